"""Deleting segments that nothing names any more, while others push.

A segment that no index object and no loose object names is marked first (`doomed/<segment>`), and deleted by a later
run, once the mark is older than the grace and after the names were read anew. A pusher that names a segment looks for
the mark afterwards (shelf.py): it sees the mark, or the collector sees its name. Marks are never taken back while their
segment is there, and no two segments ever have one name. So nobody loses a block, whatever the clocks say; the grace
only spares those who push and read just now the trouble.
"""

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from agentmem.errors import CorruptionError
from agentmem.lake.lake import Lake
from agentmem.lake.objects import ObjectInfo
from agentmem.lake.seal import Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectReport:
    """What a collection did, or with `dry_run` would do.

    Attributes:
        num_segments: Segments that the lake had.
        num_marked: Those of them that nothing names and that are marked now, to be deleted after the grace.
        num_removed: Those that were deleted.
        removed_nbytes: Their bytes.
        num_versions: Versions of sessions that were deleted, newer ones being older than the grace.
    """

    num_segments: int
    num_marked: int
    num_removed: int
    removed_nbytes: int
    num_versions: int


def collect(
    lake: Lake, *, grace_s: float, dry_run: bool = False, clock: Callable[[], float] = time.time
) -> CollectReport:
    """Delete old versions of sessions, mark segments that nothing names, and delete those marked a grace ago.

    Raises:
        CorruptionError: An object that names segments is damaged; nothing is deleted while it is there.
        TierUnavailableError: The lake cannot be reached; what was done so far is done.
    """
    seal = lake.space.find_seal()
    if seal is None:
        return CollectReport(num_segments=0, num_marked=0, num_removed=0, removed_nbytes=0, num_versions=0)
    return _Collection(lake, seal, clock() - grace_s, is_immediate=grace_s <= 0, dry_run=dry_run).run()


class _Collection:
    """One run; what changed at `before_s` or earlier is old enough, and if `is_immediate` the marks of this run too."""

    def __init__(self, lake: Lake, seal: Seal, before_s: float, *, is_immediate: bool, dry_run: bool) -> None:
        self._lake = lake
        self._seal = seal
        self._objects = lake.space.objects
        self._before_s = before_s
        self._is_immediate = is_immediate
        self._dry_run = dry_run
        self._known: dict[str, frozenset[str]] = {}

    def run(self) -> CollectReport:
        num_versions = self._remove_versions()
        segments = {_name(info): info for info in self._list("segments")}
        named = self._named()
        marks = {_name(info): info for info in self._list("doomed")}
        unnamed = [name for name, info in segments.items() if name not in named and self._is_old(info)]
        marked = [name for name in unnamed if name not in marks]
        for name in marked:
            self._do(partial(self._objects.put_new, self._path(f"doomed/{name}"), b""))
        due = [info for info in marks.values() if self._is_old(info)]
        removed = self._remove(list(self._list("doomed")) if self._is_immediate else due, segments)
        return CollectReport(
            num_segments=len(segments),
            num_marked=len(marked),
            num_removed=len(removed),
            removed_nbytes=sum(info.nbytes for info in removed),
            num_versions=num_versions,
        )

    def _remove_versions(self) -> int:
        """Delete versions of sessions behind which an old enough one stands."""
        num_removed = 0
        for infos in self._lake.sessions.listed(self._seal).values():
            for info, newer in itertools.pairwise(infos):
                if self._is_old(newer):
                    self._do(partial(self._objects.delete, info.key))
                    num_removed += 1
        return num_removed

    def _remove(self, due: list[ObjectInfo], segments: dict[str, ObjectInfo]) -> list[ObjectInfo]:
        """Delete the segments of marks, but for those that are named by now: names are read after marks were put."""
        named = self._named() if due else set()
        removed = []
        for mark in due:
            name = _name(mark)
            if name in named:
                continue  # whoever named it has seen the mark, and names another one too
            self._do(partial(self._objects.delete, self._path(f"segments/{name}")))
            self._do(partial(self._objects.delete, mark.key))
            if name in segments:
                removed.append(segments[name])
        return removed

    def _named(self) -> set[str]:
        """Return every segment that something names now; what was read before is not read again."""
        indexes = [info.key for infos in self._lake.sessions.listed(self._seal).values() for info in infos]
        unread = [key for key in indexes if key not in self._known]
        self._known.update(zip(unread, self._lake.shelf.each(self._segments_of, unread), strict=True))
        named = {_name(info) for info in self._list("loose")}
        return named.union(*(self._known[key] for key in indexes))

    def _segments_of(self, key: str) -> frozenset[str]:
        try:
            index = self._lake.sessions.read_object(self._seal, key)
        except CorruptionError as error:
            raise CorruptionError(f"nothing of the lake is collected: {error}; remove it, or push it again") from error
        return frozenset() if index is None else frozenset(segment.name for segment in index.segments)

    def _list(self, kind: str) -> Iterable[ObjectInfo]:
        return self._objects.list(self._path(kind))

    def _path(self, name: str) -> str:
        return self._lake.space.path(self._seal, name)

    def _is_old(self, info: ObjectInfo) -> bool:
        return info.changed_s <= self._before_s

    def _do(self, change: Callable[[], object]) -> None:
        if not self._dry_run:
            change()


def _name(info: ObjectInfo) -> str:
    return info.key.rsplit("/", 1)[-1]
