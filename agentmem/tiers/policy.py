"""Who leaves a full tier first: pure functions over what is known of each candidate.

Knows nothing of tensors, sessions or clocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Generic[K]):
    """Something that may be evicted.

    Attributes:
        key: What the caller evicts.
        last_used: A number that grows with each use.
        is_pinned: Whether it must stay.
        priority: How much it should stay, as `Hints` tell; decides before `last_used`.
    """

    key: K
    last_used: int = 0
    is_pinned: bool = False
    priority: float = 0.0


def eviction_order(candidates: Iterable[Candidate[K]]) -> list[K]:
    """Return the keys that may be evicted: the one that is needed last first, and else the least recently used.

    Branches are the leaves of the tree of runs: what several of them share leaves last, with the last of them.
    Source: leaf-first LRU of SGLang's radix cache.
    """
    free = [candidate for candidate in candidates if not candidate.is_pinned]
    free.sort(key=lambda candidate: (candidate.priority, candidate.last_used))
    return [candidate.key for candidate in free]
