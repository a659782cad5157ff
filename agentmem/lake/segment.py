"""Segments: immutable objects that hold some blocks, the first part of all of them first.

One range read gives the same layers of all blocks of a segment. Knows nothing of tensors, nor of where objects are.

An object, little-endian:
     0 16  head, as seal.py describes it, with magic "AMLAKESG"
    16 16  edition: random, so that no two segments ever have one name
    32  8  bytes of the directory as stored
    40  8  xxh3-64 of the 40 bytes before it
    48  n  directory; in an encrypted lake in a box, bound to "directory" and the edition
  48+n     part 0 of every block, then part 1 of every block that has one, and so on; in an encrypted lake each part is
           in a box, bound to "part", the block's digest and the part's number, u32-le

The directory is a msgpack list of blocks, each `[digest, block hash, first bytes of the block's record up to its
payload (kv/header.py), [stored bytes of each part]]`, followed by its xxh3-64.
The object's name is the blake2b-256 of its bytes in hex.
"""

import hashlib
import secrets
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import msgpack

from agentmem.errors import CorruptionError
from agentmem.ids import BlockDigest, BlockHash
from agentmem.lake.seal import HEAD, VERSION, Seal, check_head, checksum

MAX_PARTS = 16
"""Most parts that a directory may give a block."""

_MAGIC = b"AMLAKESG"
_EDITION_NBYTES = 16
_LENGTHS = struct.Struct("<QQ")
_SUM_NBYTES = 8
HEAD_NBYTES = HEAD.size + _EDITION_NBYTES + _LENGTHS.size
"""Bytes before the directory."""

_NAME_NBYTES = 32
_ERRORS = (TypeError, ValueError, OverflowError, msgpack.UnpackException)


class CutBlock(Protocol):
    """A block that is to be stored: `agentmem.tiers.parts.CutBlock`, of which this file needs bytes only."""

    @property
    def digest(self) -> BlockDigest:
        """Its byte name."""
        ...

    @property
    def block_hash(self) -> BlockHash:
        """Its token name."""
        ...

    @property
    def head(self) -> bytes:
        """The first bytes of its record, up to the payload."""
        ...

    @property
    def parts(self) -> tuple[bytes, ...]:
        """The records of its parts; the record itself where there is one part only."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One block of a directory.

    Attributes:
        digest: Its byte name.
        block_hash: Its token name.
        head: The first bytes of its record, up to the payload.
        part_nbytes: Stored bytes of each part.
    """

    digest: BlockDigest
    block_hash: BlockHash
    head: bytes
    part_nbytes: tuple[int, ...]


