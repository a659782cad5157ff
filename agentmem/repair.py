"""Repair a damaged store: into a new data file, with the old one kept beside it.

The store's own data file is never written to. All work is done on a new file in a directory of its own, and the last
step gives it the store's name; so a repair may be interrupted at any point, and begun again.
"""

import contextlib
import logging
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

from agentmem import _directory
from agentmem._lmdb import Environment
from agentmem._lmdb.salvage import Salvage, salvage
from agentmem._lock import FileLock
from agentmem.check import CheckReport, check
from agentmem.errors import StorageFullError
from agentmem.mending import Mended, mend
from agentmem.tiers.disk import DiskTier
from agentmem.tree.catalog import Catalog

logger = logging.getLogger(__name__)

WORK_DIRECTORY = "repair.tmp"
"""Where the new file is made; left behind only when a repair was killed, and removed by the next one."""

BACKUP_PREFIX = f"{_directory.DATA_FILE}.before-repair-"
"""What the old file is called afterwards, with the time. It holds all that the store held: remove it when it is not
needed any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What a repair found and did, or with `dry_run` would have done.

    Attributes:
        is_dry_run: Nothing was changed.
        backup: Name of the old data file in the store's directory; None for a dry run.
        faults: What was wrong with the structure of the data file, in words.
        num_rows: Rows that the store has now.
        num_healed: Records of which one copy was damaged, and that were written again from the other.
        num_salvaged: Rows that no table led to any more, found by a search of the whole file.
        num_blocks_dropped: Blocks whose bytes were damaged: their KV is computed again from tokens.
        num_cut: Checkpoints that named KV which is lost; it is computed again when it is next needed.
        num_recounted: Blocks whose count of names was wrong.
        lost: What could not be had again, in words; empty when nothing but KV was lost.
        problems: What `check` still finds, in words; empty for a sound store.
    """

    is_dry_run: bool
    backup: str | None
    faults: tuple[str, ...]
    num_rows: int
    num_healed: int
    num_salvaged: int
    num_blocks_dropped: int
    num_cut: int
    num_recounted: int
    lost: tuple[str, ...]
    problems: tuple[str, ...]


def repair(
    path: Path, *, previous_snapshot: bool = False, dry_run: bool = False, key: bytes | None = None
) -> RepairReport:
    """Repair the store at `path`, whatever is wrong with its data file; a sound one comes out as it was.

    Args:
        path: The store's directory.
        previous_snapshot: Go back to the state before the newest commit, when that commit is what is damaged.
        dry_run: Do everything but the last step: say what would become of the store.
        key: The key of an encrypted store.

    Raises:
        NotFoundError: There is no store.
        StoreLockedError: Somebody has the store open.
        StorageFullError: There is no room for a second data file; nothing was changed.
        CorruptionError: There is no earlier snapshot, or nothing of the store can be read.
        EncryptionError: The key is missing or another one.
    """
    path = path.absolute()
    _directory.check_damaged(path)
    with contextlib.closing(_Work(path)) as work:
        found = salvage(path / _directory.DATA_FILE, work.target, previous_snapshot=previous_snapshot)
        with Environment.open(work.target, key=key) as environment:
            catalog, disk = Catalog(), DiskTier(environment)
            mended = mend(environment, catalog, disk, found=found, now_s=time.time())
            checked = check(environment, disk)
        report = _report(found, mended, checked)
        if dry_run:
            return report
        backup = work.finish()
    logger.warning("the store %r was repaired; what it was before is in %s", str(path), backup)
    return replace(report, is_dry_run=False, backup=backup)


class _Work:
    """The directory in which the new file is made, and the lock that keeps everybody out of the store meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FileLock.acquire(path / _directory.STORE_LOCK, exclusive=True)
        try:
            self.target = path / WORK_DIRECTORY
            self._clear()
            _require_room(path)
            self.target.mkdir(mode=0o700)
        except BaseException:
            self._lock.release()
            raise

    def finish(self) -> str:
        """Keep the old file under another name and put the new one in its place; return that name."""
        old, new = self._path / _directory.DATA_FILE, self.target / _directory.DATA_FILE
        backup = self._path / f"{BACKUP_PREFIX}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        _put_on_disk(new)
        _keep(old, backup)
        _directory.sync(self._path)
        new.replace(old)
        _directory.sync(self._path)
        return backup.name

    def close(self) -> None:
        """Remove the directory and let others in."""
        try:
            self._clear()
        finally:
            self._lock.release()

    def _clear(self) -> None:
        if self.target.exists():
            shutil.rmtree(self.target)


def _require_room(path: Path) -> None:
    needed, free = _directory.nbytes(path / _directory.DATA_FILE), _directory.free_nbytes(path)
    if free < needed:
        raise StorageFullError(
            f"a repair of {str(path)!r} makes a second data file of up to {needed:,} bytes; its file system has "
            f"{free:,} bytes free: make room, or copy the store to another one and repair it there"
        )


def _keep(old: Path, backup: Path) -> None:
    """Give the old file a second name: the file itself is the copy, for nobody writes to it any more."""
    try:
        os.link(old, backup)
    except FileExistsError:
        backup.unlink()  # of a repair in the same second that was killed before its last step
        os.link(old, backup)
    except OSError:  # the file system knows no second names
        fd = os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as copy, old.open("rb") as source:
            shutil.copyfileobj(source, copy, 16 << 20)
        _put_on_disk(backup)


def _put_on_disk(file: Path) -> None:
    fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _report(found: Salvage, mended: Mended, checked: CheckReport) -> RepairReport:
    return RepairReport(
        is_dry_run=True,
        backup=None,
        faults=found.faults,
        num_rows=sum(found.num_rows.values()),
        num_healed=found.num_healed,
        num_salvaged=sum(found.num_salvaged.values()),
        num_blocks_dropped=mended.num_blocks_dropped,
        num_cut=mended.num_cut,
        num_recounted=mended.num_recounted,
        lost=mended.lost,
        problems=tuple(f"{problem.record}: {problem.advice}" for problem in checked.problems),
    )
