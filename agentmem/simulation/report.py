"""What a replay means in bytes and seconds, beside the best that any policy could do.

Arithmetic only, on what was counted and on the tiers' numbers.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from agentmem.errors import InvalidInputError
from agentmem.simulation.belady import fewest_misses
from agentmem.simulation.simulate import Counts, simulate
from agentmem.simulation.trace import Shape, Trace, shape_of
from agentmem.tiers.pyramid import RAW, TierSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What blocks weigh and what computing them takes.

    Attributes:
        token_nbytes: Bytes of KV of a token.
        ratio: How much smaller the lossless codec makes them, where a tier has it.
        decode_rate: Bytes of KV that are decoded in a second.
        prefill_tok_s: Tokens that are computed in a second.
    """

    token_nbytes: float
    ratio: float
    decode_rate: float
    prefill_tok_s: float

    def stored_nbytes(self, tier: TierSpec, num_tokens: int) -> float:
        """Return what so many tokens take in a tier."""
        return num_tokens * self.token_nbytes / (1.0 if tier.codec == RAW else self.ratio)

    def decode_s(self, tier: TierSpec, num_tokens: int) -> float:
        """Return the seconds in which they are decoded."""
        return 0.0 if tier.codec == RAW or self.ratio == 1.0 else num_tokens * self.token_nbytes / self.decode_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOutcome:
    """What one tier did. Rates are parts of all blocks of all prompts.

    Attributes:
        name: The tier's.
        num_blocks: Blocks that it holds.
        hit_rate: What it was the nearest to have.
        within: What it or a nearer one had.
        best_within: The most that any policy could have there: Belady's, with the room of all of them together.
        num_loads: Turns that loaded from it.
        loaded_nbytes: Bytes from it to the first tier.
        sunk_nbytes: Bytes from the tier above to it.
        load_s: Seconds of those loads, decoding included.
        recompute_s: Seconds of computing what was loaded.
    """

    name: str
    num_blocks: int
    hit_rate: float
    within: float
    best_within: float
    num_loads: int
    loaded_nbytes: int
    sunk_nbytes: int
    load_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a trace.

    Attributes:
        policy: Who chose what leaves.
        shape: What the trace looks like.
        block_nbytes: Bytes of KV of a block.
        prefill_tok_s: Tokens that are computed in a second.
        num_asked: Blocks of all prompts.
        num_new: Those never computed before.
        num_lost: Those computed again, because no tier had them any more.
        num_dropped: Blocks that left the last tier.
        computed_s: Seconds of computing new and lost blocks.
        saved_s: Seconds that the hits of all tiers saved: computing them, less loading them.
        tiers: Tier by tier, the nearest first.
    """

    policy: str
    shape: Shape
    block_nbytes: int
    prefill_tok_s: float
    num_asked: int
    num_new: int
    num_lost: int
    num_dropped: int
    computed_s: float
    saved_s: float
    tiers: tuple[TierOutcome, ...]


def replay(trace: Trace, pyramid: Sequence[TierSpec], costs: Costs, policy: str = "lru") -> Outcome:
    """Return what becomes of `trace` on the tiers of `pyramid`.

    Raises:
        InvalidInputError: A tier holds no block, or `simulate` refuses.
    """
    rooms = [_num_blocks(tier, trace, costs) for tier in pyramid]
    counts = simulate(trace, rooms, policy)
    best = [_best(trace, counts, room) for room in itertools.accumulate(rooms)]
    tiers = [
        _tier(index, tier, rooms[index], best[index], counts, costs, trace.block_size)
        for index, tier in enumerate(pyramid)
    ]
    token_s = trace.block_size / costs.prefill_tok_s
    return Outcome(
        policy=policy,
        shape=shape_of(trace),
        block_nbytes=round(costs.token_nbytes * trace.block_size),
        prefill_tok_s=costs.prefill_tok_s,
        num_asked=counts.num_asked,
        num_new=counts.num_new,
        num_lost=counts.num_lost,
        num_dropped=counts.num_dropped,
        computed_s=(counts.num_new + counts.num_lost) * token_s,
        saved_s=sum(tier.recompute_s - tier.load_s for tier in tiers),
        tiers=tuple(tiers),
    )


def _num_blocks(tier: TierSpec, trace: Trace, costs: Costs) -> int:
    """Return the blocks that a tier holds; more than there are in the trace make no difference."""
    num_blocks = int(tier.capacity_nbytes // costs.stored_nbytes(tier, trace.block_size))
    if num_blocks < 1:
        raise InvalidInputError(
            f"tier {tier.name!r} with {tier.capacity_nbytes} bytes holds no block of "
            f"{costs.stored_nbytes(tier, trace.block_size):.0f} bytes; give it more, or take a smaller model"
        )
    return min(num_blocks, trace.num_blocks)


def _best(trace: Trace, counts: Counts, room: int) -> float:
    num_missed = 0 if room >= trace.num_blocks else fewest_misses(trace, room)
    return (counts.num_asked - counts.num_new - num_missed) / max(1, counts.num_asked)


def _tier(
    index: int, tier: TierSpec, room: int, best: float, counts: Counts, costs: Costs, block_size: int
) -> TierOutcome:
    num_loaded = counts.hits[index] * block_size if index else 0
    loaded = costs.stored_nbytes(tier, num_loaded)
    load_s = counts.num_loads[index] * tier.latency_s + loaded / tier.bandwidth + costs.decode_s(tier, num_loaded)
    num_asked = max(1, counts.num_asked)
    return TierOutcome(
        name=tier.name,
        num_blocks=room,
        hit_rate=counts.hits[index] / num_asked,
        within=sum(counts.hits[: index + 1]) / num_asked,
        best_within=best,
        num_loads=counts.num_loads[index],
        loaded_nbytes=round(loaded),
        sunk_nbytes=round(costs.stored_nbytes(tier, counts.sunk[index] * block_size)),
        load_s=load_s,
        recompute_s=counts.hits[index] * block_size / costs.prefill_tok_s,
    )
