"""The blocks of one space: written as segments, read by ranges, several requests at once.

Knows nothing of sessions. A segment is put under the name of its bytes, and never changes. What names segments, so that
they stay, are index objects of sessions and `loose/<segment>`:

    a msgpack map, in an encrypted lake in a box bound to "loose" and the object's name: "start", where the segment's
    data begins; "directory", as segment.py describes it; "gone", digests of its blocks that were removed

The collector puts `doomed/<segment>` before it deletes a segment (collecting.py). Whoever names a segment looks for
that mark afterwards: if it is there the segment is not relied on, and if it is not, the collector will see the name.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar, cast

import msgpack

from agentmem.errors import CorruptionError, TierUnavailableError
from agentmem.ids import BlockDigest
from agentmem.lake.places import Place, Places
from agentmem.lake.seal import Seal
from agentmem.lake.segment import Entry, Segment, build, open_part
from agentmem.lake.space import Space
from agentmem.tiers import parts as parts_of
from agentmem.tiers.crew import Crew
from agentmem.tiers.parts import CutBlock

T = TypeVar("T")
ResultT = TypeVar("ResultT")

SEGMENT_NBYTES = 16_000_000
"""Most bytes of a segment of several blocks: two blocks of 64 tokens of an 8B model fit, and a part of both is worth a
request. Source: the 2 to 16 MB of issue 6."""

_NUM_THREADS = 4
_MAX_TRIES = 3
_ERRORS = (TypeError, ValueError, KeyError, msgpack.UnpackException)


class Shelf:
    """Reads and writes blocks. Thread-safe.

    Attributes:
        places: What the lake is known to hold.
        num_damaged: Blocks that came back in a form that cannot be one.
        put_nbytes: Bytes of segments that were put.
        fetched_nbytes: Bytes of parts that were read.
    """

    def __init__(self, space: Space, segment_nbytes: int = SEGMENT_NBYTES) -> None:
        """Start the threads."""
        self.places = Places()
        self.num_damaged = 0
        self.put_nbytes = 0
        self.fetched_nbytes = 0
        self._space = space
        self._segment_nbytes = segment_nbytes
        self._crew = Crew(_NUM_THREADS, "agentmem-lake")

    def each(self, work: Callable[[T], ResultT], tasks: Sequence[T]) -> list[ResultT]:
        """Do every task, several at once; the work must not call the shelf."""
        return self._crew.do(work, tasks)

    # ---- out

    def fetch(self, seal: Seal, digests: Sequence[BlockDigest]) -> list[bytes | None]:
        """Return each block's record; b"" for one whose parts cannot be put together, None for one that is not here."""

        def whole(entry: Entry, parts: list[bytes]) -> bytes:
            return parts_of.join(entry.head, parts)

        return self._read(seal, digests, None, whole)

    def fetch_parts(self, seal: Seal, digests: Sequence[BlockDigest], part: int) -> list[bytes | None]:
        """Return the record of one part of each block that has one; b"" for one that cannot be opened."""
        return self._read(seal, digests, part, lambda _, parts: parts[0])

    def _read(
        self,
        seal: Seal,
        digests: Sequence[BlockDigest],
        part: int | None,
        finish: Callable[[Entry, list[bytes]], bytes],
    ) -> list[bytes | None]:
        found = {digest: self.places.find(digest) for digest in digests}
        by_segment: dict[str, list[Place]] = {}
        for place in found.values():
            if place is not None and (part is None or part < len(place[0].entries[place[1]].part_nbytes)):
                by_segment.setdefault(place[0].name, []).append(place)

        def work(places: list[Place]) -> dict[BlockDigest, bytes]:
            return self._read_segment(seal, places, part, finish)

        records: dict[BlockDigest, bytes] = {}
        for each in self.each(work, list(by_segment.values())):
            records.update(each)
        return [records.get(digest) for digest in digests]

    def _read_segment(
        self, seal: Seal, places: list[Place], part: int | None, finish: Callable[[Entry, list[bytes]], bytes]
    ) -> dict[BlockDigest, bytes]:
        """Read parts of blocks of one segment in one request; neighbouring ranges are one."""
        segment = places[0][0]
        wanted = [
            (row, number)
            for _, row in places
            for number in ([part] if part is not None else range(len(segment.entries[row].part_nbytes)))
        ]
        key = self._space.path(seal, f"segments/{segment.name}")
        pieces = self._space.objects.get_ranges(key, [segment.span(row, number) for row, number in wanted])
        if pieces is None:
            self.places.forget_segment(segment.name)
            return {}
        self.fetched_nbytes += sum(map(len, pieces))
        stored: dict[int, list[tuple[int, bytes]]] = {}
        for (row, number), data in zip(wanted, pieces, strict=True):
            stored.setdefault(row, []).append((number, data))
        return {
            segment.entries[row].digest: self._opened(seal, segment.entries[row], stored[row], finish) for row in stored
        }

    def _opened(
        self, seal: Seal, entry: Entry, stored: list[tuple[int, bytes]], finish: Callable[[Entry, list[bytes]], bytes]
    ) -> bytes:
        try:
            if any(len(data) != entry.part_nbytes[number] for number, data in stored):
                raise CorruptionError("it is cut off")
            return finish(entry, [open_part(seal, entry.digest, number, data) for number, data in stored])
        except CorruptionError:
            self.num_damaged += 1
            return b""  # no record: whoever verifies it finds it damaged

    # ---- in

    def put(self, seal: Seal, records: Iterable[bytes]) -> list[Segment]:
        """Cut records, put them in segments and those into the lake; nothing names these yet.

        Raises:
            TierUnavailableError, StorageFullError: A segment could not be put.
            CorruptionError: A record is damaged.
        """
        segments: list[Segment] = []
        for group in _groups(records, self._segment_nbytes * _NUM_THREADS):
            blocks = self.each(parts_of.cut, group)
            built = [build(cut, seal) for cut in _groups_of_blocks(blocks, self._segment_nbytes)]
            self.each(lambda pair: self._put_segment(seal, *pair), built)
            segments += [segment for segment, _ in built]
        return segments

    def _put_segment(self, seal: Seal, segment: Segment, data: bytes) -> None:
        # False means that an earlier try of the same request had reached the server: the name is that of the bytes.
        self._space.objects.put_new(self._space.path(seal, f"segments/{segment.name}"), data)
        self.put_nbytes += len(data)

    def doomed(self, seal: Seal) -> set[str]:
        """Return the names of all segments that the collector is about to delete."""
        listed = self._space.objects.list(self._space.path(seal, "doomed"))
        return {info.key.rsplit("/", 1)[-1] for info in listed}

    def lost(self, seal: Seal, named: Iterable[str], safe: Iterable[str] = ()) -> set[str]:
        """Return which segments that were named just now cannot be relied on: doomed, or gone.

        The marks are looked at first: who finds none and then the segment knows that nobody is deleting it.

        Args:
            seal: The space's.
            named: Names of the segments.
            safe: Of these, segments that were named all the time.
        """
        names = set(named)
        lost = names & self.doomed(seal)
        unsure = sorted(names - lost - set(safe))
        keys = [self._space.path(seal, f"segments/{name}") for name in unsure]
        there = self.each(self._space.objects.has, keys)
        return lost | {name for name, is_there in zip(unsure, there, strict=True) if not is_there}

    # ---- blocks that no session names

    def put_loose(self, seal: Seal, records: Sequence[bytes]) -> None:
        """Store blocks for good, though no session names them.

        Raises:
            TierUnavailableError: They could not be put, or the collector came in between again and again.
            StorageFullError: There is no room.
        """
        for _ in range(_MAX_TRIES):
            segments = self.put(seal, records)
            self.each(lambda segment: self._put_loose(seal, segment, ()), segments)
            if not self.lost(seal, (segment.name for segment in segments)):
                self.places.add(segments)
                return
            for segment in segments:  # or they would be believed to hold what the collector takes
                self._space.objects.delete(self._space.path(seal, f"loose/{segment.name}"))
        raise TierUnavailableError(f"lake {self._space.objects.url}: what is put is collected at once: raise the grace")

    def read_loose(self, seal: Seal, name: str) -> tuple[Segment, set[BlockDigest]] | None:
        """Return a segment that `loose/<name>` names, and which of its blocks were removed; None when it is gone.

        Raises:
            CorruptionError: The object is damaged.
        """
        key = self._space.path(seal, f"loose/{name}")
        stored = self._space.objects.get(key)
        if stored is None:
            return None
        try:
            fields = cast("dict[str, object]", msgpack.unpackb(seal.open(stored, b"loose" + name.encode())))
            segment = Segment(name, cast("int", fields["start"]), cast("bytes", fields["directory"]))
            return segment, set(cast("list[BlockDigest]", fields["gone"]))
        except (*_ERRORS, CorruptionError) as error:
            raise CorruptionError(f"object {key} of the lake is damaged: {error}") from error

    def remove_loose(self, seal: Seal, digests: Sequence[BlockDigest]) -> None:
        """Remove blocks; what a session names stays in the lake, and is not taken from there by this handle."""
        by_segment: dict[str, set[BlockDigest]] = {}
        for digest in digests:
            while (place := self.places.find(digest)) is not None:
                by_segment.setdefault(place[0].name, set()).add(digest)
                self.places.refuse(digest)
        for name, gone in by_segment.items():
            loose = self.read_loose(seal, name)
            if loose is not None:
                self._remove(seal, loose[0], loose[1] | gone)

    def _remove(self, seal: Seal, segment: Segment, gone: set[BlockDigest]) -> None:
        if all(entry.digest in gone for entry in segment.entries):
            self._space.objects.delete(self._space.path(seal, f"loose/{segment.name}"))
        else:
            self._put_loose(seal, segment, sorted(gone))

    def _put_loose(self, seal: Seal, segment: Segment, gone: Sequence[BlockDigest]) -> None:
        fields = {"start": segment.data_start, "directory": segment.directory, "gone": list(gone)}
        stored = seal.close(msgpack.packb(fields), b"loose" + segment.name.encode())
        self._space.objects.put(self._space.path(seal, f"loose/{segment.name}"), stored)

    def close(self) -> None:
        """End the threads."""
        self._crew.close()


def _groups(records: Iterable[bytes], nbytes: int) -> Iterator[list[bytes]]:
    """Cut a stream of records into runs of about `nbytes`, so that no more of them are in memory at once."""
    group: list[bytes] = []
    size = 0
    for record in records:
        group.append(record)
        size += len(record)
        if size >= nbytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def _groups_of_blocks(blocks: Sequence[CutBlock], nbytes: int) -> Iterator[list[CutBlock]]:
    """Cut a run of blocks into segments of at most `nbytes`, but for a block that is larger itself."""
    group: list[CutBlock] = []
    size = 0
    for block in blocks:
        if group and size + block.nbytes > nbytes:
            yield group
            group, size = [], 0
        group.append(block)
        size += block.nbytes
    if group:
        yield group
