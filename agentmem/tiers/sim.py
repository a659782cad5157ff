"""A tier with a price: keeps records in memory and takes as long as a real one would. For tests and benchmarks.

With a clock of its own it proves a policy in milliseconds; with the real one it shows what a slow link does.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence

from agentmem.ids import BlockDigest, BlockHash
from agentmem.kv.record import Record
from agentmem.tiers.parts import CutBlock, cut


class SimTier:
    """Records in memory, behind a link of some bandwidth and latency. Thread-safe; calls take turns on the link."""

    def __init__(
        self,
        *,
        bandwidth: float,
        latency_s: float = 0.0,
        capacity_nbytes: int | None = None,
        name: str = "sim",
        is_durable: bool = True,
        residency_s: float = math.inf,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Move `bandwidth` bytes per second after `latency_s` for each call; `sleep` lets that time pass.

        What is not used for `residency_s` seconds of the clock is gone, as from a pool.
        """
        self.name = name
        self.is_durable = is_durable
        self.moved_nbytes = 0
        self._bandwidth = bandwidth
        self._latency_s = latency_s
        self._capacity_nbytes = capacity_nbytes
        self._residency_s = residency_s
        self._sleep = sleep
        self._clock = clock
        self._used_s: dict[BlockDigest, float] = {}
        self._link = threading.Lock()
        self._records: dict[BlockDigest, bytes] = {}
        self._cut_blocks: dict[BlockDigest, CutBlock] = {}
        self._names: dict[BlockHash, BlockDigest] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(map(len, tuple(self._records.values())))

    def contains_many(self, digests: Sequence[BlockDigest]) -> list[bool]:
        """Say of each block whether it is here."""
        self._pass(0)
        return [self._get(digest) is not None for digest in digests]

    def fetch_many(self, digests: Sequence[BlockDigest]) -> list[bytes | None]:
        """Return each block's record, None for one that is not here."""
        found = [self._get(digest) for digest in digests]
        self._used_s.update((digest, self._clock()) for digest, data in zip(digests, found, strict=True) if data)
        self._pass(sum(len(data) for data in found if data is not None))
        return found

    def fetch_heads(self, digests: Sequence[BlockDigest]) -> list[bytes | None]:
        """Return the first bytes of each block's record, None for one that is not here."""
        self._pass(0)
        return [None if digest not in self._records else self._cut(digest).head for digest in digests]

    def fetch_parts(self, digests: Sequence[BlockDigest], part: int) -> list[bytes | None]:
        """Return one part of each block, None for one that is not here."""
        found = [None if digest not in self._records else self._cut(digest).parts[part] for digest in digests]
        self._pass(sum(len(data) for data in found if data is not None))
        return found

    def put_many(self, records: Sequence[Record]) -> list[bool]:
        """Store records; False for one that does not fit."""
        return [self._put(record) for record in records]

    def find_many(self, names: Sequence[BlockHash]) -> list[BlockDigest | None]:
        """Return for each token name a block of those tokens that is here, or None."""
        self._pass(0)
        return [self._names.get(name) for name in names]

    def remove_many(self, digests: Sequence[BlockDigest]) -> None:
        """Drop records; nothing happens for those that are not here."""
        for digest in digests:
            self._records.pop(digest, None)
        self._names = {name: digest for name, digest in self._names.items() if digest in self._records}

    def close(self) -> None:
        """Do nothing: there is no server."""

    def _cut(self, digest: BlockDigest) -> CutBlock:
        """Cut a block into parts, when somebody first asks for them."""
        block = self._cut_blocks.get(digest)
        if block is None:
            block = self._cut_blocks[digest] = cut(self._records[digest])
        return block

    def _put(self, record: Record) -> bool:
        if self._get(record.digest) is not None:
            return True
        if self._capacity_nbytes is not None and self.nbytes + len(record.data) > self._capacity_nbytes:
            return False
        self._pass(len(record.data))
        self._records[record.digest] = bytes(record.data)
        self._names.setdefault(record.block_hash, record.digest)
        self._used_s[record.digest] = self._clock()
        return True

    def _get(self, digest: BlockDigest) -> bytes | None:
        is_old = self._clock() - self._used_s.get(digest, 0.0) > self._residency_s
        return None if is_old else self._records.get(digest)

    def _pass(self, nbytes: int) -> None:
        """Let the time pass that a call takes; one call at a time is on the link."""
        with self._link:
            self.moved_nbytes += nbytes
            self._sleep(self._latency_s + nbytes / self._bandwidth)