class Segment:
    """Where the parts of a segment's blocks lie.

    Attributes:
        name: The object's name, 64 hex digits.
        data_start: Where part 0 of its first block begins.
        directory: Its directory's bytes.
        entries: Its blocks.
    """

    __slots__ = ("_starts", "data_start", "directory", "entries", "name")

    def __init__(self, name: str, data_start: int, directory: bytes) -> None:
        """Read a directory.

        Raises:
            CorruptionError: It is damaged.
        """
        self.name = name
        self.data_start = data_start
        self.directory = directory
        self.entries = _unpack_directory(name, directory)
        self._starts = array("Q", [data_start])
        for part in range(MAX_PARTS):
            for entry in self.entries:
                nbytes = entry.part_nbytes[part] if part < len(entry.part_nbytes) else 0
                self._starts.append(self._starts[-1] + nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole object."""
        return self._starts[-1]

    def span(self, row: int, part: int) -> tuple[int, int]:
        """Return where a part of the block `entries[row]` lies in the object: `[start, stop)`."""
        place = part * len(self.entries) + row
        return self._starts[place], self._starts[place + 1]


def build(blocks: Sequence[CutBlock], seal: Seal) -> tuple[Segment, bytes]:
    """Return a segment of some blocks, and the bytes of its object."""
    edition = secrets.token_bytes(_EDITION_NBYTES)
    closed = [[close_part(seal, block.digest, *each) for each in enumerate(block.parts)] for block in blocks]
    fields = [
        [block.digest, block.block_hash, block.head, [len(part) for part in parts]]
        for block, parts in zip(blocks, closed, strict=True)
    ]
    packed = cast("bytes", msgpack.packb(fields))
    directory = packed + checksum(packed)
    stored = seal.close(directory, b"directory" + edition)
    head = HEAD.pack(_MAGIC, VERSION, VERSION, 0) + edition + struct.pack("<Q", len(stored))
    pieces = [head, checksum(head), stored]
    pieces += [parts[part] for part in range(MAX_PARTS) for parts in closed if part < len(parts)]
    data = b"".join(pieces)
    return Segment(hashlib.blake2b(data, digest_size=32).hexdigest(), HEAD_NBYTES + len(stored), directory), data


def read_directory(name: str, data: bytes, seal: Seal) -> Segment:
    """Return the segment whose object begins with `data`, directory and all.

    Raises:
        CorruptionError: It is damaged.
        FormatVersionError: It needs a newer agentmem.
    """
    check_head(data, _MAGIC, f"segment {name}")
    nbytes, found = _LENGTHS.unpack_from(data.ljust(HEAD_NBYTES, b"\0"), HEAD_NBYTES - _LENGTHS.size)
    end = HEAD_NBYTES - _SUM_NBYTES
    if found.to_bytes(_SUM_NBYTES, "little") != checksum(data[:end]) or len(data) < HEAD_NBYTES + nbytes:
        raise CorruptionError(f"segment {name} is damaged: its head fails its checksum, or it is cut off")
    edition = data[HEAD.size : HEAD.size + _EDITION_NBYTES]
    try:
        directory = seal.open(data[HEAD_NBYTES : HEAD_NBYTES + nbytes], b"directory" + edition)
    except CorruptionError as error:
        raise CorruptionError(f"segment {name}: {error}") from error
    return Segment(name, HEAD_NBYTES + nbytes, directory)


def close_part(seal: Seal, digest: BlockDigest, part: int, data: bytes) -> bytes:
    """Return what is stored of a part."""
    return seal.close(data, _bound(digest, part))


def open_part(seal: Seal, digest: BlockDigest, part: int, stored: bytes) -> bytes:
    """Return a part's record.

    Raises:
        CorruptionError: It is not as it was encrypted, or another block's.
    """
    try:
        return seal.open(stored, _bound(digest, part))
    except CorruptionError as error:
        raise CorruptionError(f"block {digest.hex()}: part {part} in the lake: {error}") from error


def _bound(digest: BlockDigest, part: int) -> bytes:
    return b"part" + digest + part.to_bytes(4, "little")


def _unpack_directory(name: str, directory: bytes) -> tuple[Entry, ...]:
    packed, found = directory[:-_SUM_NBYTES], directory[-_SUM_NBYTES:]
    if found != checksum(packed):
        raise CorruptionError(f"segment {name} is damaged: its directory fails its checksum")
    try:
        fields = cast("list[object]", msgpack.unpackb(packed, max_ext_len=0))
        return tuple(_entry(each) for each in fields)
    except _ERRORS as error:
        raise CorruptionError(f"segment {name} is damaged: {type(error).__name__}: {error}") from error


def _entry(fields: object) -> Entry:
    digest, block_hash, head, part_nbytes = cast("list[object]", fields)
    for data in (digest, block_hash):
        if type(data) is not bytes or len(data) != _NAME_NBYTES:
            raise ValueError("no name of 32 bytes")
    sizes = tuple(cast("list[int]", part_nbytes))
    if not 1 <= len(sizes) <= MAX_PARTS or not all(type(size) is int and 0 <= size < 1 << 40 for size in sizes):
        raise ValueError("no sizes of parts")
    if type(head) is not bytes:
        raise TypeError("no head of a record")
    return Entry(
        digest=BlockDigest(cast("bytes", digest)),
        block_hash=BlockHash(cast("bytes", block_hash)),
        head=head,
        part_nbytes=sizes,
    )
