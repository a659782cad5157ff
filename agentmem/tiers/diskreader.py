"""Reading what the disk tier holds: records of blocks, decoded and verified.

Knows the rows of `bindex` and `blocks`; writes nothing.
"""

import logging
import threading
from collections.abc import Iterator, Sequence

from torch import Tensor

from agentmem._lmdb import Environment, ReadTransaction, Table
from agentmem.errors import AgentMemError, CorruptionError, NotFoundError
from agentmem.ids import BlockDigest
from agentmem.kv import record as record_format
from agentmem.kv.header import RecordMeta
from agentmem.tiers.blockrows import BlockInfo, read_info
from agentmem.tiers.chunks import join, joined
from agentmem.tiers.sealing import opened

logger = logging.getLogger(__name__)


class DiskReader:
    """The records of one store. Thread-safe."""

    name = "disk"

    def __init__(self, environment: Environment) -> None:
        """Read from `environment`."""
        self._environment = environment
        self._scratch = threading.local()

    def are_here(self, digests: Sequence[BlockDigest]) -> list[bool]:
        """Say of each block whether its record is in this store, and not below alone."""
        with self._environment.read() as txn:
            infos = [self._readable(txn, digest) for digest in digests]
        return [info is not None and not info.is_below for info in infos]

    def is_named(self, digest: BlockDigest) -> bool:
        """Say whether a checkpoint names the block, so that no gc takes it."""
        with self._environment.read() as txn:
            try:
                info = read_info(txn, digest)
            except CorruptionError:
                return False
        return info is not None and info.refs > 0

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
            data = joined(txn, digest, self._require_here(txn, digest))
        record = opened(self._environment.cipher, digest, memoryview(data))
        if record_format.read_meta(record).digest != digest:
            raise CorruptionError(f"block {digest.hex()}: the store holds another block in its place")
        return bytes(record)

    def iter_index(self, txn: ReadTransaction) -> Iterator[tuple[BlockDigest, BlockInfo | CorruptionError]]:
        """Yield every block in the order of digests; one whose row is damaged comes with the error."""
        for key, value in txn.scan_each(Table.BINDEX):
            yield BlockDigest(key), value if isinstance(value, CorruptionError) else BlockInfo.unpack(value, key)

    # ---- within

    def _require(self, txn: ReadTransaction, digest: BlockDigest) -> BlockInfo:
        info = read_info(txn, digest)
        if info is None:
            raise NotFoundError(f"block {digest.hex()} is not on disk")
        return info

    def _require_here(self, txn: ReadTransaction, digest: BlockDigest) -> BlockInfo:
        info = self._require(txn, digest)
        if info.is_below:
            raise NotFoundError(f"block {digest.hex()} is in a lower tier, and not on disk")
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
            info = self._require_here(txn, digest)
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
