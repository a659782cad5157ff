"""What the records of a store say of tokens and KV, without a model and without torch."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from agentmem._lmdb import ReadTransaction, Table
from agentmem.errors import CorruptionError
from agentmem.explain.lines import Line, Lines, branch_lines
from agentmem.explain.reuse import Kept
from agentmem.ids import BlockDigest, BlockHash, CheckpointId, Fingerprint
from agentmem.kv.hashing import chain_hash, pack_tokens, part_hash, root_hash, unpack_tokens
from agentmem.marks import pack_marks
from agentmem.reasons import Reason
from agentmem.tree import nodes
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import TOKEN_NBYTES, BlockRef, Checkpoint, SessionRecord, StateRef
from agentmem.tree.trail import Trail


@dataclass(frozen=True, slots=True)
class _Known:
    """What there is of the KV of one checkpoint."""

    blocks: Trail[BlockRef] = field(default_factory=lambda: Trail([]))
    tail: BlockRef | None = None
    num_kv: int = 0
    points: tuple[StateRef, ...] = ()
    regime: bytes = b""
    limit: Reason = Reason.COMPLETE


class RecordedKv:
    """What there is of the KV of one session's lines, by its records: what ledger.py makes of them, by name alone."""

    def __init__(self, lines: Lines, fingerprint: Fingerprint, block_size: int, *, has_states: bool) -> None:
        """Judge the session for one model and block size. Reads nothing yet."""
        self._lines = lines
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._has_states = has_states
        self._known: dict[CheckpointId, _Known] = {}

    def kept(self, line: Line, equal: int) -> Kept:
        """Return what there is of the KV of a line that is cut back to its first `equal` tokens."""
        whole = known = _Known()
        for checkpoint in self._lines.chain(line):
            found = self._known.get(checkpoint.checkpoint_id)
            whole = self._known[checkpoint.checkpoint_id] = found or self._after(whole, checkpoint)
            if checkpoint.num_tokens <= equal:
                known = whole
        limit = self._limit(line, whole, equal)
        # What is cut back to a checkpoint takes over what that has, when it has more.
        return max(self._kept(whole, limit), self._kept(known, limit), key=lambda kept: kept.reach(equal))

    def _limit(self, line: Line, known: _Known, equal: int) -> Reason:
        """Return why a line has no KV of its first `equal` tokens, or cannot go on behind them."""
        if known.num_kv >= equal:
            return Reason.NO_STATE if self._has_states else Reason.COMPLETE
        num_fed = self._lines.num_tokens(line) - line.num_pending
        if known.limit is Reason.COMPLETE:
            return Reason.PENDING if num_fed <= known.num_kv else Reason.NOT_SAVED
        return known.limit

    def _kept(self, known: _Known, limit: Reason) -> Kept:
        return Kept(
            num_kv=known.num_kv,
            blocks=known.blocks,
            tail=known.tail,
            points=known.points,
            regime=known.regime,
            limit=limit,
            has_states=self._has_states,
        )

    def _after(self, before: _Known, checkpoint: Checkpoint) -> _Known:
        """Return what there is up to a checkpoint, given what there is up to its parent."""
        if checkpoint.fingerprint != self._fingerprint:
            is_resized = self._lines.block_size != self._block_size
            return dataclasses.replace(before, limit=Reason.FOREIGN_BLOCK_SIZE if is_resized else Reason.FOREIGN_MODEL)
        if not checkpoint.has_kv:
            return dataclasses.replace(before, limit=Reason.NOT_SAVED)
        first = checkpoint.first_block
        if first > len(before.blocks):
            return dataclasses.replace(before, limit=Reason.MISSING)
        blocks = before.blocks.fork()
        blocks.truncate(first)
        blocks.extend(checkpoint.blocks)
        start, num_fed = len(blocks) * self._block_size, checkpoint.num_tokens - checkpoint.num_pending
        is_cut = first < len(before.blocks)
        points = [point for point in before.points if not is_cut or point.position <= first * self._block_size]
        num_kv = num_fed if checkpoint.tail is not None else min(start, num_fed)
        return _Known(
            blocks=blocks,
            tail=checkpoint.tail,
            num_kv=num_kv,
            points=(*points, *(state for state in checkpoint.states if 0 < state.position <= num_kv)),
            regime=checkpoint.regime,
        )


