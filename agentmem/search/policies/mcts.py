"""Monte Carlo tree search: from the root down to a leaf, each time to the child with the best bound on its value.

Source: UCT, Kocsis and Szepesvari, "Bandit based Monte-Carlo Planning", ECML 2006. The user's `score` stands where a
random playout stood: a leaf is worth what it says.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentmem.search.node import Expansion, Node, require
from agentmem.search.tree import SearchTree


@dataclass(frozen=True, slots=True)
class MCTS:
    """Expand the open node that UCT leads to. What has no open node below it is not entered again.

    Attributes:
        children: Children of a node.
        exploration: UCT's constant, for rewards in [0, 1].
        max_depth: Nodes above a leaf at most; None for no limit.
        num_answers: Answers after which the search ends; None to go on.
    """

    children: int
    exploration: float
    max_depth: int | None
    num_answers: int | None

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        require("children", self.children, 1)
        require("exploration", self.exploration, 0)
        require("max_depth", self.max_depth, 1)
        require("num_answers", self.num_answers, 1)

    def choose(self, tree: SearchTree) -> Sequence[Expansion]:
        """Walk down from the root to an open node."""
        leaves = {node.number for node in tree.open_nodes(self.max_depth)}
        if not leaves or (self.num_answers is not None and len(tree.done) >= self.num_answers):
            return ()
        alive = {node.number for leaf in leaves for node in tree.lineage(leaf)}
        values, visits = tree.values(), tree.visits()
        number = 0
        while number not in leaves:

            def bound(child: Node, parent: int = number) -> tuple[float, int]:
                width = math.sqrt(math.log(visits[parent]) / visits[child.number])
                return values[child.number] + self.exploration * width, -child.number

            number = max((child for child in tree.children(number) if child.number in alive), key=bound).number
        return (Expansion(number, self.children),)

    def prune(self, _tree: SearchTree) -> Sequence[int]:
        """Let go of nothing."""
        return ()
