"""When a server is left alone: after some failures in a row, for a pause that doubles while it stays away.

    closed     every call goes through; `max_failures` in a row open it
    open       no call goes through until the pause is over
    half open  one call goes through for each pause: it closes the breaker, or doubles the pause

Knows nothing of what the calls do. Source: M. Nygard, Release It!, "Circuit Breaker".
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentmem.errors import TierUnavailableError

logger = logging.getLogger(__name__)


class Breaker:
    """Lets calls to one server through, or refuses them at once. Thread-safe.

    Attributes:
        num_failed: Calls that went through and failed.
        num_skipped: Calls that were refused.
        num_opened: Times that the server was given up for a pause, the first of a row.
    """

    def __init__(
        self,
        what: str,
        *,
        clock: Callable[[], float],
        max_failures: int = 3,
        pause_s: float = 1.0,
        max_pause_s: float = 60.0,
    ) -> None:
        """Start closed; `what` is the server's name in messages, `clock` gives seconds."""
        self.num_failed = 0
        self.num_skipped = 0
        self.num_opened = 0
        self._what = what
        self._clock = clock
        self._max_failures = max_failures
        self._first_pause_s = pause_s
        self._max_pause_s = max_pause_s
        self._lock = threading.Lock()
        self._num_in_row = 0
        self._pause_s = pause_s
        self._next_try_s: float | None = None
        self._last_failure = ""

    @property
    def is_open(self) -> bool:
        """Whether the server is given up for now, or only tried; False when calls go through freely."""
        return self._next_try_s is not None

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Make the call inside of this: its `TierUnavailableError` counts as a failure, its end as a success.

        Any other exception says nothing of the server.

        Raises:
            TierUnavailableError: The breaker is open; the call is not made.
        """
        self._admit()
        try:
            yield
        except TierUnavailableError as error:
            self._note_failure(error)
            raise
        self._note_success()

    def _admit(self) -> None:
        """Let a call through or refuse it. One that is let through to try takes the whole pause's turn.

        So nobody has to give a turn back, and a thread that is interrupted while it tries leaves nothing behind.
        """
        with self._lock:
            if self._next_try_s is None:
                return
            now_s = self._clock()
            if now_s >= self._next_try_s:
                self._next_try_s = now_s + self._pause_s
                return
            self.num_skipped += 1
            left_s = self._next_try_s - now_s
        raise TierUnavailableError(
            f"{self._what} is left alone for {left_s:.1f} s more, after {self._num_in_row} failures in a row; "
            f"the last: {self._last_failure}"
        )

    def _note_failure(self, error: TierUnavailableError) -> None:
        with self._lock:
            self.num_failed += 1
            self._num_in_row += 1
            self._last_failure = str(error)
            if self._num_in_row < self._max_failures:
                return
            if self._next_try_s is None:
                self.num_opened += 1
                self._pause_s = self._first_pause_s
                logger.warning("%s failed %d times in a row, and is left alone", self._what, self._num_in_row)
            else:
                self._pause_s = min(2 * self._pause_s, self._max_pause_s)
            self._next_try_s = self._clock() + self._pause_s

    def _note_success(self) -> None:
        with self._lock:
            if self._next_try_s is not None:
                logger.info("%s answers again", self._what)
            self._num_in_row = 0
            self._next_try_s = None
