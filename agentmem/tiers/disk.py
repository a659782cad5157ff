"""The disk tier: records of blocks in LMDB, cut into chunks, counted by the checkpoints that name them.

Knows blocks by their two names and records by their bytes; knows nothing of sessions.

Row of `chain`: block hash (32 bytes) to the digest (32 bytes) of a block of those tokens. Rows of `bindex`: see
blockindex.py, of `blocks`: see chunks.py.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import xxhash

from agentmem._future import Future
from agentmem._lmdb import Environment, Level, Table, WriteTransaction
from agentmem.errors import CorruptionError, InvalidInputError
from agentmem.ids import BlockDigest, BlockHash, BlockId, short
from agentmem.kv.codec import CodecId
from agentmem.kv.header import RecordMeta
from agentmem.kv.record import Record
from agentmem.tiers.blockindex import BlockIndex
from agentmem.tiers.blockrows import BELOW, BlockInfo, BlockSum, Totals, read_info, read_sum, unreferenced
from agentmem.tiers.chunks import MAX_RECORD_NBYTES, chunks, delete_chunks, joined, padded_nbytes
from agentmem.tiers.diskreader import DiskReader
from agentmem.tiers.sealing import sealed, verified

logger = logging.getLogger(__name__)

_TOUCH_AFTER_S = 60


class DiskTier(DiskReader):
    """The blocks of one store. Thread-safe.

    Attributes:
        num_healed: Blocks that this handle wrote in the place of damaged ones.
        written_nbytes: Bytes of records that it has written, padded as they lie in the file.
    """

    def __init__(self, environment: Environment, *, clock: Callable[[], float] = time.time) -> None:
        """Use `environment`; what is stored is read at the first question. `clock` gives seconds since 1970."""
        super().__init__(environment)
        self._clock = clock
        self._index = BlockIndex(environment)
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
        return self._store(records, [record for record in records if not self.contains(record.digest)], level)

    def prepare(self, records: Sequence[Record]) -> tuple[Callable[[WriteTransaction], None], int]:
        """Return what stores records inside of a transaction, and about how many bytes it adds; see `store`."""
        records = [sealed(self._environment.cipher, record) for record in records]
        infos = [self._new_info(record) for record in records]

        def operation(txn: WriteTransaction) -> None:
            self._put_all(txn, records, infos)

        return operation, sum(padded_nbytes(info.stored_nbytes) for info in infos)

    def rise(self, record: Record) -> Future[None]:
        """Queue the record of a block that may be below alone, to be written here again.

        Raises:
            StorageFullError: The disk budget has no room for it.
            ReadOnlyError: The store cannot be written.
        """
        return self._store([record], [record], Level.RELAXED)

    def know(self, txn: WriteTransaction, metas: Iterable[RecordMeta]) -> None:
        """Take note of blocks that a durable tier below holds, by what their records say of themselves.

        They can be named and found from then on; whoever loads one verifies what comes.
        """
        before = after = self._index.sum_to_change(txn)
        added: list[tuple[BlockDigest, BlockInfo]] = []
        for meta in metas:
            if txn.get(Table.BINDEX, meta.digest) is None:
                info = _info_below(meta, after.next_id, self._clock())
                txn.put(Table.BINDEX, meta.digest, info.pack())
                self._put_chain(txn, meta)
                after = after.with_block(info)
                added.append((meta.digest, info))
        if added:
            after.put(txn)
            txn.on_commit(lambda: self._index.note(before, after, added=added))

    def sink(self, txn: WriteTransaction, digests: Iterable[BlockDigest]) -> int:
        """Let go of the records of blocks that a durable tier below holds; return the bytes of records removed.

        The blocks stay known, with all their names: whoever loads one is told that it is not here.
        """
        before = after = self._index.sum_to_change(txn)
        for digest in digests:
            info = self._readable(txn, digest)
            if info is not None and not info.is_below:
                delete_chunks(txn, info)
                txn.put(Table.BINDEX, digest, info.sunk().pack())
                after = after.with_sunk(info)
        if after != before:
            after.put(txn)
            txn.on_commit(lambda: self._index.note(before, after))
        return before.totals.stored_nbytes - after.totals.stored_nbytes

    def put_record(self, data: bytes, *, level: Level = Level.DURABLE) -> Future[None]:
        """Store a record that came from elsewhere, after decoding and verifying all of it.

        Raises:
            CorruptionError: The bytes are damaged.
            FormatVersionError: They were written in a format that this version does not read.
        """
        return self.store([verified(data)], level=level)

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

    def _store(self, records: Sequence[Record], new: Sequence[Record], level: Level) -> Future[None]:
        """Queue records, of which those that are `new` take room."""
        operation, _ = self.prepare(records)
        nbytes = sum(padded_nbytes(len(record.data)) for record in new)
        return self._environment.submit(operation, level=level, nbytes=nbytes)

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
        is_healed = self._put_chain(txn, record) or (old is not None and not old.is_below) or is_lost
        return info, before.with_block(info, is_lost=is_lost, old=old), is_healed

    def _is_whole(self, txn: WriteTransaction, digest: BlockDigest, info: BlockInfo) -> bool:
        """Tell whether a block that is stored again is here as it was written: whoever has it anew heals it."""
        if info.is_below:
            return False
        try:
            joined(txn, digest, info)
        except CorruptionError as error:
            logger.warning("%s; it is written again", error)
            return False
        return not self._index.is_damaged(digest)

    def _put_chain(self, txn: WriteTransaction, record: Record | RecordMeta) -> bool:
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


def _info_below(meta: RecordMeta, block_id: BlockId, now_s: float) -> BlockInfo:
    """Return the row of a block that is only known by what its record, which is below, says of itself."""
    codecs = [section.codec_id for section in meta.sections]
    return BlockInfo(
        block_id=block_id,
        refs=0,
        raw_nbytes=meta.raw_nbytes,
        stored_nbytes=0,
        codec=codecs[0] if codecs else CodecId.RAW,
        num_tokens=meta.num_tokens,
        last_use_s=int(now_s),
        block_hash=meta.block_hash,
        checksum=bytes(16),
        shard=BELOW,
    )
