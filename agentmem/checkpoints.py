"""The states that a session's checkpoints stand for: made from their records, shared with the branches above them.

Knows nothing of how records are written, of locks or of the user's handles.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from agentmem.ids import BlockDigest, CheckpointId
from agentmem.kv.hashing import unpack_tokens
from agentmem.reasons import Reason
from agentmem.runtime import Runtime
from agentmem.state import BranchState
from agentmem.tiers.device import Workspace
from agentmem.tiers.states import LayerState
from agentmem.tree.checkpoint import Checkpoint
from agentmem.tree.tree import SessionTree


@dataclass(slots=True)
class BranchEntry:
    """What is written of a branch.

    Attributes:
        state: Its tokens and KV.
        tip: The checkpoint it points at; None before the first.
        extras: The user's metadata.
        created_s: Unix time.
    """

    state: BranchState
    tip: CheckpointId | None
    extras: dict[str, object]
    created_s: float

    @contextlib.contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """Leave the branch as it is when anything is raised inside; what is computed meanwhile is kept in the store."""
        state, tip, extras = self.state.snapshot(), self.tip, dict(self.extras)
        num_tokens = len(self.state.tokens)
        try:
            yield
        except BaseException:
            if len(self.state.tokens) > num_tokens:
                self.state.give_up(num_tokens)
            self.state.put_back(state)
            self.tip, self.extras = tip, extras
            raise
        self.state.note_point()

    @property
    def name(self) -> str:
        """The branch's name."""
        return self.state.name


