"""The pool: records in the memory of a server that speaks the Redis protocol, shared by whoever uses it.

The server may evict, forget or lose anything at any time: a copy here never is the last one. Keys and values:

    agentmem/1/r/<digest>    string  a record, and before it the xxh3-128 of its bytes; of an encrypted store, a box
    agentmem/1/n/<name>      string  the digest of a block with that token name; of an encrypted store, a box

<digest> and <name> are 64 hex digits, in an encrypted store those of what stands for them there. 1 is the version of
this form: another version finds nothing here, and harms nothing. Every key expires after `residency_s` without use.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import xxhash

from agentmem._lmdb import Cipher
from agentmem._lmdb.tables import Table
from agentmem.errors import CorruptionError, FormatVersionError, TierUnavailableError
from agentmem.ids import BlockDigest, BlockHash, short
from agentmem.kv.record import Record, read_meta
from agentmem.stats import Counters
from agentmem.tiers.breaker import Breaker
from agentmem.tiers.redisserver import Command, Patience, RedisServer, Reply
from agentmem.tiers.sealing import sealed

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

MAX_RECORD_NBYTES = (512 << 20) - 1024
"""Longest record that is kept: a string of such a server has at most 512 MiB."""

_BATCH_NBYTES = 8 << 20
"""Records that one round trip carries: at 10 GB/s a batch takes 1 ms, at 1 MB/s 8 s."""

_ROW_NBYTES = 256
"""More than a command or an answer takes beside a record: a key of 76 bytes, a name's box of 112, lengths."""

_SUM_NBYTES = 16
_DIGEST_NBYTES = 32


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """The memory of a pool's server, for whatever it is used.

    Attributes:
        used_nbytes: Bytes in use.
        max_nbytes: Bytes after which it evicts or refuses; None when it was given no limit.
    """

    used_nbytes: int
    max_nbytes: int | None


