"""Which blocks the disk holds: the rows of table `bindex`, their sum, and their mirror in memory.

A row's key is the block's digest. Its value, big-endian, 88 bytes:
    0  8  block id: first part of its chunks' keys
    8  4  refs: how often checkpoints name it
   12  8  raw bytes of KV
   20  8  stored bytes: length of the record
   28  2  shard: 0; room for blocks kept in further files
   30  1  codec of the first section
   31  1  flags: bit 0, refs are too low because an earlier row was lost: never collected
   32  4  tokens
   36  4  last use: when it was stored, named or released, seconds since 1970
   40 32  block hash
   72 16  xxh3_128 of the record
The sum of all rows is row "blocks" of table `meta`, changed in the same transactions. Big-endian, 48 bytes:
    0  8  next block id
    8  8  who changed it last, a number chosen at random by each
   16  8  how many blocks were ever removed
   24  8  blocks
   32  8  raw bytes of KV
   40  8  stored bytes
"""

import logging
import secrets
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from agentmem._lmdb import Environment, ReadTransaction, Table, WriteTransaction
from agentmem.errors import CorruptionError
from agentmem.ids import BlockDigest, BlockHash, BlockId

logger = logging.getLogger(__name__)

_ROW = struct.Struct(">QIQQHBBII32s16s")
_FLAG_UNCOUNTED = 1
_SUM = struct.Struct(">QQQQQQ")
_SUM_KEY = b"blocks"
_ID = struct.Struct(">Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInfo:
    """What the store knows of one block.

    Attributes:
        block_id: Its number in this store.
        refs: How often checkpoints name it.
        raw_nbytes: Bytes of its KV.
        stored_nbytes: Bytes of its record.
        codec: Codec of its first section.
        num_tokens: T.
        last_use_s: When it was stored, named or released, whole seconds since 1970.
        block_hash: Its token name.
        checksum: xxh3_128 of its record.
        is_counted: False when `refs` cannot be relied on, because an earlier row was damaged.
        shard: Which file holds it; 0.
    """

    block_id: BlockId
    refs: int
    raw_nbytes: int
    stored_nbytes: int
    codec: int
    num_tokens: int
    last_use_s: int
    block_hash: BlockHash
    checksum: bytes
    is_counted: bool = True
    shard: int = 0

    def pack(self) -> bytes:
        """Return the row's value."""
        return _ROW.pack(
            self.block_id,
            self.refs,
            self.raw_nbytes,
            self.stored_nbytes,
            self.shard,
            self.codec,
            0 if self.is_counted else _FLAG_UNCOUNTED,
            self.num_tokens,
            self.last_use_s,
            self.block_hash,
            self.checksum,
        )

    @classmethod
    def unpack(cls, value: bytes, digest: bytes) -> "BlockInfo":
        """Return the row of block `digest`.

        Raises:
            CorruptionError: It has the wrong length.
        """
        if len(value) != _ROW.size:
            raise CorruptionError(f"block {digest.hex()}: its index row has {len(value)} bytes, not {_ROW.size}")
        number, refs, raw, stored, shard, codec, flags, num_tokens, last_use_s, block_hash, checksum = _ROW.unpack(
            value
        )
        return cls(
            block_id=BlockId(number),
            refs=refs,
            raw_nbytes=raw,
            stored_nbytes=stored,
            shard=shard,
            codec=codec,
            is_counted=not flags & _FLAG_UNCOUNTED,
            num_tokens=num_tokens,
            last_use_s=last_use_s,
            block_hash=BlockHash(block_hash),
            checksum=checksum,
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """How many blocks, and how large.

    Attributes:
        num_blocks: Blocks.
        raw_nbytes: Bytes of their KV.
        stored_nbytes: Bytes of their records.
    """

    num_blocks: int = 0
    raw_nbytes: int = 0
    stored_nbytes: int = 0

    @property
    def ratio(self) -> float:
        """Raw bytes per stored byte; 1.0 when nothing is stored."""
        return self.raw_nbytes / self.stored_nbytes if self.stored_nbytes else 1.0

    def with_block(self, info: BlockInfo) -> "Totals":
        """Return the totals with one block more."""
        return Totals(self.num_blocks + 1, self.raw_nbytes + info.raw_nbytes, self.stored_nbytes + info.stored_nbytes)

    def without_block(self, info: BlockInfo) -> "Totals":
        """Return the totals with one block less."""
        return Totals(self.num_blocks - 1, self.raw_nbytes - info.raw_nbytes, self.stored_nbytes - info.stored_nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSum:
    """What is kept of all blocks together; it changes whenever a block is added or removed.

    Attributes:
        next_id: The id of the next block.
        writer: The index that changed it last.
        num_removed: How many blocks were ever removed.
        totals: How many blocks there are, and how large.
    """

    next_id: BlockId
    writer: int = 0
    num_removed: int = 0
    totals: Totals = Totals()

    def with_block(self, info: BlockInfo, *, old: BlockInfo | None = None, is_lost: bool = False) -> "BlockSum":
        """Return the sum with one block more; `old` is its damaged self, `is_lost` that nobody can read what it was."""
        totals = self.totals if old is None else self.totals.without_block(old)
        totals = self.totals if is_lost else totals.with_block(info)
        return replace(self, next_id=BlockId(self.next_id + 1), totals=totals)

    def without_block(self, info: BlockInfo) -> "BlockSum":
        """Return the sum with one block less."""
        return replace(self, num_removed=self.num_removed + 1, totals=self.totals.without_block(info))

    def put(self, txn: WriteTransaction) -> None:
        """Write it."""
        totals = self.totals
        numbers = (totals.num_blocks, totals.raw_nbytes, totals.stored_nbytes)
        txn.put(Table.META, _SUM_KEY, _SUM.pack(self.next_id, self.writer, self.num_removed, *numbers))


def read_sum(txn: ReadTransaction) -> BlockSum:
    """Return the sum of all blocks; it is counted anew when its row is missing or damaged."""
    try:
        value = txn.get(Table.META, _SUM_KEY)
    except CorruptionError as error:
        logger.warning("the blocks are counted again: %s", error)
        value = None
    if value is None or len(value) != _SUM.size:
        return count_blocks(txn)
    next_id, writer, num_removed, *numbers = _SUM.unpack(value)
    return BlockSum(next_id=BlockId(next_id), writer=writer, num_removed=num_removed, totals=Totals(*numbers))


def count_blocks(txn: ReadTransaction) -> BlockSum:
    """Return the sum of all blocks as their rows say; with a number of removals that nobody has seen yet."""
    infos = [info for _, info in _read_rows(txn)]
    last = txn.last_key(Table.BLOCKS)
    totals = Totals(len(infos), sum(info.raw_nbytes for info in infos), sum(info.stored_nbytes for info in infos))
    return BlockSum(
        next_id=BlockId(1 if last is None else _ID.unpack_from(last)[0] + 1),
        num_removed=0 if last is None else txn.id,
        totals=totals,
    )


def read_info(txn: ReadTransaction, digest: BlockDigest) -> BlockInfo | None:
    """Return what the store knows of a block, None when it has none.

    Raises:
        CorruptionError: The row is damaged.
    """
    value = txn.get(Table.BINDEX, digest)
    return None if value is None else BlockInfo.unpack(value, digest)


Changes = Sequence[tuple[BlockDigest, BlockInfo]]
"""Blocks that were added or removed."""


def unreferenced(
    txn: ReadTransaction, before_s: float, among: Iterable[BlockDigest] | None = None
) -> Iterator[tuple[BlockDigest, BlockInfo]]:
    """Yield the blocks that no checkpoint names and that were last used at `before_s` or earlier; of `among` or all.

    What cannot be read is left out: nobody knows who names it.
    """
    rows = txn.scan_each(Table.BINDEX) if among is None else ((each, _row(txn, each)) for each in set(among))
    for key, row in rows:
        info = BlockInfo.unpack(row, key) if isinstance(row, bytes) else None
        if info is not None and info.is_counted and info.refs == 0 and info.last_use_s <= before_s:
            yield BlockDigest(key), info


def _row(txn: ReadTransaction, digest: BlockDigest) -> bytes | CorruptionError | None:
    try:
        return txn.get(Table.BINDEX, digest)
    except CorruptionError as error:
        return error


class BlockIndex:
    """The mirror of `bindex` and `chain` in memory.

    A handle that writes alone has all of them: no question reaches LMDB. Commits of other processes are noticed by
    their number. Blocks stay known while none was removed by others since they were seen; blocks that are not known are
    then asked for. A handle that only reads knows what it has asked for.

    Damaged rows are left out: their blocks count as not stored, and storing them writes them again.
    """

    def __init__(self, environment: Environment) -> None:
        """Read nothing yet."""
        self._environment = environment
        self._writer = 0 if environment.is_read_only else secrets.randbits(63) + 1
        self._lock = threading.Lock()
        self._newest = -1
        self._sum = BlockSum(next_id=BlockId(1))
        self._is_complete = False
        self._digests: set[BlockDigest] = set()
        self._chain: dict[BlockHash, BlockDigest] = {}
        self._damaged: set[BlockDigest] = set()

    def contains(self, digest: BlockDigest) -> bool:
        """Say whether the block is stored, committed and not known to be damaged."""
        self._follow()
        return digest in self._digests or (not self._is_complete and self._ask(digest))

    def find(self, block_hash: BlockHash) -> BlockDigest | None:
        """Return a stored block of these tokens, None when there is none that is sound."""
        self._follow()
        digest = self._chain.get(block_hash)
        return digest if digest is not None or self._is_complete else self._ask_for(block_hash)

    def is_damaged(self, digest: BlockDigest) -> bool:
        """Say whether `mark_damaged` named the block and it was not written again since."""
        return digest in self._damaged

    def mark_damaged(self, digest: BlockDigest) -> None:
        """Treat the block as not stored."""
        self._follow()
        with self._lock:
            self._damaged.add(digest)
            self._digests.discard(digest)
            for block_hash in [key for key, value in self._chain.items() if value == digest]:
                del self._chain[block_hash]

    def sum_to_change(self, txn: WriteTransaction) -> BlockSum:
        """Return the sum of all blocks, for an operation that will write it again and call `note` once committed."""
        found = read_sum(txn)
        if found.writer != self._writer:
            with self._lock:
                self._doubt(found)
        return replace(found, writer=self._writer)

    def note(self, before: BlockSum, after: BlockSum, added: Changes = (), removed: Changes = ()) -> None:
        """Take over what an operation of this handle has committed, which changed the sum of blocks as given."""
        with self._lock:
            for digest, info in removed:
                self._digests.discard(digest)
                self._damaged.discard(digest)
                if self._chain.get(info.block_hash) == digest:
                    del self._chain[info.block_hash]
            self._damaged.difference_update(digest for digest, _ in added)
            if self._sum.num_removed != before.num_removed:
                return  # others have removed blocks since, these perhaps
            self._sum = replace(self._sum, num_removed=after.num_removed)
            for digest, info in added:
                self._digests.add(digest)
                self._chain.setdefault(info.block_hash, digest)

    # ---- within

    def _follow(self) -> None:
        """Take note of what other processes committed since the last question."""
        if self._environment.last_commit == self._newest:
            return
        with self._lock, self._environment.read() as txn:
            if self._newest < 0:
                self._build(txn)
            else:
                found = read_sum(txn)
                if found.writer != self._writer:
                    self._doubt(found)
            self._newest = txn.id

    def _build(self, txn: ReadTransaction) -> None:
        self._sum = read_sum(txn)
        if self._writer:
            self._digests = {digest for digest, _ in _read_rows(txn)}
            self._chain = _read_chain(txn, self._digests)
            self._is_complete = True

    def _doubt(self, found: BlockSum) -> None:
        """Forget what the changes of another one made doubtful."""
        if found == self._sum or self._newest < 0:
            return
        self._is_complete = False
        if found.num_removed != self._sum.num_removed:
            self._digests.clear()
            self._chain.clear()
        self._sum = found

    def _ask(self, digest: BlockDigest) -> bool:
        with self._lock, self._environment.read() as txn:
            is_stored = digest not in self._damaged and _is_stored(txn, digest)
            if is_stored:
                self._digests.add(digest)
            return is_stored

    def _ask_for(self, block_hash: BlockHash) -> BlockDigest | None:
        with self._lock, self._environment.read() as txn:
            digest = _chained(txn, block_hash)
            if digest is None or digest in self._damaged or not _is_stored(txn, digest):
                return None
            self._digests.add(digest)
            self._chain[block_hash] = digest
            return digest


def _is_stored(txn: ReadTransaction, digest: BlockDigest) -> bool:
    try:
        return read_info(txn, digest) is not None
    except CorruptionError as error:
        logger.warning("%s", error)
        return False


def _chained(txn: ReadTransaction, block_hash: BlockHash) -> BlockDigest | None:
    try:
        digest = txn.get(Table.CHAIN, block_hash)
    except CorruptionError:
        return None
    return None if digest is None else BlockDigest(digest)


def _read_rows(txn: ReadTransaction) -> Iterator[tuple[BlockDigest, BlockInfo]]:
    for key, value in txn.scan_each(Table.BINDEX):
        if isinstance(value, CorruptionError):
            logger.warning("%s", value)
        else:
            yield BlockDigest(key), BlockInfo.unpack(value, key)


def _read_chain(txn: ReadTransaction, digests: set[BlockDigest]) -> dict[BlockHash, BlockDigest]:
    rows = txn.scan_each(Table.CHAIN)
    return {BlockHash(key): BlockDigest(value) for key, value in rows if isinstance(value, bytes) and value in digests}
