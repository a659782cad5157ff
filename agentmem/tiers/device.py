"""The hot tier: KV on the model's device, as runs of tokens that branches share.

A `Workspace` is one contiguous, over-allocated buffer that holds the whole path of the branch the model continues, so
that attention runs on it exactly as on a stock cache. What other branches need and the active one does not is moved out
to a private segment, once, when the active branch diverges. This file knows nothing of blocks, tokens or sessions.

    workspace   [ trunk ........ | active tail .. | free ]     slots = token positions
    run A            private segment [ A's own tokens ]        parent: trunk, from its token `start` on

Source: SGLang's radix cache (runs), and the append-only segments and delta attach of a prototype (docs/experiments.md).
"""

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from agentmem.errors import CapacityError, NotFoundError
from agentmem.kv.spec import KVSpec
from agentmem.tiers.memory import copy_tokens, empty
from agentmem.tiers.runs import Cursor, Run, Segment, Storage
from agentmem.tiers.streams import Order

KEEP_COPY_TOKENS = 256
"""A private copy of at most this many tokens is kept while its run is in the workspace: moving out again is free."""

GRANULE = 16
"""Capacities are multiples of this many tokens."""


class Workspace:
    """The contiguous buffer of one session, and the runs that live in it.

    Slot i holds token i of the path of the cursor selected last. Not thread-safe but for `gather`, which another thread
    may call at any time.
    """

    def __init__(self, tier: "DeviceTier") -> None:
        """Start empty; the first `reserve` allocates."""
        self.lock = threading.RLock()
        self.storage: Storage | None = None
        self.layers: list[tuple[Tensor, Tensor]] = []
        """Per group and row, in order of the spec's groups: keys and values `[1, H, capacity, D]`, views of storage."""
        self.order = Order(tier.device)
        """Of what the model writes, what is loaded into the buffer, and what is copied out of it."""
        self._tier = tier
        self._chain: list[Run] = []

    @property
    def num_attached(self) -> int:
        """Tokens that the workspace holds."""
        return self._chain[-1].stop if self._chain else 0

    def select(self, cursor: Cursor) -> int:
        """Make slots [0, cursor.length) hold the cursor's path; return how many tokens were copied in.

        Only what differs from the path held before is moved.

        Raises:
            CapacityError: The path does not fit the device budget.
        """
        with self.lock:
            path = cursor.path()
            shared, num_runs = self._shared_prefix(path)
            if shared >= cursor.length:
                return 0
            self.reserve(cursor.length, keep=shared)
            self._evacuate(shared)
            if num_runs and self._chain[num_runs - 1].stop != shared:
                raise RuntimeError(f"workspace ends at {self._chain[num_runs - 1].stop}, expected {shared}")
            for run, stop in cursor.path():
                if run.start >= shared:
                    self._attach(run, stop)
            return cursor.length - shared

    def begin(self, cursor: Cursor, num_tokens: int) -> int:
        """Make room for `num_tokens` after the cursor and return the first slot to write.

        What other cursors need above it is moved out; slots at and above it may be written freely until `commit`.

        Raises:
            CapacityError: They do not fit the device budget.
        """
        with self.lock:
            self.select(cursor)
            if self.num_attached > cursor.length:
                self._evacuate(cursor.length)
            self.reserve(cursor.length + num_tokens, keep=cursor.length)
            return cursor.length

    def commit(self, cursor: Cursor, num_tokens: int) -> None:
        """Make the `num_tokens` written after `begin` part of the cursor's path, and move the cursor to their end."""
        self.order.note()
        with self.lock:
            run = cursor.run
            if run is not None and self._chain and run is self._chain[-1] and run.stop == cursor.length:
                run.stop += num_tokens
                cursor.length += num_tokens
                return
            run = Run(run, cursor.length, cursor.length + num_tokens, is_attached=True)
            self._chain.append(run)
            cursor.point(run, run.stop)  # interrupted before: a run that nobody needs, and that gives way to the next

    def gather(self, cursor: Cursor, start: int, stop: int, out: Sequence[Tensor]) -> None:
        """Copy the KV of the tokens [start, stop) of the cursor's path into `out`, one `[L, H, T, D]` per section.

        Raises:
            NotFoundError: Some of it has left the device.
        """
        if stop > cursor.length:
            raise NotFoundError(f"tokens {start:,} to {stop:,} were asked of {cursor.length:,} that are on the device")
        self.order.follow()
        with self.lock:
            for run, run_stop in cursor.path():
                low, high = max(start, run.start), min(stop, run_stop)
                if low < high:
                    for source, target in zip(self._views(run, low, high), out, strict=True):
                        target[:, :, low - start : high - start].copy_(source)

    def slots(self, start: int, stop: int) -> list[Tensor]:
        """Return views `[L, H, stop - start, D]` of the slots, per section. Valid until the next `reserve`."""
        if self.storage is None:
            raise RuntimeError("slots asked of an empty workspace")
        return [section[:, :, start:stop] for section in self.storage.sections]

    def reserve(self, num_tokens: int, keep: int | None = None) -> None:
        """Grow to at least `num_tokens` slots; the first `keep` (default: all attached) are carried over.

        Grows by a sixteenth at least, so that appending costs amortised O(1) per token.

        Raises:
            CapacityError: The larger buffer does not fit the device budget.
        """
        if self.storage is not None and num_tokens <= self.storage.capacity:
            return
        self._evacuate(self.num_attached if keep is None else keep)
        old, wanted = self.storage, num_tokens + max(64, num_tokens // 16)
        if old is None or not self.num_attached:
            old = None
            self._install(None)  # or views of the old buffer would keep its memory
            self._install(self._tier.allocate(wanted))
            return
        try:
            # Views of the old buffer would keep its memory. The buffer stays in its place: to make room, other branches
            # of this very session may be saved from it.
            self.layers = []
            self._install(self._tier.grown(old, wanted, self.num_attached))
        finally:
            if not self.layers:
                self._install(old)

    def _install(self, storage: Storage | None) -> None:
        sections = [] if storage is None else storage.sections
        layers = [
            (keys[row].unsqueeze(0), values[row].unsqueeze(0))
            for keys, values in zip(sections[::2], sections[1::2], strict=True)
            for row in range(keys.shape[0])
        ]
        self.storage, self.layers = storage, layers

    def clear(self) -> None:
        """Let go of the buffer. It is given back as soon as no cursor is alive, such as that of a block to be saved."""
        with self.lock:
            while self._chain:
                self._let_go()
            self.storage, self.layers = None, []

    def _shared_prefix(self, path: list[tuple[Run, int]]) -> tuple[int, int]:
        """Return how many leading tokens of `path` the workspace holds, and how many runs of the chain they touch."""
        shared, num_runs = 0, 0
        for attached, (run, stop) in zip(self._chain, path, strict=False):
            if attached is not run:
                break
            shared, num_runs = min(run.stop, stop), num_runs + 1
            if shared != run.stop:
                break
        return shared, num_runs

    def _views(self, run: Run, low: int, high: int) -> list[Tensor]:
        """Return the KV of the run's tokens [low, high), from wherever it is."""
        if run.is_attached:
            return self.slots(low, high)
        if run.segment is None or run.segment.length < high - run.start:
            raise NotFoundError(f"the KV of tokens {run.start:,} to {run.stop:,} has left the device")
        return run.segment.views(low - run.start, high - run.start)

    def _attach(self, run: Run, stop: int) -> None:
        """Copy a run in from its private segment, up to `stop`; what lies beyond becomes a run of its own."""
        lower = run.split(stop, self._chain) if stop < run.stop else run
        segment, length = lower.segment, lower.stop - lower.start
        if segment is None or segment.length < length:
            raise RuntimeError(f"run [{lower.start}, {lower.stop}) has no KV to attach")
        for source, target in zip(segment.views(0, length), self.slots(lower.start, lower.stop), strict=True):
            target.copy_(source)
        lower.segment, lower.is_attached = segment if length <= KEEP_COPY_TOKENS else None, True
        self._chain += [lower]

    def _evacuate(self, keep: int) -> None:
        """Empty the slots from `keep` on; what somebody needs of them goes to private segments."""
        while self.num_attached > keep:
            run = self._chain[-1]
            low, needed = max(run.start, keep), run.needed_stop()
            fresh = self._room_to_move(run, low, needed)
            if run.needed_stop() != needed:
                continue  # making room evicted somebody who needed this run: look again
            if needed > low:
                if low > run.start:
                    run.split(low, self._chain)
                self._move_out(run, needed, fresh)
            elif low > run.start:
                run.shorten(low)
            else:
                self._leave()

    def _room_to_move(self, run: Run, low: int, stop: int) -> Segment | None:
        """Allocate a segment for the run's tokens [low, stop), unless its own has the room or nobody needs them."""
        skip, length = low - run.start, stop - low
        if length <= 0 or (run.segment is not None and run.segment.room - skip >= length and run.segment.length > skip):
            return None
        storage = self._tier.allocate(length)
        return Segment(storage, 0, 0, storage.capacity)

    def _let_go(self) -> None:
        """Take the last run out of the chain, and leave the buffer to it if somebody needs its tokens."""
        chain, run = self._chain, self._chain[-1]
        length, segment = run.needed_stop() - run.start, run.segment
        if length > 0 and self.storage is not None and (segment is None or segment.length < length):
            segment = Segment(self.storage, run.start, length, length)
        run.segment, run.is_attached = segment, False
        del chain[-1]

    def _leave(self) -> None:
        """Take the last run out of the chain."""
        chain, run = self._chain, self._chain[-1]
        run.is_attached = False
        del chain[-1]

    def _move_out(self, run: Run, stop: int, fresh: Segment | None) -> None:
        """Take the last run out: copy the tokens up to `stop` that its own segment does not hold yet."""
        segment, held, length, chain = run.segment, 0, stop - run.start, self._chain
        if segment is not None:
            held = segment.length
            if fresh is not None:
                _copy(segment.views(0, held), fresh, 0, held)
        target = segment if fresh is None else fresh
        if target is None:
            raise RuntimeError(f"run [{run.start}, {run.stop}) has no segment to move to")
        if length > held:
            _copy(self.slots(run.start + held, stop), target, held, length)
        target.length, run.segment, run.stop, run.is_attached = length, target, stop, False
        del chain[-1]


def _copy(sources: Sequence[Tensor], segment: Segment, start: int, stop: int) -> None:
    for source, target in zip(sources, segment.views(start, stop), strict=True):
        target.copy_(source)


class DeviceTier:
    """Allocates the KV of all sessions on one device, within a byte budget."""

    name = "device"

    def __init__(self, spec: KVSpec, device: torch.device, budget_nbytes: int | None) -> None:
        """Serve KV of `spec` on `device`; `budget_nbytes` None means no limit."""
        self.spec = spec
        self.device = device
        self.budget_nbytes = budget_nbytes
        self.make_room: Callable[[int], None] = lambda _needed_nbytes: None
        """Called with the bytes that are missing before an allocation is refused; frees what may be freed."""
        self.bounce: Callable[[int], AbstractContextManager[bool]] = lambda _nbytes: nullcontext(False)
        """Lends bytes of the host tier's memory, for as long as the context is open; gives False when it has none."""
        self._storages: dict[weakref.ref[Storage], None] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes allocated now. Takes no lock: whoever watches must not hold up who allocates."""
        # The keys are listed in one step, as those of a WeakSet are not.
        return sum(storage.nbytes for each in list(self._storages) if (storage := each()) is not None)

    def allocate(self, num_tokens: int, *, num_rows: int | None = None) -> Storage:
        """Allocate KV for at least `num_tokens` tokens.

        Args:
            num_tokens: Tokens to hold; rounded up to a multiple of `GRANULE`.
            num_rows: Rows that each hold so many tokens: sections are `[rows, L, H, capacity, D]`. None: no rows.

        Raises:
            CapacityError: The budget cannot hold it, even after `make_room`.
        """
        capacity = _rounded(num_tokens)
        rows = () if num_rows is None else (num_rows,)
        storage = self.claim(capacity * self.spec.token_nbytes * math.prod(rows), capacity)
        return self._fill(storage, capacity, rows)

    def grown(self, old: Storage, num_tokens: int, length: int) -> Storage:
        """Return memory for `num_tokens` tokens with the first `length` of `old`, which nobody uses any more.

        While it is copied both are counted. Where the budget cannot hold both, the tokens go by way of the host tier's
        memory, if that is to be had: then the old buffer is freed before the new one is allocated.

        Raises:
            CapacityError: The budget cannot hold it, even after `make_room`. `old` is as it was.
        """
        capacity = _rounded(num_tokens)
        nbytes = capacity * self.spec.token_nbytes
        storage = self._take(nbytes)
        if storage is None:
            with self.bounce(length * self.spec.token_nbytes) as is_lent:
                if is_lent:
                    return self._moved(old, capacity, length)
            storage = self.claim(nbytes, capacity)
        copy_tokens(old.sections, self._fill(storage, capacity).sections, length)
        return storage

    def claim(self, nbytes: int, num_tokens: int = 0) -> Storage:
        """Count bytes that somebody is about to allocate, for as long as what is returned lives.

        Args:
            nbytes: How many.
            num_tokens: Of how many tokens they are to hold KV; 0 for a layer state.

        Raises:
            CapacityError: The budget cannot hold them, even after `make_room`.
        """
        storage = self._take(nbytes)
        if storage is None:
            self.make_room(self.nbytes + nbytes - (self.budget_nbytes or 0))
            storage = self._take(nbytes)
        if storage is None:
            what = f"KV for {num_tokens:,} tokens" if num_tokens else "a layer state"
            raise CapacityError(
                f"{what} needs {nbytes:,} bytes more on the device; {self.nbytes:,} bytes of the "
                f"budget of {self.budget_nbytes:,} are in use and nothing more can be evicted. Raise "
                f"Config.device_budget_nbytes, or rewind or drop branches"
            )
        return storage

    def _take(self, nbytes: int) -> Storage | None:
        """Count bytes, unless the budget does not have them."""
        with self._lock:
            if self.budget_nbytes is not None and self.nbytes + nbytes > self.budget_nbytes:
                return None
            storage = Storage([], 0, nbytes)
            self._storages[weakref.ref(storage, self._forget)] = None
            return storage

    def _forget(self, gone: weakref.ref[Storage]) -> None:
        """Count a buffer no more that nobody has any more."""
        self._storages.pop(gone, None)

    def _moved(self, old: Storage, capacity: int, length: int) -> Storage:
        """Give a buffer more memory, freeing what it has first: its tokens are in RAM meanwhile.

        It stays the same buffer, so that whoever is interrupted right behind this still has its tokens.
        """
        nbytes, before = capacity * self.spec.token_nbytes, old.capacity
        more = self.claim(nbytes - old.nbytes, capacity)
        copies = [section[:, :, :length].to("cpu", copy=True) for section in old.sections]
        try:
            old.sections.clear()
            copy_tokens(copies, self._fill(old, capacity).sections, length)
        except BaseException:
            old.sections.clear()
            copy_tokens(copies, self._fill(old, before).sections, length)
            raise
        old.nbytes, more.nbytes = nbytes, 0
        return old

    def _fill(self, storage: Storage, capacity: int, rows: tuple[int, ...] = ()) -> Storage:
        """Allocate the sections of what is counted already."""
        with torch.inference_mode(mode=False):
            dtype = getattr(torch, self.spec.dtype)
            shapes = [(*rows, *shape) for shape in self.spec.section_shapes(capacity)]
            storage.sections[:] = [empty(shape, dtype, self.device) for shape in shapes]
        storage.capacity = capacity
        return storage


def empty_sections(spec: KVSpec, num_tokens: int) -> list[Tensor]:
    """Return uninitialised CPU tensors for one block of `num_tokens`, one `[L, H, T, D]` per section."""
    return [torch.empty(shape, dtype=getattr(torch, spec.dtype)) for shape in spec.section_shapes(num_tokens)]


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // GRANULE) * GRANULE
