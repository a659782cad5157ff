"""Remove what nobody names any more, and give the space back.

Removes in this order: checkpoints (children first), blocks, rows that belong to nothing. Each step is one operation of
its own, so gc may be stopped anywhere and runs beside sessions that go on. Knows nothing of models.
"""

import heapq
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentmem import _directory
from agentmem._lmdb import Environment, Level, ReadTransaction, Table, WriteTransaction
from agentmem.errors import CorruptionError
from agentmem.ids import BlockDigest, CheckpointId, SessionId
from agentmem.leases import leased_by_others
from agentmem.tiers.blockrows import BlockInfo
from agentmem.tiers.disk import DiskTier
from agentmem.tree import nodes, refs, rows, tails
from agentmem.tree.catalog import Catalog

logger = logging.getLogger(__name__)

# Measured on LMDB 0.9: after 4 GB were freed at once, the commits that followed took up to 84 ms.
_MAX_FREED_NBYTES = 64 << 20
_CHECKPOINTS_PER_OPERATION = 256

_FAR_AHEAD_S = float(1 << 33)
"""Everything was dropped before this time, whatever clocks say."""

KEPT_MOVES = 1000
"""Rows of its reflog that every session keeps, however old they are."""

_COMPACT_FILE = "data.mdb.compact"


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """What gc removed, or with `dry_run` would remove.

    Attributes:
        checkpoints: Checkpoints that nobody named for longer than the grace.
        num_blocks: Blocks that no checkpoint named and nobody used for longer than the grace. Those of checkpoints
            removed in the same run count as just used: they go after another grace.
        nbytes: Stored bytes of those blocks. The file does not shrink (`compact` does that); the store uses them again.
        num_rows: Rows that belonged to nothing, and rows of the reflog beyond `KEPT_MOVES` and the grace.
        num_stale_readers: Readers that were killed and kept old pages from being used again.
        damaged: What gc had to leave, because it could not be read; `check` says more.
        is_dry_run: Nothing was changed.
    """

    checkpoints: tuple[CheckpointId, ...]
    num_blocks: int
    nbytes: int
    num_rows: int
    num_stale_readers: int
    damaged: tuple[str, ...]
    is_dry_run: bool


@dataclass(frozen=True, slots=True)
class Spared:
    """What gc leaves alone although nobody names it.

    Attributes:
        sessions: All checkpoints of these sessions stay.
        checkpoints: These stay too: branches in memory reach them, whose records may not be written yet.
        blocks: Returns blocks that something in this process needs; asked when blocks are about to go.
    """

    sessions: Collection[SessionId] = ()
    checkpoints: Collection[CheckpointId] = ()
    blocks: Callable[[], Collection[BlockDigest]] = frozenset


NOTHING_SPARED = Spared()


@dataclass(frozen=True, slots=True)
class CompactReport:
    """Size of the data file before and after.

    Attributes:
        before_nbytes: Before.
        after_nbytes: After.
    """

    before_nbytes: int
    after_nbytes: int


def collect(
    environment: Environment,
    catalog: Catalog,
    disk: DiskTier,
    *,
    grace_s: float,
    now_s: float,
    spared: Spared = NOTHING_SPARED,
    dry_run: bool = False,
) -> GcReport:
    """Remove what nobody has named for longer than `grace_s`.

    A checkpoint whose only name was a removed child goes in the same run, unless a branch left it within the grace.
    With a grace of 0 blocks go that a session of another process stored but has not named in a checkpoint yet; it
    stores them again.

    Args:
        environment: The store.
        catalog: Its catalog.
        disk: Its blocks.
        grace_s: Seconds for which what was dropped can still be brought back.
        now_s: Unix time.
        spared: What to leave alone.
        dry_run: Change nothing; say what would be removed.

    Raises:
        ReadOnlyError: The store cannot be written, and this is no dry run.
    """
    sweep = _Sweep(environment, catalog, disk, spared, before_s=now_s - grace_s)
    sweep.plan()
    if dry_run:
        return sweep.preview(now_s)
    num_stale_readers = environment.clear_stale_readers()
    checkpoints = sweep.remove_checkpoints()
    num_blocks, nbytes = sweep.remove_blocks()
    num_rows = environment.submit(lambda txn: _delete_rows(txn, sweep.before_s), level=Level.REMOVAL).result()
    report = GcReport(
        checkpoints=tuple(checkpoints),
        num_blocks=num_blocks,
        nbytes=nbytes,
        num_rows=num_rows,
        num_stale_readers=num_stale_readers,
        damaged=tuple(sweep.damaged),
        is_dry_run=False,
    )
    logger.info("gc removed %d checkpoints, %d blocks of %d bytes", len(checkpoints), num_blocks, nbytes)
    return report


