"""Carries a search out: asks the policy, makes nodes, keeps the record, and puts right what a killed process left.

A step happens as a whole: its nodes are checkpoints first, then the record names them. What the record does not name
is dropped when the search goes on, and made again from the same seeds.
"""

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Generic

from agentmem.errors import InvalidInputError
from agentmem.reasons import Reason
from agentmem.search.budget import UNLIMITED, Budget, afford, count_children
from agentmem.search.growth import Child, Expand, Nursery, Sampling
from agentmem.search.home import Home
from agentmem.search.node import Expansion, Node, NodeState
from agentmem.search.policies.base import Policy
from agentmem.search.protocols import B, IsDone, Score, SearchSession
from agentmem.search.prune import make_room
from agentmem.search.result import SearchResult
from agentmem.search.tree import SearchTree

logger = logging.getLogger(__name__)

NAME = "search"
"""What a search is called unless the user gives it a name."""


def run(
    session: SearchSession[B],
    policy: Policy,
    expand: Expand[B],
    score: Score[B],
    *,
    is_done: IsDone[B] | None = None,
    budget: Budget = UNLIMITED,
    seed: int = 0,
    name: str = NAME,
    branch: str | None = None,
) -> SearchResult:
    """Search with a policy, or go on with a search that was interrupted, or whose budget was raised.

    The search forks a branch called `name` and works below it: node 7 is the branch `name/7`. In the extras of branch
    and checkpoint, "score" is its score and "search" its place in the tree; what `expand` puts into "message" becomes
    the checkpoint's message. The branch that it began from, and the active one, stay as they are. When a function of
    the user's raises, or the process dies, the search stands at its last whole step, and the same call goes on from
    there. `is_done` is asked again about the leaves that a search has when it goes on.

    Args:
        session: Where to search.
        policy: Decides what is expanded and what is let go of.
        expand: How a child continues its branch: `Sampling`, or a function that is called with the child's branch, a
            fork of its node's, and a seed for all that is random. A function may return a list of texts or token ids
            instead: each begins a child. `Together` calls a function with all children of a step. A child that got no
            token is given up.
        score: Says what a branch is worth; -inf gives it up. Tokens that it appends are taken off again.
        is_done: Says whether a branch is an answer.
        budget: How much the search may take.
        seed: Of all that is random.
        name: Of the search. A call with the name of a search that is there goes on with it.
        branch: Where to begin; by default the active branch.

    Returns:
        What was found; the same for the same seed, whether the search was interrupted or not (but for `num_fed`: what
        an interrupted process left in the store is not fed again).

    Raises:
        InvalidInputError: A search of this name was begun with another policy or seed; a function returned what makes
            no sense; the branch to begin from is empty; nothing would ever end the search.
        AlreadyExistsError: The session has a branch `name` that is no search.
        CorruptionError: The search's record cannot be read.
    """
    if is_done is None and not budget.is_bounded and getattr(policy, "max_depth", None) is None:
        raise InvalidInputError(
            f"nothing would end this search: give it is_done=, max_depth= or Budget(steps=...); found {policy!r}"
        )
    home = Home(session, name, repr(policy), seed)
    home.open(branch, is_done)
    return Runner(home, policy, expand, score, is_done, budget).run()


def look(session: SearchSession[B], name: str = NAME) -> SearchResult | None:
    """Return how far the search `name` of a session has come; None when there is none. Changes nothing.

    Raises:
        CorruptionError: The search's record cannot be read.
    """
    home = Home(session, name)
    return home.result() if home.read() else None


def tree_of(session: SearchSession[B], name: str = NAME) -> SearchTree | None:
    """Return the nodes of the search `name` of a session; None when there is none. Changes nothing.

    Raises:
        CorruptionError: The search's record cannot be read.
    """
    home = Home(session, name)
    return home.tree if home.read() else None


