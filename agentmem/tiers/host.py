"""The RAM tier: raw KV blocks that left the device, by digest; who leaves next is a policy's to say.

Every block here is on disk too, or on its way there: dropping one loses nothing.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from agentmem.ids import BlockDigest
from agentmem.tiers.memory import empty_in_ram
from agentmem.tiers.policies import Policy, make_policy


class HostTier:
    """Raw blocks in RAM within a byte budget. Thread-safe."""

    name = "host"

    def __init__(
        self,
        budget_nbytes: int,
        *,
        is_pinned: bool = False,
        policy: str = "lru",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Hold at most `budget_nbytes`; `is_pinned` allocates page-locked memory for copies to and from a GPU."""
        self.budget_nbytes = budget_nbytes
        self._is_pinned = is_pinned
        self._lock = threading.Lock()
        self._clock = clock
        self._policy_name = policy
        self._policy: Policy[BlockDigest] | None = None  # made for as many blocks as fit, once one is known
        self._blocks: dict[BlockDigest, list[Tensor]] = {}
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
        """Copy a block in, dropping others first, to keep the budget.

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
            self._policy = self._policy or make_policy(self._policy_name, max(1, self.budget_nbytes // max(1, nbytes)))
            self._policy.admit(digest)
            self._used_s[digest] = self._clock()
            self._blocks[digest] = tensors
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
        self._used_s[digest] = self._clock()
        if self._policy is not None:
            self._policy.touch(digest)

    def _set_aside(self, nbytes: int) -> bool:
        """Count bytes before they are allocated; False when the budget has no room for them."""
        with self._lock:
            while self._nbytes + nbytes > self.budget_nbytes:
                victim = None if self._policy is None or nbytes > self.budget_nbytes else self._policy.victim(())
                if victim is None:
                    return False
                self._drop(victim)
            self._nbytes += nbytes
            return True

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self._nbytes -= nbytes

    def _drop(self, digest: BlockDigest) -> None:
        sections = self._blocks.pop(digest, None)
        if sections is not None:
            self._nbytes -= sum(section.nbytes for section in sections)
        if self._used_s.pop(digest, None) is not None and self._policy is not None:
            self._policy.remove(digest)
