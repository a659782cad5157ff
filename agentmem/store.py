"""An open store with a model: create and resume sessions, hold the budgets, save everything."""

import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType

from agentmem._lmdb import Environment, Level, ReadTransaction, WriteTransaction
from agentmem.adapter import Adapter
from agentmem.batch.batch import Batch, Member
from agentmem.branch import Branch
from agentmem.config import Config
from agentmem.entries import MAIN, restore_entry
from agentmem.errors import AlreadyExistsError, ClosedError, CorruptionError, NotFoundError
from agentmem.ids import new_session_id, short
from agentmem.ledger import Ledger
from agentmem.runtime import Runtime
from agentmem.session import Session
from agentmem.stats import Counters
from agentmem.tiers.blockstore import BlockStore
from agentmem.tiers.device import DeviceTier
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.host import HostTier
from agentmem.tiers.identity import Identity
from agentmem.tiers.media import MediaStore
from agentmem.tiers.policy import eviction_order
from agentmem.tiers.states import StateStore
from agentmem.tree.checkpoint import SessionRecord, check_name
from agentmem.tree.fields import copy_extras
from agentmem.tree.tree import SessionTree
from agentmem.view import StoreView

logger = logging.getLogger(__name__)


class Store(StoreView):
    """A store that is open with a model. Thread-safe; at most one is open on a directory, in all processes."""

    def __init__(self, environment: Environment, adapter: Adapter, config: Config) -> None:
        """Own an open environment; use `agentmem.open`."""
        super().__init__(environment, config)
        self._runtime = _make_runtime(environment, adapter, config)
        self._runtime.device.make_room = self._make_room
        self._sessions: dict[str, Session] = {}
        self._lock = threading.RLock()
        self._clock = itertools.count(1)
        self._is_closed = False

    @classmethod
    def open(cls, path: Path, make_adapter: Callable[[], Adapter], config: Config) -> "Store":
        """Open the store at `path`, making it when there is none, for the model of the adapter that is made.

        Raises:
            UnsupportedModelError: The model keeps state that agentmem cannot store.
            StoreLockedError: Another handle or process has the store open for writing.
            InvalidInputError, FormatVersionError, CorruptionError, ReadOnlyError: The directory is no store that can be
                used (see `Environment.open`).
        """
        adapter = make_adapter()
        try:
            environment = Environment.open(path, create=True, reserve_nbytes=config.disk_reserve_nbytes)
        except BaseException:
            adapter.close()
            raise
        return cls(environment, adapter, config)

    @property
    def token_nbytes(self) -> int:
        """Bytes of KV that one token takes on the device, over all layers."""
        return self._runtime.adapter.spec.token_nbytes

    def create(self, name: str, *, extras: Mapping[str, object] | None = None) -> Session:
        """Make a session with one empty branch, "main".

        Raises:
            AlreadyExistsError: The name is taken; `resume` it.
        """
        check_name("session", name)
        with self._lock:
            self._check_open()
            self._follow_model()
            if any(record.name == name for record in self.sessions()):
                raise AlreadyExistsError(f"the store has a session {name!r} already; resume it, or choose another name")
            adapter, now_s = self._runtime.adapter, time.time()
            record = SessionRecord(
                session_id=new_session_id(),
                name=name,
                active_branch=MAIN,
                fingerprint=self._runtime.identity.fingerprint,
                model_name=adapter.model_name,
                tokenizer_hash=adapter.tokenizer_hash,
                template_hash=adapter.template_hash,
                block_size=self.config.block_size,
                extras=copy_extras(extras or {}),
                created_s=now_s,
                updated_s=now_s,
            )
            self.environment.submit(lambda txn: self.catalog.put_session(txn, record), level=Level.DURABLE).result()
            return self._open_session(record)

    def resume(self, name: str, *, branch: str | None = None) -> Session:
        """Open a stored session again and bring a branch onto the device (by default the one that was active).

        Its report says what was reused, what has to be computed again, and why.

        Raises:
            NotFoundError: There is no such session or branch.
            CapacityError: The branch does not fit the device budget.
        """
        with self._lock:
            self._check_open()
            self._follow_model()
            session = self._sessions.get(name)
            if session is None or session.is_closed:
                self.environment.flush()
                session = self._open_session(self.view(name).record)
        session.switch(branch if branch is not None else session.active.name)
        return session

    def remove(self, name: str) -> None:
        """Remove a session with all its branches, durably. What it alone held is gc's once the grace has passed.

        Raises:
            NotFoundError: There is none of that name.
        """
        with self._lock:
            self._check_open()
            session = self._sessions.pop(name, None)
            if session is not None:
                session.close()
            self.environment.flush()
            session_id = self.view(name).record.session_id

            def operation(txn: WriteTransaction) -> None:
                self.catalog.remove_session(txn, session_id)

            self.environment.submit(operation, level=Level.DURABLE).result()

    def batch(self, branches: Iterable[Branch]) -> Batch:
        """Continue branches of one or several sessions together: `with store.batch([branch, ...]) as batch`.

        The batch calls them "session/branch". Blocks that sessions share are attended once for all of them.

        Raises:
            NotFoundError: A branch's session is not open, or it was dropped.
            InvalidInputError: A branch is named twice, or none is.
        """
        return Batch(branches, self._member)

    def stats(self) -> dict[str, int | float]:
        """Return bytes per tier, and what was fed, reused and moved since the store was opened."""
        disk = self._runtime.blocks.disk.stats()
        return {
            "device_nbytes": self._runtime.device.nbytes,
            "host_nbytes": self._runtime.blocks.host.nbytes,
            "disk_num_blocks": disk.num_blocks,
            "disk_raw_nbytes": disk.raw_nbytes,
            "disk_stored_nbytes": disk.stored_nbytes,
            "file_nbytes": self.environment.nbytes,
            **self._runtime.counters.snapshot(),
        }

    def flush(self) -> None:
        """Wait until all that was done so far, sealed blocks included, is on disk for good.

        Raises:
            StorageFullError: The disk has no room.
            ReadOnlyError: The store cannot be written any more.
        """
        self._check_open()
        for session in self._open_sessions():
            session.flush()
        self._runtime.blocks.flush()
        self.environment.flush()

    def close(self) -> None:
        """Make every session durable, KV included, and let go of directory, device and model. Again is harmless."""
        with self._lock:
            if self._is_closed:
                return
            try:
                for session in self._open_sessions():
                    session.close()
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
        try:
            self._runtime.blocks.close()
            self._runtime.adapter.close()
        finally:
            self.environment.close()

    def _open_session(self, record: SessionRecord) -> Session:
        view = self.view(record.name)
        for problem in view.damaged:
            logger.warning("session %s: %s", record.name, problem)
        self._warn_of_changes(record)
        record = dataclasses.replace(record, fingerprint=self._runtime.identity.fingerprint)
        ledger = Ledger(self._runtime, self.environment, self.catalog, record, SessionTree(view.checkpoints))
        try:
            with self.environment.read() as txn:
                entries = [
                    restore_entry(ledger, branch, self._open_tokens(txn, record, branch.name))
                    for branch in view.branches
                ]
        except NotFoundError as error:
            raise CorruptionError(
                f"session {record.name!r} cannot be opened: {error}. Damaged: {'; '.join(view.damaged) or 'nothing'}; "
                f"run `agentmem check`, and restore a backup or remove the session"
            ) from error
        session = Session(
            ledger,
            self._runtime.adapter,
            entries,
            check_open=self._check_open,
            follow_model=self._follow_model,
            tick=lambda: next(self._clock),
        )
        self._sessions[record.name] = session
        return session

    def _open_tokens(self, txn: ReadTransaction, record: SessionRecord, branch: str) -> "array[int]":
        """Return the tokens after a branch's tip; none, with a warning, when their rows are damaged."""
        try:
            return self.catalog.open_tokens(txn, record.session_id, branch)
        except CorruptionError as error:
            logger.warning(
                "session %s: the tokens of branch %s after its tip are lost, it stands at the tip: %s",
                record.name,
                branch,
                error,
            )
            return array("I")

    def _warn_of_changes(self, record: SessionRecord) -> None:
        """Say that a session comes from another model or tokenizer: it stays readable, its KV is not used."""
        adapter = self._runtime.adapter
        if record.fingerprint != self._runtime.identity.fingerprint:
            logger.warning(
                "session %s was made by another model (%s): its tokens are used, its KV is not",
                record.name,
                record.model_name,
            )
        if adapter.tokenizer_hash and record.tokenizer_hash not in {"", adapter.tokenizer_hash}:
            logger.warning("session %s was made with another tokenizer: its ids may mean other text", record.name)
        if adapter.template_hash and record.template_hash not in {"", adapter.template_hash}:
            logger.warning("session %s was made with another chat template", record.name)

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
            sessions = self._open_sessions()
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
                session.rebuild()

    def _member(self, branch: str | Branch) -> Member:
        name = branch.session if isinstance(branch, Branch) else branch.partition("/")[0]
        session = self._sessions.get(name)
        if session is None or session.is_closed:
            raise NotFoundError(f"session {name!r} of a branch for a batch is not open; resume it")
        member = session.member(branch if isinstance(branch, Branch) else branch.partition("/")[2])
        return dataclasses.replace(member, key=f"{name}/{member.key}")

    def _open_sessions(self) -> list[Session]:
        return [session for session in self._sessions.values() if not session.is_closed]

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the store {str(self.path)!r} is closed; open it again")
        self.environment.check_usable()

    def _make_room(self, nbytes: int) -> None:
        """Move branches off the device, the least recently used first, until `nbytes` are free."""
        goal = self._runtime.device.nbytes - nbytes
        current = [session for session in self._open_sessions() if session.is_in_use]
        candidates = [
            candidate
            for session in self._open_sessions()
            for candidate in session.candidates(is_current=session in current)
        ]
        for session, name in eviction_order(candidates):
            if self._runtime.device.nbytes <= goal:
                return
            if session.evict(name):
                self._runtime.counters.add("branches_evicted")
            if self._runtime.device.nbytes > goal:
                self.environment.flush()  # KV stays on the device until the disk has it


def _make_runtime(environment: Environment, adapter: Adapter, config: Config) -> Runtime:
    counters = Counters()
    identity = Identity(adapter.look(), config.salt)
    device = DeviceTier(adapter.spec, adapter.device, config.device_budget_nbytes)
    host = HostTier(config.host_budget_nbytes, is_pinned=adapter.device.type == "cuda")
    disk = DiskTier(environment)
    blocks = BlockStore(
        spec=adapter.spec,
        identity=identity,
        host=host,
        disk=disk,
        codec=config.codec,
        num_threads=config.num_threads,
        is_saving=config.save_in_background,
        counters=counters,
    )
    return Runtime(
        adapter=adapter,
        blocks=blocks,
        device=device,
        counters=counters,
        config=config,
        identity=identity,
        states=StateStore(
            spec=adapter.spec,
            identity=identity,
            device=device,
            host=host,
            disk=disk,
            codec=config.codec,
            counters=counters,
        ),
        media=MediaStore(identity, host, disk),
    )
