"""A sequence that forks for free: the tokens and the blocks of a branch.

Knows nothing of tokens, blocks or branches.
"""

from collections.abc import Iterable, Iterator, MutableSequence
from typing import Generic, TypeVar

T = TypeVar("T")


class _Run(Generic[T]):
    """Items from `start` on, after the first `start` items of `parent`. Items below any trail's length never change."""

    __slots__ = ("items", "parent", "start")

    def __init__(self, parent: "_Run[T] | None", start: int, items: MutableSequence[T]) -> None:
        self.parent = parent
        self.start = start
        self.items = items


class Trail(Generic[T]):
    """An append-only sequence whose prefixes are shared.

    `fork` and `truncate` are O(1) in the number of items; the first append after either opens a new run, so that no
    other trail ever sees an item change. A trail may be read from other threads while its owner appends.

    Source: persistent vectors with a shared tail; the same rule as the device's segments (docs/how-it-works.md).
    """

    __slots__ = ("_length", "_run")

    def __init__(self, items: MutableSequence[T]) -> None:
        """Start from `items`, which the trail owns from then on; an `array` keeps tokens in 4 bytes each."""
        self._run: _Run[T] = _Run(None, 0, items)
        self._length = len(items)

    def fork(self) -> "Trail[T]":
        """Return an independent trail of the same items. Costs the same for any length."""
        other: Trail[T] = Trail.__new__(Trail)
        other._run = self._run
        other._length = self._length
        return other

    def __len__(self) -> int:
        return self._length

    def extend(self, items: Iterable[T]) -> None:
        """Add `items` at the end; trails forked before do not see them."""
        run = self._own_run()
        run.items.extend(items)
        self._length = run.start + len(run.items)

    def truncate(self, length: int) -> None:
        """Keep the first `length` items.

        Raises:
            ValueError: `length` is negative or beyond the end.
        """
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot truncate {self._length} items to {length}")
        self._length = length
        while self._run.parent is not None and length <= self._run.start:
            self._run = self._run.parent

    def __getitem__(self, index: int) -> T:
        """Return one item; negative indices count from the end."""
        position = index if index >= 0 else self._length + index
        if not 0 <= position < self._length:
            raise IndexError(f"index {index} of {self._length} items")
        run = self._run
        while position < run.start and run.parent is not None:
            run = run.parent
        return run.items[position - run.start]

    def slice(self, start: int = 0, stop: int | None = None) -> list[T]:
        """Return the items of [start, stop) as a list, reading only the runs that hold them."""
        stop = self._length if stop is None else min(stop, self._length)
        pieces: list[MutableSequence[T]] = []
        run: _Run[T] | None = self._run
        while run is not None and start < stop:
            if stop > run.start:
                pieces.append(run.items[max(start - run.start, 0) : stop - run.start])
                stop = run.start
            run = run.parent
        return [item for piece in reversed(pieces) for item in piece]

    def __iter__(self) -> Iterator[T]:
        return iter(self.slice())

    def common_prefix(self, other: "Trail[T]") -> int:
        """Count the leading items that both trails share by reference (equal items in runs of their own don't count).

        Costs the number of runs, not of items.
        """
        bounds: dict[int, int] = {}
        run: _Run[T] | None = self._run
        bound = self._length
        while run is not None:
            bounds[id(run)] = bound
            bound, run = min(bound, run.start), run.parent
        run, bound = other._run, other._length
        while run is not None:
            if id(run) in bounds:
                return min(bounds[id(run)], bound)
            bound, run = min(bound, run.start), run.parent
        return 0

    def _own_run(self) -> _Run[T]:
        """Return a run whose end is this trail's end, opening a new one when another trail went on from here."""
        run = self._run
        if run.start + len(run.items) != self._length:
            self._run = run = _Run(run, self._length, run.items[:0])
        return run
