"""The one background mover: saves sealed blocks while the model goes on.

Knows a job only as something that can be run once. A caller that needs a job done at once runs it itself, so that
nobody ever waits in a queue behind work that is less urgent.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

from agentmem.errors import AgentMemError

logger = logging.getLogger(__name__)


class Job:
    """Work that runs at most once at a time, in the mover's thread or in the thread of whoever needs it first."""

    __slots__ = ("_is_done", "_lock", "_work")

    def __init__(self, work: Callable[[], None]) -> None:
        """Wrap `work`; it is forgotten, with all it holds, when it succeeded."""
        self._lock = threading.Lock()
        self._is_done = False
        self._work: Callable[[], None] | None = work

    def run(self) -> None:
        """Run the work unless it has succeeded already; wait when another thread is at it. Errors go to the caller."""
        with self._lock:
            if not self._is_done and self._work is not None:
                self._work()
                self._is_done = True
                self._work = None


class Mover:
    """A thread that runs jobs in order, at the pace of one core at most."""

    def __init__(self) -> None:
        """Start the thread."""
        self._jobs: deque[Job] = deque()
        self._wake = threading.Condition()
        self._is_closed = False
        self._is_busy = False
        self._thread = threading.Thread(target=self._loop, name="agentmem-mover", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Costs microseconds."""
        with self._wake:
            self._jobs.append(job)
            self._wake.notify()

    def drain(self) -> None:
        """Run every queued job that has not run, with the mover's help, and return when all have."""
        while True:
            with self._wake:
                if not self._jobs:
                    self._wake.wait_for(lambda: not self._is_busy or bool(self._jobs))
                    if not self._jobs:
                        return
                job = self._jobs.popleft()
            _run(job)

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._is_busy = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: bool(self._jobs) or self._is_closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._is_busy = True
            _run(job)


def _run(job: Job) -> None:
    """Run a job; an error is left to whoever needs the job's result and runs it again."""
    try:
        job.run()
    except (AgentMemError, OSError, RuntimeError, ValueError, MemoryError) as error:
        logger.warning("a block could not be saved in the background: %s", error)
