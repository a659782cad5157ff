"""Best-first search: the leaf with the best score is expanded next."""

from collections.abc import Sequence
from dataclasses import dataclass

from agentmem.search.node import Expansion, require
from agentmem.search.tree import SearchTree


@dataclass(frozen=True, slots=True)
class BestFirst:
    """Expand the open node with the best score until there are enough answers.

    Attributes:
        children: Children of a node.
        max_depth: Nodes above a leaf at most; None for no limit.
        num_answers: Answers after which the search ends; None to go on.
    """

    children: int
    max_depth: int | None
    num_answers: int | None

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        require("children", self.children, 1)
        require("max_depth", self.max_depth, 1)
        require("num_answers", self.num_answers, 1)

    def choose(self, tree: SearchTree) -> Sequence[Expansion]:
        """Expand the best open node; of equals, the oldest."""
        leaves = tree.open_nodes(self.max_depth)
        if not leaves or (self.num_answers is not None and len(tree.done) >= self.num_answers):
            return ()
        best = max(leaves, key=lambda node: (node.score, -node.number))
        return (Expansion(best.number, self.children),)

    def prune(self, _tree: SearchTree) -> Sequence[int]:
        """Let go of nothing."""
        return ()
