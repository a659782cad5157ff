"""Who leaves a full tier, block by block: LRU, segmented LRU and ARC, to be compared on traces.

Pure bookkeeping over keys, without clocks or bytes. Callers touch the end of a chain first and its root last, so that
leaves are always older than what they hang on, and fork points as young as their youngest branch.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class Policy(Protocol[K]):
    """Knows the keys that are in a tier, and which of them leaves next."""

    def admit(self, key: K) -> None:
        """Note that `key` has come in."""
        ...

    def touch(self, key: K) -> None:
        """Note that `key`, which is in, is used."""
        ...

    def remove(self, key: K) -> None:
        """Note that `key`, which was in, has left."""
        ...

    def victim(self, kept: Collection[K]) -> K | None:
        """Return who leaves next, none of `kept`; None when nobody may. Nothing changes until `remove`."""
        ...


class Lru(Generic[K]):
    """The least recently used leaves."""

    def __init__(self) -> None:
        """Start empty."""
        self._keys: OrderedDict[K, None] = OrderedDict()

    def admit(self, key: K) -> None:
        """Note that `key` has come in."""
        self._keys[key] = None

    def touch(self, key: K) -> None:
        """Note that `key`, which is in, is used."""
        self._keys.move_to_end(key)

    def remove(self, key: K) -> None:
        """Note that `key`, which was in, has left."""
        del self._keys[key]

    def victim(self, kept: Collection[K]) -> K | None:
        """Return the oldest that is none of `kept`."""
        return _first(self._keys, kept)


class Slru(Generic[K]):
    """Two queues: what was used again is protected from what came in once.

    Source: Karedla, Love and Wherry, Caching strategies to improve disk system performance (1994).
    """

    def __init__(self, capacity: int, *, protected: float = 0.8) -> None:
        """Start empty; `protected` is the part of `capacity` keys that is for those used again."""
        self._max_protected = int(capacity * protected)
        self._once: OrderedDict[K, None] = OrderedDict()
        self._again: OrderedDict[K, None] = OrderedDict()

    def admit(self, key: K) -> None:
        """Note that `key` has come in."""
        self._once[key] = None

    def touch(self, key: K) -> None:
        """Protect `key`; the oldest of the protected may have to make room."""
        self._once.pop(key, None)
        self._again[key] = None
        self._again.move_to_end(key)
        if len(self._again) > self._max_protected:
            oldest, _ = self._again.popitem(last=False)
            self._once[oldest] = None

    def remove(self, key: K) -> None:
        """Note that `key`, which was in, has left."""
        del (self._once if key in self._once else self._again)[key]

    def victim(self, kept: Collection[K]) -> K | None:
        """Return the oldest of those used once, or else of the protected."""
        once = _first(self._once, kept)
        return _first(self._again, kept) if once is None else once


class Arc(Generic[K]):
    """Two queues that share their room by what was missed: each remembers whom it let go.

    Source: Megiddo and Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache (FAST 2003).
    """

    def __init__(self, capacity: int) -> None:
        """Start empty, for `capacity` keys."""
        self._capacity = capacity
        self._once: OrderedDict[K, None] = OrderedDict()
        self._again: OrderedDict[K, None] = OrderedDict()
        self._left_once: OrderedDict[K, None] = OrderedDict()
        self._left_again: OrderedDict[K, None] = OrderedDict()
        self._goal = 0.0  # keys that the first queue should have

    def admit(self, key: K) -> None:
        """Let `key` in; if it was here before, its queue was too short."""
        num_once, num_again = len(self._left_once), len(self._left_again)
        if key in self._left_once:
            self._goal = min(self._goal + max(1.0, num_again / num_once), self._capacity)
            del self._left_once[key]
            self._again[key] = None
        elif key in self._left_again:
            self._goal = max(self._goal - max(1.0, num_once / num_again), 0.0)
            del self._left_again[key]
            self._again[key] = None
        else:
            self._once[key] = None

    def touch(self, key: K) -> None:
        """Note that `key`, which is in, is used again."""
        self._once.pop(key, None)
        self._again[key] = None
        self._again.move_to_end(key)

    def remove(self, key: K) -> None:
        """Note that `key` has left, and remember it for a while."""
        is_once = key in self._once
        del (self._once if is_once else self._again)[key]
        (self._left_once if is_once else self._left_again)[key] = None
        if len(self._once) + len(self._left_once) > self._capacity and self._left_once:
            self._left_once.popitem(last=False)
        if len(self._left_once) + len(self._left_again) > self._capacity:
            (self._left_again or self._left_once).popitem(last=False)

    def victim(self, kept: Collection[K]) -> K | None:
        """Return the oldest of the queue that has more than its share."""
        queues = (self._once, self._again) if len(self._once) > self._goal else (self._again, self._once)
        found = _first(queues[0], kept)
        return _first(queues[1], kept) if found is None else found


POLICIES: dict[str, Callable[[int], Policy[Any]]] = {
    "lru": lambda _: Lru(),
    "slru": Slru,
    "arc": Arc,
}
"""Makes a policy for so many keys, by its name."""


def make_policy(name: str, capacity: int) -> Policy[Any]:
    """Return the policy called `name`, for about `capacity` keys of any kind."""
    return POLICIES[name](capacity)


def _first(keys: Iterable[K], kept: Collection[K]) -> K | None:
    return next((key for key in keys if key not in kept), None)
