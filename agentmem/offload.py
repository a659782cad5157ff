"""Push sessions of a store into a lake, and pull them from there into any other store.

What travels is what an export holds (transfer.py), and the reflog. Knows nothing of models.
"""

import dataclasses
import hashlib
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentmem._lmdb import Environment, Level, Table, WriteTransaction
from agentmem.arrival import Arrival
from agentmem.bundle import Kind
from agentmem.errors import CorruptionError
from agentmem.ids import BlockDigest, SessionId
from agentmem.kv.header import RecordMeta
from agentmem.lake.index import Label, SessionIndex
from agentmem.lake.lake import Lake, Parcel
from agentmem.lake.segment import Entry
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.parts import read_head
from agentmem.transfer import depart, load_record
from agentmem.tree import rows
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import Checkpoint, check_name
from agentmem.tree.fields import CHECKPOINT_ID_NBYTES

_FETCH_NBYTES = 64 << 20
"""Bytes of records that are fetched and in memory at once."""

_BASE_PREFIX = b"lake"
_BASE = struct.Struct(">Q16s")
"""Row of `meta`: "lake" | session id (8), to the version that the session continues, and 16 bytes of blake2b that name
the lake and what the session is called there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What a push did.

    Attributes:
        session: What the session is called in the lake.
        version: Its version there.
        num_blocks: Blocks, layer states and model inputs that it names.
        num_new_blocks: Those that the lake did not have.
        put_nbytes: Bytes that were put for them.
    """

    session: str
    version: int
    num_blocks: int
    num_new_blocks: int
    put_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReport:
    """What a pull brought.

    Attributes:
        session: Name of the new session.
        session_id: Its id, new in every pull.
        version: Its version in the lake.
        branches: Names of its branches.
        num_checkpoints: Checkpoints.
        num_blocks: Blocks, layer states and model inputs that it names.
        num_new_blocks: Those that the store did not have, and has now.
        num_lost_blocks: Those that are missing from the lake or damaged there: their tokens are computed again.
        raw_nbytes: Bytes of their KV.
    """

    session: str
    session_id: SessionId
    version: int
    branches: tuple[str, ...]
    num_checkpoints: int
    num_blocks: int
    num_new_blocks: int
    num_lost_blocks: int
    raw_nbytes: int


def push(
    environment: Environment, catalog: Catalog, disk: DiskTier, lake: Lake, name: str, *, as_name: str | None = None
) -> PushReport:
    """Put a session into a lake as it is stored now, as the next version of what it was pulled or pushed as before.

    Works beside a process that writes to the session; what that process has not saved yet stays behind. Blocks that the
    lake has are not put again.

    Args:
        environment: The store.
        catalog: Its catalog.
        disk: Its blocks.
        lake: The lake, opened with the store's key if it is encrypted.
        name: The session.
        as_name: What to call it in the lake; None: as in the store.

    Raises:
        NotFoundError: There is no such session.
        AlreadyExistsError: The lake has a session of that name that is not the one that this store's goes on from.
        CorruptionError: What is to be pushed is damaged in the store.
        TierUnavailableError, StorageFullError: The lake cannot be written; others see the version before.
    """
    departure = depart(environment, catalog, name)
    target = check_name("session", name if as_name is None else as_name)
    session = dataclasses.replace(departure.session, name=target)
    departure = dataclasses.replace(departure, session=session)
    digests = tuple(departure.digests())
    label = Label(
        name=target,
        version=_base(environment, lake, session.session_id, target),
        created_s=time.time(),
        model_name=session.model_name,
        num_branches=len(departure.branches),
        num_checkpoints=len(departure.checkpoints),
        num_blocks=len(digests),
        nbytes=0,
    )
    parcel = Parcel(
        label=label,
        entries=tuple((kind.value, data) for kind, data in departure.entries()),
        moves=tuple(rows.pack_move(move) for move in departure.moves),
        digests=digests,
    )
    pushed = lake.push(parcel, lambda digest: load_record(disk, digest))
    _note_base(environment, lake, session.session_id, target, pushed.version)
    return PushReport(
        session=target,
        version=pushed.version,
        num_blocks=len(digests),
        num_new_blocks=pushed.num_new_blocks,
        put_nbytes=pushed.put_nbytes,
    )


