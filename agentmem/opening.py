"""How a session comes to be open in this process: leased, read, and said what is odd about it.

Knows nothing of locks or of the user's handles.
"""

import dataclasses
import logging
import time
from array import array
from collections.abc import Mapping

from agentmem._lmdb import Environment, Level, WriteTransaction
from agentmem.checkpoints import BranchEntry
from agentmem.entries import MAIN, restore_entries
from agentmem.errors import AlreadyExistsError, CorruptionError, NotFoundError
from agentmem.ids import new_session_id
from agentmem.leases import Lease, Leases, holder_of, require_free
from agentmem.ledger import Ledger
from agentmem.reasons import Reason
from agentmem.runtime import Runtime
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import BranchRecord, Move, SessionRecord, check_name
from agentmem.tree.fields import copy_extras
from agentmem.tree.trail import Trail
from agentmem.tree.tree import SessionTree

logger = logging.getLogger(__name__)


class Opener:
    """Gets sessions of one store for this handle, which writes to them until it gives them back."""

    def __init__(self, runtime: Runtime, environment: Environment, catalog: Catalog) -> None:
        """Open no session yet."""
        self._runtime = runtime
        self._environment = environment
        self._catalog = catalog
        self._leases = Leases(environment, runtime.config.lease_s)

    def create(self, name: str, extras: Mapping[str, object]) -> tuple[Ledger, list[BranchEntry]]:
        """Make a session, durably; of several processes that try, one does.

        Raises:
            AlreadyExistsError: The name is taken.
        """
        record = self._new_record(check_name("session", name), extras)

        def operation(txn: WriteTransaction) -> Lease:
            try:
                known = self._catalog.find_session(txn, name)
            except NotFoundError:
                self._put_new(txn, record)
                return self._leases.take(txn, record.session_id, name)
            holder = holder_of(txn, self._environment, known.session_id)
            who = "" if holder is None else f" (just now {holder} writes to it)"
            raise AlreadyExistsError(f"the store has a session {name!r} already{who}; resume it, or use another name")

        lease = self._environment.submit(operation, level=Level.DURABLE).result()
        return self._open(lease)

    def resume(self, name: str) -> tuple[Ledger, list[BranchEntry]]:
        """Open a stored session.

        Raises:
            NotFoundError: There is none of that name.
            SessionLeasedError: Another handle writes to it.
        """
        self._environment.flush()

        def operation(txn: WriteTransaction) -> Lease:
            return self._leases.take(txn, self._catalog.find_session(txn, name).session_id, name)

        lease = self._environment.submit(operation, level=Level.REMOVAL).result()
        return self._open(lease)

    def remove(self, name: str) -> None:
        """Remove a stored session with all its branches, durably.

        Raises:
            NotFoundError: There is none of that name.
            SessionLeasedError: Another handle writes to it.
        """

        def operation(txn: WriteTransaction) -> None:
            session_id = self._catalog.find_session(txn, name).session_id
            require_free(txn, self._environment, session_id, name)
            self._catalog.remove_session(txn, session_id)

        self._environment.submit(operation, level=Level.REMOVAL).result()

    def give_back(self, ledger: Ledger) -> None:
        """Let others have a session, durably, once all that was written to it is on disk."""
        self._leases.release(ledger.lease).result()

    def close(self) -> None:
        """Renew no lease any more."""
        self._leases.close()

    # -- inside

    def _open(self, lease: Lease) -> tuple[Ledger, list[BranchEntry]]:
        """Return what is written of a session that is leased."""
        damaged: list[CorruptionError] = []
        try:
            with self._environment.read() as txn:
                record = self._catalog.session(txn, lease.session_id)
                checkpoints = self._catalog.checkpoints(txn, lease.session_id, damaged)
                self._warn(record, [str(error) for error in damaged])
                record = dataclasses.replace(record, fingerprint=self._runtime.identity.fingerprint)
                tree = SessionTree(checkpoints)
                ledger = Ledger(self._runtime, self._environment, self._catalog, record, tree, lease)
                entries = restore_entries(ledger, self._catalog, txn)
        except BaseException:
            self._leases.release(lease)
            raise
        self._leases.hold(lease)
        return ledger, entries

    def _put_new(self, txn: WriteTransaction, record: SessionRecord) -> None:
        """Write a session and its first branch, which no crash may part."""
        now_s, session_id = record.created_s, record.session_id
        main = BranchRecord(name=MAIN, tip=None, created_s=now_s, updated_s=now_s)
        self._catalog.put_session(txn, record)
        self._catalog.put_branch(txn, session_id, main, Trail(array("I")), 0)
        move = Move(branch=MAIN, operation="create", old=None, new=None, time_s=now_s)
        self._catalog.record_move(txn, session_id, move)

    def _new_record(self, name: str, extras: Mapping[str, object]) -> SessionRecord:
        adapter, now_s = self._runtime.adapter, time.time()
        return SessionRecord(
            session_id=new_session_id(),
            name=name,
            active_branch=MAIN,
            fingerprint=self._runtime.identity.fingerprint,
            model_name=adapter.model_name,
            tokenizer_hash=adapter.tokenizer_hash,
            template_hash=adapter.template_hash,
            block_size=self._runtime.config.block_size,
            extras=copy_extras(extras),
            created_s=now_s,
            updated_s=now_s,
        )

    def _warn(self, record: SessionRecord, damaged: list[str]) -> None:
        """Say that a session comes from another model or tokenizer: it stays readable, its KV is not used."""
        adapter = self._runtime.adapter
        for problem in damaged:
            logger.warning("session %s: %s", record.name, problem)
        if record.fingerprint != self._runtime.identity.fingerprint:
            logger.warning(
                "session %s was made by another model, %s (%s): its tokens are used, its KV is not",
                record.name,
                record.model_name,
                Reason.FOREIGN_MODEL,
            )
        if adapter.tokenizer_hash and record.tokenizer_hash not in {"", adapter.tokenizer_hash}:
            logger.warning("session %s was made with another tokenizer: its ids may mean other text", record.name)
        if adapter.template_hash and record.template_hash not in {"", adapter.template_hash}:
            logger.warning("session %s was made with another chat template (%s)", record.name, Reason.TEMPLATE_CHANGED)
