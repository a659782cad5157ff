"""A new data file, written row by row: what compacting and salvaging put in the place of the old one.

LMDB's own compacting copy takes pages as they are, and a page that one value does not fill holds behind it whatever was
in the writer's memory before: rows that were removed long ago (docs/experiments.md). Rows that are written into a new
file bring nothing along. Knows nothing of what the rows hold.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import lmdb

from agentmem import _directory
from agentmem._lmdb.tables import Table
from agentmem._lmdb.transaction import Handles
from agentmem.errors import StorageFullError

Row = tuple[bytes | memoryview, bytes | memoryview]
"""The place of a row and what is stored there."""

_GROUP_NBYTES = 16 << 20
_MAP_NBYTES = 64 << 20
"""Room beside the rows' own pages for LMDB's trees and for half-filled pages."""


def copy_rows(env: lmdb.Environment, handles: Handles, file: Path) -> None:
    """Write all that is in use in an environment into a new data file, as it is at one moment.

    Raises:
        StorageFullError: There is no room.
        lmdb.Error: Something cannot be read or written.
        FileExistsError: There is such a file.
    """
    with env.begin(buffers=True) as txn:
        tables = ((table, iter(txn.cursor(handle))) for table, handle in handles.items())
        max_nbytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        try:
            write_data_file(file, tables, max_nbytes=max_nbytes, after=txn.id())
        except lmdb.Error as error:
            if _has_room(file):
                raise
            raise StorageFullError(f"there is no room for {str(file)!r}: free space and try again") from error


def write_data_file(file: Path, tables: Iterable[tuple[Table, Iterable[Row]]], *, max_nbytes: int, after: int) -> None:
    """Write a new data file, readable by this user alone, and put it on disk.

    Args:
        file: Its path.
        tables: Every table with its rows, in the order of their places.
        max_nbytes: About how large it may become.
        after: The transaction after which its own go on: their numbers are the stamps of rows.

    Raises:
        lmdb.Error: There is no room.
        FileExistsError: There is such a file.
    """
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    # Nobody reads the file before it is whole and on disk, so it needs no lock and no order of writes.
    with lmdb.open(
        str(file), subdir=False, map_size=2 * max_nbytes + _MAP_NBYTES, max_dbs=16, lock=False, sync=False
    ) as env:
        handles = {table: env.open_db(table.value.encode()) for table in Table}
        for table, rows in tables:
            for group in _groups(rows):
                with env.begin(write=True) as txn:
                    txn.cursor(handles[table]).putmulti(group, append=True)
        page_nbytes, newest = env.stat()["psize"], env.info()["last_txnid"]
        env.sync(True)
    with file.open("r+b") as copy:
        # Never below the number of the other meta page, or LMDB would take that for the newest.
        _directory.continue_transactions(copy.fileno(), max(after, newest), page_nbytes, place=newest % 2)
        os.fsync(copy.fileno())


def _has_room(file: Path) -> bool:
    """Try whether the file could grow: LMDB reports a full disk as a broken one."""
    with file.open("r+b") as copy:
        try:
            os.posix_fallocate(copy.fileno(), file.stat().st_size, _GROUP_NBYTES)
        except OSError:
            return False
    return True


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Cut rows into transactions of some megabytes: those of one are held in memory."""
    group: list[Row] = []
    nbytes = 0
    for place, stored in rows:
        group.append((place, stored))
        nbytes += len(stored)
        if nbytes >= _GROUP_NBYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group
