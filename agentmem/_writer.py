"""The writer thread: gathers operations into groups and hands each group to one commit.

Knows nothing of LMDB or of what an operation does; `commit` is given from outside.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from agentmem._future import Future
from agentmem.errors import ClosedError, StorageFullError

MIB = 1 << 20

# Waking a sleeping thread costs the submitter about 90 us in a virtual machine, twenty times the rest of `submit`, so
# the writer sleeps only after 2 s without work; until then it looks once per window.
_NUM_EMPTY_WINDOWS = 40

T = TypeVar("T")
TransactionT = TypeVar("TransactionT")


class Level(Enum):
    """When an operation is on disk, and what a power cut may undo."""

    DURABLE = "durable"
    """Written at once, with all that was submitted before; survives a power cut once its future is done."""

    REMOVAL = "removal"
    """As DURABLE, but it does not stand behind what found no room on the disk: it makes room."""

    QUEUED = "queued"
    """Written with the next group, within 50 ms; its failure is raised by the next DURABLE operation or flush.

    One that finds the disk full waits in its place in the order, and with it all QUEUED ones behind it: the DURABLE
    ones behind it fail, until there is room.
    """

    RELAXED = "relaxed"
    """As QUEUED, but its failure is told by its future alone: for data that can be made again."""

    @property
    def is_durable(self) -> bool:
        """Whether its future is done only once it is on disk for good."""
        return self in {Level.DURABLE, Level.REMOVAL}


@dataclass(slots=True)
class Operation(Generic[TransactionT]):
    """One piece of work that happens as a whole or not at all.

    Attributes:
        run: Called with a transaction on the writer thread; more than once when its group has to be tried again.
        level: When it is on disk.
        nbytes: About how many bytes it adds to the store; 0 for small records.
        future: Gets what `run` returns, once committed.
    """

    run: Callable[[TransactionT], Any]
    level: Level
    nbytes: int
    future: Future[Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one operation of a committed group: a value, or the error that undid it alone."""

    value: object = None
    error: Exception | None = None


Commit = Callable[[Sequence[Operation[TransactionT]], bool], Sequence[Outcome]]
"""Carries out a group in one transaction, in order, and puts it on disk for good when the flag is set.

Raises StorageFullError only when nothing of the group was written.
"""


