"""Several branches' ends side by side, so that one forward pass feeds all of them.

What branches share stays where it is, and is attended once for all that have it. Everything else of a branch, and what
it is fed from now on, is in a row of one buffer, `[N, L, H, capacity, D]` per section. A row is a storage like any
other: when the branch leaves, its new tokens stay in it, as a run, without being copied.

    shared      workspace or segment [ trunk ............. ]            rows 0, 1, 2
    row 0       [          | copied | new tokens .. | free ]            copied: too short to be worth sharing
    row 1       [ copied .......... | new tokens .. | free ]

This file knows nothing of tokens' values, of blocks or of sessions.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from agentmem.errors import CapacityError
from agentmem.tiers.device import DeviceTier
from agentmem.tiers.plan import Node, Piece, Place, pieces_of, private_pieces, shared_nodes
from agentmem.tiers.runs import Cursor, Run, Segment, Storage

LayerKV = tuple[Tensor, Tensor]
"""Keys and values of one stored layer."""

MIN_ROOM = 32
"""Tokens that every row can take before the buffer grows for the first time."""

WASTE = 4
"""A buffer this many times as large as what branches keep of it is not kept. Growing leaves up to half empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKV:
    """KV of tokens that several rows have.

    Attributes:
        rows: Indices of those rows, in order.
        num_tokens: Number of tokens.
        layers: Keys and values of each stored layer, `[H, T, D]`, in the order of `Pass.layers`.
    """

    rows: tuple[int, ...]
    num_tokens: int
    layers: list[LayerKV]


class RowStorage(Storage):
    """One row of a frontier's buffer, which lives as long as any row of it does."""

    __slots__ = ("whole",)

    def __init__(self, whole: Storage, index: int) -> None:
        super().__init__([section[index] for section in whole.sections], whole.capacity, 0)
        self.whole = whole


@dataclass(slots=True)
class Row:
    """One branch's row.

    Attributes:
        place: Where its KV is.
        length: Tokens of the branch.
        first: Its first slot with a token.
        stop: Its first free slot.
        storage: The row of the buffer.
        segment: What of it holds the run that grows; None until something was fed.
    """

    place: Place
    length: int
    first: int
    stop: int
    storage: Storage
    segment: Segment | None = None


