"""The sessions of one space: index objects, whose versions rise, each written once and never changed."""

from collections.abc import Iterator

from agentmem.errors import AlreadyExistsError
from agentmem.lake.index import (
    LABEL_RANGE_NBYTES,
    Label,
    SessionIndex,
    index_key,
    pack_index,
    read_label,
    session_prefix,
    unpack_index,
    version_of,
)
from agentmem.lake.objects import ObjectInfo
from agentmem.lake.seal import Seal
from agentmem.lake.space import Space


class Sessions:
    """Reads and writes index objects. Thread-safe."""

    def __init__(self, space: Space) -> None:
        """Look into a space."""
        self._space = space

    def versions(self, seal: Seal, name: str) -> list[int]:
        """Return the versions of a session that are there, oldest first."""
        listed = self._space.objects.list(self._space.path(seal, session_prefix(name, seal)))
        return sorted(version for info in listed if (version := version_of(info.key)))

    def listed(self, seal: Seal) -> dict[str, list[ObjectInfo]]:
        """Return the index objects of all sessions, each session's oldest first, by what their names begin with."""
        found: dict[str, list[ObjectInfo]] = {}
        for info in self._space.objects.list(self._space.path(seal, "sessions")):
            if version_of(info.key):
                found.setdefault(info.key.rsplit("/", 1)[0], []).append(info)
        return {prefix: sorted(infos, key=lambda info: version_of(info.key)) for prefix, infos in found.items()}

    def read(self, seal: Seal, name: str, version: int) -> SessionIndex | None:
        """Return a version of a session; None when it is gone.

        Raises:
            CorruptionError: It is damaged.
            FormatVersionError: It needs a newer agentmem.
        """
        return self.read_object(seal, self._space.path(seal, index_key(name, version, seal)))

    def read_object(self, seal: Seal, path: str) -> SessionIndex | None:
        """Return what an index object holds, by its name in the lake; None when it is gone."""
        data = self._space.objects.get(path)
        return None if data is None else unpack_index(data, path.split("/", 1)[1], seal)

    def has(self, seal: Seal, name: str, version: int) -> bool:
        """Say whether a version of a session is there."""
        return self._space.objects.has(self._space.path(seal, index_key(name, version, seal)))

    def write(self, seal: Seal, index: SessionIndex) -> None:
        """Put a new version of a session.

        Raises:
            AlreadyExistsError: Somebody else has put that version.
        """
        key = index_key(index.label.name, index.label.version, seal)
        data = pack_index(index, key, seal)
        path = self._space.path(seal, key)
        # Ours may be there already: an earlier try of the same request, whose answer got lost.
        if not self._space.objects.put_new(path, data) and self._space.objects.get(path) != data:
            raise conflict(index.label.name, index.label.version)

    def labels(self, seal: Seal) -> Iterator[Label]:
        """Yield what the newest version of each session says of itself, without reading it whole.

        Raises:
            CorruptionError: One is damaged.
        """
        for infos in self.listed(seal).values():
            path = infos[-1].key
            found = self._space.objects.get_ranges(path, [(0, min(LABEL_RANGE_NBYTES, infos[-1].nbytes))])
            if found is not None:
                yield read_label(found[0], path.split("/", 1)[1], seal)

    def remove(self, seal: Seal, name: str) -> int:
        """Remove every version of a session; return how many there were."""
        versions = self.versions(seal, name)
        for version in versions:  # the newest last, so that it is whole until it is gone
            self.remove_version(seal, name, version)
        return len(versions)

    def remove_version(self, seal: Seal, name: str, version: int) -> None:
        """Remove one version of a session; nothing happens when it is gone."""
        self._space.objects.delete(self._space.path(seal, index_key(name, version, seal)))


def conflict(name: str, version: int) -> AlreadyExistsError:
    """Say that somebody else has pushed a session meanwhile."""
    return AlreadyExistsError(
        f"the lake has version {version} of session {name!r}, which this store has not seen: pull it under another "
        "name, or push this one under another name"
    )
