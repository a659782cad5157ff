"""Advisory locks on files beside a store; the kernel lets go of them when their process dies, however it dies.

`store.lock` is held shared by whoever has the store open, and exclusively by what replaces its data file. In
`holders.lock` every writing handle holds one byte, so that others can ask whether it lives. Knows nothing of what the
store holds. LMDB's own `lock.mdb` is never touched: closing any descriptor of it would drop LMDB's locks.
"""

import contextlib
import datetime
import fcntl
import os
import secrets
import socket
import struct
import weakref
from pathlib import Path
from typing import Self

from agentmem.errors import ReadOnlyError, StoreLockedError

_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW

# struct flock of 64-bit Linux: type, whence, start, length, process; -1 stands for a lock of an open file.
_FLOCK = struct.Struct("@hhqqi4x")


class FileLock:
    """A lock on one file, held from `acquire` to `release`.

    Two locks on the same file exclude each other within one process too.
    """

    __slots__ = ("__weakref__", "_fd", "_is_exclusive", "path")

    def __init__(self, fd: int, path: Path, *, is_exclusive: bool) -> None:
        """Own the descriptor `fd`, whose lock is already held; use `acquire`."""
        self._fd = fd
        self._is_exclusive = is_exclusive
        self.path = path
        _held.add(self)

    @classmethod
    def acquire(cls, path: Path, *, exclusive: bool) -> Self:
        """Lock the file at `path`, made with mode 0600 when missing, without waiting.

        Raises:
            StoreLockedError: Somebody else holds it; the message names them, as far as they can be seen from here.
            ReadOnlyError: The file cannot be opened or made here.
        """
        fd = _open(path, writing=exclusive)
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            if exclusive:
                _write_holder(fd)
        except BlockingIOError as error:
            holders = _holders(fd)
            os.close(fd)
            raise StoreLockedError(f"cannot lock {str(path)!r}: it is held by {holders}; close that first") from error
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, path, is_exclusive=exclusive)

    def release(self) -> None:
        """Let go of the lock; again is harmless."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if self._is_exclusive:
            with contextlib.suppress(OSError):  # on a failing disk the name stays: it is for people only
                os.ftruncate(fd, 0)
        os.close(fd)

    def forget(self) -> None:
        """Close this process's copy without letting go: in a forked child the lock is still the parent's."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class Holders:
    """A handle's byte in a file of locks, and the question whether the byte of another one is still held.

    The lock belongs to the open file, not to a process: no number of a process is used that another one may get later,
    and containers of one machine see each other's. A byte is chosen among 2**62 at random, so that none is used twice.

    Attributes:
        number: The byte; 0 for a handle that only asks.
    """

    __slots__ = ("__weakref__", "_fd", "number")

    def __init__(self, fd: int, number: int) -> None:
        """Own the descriptor `fd`, in whose file byte `number` is held; use `enter` or `look`."""
        self._fd = fd
        self.number = number
        _held.add(self)

    @classmethod
    def enter(cls, path: Path) -> Self:
        """Hold a byte of the file at `path`, made with mode 0600 when missing.

        Raises:
            ReadOnlyError: The file cannot be opened or made here.
        """
        fd = _open(path, writing=True)
        number = secrets.randbits(62) + 1
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, number)

    @classmethod
    def look(cls, path: Path) -> Self:
        """Only ask of others, whose bytes are in the file at `path`; where there is none, nobody lives."""
        return cls(_open(path, writing=False) if path.exists() else -1, 0)

    def is_alive(self, number: int) -> bool:
        """Say whether a handle holds byte `number`. Costs a microsecond."""
        if number == self.number or self._fd < 0:
            return number == self.number
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        return bool(_FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)

    def release(self) -> None:
        """Let go of the byte; again is harmless."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    forget = release
    """In a forked child the byte is still the parent's, for the parent has the same open file."""


def _open(path: Path, *, writing: bool) -> int:
    # A shared lock needs no write access, so that a store on a read-only file system can still be read.
    flags = (os.O_RDWR | os.O_CREAT) if writing or not path.exists() else os.O_RDONLY
    try:
        return os.open(path, flags | _OPEN_FLAGS, 0o600)
    except OSError as error:
        raise ReadOnlyError(
            f"cannot open {str(path)!r} ({error.strerror}); writing needs a directory that this user may write to"
        ) from error


def _write_holder(fd: int) -> None:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with contextlib.suppress(OSError):  # whoever finds the disk full must still be able to remove something
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode(), 0)


def _holders(fd: int) -> str:
    """Name who holds a lock on the file: those who share it are looked up, who holds it alone wrote that down."""
    numbers = _sharing_processes(os.fstat(fd).st_ino)
    if os.getpid() in numbers:
        return f"this very process (process {os.getpid()})"
    if numbers:
        return ", ".join(f"process {number}" for number in sorted(numbers))
    text = os.pread(fd, 512, 0).decode(errors="replace").strip()
    if text.startswith(f"process {os.getpid()} "):
        return f"this very process ({text})"
    return text or "a process that cannot be seen from here (in another container?)"


def _sharing_processes(inode: int) -> set[int]:
    """Return the processes that hold a shared lock of the kind of `flock` on an inode.

    The device is not compared: some file systems (btrfs) show another one than `stat` does.
    """
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    # 1: FLOCK  ADVISORY  READ 30304 fe:00:2261866 0 EOF   (proc_locks(5); who waits has "->" in the second place)
    found = [line.split() for line in lines if " FLOCK " in line and " READ " in line]
    return {int(words[4]) for words in found if words[1] == "FLOCK" and words[5].endswith(f":{inode}")} - {0, -1}


# The one state of this module: Python's fork hooks cannot be removed, so there is one for all locks. A child that kept
# its copies of the descriptors would keep the store locked after its parent died.
_held: "weakref.WeakSet[FileLock | Holders]" = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
