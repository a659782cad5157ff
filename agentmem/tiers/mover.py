"""The one background mover: saves sealed blocks while the model goes on.

Knows a job only as something that can be run once. A caller that needs a job done at once runs it itself, so that
nobody ever waits in a queue behind work that is less urgent.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from agentmem.errors import AgentMemError, NotFoundError
from agentmem.reasons import Reason

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Busy(Exception):  # noqa: N818 - no error: it never leaves this folder
    """Another thread has what a job needs."""


class Job(Generic[T]):
    """Work that is done once, in the mover's thread or in the thread of whoever needs it first."""

    __slots__ = ("_fetch", "_lock", "_work")

    def __init__(self, fetch: Callable[[bool], T | None], work: Callable[[T], None]) -> None:
        """Wrap work on something that is fetched first; both are forgotten, with all they hold, when it is done.

        Args:
            fetch: Gets what the work needs; None when there is nothing to do any more. May run in several threads at
                once, and may wait for a lock, if it is told to be patient; else it raises `Busy`. Whoever does the work
                waits for nobody.
            work: Does it.
        """
        self._lock = threading.Lock()
        self._fetch: Callable[[bool], T | None] | None = fetch
        self._work: Callable[[T], None] | None = work

    def run(self, *, is_patient: bool = True) -> None:
        """Do the work unless it was done already; wait when another thread is at it. Errors go to the caller.

        Raises:
            Busy: What is needed cannot be had now, and the caller is not patient.
        """
        fetch = self._fetch
        try:
            fetched = None if fetch is None else fetch(is_patient)
        except NotFoundError:
            if self._work is None:
                return  # another thread did it meanwhile
            raise
        with self._lock:
            if fetched is not None and self._work is not None:
                self._work(fetched)
            self._fetch = self._work = None


AnyJob = Job[list[Tensor]]


class Mover:
    """A thread that runs jobs in order, at the pace of one core at most."""

    def __init__(self) -> None:
        """Start the thread."""
        self._jobs: deque[tuple[AnyJob, object]] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._is_closed = False
        self._current: AnyJob | None = None
        self._thread = threading.Thread(target=self._loop, name="agentmem-mover", daemon=True)
        self._thread.start()

    def submit(self, job: AnyJob, *, needs: object = None) -> None:
        """Queue a job, and hold what it needs until it has run. Costs microseconds."""
        with self._lock:
            self._jobs.append((job, needs))
            self._wake.notify()

    def drain(self, *, is_patient: bool = True) -> None:
        """Run every queued job that has not run, with the mover's help, and return when all have.

        The mover's own job is run here too, rather than waited for: it may be waiting for a lock of the caller's.

        Args:
            is_patient: Whether to wait for other threads' locks. Else jobs that would have to wait are left to the
                mover: for a caller that holds a lock which these threads may want.
        """
        left: list[tuple[AnyJob, object]] = []
        while True:
            with self._lock:
                is_last = not self._jobs
                job, needs = (self._current, None) if is_last else self._jobs.popleft()
            if job is not None and not _run(job, is_patient=is_patient) and not is_last:
                left.append((job, needs))
            del needs
            if is_last:
                break
        with self._lock:
            self._jobs.extendleft(reversed(left))
            self._wake.notify()

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        with self._lock:
            self._is_closed = True
            self._wake.notify()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._lock:
                self._current = None
                self._wake.wait_for(lambda: bool(self._jobs) or self._is_closed)
                if not self._jobs:
                    return
                job, needs = self._jobs.popleft()
                self._current = job
            _run(job)
            del job, needs  # or the thread would hold them while it waits for the next


def _run(job: AnyJob, *, is_patient: bool = True) -> bool:
    """Run a job, unless it would have to wait; an error is left to whoever needs the job's result and runs it again."""
    try:
        job.run(is_patient=is_patient)
    except Busy:
        return False
    except (AgentMemError, OSError, RuntimeError, ValueError, MemoryError) as error:
        reason = error.reason if isinstance(error, AgentMemError) else Reason.SYSTEM_ERROR
        logger.warning("a block could not be saved in the background (%s): %s", reason, error)
    return True
