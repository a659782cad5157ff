"""The lake, tier 5: sessions that any machine can pull by name, and records of blocks by their digest.

Knows nothing of stores or models: what a session's entries say is transfer.py's business.
"""

import importlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from agentmem.errors import (
    ClosedError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    StorageFullError,
    TierUnavailableError,
)
from agentmem.ids import BlockDigest, BlockHash
from agentmem.kv.record import Record
from agentmem.lake.index import Label, SessionIndex
from agentmem.lake.seal import Seal
from agentmem.lake.segment import Entry, Segment
from agentmem.lake.sessions import Sessions, conflict
from agentmem.lake.shelf import SEGMENT_NBYTES, Shelf
from agentmem.lake.space import Space

TIMEOUT_S = 45.0
"""Longest time for one request: four segments at once come through at 1.4 MB/s."""

REFRESH_S = 60.0
"""Seconds for which what other machines put may go unnoticed when a block is asked for by its digest."""

_MAX_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A session that is to be pushed.

    Attributes:
        label: What a listing will say of it; its version is that which the session continues, 0 for a new one.
        entries: The session, its checkpoints and branches: a kind of four bytes and the entry each.
        moves: Its reflog, oldest first.
        digests: Every record that the checkpoints name.
    """

    label: Label
    entries: tuple[tuple[bytes, bytes], ...]
    moves: tuple[bytes, ...]
    digests: tuple[BlockDigest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What a push did.

    Attributes:
        version: The session's version in the lake.
        num_new_blocks: Blocks that the lake did not have.
        put_nbytes: Bytes of segments that were put.
    """

    version: int
    num_new_blocks: int
    put_nbytes: int


