"""Replay a trace over tiers: who has each block, what moves, what is computed again.

A turn needs its whole prompt on the first tier. What is there is a hit; what a lower tier has is loaded and stays there
as a copy; from the first block that no tier has, everything is computed. What has to leave a tier sinks to the next
unless that has a copy, and what leaves the last tier is lost. Counts blocks only: bytes and seconds are `report`'s.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agentmem.errors import InvalidInputError
from agentmem.simulation.forest import Forest
from agentmem.simulation.hinted import Hinted
from agentmem.simulation.level import Level
from agentmem.simulation.trace import Request, Trace
from agentmem.tiers.hints import Hints
from agentmem.tiers.policies import POLICIES, Policy

HINTED = "hints"
"""The policy that goes by what branches say of their next use."""

NAMES = (*POLICIES, HINTED)
"""Every policy's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What happened to the blocks of all prompts. Tiers are counted from 0, the nearest.

    Attributes:
        num_asked: Blocks of prompts, each as often as it was asked for.
        num_new: Those that nobody had computed before.
        num_lost: Those that were computed before, and again because no tier had them.
        hits: For each tier, the blocks that it was the nearest to have.
        num_loads: For each tier, the turns that loaded from it.
        sunk: For each tier, the blocks that sank into it from the one above.
        num_dropped: Blocks that left the last tier.
    """

    num_asked: int
    num_new: int
    num_lost: int
    hits: tuple[int, ...]
    num_loads: tuple[int, ...]
    sunk: tuple[int, ...]
    num_dropped: int


def simulate(trace: Trace, capacities: Sequence[int], policy: str = "lru") -> Counts:
    """Return what happens to the blocks of `trace` on tiers of so many blocks, the nearest first.

    Raises:
        InvalidInputError: There is no tier, one holds no block, the policy is not known, or it goes by hints and the
            trace has none.
    """
    if not capacities or min(capacities) < 1:
        raise InvalidInputError(f"tiers of {list(capacities)} blocks: there must be one at least, and each holds one")
    if policy not in NAMES:
        raise InvalidInputError(f"policy {policy!r} is not known; there are {', '.join(NAMES)}")
    if policy == HINTED and not trace.has_hints:
        raise InvalidInputError(f"the trace says nothing of next uses, so {HINTED!r} has nothing to go by; try lru")
    replay = _Replay(capacities, policy)
    for request in trace.requests:
        replay.run(request)
    return replay.counts(len(capacities))


class _Replay:
    """The tiers at one moment of a trace, and what was counted so far."""

    def __init__(self, capacities: Sequence[int], policy: str) -> None:
        self._now_s = 0.0
        self._forest = Forest()
        self._hints: Hints[str] = Hints(clock=lambda: self._now_s)
        self._levels = [Level(capacity, self._policy(policy, capacity)) for capacity in capacities]
        self._computed: set[int] = set()
        self._num_asked = self._num_new = self._num_lost = self._num_dropped = 0
        self._hits: Counter[int] = Counter()
        self._num_loads: Counter[int] = Counter()
        self._sunk: Counter[int] = Counter()

    def run(self, request: Request) -> None:
        """Replay one turn."""
        self._now_s = request.time_s
        self._hints.use(request.branch)
        self._forest.grow(request.branch, request.blocks)
        self._count(request.blocks[: request.num_prompt])
        self._computed.update(request.blocks)
        self._hold(request.blocks)
        self._listen(request)

    def _listen(self, request: Request) -> None:
        """Note what is known after a turn."""
        if request.tool is not None:
            self._hints.start_call(request.branch, request.tool)
        for said in request.announced:
            if said.steps is None:
                self._hints.forget(said.branch)
                self._forest.end(said.branch)
            else:
                self._hints.hint(said.branch, steps=said.steps)

    def counts(self, num_levels: int) -> Counts:
        """Return what was counted."""
        hits, num_loads, sunk = (
            tuple(found[level] for level in range(num_levels)) for found in (self._hits, self._num_loads, self._sunk)
        )
        return Counts(
            num_asked=self._num_asked,
            num_new=self._num_new,
            num_lost=self._num_lost,
            hits=hits,
            num_loads=num_loads,
            sunk=sunk,
            num_dropped=self._num_dropped,
        )

    def _policy(self, policy: str, capacity: int) -> Policy[int]:
        return Hinted(self._forest, self._hints) if policy == HINTED else POLICIES[policy](capacity)

    def _count(self, prompt: Sequence[int]) -> None:
        """Count who has each block of a prompt, and let those tiers know that it is used."""
        found: dict[int, list[int]] = {}
        for index, block in enumerate(prompt):
            level = self._nearest(block)
            if level is None:
                num_known = sum(block in self._computed for block in prompt[index:])
                self._num_lost += num_known
                self._num_new += len(prompt) - index - num_known
                break
            found.setdefault(level, []).append(block)
        self._num_asked += len(prompt)
        for level, blocks in found.items():
            self._hits[level] += len(blocks)
            self._num_loads[level] += level > 0
            if level > 0:
                self._levels[level].touch(blocks)

    def _nearest(self, block: int) -> int | None:
        return next((index for index, level in enumerate(self._levels) if block in level), None)

    def _hold(self, blocks: Sequence[int]) -> None:
        """Bring blocks to the first tier; what leaves a tier for them sinks."""
        for index, level in enumerate(self._levels):
            num_came, left = level.hold(blocks)
            self._sunk[index] += num_came if index else 0
            blocks = left[::-1]
        self._num_dropped += len(blocks)
