"""The searches that a user calls: each is a policy and `run`. Nothing is decided here."""

import math

from agentmem.search.budget import UNLIMITED, Budget
from agentmem.search.growth import Expand
from agentmem.search.policies.beam import Beam
from agentmem.search.policies.best_first import BestFirst
from agentmem.search.policies.best_of import BestOfN
from agentmem.search.policies.mcts import MCTS
from agentmem.search.protocols import B, IsDone, Score, SearchSession
from agentmem.search.result import SearchResult
from agentmem.search.runner import NAME, run


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
