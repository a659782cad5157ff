"""`plan`: what the KV of a model takes, where it fits, and when loading it beats computing it. Needs no store."""

import argparse
from dataclasses import asdict

from agentmem.cli.result import Result
from agentmem.cli.text import amount, count, duration, facts, plain, table
from agentmem.errors import InvalidInputError
from agentmem.planning.claims import Claim, check_claims
from agentmem.planning.geometry import read_geometry
from agentmem.planning.plan import FLOPS, Plan, TierPlan, Wanted, make_plan
from agentmem.tiers.pyramid import read_pyramid

_FACTORS = {"": 1, "k": 10**3, "m": 10**6}


def plan(arguments: argparse.Namespace) -> Result:
    """Reckon what a session's KV takes, or check the figures of articles."""
    if arguments.check_claims:
        claims = check_claims()
        return Result(document={"claims": [asdict(claim) for claim in claims]}, text=lambda: _claims_text(claims))
    if arguments.tokens is None:
        raise InvalidInputError("plan needs to know for how many tokens: give --tokens, such as --tokens 100k")
    flops = FLOPS["local" if arguments.tiers == "local" else "accelerators"]
    wanted = Wanted(
        num_tokens=_count(arguments.tokens),
        dtype=arguments.dtype,
        num_branches=arguments.branches,
        shared=_part(arguments.shared),
        prefill_tok_s=arguments.prefill,
        flops=flops if arguments.flops is None else arguments.flops,
    )
    found = make_plan(read_geometry(arguments.model), wanted, read_pyramid(arguments.tiers))
    return Result(document=asdict(found), text=lambda: _plan_text(found))


COMMANDS = {"plan": plan}


def _plan_text(found: Plan) -> str:
    rows = [
        ("model", f"{plain(found.model)}, KV in {found.dtype}"),
        ("a token", f"{found.token_nbytes:,.0f} B"),
        ("one branch", f"{amount(found.session_nbytes)} for {found.num_tokens:,} tokens{_states(found)}"),
    ]
    if found.seen_nbytes < found.session_nbytes:
        rows.append(("of it seen", f"{amount(found.seen_nbytes)} by the next token: windows bound their layers"))
    if found.source_nbytes:
        rows.append(
            ("encoder", f"{found.source_nbytes:,.0f} B more for each token of its input, once for all branches")
        )
    if found.num_branches > 1:
        branches = count(found.num_branches, "branch")
        rows.append((branches, f"{amount(found.apart_nbytes)} each on its own"))
        rows.append(("shared", f"{amount(found.shared_nbytes)} with {found.shared:.0%} of the tokens in common"))
    rows += [
        ("stored", f"about {amount(found.coded_nbytes)}, coded without loss"),
        (
            "compute",
            f"{duration(found.recompute_s)} a branch: {found.prefill_tok_s:,.0f} tokens/s, {found.prefill_basis}",
        ),
        ("break-even", f"{amount(found.break_even)}/s: a tier that is faster beats computing"),
    ]
    header = ("TIER", "HOLDS", "BRANCHES", "ALL FIT", "LOAD ONE", "FASTER")
    return f"{facts(rows)}\n\n{table(header, [_tier_row(tier) for tier in found.tiers])}"


def _states(found: Plan) -> str:
    return f", {amount(found.state_nbytes)} of it layer states" if found.state_nbytes else ""


def _tier_row(tier: TierPlan) -> tuple[str, ...]:
    return (
        plain(tier.name),
        _range(amount(tier.capacity_nbytes), amount(tier.best_capacity_nbytes)),
        _range(f"{tier.num_sessions:,}", f"{tier.best_num_sessions:,}"),
        "yes" if tier.fits else "at best" if tier.fits_at_best else "no",
        _range(duration(tier.best_load_s), duration(tier.load_s)),
        str(tier.verdict),
    )


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} - {high}"


def _claims_text(claims: list[Claim]) -> str:
    return "\n\n".join(
        facts(
            [
                ("right" if claim.is_right else "OFF", claim.what),
                ("", f"said: {claim.said}"),
                ("", f"is:   {amount(claim.found)}"),
                ("", claim.why),
            ]
        )
        for claim in claims
    )


def _count(text: str) -> int:
    """Read how many tokens "4096", "100k" or "1M" are."""
    letter = text[-1:].lower() if text[-1:].isalpha() else ""
    try:
        number = float(text.removesuffix(text[-1:]) if letter else text) * _FACTORS[letter]
        return round(number)
    except (KeyError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"{text!r} is no number of tokens: give one such as 4096, 100k or 1M") from error


def _part(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / 100
    except ValueError as error:
        raise InvalidInputError(f"{text!r} is no part of the tokens: give 0% to 100%") from error
