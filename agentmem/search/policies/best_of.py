"""Best of n: several continuations of one context, the one with the best score wins."""

from collections.abc import Sequence
from dataclasses import dataclass

from agentmem.search.node import Expansion, NodeState, require
from agentmem.search.tree import SearchTree


@dataclass(frozen=True, slots=True)
class BestOfN:
    """Make n children of the root, then carry each of them on.

    Attributes:
        n: How many.
        max_depth: Nodes above a leaf at most; None for no limit.
    """

    n: int
    max_depth: int | None

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        require("n", self.n, 1)
        require("max_depth", self.max_depth, 1)

    def choose(self, tree: SearchTree) -> Sequence[Expansion]:
        """Expand the root, or give every open leaf one more child."""
        if tree.root.state is NodeState.OPEN:
            return (Expansion(0, self.n),)
        return [Expansion(node.number, 1) for node in tree.open_nodes(self.max_depth)]

    def prune(self, _tree: SearchTree) -> Sequence[int]:
        """Let go of nothing."""
        return ()
