"""Bringing back what a branch had, and finding what others computed of the same tokens.

Nothing here runs the model: what cannot be had becomes pending, and the reason is noted.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence

from agentmem.choosing import Choice
from agentmem.errors import CorruptionError, NotFoundError, ReadOnlyError, SpecMismatchError, StorageFullError
from agentmem.ids import BlockDigest, BlockHash
from agentmem.marks import MarkKind, lossy_mark, media_start, with_lossy, without_splices
from agentmem.prefix import Prefix
from agentmem.reasons import Reason
from agentmem.tiers.blocks import Loaded, Lossy, SealedBlock, Want
from agentmem.tiers.states import LayerState
from agentmem.tree.checkpoint import Checkpoint

_GONE = (NotFoundError, StorageFullError, ReadOnlyError)
_DAMAGED = (CorruptionError, SpecMismatchError)


class Restoring(Prefix):
    """A prefix that can be brought onto the device."""

    def restore(self, *, is_next: bool = True, num_next: int = 0) -> Loaded:
        """Bring the branch's KV and layer state onto the device: only what is not there already.

        What cannot be had is not computed here: it becomes pending, and `loss` says why.

        Args:
            is_next: Whether the model goes on with this branch alone: its KV goes to where such passes read it.
            num_next: Tokens that the model is fed right afterwards: KV may still be on its way when it begins (see
                `stream`), and whoever feeds it must be ready for `LoadFailed`. 0: everything is there on return.
        """
        have = self.cursor.length
        if have:
            self._runtime.counters.add("tokens_on_device", have)
        loaded = Loaded(from_tier={"device": have} if have else {})
        if have < self.num_kv:
            loaded = self._bring(self._missing(have), self.num_kv - have, num_next)
            if have:
                loaded.from_tier["device"] = have
            if self.cursor.length < self.num_kv:
                self._lose(loaded.reason)
            self._take_lossy(loaded.lossy)
        self._restore_state(loaded)
        self._restore_root()
        moved = self._workspace.select(self.cursor) if is_next else 0
        loaded.nbytes += moved * self.spec.token_nbytes
        _limit(loaded, self.num_computed)
        self.note_point()
        return loaded

    def save_tail(self) -> SealedBlock | None:
        """Seal the tokens after the last full block, if they are on the device; return the partial block."""
        start = len(self.blocks) * self.spec.block_size
        is_exact = self.tail is not None and self.tail.stop == self.num_kv
        if not is_exact and start < self.num_kv <= self.cursor.length:
            self.tail = self.seal_block(start, self.num_kv)
            return self.tail
        return self.tail if is_exact else None

    def save(self) -> None:
        """Hand all KV and layer states to the disk's writer, the tail and the state the branch stands at included."""
        self.save_tail()
        self._runtime.blocks.save(self.saved_blocks())
        self.keep_state()
        for state in self.saved_states():
            self._runtime.states.save(state)

    def give_up(self, num_tokens: int) -> None:
        """Take off all but the first `num_tokens` tokens; whole blocks that were computed of the others are kept."""
        self._runtime.blocks.keep(self.blocks.slice(num_tokens // self.spec.block_size))
        self.truncate(num_tokens)

    def save_blocks(self) -> None:
        """Hand the full blocks to the disk's writer; afterwards each has its digest."""
        self._runtime.blocks.save(self.blocks.slice())

    def has_other_states(self, tips: Sequence[Checkpoint], named: Collection[BlockDigest]) -> bool:
        """Say whether a layer state was computed again since the branch's tip named one at its place."""
        places = {ref.position for tip in tips for ref in tip.states}
        again = [state for state in self.saved_states() if state.position in places]
        for state in again:
            self._runtime.states.save(state)
        return any(digest not in named for state in again for digest in state.digests or ())

    def saved_blocks(self) -> list[SealedBlock]:
        """Return every block of the branch, tail included, as far as there are any."""
        return [*self.blocks.slice(), *([self.tail] if self.tail is not None else [])]

    def saved_states(self) -> list[LayerState]:
        """Return every layer state that is kept, the root's included, as far as there are any."""
        return [*([self.root] if self.root is not None else []), *self.points]

    def reuse_pending(self, *, keep: int) -> Loaded:
        """Load KV of the pending tokens, all but the last `keep`, that somebody else computed already."""
        loaded = Loaded()
        limit = media_start(self.marks, len(self.tokens) - keep)
        if limit <= self.num_computed or not self.is_hot or self.num_kv > self.num_computed:
            return loaded
        found = self._match(limit)
        state = self._match_state(found, limit) if self.spec.states else None
        stop = state.position if state is not None else 0 if self.spec.states else found[-1].stop if found else 0
        start = self.num_computed
        if stop <= start:
            return loaded
        wanted = [(block, max(block.start, start), min(block.stop, stop)) for block in self._covering(found, stop)]
        num_worth, loaded.choice = self._worth(wanted)
        if num_worth < len(wanted):
            wanted = [] if self.spec.states else wanted[:num_worth]
            stop = wanted[-1][2] if wanted else start
        if not wanted:
            return loaded
        loaded.add(self._load(wanted, stop - start))
        self._take_reused(loaded, start, stop)
        self._take_lossy(loaded.lossy)
        if state is not None and self.num_kv == stop:
            self._take_state(state, loaded)
        self.num_computed = max(start, self._restart(self.num_kv))
        _limit(loaded, self.num_computed - start)
        self._runtime.counters.add("tokens_reused", self.num_computed - start)
        self.note_point()
        return loaded

    # -- inside

    def _restore_state(self, loaded: Loaded) -> None:
        """Bring the layer state that the model goes on from onto the device, or the nearest earlier one."""
        while self.spec.states and self.num_computed:
            state = next((each for each in self._states() if each.position == self.num_computed), None)
            reason = Reason.MISSING if state is None else self._fetch(state)
            if reason is Reason.COMPLETE:
                self.live = state
                break
            lost = self.num_computed
            self.points = tuple(point for point in self.points if point is not state)
            self.live = self.before = None
            self.num_computed = self._restart(lost - 1)
            self.loss, self.lost_stop = reason, max(self.lost_stop, lost)
            loaded.reason = reason
            self._runtime.counters.add("tokens_lost", lost - self.num_computed, reason=reason)

    def _restore_root(self) -> None:
        """Bring KV of the encoder's output onto the device, this branch's or another's of the same inputs."""
        reason = Reason.COMPLETE if self.root is None else self._fetch(self.root)
        is_wanted = self.root is None or reason is not Reason.COMPLETE
        if is_wanted and any(mark.kind is MarkKind.ENCODER for mark in self.marks):
            self.root = self._runtime.states.find(self.root_name(), 0, num_parts=1)
            reason = reason if self.root is None else self._fetch(self.root)
        if reason is not Reason.COMPLETE:
            self.root = None  # the encoder runs again: no token is fed for it, so a counter says so
            self._runtime.counters.add("encodings_lost", reason=reason)

    def _fetch(self, state: LayerState) -> Reason:
        """Bring a layer state onto the device; say why it cannot be had."""
        try:
            self._runtime.states.load(state)
        except _GONE:
            self._runtime.states.forget(state)
            return Reason.MISSING
        except _DAMAGED:
            self._runtime.states.forget_damaged(state)
            return Reason.DAMAGED
        return Reason.COMPLETE

    def _missing(self, have: int) -> list[tuple[SealedBlock, int, int]]:
        """List what to load after the first `have` tokens: block, and the positions to fill from it."""
        block_size = self.spec.block_size
        blocks = self.blocks.slice(have // block_size)
        if self.tail is not None and self.tail.stop >= self.num_kv > self.tail.start:
            blocks.append(self.tail)
        return [(block, max(block.start, have), min(block.stop, self.num_kv)) for block in blocks]

    @abstractmethod
    def _bring(self, wanted: list[tuple[SealedBlock, int, int]], num_tokens: int, num_next: int) -> Loaded:
        """Bring blocks right after the cursor onto the device, in the way that is fastest."""

    @abstractmethod
    def _worth(self, wanted: list[tuple[SealedBlock, int, int]]) -> tuple[int, Choice | None]:
        """Return how many of the first blocks are loaded sooner than they are computed; the choice where any is far."""

    def _load(self, wanted: list[tuple[SealedBlock, int, int]], num_tokens: int) -> Loaded:
        """Load blocks right after the cursor and move it over what is good."""
        first = self._workspace.begin(self.cursor, num_tokens)
        wants = [self._want(block, start, stop) for block, start, stop in wanted]
        self._workspace.order.note()
        loaded = self._runtime.blocks.load(wants)
        self._workspace.order.follow()
        if len(loaded.blocks) == len(wanted) and (not wanted or wanted[-1][2] < first + num_tokens):
            loaded.reason = Reason.MISSING
        if loaded.blocks:
            stop = wanted[len(loaded.blocks) - 1][2]
            self._workspace.commit(self.cursor, stop - first)
            self._runtime.counters.add("tokens_restored", stop - first)
            self._adopt_equivalent(loaded.blocks)
        return loaded

    def _want(self, block: SealedBlock, start: int, stop: int) -> Want:
        """Say where the tokens [start, stop) of a block go."""
        return Want(
            block=block,
            out=self._workspace.slots(start, stop),
            num_tokens=stop - start,
            skip=start - block.start,
            order=self._workspace.order,
        )

    def _adopt_equivalent(self, loaded: list[SealedBlock]) -> None:
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
        """Accept that KV beyond the cursor is gone: its tokens become pending, and are computed exactly."""
        lost = self.num_kv - self.cursor.length
        self.loss, self.lost_stop = reason, max(self.lost_stop, self.num_kv)
        self.num_kv = self.cursor.length
        self.blocks.truncate(self.num_kv // self.spec.block_size)
        self.tail = None
        self.num_computed = self._restart(min(self.num_computed, self.num_kv))
        self.points = tuple(point for point in self.points if point.position <= self.num_computed)
        # Not even a sound layer state may be gone on from when the KV of its tokens is lost.
        self.live = self.live if self.live is not None and self.live.position <= self.num_computed else None
        self.before = self.before if self.before is not None and self.before.position <= self.num_computed else None
        self.marks = without_splices(self.marks, self.num_kv)
        self._runtime.counters.add("tokens_lost", lost, reason=reason)

    def _take_reused(self, loaded: Loaded, start: int, stop: int) -> None:
        """Make the blocks that were loaded part of the branch."""
        for block in loaded.blocks:
            self.num_kv = min(block.stop, stop)
            is_whole = block.start >= start and block.stop <= stop and block.num_tokens == self.spec.block_size
            if is_whole:
                self.tail = None
                self.blocks.extend([block])
            elif block.start >= start:
                self.tail = block
            else:
                self.tail = None
                self.seal()  # the first tokens of this block are the branch's own bytes: it is a block of its own

    def _take_state(self, state: LayerState, loaded: Loaded) -> None:
        """Go on from a layer state that somebody else left, if it can be had."""
        if self._fetch(state) is Reason.COMPLETE:
            self.points = (*self.points, state)
            self.before, self.live = None, state
        else:
            loaded.reason = Reason.MISSING

    def _take_lossy(self, lossy: Sequence[Lossy]) -> None:
        """Note that KV on the device is not what the model made: it and all after it gets names of its own.

        The names that the exact KV has stay with whoever has that.
        """
        if lossy:
            self.marks = with_lossy(self.marks, (lossy_mark(each.start, each.stop, each.codec) for each in lossy))
            self.blocks.truncate(lossy[0].start // self.spec.block_size)
            self.tail = None
            self.seal()
            self._runtime.counters.add("tokens_lossy", sum(each.stop - each.start for each in lossy))

    def _match(self, limit: int) -> list[SealedBlock]:
        """Return the stored blocks that continue the computed tokens, up to position `limit`."""
        first = self.num_computed - self.num_computed % self.spec.block_size
        is_worth_asking = limit - self.num_computed >= self.spec.block_size  # not for each block that decoding fills
        return self._runtime.blocks.find_run(self._names_after(first, limit), first, asks_lower=is_worth_asking)

    def _names_after(self, start: int, limit: int) -> Iterator[BlockHash]:
        """Yield the names of the whole blocks of [start, limit), as they are asked for."""
        block_size = self.spec.block_size
        parent = self.parent_name(start)
        while start + block_size <= limit:
            parent = self.block_name(start, start + block_size, parent)
            yield parent
            start += block_size

    def _match_state(self, found: list[SealedBlock], limit: int) -> LayerState | None:
        """Return the last layer state, up to `limit`, that follows the tokens and whose KV is stored too."""
        block_size = self.spec.block_size
        first = self.num_computed - self.num_computed % block_size
        parents: list[BlockHash] = [self.parent_name(first), *(block.block_hash for block in found)]
        for index in reversed(range(len(parents))):
            start = first + index * block_size
            for position in range(min(start + block_size - 1, limit), max(start - 1, self.num_computed), -1):
                state = self._runtime.states.find(self.state_name(position, parents[index]), position)
                if state is not None and self._extend_found(found, parents[index], start, position):
                    return state
        return None

    def _extend_found(self, found: list[SealedBlock], parent: BlockHash, start: int, stop: int) -> bool:
        """Say whether KV of the tokens [start, stop) is stored; add the partial block that has it."""
        if start >= stop or any(block.start <= start and block.stop >= stop for block in found):
            return True
        block = self._runtime.blocks.find(self.block_name(start, stop, parent), start, stop)
        if block is not None:
            found.append(block)
        return block is not None

    def _covering(self, found: list[SealedBlock], stop: int) -> list[SealedBlock]:
        return [block for block in found if block.start < stop]


def _limit(loaded: Loaded, num_tokens: int) -> None:
    """Count at most `num_tokens` tokens as reused: KV beyond them is read, but those tokens are fed."""
    excess = sum(loaded.from_tier.values()) - num_tokens
    for tier in reversed(loaded.from_tier):
        taken = min(max(excess, 0), loaded.from_tier[tier])
        loaded.from_tier[tier] -= taken
        excess -= taken