def relieve(
    environment: Environment, catalog: Catalog, disk: DiskTier, nbytes: int, *, spared: Spared
) -> list[CheckpointId]:
    """Remove what nobody names, whatever its grace, until about `nbytes` are free: the disk budget is used up.

    What was dropped first goes first. Returns the checkpoints that were removed. A failed write of somebody else is
    not taken for one of its own.
    """
    sweep = _Sweep(environment, catalog, disk, spared, before_s=_FAR_AHEAD_S)
    removed: list[CheckpointId] = []
    freed = 1
    while nbytes > 0 and freed:
        wanted = min(nbytes, _MAX_FREED_NBYTES)
        checkpoints, freed = environment.submit(partial(sweep.relieve, nbytes=wanted), level=Level.RELAXED).result()
        removed += checkpoints
        nbytes -= freed
    if removed:
        logger.info("the disk budget is short: removed %d dropped checkpoints before their grace", len(removed))
    return removed


def compact(path: Path, *, key: bytes | None = None) -> CompactReport:
    """Rewrite the store's data file without its free pages. The old file stays until the copy is whole: it needs room.

    Raises:
        StoreLockedError: Somebody has the store open, for writing or reading.
        StorageFullError: There is no room for the copy.
        NotFoundError: There is no store.
    """
    with Environment.open(path, exclusive=True, key=key) as environment:
        # What is open here is the old file, which nobody writes to any more.
        before_nbytes = environment.nbytes
        copy = path / _COMPACT_FILE
        try:
            copy.unlink(missing_ok=True)  # a process that was killed may have left one
            environment.copy_to(copy)
            copy.replace(path / _directory.DATA_FILE)
        finally:
            copy.unlink(missing_ok=True)
        _directory.sync(path)
        return CompactReport(before_nbytes, environment.nbytes)


