"""Loading blocks layer by layer, while the model computes on the layers that have come.

A part is verified alone before it is copied to where the model reads it; when all parts have come, so is the block as a
whole. Nothing of a pass is kept before that. Source: layer-wise preloading of CachedAttention (arXiv 2403.19708).
"""

import contextlib
import logging
import threading
from collections.abc import Sequence
from queue import Empty, Queue

import torch
import xxhash
from torch import Tensor

from agentmem._background import LESS, give_way
from agentmem._future import Future
from agentmem.errors import AgentMemError, CorruptionError, TierUnavailableError
from agentmem.ids import short
from agentmem.kv import record as record_format
from agentmem.kv.codec import as_words
from agentmem.kv.hashing import content_digest, part_hash
from agentmem.kv.header import RecordMeta
from agentmem.kv.spec import KVSpec
from agentmem.tiers.blocks import Want
from agentmem.tiers.parts import num_parts, part_rows, read_head
from agentmem.tiers.remote import LayeredTier
from agentmem.tiers.runs import Storage

logger = logging.getLogger(__name__)


_NUM_AHEAD = 2
"""Parts that are fetched ahead of those that are decoded."""

_LOOK_S = 0.01

Fetched = list[bytes | None] | AgentMemError
"""One part of every block, or why it cannot be had."""


class LoadFailed(Exception):  # noqa: N818 - no error: whoever catches it loads in another way
    """A load that a pass was waiting for cannot be finished. It never leaves a verb."""


class LayerStream:
    """A load of blocks in the order in which the model's layers need them, in a thread of its own.

    Attributes:
        tier: The tier that it loads from.
        num_tokens: Tokens of the blocks.
        thread: Ends soon after `stop`: when what is under way has come.
    """

    def __init__(self, tier: LayeredTier, wanted: Sequence[Want], heads: Sequence[bytes], spec: KVSpec) -> None:
        """Begin to load `wanted`, whole blocks whose records begin with `heads`.

        Raises:
            CorruptionError, FormatVersionError: A head is damaged, another block's or of a newer version.
        """
        self.tier = tier
        self.num_tokens = sum(want.num_tokens for want in wanted)
        self._wanted = list(wanted)
        self._metas = [_meta_of(want, head) for want, head in zip(wanted, heads, strict=True)]
        self._num_parts = num_parts(self._metas[0])
        self._part_of_layer = [
            next(
                part for part in range(self._num_parts) if part_rows(group.num_layers, part, self._num_parts).stop > row
            )
            for group in spec.groups
            for row in range(group.num_layers)
        ]
        self._sums = [[xxhash.xxh3_128() for _ in want.out] for want in wanted]
        self._lock = threading.Lock()
        self._is_over = False
        self._places = [section.untyped_storage().data_ptr() for section in wanted[0].out]
        self._parts: list[Future[None]] = [Future() for _ in range(self._num_parts)]
        self._whole: Future[None] = Future()
        self.thread = threading.Thread(target=self._run, name="agentmem-layers", daemon=True)
        self.thread.start()

    def wait(self, layer: int) -> None:
        """Wait until the KV of a stored layer, counted over all groups, is where the model reads it.

        Raises:
            LoadFailed: It will not be.
        """
        self._parts[self._part_of_layer[layer]].result()
        if self._wanted[0].order is not None:
            self._wanted[0].order.follow()

    def check_place(self, storage: Storage | None) -> None:
        """Check that what is loaded comes to where the model reads it: that buffer has not grown since.

        Raises:
            LoadFailed: It has.
        """
        places = [] if storage is None else [section.untyped_storage().data_ptr() for section in storage.sections]
        if places != self._places:
            raise LoadFailed("the buffer has grown")

    def finish(self) -> None:
        """Wait until all has come, and every block was found to be what it is called.

        Raises:
            LoadFailed: It was not.
        """
        self._whole.result()

    def stop(self) -> None:
        """Load no more; what is under way is not copied to where it was wanted."""
        with self._lock:
            self._is_over = True

    def _run(self) -> None:
        give_way(LESS)  # to the model's threads, which wait for it where they must
        left = [*self._parts, self._whole]
        fetched: Queue[Fetched] = Queue(_NUM_AHEAD)
        fetcher = threading.Thread(target=self._fetch, args=(fetched,), name="agentmem-layers-fetch", daemon=True)
        fetcher.start()
        try:
            for part in range(self._num_parts):
                found = fetched.get()
                if isinstance(found, AgentMemError):
                    raise found
                self._take(part, found)
                left.pop(0).set_result(None)
            for meta, sums in zip(self._metas, self._sums, strict=True):
                _check_whole(meta, [each.digest() for each in sums])
            left.pop(0).set_result(None)
        except (AgentMemError, LoadFailed) as error:
            logger.warning("blocks of tier %s are loaded in another way: %s", self.tier.name, error)
        finally:
            self.stop()
            for each in left:
                each.set_exception(LoadFailed(f"tier {self.tier.name} did not give all layers"))
            while fetcher.is_alive():  # it may wait for room
                with contextlib.suppress(Empty):
                    fetched.get(timeout=_LOOK_S)

    def _fetch(self, fetched: "Queue[Fetched]") -> None:
        """Fetch the parts one after the other, some ahead of those that are decoded."""
        digests = [meta.digest for meta in self._metas]
        for part in range(self._num_parts):
            if self._is_over:
                fetched.put(TierUnavailableError("nobody waits any more"))  # but who decodes waits for this
                return
            try:
                fetched.put(self.tier.fetch_parts(digests, part))
            except AgentMemError as error:
                fetched.put(error)
                return

    def _take(self, part: int, found: Sequence[bytes | None]) -> None:
        """Verify one part of every block, and copy it to where it is wanted."""
        for number, data in enumerate(found):
            want, meta = self._wanted[number], self._metas[number]
            rows = [part_rows(section.shape[0], part, self._num_parts) for section in want.out]
            staged = _decoded(meta, part, data, rows)
            for each, section in zip(self._sums[number], staged, strict=True):
                each.update(as_words(section).data)
            with self._lock:
                if self._is_over:
                    raise LoadFailed("nobody waits any more")
                _copy(want, staged, rows)


