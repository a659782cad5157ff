"""Which blocks the disk holds: the rows of table `bindex`, and their sum.

A row's key is the block's digest. Its value, big-endian, 88 bytes:
    0  8  block id: first part of its chunks' keys
    8  4  refs: how often checkpoints name it
   12  8  raw bytes of KV
   20  8  stored bytes: length of the record
   28  2  shard: 0; 1 for a block whose record is in a durable tier below, and has no chunks here: 0 stored bytes
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
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from agentmem._lmdb import ReadTransaction, Table, WriteTransaction
from agentmem.errors import CorruptionError
from agentmem.ids import BlockDigest, BlockHash, BlockId

logger = logging.getLogger(__name__)

_ROW = struct.Struct(">QIQQHBBII32s16s")
_FLAG_UNCOUNTED = 1
BELOW = 1
"""Shard of a block whose record is in a durable tier below."""

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
        shard: Where its record is; 0: here.
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

    @property
    def is_below(self) -> bool:
        """Whether a tier below has its record, and this one has not."""
        return self.shard == BELOW

    def sunk(self) -> "BlockInfo":
        """Return the row of the block once its record is below alone."""
        return replace(self, shard=BELOW, stored_nbytes=0)

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

    def with_sunk(self, info: BlockInfo) -> "BlockSum":
        """Return the sum with one block's record less; the block itself stays."""
        totals = self.totals.without_block(info).with_block(info.sunk())
        return replace(self, totals=totals)

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
    infos = [info for _, info in read_rows(txn)]
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


def read_rows(txn: ReadTransaction) -> Iterator[tuple[BlockDigest, BlockInfo]]:
    """Yield every block whose row can be read."""
    for key, value in txn.scan_each(Table.BINDEX):
        if isinstance(value, CorruptionError):
            logger.warning("%s", value)
        else:
            yield BlockDigest(key), BlockInfo.unpack(value, key)
