"""Feeds several branches: together where the model can, one after the other where it cannot.

Between two passes the branches are as any other: a branch that moved by other hands, or whose KV was moved, is looked
up again before the next pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentmem.batch.report import BatchReport
from agentmem.batching import BatchMode, RowsPass
from agentmem.feed import BranchFeed
from agentmem.marks import MarkKind
from agentmem.runtime import Runtime
from agentmem.state import BranchState
from agentmem.tiers.device import Workspace
from agentmem.tiers.frontier import Frontier
from agentmem.tiers.plan import Place, order_of
from agentmem.tiers.runs import Cursor

MIN_SHARE = 0.75
"""Rows that only come along cost as much as those that are fed: with fewer of the latter, the others leave."""


@dataclass(frozen=True, slots=True)
class _Last:
    """The logits after a branch's last token, and where it stood."""

    state: BranchState
    num_computed: int
    num_rewinds: int
    logits: Tensor


class Feeder:
    """Feeds branches, and keeps the frontier on which they stand between two passes. Not thread-safe."""

    def __init__(self, runtime: Runtime) -> None:
        """Feed branches of one store."""
        self._runtime = runtime
        self._model = runtime.adapter.batch_model()
        self._frontier: Frontier | None = None
        self._members: list[BranchState] = []
        self._last: dict[int, _Last] = {}
        self._num_expected = 0
        self._num_rows = 0
        self._num_passes = 0
        self._num_fed = 0

    @property
    def mode(self) -> BatchMode:
        """How the model feeds several branches."""
        return self._model.mode

    def feed(
        self, states: Sequence[BranchState], tokens: Sequence[Sequence[int]], num_logits: Sequence[int]
    ) -> list[Tensor]:
        """Feed each of `states` its tokens, the pending ones first; their KV is on the device.

        A pass that fails leaves all branches as they were before it.

        Returns:
            The logits `[num_logits, V]` of each one's last tokens.

        Raises:
            CapacityError: The rows do not fit the device budget.
        """
        try:
            return self._feed(states, tokens, num_logits)
        except BaseException:
            self._frontier = None  # half of it may stand in a new buffer; every branch has its KV, wherever it is
            raise

    def last_logits(self, state: BranchState) -> Tensor | None:
        """Return the logits `[V]` after a branch's last token, if that was fed here last and nothing came since."""
        last = self._last.get(id(state))
        is_same = last is not None and (last.num_computed, last.num_rewinds) == (state.num_computed, state.num_rewinds)
        return last.logits if last is not None and is_same and not state.num_pending else None

    def expect(self, num_tokens: object) -> None:
        """Make room, when rows are made next, for so many tokens in each; for few when it is no number."""
        self._num_expected = num_tokens if isinstance(num_tokens, int) else 0

    def report(self, states: Sequence[BranchState]) -> BatchReport:
        """Return what was done, and what `states` take on the device."""
        frontier, spec = self._frontier, self._runtime.adapter.spec
        num_tokens = sum(state.num_kv for state in states)
        return BatchReport(
            mode=self._model.mode,
            reason=self._model.reason,
            why=self._model.why,
            num_rows=self._num_rows,
            num_passes=self._num_passes,
            num_fed=self._num_fed,
            num_shared=0 if frontier is None else frontier.num_shared,
            num_copied=0 if frontier is None else frontier.num_copied,
            kv_nbytes=num_tokens * spec.token_nbytes if frontier is None else frontier.nbytes,
            stock_nbytes=num_tokens * spec.token_nbytes,
        )

    def close(self) -> None:
        """Leave every branch what it was fed, where it is."""
        if self._frontier is not None:
            self._frontier.settle_rows()
        self._frontier, self._members, self._last = None, [], {}

    # -- inside

    def _feed(
        self, states: Sequence[BranchState], tokens: Sequence[Sequence[int]], num_logits: Sequence[int]
    ) -> list[Tensor]:
        kept: list[list[Tensor]] = [[] for _ in states]
        fed = [0] * len(states)
        for index, state in enumerate(states):
            if _has_new_media(state):  # whose tokens no pass may cut
                kept[index].append(self._alone(state, list(tokens[index]), num_logits[index]))
                fed[index] = len(tokens[index])
        while any(done < len(todo) for done, todo in zip(fed, tokens, strict=True)):
            step = self._step(states, [len(todo) - done for done, todo in zip(fed, tokens, strict=True)])
            parts = [list(todo[done : done + step]) for done, todo in zip(fed, tokens, strict=True)]
            wanted = [
                max(min(len(part), count - (len(todo) - done - len(part))), 0)
                for part, todo, done, count in zip(parts, tokens, fed, num_logits, strict=True)
            ]
            for logits, new in zip(kept, self._pass(states, parts, wanted), strict=True):
                logits.extend([new] if new.shape[0] else [])
            fed = [done + len(part) for done, part in zip(fed, parts, strict=True)]
        found = [logits[0] if len(logits) == 1 else torch.cat(logits) for logits in kept]
        for state, rows in zip(states, found, strict=True):
            self._last[id(state)] = _Last(state, state.num_computed, state.num_rewinds, rows[-1].clone())
        return found

    def _step(self, states: Sequence[BranchState], left: Sequence[int]) -> int:
        """Return how many tokens to feed each branch in the next pass, at most."""
        limit = max(self._runtime.config.prefill_chunk_tokens // max(len(states), 1), 1)
        if not self._runtime.adapter.spec.states:
            return limit
        return min(limit, min(count for count in left if count))  # no filling: until the first has all of its tokens

    def _pass(
        self, states: Sequence[BranchState], tokens: Sequence[list[int]], num_logits: Sequence[int]
    ) -> list[Tensor]:
        """Feed one pass's tokens, in one pass if that can be."""
        busy = [index for index, part in enumerate(tokens) if part]
        chosen = [(states[index], tokens[index], num_logits[index]) for index in busy]
        if self._can_join([state for state, _, _ in chosen], [part for _, part, _ in chosen]):
            found = self._together(*(list(column) for column in zip(*chosen, strict=True)))
        else:
            found = [self._alone(*each) for each in chosen]
        by_index = dict(zip(busy, found, strict=True))
        empty = found[0][:0]
        return [by_index.get(index, empty) for index in range(len(states))]

    def _can_join(self, states: Sequence[BranchState], tokens: Sequence[Sequence[int]]) -> bool:
        """Say whether the branches can be fed in one pass."""
        if len(states) < 2 or not self._model.takes([len(part) for part in tokens]):
            return False
        if len({state.live is None for state in states}) > 1 or any(
            state.num_kv > state.num_computed for state in states
        ):
            return False
        regimes = {
            self._runtime.adapter.regime(state.num_computed + len(part))
            for state, part in zip(states, tokens, strict=True)
        }
        return len(regimes | {state.regime for state in states}) == 1

    def _alone(self, state: BranchState, tokens: list[int], num_logits: int) -> Tensor:
        logits = state.feed(tokens, num_logits)
        self._count(1, len(tokens))
        return logits[len(logits) - num_logits :]

    def _together(
        self, states: Sequence[BranchState], tokens: Sequence[list[int]], num_logits: Sequence[int]
    ) -> list[Tensor]:
        # Before they are allocated: what each branch is left with, and what the pass works on, stacked.
        rooms, scratch = [state.claim_state() for state in states], self._runtime.states.claim(2 * len(states))
        frontier = self._stand(states)
        places = [_index(self._members, state) for state in states]
        rows: list[tuple[list[int], int]] = [([], 0)] * len(self._members)
        for place, part, count in zip(places, tokens, num_logits, strict=True):
            rows[place] = part, count
        frontier.reserve(max(len(part) for part in tokens))
        feeds = [BranchFeed(state) for state in self._members]
        result = self._model.run(
            RowsPass(
                texts=feeds,
                tokens=[part for part, _ in rows],
                lengths=[row.length for row in frontier.rows],
                firsts=[row.first for row in frontier.rows],
                stops=[row.stop for row in frontier.rows],
                layers=frontier.layers,
                shared=frontier.shared,
                states=self._stacked_states(),
                num_logits=[count for _, count in rows],
            )
        )
        left = [
            state.hold(len(part), [each[place : place + 1].clone() for each in result.states], room)
            for place, state, part, room in zip(places, states, tokens, rooms, strict=True)
        ]
        del scratch
        for place, state, part, layer_state in zip(places, states, tokens, left, strict=True):
            frontier.commit(place, len(part))
            state.fed(part, layer_state)
        self._count(len(states), sum(len(part) for part in tokens))
        return [result.logits[place] for place in places]

    def _count(self, num_rows: int, num_tokens: int) -> None:
        self._num_rows = num_rows
        self._num_passes += 1
        self._num_fed += num_tokens

    def _stacked_states(self) -> list[Tensor] | None:
        """Return the layer states of all rows, `[N, ...]` each; None when there are none."""
        found = [state.tensors(state.live) for state in self._members if state.live is not None]
        return [torch.cat(tensors) for tensors in zip(*found, strict=True)] if found else None

    def _stand(self, states: Sequence[BranchState]) -> Frontier:
        """Return a frontier on which all of `states` stand, and not many others."""
        frontier = self._frontier
        is_known = all(any(state is member for member in self._members) for state in states)
        share = 1.0 if self._runtime.adapter.spec.states else MIN_SHARE  # a state takes no filling
        is_lean = len(states) >= share * len(self._members)
        if (
            frontier is not None
            and is_known
            and is_lean
            and frontier.is_current([each.cursor for each in self._members])
        ):
            return frontier
        return self._rebuild(states)

    def _rebuild(self, states: Sequence[BranchState]) -> Frontier:
        aliases = _aliases(states)
        places = [Place(state.workspace, state.cursor, alias) for state, alias in zip(states, aliases, strict=True)]
        order = order_of(places)
        self._frontier = Frontier(
            self._runtime.device,
            [places[index] for index in order],
            num_private=self._num_private(states),
            is_worth_sharing=self._model.is_worth_sharing,
            num_new=self._num_expected,
            replaces=self._frontier,
        )
        self._members = [states[index] for index in order]
        return self._frontier

    def _num_private(self, states: Sequence[BranchState]) -> int:
        """Return how many of its last tokens each row must have: all of them where nothing can be shared."""
        if self._model.mode is BatchMode.CASCADE:
            return self._model.num_private
        return max(state.num_kv for state in states)


def _aliases(states: Sequence[BranchState]) -> list[tuple[Workspace, Cursor] | None]:
    """Return where else the first tokens of branches are: sessions that hold the same blocks share the first one's."""
    hosts = [state for state in states if state.workspace is states[0].workspace]
    return [None if state.workspace is hosts[0].workspace else _alias(state, hosts) for state in states]


def _alias(state: BranchState, hosts: Sequence[BranchState]) -> tuple[Workspace, Cursor] | None:
    counts = [_num_common(state, host) for host in hosts]
    host = hosts[max(range(len(hosts)), key=counts.__getitem__)]
    return (host.workspace, host.cursor.fork(max(counts))) if max(counts) else None


def _num_common(state: BranchState, host: BranchState) -> int:
    """Return how many leading tokens of two branches are in the very same blocks, bit for bit."""
    stop = 0
    for mine, theirs in zip(state.blocks.slice(), host.blocks.slice(), strict=False):
        is_same = mine is theirs or (mine.digest is not None and mine.digest == theirs.digest)
        if not is_same or mine.block_hash != theirs.block_hash:
            break
        stop = mine.stop
    return stop


def _has_new_media(state: BranchState) -> bool:
    """Say whether an image or the like is among the tokens that a branch was not fed yet."""
    return any(mark.kind is MarkKind.MEDIA and mark.stop > state.num_computed for mark in state.marks)


def _index(members: Sequence[BranchState], state: BranchState) -> int:
    return next(index for index, member in enumerate(members) if member is state)