class DiskShelf:
    """What is on disk, for the model and block size that one session was made with.

    The salt is not stored: the name of the empty prefix is known only when the session's own blocks derive from that
    without one, or when the session has none yet. Nor is it stored whether the model has layer states: it has them when
    checkpoints have them.

    Attributes:
        block_size: Tokens per block.
        is_salted: Whether the session's blocks were stored under a salt.
    """

    def __init__(self, txn: ReadTransaction, record: SessionRecord, lines: Lines) -> None:
        """Look things up in a transaction that stays open as long as this is used."""
        self._txn = txn
        self._fingerprint = record.fingerprint
        self._num_parts = self._count_parts(lines.checkpoints())
        self.block_size = record.block_size
        self.is_salted = has_salt(lines, b"") is False

    @property
    def has_states(self) -> bool:
        """Whether the model has layer states, as far as checkpoints tell."""
        return self._num_parts > 0

    def root_of(self, regime: bytes) -> BlockHash | None:
        """Return the name of the empty prefix; None when the session's salt is needed for it."""
        return None if self.is_salted else root_hash(self._fingerprint, b"", regime)

    def regime(self, _num_tokens: int) -> bytes | None:
        """Return None: only the model knows. The regime of what is stored is taken for the prompt's."""
        return None

    def contains(self, digest: BlockDigest) -> bool:
        """Say whether these bytes are stored."""
        return self._txn.get_view(Table.BINDEX, digest) is not None

    def find_block(self, name: BlockHash) -> bool:
        """Say whether a block of these tokens is stored."""
        try:
            digest = self._txn.get(Table.CHAIN, name)
        except CorruptionError:
            return False
        return digest is not None and self.contains(BlockDigest(digest))

    def find_state(self, name: BlockHash) -> bool:
        """Say whether a layer state after these tokens is stored."""
        return all(self.find_block(part_hash(name, part)) for part in range(self._num_parts))

    def _count_parts(self, own: Iterable[Checkpoint]) -> int:
        """Return how many records a layer state of the model takes; 0 when neither session nor another has one."""
        found = max((_num_parts(each) for each in own if each.fingerprint == self._fingerprint), default=0)
        others = (each for _, each in nodes.each(self._txn) if isinstance(each, Checkpoint))
        known = (each for each in others if each.fingerprint == self._fingerprint and (each.blocks or each.tail))
        return found or next(map(_num_parts, known), 0)


def _num_parts(checkpoint: Checkpoint) -> int:
    return max((len(state.digests) for state in checkpoint.states if state.position), default=0)


class RecordedLibrary:
    """A store as its records describe it, for `agentmem explain`.

    Attributes:
        own: The session that is asked.
        shelf: All blocks of the store.
        damaged: What could not be read.
    """

    def __init__(self, txn: ReadTransaction, catalog: Catalog, session: str, branch: str | None) -> None:
        """Read the session called `session` in a transaction that stays open as long as this is used.

        Args:
            txn: Where.
            catalog: Reads it.
            session: The session's name.
            branch: The branch that a prompt is compared with first; None for the active one.

        Raises:
            NotFoundError: There is no such session or branch.
        """
        self.damaged: list[CorruptionError] = []
        self._txn = txn
        self._catalog = catalog
        self._record = catalog.find_session(txn, session)
        if branch is not None:
            catalog.branch(txn, self._record.session_id, branch)
        self.own = read_lines(txn, catalog, self._record, self.damaged, first=[] if branch is None else [branch])
        self.shelf = DiskShelf(txn, self._record, self.own)
        self._known: dict[str, RecordedKv] = {}

    def others(self) -> Iterator[Lines]:
        """Yield the other sessions of the store, as far as they can be read."""
        for record in self._catalog.sessions(self._txn, []):
            if record.session_id != self._record.session_id:
                yield read_lines(self._txn, self._catalog, record, [])

    def kept(self, lines: Lines, line: Line, equal: int) -> Kept:
        """Return what there is of the KV of a line that is cut back to its first `equal` tokens."""
        recorded = self._known.get(lines.session)
        if recorded is None:
            recorded = self._known[lines.session] = RecordedKv(
                lines, self._record.fingerprint, self._record.block_size, has_states=self.shelf.has_states
            )
        return recorded.kept(line, equal)


def has_salt(lines: Lines, salt: bytes) -> bool | None:
    """Say whether a session's first block is named under this salt; None when it has no block yet."""
    first = next((each for each in lines.checkpoints() if each.blocks and not each.first_block), None)
    if first is None:
        return None
    size = lines.block_size
    line = Line(branch=None, tip=first.checkpoint_id)
    tokens = unpack_tokens(lines.tokens(line)[: size * TOKEN_NBYTES])
    root = root_hash(first.fingerprint, salt, first.regime)
    return first.blocks[0].block_hash == chain_hash(root, tokens, pack_marks(lines.marks(line), 0, size))


def read_lines(
    txn: ReadTransaction,
    catalog: Catalog,
    record: SessionRecord,
    damaged: list[CorruptionError],
    *,
    first: Sequence[str | None] = (),
) -> Lines:
    """Read the lines of a stored session.

    Args:
        txn: Where.
        catalog: Reads it.
        record: The session.
        damaged: What could not be read is added here and passed over.
        first: Names of branches that are to stand before the others.
    """
    session_id = record.session_id
    branches = []
    for branch in catalog.branches(txn, session_id, damaged):
        try:
            tokens = pack_tokens(catalog.open_tokens(txn, session_id, branch.name))
        except CorruptionError as error:
            damaged.append(error)
            tokens = b""  # the branch stands at its tip, as when it is resumed
        branches.append((branch, tokens))
    checkpoints = catalog.checkpoints(txn, session_id, damaged)
    return Lines(record.name, record.block_size, checkpoints, branch_lines(branches, (*first, record.active_branch)))
