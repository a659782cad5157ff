"""The pages of LMDB's data file, read without LMDB: whether it may be given to LMDB, and what is left of a broken one.

Nothing that a page says is believed before it was compared with the page's and the file's size. Knows the layout of
LMDB 0.9 and nothing of what rows mean. Numbers are in native byte order:

    page    number u64 | pad u16 | flags u16 | lower u16, upper u16 (for a run of pages: their number u32)
            then places of nodes u16 each, up to `lower`; nodes from `upper` on
    node    low u16 | high u16 | flags u16 | bytes of its key u16 | key | data
            in a leaf: low and high are the length of the data; a long value's data is the number of its first page u64,
            whose first 16 bytes are the page's; in a branch: low, high and flags are the number of the page below it
    table   pad u32 | flags u16 | depth u16 | pages: branch, leaf, run u64 each | rows u64 | root u64
    meta    magic u32 | version u32 | address u64 | map size u64 | table of free pages, whose pad is the size of a
            page | table of tables | last page u64 | transaction u64; commits go to pages 0 and 1 in turn
"""

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from agentmem.errors import CorruptionError

NO_PAGE = (1 << 64) - 1
"""What stands for the root of an empty table."""

HEAD_NBYTES = 16
"""Bytes of a page before its contents."""

_BRANCH, _LEAF, _RUN, _SUB_PAGES = 1, 2, 4, 0x60
_BIG, _TABLE = 1, 2
_PAGE = struct.Struct("=QHHHH")
_NODE = struct.Struct("=HHHH")
_NUMBER = struct.Struct("=Q")
_TABLE_RECORD = struct.Struct("=IHHQQQQQ")
# A leaf of `blocks` that was filled in order holds nothing but nodes of one shape: key of 10 bytes, a long value.
_CHUNK_NODE = struct.Struct("=HHHH10sQ")
_CHUNK_KEY_NBYTES = 10
_MAX_DEPTH = 32


_META = struct.Struct("=IIQQ48s48sQQ")
_MAGIC = 0xBEEFC0DE
_DEFAULT_PAGE_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class Meta:
    """What a meta page says of the file.

    Attributes:
        transaction: The commit that wrote it.
        free_root: Root of the list of free pages.
        main_root: Root of the table of tables.
    """

    transaction: int
    free_root: int
    main_root: int


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a leaf.

    Attributes:
        key: Its key.
        at: Where its value begins in the file.
        nbytes: Length of its value.
        is_table: The value is a table's record.
        is_big: The value has pages of its own.
    """

    key: bytes
    at: int
    nbytes: int
    is_table: bool
    is_big: bool


@dataclass(frozen=True, slots=True)
class Gap:
    """A range of keys of which rows are lost: from `start` on, before `stop` (None: up to the end)."""

    start: bytes
    stop: bytes | None

    def __contains__(self, key: bytes) -> bool:
        return self.start <= key and (self.stop is None or key < self.stop)


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a tree.

    Attributes:
        number: Its number.
        is_leaf: It holds rows, not pages.
        rows: The rows of a leaf.
        children: The pages below a branch: the least key of each (of the first: empty), and its number.
        faults: What is wrong with it.
    """

    number: int
    is_leaf: bool
    rows: list[Row]
    children: list[tuple[bytes, int]]
    faults: list[str]


