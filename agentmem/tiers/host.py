"""The RAM tier: raw KV blocks that left the device, by digest, least recently used out first.

Every block here is on disk too, or on its way there: dropping one loses nothing.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from agentmem.ids import BlockDigest


class HostTier:
    """Raw blocks in RAM within a byte budget. Thread-safe."""

    name = "host"

    def __init__(self, budget_nbytes: int, *, is_pinned: bool = False) -> None:
        """Hold at most `budget_nbytes`; `is_pinned` allocates page-locked memory for copies to and from a GPU."""
        self.budget_nbytes = budget_nbytes
        self._is_pinned = is_pinned
        self._lock = threading.Lock()
        self._blocks: OrderedDict[BlockDigest, list[Tensor]] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of KV held."""
        return self._nbytes

    def __len__(self) -> int:
        return len(self._blocks)

    def contains(self, digest: BlockDigest) -> bool:
        """Say whether the block is here."""
        with self._lock:
            return digest in self._blocks

    def store(self, digest: BlockDigest, sections: Sequence[Tensor]) -> bool:
        """Copy a block in, dropping the least recently used ones to keep the budget.

        Returns:
            False when the block alone is larger than the budget; nothing is dropped then.
        """
        nbytes = sum(section.nbytes for section in sections)
        if nbytes > self.budget_nbytes:
            return False
        copies = [self._copy(section) for section in sections]
        with self._lock:
            self._drop(digest)
            while self._nbytes + nbytes > self.budget_nbytes:
                self._drop(next(iter(self._blocks)))
            self._blocks[digest] = copies
            self._nbytes += nbytes
        return True

    def load(self, digest: BlockDigest, out: Sequence[Tensor]) -> bool:
        """Copy a block into `out`, one `[L, H, T, D]` per section, and mark it as just used.

        Returns:
            False when the block is not here; `out` is untouched then.
        """
        with self._lock:
            sections = self._blocks.get(digest)
            if sections is None:
                return False
            self._blocks.move_to_end(digest)
        for source, target in zip(sections, out, strict=True):
            target.copy_(source, non_blocking=True)
        return True

    def fetch(self, digest: BlockDigest) -> list[Tensor] | None:
        """Return copies of a block's sections and mark it as just used; None when it is not here."""
        with self._lock:
            sections = self._blocks.get(digest)
            if sections is None:
                return None
            self._blocks.move_to_end(digest)
        return [section.clone() for section in sections]

    def remove(self, digest: BlockDigest) -> None:
        """Drop a block; nothing happens when it is not here."""
        with self._lock:
            self._drop(digest)

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._blocks.clear()
            self._nbytes = 0

    def _copy(self, section: Tensor) -> Tensor:
        copy = torch.empty(section.shape, dtype=section.dtype, pin_memory=self._is_pinned)
        return copy.copy_(section)

    def _drop(self, digest: BlockDigest) -> None:
        sections = self._blocks.pop(digest, None)
        if sections is not None:
            self._nbytes -= sum(section.nbytes for section in sections)
