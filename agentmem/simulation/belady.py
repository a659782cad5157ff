"""The best that any policy could do: let go of what is needed last, knowing all that will come.

Source: Belady, A study of replacement algorithms for a virtual-storage computer (1966).
"""

import heapq
import math

from agentmem.simulation.trace import Trace


def fewest_misses(trace: Trace, capacity: int) -> int:
    """Return how often a block of a prompt that was there before must be missing, with room for `capacity` blocks.

    A block need not stay after its use, so this is a bound for policies that choose what they let in, too.
    """
    uses = [
        (block, index < request.num_prompt) for request in trace.requests for index, block in enumerate(request.blocks)
    ]
    next_use = _next_uses([block for block, _ in uses])
    kept: dict[int, float] = {}
    latest: list[tuple[float, int]] = []
    seen: set[int] = set()
    num_misses = 0
    for (block, is_prompt), later in zip(uses, next_use, strict=True):
        num_misses += is_prompt and block in seen and block not in kept
        seen.add(block)
        kept[block] = later
        heapq.heappush(latest, (-later, block))
        while len(kept) > capacity:
            when, candidate = heapq.heappop(latest)
            if kept.get(candidate) == -when:
                del kept[candidate]
    return num_misses


def _next_uses(blocks: list[int]) -> list[float]:
    """Return for each use the number of the next one of the same block, infinity after the last."""
    found: list[float] = [math.inf] * len(blocks)
    last: dict[int, int] = {}
    for index in range(len(blocks) - 1, -1, -1):
        found[index] = last.get(blocks[index], math.inf)
        last[blocks[index]] = index
    return found
