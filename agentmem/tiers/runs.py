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

    def shorten(self, stop: int) -> None:
        """Give up the tokens from `stop` on, which nobody needs."""
        if self.segment is not None:  # its copy first: a run that is too long for its copy is not to be had
            self.segment.length = min(self.segment.length, stop - self.start)
        self.stop = stop

    def split(self, position: int, chain: "list[Run]") -> "Run":
        """Cut the run at `position`; return the new lower half. This stays the upper one, for all that point above.

        It is cut at a stroke. Whoever points at the upper half and needs the lower one only finds that by its parent:
        that they are moved to it afterwards lets it go the sooner, and no more.

        Args:
            position: Where to cut.
            chain: The runs in the workspace: when this one is attached, the lower half comes in before it.
        """
        lower = Run(self.parent, self.start, position, is_attached=self.is_attached)
        lower.children.add(self)
        upper, parent = self.segment, self.parent
        if upper is not None:
            lower.segment, upper = upper.cut(position - self.start)
        place = next((index for index, attached in enumerate(chain) if attached is self), len(chain))
        self.parent, self.start, self.segment = lower, position, upper
        if self.is_attached:
            chain[place:place] = [lower]
        self._hand_down(lower)
        if parent is not None:
            parent.children.discard(self)
        return lower

    def _hand_down(self, lower: "Run") -> None:
        """Let what needs the lower half only, point at that."""
        for cursor in [cursor for cursor in self.cursors if cursor.length <= lower.stop]:
            cursor.point(lower, cursor.length)
        for child in [child for child in self.children if child.start <= lower.stop]:
            lower.children.add(child)
            child.parent = lower
            self.children.discard(child)


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
        before = self.run
        if run is not before and run is not None:
            run.cursors.add(self)
        self.run, self.length = run, length
        if run is not before and before is not None:
            before.cursors.discard(self)  # last: what is pointed at is never without a cursor

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
