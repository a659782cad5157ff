"""`push`, `pull` and `lake`: sessions between stores and a lake, and what is in a lake."""

import argparse
from collections.abc import Callable
from dataclasses import asdict

from agentmem.cli.result import Result
from agentmem.cli.source import open_store, read_key
from agentmem.cli.text import count, plain, size, table, when
from agentmem.errors import InvalidInputError
from agentmem.lake.collecting import collect
from agentmem.lake.lake import Lake
from agentmem.lake.space import rekey
from agentmem.offload import pull, push
from agentmem.tiers.disk import DiskTier
from agentmem.tree.catalog import Catalog


def push_(arguments: argparse.Namespace) -> Result:
    """Put a session into a lake, also beside a process that writes to it."""
    with open_store(arguments) as environment, _open_lake(arguments) as lake:
        report = push(environment, Catalog(), DiskTier(environment), lake, arguments.session, as_name=arguments.name)
    return Result(
        document={"store": str(arguments.store), "lake": arguments.lake, **asdict(report)},
        text=lambda: (
            f"session {plain(report.session)} is version {report.version} in the lake: "
            f"{count(report.num_blocks, 'block')}, {report.num_new_blocks} of them new ({size(report.put_nbytes)})"
        ),
    )


def pull_(arguments: argparse.Namespace) -> Result:
    """Bring a session from a lake into a store, which is made when there is none."""
    with _open_lake(arguments) as lake:
        lake.pull(arguments.session)  # what the lake has not must not leave an empty store behind
        with open_store(arguments, create=True) as environment:
            report = pull(
                environment, Catalog(), DiskTier(environment), lake, arguments.session, as_name=arguments.name
            )
    return Result(
        document={"store": str(arguments.store), "lake": arguments.lake, **asdict(report)},
        text=lambda: (
            f"session {plain(report.session)}, version {report.version} of the lake: "
            f"{count(len(report.branches), 'branch')}, {count(report.num_checkpoints, 'checkpoint')}, "
            f"{count(report.num_blocks, 'block')} ({size(report.raw_nbytes)} of KV)"
        ),
        notices=[_lost(report.num_lost_blocks)] if report.num_lost_blocks else [],
    )


def lake(arguments: argparse.Namespace) -> Result:
    """List a lake's sessions, remove one, collect what nothing names, or let another key open it."""
    actions: dict[str, Callable[[argparse.Namespace, Lake], Result]] = {
        "ls": _list,
        "rm": _remove,
        "gc": _collect,
        "rekey": _rekey,
    }
    with _open_lake(arguments) as opened:
        return actions[arguments.action](arguments, opened)


COMMANDS = {"push": push_, "pull": pull_, "lake": lake}


def _open_lake(arguments: argparse.Namespace) -> Lake:
    if not arguments.lake:
        raise InvalidInputError("which lake? give --lake URL, or name one in the environment's AGENTMEM_LAKE")
    return Lake.open(arguments.lake, key=read_key(arguments.key_file))


def _list(arguments: argparse.Namespace, lake: Lake) -> Result:
    labels = lake.names()
    head = ["SESSION", "VERSION", "MODEL", "BRANCHES", "CHECKPOINTS", "BLOCKS", "STORED", "PUSHED"]
    lines = [
        [
            plain(label.name),
            str(label.version),
            plain(label.model_name),
            str(label.num_branches),
            str(label.num_checkpoints),
            str(label.num_blocks),
            size(label.nbytes),
            when(label.created_s),
        ]
        for label in labels
    ]
    return Result(
        document={"lake": arguments.lake, "sessions": [asdict(label) for label in labels]},
        text=lambda: table(head, lines) if lines else "no sessions",
    )


def _remove(arguments: argparse.Namespace, lake: Lake) -> Result:
    if arguments.session is None:
        raise InvalidInputError("which session? give its name: agentmem lake rm URL SESSION")
    lake.remove(arguments.session)
    return Result(
        document={"lake": arguments.lake, "session": arguments.session},
        text=lambda: f"removed session {plain(arguments.session)}; `agentmem lake gc` removes what it alone held",
    )


def _collect(arguments: argparse.Namespace, lake: Lake) -> Result:
    report = collect(lake, grace_s=arguments.grace, dry_run=arguments.dry_run)
    verb = "would remove" if arguments.dry_run else "removed"
    return Result(
        document={"lake": arguments.lake, "is_dry_run": arguments.dry_run, **asdict(report)},
        text=lambda: (
            f"{verb} {count(report.num_removed, 'segment')} of {report.num_segments} ({size(report.removed_nbytes)}) "
            f"and {count(report.num_versions, 'old version')}; marked, to go after the grace: {report.num_marked}"
        ),
    )


def _rekey(arguments: argparse.Namespace, lake: Lake) -> Result:
    key, new_key = read_key(arguments.key_file), read_key(arguments.new_key_file)
    if key is None or new_key is None:
        raise InvalidInputError("a lake's key is changed with --key-file (the one that opens it) and --new-key-file")
    rekey(lake.space.objects, key, new_key)
    return Result(document={"lake": arguments.lake}, text=lambda: "the new key opens the lake, the old one does not")


def _lost(num_blocks: int) -> str:
    return f"{count(num_blocks, 'block')} of the session are missing from the lake or damaged: they are computed again"
