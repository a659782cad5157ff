"""Bringing KV nearer before anybody asks for it.

Source: advisory requests of SYMPHONY (arXiv 2412.16434): idempotent, and nothing depends on them.
"""

import logging
import threading
from collections.abc import Callable

from agentmem._background import give_way
from agentmem.errors import AgentMemError

logger = logging.getLogger(__name__)


class Prefetch:
    """A load in the background that nobody waits for."""

    def __init__(self, work: Callable[[Callable[[], bool]], int]) -> None:
        """Begin `work`, which is given what says that it is to end and returns how many blocks it brought."""
        self._work = work
        self._is_cancelled = False
        self._num_blocks = 0
        self._thread = threading.Thread(target=self._run, name="agentmem-prefetch", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """End it; what has come stays."""
        self._is_cancelled = True

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it is over, `timeout` seconds at most; return how many blocks it has brought nearer."""
        self._thread.join(timeout)
        return self._num_blocks

    def _run(self) -> None:
        give_way()
        try:
            self._num_blocks = self._work(lambda: self._is_cancelled)
        except (AgentMemError, OSError, RuntimeError, ValueError, MemoryError) as error:
            logger.info("a prefetch ended early: %s", error)
