"""`check`, `repair`, `gc` and `compact`: keep a store sound and small. They need torch, so these start slower."""

import argparse
import time
from dataclasses import asdict

from agentmem.check import CheckReport
from agentmem.check import check as check_store
from agentmem.cli.result import ExitCode, Result
from agentmem.cli.source import open_store, read_key
from agentmem.cli.text import count, plain, size
from agentmem.gc import GcReport, collect
from agentmem.gc import compact as compact_store
from agentmem.ids import short
from agentmem.repair import RepairReport
from agentmem.repair import repair as repair_store
from agentmem.tiers.disk import DiskTier
from agentmem.tree.catalog import Catalog


def check(arguments: argparse.Namespace) -> Result:
    """Verify a store, also beside a process that writes to it."""
    fraction = arguments.read_data
    with open_store(arguments, read_only=True) as environment:
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
    with open_store(arguments, read_only=arguments.dry_run) as environment:
        report = collect(
            environment,
            Catalog(),
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
    report = compact_store(arguments.store, key=read_key(arguments.key_file))
    return Result(
        document={"store": str(arguments.store), **asdict(report)},
        text=lambda: f"{size(report.before_nbytes)} before, {size(report.after_nbytes)} now",
    )


def repair(arguments: argparse.Namespace) -> Result:
    """Make a damaged store whole again, as far as that can be done, and keep what it was."""
    report = repair_store(
        arguments.store,
        previous_snapshot=arguments.previous_snapshot,
        dry_run=arguments.dry_run,
        key=read_key(arguments.key_file),
    )
    is_whole = not report.lost and not report.problems
    return Result(
        document={"store": str(arguments.store), **asdict(report)},
        text=lambda: _repair_text(report),
        exit_code=ExitCode.OK if is_whole else ExitCode.DAMAGE,
        notices=[] if is_whole else [f"{count(len(report.lost) + len(report.problems), 'thing')} could not be mended"],
    )


COMMANDS = {"check": check, "gc": gc, "compact": compact, "repair": repair}


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


def _repair_text(report: RepairReport) -> str:
    lines = [f"structure: {plain(fault)}" for fault in report.faults]
    lines += [f"lost: {plain(what)}" for what in report.lost]
    lines += [f"left: {plain(problem)}" for problem in report.problems]
    lines.append(
        f"{'would keep' if report.is_dry_run else 'kept'} {count(report.num_rows, 'row')}: "
        f"{report.num_healed:,} healed from their copies, {report.num_salvaged:,} found outside of the tables; "
        f"{count(report.num_blocks_dropped, 'damaged block')} dropped, {report.num_recounted:,} counted again"
    )
    if report.num_cut:
        lines.append(
            f"KV of {count(report.num_cut, 'checkpoint')} is computed again from tokens when it is next needed"
        )
    if report.backup is not None:
        lines.append(f"the store as it was is {report.backup} in its directory: remove that file when all is well")
    return "\n".join(lines)


def _gc_text(report: GcReport, free_nbytes: int) -> str:
    verb = "would remove" if report.is_dry_run else "removed"
    checkpoints = count(len(report.checkpoints), "checkpoint")
    blocks = f"{count(report.num_blocks, 'block')} of {size(report.nbytes)}"
    lines = [f"{verb} {checkpoints}, {blocks} and {count(report.num_rows, 'row')} that belonged to nothing"]
    if report.checkpoints:
        lines.append(f"checkpoints: {' '.join(short(name) for name in report.checkpoints)}")
    return "\n".join([*lines, f"{size(free_nbytes)} of the data file are free for later writes; `compact` shrinks it"])
