"""One tier of a simulation: a number of blocks that it holds, and a policy that says who leaves.

Knows nothing of bytes or seconds.
"""

from collections.abc import Sequence

from agentmem.tiers.policies import Policy


class Level:
    """Blocks that are in a tier.

    Attributes:
        capacity: Blocks that it holds.
    """

    def __init__(self, capacity: int, policy: Policy[int]) -> None:
        """Start empty."""
        self.capacity = capacity
        self._policy = policy
        self._blocks: set[int] = set()

    def __contains__(self, block: int) -> bool:
        """Say whether `block` is here."""
        return block in self._blocks

    def hold(self, blocks: Sequence[int]) -> tuple[int, list[int]]:
        """Use `blocks`, and let in those that are not here, as far as all of them together fit.

        Args:
            blocks: What is to be here, the most important first: the root of a chain before its end.

        Returns:
            How many came in, and which blocks had to leave or found no room, the most important last.
        """
        fitting = blocks[: self.capacity]
        new = [block for block in fitting if block not in self._blocks]
        left = [block for block in blocks[self.capacity :] if block not in self._blocks][::-1]
        self.touch(fitting)
        left += self._make_room(len(new), set(fitting))
        for block in reversed(new):
            self._blocks.add(block)
            self._policy.admit(block)
        self.touch([block for block in fitting if block not in set(new)])
        return len(new), left

    def touch(self, blocks: Sequence[int]) -> None:
        """Use those of `blocks` that are here; the root counts as used last."""
        for block in reversed(blocks):
            if block in self._blocks:
                self._policy.touch(block)

    def _make_room(self, num_new: int, kept: set[int]) -> list[int]:
        left = []
        while len(self._blocks) + num_new > self.capacity:
            victim = self._policy.victim(kept)
            if victim is None:
                raise RuntimeError(f"a tier of {self.capacity} blocks found no one to leave for {num_new} others")
            self._policy.remove(victim)
            self._blocks.remove(victim)
            left.append(victim)
        return left
