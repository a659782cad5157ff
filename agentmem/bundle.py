"""The portable file that `export` writes and `import` reads: a head, entries, a foot, every byte under a checksum.

Streams both ways: one entry is in memory at a time. Knows nothing of what entries hold (see transfer.py).

Little-endian:
    head        0  8  magic "AMEXPORT"
                8  2  version of the writer
               10  2  min_reader: lowest version that can read the file
               12  4  incompat: feature bits that a reader must know
               16  8  when it was written: seconds since 1970, IEEE double
               24  8  xxh3-64 of the 24 bytes before it
    entries     0  4  kind
                4  8  n
               12  8  xxh3-64 of kind, n and the n bytes that follow
               20  n  the entry
    foot        0  8  magic "AMEXDONE"
                8  8  number of blocks
               16  8  number of checkpoints
               24  8  number of branches
               32  8  length of head and entries
               40 32  blake2b-256 of everything before it
"""

import errno
import hashlib
import os
import secrets
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import BinaryIO

import xxhash

from agentmem import _directory
from agentmem.errors import (
    AgentMemError,
    CorruptionError,
    FormatVersionError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    StorageFullError,
)

VERSION = 1
"""Version that this code writes; rises whenever a byte of the file changes its meaning."""

MAX_ENTRY_NBYTES = 1 << 31
"""Longest entry that is read: a block has at most 1 GiB of KV, and a record little more."""

_KNOWN_INCOMPAT = 0
_HEAD = struct.Struct("<8sHHIdQ")
_ENTRY = struct.Struct("<4sQQ")
_FOOT = struct.Struct("<8sQQQQ32s")
_HEAD_MAGIC = b"AMEXPORT"
_FOOT_MAGIC = b"AMEXDONE"
_SUM_NBYTES = 8
_DIGEST_NBYTES = 32

_MEANINGS: list[tuple[set[int], type[AgentMemError], str]] = [
    ({errno.ENOSPC, errno.EDQUOT, errno.EFBIG}, StorageFullError, "there is no room"),
    ({errno.ENOENT}, NotFoundError, "there is no such file or directory"),
    ({errno.EACCES, errno.EPERM, errno.EROFS}, ReadOnlyError, "this user may not"),
    ({errno.EISDIR, errno.ENOTDIR, errno.ESPIPE, errno.ENAMETOOLONG}, InvalidInputError, "give the path of a file"),
]


class Kind(Enum):
    """What an entry is."""

    SESSION = b"SESS"
    BLOCK = b"BLOK"
    CHECKPOINT = b"CHKP"
    BRANCH = b"BRCH"


_COUNTED = (Kind.BLOCK, Kind.CHECKPOINT, Kind.BRANCH)


class BundleWriter:
    """Writes the entries of one file."""

    def __init__(self, file: BinaryIO) -> None:
        """Write the head to an empty file; use `write_bundle`."""
        self._file = file
        self._digest = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
        self._counts: Counter[Kind] = Counter()
        self.nbytes = 0
        head = _HEAD.pack(_HEAD_MAGIC, VERSION, VERSION, 0, time.time(), 0)[:-_SUM_NBYTES]
        self._write(head + _sum(head))

    def put(self, kind: Kind, data: bytes) -> None:
        """Add one entry."""
        head = _ENTRY.pack(kind.value, len(data), 0)[:-_SUM_NBYTES]
        self._write(head + _sum(head, data))
        self._write(data)
        self._counts[kind] += 1

    def finish(self) -> None:
        """Write the foot, without which nobody reads the file."""
        counts = [self._counts[kind] for kind in _COUNTED]
        self._write(_FOOT.pack(_FOOT_MAGIC, *counts, self.nbytes, b"")[:-_DIGEST_NBYTES])
        self._write(self._digest.digest())

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.nbytes += len(data)


