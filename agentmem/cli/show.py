"""`show`: everything about one session, branch or checkpoint. Beside a running process, and without torch."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from agentmem.cli.result import ExitCode, Result
from agentmem.cli.source import (
    KvSize,
    branch_document,
    checkpoint_document,
    find_checkpoint,
    infos_of,
    kv_size,
    lineage,
    num_tokens,
    open_view,
    session_document,
    split_target,
)
from agentmem.cli.text import count, facts, plain, size, table, to_line, when
from agentmem.ids import CheckpointId, short
from agentmem.tree.checkpoint import BranchRecord, Checkpoint, Move
from agentmem.view import SessionView, StoreView


@dataclass(frozen=True, slots=True)
class _Shown:
    """What was found: for programs, for people in parts, and which moves of the session belong to it."""

    document: dict[str, object]
    parts: list[str]
    has: Callable[[Move], bool]


def show(arguments: argparse.Namespace) -> Result:
    """Tell everything about one session, branch or checkpoint."""
    with open_view(arguments) as store:
        session, name = split_target(store, arguments.target)
        view = store.view(session)
        shown = _look(store, view, name)
        if arguments.reflog:
            moves = [move for move in store.moves(session) if shown.has(move)]
            shown.document["moves"] = [_move_document(move) for move in moves]
            shown.parts.append(_moves_text(moves))
    return Result(
        document={**shown.document, "damaged": view.damaged},
        text=lambda: "\n\n".join(shown.parts),
        exit_code=ExitCode.DAMAGE if view.damaged else ExitCode.OK,
        notices=view.damaged,
    )


COMMANDS = {"show": show}


def _look(store: StoreView, view: SessionView, name: str | None) -> _Shown:
    checkpoints = {checkpoint.checkpoint_id: checkpoint for checkpoint in view.checkpoints}
    if name is None:
        return _session(view, checkpoints)
    for branch in view.branches:
        if branch.name == name:
            return _branch(store, view, branch, checkpoints)
    return _checkpoint(store, view, find_checkpoint(view, name))


def _session(view: SessionView, checkpoints: Mapping[CheckpointId, Checkpoint]) -> _Shown:
    record = view.record
    rows = [
        ("session", plain(record.name)),
        ("id", record.session_id.hex()),
        ("model", plain(record.model_name)),
        ("fingerprint", record.fingerprint.hex()),
        ("block size", count(record.block_size, "token")),
        ("active branch", plain(record.active_branch)),
        ("checkpoints", f"{len(view.checkpoints):,}"),
        ("created", when(record.created_s)),
        ("changed", when(max([record.updated_s, *(branch.updated_s for branch in view.branches)]))),
        ("extras", to_line(record.extras)),
    ]
    document = session_document(record) | {
        "branches": [branch_document(branch, checkpoints) for branch in view.branches],
        "num_checkpoints": len(view.checkpoints),
    }
    return _Shown(document, [facts(rows), _branches_text(view, checkpoints)], lambda _: True)


def _branches_text(view: SessionView, checkpoints: Mapping[CheckpointId, Checkpoint]) -> str:
    header = ("BRANCH", "TIP", "TOKENS", "OPEN", "PENDING", "CHANGED")
    rows = [
        (
            plain(branch.name) + ("*" if branch.name == view.record.active_branch else ""),
            "-" if branch.tip is None else short(branch.tip),
            _counted(num_tokens(branch, checkpoints)),
            f"{branch.num_open:,}",
            f"{branch.num_pending:,}",
            when(branch.updated_s),
        )
        for branch in view.branches
    ]
    return table(header, rows, left=2)


def _branch(
    store: StoreView, view: SessionView, branch: BranchRecord, checkpoints: Mapping[CheckpointId, Checkpoint]
) -> _Shown:
    line = lineage(branch.tip, checkpoints)
    with store.environment.read() as txn:
        infos = infos_of(txn, {digest for checkpoint in line for digest in checkpoint.digests()})
    kv = kv_size(infos, infos)
    is_active = branch.name == view.record.active_branch
    rows = [
        ("branch", f"{plain(branch.name)} of session {plain(view.record.name)}{' (active)' if is_active else ''}"),
        ("tip", "none yet" if branch.tip is None else branch.tip.hex()),
        ("tokens", f"{_counted(num_tokens(branch, checkpoints))}, {branch.num_open:,} of them after the tip"),
        ("pending", count(branch.num_pending, "token")),
        ("checkpoints", f"{len(line):,}"),
        ("KV on disk", _kv_text(kv)),
        ("created", when(branch.created_s)),
        ("changed", when(branch.updated_s)),
        ("extras", to_line(branch.extras)),
    ]
    document = branch_document(branch, checkpoints) | {
        "session": view.record.name,
        "is_active": is_active,
        "checkpoint_ids": [checkpoint.checkpoint_id for checkpoint in line],
        "kv": asdict(kv),
    }
    return _Shown(document, [facts(rows)], lambda move: move.branch == branch.name)


def _checkpoint(store: StoreView, view: SessionView, checkpoint: Checkpoint) -> _Shown:
    with store.environment.read() as txn:
        infos = infos_of(txn, checkpoint.digests())
    kv, name = kv_size(infos, infos), checkpoint.checkpoint_id
    branches = [branch.name for branch in view.branches if branch.tip == name]
    made = "automatically" if checkpoint.is_auto else "by the user"
    rows = [
        ("checkpoint", f"{name.hex()} of session {plain(view.record.name)}"),
        ("message", plain(checkpoint.message)),
        ("parent", "none" if checkpoint.parent_id is None else checkpoint.parent_id.hex()),
        ("tip of", ", ".join(map(plain, branches)) or "no branch"),
        ("tokens", f"{checkpoint.num_tokens:,}, {checkpoint.num_own_tokens:,} of them own"),
        ("pending", count(checkpoint.num_pending, "token")),
        ("own KV on disk", _kv_text(kv) if checkpoint.has_kv else "none yet: tokens only"),
        ("model", f"fingerprint {checkpoint.fingerprint.hex()}"),
        ("made", f"{when(checkpoint.created_s)}, {made}"),
        ("extras", to_line(checkpoint.extras)),
    ]
    document = checkpoint_document(checkpoint) | {
        "session": view.record.name,
        "branches": branches,
        "kv": asdict(kv),
    }
    return _Shown(document, [facts(rows)], lambda move: name in {move.old, move.new})


def _kv_text(kv: KvSize) -> str:
    missing = f"; {count(kv.num_missing_blocks, 'block')} missing" if kv.num_missing_blocks else ""
    return f"{count(kv.num_blocks, 'block')}, {size(kv.stored_nbytes)} ({size(kv.raw_nbytes)} raw){missing}"


def _move_document(move: Move) -> dict[str, object]:
    return {
        "branch": move.branch,
        "operation": move.operation,
        "old": move.old,
        "new": move.new,
        "time_s": move.time_s,
    }


def _moves_text(moves: list[Move]) -> str:
    header = ("WHEN", "BRANCH", "MOVE", "FROM", "TO")
    rows = [
        (
            when(move.time_s),
            plain(move.branch),
            plain(move.operation),
            "-" if move.old is None else short(move.old),
            "-" if move.new is None else short(move.new),
        )
        for move in moves
    ]
    return table(header, rows, left=5)


def _counted(number: int | None) -> str:
    return "?" if number is None else f"{number:,}"
