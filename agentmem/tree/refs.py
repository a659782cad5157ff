"""How often each checkpoint is named, and which ones nobody names any more.

A checkpoint is named by its children and by branches whose tip it is. The counts are exact at the end of every
transaction; a checkpoint whose count is 0 has a row in `tomb` with the time it lost its last name, until it is named
again or gc removes it. Knows nothing of what a checkpoint holds. Layout of the rows: rows.py.
"""

from collections.abc import Iterator

from agentmem._lmdb import ReadTransaction, Table, WriteTransaction
from agentmem.errors import AlreadyExistsError, CorruptionError, NotFoundError
from agentmem.tree.rows import (
    SESSION_ID_NBYTES,
    NodeRefs,
    pack_refs,
    split_tomb_key,
    tomb_key,
    unpack_refs,
)

_UNCOUNTED = 1 << 31
"""Names of a checkpoint whose count was lost: it is counted on from there, so that gc leaves it alone until
`agentmem repair` counts it anew."""


def find(txn: ReadTransaction, node: bytes) -> NodeRefs | None:
    """Return the counts of the checkpoint whose key is `node`; None when it is not stored.

    Raises:
        CorruptionError: The row is damaged.
    """
    value = txn.get(Table.NREFS, node)
    return None if value is None else unpack_refs(node, value)


def create(txn: WriteTransaction, node: bytes, now_ns: int) -> None:
    """Begin to count the names of a new checkpoint: none yet, so it may go, `now_ns` being when it was last named.

    Raises:
        AlreadyExistsError: It is being counted.
    """
    if find(txn, node) is not None:
        raise AlreadyExistsError(f"checkpoint {_name(node)} is counted already; run `agentmem check`")
    _put(txn, node, None, NodeRefs(0, now_ns))


def retain(txn: WriteTransaction, node: bytes) -> None:
    """Count one more name of a checkpoint; one that was about to go stays.

    Raises:
        NotFoundError: It is not stored (any more).
    """
    old = _existing(txn, node)
    _put(txn, node, old, NodeRefs(old.refs + 1, old.dropped_ns))


def release(txn: WriteTransaction, node: bytes, dropped_ns: int) -> None:
    """Count one name less. Without any left, the checkpoint may go once gc's grace since then is over.

    Args:
        txn: Where.
        node: Key of the checkpoint.
        dropped_ns: When the name was lost. The checkpoint keeps the latest such time: a parent whose branch moved off
            yesterday does not go with a child that was dropped last week.

    Raises:
        NotFoundError: It is not stored.
        CorruptionError: Its count is 0 already.
    """
    old = _existing(txn, node)
    if old.refs == 0:
        raise CorruptionError(f"checkpoint {_name(node)} is named more often than counted; run `agentmem check`")
    _put(txn, node, old, NodeRefs(old.refs - 1, max(old.dropped_ns, dropped_ns)))


def recount(txn: WriteTransaction, node: bytes, num_refs: int, now_ns: int) -> None:
    """Begin to count the names of a checkpoint anew, of which there are `num_refs`; for tables that hold no counts."""
    _put(txn, node, None, NodeRefs(num_refs, now_ns))


def remove(txn: WriteTransaction, node: bytes) -> None:
    """End the counting of a checkpoint that is removed.

    Raises:
        NotFoundError: It is not stored.
    """
    old = _existing(txn, node)
    txn.delete(Table.TOMB, tomb_key(old.dropped_ns, node))
    txn.delete(Table.NREFS, node)


def unnamed(txn: ReadTransaction, until_ns: int) -> Iterator[tuple[int, bytes]]:
    """Yield every checkpoint that lost its last name by `until_ns`, longest ago first: when, and its key."""
    for key, _ in txn.scan_each(Table.TOMB):
        dropped_ns, node = split_tomb_key(key)
        if dropped_ns > until_ns:
            return
        yield dropped_ns, node


def _existing(txn: ReadTransaction, node: bytes) -> NodeRefs:
    try:
        found = find(txn, node)
    except CorruptionError:
        return NodeRefs(_UNCOUNTED, 0)
    if found is None and txn.get_view(Table.NODES, node) is not None:
        return NodeRefs(_UNCOUNTED, 0)
    if found is None:
        raise NotFoundError(f"checkpoint {_name(node)} is not stored; gc may have removed it")
    return found


def _put(txn: WriteTransaction, node: bytes, old: NodeRefs | None, new: NodeRefs) -> None:
    """Write the counts, and keep the row in `tomb` in step with them."""
    if old is not None and old.refs == 0:
        txn.delete(Table.TOMB, tomb_key(old.dropped_ns, node))
    if new.refs == 0:
        txn.put(Table.TOMB, tomb_key(new.dropped_ns, node), b"")
    txn.put(Table.NREFS, node, pack_refs(new))


def _name(node: bytes) -> str:
    return node[SESSION_ID_NBYTES:].hex()
