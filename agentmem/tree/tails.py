"""The open tokens of branches on disk, in rows, so that an append rewrites the last row alone.

Knows nothing of where a branch points. Layout of the rows: rows.py.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from agentmem._lmdb import ReadTransaction, Table, WriteTransaction
from agentmem.errors import CorruptionError
from agentmem.ids import SessionId
from agentmem.kv.hashing import pack_tokens, unpack_tokens
from agentmem.tree import rows
from agentmem.tree.rows import ROW_TOKENS, SUM_NBYTES, StoredBranch
from agentmem.tree.trail import Trail


@dataclass(frozen=True, slots=True)
class _Written:
    """Which trail the rows of a branch came from, if the stored branch still has this stamp."""

    stamp: int
    tokens: Trail[int]


class Tails:
    """Writes open tokens, and remembers what it wrote last for each branch.

    The memory is a shortcut, never a truth: it is used only when the stored branch carries its stamp. So a write that
    was undone, or made by somebody else, costs a full rewrite and nothing more.
    """

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._written: dict[bytes, _Written] = {}

    def put(
        self, txn: WriteTransaction, branch: bytes, old: StoredBranch | None, new: StoredBranch, tokens: Trail[int]
    ) -> bytes:
        """Make the rows of a branch hold `tokens[new.start:]`, writing those that changed; return their sums.

        Args:
            txn: Where.
            branch: Key of the branch.
            old: The branch as it is stored; None when it is new.
            new: The branch as it will be stored in the same transaction.
            tokens: All its tokens from the root, in a trail that nobody changes any more.
        """
        first = self._first_changed(branch, old, new, tokens)
        sums = [] if old is None else [old.sums[: first * SUM_NBYTES]]
        for row in range(first, num_rows(new.record.num_open)):
            start = new.start + row * ROW_TOKENS
            data = pack_tokens(tokens.slice(start, start + ROW_TOKENS))
            txn.put(Table.TAILS, rows.tail_key(branch, row), data)
            sums.append(rows.row_sum(data))
        num_old = 0 if old is None else num_rows(old.record.num_open)
        for row in range(num_rows(new.record.num_open), num_old):
            txn.delete(Table.TAILS, rows.tail_key(branch, row))
        self._written[branch] = _Written(new.stamp, tokens)
        return b"".join(sums)

    def remove(self, txn: WriteTransaction, branch: bytes) -> None:
        """Remove all rows of a branch."""
        for key, _ in list(txn.scan_each(Table.TAILS, branch)):
            txn.delete(Table.TAILS, key)
        self._written.pop(branch, None)

    def forget(self, session_id: SessionId) -> None:
        """Let go of the trails of a session that was closed."""
        for branch in list(self._written):
            if branch.startswith(session_id):
                self._written.pop(branch, None)

    def _first_changed(self, branch: bytes, old: StoredBranch | None, new: StoredBranch, tokens: Trail[int]) -> int:
        """Return the first row that does not hold already what it is to hold."""
        written = self._written.get(branch)
        if old is None or written is None or written.stamp != old.stamp or old.start != new.start:
            return 0
        common = written.tokens.common_prefix(tokens)
        if common == len(tokens) == len(written.tokens):
            return num_rows(new.record.num_open)
        return max(common - new.start, 0) // ROW_TOKENS


def read(txn: ReadTransaction, branch: bytes, stored: StoredBranch) -> "array[int]":
    """Return the open tokens of the branch whose key is `branch`.

    Raises:
        CorruptionError: A row is damaged or missing, or of another version than the branch.
    """
    tokens = array("I")
    for row in range(num_rows(stored.record.num_open)):
        data = txn.get(Table.TAILS, rows.tail_key(branch, row)) or b""
        if rows.row_sum(data) != stored.sums[row * SUM_NBYTES : (row + 1) * SUM_NBYTES]:
            raise CorruptionError(
                f"branch {stored.record.name!r} has {stored.record.num_open} tokens after its tip, of which those from "
                f"{row * ROW_TOKENS} on are lost"
            )
        tokens.extend(unpack_tokens(data))
    if len(tokens) != stored.record.num_open:
        raise CorruptionError(
            f"branch {stored.record.name!r} has {stored.record.num_open} open tokens, but {len(tokens)} are stored"
        )
    return tokens


def orphans(txn: ReadTransaction) -> Iterator[bytes]:
    """Yield the keys of rows that no branch counts as its own; rows of damaged branches are not among them."""
    stored: dict[bytes, int | None] = {}
    for key, _ in txn.scan_each(Table.TAILS):
        branch, row = rows.split_tail_key(key)
        if branch not in stored:
            stored[branch] = _num_counted(txn, branch)
        counted = stored[branch]
        if counted is not None and row >= counted:
            yield key


def num_rows(num_tokens: int) -> int:
    """Return how many rows hold `num_tokens`."""
    return -(-num_tokens // ROW_TOKENS)


def _num_counted(txn: ReadTransaction, branch: bytes) -> int | None:
    """Return how many rows a stored branch has; None when it is damaged and nobody can say."""
    try:
        value = txn.get(Table.BRANCHES, branch)
        return 0 if value is None else num_rows(rows.unpack_branch(branch, value).record.num_open)
    except CorruptionError:
        return None
