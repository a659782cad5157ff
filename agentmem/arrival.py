"""A session on its way into a store, from a file or a lake: every entry checked against those before it.

Knows nothing of where the entries come from. What they hold is described in transfer.py.
"""

import dataclasses
import struct
import time
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from agentmem._future import Future
from agentmem._lmdb import Environment, Level, WriteTransaction
from agentmem.bundle import Kind
from agentmem.errors import AlreadyExistsError, CorruptionError
from agentmem.ids import BlockDigest, CheckpointId, SessionId, new_session_id, short
from agentmem.kv.hashing import chain_hash, pack_tokens, unpack_tokens
from agentmem.kv.header import RecordMeta
from agentmem.kv.record import read_meta
from agentmem.marks import Marks, by_start, pack_marks
from agentmem.tiers.disk import DiskTier
from agentmem.tree import rows
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import (
    TOKEN_NBYTES,
    BlockRef,
    BranchRecord,
    Checkpoint,
    Move,
    SessionRecord,
    check_name,
)
from agentmem.tree.fields import CHECKPOINT_ID_NBYTES
from agentmem.tree.losses import without_lost
from agentmem.tree.trail import Trail

_BRANCH = struct.Struct("<HI")


@dataclass(frozen=True, slots=True)
class MovedBranch:
    """A branch on its way.

    Attributes:
        record: The branch.
        start: Index, from the root, of its first open token.
        tokens: Its open tokens.
    """

    record: BranchRecord
    start: int
    tokens: "array[int]"


