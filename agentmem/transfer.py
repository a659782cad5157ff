"""Export a session, or one of its branches, into one portable file, and import it into another store.

Tokens, KV, checkpoints, branches and metadata travel; the reflog and checkpoints that no branch reaches stay behind.
The file around the entries is bundle.py's. Knows nothing of models.

Entries, in this order:
    "SESS"  once: the msgpack map of the session
    "BLOK"  the record of a block, as kv/header.py describes it; each block once
    "CHKP"  checkpoint id (16) | the msgpack map of a checkpoint; parents before children
    "BRCH"  name bytes u16-le | map bytes u32-le | name, UTF-8 | the msgpack map of a branch | its open tokens, u32-le
The maps are those of the store's tables (tree/rows.py).
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agentmem._lmdb import Environment, Level, ReadTransaction
from agentmem.arrival import Arrival, ImportReport, MovedBranch, pack_branch
from agentmem.bundle import Kind, read_bundle, write_bundle
from agentmem.errors import CorruptionError, InvalidInputError, NotFoundError
from agentmem.ids import BlockDigest, CheckpointId, SessionId
from agentmem.kv.record import read_meta
from agentmem.tiers.disk import DiskTier
from agentmem.tree import rows
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import (
    BranchRecord,
    Checkpoint,
    Move,
    SessionRecord,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export wrote.

    Attributes:
        session: Name of the session.
        branches: Names of the branches.
        num_checkpoints: Checkpoints.
        num_blocks: Blocks.
        raw_nbytes: Bytes of the blocks' KV.
        nbytes: Bytes of the file.
    """

    session: str
    branches: tuple[str, ...]
    num_checkpoints: int
    num_blocks: int
    raw_nbytes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Departure:
    """What travels of a session, beside its blocks.

    Attributes:
        session: The session.
        checkpoints: What its branches reach, parents before children.
        branches: Its branches with their open tokens.
        moves: Its reflog, oldest first; empty when one branch travels alone.
    """

    session: SessionRecord
    checkpoints: tuple[Checkpoint, ...]
    branches: tuple[MovedBranch, ...]
    moves: tuple[Move, ...]

    def digests(self) -> list[BlockDigest]:
        """Return every record that the checkpoints name, each once."""
        return list(dict.fromkeys(digest for checkpoint in self.checkpoints for digest in checkpoint.digests()))

    def entries(self) -> Iterator[tuple[Kind, bytes]]:
        """Yield the entries but for the blocks, in order."""
        yield Kind.SESSION, rows.pack_session(self.session)
        for checkpoint in self.checkpoints:
            yield Kind.CHECKPOINT, checkpoint.checkpoint_id + rows.checkpoint_map(checkpoint)
        for branch in self.branches:
            yield Kind.BRANCH, pack_branch(branch)


# -- out


def export_session(
    environment: Environment, catalog: Catalog, disk: DiskTier, name: str, path: Path, *, branch: str | None = None
) -> ExportReport:
    """Write a session, or one branch of it, into the file at `path`, which appears whole or not at all.

    Works beside a process that writes; what that process has not saved yet stays behind.

    Args:
        environment: The store.
        catalog: Its catalog.
        disk: Its blocks.
        name: The session.
        path: The file; an older export there is replaced.
        branch: The only branch to export; None for all.

    Raises:
        NotFoundError: There is no such session or branch, or no such directory for the file.
        CorruptionError: What is to be exported is damaged in the store; no file is left.
        InvalidInputError: The path is in the store, or something else than an export.
        StorageFullError, ReadOnlyError: The file cannot be written.
    """
    if path.resolve().parent == environment.path.resolve():
        raise InvalidInputError(f"{str(path)!r} is inside the store: choose a path outside")
    departure = depart(environment, catalog, name, branch=branch)
    session, *others = departure.entries()
    digests = departure.digests()
    raw_nbytes = 0
    with write_bundle(path) as writer:
        writer.put(*session)
        for digest in digests:
            data = load_record(disk, digest)
            raw_nbytes += read_meta(data).raw_nbytes
            writer.put(Kind.BLOCK, data)
        for entry in others:
            writer.put(*entry)
    return ExportReport(
        session=name,
        branches=tuple(each.record.name for each in departure.branches),
        num_checkpoints=len(departure.checkpoints),
        num_blocks=len(digests),
        raw_nbytes=raw_nbytes,
        nbytes=path.stat().st_size,
    )


