"""`forget` and `rekey`: leave no trace of a session, and change the key of an encrypted store."""

import argparse
from dataclasses import asdict
from pathlib import Path

from agentmem._directory import OWN_FILES
from agentmem.cli.result import ExitCode, Result
from agentmem.cli.source import open_store, read_key
from agentmem.cli.text import count, facts, plain, size
from agentmem.errors import EncryptionError, InvalidInputError, StoreLockedError
from agentmem.forget import ForgetReport
from agentmem.forget import forget as forget_session
from agentmem.gc import compact
from agentmem.rekey import rekey as rekey_store
from agentmem.tiers.disk import DiskTier
from agentmem.tree.catalog import Catalog


def forget(arguments: argparse.Namespace) -> Result:
    """Forget a session with `--yes`, and write the data file anew; without, say what would be forgotten."""
    with open_store(arguments, read_only=not arguments.yes) as environment:
        report = forget_session(
            environment, Catalog(), DiskTier(environment), arguments.session, dry_run=not arguments.yes
        )
    notices = [*report.damaged, *([] if arguments.yes else ["nothing was forgotten: repeat with --yes"])]
    is_compact = arguments.yes and _compact(arguments, notices)
    notices += [] if not arguments.yes else _others(arguments.store)
    code = ExitCode.INPUT if not arguments.yes else ExitCode.OK if is_compact else ExitCode.LOCKED
    return Result(
        document={"store": str(arguments.store), **asdict(report), "is_compact": is_compact},
        text=lambda: _forget_text(report),
        exit_code=ExitCode.DAMAGE if report.damaged and code is ExitCode.OK else code,
        notices=notices,
    )


def rekey(arguments: argparse.Namespace) -> Result:
    """Let another key open an encrypted store."""
    key, new_key = read_key(arguments.key_file), read_key(arguments.new_key_file)
    if key is None:
        raise EncryptionError("rekey needs the key that opens the store now: give it with --key-file")
    if new_key is None:
        raise InvalidInputError("rekey needs the new key: give it with --new-key-file")
    report = rekey_store(arguments.store, key, new_key)
    return Result(
        document={"store": str(arguments.store), **asdict(report)},
        text=lambda: "only the new key opens the store from now on",
    )


COMMANDS = {"forget": forget, "rekey": rekey}


def _compact(arguments: argparse.Namespace, notices: list[str]) -> bool:
    """Write the data file anew; say so when that has to wait."""
    try:
        compact(arguments.store, key=read_key(arguments.key_file))
    except StoreLockedError:
        notices.append(
            "the session is gone, but its bytes stay in the data file's free pages: somebody has the store open; "
            "run `agentmem compact` afterwards"
        )
        return False
    return True


def _others(store: Path) -> list[str]:
    """Return a notice for each file beside the store's own: copies of it hold what it held."""
    found = sorted(entry.name for entry in store.iterdir() if entry.name not in OWN_FILES)
    return [f"{name!r} is in the store's directory too, and may hold what was forgotten: remove it" for name in found]


def _forget_text(report: ForgetReport) -> str:
    what = f"session {plain(report.session)} with {count(report.num_branches, 'branch')}"
    verb = "would forget" if report.is_dry_run else "forgot"
    lines = [
        (verb, f"{what}, {count(report.num_checkpoints, 'checkpoint')}"),
        ("blocks", f"{report.num_blocks:,} of {size(report.nbytes)}"),
    ]
    if report.num_shared_blocks:
        names = ", ".join(map(plain, report.shared_with))
        lines.append(("stay", f"{count(report.num_shared_blocks, 'block')} that others name too: {names}"))
    return facts([*lines, ("undo", "there is none")])
