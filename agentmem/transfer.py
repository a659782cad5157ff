"""Export a session, or one of its branches, into one portable file, and import it into another store.

Tokens, KV, checkpoints, branches and metadata travel; the reflog and checkpoints that no branch reaches stay behind.
The file around the entries is bundle.py's. Knows nothing of models.

Entries, in this order:
    "SESS"  once: the msgpack map of the session
    "BLOK"  the record of a block, as kv/header.py describes it; each block once
    "CHKP"  checkpoint id (16) | the msgpack map of a checkpoint; parents before children
    "BRCH"  name bytes u16-le | map bytes u32-le | name, UTF-8 | the msgpack map of a branch | its open tokens, u32-le
The maps are those of the store's tables (tree/rows.py).
"""

import dataclasses
import struct
import time
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agentmem._future import Future
from agentmem._lmdb import Environment, Level, ReadTransaction, WriteTransaction
from agentmem.bundle import BundleReader, Kind, read_bundle, write_bundle
from agentmem.errors import AlreadyExistsError, CorruptionError, InvalidInputError, NotFoundError
from agentmem.ids import BlockDigest, CheckpointId, SessionId, new_session_id, short
from agentmem.kv.hashing import chain_hash, pack_tokens, unpack_tokens
from agentmem.kv.header import RecordMeta
from agentmem.kv.record import read_meta
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
from agentmem.tree.trail import Trail

