"""Which block hangs on which, and which branches have it: what a policy that knows branches needs to know.

Knows nothing of tiers.
"""

from collections.abc import Sequence


class Forest:
    """The chains of all branches so far."""

    def __init__(self) -> None:
        """Start without a branch."""
        self.parents: dict[int, int | None] = {}
        self.branches: dict[int, set[str]] = {}
        self._chains: dict[str, Sequence[int]] = {}

    def grow(self, branch: str, chain: Sequence[int]) -> None:
        """Note that `branch` is `chain` now. It may have grown, or turned back and gone another way."""
        before = self._chains.get(branch, ())
        num_common = _num_common(before, chain)
        for block in before[num_common:]:
            self.branches[block].discard(branch)
        for index in range(num_common, len(chain)):
            self.parents.setdefault(chain[index], chain[index - 1] if index else None)
            self.branches.setdefault(chain[index], set()).add(branch)
        self._chains[branch] = chain

    def end(self, branch: str) -> None:
        """Note that `branch` is gone."""
        for block in self._chains.pop(branch, ()):
            self.branches[block].discard(branch)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(index for index in range(shorter) if one[index] != other[index])