class _Sweep:
    """One run of gc: what is due, and its removal."""

    def __init__(
        self, environment: Environment, catalog: Catalog, disk: DiskTier, spared: Spared, *, before_s: float
    ) -> None:
        self.before_s = before_s
        self.due: list[bytes] = []
        self.damaged: list[str] = []
        self._environment = environment
        self._catalog = catalog
        self._disk = disk
        self._spared = spared
        self._leased: set[SessionId] = set()
        self._until_ns = int(before_s * 1e9)

    def plan(self) -> None:
        """List the keys of the checkpoints that may go, children before parents."""
        with self._environment.read() as txn:
            self._plan(txn)

    def _plan(self, txn: ReadTransaction) -> None:
        self.due = []
        self._leased = leased_by_others(txn, self._environment)
        todo = [each for each in refs.unnamed(txn, self._until_ns) if not self._is_spared(each[1])]
        left: dict[bytes, rows.NodeRefs] = {}
        while todo:
            dropped_ns, node = heapq.heappop(todo)
            parent = self._parent(txn, node)
            if parent is None:
                continue
            counts = left.get(parent) or refs.find(txn, parent)
            if counts is None:
                continue
            counts = left[parent] = rows.NodeRefs(counts.refs - 1, max(counts.dropped_ns, dropped_ns))
            if counts.refs == 0 and counts.dropped_ns <= self._until_ns and not self._is_spared(parent):
                heapq.heappush(todo, (counts.dropped_ns, parent))

    def _is_spared(self, node: bytes) -> bool:
        """Say whether somebody has the checkpoint in memory: a session of another handle, or one that is busy here."""
        session_id = SessionId(node[: rows.SESSION_ID_NBYTES])
        is_reached = CheckpointId(node[rows.SESSION_ID_NBYTES :]) in self._spared.checkpoints
        return is_reached or session_id in self._leased or session_id in self._spared.sessions

    def _parent(self, txn: ReadTransaction, node: bytes) -> bytes | None:
        """Add a checkpoint to what is due; return its parent's key."""
        try:
            checkpoint = nodes.find(txn, node)
        except CorruptionError as error:
            self.damaged.append(str(error))
            return None
        if checkpoint is None:
            self.damaged.append(f"checkpoint {node.hex()} is listed for removal but is not stored")
            return None
        self.due.append(node)
        parent_id = checkpoint.parent_id
        return None if parent_id is None else rows.node_key(checkpoint.session_id, parent_id)

    def remove_checkpoints(self) -> list[CheckpointId]:
        """Remove what is due, some hundred checkpoints an operation; return what was removed."""
        removed: list[CheckpointId] = []
        starts = range(0, len(self.due), _CHECKPOINTS_PER_OPERATION)
        todo = deque(self.due[start : start + _CHECKPOINTS_PER_OPERATION] for start in starts)
        while todo:
            batch = todo.popleft()
            try:
                removed += self._environment.submit(partial(self._remove, batch=batch), level=Level.REMOVAL).result()
            except CorruptionError as error:
                # One damaged checkpoint must not keep the others: try halves, down to the one.
                middle = len(batch) // 2
                if middle:
                    todo.extendleft((batch[middle:], batch[:middle]))
                else:
                    self.damaged.append(str(error))
        return removed

    def _remove(self, txn: WriteTransaction, batch: list[bytes]) -> list[CheckpointId]:
        removed = []
        self._leased = leased_by_others(txn, self._environment)
        for node in batch:
            counts = refs.find(txn, node)
            checkpoint = nodes.find(txn, node)
            if self._is_spared(node):
                continue  # opened by another handle since the plan was made
            # A session may have named it again since then, and even dropped it again.
            if counts is None or checkpoint is None or counts.refs or counts.dropped_ns > self._until_ns:
                continue
            self._disk.release(txn, checkpoint.digests())
            self._catalog.remove_checkpoint(txn, checkpoint)
            removed.append(checkpoint.checkpoint_id)
        return removed

    def remove_blocks(self) -> tuple[int, int]:
        """Remove unnamed blocks, 64 MB an operation; return their number and bytes."""
        total_blocks, total_nbytes, num_blocks = 0, 0, 1
        while num_blocks:
            num_blocks, nbytes = self._environment.submit(
                partial(self._free, max_nbytes=_MAX_FREED_NBYTES), level=Level.REMOVAL
            ).result()
            total_blocks += num_blocks
            total_nbytes += nbytes
        return total_blocks, total_nbytes

    def relieve(self, txn: WriteTransaction, nbytes: int) -> tuple[list[CheckpointId], int]:
        """Remove dropped checkpoints with their blocks, and then other unnamed blocks, until `nbytes` are free."""
        self._plan(txn)
        removed: list[CheckpointId] = []
        freed, held = 0, self._held(txn)
        for node in self.due:
            checkpoint = nodes.find(txn, node) if freed < nbytes else None
            if checkpoint is not None and self._remove(txn, [node]):
                removed.append(checkpoint.checkpoint_id)
                digests = checkpoint.digests()
                freed += self._disk.remove_unreferenced(txn, self.before_s, nbytes, among=digests, held=held)[1]
        if freed < nbytes:
            freed += self._disk.remove_unreferenced(txn, self.before_s, nbytes - freed, held=held)[1]
        return removed, freed

    def _free(self, txn: WriteTransaction, max_nbytes: int) -> tuple[int, int]:
        return self._disk.remove_unreferenced(txn, self.before_s, max_nbytes, held=self._held(txn))

    def _held(self, txn: ReadTransaction) -> set[BlockDigest]:
        """Return blocks that stay although no checkpoint names them."""
        return {*self._spared.blocks(), *self._catalog.open_payloads(txn)}

    def preview(self, now_s: float) -> GcReport:
        """Say what a run would remove."""
        with self._environment.read() as txn:
            released: Counter[BlockDigest] = Counter()
            held = self._held(txn)
            for node in self.due:
                checkpoint = nodes.find(txn, node)
                released.update(checkpoint.digests() if checkpoint is not None else ())
            sizes = [
                info.stored_nbytes
                for digest, info in self._disk.iter_index(txn)
                if isinstance(info, BlockInfo) and self._would_go(info, released[digest], now_s) and digest not in held
            ]
            return GcReport(
                checkpoints=tuple(CheckpointId(node[rows.SESSION_ID_NBYTES :]) for node in self.due),
                num_blocks=len(sizes),
                nbytes=sum(sizes),
                num_rows=len(_surplus_rows(txn, self.before_s)),
                num_stale_readers=0,
                damaged=tuple(self.damaged),
                is_dry_run=True,
            )

    def _would_go(self, info: BlockInfo, num_released: int, now_s: float) -> bool:
        last_use_s = now_s if num_released else info.last_use_s
        return info.is_counted and info.refs <= num_released and last_use_s <= self.before_s


def _surplus_rows(txn: ReadTransaction, before_s: float) -> list[tuple[Table, bytes]]:
    """Return open tokens of no branch, and moves that are both old and many."""
    return [
        *((Table.TAILS, key) for key in tails.orphans(txn)),
        *((Table.REFLOG, key) for key in _old_moves(txn, before_s)),
    ]


def _old_moves(txn: ReadTransaction, before_s: float) -> Iterator[bytes]:
    stored = txn.scan_each(Table.REFLOG)
    for _, moves in itertools.groupby(stored, key=lambda row: row[0][: rows.SESSION_ID_NBYTES]):
        for key, value in list(moves)[:-KEPT_MOVES]:
            if isinstance(value, CorruptionError) or rows.unpack_move(key, value).time_s <= before_s:
                yield key


def _delete_rows(txn: WriteTransaction, before_s: float) -> int:
    surplus = _surplus_rows(txn, before_s)
    for table, key in surplus:
        txn.delete(table, key)
    return len(surplus)
