"""The policy that knows branches: leaves first, and of them the one whose branches need it last.

Pure bookkeeping, as the other policies are.
"""

import heapq
from collections.abc import Collection

from agentmem.simulation.forest import Forest
from agentmem.tiers.hints import NEVER, Hints


class Hinted:
    """Lets blocks leave that nothing else in the tier hangs on, by the hints on the branches that have them."""

    def __init__(self, forest: Forest, hints: Hints[str]) -> None:
        """Start empty. `forest` and `hints` belong to the caller, who keeps them up to date."""
        self._forest = forest
        self._hints = hints
        self._keys: set[int] = set()
        self._num_children: dict[int, int] = {}
        self._leaves: set[int] = set()
        self._heap: list[tuple[float, int]] | None = None
        self._priorities: dict[str, float] = {}

    def admit(self, key: int) -> None:
        """Note that `key` has come in."""
        self._heap = None
        self._keys.add(key)
        if not self._num_children.get(key):
            self._leaves.add(key)
        parent = self._forest.parents[key]
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
            self._leaves.discard(parent)

    def touch(self, key: int) -> None:  # noqa: ARG002 - branches are used, not blocks
        """Judge all anew: time has passed."""
        self._heap = None

    def remove(self, key: int) -> None:
        """Note that `key`, which was in, has left."""
        self._keys.remove(key)
        self._leaves.discard(key)
        parent = self._forest.parents[key]
        if parent is None:
            return
        self._num_children[parent] -= 1
        if self._num_children[parent] == 0 and parent in self._keys:
            self._leaves.add(parent)
            if self._heap is not None:
                heapq.heappush(self._heap, (self._priority(parent), parent))

    def victim(self, kept: Collection[int]) -> int | None:
        """Return the leaf that is needed last; a block that only kept ones hang on, when there is no other."""
        if self._heap is None:
            self._priorities.clear()
            self._heap = [(self._priority(leaf), leaf) for leaf in self._leaves]
            heapq.heapify(self._heap)
        while self._heap:
            _, key = heapq.heappop(self._heap)
            if key in self._leaves and key not in kept:
                return key
        free = [key for key in self._keys if key not in kept]
        return min(free, key=self._priority, default=None)

    def _priority(self, key: int) -> float:
        return max((self._branch_priority(branch) for branch in self._forest.branches[key]), default=NEVER)

    def _branch_priority(self, branch: str) -> float:
        if branch not in self._priorities:
            self._priorities[branch] = self._hints.priority(branch)
        return self._priorities[branch]
