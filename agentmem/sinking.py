"""Letting KV sink from the disk to the tiers below: first the copy, then the name of its place, then the bytes here go.

At every moment a durable copy is where the store says that it is. Layer states and model inputs stay on disk: they are
small, and some of them cannot be computed again.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from agentmem._lmdb import Environment, Level, ReadTransaction, WriteTransaction
from agentmem.errors import AgentMemError, CorruptionError, InvalidInputError, NotFoundError
from agentmem.ids import BlockDigest, SessionId
from agentmem.kv import record as record_format
from agentmem.kv.record import Record
from agentmem.leases import leased_by_others
from agentmem.tiers.blockrows import read_info
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.remote import RecordTier
from agentmem.tree import nodes
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import Checkpoint, SessionRecord

logger = logging.getLogger(__name__)

_BATCH_NBYTES = 16 << 20
"""Records that sink together: one request and one transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkReport:
    """What sank.

    Attributes:
        num_blocks: Blocks whose records are below now, and not on disk any more.
        nbytes: Bytes of records that the disk let go of.
        num_refused: Blocks that the tier did not take; they stay.
    """

    num_blocks: int = 0
    nbytes: int = 0
    num_refused: int = 0


def idle_sessions(
    txn: ReadTransaction, catalog: Catalog, environment: Environment, before_s: float, opened: Collection[SessionId]
) -> tuple[list[SessionRecord], list[SessionId]]:
    """Return the sessions that nobody has open and that were used last before `before_s`, and the ids of the others.

    The one that was not used for the longest time comes first.
    """
    leased = leased_by_others(txn, environment) | set(opened)
    idle: list[tuple[float, SessionRecord]] = []
    busy: list[SessionId] = []
    for record in catalog.sessions(txn, []):
        branches = catalog.branches(txn, record.session_id, [])
        used_s = max([record.updated_s, *(branch.updated_s for branch in branches)])  # every verb writes its branch
        if used_s <= before_s and record.session_id not in leased:
            idle.append((used_s, record))
        else:
            busy.append(record.session_id)
    return [record for _, record in sorted(idle, key=lambda each: each[0])], busy


def idle_blocks(txn: ReadTransaction, session_ids: Iterable[SessionId]) -> list[BlockDigest]:
    """Return the blocks that checkpoints of sessions name and that are on disk."""
    return [digest for digest in named_blocks(txn, session_ids) if _is_here(txn, digest)]


def named_blocks(txn: ReadTransaction, session_ids: Iterable[SessionId]) -> list[BlockDigest]:
    """Return the blocks that checkpoints of sessions name, wherever they are."""
    found: dict[BlockDigest, None] = {}
    for session_id in session_ids:
        for _, checkpoint in nodes.each(txn, session_id):
            if isinstance(checkpoint, Checkpoint):
                tail = (checkpoint.tail,) if checkpoint.tail is not None else ()
                found.update((block.digest, None) for block in (*checkpoint.blocks, *tail))
    return list(found)


def sink(environment: Environment, disk: DiskTier, tier: RecordTier, digests: Sequence[BlockDigest]) -> SinkReport:
    """Move the records of blocks from the disk to a durable tier below, one transaction for each batch.

    Raises:
        InvalidInputError: The tier may lose what it is given.
        TierUnavailableError: The tier does not answer. What sank before is below, the rest is on disk.
        ReadOnlyError: The store cannot be written.
    """
    if not tier.is_durable:
        raise InvalidInputError(f"tier {tier.name} may lose what it is given: nothing sinks to it for good")
    report = SinkReport()
    for records in _batches(disk, digests):
        taken = [record.digest for record, is_here in zip(records, tier.put_many(records), strict=True) if is_here]
        held = [digest for digest, is_here in zip(taken, tier.contains_many(taken), strict=True) if is_here]

        def operation(txn: WriteTransaction, held: Sequence[BlockDigest] = held) -> int:
            return disk.sink(txn, held)

        nbytes = environment.submit(operation, level=Level.REMOVAL).result()
        report = SinkReport(
            num_blocks=report.num_blocks + len(held),
            nbytes=report.nbytes + nbytes,
            num_refused=report.num_refused + len(records) - len(held),
        )
    return report


def _is_here(txn: ReadTransaction, digest: BlockDigest) -> bool:
    try:
        info = read_info(txn, digest)
    except CorruptionError:
        return False
    return info is not None and not info.is_below


def _batches(disk: DiskTier, digests: Sequence[BlockDigest]) -> Iterator[list[Record]]:
    """Yield the records of blocks, some megabytes at a time; what cannot be read is left where it is."""
    batch: list[Record] = []
    for digest in digests:
        try:
            data = disk.load_record(digest)
        except NotFoundError:
            continue
        except AgentMemError as error:
            logger.warning("block %s does not sink: %s", digest.hex(), error)
            continue
        batch.append(Record.of(record_format.read_meta(data), data))
        if sum(len(record.data) for record in batch) >= _BATCH_NBYTES:
            yield batch
            batch = []
    if batch:
        yield batch
