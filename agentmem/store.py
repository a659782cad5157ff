"""An open store with a model: create and resume sessions, hold the budgets, save everything."""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from agentmem import _directory
from agentmem._lmdb import Environment
from agentmem.adapter import Adapter
from agentmem.batch.batch import Batch, Member
from agentmem.branch import Branch
from agentmem.checkpoints import BranchEntry
from agentmem.config import Config
from agentmem.crowd import Crowd
from agentmem.errors import ClosedError, NotFoundError, SessionLeasedError, StorageFullError
from agentmem.forget import ForgetReport
from agentmem.gc import GcReport
from agentmem.hinting import Key
from agentmem.ids import short
from agentmem.ledger import Ledger
from agentmem.metrics.endpoint import Endpoint
from agentmem.opening import Opener
from agentmem.pruning import PruneReport
from agentmem.residency import Sinker, Sweeper, SweepReport
from agentmem.retention import Retention
from agentmem.roommaking import RoomMaker
from agentmem.runtime import make_runtime
from agentmem.session import Session
from agentmem.tiers.hints import Hints
from agentmem.tiers.remote import RecordTier
from agentmem.tree.checkpoint import Checkpoint
from agentmem.upkeep import RELIEF_PART, Upkeep
from agentmem.usage import usage
from agentmem.view import StoreView

logger = logging.getLogger(__name__)


