"""Beam search over branches: level by level, the best few go on."""

from collections.abc import Sequence
from dataclasses import dataclass

from agentmem.search.node import Expansion, require
from agentmem.search.prune import all_but, best_leaves
from agentmem.search.tree import SearchTree


@dataclass(frozen=True, slots=True)
class Beam:
    """Expand all open leaves at once, then keep the best leaves, answers among them.

    Attributes:
        width: Leaves that are kept.
        children: Children of a node.
        token_cost: What a token of KV that no better leaf has costs, in units of score.
        max_depth: Nodes above a leaf at most; None for no limit.
    """

    width: int
    children: int
    token_cost: float
    max_depth: int | None

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        require("width", self.width, 1)
        require("children", self.children, 1)
        require("token_cost", self.token_cost, 0)
        require("max_depth", self.max_depth, 1)

    def choose(self, tree: SearchTree) -> Sequence[Expansion]:
        """Expand what the last step left open."""
        return [Expansion(node.number, self.children) for node in tree.open_nodes(self.max_depth)]

    def prune(self, tree: SearchTree) -> Sequence[int]:
        """Let go of all but the best leaves and what leads to them."""
        return all_but(tree, best_leaves(tree, tree.leaves, self.width, self.token_cost))
