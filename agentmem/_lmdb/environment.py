"""One open store: reads at any time from any thread, writes in groups from one."""

import atexit
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeVar

import lmdb

from agentmem import _directory
from agentmem._lmdb import engine
from agentmem._lmdb.transaction import ReadTransaction, WriteTransaction
from agentmem._lock import FileLock
from agentmem._writer import MIB, Level, Operation, Outcome, Writer
from agentmem.errors import AgentMemError, ClosedError, NotFoundError, ReadOnlyError, StorageFullError

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 30.0


class Environment:
    """One open store directory.

    At most one handle of all processes writes; any number read. Handles are thread-safe; a forked child cannot use its
    parent's.

    Attributes:
        path: The directory.
        format: What the store says of itself.
        is_read_only: The handle cannot write, by its opening or since a write failed.
    """

    def __init__(self, env: lmdb.Environment, path: Path, lock: FileLock, *, read_only: bool, reserve: int) -> None:
        """Own an open LMDB environment and its lock; use `open`."""
        self.path = path
        self._env = env
        self._lock = lock
        self._reserve_nbytes = reserve
        self._pid = os.getpid()
        self._refusal = "it was opened for reading only" if read_only else ""
        self._reading = threading.Condition()
        self._num_reads = 0
        self._is_closed = False
        self._handles, self.format = engine.open_tables(env, path)
        env.reader_check()
        self._writer = None if read_only else Writer[WriteTransaction](self._commit_group)
        atexit.register(self.close)

    @classmethod
    def open(cls, path: Path, *, create: bool = False, read_only: bool = False, reserve_nbytes: int = 64 * MIB) -> Self:
        """Open the store at `path`.

        Args:
            path: The store's directory.
            create: Make the store when there is none.
            read_only: Open beside a running writer, without its lock.
            reserve_nbytes: Free bytes of the file system that operations with a size never touch.

        Raises:
            NotFoundError: There is no store, and `create` was not given.
            InvalidInputError: The path is something else, another user's, or on a network file system.
            FormatVersionError: The store needs a newer agentmem.
            CorruptionError: The store's files are cut off or damaged.
            StoreLockedError: Another handle or process has it open for writing.
            ReadOnlyError: The directory cannot be written to.
        """
        path = path.absolute()
        can_create = create and not read_only
        if can_create:
            _directory.create(path)
        _directory.check(path, create=can_create)
        name = _directory.READERS_LOCK if read_only else _directory.STORE_LOCK
        lock = FileLock.acquire(path / name, exclusive=not read_only)
        try:
            if not read_only:
                (path / _directory.READERS_LOCK).touch(mode=0o600)
            engine.require_sound(path / _directory.DATA_FILE, read_only=read_only)
            env = engine.open_lmdb(path, read_only=read_only)
            try:
                _make_if_new(env, path, can_create=can_create)
                return cls(env, path, lock, read_only=read_only, reserve=reserve_nbytes)
            except BaseException:
                env.close()
                raise
        except lmdb.Error as error:
            lock.release()
            raise engine.translate(error, path) from error
        except BaseException:
            lock.release()
            raise

    @property
    def is_read_only(self) -> bool:
        """Whether writes are refused."""
        return bool(self._refusal)

    @property
    def nbytes(self) -> int:
        """Size of the data file; it never shrinks, see `free_nbytes`."""
        return (self.path / _directory.DATA_FILE).stat().st_size

    @property
    def free_nbytes(self) -> int:
        """Bytes inside the data file that later writes use again (a little too many: the free list counts too)."""
        with self.read() as txn:
            return max(0, self._env.info()["last_pgno"] - 1 - txn.num_pages()) * self._env.stat()["psize"]

    @contextmanager
    def read(self) -> Iterator[ReadTransaction]:
        """Give a view of the store that later writes do not change. Keep it short: it keeps old pages from reuse.

        Raises:
            ClosedError: The store is closed, or this is a forked child.
        """
        self._begin_reading()
        try:
            with self._env.begin(buffers=True) as txn:
                yield ReadTransaction(txn, self._handles)
        except lmdb.Error as error:
            raise engine.translate(error, self.path) from error
        finally:
            with self._reading:
                self._num_reads -= 1
                self._reading.notify_all()

    def submit(
        self, operation: Callable[[WriteTransaction], T], *, level: Level = Level.DURABLE, nbytes: int = 0
    ) -> Future[T]:
        """Have `operation` carried out on the writer thread, after all that was submitted before.

        It gets a transaction of its own: if it raises, it alone is undone and its future gets the error. It may run
        twice (when its group found the disk full), so it changes nothing but the transaction; see
        `WriteTransaction.on_commit`. `nbytes` is about what it adds to the store; operations with 0 may use the
        reserve.

        Returns:
            The operation's result, done once it is committed, and on disk for good when `level` is DURABLE.

        Raises:
            ClosedError: The store is closed, or this is a forked child.
            ReadOnlyError: The handle cannot write.
        """
        if self._is_closed or os.getpid() != self._pid:
            self.check_usable()
        if self._writer is None or self._refusal:
            raise ReadOnlyError(f"cannot write to {str(self.path)!r}: {self._refusal}")
        return self._writer.submit(operation, level=level, nbytes=nbytes)

    def flush(self) -> None:
        """Wait until all that was submitted before is on disk for good.

        Raises:
            AgentMemError: The first failure of a QUEUED operation that nobody was told of yet, or of this flush.
        """
        self.check_usable()
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write what is queued, wait for running reads and let go of the store; again is harmless.

        Raises:
            AgentMemError: As `flush`; the store is closed all the same.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def clear_stale_readers(self) -> int:
        """Free the pages held by readers that were killed; return how many there were."""
        self.check_usable()
        return self._env.reader_check()

    def copy_to(self, fd: int) -> None:
        """Write a compacted copy of the data file, as it is now, to the descriptor `fd`."""
        with self.read():
            self._env.copyfd(fd, compact=True)

    @contextmanager
    def excluded_readers(self) -> Iterator[None]:
        """Keep read-only handles of all processes out, for as long as the data file is replaced.

        Raises:
            StoreLockedError: Some are open.
        """
        lock = FileLock.acquire(self.path / _directory.READERS_LOCK, exclusive=True)
        try:
            yield
        finally:
            lock.release()

    def verify(self) -> list[str]:
        """Return what is wrong with the structure of the data file, empty when sound; checks no record's checksum."""
        if self._writer is None or self._refusal:
            return engine.verify(self.path / _directory.DATA_FILE)
        # On the writer thread nobody writes meanwhile.
        return self.submit(lambda _: engine.verify(self.path / _directory.DATA_FILE)).result()

    def check_usable(self) -> None:
        """Refuse a handle that was closed, or that a fork left in a child process.

        Raises:
            ClosedError: It is one of these.
        """
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{str(self.path)!r} was opened by process {self._pid}, from which this one was forked: LMDB cannot be "
                "used across a fork; start workers with 'spawn', or fork before opening"
            )
        if self._is_closed:
            raise ClosedError(f"the store {str(self.path)!r} is closed: open it again")

    def _begin_reading(self) -> None:
        self.check_usable()
        with self._reading:
            if self._is_closed:
                self.check_usable()
            self._num_reads += 1

    def _close(self) -> None:
        atexit.unregister(self.close)
        with self._reading:
            self._is_closed = True
            if not self._reading.wait_for(lambda: not self._num_reads, _CLOSE_TIMEOUT_S):
                # Closing the map under a reader would kill the process.
                raise RuntimeError(f"a read of {str(self.path)!r} is still open after {_CLOSE_TIMEOUT_S} s")
        self._env.close()
        self._lock.release()

    def _commit_group(self, operations: Sequence[Operation[WriteTransaction]], is_durable: bool) -> list[Outcome]:
        """Carry out a group; called by the writer thread only."""
        if self._refusal:
            raise ReadOnlyError(f"cannot write to {str(self.path)!r}: {self._refusal}")
        callbacks: list[Callable[[], object]] = []
        nbytes = sum(operation.nbytes for operation in operations)
        allowed_nbytes = self._allowed_nbytes(nbytes)
        try:
            with self._env.begin(write=True, buffers=True) as parent:
                outcomes = [self._carry_out(parent, operation, allowed_nbytes, callbacks) for operation in operations]
        except lmdb.Error as error:
            raise self._after_failed_commit(error, nbytes) from error
        try:
            if is_durable:
                self._sync()
        finally:  # the group is in the store, whatever became of the disk
            for callback in callbacks:
                callback()
        return outcomes

    def _allowed_nbytes(self, nbytes: int) -> int:
        """Return how large an operation may be: pages inside the file count half, as a run of them may not fit."""
        free_nbytes = _directory.free_nbytes(self.path) - self._reserve_nbytes
        return free_nbytes if nbytes <= free_nbytes else max(free_nbytes, self.free_nbytes // 2)

    def _carry_out(
        self,
        parent: "lmdb.Transaction[memoryview]",
        operation: Operation[WriteTransaction],
        allowed_nbytes: int,
        callbacks: list[Callable[[], object]],
    ) -> Outcome:
        if operation.nbytes > max(allowed_nbytes, 0):
            return Outcome(error=self._storage_full(operation.nbytes))
        try:
            with self._env.begin(parent=parent, write=True, buffers=True) as txn:
                transaction = WriteTransaction(txn, self._handles)
                value = operation.run(transaction)
        except lmdb.Error as error:
            return Outcome(error=engine.translate(error, self.path))
        except Exception as error:  # noqa: BLE001 - whatever the operation raises belongs to its future
            return Outcome(error=error)
        callbacks.extend(transaction.callbacks)
        return Outcome(value)

    def _sync(self) -> None:
        try:
            self._env.sync(True)
        except lmdb.Error as error:
            # After a failed fsync nobody knows what is on disk, and asking again may say "yes" wrongly (fsyncgate).
            self._refusal = f"the device did not confirm a write ({error}); close it, look at the system log, reopen"
            raise ReadOnlyError(f"{str(self.path)!r} is read-only from now on: {self._refusal}") from error

    def _after_failed_commit(self, error: lmdb.Error, nbytes: int) -> AgentMemError:
        """Tell a full disk, after which the store goes on, from a failing one, after which it must not."""
        meaning = engine.translate(error, self.path)
        if isinstance(meaning, StorageFullError):
            return meaning
        if not engine.is_damage(error) and not _directory.has_room(self.path, 2 * nbytes + MIB):
            return self._storage_full(nbytes)
        self._refusal = f"a write failed ({error}); close it, run `agentmem check`, reopen"
        return (
            meaning
            if engine.is_damage(error)
            else ReadOnlyError(f"{str(self.path)!r} is read-only from now on: {self._refusal}")
        )

    def _storage_full(self, nbytes: int) -> StorageFullError:
        return StorageFullError(
            f"no room for {nbytes} bytes in {str(self.path)!r}: its file system has "
            f"{_directory.free_nbytes(self.path)} bytes free, of which {self._reserve_nbytes} are kept for removals; "
            "remove data and collect garbage, or free space; nothing stored was lost"
        )


def _make_if_new(env: lmdb.Environment, path: Path, *, can_create: bool) -> None:
    if not engine.is_new(env):
        return
    if not can_create:
        raise NotFoundError(f"the store at {str(path)!r} was never finished; open it with create")
    engine.initialise(env, path)