class Store(StoreView):
    """A store that is open with a model. Thread-safe; one of each process may be open on a directory."""

    def __init__(
        self,
        environment: Environment,
        adapter: Adapter,
        config: Config,
        tiers: Sequence[RecordTier] = (),
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Own an open environment; use `agentmem.open`."""
        super().__init__(environment, config)
        self._endpoint = Endpoint(config.metrics)  # first: it may be refused
        self._runtime = make_runtime(environment, adapter, config, tiers, clock=clock)
        self._runtime.device.make_room = RoomMaker(self._runtime, environment, self._open_sessions).make_room
        self._upkeep = Upkeep(environment, self.catalog, self._runtime.blocks.disk, self._open_sessions)
        with environment.read() as txn:
            environment.quota.hold(config.disk_budget_nbytes, txn)
        environment.quota.make_room = self._relieve
        self._sinker = Sinker(self._runtime, environment, self.catalog, self._open_sessions, clock)
        self._opener = Opener(self._runtime, environment, self.catalog)
        self._sessions: dict[str, Session] = {}
        self._lock = threading.RLock()
        self._hints: Hints[Key] = Hints(clock=clock)
        self._crowd = Crowd(is_limited=config.device_budget_nbytes is not None)
        self._is_closed = False
        self._sweeper = Sweeper(self._sinker, config.residency)  # last: its thread looks at all of the above
        self._endpoint.serve(self.stats, store=self.path, number=environment.holders.number)

    @classmethod
    def open(
        cls,
        path: Path,
        make_adapter: Callable[[], Adapter],
        config: Config,
        tiers: Sequence[RecordTier] = (),
        *,
        clock: Callable[[], float] = time.time,
    ) -> "Store":
        """Open the store at `path`, making it when there is none, for the model of the adapter that is made.

        The `tiers` below the disk are closed with the store; `clock`, seconds since 1970, says what is idle.

        Raises:
            UnsupportedModelError: The model keeps state that agentmem cannot store.
            StoreLockedError: This process has the store open already, or its data file is being replaced.
            InvalidInputError, FormatVersionError, CorruptionError, ReadOnlyError: The directory is no store that can be
                used (see `Environment.open`).
        """
        with contextlib.ExitStack() as opened:
            adapter = make_adapter()
            opened.callback(adapter.close)
            environment = Environment.open(
                path, create=True, reserve_nbytes=config.disk_reserve_nbytes, key=config.encryption_key
            )
            opened.callback(environment.close)
            with _directory.named_errors(path):
                store = cls(environment, adapter, config, tiers, clock=clock)
            opened.pop_all()
            return store

    @property
    def token_nbytes(self) -> int:
        """Bytes of KV that one token takes on the device, over all layers."""
        return self._runtime.adapter.spec.token_nbytes

    @property
    def metrics_url(self) -> str | None:
        """Where `Config.metrics` is served; None when it is not."""
        return self._endpoint.url

    def create(self, name: str, *, extras: Mapping[str, object] | None = None) -> Session:
        """Make a session with one empty branch, "main".

        Raises:
            AlreadyExistsError: The name is taken, by whatever process; `resume` it.
        """
        with self._lock:
            self._check_open()
            self._follow_model()
            return self._open_session(*self._opener.create(name, extras or {}))

    def resume(self, name: str, *, branch: str | None = None, lazy: bool = False) -> Session:
        """Open a stored session again and bring a branch onto the device (by default the one that was active).

        A session that only the lake has is pulled from there first. With `lazy` KV stays where it is until the next
        verb needs it (see `Session.switch`).

        Until it is closed, no other handle of any process writes to it (docs/caveats.md). Its report says what was
        reused, what has to be computed again, and why.

        Raises:
            NotFoundError: There is no such session or branch.
            SessionLeasedError: Another handle writes to the session.
            CorruptionError: The branch's tokens cannot be had; the session's other branches can be resumed.
            CapacityError: The branch does not fit the device budget.
            TierUnavailableError: The store has no such session, and its lake cannot be asked.
        """
        try:
            session = self._entered(name)
        except NotFoundError:
            if not self._sinker.fetch(name):  # asks the lake: no lock is held meanwhile
                raise
            session = self._entered(name)
        session.switch(branch if branch is not None else session.active.name, lazy=lazy)
        return session

    def remove(self, name: str) -> None:
        """Remove a session with all its branches, durably. What it alone held is gc's once the grace has passed.

        Raises:
            NotFoundError: There is none of that name.
            SessionLeasedError: Another handle writes to it.
        """
        with self._lock:
            self._leave(name)
            self._opener.remove(name)

    def forget(self, name: str) -> ForgetReport:
        """Remove a session at once and for good, from every tier: no grace, no way back (docs/privacy.md).

        What others have in common with it stays, and the report says so. The data file's free pages hold its bytes
        until `agentmem compact`.

        Raises:
            NotFoundError: There is none of that name.
            SessionLeasedError: Another handle writes to it.
            TierUnavailableError: A pool or lake does not answer; the session is still here.
        """
        with contextlib.suppress(StorageFullError):  # what is forgotten need not be saved
            self._leave(name)
        self._runtime.blocks.flush()
        self._sinker.forget(name)  # first, and without the lock: who cannot be reached is asked by the next `forget`
        with self._lock:
            self._leave(name)
            report = self._upkeep.forget(name)
            self._runtime.blocks.host.clear()
            return report

    def batch(self, branches: Iterable[Branch]) -> contextlib.AbstractContextManager[Batch]:
        """Continue branches of one or several sessions together: `with store.batch([branch, ...]) as batch`.

        The batch calls them "session/branch". Blocks that sessions share are attended once for all of them.

        Raises:
            NotFoundError: A branch's session is not open, or it was dropped.
            InvalidInputError: A branch is named twice, or none is.
        """
        return Batch(branches, self._member).running()

    def stats(self) -> dict[str, int | float]:
        """Return bytes per tier beside its budget, and what was fed, reused and moved since the store was opened."""
        return usage(self._runtime, self.environment)

    def gc(self, *, grace_s: float | None = None, dry_run: bool = False) -> GcReport:
        """Remove what no branch and no pin has reached for `grace_s` seconds (by default `Config.gc_grace_s`)."""
        grace_s = self.config.gc_grace_s if grace_s is None else grace_s
        with self._lock:
            self._check_open()
            return self._upkeep.collect(grace_s=grace_s, dry_run=dry_run)

    def prune(self, retention: Retention, *, dry_run: bool = False) -> PruneReport:
        """Let go of the checkpoints and branches that `retention` does not keep; the tokens of branches stay.

        What it lets go of is gc's once the grace has passed. With `dry_run`, only say what would go, and its bytes.
        """
        with self._lock:
            self._check_open()
            return self._upkeep.prune(retention, dry_run=dry_run)

    def pin(self, checkpoint: Checkpoint) -> bool:
        """Keep a checkpoint, and those before it, though no branch reaches it; False when it is pinned already.

        Raises:
            NotFoundError: It is not stored (any more).
        """
        return self._upkeep.pin(checkpoint, is_pinned=True)

    def unpin(self, checkpoint: Checkpoint) -> bool:
        """Leave a pinned checkpoint to gc, unless a branch reaches it; False when it is not pinned."""
        return self._upkeep.pin(checkpoint, is_pinned=False)

    def sweep(self) -> SweepReport:
        """Let sink now what nobody has touched for as long as `Config.residency` allows; a thread does so too."""
        self._check_open()
        return self._sinker.sweep(self.config.residency)

    def offload(self, name: str) -> SweepReport:
        """Let a session sink to the lake, whole: any store that reads the lake can resume it by its name.

        It is closed first, if it is open here. Its tokens, layer states and model inputs stay here too.

        Raises:
            NotFoundError: There is none of that name, or no lake.
            TierUnavailableError: The lake does not answer; nothing is lost.
            SessionLeasedError: Another handle writes to it.
        """
        self._leave(name)
        self._runtime.blocks.flush()
        return self._sinker.offload(name)

    def flush(self) -> None:
        """Wait until all that was done so far, sealed blocks included, is on disk for good.

        Raises:
            StorageFullError: The disk has no room.
            ReadOnlyError: The store cannot be written any more.
            SessionLeasedError: A session was taken over by another handle.
        """
        self._check_open()
        _for_each(self._open_sessions(), Session.flush)
        self._runtime.blocks.flush()
        self.environment.flush()

    def close(self) -> None:
        """Make every session durable, KV included, and let go of directory, device and model. Again is harmless."""
        with self._lock:
            if self._is_closed:
                return
            try:
                _for_each(self._open_sessions(), self._close_session)
                self._runtime.blocks.flush()
            finally:
                self._is_closed = True
                self._release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise
            logger.exception("the store could not be closed cleanly after another error")

    def _release(self) -> None:
        self._endpoint.close()
        self._sweeper.close()
        try:
            self._runtime.blocks.close()
            self._runtime.adapter.close()
        finally:
            self._opener.close()
            self.environment.close()

    def _open_session(self, ledger: Ledger, entries: list[BranchEntry]) -> Session:
        session = Session(
            ledger,
            self._runtime.adapter,
            entries,
            check_open=self._check_open,
            follow_model=self._follow_model,
            give_back=self._opener.give_back,
            crowd=self._crowd,
            hints=self._hints,
        )
        self._sessions[session.name] = session
        return session

    def _entered(self, name: str) -> Session:
        """Return a session of the store, opened if it is not."""
        with self._lock:
            self._check_open()
            self._follow_model()
            session = self._sessions.get(name)
            if session is not None and session.ledger.lease.is_lost:
                self._close_session(session)
            if session is None or session.is_closed:
                session = self._open_session(*self._opener.resume(name))
            return session

    def _leave(self, name: str) -> None:
        """Close a session, if it is open here."""
        with self._lock:
            self._check_open()
            session = self._sessions.pop(name, None)
            if session is not None:
                self._close_session(session)

    def _relieve(self, missing_nbytes: int) -> None:
        """Make room on disk: what was dropped goes first, then sessions that nobody has open sink to the lake."""
        wanted_nbytes = max(missing_nbytes, (self.config.disk_budget_nbytes or 0) // RELIEF_PART)
        before = self.environment.live_nbytes
        self._upkeep.relieve(wanted_nbytes)
        freed_nbytes = before - self.environment.live_nbytes
        if freed_nbytes < missing_nbytes:
            self._sinker.relieve(wanted_nbytes - freed_nbytes)

    def _close_session(self, session: Session) -> None:
        """Close a session, also one that another handle took over: nothing more can be saved of it."""
        try:
            session.close()
        except SessionLeasedError as error:
            logger.warning("session %s was closed: %s", session.name, error)

    def _follow_model(self) -> None:
        """Let all that is open follow the model, whose adapters or weights may be others since the last verb.

        What was computed until now is saved under the model's old name; KV of the new one is looked for in the store.

        Raises:
            InvalidInputError: The model changed while an operation was running.
            StorageFullError: The old model's KV cannot be saved; the next verb tries again.
        """
        identity, adapter = self._runtime.identity, self._runtime.adapter
        if adapter.look() == identity.fingerprint:
            return
        with self._lock, contextlib.ExitStack() as held:
            sessions = [session for session in self._open_sessions() if not session.ledger.lease.is_lost]
            for session in sessions:
                held.enter_context(session.held())
            now = adapter.look()
            if now == identity.fingerprint:
                return  # another thread was first
            logger.info("the model is another one now (adapters or weights): %s", short(now))
            for session in sessions:
                session.save()
            self._runtime.blocks.flush()  # what is written from here on bears the new name
            identity.fingerprint = now
            for session in sessions:
                with session.held():
                    pass  # whoever comes in makes the branches anew, also when this is interrupted

    def _member(self, branch: str | Branch) -> Member:
        name = branch.session if isinstance(branch, Branch) else branch.partition("/")[0]
        session = self._sessions.get(name)
        if session is None or session.is_closed:
            raise NotFoundError(f"session {name!r} of a branch for a batch is not open; resume it")
        member = session.member(branch if isinstance(branch, Branch) else branch.partition("/")[2])
        return dataclasses.replace(member, key=f"{name}/{member.key}")

    def _open_sessions(self) -> list[Session]:
        return [session for session in list(self._sessions.values()) if not session.is_closed]

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the store {str(self.path)!r} is closed; open it again")
        self.environment.check_usable()


def _for_each(sessions: Iterable[Session], action: Callable[[Session], None]) -> None:
    """Do it for every session, whatever becomes of the others; the first error is raised at the end."""
    failures: list[Exception] = []
    for session in sessions:
        try:
            action(session)
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)
    for failure in failures[1:]:
        failures[0].add_note(f"Another session failed too: {failure}")
    if failures:
        raise failures[0]
