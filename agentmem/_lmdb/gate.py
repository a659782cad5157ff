"""The gate that every read of a process passes, so that nobody closes or moves LMDB's map under a reader.

Knows nothing of LMDB: a map that is gone under a reader kills the process, and no error tells why.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TIMEOUT_S = 30.0

_LOOK_S = 0.001
"""How often a thread looks whether reads are out. Nobody calls it, so that an interrupt leaves no lock behind."""


class Gate:
    """Knows the reads that are in. Thread-safe."""

    def __init__(self) -> None:
        """Let reads in."""
        self._lock = threading.Lock()
        self._in: dict[object, None] = {}
        self._is_shut = False

    def enter(self, read: object) -> bool:
        """Let a read in; False when the gate was shut. Each must `leave`, whatever became of its coming in."""
        with self._lock:
            if not self._is_shut:
                self._in[read] = None
            return not self._is_shut

    def leave(self, read: object) -> None:
        """Let a read out, if it is in."""
        self._in.pop(read, None)

    def shut(self) -> bool:
        """Let nobody in any more, and wait until all are out; False when some do not come out."""
        with self._lock:
            self._is_shut = True
        return _wait(lambda: not self._in)

    @contextmanager
    def empty(self, *, num_own: int) -> Iterator[bool]:
        """Keep everybody out, and wait until all but the caller's own reads are out; give False when some stay in."""
        with self._lock:
            yield _wait(lambda: len(self._in) <= num_own)


def _wait(is_due: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _TIMEOUT_S
    while not is_due():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True
