"""Best of n: several continuations of one context, the one with the best score wins."""

from collections.abc import Sequence
from dataclasses import dataclass

from agentmem.search.budget import UNLIMITED, Budget
from agentmem.search.growth import Expand
from agentmem.search.node import Expansion, NodeState, require
from agentmem.search.protocols import B, IsDone, Score, SearchSession
from agentmem.search.result import SearchResult
from agentmem.search.runner import NAME, run
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


def best_of_n(
    session: SearchSession[B],
    expand: Expand[B],
    score: Score[B],
    *,
    n: int = 8,
    is_done: IsDone[B] | None = None,
    budget: Budget = UNLIMITED,
    seed: int = 0,
    name: str = NAME,
    branch: str | None = None,
) -> SearchResult:
    """Continue a branch n times and return the continuation with the best score.

    Without `is_done` a continuation is one call of `expand`; with it, each is expanded until it is done.

    Args:
        session: Where to search.
        expand: How a child continues its branch.
        score: What a branch is worth.
        n: How many continuations.
        is_done: Whether a branch is an answer.
        budget: How much the search may take.
        seed: Of all that is random.
        name: Of the search: a call with the name of one that is there goes on with it.
        branch: Where to begin; by default the active branch.

    Raises:
        InvalidInputError: An option is out of range, or a search of this name was begun in another way.
    """
    policy = BestOfN(n, 1 if is_done is None else None)
    return run(session, policy, expand, score, is_done=is_done, budget=budget, seed=seed, name=name, branch=branch)
