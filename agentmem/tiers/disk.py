"""The disk tier: records of blocks in LMDB, cut into chunks, counted by the checkpoints that name them.

Knows blocks by their two names and records by their bytes; knows nothing of sessions.

A record of n bytes lies in table `blocks` as chunks of 65,520 bytes, which fill 16 pages of LMDB exactly; the last
chunk is padded with zeros so that it fills 1, 2, 4, 8 or 16 pages. One value per block would make every later write
search the free list for a long run of pages (8-10 times the CPU on an aged store, docs/decisions). Key of a chunk:
    0  8  block id, u64-be
    8  2  number of the chunk, u16-be
Row of `chain`: block hash (32 bytes) to the digest (32 bytes) of a block of those tokens. Row of `bindex`: see
blockindex.py.
"""

import logging
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
import xxhash
from torch import Tensor

from agentmem._lmdb import Environment, Level, ReadTransaction, Table, WriteTransaction
from agentmem.errors import AgentMemError, CorruptionError, InvalidInputError, NotFoundError
from agentmem.ids import BlockDigest, BlockHash, BlockId, short
from agentmem.kv import record as record_format
from agentmem.kv.codec import CodecId
from agentmem.kv.header import RecordMeta
from agentmem.kv.record import Record
from agentmem.tiers.blockindex import BlockIndex, BlockInfo, Totals, read_info

logger = logging.getLogger(__name__)

PAGE_NBYTES = 4096
MAX_CHUNK_PAGES = 16
# LMDB keeps 16 bytes of a run of pages for itself.
CHUNK_NBYTES = MAX_CHUNK_PAGES * PAGE_NBYTES - 16

_MAX_RECORD_NBYTES = CHUNK_NBYTES << 16
_MAX_RAW_NBYTES = 1 << 30
_NEXT_ID_KEY = b"next_block_id"
_TOUCH_AFTER_S = 60
_NUMBER = struct.Struct(">Q")
_CHUNK_KEY = struct.Struct(">QH")