def depart(environment: Environment, catalog: Catalog, name: str, *, branch: str | None = None) -> Departure:
    """Return what is to travel of a session, or of one branch of it, as it is stored now.

    Raises:
        NotFoundError: There is no such session or branch.
        CorruptionError: What is to travel is damaged in the store.
    """
    with environment.read() as txn:
        session = catalog.find_session(txn, name)
        records = catalog.branches(txn, session.session_id)
        moves = catalog.moves(txn, session.session_id)
        if branch is not None:
            records, moves = [catalog.branch(txn, session.session_id, branch)], []
            session = dataclasses.replace(session, active_branch=branch)
        checkpoints = _lineages(txn, catalog, session.session_id, records)
        starts = [0 if record.tip is None else checkpoints[record.tip].num_tokens for record in records]
        branches = tuple(
            MovedBranch(record, start, catalog.open_tokens(txn, session.session_id, record.name))
            for record, start in zip(records, starts, strict=True)
        )
    return Departure(session, tuple(checkpoints.values()), branches, tuple(moves))


def load_record(disk: DiskTier, digest: BlockDigest) -> bytes:
    """Return the record of a block that is to travel.

    Raises:
        CorruptionError: It is missing or damaged; says what can be done.
    """
    try:
        return disk.load_record(digest)
    except (NotFoundError, CorruptionError) as error:
        raise CorruptionError(
            f"{error}; resume the session with its model, generate and checkpoint, which computes the block again, "
            "or export another branch"
        ) from error


def _lineages(
    txn: ReadTransaction, catalog: Catalog, session_id: SessionId, branches: Iterable[BranchRecord]
) -> dict[CheckpointId, Checkpoint]:
    """Return every checkpoint that the branches reach, parents before children."""
    found: dict[CheckpointId, Checkpoint] = {}
    for branch in branches:
        line: list[Checkpoint] = []
        at = branch.tip
        while at is not None and at not in found:
            try:
                line.append(catalog.checkpoint(txn, session_id, at))
            except NotFoundError as error:
                raise CorruptionError(f"branch {branch.name!r} cannot be exported: {error}") from error
            at = line[-1].parent_id
        found.update((checkpoint.checkpoint_id, checkpoint) for checkpoint in reversed(line))
    return found


# -- in


def import_session(
    environment: Environment, catalog: Catalog, disk: DiskTier, path: Path, *, name: str | None = None
) -> ImportReport:
    """Read a file that `export_session` wrote into the store, as a new session, durably.

    Every block is decoded and compared with its names before it is stored; those that the store has are not stored
    again. Checkpoints and branches are written at the end, in one operation: after an error nothing is imported, and
    the blocks that were stored until then are gc's. Nothing can prove that KV came from the model that the file names:
    import files of people whom you trust.

    Args:
        environment: The store.
        catalog: Its catalog.
        disk: Its blocks.
        path: The file.
        name: What to call the session; None: as in the file.

    Raises:
        AlreadyExistsError: The store has a session of that name.
        CorruptionError: The file is no export, damaged, cut off, or contradicts itself.
        FormatVersionError: It needs a newer agentmem.
        NotFoundError: There is no such file.
        StorageFullError, ReadOnlyError: The store cannot be written.
    """
    with read_bundle(path) as reader:
        arrival = Arrival(environment, catalog, disk, name)
        arrival.receive(reader.entries())
    try:
        environment.submit(arrival.write, level=Level.DURABLE, nbytes=arrival.metadata_nbytes).result()
    finally:
        catalog.forget(arrival.session_id)
    return arrival.report()
