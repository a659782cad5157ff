"""One session's records: its checkpoints, and what is written of its branches.

Joins the tree in memory and the catalog on disk. Knows nothing of locks or of the user's handles.
"""

import dataclasses
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future

from agentmem._lmdb import Environment, Level, WriteTransaction
from agentmem.checkpoints import BranchEntry, Checkpoints
from agentmem.errors import NotFoundError
from agentmem.explain.live import LiveLibrary
from agentmem.ids import CheckpointId, new_checkpoint_id
from agentmem.kv.hashing import pack_tokens
from agentmem.marks import marks_between
from agentmem.runtime import Runtime
from agentmem.state import BranchState
from agentmem.tiers.blockstore import SealedBlock
from agentmem.tiers.device import Workspace
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import BlockRef, BranchRecord, Checkpoint, Move, SessionRecord, StateRef
from agentmem.tree.fields import copy_extras
from agentmem.tree.tree import SessionTree

logger = logging.getLogger(__name__)


class Ledger:
    """The records of one session.

    Attributes:
        record: The session.
        tree: Its checkpoints.
        workspace: The session's buffer on the device.
        states: What the checkpoints stand for.
    """

    def __init__(
        self, runtime: Runtime, environment: Environment, catalog: Catalog, record: SessionRecord, tree: SessionTree
    ) -> None:
        """Keep the records of the session `record`, whose stored checkpoints are in `tree`."""
        self.record = record
        self.tree = tree
        self.workspace = Workspace(runtime.device)
        self.states = Checkpoints(runtime, self.workspace, tree)
        self._runtime = runtime
        self._environment = environment
        self._catalog = catalog

    def demote(self, state: BranchState, first: int) -> None:
        """Save a state's KV and let the device forget it; blocks from `first` on stay in the host tier, if they fit."""
        state.save()
        self._runtime.blocks.demote(state.saved_blocks()[first:], self.workspace, state.cursor)
        state.cool()

    def library(self, entries: Sequence[BranchEntry]) -> LiveLibrary:
        """Return the store as it stands, for explaining what a prompt would reuse.

        Args:
            entries: The session's branches, the one that the prompt is compared with first.
        """
        return LiveLibrary(
            runtime=self._runtime,
            environment=self._environment,
            catalog=self._catalog,
            record=self.record,
            tree=self.tree,
            states=self.states,
            entries=entries,
        )

    def close(self) -> None:
        """Give the device back, and what is held in memory of the session."""
        self.states.clear()
        self.workspace.clear()
        self._catalog.forget(self.record.session_id)

    # -- writing

    def write_session(self) -> None:
        """Queue the session's record."""
        record = self.record = dataclasses.replace(self.record, updated_s=time.time())
        self._environment.submit(lambda txn: self._catalog.put_session(txn, record), level=Level.QUEUED)

    @property
    def is_current(self) -> bool:
        """Whether what was made of the records is KV of the model as it is now."""
        return self.record.fingerprint == self._runtime.identity.fingerprint

    def follow_model(self) -> None:
        """Note, and queue, that the session belongs to the model as it is now."""
        self.record = dataclasses.replace(self.record, fingerprint=self._runtime.identity.fingerprint)
        self.write_session()

    def activate(self, name: str) -> None:
        """Make a branch the active one, and queue that."""
        self.record = dataclasses.replace(self.record, active_branch=name)
        self.write_session()

    def write_branch(self, entry: BranchEntry, move: Move | None = None) -> Future[None]:
        """Queue a branch's record. Costs microseconds: the writer serialises a snapshot."""
        return self._catalog.submit_branch(
            self.record.session_id,
            self.branch_record(entry),
            entry.state.tokens.fork(),
            self.tip_length(entry),
            move=move,
        )

    def remove_branch(self, entry: BranchEntry) -> None:
        """Queue the removal of a branch's record."""
        move = self.move(entry, "drop", entry.tip, None)

        def operation(txn: WriteTransaction) -> None:
            self._catalog.remove_branch(txn, self.record.session_id, entry.name)
            self._catalog.record_move(txn, self.record.session_id, move)

        self._environment.submit(operation, level=Level.QUEUED)

    def mark(self, entry: BranchEntry) -> Checkpoint:
        """Make an automatic checkpoint of the branch's tokens, in microseconds: its KV is attached later."""
        state = entry.state
        parent_length = self.tip_length(entry)
        checkpoint = Checkpoint(
            checkpoint_id=new_checkpoint_id(),
            session_id=self.record.session_id,
            parent_id=entry.tip,
            num_tokens=len(state.tokens),
            tokens=pack_tokens(state.tokens.slice(parent_length)),
            num_pending=state.num_pending,
            marks=marks_between(state.marks, parent_length, len(state.tokens)),
            fingerprint=self._runtime.identity.fingerprint,
            is_auto=True,
            has_kv=False,
            created_s=time.time(),
        )
        self._environment.submit(lambda txn: self._put(txn, checkpoint), level=Level.QUEUED)
        self._enter(checkpoint, entry)
        return checkpoint

    def commit(
        self, entry: BranchEntry, *, message: str, extras: dict[str, object], is_auto: bool = False
    ) -> Checkpoint:
        """Make a checkpoint of the branch, with its KV, and return when it is on disk for good.

        Checkpoints before it that have no KV yet get theirs in the same transaction.

        Raises:
            StorageFullError: The disk has no room; the branch is unchanged, and may be committed later.
            ReadOnlyError: The store cannot be written any more.
        """
        state = entry.state
        saved: list[SealedBlock] = []
        records = self._attach_ancestors(entry.tip, saved)
        fresh = Checkpoint(
            checkpoint_id=new_checkpoint_id(),
            session_id=self.record.session_id,
            parent_id=entry.tip,
            num_tokens=len(state.tokens),
            tokens=pack_tokens(state.tokens.slice(self.tip_length(entry))),
            marks=marks_between(state.marks, self.tip_length(entry), len(state.tokens)),
            fingerprint=self._runtime.identity.fingerprint,
            message=message,
            extras=extras,
            is_auto=is_auto,
            created_s=time.time(),
        )
        parent = records[-1] if records else None if entry.tip is None else self.tree.get(entry.tip)
        checkpoint = self._attached(fresh, parent, state, saved)
        self._write_durably([*records, checkpoint], saved, entry)
        for record in records:
            self.tree.add(record)
        self._enter(checkpoint, entry)
        state.cool_points()
        return checkpoint

    def attach_kv(self, entry: BranchEntry) -> None:
        """Give the checkpoints up to the branch's tip that have no KV yet theirs, durably."""
        saved: list[SealedBlock] = []
        records = self._attach_ancestors(entry.tip, saved)
        if records:
            self._write_durably(records, saved, None)
        for record in records:
            self.tree.add(record)

    def move(self, entry: BranchEntry, operation: str, old: CheckpointId | None, new: CheckpointId | None) -> Move:
        """Return a row for the reflog."""
        return Move(branch=entry.name, operation=operation, old=old, new=new, time_s=time.time())

    def tip_length(self, entry: BranchEntry) -> int:
        """Return the tokens up to the branch's tip."""
        return 0 if entry.tip is None else self.tree.get(entry.tip).num_tokens

    # -- inside

    def _without_kv(self, tip: CheckpointId | None) -> list[Checkpoint]:
        """Return the checkpoints from `tip` up that have no KV yet and could get it, oldest first."""
        found: list[Checkpoint] = []
        for checkpoint in self.tree.lineage(tip) if tip is not None else ():
            if checkpoint.has_kv or checkpoint.fingerprint != self._runtime.identity.fingerprint:
                break
            found.append(checkpoint)
        return found[::-1]

    def _attach_ancestors(self, tip: CheckpointId | None, saved: list[SealedBlock]) -> list[Checkpoint]:
        """Return new records for the checkpoints up to `tip` that have no KV yet, oldest first."""
        records: list[Checkpoint] = []
        for checkpoint in self._without_kv(tip):
            parent = records[-1] if records else None
            if parent is None and checkpoint.parent_id is not None:
                parent = self.tree.get(checkpoint.parent_id)
            records.append(self._attached(checkpoint, parent, self.states.state_of(checkpoint.checkpoint_id), saved))
        return records

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
                state.blocks.common_prefix(self.states.state_of(parent.checkpoint_id).blocks),
                self._num_recorded_blocks(parent),
            )
        )
        own = state.blocks.slice(first)
        saved.extend([*own, *([] if tail is None else [tail])])
        num_saved = state.num_kv if tail is not None else len(state.blocks) * state.spec.block_size
        ours = parent if parent is not None and parent.fingerprint == checkpoint.fingerprint else None
        states = [each for each in state.saved_states() if is_own_state(each.position, ours)]
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

    def _num_recorded_blocks(self, checkpoint: Checkpoint) -> int:
        """Return how many leading blocks the checkpoint's record names, through its ancestors, for this model."""
        is_ours = checkpoint.has_kv and checkpoint.fingerprint == self._runtime.identity.fingerprint
        return checkpoint.first_block + len(checkpoint.blocks) if is_ours else 0

    def _write_durably(
        self, checkpoints: list[Checkpoint], saved: list[SealedBlock], entry: BranchEntry | None
    ) -> None:
        """Write checkpoints, and the branch that the last one is the new tip of, all or none."""
        session_id = self.record.session_id

        def operation(txn: WriteTransaction) -> None:
            for checkpoint in checkpoints:
                self._put(txn, checkpoint)
            if entry is not None:
                tip = checkpoints[-1]
                record = dataclasses.replace(self.branch_record(entry), tip=tip.checkpoint_id)
                self._catalog.put_branch(txn, session_id, record, entry.state.tokens, tip.num_tokens)
                self._catalog.record_move(txn, session_id, self.move(entry, "checkpoint", entry.tip, tip.checkpoint_id))

        try:
            self._environment.submit(operation, level=Level.DURABLE).result()
        except NotFoundError:
            self._runtime.blocks.raise_failures(saved)  # why a block did not reach the disk
            for state in entry.state.points if entry is not None else ():
                self._runtime.states.raise_failure(state)
            raise

    def _put(self, txn: WriteTransaction, checkpoint: Checkpoint) -> None:
        disk = self._runtime.blocks.disk
        old = self._catalog.put_checkpoint(txn, checkpoint)
        disk.retain(txn, checkpoint.digests())
        if old is not None:
            disk.release(txn, old.digests())

    def _enter(self, checkpoint: Checkpoint, entry: BranchEntry) -> None:
        self.tree.add(checkpoint)
        self.states.enter(checkpoint.checkpoint_id, entry.state.fork(checkpoint.message))
        entry.tip = checkpoint.checkpoint_id

    def branch_record(self, entry: BranchEntry) -> BranchRecord:
        """Return what is stored of a branch, but for its open tokens."""
        return BranchRecord(
            name=entry.name,
            tip=entry.tip,
            num_pending=entry.state.num_pending,
            num_open=len(entry.state.tokens) - self.tip_length(entry),
            marks=marks_between(entry.state.marks, self.tip_length(entry), len(entry.state.tokens)),
            extras=copy_extras(entry.extras),
            created_s=entry.created_s,
            updated_s=time.time(),
        )


def is_own_state(position: int, parent: Checkpoint | None) -> bool:
    """Say whether a layer state at `position` belongs to a child of `parent` rather than to it or its ancestors."""
    return parent is None or position > parent.num_tokens - parent.num_pending


def _ref(block: SealedBlock) -> BlockRef:
    if block.digest is None:
        raise RuntimeError(f"block [{block.start}, {block.stop}) was not saved before its checkpoint")
    return BlockRef(block.block_hash, block.digest)
