"""The mirror of the disk tier's index in memory: which blocks it holds, and which of them have given tokens.

Rows: see blockrows.py.
"""

import logging
import secrets
import threading
from collections.abc import Sequence
from dataclasses import replace

from agentmem._lmdb import Environment, ReadTransaction, Table, WriteTransaction
from agentmem.errors import CorruptionError
from agentmem.ids import BlockDigest, BlockHash, BlockId
from agentmem.tiers.blockrows import BlockInfo, BlockSum, read_info, read_rows, read_sum

logger = logging.getLogger(__name__)

Changes = Sequence[tuple[BlockDigest, BlockInfo]]
"""Blocks that were added or removed."""


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
            self._digests = {digest for digest, _ in read_rows(txn)}
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


def _read_chain(txn: ReadTransaction, digests: set[BlockDigest]) -> dict[BlockHash, BlockDigest]:
    rows = txn.scan_each(Table.CHAIN)
    return {BlockHash(key): BlockDigest(value) for key, value in rows if isinstance(value, bytes) and value in digests}
