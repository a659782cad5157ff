"""One open store: reads at any time from any thread, writes in groups from one."""

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self, TypeVar

import lmdb

from agentmem import _directory
from agentmem._future import Future
from agentmem._lmdb import engine
from agentmem._lmdb.gate import Gate
from agentmem._lmdb.keys import open_cipher
from agentmem._lmdb.quota import Quota, require_order
from agentmem._lmdb.rewrite import copy_rows
from agentmem._lmdb.tables import Table
from agentmem._lmdb.transaction import ReadTransaction, WriteTransaction
from agentmem._lock import FileLock, Holders
from agentmem._writer import MIB, Level, Operation, Outcome, Writer
from agentmem.errors import AgentMemError, CapacityError, ClosedError, ReadOnlyError, StorageFullError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Environment:
    """One open store directory.

    Any number of processes read and write it, with one handle each: LMDB lets one group commit at a time. Handles are
    thread-safe; a forked child cannot use its parent's.

    Attributes:
        path: The directory.
        format: What the store says of itself.
        cipher: Puts records into boxes and takes them out; None in a store that is not encrypted.
        holders: Tells which writing handles live, of whatever process.
        is_read_only: The handle cannot write, by its opening, since a write failed or since damage was found.
        num_healed: Records of which one copy was damaged and that were written again.
        quota: Holds the data file within a budget, once it is given one.
    """

    def __init__(
        self,
        env: lmdb.Environment,
        path: Path,
        locks: ExitStack,
        *,
        read_only: bool,
        reserve: int,
        key: bytes | None,
    ) -> None:
        """Own an open LMDB environment and what else `locks` closes; use `open`."""
        self.path = path
        holders_path = path / _directory.HOLDERS_LOCK
        self.holders = Holders.look(holders_path) if read_only else Holders.enter(holders_path)
        locks.callback(self.holders.release)
        self._commits = _directory.CommitCounter(path / _directory.DATA_FILE)
        locks.callback(self._commits.close)
        self.num_healed = 0
        self.quota = Quota(path / _directory.DATA_FILE, env.stat()["psize"])
        self._env = env
        self._reserve_nbytes = reserve
        self._pid = os.getpid()
        self._refusal = "it was opened for reading only" if read_only else ""
        self._gate = Gate()
        self._committing = threading.Lock()
        self._is_closed = False
        self._handles, self.format = engine.open_tables(env, path)
        with env.begin(buffers=True) as txn:
            self.cipher = open_cipher(ReadTransaction(txn, self._handles, None), self.format, path, key)
        env.reader_check()
        self._writer = None if read_only else Writer[WriteTransaction](self._commit_group)
        atexit.register(self.close)
        self._locks = locks.pop_all()

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        create: bool = False,
        read_only: bool = False,
        exclusive: bool = False,
        reserve_nbytes: int = 64 * MIB,
        key: bytes | None = None,
    ) -> Self:
        """Open the store at `path`.

        Args:
            path: The store's directory.
            create: Make the store when there is none.
            read_only: Write nothing.
            exclusive: Keep every other handle of all processes out, so that the data file may be replaced.
            reserve_nbytes: Free bytes of the file system that operations with a size never touch.
            key: The key of an encrypted store; a store that is made with one is encrypted.

        Raises:
            NotFoundError: There is no store, and `create` was not given.
            InvalidInputError: The path is something else, another user's, or on a network file system.
            FormatVersionError: The store needs a newer agentmem.
            EncryptionError: The key is missing, another one, or given for a store that is not encrypted.
            CorruptionError: The store's files are cut off or damaged.
            StoreLockedError: Its data file is being replaced, or with `exclusive` somebody has it open; or this process
                has it open already, which LMDB does not allow twice.
            ReadOnlyError: The directory cannot be written to.
            CapacityError, StorageFullError: This process has too many open files, or the disk no room at all.
        """
        path = path.absolute()
        can_create = create and not read_only
        with _directory.named_errors(path), ExitStack() as locks:
            if can_create:
                _directory.create(path)
            _directory.check(path, create=can_create)
            lock = FileLock.acquire(path / _directory.STORE_LOCK, exclusive=exclusive)
            locks.callback(lock.release)
            try:
                engine.require_sound(path / _directory.DATA_FILE, read_only=read_only)
                env = engine.open_lmdb(path, read_only=read_only)
                locks.callback(env.close)
                engine.make_if_new(env, path, key, can_create=can_create)
                if not read_only:
                    _directory.mark_made(path)
                return cls(env, path, locks, read_only=read_only, reserve=reserve_nbytes, key=key)
            except lmdb.Error as error:
                raise engine.translate(error, path) from error

    @property
    def is_read_only(self) -> bool:
        """Whether writes are refused."""
        return bool(self._refusal)

    @property
    def last_commit(self) -> int:
        """Number of the newest commit, of whichever process; costs a microsecond and calls nobody."""
        if self._is_closed:
            self.check_usable()
        return self._commits.newest()

    @property
    def nbytes(self) -> int:
        """Size of the data file; it never shrinks, see `free_nbytes`."""
        return (self.path / _directory.DATA_FILE).stat().st_size

    @property
    def live_nbytes(self) -> int:
        """Bytes of the data file that are in use: all of it but what later writes use again."""
        with self.read() as txn:
            return self.quota.live_nbytes(txn)

    @property
    def free_nbytes(self) -> int:
        """Bytes inside the data file that later writes use again."""
        return max(0, (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"] - self.live_nbytes)

    @contextmanager
    def read(self) -> Iterator[ReadTransaction]:
        """Give a view of the store that later writes do not change. Keep it short: it keeps old pages from reuse.

        Raises:
            ClosedError: The store is closed, or this is a forked child.
        """
        self.check_usable()
        read = object()
        try:
            if not self._gate.enter(read):
                self.check_usable()
            with self._begin(write=False) as txn:
                transaction = ReadTransaction(txn, self._handles, self.cipher)
                yield transaction
        except lmdb.Error as error:
            self._refuse_if_damaged(error)
            raise engine.translate(error, self.path) from error
        finally:
            self._gate.leave(read)
        if transaction.unlike and self._writer is not None:
            self._heal_soon(transaction.unlike)

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
        self.quota.make_ready(nbytes, self._writer.unfinished_nbytes)
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

    def copy_to(self, file: Path) -> None:
        """Write a new data file of what is in use now, and of nothing that ever was; on disk when this returns."""
        with self.read():
            copy_rows(self._env, self._handles, file)

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

    def _begin(self, *, write: bool) -> "lmdb.Transaction[memoryview]":
        """Begin a transaction of LMDB, with a larger map when another process made the file larger than this one's."""
        try:
            return self._env.begin(write=write, buffers=True)
        except lmdb.MapResizedError:
            with (
                contextlib.nullcontext() if write else self._committing,
                self._gate.empty(num_own=not write) as is_free,
            ):
                if not is_free:
                    raise CapacityError(f"{str(self.path)!r} outgrew its map while a read stayed open") from None
                engine.grow_map(self._env, self.path)
            return self._env.begin(write=write, buffers=True)

    def _close(self) -> None:
        atexit.unregister(self.close)
        self._is_closed = True
        if not self._gate.shut():
            # Closing the map under a reader would kill the process.
            raise RuntimeError(f"a read of {str(self.path)!r} stays open, so that it cannot be closed")
        self._locks.close()

    def _commit_group(self, operations: Sequence[Operation[WriteTransaction]], is_durable: bool) -> list[Outcome]:
        """Carry out a group; called by the writer thread only."""
        if self._refusal:
            raise ReadOnlyError(f"cannot write to {str(self.path)!r}: {self._refusal}")
        callbacks: list[Callable[[], object]] = []
        nbytes = sum(operation.nbytes for operation in operations)
        allowed_nbytes = self._allowed_nbytes(nbytes)
        try:
            with self._committing, self._begin(write=True) as parent:
                self.quota.begin(ReadTransaction(parent, self._handles, self.cipher))
                outcomes = [self._carry_out(parent, operation, allowed_nbytes, callbacks) for operation in operations]
                require_order(operations, outcomes)
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
            self.quota.require(operation.nbytes)
            with self._env.begin(parent=parent, write=True, buffers=True) as txn:
                transaction = WriteTransaction(txn, self._handles, self.cipher)
                value = operation.run(transaction)
                self._heal(transaction, transaction.unlike)
                self.quota.check(transaction, operation.nbytes)
        except lmdb.Error as error:
            if engine.is_damage(error):
                raise
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
        self._refuse_if_damaged(error)
        self._refusal = self._refusal or f"a write failed ({error}); close it, run `agentmem check`, reopen"
        return (
            meaning
            if engine.is_damage(error)
            else ReadOnlyError(f"{str(self.path)!r} is read-only from now on: {self._refusal}")
        )

    def _refuse_if_damaged(self, error: lmdb.Error) -> None:
        """Write no more into a file whose structure is broken: that would break more of it."""
        if engine.is_damage(error) and not self._refusal:
            self._refusal = f"its data file is damaged ({error}); close it and run `agentmem repair`"
            logger.error("%r is read-only from now on: %s", str(self.path), self._refusal)

    def _heal_soon(self, rows: set[tuple[Table, bytes]]) -> None:
        with contextlib.suppress(ClosedError, ReadOnlyError):  # the next read of them tries again
            self.submit(lambda txn: self._heal(txn, rows), level=Level.RELAXED)

    def _heal(self, txn: WriteTransaction, rows: set[tuple[Table, bytes]]) -> None:
        if healed := txn.heal(rows):
            txn.on_commit(lambda: self._note_healed(healed))

    def _note_healed(self, rows: list[str]) -> None:
        self.num_healed += len(rows)
        logger.warning("rows were damaged, and are written again from their other copies: %s", ", ".join(rows))

    def _storage_full(self, nbytes: int) -> StorageFullError:
        return StorageFullError(
            f"no room for {nbytes} bytes in {str(self.path)!r}: its file system has "
            f"{_directory.free_nbytes(self.path)} bytes free, of which {self._reserve_nbytes} are kept for removals; "
            "remove data and collect garbage, or free space; nothing stored was lost"
        )
