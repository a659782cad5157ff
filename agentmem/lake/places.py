"""Which blocks a lake is known to hold, and in which segments. Knows nothing of objects."""

import threading
from collections.abc import Iterable

from agentmem.ids import BlockDigest, BlockHash
from agentmem.lake.segment import Segment

Place = tuple[Segment, int]
"""A segment, and the block's row in it."""


class Places:
    """What this handle knows. Thread-safe.

    Attributes:
        num_added: Segments that were added so far.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self.num_added = 0
        self._lock = threading.Lock()
        self._order: dict[str, int] = {}
        self._segments: dict[str, Segment] = {}
        self._places: dict[BlockDigest, Place] = {}
        self._names: dict[BlockHash, BlockDigest] = {}
        self._refused: set[tuple[str, BlockDigest]] = set()

    def replace(self, segments: Iterable[Segment], since: int) -> None:
        """Know these segments, those added since `num_added` was that, and no others; what was refused stays so."""
        with self._lock:
            newer = {name: each for name, each in self._segments.items() if self._order.get(name, 0) > since}
            self._segments = {segment.name: segment for segment in segments} | newer
            self._order = {name: self._order[name] for name in newer}
            self._rebuild()

    def add(self, segments: Iterable[Segment]) -> None:
        """Know these segments too."""
        with self._lock:
            for segment in segments:
                self.num_added += 1
                self._order[segment.name] = self.num_added
                self._segments[segment.name] = segment
                self._enter(segment, self._places, self._names)

    def find(self, digest: BlockDigest) -> Place | None:
        """Return where a block is, or None."""
        return self._places.get(digest)

    def find_name(self, name: BlockHash) -> BlockDigest | None:
        """Return a block of these tokens, or None."""
        return self._names.get(name)

    def refuse(self, digest: BlockDigest) -> None:
        """Never again take a block from where it is now: it is damaged there, or was removed."""
        with self._lock:
            place = self._places.get(digest)
            if place is not None:
                self._refused.add((place[0].name, digest))
                self._rebuild()

    def forget_segment(self, name: str) -> None:
        """Forget a segment that is gone."""
        with self._lock:
            if self._segments.pop(name, None) is not None:
                self._rebuild()

    def _rebuild(self) -> None:
        """Enter all segments again: a block may lie in several."""
        places: dict[BlockDigest, Place] = {}
        names: dict[BlockHash, BlockDigest] = {}
        for segment in self._segments.values():
            self._enter(segment, places, names)
        self._places, self._names = places, names  # whole, for those who look without the lock

    def _enter(self, segment: Segment, places: dict[BlockDigest, Place], names: dict[BlockHash, BlockDigest]) -> None:
        for row, entry in enumerate(segment.entries):
            if (segment.name, entry.digest) not in self._refused:
                places.setdefault(entry.digest, (segment, row))
                names.setdefault(entry.block_hash, entry.digest)