class Runner(Generic[B]):
    """One call of `run`."""

    def __init__(
        self,
        home: Home[B],
        policy: Policy,
        expand: Expand[B],
        score: Score[B],
        is_done: IsDone[B] | None,
        budget: Budget,
    ) -> None:
        """Search in `home`, which is open."""
        self._home = home
        self._policy = policy
        self._expand: Expand[B] = expand
        self._score = score
        self._is_done = is_done
        self._budget = budget

    def run(self) -> SearchResult:
        """Take steps until the policy or the budget ends them."""
        home = self._home
        while True:
            expansions, stop = self._next()
            if stop is not Reason.RUNNING:
                home.commit(dataclasses.replace(home.stored, stopped=stop))
                return home.result()
            try:
                self._step(expansions)
            except BaseException:
                home.tidy()
                raise

    def _next(self) -> tuple[Sequence[Expansion], Reason]:
        """Return what to expand, as far as the budget allows, or why to stop."""
        stored, budget = self._home.stored, self._budget
        wanted = self._policy.choose(self._home.tree)
        if not wanted:
            return (), Reason.FINISHED
        if budget.steps is not None and stored.num_steps >= budget.steps:
            return (), Reason.STEP_BUDGET
        affordable = self._within_tokens(wanted)
        if not affordable:
            return (), Reason.TOKEN_BUDGET
        affordable = self._within_nbytes(affordable)
        return affordable, Reason.RUNNING if affordable else Reason.BYTE_BUDGET

    def _within_tokens(self, wanted: Sequence[Expansion]) -> Sequence[Expansion]:
        if self._budget.tokens is None:
            return wanted
        left = self._budget.tokens - self._home.tree.num_spent
        if not isinstance(self._expand, Sampling):
            return wanted if left > 0 else ()
        # the pending token of the node, all new tokens but the last, and that one when the score wants its logits
        return afford(wanted, left // (self._expand.max_new_tokens + 1))

    def _within_nbytes(self, wanted: Sequence[Expansion]) -> Sequence[Expansion]:
        """Let go of leaves until the children fit; return as many of the expansions as then do."""
        limit, expand, home = self._budget.nbytes, self._expand, self._home
        if limit is None:
            return wanted
        child_nbytes = home.child_nbytes(expand.max_new_tokens) if isinstance(expand, Sampling) else 0
        needed = child_nbytes * count_children(wanted) or 1
        home.prune(make_room(home.tree, limit - needed, {each.node for each in wanted}))
        left = limit - home.tree.nbytes
        if not child_nbytes:
            return wanted if left > 0 else ()
        return afford(wanted, max(left, 0) // child_nbytes)

    def _step(self, expansions: Sequence[Expansion]) -> None:
        """Expand nodes: first the children, each a durable checkpoint, then the record that names them."""
        home, stored = self._home, self._home.stored
        nursery = Nursery(home.session, home.name, home.tree, stored.seed)
        children = [self._enter(child) for child in nursery.grow(expansions, self._expand)]
        home.commit(
            dataclasses.replace(
                stored,
                num_steps=stored.num_steps + 1,
                peak_nbytes=max(stored.peak_nbytes, home.nbytes_with(children)),
                stopped=Reason.RUNNING,
                nodes=self._after(expansions, children).nodes,
            )
        )
        logger.debug("search %s: step %d, %d nodes", home.name, home.stored.num_steps, len(home.stored.nodes))

    def _after(self, expansions: Sequence[Expansion], children: Sequence[Node]) -> SearchTree:
        """Return the tree with the children of a step, less what the policy and the budget let go of."""
        tree = self._home.tree.with_states({each.node for each in expansions}, NodeState.EXPANDED)
        tree = tree.with_nodes((*tree.nodes, *children))
        tree = tree.with_states(self._policy.prune(tree), NodeState.PRUNED)
        limit = self._budget.nbytes
        return tree if limit is None else tree.with_states(make_room(tree, limit), NodeState.PRUNED)

    def _enter(self, child: Child) -> Node:
        """Score a child and make it a checkpoint, or give it up."""
        branch = self._home.session.branch(child.name)
        num_own = branch.num_tokens - child.parent.num_tokens
        if num_own < 0:
            raise InvalidInputError(f"expand took {-num_own:,} tokens of its node off branch {child.name!r}")
        score = self._ask_score(branch) if num_own else -math.inf
        node = Node(
            number=child.number,
            parent=child.parent.number,
            index=child.index,
            depth=child.parent.depth + 1,
            checkpoint_id=b"",
            score=score,
            num_tokens=branch.num_tokens,
            num_fed=branch.num_fed,
            step=self._home.stored.num_steps + 1,
            state=NodeState.DEAD,
        )
        if score == -math.inf:
            return node
        is_done = self._is_done is not None and bool(self._is_done(branch))
        node = dataclasses.replace(node, state=NodeState.DONE if is_done else NodeState.OPEN)
        checkpoint_id = self._home.checkpoint(branch, node)
        return dataclasses.replace(node, checkpoint_id=checkpoint_id, num_fed=branch.num_fed)

    def _ask_score(self, branch: B) -> float:
        """Return the user's score, and take off what it appended."""
        num_tokens = branch.num_tokens
        score = float(self._score(branch))
        if branch.num_tokens < num_tokens:
            raise InvalidInputError(f"score took tokens off branch {branch.name!r}; fork it and work on the fork")
        if branch.num_tokens > num_tokens:
            branch.rewind(tokens=branch.num_tokens - num_tokens)
        if math.isnan(score) or score == math.inf:
            raise InvalidInputError(f"score of branch {branch.name!r} is {score}; give a number, or -inf to give it up")
        return score
