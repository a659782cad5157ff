"""Monte Carlo tree search: from the root down to a leaf, each time to the child with the best bound on its value.

Source: UCT, Kocsis and Szepesvari, "Bandit based Monte-Carlo Planning", ECML 2006. The user's `score` stands where a
random playout stood: a leaf is worth what it says.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentmem.search.budget import UNLIMITED, Budget
from agentmem.search.growth import Expand
from agentmem.search.node import Expansion, Node, require
from agentmem.search.protocols import B, IsDone, Score, SearchSession
from agentmem.search.result import SearchResult
from agentmem.search.runner import NAME, run
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


def mcts(
    session: SearchSession[B],
    expand: Expand[B],
    score: Score[B],
    *,
    children: int = 4,
    exploration: float = math.sqrt(2),
    max_depth: int | None = None,
    num_answers: int | None = None,
    is_done: IsDone[B] | None = None,
    budget: Budget = UNLIMITED,
    seed: int = 0,
    name: str = NAME,
    branch: str | None = None,
) -> SearchResult:
    """Search by UCT: expand where the mean score, and how little is known of it, promise most.

    A node's value is the mean score of all that was made below it; scores are scaled to [0, 1] over all there are.

    Args:
        session: Where to search.
        expand: How a child continues its branch.
        score: What a branch is worth.
        children: How many children a node gets.
        exploration: UCT's constant: how much what is little known draws the search.
        max_depth: Nodes above a leaf at most.
        num_answers: Answers after which the search ends; None to go on until the budget is used up.
        is_done: Whether a branch is an answer.
        budget: How much the search may take.
        seed: Of all that is random.
        name: Of the search: a call with the name of one that is there goes on with it.
        branch: Where to begin; by default the active branch.

    Raises:
        InvalidInputError: An option is out of range, a search of this name was begun in another way, or nothing would
            ever end it.
    """
    policy = MCTS(children, exploration, max_depth, num_answers)
    return run(session, policy, expand, score, is_done=is_done, budget=budget, seed=seed, name=name, branch=branch)
