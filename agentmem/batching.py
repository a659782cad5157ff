"""What the core asks of a framework to feed several branches in one forward pass, and to sample from its logits.

Knows nothing of sessions, and names no framework.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from agentmem.marks import Mark, Marks
from agentmem.reasons import Reason
from agentmem.tiers.frontier import LayerKV, SharedKV


class BatchMode(StrEnum):
    """How a model feeds several branches."""

    CASCADE = "cascade"
    """In one pass: what branches share is attended once for all of them."""
    ROWS = "rows"
    """In one pass: every branch has a row with all of its KV."""
    ONE_BY_ONE = "one-by-one"
    """In a pass for each branch, one after the other."""


class RowText(Protocol):
    """What is known of one row's tokens."""

    @property
    def marks(self) -> Marks:
        """What the row's KV depends on beside its tokens."""
        ...

    @property
    def regime(self) -> bytes:
        """The rotary regime that the row's KV is in (see `agentmem.adapter.Adapter.regime`)."""
        ...

    def tokens(self, stop: int) -> list[int]:
        """Return the row's first `stop` token ids."""
        ...

    def inputs(self, mark: Mark) -> dict[str, object]:
        """Return the model inputs behind a mark."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsPass:
    """One forward pass over several branches, a row for each.

    A row's KV is what it shares and, in slots of its own, everything else: the slots [first, stop) hold its last
    tokens, in order. The pass writes its new tokens from `stop` on, and may write as far as the longest row's.

    Attributes:
        texts: What is known of each row.
        tokens: The tokens to feed, per row; none for a row that only comes along.
        lengths: Tokens of each row before the pass.
        firsts: Each row's first slot with a token.
        stops: Each row's first free slot.
        layers: Keys and values of each stored layer, `[N, H, capacity, D]`.
        shared: What several rows have.
        states: The layer states before the pass, `[N, ...]` per entry of `KVSpec.states`: copies that the model may
            overwrite. None for a model without, and before the first token.
        num_logits: How many of its last tokens' logits are wanted, per row.
    """

    texts: Sequence[RowText]
    tokens: Sequence[Sequence[int]]
    lengths: Sequence[int]
    firsts: Sequence[int]
    stops: Sequence[int]
    layers: Sequence[LayerKV]
    shared: Sequence[SharedKV]
    states: list[Tensor] | None
    num_logits: Sequence[int]

    @property
    def num_fed(self) -> int:
        """Tokens of the row that is fed most."""
        return max(len(tokens) for tokens in self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsResult:
    """What a pass over several branches gives.

    Attributes:
        logits: `[num_logits, V]` of each row's last tokens.
        states: The layer states after the pass, `[N, ...]` per entry of `KVSpec.states`.
    """

    logits: list[Tensor]
    states: list[Tensor]


class BatchModel(Protocol):
    """A model that feeds several branches at once."""

    @property
    def mode(self) -> BatchMode:
        """How it does; proven on the model itself."""
        ...

    @property
    def reason(self) -> Reason | None:
        """Why nothing faster is done, in a word of `reasons.BATCHING`; None for the fastest."""
        ...

    @property
    def why(self) -> str:
        """The same in a sentence; "" for the fastest."""
        ...

    @property
    def num_private(self) -> int:
        """How many of its last tokens each row must have in its own slots: what a window sees."""
        ...

    def is_worth_sharing(self, num_rows: int, num_tokens: int) -> bool:
        """Say whether attending tokens once for so many rows is faster than copying them into each."""
        ...

    def takes(self, num_tokens: Sequence[int]) -> bool:
        """Say whether rows can be fed these numbers of tokens in one pass."""
        ...

    def run(self, rows: RowsPass) -> RowsResult:
        """Feed the rows. The KV is in their slots when it returns; when it raises, nothing below `stop` has changed."""
        ...


class Sampler(Protocol):
    """Chooses the next tokens of one branch, and knows when it ends."""

    @property
    def is_greedy(self) -> bool:
        """Whether it always takes the likeliest token, so that a batch may look for all rows' at once."""
        ...

    def choose(self, logits: Tensor) -> int:
        """Return the next token, given the logits `[V]` after the last one."""
        ...

    def accept(self, token: int) -> bool:
        """Add a token that was chosen; return whether the branch ends with it."""
        ...


SamplerOptions = Mapping[str, object]
"""The framework's own options of generation, and `seed`."""
