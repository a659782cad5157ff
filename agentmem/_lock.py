"""Advisory locks on files beside a store; the kernel lets go of them when their process dies, however it dies.

`store.lock` is held exclusively by the one writer, `readers.lock` shared by every read-only handle and exclusively
while the data file is replaced. Knows nothing of what the store holds. LMDB's own `lock.mdb` is never touched: closing
any descriptor of it would drop LMDB's locks.
"""

import datetime
import fcntl
import os
import socket
import weakref
from pathlib import Path
from typing import Self

from agentmem.errors import ReadOnlyError, StoreLockedError

_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW


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
            StoreLockedError: Somebody else holds it; the message names the holder when the holder is exclusive.
            ReadOnlyError: The file cannot be opened or made here.
        """
        fd = _open(path, exclusive=exclusive)
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            if exclusive:
                _write_holder(fd)
        except BlockingIOError as error:
            holder = _read_holder(fd)
            os.close(fd)
            raise StoreLockedError(f"cannot lock {str(path)!r}: it is held by {holder}; close that first") from error
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
            os.ftruncate(fd, 0)
        os.close(fd)

    def forget(self) -> None:
        """Close this process's copy without letting go: in a forked child the lock is still the parent's."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _open(path: Path, *, exclusive: bool) -> int:
    # A shared lock needs no write access, so that a store on a read-only file system can still be read.
    flags = (os.O_RDWR | os.O_CREAT) if exclusive or not path.exists() else os.O_RDONLY
    try:
        return os.open(path, flags | _OPEN_FLAGS, 0o600)
    except OSError as error:
        raise ReadOnlyError(
            f"cannot open {str(path)!r} ({error.strerror}); writing needs a directory that this user may write to"
        ) from error


def _write_holder(fd: int) -> None:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode(), 0)


def _read_holder(fd: int) -> str:
    text = os.pread(fd, 512, 0).decode(errors="replace").strip()
    if text.startswith(f"process {os.getpid()} "):
        return f"this very process ({text})"
    return text or "readers, which leave no name"


# The one state of this module: Python's fork hooks cannot be removed, so there is one for all locks. A child that kept
# its copies of the descriptors would keep the store locked after its parent died.
_held: "weakref.WeakSet[FileLock]" = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
