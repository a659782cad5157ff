"""Which blocks the disk holds: the rows of table `bindex`, and their mirror in memory.

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
"""

import logging
import struct
import threading
from dataclasses import dataclass

from agentmem._lmdb import Environment, ReadTransaction, Table
from agentmem.errors import CorruptionError
from agentmem.ids import BlockDigest, BlockHash, BlockId

logger = logging.getLogger(__name__)

_ROW = struct.Struct(">QIQQHBBII32s16s")
_FLAG_UNCOUNTED = 1


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


def read_info(txn: ReadTransaction, digest: BlockDigest) -> BlockInfo | None:
    """Return what the store knows of a block, None when it has none.

    Raises:
        CorruptionError: The row is damaged.
    """
    value = txn.get(Table.BINDEX, digest)
    return None if value is None else BlockInfo.unpack(value, digest)


class BlockIndex:
    """The mirror of `bindex` and `chain` in memory; commits keep it true.

    Damaged rows are left out: their blocks count as not stored, and storing them writes them again. A read-only handle
    has no mirror, because another process may be writing; it asks LMDB every time.
    """

    def __init__(self, environment: Environment) -> None:
        """Read nothing yet."""
        self._environment = environment
        self._is_mirrored = not environment.is_read_only
        self._lock = threading.Lock()
        self._is_built = False
        self._digests: set[BlockDigest] = set()
        self._chain: dict[BlockHash, BlockDigest] = {}
        self._damaged: set[BlockDigest] = set()
        self._totals = Totals()

    def contains(self, digest: BlockDigest) -> bool:
        """Say whether the block is stored, committed and not known to be damaged."""
        if self._is_mirrored:
            self._build_once()
            return digest in self._digests
        with self._environment.read() as txn:
            return digest not in self._damaged and txn.get_view(Table.BINDEX, digest) is not None

    def find(self, block_hash: BlockHash) -> BlockDigest | None:
        """Return a stored block of these tokens, None when there is none that is sound."""
        if self._is_mirrored:
            self._build_once()
            return self._chain.get(block_hash)
        with self._environment.read() as txn:
            digest = txn.get(Table.CHAIN, block_hash)
        return BlockDigest(digest) if digest is not None and self.contains(BlockDigest(digest)) else None

    def totals(self) -> Totals:
        """Return the number of blocks and their bytes."""
        if self._is_mirrored:
            self._build_once()
            return self._totals
        with self._environment.read() as txn:
            return _read_all(txn)[1]

    def is_damaged(self, digest: BlockDigest) -> bool:
        """Say whether `mark_damaged` named the block and it was not written again since."""
        return digest in self._damaged

    def mark_damaged(self, digest: BlockDigest) -> None:
        """Treat the block as not stored."""
        self._build_once()
        with self._lock:
            self._damaged.add(digest)
            self._digests.discard(digest)
            for block_hash in [key for key, value in self._chain.items() if value == digest]:
                del self._chain[block_hash]

    def add(self, digest: BlockDigest, info: BlockInfo, replaced: BlockInfo | None) -> None:
        """Note a committed block, the one for its tokens unless there is one; `replaced` is its damaged old self."""
        with self._lock:
            if not self._is_built or digest in self._digests:
                return  # the mirror will be, or was, built from a transaction that has it already
            totals = self._totals if replaced is None else self._totals.without_block(replaced)
            self._totals = totals.with_block(info)
            self._digests.add(digest)
            self._damaged.discard(digest)
            self._chain.setdefault(info.block_hash, digest)

    def discard(self, digest: BlockDigest, info: BlockInfo) -> None:
        """Note a committed removal."""
        with self._lock:
            if digest not in self._digests and digest not in self._damaged:
                return  # as in `add`
            self._totals = self._totals.without_block(info)
            self._digests.discard(digest)
            self._damaged.discard(digest)
            if self._chain.get(info.block_hash) == digest:
                del self._chain[info.block_hash]

    def _build_once(self) -> None:
        if self._is_built or not self._is_mirrored:
            return
        with self._lock:
            if not self._is_built:
                with self._environment.read() as txn:
                    self._digests, self._totals = _read_all(txn)
                    self._chain = _read_chain(txn, self._digests)
                self._is_built = True


def _read_all(txn: ReadTransaction) -> tuple[set[BlockDigest], Totals]:
    digests = set()
    num_blocks = raw_nbytes = stored_nbytes = 0
    for key, value in txn.scan_each(Table.BINDEX):
        if isinstance(value, CorruptionError):
            logger.warning("%s", value)
            continue
        info = BlockInfo.unpack(value, key)
        digests.add(BlockDigest(key))
        num_blocks += 1
        raw_nbytes += info.raw_nbytes
        stored_nbytes += info.stored_nbytes
    return digests, Totals(num_blocks, raw_nbytes, stored_nbytes)


def _read_chain(txn: ReadTransaction, digests: set[BlockDigest]) -> dict[BlockHash, BlockDigest]:
    rows = txn.scan_each(Table.CHAIN)
    return {BlockHash(key): BlockDigest(value) for key, value in rows if isinstance(value, bytes) and value in digests}
