"""`rm`: give up a branch or a session, after saying what goes and how it comes back. Without torch."""

import argparse
import dataclasses
import time
from array import array
from dataclasses import dataclass

from agentmem._lmdb import Environment, Level, ReadTransaction, Table, WriteTransaction
from agentmem.cli.result import ExitCode, Result
from agentmem.cli.source import open_view, split_target
from agentmem.cli.text import count, facts, plain
from agentmem.config import Config
from agentmem.errors import CorruptionError, InvalidInputError
from agentmem.ids import CheckpointId, SessionId, new_checkpoint_id, short
from agentmem.kv.hashing import pack_tokens
from agentmem.tree import rows
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import BranchRecord, Checkpoint, Move, SessionRecord
from agentmem.view import StoreView


@dataclass(frozen=True, slots=True, kw_only=True)
class _Removal:
    """What goes, and how it comes back.

    Attributes:
        session: The session.
        branch: The branch of it; None for the whole session.
        num_tokens: Tokens of the branch, or of all checkpoints of the session; None when that cannot be read.
        num_branches: Branches that go.
        checkpoint_id: Where the branch ended; None for a session or an empty branch.
        active_branch: The session's active branch afterwards; None when the session goes.
        undo: What brings it back.
        removed: It was done.
    """

    session: str
    branch: str | None
    num_tokens: int | None
    num_branches: int
    checkpoint_id: CheckpointId | None = None
    active_branch: str | None = None
    undo: str
    removed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaving:
    """A branch that is to go.

    Attributes:
        session: Its session.
        name: Its name.
        record: The branch; None when it is damaged.
        tip: Its tip; None without one, or when that cannot be read.
        open_tokens: Its tokens after the tip, as far as they can be read.
        active_branch: The session's active branch afterwards.
    """

    session: SessionRecord
    name: str
    record: BranchRecord | None
    tip: Checkpoint | None
    open_tokens: "array[int]"
    active_branch: str


def rm(arguments: argparse.Namespace) -> Result:
    """Remove a session or a branch with `--yes`; without, say what would be removed."""
    if arguments.yes:
        with Environment.open(arguments.store) as environment:
            removal = _remove(StoreView(environment, Config()), arguments.target)
    else:
        with open_view(arguments.store) as store:
            removal = _plan(store, arguments.target)
    return Result(
        document=dataclasses.asdict(removal),
        text=lambda: _text(removal),
        exit_code=ExitCode.OK if removal.removed else ExitCode.INPUT,
        notices=[] if removal.removed else ["nothing was removed: repeat with --yes"],
    )


def _plan(store: StoreView, target: str) -> _Removal:
    session, branch = split_target(store, target)
    with store.environment.read() as txn:
        if branch is None:
            return _session_removal(txn, store.catalog, session, removed=False)
        leaving = _leaving(txn, store.catalog, session, branch)
    return _branch_removal(leaving, None if leaving.tip is None else leaving.tip.checkpoint_id, removed=False)


def _remove(store: StoreView, target: str) -> _Removal:
    session, branch = split_target(store, target)
    catalog = store.catalog

    def operation(txn: WriteTransaction) -> _Removal:
        if branch is None:
            removal = _session_removal(txn, catalog, session, removed=True)
            catalog.remove_session(txn, _session_id(txn, catalog, session))
            return removal
        leaving = _leaving(txn, catalog, session, branch)
        return _branch_removal(leaving, _remove_branch(txn, catalog, leaving), removed=True)

    return store.environment.submit(operation, level=Level.DURABLE).result()


def _session_id(txn: ReadTransaction, catalog: Catalog, name: str) -> SessionId:
    """Return the id of a session whose record may be damaged."""
    session_id = txn.get(Table.SESSIONS, rows.session_name_key(name))
    return catalog.find_session(txn, name).session_id if session_id is None else SessionId(session_id)


def _session_removal(txn: ReadTransaction, catalog: Catalog, name: str, *, removed: bool) -> _Removal:
    session_id = _session_id(txn, catalog, name)
    damaged: list[CorruptionError] = []
    checkpoints = catalog.checkpoints(txn, session_id, damaged)
    return _Removal(
        session=name,
        branch=None,
        num_tokens=None if damaged else sum(checkpoint.num_own_tokens for checkpoint in checkpoints),
        num_branches=sum(1 for _ in txn.scan_each(Table.BRANCHES, session_id)),
        undo="there is none" if removed else "there is none: `agentmem export` the session first",
        removed=removed,
    )


