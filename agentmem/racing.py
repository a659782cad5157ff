"""Bringing back KV that is far away: loaded, computed again, or both at once, whichever is faster.

What is here or on the local disk is always loaded: that is faster than any model computes.
"""

import dataclasses
from abc import abstractmethod

from torch import Tensor

from agentmem.choosing import Choice, Way, choose
from agentmem.marks import MarkKind
from agentmem.reasons import Reason
from agentmem.restoring import Restoring
from agentmem.tiers.backward import BackwardLoad
from agentmem.tiers.blocks import Loaded, SealedBlock

_RACE_TOKENS = 256
"""Tokens that are computed at a time while others are loaded: enough for the model to be fast."""

_HEAD_START_S = 0.03
"""How long a load may go on alone: a fast one is done by then, and nothing was computed for nothing."""

PREFILL = "prefill"
"""What the rate of the model is called, in tokens per second."""

Missing = list[tuple[SealedBlock, int, int]]
"""What to load: blocks, and the positions to fill from each."""


class Racing(Restoring):
    """A prefix that is brought onto the device in the fastest way."""

    @abstractmethod
    def _feed(self, pending: list[int], tokens: list[int]) -> Tensor:
        """Feed `pending` and then `tokens`."""

    def note_point(self) -> None:
        """Note that the branch is whole as it is; not while KV is on its way that nobody has verified yet."""
        if self.stream is None:
            super().note_point()

    def settle_stream(self) -> None:
        """Wait until KV that is on its way is there, and verified.

        Raises:
            LoadFailed: It will not be.
        """
        if self.stream is not None:
            self.stream.finish()
            nbytes = self.stream.num_tokens * self.spec.token_nbytes
            self._runtime.counters.add(f"{self.stream.tier.name}_to_device_nbytes", nbytes)
            self._runtime.counters.add("tokens_restored", self.stream.num_tokens)
            self.stream = None

    def go_back(self) -> None:
        """Go back to where the branch was whole last; what is on its way is not waited for."""
        if self.stream is not None:
            self.stream.stop()
        super().go_back()

    def _bring(self, wanted: Missing, num_tokens: int, num_next: int) -> Loaded:
        """Bring the blocks right after the cursor onto the device: those near by load, the others as is fastest."""
        first, tiers = self._first_far(wanted)
        near, far = wanted[:first], wanted[first:]
        if not far:
            return self._load(wanted, num_tokens)
        choice = self._choose(far, tiers[first:], num_next)
        self._runtime.counters.add(f"tokens_far_{choice.way}", choice.num_tokens)
        loaded = self._load(near, far[0][1] - self.cursor.length) if near else Loaded()
        if loaded.reason is Reason.COMPLETE:
            loaded = self._bring_far(far, tiers[first], choice.way, loaded, num_next)
        loaded.choice = choice
        return loaded

    def _worth(self, wanted: Missing) -> tuple[int, Choice | None]:
        """Return how many of the first blocks are loaded sooner than they are computed, and after which estimates."""
        first, tiers = self._first_far(wanted)
        if first == len(wanted):
            return first, None
        choice = self._choose(wanted[first:], tiers[first:], 0)
        is_slow = choice.load_s is not None and choice.compute_s is not None and choice.load_s > choice.compute_s
        choice = dataclasses.replace(choice, way=Way.COMPUTE if is_slow else Way.LOAD)
        self._runtime.counters.add(f"tokens_far_{choice.way}", choice.num_tokens)
        return first if is_slow else len(wanted), choice

    def _first_far(self, wanted: Missing) -> tuple[int, list[str]]:
        """Return the index of the first block that is in a lower tier, and where they all are; no index: none is."""
        lower = self._runtime.blocks.lower
        if not lower.tiers:
            return len(wanted), []
        tiers = self._runtime.blocks.whereabouts([block for block, _, _ in wanted])
        return next((index for index, tier in enumerate(tiers) if tier in lower.names), len(wanted)), tiers

    def _bring_far(self, far: Missing, tier: str, way: Way, loaded: Loaded, num_next: int) -> Loaded:
        """Add to `loaded` what comes of the far blocks."""
        if way is Way.RACE:
            self._race(far, loaded)
        elif way is Way.COMPUTE:
            loaded.reason = Reason.FASTER
        elif way is Way.LOAD or not self._begin_stream(far, tier, loaded, num_next):
            loaded.add(self._load(far, far[-1][2] - far[0][1]))
        return loaded

    def _choose(self, far: Missing, tiers: list[str], num_next: int) -> Choice:
        """Compare the time that loading takes with the time that computing takes."""
        lower, load_s, is_known = self._runtime.blocks.lower, 0.0, True
        for (_, start, stop), tier in zip(far, tiers, strict=True):
            rate = lower.rates.get(tier)
            is_known = is_known and (rate is not None or tier not in lower.names)
            load_s += (stop - start) * self.spec.token_nbytes / rate if rate else 0.0
        num_tokens, prefill = far[-1][2] - far[0][1], lower.rates.get(PREFILL)
        return choose(
            num_tokens,
            load_s if is_known else None,
            num_tokens / prefill if prefill else None,
            num_next / prefill if prefill else 0.0,
            can_race=self._can_race(far) and not lower.lossy.keys() & set(tiers),
            can_overlap=num_next > 0 and set(tiers) == {tiers[0]} and tiers[0] in lower.layered,
        )

    def _begin_stream(self, far: Missing, tier: str, loaded: Loaded, num_next: int) -> bool:
        """Begin to load the far blocks layer by layer, and go on as if they were there; say whether that is possible.

        Until the pass that waits for them is kept, whoever fails goes back to before. There is room for the next tokens
        now: the buffer must not be another one before all has come.
        """
        start, stop = far[0][1], far[-1][2]
        self.note_point()
        self._workspace.begin(self.cursor, stop - start + num_next)
        self._workspace.order.note()
        self.stream = self._runtime.blocks.stream(tier, [self._want(*each) for each in far])
        if self.stream is None:
            return False
        self._workspace.commit(self.cursor, stop - start)
        loaded.count(tier, stop - start, self.spec.token_nbytes)
        return True

    def _can_race(self, far: Missing) -> bool:
        """Say whether tokens may be computed while those behind them load: the model is fed nothing but tokens."""
        is_plain = all(mark.kind is MarkKind.SPLICE and mark.stop <= far[0][1] for mark in self.marks)
        is_whole = far[0][1] % self.spec.block_size == 0 and far[0][0].start == far[0][1]
        return is_plain and is_whole and not self.spec.states and self.num_computed == self.num_kv

    def _race(self, far: Missing, loaded: Loaded) -> None:
        """Compute the far blocks from the front and load them from the back, until the two meet."""
        start, stop, has_tail = far[0][1], far[-1][2], far[-1][0] is self.tail
        self._workspace.begin(self.cursor, stop - start)
        wants = [self._want(*each) for each in far]
        self._workspace.order.note()
        self._forget_from(start)
        load = self._runtime.blocks.load_backward(wants)
        try:
            index = self._compute_up_to(load, far)
        finally:
            load.stop()
        self._workspace.order.follow()
        if index < len(far):
            self._join(load.blocks, stop - far[index][1], has_tail=has_tail)
        loaded.num_equivalent += load.num_equivalent
        for tier, num_tokens in load.from_tier.items():
            loaded.count(tier, num_tokens, self.spec.token_nbytes)
            self._runtime.counters.add(f"{tier}_to_device_nbytes", num_tokens * self.spec.token_nbytes)
        if load.reason is not Reason.COMPLETE:
            self.loss, self.lost_stop = load.reason, max(self.lost_stop, stop)

    def _compute_up_to(self, load: BackwardLoad, far: Missing) -> int:
        """Compute blocks from the front on until the rest is loaded; return the index of the first loaded one."""
        index, per_pass = 0, 1  # at first one block: nobody knows yet how fast the load is
        load.wait(_HEAD_START_S)
        while index < load.num_left:
            stop = load.claim(index, per_pass)
            per_pass = min(2 * per_pass, max(1, _RACE_TOKENS // self.spec.block_size))
            if stop == index:  # all that is left is under way: it has as long as computing it takes
                prefill = self._runtime.blocks.lower.rates.get(PREFILL)
                num_tokens = far[load.num_left - 1][2] - far[index][1]
                load.wait(num_tokens / prefill if prefill else 0.0)
                load.stop()
                stop = load.num_left
            if stop > index:
                self._feed(self.tokens.slice(far[index][1], far[stop - 1][2]), [])
            index = stop
        return index

    def _forget_from(self, start: int) -> None:
        """Be a branch whose KV ends at `start`, until the race is over."""
        self.num_kv = self.num_computed = start
        self.blocks.truncate(start // self.spec.block_size)
        self.tail = None
        self.note_point()

    def _join(self, blocks: list[SealedBlock], num_tokens: int, *, has_tail: bool) -> None:
        """Take over the blocks that were loaded behind the computed ones; the last one may be the tail."""
        self._workspace.commit(self.cursor, num_tokens)
        self.blocks.extend(blocks[:-1] if has_tail else blocks)
        self.tail = blocks[-1] if has_tail else None
        self.num_kv = self.num_computed = self.cursor.length
        self.note_point()
        self._runtime.counters.add("tokens_restored", num_tokens)
