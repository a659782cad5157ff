"""Sinking by time: what nobody has touched for as long as its tier allows goes one tier down.

A sweep never takes what a verb needs, and waits for nobody: what is busy is looked at again the next time. KV leaves a
tier only when a durable copy of it is below.
"""

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from agentmem._background import give_way
from agentmem._lmdb import Environment
from agentmem.config import Residency
from agentmem.errors import AgentMemError, AlreadyExistsError, NotFoundError
from agentmem.ids import BlockDigest
from agentmem.kv import record as record_format
from agentmem.kv.record import Record
from agentmem.lake.lake import Lake
from agentmem.offload import is_shared, pull, push
from agentmem.runtime import Runtime
from agentmem.session import Session
from agentmem.sinking import SinkReport, idle_blocks, idle_sessions, named_blocks, sink
from agentmem.tiers.remote import RecordTier
from agentmem.tree.catalog import Catalog

logger = logging.getLogger(__name__)

_LOOKS = 4
"""How often a sweep comes in the shortest residency."""

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.05, 60.0
_BATCH_BLOCKS = 16

_SINK_PART = 8
"""A short disk budget is relieved of an eighth of it at least, when sessions have to sink for it."""


@dataclass(slots=True)
class SweepReport:
    """What a sweep moved, or an offload.

    Attributes:
        num_branches: Branches that left the device.
        num_to_pool: Blocks that the pool took.
        num_from_host: Blocks that left host memory.
        num_to_lake: Blocks that left the disk for a durable tier below.
        nbytes: Bytes of records that the disk let go of.
        sessions: The sessions whose blocks left the disk.
    """

    num_branches: int = 0
    num_to_pool: int = 0
    num_from_host: int = 0
    num_to_lake: int = 0
    nbytes: int = 0
    sessions: list[str] = field(default_factory=list)

    def add(self, name: str, sunk: SinkReport) -> None:
        """Count what sank of a session."""
        self.num_to_lake += sunk.num_blocks
        self.nbytes += sunk.nbytes
        self.sessions += [name] if sunk.num_blocks else []


