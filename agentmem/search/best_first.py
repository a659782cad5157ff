"""Best-first search: the leaf with the best score is expanded next."""

from collections.abc import Sequence
from dataclasses import dataclass

from agentmem.search.budget import UNLIMITED, Budget
from agentmem.search.growth import Expand
from agentmem.search.node import Expansion, require
from agentmem.search.protocols import B, IsDone, Score, SearchSession
from agentmem.search.result import SearchResult
from agentmem.search.runner import NAME, run
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


def best_first(
    session: SearchSession[B],
    expand: Expand[B],
    score: Score[B],
    *,
    children: int = 4,
    max_depth: int | None = None,
    num_answers: int | None = 1,
    is_done: IsDone[B] | None = None,
    budget: Budget = UNLIMITED,
    seed: int = 0,
    name: str = NAME,
    branch: str | None = None,
) -> SearchResult:
    """Search from the best leaf, wherever in the tree it is, until there is an answer.

    Args:
        session: Where to search.
        expand: How a child continues its branch.
        score: What a branch is worth, and how promising it is.
        children: How many children a node gets.
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
    policy = BestFirst(children, max_depth, num_answers)
    return run(session, policy, expand, score, is_done=is_done, budget=budget, seed=seed, name=name, branch=branch)
