"""KV on the device as runs of tokens that branches share: a tree, and the places in it.

Knows nothing of who allocates, and nothing of blocks, tokens or sessions.

Source: SGLang's radix cache; the rule that what is named never changes is the prototype's (docs/experiments.md).
"""

import weakref
from dataclasses import dataclass

from torch import Tensor


class Storage:
    """Tensors of one allocation, one `[L, H, capacity, D]` per section; counted against the device budget."""

    __slots__ = ("__weakref__", "capacity", "nbytes", "sections")

    def __init__(self, sections: list[Tensor], capacity: int, nbytes: int) -> None:
        self.sections = sections
        self.capacity = capacity
        self.nbytes = nbytes


@dataclass(slots=True)
class Segment:
    """The slots [offset, offset + room) of a storage, of which the first `length` hold a run's first tokens."""

    storage: Storage
    offset: int
    length: int
    room: int

    def cut(self, position: int) -> "tuple[Segment, Segment | None]":
        """Share the storage out at `position`: neither part can grow into the other."""
        upper_room = max(self.room - position, 0)
        lower = Segment(self.storage, self.offset, min(position, self.length), self.room - upper_room)
        if self.length <= position:
            return lower, None
        return lower, Segment(self.storage, self.offset + position, self.length - position, upper_room)

    def views(self, start: int, stop: int) -> list[Tensor]:
        """Return `[L, H, stop - start, D]` views per section, `start` and `stop` counted from the segment's start."""
        low, high = self.offset + start, self.offset + stop
        return [section[:, :, low:high] for section in self.storage.sections]


class Run:
    """KV of the tokens [start, stop) that follow the first `start` tokens of `parent`.

    Its bytes are in the workspace while it is attached, else in its segment. They never change.
    """

    __slots__ = ("__weakref__", "children", "cursors", "is_attached", "parent", "segment", "start", "stop")

    def __init__(self, parent: "Run | None", start: int, stop: int, *, is_attached: bool) -> None:
        self.parent = parent
        self.start = start
        self.stop = stop
        self.is_attached = is_attached
        self.segment: Segment | None = None
        self.cursors: weakref.WeakSet[Cursor] = weakref.WeakSet()
        self.children: weakref.WeakSet[Run] = weakref.WeakSet()
        if parent is not None:
            parent.children.add(self)

    def needed_stop(self) -> int:
        """Return the position below which somebody still needs this run's tokens; `start` when nobody does."""
        lengths = [cursor.length for cursor in self.cursors] + [child.start for child in self.children]
        return min(max(lengths, default=self.start), self.stop)


class Cursor:
    """A place in the tree of runs: the first `length` tokens of the path that ends in `run`.

    While a cursor lives, the tokens below it stay on the device.
    """

    __slots__ = ("__weakref__", "length", "run")

    def __init__(self, run: Run | None, length: int) -> None:
        """Point at the first `length` tokens of the path that ends in `run`; None is the empty path."""
        self.run = run
        self.length = length
        if run is not None:
            run.cursors.add(self)

    def fork(self, length: int | None = None) -> "Cursor":
        """Return a cursor of the same path, or of its first `length` tokens. Copies no KV."""
        run, length = self.run, self.length if length is None else length
        while run is not None and length <= run.start:
            run = run.parent
        return Cursor(run, length)

    def point(self, run: Run | None, length: int) -> None:
        """Move to another place."""
        if run is not self.run:
            if self.run is not None:
                self.run.cursors.discard(self)
            if run is not None:
                run.cursors.add(self)
        self.run, self.length = run, length

    def path(self) -> list[tuple[Run, int]]:
        """Return the runs from the root on, each with the position at which this path leaves it."""
        steps: list[tuple[Run, int]] = []
        run, stop = self.run, self.length
        while run is not None:
            if stop > run.start:
                steps.append((run, stop))
                stop = run.start
            run = run.parent
        steps.reverse()
        return steps
