"""What becomes of work that another thread does: the result, once it is there.

As `concurrent.futures.Future`, but that the thread which waits and the one which works share no lock: an interrupt that
stops the first in a bad moment never stops the second. (The standard library's waits for locks in Python code, and an
interrupt may leave one taken.)
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Future(Generic[T]):
    """A result that is not there yet. Thread-safe; set once."""

    __slots__ = ("__weakref__", "_callbacks", "_outcome", "_waiting")

    def __init__(self) -> None:
        """Begin without a result."""
        self._outcome: tuple[list[T], BaseException | None] | None = None
        self._waiting: deque[threading.Lock] = deque()
        self._callbacks: deque[Callable[[Future[T]], object]] = deque()

    def done(self) -> bool:
        """Say whether the result, or an error, is there."""
        return self._outcome is not None

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result and return it, or raise the error.

        Raises:
            TimeoutError: It was not there after `timeout` seconds.
        """
        values, error = self._wait(timeout)
        if error is not None:
            try:
                raise error
            finally:
                del error  # or the error would hold this frame, and this frame the error
        return values[0]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the result; return the error, None when all went well.

        Raises:
            TimeoutError: It was not there after `timeout` seconds.
        """
        return self._wait(timeout)[1]

    def add_done_callback(self, callback: "Callable[[Future[T]], object]") -> None:
        """Have `callback` called with this future when the result is there: by the thread that sets it, or at once."""
        self._callbacks.append(callback)
        if self._outcome is not None:
            self._call_back()

    def set_result(self, value: T) -> None:
        """Give the result."""
        self._set(([value], None))

    def set_exception(self, error: BaseException) -> None:
        """Give the error in the result's stead."""
        self._set(([], error))

    def _set(self, outcome: tuple[list[T], BaseException | None]) -> None:
        self._outcome = outcome
        while self._waiting:
            self._waiting.popleft().release()
        self._call_back()

    def _wait(self, timeout: float | None) -> tuple[list[T], BaseException | None]:
        if self._outcome is None:
            bell = threading.Lock()
            bell.acquire()
            self._waiting.append(bell)
            if self._outcome is None:  # else whoever set it may have looked for waiting threads before
                bell.acquire(timeout=-1 if timeout is None else timeout)
        if self._outcome is None:
            raise TimeoutError("the result is not there yet")
        return self._outcome

    def _call_back(self) -> None:
        """Call each callback once, whichever thread comes to it first."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return  # the other thread was faster
            callback(self)
