"""What a record says of itself, and the bytes it says it in.

Knows nothing of tensors or codecs' insides; the bytes it reads are not trusted.
"""

import math
import struct
from dataclasses import dataclass
from typing import TypeVar

import msgpack
import xxhash

from agentmem.errors import CorruptionError, FormatVersionError
from agentmem.ids import BlockDigest, BlockHash, Fingerprint
from agentmem.kv.codec import CodecId
from agentmem.kv.spec import DTYPE_NBYTES

VERSION = 2
"""The newest record version that this file reads. It writes 2 for lossy records, which need it, and 1 for others."""

_MAGIC = b"AMKB"
_HEADER = struct.Struct("<4sBBHIIQQ")
_SUMMED_NBYTES = 24
_SECTION_ALIGNMENT = 64
_PART_ALIGNMENT = 8
_IS_LOSSY = 1
_IS_PARENT_LOSSY = 2
_SUM_NBYTES = 16
_NAME_NBYTES = 32
_U32 = 1 << 32
_U63 = 1 << 63

V = TypeVar("V", int, float, str, bytes, list[object])


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionMeta:
    """One section of a record.

    Attributes:
        shape: `[L, H, T, D]`.
        codec_id: How its bytes are coded.
        sum: xxh3-128 of its raw bytes, 16 bytes.
        part_nbytes: Stored bytes of each of its parts.
        bound: By how much a value may differ from the model's; 0.0 when it does not.
    """

    shape: tuple[int, ...]
    codec_id: CodecId
    sum: bytes
    part_nbytes: tuple[int, ...]
    bound: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordMeta:
    """What a record says of itself.

    Attributes:
        block_hash: Token name of the block; in a lossy record what stands in its place (`hashing.lossy_hash`).
        digest: Byte name of the block.
        fingerprint: The model that made the KV.
        start: Position of the block's first token, from the root.
        num_tokens: T.
        dtype: torch's name of the KV's dtype.
        rope: Name of the rotary scheme that the keys are in, "" when there is none.
        sections: Keys and values of each layer group, in group order.
        is_lossy: The bytes are not those the model made.
        origin: Of a lossy record: the byte name of the block of the model's own bytes that this one stands for.
        is_parent_lossy: The KV was computed from lossy KV before it.
    """

    block_hash: BlockHash
    digest: BlockDigest
    fingerprint: Fingerprint
    start: int
    num_tokens: int
    dtype: str
    rope: str
    sections: tuple[SectionMeta, ...]
    is_lossy: bool = False
    is_parent_lossy: bool = False
    origin: BlockDigest | None = None

    @property
    def raw_nbytes(self) -> int:
        """Bytes of the decoded KV."""
        return DTYPE_NBYTES[self.dtype] * sum(math.prod(section.shape) for section in self.sections)

    @property
    def sums(self) -> list[bytes]:
        """Each section's sum, in order: with the block hash they give the digest."""
        return [section.sum for section in self.sections]


def pack_meta(meta: RecordMeta) -> bytes:
    """Return a record's first bytes: everything before the payload.

    Header, 32 bytes, little-endian: magic "AMKB"; u8 version; u8 flags (bit 0 lossy, bit 1 parent lossy); u16 zero;
    u32 bytes of metadata; u32 num_tokens; u64 bytes of payload; u64 xxh3-64 of the 24 bytes before it and the metadata.
    Then the metadata, a msgpack map: h block_hash, d digest, f fingerprint, p start, t dtype, r rope, s sections, each
    `[shape, codec id, sum, part sizes]`. Version 2, for lossy records only, adds o, the digest of the block that it
    stands for, and to each section its bound, a float. Then zeros up to a multiple of 64, where the payload starts.

    Payload: the parts of all sections in order. A section starts at a multiple of 64 bytes from the payload's start,
    each of its parts at a multiple of 8; zeros between them are in no checksum.
    """
    is_new = meta.origin is not None
    fields = {
        "h": meta.block_hash,
        "d": meta.digest,
        "f": meta.fingerprint,
        "p": meta.start,
        "t": meta.dtype,
        "r": meta.rope,
        "s": [_section_fields(section, is_new=is_new) for section in meta.sections],
        **({"o": meta.origin} if is_new else {}),
    }
    body: bytes = msgpack.packb(fields)
    flags = _IS_LOSSY * meta.is_lossy | _IS_PARENT_LOSSY * meta.is_parent_lossy
    payload_nbytes = payload_layout(meta)[1]
    header = _HEADER.pack(_MAGIC, 2 if is_new else 1, flags, 0, len(body), meta.num_tokens, payload_nbytes, 0)[
        :_SUMMED_NBYTES
    ]
    head = header + _sum(header, body) + body
    return head.ljust(_align(len(head), _SECTION_ALIGNMENT), b"\0")


def unpack_meta(data: memoryview) -> tuple[RecordMeta, memoryview]:
    """Return a record's metadata, verified, and its payload, whose length fits the metadata.

    Raises:
        CorruptionError: The header, the metadata or a length is damaged.
        FormatVersionError: The record was written in a format that this version does not read.
    """
    start, nbytes = _payload_place(data)
    if data.nbytes != start + nbytes:
        raise CorruptionError(f"a record of {data.nbytes} bytes claims {start + nbytes}")
    return unpack_head(data), data[start:]


