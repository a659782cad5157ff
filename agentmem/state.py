"""Tokens, and the KV that is their cache. Here the metadata plane and the data plane meet.

A state knows which of its tokens the model was fed, where their KV is, and how to get it back or, failing that, to
compute it again. It knows nothing of names, records and transactions.
"""

import contextlib
from array import array
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from agentmem.errors import InvalidInputError
from agentmem.feed import BranchFeed
from agentmem.ids import BlockHash
from agentmem.kv.hashing import chain_hash
from agentmem.kv.spec import KVSpec
from agentmem.operation import Operation
from agentmem.runtime import Runtime
from agentmem.stats import Reason, ReuseReport
from agentmem.tiers.blockstore import Loaded, SealedBlock, Want
from agentmem.tiers.device import Workspace
from agentmem.tiers.runs import Cursor
from agentmem.tree.trail import Trail


class BranchState:
    """Tokens and KV of a branch.

    The first `num_computed` tokens have KV: on the device up to `cursor.length`, beyond it in `blocks` and `tail`.

    Attributes:
        name: For messages.
        tokens: All token ids.
        blocks: The full blocks, in order.
        tail: A saved partial block from the end of `blocks` to `num_computed` or beyond; None when there is none.
        num_computed: Leading tokens whose KV exists somewhere.
        cursor: Where the KV is on the device.
        loss: Why KV that once existed is gone; COMPLETE when none is, or when it was computed again.
        lost_stop: Position up to which KV existed when it was lost.
        num_fed: Tokens the model was fed through this branch.
        num_rewinds: How often tokens were taken off; while it stays, tokens that were there are there still.
        last_report: What the last operation reused and computed.
    """

    def __init__(
        self,
        runtime: Runtime,
        workspace: Workspace,
        name: str,
        *,
        tokens: Trail[int] | None = None,
        blocks: Trail[SealedBlock] | None = None,
        tail: SealedBlock | None = None,
        num_computed: int = 0,
        cursor: Cursor | None = None,
    ) -> None:
        self.name = name
        self.tokens: Trail[int] = Trail(array("I")) if tokens is None else tokens
        self.blocks: Trail[SealedBlock] = Trail([]) if blocks is None else blocks
        self.tail = tail
        self.num_computed = num_computed
        self.cursor = Cursor(None, 0) if cursor is None else cursor
        self.loss = Reason.COMPLETE
        self.lost_stop = 0
        self.num_fed = 0
        self.num_rewinds = 0
        self.last_report = ReuseReport(operation="create", num_tokens=len(self.tokens))
        self._runtime = runtime
        self._workspace = workspace

    def fork(self, name: str) -> "BranchState":
        """Return an independent state of the same tokens and KV. Copies neither."""
        other = BranchState(
            self._runtime,
            self._workspace,
            name,
            tokens=self.tokens.fork(),
            blocks=self.blocks.fork(),
            tail=self.tail,
            num_computed=self.num_computed,
            cursor=self.cursor.fork(),
        )
        other.loss, other.lost_stop = self.loss, self.lost_stop
        return other

    @property
    def spec(self) -> KVSpec:
        """Geometry of the KV."""
        return self._runtime.adapter.spec

    @property
    def workspace(self) -> Workspace:
        """Where the KV is while the model runs."""
        return self._workspace

    @property
    def pending(self) -> list[int]:
        """Tokens that the model was not fed yet."""
        return self.tokens.slice(self.num_computed)

    @property
    def num_pending(self) -> int:
        """Tokens that the model was not fed yet."""
        return len(self.tokens) - self.num_computed

    @property
    def is_hot(self) -> bool:
        """Whether all KV of the branch is on the device."""
        return self.cursor.length >= self.num_computed

    # -- feeding ---------------------------------------------------------------------------------------------------

    def forward(self, tokens: Sequence[int]) -> Tensor:
        """Feed what is pending and then `tokens`; return the logits `[len(tokens), V]` of the latter.

        With no tokens, return the logits `[1, V]` of the last token, which feeds at most that one again.
        """
        with Operation(self, "forward") as report, self._undone_on_error():
            report.note_load(self.restore())
            if not tokens and not self.num_pending:
                return self._feed_last_again()
            report.note_load(self._reuse_pending(keep=0 if tokens else 1))
            return self._feed(self.pending, list(tokens))

    def generate(self, options: dict[str, object]) -> list[int]:
        """Continue the branch with the framework's generation; return the new ids as sampled.

        The last one, which the model was not fed, is pending afterwards.
        """
        adapter = self._runtime.adapter
        with Operation(self, "generate") as report, self._undone_on_error():
            report.note_load(self.restore())
            report.note_load(self._reuse_pending(keep=1))
            self.compute(keep=self._runtime.config.prefill_chunk_tokens)
            prompt = self.tokens.slice()
            feed = BranchFeed(self, is_again=not self.num_pending)
            try:
                sampled = adapter.generate(feed, prompt, options)
            finally:
                feed.close()
            self.tokens.extend(sampled[len(self.tokens) - len(prompt) :])
            return sampled

    def compute(self, *, keep: int) -> None:
        """Feed pending tokens, all but the last `keep`, in passes of at most `prefill_chunk_tokens`."""
        tokens = self.pending
        todo = tokens[: max(len(tokens) - keep, 0)]
        if todo:
            self._feed(todo, [])

    def make_hot(self, operation: str) -> None:
        """Bring the branch's KV onto the device and report it as `operation`. Computes nothing."""
        with Operation(self, operation) as report:
            report.note_load(self.restore())

    def adopt(self, other: "BranchState") -> None:
        """Take over KV of the same leading tokens that another branch has computed, or has on the device."""
        if len(self.tokens) >= other.num_computed > self.num_computed:
            self.blocks, self.tail, self.num_computed = other.blocks.fork(), other.tail, other.num_computed
            self.cursor = other.cursor.fork()
        self.adopt_cursor(other)

    def adopt_cursor(self, other: "BranchState") -> None:
        """Take over what another state of the same leading tokens has on the device."""
        length = min(other.cursor.length, self.num_computed)
        if length > self.cursor.length:
            self.cursor = other.cursor.fork(length)

    def cool(self) -> None:
        """Let the device forget the branch's KV; `blocks` and `tail` say how to get it back."""
        self.cursor = Cursor(None, 0)

    def settle(self, *, keep: int) -> None:
        """Give all pending tokens but the last `keep` their KV: reuse what is stored, compute the rest."""
        is_tail_saved = self.tail is not None and self.tail.stop == self.num_computed
        is_at_border = self.num_computed == len(self.blocks) * self.spec.block_size
        if self.num_pending <= keep and (self.is_hot or is_tail_saved or is_at_border):
            return
        with Operation(self, "checkpoint") as report:
            report.note_load(self.restore())
            report.note_load(self._reuse_pending(keep=keep))
            self.compute(keep=keep)

    def fed(self, tokens: Sequence[int]) -> None:
        """Note that the model was fed `tokens` and their KV is at the cursor's end."""
        num_known = self.num_pending
        self.tokens.extend(tokens[num_known:])
        self.num_computed += len(tokens)
        self.tail = None
        self.count_fed(len(tokens))
        self._seal()

    def unfeed(self, num_tokens: int) -> None:
        """Take the last computed tokens back."""
        self.truncate(self.num_computed - num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and their KV. Moves nothing."""
        self.num_rewinds += num_tokens < len(self.tokens)
        self.tokens.truncate(num_tokens)
        self.truncate_kv(num_tokens)

    def truncate_kv(self, num_tokens: int) -> None:
        """Keep the KV of the first `num_tokens` tokens at most; the other tokens become pending. Moves nothing."""
        if num_tokens >= self.num_computed:
            return
        block_size = self.spec.block_size
        num_blocks = num_tokens // block_size
        self.num_computed = num_tokens
        if len(self.blocks) > num_blocks:
            self.tail = self.blocks[num_blocks] if num_tokens % block_size else None
            self.blocks.truncate(num_blocks)
        if self.cursor.length > num_tokens:
            self.cursor = self.cursor.fork(num_tokens)

    # -- bringing KV back ------------------------------------------------------------------------------------------

    def restore(self) -> Loaded:
        """Bring the branch's KV onto the device: only what is not there already.

        What cannot be had is not computed here: it becomes pending, and `loss` says why.
        """
        have = self.cursor.length
        loaded = Loaded(from_tier={"device": have} if have else {})
        if have < self.num_computed:
            wanted = self._missing(have)
            loaded = self._load(wanted, self.num_computed - have)
            if have:
                loaded.from_tier["device"] = have
            if self.cursor.length < self.num_computed:
                self._lose(loaded.reason)
        moved = self._workspace.select(self.cursor)
        loaded.nbytes += moved * self.spec.token_nbytes
        return loaded

    def save_tail(self) -> SealedBlock | None:
        """Seal the tokens after the last full block, if they are on the device; return the partial block."""
        start = len(self.blocks) * self.spec.block_size
        is_exact = self.tail is not None and self.tail.stop == self.num_computed
        if not is_exact and start < self.num_computed <= self.cursor.length:
            block_hash = chain_hash(self._parent_hash(len(self.blocks)), self.tokens.slice(start, self.num_computed))
            blocks = self._runtime.blocks
            self.tail = blocks.seal(self._workspace, self.cursor, start, self.num_computed, block_hash)
            return self.tail
        return self.tail if is_exact else None

    def saved_blocks(self) -> list[SealedBlock]:
        """Return every block of the branch, tail included, as far as there are any."""
        return [*self.blocks.slice(), *([self.tail] if self.tail is not None else [])]

    def _missing(self, have: int) -> list[tuple[SealedBlock, int, int]]:
        """List what to load after the first `have` tokens: block, and the positions to fill from it."""
        block_size = self.spec.block_size
        blocks = self.blocks.slice(have // block_size)
        if self.tail is not None and self.tail.stop >= self.num_computed > self.tail.start:
            blocks.append(self.tail)
        return [(block, max(block.start, have), min(block.stop, self.num_computed)) for block in blocks]

    def _load(self, wanted: list[tuple[SealedBlock, int, int]], num_tokens: int) -> Loaded:
        """Load blocks right after the cursor and move it over what is good."""
        first = self._workspace.begin(self.cursor, num_tokens)
        wants = [
            Want(block=block, out=self._workspace.slots(start, stop), skip=start - block.start)
            for block, start, stop in wanted
        ]
        loaded = self._runtime.blocks.load(wants)
        if len(loaded.blocks) == len(wanted) and (not wanted or wanted[-1][2] < first + num_tokens):
            loaded.reason = Reason.MISSING
        if loaded.blocks:
            stop = wanted[len(loaded.blocks) - 1][2]
            self._workspace.commit(self.cursor, stop - first)
            self._runtime.counters.add("tokens_restored", stop - first)
            self._adopt(loaded.blocks)
        return loaded

    def _adopt(self, loaded: list[SealedBlock]) -> None:
        """Take equivalent blocks in the place of those that were gone."""
        for block in loaded:
            index = block.start // self.spec.block_size
            if block.num_tokens == self.spec.block_size and index < len(self.blocks):
                if self.blocks[index] is not block:
                    later = self.blocks.slice(index + 1)
                    self.blocks.truncate(index)
                    self.blocks.extend([block, *later])
            elif self.tail is not None and self.tail.start == block.start:
                self.tail = block

    def _lose(self, reason: Reason) -> None:
        """Accept that KV beyond the cursor is gone: its tokens become pending."""
        lost = self.num_computed - self.cursor.length
        self.loss, self.lost_stop = reason, max(self.lost_stop, self.num_computed)
        self.num_computed = self.cursor.length
        self.blocks.truncate(self.num_computed // self.spec.block_size)
        self.tail = None
        self._runtime.counters.add(f"tokens_lost_{reason.value}", lost)

    def _reuse_pending(self, *, keep: int) -> Loaded:
        """Load blocks of the pending tokens, all but the last `keep`, that somebody else computed already."""
        loaded = Loaded()
        limit = len(self.tokens) - keep
        found = self._match(limit)
        if not found or not self.is_hot:
            return loaded
        start = self.num_computed
        wanted = [(block, max(block.start, start), block.stop) for block in found]
        loaded = self._load(wanted, found[-1].stop - start)
        for block in loaded.blocks:
            self.num_computed = block.stop
            self.tail = None
            if block.start >= start:
                self.blocks.extend([block])
            else:
                self._seal()  # the first tokens of this block are the branch's own bytes: it is a block of its own
        self._runtime.counters.add("tokens_reused", self.num_computed - start)
        return loaded

    def _match(self, limit: int) -> list[SealedBlock]:
        """Return the stored blocks that continue the computed tokens, up to position `limit`."""
        block_size = self.spec.block_size
        index = self.num_computed // block_size
        parent = self._parent_hash(index)
        found: list[SealedBlock] = []
        while (index + 1) * block_size <= limit:
            start, stop = index * block_size, (index + 1) * block_size
            parent = chain_hash(parent, self.tokens.slice(start, stop))
            block = self._runtime.blocks.find(parent, start, stop)
            if block is None:
                break
            found.append(block)
            index += 1
        return found

    # -- inside ----------------------------------------------------------------------------------------------------

    def _feed(self, pending: list[int], tokens: list[int]) -> Tensor:
        """Feed `pending` and then `tokens`, in passes; return logits `[max(len(tokens), 1), V]` of the last ones."""
        adapter, size = self._runtime.adapter, self._runtime.config.prefill_chunk_tokens
        todo = pending + tokens
        num_logits = max(len(tokens), 1)
        kept: list[Tensor] = []
        feed = BranchFeed(self)
        try:
            for first in range(0, len(todo), size):
                chunk = todo[first : first + size]
                wanted = min(len(chunk), num_logits - (len(todo) - first - len(chunk)))
                logits = adapter.forward(feed, chunk, num_logits=max(wanted, 1))
                if wanted > 0:
                    kept.append(logits)
        finally:
            feed.close()
        return kept[0] if len(kept) == 1 else torch.cat(kept)

    @contextlib.contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Take new tokens back when an operation fails; what it computed of older ones is kept."""
        num_tokens = len(self.tokens)
        try:
            yield
        except BaseException:
            self.truncate(num_tokens)
            raise

    def _feed_last_again(self) -> Tensor:
        if not len(self.tokens):
            raise InvalidInputError(
                f"branch {self.name!r} has no tokens, so there is nothing to feed; append some first"
            )
        feed = BranchFeed(self, is_again=True)
        try:
            return self._runtime.adapter.forward(feed, [self.tokens[-1]], num_logits=1)
        finally:
            feed.close()

    def count_fed(self, num_tokens: int) -> None:
        """Note that the model was fed tokens through this branch."""
        self.num_fed += num_tokens
        self._runtime.counters.add("tokens_fed", num_tokens)

    def _seal(self) -> None:
        """Name the blocks that have become full."""
        block_size = self.spec.block_size
        while (len(self.blocks) + 1) * block_size <= self.num_computed:
            index = len(self.blocks)
            start, stop = index * block_size, (index + 1) * block_size
            block_hash = chain_hash(self._parent_hash(index), self.tokens.slice(start, stop))
            sealed = self._runtime.blocks.seal(self._workspace, self.cursor, start, stop, block_hash)
            self.blocks.extend([sealed])

    def _parent_hash(self, index: int) -> BlockHash:
        return self.blocks[index - 1].block_hash if index else self._runtime.root