class DiskTier:
    """The blocks of one store. Thread-safe."""

    name = "disk"

    def __init__(self, environment: Environment, *, clock: Callable[[], float] = time.time) -> None:
        """Use `environment`; what is stored is read at the first question. `clock` gives seconds since 1970."""
        self._environment = environment
        self._clock = clock
        self._index = BlockIndex(environment)
        self._scratch = threading.local()

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self.stats().stored_nbytes

    def stats(self) -> Totals:
        """Return the number of blocks and their bytes, raw and stored."""
        return self._index.totals()

    def contains(self, digest: BlockDigest) -> bool:
        """Say whether the block is stored and committed."""
        return self._index.contains(digest)

    def contains_many(self, digests: Iterable[BlockDigest]) -> list[bool]:
        """Say of each block whether it is stored and committed."""
        return [self._index.contains(digest) for digest in digests]

    def find(self, block_hash: BlockHash) -> BlockDigest | None:
        """Return a stored block of these tokens, computed by whomever, or None."""
        return self._index.find(block_hash)

    def mark_damaged(self, digest: BlockDigest) -> None:
        """Forget a block that was found corrupt, so that the next `store` of it writes it again."""
        self._index.mark_damaged(digest)

    # ---- in

    def store(self, records: Sequence[Record], *, level: Level = Level.RELAXED) -> Future[None]:
        """Queue records to be written in one operation; those that are stored already are not written again.

        New blocks are named by no checkpoint; `retain` them in the transaction that names them.

        Raises:
            ReadOnlyError: The store cannot be written.
            InvalidInputError: A record is too large.
        """
        infos = [self._new_info(record) for record in records]
        nbytes = sum(info.stored_nbytes for info in infos)

        def operation(txn: WriteTransaction) -> None:
            self._put_all(txn, records, infos)

        return self._environment.submit(operation, level=level, nbytes=nbytes)

    def put_record(self, data: bytes, *, level: Level = Level.DURABLE) -> Future[None]:
        """Store a record that came from elsewhere, after decoding and verifying all of it.

        Raises:
            CorruptionError: The bytes are damaged.
            FormatVersionError: They were written in a format that this version does not read.
        """
        meta = record_format.read_meta(data)
        if meta.raw_nbytes > _MAX_RAW_NBYTES:
            raise CorruptionError(
                f"block {short(meta.digest)} claims {meta.raw_nbytes} bytes of KV; no block is so large"
            )
        dtype = getattr(torch, meta.dtype)
        record_format.unpack(data, [torch.empty(section.shape, dtype=dtype) for section in meta.sections])
        record = Record(
            digest=meta.digest,
            block_hash=meta.block_hash,
            data=bytes(data),
            raw_nbytes=meta.raw_nbytes,
            num_tokens=meta.num_tokens,
            codec_ids=tuple(section.codec_id for section in meta.sections),
        )
        return self.store([record], level=level)

    # ---- out

    def load(self, digest: BlockDigest, out: Sequence[Tensor]) -> RecordMeta:
        """Decode a block into `out`, one `[L, H, T, D]` per section with any strides, and verify every byte.

        Raises:
            NotFoundError: The block is not stored.
            CorruptionError: Its bytes are damaged; `out` is undefined.
            SpecMismatchError: `out` has another geometry.
        """
        meta = record_format.unpack(self._join_into_scratch(digest), out)
        other = _other(digest, meta)
        if other is not None:
            raise other
        return meta

    def load_many(self, digests: Sequence[BlockDigest], outs: Sequence[Sequence[Tensor]]) -> list[AgentMemError | None]:
        """Decode several blocks as `load` does each; return None for each that is good, else why it is not.

        Small blocks are decoded together, in less time.
        """
        outcomes: list[AgentMemError | None] = [None] * len(digests)
        found: list[tuple[int, memoryview]] = []
        for number, digest in enumerate(digests):
            try:
                found.append((number, self._join_into_scratch(digest, number)))
            except (NotFoundError, CorruptionError) as error:
                outcomes[number] = error
        results = record_format.unpack_many([data for _, data in found], [outs[number] for number, _ in found])
        for (number, _), result in zip(found, results, strict=True):
            outcomes[number] = result if isinstance(result, AgentMemError) else _other(digests[number], result)
        return outcomes

    def load_record(self, digest: BlockDigest) -> bytes:
        """Return a block's record as it is stored, with its checksum verified but nothing decoded.

        Raises:
            NotFoundError: The block is not stored.
            CorruptionError: Its bytes are damaged.
        """
        with self._environment.read() as txn:
            info = self._require(txn, digest)
            data = bytearray(info.stored_nbytes)
            _join(txn, digest, info, memoryview(data))
        if xxhash.xxh3_128_digest(data) != info.checksum:
            raise CorruptionError(f"block {digest.hex()}: the stored record fails its checksum")
        if record_format.read_meta(memoryview(data)).digest != digest:
            raise CorruptionError(f"block {digest.hex()}: the store holds another block in its place")
        return bytes(data)

    # ---- references, inside a catalog's transaction

    def retain(self, txn: WriteTransaction, digests: Iterable[BlockDigest]) -> None:
        """Count one more name for each block, in the transaction of the checkpoint that names them.

        Raises:
            NotFoundError: A block is not stored; the whole operation is undone.
            CorruptionError: Its index row is damaged.
        """
        for digest in digests:
            info = self._require(txn, digest)
            self._put_info(txn, digest, replace(info, refs=info.refs + 1))

    def release(self, txn: WriteTransaction, digests: Iterable[BlockDigest]) -> None:
        """Count one name less for each block, in the transaction that removes the checkpoint that named them.

        A block that is gone or whose row is damaged is passed over: what named it is on its way out.

        Raises:
            CorruptionError: A block is named more often than it was counted.
        """
        for digest in digests:
            info = self._readable(txn, digest)
            if info is None:
                logger.warning("block %s was released, but is not stored", short(digest))
            elif info.refs > 0:
                self._put_info(txn, digest, replace(info, refs=info.refs - 1))
            elif info.is_counted:
                raise CorruptionError(f"block {digest.hex()} is named more often than counted; run `agentmem check`")

    def iter_index(self, txn: ReadTransaction) -> Iterator[tuple[BlockDigest, BlockInfo | CorruptionError]]:
        """Yield every block in the order of digests; one whose row is damaged comes with the error."""
        for key, value in txn.scan_each(Table.BINDEX):
            yield BlockDigest(key), value if isinstance(value, CorruptionError) else BlockInfo.unpack(value, key)

    def remove_unreferenced(self, txn: WriteTransaction, before_s: float, max_nbytes: int) -> tuple[int, int]:
        """Remove blocks that no checkpoint names and that were last used at `before_s` or earlier.

        Stops once `max_nbytes` of records are removed: large removals make the commits after them slow, so gc takes
        several operations.

        Returns:
            Number of blocks and bytes of records removed; (0, 0) when none is left.
        """
        unreferenced = (
            (digest, info)
            for digest, info in self.iter_index(txn)
            if isinstance(info, BlockInfo) and info.is_counted and info.refs == 0 and info.last_use_s <= before_s
        )
        removed: list[tuple[BlockDigest, BlockInfo]] = []
        nbytes = 0
        for digest, info in unreferenced:
            removed.append((digest, info))
            nbytes += info.stored_nbytes
            if nbytes >= max_nbytes:
                break
        for digest, info in removed:
            self._delete(txn, digest, info)
        return len(removed), nbytes

    def remove(self, digest: BlockDigest) -> None:
        """Remove a block that no checkpoint names, and wait for it; nothing happens when it is not stored.

        Raises:
            InvalidInputError: A checkpoint names it.
        """

        def operation(txn: WriteTransaction) -> None:
            info = self._readable(txn, digest)
            if info is None:
                return
            if info.refs or not info.is_counted:
                raise InvalidInputError(
                    f"block {short(digest)} is named by {info.refs} checkpoints: remove those first"
                )
            self._delete(txn, digest, info)

        self._environment.submit(operation, level=Level.RELAXED).result()

    # ---- within

    def _new_info(self, record: Record) -> BlockInfo:
        """Describe a record, in the thread that stores it; its id is given by the writer."""
        if len(record.data) > _MAX_RECORD_NBYTES:
            raise InvalidInputError(f"block {short(record.digest)} has a record of {len(record.data)} bytes: too large")
        return BlockInfo(
            block_id=BlockId(0),
            refs=0,
            raw_nbytes=record.raw_nbytes,
            stored_nbytes=len(record.data),
            codec=record.codec_ids[0] if record.codec_ids else CodecId.RAW,
            num_tokens=record.num_tokens,
            last_use_s=int(self._clock()),
            block_hash=record.block_hash,
            checksum=xxhash.xxh3_128_digest(record.data),
        )

    def _put_all(self, txn: WriteTransaction, records: Sequence[Record], infos: Sequence[BlockInfo]) -> None:
        number = txn.get(Table.META, _NEXT_ID_KEY)
        next_id = _NUMBER.unpack(number)[0] if number is not None else 1
        for record, info in zip(records, infos, strict=True):
            next_id += self._put(txn, record, replace(info, block_id=BlockId(next_id)))
        txn.put(Table.META, _NEXT_ID_KEY, _NUMBER.pack(next_id))

    def _put(self, txn: WriteTransaction, record: Record, info: BlockInfo) -> bool:
        """Write one record; False when it was there, and its id is free for the next."""
        is_lost = False
        try:
            old = read_info(txn, record.digest)
        except CorruptionError:
            old, is_lost = None, True
        if old is not None and not self._index.is_damaged(record.digest):
            if info.last_use_s - old.last_use_s > _TOUCH_AFTER_S:  # or gc could take it before it is named
                self._put_info(txn, record.digest, old)
            return False
        if old is not None:
            _delete_chunks(txn, old)
            info = replace(info, refs=old.refs, is_counted=old.is_counted)
        elif is_lost:
            info = replace(info, is_counted=False)
        txn.put_raw(Table.BLOCKS, list(_chunks(info.block_id, record.data)))
        txn.put(Table.BINDEX, record.digest, info.pack())
        self._put_chain(txn, record)
        txn.on_commit(lambda: self._index.add(record.digest, info, old))
        return True

    def _put_chain(self, txn: WriteTransaction, record: Record) -> None:
        """Name the block for its tokens, unless another sound one has that name: reuse should always find the same."""
        try:
            digest = txn.get(Table.CHAIN, record.block_hash)
        except CorruptionError:
            digest = None
        if digest is None or self._index.is_damaged(BlockDigest(digest)):
            txn.put(Table.CHAIN, record.block_hash, record.digest)

    def _put_info(self, txn: WriteTransaction, digest: BlockDigest, info: BlockInfo) -> None:
        txn.put(Table.BINDEX, digest, replace(info, last_use_s=int(self._clock())).pack())

    def _delete(self, txn: WriteTransaction, digest: BlockDigest, info: BlockInfo) -> None:
        _delete_chunks(txn, info)
        txn.delete(Table.BINDEX, digest)
        try:
            is_chained = txn.get(Table.CHAIN, info.block_hash) == digest
        except CorruptionError:
            is_chained = True
        if is_chained:
            txn.delete(Table.CHAIN, info.block_hash)
        txn.on_commit(lambda: self._index.discard(digest, info))

    def _require(self, txn: ReadTransaction, digest: BlockDigest) -> BlockInfo:
        info = read_info(txn, digest)
        if info is None:
            raise NotFoundError(f"block {digest.hex()} is not on disk")
        return info

    def _readable(self, txn: ReadTransaction, digest: BlockDigest) -> BlockInfo | None:
        try:
            return read_info(txn, digest)
        except CorruptionError as error:
            logger.warning("%s", error)
            return None

    def _join_into_scratch(self, digest: BlockDigest, place: int = 0) -> memoryview:
        """Return a block's record in a buffer of this thread, valid until its next call with the same `place`."""
        buffers: dict[int, bytearray] = self._scratch.__dict__.setdefault("buffers", {})
        with self._environment.read() as txn:
            info = self._require(txn, digest)
            buffer = buffers.get(place)
            if buffer is None or len(buffer) < info.stored_nbytes:
                buffer = buffers[place] = bytearray(1 << (info.stored_nbytes - 1).bit_length())
            data = memoryview(buffer)[: info.stored_nbytes]
            _join(txn, digest, info, data)
        return data