class BundleReader:
    """Reads the entries of one file, verifying each, and at the end all of them.

    Attributes:
        created_s: When it was written, Unix time.
        counts: How many blocks, checkpoints and branches it says it has.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        """Check head and foot; use `read_bundle`.

        Raises:
            CorruptionError: The file is no export, cut off, or longer than it was written.
            FormatVersionError: It needs a newer agentmem.
        """
        self._file = file
        self._path = path
        self._digest = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        self.created_s = self._read_head(self._read(min(_HEAD.size, size)))
        if size < _HEAD.size + _FOOT.size:
            raise self._damage(f"it is cut off after {size:,} bytes")
        file.seek(size - _FOOT.size)
        self._foot = file.read(_FOOT.size)
        magic, *counts, self._end, _ = _FOOT.unpack(self._foot)
        if magic != _FOOT_MAGIC or self._end != size - _FOOT.size:
            raise self._damage(f"its {size:,} bytes do not end where they were finished: it is cut off or was added to")
        self.counts: dict[Kind, int] = dict(zip(_COUNTED, counts, strict=True))
        file.seek(_HEAD.size)

    def entries(self) -> Iterator[tuple[Kind, bytes]]:
        """Yield every entry; after the last one, check that these were all of them.

        Raises:
            CorruptionError: The file is damaged. What came out before is not to be relied on.
            FormatVersionError: It has an entry of a kind that this version does not know.
        """
        counts: Counter[Kind] = Counter()
        while self._file.tell() < self._end:
            kind, data = self._read_entry()
            counts[kind] += 1
            yield kind, data
        self._digest.update(self._foot[:-_DIGEST_NBYTES])
        if self._digest.digest() != self._foot[-_DIGEST_NBYTES:]:
            raise self._damage("its digest is not that of its bytes")
        if any(counts[kind] != number for kind, number in self.counts.items()):
            raise self._damage("it does not hold as many entries as it says")

    def _read_head(self, head: bytes) -> float:
        if head[: len(_HEAD_MAGIC)] != _HEAD_MAGIC:
            raise self._damage(f"it is no export of agentmem: it starts with {head[:8]!r}")
        if len(head) < _HEAD.size or head[-_SUM_NBYTES:] != _sum(head[:-_SUM_NBYTES]):
            raise self._damage("its head fails its checksum")
        _, version, min_reader, incompat, created_s, _ = _HEAD.unpack(head)
        if min_reader > VERSION or incompat & ~_KNOWN_INCOMPAT:
            raise FormatVersionError(
                f"{str(self._path)!r} has export format {version} (for {min_reader} or newer, features {incompat:#x}); "
                f"this agentmem reads up to {VERSION}: install a newer one"
            )
        return float(created_s)

    def _read_entry(self) -> tuple[Kind, bytes]:
        position = self._file.tell()
        head = self._read(_ENTRY.size)
        name, nbytes, _ = _ENTRY.unpack(head)
        # A length is believed only as far as the file goes, so that a lie costs no memory.
        if self._file.tell() + nbytes > self._end or nbytes > MAX_ENTRY_NBYTES:
            raise self._damage(f"the entry at byte {position:,} claims {nbytes:,} bytes")
        data = self._read(nbytes)
        if head[-_SUM_NBYTES:] != _sum(head[:-_SUM_NBYTES], data):
            raise self._damage(f"the entry at byte {position:,} fails its checksum")
        if name not in {kind.value for kind in Kind}:
            raise FormatVersionError(f"{str(self._path)!r} has an entry {name!r}, unknown to this agentmem: upgrade it")
        return Kind(name), data

    def _read(self, nbytes: int) -> bytes:
        data = self._file.read(nbytes)
        if len(data) < nbytes:
            raise self._damage("it became shorter while it was read")
        self._digest.update(data)
        return data

    def _damage(self, what: str) -> CorruptionError:
        return CorruptionError(f"{str(self._path)!r} cannot be imported: {what}; export it again")


@contextmanager
def write_bundle(path: Path) -> Iterator[BundleWriter]:
    """Give a writer of the file at `path`, which appears, whole and on disk, when the block ends without an error.

    The file is readable by its owner only. An older export of that path is replaced.

    Raises:
        InvalidInputError: What is there is no export, and is left alone.
        StorageFullError, NotFoundError, ReadOnlyError: It cannot be written there.
    """
    with _named_errors("write", path):
        _check_replaceable(path)
        partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.partial")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(partial, flags, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                writer = BundleWriter(file)
                yield writer
                writer.finish()
                file.flush()
                os.fsync(fd)
            partial.replace(path)
            _directory.sync(path.absolute().parent)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def read_bundle(path: Path) -> Iterator[BundleReader]:
    """Give a reader of the file at `path`, whose head and foot are sound.

    Raises:
        CorruptionError: The file is no export, or cut off.
        FormatVersionError: It needs a newer agentmem.
        NotFoundError, InvalidInputError, ReadOnlyError: It cannot be read.
    """
    with _named_errors("read", path), path.open("rb") as file:
        yield BundleReader(file, path)


def _check_replaceable(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb") as file:
        head = file.read(len(_HEAD_MAGIC))
    if head and head != _HEAD_MAGIC:
        raise InvalidInputError(f"{str(path)!r} exists and is no export: choose another path, or remove it first")


@contextmanager
def _named_errors(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except AgentMemError:
        raise  # many of ours are OSErrors too
    except OSError as error:
        for codes, meaning, what in _MEANINGS:
            if error.errno in codes:
                raise meaning(f"cannot {verb} {str(path)!r}: {what} ({error.strerror})") from error
        raise


def _sum(*pieces: bytes) -> bytes:
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.intdigest().to_bytes(_SUM_NBYTES, "little")
