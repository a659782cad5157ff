"""One session's records: its checkpoints, and what is written of its branches.

Joins the tree in memory and the catalog on disk. Knows nothing of locks or of the user's handles.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from agentmem._lmdb import Environment, Level, WriteTransaction
from agentmem.checkpoints import BranchEntry, Checkpoints
from agentmem.errors import AgentMemError, CorruptionError, InvalidInputError, NotFoundError
from agentmem.explain.live import LiveLibrary
from agentmem.ids import CheckpointId, new_checkpoint_id
from agentmem.kv.hashing import pack_tokens
from agentmem.kv.record import Record
from agentmem.leases import Lease
from agentmem.marks import Marks, marks_between, own_marks
from agentmem.naming import Naming
from agentmem.runtime import Runtime
from agentmem.state import BranchState
from agentmem.tiers.device import Workspace
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import BranchRecord, Checkpoint, Move, SessionRecord
from agentmem.tree.fields import copy_extras
from agentmem.tree.tree import SessionTree

logger = logging.getLogger(__name__)

_NUM_TRIES = 3
"""How often a checkpoint is written whose blocks others remove meanwhile."""


class Ledger:
    """The records of one session.

    Attributes:
        record: The session.
        tree: Its checkpoints.
        lease: The right to write them.
        workspace: The session's buffer on the device.
        states: What the checkpoints stand for.
        damaged: The branches whose tokens cannot be had: by name, why not.
    """

    def __init__(
        self,
        runtime: Runtime,
        environment: Environment,
        catalog: Catalog,
        record: SessionRecord,
        tree: SessionTree,
        lease: Lease,
    ) -> None:
        """Keep the records of the session `record`, whose stored checkpoints are in `tree`; nothing without `lease`."""
        self.record = record
        self.tree = tree
        self.lease = lease
        self.workspace = Workspace(runtime.device)
        self.states = Checkpoints(runtime, self.workspace, tree)
        self.damaged: dict[str, str] = {}
        self._naming = Naming(runtime, self.states, tree)
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

    def close(self, entries: Iterable[BranchEntry]) -> None:
        """Give the device back, and what is held in memory of the session and of its branches `entries`."""
        for entry in entries:
            entry.state.let_go()
        self.states.clear()
        self.workspace.clear()
        self._catalog.forget(self.record.session_id)

    # -- writing

    def write_session(self) -> None:
        """Queue the session's record."""
        record = self.record = dataclasses.replace(self.record, updated_s=time.time())
        self._queue(lambda txn: self._catalog.put_session(txn, record))

    @property
    def is_current(self) -> bool:
        """Whether what was made of the records is KV of the model as it is now."""
        return self.record.fingerprint == self._runtime.identity.fingerprint

    def require_same_model(self) -> None:
        """Raise when the model changed in the middle of an operation, where it is too late to follow.

        Raises:
            InvalidInputError: It did.
        """
        if self._runtime.adapter.look() != self.record.fingerprint:
            raise InvalidInputError(
                f"the model's adapters or weights changed while session {self.record.name!r} was in use (`with ... "
                f"cache()`): leave that block first, then change the model"
            )

    def follow_model(self) -> None:
        """Note, and queue, that the session belongs to the model as it is now."""
        self.record = dataclasses.replace(self.record, fingerprint=self._runtime.identity.fingerprint)
        self.write_session()

    def activate(self, name: str) -> None:
        """Make a branch the active one, and queue that."""
        self.record = dataclasses.replace(self.record, active_branch=name)
        self.write_session()

    def write_branch(self, entry: BranchEntry, move: Move | None = None) -> None:
        """Queue a branch's record. Costs microseconds: the writer serialises a snapshot."""
        record, tokens, start = self.branch_record(entry), entry.state.tokens.fork(), self.tip_length(entry)

        def operation(txn: WriteTransaction) -> None:
            self._catalog.put_branch(txn, self.record.session_id, record, tokens, start)
            if move is not None:
                self._catalog.record_move(txn, self.record.session_id, move)

        self._queue(operation)

    def remove_branch(self, entry: BranchEntry) -> None:
        """Queue the removal of a branch's record."""
        move = self.move(entry, "drop", entry.tip, None)

        def operation(txn: WriteTransaction) -> None:
            with contextlib.suppress(NotFoundError):  # a fork that was interrupted before its record was queued
                self._catalog.remove_branch(txn, self.record.session_id, entry.name)
            self._catalog.record_move(txn, self.record.session_id, move)

        self._queue(operation)

    def drop_damaged(self, name: str) -> bool:
        """Queue the removal of a damaged branch; False when it is none. What it named stays until `agentmem repair`."""
        if self.damaged.pop(name, None) is None:
            return False
        session_id = self.record.session_id
        self._queue(lambda txn: self._catalog.remove_branch(txn, session_id, name))
        return True

    def no_branch(self, name: str, names: Sequence[str]) -> AgentMemError:
        """Return the error for a branch that the session does not have, or whose tokens cannot be had."""
        if name not in self.damaged:
            return NotFoundError(f"session {self.record.name!r} has no branch {name!r}; it has {', '.join(names)}")
        return CorruptionError(
            f"branch {name!r} of session {self.record.name!r} cannot be opened: {self.damaged[name]}. Resume another "
            f"branch ({', '.join(names) or 'none is left'}), fork an earlier checkpoint, or run `agentmem repair`"
        )

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
            marks=self._own_marks(entry),
            fingerprint=self._runtime.identity.fingerprint,
            is_auto=True,
            has_kv=False,
            created_s=time.time(),
        )
        self._queue(lambda txn: self._put(txn, checkpoint))
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
        fresh = Checkpoint(
            checkpoint_id=new_checkpoint_id(),
            session_id=self.record.session_id,
            parent_id=entry.tip,
            num_tokens=len(entry.state.tokens),
            tokens=pack_tokens(entry.state.tokens.slice(self.tip_length(entry))),
            marks=self._own_marks(entry),
            fingerprint=self._runtime.identity.fingerprint,
            message=message,
            extras=extras,
            is_auto=is_auto,
            created_s=time.time(),
        )
        checkpoint = self._write_with_kv(entry, fresh)[-1]
        self._enter(checkpoint, entry)
        entry.state.cool_points()
        return checkpoint

    def attach_kv(self, entry: BranchEntry) -> None:
        """Give the checkpoints up to the branch's tip that have no KV yet theirs, durably."""
        self._write_with_kv(entry, None)

    def move(self, entry: BranchEntry, operation: str, old: CheckpointId | None, new: CheckpointId | None) -> Move:
        """Return a row for the reflog."""
        return Move(branch=entry.name, operation=operation, old=old, new=new, time_s=time.time())

    def tip_length(self, entry: BranchEntry) -> int:
        """Return the tokens up to the branch's tip."""
        return 0 if entry.tip is None else self.tree.get(entry.tip).num_tokens

    # -- inside

    def _own_marks(self, entry: BranchEntry) -> Marks:
        """Return the own marks of the branch's next checkpoint."""
        above = self.tree.lineage(entry.tip) if entry.tip is not None else ()
        inherited = (mark for checkpoint in above for mark in checkpoint.marks)
        return own_marks(entry.state.marks, self.tip_length(entry), len(entry.state.tokens), inherited)

    def _write_with_kv(self, entry: BranchEntry, fresh: Checkpoint | None) -> list[Checkpoint]:
        """Write `fresh`, the branch's next tip, and the checkpoints up to it that lack KV, with theirs; return them.

        Blocks that gc of another process took meanwhile are saved again with them, or left out.
        """
        num_left, again = _NUM_TRIES, list[Record]()
        while True:
            num_left -= 1
            named = self._naming.name(entry, fresh)
            try:
                if named.records:
                    self._write_durably(named.records, None if fresh is None else entry, again)
                break
            except NotFoundError:
                self._naming.raise_failures(named, entry)
                if not num_left:
                    raise
                again = self._naming.unnamed(entry)
        for record in named.records if fresh is None else named.records[:-1]:
            self.tree.add(record)
        return named.records

    def _write_durably(self, checkpoints: list[Checkpoint], entry: BranchEntry | None, again: Sequence[Record]) -> None:
        """Write checkpoints, the branch that the last one is the new tip of, and records `again`, all or none."""
        session_id = self.record.session_id
        store, nbytes = self._runtime.blocks.disk.prepare(again)

        def operation(txn: WriteTransaction) -> None:
            self.lease.require(txn)
            store(txn)
            for checkpoint in checkpoints:
                self._put(txn, checkpoint)
            if entry is not None:
                tip = checkpoints[-1]
                record = dataclasses.replace(self.branch_record(entry), tip=tip.checkpoint_id)
                self._catalog.put_branch(txn, session_id, record, entry.state.tokens, tip.num_tokens)
                self._catalog.record_move(txn, session_id, self.move(entry, "checkpoint", entry.tip, tip.checkpoint_id))

        self._environment.submit(operation, level=Level.DURABLE, nbytes=nbytes).result()

    def _queue(self, operation: Callable[[WriteTransaction], None]) -> None:
        """Queue an operation, of which nothing happens once the lease was lost: the session's next verb says so."""

        def fenced(txn: WriteTransaction) -> None:
            if self.lease.is_held(txn):
                operation(txn)

        self._environment.submit(fenced, level=Level.QUEUED)

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
        num_tokens, tip_length = len(entry.state.tokens), self.tip_length(entry)
        return BranchRecord(
            name=entry.name,
            tip=entry.tip,
            num_pending=entry.state.num_pending,
            num_open=num_tokens - tip_length,
            marks=marks_between(entry.state.marks, tip_length, num_tokens),
            extras=copy_extras(entry.extras),
            created_s=entry.created_s,
            updated_s=time.time(),
        )
