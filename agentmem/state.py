"""Tokens, and the KV that is their cache. Here the metadata plane and the data plane meet the model.

A state knows which of its tokens the model was fed, where their KV is, and how to get it back or, failing that, to
compute it again. It knows nothing of names, records and transactions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from agentmem.errors import InvalidInputError
from agentmem.feed import BranchFeed
from agentmem.marks import Mark, MarkKind, Marks, media_start
from agentmem.operation import Operation
from agentmem.racing import PREFILL, Racing
from agentmem.reasons import Reason
from agentmem.tiers.layerstream import LoadFailed

T = TypeVar("T")

_ROOM = 256
"""Tokens that a generation has room for when it begins, at most: it may end long before `max_new_tokens`."""


_MEASURED_TOKENS = 64
"""Tokens of a pass from which on it says how fast the model is."""


class BranchState(Racing):
    """Tokens and KV of a branch, and the model that continues them."""

    def append(self, tokens: Sequence[int], inputs: Mapping[str, object]) -> None:
        """Add tokens at the end, with the model inputs that some of them stand for.

        Raises:
            InvalidInputError: The model takes no such inputs there, or they cannot be stored.
        """
        start = len(self.tokens)
        marks = self._mark(tokens, inputs, start)
        if any(mark.kind is MarkKind.ENCODER for mark in marks):
            self.marks, self.root = (), None  # of a branch that was emptied: other inputs take their place
        self.extend(tokens, marks)
        self.note_point()

    def inputs(self, mark: Mark) -> dict[str, object]:
        """Return the model inputs behind a mark (see `agentmem.adapter.Feed.inputs`)."""
        return self._runtime.media.load(mark)

    def forward(self, tokens: Sequence[int]) -> Tensor:
        """Feed what is pending and then `tokens`; return the logits `[len(tokens), V]` of the latter.

        With no tokens, return the logits `[1, V]` of the last token, which feeds at most that one again; a model with
        layer states is fed from the nearest one before it.
        """
        with Operation(self, "forward", is_undone=True) as report:
            self.enter_regime(len(self.tokens) + len(tokens))
            return self._overlapped(report, lambda num_next: self._forward(report, tokens, num_next), len(tokens))

    def generate(self, options: dict[str, object], with_room: Callable[[Callable[[], None]], None]) -> list[int]:
        """Continue the branch with the framework's generation; return the new ids as sampled.

        The last one, which the model was not fed, is pending afterwards.

        Args:
            options: The framework's.
            with_room: Does what is given to it, again when there was no room on the device and then is.
        """
        adapter = self._runtime.adapter
        with Operation(self, "generate", is_undone=True) as report:
            with_room(lambda: self._begin_to_generate(report, options))
            prompt = self.tokens.slice()
            feed = BranchFeed(self, is_again=not self.num_pending)
            try:
                sampled = adapter.generate(feed, prompt, options)
            finally:
                feed.close()
            self.tokens.extend(sampled[len(self.tokens) - len(prompt) :])
            return sampled

    def feed(self, tokens: Sequence[int], num_logits: int) -> Tensor:
        """Feed tokens, those that are pending first; return the logits `[num_logits, V]` of the last ones."""
        border = len(tokens) - max(num_logits, 1)
        return self._feed(list(tokens[:border]), list(tokens[border:]))

    def last_logits(self) -> Tensor:
        """Return the logits `[1, V]` of the last token, which is fed again; nothing is pending."""
        return self._feed_last_again()

    def compute(self, *, keep: int) -> None:
        """Feed pending tokens, all but the last `keep`, in passes of at most `prefill_chunk_tokens`."""
        stop = media_start(self.marks, max(len(self.tokens) - keep, 0))
        if stop > self.num_computed:
            self._feed(self.tokens.slice(self.num_computed, stop), [])

    def make_hot(self, operation: str) -> None:
        """Bring the branch's KV onto the device and report it as `operation`. Computes nothing."""
        with Operation(self, operation) as report:
            report.note_load(self.restore())

    def is_settled(self, *, keep: int) -> bool:
        """Say whether all pending tokens but the last `keep` have their KV, all of it saved or on the device."""
        is_tail_saved = self.tail is not None and self.tail.stop == self.num_kv
        is_at_border = self.num_kv == len(self.blocks) * self.spec.block_size
        regime = self._runtime.adapter.regime(max(self.num_computed, len(self.tokens) - keep))
        is_computed = self.num_pending <= keep and self.num_kv == self.num_computed and regime == self.regime
        return is_computed and (self.is_hot or is_tail_saved or is_at_border)

    def settle(self, *, keep: int) -> None:
        """Give all pending tokens but the last `keep` their KV: reuse what is stored, compute the rest."""
        if self.is_settled(keep=keep):
            return
        with Operation(self, "checkpoint") as report:
            self.enter_regime(max(self.num_computed, len(self.tokens) - keep))
            report.note_load(self.restore())
            report.note_load(self.reuse_pending(keep=keep))
            self.compute(keep=keep)

    def enter_regime(self, num_tokens: int) -> None:
        """Make ready to compute up to `num_tokens` tokens: KV in another rotary regime than theirs is of no use."""
        regime = self._runtime.adapter.regime(num_tokens)
        self.foreseen = num_tokens
        if regime != self.regime:
            self.drop_kv(Reason.REGIME)
            self.regime = regime
            self.note_point()

    def grow_to(self, num_tokens: int) -> None:
        """Make ready for a pass that ends at `num_tokens` tokens, in the middle of an operation.

        Where a rotary regime ends that no one foresaw, the tokens before the pass are computed again in the next one.
        """
        if num_tokens > self.foreseen and self._runtime.adapter.regime(num_tokens) != self.regime:
            position = self.num_computed
            self.enter_regime(num_tokens)
            self.restore()
            self.reuse_pending(keep=len(self.tokens) - position)
            if self.num_computed < position:
                self._feed(self.tokens.slice(self.num_computed, position), [])

    def unfeed(self, num_tokens: int) -> None:
        """Take the last computed tokens back.

        Raises:
            InvalidInputError: The layer state before them is not kept.
        """
        position = self.num_computed - num_tokens
        if self.reach(position) != position:
            raise InvalidInputError(
                f"branch {self.name!r}: {num_tokens:,} tokens can't be taken back in the middle of a pass, for the "
                f"model's layer state at {position:,} is not kept; fork before, or use branch.rewind"
            )
        self.foreseen = position
        self.truncate(position)

    # -- inside

    def _forward(self, report: Operation, tokens: Sequence[int], num_next: int) -> Tensor:
        report.note_load(self.restore(num_next=num_next))
        if not tokens and not self.num_pending:
            return self._feed_last_again()
        report.note_load(self.reuse_pending(keep=0 if tokens else 1))
        return self._feed(self.pending, list(tokens))

    def _overlapped(self, report: Operation, work: Callable[[int], T], num_more: int) -> T:
        """Do work that restores the branch and feeds what is pending and `num_more` tokens, maybe at the same time.

        `work` is told how many tokens it feeds. Should a load fail that a pass was waiting for, it is done again, one
        after the other: that finds out what cannot be had.
        """
        try:
            return work(self.num_pending + num_more)
        except LoadFailed:
            self.go_back()
            report.forget_loads()
            return work(0)

    def _mark(self, tokens: Sequence[int], inputs: Mapping[str, object], start: int) -> Marks:
        """Save model inputs and return the marks of the tokens that stand for them, which begin at `start`."""
        adapter = self._runtime.adapter
        spans = adapter.media_spans(tokens, inputs, start)
        if not spans:
            return ()
        digest = adapter.media_digest(inputs)
        payload, described = self._runtime.media.save(digest, inputs)
        return tuple(
            Mark(
                kind=kind,
                start=first if kind is MarkKind.ENCODER else start + first,
                stop=stop if kind is MarkKind.ENCODER else start + stop,
                digest=digest,
                payload=payload,
                inputs=described,
            )
            for kind, first, stop in spans
        )

    def _feed(self, pending: list[int], tokens: list[int]) -> Tensor:
        """Feed `pending` and then `tokens`, in passes; return logits `[max(len(tokens), 1), V]` of the last ones."""
        adapter = self._runtime.adapter
        todo = pending + tokens
        num_logits = max(len(tokens), 1)
        kept: list[Tensor] = []
        feed = BranchFeed(self)
        first = 0
        try:
            while first < len(todo):
                stop = self._pass_stop(self.num_computed, self.num_computed + len(todo) - first)
                chunk = todo[first : first + stop - self.num_computed]
                wanted = min(len(chunk), num_logits - (len(todo) - first - len(chunk)))
                is_telling = len(chunk) >= _MEASURED_TOKENS and self.stream is None  # which a pass may wait for
                with self._runtime.blocks.lower.rates.measuring(PREFILL) as measured:
                    logits = adapter.forward(feed, chunk, num_logits=max(wanted, 1))
                    measured.add(len(chunk) if is_telling else 0)
                first += len(chunk)
                if wanted > 0:
                    kept.append(logits)
        finally:
            feed.close()
        return kept[0] if len(kept) == 1 else torch.cat(kept)

    def _begin_to_generate(self, report: Operation, options: Mapping[str, object]) -> None:
        """Bring the branch onto the device and feed what is pending, as far as generation does not; make room."""
        report.forget_loads()
        self.enter_regime(len(self.tokens))
        report.note_load(self.restore())
        report.note_load(self.reuse_pending(keep=1))
        if not self.num_pending and not self._can_repeat_last():
            self.step_back(self.num_computed - 1)
            report.note_load(self.restore())
        self.compute(keep=1 if self._runtime.adapter.is_stepwise else self._left_to_generate())
        num_new = options.get("max_new_tokens")
        if isinstance(num_new, int):  # now, when nothing was sampled yet and there may be waiting for room
            self._workspace.begin(self.cursor, self.num_pending + min(num_new, _ROOM))

    def _left_to_generate(self) -> int:
        """Return how many pending tokens the framework's generation may feed itself: those after the last border."""
        last = max(self.borders, default=0)
        return max(1, min(self._runtime.config.prefill_chunk_tokens, len(self.tokens) - last))

    def _pass_stop(self, start: int, stop: int) -> int:
        """Return where the pass that begins at `start` ends: it cuts no media, and ends where a state is to be kept."""
        if not start and self._runtime.adapter.is_stepwise:
            return stop  # whatever is left over would be fed one token at a time
        limit = min(start + self._runtime.config.prefill_chunk_tokens, stop)
        limit = min((position for position in self.borders if start < position <= limit), default=limit)
        before = media_start(self.marks, limit)
        if before > start:
            return before
        mark = self.media_at(start)
        return max(mark.stop, limit) if mark is not None and before < limit else limit

    def _can_repeat_last(self) -> bool:
        """Tell whether the last token can be fed again alone: not on top of a layer state, nor as a part of media."""
        last = self.num_computed - 1
        return not self.spec.states and media_start(self.marks, last) == last

    def _feed_last_again(self) -> Tensor:
        self.check_not_empty()
        if not self._can_repeat_last():
            self.step_back(self.num_computed - 1)
            self.restore()
            return self._feed(self.pending, [])
        feed = BranchFeed(self, is_again=True)
        try:
            return self._runtime.adapter.forward(feed, [self.tokens[-1]], num_logits=1)
        finally:
            feed.close()
