"""The RAM tier: raw KV blocks that left the device, by digest, least recently used out first.

Every block here is on disk too, or on its way there: dropping one loses nothing.
"""

import contextlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from agentmem.ids import BlockDigest
from agentmem.tiers.memory import empty_in_ram


class HostTier:
    """Raw blocks in RAM within a byte budget. Thread-safe."""

    name = "host"

    def __init__(self, budget_nbytes: int, *, is_pinned: bool = False, clock: Callable[[], float] = time.time) -> None:
        """Hold at most `budget_nbytes`; `is_pinned` allocates page-locked memory for copies to and from a GPU."""
        self.budget_nbytes = budget_nbytes
        self._is_pinned = is_pinned
        self._lock = threading.Lock()
        self._clock = clock
        self._blocks: OrderedDict[BlockDigest, list[Tensor]] = OrderedDict()
        self._used_s: dict[BlockDigest, float] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of KV held, and of what is being copied in."""
        return self._nbytes

    def __len__(self) -> int:
        return len(self._blocks)

    def contains(self, digest: BlockDigest) -> bool:
        """Say whether the block is here."""
        with self._lock:
            return digest in self._blocks

    def nbytes_of(self, digest: BlockDigest) -> int | None:
        """Return the bytes of a block, None when it is not here."""
        with self._lock:
            sections = self._blocks.get(digest)
        return None if sections is None else sum(section.nbytes for section in sections)

    def store(self, digest: BlockDigest, sections: Sequence[Tensor]) -> bool:
        """Copy a block in, dropping the least recently used ones first, to keep the budget.

        Returns:
            False when the block alone is larger than the budget; nothing is dropped then.
        """

        def write(out: list[Tensor]) -> None:
            for section, target in zip(sections, out, strict=True):
                target.copy_(section)

        return self.fill(digest, [(section.shape, section.dtype) for section in sections], write)

    def fill(
        self,
        digest: BlockDigest,
        sections: Sequence[tuple[Sequence[int], torch.dtype]],
        write: Callable[[list[Tensor]], None],
    ) -> bool:
        """Take in a block that `write` writes into memory of these shapes and dtypes; see `store`."""
        nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in sections)
        if not self._set_aside(nbytes):
            return False
        try:
            tensors = [empty_in_ram(shape, dtype, is_pinned=self._is_pinned) for shape, dtype in sections]
            write(tensors)
        except BaseException:
            self._give_back(nbytes)
            raise
        with self._lock:
            self._drop(digest)
            self._blocks[digest] = tensors
            self._use(digest)
        return True

    @contextlib.contextmanager
    def lend(self, nbytes: int) -> Iterator[bool]:
        """Count bytes of somebody else while the context is open, dropping blocks for them; False: there is no room."""
        is_lent = self._set_aside(nbytes)
        try:
            yield is_lent
        finally:
            if is_lent:
                self._give_back(nbytes)

    def load(self, digest: BlockDigest, out: Sequence[Tensor]) -> bool:
        """Copy a block into `out`, one `[L, H, T, D]` per section, and mark it as just used.

        Returns:
            False when the block is not here; `out` is untouched then.
        """
        with self._lock:
            sections = self._blocks.get(digest)
            if sections is None:
                return False
            self._use(digest)
        for source, target in zip(sections, out, strict=True):
            target.copy_(source, non_blocking=True)
        return True

    def fetch(self, digest: BlockDigest) -> list[Tensor] | None:
        """Return copies of a block's sections and mark it as just used; None when it is not here."""
        with self._lock:
            sections = self._blocks.get(digest)
            if sections is None:
                return None
            self._use(digest)
        return [section.clone() for section in sections]

    def remove(self, digest: BlockDigest) -> None:
        """Drop a block; nothing happens when it is not here."""
        with self._lock:
            self._drop(digest)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            for digest in list(self._blocks):
                self._drop(digest)

    def idle(self, before_s: float) -> list[BlockDigest]:
        """Return the blocks that were used last before `before_s`, by the clock."""
        with self._lock:
            return [digest for digest in self._blocks if self._used_s[digest] < before_s]

    def _use(self, digest: BlockDigest) -> None:
        self._blocks.move_to_end(digest)
        self._used_s[digest] = self._clock()

    def _set_aside(self, nbytes: int) -> bool:
        """Count bytes before they are allocated; False when the budget has no room for them."""
        with self._lock:
            while self._nbytes + nbytes > self.budget_nbytes:
                if nbytes > self.budget_nbytes or not self._blocks:
                    return False
                self._drop(next(iter(self._blocks)))
            self._nbytes += nbytes
            return True

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes -= nbytes

    def _drop(self, digest: BlockDigest) -> None:
        sections = self._blocks.get(digest)
        if sections is not None:
            nbytes = sum(section.nbytes for section in sections)
            self._nbytes -= nbytes
            del self._blocks[digest], self._used_s[digest]
