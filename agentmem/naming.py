"""Give checkpoints the names of their KV: of the blocks and layer states that they have and their ancestors have not.

Saves what is not saved yet. Knows nothing of how records are written.
"""

import dataclasses
from dataclasses import dataclass, field

from agentmem.checkpoints import BranchEntry, Checkpoints
from agentmem.ids import CheckpointId
from agentmem.kv.record import Record
from agentmem.resaving import Resaving
from agentmem.runtime import Runtime
from agentmem.state import BranchState
from agentmem.tiers.blocks import SealedBlock
from agentmem.tiers.states import LayerState
from agentmem.tree.checkpoint import BlockRef, Checkpoint, StateRef
from agentmem.tree.tree import SessionTree


@dataclass(frozen=True, slots=True)
class Named:
    """Checkpoints that are to be written.

    Attributes:
        records: Their records, oldest first.
        saved: The blocks that they name.
    """

    records: list[Checkpoint] = field(default_factory=list)
    saved: list[SealedBlock] = field(default_factory=list)


class Naming:
    """Names the KV of one session's checkpoints."""

    def __init__(self, runtime: Runtime, states: Checkpoints, tree: SessionTree) -> None:
        """Name what `states` says that the checkpoints in `tree` stand for."""
        self._runtime = runtime
        self._states = states
        self._tree = tree

    def name(self, entry: BranchEntry, fresh: Checkpoint | None) -> Named:
        """Return new records for the checkpoints up to a branch's tip that have no KV yet, and for its next tip."""
        named = Named()
        for checkpoint in self._without_kv(entry.tip):
            state = self._states.state_of(checkpoint.checkpoint_id)
            named.records.append(self._attached(checkpoint, self._parent(named, checkpoint), state, named.saved))
        if fresh is not None:
            named.records.append(self._attached(fresh, self._parent(named, fresh), entry.state, named.saved))
        return named

    def raise_failures(self, named: Named, entry: BranchEntry) -> None:
        """Raise the error for which a block or layer state did not reach the disk, if any."""
        self._runtime.blocks.raise_failures(named.saved)
        for state in entry.state.points:
            self._runtime.states.raise_failure(state)

    def unnamed(self, entry: BranchEntry) -> list[Record]:
        """Return what gc of another process may take, or has taken, before it is named (see `Resaving`)."""
        resaving = Resaving(self._runtime)
        for checkpoint in self._without_kv(entry.tip):
            state = self._states.state_of(checkpoint.checkpoint_id)
            state.adopt_cursor(entry.state)
            resaving.collect(state)
        resaving.collect(entry.state)
        return list(resaving.records.values())

    def _parent(self, named: Named, checkpoint: Checkpoint) -> Checkpoint | None:
        if named.records or checkpoint.parent_id is None:
            return named.records[-1] if named.records else None
        return self._tree.get(checkpoint.parent_id)

    def _without_kv(self, tip: CheckpointId | None) -> list[Checkpoint]:
        """Return the checkpoints from `tip` up that have no KV yet and could get it, oldest first."""
        found: list[Checkpoint] = []
        for checkpoint in self._tree.lineage(tip) if tip is not None else ():
            if checkpoint.has_kv or checkpoint.fingerprint != self._runtime.identity.fingerprint:
                break
            found.append(checkpoint)
        return found[::-1]

    def _attached(
        self, checkpoint: Checkpoint, parent: Checkpoint | None, state: BranchState, saved: list[SealedBlock]
    ) -> Checkpoint:
        """Return the record with the names of its KV, as far as there is any; add its blocks to `saved`."""
        state.save()
        tail = state.save_tail()
        first = (
            0
            if parent is None
            else min(
                state.blocks.common_prefix(self._states.state_of(parent.checkpoint_id).blocks),
                self._num_recorded_blocks(parent),
            )
        )
        own = state.blocks.slice(first)
        saved.extend([*own, *([] if tail is None else [tail])])
        num_saved = state.num_kv if tail is not None else len(state.blocks) * state.spec.block_size
        ours = parent if parent is not None and parent.fingerprint == checkpoint.fingerprint else None
        inherited = self._inherited_states(ours, first * state.spec.block_size)
        states = [each for each in state.saved_states() if _is_own_state(each, ours, inherited)]
        for each in states:
            self._runtime.states.save(each)
        return dataclasses.replace(
            checkpoint,
            first_block=first,
            blocks=tuple(_ref(block) for block in own),
            tail=None if tail is None else _ref(tail),
            states=tuple(StateRef(each.position, each.digests) for each in states if each.digests is not None),
            regime=state.regime,
            num_pending=checkpoint.num_tokens - num_saved,
            has_kv=True,
        )

    def _inherited_states(self, parent: Checkpoint | None, num_shared: int) -> set[StateRef]:
        """Return the layer states that a child of `parent` need not name: those before the tokens it shares end.

        Those of the checkpoints that end before the parent's first own token are not looked for: no child names them.
        """
        if parent is None or not self._runtime.adapter.spec.states:
            return set()
        is_cut = num_shared < self._num_recorded_blocks(parent) * self._runtime.adapter.spec.block_size
        return {state for state in parent.states if not is_cut or state.position <= num_shared}

    def _num_recorded_blocks(self, checkpoint: Checkpoint) -> int:
        """Return how many leading blocks the checkpoint's record names, through its ancestors, for this model."""
        is_ours = checkpoint.has_kv and checkpoint.fingerprint == self._runtime.identity.fingerprint
        return checkpoint.first_block + len(checkpoint.blocks) if is_ours else 0


def _is_own_state(state: LayerState, parent: Checkpoint | None, inherited: set[StateRef]) -> bool:
    """Say whether a layer state is to be named by a child of `parent` rather than by it or its ancestors.

    One at a place that the parent has a state for, but another one or one that the child does not inherit, was computed
    again after a loss.
    """
    if parent is None or state.position > parent.num_tokens - parent.num_pending:
        return True
    is_of_parent = any(each.position == state.position > 0 for each in parent.states)
    return is_of_parent and state.digests is not None and StateRef(state.position, state.digests) not in inherited


def _ref(block: SealedBlock) -> BlockRef:
    if block.digest is None:
        raise RuntimeError(f"block [{block.start}, {block.stop}) was not saved before its checkpoint")
    return BlockRef(block.block_hash, block.digest)
