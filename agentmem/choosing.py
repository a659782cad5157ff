"""Load or compute: what is to be done about KV that is far away. Pure functions of measured rates.

Knows nothing of tiers, blocks or models.
"""

from dataclasses import dataclass
from enum import StrEnum

_RACE_COST, _OVERLAP_COST = 1.1, 1.05
"""What it costs that two things run side by side: the share of time by which they take longer than on paper."""


class Way(StrEnum):
    """What is done about KV that is not here."""

    LOAD = "load"
    """It is loaded, and then the model goes on."""
    OVERLAP = "overlap"
    """It is loaded layer by layer, while the model goes on with the layers that have come."""
    RACE = "race"
    """It is loaded from the end and computed from the front, until the two meet."""
    COMPUTE = "compute"
    """It is computed again from the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen, and why.

    Attributes:
        way: What is done.
        num_tokens: Tokens whose KV is far away.
        load_s: Seconds that loading all of it takes; None when nobody knows yet.
        compute_s: Seconds that computing all of it takes; None when nobody knows yet.
        next_s: Seconds that the tokens take which the model is fed next.
    """

    way: Way
    num_tokens: int
    load_s: float | None
    compute_s: float | None
    next_s: float = 0.0


def choose(
    num_tokens: int,
    load_s: float | None,
    compute_s: float | None,
    next_s: float = 0.0,
    *,
    can_race: bool = False,
    can_overlap: bool = False,
) -> Choice:
    """Choose the way to KV of `num_tokens` tokens that takes the least time (see `Choice`).

    Where a time is not known, both are tried at once, if they can be: that takes no longer than the faster of the two.
    """
    if load_s is None or compute_s is None:
        way = Way.RACE if can_race else Way.OVERLAP if can_overlap else Way.LOAD
    else:
        costs = {Way.LOAD: load_s + next_s, Way.COMPUTE: compute_s + next_s}
        if can_overlap:
            costs[Way.OVERLAP] = max(load_s, next_s) * _OVERLAP_COST
        if can_race and load_s + compute_s > 0:
            costs[Way.RACE] = load_s * compute_s / (load_s + compute_s) * _RACE_COST + next_s
        way = min(costs, key=costs.__getitem__)
    return Choice(way=way, num_tokens=num_tokens, load_s=load_s, compute_s=compute_s, next_s=next_s)
