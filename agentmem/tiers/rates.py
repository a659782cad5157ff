"""How fast tiers are and how fast the model computes, as measured: what decides between loading and computing.

Knows no tier and no model.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_NEW_PART = 0.3
"""Weight of the newest measurement in the running mean."""


class Measured:
    """What was moved or computed while it was timed."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.amount = 0

    def add(self, amount: int) -> None:
        """Count more of it."""
        self.amount += amount


class Rates:
    """Amounts per second, by name: bytes of a tier, tokens of the model. Thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Know nothing yet."""
        self._clock = clock
        self._lock = threading.Lock()
        self._rates: dict[str, float] = {}

    @contextlib.contextmanager
    def measuring(self, name: str) -> Iterator[Measured]:
        """Time what happens inside, and note its rate, unless it fails or comes to nothing."""
        measured, started = Measured(), self._clock()
        yield measured
        self.note(name, measured.amount, self._clock() - started)

    def note(self, name: str, amount: int, elapsed_s: float) -> None:
        """Add one measurement."""
        if amount <= 0 or elapsed_s <= 0:
            return
        rate = amount / elapsed_s
        with self._lock:
            before = self._rates.get(name, rate)
            self._rates[name] = before + _NEW_PART * (rate - before)

    def get(self, name: str) -> float | None:
        """Return an amount per second; None when it was never measured."""
        with self._lock:
            return self._rates.get(name)

    def snapshot(self) -> dict[str, float]:
        """Return all rates, sorted by name. Takes no lock: whoever watches must not hold up who measures."""
        return dict(sorted(self._rates.copy().items()))  # a dict of text is copied in one step
