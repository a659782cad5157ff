"""The transactions that read and write checksummed rows.

Rows of mirrored tables are kept twice. Every read looks at both: where one is damaged, missing or older, the other is
given, and the row is noted to be healed. Layout of a row: row.py.

In an encrypted store a row is found at another place than its key, and its value is in a box: cipher.py. Copies are
made and healed as they are stored.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import lmdb

from agentmem._lmdb.cipher import Cipher, Place
from agentmem._lmdb.row import HEAD_NBYTES, TAGS, is_sound, opened, seal, stamp_of, unseal
from agentmem._lmdb.tables import Table
from agentmem.errors import CorruptionError

Handles = dict[Table, lmdb._Database]  # noqa: SLF001 - py-lmdb gives the type no public name
"""The handle of each table."""

_Stored = memoryview | None


class ReadTransaction:
    """The whole store as it was at one moment. Used by one thread; ends with the `with` that gave it.

    Attributes:
        unlike: Rows whose two copies were found to differ: one of them is damaged, missing or older.
    """

    __slots__ = ("_cipher", "_handles", "_txn", "unlike")

    def __init__(self, txn: "lmdb.Transaction[memoryview]", handles: Handles, cipher: Cipher | None) -> None:
        """Wrap an open transaction of a store, encrypted if there is a `cipher`; use `Environment.read`."""
        self._txn = txn
        self._handles = handles
        self._cipher = cipher
        self.unlike: set[tuple[Table, bytes]] = set()

    @property
    def id(self) -> int:
        """Number of the newest commit that it sees; of a write, the number that its commit will have."""
        return self._txn.id()

    def get(self, table: Table, key: bytes) -> bytes | None:
        """Return the value of `key`, None when there is none.

        Raises:
            CorruptionError: No sound copy of the value is left; the message names table and key.
        """
        place = self.place(table, key)
        stored = self._txn.get(place, db=self._handles[table])
        value = self._open(table, place, stored, self._copy(table, place) if table in TAGS else None)
        return None if value is None else self._reveal(table, place, value)[1]

    def get_view(self, table: Table, key: bytes) -> memoryview | None:
        """Return the bytes of `key` in place, without a checksum: for rows written with `put_raw` only.

        The view dies with the transaction and with the next write of the same transaction.
        """
        return self._txn.get(self.place(table, key), db=self._handles[table])

    def get_views(self, table: Table, keys: Sequence[bytes]) -> list[memoryview]:
        """Return `get_view` of those `keys` that exist, in order, in one call."""
        return [view for _, view in self._txn.cursor(self._handles[table]).getmulti(keys)]

    def scan(self, table: Table, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows whose key starts with `prefix`, in the order of their keys, hidden parts as they are hidden.

        Raises:
            CorruptionError: A value fails its checksum; see `scan_each` to go on behind it.
        """
        for key, value in self.scan_each(table, prefix):
            if isinstance(value, CorruptionError):
                raise value
            yield key, value

    def scan_each(self, table: Table, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes | CorruptionError]]:
        """Yield the rows whose key starts with `prefix`; a damaged row comes with its error in place of its value.

        Of a damaged row in an encrypted store nobody knows the key: a `Place` is given, which can be removed.
        """
        for place, stored, copy in self._pairs(table, self.place(table, prefix)):
            try:
                value = self._open(table, place, stored, copy)
                row: tuple[bytes, bytes | CorruptionError] | None
                row = None if value is None else self._reveal(table, place, value)
            except CorruptionError as error:
                row = (place if self._cipher is None else Place(place), error)
            if row is not None:
                yield row

    def keys(self, table: Table) -> Iterator[bytes]:
        """Yield the keys of a table that hides none, in order, without reading its values."""
        cursor = self._txn.cursor(self._handles[table])
        yield from (bytes(key) for key in cursor.iternext(keys=True, values=False))

    def last_key(self, table: Table, prefix: bytes = b"") -> bytes | None:
        """Return the greatest key that starts with `prefix`, None when there is none; for tables that hide no key."""
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

    def place(self, table: Table, key: bytes) -> bytes:
        """Return where the row `key` is found: in an encrypted store another key than its own."""
        return key if self._cipher is None else self._cipher.place(table, key)

    def _reveal(self, table: Table, place: bytes, value: bytes) -> tuple[bytes, bytes]:
        """Return the key and the value of the row at `place`."""
        return (place, value) if self._cipher is None else self._cipher.open(table, place, value)

    def _copy(self, table: Table, key: bytes) -> _Stored:
        return self._txn.get(TAGS[table] + key, db=self._handles[Table.MIRROR])

    def _open(self, table: Table, key: bytes, stored: _Stored, copy: _Stored) -> bytes | None:
        """Return the value of a row that is stored as `stored`, and in a mirrored table also as `copy`."""
        if table not in TAGS:
            return None if stored is None else unseal(table, key, stored)
        if stored is not None and copy is not None and stored[:HEAD_NBYTES] == copy[:HEAD_NBYTES]:
            value = opened(table, key, stored)
            if value is not None:
                return value
        if stored is None and copy is None:
            return None
        newest = _newest(table, key, stored, copy)
        if newest is not None:
            self.unlike.add((table, key))
        return unseal(table, key, newest or stored or copy or b"")

    def _pairs(self, table: Table, prefix: bytes) -> Iterator[tuple[bytes, _Stored, _Stored]]:
        """Yield the rows whose key starts with `prefix`: key, what is stored, and its copy."""
        rows = self._rows(table, prefix)
        if table not in TAGS:
            yield from ((key, stored, None) for key, stored in rows)
            return
        copies = self._rows(Table.MIRROR, prefix, TAGS[table])
        row, copy = next(rows, None), next(copies, None)
        while row is not None or copy is not None:
            if row is not None and copy is not None and row[0] == copy[0]:
                yield *row, copy[1]
                row, copy = next(rows, None), next(copies, None)
            elif copy is None or (row is not None and row[0] < copy[0]):
                yield *cast("tuple[bytes, memoryview]", row), None
                row = next(rows, None)
            else:
                yield copy[0], None, copy[1]
                copy = next(copies, None)

    def _rows(self, table: Table, prefix: bytes, tag: bytes = b"") -> Iterator[tuple[bytes, memoryview]]:
        """Yield the rows whose key starts with `tag` and `prefix`, the key without the tag."""
        cursor = self._txn.cursor(self._handles[table])
        start, skipped = tag + prefix, len(tag)
        if not cursor.set_range(start):
            return
        for key_view, stored in cursor:
            key = bytes(key_view)
            if not key.startswith(start):
                return
            yield key[skipped:], stored


