"""The store's LMDB environment: the one home of lmdb.

`environment` opens, reads and writes in groups; `transaction` gets and puts rows, `row` is what they are made of;
`engine` is what is peculiar to LMDB. Knows nothing of blocks, checkpoints or sessions.
"""

from agentmem._lmdb.cipher import Cipher
from agentmem._lmdb.environment import Environment
from agentmem._lmdb.keys import rekey
from agentmem._lmdb.tables import Table
from agentmem._lmdb.transaction import ReadTransaction, WriteTransaction
from agentmem._writer import Level

__all__ = ["Cipher", "Environment", "Level", "ReadTransaction", "Table", "WriteTransaction", "rekey"]
