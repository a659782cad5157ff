"""The hot tier: KV on the model's device, as runs of tokens that branches share.

A `Workspace` is one contiguous, over-allocated buffer that holds the whole path of the branch the model continues, so
that attention runs on it exactly as on a stock cache. What other branches need and the active one does not is moved out
to a private segment, once, when the active branch diverges. This file knows nothing of blocks, tokens or sessions.

    workspace   [ trunk ........ | active tail .. | free ]     slots = token positions
    run A            private segment [ A's own tokens ]        parent: trunk, from its token `start` on

Source: SGLang's radix cache (runs), and the append-only segments and delta attach of a prototype (docs/experiments.md).
"""

import contextlib
import math
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from agentmem.errors import CapacityError, NotFoundError
from agentmem.kv.spec import KVSpec
from agentmem.tiers.runs import Cursor, Run, Segment, Storage

KEEP_COPY_TOKENS = 256
"""A private copy of at most this many tokens is kept while its run is in the workspace: moving out again is free."""

GRANULE = 16
"""Capacities are multiples of this many tokens."""

HUGE_PAGES_FROM_NBYTES = 4 << 20
"""Sections of this size lie on huge pages on a CPU: touching them first costs a quarter (benchmarks/path.py)."""


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
        with self.lock:
            run = cursor.run
            if run is not None and self._chain and run is self._chain[-1] and run.stop == cursor.length:
                run.stop += num_tokens
                cursor.length += num_tokens
                return
            run = Run(run, cursor.length, cursor.length + num_tokens, is_attached=True)
            self._chain.append(run)
            cursor.point(run, run.stop)

    def gather(self, cursor: Cursor, start: int, stop: int, out: Sequence[Tensor]) -> None:
        """Copy the KV of the tokens [start, stop) of the cursor's path into `out`, one `[L, H, T, D]` per section.

        Raises:
            NotFoundError: Some of it has left the device.
        """
        if stop > cursor.length:
            raise NotFoundError(f"tokens {start:,} to {stop:,} were asked of {cursor.length:,} that are on the device")
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
        old = self.storage
        self._evacuate(self.num_attached if keep is None else keep)
        storage = self._tier.allocate(num_tokens + max(64, num_tokens // 16), replaces=old.nbytes if old else 0)
        if old is not None and self.num_attached:
            for source, target in zip(old.sections, storage.sections, strict=True):
                target[:, :, : self.num_attached].copy_(source[:, :, : self.num_attached])
        self.storage = storage
        self.layers = [
            (keys[row].unsqueeze(0), values[row].unsqueeze(0))
            for keys, values in zip(storage.sections[::2], storage.sections[1::2], strict=True)
            for row in range(keys.shape[0])
        ]

    def clear(self) -> None:
        """Give the buffer back. No cursor of this workspace may be alive: `select` would find no KV."""
        with self.lock:
            for run in self._chain:
                run.is_attached = False
            self._chain.clear()
            self.storage = None
            self.layers = []

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
        lower = self._split(run, stop) if stop < run.stop else run
        segment, length = lower.segment, lower.stop - lower.start
        if segment is None or segment.length < length:
            raise RuntimeError(f"run [{lower.start}, {lower.stop}) has no KV to attach")
        for source, target in zip(segment.views(0, length), self.slots(lower.start, lower.stop), strict=True):
            target.copy_(source)
        if length > KEEP_COPY_TOKENS:
            lower.segment = None
        lower.is_attached = True
        self._chain.append(lower)

    def _evacuate(self, keep: int) -> None:
        """Empty the slots from `keep` on; what somebody needs of them goes to private segments."""
        while self.num_attached > keep:
            run = self._chain[-1]
            low, needed = max(run.start, keep), run.needed_stop()
            fresh = self._room_to_move(run, low, needed)
            if run.needed_stop() != needed:
                continue  # making room evicted somebody who needed this run: look again
            if needed > low:
                lower = self._split(run, low) if low > run.start else None
                self._move_out(run, needed, fresh)
                self._chain[-1:] = [lower] if lower is not None else []
            elif low > run.start:
                _shorten(run, low)
            else:
                self._chain.pop().is_attached = False

    def _room_to_move(self, run: Run, low: int, stop: int) -> Segment | None:
        """Allocate a segment for the run's tokens [low, stop), unless its own has the room or nobody needs them."""
        skip, length = low - run.start, stop - low
        if length <= 0 or (run.segment is not None and run.segment.room - skip >= length and run.segment.length > skip):
            return None
        storage = self._tier.allocate(length)
        return Segment(storage, 0, 0, storage.capacity)

    def _move_out(self, run: Run, stop: int, fresh: Segment | None) -> None:
        """Leave the workspace: copy the tokens up to `stop` that the run's own segment does not hold yet."""
        segment = run.segment
        if fresh is not None:
            if segment is not None:
                _copy(segment.views(0, segment.length), fresh, 0, segment.length)
                fresh.length = segment.length
            run.segment = segment = fresh
        if segment is None:
            raise RuntimeError(f"run [{run.start}, {run.stop}) has no segment to move to")
        held, length = segment.length, stop - run.start
        if length > held:
            _copy(self.slots(run.start + held, stop), segment, held, length)
        segment.length = length
        run.stop = stop
        run.is_attached = False

    def _split(self, run: Run, position: int) -> Run:
        """Cut a run at `position`; return the new lower half. `run` stays the upper half, for all that point above."""
        lower = Run(run.parent, run.start, position, is_attached=run.is_attached)
        if run.parent is not None:
            run.parent.children.discard(run)
        for cursor in [cursor for cursor in run.cursors if cursor.length <= position]:
            cursor.point(lower, cursor.length)
        for child in [child for child in run.children if child.start <= position]:
            run.children.discard(child)
            child.parent = lower
            lower.children.add(child)
        if run.segment is not None:
            lower.segment, run.segment = run.segment.cut(position - run.start)
        run.parent, run.start = lower, position
        lower.children.add(run)
        return lower


def _shorten(run: Run, stop: int) -> None:
    run.stop = stop
    if run.segment is not None:
        run.segment.length = min(run.segment.length, stop - run.start)


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
        self._storages: weakref.WeakSet[Storage] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._reserved_nbytes = 0  # of allocations that are being made

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        with self._lock:
            return sum(storage.nbytes for storage in tuple(self._storages))

    def allocate(self, num_tokens: int, *, replaces: int = 0, num_rows: int | None = None) -> Storage:
        """Allocate KV for at least `num_tokens` tokens.

        Args:
            num_tokens: Tokens to hold; rounded up to a multiple of `GRANULE`.
            replaces: Bytes that the caller frees as soon as it has copied them: counted as free already.
            num_rows: Rows that each hold so many tokens: sections are `[rows, L, H, capacity, D]`. None: no rows.

        Raises:
            CapacityError: The budget cannot hold it, even after `make_room`.
        """
        capacity = -(-num_tokens // GRANULE) * GRANULE
        nbytes = capacity * self.spec.token_nbytes * (1 if num_rows is None else num_rows)
        self._require(nbytes - replaces, capacity)
        storage: Storage | None = None
        try:
            with torch.inference_mode(mode=False):
                dtype = getattr(torch, self.spec.dtype)
                rows = () if num_rows is None else (num_rows,)
                shapes = [(*rows, *shape) for shape in self.spec.section_shapes(capacity)]
                sections = [_empty(shape, dtype, self.device) for shape in shapes]
            storage = Storage(sections, capacity, nbytes)
        finally:
            with self._lock:  # counted once at every moment, as set aside or as allocated
                self._reserved_nbytes -= nbytes - replaces
                if storage is not None:
                    self._storages.add(storage)
        return storage

    def track(self, tensors: Sequence[Tensor]) -> Storage:
        """Count tensors that somebody else allocated, for as long as what is returned lives.

        Raises:
            CapacityError: The budget cannot hold them, even after `make_room`.
        """
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self._require(nbytes, 0)
        storage = Storage([], 0, nbytes)
        with self._lock:
            self._reserved_nbytes -= nbytes
            self._storages.add(storage)
        return storage

    def _take(self, nbytes: int) -> bool:
        """Set bytes aside for an allocation, unless the budget does not have them."""
        with self._lock:
            used = sum(storage.nbytes for storage in tuple(self._storages)) + self._reserved_nbytes
            if self.budget_nbytes is not None and used + nbytes > self.budget_nbytes:
                return False
            self._reserved_nbytes += nbytes
            return True

    def _require(self, nbytes: int, num_tokens: int) -> None:
        if self._take(nbytes):
            return
        self.make_room(self.nbytes + nbytes - (self.budget_nbytes or 0))
        if not self._take(nbytes):
            what = f"KV for {num_tokens:,} tokens" if num_tokens else "a layer state"
            raise CapacityError(
                f"{what} needs {nbytes:,} bytes more on the device; {self.nbytes:,} bytes of the "
                f"budget of {self.budget_nbytes:,} are in use and nothing more can be evicted. Raise "
                f"Config.device_budget_nbytes, or rewind or drop branches"
            )


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised memory, on huge pages where that pays and the system has them."""
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < HUGE_PAGES_FROM_NBYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without huge pages: small ones do as well
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def empty_sections(spec: KVSpec, num_tokens: int) -> list[Tensor]:
    """Return uninitialised CPU tensors for one block of `num_tokens`, one `[L, H, T, D]` per section."""
    return [torch.empty(shape, dtype=getattr(torch, spec.dtype)) for shape in spec.section_shapes(num_tokens)]