class WriteTransaction(ReadTransaction):
    """One operation's view of the store and its changes: all of them happen, or none.

    Attributes:
        callbacks: What `on_commit` was given.
    """

    __slots__ = ("_stamp", "callbacks")

    def __init__(self, txn: "lmdb.Transaction[memoryview]", handles: Handles, cipher: Cipher | None) -> None:
        """Wrap an open write transaction; see `Environment.submit`."""
        super().__init__(txn, handles, cipher)
        self._stamp = txn.id()
        self.callbacks: list[Callable[[], object]] = []

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        """Write `value` with its checksum under `key` (1 to 511 bytes, or 510 where it is mirrored)."""
        place = self.place(table, key)
        value = value if self._cipher is None else self._cipher.close(table, place, key, value)
        self._put_both(table, place, seal(table, place, value, self._stamp))

    def put_raw(self, table: Table, rows: Sequence[tuple[bytes, bytes | bytearray | memoryview]]) -> None:
        """Write rows as they are, in one call: for values that carry their own checksum."""
        self._txn.cursor(self._handles[table]).putmulti(rows)

    def delete(self, table: Table, key: bytes) -> bool:
        """Remove `key`; False when it was not there."""
        place = self.place(table, key)
        is_copied = table in TAGS and self._txn.delete(TAGS[table] + place, db=self._handles[Table.MIRROR])
        return self._txn.delete(place, db=self._handles[table]) or is_copied

    def heal(self, rows: Iterable[tuple[Table, bytes]]) -> list[str]:
        """Make both copies of rows, given by their places, the later sound one; return those that it changed."""
        healed: list[str] = []
        for table, place in sorted(rows):
            stored, copy = self._txn.get(place, db=self._handles[table]), self._copy(table, place)
            newest = _newest(table, place, stored, copy)
            if newest is not None and stored != copy:
                self._put_both(table, place, bytes(newest))
                healed.append(f"{place.hex()} of {table.value!r}")
        return healed

    def on_commit(self, callback: Callable[[], object]) -> None:
        """Call `callback` on the writer thread after the commit, before any future of the group is done.

        What mirrors the store in memory is changed here: the operation itself may still be undone, or run again.
        """
        self.callbacks.append(callback)

    def _put_both(self, table: Table, key: bytes, stored: bytes) -> None:
        self._txn.put(key, stored, db=self._handles[table])
        if table in TAGS:
            self._txn.put(TAGS[table] + key, stored, db=self._handles[Table.MIRROR])


def _newest(table: Table, key: bytes, stored: _Stored, copy: _Stored) -> _Stored:
    """Return the later one of the sound copies of a row; None when there is none."""
    sound = [each for each in (stored, copy) if each is not None and is_sound(table, key, each)]
    return max(sound, key=stamp_of, default=None)


def _after_prefix(prefix: bytes) -> bytes | None:
    """Return the least key that is greater than all that start with `prefix`; None when there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None
