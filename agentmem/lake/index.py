"""The index object of a session: written last, it makes the session's blocks in a lake reachable.

Knows nothing of tensors or models, nor of what a session's entries say (transfer.py).

An object, little-endian, called `sessions/<name, hidden>/<version, 12 digits>`:
     0 16  head, as seal.py describes it, with magic "AMLAKEIX"
    16  8  bytes of the label as stored
    24  8  bytes of the body as stored
    32  8  xxh3-64 of the 32 bytes before it
    40     label: a msgpack map; in an encrypted lake in a box, bound to "label" and the object's name
           body: a zstd frame of a msgpack map; in an encrypted lake in a box, bound to "body" and the object's name
   end 32  blake2b-256 of everything before it
The body's keys: "entries", `[kind, bytes]` each; "moves", rows of the reflog; "segments", `[name, where the data
begins, directory]` each, as segment.py describes them.
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import cast

import msgpack
import zstandard

from agentmem.errors import CorruptionError
from agentmem.ids import BlockDigest
from agentmem.lake.seal import HEAD, VERSION, Seal, check_head, checksum
from agentmem.lake.segment import Segment

LABEL_RANGE_NBYTES = 4096
"""A read of so many bytes has the whole label: a session's name has at most 255."""

_MAGIC = b"AMLAKEIX"
_LENGTHS = struct.Struct("<QQ")
_SUM_NBYTES = 8
_HEAD_NBYTES = HEAD.size + _LENGTHS.size + _SUM_NBYTES
_DIGEST_NBYTES = 32
_MAX_BODY_NBYTES = 1 << 30
_LIMITS = {"max_bin_len": 1 << 30, "max_array_len": 1 << 24, "max_map_len": 1 << 10, "max_ext_len": 0}
_ERRORS = (TypeError, ValueError, KeyError, OverflowError, msgpack.UnpackException, zstandard.ZstdError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What a listing of a lake says of a session.

    Attributes:
        name: The session's name.
        version: Rises with every push.
        created_s: When it was pushed, Unix time.
        model_name: The model's name, for people.
        num_branches: Branches.
        num_checkpoints: Checkpoints.
        num_blocks: Blocks, layer states and model inputs.
        nbytes: Bytes that these take in the lake, shared ones included.
    """

    name: str
    version: int
    created_s: float
    model_name: str
    num_branches: int
    num_checkpoints: int
    num_blocks: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionIndex:
    """One version of a session in a lake.

    Attributes:
        label: What a listing says of it.
        entries: The session, its checkpoints and branches: a kind of four bytes and the entry each.
        moves: Its reflog, oldest first.
        segments: Where its blocks are.
    """

    label: Label
    entries: tuple[tuple[bytes, bytes], ...]
    moves: tuple[bytes, ...]
    segments: tuple[Segment, ...]

    def digests(self) -> set[BlockDigest]:
        """Return every block of the segments, those of other sessions among them."""
        return {entry.digest for segment in self.segments for entry in segment.entries}


def index_key(name: str, version: int, seal: Seal) -> str:
    """Return the name of the object that holds a version of the session `name`."""
    return f"{session_prefix(name, seal)}/{version:012d}"


def session_prefix(name: str, seal: Seal) -> str:
    """Return what the names of all versions of the session `name` begin with."""
    return f"sessions/{seal.hide(b'session/' + name.encode())}"


def version_of(key: str) -> int:
    """Return the version in an object's name; 0 when it is none."""
    digits = key.rsplit("/", 1)[-1]
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def pack_index(index: SessionIndex, key: str, seal: Seal) -> bytes:
    """Return the object called `key`."""
    label = seal.close(msgpack.packb(asdict(index.label)), b"label" + key.encode())
    fields = {
        "entries": [list(entry) for entry in index.entries],
        "moves": list(index.moves),
        "segments": [[segment.name, segment.data_start, segment.directory] for segment in index.segments],
    }
    body = seal.close(zstandard.ZstdCompressor(level=3).compress(msgpack.packb(fields)), b"body" + key.encode())
    head = HEAD.pack(_MAGIC, VERSION, VERSION, 0) + _LENGTHS.pack(len(label), len(body))
    data = b"".join((head, checksum(head), label, body))
    return data + hashlib.blake2b(data, digest_size=_DIGEST_NBYTES).digest()


def unpack_index(data: bytes, key: str, seal: Seal) -> SessionIndex:
    """Return what the object called `key` holds.

    Raises:
        CorruptionError: It is damaged, or cut off.
        FormatVersionError: It needs a newer agentmem.
    """
    label = read_label(data, key, seal)
    if hashlib.blake2b(data[:-_DIGEST_NBYTES], digest_size=_DIGEST_NBYTES).digest() != data[-_DIGEST_NBYTES:]:
        raise CorruptionError(f"{_what(key)} is damaged: its digest is not that of its bytes")
    label_nbytes, _ = _LENGTHS.unpack_from(data, HEAD.size)
    try:
        frame = seal.open(data[_HEAD_NBYTES + label_nbytes : -_DIGEST_NBYTES], b"body" + key.encode())
        return _read_body(label, frame)
    except (*_ERRORS, CorruptionError) as error:
        raise CorruptionError(f"{_what(key)} is damaged: {error}") from error


def read_label(data: bytes, key: str, seal: Seal) -> Label:
    """Return the label in the first bytes of the object called `key`.

    Raises:
        CorruptionError: It is damaged.
        FormatVersionError: It needs a newer agentmem.
    """
    check_head(data, _MAGIC, _what(key))
    head, found = data[: _HEAD_NBYTES - _SUM_NBYTES], data[_HEAD_NBYTES - _SUM_NBYTES : _HEAD_NBYTES]
    if found != checksum(head):
        raise CorruptionError(f"{_what(key)} is damaged: its head fails its checksum")
    nbytes, _ = _LENGTHS.unpack_from(data, HEAD.size)
    try:
        stored = seal.open(data[_HEAD_NBYTES : _HEAD_NBYTES + nbytes], b"label" + key.encode())
        label = Label(**cast("dict[str, object]", msgpack.unpackb(stored, **_LIMITS)))  # type: ignore[arg-type]  # below
    except (*_ERRORS, CorruptionError) as error:
        raise CorruptionError(f"{_what(key)} is damaged: {error}") from error
    if label.version != version_of(key):
        raise CorruptionError(f"{_what(key)} is damaged: it holds version {label.version} of {label.name!r}")
    return label


def _read_body(label: Label, frame: bytes) -> SessionIndex:
    if not 0 <= zstandard.frame_content_size(frame) <= _MAX_BODY_NBYTES:
        raise ValueError("its body claims more than 1 GiB")
    fields = cast("dict[str, Iterable[object]]", msgpack.unpackb(zstandard.decompress(frame), **_LIMITS))
    entries = cast("Iterable[tuple[bytes, bytes]]", fields["entries"])
    segments = cast("Iterable[tuple[str, int, bytes]]", fields["segments"])
    return SessionIndex(
        label=label,
        entries=tuple((bytes(kind), bytes(data)) for kind, data in entries),
        moves=tuple(cast("Iterable[bytes]", fields["moves"])),
        segments=tuple(Segment(name, int(start), directory) for name, start, directory in segments),
    )


def _what(key: str) -> str:
    return f"index object {key} of the lake"
