"""What a batch tells about itself: how it fed its branches, what they shared, and what a continuation is worth.

Knows nothing of how the numbers arise.
"""

from dataclasses import dataclass

from agentmem.batching import BatchMode
from agentmem.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """What a batch holds and has done.

    Attributes:
        mode: How the model feeds the branches.
        reason: Why nothing faster is done, in a word of `reasons.BATCHING`; None for the fastest.
        why: The same in a sentence; "" for the fastest.
        num_rows: Branches that were fed together last.
        num_passes: Forward passes so far; with one-by-one passes of single branches among them.
        num_fed: Tokens the model was fed so far, over all branches.
        num_shared: Tokens that are held, and attended, once for several branches.
        num_copied: Tokens whose KV was copied beside a branch's own, for sharing them would have been slower.
        kv_nbytes: Bytes of KV that the branches take on the device: shared ones once, and the rows.
        stock_nbytes: Bytes of KV that a stock batched cache would hold for the same branches.
    """

    mode: BatchMode
    reason: Reason | None
    why: str
    num_rows: int = 0
    num_passes: int = 0
    num_fed: int = 0
    num_shared: int = 0
    num_copied: int = 0
    kv_nbytes: int = 0
    stock_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """What a model thinks of a continuation.

    Attributes:
        tokens: Its ids.
        logprobs: The natural logarithm of each token's probability, given all before it.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def total(self) -> float:
        """The logarithm of the continuation's probability."""
        return sum(self.logprobs)

    @property
    def mean(self) -> float:
        """The mean over tokens, which compares continuations of different lengths; 0.0 for an empty one."""
        return self.total / len(self.logprobs) if self.logprobs else 0.0
