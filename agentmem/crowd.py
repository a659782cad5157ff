"""Who works on the device at the same time: any number of threads, until one of them finds no room.

That one leaves the device to the others, waits until none of them works any more, and works alone. So more threads may
share a store than its device budget holds sessions: they wait for each other where they must.
"""

import contextlib
import operator
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from agentmem.errors import CapacityError
from agentmem.presence import Lock, present

T = TypeVar("T")

_LOOK_S = 0.002
"""How often a waiting thread looks. Nobody calls it, so that an interrupt leaves no lock behind."""

_release = operator.methodcaller("release")


class Crowd:
    """The threads that work on one store."""

    def __init__(self, *, is_limited: bool) -> None:
        """Begin with nobody; without a limit on the device nobody ever waits."""
        self._is_limited = is_limited
        self._lock = threading.Lock()
        self._inside: dict[object, int] = {}
        self._paused: dict[object, int] = {}  # inside, and waiting for a lock or to be alone
        self._queue: dict[object, int] = {}  # those that want to be alone; the first of them is, when nobody works
        self._num_left = 0

    @contextlib.contextmanager
    def taken(self, lock: Lock) -> Iterator[None]:
        """Hold a session's lock, and work, for the time of a `with` block; wait while somebody is to work alone.

        Without a limit it does nothing: the lock is to be taken inside of the block anyway.

        A thread that waits holds no lock: what its session has on the device can be evicted.
        """
        if not self._is_limited:
            yield  # whoever comes in takes the lock
            return
        key, held = object(), list[object]()
        try:
            self._enter(key, lock, held)
            yield
        finally:
            if True in held:
                lock.release()
            if key in self._inside:
                del self._inside[key]
            self._num_left += 1

    def with_room(self, work: Callable[[], T], step_aside: Callable[[], bool]) -> T:
        """Do work that needs room on the device, again and alone when others had the room.

        Args:
            work: May be done again when it raised CapacityError.
            step_aside: Makes the device forget what this thread's session has there; False when that cannot be.

        Raises:
            CapacityError: There is no room even when nobody else works.
        """
        num_left = self._num_left
        try:
            return work()
        except CapacityError:
            is_crowded = self._has_others or self._num_left != num_left
            if not self._is_limited or not is_crowded or not step_aside():
                raise
        with self._alone():
            return work()

    @property
    def _has_others(self) -> bool:
        me = threading.get_ident()
        return any(thread != me for thread in tuple(self._inside.values()))

    @property
    def _is_anybody_working(self) -> bool:
        paused = set(self._paused.values())
        return any(thread not in paused for thread in tuple(self._inside.values()))

    def _enter(self, key: object, lock: Lock, held: list[object]) -> None:
        """Take the lock in a moment when nobody is to work alone. Whoever is inside already need not wait for that."""
        me = threading.get_ident()
        is_inside = me in self._inside.values()
        while True:
            if not is_inside:
                _wait(lambda: not self._queue)
            with present(self._paused, me):
                held[:] = map(lock.acquire, (True,))  # one step: no interrupt comes between taking and noting
            with self._lock:
                if is_inside or not self._queue:
                    self._inside[key] = me
                    return
            held[:] = map(_release, (lock,))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait until nobody else works, and keep it so for the time of a `with` block."""
        key, me = object(), threading.get_ident()
        with present(self._paused, me):
            try:
                with self._lock:
                    self._queue[key] = me
                _wait(lambda: next(iter(tuple(self._queue))) is key and not self._is_anybody_working)
                yield
            finally:
                if key in self._queue:
                    del self._queue[key]


def _wait(is_due: Callable[[], bool]) -> None:
    while not is_due():
        time.sleep(_LOOK_S)
