"""gc, retention and pins of a store whose sessions are open: what other threads work on is left alone.

Also what happens when the disk budget is used up: what was dropped goes at once, without its grace.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from agentmem._lmdb import Environment, Level, WriteTransaction
from agentmem.errors import AgentMemError
from agentmem.forget import ForgetReport, forget
from agentmem.gc import GcReport, Spared, collect, relieve
from agentmem.ids import BlockDigest, CheckpointId, SessionId
from agentmem.pruning import PruneReport, prune
from agentmem.retention import Change, Retention
from agentmem.session import Session
from agentmem.tiers.disk import DiskTier
from agentmem.tree import pins, rows
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

RELIEF_PART = 32
"""A short disk budget is relieved of a 32nd of it at least, so that this is not done again for every block."""


class Upkeep:
    """Removes what nobody needs from an open store. Thread-safe.

    A session that another thread works on keeps all of its checkpoints until the next time.
    """

    def __init__(
        self, environment: Environment, catalog: Catalog, disk: DiskTier, open_sessions: Callable[[], list[Session]]
    ) -> None:
        """Look after a store; `open_sessions` returns its sessions that are open here."""
        self._environment = environment
        self._catalog = catalog
        self._disk = disk
        self._open_sessions = open_sessions

    def collect(self, *, grace_s: float, dry_run: bool) -> GcReport:
        """Remove what nobody has named for longer than `grace_s` (see `agentmem.gc.collect`)."""
        self._wait()
        with self._idle_sessions() as (idle, spared):
            report = collect(
                self._environment,
                self._catalog,
                self._disk,
                grace_s=grace_s,
                now_s=time.time(),
                spared=spared,
                dry_run=dry_run,
            )
            if not dry_run:
                _forget(idle, report.checkpoints)
        return report

    def prune(self, retention: Retention, *, dry_run: bool) -> PruneReport:
        """Let go of what `retention` does not keep (see `agentmem.pruning.prune`)."""
        self._wait()
        with self._idle_sessions() as (idle, spared):
            # A branch of an open session is dropped by the session, which has it in memory.
            report, made = prune(
                self._environment,
                self._catalog,
                self._disk,
                retention,
                now_s=time.time(),
                spared=spared.sessions,
                drop={session.name: session.drop for session in idle},
                dry_run=dry_run,
            )
            for session in idle:
                _follow(session, made.get(session.ledger.record.session_id, ()))
        return report

    def pin(self, checkpoint: Checkpoint, *, is_pinned: bool) -> bool:
        """Pin or unpin a checkpoint, durably; False when it was so already.

        Raises:
            NotFoundError: It is not stored.
        """
        node = rows.node_key(checkpoint.session_id, checkpoint.checkpoint_id)

        def operation(txn: WriteTransaction) -> bool:
            return (pins.put if is_pinned else pins.remove)(txn, node, time.time_ns())

        return self._environment.submit(operation, level=Level.DURABLE).result()

    def forget(self, name: str) -> ForgetReport:
        """Remove a session that is not open here, with all that only it names (see `agentmem.forget.forget`)."""
        return forget(self._environment, self._catalog, self._disk, name, held=self._held_blocks)

    def relieve(self, missing_nbytes: int) -> None:
        """Make room on disk for about `missing_nbytes`; called by whoever is about to write."""
        try:
            with self._idle_sessions() as (idle, spared):
                removed = relieve(self._environment, self._catalog, self._disk, missing_nbytes, spared=spared)
                _forget(idle, removed)
        except AgentMemError as error:
            logger.warning("the disk budget is used up, and nothing could be removed: %s", error)

    # -- inside

    def _wait(self) -> None:
        """Wait until what was queued has been carried out, but for what finds no room on the disk."""
        self._environment.submit(lambda _: None, level=Level.REMOVAL).result()

    @contextlib.contextmanager
    def _idle_sessions(self) -> Iterator[tuple[list[Session], Spared]]:
        """Keep other threads out of the open sessions where none is in; the others are to be spared."""
        idle: list[Session] = []
        busy: list[SessionId] = []
        with contextlib.ExitStack() as held:
            for session in self._open_sessions():
                if held.enter_context(session.idle()):
                    idle.append(session)
                else:
                    busy.append(session.ledger.record.session_id)
            reached = {name for session in idle for name in session.ledger.states.passed(session.entries)}
            yield idle, Spared(sessions=busy, checkpoints=reached, blocks=self._held_blocks)

    def _held_blocks(self) -> set[BlockDigest]:
        """Return the blocks that open sessions need, named by a checkpoint or not yet."""
        held: set[BlockDigest] = set()
        for session in self._open_sessions():
            held |= session.ledger.states.held(session.entries)
        return held


def _forget(sessions: Iterable[Session], removed: Collection[CheckpointId]) -> None:
    """Let open sessions know of checkpoints that gc removed."""
    for session in sessions:
        session.ledger.states.forget(removed)
        for checkpoint_id in removed:
            session.ledger.tree.discard(checkpoint_id)


def _follow(session: Session, changes: Iterable[Change]) -> None:
    """Let an open session know of checkpoints that were merged or thinned."""
    for change in changes:
        session.ledger.states.forget(change.removed)
        session.ledger.tree.merge(change.removed, change.new)
