"""One checkpoint on disk: its record, cut into rows of one table.

Knows nothing of who names it. Layout of the rows: rows.py.
"""

import itertools
from collections.abc import Iterator

from agentmem._lmdb import ReadTransaction, Table, WriteTransaction
from agentmem.errors import CorruptionError
from agentmem.tree import rows
from agentmem.tree.checkpoint import Checkpoint


def find(txn: ReadTransaction, node: bytes) -> Checkpoint | None:
    """Return the checkpoint whose key is `node`; None when it is not stored.

    Raises:
        CorruptionError: Its record is damaged.
    """
    first = txn.get(Table.NODES, node)
    if first is None:
        return None
    others = (txn.get(Table.NODES, rows.piece_key(node, piece)) for piece in range(1, rows.num_pieces(first)))
    return rows.unpack_checkpoint(node, [first, *(data for data in others if data is not None)])


def each(txn: ReadTransaction, prefix: bytes = b"") -> Iterator[tuple[bytes, Checkpoint | CorruptionError]]:
    """Yield the key of every checkpoint whose key starts with `prefix`, and the checkpoint or what is wrong with it."""
    stored = txn.scan_each(Table.NODES, prefix)
    for node, pieces in itertools.groupby(stored, key=lambda row: row[0][: rows.NODE_KEY_NBYTES]):
        yield node, _joined(node, [value for _, value in pieces])


def put(txn: WriteTransaction, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, replacing the record that is there."""
    node = rows.node_key(checkpoint.session_id, checkpoint.checkpoint_id)
    remove(txn, node)
    first, *others = rows.pack_checkpoint(checkpoint)
    txn.put(Table.NODES, node, first)
    for piece, data in enumerate(others, start=1):
        txn.put(Table.NODES, rows.piece_key(node, piece), data)


def remove(txn: WriteTransaction, node: bytes) -> None:
    """Remove the rows of a checkpoint, if there are any."""
    for key, _ in list(txn.scan_each(Table.NODES, node)):
        txn.delete(Table.NODES, key)


def _joined(node: bytes, values: list[bytes | CorruptionError]) -> Checkpoint | CorruptionError:
    pieces: list[bytes] = []
    for value in values:
        if isinstance(value, CorruptionError):
            return value
        pieces.append(value)
    try:
        return rows.unpack_checkpoint(node, pieces)
    except CorruptionError as error:
        return error
