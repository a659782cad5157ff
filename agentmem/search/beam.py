"""Beam search over branches: level by level, the best few go on."""

from collections.abc import Sequence
from dataclasses import dataclass

from agentmem.search.budget import UNLIMITED, Budget
from agentmem.search.growth import Expand
from agentmem.search.node import Expansion, require
from agentmem.search.protocols import B, IsDone, Score, SearchSession
from agentmem.search.prune import all_but, best_leaves
from agentmem.search.result import SearchResult
from agentmem.search.runner import NAME, run
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


def beam(
    session: SearchSession[B],
    expand: Expand[B],
    score: Score[B],
    *,
    width: int = 4,
    children: int = 4,
    token_cost: float = 0.0,
    max_depth: int | None = None,
    is_done: IsDone[B] | None = None,
    budget: Budget = UNLIMITED,
    seed: int = 0,
    name: str = NAME,
    branch: str | None = None,
) -> SearchResult:
    """Search level by level: expand every leaf of the beam, and keep the `width` best of what comes out.

    An answer keeps its place in the beam while its score is among the best. With `token_cost`, leaves that share KV are
    preferred to equally good ones that do not: the beam is chosen one leaf after the other, by score minus the price of
    the tokens that those chosen before do not have (ETS, arXiv 2502.13575).

    Args:
        session: Where to search.
        expand: How a child continues its branch.
        score: What a branch is worth.
        width: Leaves that are kept after each level.
        children: How many children a node gets.
        token_cost: Price of one token of KV, in units of score; 0 is plain beam search.
        max_depth: Levels at most.
        is_done: Whether a branch is an answer.
        budget: How much the search may take.
        seed: Of all that is random.
        name: Of the search: a call with the name of one that is there goes on with it.
        branch: Where to begin; by default the active branch.

    Raises:
        InvalidInputError: An option is out of range, a search of this name was begun in another way, or nothing would
            ever end it.
    """
    policy = Beam(width, children, token_cost, max_depth)
    return run(session, policy, expand, score, is_done=is_done, budget=budget, seed=seed, name=name, branch=branch)
