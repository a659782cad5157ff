"""Forget a session at once and for good: no grace, no way back.

Its records go in one operation, then the blocks that nobody else names. What they were written on stays in the data
file's free pages until `agentmem.gc.compact` writes a file without them. Knows nothing of models.
"""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from agentmem._lmdb import Environment, Level, ReadTransaction, Table, WriteTransaction
from agentmem.errors import CorruptionError
from agentmem.ids import BlockDigest, SessionId, short
from agentmem.leases import require_free
from agentmem.tiers.blockrows import read_info
from agentmem.tiers.disk import DiskTier
from agentmem.tree import nodes, pins, rows
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

_MAX_FREED_NBYTES = 64 << 20
"""Bytes of records per operation, as in gc: freeing more at once makes the commits after it slow."""

_ANY_AGE_S = float(1 << 33)
_TABLES = (Table.BRANCHES, Table.TAILS, Table.NODES, Table.NREFS, Table.REFLOG, Table.LEASES)
"""The tables whose keys begin with the session's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetReport:
    """What was forgotten, or with `dry_run` would be.

    Attributes:
        session: The session.
        num_branches: Its branches.
        num_checkpoints: Its checkpoints.
        num_blocks: Blocks, layer states and model inputs that went with it. Also those that nobody had named yet,
            whosever they are: a session that needs one stores it again.
        nbytes: Stored bytes of these.
        num_shared_blocks: Blocks of the session that stay, because others name them too.
        shared_with: The other sessions that name them.
        damaged: What could not be read: which blocks it named is unknown, and they may still be stored.
        is_dry_run: Nothing was changed.
    """

    session: str
    num_branches: int
    num_checkpoints: int
    num_blocks: int
    nbytes: int
    num_shared_blocks: int
    shared_with: tuple[str, ...]
    damaged: tuple[str, ...]
    is_dry_run: bool


@dataclass(slots=True)
class _Traces:
    """What the store holds of a session.

    Attributes:
        num_branches: Its branches.
        num_checkpoints: Its checkpoints that can be read.
        digests: What they name.
        others: What of that other sessions name too, and which.
        damaged: What could not be read.
    """

    num_branches: int = 0
    num_checkpoints: int = 0
    digests: set[BlockDigest] = field(default_factory=set)
    others: dict[BlockDigest, set[SessionId]] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)


def forget(
    environment: Environment,
    catalog: Catalog,
    disk: DiskTier,
    name: str,
    *,
    held: Callable[[], Collection[BlockDigest]] = frozenset,
    dry_run: bool = False,
) -> ForgetReport:
    """Remove a session from the store, with all that only it names, durably.

    Args:
        environment: The store.
        catalog: Its catalog.
        disk: Its blocks.
        name: The session. It may not be open here.
        held: Returns the blocks that open sessions of this process need.
        dry_run: Change nothing; say what would be forgotten.

    Raises:
        NotFoundError: There is no such session.
        SessionLeasedError: Another handle writes to it.
        ReadOnlyError: The store cannot be written, and this is no dry run.
    """
    with environment.read() as txn:
        session_id = _session_id(txn, catalog, name)
        traces = _find(txn, session_id)
        num_blocks, nbytes = _size(txn, traces)
    if not dry_run:

        def operation(txn: WriteTransaction) -> _Traces:
            require_free(txn, environment, session_id, name)
            return _remove_records(txn, disk, session_id)

        traces = environment.submit(operation, level=Level.REMOVAL).result()
        num_blocks, nbytes = _remove_blocks(environment, catalog, disk, traces, held)
        catalog.forget(session_id)
        logger.info("forgot session %s: %d blocks of %d bytes", session_id.hex(), num_blocks, nbytes)
    return ForgetReport(
        session=name,
        num_branches=traces.num_branches,
        num_checkpoints=traces.num_checkpoints,
        num_blocks=num_blocks,
        nbytes=nbytes,
        num_shared_blocks=len(traces.others),
        shared_with=_names(environment, catalog, traces),
        damaged=tuple(traces.damaged),
        is_dry_run=dry_run,
    )


def _session_id(txn: ReadTransaction, catalog: Catalog, name: str) -> SessionId:
    """Return the id of a session whose record may be damaged."""
    found = txn.get(Table.SESSIONS, rows.session_name_key(name))
    return catalog.find_session(txn, name).session_id if found is None else SessionId(found)


def _find(txn: ReadTransaction, session_id: SessionId) -> _Traces:
    traces = _Traces()
    traces.num_branches = sum(1 for _ in txn.scan_each(Table.BRANCHES, session_id))
    for _, checkpoint in nodes.each(txn, session_id):
        if isinstance(checkpoint, CorruptionError):
            traces.damaged.append(str(checkpoint))
            continue
        traces.num_checkpoints += 1
        traces.digests.update(checkpoint.digests())
    for _, checkpoint in nodes.each(txn):
        if isinstance(checkpoint, Checkpoint) and checkpoint.session_id != session_id:
            for digest in traces.digests.intersection(checkpoint.digests()):
                traces.others.setdefault(digest, set()).add(checkpoint.session_id)
    return traces


def _names(environment: Environment, catalog: Catalog, traces: _Traces) -> tuple[str, ...]:
    """Return the names of the sessions that share blocks; of a removed one that gc has not taken yet, its id."""
    with environment.read() as txn:
        known = {record.session_id: record.name for record in catalog.sessions(txn, [])}
    ids: set[SessionId] = set().union(*traces.others.values())
    return tuple(sorted(known.get(each, f"removed session {short(each)}") for each in ids))


def _size(txn: ReadTransaction, traces: _Traces) -> tuple[int, int]:
    """Return the number of blocks, and their stored bytes, that only the session names."""
    sizes = []
    for digest in traces.digests - traces.others.keys():
        try:
            info = read_info(txn, digest)
        except CorruptionError:
            continue
        sizes += [] if info is None else [info.stored_nbytes]
    return len(sizes), sum(sizes)


def _remove_records(txn: WriteTransaction, disk: DiskTier, session_id: SessionId) -> _Traces:
    """Remove every row of a session; return what there was of it."""
    traces = _find(txn, session_id)
    for _, checkpoint in nodes.each(txn, session_id):
        if isinstance(checkpoint, Checkpoint):
            _release(txn, disk, checkpoint, traces.damaged)
    for node in list(pins.each(txn, session_id)):
        with contextlib.suppress(CorruptionError):  # of a count that goes anyway
            pins.remove(txn, node, 0)
    for table, key in list(_rows(txn, session_id)):
        txn.delete(table, key)
    return traces


def _rows(txn: ReadTransaction, session_id: SessionId) -> Iterator[tuple[Table, bytes]]:
    """Yield every row of a session, damaged ones too: they are told by their keys."""
    for table in _TABLES:
        for key, _ in txn.scan_each(table, session_id):
            yield table, key
    for key, _ in txn.scan_each(Table.TOMB):
        if rows.split_tomb_key(key)[1].startswith(session_id):
            yield Table.TOMB, key
    for key, value in txn.scan_each(Table.SESSIONS, rows.SESSION_NAME_PREFIX):
        if value == session_id:
            yield Table.SESSIONS, key
    yield Table.SESSIONS, rows.session_key(session_id)


def _release(txn: WriteTransaction, disk: DiskTier, checkpoint: Checkpoint, damaged: list[str]) -> None:
    for digest in checkpoint.digests():
        try:
            disk.release(txn, [digest])
        except CorruptionError as error:
            damaged.append(str(error))


def _remove_blocks(
    environment: Environment,
    catalog: Catalog,
    disk: DiskTier,
    traces: _Traces,
    held: Callable[[], Collection[BlockDigest]],
) -> tuple[int, int]:
    """Remove what nobody names, some megabytes at a time: the session's, then what may have been its own."""
    total_blocks, total_nbytes = 0, 0
    for among in (traces.digests, None):
        num_blocks = 1
        while num_blocks:
            num_blocks, nbytes = environment.submit(
                lambda txn, among=among: disk.remove_unreferenced(  # type: ignore[misc]  # a default has no type
                    txn, _ANY_AGE_S, _MAX_FREED_NBYTES, among=among, held={*held(), *catalog.open_payloads(txn)}
                ),
                level=Level.REMOVAL,
            ).result()
            total_blocks += num_blocks
            total_nbytes += nbytes
    return total_blocks, total_nbytes
