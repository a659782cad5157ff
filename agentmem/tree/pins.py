"""Pins: checkpoints that stay though no branch reaches them. A pin counts as a name of its checkpoint.

Row of `meta`: "pin" | session id (8) | checkpoint id (16), to when it was pinned: nanoseconds of Unix time, u64-be.
"""

import struct
from collections.abc import Iterator

from agentmem._lmdb import ReadTransaction, Table, WriteTransaction
from agentmem.tree import refs
from agentmem.tree.rows import NODE_KEY_NBYTES

_PREFIX = b"pin"
_TIME = struct.Struct(">Q")


def put(txn: WriteTransaction, node: bytes, now_ns: int) -> bool:
    """Pin the checkpoint whose key is `node`; False when it is pinned already.

    Raises:
        NotFoundError: It is not stored (any more).
    """
    if txn.get(Table.META, _PREFIX + node) is not None:
        return False
    refs.retain(txn, node)
    txn.put(Table.META, _PREFIX + node, _TIME.pack(now_ns))
    return True


def remove(txn: WriteTransaction, node: bytes, now_ns: int) -> bool:
    """Unpin a checkpoint, which gc may remove once its grace since now is over; False when it is not pinned."""
    if not txn.delete(Table.META, _PREFIX + node):
        return False
    if refs.find(txn, node) is not None:
        refs.release(txn, node, now_ns)
    return True


def each(txn: ReadTransaction, prefix: bytes = b"") -> Iterator[bytes]:
    """Yield the keys of pinned checkpoints, of one session where `prefix` is its id."""
    for key, _ in txn.scan_each(Table.META, _PREFIX + prefix):
        if len(key) == len(_PREFIX) + NODE_KEY_NBYTES:
            yield key[len(_PREFIX) :]