class Lake:
    """One lake, as stores with one key see it. Thread-safe; a `RecordTier`.

    Attributes:
        space: Its objects, for the collector.
        shelf: Its blocks, with counters.
        sessions: Its index objects, for the collector.
    """

    name = "lake"

    def __init__(
        self,
        space: Space,
        *,
        clock: Callable[[], float] = time.monotonic,
        refresh_s: float = REFRESH_S,
        segment_nbytes: int = SEGMENT_NBYTES,
    ) -> None:
        """Ask nothing yet; use `open`."""
        self.space = space
        self.shelf = Shelf(space, segment_nbytes)
        self.sessions = Sessions(space)
        self._clock = clock
        self._refresh_s = refresh_s
        self._refreshed_s: float | None = None
        self._read: dict[str, tuple[Segment, ...]] = {}
        self._refreshing = threading.Lock()
        self._is_closed = False

    @classmethod
    def open(
        cls,
        url: str,
        *,
        key: bytes | None = None,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Open the lake at a URL, as `s3://bucket/prefix`, `gs://`, `az://` or `file:///directory`.

        Nothing is asked of the server yet. Credentials come from the usual environment of the service.

        Args:
            url: Where.
            key: The key of an encrypted store.
            timeout_s: Longest time for one request, and how long a failed one is tried again.
            clock: Seconds, for the circuit breaker and for how long answers hold.

        Raises:
            InvalidInputError: The URL names no such place, the key has not 32 bytes, or obstore is not installed.
        """
        try:
            objects = importlib.import_module("agentmem.lake.objects").Objects
        except ModuleNotFoundError as error:
            raise InvalidInputError("a lake needs the package `obstore`: pip install 'agentmem-kv[lake]'") from error
        return cls(Space(objects.open(url, timeout_s=timeout_s, clock=clock), key), clock=clock)

    @property
    def url(self) -> str:
        """Where the lake is."""
        return self.space.objects.url

    @property
    def uuid(self) -> bytes:
        """Names the space of stores with this key; b"" while nobody has put anything into it.

        Raises:
            TierUnavailableError: The lake cannot be reached.
        """
        seal = self._found_seal()
        return b"" if seal is None else seal.uuid

    @property
    def is_durable(self) -> bool:
        """Whether what is here outlives every machine: yes, but for a lake in memory."""
        return self.space.objects.is_durable

    # ---- sessions

    def push(self, parcel: Parcel, load: Callable[[BlockDigest], bytes]) -> Pushed:
        """Put a session into the lake: the blocks that it lacks, then, last of all, the index object.

        Other machines see the old version or the new one. After an error they see the old one.

        Args:
            parcel: The session.
            load: Returns the record of a block.

        Raises:
            AlreadyExistsError: The lake has a version that does not come before this one.
            TierUnavailableError, StorageFullError: Something could not be put.
            CorruptionError: A record is damaged.
        """
        seal = self._made_seal()
        name, base = parcel.label.name, parcel.label.version
        versions = self.sessions.versions(seal, name)
        if versions and versions[-1] != base:
            raise conflict(name, versions[-1])
        before = self.sessions.read(seal, name, base) if versions else None
        if before is not None:
            self.shelf.places.add(before.segments)
            if (before.entries, before.moves) == (parcel.entries, parcel.moves):
                return Pushed(version=base, num_new_blocks=0, put_nbytes=0)
        self._refresh_if_old(seal)
        return self._push(seal, parcel, load, before)

    def _push(
        self, seal: Seal, parcel: Parcel, load: Callable[[BlockDigest], bytes], before: SessionIndex | None
    ) -> Pushed:
        places, version = self.shelf.places, parcel.label.version
        lost = self.shelf.doomed(seal)
        num_new, put_nbytes = 0, self.shelf.put_nbytes
        for _ in range(_MAX_TRIES):
            for segment in lost:
                places.forget_segment(segment)
            missing = [digest for digest in parcel.digests if places.find(digest) is None]
            num_new += len(missing)
            places.add(self.shelf.put(seal, (load(digest) for digest in missing)))
            version += 1
            index = _index(parcel, version, self._segments_of(parcel.digests))
            self.sessions.write(seal, index)
            safe = self._still_named(seal, before)
            lost = self.shelf.lost(seal, (segment.name for segment in index.segments), safe)
            if not lost:
                return Pushed(version=version, num_new_blocks=num_new, put_nbytes=self.shelf.put_nbytes - put_nbytes)
        for unreliable in range(version, parcel.label.version, -1):
            self.sessions.remove_version(seal, parcel.label.name, unreliable)
        raise TierUnavailableError(f"lake {self.url}: what is put is collected at once: raise the collector's grace")

    def pull(self, name: str, *, version: int | None = None) -> SessionIndex:
        """Return a session, by default its newest version; its blocks can be fetched from now on.

        Raises:
            NotFoundError: The lake has no such session, or not that version.
            CorruptionError: Its index object is damaged.
            TierUnavailableError: The lake cannot be reached.
        """
        seal = self._found_seal()
        versions = [] if seal is None else self.sessions.versions(seal, name)
        wanted = version if version is not None else max(versions, default=0)
        index = None if seal is None or wanted not in versions else self.sessions.read(seal, name, wanted)
        if index is None:
            what = f"session {name!r}" if version is None else f"version {version} of session {name!r}"
            raise NotFoundError(f"lake {self.url} has no {what}; see `agentmem lake ls {self.url}`")
        if index.label.name != name:
            raise CorruptionError(f"lake {self.url} holds session {index.label.name!r} in the place of {name!r}")
        self.shelf.places.add(index.segments)
        return index

    def names(self) -> list[Label]:
        """Return what the lake says of each session, in the order of names.

        Raises:
            TierUnavailableError: The lake cannot be reached.
            CorruptionError: An index object is damaged.
        """
        seal = self._found_seal()
        return [] if seal is None else sorted(self.sessions.labels(seal), key=lambda label: label.name)

    def remove(self, name: str) -> None:
        """Remove a session with all its versions; blocks that nothing names any more are left to the collector.

        Raises:
            NotFoundError: There is none of that name.
            TierUnavailableError: The lake cannot be reached.
        """
        seal = self._found_seal()
        if seal is None or not self.sessions.remove(seal, name):
            raise NotFoundError(f"lake {self.url} has no session {name!r}; see `agentmem lake ls {self.url}`")

    # ---- blocks

    def find_entries(self, digests: Sequence[BlockDigest]) -> list[Entry | None]:
        """Return what the lake says of each block: its head, and the sizes of its parts."""
        if self._asked(digests) is None:
            return [None] * len(digests)
        places = [self.shelf.places.find(digest) for digest in digests]
        return [None if place is None else place[0].entries[place[1]] for place in places]

    def fetch_heads(self, digests: Sequence[BlockDigest]) -> list[bytes | None]:
        """Return the first bytes of each block's record, up to its payload; None for one that is not here."""
        return [None if entry is None else entry.head for entry in self.find_entries(digests)]

    def fetch_parts(self, digests: Sequence[BlockDigest], part: int) -> list[bytes | None]:
        """Return one part of each block (tiers/parts.py), in one request for each segment; damaged ones as b""."""
        seal = self._asked(digests)
        return [None] * len(digests) if seal is None else self.shelf.fetch_parts(seal, digests, part)

    def contains_many(self, digests: Sequence[BlockDigest]) -> list[bool]:
        """Say of each block whether it is here; what others put in the last minute may be missing."""
        self._asked(digests)
        return [self.shelf.places.find(digest) is not None for digest in digests]

    def fetch_many(self, digests: Sequence[BlockDigest]) -> list[bytes | None]:
        """Return each block's record, None for one that is not here; nothing is verified.

        A block that was cut by layers comes in other bands than it was put in, as another record of the same KV; one
        whose parts cannot be put together comes as b"".
        """
        seal = self._asked(digests)
        return [None] * len(digests) if seal is None else self.shelf.fetch(seal, digests)

    def put_many(self, records: Sequence[Record]) -> list[bool]:
        """Store records that no session names, for good; False where there is no room.

        Each call makes at least one segment, so put many at once. Blocks that are here already are not put again.
        """
        seal = self._made_seal()
        if not records:
            return []
        self._asked([record.digest for record in records])
        missing = {record.digest: record.data for record in records if not self._has(record.digest)}
        if missing:
            try:
                self.shelf.put_loose(seal, list(missing.values()))
            except StorageFullError:
                return [record.digest not in missing for record in records]
        return [True] * len(records)

    def find_many(self, names: Sequence[BlockHash]) -> list[BlockDigest | None]:
        """Return for each token name a block of those tokens that is here, or None."""
        places = self.shelf.places
        seal = self._found_seal()
        if seal is not None and any(places.find_name(name) is None for name in names):
            self._refresh_if_old(seal)
        return [places.find_name(name) for name in names]

    def remove_many(self, digests: Sequence[BlockDigest]) -> None:
        """Drop blocks that `put_many` stored. What a session names stays; this handle takes it from there no more."""
        seal = self._asked(digests)
        if seal is not None:
            self.shelf.remove_loose(seal, digests)

    def refresh(self) -> None:
        """Read what other machines have put, as is done by itself once a minute when something is not found.

        Raises:
            TierUnavailableError: The lake cannot be reached.
        """
        seal = self._found_seal()
        if seal is not None:
            with self._refreshing:
                self._refresh(seal)

    def close(self) -> None:
        """Let go of the lake; again is harmless."""
        if not self._is_closed:
            self._is_closed = True
            self.shelf.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- within

    def _found_seal(self) -> Seal | None:
        """Return what opens the space; None where nobody has put anything into it."""
        self._check_open()
        return self.space.find_seal()

    def _made_seal(self) -> Seal:
        self._check_open()
        return self.space.make_seal()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the lake {self.url} is closed: open it again")

    def _has(self, digest: BlockDigest) -> bool:
        return self.shelf.places.find(digest) is not None

    def _asked(self, digests: Sequence[BlockDigest]) -> Seal | None:
        """Make sure that what is not known of blocks is not known to the lake either, a minute ago."""
        seal = self._found_seal()
        if seal is not None and not all(self._has(digest) for digest in digests):
            self._refresh_if_old(seal)
        return seal

    def _refresh_if_old(self, seal: Seal) -> None:
        with self._refreshing:
            if self._refreshed_s is None or self._clock() - self._refreshed_s >= self._refresh_s:
                self._refresh(seal)

    def _refresh(self, seal: Seal) -> None:
        """Read the newest index object of every session and all loose segments, of these what was not read before."""
        now_s, since = self._clock(), self.shelf.places.num_added
        newest = [infos[-1].key for infos in self.sessions.listed(seal).values()]
        loose = [info.key for info in self.space.objects.list(self.space.path(seal, "loose"))]
        new = [key for key in (*newest, *loose) if key not in self._read]
        found = self.shelf.each(lambda key: self._segments_in(seal, key), new)
        self._read = {key: segments for key, segments in self._read.items() if key in {*newest, *loose}}
        self._read.update(zip(new, found, strict=True))
        self.shelf.places.replace((segment for segments in self._read.values() for segment in segments), since)
        self._refreshed_s = now_s

    def _segments_in(self, seal: Seal, key: str) -> tuple[Segment, ...]:
        """Return the segments that an object names; none where it is damaged, for others are not."""
        try:
            if key.rsplit("/", 2)[-2] == "loose":
                loose = self.shelf.read_loose(seal, key.rsplit("/", 1)[-1])
                return () if loose is None else (loose[0],)
            index = self.sessions.read_object(seal, key)
        except CorruptionError:
            return ()
        else:
            return () if index is None else index.segments

    def _segments_of(self, digests: Sequence[BlockDigest]) -> tuple[Segment, ...]:
        places = (self.shelf.places.find(digest) for digest in digests)
        return tuple({place[0].name: place[0] for place in places if place is not None}.values())

    def _still_named(self, seal: Seal, before: SessionIndex | None) -> list[str]:
        """Return the segments that a version named which is there still: no collector took them meanwhile."""
        if before is None or not self.sessions.has(seal, before.label.name, before.label.version):
            return []
        return [segment.name for segment in before.segments]


def _index(parcel: Parcel, version: int, segments: tuple[Segment, ...]) -> SessionIndex:
    wanted = set(parcel.digests)
    sizes = (sum(entry.part_nbytes) for segment in segments for entry in segment.entries if entry.digest in wanted)
    fields = {name: getattr(parcel.label, name) for name in Label.__slots__}
    label = Label(**fields | {"version": version, "num_blocks": len(wanted), "nbytes": sum(sizes)})
    return SessionIndex(label=label, entries=parcel.entries, moves=parcel.moves, segments=segments)
