"""A block between tiers: what it is called, where it is wanted, and what a load made of it.

Knows nothing of how tiers keep blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from agentmem._future import Future
from agentmem.choosing import Choice
from agentmem.ids import BlockDigest, BlockHash
from agentmem.reasons import Reason
from agentmem.tiers.device import Workspace
from agentmem.tiers.mover import AnyJob
from agentmem.tiers.runs import Cursor
from agentmem.tiers.streams import Order


class SealedBlock:
    """An immutable block: tokens [start, stop) of some branch. Its digest is known once its bytes were read to save it.

    Attributes:
        block_hash: Its token name.
        start: Position of its first token.
        stop: Position after its last token.
        digest: Its byte name; None until it is being saved.
    """

    __slots__ = ("__weakref__", "block_hash", "digest", "is_parent_lossy", "job", "source", "start", "stop", "stored")

    def __init__(self, block_hash: BlockHash, start: int, stop: int, digest: BlockDigest | None) -> None:
        self.block_hash = block_hash
        self.start = start
        self.stop = stop
        self.digest = digest
        self.source: tuple[Workspace, Cursor] | None = None
        """Where its bytes are on the device, until the disk has them."""
        self.job: AnyJob | None = None
        self.stored: Future[None] | None = None
        self.is_parent_lossy = False
        """Whether its KV, or some before it, came back from a lossy tier."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the block."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """One block to bring onto the device.

    Attributes:
        block: The block.
        out: Where its tokens from `skip` on go: one `[L, H, T, D]` per section.
        num_tokens: Tokens wanted, T; at most what is left of the block.
        skip: Leading tokens of the block that are on the device already.
        order: Of what threads do to the memory it goes to; None where that is the CPU's.
    """

    block: SealedBlock
    out: list[Tensor]
    num_tokens: int
    skip: int = 0
    order: Order | None = None

    @property
    def is_on_cpu(self) -> bool:
        """Whether the tokens go to the CPU's memory."""
        return all(section.device.type == "cpu" for section in self.out)


@dataclass(frozen=True, slots=True)
class Lossy:
    """Tokens whose KV came back otherwise than the model made it.

    Attributes:
        start: Position of the first.
        stop: Position after the last.
        codec: The lossy codec that their tier keeps them in.
    """

    start: int
    stop: int
    codec: str


@dataclass(slots=True)
class Loaded:
    """What a load brought: the leading blocks that are good, and why it ended where it did.

    Attributes:
        blocks: The blocks as loaded, in order; one whose own bytes were gone is replaced by an equivalent one.
        from_tier: Tokens by tier.
        nbytes: Bytes of KV copied onto the device.
        num_equivalent: Tokens whose bytes come from an equivalent block.
        lossy: Which tokens have KV that is not the model's, in order: whoever takes them names their blocks anew.
        reason: COMPLETE, or why the next block could not be had.
        choice: Whether to load or to compute what was far away; None when nothing was.
    """

    blocks: list[SealedBlock] = field(default_factory=list)
    from_tier: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    num_equivalent: int = 0
    lossy: list[Lossy] = field(default_factory=list)
    reason: Reason = Reason.COMPLETE
    choice: Choice | None = None

    def count(self, tier: str, num_tokens: int, token_nbytes: int) -> None:
        """Count tokens that a tier gives."""
        self.from_tier[tier] = self.from_tier.get(tier, 0) + num_tokens
        self.nbytes += num_tokens * token_nbytes

    def add(self, other: "Loaded") -> None:
        """Add what came after it."""
        self.blocks += other.blocks
        for tier, num_tokens in other.from_tier.items():
            self.from_tier[tier] = self.from_tier.get(tier, 0) + num_tokens
        self.nbytes += other.nbytes
        self.num_equivalent += other.num_equivalent
        self.lossy += other.lossy
        self.reason = other.reason


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one block that was wanted.

    Attributes:
        block: The block that was loaded, maybe an equivalent one; None when it cannot be had.
        tier: The tier that had it.
        reason: COMPLETE; why an equivalent block had to do, or why none can be had.
        codec: The lossy codec that the tier had it in; "" when its bytes are the block's.
    """

    block: SealedBlock | None
    tier: str
    reason: Reason
    codec: str = ""


def copy_in(sections: Sequence[Tensor], want: Want) -> None:
    """Copy the wanted tokens of a block to where they are wanted, after whatever was done there before."""
    if want.order is not None:
        want.order.follow()
    for source, target in zip(sections, want.out, strict=True):
        target.copy_(source[:, :, want.skip : want.skip + want.num_tokens])
    if want.order is not None:
        want.order.note()
