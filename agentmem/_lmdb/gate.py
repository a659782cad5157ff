"""The gate that every read of a process passes, so that nobody closes or moves LMDB's map under a reader.

Knows nothing of LMDB: a map that is gone under a reader kills the process, and no error tells why.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_TIMEOUT_S = 30.0


class Gate:
    """Counts the reads that are in. Thread-safe."""

    def __init__(self) -> None:
        """Let reads in."""
        self._changed = threading.Condition()
        self._num_in = 0
        self._is_shut = False

    def enter(self) -> bool:
        """Let a read in; False when the gate was shut. Each that came in must `leave`."""
        with self._changed:
            self._num_in += not self._is_shut
            return not self._is_shut

    def leave(self) -> None:
        """Let a read out."""
        with self._changed:
            self._num_in -= 1
            self._changed.notify_all()

    def shut(self) -> bool:
        """Let nobody in any more, and wait until all are out; False when some do not come out."""
        with self._changed:
            self._is_shut = True
            return self._changed.wait_for(lambda: not self._num_in, _TIMEOUT_S)

    @contextmanager
    def empty(self, *, num_own: int) -> Iterator[bool]:
        """Keep everybody out, and wait until all but the caller's own reads are out; give False when some stay in."""
        with self._changed:
            self._num_in -= num_own
            self._changed.notify_all()
            try:
                yield self._changed.wait_for(lambda: not self._num_in, _TIMEOUT_S)
            finally:
                self._num_in += num_own
