"""`rm`: give up a branch or a session, after saying what goes and how it comes back. Without torch."""

import argparse
import dataclasses
import time
from dataclasses import dataclass

from agentmem._lmdb import Level, ReadTransaction, Table, WriteTransaction
from agentmem.cli.result import ExitCode, Result
from agentmem.cli.source import open_store, open_view, split_target
from agentmem.cli.text import count, facts, plain
from agentmem.config import Config
from agentmem.dropping import Leaving, drop, leaving
from agentmem.errors import CorruptionError
from agentmem.ids import CheckpointId, SessionId, short
from agentmem.leases import require_free
from agentmem.tree import rows
from agentmem.tree.catalog import Catalog
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


def rm(arguments: argparse.Namespace) -> Result:
    """Remove a session or a branch with `--yes`; without, say what would be removed."""
    if arguments.yes:
        with open_store(arguments) as environment:
            removal = _remove(StoreView(environment, Config()), arguments.target)
    else:
        with open_view(arguments) as store:
            removal = _plan(store, arguments.target)
    return Result(
        document=dataclasses.asdict(removal),
        text=lambda: _text(removal),
        exit_code=ExitCode.OK if removal.removed else ExitCode.INPUT,
        notices=[] if removal.removed else ["nothing was removed: repeat with --yes"],
    )


COMMANDS = {"rm": rm}


def _plan(store: StoreView, target: str) -> _Removal:
    session, branch = split_target(store, target)
    with store.environment.read() as txn:
        if branch is None:
            return _session_removal(txn, store.catalog, session, removed=False)
        left = leaving(txn, store.catalog, session, branch)
    return _branch_removal(left, None if left.tip is None else left.tip.checkpoint_id, removed=False)


def _remove(store: StoreView, target: str) -> _Removal:
    session, branch = split_target(store, target)
    catalog = store.catalog

    def operation(txn: WriteTransaction) -> _Removal:
        require_free(txn, store.environment, _session_id(txn, catalog, session), session)
        if branch is None:
            removal = _session_removal(txn, catalog, session, removed=True)
            catalog.remove_session(txn, _session_id(txn, catalog, session))
            return removal
        left = leaving(txn, catalog, session, branch)
        return _branch_removal(left, drop(txn, catalog, left, time.time()), removed=True)

    return store.environment.submit(operation, level=Level.REMOVAL).result()


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


def _branch_removal(left: Leaving, end: CheckpointId | None, *, removed: bool) -> _Removal:
    num_before = 0 if left.tip is None else left.tip.num_tokens
    num_tokens = None if left.record is None else num_before + len(left.open_tokens)
    place = "its last checkpoint" if end is None else repr(short(end))
    if left.open_tokens and not removed:
        place = "the id that `rm --yes` prints"
    hours = Config().gc_grace_s / 3600
    return _Removal(
        session=left.session.name,
        branch=left.name,
        num_tokens=num_tokens,
        num_branches=1,
        checkpoint_id=end,
        active_branch=left.active_branch,
        undo=(
            f"session.fork({left.name!r}, at={place}) in Python, for {hours:g} hours, then `agentmem gc` may take it"
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
