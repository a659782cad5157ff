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
    """

    key: K
    last_used: int
    is_pinned: bool = False


def eviction_order(candidates: Iterable[Candidate[K]]) -> list[K]:
    """Return the keys that may be evicted, the least recently used first.

    Branches are the leaves of the tree of runs: what several of them share leaves last, with the last of them.
    Source: leaf-first LRU of SGLang's radix cache.
    """
    free = [candidate for candidate in candidates if not candidate.is_pinned]
    free.sort(key=lambda candidate: candidate.last_used)
    return [candidate.key for candidate in free]
