"""Sessions, branches, checkpoints and moves on disk.

Every method works inside a transaction that the caller opened on the environment, so that one operation may change
several records and blocks, all or none. Knows nothing of blocks: whoever stores or removes a checkpoint also retains or
releases `checkpoint.digests()` in the same transaction. Layout of the rows: rows.py.
"""

import dataclasses
import difflib
import logging
import secrets
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from agentmem._lmdb import ReadTransaction, Table, WriteTransaction
from agentmem.errors import AlreadyExistsError, CorruptionError, InvalidInputError, NotFoundError
from agentmem.ids import BlockDigest, CheckpointId, SessionId
from agentmem.tree import nodes, pins, refs, rows, tails
from agentmem.tree.checkpoint import BranchRecord, Checkpoint, Move, SessionRecord, check_name
from agentmem.tree.tails import Tails
from agentmem.tree.trail import Trail

logger = logging.getLogger(__name__)

T = TypeVar("T")

Damaged = list[CorruptionError] | None
"""Where a listing puts the errors of damaged records, and goes on; with None the first one is raised."""


class Catalog:
    """Reads and writes the records of the metadata plane."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        """Make the catalog of one store; its transactions are given to each method.

        Args:
            clock: Unix time; says since when nobody names a checkpoint.
        """
        self._clock = clock
        self._tails = Tails()
        # Random, so that no two handles ever give out the same stamp.
        self._last_stamp = secrets.randbits(60)

    def sessions(self, txn: ReadTransaction, damaged: Damaged = None) -> list[SessionRecord]:
        """Return every session, oldest first.

        Raises:
            CorruptionError: A record is damaged and `damaged` is None.
        """
        listed = _decoded(txn, Table.SESSIONS, rows.SESSION_PREFIX, rows.unpack_session)
        return sorted(_sound(listed, damaged), key=lambda session: session.created_s)

    def session(self, txn: ReadTransaction, session_id: SessionId) -> SessionRecord:
        """Return one session.

        Raises:
            NotFoundError: There is none.
            CorruptionError: Its record is damaged.
        """
        key = rows.session_key(session_id)
        value = txn.get(Table.SESSIONS, key)
        if value is None:
            raise NotFoundError(f"no session has the id {session_id.hex()}")
        return rows.unpack_session(key, value)

    def find_session(self, txn: ReadTransaction, name: str) -> SessionRecord:
        """Return the session called `name`.

        Raises:
            NotFoundError: There is none; lists what is near.
            CorruptionError: Its record is damaged.
        """
        session_id = txn.get(Table.SESSIONS, rows.session_name_key(name))
        if session_id is None:
            raise NotFoundError(_no_session(name, self._session_names(txn)))
        return self.session(txn, SessionId(session_id))

    def put_session(self, txn: WriteTransaction, record: SessionRecord) -> None:
        """Write a session, new or known; a new name replaces its old one.

        Raises:
            InvalidInputError: It may not be called so.
            AlreadyExistsError: Another session is called so.
        """
        name_key = rows.session_name_key(check_name("session", record.name))
        holder = txn.get(Table.SESSIONS, name_key)
        if holder not in {None, record.session_id}:
            raise AlreadyExistsError(f"a session called {record.name!r} exists; resume it, or choose another name")
        key = rows.session_key(record.session_id)
        old = txn.get(Table.SESSIONS, key)
        if holder is None:
            if old is not None:
                old_name = rows.unpack_session(key, old).name
                txn.delete(Table.SESSIONS, rows.session_name_key(old_name))
            txn.put(Table.SESSIONS, name_key, record.session_id)
        txn.put(Table.SESSIONS, key, rows.pack_session(record))

    def remove_session(self, txn: WriteTransaction, session_id: SessionId) -> None:
        """Remove a session with its branches, pins and moves; its checkpoints are gc's once the grace is over.

        Raises:
            NotFoundError: There is none.
        """
        if not txn.delete(Table.SESSIONS, rows.session_key(session_id)):
            raise NotFoundError(f"no session has the id {session_id.hex()}")
        txn.delete(Table.LEASES, session_id)  # whoever believes to hold it hears of it at the next write
        # The record may be damaged, so the name is found by its id.
        for key, value in list(txn.scan_each(Table.SESSIONS, rows.SESSION_NAME_PREFIX)):
            if value == session_id:
                txn.delete(Table.SESSIONS, key)
        for key, value in list(txn.scan_each(Table.BRANCHES, session_id)):
            self._remove_branch(txn, key, value)
        for node in list(pins.each(txn, session_id)):
            pins.remove(txn, node, self._now_ns())
        for key, _ in list(txn.scan_each(Table.REFLOG, session_id)):
            txn.delete(Table.REFLOG, key)

    def branches(self, txn: ReadTransaction, session_id: SessionId, damaged: Damaged = None) -> list[BranchRecord]:
        """Return every branch of a session, oldest first.

        Raises:
            CorruptionError: A record is damaged and `damaged` is None.
        """
        listed = _decoded(txn, Table.BRANCHES, session_id, lambda key, value: rows.unpack_branch(key, value).record)
        return sorted(_sound(listed, damaged), key=lambda branch: branch.created_s)

    def open_branches(
        self, txn: ReadTransaction, session_id: SessionId
    ) -> Iterator[tuple[str, tuple[BranchRecord, "array[int]"] | CorruptionError]]:
        """Yield the name of every branch of a session, and it with the tokens after its tip, or what is wrong."""
        for key, value in txn.scan_each(Table.BRANCHES, session_id):
            found: tuple[BranchRecord, array[int]] | CorruptionError
            try:
                if isinstance(value, CorruptionError):
                    raise value
                stored = rows.unpack_branch(key, value)
                found = (stored.record, tails.read(txn, key, stored))
            except CorruptionError as error:
                found = error
            yield rows.branch_name(key), found

    def branch(self, txn: ReadTransaction, session_id: SessionId, name: str) -> BranchRecord:
        """Return one branch.

        Raises:
            NotFoundError: There is none.
            CorruptionError: Its record is damaged.
        """
        return self._stored_branch(txn, session_id, name).record

    def open_tokens(self, txn: ReadTransaction, session_id: SessionId, name: str) -> "array[int]":
        """Return the tokens after a branch's tip.

        Raises:
            NotFoundError: There is no such branch.
            CorruptionError: A row is damaged or missing.
        """
        stored = self._stored_branch(txn, session_id, name)
        return tails.read(txn, rows.branch_key(session_id, name), stored)

    def put_branch(
        self, txn: WriteTransaction, session_id: SessionId, record: BranchRecord, tokens: Trail[int], start: int
    ) -> None:
        """Write a branch, new or known, and move its name in the counts of checkpoints.

        Args:
            txn: Where.
            session_id: The branch's session.
            record: The branch; its `num_open` is taken from `tokens`.
            tokens: All tokens of the branch from the root. Nobody may change the trail until the transaction is over:
                give a fork of it, or wait.
            start: Index of the first open token: the tip's `num_tokens`. Only tokens from there on are read.

        Raises:
            InvalidInputError: It may not be called so, or `start` is beyond the tokens.
            NotFoundError: Its tip is not stored.
            CorruptionError: The stored branch is damaged.
        """
        key = rows.branch_key(session_id, check_name("branch", record.name))
        # What is remembered as written must not change with the branch.
        tokens = tokens.fork()
        num_open = len(tokens) - start
        if num_open < 0 or start < 0:
            raise InvalidInputError(f"branch {record.name!r} of {len(tokens)} tokens cannot be open from {start} on")
        value = txn.get(Table.BRANCHES, key)
        old = None if value is None else rows.unpack_branch(key, value)
        self._last_stamp += 1
        new = rows.StoredBranch(dataclasses.replace(record, num_open=num_open), start, self._last_stamp)
        sums = self._tails.put(txn, key, old, new, tokens)
        txn.put(Table.BRANCHES, key, rows.pack_branch(dataclasses.replace(new, sums=sums)))
        self._move_tip(txn, session_id, None if old is None else old.record.tip, record.tip)

    def remove_branch(self, txn: WriteTransaction, session_id: SessionId, name: str) -> None:
        """Remove a branch; what only it reached is gc's once the grace is over.

        A damaged branch can be removed too: its checkpoints then stay until `check` tells of them.

        Raises:
            NotFoundError: There is none.
        """
        key = rows.branch_key(session_id, name)
        value = next((value for found, value in txn.scan_each(Table.BRANCHES, key) if found == key), None)
        if value is None:
            raise NotFoundError(f"the session has no branch {name!r}")
        self._remove_branch(txn, key, value)

    def forget(self, session_id: SessionId) -> None:
        """Let go of the tokens that are held in memory for a session that was closed."""
        self._tails.forget(session_id)

    def checkpoints(self, txn: ReadTransaction, session_id: SessionId, damaged: Damaged = None) -> list[Checkpoint]:
        """Return every stored checkpoint of a session, oldest first, with those that gc has not removed yet.

        Raises:
            CorruptionError: A record is damaged and `damaged` is None.
        """
        listed = (checkpoint for _, checkpoint in nodes.each(txn, session_id))
        return sorted(_sound(listed, damaged), key=lambda checkpoint: checkpoint.created_s)

    def checkpoint(self, txn: ReadTransaction, session_id: SessionId, checkpoint_id: CheckpointId) -> Checkpoint:
        """Return one checkpoint.

        Raises:
            NotFoundError: There is none.
            CorruptionError: Its record is damaged.
        """
        found = nodes.find(txn, rows.node_key(session_id, checkpoint_id))
        if found is None:
            raise NotFoundError(f"checkpoint {checkpoint_id.hex()} is not stored; gc may have removed it")
        return found

    def open_payloads(self, txn: ReadTransaction) -> set[BlockDigest]:
        """Return the model inputs that branches need after their tips, where no checkpoint names them yet."""
        listed = _decoded(txn, Table.BRANCHES, b"", lambda key, value: rows.unpack_branch(key, value).record)
        marks = (mark for record in _sound(listed, []) for mark in record.marks)
        return {mark.payload for mark in marks if mark.payload is not None}

    def put_checkpoint(self, txn: WriteTransaction, checkpoint: Checkpoint) -> Checkpoint | None:
        """Write a checkpoint; return the record that it replaces, None when it is new.

        A new one counts as a name of its parent. The caller retains `checkpoint.digests()` and releases those of the
        record that is returned.

        Raises:
            NotFoundError: Its parent is not stored.
            InvalidInputError: It is stored with another parent.
            CorruptionError: The record to replace is damaged.
        """
        key = rows.node_key(checkpoint.session_id, checkpoint.checkpoint_id)
        old = nodes.find(txn, key)
        if old is None:
            if checkpoint.parent_id is not None:
                refs.retain(txn, rows.node_key(checkpoint.session_id, checkpoint.parent_id))
            refs.create(txn, key, self._now_ns())
        elif old.parent_id != checkpoint.parent_id:
            raise InvalidInputError(f"checkpoint {checkpoint.checkpoint_id.hex()} is stored with another parent")
        nodes.put(txn, checkpoint)
        return old

    def remove_checkpoint(self, txn: WriteTransaction, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint that nobody names; its parent loses a name. The caller releases its digests.

        Raises:
            InvalidInputError: Somebody names it.
            NotFoundError: It is not stored.
        """
        key = rows.node_key(checkpoint.session_id, checkpoint.checkpoint_id)
        counts = refs.find(txn, key)
        if counts is not None and counts.refs:
            raise InvalidInputError(f"checkpoint {checkpoint.checkpoint_id.hex()} is named {counts.refs} times")
        refs.remove(txn, key)
        nodes.remove(txn, key)
        parent = None if checkpoint.parent_id is None else rows.node_key(checkpoint.session_id, checkpoint.parent_id)
        # A parent that was lost to damage must not keep its children from being removed.
        if parent is not None and counts is not None and refs.find(txn, parent) is not None:
            refs.release(txn, parent, counts.dropped_ns)

    def record_move(self, txn: WriteTransaction, session_id: SessionId, move: Move) -> None:
        """Add a row to a session's reflog."""
        last = txn.last_key(Table.REFLOG, session_id)
        sequence = 0 if last is None else rows.move_sequence(last) + 1
        txn.put(Table.REFLOG, rows.move_key(session_id, sequence), rows.pack_move(move))

    def moves(self, txn: ReadTransaction, session_id: SessionId, damaged: Damaged = None) -> list[Move]:
        """Return a session's reflog, oldest first.

        Raises:
            CorruptionError: A row is damaged and `damaged` is None.
        """
        return list(_sound(_decoded(txn, Table.REFLOG, session_id, rows.unpack_move), damaged))

    def _session_names(self, txn: ReadTransaction) -> list[str]:
        found = txn.scan_each(Table.SESSIONS, rows.SESSION_NAME_PREFIX)
        return [key[len(rows.SESSION_NAME_PREFIX) :].decode(errors="replace") for key, _ in found]

    def _stored_branch(self, txn: ReadTransaction, session_id: SessionId, name: str) -> rows.StoredBranch:
        key = rows.branch_key(session_id, name)
        value = txn.get(Table.BRANCHES, key)
        if value is None:
            raise NotFoundError(f"the session has no branch {name!r}")
        return rows.unpack_branch(key, value)

    def _move_tip(
        self, txn: WriteTransaction, session_id: SessionId, old: CheckpointId | None, new: CheckpointId | None
    ) -> None:
        if old == new:
            return
        if new is not None:
            refs.retain(txn, rows.node_key(session_id, new))
        if old is not None:
            refs.release(txn, rows.node_key(session_id, old), self._now_ns())

    def _remove_branch(self, txn: WriteTransaction, key: bytes, value: bytes | CorruptionError) -> None:
        """Remove a branch and its tokens; when it is damaged, nobody knows its tip, which stays counted."""
        try:
            if isinstance(value, CorruptionError):
                raise value
            tip = rows.unpack_branch(key, value).record.tip
        except CorruptionError as error:
            logger.warning("removed a damaged branch, its checkpoints stay: %s", error)
            tip = None
        try:
            self._move_tip(txn, SessionId(key[: rows.SESSION_ID_NBYTES]), tip, None)
        except NotFoundError as error:
            logger.warning("removed a branch whose tip was lost: %s", error)
        txn.delete(Table.BRANCHES, key)
        self._tails.remove(txn, key)

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)


def _decoded(
    txn: ReadTransaction, table: Table, prefix: bytes, unpack: Callable[[bytes, bytes], T]
) -> Iterator[T | CorruptionError]:
    """Yield what the rows hold, or what is wrong with them."""
    for key, value in txn.scan_each(table, prefix):
        try:
            yield value if isinstance(value, CorruptionError) else unpack(key, value)
        except CorruptionError as error:
            yield error


def _sound(listed: Iterable[T | CorruptionError], damaged: Damaged) -> Iterator[T]:
    """Yield what is sound; put the rest into `damaged`, or raise it."""
    for found in listed:
        if not isinstance(found, CorruptionError):
            yield found
        elif damaged is None:
            raise found
        else:
            damaged.append(found)


def _no_session(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, cutoff=0.5) or names[:5]
    hint = f"did you mean {', '.join(map(repr, near))}?" if near else "the store has no session yet"
    return f"no session is called {name!r}; {hint}"