_BRANCH = struct.Struct("<HI")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export wrote.

    Attributes:
        session: Name of the session.
        branches: Names of the branches.
        num_checkpoints: Checkpoints.
        num_blocks: Blocks.
        raw_nbytes: Bytes of the blocks' KV.
        nbytes: Bytes of the file.
    """

    session: str
    branches: tuple[str, ...]
    num_checkpoints: int
    num_blocks: int
    raw_nbytes: int
    nbytes: int


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


@dataclass(frozen=True, slots=True)
class _Branch:
    """A branch on its way.

    Attributes:
        record: The branch.
        start: Index, from the root, of its first open token.
        tokens: Its open tokens.
    """

    record: BranchRecord
    start: int
    tokens: "array[int]"


# -- out


def export_session(
    environment: Environment, catalog: Catalog, disk: DiskTier, name: str, path: Path, *, branch: str | None = None
) -> ExportReport:
    """Write a session, or one branch of it, into the file at `path`, which appears whole or not at all.

    Works beside a process that writes; what that process has not saved yet stays behind.

    Args:
        environment: The store.
        catalog: Its catalog.
        disk: Its blocks.
        name: The session.
        path: The file; an older export there is replaced.
        branch: The only branch to export; None for all.

    Raises:
        NotFoundError: There is no such session or branch, or no such directory for the file.
        CorruptionError: What is to be exported is damaged in the store; no file is left.
        InvalidInputError: The path is in the store, or something else than an export.
        StorageFullError, ReadOnlyError: The file cannot be written.
    """
    if path.resolve().parent == environment.path.resolve():
        raise InvalidInputError(f"{str(path)!r} is inside the store: choose a path outside")
    with environment.read() as txn:
        session = catalog.find_session(txn, name)
        records = catalog.branches(txn, session.session_id)
        if branch is not None:
            records = [catalog.branch(txn, session.session_id, branch)]
            session = dataclasses.replace(session, active_branch=branch)
        checkpoints = _lineages(txn, catalog, session.session_id, records)
        starts = [0 if record.tip is None else checkpoints[record.tip].num_tokens for record in records]
        branches = [
            _Branch(record, start, catalog.open_tokens(txn, session.session_id, record.name))
            for record, start in zip(records, starts, strict=True)
        ]
    digests = dict.fromkeys(digest for checkpoint in checkpoints.values() for digest in checkpoint.digests())
    raw_nbytes = 0
    with write_bundle(path) as writer:
        writer.put(Kind.SESSION, rows.pack_session(session))
        for digest in digests:
            data = _load_record(disk, digest)
            raw_nbytes += read_meta(data).raw_nbytes
            writer.put(Kind.BLOCK, data)
        for checkpoint in checkpoints.values():
            writer.put(Kind.CHECKPOINT, _pack_checkpoint(checkpoint))
        for each in branches:
            writer.put(Kind.BRANCH, _pack_branch(each))
    return ExportReport(
        session=name,
        branches=tuple(record.name for record in records),
        num_checkpoints=len(checkpoints),
        num_blocks=len(digests),
        raw_nbytes=raw_nbytes,
        nbytes=path.stat().st_size,
    )


def _lineages(
    txn: ReadTransaction, catalog: Catalog, session_id: SessionId, branches: Iterable[BranchRecord]
) -> dict[CheckpointId, Checkpoint]:
    """Return every checkpoint that the branches reach, parents before children."""
    found: dict[CheckpointId, Checkpoint] = {}
    for branch in branches:
        line: list[Checkpoint] = []
        at = branch.tip
        while at is not None and at not in found:
            try:
                line.append(catalog.checkpoint(txn, session_id, at))
            except NotFoundError as error:
                raise CorruptionError(f"branch {branch.name!r} cannot be exported: {error}") from error
            at = line[-1].parent_id
        found.update((checkpoint.checkpoint_id, checkpoint) for checkpoint in reversed(line))
    return found


def _load_record(disk: DiskTier, digest: BlockDigest) -> bytes:
    try:
        return disk.load_record(digest)
    except (NotFoundError, CorruptionError) as error:
        raise CorruptionError(
            f"{error}; resume the session with its model, generate and checkpoint, which computes the block again, "
            "or export another branch"
        ) from error


def _pack_checkpoint(checkpoint: Checkpoint) -> bytes:
    return checkpoint.checkpoint_id + rows.checkpoint_map(checkpoint)


def _pack_branch(branch: _Branch) -> bytes:
    name = branch.record.name.encode()
    fields = rows.pack_branch(rows.StoredBranch(branch.record, branch.start, stamp=0))
    return b"".join((_BRANCH.pack(len(name), len(fields)), name, fields, pack_tokens(branch.tokens)))


# -- in


def import_session(
    environment: Environment, catalog: Catalog, disk: DiskTier, path: Path, *, name: str | None = None
) -> ImportReport:
    """Read a file that `export_session` wrote into the store, as a new session, durably.

    Every block is decoded and compared with its names before it is stored; those that the store has are not stored
    again. Checkpoints and branches are written at the end, in one operation: after an error nothing is imported, and
    the blocks that were stored until then are gc's. Nothing can prove that KV came from the model that the file names:
    import files of people whom you trust.

    Args:
        environment: The store.
        catalog: Its catalog.
        disk: Its blocks.
        path: The file.
        name: What to call the session; None: as in the file.

    Raises:
        AlreadyExistsError: The store has a session of that name.
        CorruptionError: The file is no export, damaged, cut off, or contradicts itself.
        FormatVersionError: It needs a newer agentmem.
        NotFoundError: There is no such file.
        StorageFullError, ReadOnlyError: The store cannot be written.
    """
    with read_bundle(path) as reader:
        arrival = _Arrival(environment, catalog, disk, name)
        arrival.receive(reader)
    try:
        environment.submit(arrival.write, level=Level.DURABLE, nbytes=arrival.metadata_nbytes).result()
    finally:
        catalog.forget(arrival.session_id)
    return arrival.report()


class _Arrival:
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
        self._num_new_blocks = 0
        self._stored: deque[Future[None]] = deque()
        self._checkpoints: dict[CheckpointId, Checkpoint] = {}
        self._tokens: dict[CheckpointId | None, Trail[int]] = {None: Trail(array("I"))}
        self._chains: dict[CheckpointId | None, Trail[BlockRef]] = {None: Trail([])}
        self._branches: dict[str, _Branch] = {}

    def receive(self, reader: BundleReader) -> None:
        """Take every entry of the file, and store its blocks."""
        take = {
            Kind.SESSION: self._take_session,
            Kind.BLOCK: self._take_block,
            Kind.CHECKPOINT: self._take_checkpoint,
            Kind.BRANCH: self._take_branch,
        }
        for kind, data in reader.entries():
            if (self._session is None) != (kind is Kind.SESSION):
                raise CorruptionError("the file cannot be imported: it must begin with its one session")
            if kind is not Kind.BLOCK:
                self.metadata_nbytes += len(data)
            take[kind](data)
        while self._stored:
            self._stored.popleft().result()

    def write(self, txn: WriteTransaction) -> None:
        """Write the session with all that belongs to it, as one operation."""
        self._catalog.put_session(txn, self._record())
        for checkpoint in self._checkpoints.values():
            self._catalog.put_checkpoint(txn, checkpoint)
            self._disk.retain(txn, checkpoint.digests())
        for branch in self._branches.values():
            tip = branch.record.tip
            tokens = self._tokens[tip].fork()
            tokens.extend(branch.tokens)
            self._catalog.put_branch(txn, self.session_id, branch.record, tokens, branch.start)
            move = Move(branch=branch.record.name, operation="import", old=None, new=tip, time_s=time.time())
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
            is_same = chain_hash(before.block_hash, tokens.slice(start, stop)) == ref.block_hash
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


def _unpack_branch(session_id: SessionId, data: bytes) -> _Branch:
    name_nbytes, map_nbytes = _BRANCH.unpack_from(data) if len(data) >= _BRANCH.size else (0, 0)
    middle = _BRANCH.size + name_nbytes
    end = middle + map_nbytes
    if not name_nbytes or end > len(data) or (len(data) - end) % TOKEN_NBYTES:
        raise CorruptionError(f"a branch of the file has {len(data)} bytes, which do not fit its lengths")
    name = data[_BRANCH.size : middle].decode(errors="replace")
    stored = rows.unpack_branch(rows.branch_key(session_id, name), data[middle:end])
    return _Branch(stored.record, stored.start, unpack_tokens(data[end:]))


def _require(is_right: bool, checkpoint_id: CheckpointId, what: str) -> None:
    if not is_right:
        raise CorruptionError(f"checkpoint {short(checkpoint_id)} of the file cannot be imported: {what}")