def unpack_head(data: memoryview) -> RecordMeta:
    """Return a record's metadata, verified, from its first bytes: those up to the payload, or more.

    Raises:
        CorruptionError: The header or the metadata is damaged, or cut off.
        FormatVersionError: The record was written in a format that this version does not read.
    """
    _, payload_nbytes = _payload_place(data)
    _, version, flags, _, body_nbytes, num_tokens, _, _ = _HEADER.unpack_from(data)
    body = data[_HEADER.size : _HEADER.size + body_nbytes]
    if data[_SUMMED_NBYTES : _HEADER.size] != _sum(data[:_SUMMED_NBYTES], body):
        raise CorruptionError("a record's header or metadata fails its checksum")
    if flags & ~(_IS_LOSSY | _IS_PARENT_LOSSY):
        raise FormatVersionError(f"a record has flags {flags:#x}, which this agentmem does not know: upgrade it")
    meta = _parse(body, num_tokens, flags, is_new=version > 1)
    if payload_layout(meta)[1] != payload_nbytes:
        raise CorruptionError(f"block {meta.digest.hex()}: its parts do not add up to {payload_nbytes} bytes")
    return meta


def payload_layout(meta: RecordMeta) -> tuple[list[list[slice]], int]:
    """Return where each part of each section lies in the payload, and the payload's length."""
    position = 0
    sections = []
    for section in meta.sections:
        position = _align(position, _SECTION_ALIGNMENT)
        parts = []
        for nbytes in section.part_nbytes:
            position = _align(position, _PART_ALIGNMENT)
            parts.append(slice(position, position + nbytes))
            position += nbytes
        sections.append(parts)
    return sections, position


def _payload_place(data: memoryview) -> tuple[int, int]:
    """Return where a record's payload begins and how long it is, as its header claims."""
    if data.nbytes < _HEADER.size or data[:4] != _MAGIC:
        raise CorruptionError(f"no record: {data.nbytes} bytes that start with {bytes(data[:4])!r}")
    _, version, _, _, body_nbytes, _, payload_nbytes, _ = _HEADER.unpack_from(data)
    if not 1 <= version <= VERSION:
        raise FormatVersionError(f"a record has version {version}; this agentmem reads up to {VERSION}: upgrade it")
    return _align(_HEADER.size + body_nbytes, _SECTION_ALIGNMENT), payload_nbytes


def _section_fields(section: SectionMeta, *, is_new: bool) -> list[object]:
    fields = [list(section.shape), int(section.codec_id), section.sum, list(section.part_nbytes)]
    return [*fields, section.bound] if is_new else fields


def _parse(body: memoryview, num_tokens: int, flags: int, *, is_new: bool) -> RecordMeta:
    try:
        fields = msgpack.unpackb(body, strict_map_key=True, max_ext_len=0)
        return _read_fields(fields, num_tokens, flags, is_new=is_new)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise CorruptionError(f"a record's metadata is damaged: {type(error).__name__}: {error}") from error


def _read_fields(fields: dict[str, object], num_tokens: int, flags: int, *, is_new: bool) -> RecordMeta:
    dtype = _typed(fields["t"], str)
    if dtype not in DTYPE_NBYTES:
        raise ValueError(f"dtype {dtype!r} is unknown")
    meta = RecordMeta(
        block_hash=BlockHash(_name(fields["h"])),
        digest=BlockDigest(_name(fields["d"])),
        fingerprint=Fingerprint(_name(fields["f"])),
        start=_size(fields["p"], _U63),
        num_tokens=num_tokens,
        dtype=dtype,
        rope=_typed(fields["r"], str),
        sections=tuple(_read_section(section, num_tokens, is_new=is_new) for section in _typed(fields["s"], list)),
        is_lossy=bool(flags & _IS_LOSSY),
        is_parent_lossy=bool(flags & _IS_PARENT_LOSSY),
        origin=BlockDigest(_name(fields["o"])) if is_new else None,
    )
    if is_new and (not meta.is_lossy or meta.origin == meta.digest):
        raise ValueError("a record that stands for another block is not lossy, or is that block")
    return meta


def _read_section(fields: object, num_tokens: int, *, is_new: bool) -> SectionMeta:
    shape_field, codec_field, sum_field, parts_field, *bounds = _typed(fields, list)
    if len(bounds) != is_new:
        raise ValueError(f"a section has {4 + len(bounds)} fields")
    shape = tuple(_size(length, _U32) for length in _typed(shape_field, list))
    if len(shape) != 4 or shape[2] != num_tokens:
        raise ValueError(f"a section of {num_tokens} tokens has shape {shape}")
    codec = _size(codec_field, _U32)
    if codec not in set(CodecId):
        raise FormatVersionError(f"a record has codec {codec}, which this agentmem does not know: upgrade it")
    return SectionMeta(
        shape=shape,
        codec_id=CodecId(codec),
        sum=_bytes_of(sum_field, _SUM_NBYTES),
        part_nbytes=tuple(_size(nbytes, _U63) for nbytes in _typed(parts_field, list)),
        bound=_typed(bounds[0], float) if bounds else 0.0,
    )


def _typed(value: object, kind: type[V]) -> V:
    if type(value) is not kind:
        raise TypeError(f"found {type(value).__name__} where {kind.__name__} belongs")
    return value


def _size(value: object, limit: int) -> int:
    number = _typed(value, int)
    if not 0 <= number < limit:
        raise ValueError(f"{number} is out of range")
    return number


def _name(value: object) -> bytes:
    return _bytes_of(value, _NAME_NBYTES)


def _bytes_of(value: object, nbytes: int) -> bytes:
    data = _typed(value, bytes)
    if len(data) != nbytes:
        raise ValueError(f"found {len(data)} bytes where {nbytes} belong")
    return data


def _sum(header: bytes | memoryview, body: bytes | memoryview) -> bytes:
    state = xxhash.xxh3_64(header)
    state.update(body)
    return struct.pack("<Q", state.intdigest())


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment
