"""A new data file from what can still be read of another one, however broken, without changing that one.

A row is taken over when its checksum proves that it is a row of its table and key. First come the rows that the trees
of a snapshot lead to, or their copies in `mirror`. Where both are lost, every page of the file is searched for rows of
just those keys, the latest version first: old pages may hold what was removed since, so nothing else is looked for.
Chunks of blocks have no checksum of their own; whoever reads the block compares it with its name.

What can be counted anew (`nrefs`, `tomb`) and leases are left behind. Knows nothing of what rows mean.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import lmdb

from agentmem import _directory
from agentmem._format import FORMAT_KEY, StoreFormat
from agentmem._lmdb import engine
from agentmem._lmdb.cipher import KEY_KEY
from agentmem._lmdb.pages import HEAD_NBYTES as PAGE_HEAD_NBYTES
from agentmem._lmdb.pages import Gap, Meta, PageFile, Row, Walk
from agentmem._lmdb.rewrite import Row as StoredRow
from agentmem._lmdb.rewrite import write_data_file
from agentmem._lmdb.row import MIRRORED, TAGS, is_sound, seal, stamp_of
from agentmem._lmdb.tables import Table
from agentmem.errors import CorruptionError, StorageFullError

_LEFT_BEHIND = {Table.NREFS, Table.TOMB, Table.LEASES, Table.MIRROR}
_CHUNK_KEY_NBYTES = 10
_ALL = Gap(b"", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvage:
    """What became of the rows of a file.

    Attributes:
        faults: What is wrong with the structure of the file, in words.
        num_rows: Rows that were taken over, by table.
        num_healed: Rows of which one copy was lost or older.
        num_salvaged: Rows that were found outside of the trees, by table.
        earlier: The places of sessions and branches among those: they may be of an earlier time.
        is_newest_unsure: The meta page of the newest commit may be the one that is damaged.
        incomplete: Tables of which rows may be lost: nobody can say how many.
    """

    faults: tuple[str, ...]
    num_rows: dict[Table, int]
    num_healed: int
    num_salvaged: dict[Table, int]
    earlier: frozenset[bytes]
    is_newest_unsure: bool
    incomplete: frozenset[Table]


def salvage(data_file: Path, target: Path, *, previous_snapshot: bool = False) -> Salvage:
    """Make a data file in the empty directory `target` of the rows of `data_file`, which nobody may be writing.

    Args:
        data_file: The file to read.
        target: Where the new one is made; on disk for good when this returns.
        previous_snapshot: Read the store as it was before its newest commit.

    Raises:
        CorruptionError: There is no earlier snapshot, or nothing of a store.
        StorageFullError: There is no room for the new file.
    """
    with PageFile(data_file) as file:
        rescue = _Rescue(file)
        rescue.walk(_snapshot(file, data_file, previous_snapshot=previous_snapshot))
        rescue.search()
        rescue.complete_format(data_file)
        newest = max([meta.transaction for meta in file.metas()] + [rescue.newest_stamp])
        new = target / _directory.DATA_FILE
        try:
            tables = _tables(file, rescue.found)
            write_data_file(new, tables, max_nbytes=2 * file.num_pages * file.page_nbytes, after=newest + 1)
        except lmdb.Error as error:
            if not _directory.has_room(target, 16 << 20):
                raise StorageFullError(f"no room for {str(new)!r}: free space; nothing was changed") from error
            raise engine.translate(error, target) from error
        return rescue.outcome()


def _snapshot(file: PageFile, data_file: Path, *, previous_snapshot: bool) -> Meta | None:
    metas = file.metas()
    if previous_snapshot and len(metas) < 2:
        raise CorruptionError(f"{str(data_file)!r} has no earlier snapshot: repair it without --previous-snapshot")
    return metas[previous_snapshot] if metas else None


@dataclass(slots=True)
class _Found:
    """Where a row's stored bytes are, or the bytes themselves when they are in no file."""

    stamp: int
    row: Row
    data: bytes | None = None


@dataclass(slots=True)
class _Holes:
    """What of one table could not be reached."""

    gaps: list[Gap] = field(default_factory=list)

    def covers(self, key: bytes) -> bool:
        return any(key in gap for gap in self.gaps)


class _Rescue:
    """The rows that were found, and what is missing."""

    def __init__(self, file: PageFile) -> None:
        self.found: dict[Table, dict[bytes, _Found]] = {table: {} for table in Table if table not in _LEFT_BEHIND}
        self.newest_stamp = 0
        self._file = file
        self._faults: list[str] = []
        self._pages: set[int] = set()
        self._holes: dict[Table, _Holes] = {table: _Holes() for table in Table}
        self._num_copies: dict[Table, Counter[bytes]] = {table: Counter() for table in TAGS}
        self._salvaged: dict[Table, set[bytes]] = {}

    # -- by the trees

    def walk(self, snapshot: Meta | None) -> None:
        """Take the rows that a snapshot leads to."""
        roots = {} if snapshot is None else self._roots(snapshot)
        if snapshot is None:
            self._faults.append("both meta pages are damaged")
        for table in Table:
            if table not in roots:
                self._holes[table].gaps.append(_ALL)
                self._faults.append(f"table {table.value!r} is not to be found")
                continue
            walk = Walk(self._file, roots[table])
            for row in walk.rows():
                if not self._take(table, row):
                    walk.gaps.append(Gap(row.key, row.key + b"\0"))
            self._note(walk, table)

    def _roots(self, snapshot: Meta) -> dict[Table, int]:
        walk = Walk(self._file, snapshot.main_root)
        names = {table.value.encode(): table for table in Table}
        tables = [row for row in walk.rows() if row.is_table and row.key in names]
        roots = {names[row.key]: self._file.table_root(row)[0] for row in tables}
        self._faults.extend(walk.faults)
        self._pages |= walk.pages
        return roots

    def _note(self, walk: Walk, table: Table) -> None:
        self._faults.extend(f"{fault} (table {table.value!r})" for fault in walk.faults)
        self._holes[table].gaps.extend(walk.gaps)
        self._pages |= walk.pages

    def _take(self, table: Table, row: Row) -> bool:
        """Take over a row of a tree; False when it is not sound."""
        if table is Table.BLOCKS:
            return self._take_chunk(row)
        owner, key = _owner(table, row.key)
        if owner is None:
            return False
        stamp = self._stamp(owner, key, row)
        if stamp is None:
            return False
        self._keep(owner, key, stamp, row)
        if owner in TAGS:
            self._num_copies[owner][key + stamp.to_bytes(8)] += 1
        return True

    def _take_chunk(self, row: Row) -> bool:
        is_whole = len(row.key) == _CHUNK_KEY_NBYTES and not (row.nbytes + PAGE_HEAD_NBYTES) % 4096
        if is_whole:
            self.found[Table.BLOCKS].setdefault(row.key, _Found(0, row))
        return is_whole

    def _stamp(self, table: Table, key: bytes, row: Row) -> int | None:
        stored = self._file.read(row)
        return stamp_of(stored) if is_sound(table, key, stored) else None

    def _keep(self, table: Table, key: bytes, stamp: int, row: Row) -> None:
        self.newest_stamp = max(self.newest_stamp, stamp)
        known = self.found[table].get(key) if table in self.found else None
        if table in self.found and (known is None or known.stamp < stamp):
            self.found[table][key] = _Found(stamp, row)

    # -- in all other pages

    def search(self) -> None:
        """Look for the rows that are missing in every page that no tree led to."""
        missing = {table: self._open_gaps(table) for table in self.found}
        missing = {table: holes for table, holes in missing.items() if holes.gaps}
        if not missing:
            return
        in_trees = {table: set(self.found[table]) for table in missing}
        big = (found.row for rows in self.found.values() for found in rows.values() if found.row.is_big)
        for page in self._file.leaves(dict(map(self._file.run, big))):
            if page.number not in self._pages:
                self._search_leaf(page.rows, missing, in_trees)
        for table in missing:
            self._salvaged[table] = self.found[table].keys() - in_trees[table]

    def _search_leaf(self, leaf: list[Row], missing: dict[Table, _Holes], in_trees: dict[Table, set[bytes]]) -> None:
        for row in leaf:
            for table, key in _readings(row.key, missing):
                if key in in_trees[table] or not missing[table].covers(key):
                    continue
                if table is Table.BLOCKS:
                    self._take_chunk(row)
                    continue
                stamp = self._stamp(table, key, row)
                if stamp is not None:
                    self._keep(table, key, stamp, row)
                    break

    def _open_gaps(self, table: Table) -> _Holes:
        """Return where rows of a table may be missing: where its tree and, when it is mirrored, its copies fail."""
        gaps = self._holes[table].gaps
        if table in TAGS:
            copies = [_of_copies(gap, TAGS[table]) for gap in self._holes[Table.MIRROR].gaps]
            gaps = [both for gap in gaps for copy in copies if copy and (both := _common(gap, copy))]
        found = self.found[table]
        return _Holes([gap for gap in gaps if not (gap.stop == gap.start + b"\0" and gap.start in found)])

    # -- the outcome

    def complete_format(self, data_file: Path) -> None:
        """Make a format record where there is none left: the store gets a new uuid.

        Raises:
            CorruptionError: There is no other row either.
        """
        meta = self.found[Table.META]
        if not any(rows for table, rows in self.found.items() if table is not Table.BLOCKS):
            raise CorruptionError(f"{str(data_file)!r} holds nothing of a store in this format: restore a backup")
        if FORMAT_KEY not in meta:
            record = StoreFormat.new(is_encrypted=KEY_KEY in meta).pack()
            stored = seal(Table.META, FORMAT_KEY, record, self.newest_stamp)
            meta[FORMAT_KEY] = _Found(self.newest_stamp, Row(FORMAT_KEY, 0, 0, is_table=False, is_big=False), stored)
            self._faults.append("the format record is lost; a new one is made")

    def outcome(self) -> Salvage:
        """Say what was found."""
        singles = sum(
            self._num_copies[table][key + found.stamp.to_bytes(8)] == 1
            for table in TAGS
            for key, found in self.found[table].items()
        )
        return Salvage(
            faults=tuple(self._faults),
            num_rows={table: len(rows) for table, rows in self.found.items()},
            num_healed=singles,
            num_salvaged={table: len(keys) for table, keys in self._salvaged.items() if keys},
            earlier=frozenset().union(*(self._salvaged.get(table, ()) for table in (Table.SESSIONS, Table.BRANCHES))),
            is_newest_unsure=len(self._file.metas()) == 1,
            incomplete=frozenset(table for table in self.found if self._open_gaps(table).gaps),
        )