class Checkpoints:
    """The states of one session's checkpoints, as far as somebody has asked for them."""

    def __init__(self, runtime: Runtime, workspace: Workspace, tree: SessionTree) -> None:
        """Make states of the checkpoints in `tree`, whose KV is in `workspace` while it is on the device."""
        self._runtime = runtime
        self._workspace = workspace
        self._tree = tree
        self._states: dict[CheckpointId, BranchState] = {}

    def new_state(self, name: str) -> BranchState:
        """Return the state of a branch without tokens."""
        return BranchState(self._runtime, self._workspace, name)

    def state_of(self, checkpoint_id: CheckpointId) -> BranchState:
        """Return the state that a checkpoint stands for; fork it before changing it."""
        missing: list[Checkpoint] = []
        for checkpoint in self._tree.lineage(checkpoint_id):
            if checkpoint.checkpoint_id in self._states:
                break
            missing.append(checkpoint)
        for checkpoint in reversed(missing):
            self._states[checkpoint.checkpoint_id] = self._build(checkpoint)
        return self._states[checkpoint_id]

    def warm_up(self, entry: BranchEntry) -> None:
        """Let a branch take over what its checkpoints have computed, or have on the device, and it has not."""
        if entry.tip is None:
            return
        entry.state.adopt(self.state_of(entry.tip))
        for checkpoint in self._tree.lineage(entry.tip):
            if entry.state.is_hot:
                return
            state = self._states.get(checkpoint.checkpoint_id)
            if state is not None:
                entry.state.adopt_cursor(state)

    def note_progress(self, entry: BranchEntry) -> None:
        """Let the checkpoints of a branch know what the branch has computed, or has on the device, of their tokens."""
        if entry.tip is None:
            return
        for checkpoint in self._tree.lineage(entry.tip):
            state = self._states.get(checkpoint.checkpoint_id)
            if state is None:
                continue
            if state.num_computed < entry.state.reach(checkpoint.num_tokens):
                state = entry.state.fork(state.name)
                state.truncate(checkpoint.num_tokens)
                self._states[checkpoint.checkpoint_id] = state
            elif state.cursor.length < state.num_kv:
                state.adopt_cursor(entry.state)
            else:
                return

    def forget_all_but(self, kept: Iterable[BranchEntry]) -> None:
        """Drop the states of checkpoints that no branch reaches: whoever forks one by its id makes it again.

        Those that an edit moved KV from are only cooled: the next edit moves it from there again.
        """
        entries = list(kept)
        origins = {mark.origin[0] for entry in entries for mark in entry.state.marks if mark.origin is not None}
        for checkpoint_id in self._states.keys() - self.passed(entries):
            if checkpoint_id in origins:
                self._states[checkpoint_id].save_tail()
                self._states[checkpoint_id].cool()
            else:
                del self._states[checkpoint_id]

    def cool_all_but(self, hot: Iterable[BranchEntry]) -> None:
        """Let the device forget the checkpoints that only cold branches pass through, saving what is not saved yet."""
        for checkpoint_id in self._states.keys() - self.passed(hot):
            if self._tree.get(checkpoint_id).has_kv:
                del self._states[checkpoint_id]  # its record says how to make it again
            elif self._states[checkpoint_id].cursor.length:
                self._states[checkpoint_id].save()
                self._states[checkpoint_id].cool()

    def enter(self, checkpoint_id: CheckpointId, state: BranchState) -> None:
        """Let a new checkpoint stand for a state, which nobody else changes."""
        self._states[checkpoint_id] = state

    def forget(self, removed: Iterable[CheckpointId]) -> None:
        """Drop the states of checkpoints that are no more."""
        for checkpoint_id in removed:
            self._states.pop(checkpoint_id, None)

    def held(self, entries: Iterable[BranchEntry]) -> set[BlockDigest]:
        """Return every record that branches or states of checkpoints need, named on disk or not yet.

        May be called while another thread works on the session.
        """
        states = [*list(self._states.values()), *(entry.state for entry in entries)]
        found: set[BlockDigest | None] = set()
        for state in states:
            found.update(block.digest for block in state.saved_blocks())
            found.update(mark.payload for mark in state.marks)
            for each in (*state.saved_states(), state.live, state.before):
                found.update(() if each is None or each.digests is None else each.digests)
        return {digest for digest in found if digest is not None}

    def clear(self) -> None:
        """Forget all states."""
        self._states.clear()

    def passed(self, entries: Iterable[BranchEntry]) -> set[CheckpointId]:
        """Return the checkpoints that the branches pass through."""
        passed: set[CheckpointId] = set()
        for entry in entries:
            for checkpoint in self._tree.lineage(entry.tip) if entry.tip is not None else ():
                if checkpoint.checkpoint_id in passed:
                    break
                passed.add(checkpoint.checkpoint_id)
        return passed

    # -- inside

    def _build(self, checkpoint: Checkpoint) -> BranchState:
        """Make the state of a stored checkpoint whose parent's state is known."""
        runtime = self._runtime
        parent = None if checkpoint.parent_id is None else self._states[checkpoint.parent_id]
        state = self.new_state(checkpoint.message) if parent is None else parent.fork(checkpoint.message)
        state.extend(unpack_tokens(checkpoint.tokens), checkpoint.marks)
        num_fed = checkpoint.num_tokens - checkpoint.num_pending
        state.lost_stop = max(state.lost_stop, num_fed)
        if checkpoint.fingerprint != runtime.identity.fingerprint:
            if num_fed > state.num_computed:
                state.lack(Reason.FOREIGN_MODEL)
        elif not checkpoint.has_kv:
            state.lack(Reason.NOT_SAVED)
        elif checkpoint.first_block > len(state.blocks):
            state.lack(Reason.MISSING)
        else:
            self._name_blocks(state, checkpoint)
        return state

    def _name_blocks(self, state: BranchState, checkpoint: Checkpoint) -> None:
        size, blocks = self._runtime.adapter.spec.block_size, self._runtime.blocks
        first = checkpoint.first_block
        state.regime = checkpoint.regime
        if first < len(state.blocks):
            state.truncate_kv(first * size)
        state.blocks.extend(
            blocks.known(ref.block_hash, (first + index) * size, (first + index + 1) * size, ref.digest)
            for index, ref in enumerate(checkpoint.blocks)
        )
        start, num_fed = len(state.blocks) * size, checkpoint.num_tokens - checkpoint.num_pending
        tail = checkpoint.tail
        state.tail = None if tail is None else blocks.known(tail.block_hash, start, num_fed, tail.digest)
        state.know(
            num_fed if tail is not None else min(start, num_fed),
            [LayerState(ref.position, digests=ref.digests) for ref in checkpoint.states],
        )
