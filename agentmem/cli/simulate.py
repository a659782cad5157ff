"""`simulate`: what tiers and a policy would do with a trace of requests. Needs no store."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence

from agentmem.cli.result import Result
from agentmem.cli.text import amount, count, duration, facts, plain, table
from agentmem.errors import InvalidInputError
from agentmem.planning.geometry import read_geometry
from agentmem.planning.plan import DECODE_RATE, FLOPS, LOSSLESS_RATIO, Wanted, make_plan
from agentmem.simulation.agents import agents
from agentmem.simulation.reader import BLOCK_SIZE, read_trace
from agentmem.simulation.report import Costs, Outcome, TierOutcome, replay
from agentmem.simulation.trace import Trace
from agentmem.simulation.workloads import beam, round_robin
from agentmem.tiers.pyramid import Pyramid, TierSpec, parse_nbytes, read_pyramid

_BLOCKS = "blocks"
_GENERATORS: dict[str, Callable[[int], Trace]] = {
    "agents": lambda seed: agents(seed=seed),
    "round-robin": lambda seed: round_robin(seed=seed),
    "beam": lambda seed: beam(seed=seed),
}


def simulate(arguments: argparse.Namespace) -> Result:
    """Replay a trace over tiers."""
    trace = _trace(arguments)
    pyramid = read_pyramid(arguments.tiers)
    costs = _costs(arguments, trace)
    outcome = replay(trace, _resized(pyramid, arguments.capacity, trace, costs), costs, arguments.policy)
    return Result(document=dataclasses.asdict(outcome), text=lambda: _text(outcome))


COMMANDS = {"simulate": simulate}


def _trace(arguments: argparse.Namespace) -> Trace:
    if arguments.trace is not None:
        return read_trace(arguments.trace, block_size=arguments.block_size or BLOCK_SIZE)
    if arguments.block_size is not None:
        raise InvalidInputError("--block-size says how many tokens a block of a --trace has; it needs one")
    if arguments.generate not in _GENERATORS:
        raise InvalidInputError(f"{arguments.generate!r} cannot be generated; there are {', '.join(_GENERATORS)}")
    return _GENERATORS[arguments.generate](arguments.seed)


def _costs(arguments: argparse.Namespace, trace: Trace) -> Costs:
    """Take the rate of prefill at the middle of the prompts' lengths, as `plan` does where it was not measured."""
    geometry = read_geometry(arguments.model)
    lengths = sorted(request.num_input for request in trace.requests)
    wanted = Wanted(
        num_tokens=max(1, lengths[len(lengths) // 2]),
        dtype=arguments.dtype,
        prefill_tok_s=arguments.prefill,
        flops=FLOPS["local" if arguments.tiers == "local" else "accelerators"],
    )
    plan = make_plan(geometry, wanted, ())
    if not plan.token_nbytes:
        raise InvalidInputError(f"{plan.model!r} keeps nothing for a token, so there are no blocks to simulate")
    return Costs(
        token_nbytes=plan.token_nbytes,
        ratio=LOSSLESS_RATIO.get(plan.dtype, 1.0),
        decode_rate=DECODE_RATE,
        prefill_tok_s=plan.prefill_tok_s,
    )


def _resized(pyramid: Pyramid, wanted: Sequence[str], trace: Trace, costs: Costs) -> Pyramid:
    """Give tiers the capacities of `NAME=SIZE` words."""
    tiers = {tier.name: tier for tier in pyramid}
    for word in wanted:
        name, _, size = word.partition("=")
        if name not in tiers:
            raise InvalidInputError(f"{word!r} names no tier; there are {', '.join(tiers)}: give NAME=SIZE")
        nbytes = _nbytes(tiers[name], size, trace, costs)
        tiers[name] = dataclasses.replace(tiers[name], capacity_nbytes=nbytes, max_capacity_nbytes=None)
    return tuple(tiers.values())


def _nbytes(tier: TierSpec, size: str, trace: Trace, costs: Costs) -> int:
    """Read "80GB", or "400blocks": as many blocks as the tier stores them."""
    if not size.endswith(_BLOCKS):
        return parse_nbytes(size)
    number = size.removesuffix(_BLOCKS).strip()
    if not number.isdecimal():
        raise InvalidInputError(f"{size!r} is no number of blocks: give one such as 400{_BLOCKS}")
    # Half a block more, or rounding could take one away.
    return round((int(number) + 0.5) * costs.stored_nbytes(tier, trace.block_size)) if int(number) else 0


def _text(found: Outcome) -> str:
    shape = found.shape
    num_hits = found.num_asked - found.num_new - found.num_lost
    rows = [
        ("trace", f"{count(shape.num_requests, 'request')} of {count(shape.num_branches, 'branch')}"),
        ("", f"{shape.ratio:,.0f} tokens in for each one out, {shape.repeated:.1%} of them repeated"),
        ("policy", found.policy),
        ("blocks", f"{found.num_asked:,} asked for, {amount(found.block_nbytes)} each"),
        ("hits", f"{num_hits / max(1, found.num_asked):.1%} in all tiers; {found.num_lost:,} were lost"),
        ("computed", f"{duration(found.computed_s)} for what was new or lost, at {found.prefill_tok_s:,.0f} tokens/s"),
        ("saved", _signed(found.saved_s)),
    ]
    header = ("TIER", "BLOCKS", "HITS", "WITHIN", "BEST", "LOADED", "SUNK TO", "LOADING", "COMPUTING")
    return f"{facts(rows)}\n\n{table(header, [_row(tier) for tier in found.tiers])}"


def _signed(saved_s: float) -> str:
    if saved_s < 0:
        return f"nothing: loading took {duration(-saved_s)} longer than computing"
    return f"{duration(saved_s)}: computing what was hit, less loading it"


def _row(tier: TierOutcome) -> tuple[str, ...]:
    rates = (f"{rate:.1%}" for rate in (tier.hit_rate, tier.within, tier.best_within))
    moved = (amount(nbytes) if nbytes else "-" for nbytes in (tier.loaded_nbytes, tier.sunk_nbytes))
    times = (duration(time_s) if time_s else "-" for time_s in (tier.load_s, tier.recompute_s))
    return (plain(tier.name), f"{tier.num_blocks:,}", *rates, *moved, *times)
