"""A search's place in a session: the root's branch with the record, and the branches of the nodes below it."""

import contextlib
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Generic

from agentmem.errors import AlreadyExistsError, ClosedError, InvalidInputError
from agentmem.search.node import Node, NodeState
from agentmem.search.protocols import B, IsDone, SearchSession
from agentmem.search.result import SearchResult
from agentmem.search.stored import KEY, Stored, is_marked, mark, pack, unpack
from agentmem.search.tree import SearchTree

SCORE = "score"
"""Where in its extras a node's score is; `Session.log` shows it."""

MESSAGE = "message"
"""Where in its extras an `expand` may say what its child's checkpoint is to be called."""


class Home(Generic[B]):
    """What one search has in a session.

    Attributes:
        session: The session.
        name: The search's name.
        stored: What the record says.
        tree: Its nodes.
    """

    def __init__(self, session: SearchSession[B], name: str, policy: str = "", seed: int = 0) -> None:
        """Name a search; `open` or `read` finds it."""
        if "/" in name:
            raise InvalidInputError(f"search name {name!r}: give one without '/', which stands before a node's number")
        self.session = session
        self.name = name
        self.stored = Stored(name=name, policy=policy, seed=seed, nodes=())
        spec = session.adapter.spec
        self._token_nbytes, self._state_nbytes = spec.token_nbytes, spec.state_nbytes
        self.tree = self._tree_of(self.stored)

    def read(self) -> bool:
        """Read the record; say whether there is one."""
        if self.name not in self.session.branches:
            return False
        stored = unpack(self.session.branch(self.name).extras.get(KEY), self.name)
        if stored is not None:
            self._know(stored)
        return stored is not None

    def open(self, start: str | None, is_done: IsDone[B] | None) -> None:
        """Read the record and put right what is not as it says, or begin a search at the branch `start`.

        Raises:
            InvalidInputError: The search was begun in another way, or the branch to begin from is empty.
            AlreadyExistsError: A branch that is no search has its name.
        """
        policy, seed = self.stored.policy, self.stored.seed
        if not self.read():
            self._begin(start)
        elif (self.stored.policy, self.stored.seed) != (policy, seed):
            raise InvalidInputError(
                f"search {self.name!r} was begun as {self.stored.policy} with seed {self.stored.seed}; found {policy} "
                f"with seed {seed}: ask for the same again, or give the new search another name="
            )
        else:
            self.tidy()
            self._know(replace(self.stored, nodes=self._asked_again(is_done)))

    def checkpoint(self, branch: B, node: Node) -> bytes:
        """Make a node of a branch: a durable checkpoint with its score; return the checkpoint's id."""
        message = branch.extras.pop(MESSAGE, self._branch_name(node.number))
        branch.extras.update({KEY: mark(self.name, node), SCORE: node.score})
        return branch.checkpoint(str(message)).checkpoint_id

    def commit(self, stored: Stored) -> None:
        """Write the record, then drop the branches of nodes that it no longer keeps.

        All that was written before is on disk when the record is.
        """
        old = self.stored.nodes
        self._write(stored)
        branches = set(self.session.branches)
        for node in stored.nodes:
            name = self._branch_name(node.number)
            is_news = node.number >= len(old) or old[node.number].is_kept
            if is_news and not node.is_kept and name in branches:
                self._drop_left_over(self.session.branch(name))

    def nbytes_with(self, children: Sequence[Node]) -> int:
        """Return the bytes of KV of the kept nodes and of the children of a step, dead or not."""
        tree = self.tree.with_nodes((*self.tree.nodes, *children))
        return self.tree.nbytes + sum(tree.own_nbytes(child.number) for child in children)

    def prune(self, numbers: Collection[int]) -> None:
        """Let go of nodes: in the record first, then in the session."""
        if numbers:
            self.commit(replace(self.stored, nodes=self.tree.with_states(numbers, NodeState.PRUNED).nodes))

    def tidy(self) -> None:
        """Drop the branches of nodes that the record does not know or keep; note those that somebody else dropped."""
        with contextlib.suppress(ClosedError):  # the next process will do it
            for branch in map(self.session.branch, self.session.branches):
                self._drop_left_over(branch)
            self._note_lost()

    def child_nbytes(self, num_tokens: int) -> int:
        """Return the bytes of KV of a child with `num_tokens` tokens of its own."""
        return num_tokens * self._token_nbytes + self._state_nbytes

    def result(self) -> SearchResult:
        """Return how far the search has come."""
        stored, best = self.stored, self.tree.best
        return SearchResult(
            name=self.name,
            best=self._branch_name(best.number),
            score=best.score,
            is_done=best.state is NodeState.DONE,
            stopped=stored.stopped,
            num_steps=stored.num_steps,
            num_fed=sum(node.num_fed for node in stored.nodes),
            num_nodes=len(stored.nodes),
            num_dead=sum(node.state is NodeState.DEAD for node in stored.nodes),
            nbytes=self.tree.nbytes,
            peak_nbytes=stored.peak_nbytes,
        )

    # -- inside

    def _begin(self, start: str | None) -> None:
        """Fork the root's branch, make its checkpoint, write the first record. A process may have died in between."""
        session = self.session
        source = session.active if start is None else session.branch(start)
        if not source.num_tokens:
            raise InvalidInputError(f"branch {source.name!r} has no tokens to search from; append some first")
        if self.name not in session.branches:
            root = session.fork(self.name, branch=source.name)
        else:
            root = session.branch(self.name)
            self._check_is_begun(root, source)
        root.extras[KEY] = mark(self.name)
        root.extras.pop(SCORE, None)
        root.append(())
        checkpoint_id = root.checkpoint(f"{self.name}: root").checkpoint_id
        node = Node(
            number=0,
            parent=None,
            index=0,
            depth=0,
            checkpoint_id=checkpoint_id,
            score=float("-inf"),
            num_tokens=root.num_tokens,
            num_fed=0,
            step=0,
            state=NodeState.OPEN,
        )
        stored = replace(self.stored, nodes=(node,))
        self.commit(replace(stored, peak_nbytes=self._tree_of(stored).nbytes))

    def _write(self, stored: Stored) -> None:
        root = self.session.branch(self.name)
        before = root.extras.get(KEY)
        root.extras[KEY] = pack(stored)
        try:
            root.append(())  # nothing, and so writes the branch's record with its extras
        except BaseException:
            root.extras[KEY] = before
            raise
        self._know(stored)

    def _check_is_begun(self, root: B, source: B) -> None:
        """Tell a branch that a dying process forked to search below it from one of the user's."""
        is_marked_root = is_marked(root.extras.get(KEY), self.name)
        is_fresh_fork = root.num_tokens == source.num_tokens and _tip(root) == _tip(source)
        if not is_marked_root and not is_fresh_fork:
            raise AlreadyExistsError(
                f"the session has a branch {self.name!r} that is no search: give the search another name="
            )

    def _asked_again(self, is_done: IsDone[B] | None) -> tuple[Node, ...]:
        """Return the nodes, their leaves open or done as `is_done` says now: it may have another goal."""

        def state(node: Node) -> NodeState:
            if node.state not in {NodeState.OPEN, NodeState.DONE} or node.parent is None:
                return node.state
            branch = self.session.branch(self._branch_name(node.number))
            return NodeState.DONE if is_done is not None and is_done(branch) else NodeState.OPEN

        return tuple(replace(node, state=state(node)) for node in self.stored.nodes)

    def _drop_left_over(self, branch: B) -> None:
        """Drop a branch if it is a node's that the record does not keep, unless the user has put it to use.

        Tokens of it that no checkpoint has are taken off first, so that nothing is kept of them.
        """
        if not self._is_left_over(branch):
            return
        if branch.tip is not None:
            branch.rewind(tokens=branch.num_tokens - branch.tip.num_tokens)
        if self.session.active.name == branch.name:
            self.session.switch(self.name)
        self.session.drop(branch.name)

    def _is_left_over(self, branch: B) -> bool:
        match = re.fullmatch(rf"{re.escape(self.name)}/(\d+)", branch.name)
        if match is None or not is_marked(branch.extras.get(KEY), self.name):
            return False
        number = int(match[1])
        if number >= len(self.stored.nodes) or self.stored.nodes[number].state is NodeState.DEAD:
            return True
        node = self.stored.nodes[number]
        is_in_use = branch.num_tokens != node.num_tokens or branch.name == self.session.active.name
        return not node.is_kept and not is_in_use

    def _note_lost(self) -> None:
        """Count leaves whose branch the user dropped as pruned."""
        branches = set(self.session.branches)
        while True:
            lost = {node.number for node in self.tree.leaves if self._branch_name(node.number) not in branches}
            if not lost:
                return
            self._know(replace(self.stored, nodes=self.tree.with_states(lost, NodeState.PRUNED).nodes))

    def _branch_name(self, number: int) -> str:
        return f"{self.name}/{number}" if number else self.name

    def _know(self, stored: Stored) -> None:
        self.stored, self.tree = stored, self._tree_of(stored)

    def _tree_of(self, stored: Stored) -> SearchTree:
        return SearchTree(stored.nodes, token_nbytes=self._token_nbytes, state_nbytes=self._state_nbytes)


def _tip(branch: B) -> bytes | None:
    return None if branch.tip is None else branch.tip.checkpoint_id