class Sinker:
    """Moves the KV of one open store down its tiers."""

    def __init__(
        self,
        runtime: Runtime,
        environment: Environment,
        catalog: Catalog,
        open_sessions: Callable[[], Iterable[Session]],
        clock: Callable[[], float],
    ) -> None:
        """Serve a store; `clock` gives seconds since 1970."""
        self._runtime = runtime
        self._environment = environment
        self._catalog = catalog
        self._open_sessions = open_sessions
        self._clock = clock
        self._relieving = threading.Lock()

    def sweep(self, residency: Residency) -> SweepReport:
        """Move down what has been idle longer than its tier allows."""
        now_s, report = self._clock(), SweepReport()
        report.num_branches = self._leave_device(residency.device_s)
        self._leave_host(now_s - residency.host_s, report)
        if math.isfinite(residency.disk_s):
            self._leave_disk(now_s - residency.disk_s, report)
        return report

    def offload(self, name: str) -> SweepReport:
        """Let a session that is not open sink to the durable tier below; a lake can be asked for it by name.

        Raises:
            NotFoundError: There is no such session, or no such tier.
            TierUnavailableError: The tier does not answer: what has not sunk stays.
        """
        report = SweepReport()
        with self._environment.read() as txn:
            session_id = self._catalog.find_session(txn, name).session_id
            digests = idle_blocks(txn, [session_id])
        report.add(name, self._sink(name, self._runtime.blocks.lower.durable(), digests))
        return report

    def fetch(self, name: str) -> bool:
        """Make a session of the lake a session of the store; False when there is no lake, or no such session in it.

        Its KV stays in the lake until it is needed.

        Raises:
            TierUnavailableError: The lake does not answer.
            CorruptionError: What the lake has is damaged.
            StorageFullError, ReadOnlyError: The store cannot be written.
        """
        lake = next((tier for tier in self._runtime.blocks.lower.tiers if isinstance(tier, Lake)), None)
        if lake is None:
            return False
        try:
            pull(self._environment, self._catalog, self._runtime.blocks.disk, lake, name, lazy=True)
        except NotFoundError:
            return False
        except AlreadyExistsError:
            return True  # another thread was faster
        return True

    def relieve(self, missing_nbytes: int) -> None:
        """Let sessions sink that nobody has open, the longest unused first, until about `missing_nbytes` are free.

        One thread at a time does so: two would sink the same sessions, and one of them find that it freed nothing.
        """
        tier = self._runtime.blocks.lower.durable_or_none()
        least_nbytes = (self._environment.quota.budget_nbytes or 0) // _SINK_PART
        if tier is not None:
            with self._relieving:
                self._sink_idle(tier, math.inf, max(missing_nbytes, least_nbytes), SweepReport())

    def forget(self, name: str) -> None:
        """Remove what the tiers below have of a session, and no other session of the store names.

        In a lake the session is removed by its name, with all versions; another's of that name stays. What lay in
        segments is the collector's.

        Raises:
            NotFoundError: There is no such session.
            TierUnavailableError: A tier does not answer: what it has is not removed.
        """
        lower = self._runtime.blocks.lower
        if not lower.tiers:
            return
        with self._environment.read() as txn:
            session_id = self._catalog.find_session(txn, name).session_id
            others = [each.session_id for each in self._catalog.sessions(txn, []) if each.session_id != session_id]
            shared = set(named_blocks(txn, others))
            digests = [digest for digest in named_blocks(txn, [session_id]) if digest not in shared]
        for tier in lower.tiers:
            if isinstance(tier, Lake) and is_shared(self._environment, tier, session_id, name):
                with contextlib.suppress(NotFoundError):
                    tier.remove(name)
            tier.remove_many(digests)

    # -- inside

    def _leave_device(self, residency_s: float) -> int:
        """Let branches leave that are not expected back in time: as long as they were idle, or as hints say."""
        count = 0
        for session in self._open_sessions():
            for candidate in session.candidates(is_current=session.is_in_use):
                if not candidate.is_pinned and -candidate.priority > residency_s:
                    count += session.evict(candidate.key[1])
        return count

    def _leave_host(self, before_s: float, report: SweepReport) -> None:
        """Let blocks leave host memory, for the pool where there is one; the disk or a tier below has them."""
        host, disk, pool = self._runtime.blocks.host, self._runtime.blocks.disk, self._runtime.blocks.lower.pool
        idle = [digest for digest in host.idle(before_s) if disk.contains(digest)]
        for first in range(0, len(idle), _BATCH_BLOCKS):
            batch = idle[first : first + _BATCH_BLOCKS]
            report.num_to_pool += 0 if pool is None else self._pool(pool, batch)
            for digest in batch:
                host.remove(digest)
            report.num_from_host += len(batch)

    def _pool(self, pool: RecordTier, digests: Sequence[BlockDigest]) -> int:
        """Give the pool copies of blocks; a pool that does not answer gets none."""
        records: list[Record] = []
        for digest in digests:
            with contextlib.suppress(AgentMemError):  # below alone, or damaged: no copy of it is made
                data = self._runtime.blocks.disk.load_record(digest)
                records.append(Record.of(record_format.read_meta(data), data))
        try:
            taken = [record for record, is_here in zip(records, pool.put_many(records), strict=True) if is_here]
        except AgentMemError as error:
            logger.warning("the pool took nothing (%s): %s", error.reason, error)
            return 0
        self._runtime.counters.add("host_to_pool_nbytes", sum(record.raw_nbytes for record in taken))
        return len(taken)

    def _leave_disk(self, before_s: float, report: SweepReport) -> None:
        """Let sessions sink that nobody has opened since."""
        tier = self._runtime.blocks.lower.durable_or_none()
        if tier is not None:
            self._sink_idle(tier, before_s, math.inf, report)

    def _sink_idle(self, tier: RecordTier, before_s: float, most_nbytes: float, report: SweepReport) -> None:
        """Let idle sessions sink, but for what sessions need that somebody has open or has used since."""
        opened = {session.ledger.record.session_id for session in self._open_sessions()}
        with self._environment.read() as txn:
            idle, busy = idle_sessions(txn, self._catalog, self._environment, before_s, opened)
            needed = set(idle_blocks(txn, busy))
            work = [(record.name, idle_blocks(txn, [record.session_id])) for record in idle]
        for name, digests in work:
            if report.nbytes >= most_nbytes:
                break
            try:
                report.add(name, self._sink(name, tier, [digest for digest in digests if digest not in needed]))
            except AgentMemError as error:
                logger.warning("session %s stays on disk (%s): %s", name, error.reason, error)

    def _sink(self, name: str, tier: RecordTier, digests: Sequence[BlockDigest]) -> SinkReport:
        disk = self._runtime.blocks.disk
        if digests and isinstance(tier, Lake):  # an index object names them, or the lake's collector would take them
            push(self._environment, self._catalog, disk, tier, name)
        sunk = sink(self._environment, disk, tier, digests)
        self._runtime.counters.add(f"disk_to_{tier.name}_nbytes", sunk.nbytes)
        return sunk


class Sweeper:
    """Sweeps a store now and then, in a thread of its own, until it is closed."""

    def __init__(self, sinker: Sinker, residency: Residency) -> None:
        """Start the thread, unless everything stays for ever."""
        self._sinker = sinker
        self._residency = residency
        self._stop = threading.Event()
        shortest_s = min(residency.device_s, residency.host_s, residency.disk_s)
        self._pause_s = min(max(shortest_s / _LOOKS, _MIN_PAUSE_S), _MAX_PAUSE_S)
        self._thread = threading.Thread(target=self._run, name="agentmem-sweeper", daemon=True)
        if math.isfinite(shortest_s):
            self._thread.start()

    def close(self) -> None:
        """End the thread; a batch that is under way is finished."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        give_way()
        while not self._stop.wait(self._pause_s):
            try:
                self._sinker.sweep(self._residency)
            except (AgentMemError, OSError, RuntimeError, ValueError, MemoryError) as error:
                logger.warning("a sweep ended early, and is tried again: %s", error)
