"""`check`, `gc` and `compact`: keep a store sound and small. Decoding blocks needs torch, so these start slower."""

import argparse
import time
from dataclasses import asdict

from agentmem._lmdb import Environment
from agentmem.check import CheckReport
from agentmem.check import check as check_store
from agentmem.cli.result import ExitCode, Result
from agentmem.cli.text import count, plain, size
from agentmem.gc import GcReport, collect
from agentmem.gc import compact as compact_store
from agentmem.ids import short
from agentmem.tiers.disk import DiskTier
from agentmem.tree.catalog import Catalog


def check(arguments: argparse.Namespace) -> Result:
    """Verify a store, also beside a process that writes to it."""
    fraction = arguments.read_data
    with Environment.open(arguments.store, read_only=True) as environment:
        report = check_store(
            environment, DiskTier(environment), read_data=fraction is not None, fraction=fraction or 1.0
        )
    return Result(
        document={"store": str(arguments.store), "is_sound": report.is_sound, **asdict(report)},
        text=lambda: _check_text(report),
        exit_code=ExitCode.OK if report.is_sound else ExitCode.DAMAGE,
        notices=[] if report.is_sound else [f"{count(len(report.problems), 'problem')} found"],
    )


def gc(arguments: argparse.Namespace) -> Result:
    """Remove what nothing names any more and whose grace is over."""
    with Environment.open(arguments.store, read_only=arguments.dry_run) as environment:
        report = collect(
            environment,
            Catalog(environment),
            DiskTier(environment),
            grace_s=arguments.grace,
            now_s=time.time(),
            dry_run=arguments.dry_run,
        )
        free_nbytes = environment.free_nbytes
    return Result(
        document={"store": str(arguments.store), **asdict(report), "free_nbytes": free_nbytes},
        text=lambda: _gc_text(report, free_nbytes),
        exit_code=ExitCode.DAMAGE if report.damaged else ExitCode.OK,
        notices=list(report.damaged),
    )


def compact(arguments: argparse.Namespace) -> Result:
    """Rewrite the data file without its free space."""
    report = compact_store(arguments.store)
    return Result(
        document={"store": str(arguments.store), **asdict(report)},
        text=lambda: f"{size(report.before_nbytes)} before, {size(report.after_nbytes)} now",
    )


COMMANDS = {"check": check, "gc": gc, "compact": compact}


def _check_text(report: CheckReport) -> str:
    seen = [
        count(report.num_sessions, "session"),
        count(report.num_branches, "branch"),
        count(report.num_checkpoints, "checkpoint"),
        count(report.num_blocks, "block"),
    ]
    read = f"{report.num_blocks_read:,} of {report.num_blocks:,} blocks decoded, {size(report.nbytes_read)}"
    lines = [f"{problem.kind}: {plain(problem.record)}: {plain(problem.advice)}" for problem in report.problems]
    lines.append(f"{'sound' if report.is_sound else 'looked at'}: {', '.join(seen)}; {read}")
    return "\n".join(lines)


def _gc_text(report: GcReport, free_nbytes: int) -> str:
    verb = "would remove" if report.is_dry_run else "removed"
    checkpoints = count(len(report.checkpoints), "checkpoint")
    blocks = f"{count(report.num_blocks, 'block')} of {size(report.nbytes)}"
    lines = [f"{verb} {checkpoints}, {blocks} and {count(report.num_rows, 'row')} that belonged to nothing"]
    if report.checkpoints:
        lines.append(f"checkpoints: {' '.join(short(name) for name in report.checkpoints)}")
    return "\n".join([*lines, f"{size(free_nbytes)} of the data file are free for later writes; `compact` shrinks it"])