class Writer(Generic[TransactionT]):
    """One thread that carries out operations in the order of their submission.

    Operations wait up to `window_s` for company, unless one is DURABLE. The queue is bounded in bytes: `submit` waits
    while more than `max_queued_nbytes` are under way. Groups of 8 MB commit in 0.85 ms/MB, of 32 MB in 2 ms/MB, because
    the memory of the dirty pages is used again instead of faulted in.
    """

    def __init__(
        self,
        commit: Commit[TransactionT],
        *,
        window_s: float = 0.05,
        group_nbytes: int = 8 * MIB,
        max_queued_nbytes: int = 64 * MIB,
    ) -> None:
        """Start the thread."""
        self._commit = commit
        self._window_s = window_s
        self._group_nbytes = group_nbytes
        self._max_queued_nbytes = max_queued_nbytes
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._bells: deque[threading.Lock] = deque()  # one of each thread that waits for space
        self._queue: deque[Operation[TransactionT]] = deque()
        self._postponed: list[Operation[TransactionT]] = []  # QUEUED ones that found the disk full, oldest first
        self._queued_nbytes = 0
        self._unfinished_nbytes = 0
        self._num_unfinished = 0
        self._num_urgent = 0
        self._is_asleep = False
        self._is_unsynced = False
        self._is_closing = False
        self._failure: Exception | None = None
        # A daemon, so that a store that was never closed cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="agentmem-writer", daemon=True)
        self._thread.start()

    def unfinished_nbytes(self) -> int:
        """Return the bytes of the operations that are queued or being carried out."""
        return self._unfinished_nbytes

    def submit(self, run: Callable[[TransactionT], T], *, level: Level, nbytes: int) -> Future[T]:
        """Queue an operation. Takes microseconds, unless the queue is full of bytes.

        Raises:
            ClosedError: The writer is closed.
        """
        operation: Operation[TransactionT] = Operation(run, level, nbytes, Future())
        if nbytes and threading.current_thread() is not self._thread:  # which must not wait for itself
            self._wait_for_space(nbytes)
        with self._lock:
            if self._is_closing:
                raise ClosedError("the store is closed: nothing can be written any more")
            self._enqueue(operation)
        return operation.future

    def flush(self) -> None:
        """Wait until all that was submitted before is on disk for good.

        Raises:
            Exception: The first failure of a QUEUED operation that was not told yet, or of this flush.
        """
        with self._lock:
            is_unfinished = self._num_unfinished > 0 or self._is_unsynced or len(self._postponed) > 0
        if is_unfinished or self._failure is not None:
            self.submit(_do_nothing, level=Level.DURABLE, nbytes=0).result()

    def close(self) -> None:
        """Carry out what is queued, put it on disk and stop the thread; again is harmless.

        Raises:
            Exception: The first failure of a QUEUED operation that was not told yet, or of the last write.
        """
        with self._lock:
            self._is_closing = True
            self._work.notify()
        self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _wait_for_space(self, nbytes: int) -> None:
        """Wait without a lock, as `Future` does: several that wait may each add an operation of theirs at once."""
        while not self._has_space(nbytes):
            bell = threading.Lock()
            bell.acquire()
            self._bells.append(bell)
            if not self._has_space(nbytes):  # else it was rung before, maybe
                bell.acquire()

    def _has_space(self, nbytes: int) -> bool:
        unfinished = self._unfinished_nbytes
        return not unfinished or unfinished + nbytes <= self._max_queued_nbytes or self._is_closing

    def _enqueue(self, operation: Operation[TransactionT]) -> None:
        is_urgent = operation.level.is_durable
        self._num_unfinished += 1
        self._num_urgent += is_urgent
        self._queued_nbytes += operation.nbytes
        self._unfinished_nbytes += operation.nbytes
        self._queue.append(operation)  # last: an interrupt comes after a call, and finds all counted
        # A thread that looks at the end of its window anyway need not be woken for a queued operation.
        if is_urgent or self._is_asleep or self._queued_nbytes >= self._group_nbytes:
            self._is_asleep = False
            self._work.notify()

    def _run(self) -> None:
        while group := self._next_group():
            self._carry_out(group)
            with self._lock:
                self._num_unfinished -= len(group)
                self._unfinished_nbytes -= sum(operation.nbytes for operation in group)
            while self._bells:
                self._bells.popleft().release()
            del group  # or the thread would keep the group's memory while it waits for the next
        self._give_up_postponed()
        if self._is_unsynced:
            self._sync_last()

    def _next_group(self) -> list[Operation[TransactionT]]:
        """Wait for a group whose time has come; empty when the writer is closed and the queue is done."""
        num_empty_windows = 0
        with self._lock:
            while not self._is_due():
                if num_empty_windows == _NUM_EMPTY_WINDOWS:
                    num_empty_windows = 0
                    self._is_asleep = True
                    self._work.wait()
                    self._is_asleep = False
                elif not self._work.wait(self._window_s):
                    if self._queue:
                        break
                    num_empty_windows += 1
            return self._take()

    def _is_due(self) -> bool:
        return self._num_urgent > 0 or self._is_closing or self._queued_nbytes >= self._group_nbytes

    def _take(self) -> list[Operation[TransactionT]]:
        group: list[Operation[TransactionT]] = []
        nbytes = 0
        while self._queue and (not group or nbytes + self._queue[0].nbytes <= self._group_nbytes):
            operation = self._queue.popleft()
            nbytes += operation.nbytes
            self._num_urgent -= operation.level.is_durable
            group.append(operation)
        self._queued_nbytes -= nbytes
        return group

    def _carry_out(self, group: list[Operation[TransactionT]]) -> None:
        if not group:
            return
        group, self._postponed = [*self._postponed, *group], []
        try:
            outcomes = self._commit_group(group)
        except StorageFullError as error:
            if len(group) == 1:
                self._settle(group[0], Outcome(error=error))
            else:
                self._carry_out_what_fits(group, error)
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, the futures must tell it
            outcomes = [Outcome(error=error)] * len(group)
        for operation, outcome in zip(group, outcomes, strict=True):
            self._resolve(operation, outcome)

    def _carry_out_what_fits(self, group: list[Operation[TransactionT]], full: StorageFullError) -> None:
        """Try each operation alone, so that one large one does not take the small ones with it, and keep the order."""
        for operation in group:
            is_behind = len(self._postponed) > 0 and operation.level in {Level.QUEUED, Level.DURABLE}
            self._settle(operation, Outcome(error=full) if is_behind else self._carry_out_alone(operation))

    def _carry_out_alone(self, operation: Operation[TransactionT]) -> Outcome:
        try:
            return self._commit_group([operation])[0]
        except Exception as error:  # noqa: BLE001 - its future must tell it
            return Outcome(error=error)

    def _settle(self, operation: Operation[TransactionT], outcome: Outcome) -> None:
        """Tell the outcome of an operation; one that is QUEUED waits for room instead."""
        if operation.level is Level.QUEUED and isinstance(outcome.error, StorageFullError):
            self._postponed.append(operation)
        else:
            self._resolve(operation, outcome)

    def _give_up_postponed(self) -> None:
        """Try for the last time what is postponed, and let `close` tell of it when there is still no room."""
        last, self._postponed = self._postponed, []
        if not last:
            return
        try:
            outcomes = self._commit_group(last)
        except Exception as error:  # noqa: BLE001 - close() raises it
            outcomes = [Outcome(error=error)] * len(last)
        for operation, outcome in zip(last, outcomes, strict=True):
            self._resolve(operation, outcome)

    def _commit_group(self, group: list[Operation[TransactionT]]) -> Sequence[Outcome]:
        is_durable = any(operation.level.is_durable for operation in group)
        outcomes = self._commit(group, is_durable)
        self._is_unsynced = not is_durable
        return outcomes

    def _resolve(self, operation: Operation[TransactionT], outcome: Outcome) -> None:
        error = outcome.error
        if operation.level is Level.QUEUED and error is not None and self._failure is None:
            self._failure = error
        elif operation.level.is_durable and error is not None and self._failure is not None:
            error.add_note(f"An earlier queued write failed too: {self._failure}")
            self._failure = None
        elif operation.level.is_durable and self._failure is not None:
            error, self._failure = self._failure, None
            error.add_note("This is the failure of an earlier queued write; the write that raises it is stored.")
        if error is not None:
            operation.future.set_exception(error)
        else:
            operation.future.set_result(outcome.value)

    def _sync_last(self) -> None:
        try:
            self._commit([], True)
        except Exception as error:  # noqa: BLE001 - close() raises it
            self._failure = self._failure or error


def _do_nothing(transaction: object) -> None:
    """Stand in the queue, so that all before it is done when this is."""
