"""What the KV of a session takes, where it fits, and whether loading it beats computing it again.

Arithmetic only: on a geometry, a pyramid and a few assumptions, all of which are in the result.
"""

from dataclasses import dataclass
from enum import StrEnum

from agentmem.errors import InvalidInputError
from agentmem.planning.compute import prefill_flops
from agentmem.planning.geometry import DTYPE_BITS, Geometry
from agentmem.tiers.pyramid import RAW, Pyramid, TierSpec

LOSSLESS_RATIO = {"bf16": 1.5, "fp16": 1.16, "fp32": 1.19}
"""How much smaller the lossless codec makes KV; others are kept raw. Measured on SmolLM2's KV (docs/experiments.md)."""

DECODE_RATE = 1.4e9
"""Bytes of KV that one core decodes in a second, cautiously: 1.4e9 to 2.0e9 were measured."""

FLOPS = {"local": 1.2e11, "accelerators": 3.2e15}
"""Sustained floating-point operations per second of the default pyramid's machine (SmolLM2 at 340 to 560 tokens/s by
length, on two cores) and of any other: 8 H100 at 40 % of their dense bf16 peak."""


class Verdict(StrEnum):
    """What is faster for KV in a tier."""

    LOAD = "load"
    RECOMPUTE = "recompute"
    EITHER = "either"
    """Depends on where in its range the tier's bandwidth is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """What one tier means for a session.

    Attributes:
        name: The tier's.
        note: What it is made of.
        capacity_nbytes: What it holds, at the cautious end of a range.
        best_capacity_nbytes: The same at the upper end.
        session_nbytes: What one branch takes there, coded as the tier codes.
        num_sessions: Branches of that size that fit, each on its own, at the cautious capacity.
        best_num_sessions: The same at the upper end.
        fits: Whether all planned branches, sharing what they share, fit at the cautious capacity.
        fits_at_best: The same at the upper end.
        load_s: Seconds to load one branch at the tier's cautious bandwidth, decoding included.
        best_load_s: The same at the upper end of its bandwidth.
        verdict: Whether to load or to compute.
    """

    name: str
    note: str
    capacity_nbytes: int
    best_capacity_nbytes: int
    session_nbytes: int
    num_sessions: int
    best_num_sessions: int
    fits: bool
    fits_at_best: bool
    load_s: float
    best_load_s: float
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the KV of a session takes.

    Attributes:
        model: Its name.
        dtype: Of the KV.
        num_tokens: Of each branch.
        num_branches: How many.
        shared: Part of each branch's tokens that all branches share.
        token_nbytes: Bytes of KV per token.
        state_nbytes: Bytes of layer states per branch.
        source_nbytes: Bytes per token of an encoder's input, once for all branches; 0 without an encoder.
        session_nbytes: One branch: its KV and its states.
        seen_nbytes: What the next token of one branch sees, and its states: windows bound their layers.
        apart_nbytes: All branches, each with a copy of its own.
        shared_nbytes: All branches, sharing what they share.
        coded_nbytes: The same as the lossless codec leaves it, estimated; states are counted raw.
        prefill_tok_s: Tokens per second of computing them.
        prefill_basis: Where that rate comes from.
        recompute_s: Seconds to compute one branch again.
        break_even: Bytes per second above which loading beats computing.
        tiers: Tier by tier.
    """

    model: str
    dtype: str
    num_tokens: int
    num_branches: int
    shared: float
    token_nbytes: float
    state_nbytes: int
    source_nbytes: float
    session_nbytes: int
    seen_nbytes: int
    apart_nbytes: int
    shared_nbytes: int
    coded_nbytes: int
    prefill_tok_s: float
    prefill_basis: str
    recompute_s: float
    break_even: float
    tiers: tuple[TierPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to plan for.

    Attributes:
        num_tokens: Tokens of each branch, shared ones included.
        dtype: Of the KV; None for the model's own.
        num_branches: How many branches.
        shared: Part of their tokens that they share, 0 to 1.
        prefill_tok_s: Tokens per second, where it was measured.
        flops: Sustained floating-point operations per second, for an estimate otherwise.
    """

    num_tokens: int
    dtype: str | None = None
    num_branches: int = 1
    shared: float = 0.0
    prefill_tok_s: float | None = None
    flops: float = FLOPS["local"]

    def __post_init__(self) -> None:
        """Refuse what cannot be planned.

        Raises:
            InvalidInputError: A number is out of its range, or the dtype is not known.
        """
        rates = [rate for rate in (self.prefill_tok_s, self.flops) if rate is not None]
        if self.num_tokens < 1 or self.num_branches < 1 or not 0 <= self.shared <= 1 or min(rates) <= 0:
            raise InvalidInputError(
                f"cannot plan for {self}: tokens and branches are at least 1, the shared part is 0 to 1, and rates are "
                f"above 0"
            )
        if self.dtype is not None and self.dtype not in DTYPE_BITS:
            raise InvalidInputError(f"KV of dtype {self.dtype!r} is not known; there are {', '.join(DTYPE_BITS)}")


def make_plan(geometry: Geometry, wanted: Wanted, pyramid: Pyramid) -> Plan:
    """Reckon what `wanted` takes on the tiers of `pyramid`."""
    dtype = wanted.dtype or geometry.dtype
    kv, state = geometry.kv_nbytes(wanted.num_tokens, dtype), geometry.state_nbytes(dtype)
    common = geometry.kv_nbytes(round(wanted.num_tokens * wanted.shared), dtype)
    together = common + wanted.num_branches * (kv - common)
    states = wanted.num_branches * state
    rate, basis = _prefill(geometry, wanted)
    recompute_s = wanted.num_tokens / rate
    return Plan(
        model=geometry.name,
        dtype=dtype,
        num_tokens=wanted.num_tokens,
        num_branches=wanted.num_branches,
        shared=wanted.shared,
        token_nbytes=geometry.token_nbytes(dtype),
        state_nbytes=state,
        source_nbytes=geometry.source_nbytes(dtype),
        session_nbytes=kv + state,
        seen_nbytes=geometry.seen_nbytes(wanted.num_tokens, dtype) + state,
        apart_nbytes=wanted.num_branches * (kv + state),
        shared_nbytes=together + states,
        coded_nbytes=_coded(together, dtype) + states,
        prefill_tok_s=rate,
        prefill_basis=basis,
        recompute_s=recompute_s,
        break_even=(kv + state) / recompute_s,
        tiers=tuple(_tier(tier, dtype, (kv, state), (together, states), recompute_s) for tier in pyramid),
    )


def _prefill(geometry: Geometry, wanted: Wanted) -> tuple[float, str]:
    """Return tokens per second, and where they come from."""
    if wanted.prefill_tok_s is not None:
        return wanted.prefill_tok_s, "as given"
    flops = prefill_flops(geometry, wanted.num_tokens)
    return wanted.num_tokens * wanted.flops / flops, f"estimated: {flops:.3g} FLOP at {wanted.flops:.3g} FLOP/s"


def _tier(tier: TierSpec, dtype: str, one: tuple[int, int], together: tuple[int, int], recompute_s: float) -> TierPlan:
    """Plan one tier; `one` branch and all `together` are bytes of KV and of states."""
    ratio_is_one = tier.codec == RAW or dtype not in LOSSLESS_RATIO
    session, everything = (kv + state if ratio_is_one else _coded(kv, dtype) + state for kv, state in (one, together))
    best = tier.max_capacity_nbytes or tier.capacity_nbytes
    decode_s = 0.0 if ratio_is_one else one[0] / DECODE_RATE
    load_s = tier.load_s(session) + decode_s
    best_s = tier.load_s(session, bandwidth=tier.max_bandwidth) + decode_s
    return TierPlan(
        name=tier.name,
        note=tier.note,
        capacity_nbytes=tier.capacity_nbytes,
        best_capacity_nbytes=best,
        session_nbytes=session,
        num_sessions=tier.capacity_nbytes // max(1, session),
        best_num_sessions=best // max(1, session),
        fits=everything <= tier.capacity_nbytes,
        fits_at_best=everything <= best,
        load_s=load_s,
        best_load_s=best_s,
        verdict=_verdict(load_s, best_s, recompute_s),
    )


def _verdict(load_s: float, best_load_s: float, recompute_s: float) -> Verdict:
    if load_s <= recompute_s:
        return Verdict.LOAD
    return Verdict.EITHER if best_load_s <= recompute_s else Verdict.RECOMPUTE


def _coded(nbytes: int, dtype: str) -> int:
    return round(nbytes / LOSSLESS_RATIO.get(dtype, 1.0))
