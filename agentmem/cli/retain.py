"""`prune`, `pin` and `unpin`: choose what a store keeps. They count blocks, which takes torch to start."""

import argparse
import time
from collections import Counter
from dataclasses import asdict

from agentmem._lmdb import Level, WriteTransaction
from agentmem.cli.result import ExitCode, Result
from agentmem.cli.source import find_checkpoint, open_store, split_target
from agentmem.cli.text import count, facts, plain, size, table
from agentmem.config import Config
from agentmem.ids import short
from agentmem.pruning import PrunedItem, PruneReport
from agentmem.pruning import prune as prune_store
from agentmem.retention import Retention
from agentmem.tiers.disk import DiskTier
from agentmem.tree import pins, rows
from agentmem.tree.catalog import Catalog
from agentmem.view import StoreView


def prune(arguments: argparse.Namespace) -> Result:
    """Let go of what the rules do not keep, or say what would go."""
    retention = Retention(
        older_than_s=arguments.older_than,
        keep_named=not arguments.drop_named,
        keep_leaves=not arguments.drop_leaves,
        keep_branch_points=not arguments.drop_branch_points,
    )
    with open_store(arguments, read_only=arguments.dry_run) as environment:
        report, _ = prune_store(
            environment,
            Catalog(),
            DiskTier(environment),
            retention,
            now_s=time.time(),
            dry_run=arguments.dry_run,
        )
    notices = [f"session {name!r} was left out: somebody is working on it" for name in report.skipped]
    return Result(
        document={"store": str(arguments.store), **asdict(report)},
        text=lambda: _prune_text(report),
        exit_code=ExitCode.DAMAGE if report.damaged else ExitCode.OK,
        notices=[*notices, *report.damaged],
    )


def pin(arguments: argparse.Namespace) -> Result:
    """Keep a checkpoint though no branch reaches it, or leave it to gc again."""
    is_pinned = arguments.command == "pin"
    with open_store(arguments) as environment:
        store = StoreView(environment, Config())
        session, name = split_target(store, arguments.target)
        checkpoint = find_checkpoint(store.view(session), name or "")
        node = rows.node_key(checkpoint.session_id, checkpoint.checkpoint_id)

        def operation(txn: WriteTransaction) -> bool:
            return (pins.put if is_pinned else pins.remove)(txn, node, time.time_ns())

        is_changed = environment.submit(operation, level=Level.DURABLE).result()
    document = {
        "session": session,
        "checkpoint_id": checkpoint.checkpoint_id,
        "is_pinned": is_pinned,
        "is_changed": is_changed,
    }
    state = "pinned" if is_pinned else "not pinned"
    words = f"{'is now' if is_changed else 'was already'} {state}"
    return Result(
        document=document,
        text=lambda: facts(
            [("checkpoint", checkpoint.checkpoint_id.hex()), ("session", plain(session)), ("it", words)]
        ),
    )


_WAYS = ("merged", "thinned")
"""How checkpoints go."""

COMMANDS = {"prune": prune, "pin": pin, "unpin": pin}


def _prune_text(report: PruneReport) -> str:
    lines = []
    if report.items:
        header = ("SESSION", "WHAT", "NAME", "MESSAGE", "TOKENS", "GIVES BACK")
        lines.append(table(header, [_row(item) for item in report.items], left=4))
    numbers = Counter(item.what for item in report.items)
    sums = [count(numbers["dropped"], "branch"), *(f"{count(numbers[what], 'checkpoint')} {what}" for what in _WAYS)]
    verb = "would let go of" if report.is_dry_run else "let go of"
    lines.append(f"{verb} {', '.join(sums)}: {size(report.nbytes)}, which `gc` gives back once its grace is over")
    return "\n".join(lines)


def _row(item: PrunedItem) -> tuple[str, ...]:
    name = plain(item.name) if item.what == "dropped" else short(bytes.fromhex(item.name))
    return (plain(item.session), item.what, name, plain(item.message), f"{item.num_tokens:,}", size(item.nbytes))
