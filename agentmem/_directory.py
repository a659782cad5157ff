"""A store's directory on the file system: is it a store, is it ours, is its data file whole, is there room.

Reads the first bytes of the data file itself, because LMDB dies of SIGBUS on a truncated one. Knows nothing of what the
store holds and never opens LMDB.
"""

import errno
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from agentmem.errors import (
    AgentMemError,
    CapacityError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    StorageFullError,
)

DATA_FILE = "data.mdb"
STORE_LOCK = "store.lock"
HOLDERS_LOCK = "holders.lock"
MADE_FILE = "store.made"
"""An empty file that is there once a store was finished: without it a lost data file would look like a new store's."""

_PROBE_FILE = "room.probe"
METRICS_FOLDER = "metrics"
OWN_FILES = {DATA_FILE, "lock.mdb", STORE_LOCK, HOLDERS_LOCK, MADE_FILE, _PROBE_FILE, METRICS_FOLDER}
# LMDB's documentation forbids these, even for the processes of one host.
_NETWORK_TYPES = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre"}

# LMDB 0.9, one meta page, native byte order: 16 bytes of page header; magic u32, version u32, address u64, map size
# u64; two tables of 48 bytes each, the first of which, the list of free pages, starts with the page size as u32 and has
# the numbers of its branch, leaf and overflow pages as u64 from its 8th byte on; last page u64, transaction u64.
_META = struct.Struct("=16xIIQQI4xQQQ16x48xQQ")
_MAGIC = 0xBEEFC0DE
_TRANSACTION = struct.Struct("=Q")
_TRANSACTION_AT = _META.size - _TRANSACTION.size


_NAMES: list[tuple[set[int], type[AgentMemError], str]] = [
    ({errno.EMFILE, errno.ENFILE}, CapacityError, "there are too many open files"),
    ({errno.ENOMEM}, CapacityError, "there is too little memory"),
    ({errno.ENOSPC, errno.EDQUOT, errno.EFBIG}, StorageFullError, "the file system is full"),
    ({errno.EACCES, errno.EPERM, errno.EROFS}, ReadOnlyError, "this user may not write there"),
    ({errno.ENODEV, errno.ENOLCK}, InvalidInputError, "its file system cannot map or lock files"),
]
"""What an error of the operating system means; any other one means that the device or a file fails."""


class _MetaPage(NamedTuple):
    page_nbytes: int
    free_list_pages: int
    last_page: int
    transaction: int


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Give the operating system's errors about the store at `path` names of ours.

    Raises:
        CapacityError, StorageFullError, ReadOnlyError, InvalidInputError, CorruptionError: By what is wrong.
    """
    try:
        yield
    except AgentMemError:
        raise
    except OSError as error:
        for codes, meaning, text in _NAMES:
            if error.errno in codes:
                raise meaning(f"cannot use {str(path)!r}: {text} ({error})") from error
        raise CorruptionError(f"cannot use {str(path)!r}: its device or a file fails ({error})") from error


def create(path: Path) -> None:
    """Make the directory, with mode 0700 and on disk before this returns, unless it exists.

    Raises:
        ReadOnlyError: It cannot be made here.
    """
    if path.exists():
        return
    try:
        path.mkdir(mode=0o700, parents=True)
        sync(path.parent)
    except OSError as error:
        raise ReadOnlyError(f"cannot make the directory {str(path)!r}: {error.strerror}") from error


def sync(path: Path) -> None:
    """Put the directory's entries on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check(path: Path, *, create: bool) -> None:
    """Check that the directory at `path` is a store of this user, or with `create` may become one.

    Raises:
        NotFoundError: There is none.
        InvalidInputError: It is something else, another user's, or on a file system that LMDB must not be used on.
        CorruptionError: It was a store, but the data file no longer starts as one, or is gone.
    """
    names = _check_place(path)
    if not nbytes(path / DATA_FILE):
        check_never_made(path)
    if DATA_FILE not in names:
        _check_empty(path, names, create=create)
    elif not _is_data_file(path / DATA_FILE):
        if STORE_LOCK in names:
            raise CorruptionError(f"{str(path / DATA_FILE)!r} does not start as a data file: restore it from a backup")
        raise InvalidInputError(f"{str(path)!r} is no store: its {DATA_FILE} is another kind of file")