def pull(
    environment: Environment,
    catalog: Catalog,
    disk: DiskTier,
    lake: Lake,
    name: str,
    *,
    as_name: str | None = None,
    version: int | None = None,
    lazy: bool = False,
) -> PullReport:
    """Bring a session from a lake into the store, as a new session, durably.

    Every block is decoded and compared with its names before it is stored; those that the store has are not fetched.
    What is missing or damaged in the lake is left out: its tokens are there, and are computed again. After an error
    there is no new session, and the blocks that were stored until then are gc's. Nothing can prove that KV came from
    the model that the lake names: pull from lakes of people whom you trust.

    Args:
        environment: The store.
        catalog: Its catalog.
        disk: Its blocks.
        lake: The lake, opened with the key that it was pushed with.
        name: What the session is called in the lake.
        as_name: What to call it here; None: as in the lake.
        version: Which version of it; None: the newest.
        lazy: Leave KV in the lake: whoever needs a block loads it from there. Layer states and model inputs come now.

    Raises:
        AlreadyExistsError: The store has a session of that name.
        NotFoundError: The lake has no such session.
        CorruptionError: The session's index object is damaged, or a model input that only the lake had.
        TierUnavailableError: The lake does not answer.
        StorageFullError, ReadOnlyError: The store cannot be written.
    """
    index = lake.pull(name, version=version)
    arrival = Arrival(environment, catalog, disk, as_name)
    try:
        lost, left = _receive(arrival, disk, lake, index, is_lazy=lazy)
        moves = [rows.unpack_move(rows.move_key(arrival.session_id, 0), move) for move in index.moves]

        def write(txn: WriteTransaction) -> None:
            disk.know(txn, left)
            arrival.write(txn, operation="pull", moves=moves)
            _put_base(txn, arrival.session_id, _lake_name(lake, name), index.label.version)

        environment.submit(write, level=Level.DURABLE, nbytes=arrival.metadata_nbytes).result()
    except CorruptionError as error:
        raise CorruptionError(f"session {name!r} of lake {lake.url} cannot be pulled: {error}") from error
    finally:
        catalog.forget(arrival.session_id)
    report = dataclasses.asdict(arrival.report())
    return PullReport(**report, version=index.label.version, num_lost_blocks=len(lost))


def is_shared(environment: Environment, lake: Lake, session_id: SessionId, name: str) -> bool:
    """Say whether a session was pushed to a lake, or pulled from there, under its name; another's was not."""
    return _base(environment, lake, session_id, name) > 0


def _receive(
    arrival: Arrival, disk: DiskTier, lake: Lake, index: SessionIndex, *, is_lazy: bool
) -> tuple[set[BlockDigest], list[RecordMeta]]:
    """Take a session's entries, and fetch the blocks that the store lacks.

    Returns:
        The blocks that cannot be had, and what those that are left in the lake say of themselves.
    """
    first, *others = ((Kind(kind), data) for kind, data in index.entries)
    arrival.receive([first])
    entries = {entry.digest: entry for segment in index.segments for entry in segment.entries}
    checkpoints = _checkpoints(index)
    named = dict.fromkeys(digest for checkpoint in checkpoints for digest in checkpoint.digests())
    digests = [digest for digest in named if digest in entries]
    missing = [digest for digest in digests if not disk.contains(digest)]
    kv = {digest for checkpoint in checkpoints for digest in _kv_of(checkpoint)} if is_lazy else set()
    lost: set[BlockDigest] = set()
    for batch in _batches([entries[digest] for digest in missing if digest not in kv]):
        names = [entry.digest for entry in batch]
        for digest, data in zip(names, lake.fetch_many(names), strict=True):
            if data is None or not arrival.store(digest, data):
                lost.add(digest)
    is_stored = {digest for digest in missing if digest not in kv} - lost
    metas = {digest: read_head(entries[digest].head) for digest in digests if digest not in is_stored}
    arrival.expect(metas.values(), lost)
    arrival.receive(others)
    return lost, [metas[digest] for digest in missing if digest in kv]


def _checkpoints(index: SessionIndex) -> list[Checkpoint]:
    bodies = [data for kind, data in index.entries if kind == Kind.CHECKPOINT.value]
    nowhere = bytes(rows.SESSION_ID_NBYTES)
    return [rows.checkpoint_of(nowhere + data[:CHECKPOINT_ID_NBYTES], data[CHECKPOINT_ID_NBYTES:]) for data in bodies]


def _kv_of(checkpoint: Checkpoint) -> list[BlockDigest]:
    """Return the records of a checkpoint that are KV of its tokens."""
    return [block.digest for block in (*checkpoint.blocks, *([checkpoint.tail] if checkpoint.tail else []))]


def _batches(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    batch: list[Entry] = []
    nbytes = 0
    for entry in entries:
        batch.append(entry)
        nbytes += sum(entry.part_nbytes)
        if nbytes >= _FETCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _base(environment: Environment, lake: Lake, session_id: SessionId, name: str) -> int:
    """Return the version of `name` in the lake that a session goes on from; 0 when it was never there."""
    with environment.read() as txn:
        value = txn.get(Table.META, _BASE_PREFIX + session_id)
    if value is None or len(value) != _BASE.size:
        return 0
    version, lake_name = _BASE.unpack(value)
    return int(version) if lake_name == _lake_name(lake, name) else 0


def _note_base(environment: Environment, lake: Lake, session_id: SessionId, name: str, version: int) -> None:
    lake_name = _lake_name(lake, name)
    operation = lambda txn: _put_base(txn, session_id, lake_name, version)  # noqa: E731 - it is one call
    environment.submit(operation, level=Level.DURABLE).result()


def _put_base(txn: WriteTransaction, session_id: SessionId, lake_name: bytes, version: int) -> None:
    """Note what a session goes on from, and forget that of sessions that are gone."""
    for key, _ in list(txn.scan_each(Table.META, _BASE_PREFIX)):
        if txn.get(Table.SESSIONS, rows.session_key(SessionId(key[len(_BASE_PREFIX) :]))) is None:
            txn.delete(Table.META, key)
    txn.put(Table.META, _BASE_PREFIX + session_id, _BASE.pack(version, lake_name))


def _lake_name(lake: Lake, name: str) -> bytes:
    return hashlib.blake2b(lake.uuid + name.encode(), digest_size=16).digest()