def can_stream(wanted: Sequence[Want], heads: Sequence[bytes | None]) -> bool:
    """Say whether blocks can be loaded by layers: all are there, wanted as a whole, and cut alike into parts."""
    if any(head is None for head in heads) or any(want.num_tokens != want.block.num_tokens for want in wanted):
        return False
    try:
        counts = {num_parts(read_head(head)) for head in heads if head is not None}
    except AgentMemError:
        return False
    return len(counts) == 1 and counts != {1}


def _meta_of(want: Want, head: bytes) -> RecordMeta:
    """Return what a block's record says of itself.

    Raises:
        CorruptionError: It is another block's.
    """
    meta = read_head(head)
    shapes = [tuple(section.shape) for section in want.out]
    if meta.digest != want.block.digest or [section.shape for section in meta.sections] != shapes:
        raise CorruptionError(f"block {meta.digest.hex()} was found in the place of another, or in another shape")
    return meta


def _decoded(meta: RecordMeta, part: int, data: bytes | None, rows: Sequence[slice]) -> list[Tensor]:
    """Return a part's rows of each section, verified.

    Raises:
        CorruptionError: The bytes are damaged, or another part's.
        LoadFailed: The part is not there.
    """
    if data is None:
        raise LoadFailed(f"part {part} of block {short(meta.digest)} is gone")
    dtype = getattr(torch, meta.dtype)
    staged = [
        torch.empty((place.stop - place.start, *section.shape[1:]), dtype=dtype)
        for section, place in zip(meta.sections, rows, strict=True)
    ]
    found = record_format.unpack(data, staged)
    if found.block_hash != part_hash(meta.block_hash, part):
        raise CorruptionError(f"block {meta.digest.hex()}: something else is in the place of part {part}")
    return staged


def _check_whole(meta: RecordMeta, sums: Sequence[bytes]) -> None:
    if content_digest(meta.block_hash, sums) != meta.digest:
        raise CorruptionError(f"block {meta.digest.hex()}: its parts do not give its digest")


def _copy(want: Want, staged: Sequence[Tensor], rows: Sequence[slice]) -> None:
    if want.order is not None:
        want.order.follow()
    for source, target, place in zip(staged, want.out, rows, strict=True):
        target[place].copy_(source)
    if want.order is not None:
        want.order.note()
