"""`ls` and `log`: which sessions there are, and the tree of one. Beside a running process, and without torch."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from agentmem._lmdb import ReadTransaction, Table
from agentmem.cli.result import ExitCode, Result
from agentmem.cli.source import branch_document, checkpoint_document, num_tokens, open_view
from agentmem.cli.text import plain, table, when
from agentmem.errors import CorruptionError, NotFoundError
from agentmem.ids import CheckpointId, SessionId
from agentmem.tree.checkpoint import BranchRecord, Checkpoint, SessionRecord
from agentmem.view import SessionView, StoreView


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """One line of `ls`; `num_tokens` are those of the active branch, None when it cannot be read."""

    name: str
    session_id: SessionId
    active_branch: str
    model_name: str
    num_branches: int
    num_checkpoints: int
    num_tokens: int | None
    created_s: float
    updated_s: float


def ls(arguments: argparse.Namespace) -> Result:
    """List the sessions of a store."""
    damaged: list[CorruptionError] = []
    with open_view(arguments) as store, store.environment.read() as txn:
        sessions = [_listed(txn, store, record, damaged) for record in store.catalog.sessions(txn, damaged)]
    problems = [str(error) for error in damaged]
    return Result(
        document={
            "store": str(arguments.store),
            "sessions": [asdict(session) for session in sessions],
            "damaged": problems,
        },
        text=lambda: _ls_text(sessions),
        exit_code=ExitCode.DAMAGE if problems else ExitCode.OK,
        notices=problems,
    )


def log(arguments: argparse.Namespace) -> Result:
    """Draw the tree of a session."""
    with open_view(arguments) as store:
        view = store.view(arguments.session)
    checkpoints = {checkpoint.checkpoint_id: checkpoint for checkpoint in view.checkpoints}
    return Result(
        document={
            "session": view.record.name,
            "session_id": view.record.session_id,
            "active_branch": view.record.active_branch,
            "branches": [branch_document(branch, checkpoints) for branch in view.branches],
            "checkpoints": [checkpoint_document(checkpoint) for checkpoint in view.checkpoints],
            "damaged": view.damaged,
        },
        text=lambda: _log_text(view, checkpoints, fold=not arguments.all),
        exit_code=ExitCode.DAMAGE if view.damaged else ExitCode.OK,
        notices=view.damaged,
    )


COMMANDS = {"ls": ls, "log": log}


def _listed(txn: ReadTransaction, store: StoreView, record: SessionRecord, damaged: list[CorruptionError]) -> _Listed:
    branches = store.catalog.branches(txn, record.session_id, damaged)
    active = next((branch for branch in branches if branch.name == record.active_branch), None)
    return _Listed(
        name=record.name,
        session_id=record.session_id,
        active_branch=record.active_branch,
        model_name=record.model_name,
        num_branches=len(branches),
        # One short row a checkpoint, where `nodes` holds all their tokens.
        num_checkpoints=sum(1 for _ in txn.scan_each(Table.NREFS, record.session_id)),
        num_tokens=None if active is None else _count_tokens(txn, store, record, active, damaged),
        created_s=record.created_s,
        updated_s=max([record.updated_s, *(branch.updated_s for branch in branches)]),
    )


def _count_tokens(
    txn: ReadTransaction,
    store: StoreView,
    record: SessionRecord,
    branch: BranchRecord,
    damaged: list[CorruptionError],
) -> int | None:
    try:
        tip = None if branch.tip is None else store.catalog.checkpoint(txn, record.session_id, branch.tip)
    except NotFoundError as error:
        damaged.append(CorruptionError(f"branch {branch.name!r} of session {record.name!r}: {error}"))
        return None
    except CorruptionError as error:
        damaged.append(error)
        return None
    return num_tokens(branch, {} if tip is None else {tip.checkpoint_id: tip})


def _ls_text(sessions: list[_Listed]) -> str:
    if not sessions:
        return "no sessions"
    header = ("SESSION", "ACTIVE", "MODEL", "BRANCHES", "CHECKPOINTS", "TOKENS", "CHANGED")
    rows = [
        (
            plain(session.name),
            plain(session.active_branch),
            plain(_model(session.model_name)),
            f"{session.num_branches:,}",
            f"{session.num_checkpoints:,}",
            "?" if session.num_tokens is None else f"{session.num_tokens:,}",
            when(session.updated_s),
        )
        for session in sessions
    ]
    return table(header, rows, left=3)


def _model(name: str) -> str:
    """Return a model's name; of one that was loaded from a folder, the folder's."""
    return Path(name).name if Path(name).is_absolute() else name


def _log_text(view: SessionView, checkpoints: Mapping[CheckpointId, Checkpoint], *, fold: bool) -> str:
    from agentmem.tree.render import render  # networkx takes a fifth of a second; --json does without
    from agentmem.tree.tree import SessionTree

    return render(
        SessionTree(view.checkpoints),
        title=view.record.name,
        branches=view.branches,
        active=view.record.active_branch,
        notes={branch.name: _note(branch, checkpoints) for branch in view.branches},
        fold=fold,
    )


def _note(branch: BranchRecord, checkpoints: Mapping[CheckpointId, Checkpoint]) -> str:
    """Say where a branch's KV is, and its score when the user keeps one, as `Session.log` does."""
    tip = None if branch.tip is None else checkpoints.get(branch.tip)
    is_on_disk = tip is not None and tip.has_kv and tip.num_pending < tip.num_tokens
    tier, score = "disk" if is_on_disk else "tokens", branch.extras.get("score")
    return f"{tier}  score={score:.4g}" if isinstance(score, int | float) else tier
