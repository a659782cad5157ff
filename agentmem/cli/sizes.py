"""`stats` and `du`: what a store holds, and what each branch costs. Beside a running process, and without torch."""

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

from agentmem._lmdb import ReadTransaction, Table
from agentmem.cli.result import ExitCode, Result
from agentmem.cli.source import KvSize, all_infos, kv_size, lineage, num_tokens, open_view
from agentmem.cli.text import count, facts, plain, size, table, when
from agentmem.errors import CorruptionError
from agentmem.ids import BlockDigest, CheckpointId, SessionId
from agentmem.tiers.blockrows import BlockInfo
from agentmem.tree import nodes
from agentmem.tree.checkpoint import Checkpoint
from agentmem.view import StoreView

_Checkpoints = dict[SessionId, dict[CheckpointId, Checkpoint]]
_Infos = Mapping[BlockDigest, BlockInfo | None]

_SUMS = {
    "dropped": "dropped, until gc takes it",
    "unnamed": "named by no checkpoint",
    "total": "all blocks of the store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stats:
    """What a store holds."""

    store: str
    uuid: bytes
    format_version: int
    created_s: float
    num_sessions: int
    num_branches: int
    num_checkpoints: int
    disk_num_blocks: int
    disk_raw_nbytes: int
    disk_stored_nbytes: int
    ratio: float
    file_nbytes: int
    free_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reach:
    """What one branch reaches."""

    session: str
    branch: str
    num_tokens: int | None
    digests: frozenset[BlockDigest]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """What one branch costs: KV that only it reaches, and KV that another branch of the store reaches too."""

    session: str
    branch: str
    num_tokens: int | None
    own: KvSize
    shared: KvSize


def stats(arguments: argparse.Namespace) -> Result:
    """Count what a store holds."""
    with open_view(arguments) as store, store.environment.read() as txn:
        infos = all_infos(txn)
        found = _count(str(arguments.store), store, txn, kv_size(infos, infos))
    num_lost = sum(info is None for info in infos.values())
    problem = f"{count(num_lost, 'row')} of the index of blocks cannot be read: run `agentmem check`"
    problems = [problem] if num_lost else []
    return Result(
        document=asdict(found) | {"damaged": problems},
        text=lambda: _stats_text(found),
        exit_code=ExitCode.DAMAGE if problems else ExitCode.OK,
        notices=problems,
    )


def du(arguments: argparse.Namespace) -> Result:
    """Tell the bytes of each branch: those that only it reaches, and those that it shares."""
    damaged: list[CorruptionError] = []
    with open_view(arguments) as store, store.environment.read() as txn:
        wanted = None if arguments.session is None else store.catalog.find_session(txn, arguments.session).name
        infos = all_infos(txn)
        checkpoints = _checkpoints(txn, damaged)
        reaches = list(_reaches(txn, store, checkpoints, damaged))
    costs = [cost for cost in _costs(infos, reaches) if wanted in {None, cost.session}]
    sums = _sums(infos, checkpoints, reaches)
    problems = [str(error) for error in damaged]
    return Result(
        document={
            "store": str(arguments.store),
            "branches": [asdict(cost) for cost in costs],
            **{name: asdict(kv) for name, kv in sums.items()},
            "damaged": problems,
        },
        text=lambda: _du_text(costs, sums),
        exit_code=ExitCode.DAMAGE if problems else ExitCode.OK,
        notices=problems,
    )


COMMANDS = {"stats": stats, "du": du}


def _count(path: str, store: StoreView, txn: ReadTransaction, kv: KvSize) -> _Stats:
    environment = store.environment
    return _Stats(
        store=path,
        uuid=environment.format.uuid,
        format_version=environment.format.version,
        created_s=environment.format.created_s,
        num_sessions=len(store.catalog.sessions(txn, [])),
        num_branches=txn.count(Table.BRANCHES),
        num_checkpoints=txn.count(Table.NREFS),
        disk_num_blocks=kv.num_blocks,
        disk_raw_nbytes=kv.raw_nbytes,
        disk_stored_nbytes=kv.stored_nbytes,
        ratio=kv.raw_nbytes / kv.stored_nbytes if kv.stored_nbytes else 1.0,
        file_nbytes=environment.nbytes,
        free_nbytes=environment.free_nbytes,
    )


def _stats_text(found: _Stats) -> str:
    stored, raw = size(found.disk_stored_nbytes), size(found.disk_raw_nbytes)
    rows = [
        ("store", f"{plain(found.store)}, format {found.format_version}, made {when(found.created_s)}"),
        ("sessions", f"{found.num_sessions:,}"),
        ("branches", f"{found.num_branches:,}"),
        ("checkpoints", f"{found.num_checkpoints:,}"),
        ("blocks", f"{found.disk_num_blocks:,}"),
        ("KV", f"{stored} stored, {raw} raw: {found.ratio:.2f}x"),
        ("data file", f"{size(found.file_nbytes)}, {size(found.free_nbytes)} of it free for later writes"),
    ]
    return facts(rows)


def _checkpoints(txn: ReadTransaction, damaged: list[CorruptionError]) -> _Checkpoints:
    """Return the checkpoints of all sessions, those of removed ones too."""
    found: _Checkpoints = {}
    for _, checkpoint in nodes.each(txn):
        if isinstance(checkpoint, CorruptionError):
            damaged.append(checkpoint)
        else:
            found.setdefault(checkpoint.session_id, {})[checkpoint.checkpoint_id] = checkpoint
    return found


def _reaches(
    txn: ReadTransaction, store: StoreView, checkpoints: _Checkpoints, damaged: list[CorruptionError]
) -> Iterator[_Reach]:
    for session in store.catalog.sessions(txn, damaged):
        known = checkpoints.get(session.session_id, {})
        for branch in store.catalog.branches(txn, session.session_id, damaged):
            line = lineage(branch.tip, known)
            yield _Reach(
                session=session.name,
                branch=branch.name,
                num_tokens=num_tokens(branch, known),
                digests=frozenset(digest for checkpoint in line for digest in checkpoint.digests()),
            )


def _costs(infos: _Infos, reaches: list[_Reach]) -> Iterator[_Cost]:
    num_names = Counter(digest for reach in reaches for digest in reach.digests)
    for reach in reaches:
        own = {digest for digest in reach.digests if num_names[digest] == 1}
        yield _Cost(
            session=reach.session,
            branch=reach.branch,
            num_tokens=reach.num_tokens,
            own=kv_size(infos, own),
            shared=kv_size(infos, reach.digests - own),
        )


def _sums(infos: _Infos, checkpoints: _Checkpoints, reaches: list[_Reach]) -> dict[str, KvSize]:
    """Return what no branch reaches, what no checkpoint names, and all; names as in `_SUMS`."""
    reached = {digest for reach in reaches for digest in reach.digests}
    named = {digest for each in checkpoints.values() for checkpoint in each.values() for digest in checkpoint.digests()}
    return {
        "dropped": kv_size(infos, named - reached),
        "unnamed": kv_size(infos, infos.keys() - named),
        "total": kv_size(infos, infos),
    }


def _du_text(costs: Iterable[_Cost], sums: Mapping[str, KvSize]) -> str:
    header = ("SESSION", "BRANCH", "TOKENS", "OWN", "OWN RAW", "SHARED", "SHARED RAW")
    rows = [
        (
            plain(cost.session),
            plain(cost.branch),
            "?" if cost.num_tokens is None else f"{cost.num_tokens:,}",
            *(size(nbytes) for kv in (cost.own, cost.shared) for nbytes in (kv.stored_nbytes, kv.raw_nbytes)),
        )
        for cost in costs
    ]
    return f"{table(header, rows, left=2)}\n\n{facts([(_SUMS[name], _sum_text(kv)) for name, kv in sums.items()])}"


def _sum_text(kv: KvSize) -> str:
    return f"{size(kv.stored_nbytes)} ({size(kv.raw_nbytes)} raw) in {count(kv.num_blocks, 'block')}"