def _leaving(txn: ReadTransaction, catalog: Catalog, session_name: str, name: str) -> _Leaving:
    session = catalog.find_session(txn, session_name)
    others = [branch.name for branch in catalog.branches(txn, session.session_id, []) if branch.name != name]
    record, tip, open_tokens = None, None, array("I")
    # A damaged branch can be given up too: what cannot be read is left out.
    try:
        record = catalog.branch(txn, session.session_id, name)
        tip = None if record.tip is None else catalog.checkpoint(txn, session.session_id, record.tip)
        open_tokens = catalog.open_tokens(txn, session.session_id, name)
    except CorruptionError:
        pass
    if not others:
        raise InvalidInputError(f"{name!r} is the only branch of session {session_name!r}: remove the session")
    is_active = session.active_branch == name
    return _Leaving(
        session=session,
        name=name,
        record=record,
        tip=tip,
        open_tokens=open_tokens,
        active_branch=others[0] if is_active else session.active_branch,
    )


def _remove_branch(txn: WriteTransaction, catalog: Catalog, leaving: _Leaving) -> CheckpointId | None:
    """Remove a branch, and return where it can be forked again: its open tokens become a checkpoint of their own."""
    session_id, now_s = leaving.session.session_id, time.time()
    end = None if leaving.tip is None else leaving.tip.checkpoint_id
    if leaving.record is not None and leaving.open_tokens:
        checkpoint = _checkpoint_of(leaving, leaving.record, now_s)
        catalog.put_checkpoint(txn, checkpoint)
        end = checkpoint.checkpoint_id
    catalog.remove_branch(txn, session_id, leaving.name)
    if leaving.active_branch != leaving.session.active_branch:
        session = dataclasses.replace(leaving.session, active_branch=leaving.active_branch, updated_s=now_s)
        catalog.put_session(txn, session)
    catalog.record_move(txn, session_id, Move(branch=leaving.name, operation="drop", old=end, new=None, time_s=now_s))
    return end


def _checkpoint_of(leaving: _Leaving, record: BranchRecord, now_s: float) -> Checkpoint:
    tip = leaving.tip
    return Checkpoint(
        checkpoint_id=new_checkpoint_id(),
        session_id=leaving.session.session_id,
        parent_id=record.tip,
        num_tokens=(0 if tip is None else tip.num_tokens) + len(leaving.open_tokens),
        tokens=pack_tokens(leaving.open_tokens),
        num_pending=record.num_pending,
        fingerprint=leaving.session.fingerprint,
        extras=record.extras,
        is_auto=True,
        has_kv=False,
        created_s=now_s,
    )


def _branch_removal(leaving: _Leaving, end: CheckpointId | None, *, removed: bool) -> _Removal:
    num_before = 0 if leaving.tip is None else leaving.tip.num_tokens
    num_tokens = None if leaving.record is None else num_before + len(leaving.open_tokens)
    place = "its last checkpoint" if end is None else repr(short(end))
    if leaving.open_tokens and not removed:
        place = "the id that `rm --yes` prints"
    hours = Config().gc_grace_s / 3600
    return _Removal(
        session=leaving.session.name,
        branch=leaving.name,
        num_tokens=num_tokens,
        num_branches=1,
        checkpoint_id=end,
        active_branch=leaving.active_branch,
        undo=(
            f"session.fork({leaving.name!r}, at={place}) in Python, for {hours:g} hours, then `agentmem gc` may take it"
            if num_tokens
            else "there is nothing to bring back"
        ),
        removed=removed,
    )


def _text(removal: _Removal) -> str:
    if removal.branch is None:
        what = f"session {plain(removal.session)} with {count(removal.num_branches, 'branch')}"
    else:
        what = f"branch {plain(removal.branch)} of session {plain(removal.session)}"
    tokens = "tokens that cannot be read" if removal.num_tokens is None else count(removal.num_tokens, "token")
    lines = [("removed" if removal.removed else "would remove", f"{what}, {tokens}")]
    if removal.checkpoint_id is not None:
        lines.append(("it ended at", removal.checkpoint_id.hex()))
    if removal.active_branch is not None:
        lines.append(("active branch", plain(removal.active_branch)))
    return facts([*lines, ("undo", removal.undo)])