class PoolTier:
    """A `RecordTier` on a Redis server. Thread-safe.

    What comes back passed a checksum, so that it is what somebody stored as this block; the caller still decodes and
    verifies it. Damaged values are counted, removed, and then not here.
    """

    name = "pool"
    is_durable = False

    def __init__(
        self,
        url: str,
        *,
        cipher: Cipher | None = None,
        counters: Counters | None = None,
        residency_s: int = 6 * 3600,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take note of a server, without connecting to it.

        Args:
            url: `redis://[user:password@]host[:port][/db]`, `rediss://` for TLS, or `unix:///path[?db=n]`. A password
                that is not in it is taken from the environment, REDISCLI_AUTH.
            cipher: Of an encrypted store. Those share blocks whose ciphers have the same key.
            counters: Where to count.
            residency_s: Seconds without use after which the server drops a block.
            patience: How long the server may take.
            clock: Seconds, for pauses and deadlines.

        Raises:
            InvalidInputError: The URL cannot be used.
        """
        self._server = RedisServer(url, patience=patience or Patience(), clock=clock)
        self._cipher = cipher
        self._counters = counters or Counters()
        self._residency_s = residency_s
        self._breaker = Breaker(f"pool {self._server.where}", clock=clock)

    # ---- RecordTier

    def contains_many(self, digests: Sequence[BlockDigest]) -> list[bool]:
        """Say of each block whether it is here."""
        with self._calls():
            return self._are_here(digests)

    def fetch_many(self, digests: Sequence[BlockDigest]) -> list[bytes | None]:
        """Return each block's record, None for one that is not here; two round trips, and one for each 8 MiB more."""
        found: dict[BlockDigest, bytes] = {}
        damaged: list[BlockDigest] = []
        with self._calls():
            for batch in self._sized_batches(digests, damaged):
                self._fetch_batch(batch, found, damaged)
            self._remove_damaged(damaged)
        return [found.get(digest) for digest in digests]

    def put_many(self, records: Sequence[Record]) -> list[bool]:
        """Store records that are not here yet; say of each whether it is here now: False when there is no room."""
        is_here: dict[BlockDigest, bool] = {}
        with self._calls():
            distinct = {record.digest: record for record in records}
            for record, was_here in zip(distinct.values(), self._are_here(list(distinct)), strict=True):
                is_here[record.digest] = was_here
            new = [record for record in distinct.values() if not is_here[record.digest]]
            self._run([self._name(record) for record in distinct.values() if is_here[record.digest]])
            for batch in _batches([(record, len(record.data)) for record in new if _fits(record)]):
                stored = self._put_batch([record for record, _ in batch])
                is_here |= dict.fromkeys(stored, True)
                if len(stored) < len(batch):
                    break  # it is full: sending the rest would only take time
        num_refused = sum(not each for each in is_here.values())
        if num_refused:
            self._counters.add("pool_blocks_refused", num_refused)
        return [is_here[record.digest] for record in records]

    def find_many(self, names: Sequence[BlockHash]) -> list[BlockDigest | None]:
        """Return for each token name a block of those tokens that is here, or None; two round trips."""
        with self._calls():
            values = self._run([("GET", self._name_key(name)) for name in names])
            digests = [self._digest_in(name, value) for name, value in zip(names, values, strict=True)]
            named = [(name, digest) for name, digest in zip(names, digests, strict=True) if digest is not None]
            keys = [self._record_key(digest) for _, digest in named] + [self._name_key(name) for name, _ in named]
            replies = self._run([self._expire(key) for key in keys])
        here = {digest for (_, digest), reply in zip(named, replies, strict=False) if reply == 1}
        return [digest if digest in here else None for digest in digests]

    def remove_many(self, digests: Sequence[BlockDigest]) -> None:
        """Drop the pool's copies; nothing happens for those that are not here."""
        with self._calls():
            self._run([("DEL", self._record_key(digest)) for digest in digests])

    def close(self) -> None:
        """Hang up; again is harmless."""
        self._server.close()

    # ---- what only a pool has

    @property
    def is_open(self) -> bool:
        """Whether the server is left alone for now, after failures in a row."""
        return self._breaker.is_open

    def usage(self) -> PoolUsage:
        """Ask the server for its memory.

        Raises:
            TierUnavailableError: It does not answer.
        """
        with self._calls():
            [text] = self._run([("INFO", "memory")], nbytes=1 << 16)
        lines = text.decode("ascii", "replace").splitlines() if isinstance(text, bytes) else []
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        return PoolUsage(_number(fields, "used_memory"), _number(fields, "maxmemory") or None)

    # ---- within

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """Count how the calls inside end."""
        is_made = False
        try:
            with self._breaker.guard():
                is_made = True
                yield
        except TierUnavailableError:
            if is_made:
                self._counters.add("pool_calls_failed")
            else:
                self._counters.add("pool_calls_skipped")
            raise

    def _run(self, commands: Sequence[Command], *, nbytes: int = 0) -> list[Reply]:
        return self._server.run(commands, nbytes=nbytes + _ROW_NBYTES * len(commands)) if commands else []

    def _are_here(self, digests: Sequence[BlockDigest]) -> list[bool]:
        """Say of each whether it is here, and keep those that are for another `residency_s`."""
        return [reply == 1 for reply in self._run([self._expire(self._record_key(digest)) for digest in digests])]

    def _sized_batches(
        self, digests: Sequence[BlockDigest], damaged: list[BlockDigest]
    ) -> Iterator[list[tuple[BlockDigest, int]]]:
        """Yield the blocks that are here with the bytes that each takes, and note those that cannot be blocks."""
        distinct = list(dict.fromkeys(digests))
        sizes = self._run([("STRLEN", self._record_key(digest)) for digest in distinct])
        sized: list[tuple[BlockDigest, int]] = []
        for digest, nbytes in zip(distinct, sizes, strict=True):
            if not isinstance(nbytes, int) or nbytes > MAX_RECORD_NBYTES + _ROW_NBYTES:
                damaged.append(digest)
            elif nbytes > 0:
                sized.append((digest, nbytes))
        yield from _batches(sized)

    def _fetch_batch(
        self, batch: Sequence[tuple[BlockDigest, int]], found: dict[BlockDigest, bytes], damaged: list[BlockDigest]
    ) -> None:
        keys = [self._record_key(digest) for digest, _ in batch]
        commands: list[Command] = [("GET", key) for key in keys]
        values = self._run(commands + [self._expire(key) for key in keys], nbytes=sum(size for _, size in batch))
        for (digest, _), value in zip(batch, values, strict=False):
            try:
                if isinstance(value, bytes):
                    found[digest] = self._record_in(digest, value)
            except FormatVersionError:
                logger.info("the pool's block %s needs another version of agentmem", short(digest))
            except CorruptionError as error:
                logger.warning("%s; it is removed from the pool", error)
                damaged.append(digest)
                found[digest] = b""
        self._counters.add("pool_fetched_nbytes", sum(len(found.get(digest, b"")) for digest, _ in batch))

    def _remove_damaged(self, damaged: Sequence[BlockDigest]) -> None:
        if damaged:
            self._run([("DEL", self._record_key(digest)) for digest in damaged])

    def _put_batch(self, records: Sequence[Record]) -> list[BlockDigest]:
        """Send records and their names; return the digests of those that the server took."""
        commands = [self._set(self._record_key(each.digest), self._value_of(each)) for each in records]
        replies = self._run(
            commands + [self._name(each) for each in records], nbytes=sum(len(record.data) for record in records)
        )
        stored = [record for record, reply in zip(records, replies, strict=False) if reply == b"OK"]
        self._counters.add("pool_stored_nbytes", sum(len(record.data) for record in stored))
        return [record.digest for record in stored]

    def _name(self, record: Record) -> Command:
        """Return the command that lets a block be found by its tokens."""
        return self._set(self._name_key(record.block_hash), self._name_value(record))

    def _set(self, key: bytes, value: bytes) -> Command:
        return ("SET", key, value, "EX", self._residency_s)

    def _expire(self, key: bytes) -> Command:
        """Return the command that lets a key live on; its answer is whether there is one."""
        return ("EXPIRE", key, self._residency_s)

    def _record_key(self, digest: BlockDigest) -> bytes:
        place = digest if self._cipher is None else self._cipher.place(Table.BINDEX, digest)
        return b"agentmem/1/r/" + place.hex().encode()

    def _name_key(self, name: BlockHash) -> bytes:
        place = name if self._cipher is None else self._cipher.place(Table.CHAIN, name)
        return b"agentmem/1/n/" + place.hex().encode()

    def _value_of(self, record: Record) -> bytes:
        if self._cipher is not None:
            return sealed(self._cipher, record).data
        return xxhash.xxh3_128_digest(record.data) + record.data

    def _name_value(self, record: Record) -> bytes:
        if self._cipher is None:
            return record.digest
        place = self._cipher.place(Table.CHAIN, record.block_hash)
        return self._cipher.close(Table.CHAIN, place, record.block_hash, record.digest)

    def _record_in(self, digest: BlockDigest, value: bytes) -> bytes:
        """Return the record in a value.

        Raises:
            CorruptionError: It is damaged, or another block's.
            FormatVersionError: Its form is another version's.
        """
        if self._cipher is not None:
            data = self._cipher.open_record(digest, memoryview(value))
        else:
            data = value[_SUM_NBYTES:]
            if xxhash.xxh3_128_digest(data) != value[:_SUM_NBYTES]:
                raise CorruptionError(f"block {digest.hex()}: the pool's copy fails its checksum")
        if read_meta(data).digest != digest:
            raise CorruptionError(f"block {digest.hex()}: the pool holds another block in its place")
        return data

    def _digest_in(self, name: BlockHash, value: Reply) -> BlockDigest | None:
        """Return the digest in a name's value; None when there is none, or it is damaged."""
        if not isinstance(value, bytes):
            return None
        try:
            digest = value if self._cipher is None else self._opened_name(self._cipher, name, value)
        except CorruptionError as error:
            logger.warning("a name in the pool leads nowhere: %s", error)
            return None
        return BlockDigest(digest) if len(digest) == _DIGEST_NBYTES else None

    def _opened_name(self, cipher: Cipher, name: BlockHash, value: bytes) -> bytes:
        return cipher.open(Table.CHAIN, cipher.place(Table.CHAIN, name), value)[1]


def _fits(record: Record) -> bool:
    return len(record.data) <= MAX_RECORD_NBYTES


def _number(fields: dict[str, str], name: str) -> int:
    text = fields.get(name, "")
    return int(text) if text.isdigit() else 0


def _batches(sized: Iterable[tuple[_T, int]]) -> Iterator[list[tuple[_T, int]]]:
    """Cut things with their sizes into batches of at most `_BATCH_NBYTES`, or of one thing that is larger."""
    batch: list[tuple[_T, int]] = []
    left_nbytes = _BATCH_NBYTES
    for thing, nbytes in sized:
        if batch and nbytes > left_nbytes:
            yield batch
            batch, left_nbytes = [], _BATCH_NBYTES
        batch.append((thing, nbytes))
        left_nbytes -= nbytes
    if batch:
        yield batch
