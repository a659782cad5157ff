"""The disk tier: records of blocks in LMDB, cut into chunks, counted by the checkpoints that name them.

Knows blocks by their two names and records by their bytes; knows nothing of sessions.

Row of `chain`: block hash (32 bytes) to the digest (32 bytes) of a block of those tokens. Rows of `bindex`: see
blockindex.py, of `blocks`: see chunks.py.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import xxhash
from torch import Tensor

from agentmem._future import Future
from agentmem._lmdb import Environment, Level, ReadTransaction, Table, WriteTransaction
from agentmem.errors import AgentMemError, CorruptionError, InvalidInputError, NotFoundError
from agentmem.ids import BlockDigest, BlockHash, BlockId, short
from agentmem.kv import record as record_format
from agentmem.kv.codec import CodecId
from agentmem.kv.header import RecordMeta
from agentmem.kv.record import Record
from agentmem.tiers.blockindex import BlockIndex, BlockInfo, BlockSum, Totals, read_info, read_sum, unreferenced
from agentmem.tiers.chunks import MAX_RECORD_NBYTES, chunks, delete_chunks, join, joined, padded_nbytes
from agentmem.tiers.sealing import opened, sealed, verified

logger = logging.getLogger(__name__)

_TOUCH_AFTER_S = 60


class DiskTier:
    """The blocks of one store. Thread-safe.

    Attributes:
        num_healed: Blocks that this handle wrote in the place of damaged ones.
        written_nbytes: Bytes of records that it has written, padded as they lie in the file.
    """

    name = "disk"

    def __init__(self, environment: Environment, *, clock: Callable[[], float] = time.time) -> None:
        """Use `environment`; what is stored is read at the first question. `clock` gives seconds since 1970."""
        self._environment = environment
        self._clock = clock
        self._index = BlockIndex(environment)
        self._scratch = threading.local()
        self.num_healed = 0
        self.written_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self.stats().stored_nbytes

    def stats(self) -> Totals:
        """Return the number of blocks and their bytes, raw and stored."""
        with self._environment.read() as txn:
            return read_sum(txn).totals

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
            StorageFullError: The disk budget has no room for those that are new.
            ReadOnlyError: The store cannot be written.
            InvalidInputError: A record is too large.
        """
        records = [sealed(self._environment.cipher, record) for record in records]
        infos = [self._new_info(record) for record in records]
        nbytes = sum(
            padded_nbytes(info.stored_nbytes)
            for record, info in zip(records, infos, strict=True)
            if not self.contains(record.digest)
        )

        def operation(txn: WriteTransaction) -> None:
            self._put_all(txn, records, infos)

        return self._environment.submit(operation, level=level, nbytes=nbytes)

    def put_record(self, data: bytes, *, level: Level = Level.DURABLE) -> Future[None]:
        """Store a record that came from elsewhere, after decoding and verifying all of it.

        Raises:
            CorruptionError: The bytes are damaged.
            FormatVersionError: They were written in a format that this version does not read.
        """
        return self.store([verified(data)], level=level)

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

    def raw_nbytes(self, digest: BlockDigest) -> int:
        """Return the bytes of a block's KV.

        Raises:
            NotFoundError: The block is not stored.
            CorruptionError: Its index row is damaged.
        """
        with self._environment.read() as txn:
            return self._require(txn, digest).raw_nbytes

    def load_record(self, digest: BlockDigest) -> bytes:
        """Return a block's record as it is stored, with its checksum verified but nothing decoded.

        Raises:
            NotFoundError: The block is not stored.
            CorruptionError: Its bytes are damaged.
        """
        with self._environment.read() as txn:
            data = joined(txn, digest, self._require(txn, digest))
        record = opened(self._environment.cipher, digest, memoryview(data))
        if record_format.read_meta(record).digest != digest:
            raise CorruptionError(f"block {digest.hex()}: the store holds another block in its place")
        return bytes(record)

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

    def remove_unreferenced(
        self,
        txn: WriteTransaction,
        before_s: float,
        max_nbytes: int,
        *,
        among: Iterable[BlockDigest] | None = None,
        held: Collection[BlockDigest] = (),
    ) -> tuple[int, int]:
        """Remove blocks that no checkpoint names and that were last used at `before_s` or earlier.

        Stops once `max_nbytes` of records are removed: large removals make the commits after them slow, so gc takes
        several operations.

        Of blocks `among` these alone are looked at; those that are `held` stay, for this process needs them.

        Returns:
            Number of blocks and bytes of records removed; (0, 0) when none is left.
        """
        removed: list[tuple[BlockDigest, BlockInfo]] = []
        nbytes = 0
        for digest, info in unreferenced(txn, before_s, among):
            if digest in held:
                continue
            removed.append((digest, info))
            nbytes += info.stored_nbytes
            if nbytes >= max_nbytes:
                break
        self._delete(txn, removed)
        return len(removed), nbytes

    def discard(self, txn: WriteTransaction, digests: Iterable[BlockDigest]) -> None:
        """Remove blocks that cannot be read, whoever names them: their KV is computed again from tokens."""
        found = ((digest, self._readable(txn, digest)) for digest in digests)
        self._delete(txn, [(digest, info) for digest, info in found if info is not None])

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
            self._delete(txn, [(digest, info)])

        self._environment.submit(operation, level=Level.RELAXED).result()

    # ---- within

    def _new_info(self, record: Record) -> BlockInfo:
        """Describe a record, in the thread that stores it; its id is given by the writer."""
        if len(record.data) > MAX_RECORD_NBYTES:
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
        before = after = self._index.sum_to_change(txn)
        added: list[tuple[BlockDigest, BlockInfo]] = []
        num_healed = 0
        for record, info in zip(records, infos, strict=True):
            put = self._put(txn, record, replace(info, block_id=after.next_id), after)
            if put is not None:
                info, after, is_healed = put
                added.append((record.digest, info))
                num_healed += is_healed
        if added:
            after.put(txn)
            txn.on_commit(lambda: self._index.note(before, after, added=added))
            txn.on_commit(lambda: self._count(added, num_healed))

    def _put(
        self, txn: WriteTransaction, record: Record, info: BlockInfo, before: BlockSum
    ) -> tuple[BlockInfo, BlockSum, bool] | None:
        """Write one record; return its row, the new sum and whether it heals a damaged one; None when it was there."""
        is_lost = False
        try:
            old = read_info(txn, record.digest)
        except CorruptionError:
            old, is_lost = None, True
        if old is not None and self._is_whole(txn, record.digest, old):
            if info.last_use_s - old.last_use_s > _TOUCH_AFTER_S:  # or gc could take it before it is named
                self._put_info(txn, record.digest, old)
            return None
        if old is not None:
            delete_chunks(txn, old)
            info = replace(info, refs=old.refs, is_counted=old.is_counted)
        elif is_lost:
            info = replace(info, is_counted=False)
        txn.put_raw(Table.BLOCKS, list(chunks(info.block_id, record.data)))
        txn.put(Table.BINDEX, record.digest, info.pack())
        is_healed = self._put_chain(txn, record) or old is not None or is_lost
        return info, before.with_block(info, is_lost=is_lost, old=old), is_healed

    def _is_whole(self, txn: WriteTransaction, digest: BlockDigest, info: BlockInfo) -> bool:
        """Tell whether a block that is stored again is stored as it was written: whoever has it anew heals it."""
        try:
            joined(txn, digest, info)
        except CorruptionError as error:
            logger.warning("%s; it is written again", error)
            return False
        return not self._index.is_damaged(digest)

    def _put_chain(self, txn: WriteTransaction, record: Record) -> bool:
        """Name the block for its tokens, unless another sound one has that name; say whether a damaged one had it."""
        try:
            digest = txn.get(Table.CHAIN, record.block_hash)
        except CorruptionError:
            digest = b""
        if digest and not self._index.is_damaged(BlockDigest(digest)) and self._readable(txn, BlockDigest(digest)):
            return False
        txn.put(Table.CHAIN, record.block_hash, record.digest)
        return digest is not None

    def _put_info(self, txn: WriteTransaction, digest: BlockDigest, info: BlockInfo) -> None:
        txn.put(Table.BINDEX, digest, replace(info, last_use_s=int(self._clock())).pack())

    def _count(self, added: Sequence[tuple[BlockDigest, BlockInfo]], num_healed: int) -> None:
        self.num_healed += num_healed
        self.written_nbytes += sum(padded_nbytes(info.stored_nbytes) for _, info in added)

    def _delete(self, txn: WriteTransaction, removed: Sequence[tuple[BlockDigest, BlockInfo]]) -> None:
        if not removed:
            return
        before = after = self._index.sum_to_change(txn)
        for digest, info in removed:
            delete_chunks(txn, info)
            txn.delete(Table.BINDEX, digest)
            self._delete_chain(txn, digest, info)
            after = after.without_block(info)
        after.put(txn)
        txn.on_commit(lambda: self._index.note(before, after, removed=removed))

    def _delete_chain(self, txn: WriteTransaction, digest: BlockDigest, info: BlockInfo) -> None:
        try:
            is_chained = txn.get(Table.CHAIN, info.block_hash) == digest
        except CorruptionError:
            is_chained = True
        if is_chained:
            txn.delete(Table.CHAIN, info.block_hash)

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
            join(txn, digest, info, data)
        return opened(self._environment.cipher, digest, data)


def _other(digest: BlockDigest, meta: RecordMeta) -> CorruptionError | None:
    """Say so when a record is another block than the one that was asked for."""
    if meta.digest == digest:
        return None
    return CorruptionError(f"block {digest.hex()}: the store holds block {meta.digest.hex()} in its place")
