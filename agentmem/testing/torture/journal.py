"""What `faults.c` wrote down: every change of the files of a directory, in order. Its bytes are described there."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_HEAD = struct.Struct("=IIQQQ")


class Kind(IntEnum):
    """What happened; the values are those of `enum event` in `faults.c`."""

    WRITE = 1
    DURABLE_WRITE = 2
    SYNC = 3
    TRUNCATE = 4
    CREATE = 5
    RENAME = 6
    UNLINK = 7
    MARK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One change, sync or mark.

    Attributes:
        kind: What happened.
        name: The file's name in the directory at that time, "" for the directory itself.
        inode: The file's number; of a mark, its own.
        offset: Where bytes were written; the new length of a truncated file.
        data: The bytes; the new name of a renamed file.
    """

    kind: Kind
    name: str
    inode: int
    offset: int
    data: bytes


def read(path: Path) -> list[Event]:
    """Return the events of a journal, oldest first; a last one that was cut off by a kill is left out."""
    return list(_events(path.read_bytes()))


def _events(data: bytes) -> Iterator[Event]:
    start = 0
    while start + _HEAD.size <= len(data):
        kind, name_nbytes, inode, offset, nbytes = _HEAD.unpack_from(data, start)
        middle = start + _HEAD.size + name_nbytes
        end = middle + nbytes
        if end > len(data):
            return
        name = data[start + _HEAD.size : middle].decode()
        yield Event(kind=Kind(kind), name=name, inode=inode, offset=offset, data=data[middle:end])
        start = end