class Frontier:
    """Rows of several branches over the runs that they share. Not thread-safe: one batch owns it.

    Attributes:
        rows: In the order in which places were given.
        shared: What several rows have; good until a workspace moves something (`is_current`).
    """

    def __init__(
        self,
        tier: DeviceTier,
        places: Sequence[Place],
        *,
        num_private: int,
        is_worth_sharing: Callable[[int, int], bool],
        num_new: int = 0,
        replaces: "Frontier | None" = None,
    ) -> None:
        """Copy into rows what is not shared.

        Args:
            tier: Where the buffer is counted.
            places: One per row; the KV of every one is on the device.
            num_private: How many of its last tokens each row must have in its own slots.
            is_worth_sharing: Whether tokens (the second number) are shared by so many rows (the first).
            num_new: Tokens that each row is expected to be fed.
            replaces: The frontier that had some of these rows; what its buffer holds of them moves here.

        Raises:
            CapacityError: The rows do not fit the device budget.
        """
        self._tier = tier
        paths = [pieces_of(place) for place in places]
        limits = [place.cursor.length - num_private for place in places]
        self._nodes = [
            node for node in shared_nodes(paths, limits) if is_worth_sharing(len(node.rows), node.num_tokens)
        ]
        private = [private_pieces(path, index, self._nodes) for index, path in enumerate(paths)]
        lengths = [sum(piece.high - piece.low for piece in pieces) for pieces in private]
        self._border = max(lengths, default=0)
        self.num_copied = sum(lengths)
        self.whole = self._allocate(len(places), self._border + max(num_new, MIN_ROOM), self._border)
        self.rows = [
            self._fill(index, place, pieces, length)
            for index, (place, pieces, length) in enumerate(zip(places, private, lengths, strict=True))
        ]
        if replaces is not None:
            for row, pieces in zip(self.rows, private, strict=True):
                self._take_over(row, pieces, replaces.whole)
            replaces.settle_rows(self)
        for node in self._nodes:
            node.storage, node.slot = node.pieces[0].memory()
        self.shared = [self._views(node) for node in self._nodes]
        self.layers = self._layers()

    @property
    def nbytes(self) -> int:
        """Bytes of KV: the buffer's, and those of what is shared."""
        return self.whole.nbytes + self.num_shared * self._tier.spec.token_nbytes

    @property
    def num_shared(self) -> int:
        """Tokens that are held once for several rows."""
        return sum(node.num_tokens for node in self._nodes)

    def is_current(self, cursors: Sequence[Cursor]) -> bool:
        """Say whether the rows stand where these cursors do, and nothing that they share has moved."""
        is_standing = len(cursors) == len(self.rows) and all(
            row.place.cursor is cursor and row.length == cursor.length
            for row, cursor in zip(self.rows, cursors, strict=True)
        )
        return is_standing and all(node.is_in_place() for node in self._nodes)

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more in every row; what is there for new tokens at least doubles.

        Raises:
            CapacityError: It does not fit the device budget.
        """
        needed = max(row.stop for row in self.rows) + num_tokens
        old = self.whole
        if needed <= old.capacity:
            return
        stop = max(row.stop for row in self.rows)
        self.whole = self._allocate(len(self.rows), 2 * needed - self._border, stop)
        for source, target in zip(old.sections, self.whole.sections, strict=True):
            target[:, :, :, :stop].copy_(source[:, :, :, :stop])
        for index, row in enumerate(self.rows):
            storage = RowStorage(self.whole, index)
            with row.place.workspace.lock:
                for segment in _segments_on(row, row.storage):
                    segment.storage = storage
            row.storage = storage
        self.layers = self._layers()
        for node in self._nodes:
            node.storage, node.slot = node.pieces[0].memory()

    def commit(self, index: int, num_tokens: int) -> None:
        """Make the `num_tokens` written at a row's end part of its branch's path."""
        row = self.rows[index]
        cursor, workspace = row.place.cursor, row.place.workspace
        workspace.order.note()
        with workspace.lock:
            run, segment = cursor.run, row.segment
            is_own = run is not None and run.segment is segment and run.stop == cursor.length and not run.is_attached
            if is_own and segment is not None and run is not None:
                segment.length += num_tokens
                segment.room = segment.length  # nobody else may move tokens into what this row writes
                run.stop += num_tokens
                cursor.length += num_tokens
            else:
                row.segment = Segment(row.storage, row.stop, num_tokens, num_tokens)
                run = Run(run, cursor.length, cursor.length + num_tokens, is_attached=False)
                run.segment = row.segment
                cursor.point(run, run.stop)
        row.stop += num_tokens
        row.length += num_tokens

    def settle_rows(self, successor: "Frontier | None" = None) -> None:
        """Let go of the rows: their branches keep what they were fed.

        It stays where it is, with the room behind it, unless most of the buffer would be kept for nothing, or another
        frontier takes its place.
        """
        own = [segment for row in self.rows for segment in _segments_on(row, row.storage)]
        is_wasteful = WASTE * sum(segment.length for segment in own) < len(self.rows) * self.whole.capacity
        for row in self.rows:
            if successor is not None or is_wasteful:
                self._move_out(row)
            elif row.segment is not None:
                with row.place.workspace.lock:
                    row.segment.room = row.storage.capacity - row.segment.offset

    # -- inside

    def _allocate(self, num_rows: int, num_tokens: int, num_filled: int) -> Storage:
        """Allocate a buffer of which the first `num_filled` slots are going to be written."""
        whole = self._tier.allocate(num_tokens, num_rows=num_rows)
        for section in whole.sections:  # hidden slots are read, too: they must hold numbers
            section[:, :, :, num_filled:].zero_()
        return whole

    def _fill(self, index: int, place: Place, pieces: Sequence[Piece], length: int) -> Row:
        """Copy a row's own tokens into it, up to the border that all rows begin to grow from."""
        storage = RowStorage(self.whole, index)
        slot = self._border - length
        for section in storage.sections:
            section[:, :, :slot].zero_()
        for piece in pieces:
            source, start = piece.memory()
            size = piece.high - piece.low
            for section, target in zip(source.sections, storage.sections, strict=True):
                target[:, :, slot : slot + size].copy_(section[:, :, start : start + size])
            slot += size
        return Row(place, place.cursor.length, self._border - length, self._border, storage)

    def _take_over(self, row: Row, pieces: Sequence[Piece], old: Storage) -> None:
        """Let runs in the buffer that this one replaces live in the row's copy of them."""
        slot = row.first
        for piece in pieces:
            run, segment = piece.run, piece.run.segment
            is_old = segment is not None and isinstance(segment.storage, RowStorage) and segment.storage.whole is old
            if is_old and (run.start, run.stop) == (piece.low, piece.high) and not run.is_attached:
                with piece.workspace.lock:
                    run.segment = Segment(row.storage, slot, piece.high - piece.low, piece.high - piece.low)
                if slot + piece.high - piece.low == row.stop and row.place.cursor.run is run:
                    row.segment = run.segment
            slot += piece.high - piece.low

    def _move_out(self, row: Row) -> None:
        """Give what a row was fed memory of its own; where there is none, it stays."""
        for segment in _segments_on(row, row.storage):
            with contextlib.suppress(CapacityError):
                storage = self._tier.allocate(segment.length)
                for source, target in zip(segment.views(0, segment.length), storage.sections, strict=True):
                    target[:, :, : segment.length].copy_(source)
                with row.place.workspace.lock:
                    segment.storage, segment.offset, segment.room = storage, 0, storage.capacity

    def _views(self, node: Node) -> SharedKV:
        start, stop = node.slot, node.slot + node.num_tokens
        keys_and_values = zip(node.storage.sections[::2], node.storage.sections[1::2], strict=True)
        layers = [
            (keys[layer, :, start:stop], values[layer, :, start:stop])
            for keys, values in keys_and_values
            for layer in range(keys.shape[0])
        ]
        return SharedKV(rows=node.rows, num_tokens=node.num_tokens, layers=layers)

    def _layers(self) -> list[LayerKV]:
        sections = self.whole.sections
        return [
            (keys[:, layer], values[:, layer])
            for keys, values in zip(sections[::2], sections[1::2], strict=True)
            for layer in range(keys.shape[1])
        ]


def _segments_on(row: Row, storage: Storage) -> list[Segment]:
    """Return the segments of the row's path that lie in `storage`."""
    segments = [run.segment for run, _ in row.place.cursor.path()]
    return [segment for segment in segments if segment is not None and segment.storage is storage]
