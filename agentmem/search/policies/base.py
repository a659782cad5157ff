"""What a search policy is: two pure functions of the tree. Knows nothing of sessions."""

from collections.abc import Sequence
from typing import Protocol

from agentmem.search.node import Expansion
from agentmem.search.tree import SearchTree


class Policy(Protocol):
    """Decides which nodes a search expands and which it lets go of.

    Both methods depend on the tree alone, so that a search that was interrupted goes on as if it had not been. The
    policy's `repr` is stored with the search and names it: a frozen dataclass with its options does it right. One with
    a `max_depth` that is not None needs nothing else to end it.
    """

    def choose(self, tree: SearchTree) -> Sequence[Expansion]:
        """Return the open nodes to expand next, as one step; none when the search is at its end."""
        ...

    def prune(self, tree: SearchTree) -> Sequence[int]:
        """Return the numbers of the kept nodes to let go of after a step, with all kept nodes below them."""
        ...