def pack_branch(branch: MovedBranch) -> bytes:
    """Return the entry of a branch."""
    name = branch.record.name.encode()
    fields = rows.pack_branch(rows.StoredBranch(branch.record, branch.start, stamp=0))
    return b"".join((_BRANCH.pack(len(name), len(fields)), name, fields, pack_tokens(branch.tokens)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """What an import brought.

    Attributes:
        session: Name of the new session.
        session_id: Its id, new in every import.
        branches: Names of its branches.
        num_checkpoints: Checkpoints.
        num_blocks: Blocks in the file.
        num_new_blocks: Those that the store did not have.
        raw_nbytes: Bytes of the blocks' KV.
    """

    session: str
    session_id: SessionId
    branches: tuple[str, ...]
    num_checkpoints: int
    num_blocks: int
    num_new_blocks: int
    raw_nbytes: int


class Arrival:
    """One import: what came out of the file so far, each part checked against the parts before it."""

    def __init__(self, environment: Environment, catalog: Catalog, disk: DiskTier, name: str | None) -> None:
        self.session_id = new_session_id()
        self.metadata_nbytes = 0
        self._environment = environment
        self._catalog = catalog
        self._disk = disk
        self._name = None if name is None else check_name("session", name)
        self._session: SessionRecord | None = None
        self._blocks: dict[BlockDigest, RecordMeta] = {}
        self._lost: set[BlockDigest] = set()
        self._num_new_blocks = 0
        self._stored: deque[Future[None]] = deque()
        self._checkpoints: dict[CheckpointId, Checkpoint] = {}
        self._tokens: dict[CheckpointId | None, Trail[int]] = {None: Trail(array("I"))}
        self._chains: dict[CheckpointId | None, Trail[BlockRef]] = {None: Trail([])}
        self._marks: dict[CheckpointId | None, Marks] = {None: ()}
        self._branches: dict[str, MovedBranch] = {}

    def expect(self, metas: Iterable[RecordMeta], lost: Collection[BlockDigest] = ()) -> None:
        """Take note of blocks that no entry brings: they are in the store already, or `lost`.

        Checkpoints are stored without what is lost; its tokens count as not fed, so that it is computed again.
        """
        self._blocks.update((meta.digest, meta) for meta in metas)
        self._lost.update(lost)

    def store(self, digest: BlockDigest, data: bytes) -> bool:
        """Store the block `digest`; False when `data` is another one's record, or damaged.

        Raises:
            FormatVersionError: The record is of a format that this version does not read.
            StorageFullError, ReadOnlyError: The store cannot be written.
        """
        try:
            if read_meta(data).digest != digest:
                return False
            self._take_block(data)
        except CorruptionError:
            return False
        return True

    def receive(self, entries: Iterable[tuple[Kind, bytes]]) -> None:
        """Take every entry, and store the blocks among them.

        Raises:
            AlreadyExistsError: The store has a session of that name.
            CorruptionError: An entry is damaged, or contradicts those before it.
        """
        take = {
            Kind.SESSION: self._take_session,
            Kind.BLOCK: self._take_block,
            Kind.CHECKPOINT: self._take_checkpoint,
            Kind.BRANCH: self._take_branch,
        }
        for kind, data in entries:
            if (self._session is None) != (kind is Kind.SESSION):
                raise CorruptionError("the file cannot be imported: it must begin with its one session")
            if kind is not Kind.BLOCK:
                self.metadata_nbytes += len(data)
            take[kind](data)
        while self._stored:
            self._stored.popleft().result()

    def write(self, txn: WriteTransaction, *, operation: str = "import", moves: Sequence[Move] = ()) -> None:
        """Write the session with all that belongs to it, as one operation; `moves` come before its own in the reflog.

        Raises:
            NotFoundError: A block that was expected is not stored.
        """
        self._catalog.put_session(txn, self._record())
        for checkpoint in self._checkpoints.values():
            whole = self._without_lost(checkpoint)
            self._catalog.put_checkpoint(txn, whole)
            self._disk.retain(txn, whole.digests())
        for move in moves:
            self._catalog.record_move(txn, self.session_id, move)
        for branch in self._branches.values():
            tip = branch.record.tip
            tokens = self._tokens[tip].fork()
            tokens.extend(branch.tokens)
            self._catalog.put_branch(txn, self.session_id, branch.record, tokens, branch.start)
            move = Move(branch=branch.record.name, operation=operation, old=None, new=tip, time_s=time.time())
            self._catalog.record_move(txn, self.session_id, move)

    def report(self) -> ImportReport:
        """Say what was imported."""
        return ImportReport(
            session=self._record().name,
            session_id=self.session_id,
            branches=tuple(self._branches),
            num_checkpoints=len(self._checkpoints),
            num_blocks=len(self._blocks),
            num_new_blocks=self._num_new_blocks,
            raw_nbytes=sum(meta.raw_nbytes for meta in self._blocks.values()),
        )

    def _without_lost(self, checkpoint: Checkpoint) -> Checkpoint:
        if self._lost.isdisjoint(checkpoint.digests()):
            return checkpoint
        for mark in checkpoint.marks:
            is_there = mark.payload is None or mark.payload not in self._lost
            _require(is_there, checkpoint.checkpoint_id, f"the model input at token {mark.start:,} is lost")
        return without_lost(checkpoint, self._blocks.keys() - self._lost, self._record().block_size)

    def _record(self) -> SessionRecord:
        if self._session is None:
            raise CorruptionError("the file cannot be imported: it holds no session")
        return self._session

    def _take_session(self, data: bytes) -> None:
        record = rows.unpack_session(rows.session_key(self.session_id), data)
        self._session = dataclasses.replace(record, name=self._name or record.name, updated_s=time.time())
        check_name("session", self._session.name)
        with self._environment.read() as txn:
            names = {known.name for known in self._catalog.sessions(txn, [])}
        if self._session.name in names:  # said now, not after all blocks were stored
            raise AlreadyExistsError(f"the store has a session {self._session.name!r}: import it under another name")

    def _take_block(self, data: bytes) -> None:
        meta = read_meta(data)
        self._num_new_blocks += not self._disk.contains(meta.digest) and meta.digest not in self._blocks
        self._blocks[meta.digest] = meta
        self._stored.append(self._disk.put_record(data, level=Level.RELAXED))
        while self._stored and self._stored[0].done():
            self._stored.popleft().result()

    def _take_checkpoint(self, data: bytes) -> None:
        key = self.session_id + data[:CHECKPOINT_ID_NBYTES]
        checkpoint = rows.checkpoint_of(key, data[CHECKPOINT_ID_NBYTES:])
        parent_id, name = checkpoint.parent_id, checkpoint.checkpoint_id
        _require(len(key) == rows.NODE_KEY_NBYTES and name not in self._checkpoints, name, "its id is damaged")
        _require(parent_id in self._tokens, name, "its parent is not before it")
        tokens = self._tokens[name] = self._tokens[parent_id].fork()
        tokens.extend(unpack_tokens(checkpoint.tokens))
        _require(
            len(tokens) == checkpoint.num_tokens, name, f"it has {len(tokens)} tokens, not {checkpoint.num_tokens}"
        )
        _require(checkpoint.num_pending <= checkpoint.num_tokens, name, "more tokens are pending than it has")
        self._marks[name] = by_start((*self._marks[parent_id], *checkpoint.marks))
        self._chains[name] = self._checked_blocks(checkpoint, tokens)
        self._checkpoints[name] = checkpoint

    def _checked_blocks(self, checkpoint: Checkpoint, tokens: Trail[int]) -> Trail[BlockRef]:
        """Return the full blocks up to the checkpoint, after checking that each block is that of its tokens."""
        name = checkpoint.checkpoint_id
        missing = [digest for digest in checkpoint.digests() if digest not in self._blocks]
        _require(not missing, name, f"{len(missing)} of its blocks are not in the file")
        chain = self._chains[checkpoint.parent_id].fork()
        _require(checkpoint.first_block <= len(chain), name, "blocks are missing before its first one")
        chain.truncate(checkpoint.first_block)
        for ref in checkpoint.blocks:
            self._check_block(ref, chain, tokens, checkpoint)
            chain.extend([ref])
        if checkpoint.tail is not None:
            self._check_block(checkpoint.tail, chain, tokens, checkpoint)
        return chain

    def _check_block(self, ref: BlockRef, chain: Trail[BlockRef], tokens: Trail[int], checkpoint: Checkpoint) -> None:
        meta, name = self._blocks[ref.digest], checkpoint.checkpoint_id
        is_same = meta.block_hash == ref.block_hash and meta.fingerprint == checkpoint.fingerprint
        _require(is_same, name, f"block {short(ref.digest)} is of other tokens or another model")
        before = self._blocks[chain[-1].digest] if len(chain) else None
        start = 0 if before is None else before.start + before.num_tokens
        stop = start + meta.num_tokens
        _require(meta.start == start and stop <= len(tokens), name, f"block {short(ref.digest)} is out of place")
        # The first block's hash begins at a root that depends on the store's salt, which no file tells.
        if before is not None:
            marks = pack_marks(self._marks[name], start, stop)
            is_same = chain_hash(before.block_hash, tokens.slice(start, stop), marks) == ref.block_hash
            _require(is_same, name, f"block {short(ref.digest)} is not that of its tokens")

    def _take_branch(self, data: bytes) -> None:
        branch = _unpack_branch(self.session_id, data)
        name, tip = branch.record.name, branch.record.tip
        if name in self._branches or tip not in self._tokens:
            raise CorruptionError(f"branch {name!r} of the file comes twice or before its tip")
        check_name("branch", name)
        if branch.start != len(self._tokens[tip]) or branch.record.num_open != len(branch.tokens):
            raise CorruptionError(f"branch {name!r} of the file does not begin where its tip ends")
        self._branches[name] = branch


def _unpack_branch(session_id: SessionId, data: bytes) -> MovedBranch:
    name_nbytes, map_nbytes = _BRANCH.unpack_from(data) if len(data) >= _BRANCH.size else (0, 0)
    middle = _BRANCH.size + name_nbytes
    end = middle + map_nbytes
    if not name_nbytes or end > len(data) or (len(data) - end) % TOKEN_NBYTES:
        raise CorruptionError(f"a branch of the file has {len(data)} bytes, which do not fit its lengths")
    name = data[_BRANCH.size : middle].decode(errors="replace")
    stored = rows.unpack_branch(rows.branch_key(session_id, name), data[middle:end])
    return MovedBranch(stored.record, stored.start, unpack_tokens(data[end:]))


def _require(is_right: bool, checkpoint_id: CheckpointId, what: str) -> None:
    if not is_right:
        raise CorruptionError(f"checkpoint {short(checkpoint_id)} of the file cannot be imported: {what}")
