"""Tables of checksummed rows, and the transactions that read and write them.

Every value but those written with `put_raw` is stored as its checksum and itself:
    0  8  xxh3_64 of the value, big-endian, seeded with the xxh3_64 of the key, itself seeded with that of the table's
          name: a row found under another key or in another table fails too
    8  n  the value
"""

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum

import lmdb
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from agentmem.errors import CorruptionError


class Table(StrEnum):
    """The tables of a store; what their rows hold is described where the rows are packed."""

    META = "meta"
    CHAIN = "chain"
    BINDEX = "bindex"
    BLOCKS = "blocks"
    NODES = "nodes"
    NREFS = "nrefs"
    SESSIONS = "sessions"
    BRANCHES = "branches"
    TAILS = "tails"
    REFLOG = "reflog"
    TOMB = "tomb"
    LEASES = "leases"


_SEEDS = {table: xxh3_64_intdigest(table.value.encode()) for table in Table}
Handles = dict[Table, lmdb._Database]  # noqa: SLF001 - py-lmdb gives the type no public name
"""The handle of each table."""


class ReadTransaction:
    """The whole store as it was at one moment. Used by one thread; ends with the `with` that gave it."""

    __slots__ = ("_handles", "_txn")

    def __init__(self, txn: "lmdb.Transaction[memoryview]", handles: Handles) -> None:
        """Wrap an open transaction; use `Environment.read`."""
        self._txn = txn
        self._handles = handles

    def get(self, table: Table, key: bytes) -> bytes | None:
        """Return the value of `key`, None when there is none.

        Raises:
            CorruptionError: The value fails its checksum; the message names table and key.
        """
        stored = self._txn.get(key, db=self._handles[table])
        return None if stored is None else _open_value(table, key, stored)

    def get_view(self, table: Table, key: bytes) -> memoryview | None:
        """Return the bytes of `key` in place, without a checksum: for rows written with `put_raw` only.

        The view dies with the transaction and with the next write of the same transaction.
        """
        return self._txn.get(key, db=self._handles[table])

    def get_views(self, table: Table, keys: Sequence[bytes]) -> list[memoryview]:
        """Return `get_view` of those `keys` that exist, in order, in one call."""
        return [view for _, view in self._txn.cursor(self._handles[table]).getmulti(keys)]

    def scan(self, table: Table, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows whose key starts with `prefix`, in the order of their keys.

        Raises:
            CorruptionError: A value fails its checksum; see `scan_each` to go on behind it.
        """
        for key, value in self.scan_each(table, prefix):
            if isinstance(value, CorruptionError):
                raise value
            yield key, value

    def scan_each(self, table: Table, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes | CorruptionError]]:
        """Yield the rows whose key starts with `prefix`; a damaged row comes with its error in place of its value."""
        cursor = self._txn.cursor(self._handles[table])
        if not cursor.set_range(prefix):
            return
        for key_view, stored in cursor:
            key = bytes(key_view)
            if not key.startswith(prefix):
                return
            try:
                value: bytes | CorruptionError = _open_value(table, key, stored)
            except CorruptionError as error:
                value = error
            yield key, value

    def last_key(self, table: Table, prefix: bytes = b"") -> bytes | None:
        """Return the greatest key that starts with `prefix`, None when there is none."""
        cursor = self._txn.cursor(self._handles[table])
        behind = _after_prefix(prefix)
        is_found = cursor.prev() if behind is not None and cursor.set_range(behind) else cursor.last()
        key = bytes(cursor.key()) if is_found else b""
        return key if is_found and key.startswith(prefix) else None

    def count(self, table: Table) -> int:
        """Return the number of rows; costs the same for any number."""
        return self._txn.stat(self._handles[table])["entries"]

    def num_pages(self) -> int:
        """Return the number of pages that tables use."""
        stats = [self._txn.stat(), *(self._txn.stat(handle) for handle in self._handles.values())]
        return sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)


class WriteTransaction(ReadTransaction):
    """One operation's view of the store and its changes: all of them happen, or none.

    Attributes:
        callbacks: What `on_commit` was given.
    """

    __slots__ = ("callbacks",)

    def __init__(self, txn: "lmdb.Transaction[memoryview]", handles: Handles) -> None:
        """Wrap an open write transaction; see `Environment.submit`."""
        super().__init__(txn, handles)
        self.callbacks: list[Callable[[], object]] = []

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """Write `value` with its checksum under `key` (1 to 511 bytes), replacing what is there."""
        self._txn.put(key, _checksum(table, key, value) + value, db=self._handles[table])

    def put_raw(self, table: Table, rows: Sequence[tuple[bytes, bytes | bytearray | memoryview]]) -> None:
        """Write rows as they are, in one call: for values that carry their own checksum."""
        self._txn.cursor(self._handles[table]).putmulti(rows)

    def delete(self, table: Table, key: bytes) -> bool:
        """Remove `key`; False when it was not there."""
        return self._txn.delete(key, db=self._handles[table])

    def on_commit(self, callback: Callable[[], object]) -> None:
        """Call `callback` on the writer thread after the commit, before any future of the group is done.

        What mirrors the store in memory is changed here: the operation itself may still be undone, or run again.
        """
        self.callbacks.append(callback)


def _checksum(table: Table, key: bytes, value: bytes | memoryview) -> bytes:
    return xxh3_64_digest(value, seed=xxh3_64_intdigest(key, seed=_SEEDS[table]))


def _open_value(table: Table, key: bytes, stored: memoryview) -> bytes:
    value = bytes(stored[8:])
    if _checksum(table, key, value) != stored[:8]:
        raise CorruptionError(f"row {key.hex()} of table {table.value!r} fails its checksum: run `agentmem check`")
    return value


def _after_prefix(prefix: bytes) -> bytes | None:
    """Return the least key that is greater than all that start with `prefix`; None when there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None