class PageFile:
    """An open data file. Nobody may write to it meanwhile, or what is read is of several moments.

    Attributes:
        page_nbytes: Bytes per page.
        num_pages: Whole pages in the file.
    """

    def __init__(self, data_file: Path) -> None:
        """Open a data file; when its first page is damaged its pages are taken to have 4,096 bytes."""
        self._fd = os.open(data_file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        magic, _, _, _, free, *_ = self._meta_fields(0) or (0, 0, 0, 0, b"")
        page_nbytes = _TABLE_RECORD.unpack(free)[0] if magic == _MAGIC else 0
        is_plausible = page_nbytes in {1 << power for power in range(9, 17)}
        self.page_nbytes = page_nbytes if is_plausible else _DEFAULT_PAGE_NBYTES
        self.num_pages = os.fstat(self._fd).st_size // self.page_nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, row: Row) -> bytes:
        """Return the value of a row."""
        return os.pread(self._fd, row.nbytes, row.at)

    def metas(self) -> list[Meta]:
        """Return what the meta pages say, the newest first; those that are damaged are left out."""
        found: list[Meta] = []
        for number in (0, 1):
            magic, _, _, _, free, main, _, transaction = self._meta_fields(number) or (0,) * 8
            if magic != _MAGIC or transaction & 1 != number:
                continue
            pad, *_, free_root = _TABLE_RECORD.unpack(free)
            if pad == self.page_nbytes:
                found.append(Meta(transaction, free_root, _TABLE_RECORD.unpack(main)[-1]))
        return sorted(found, key=lambda meta: meta.transaction, reverse=True)

    def table_root(self, row: Row) -> tuple[int, int]:
        """Return the root of a table, and its number of rows, by its row in the table of tables."""
        *_, num_rows, root = _TABLE_RECORD.unpack(self.read(row))
        return root, num_rows

    def page(self, number: int) -> Page | None:
        """Return a page of a tree; None when the file has none there, or something else."""
        if not 2 <= number < self.num_pages:
            return None
        data = os.pread(self._fd, self.page_nbytes, number * self.page_nbytes)
        own, _, flags, lower, upper = _PAGE.unpack_from(data)
        if own != number or flags not in {_BRANCH, _LEAF} or not HEAD_NBYTES <= lower <= upper <= len(data):
            return None
        if flags == _LEAF:
            return self._leaf(number, data, (lower - HEAD_NBYTES) // 2)
        return self._branch(number, data, (lower - HEAD_NBYTES) // 2)

    def leaves(self, skipped: Mapping[int, int]) -> Iterator[Page]:
        """Yield every page of the file that is a leaf, whoever reaches it.

        Args:
            skipped: Runs of pages that are none: first page and number of pages.
        """
        number = 2
        while number < self.num_pages:
            page = self.page(number) if number not in skipped else None
            if page is not None and page.is_leaf:
                yield page
            number += skipped.get(number, 1)

    def run(self, row: Row) -> tuple[int, int]:
        """Return the first page and the number of pages of a long value."""
        first = row.at // self.page_nbytes
        return first, -(-(row.at + row.nbytes) // self.page_nbytes) - first

    def is_plain_leaf(self, number: int) -> bool:
        """Tell whether a page is a leaf of chunks that are all within the file; a quick answer, not the only way."""
        data = os.pread(self._fd, self.page_nbytes, number * self.page_nbytes)
        own, _, flags, lower, upper = _PAGE.unpack_from(data) if len(data) == self.page_nbytes else (0, 0, 0, 0, 0)
        count = (lower - HEAD_NBYTES) // 2
        if own != number or flags != _LEAF or count < 1 or len(data) - upper != count * _CHUNK_NODE.size:
            return False
        _, highs, kinds, key_lengths, _, starts = zip(*_CHUNK_NODE.iter_unpack(data[upper:]), strict=True)
        places = set(struct.unpack_from(f"={count}H", data, HEAD_NBYTES))
        is_chunks = set(kinds) == {_BIG} and set(key_lengths) == {_CHUNK_KEY_NBYTES} and not any(highs)
        max_pages = (HEAD_NBYTES + 0xFFFF) // self.page_nbytes + 1
        is_inside = min(starts) >= 2 and max(starts) + max_pages <= self.num_pages
        return is_chunks and is_inside and places == set(range(upper, len(data), _CHUNK_NODE.size))

    def _meta_fields(self, number: int) -> tuple[Any, ...] | None:
        data = os.pread(self._fd, HEAD_NBYTES + _META.size, number and self.page_nbytes)
        return _META.unpack_from(data, HEAD_NBYTES) if len(data) == HEAD_NBYTES + _META.size else None

    def _leaf(self, number: int, data: bytes, count: int) -> Page:
        page = Page(number, True, [], [], [])
        for at in struct.unpack_from(f"={count}H", data, HEAD_NBYTES):
            row = self._row(number, data, at)
            if row is None:
                page.faults.append(f"page {number} has a row that reaches out of it, or out of the file")
            else:
                page.rows.append(row)
        return page

    def _row(self, number: int, data: bytes, at: int) -> Row | None:
        if not HEAD_NBYTES <= at <= len(data) - _NODE.size:
            return None
        low, high, flags, key_nbytes = _NODE.unpack_from(data, at)
        nbytes, start = low | high << 16, at + _NODE.size + key_nbytes
        key = data[at + _NODE.size : start]
        if not flags & _BIG:
            is_inside = start + nbytes <= len(data)
            is_table = bool(flags & _TABLE)
            if not is_inside or (is_table and nbytes != _TABLE_RECORD.size):
                return None
            return Row(key, number * self.page_nbytes + start, nbytes, is_table, is_big=False)
        if start + _NUMBER.size > len(data):
            return None
        first = _NUMBER.unpack_from(data, start)[0]
        stop = first * self.page_nbytes + HEAD_NBYTES + nbytes
        if first < 2 or stop > self.num_pages * self.page_nbytes:
            return None
        return Row(key, first * self.page_nbytes + HEAD_NBYTES, nbytes, is_table=False, is_big=True)

    def _branch(self, number: int, data: bytes, count: int) -> Page:
        page = Page(number, False, [], [], [])
        for index, at in enumerate(struct.unpack_from(f"={count}H", data, HEAD_NBYTES)):
            if not HEAD_NBYTES <= at <= len(data) - _NODE.size:
                page.faults.append(f"page {number} points out of itself")
                continue
            low, high, flags, key_nbytes = _NODE.unpack_from(data, at)
            start = at + _NODE.size
            if start + key_nbytes > len(data):
                page.faults.append(f"page {number} has a key that reaches out of it")
                continue
            key = data[start : start + key_nbytes] if index else b""
            page.children.append((key, low | high << 16 | flags << 32))
        return page


class Walk:
    """The rows of one tree, as far as they can be reached, in the order of their keys.

    Attributes:
        gaps: The ranges of keys that could not be reached; complete once all rows were taken.
        faults: What was found wrong.
        pages: The numbers of all pages that were visited.
    """

    def __init__(self, file: PageFile, root: int) -> None:
        """Walk the tree with this root."""
        self._file = file
        self._root = root
        self.gaps: list[Gap] = []
        self.faults: list[str] = []
        self.pages: set[int] = set()

    def rows(self) -> Iterator[Row]:
        """Yield the rows."""
        if self._root == NO_PAGE:
            return
        todo: list[tuple[int, bytes, bytes | None, int]] = [(self._root, b"", None, 0)]
        while todo:
            number, start, stop, depth = todo.pop()
            page = None if number in self.pages or depth > _MAX_DEPTH else self._file.page(number)
            if page is None:
                self._miss(f"page {number} of a tree is damaged, or is another page", start, stop)
                continue
            self.pages.add(number)
            for fault in page.faults:
                self._miss(fault, start, stop)
            yield from page.rows
            ends = [key for key, _ in page.children[1:]] + [stop]
            below = zip(page.children, ends, strict=False)
            todo.extend((child, key or start, end, depth + 1) for (key, child), end in reversed(list(below)))

    def _miss(self, fault: str, start: bytes, stop: bytes | None) -> None:
        self.faults.append(fault)
        self.gaps.append(Gap(start, stop))


def unsafe(data_file: Path) -> list[str]:
    """Return why LMDB would read outside of the file, or take one page for another: empty when it may have the file.

    Looks at the pages of all trees but at no long value: about 5 ms per GB of blocks.

    Raises:
        CorruptionError: The meta pages are damaged.
    """
    with PageFile(data_file) as file:
        metas = file.metas()
        if not metas:
            raise CorruptionError(f"{str(data_file)!r}: both meta pages are damaged; run `agentmem repair`")
        todo = [metas[0].free_root, metas[0].main_root]
        faults: list[str] = []
        pages: set[int] = set()
        while todo and len(faults) < 20:
            number = todo.pop()
            if number == NO_PAGE or (number not in pages and file.is_plain_leaf(number)):
                pages.add(number)
                continue
            page = None if number in pages else file.page(number)
            if page is None:
                faults.append(f"page {number} of a tree is damaged, or is another page")
                continue
            pages.add(number)
            faults.extend(page.faults)
            todo.extend(child for _, child in page.children)
            todo.extend(file.table_root(row)[0] for row in page.rows if row.is_table)
    return faults
