"""When things will be needed again: what callers say, what running tool calls tell, and else how long they lie idle.

Knows nothing of blocks or tiers: a key is whatever the caller evicts, a branch for example.
"""

import math
import statistics
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from agentmem.errors import InvalidInputError

K = TypeVar("K", bound=Hashable)

NEVER = -math.inf
"""The priority of what is not needed any more."""

PATIENCE_S = 300.0
"""Seconds in which nobody expects a key of which nothing is known: it leaves before all that are due earlier.

A pin expires by then, so pins hold against whatever has none. A tool that takes longer is worth a reload.
"""

FIRST_CALL_S = 5.0
"""Seconds that the first call of a tool is expected to take."""

SLACK = 2.5
"""How much longer than nine in ten calls took a call is waited for. Measured in docs/simulation.md: less loses more."""

_NUM_DURATIONS = 64
_NUM_TOOLS = 256
_STEP_S = 1.0
_MIN_STEP_S = 1e-6
_STEP_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class _Due:
    """When a key is needed: at a step, or at a time, infinity for never."""

    step: int | None
    at_s: float


@dataclass(frozen=True, slots=True)
class _Call:
    """A tool call that a key waits for; `expected_s` are durations to judge it by."""

    tool: str
    started_s: float
    expected_s: tuple[float, ...]
    expires_s: float


