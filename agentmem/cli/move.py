"""`export` and `import`: carry a session or a branch from one store to another, in one file."""

import argparse
from dataclasses import asdict

from agentmem.arrival import ImportReport
from agentmem.bundle import read_bundle
from agentmem.cli.result import Result
from agentmem.cli.source import open_store, open_view
from agentmem.cli.text import count, plain, size
from agentmem.tiers.disk import DiskTier
from agentmem.transfer import ExportReport, export_session, import_session
from agentmem.tree.catalog import Catalog


def export(arguments: argparse.Namespace) -> Result:
    """Write a session, or one branch of it, into a file; also beside a process that writes."""
    with open_view(arguments) as store:
        report = export_session(
            store.environment,
            store.catalog,
            DiskTier(store.environment),
            arguments.session,
            arguments.file,
            branch=arguments.branch,
        )
        is_encrypted = store.environment.format.is_encrypted
    return Result(
        document={"store": str(arguments.store), "file": str(arguments.file), **asdict(report)},
        text=lambda: f"{_contents(report)}\nfile of {size(report.nbytes)}: {arguments.file}",
        notices=["the store is encrypted, the file is not"] if is_encrypted else [],
    )


def import_(arguments: argparse.Namespace) -> Result:
    """Read a file that `export` wrote into a store, which is made when there is none."""
    with read_bundle(arguments.file):
        pass  # a file that is no export must not leave an empty store behind
    with open_store(arguments, create=True) as environment:
        report = import_session(environment, Catalog(), DiskTier(environment), arguments.file, name=arguments.name)
    num_known = report.num_blocks - report.num_new_blocks
    return Result(
        document={"store": str(arguments.store), "file": str(arguments.file), **asdict(report)},
        text=lambda: f"{_contents(report)}\nthe store had {count(num_known, 'block')} of these already",
    )


COMMANDS = {"export": export, "import": import_}


def _contents(report: ExportReport | ImportReport) -> str:
    return (
        f"session {plain(report.session)}: {count(len(report.branches), 'branch')}, "
        f"{count(report.num_checkpoints, 'checkpoint')}, {count(report.num_blocks, 'block')} "
        f"({size(report.raw_nbytes)} of KV)"
    )
