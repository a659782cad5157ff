"""Who may write to a session: one handle of all processes at a time.

A lease is a row of table `leases`, under the session's id (8). Its value, big-endian:
    0  8  token: a random number, another one each time that a lease is given
    8  8  holder: the handle's byte in `holders.lock`
   16  8  expires: seconds since the machine was started (CLOCK_BOOTTIME), IEEE double
   24  8  since when: Unix time, IEEE double; for people
   32 16  the machine's boot id; zeros where it has none
   48  4  process id; for people
   52  n  the host's name, UTF-8; for people

A lease is void when its handle is dead, when the machine was started again, and when it was not renewed in time, as
that of a stopped process. Whoever writes to a session compares its token with the row's in the same transaction: a
lease that others took over ends there, whatever its holder believes. Knows nothing of what a session is.
"""

import datetime
import logging
import os
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from agentmem._future import Future
from agentmem._lmdb import Environment, Level, ReadTransaction, Table, WriteTransaction
from agentmem.errors import AgentMemError, CorruptionError, SessionLeasedError
from agentmem.ids import SessionId

logger = logging.getLogger(__name__)

_ROW = struct.Struct(">QQdd16sI")
_TOKEN = struct.Struct(">Q")
_RENEWALS = 3
"""How often a lease is renewed in the time in which it expires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """A lease as it is stored.

    Attributes:
        token: Tells it from every other lease of the session.
        holder: The handle's byte in `holders.lock`.
        expires_s: CLOCK_BOOTTIME after which it is void.
        since_s: Unix time at which it was given.
        boot_id: Names the machine's run; 16 bytes.
        process_id: The holder's process.
        host: The holder's machine.
    """

    token: int
    holder: int
    expires_s: float
    since_s: float
    boot_id: bytes
    process_id: int
    host: str

    def __str__(self) -> str:
        since = datetime.datetime.fromtimestamp(self.since_s, datetime.UTC).isoformat(timespec="seconds")
        return f"process {self.process_id} on {self.host} since {since}"

    def pack(self) -> bytes:
        """Return the row's value."""
        head = _ROW.pack(self.token, self.holder, self.expires_s, self.since_s, self.boot_id, self.process_id)
        return head + self.host.encode()

    @classmethod
    def unpack(cls, session_id: SessionId, value: bytes) -> "LeaseRecord":
        """Return the lease in a row.

        Raises:
            CorruptionError: It is too short.
        """
        if len(value) < _ROW.size:
            raise CorruptionError(f"the lease of session {session_id.hex()} has {len(value)} bytes")
        token, holder, expires_s, since_s, boot_id, process_id = _ROW.unpack_from(value)
        host = value[_ROW.size :].decode(errors="replace")
        return cls(
            token=token,
            holder=holder,
            expires_s=expires_s,
            since_s=since_s,
            boot_id=boot_id,
            process_id=process_id,
            host=host,
        )


class Lease:
    """The right to write to one session, as its holder has it.

    Attributes:
        session_id: The session.
        token: What its row must bear.
    """

    __slots__ = ("_lost_to", "session_id", "token")

    def __init__(self, session_id: SessionId, token: int) -> None:
        """Hold what was written as a row; use `Leases.take`."""
        self.session_id = session_id
        self.token = token
        self._lost_to = ""

    @property
    def is_lost(self) -> bool:
        """Whether it was found that somebody else took the session over."""
        return bool(self._lost_to)

    def check(self) -> None:
        """Raise when the lease was found lost.

        Raises:
            SessionLeasedError: It was; names the new holder.
        """
        if self._lost_to:
            raise SessionLeasedError(
                f"this handle lost its session to {self._lost_to}, having not renewed its lease in time; what it had "
                f"not written by then is not stored: resume the session when the other is done"
            )

    def is_held(self, txn: ReadTransaction) -> bool:
        """Say whether the lease is still the session's, in the transaction that is to write to it."""
        try:
            value = txn.get(Table.LEASES, self.session_id)
        except CorruptionError as error:
            self._lost_to = f"damage ({error})"
            return False
        if value is None or _TOKEN.unpack_from(value)[0] != self.token:
            other = None if value is None else LeaseRecord.unpack(self.session_id, value)
            self._lost_to = "somebody who has closed or removed it since" if other is None else str(other)
        return not self._lost_to

    def require(self, txn: ReadTransaction) -> None:
        """Raise unless the lease is still the session's, in the transaction that is to write to it.

        Raises:
            SessionLeasedError: It was taken over; names the new holder.
        """
        if not self.is_held(txn):
            self.check()


