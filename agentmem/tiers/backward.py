"""Loading from the end towards the front, while somebody computes from the front towards the end.

Blocks are loaded into memory of their own, a few at a time, and copied to where they are wanted when they have come,
unless the other side was there first. Source: Cake (compute or load, arXiv 2410.03065).
"""

import threading
import time
from collections.abc import Callable, Sequence

import torch

from agentmem.reasons import Reason
from agentmem.tiers.blocks import Outcome, SealedBlock, Want, copy_in

Fetch = Callable[[Sequence[Want]], Sequence[Outcome]]
"""Loads blocks to where they are wanted, and says of each what became of it."""

_SHORT_S, _LONG_S = 0.05, 0.2
"""A fetch that takes less is made larger the next time, one that takes longer smaller."""


class BackwardLoad:
    """A load of neighbouring blocks, the last ones first, in a thread of its own.

    Attributes:
        blocks: The blocks that were loaded, in order of their positions, maybe equivalent ones.
        from_tier: Tokens that were loaded, by tier.
        num_equivalent: Tokens whose bytes come from an equivalent block.
        reason: COMPLETE, or why a block could not be had: those before it are not loaded either.
        thread: Ends soon after `stop`: when what is under way has come.
    """

    def __init__(self, wanted: Sequence[Want], fetch: Fetch) -> None:
        """Begin to load `wanted`, which are in order of their positions."""
        self.blocks: list[SealedBlock] = []
        self.from_tier: dict[str, int] = {}
        self.num_equivalent = 0
        self.reason = Reason.COMPLETE
        self._wanted = list(wanted)
        self._fetch = fetch
        self._lock = threading.Lock()
        self._bell = threading.Event()
        self._num_left = len(wanted)
        self._num_under_way = 1
        self._num_computed = 0
        self._is_over = False
        self.thread = threading.Thread(target=self._run, name="agentmem-backward", daemon=True)
        self.thread.start()

    @property
    def num_left(self) -> int:
        """How many of the first blocks have not been loaded, those under way included."""
        return self._num_left

    def claim(self, index: int, most: int) -> int:
        """Take up to `most` blocks from `index` on, to compute them; return the index behind the last of them.

        Blocks that are under way are not taken: that may be as many as are left.
        """
        with self._lock:
            free = self._num_left - (0 if self._is_over else self._num_under_way)
            self._num_computed = max(index, min(index + most, free))
            return self._num_computed

    def wait(self, timeout_s: float) -> None:
        """Wait until all is loaded that nobody has taken, or no more comes; `timeout_s` at most."""
        self._bell.wait(timeout_s)

    def stop(self) -> None:
        """Load no more; what is under way is not copied to where it was wanted."""
        with self._lock:
            self._is_over = True

    def _run(self) -> None:
        num_blocks = 1
        while self._begin(num_blocks):
            started = time.perf_counter()
            wants = self._wanted[self._num_left - self._num_under_way : self._num_left]
            staged = [_staged(want) for want in wants]
            outcomes = self._fetch(staged)
            if not self._end(wants, staged, outcomes):
                break
            elapsed_s = time.perf_counter() - started
            num_blocks = (
                num_blocks * 2
                if elapsed_s < _SHORT_S
                else max(1, num_blocks // 2)
                if elapsed_s > _LONG_S
                else num_blocks
            )
        self.stop()
        self._bell.set()

    def _begin(self, num_blocks: int) -> bool:
        with self._lock:
            self._num_under_way = min(num_blocks, self._num_left - self._num_computed)
            return self._num_under_way > 0 and not self._is_over

    def _end(self, wants: Sequence[Want], staged: Sequence[Want], outcomes: Sequence[Outcome]) -> bool:
        """Copy what has come, from the last block on; say whether to go on."""
        with self._lock:
            for want, source, outcome in zip(reversed(wants), reversed(staged), reversed(outcomes), strict=True):
                if self._is_over:
                    return False
                if outcome.block is None:
                    self.reason = outcome.reason
                    return False
                copy_in(source.out, want)
                self.blocks.insert(0, outcome.block)
                self.num_equivalent += want.num_tokens if outcome.reason is not Reason.COMPLETE else 0
                self.from_tier[outcome.tier] = self.from_tier.get(outcome.tier, 0) + want.num_tokens
                self._num_left -= 1
        return True


def _staged(want: Want) -> Want:
    """Return the want of the whole block, in memory of its own."""
    shapes = [(*section.shape[:2], want.block.num_tokens, section.shape[3]) for section in want.out]
    out = [torch.empty(shape, dtype=section.dtype) for shape, section in zip(shapes, want.out, strict=True)]
    return Want(block=want.block, out=out, num_tokens=want.block.num_tokens)
