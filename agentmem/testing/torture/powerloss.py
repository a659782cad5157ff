"""What a power cut may leave of a directory: all that was synced, and any part of what was written since.

The model is a disk and a file system that reorder freely and tear pages, but write a sector of 512 bytes as a whole.

    ...  write  sync | write  write  truncate  write | cut
    all of it is there  any of the pages, or sectors, of these is there, or none

Names are changed durably by a sync of the directory; before it, any first part of the changes is there.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentmem.testing.torture.journal import Event, Kind

SECTOR_NBYTES = 512
PAGE_NBYTES = 4096


@dataclass(slots=True)
class _File:
    """One file: its bytes that are safe, and the writes that are not yet."""

    safe: bytearray = field(default_factory=bytearray)
    unsafe: list[tuple[int, bytes | None]] = field(default_factory=list)

    def sync(self) -> None:
        for offset, data in self.unsafe:
            _apply(self.safe, offset, data)
        self.unsafe.clear()

    def image(self, rng: random.Random, share: float, *, is_torn: bool) -> bytearray:
        """Return the bytes with a random `share` of the unsafe pages; with `is_torn`, of sectors."""
        image = bytearray(self.safe)
        for offset, data in self.unsafe:
            pieces = [(offset, data)] if data is None else _pieces(offset, data, is_torn=is_torn)
            for start, piece in pieces:
                if rng.random() < share:
                    _apply(image, start, piece)
        return image


class Disk:
    """A directory's files, event by event."""

    def __init__(self) -> None:
        """Start with an empty directory."""
        self._files: dict[int, _File] = {}
        self._safe_names: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._renamings: list[dict[str, int]] = []

    def apply(self, event: Event) -> None:
        """Let an event happen."""
        if event.kind in {Kind.WRITE, Kind.DURABLE_WRITE, Kind.TRUNCATE}:
            self._write(event)
        elif event.kind is Kind.SYNC:
            self._sync(event)
        elif event.kind is not Kind.MARK:
            self._rename(event)

    def image(self, rng: random.Random) -> dict[str, bytes]:
        """Return what a power cut now could leave, by name."""
        share = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        is_torn = rng.random() < 0.5
        names = rng.choice([self._safe_names, *self._renamings])
        return {name: bytes(self._files[inode].image(rng, share, is_torn=is_torn)) for name, inode in names.items()}

    def _write(self, event: Event) -> None:
        file = self._files.setdefault(event.inode, _File())
        self._name(event)
        file.unsafe.append((event.offset, None if event.kind is Kind.TRUNCATE else event.data))
        if event.kind is Kind.DURABLE_WRITE:
            _apply(file.safe, event.offset, event.data)

    def _sync(self, event: Event) -> None:
        if event.name:
            self._files.setdefault(event.inode, _File()).sync()
        else:
            self._safe_names = dict(self._names)
            self._renamings.clear()

    def _rename(self, event: Event) -> None:
        if event.kind is Kind.CREATE:
            self._create(event)
            return
        inode = self._names.pop(event.name, None)
        if event.kind is Kind.RENAME and inode is not None:
            self._names[event.data.decode()] = inode
        self._renamings.append(dict(self._names))

    def _create(self, event: Event) -> None:
        if self._names.get(event.name) != event.inode:
            self._files[event.inode] = _File()  # the number of a file that was removed is given again
            self._name(event)

    def _name(self, event: Event) -> None:
        is_gone = event.name.endswith(" (deleted)")  # so Linux calls a file that is open, but has no name any more
        if not is_gone and self._names.get(event.name) != event.inode:
            self._names[event.name] = event.inode
            self._renamings.append(dict(self._names))


def cuts(events: Sequence[Event], number: int, rng: random.Random) -> Iterator[tuple[dict[str, bytes], int]]:
    """Yield images of `number` power cuts at random events, each with the greatest mark before it (0 for none)."""
    places = sorted(rng.randrange(1, len(events) + 1) for _ in range(number))
    disk, done, mark = Disk(), 0, 0
    for place in places:
        for event in events[done:place]:
            disk.apply(event)
            mark = max(mark, event.inode) if event.kind is Kind.MARK else mark
        done = place
        yield disk.image(rng), mark


def lie(events: Sequence[Event]) -> list[Event]:
    """Return the events of a disk that acknowledges syncs without doing them, but for the first ones of each file.

    For a test of the test: on such a disk promises are broken, and must be seen to be.
    """
    seen: set[int] = set()
    kept = []
    for event in events:
        if event.kind is Kind.SYNC and event.name:
            if event.inode in seen:
                continue
            seen.add(event.inode)
        kept.append(event)
    return kept


def write(image: dict[str, bytes], folder: Path) -> None:
    """Write an image into a new directory."""
    folder.mkdir(mode=0o700)
    for name, data in image.items():
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)


def _apply(data: bytearray, offset: int, piece: bytes | None) -> None:
    """Write `piece`; None makes the file end at `offset`."""
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    if piece is None:
        del data[offset:]
    else:
        data[offset : offset + len(piece)] = piece


def _pieces(offset: int, data: bytes, *, is_torn: bool) -> Iterator[tuple[int, bytes]]:
    """Cut what is written at `offset` where a page of the file begins, or with `is_torn` a sector."""
    nbytes = SECTOR_NBYTES if is_torn else PAGE_NBYTES
    start = 0
    while start < len(data):
        end = min(len(data), start + nbytes - (offset + start) % nbytes)
        yield offset + start, data[start:end]
        start = end