class Leases:
    """The leases that one handle holds, renewed by a thread for as long as it holds any. Thread-safe."""

    def __init__(self, environment: Environment, lease_s: float) -> None:
        """Hold none yet; each is void `lease_s` seconds after its last renewal."""
        self._environment = environment
        self._lease_s = lease_s
        self._held: dict[SessionId, Lease] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, txn: WriteTransaction, session_id: SessionId, name: str) -> Lease:
        """Give this handle the lease of a session, called `name`; `hold` it once that is committed.

        A lease that could not be given back is given again, for writes may still be waiting for room on the disk.

        Raises:
            SessionLeasedError: A living handle holds it; names that one.
        """
        require_free(txn, self._environment, session_id, name)
        kept = self._held.get(session_id)
        if kept is not None and kept.is_held(txn):
            return kept
        record = LeaseRecord(
            token=secrets.randbits(63) + 1,
            holder=self._environment.holders.number,
            expires_s=_now_s() + self._lease_s,
            since_s=time.time(),
            boot_id=_boot_id(),
            process_id=os.getpid(),
            host=socket.gethostname(),
        )
        txn.put(Table.LEASES, session_id, record.pack())
        return Lease(session_id, record.token)

    def hold(self, lease: Lease) -> None:
        """Renew a lease from now on."""
        with self._lock:
            self._held[lease.session_id] = lease
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._renew_for_ever, name="agentmem-leases", daemon=True)
                self._thread.start()

    def release(self, lease: Lease) -> Future[None]:
        """Give a lease back, durably, after all that was written with it; when that fails, it stays held."""
        with self._lock:
            self._held.pop(lease.session_id, None)

        def operation(txn: WriteTransaction) -> None:
            if lease.is_held(txn):
                txn.delete(Table.LEASES, lease.session_id)

        released = self._environment.submit(operation, level=Level.DURABLE)
        released.add_done_callback(lambda done: None if done.exception() is None else self.hold(lease))
        return released

    def close(self) -> None:
        """End the thread; leases that are still held are void once the handle is closed."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _renew_for_ever(self) -> None:
        while not self._stop.wait(self._lease_s / _RENEWALS) and not self._environment.is_read_only:
            try:
                self._environment.submit(self._renew, level=Level.RELAXED).result()
            except AgentMemError as error:
                logger.warning("the leases of this handle's sessions could not be renewed: %s", error)

    def _renew(self, txn: WriteTransaction) -> None:
        with self._lock:
            held = list(self._held.values())
        for lease in held:
            if not lease.is_lost and lease.is_held(txn):
                value = txn.get(Table.LEASES, lease.session_id)
                record = LeaseRecord.unpack(lease.session_id, value or b"")
                txn.put(Table.LEASES, lease.session_id, replace(record, expires_s=_now_s() + self._lease_s).pack())


def holder_of(txn: ReadTransaction, environment: Environment, session_id: SessionId) -> LeaseRecord | None:
    """Return the lease that another living handle holds of a session, None when there is none."""
    try:
        value = txn.get(Table.LEASES, session_id)
        record = None if value is None else LeaseRecord.unpack(session_id, value)
    except CorruptionError as error:
        # Whoever held it notices that it is gone before writing anything.
        logger.warning("a lease is taken for void: %s", error)
        return None
    return record if record is not None and _is_others(record, environment) else None


def require_free(txn: ReadTransaction, environment: Environment, session_id: SessionId, name: str) -> None:
    """Raise when another living handle writes to the session called `name`.

    Raises:
        SessionLeasedError: One does; names it.
    """
    record = holder_of(txn, environment, session_id)
    if record is not None:
        raise SessionLeasedError(
            f"session {name!r} is written to by {record}: close it there; until then it can be looked at "
            f"(`agentmem log`, agentmem.open without a model) and exported"
        )


def leased_by_others(txn: ReadTransaction, environment: Environment) -> set[SessionId]:
    """Return the sessions that other living handles write to."""
    ids = (SessionId(key) for key, _ in txn.scan_each(Table.LEASES))
    return {session_id for session_id in ids if holder_of(txn, environment, session_id) is not None}


def _is_others(record: LeaseRecord, environment: Environment) -> bool:
    return (
        record.holder != environment.holders.number
        and record.boot_id == _boot_id()
        and record.expires_s > _now_s()
        and environment.holders.is_alive(record.holder)
    )


def _now_s() -> float:
    """Return the seconds since the machine was started, time asleep included: no clock that anybody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot_id() -> bytes:
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return bytes(16)
    return bytes.fromhex(text.replace("-", ""))
