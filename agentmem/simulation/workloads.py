"""Traces with a simple, known order: agents that take turns in a ring, and beam searches.

Their next uses are known ahead, which is what hints are for. Seeded: the same arguments give the same trace.
"""

import dataclasses
import itertools
import random

from agentmem.simulation.chain import Chain
from agentmem.simulation.trace import Announcement, Request, Trace


def round_robin(
    *,
    num_agents: int = 12,
    num_rounds: int = 10,
    num_common: int = 10,
    growth: tuple[int, int] = (3, 5),
    block_size: int = 16,
    seed: int = 0,
) -> Trace:
    """Return agents that take turns in a ring, and say after each turn that the others come first.

    Args:
        num_agents: How many.
        num_rounds: Turns of each.
        num_common: Blocks of the prompt that all have in common.
        growth: Blocks that a turn appends: at least, at most.
        block_size: Tokens of a block.
        seed: Of what is left to chance.
    """
    chance = random.Random(seed)
    common = Chain(itertools.count(), block_size)
    common.grow(num_common * block_size)
    chains = [common.fork() for _ in range(num_agents)]
    requests = []
    for turn, agent in itertools.product(range(num_rounds), range(num_agents)):
        name = f"agent-{agent}"
        said = Announcement(name, None if turn == num_rounds - 1 else num_agents)
        num_new = chance.randint(*growth) * block_size
        time_s = float(turn * num_agents + agent)
        requests.append(chains[agent].turn(name, time_s, num_new, announced=(said,)))
    return Trace(tuple(requests), block_size)


def beam(
    *,
    width: int = 4,
    num_children: int = 3,
    depth: int = 8,
    num_searches: int = 4,
    num_root: int = 40,
    growth: tuple[int, int] = (2, 6),
    block_size: int = 16,
    seed: int = 0,
) -> Trace:
    """Return beam searches side by side, which take turns at each level.

    Each level, every branch of a beam forks into children; the best of them go on, and the search says that the others
    are done.

    Args:
        width: Branches that go on at each level.
        num_children: Forks of each.
        depth: Levels.
        num_searches: Searches side by side.
        num_root: Blocks of each search's prompt.
        growth: Blocks that a child appends: at least, at most.
        block_size: Tokens of a block.
        seed: Of what is left to chance.
    """
    chance = random.Random(seed)
    numbers = itertools.count()
    beams: list[dict[str, Chain]] = [{f"search-{index}": Chain(numbers, block_size)} for index in range(num_searches)]
    for index, chains in enumerate(beams):
        chains[f"search-{index}"].grow(num_root * block_size)
    requests: list[Request] = []
    for level, index in itertools.product(range(depth), range(num_searches)):
        children: dict[str, Chain] = {}
        for (name, chain), child in itertools.product(beams[index].items(), range(num_children)):
            children[f"{name}/{child}"] = chain.fork()
            num_new = chance.randint(*growth) * block_size
            requests.append(children[f"{name}/{child}"].turn(f"{name}/{child}", float(len(requests)), num_new))
        is_last = level == depth - 1
        best = set() if is_last else set(chance.sample(sorted(children), min(width, len(children))))
        beams[index] = {name: chain for name, chain in children.items() if name in best}
        others = (num_searches - 1) * width * num_children
        said = [Announcement(name, others if name in best else None) for name in children]
        requests[-1] = dataclasses.replace(requests[-1], announced=tuple(said))
    return Trace(tuple(requests), block_size)