class Hints(Generic[K]):
    """What is known of the next use of each key. Thread-safe; every call is short.

    Time counts in seconds of the clock, turns in steps: a step is over when another key is used. Steps turn into
    seconds by how long they took so far. A key of which nothing is known is expected after as long as it has been idle,
    which among such keys is LRU.

    Sources: steps and the minimum over sharers, KVFlow (arXiv 2507.07400); pins that expire, Continuum (2511.02230).
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        """Start without knowledge; `clock` gives seconds that never go back."""
        self._clock = clock
        self._lock = threading.Lock()
        self._started_s = clock()
        self._used_s: dict[K, float] = {}
        self._due: dict[K, _Due] = {}
        self._calls: dict[K, _Call] = {}
        self._durations: OrderedDict[str, deque[float]] = OrderedDict()
        self._step = 0
        self._step_s = _STEP_S
        self._step_started_s = self._started_s
        self._current: K | None = None

    def use(self, key: K) -> None:
        """Note that `key` is used now. What was hinted of it has come true or not, and is forgotten; its call ends."""
        with self._lock:
            now_s = self._clock()
            self._end_call(key, now_s)
            self._due.pop(key, None)
            self._used_s[key] = now_s
            if key != self._current:
                self._next_step(key, now_s)

    def touch(self, key: K) -> None:
        """Note that `key` is new or looked at: nothing that was said of it comes true by that. No lock is taken."""
        self._used_s[key] = self._clock()

    def used_s(self, key: K) -> float:
        """Return when `key` was used last, by the clock; when all began, if it never was. No lock is taken."""
        return self._used_s.get(key, self._started_s)

    def hint(self, key: K, *, steps: int | None = None, at_s: float | None = None, never: bool = False) -> None:
        """Say when `key` is needed next: after so many steps, at a time of the clock, or never. The last word counts.

        Raises:
            InvalidInputError: Not exactly one of the three is given, steps are negative, or a time is not finite.
        """
        given = (steps is not None) + (at_s is not None) + never
        if given != 1 or (steps or 0) < 0 or not math.isfinite(at_s or 0.0):
            raise InvalidInputError(
                f"a hint says one thing: steps of 0 or more, a time, or never; not steps={steps}, at={at_s}, "
                f"never={never}"
            )
        with self._lock:
            step = None if steps is None else self._step + steps
            self._due[key] = _Due(step, math.inf if at_s is None else at_s)

    def start_call(self, key: K, tool: str, *, expect_s: float | None = None) -> None:
        """Note that `key` waits for a tool from now on, and pin it for as long as such calls take.

        What was hinted of it before is forgotten: the last word counts.

        Args:
            key: Who waits.
            tool: What it waits for: durations are learned by this name.
            expect_s: Seconds that this call will take; by default what calls of the tool took before.

        Raises:
            InvalidInputError: `expect_s` is no time.
        """
        if expect_s is not None and not 0 <= expect_s < math.inf:
            raise InvalidInputError(f"a call of {tool!r} cannot take {expect_s} s: give 0 or more seconds")
        with self._lock:
            known = sorted(self._durations.get(tool, ())) or [FIRST_CALL_S]
            expected = tuple(known) if expect_s is None else (expect_s,)
            now_s = self._clock()
            self._due.pop(key, None)
            self._calls[key] = _Call(tool, now_s, expected, now_s + _pin_s(expected))

    def end_call(self, key: K) -> None:
        """Note that the call of `key` is over, if there is one, learn how long it took, and expect `key` at once."""
        with self._lock:
            now_s = self._clock()
            if self._end_call(key, now_s):
                self._due[key] = _Due(None, now_s)

    def forget(self, key: K) -> None:
        """Drop all that is known of `key`, which is gone."""
        with self._lock:
            for known in (self._used_s, self._due, self._calls):
                known.pop(key, None)
            self._current = None if self._current == key else self._current

    def priority(self, key: K, now_s: float | None = None) -> float:
        """Return in how many seconds `key` is expected to be needed, with a minus: the smallest leaves first.

        0.0 is now, `NEVER` is never. Give `now_s`, the clock's time, to judge many keys at one moment.
        """
        with self._lock:
            return self._priority(key, self._clock() if now_s is None else now_s)

    def shared_priority(self, keys: Iterable[K], now_s: float | None = None) -> float:
        """Return the priority of what `keys` share: that of the one that needs it first, `NEVER` without any."""
        with self._lock:
            now_s = self._clock() if now_s is None else now_s
            return max((self._priority(key, now_s) for key in keys), default=NEVER)

    def is_pinned(self, key: K, now_s: float | None = None) -> bool:
        """Say whether `key` waits for a tool call whose pin has not expired: it should not sink for being idle."""
        with self._lock:
            return self._is_pinned(key, self._clock() if now_s is None else now_s)

    def _priority(self, key: K, now_s: float) -> float:
        """Take what is said before what is learned. A due time that has passed counts like a use at that time."""
        due, call = self._due.get(key), self._calls.get(key)
        if due is not None:
            return -abs(due.at_s - now_s) if due.step is None else -abs(due.step - self._step) * self._step_s
        if call is not None and now_s < call.expires_s:
            return -min(_remaining_s(call.expected_s, now_s - call.started_s), PATIENCE_S)
        return self._used_s.get(key, self._started_s) - now_s - PATIENCE_S

    def _is_pinned(self, key: K, now_s: float) -> bool:
        call = self._calls.get(key)
        return call is not None and now_s < call.expires_s

    def _next_step(self, key: K, now_s: float) -> None:
        if self._current is not None:
            took_s = max(now_s - self._step_started_s, _MIN_STEP_S)  # steps keep their order on a clock that stands
            self._step_s = took_s if self._step == 1 else self._step_s + _STEP_WEIGHT * (took_s - self._step_s)
        self._step += 1
        self._step_started_s = now_s
        self._current = key

    def _end_call(self, key: K, now_s: float) -> bool:
        call = self._calls.pop(key, None)
        if call is None:
            return False
        self._durations.setdefault(call.tool, deque(maxlen=_NUM_DURATIONS)).append(now_s - call.started_s)
        self._durations.move_to_end(call.tool)
        if len(self._durations) > _NUM_TOOLS:
            self._durations.popitem(last=False)
        return True


def _pin_s(expected_s: tuple[float, ...]) -> float:
    """Return how long a call is waited for: most of its kind are over by then."""
    return min(SLACK * expected_s[len(expected_s) * 9 // 10], PATIENCE_S)


def _remaining_s(expected_s: tuple[float, ...], elapsed_s: float) -> float:
    """Return how long a call takes yet: the median of those that took longer than this one did so far.

    A call that takes longer than all before is expected to take as long again.
    """
    longer = [duration_s for duration_s in expected_s if duration_s > elapsed_s]
    return statistics.median(longer) - elapsed_s if longer else elapsed_s