def check_never_made(path: Path) -> None:
    """Refuse to take a store whose data is gone for a new one.

    Raises:
        CorruptionError: A store was finished in this directory.
    """
    if (path / MADE_FILE).exists():
        raise CorruptionError(
            f"the store at {str(path)!r} has lost its {DATA_FILE}, which is missing or empty: restore it from a "
            "backup, or remove the directory to begin anew"
        )


def mark_made(path: Path) -> None:
    """Note, on disk, that a store was finished in this directory."""
    marker = path / MADE_FILE
    if not marker.exists():
        os.close(os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        sync(path)


def check_damaged(path: Path) -> None:
    """Check that the directory at `path` is or was a store of this user, however damaged its data file.

    Raises:
        NotFoundError: There is none.
        InvalidInputError: It is something else, another user's, or on a file system that LMDB must not be used on.
    """
    names = _check_place(path)
    if DATA_FILE not in names or not nbytes(path / DATA_FILE):
        raise NotFoundError(f"there is no store at {str(path)!r}: it has no data file")
    if STORE_LOCK not in names and not _is_data_file(path / DATA_FILE):
        raise InvalidInputError(f"{str(path)!r} is no store: its {DATA_FILE} is another kind of file")


def nbytes(data_file: Path) -> int:
    """Return the size of the file, 0 when there is none."""
    return data_file.stat().st_size if data_file.exists() else 0


def missing_nbytes(data_file: Path) -> int:
    """Return how many bytes the file is shorter than its newest meta page says; 0 for a whole or empty file.

    Raises:
        CorruptionError: Not even the meta pages are there.
    """
    if nbytes(data_file) == 0:
        return 0
    meta = _newest_meta(data_file)
    # The size is taken last: another process may be growing the file.
    return max(0, (meta.last_page + 1) * meta.page_nbytes - nbytes(data_file))


def free_list_pages(data_file: Path) -> int:
    """Return the number of pages that the list of free pages takes itself.

    Raises:
        CorruptionError: The meta pages are damaged.
    """
    return _newest_meta(data_file).free_list_pages


def grow(data_file: Path, num_more: int) -> None:
    """Make the file `num_more` bytes longer, or longer still where another process has grown it meanwhile."""
    fd = os.open(data_file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        # Not truncate, which would cut off what that process has written.
        os.posix_fallocate(fd, os.fstat(fd).st_size + num_more - 1, 1)
    finally:
        os.close(fd)


def last_transaction(data_file: Path) -> int:
    """Return the number of the newest commit in the file.

    Raises:
        CorruptionError: The meta pages are damaged.
    """
    return _newest_meta(data_file).transaction


def continue_transactions(fd: int, number: int, page_nbytes: int, *, place: int = 1) -> None:
    """Let the transactions of a new data file, open as `fd`, go on after `number`: LMDB would count from 1 again.

    The numbers are the stamps of rows.

    Args:
        fd: The file, which nobody has open otherwise.
        number: The last number that was given.
        page_nbytes: Bytes per page.
        place: Which of the two meta pages is the newest: numbers there are odd (1, as in a compacted copy) or even (0).
    """
    os.pwrite(fd, _TRANSACTION.pack(number + (number + place) % 2), place * page_nbytes + _TRANSACTION_AT)


class CommitCounter:
    """Tells the number of the newest commit of any process, in less than a microsecond and without calling LMDB."""

    def __init__(self, data_file: Path) -> None:
        """Map the two meta pages of a data file that LMDB has open."""
        with data_file.open("rb") as file:
            self._places = (0, _read_meta(file.read(_META.size), data_file).page_nbytes)
            self._map = mmap.mmap(file.fileno(), self._places[1] + _META.size, access=mmap.ACCESS_READ)

    def newest(self) -> int:
        """Return the number; it never falls while the file is open."""
        first, second = (_TRANSACTION.unpack_from(self._map, place + _TRANSACTION_AT)[0] for place in self._places)
        return int(max(first, second))

    def close(self) -> None:
        """Let go of the pages."""
        self._map.close()


def free_nbytes(path: Path) -> int:
    """Return the bytes that this user may still write on the file system of `path`.

    Very many where it does not tell: a write that finds no room says so itself.
    """
    try:
        status = os.statvfs(path)
    except OSError:
        return 1 << 62
    return status.f_bavail * status.f_frsize


def has_room(path: Path, nbytes: int) -> bool:
    """Try whether the data file could grow by `nbytes`.

    LMDB reports a full disk, a quota and a file size limit all as EIO, the same as a broken disk; this tells them
    apart by reserving the same range of another file.
    """
    probe = path / _PROBE_FILE
    start = (path / DATA_FILE).stat().st_size
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return False
    try:
        os.posix_fallocate(fd, start, max(nbytes, 1))
    except OSError:
        return False
    finally:
        os.close(fd)
        probe.unlink(missing_ok=True)  # another process may have tried at the same time
    return True


def _check_place(path: Path) -> set[str]:
    """Check where a store is, or may be made; return the names of the files there."""
    if not path.exists():
        raise NotFoundError(f"there is no store at {str(path)!r}; open it with create to make one")
    if not path.is_dir():
        raise InvalidInputError(f"{str(path)!r} is no store: a store is a directory, this is a file")
    _check_owner(path)
    _check_file_system(path)
    return {entry.name for entry in path.iterdir()}


def _check_owner(path: Path) -> None:
    owner, user = path.stat().st_uid, os.geteuid()
    if owner != user:
        raise InvalidInputError(
            f"{str(path)!r} belongs to user {owner}, not to user {user}: a store is opened by its owner only"
        )


def _check_file_system(path: Path) -> None:
    kind = _file_system(path)
    if kind in _NETWORK_TYPES:
        raise InvalidInputError(
            f"{str(path)!r} is on a network file system ({kind}), where LMDB loses data: choose a local directory"
        )


def _file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`, "" where the system does not tell."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    device = path.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    # 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue   (proc_pid_mountinfo(5))
    return next((line.partition(" - ")[2].split(" ")[0] for line in lines if line.split(" ")[2] == name), "")


def _check_empty(path: Path, names: set[str], *, create: bool) -> None:
    if names - OWN_FILES:
        raise InvalidInputError(
            f"{str(path)!r} is no store and not empty (it has {min(names - OWN_FILES)!r}): choose another path"
        )
    if not create:
        raise NotFoundError(f"there is no store at {str(path)!r}: the directory is empty; open it with create")


def _is_data_file(data_file: Path) -> bool:
    """Tell whether the file starts as LMDB's; an empty one is left by a crash while the store was made."""
    with data_file.open("rb") as file:
        head = file.read(24)
    return not head or (len(head) == 24 and head[16:20] == struct.pack("=I", _MAGIC))


def _newest_meta(data_file: Path) -> _MetaPage:
    with data_file.open("rb") as file:
        first = _read_meta(file.read(_META.size), data_file)
        file.seek(first.page_nbytes)
        second = _read_meta(file.read(_META.size), data_file)
    return max(first, second, key=lambda meta: meta.transaction)


def _read_meta(data: bytes, data_file: Path) -> _MetaPage:
    if len(data) < _META.size:
        raise CorruptionError(f"{str(data_file)!r} is cut off within its first pages: restore it from a backup")
    magic, _, _, _, page_nbytes, *free_list, last_page, transaction = _META.unpack(data)
    if magic != _MAGIC or not 512 <= page_nbytes <= 65536:
        raise CorruptionError(f"{str(data_file)!r} has a damaged first page: restore it from a backup")
    return _MetaPage(page_nbytes, sum(free_list), last_page, transaction)
