"""Make the records of a store fit one another again, after rows of it were lost.

Drops blocks that cannot be read and checkpoints whose tokens are not complete; makes sessions and branches again from
what names them; counts everything anew. What cannot be had is said, never guessed: a branch whose tokens are lost goes
back to an earlier checkpoint of its own. Knows nothing of files.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from agentmem._lmdb import Environment, ReadTransaction, Table, WriteTransaction
from agentmem._lmdb.salvage import Salvage
from agentmem.errors import AgentMemError, CorruptionError
from agentmem.ids import BlockDigest, CheckpointId, Fingerprint, SessionId, short
from agentmem.tiers.blockrows import BlockInfo, count_blocks
from agentmem.tiers.chunks import chunk_keys
from agentmem.tiers.disk import DiskTier
from agentmem.tree import nodes, pins, refs, rows, tails
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import BranchRecord, Checkpoint, Move, SessionRecord
from agentmem.tree.losses import History, complete, without_lost

logger = logging.getLogger(__name__)

_DEFAULT_BLOCK_SIZE = 64

_EARLIER = "its record was found outside of the tables, and may be of an earlier time"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """What was lost, and what was counted anew.

    Attributes:
        lost: What could not be had again, in words.
        num_blocks_dropped: Blocks whose bytes were damaged or incomplete.
        num_cut: Checkpoints that named KV which is lost: it is computed again from tokens, and named anew.
        num_recounted: Blocks whose count of names was wrong.
    """

    lost: tuple[str, ...]
    num_blocks_dropped: int
    num_cut: int
    num_recounted: int


def mend(environment: Environment, catalog: Catalog, disk: DiskTier, *, found: Salvage, now_s: float) -> Mended:
    """Mend the records of a store whose `nrefs`, `tomb` and leases are empty, and which nobody else has open.

    Args:
        environment: The store.
        catalog: Its catalog.
        disk: Its blocks.
        found: How its rows were found.
        now_s: Unix time.
    """
    unreadable = list(_unreadable(environment, disk))

    def operation(txn: WriteTransaction) -> Mended:
        disk.discard(txn, unreadable)
        mending = _Mending(txn, catalog, found, now_s)
        mending.run()
        return Mended(
            lost=tuple(mending.lost),
            num_blocks_dropped=len(unreadable),
            num_cut=mending.num_cut,
            num_recounted=mending.num_recounted,
        )

    return environment.submit(operation).result()


def _unreadable(environment: Environment, disk: DiskTier) -> Iterator[BlockDigest]:
    """Yield the blocks whose stored bytes are not what was written."""
    with environment.read() as txn:
        digests = [digest for digest, info in disk.iter_index(txn) if isinstance(info, BlockInfo) and not info.is_below]
    for digest in digests:
        try:
            disk.load_record(digest)
        except AgentMemError as error:
            logger.warning("block %s is dropped: %s", short(digest), error)
            yield digest


class _Mending:
    """One pass over all records."""

    def __init__(self, txn: WriteTransaction, catalog: Catalog, found: Salvage, now_s: float) -> None:
        self.lost: list[str] = []
        self.num_cut = 0
        self.num_recounted = 0
        self._txn = txn
        self._catalog = catalog
        self._found = found
        self._now_s = now_s
        self._checkpoints: dict[bytes, Checkpoint] = {}
        self._blocks: set[BlockDigest] = set()
        self._names: dict[SessionId, str] = {}
        self._block_sizes: dict[SessionId, int] = {}
        self._revived: set[SessionId] = set()

    def run(self) -> None:
        """Mend everything, in the order in which things are named: what is named first."""
        if self._found.is_newest_unsure:
            self._lose("the newest commit may be lost: one of the two meta pages is damaged")
        self._mend_blocks()
        self._mend_checkpoints()
        self._mend_sessions()
        self._cut_checkpoints()
        for session_id in list(self._names):
            self._mend_branches(session_id)
        for key in list(tails.orphans(self._txn)):
            self._txn.delete(Table.TAILS, key)
        self._mend_counts()
        for table in sorted(self._found.incomplete & {Table.SESSIONS, Table.BRANCHES, Table.NODES}):
            self._lose(f"rows of table {table.value!r} may be lost of which nothing else tells")

    # -- blocks

    def _mend_blocks(self) -> None:
        """Remove chunks of no block and names of no block; name blocks that lost theirs."""
        txn = self._txn
        infos = {BlockDigest(key): info for key, info in _sound(txn, Table.BINDEX, _block_info)}
        chunks = {key for info in infos.values() for key in chunk_keys(info)}
        for key in [key for key in txn.keys(Table.BLOCKS) if key not in chunks]:
            txn.delete(Table.BLOCKS, key)
        chain = dict(_sound(txn, Table.CHAIN, lambda _, digest: digest))
        for block_hash in [key for key, digest in chain.items() if digest not in infos]:
            txn.delete(Table.CHAIN, block_hash)
            del chain[block_hash]
        for digest, info in infos.items():
            if chain.setdefault(info.block_hash, digest) == digest:
                txn.put(Table.CHAIN, info.block_hash, digest)
        count_blocks(txn).put(txn)
        self._blocks = set(infos)

    # -- checkpoints

    def _mend_checkpoints(self) -> None:
        """Keep the checkpoints whose tokens can be had from the root on; remove the others."""
        readable: dict[bytes, Checkpoint] = {}
        damaged: list[bytes] = []
        for node, found in nodes.each(self._txn):
            if isinstance(found, CorruptionError):
                damaged.append(node)
                self._lose(f"{_checkpoint(node)}: {found}")
            else:
                readable[node] = found
        self._checkpoints = complete(readable)
        for node in readable.keys() - self._checkpoints.keys():
            self._lose(f"{_checkpoint(node)}: a checkpoint before it is lost, and with it the tokens that begin it")
        for node in [*damaged, *(readable.keys() - self._checkpoints.keys())]:
            nodes.remove(self._txn, node)
        for node in [node for node in pins.each(self._txn) if node not in self._checkpoints]:
            pins.remove(self._txn, node, self._now_ns)

    def _cut_checkpoints(self) -> None:
        """Let no checkpoint name KV that is lost."""
        for node, checkpoint in list(self._checkpoints.items()):
            block_size = self._block_sizes.get(checkpoint.session_id, _DEFAULT_BLOCK_SIZE)
            cut = without_lost(checkpoint, self._blocks, block_size)
            if cut != checkpoint:
                self._checkpoints[node] = cut
                nodes.put(self._txn, cut)
                self.num_cut += 1
            for mark in checkpoint.marks:
                if mark.payload is not None and mark.payload not in self._blocks:
                    self._lose(
                        f"{_checkpoint(node)}: the model input behind its tokens [{mark.start}, {mark.stop}) is lost; "
                        "where their KV is lost too it cannot be computed again"
                    )

    # -- sessions

    def _mend_sessions(self) -> None:
        txn = self._txn
        name_of = {
            SessionId(session_id): key[len(rows.SESSION_NAME_PREFIX) :].decode(errors="replace")
            for key, session_id in _sound(txn, Table.SESSIONS, lambda _, value: value, rows.SESSION_NAME_PREFIX)
        }
        records = dict(_sound(txn, Table.SESSIONS, rows.unpack_session, rows.SESSION_PREFIX))
        self._names = {record.session_id: record.name for record in records.values()}
        for key, record in records.items():
            if txn.place(Table.SESSIONS, key) in self._found.earlier:
                self._lose(f"session {record.name!r}: {_EARLIER}")
        self._block_sizes = {record.session_id: record.block_size for record in records.values()}
        # Checkpoints of a session that was removed are gc's.
        keys = [key for key, _ in txn.scan_each(Table.BRANCHES)]
        keys += self._checkpoints if Table.SESSIONS in self._found.incomplete else ()
        for session_id in sorted({SessionId(key[: rows.SESSION_ID_NBYTES]) for key in keys} - self._names.keys()):
            self._revive_session(session_id, name_of.get(session_id, f"recovered-{session_id.hex()}"))
        for session_id, name in name_of.items():
            if self._names.get(session_id) != name:
                txn.delete(Table.SESSIONS, rows.session_name_key(name))
        for session_id, name in self._names.items():
            txn.put(Table.SESSIONS, rows.session_name_key(name), session_id)

    def _revive_session(self, session_id: SessionId, name: str) -> None:
        """Make the record of a session again, from its checkpoints."""
        own = sorted(self._own(session_id), key=lambda checkpoint: checkpoint.created_s)
        record = SessionRecord(
            session_id=session_id,
            name=name,
            active_branch="main",
            fingerprint=own[-1].fingerprint if own else Fingerprint(bytes(32)),
            block_size=self._block_size(own),
            created_s=own[0].created_s if own else self._now_s,
            updated_s=self._now_s,
        )
        self._names[session_id] = name
        self._block_sizes[session_id] = record.block_size
        self._revived.add(session_id)
        self._put_session(record)
        self._lose(f"session {name!r}: its record is lost, with its metadata; it is made again from its checkpoints")

    def _block_size(self, checkpoints: list[Checkpoint]) -> int:
        digests = (block.digest for checkpoint in checkpoints for block in checkpoint.blocks)
        infos = (self._txn.get(Table.BINDEX, digest) for digest in digests)
        return next((BlockInfo.unpack(info, b"").num_tokens for info in infos if info), _DEFAULT_BLOCK_SIZE)

    def _put_session(self, record: SessionRecord) -> None:
        self._txn.put(Table.SESSIONS, rows.session_key(record.session_id), rows.pack_session(record))

    def _own(self, session_id: SessionId) -> list[Checkpoint]:
        return [checkpoint for node, checkpoint in self._checkpoints.items() if node.startswith(session_id)]

    # -- branches

    def _mend_branches(self, session_id: SessionId) -> None:
        """Let every branch of a session stand where all of its tokens can be had."""
        history = History(self._catalog.moves(self._txn, session_id, []))
        stored = dict(_sound(self._txn, Table.BRANCHES, rows.unpack_branch, session_id))
        for key, branch in stored.items():
            if self._txn.place(Table.BRANCHES, key) in self._found.earlier:
                name = f"branch {branch.record.name!r} of session {self._names[session_id]!r}"
                self._lose(f"{name}: {_EARLIER}")
            self._mend_branch(session_id, key, branch, history)
        kept = {branch.record.name for branch in stored.values()}
        if Table.BRANCHES in self._found.incomplete:
            for name in history.alive() - kept:
                self._revive_branch(session_id, name, history)
        self._mend_active(session_id)

    def _mend_branch(self, session_id: SessionId, key: bytes, stored: rows.StoredBranch, history: History) -> None:
        record = stored.record
        tip = None if record.tip is None else self._checkpoints.get(session_id + record.tip)
        if record.tip is not None and (tip is None or tip.num_tokens != stored.start):
            if not self._put_branch(session_id, record, history.nearest(record, self._is_readable(session_id))):
                self._txn.delete(Table.BRANCHES, key)
            return
        try:
            tails.read(self._txn, key, stored)
        except CorruptionError as error:
            logger.warning("%s", error)
            self._put_branch(session_id, record, record.tip)

    def _revive_branch(self, session_id: SessionId, name: str, history: History) -> None:
        blank = BranchRecord(name=name, tip=history.tip(name), created_s=self._now_s, updated_s=self._now_s)
        self._put_branch(session_id, blank, history.nearest(blank, self._is_readable(session_id)))

    def _put_branch(self, session_id: SessionId, record: BranchRecord, tip: CheckpointId | None) -> bool:
        """Let a branch stand at a checkpoint, without the tokens after it; False when there is nothing to stand at."""
        name = f"branch {record.name!r} of session {self._names[session_id]!r}"
        checkpoint = None if tip is None else self._checkpoints[session_id + tip]
        if tip is None and record.tip is not None:
            self._lose(f"{name}: no checkpoint of it can be read; the branch is removed")
            return False
        start, num_pending = (0, 0) if checkpoint is None else (checkpoint.num_tokens, checkpoint.num_pending)
        new = replace(record, tip=tip, num_open=0, num_pending=num_pending, marks=(), updated_s=self._now_s)
        stamp = int(self._now_s * 1e9)
        self._txn.put(
            Table.BRANCHES,
            rows.branch_key(session_id, record.name),
            rows.pack_branch(rows.StoredBranch(new, start, stamp)),
        )
        place = "at its beginning" if tip is None else f"at checkpoint {short(tip)}, after {start:,} tokens"
        self._lose(f"{name}: tokens that it ended with are lost; it stands {place}")
        move = Move(branch=record.name, operation="repair", old=record.tip, new=tip, time_s=self._now_s)
        self._catalog.record_move(self._txn, session_id, move)
        return True

    def _mend_active(self, session_id: SessionId) -> None:
        """Give a session without branches one at its newest checkpoint, and make sure that its active one is there."""
        branches = self._catalog.branches(self._txn, session_id, [])
        own = self._own(session_id)
        if not branches and not own and session_id in self._revived:
            self._catalog.remove_session(self._txn, session_id)
            return
        if not branches:
            newest = max(own, key=lambda checkpoint: checkpoint.created_s, default=None)
            tip = None if newest is None else newest.checkpoint_id
            blank = BranchRecord(name="main", tip=tip, created_s=self._now_s, updated_s=self._now_s)
            self._put_branch(session_id, blank, tip)
            branches = [blank]
        record = self._catalog.session(self._txn, session_id)
        names = [branch.name for branch in branches]
        if names and record.active_branch not in names:
            latest = max(branches, key=lambda branch: branch.updated_s)
            self._put_session(replace(record, active_branch=latest.name))

    def _is_readable(self, session_id: SessionId) -> Callable[[CheckpointId], bool]:
        return lambda checkpoint_id: session_id + checkpoint_id in self._checkpoints

    # -- counts

    def _mend_counts(self) -> None:
        names = Counter(
            rows.node_key(each.session_id, each.parent_id)
            for each in self._checkpoints.values()
            if each.parent_id is not None
        )
        names.update(pins.each(self._txn))
        for key, stored in _sound(self._txn, Table.BRANCHES, rows.unpack_branch):
            if stored.record.tip is not None:
                names[key[: rows.SESSION_ID_NBYTES] + stored.record.tip] += 1
        for node in self._checkpoints:
            refs.recount(self._txn, node, names[node], self._now_ns)
        counted = Counter(digest for each in self._checkpoints.values() for digest in each.digests())
        for digest, info in list(_sound(self._txn, Table.BINDEX, _block_info)):
            right = replace(info, refs=counted[BlockDigest(digest)], is_counted=True)
            if right != info:
                self._txn.put(Table.BINDEX, digest, right.pack())
                self.num_recounted += 1

    @property
    def _now_ns(self) -> int:
        return int(self._now_s * 1e9)

    def _lose(self, what: str) -> None:
        self.lost.append(what)


def _sound(
    txn: ReadTransaction, table: Table, unpack: Callable[[bytes, bytes], T], prefix: bytes = b""
) -> Iterator[tuple[bytes, T]]:
    """Yield the rows of a table that can be read."""
    for key, value in txn.scan_each(table, prefix):
        try:
            if isinstance(value, CorruptionError):
                raise value
            yield key, unpack(key, value)
        except CorruptionError as error:
            logger.warning("%s", error)


def _block_info(key: bytes, value: bytes) -> BlockInfo:
    return BlockInfo.unpack(value, key)


def _checkpoint(node: bytes) -> str:
    session_id, checkpoint_id = node[: rows.SESSION_ID_NBYTES], node[rows.SESSION_ID_NBYTES :]
    return f"checkpoint {short(checkpoint_id)} of session {session_id.hex()}"