def _other(digest: BlockDigest, meta: RecordMeta) -> CorruptionError | None:
    """Say so when a record is another block than the one that was asked for."""
    if meta.digest == digest:
        return None
    return CorruptionError(f"block {digest.hex()}: the store holds block {meta.digest.hex()} in its place")


def _chunk_keys(info: BlockInfo) -> list[bytes]:
    num_chunks = -(-info.stored_nbytes // CHUNK_NBYTES)
    return [_CHUNK_KEY.pack(info.block_id, number) for number in range(num_chunks)]


def _chunks(block_id: BlockId, data: bytes) -> Iterator[tuple[bytes, memoryview | bytearray]]:
    view = memoryview(data)
    for number, start in enumerate(range(0, len(data), CHUNK_NBYTES)):
        chunk = view[start : start + CHUNK_NBYTES]
        yield _CHUNK_KEY.pack(block_id, number), chunk if len(chunk) == CHUNK_NBYTES else _padded(chunk)


def _padded(chunk: memoryview) -> bytearray:
    """Return the chunk with zeros at its end, so that it fills a power of two of pages."""
    num_pages = -(-(len(chunk) + 16) // PAGE_NBYTES)
    padded = bytearray((1 << (num_pages - 1).bit_length()) * PAGE_NBYTES - 16)
    padded[: len(chunk)] = chunk
    return padded


def _join(txn: ReadTransaction, digest: BlockDigest, info: BlockInfo, out: memoryview) -> None:
    """Copy a block's chunks into `out`, whose length is the record's."""
    keys = _chunk_keys(info)
    views = txn.get_views(Table.BLOCKS, keys)
    if len(views) != len(keys):
        raise CorruptionError(f"block {digest.hex()}: {len(keys) - len(views)} of its {len(keys)} chunks are missing")
    for number, view in enumerate(views):
        target = out[number * CHUNK_NBYTES : (number + 1) * CHUNK_NBYTES]
        if len(view) < len(target):
            raise CorruptionError(f"block {digest.hex()}: chunk {number} has {len(view)} bytes, not {len(target)}")
        target[:] = view[: len(target)]


def _delete_chunks(txn: WriteTransaction, info: BlockInfo) -> None:
    for key in _chunk_keys(info):
        txn.delete(Table.BLOCKS, key)