def _owner(table: Table, key: bytes) -> tuple[Table | None, bytes]:
    """Return the table and the key that a row of `table` stands for: a copy stands for its original."""
    return (MIRRORED.get(key[:1]), key[1:]) if table is Table.MIRROR else (table, key)


def _readings(key: bytes, tables: dict[Table, _Holes]) -> Iterator[tuple[Table, bytes]]:
    """Yield what a row of an unknown table may be, by its key."""
    if key[:1] in MIRRORED and MIRRORED[key[:1]] in tables:
        yield MIRRORED[key[:1]], key[1:]
    yield from ((table, key) for table in tables)


def _of_copies(gap: Gap, tag: bytes) -> Gap | None:
    """Return the part of a gap in `mirror` that concerns the table of a tag, in that table's keys."""
    behind = bytes([tag[0] + 1])
    if gap.start >= behind or (gap.stop is not None and gap.stop <= tag):
        return None
    start = gap.start[1:] if gap.start[:1] == tag else b""
    return Gap(start, gap.stop[1:] if gap.stop is not None and gap.stop[:1] == tag else None)


def _common(first: Gap, second: Gap) -> Gap | None:
    start = max(first.start, second.start)
    stops = [gap.stop for gap in (first, second) if gap.stop is not None]
    stop = min(stops, default=None)
    return None if stop is not None and stop <= start else Gap(start, stop)


def _tables(file: PageFile, found: dict[Table, dict[bytes, _Found]]) -> Iterator[tuple[Table, Iterator[StoredRow]]]:
    """Yield every table with its rows, in order; `mirror` with those of the mirrored tables once more."""
    for table, rows in found.items():
        yield table, _stored(file, rows)
    copies = (_stored(file, found[table], tag) for table, tag in sorted(TAGS.items(), key=lambda item: item[1]))
    yield Table.MIRROR, itertools.chain.from_iterable(copies)


def _stored(file: PageFile, rows: dict[bytes, _Found], tag: bytes = b"") -> Iterator[StoredRow]:
    for key in sorted(rows):
        found = rows[key]
        yield tag + key, file.read(found.row) if found.data is None else found.data
