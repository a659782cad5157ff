"""The store's LMDB environment: the one home of lmdb.

`environment` opens, reads and writes in groups; `transaction` gets and puts checksummed rows; `engine` is what is
peculiar to LMDB. Knows nothing of blocks, checkpoints or sessions.
"""

from agentmem._lmdb.environment import Environment
from agentmem._lmdb.transaction import ReadTransaction, Table, WriteTransaction
from agentmem._writer import Level

__all__ = ["Environment", "Level", "ReadTransaction", "Table", "WriteTransaction"]
