"""Blocks cut by layers into parts and put together again.

A part is a record of its own (kv/record.py): rows `[first, stop)` of every section of the block, so that it is decoded
and verified alone. Knows nothing of where parts are kept.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentmem.errors import CorruptionError, SpecMismatchError
from agentmem.ids import BlockDigest, BlockHash, short
from agentmem.kv import record as record_format
from agentmem.kv.codec import CodecId
from agentmem.kv.hashing import content_digest, part_hash
from agentmem.kv.header import RecordMeta, SectionMeta, pack_meta, payload_layout, unpack_head, unpack_meta
from agentmem.kv.spec import DTYPE_NBYTES
from agentmem.tiers.sealing import verified

MAX_PARTS = 16
"""Most parts that a block is cut into."""

_MIN_PART_NBYTES = 128 << 10
"""Raw bytes of a part of a block of 64 tokens. On one core parts of 92 KiB took 4 times as long to decode as the block
uncut, parts of 300 KiB 1.1 to 1.6 times: each is a few calls of numpy. Source: docs/experiments.md."""

_NOMINAL_TOKENS = 64
_LOSSLESS = "lossless"


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBlock:
    """A block that is to be stored in a lake.

    Attributes:
        digest: Its byte name.
        block_hash: Its token name.
        head: The first bytes of its record, up to the payload.
        parts: The records of its parts; the record itself where there is one part only.
    """

    digest: BlockDigest
    block_hash: BlockHash
    head: bytes
    parts: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return len(self.head) + sum(map(len, self.parts))


def num_parts(meta: RecordMeta) -> int:
    """Return how many parts a block is cut into: all blocks of a model alike, whatever their number of tokens."""
    num_layers = max((section.shape[0] for section in meta.sections), default=1)
    nominal = meta.raw_nbytes * _NOMINAL_TOKENS // max(1, meta.num_tokens)
    return max(1, min(MAX_PARTS, num_layers, nominal // _MIN_PART_NBYTES))


def part_rows(num_rows: int, part: int, num_parts: int) -> slice:
    """Return the rows of a section of `num_rows` layers that a part holds: the codec's rule for bands."""
    return slice(part * num_rows // num_parts, (part + 1) * num_rows // num_parts)


def cut(data: bytes) -> CutBlock:
    """Cut a block's record into the records of its parts, after verifying all of it.

    Raises:
        CorruptionError, FormatVersionError: The record is damaged, or of a newer version.
    """
    meta, payload = unpack_meta(memoryview(data))
    count = num_parts(meta)
    parts = (bytes(verified(data).data),) if count == 1 else tuple(_pack_parts(data, meta, count))
    head = bytes(data[: len(data) - payload.nbytes])
    return CutBlock(digest=meta.digest, block_hash=meta.block_hash, head=head, parts=parts)


def join(head: bytes, parts: Sequence[bytes]) -> bytes:
    """Return the record of a block, from its first bytes and all its parts; nothing is decoded.

    The caller verifies what it gets, as any record. A block that was cut comes back in other bands than it was coded
    in before, as another record of the same KV.

    Raises:
        CorruptionError: The parts are not those of the block.
        FormatVersionError: They were written in a format that this version does not read.
    """
    if len(parts) == 1:
        return parts[0]
    meta = read_head(head)
    opened = [unpack_meta(memoryview(part)) for part in parts]
    for number, (part, _) in enumerate(opened):
        _check_part(meta, part, number, len(parts))
    columns = _columns([part for part, _ in opened])
    is_alike = all(_is_one_band(meta.dtype, section) for column in columns for section in column)
    if is_alike and all(len({section.codec_id for section in column}) == 1 for column in columns):
        return _joined(meta, opened)
    return _repacked(meta, parts)


def unpack_part(head: bytes, data: bytes, part: int, num_parts: int, out: Sequence[Tensor]) -> None:
    """Decode one part of a block into its rows of `out`, the block's sections `[L, H, T, D]`, and verify it alone.

    When all parts are there, `check_whole` says whether they are the block.

    Raises:
        CorruptionError: The bytes are damaged or another part's.
        SpecMismatchError: `out` has another geometry than the block.
    """
    meta = read_head(head)
    if [tuple(section.shape) for section in out] != [section.shape for section in meta.sections]:
        raise SpecMismatchError(f"block {short(meta.digest)} was to be decoded into sections of another shape")
    found = record_format.unpack(data, _rows(out, part, num_parts))
    if num_parts > 1:
        _check_part(meta, found, part, num_parts)


def check_whole(head: bytes, out: Sequence[Tensor]) -> None:
    """Check that sections are the KV of the block whose record begins with `head`.

    Raises:
        CorruptionError: They are not.
    """
    meta = read_head(head)
    if content_digest(meta.block_hash, record_format.section_sums(out)) != meta.digest:
        raise CorruptionError(f"block {meta.digest.hex()}: its parts in the lake do not give its digest")


def read_head(head: bytes) -> RecordMeta:
    """Return what a record says of itself in its first bytes.

    Raises:
        CorruptionError, FormatVersionError: They are damaged, or of a newer version.
    """
    return unpack_head(memoryview(head))


def _pack_parts(data: bytes, meta: RecordMeta, count: int) -> list[bytes]:
    sections = [torch.empty(section.shape, dtype=getattr(torch, meta.dtype)) for section in meta.sections]
    record_format.unpack(data, sections)
    return [
        record_format.pack(
            _rows(sections, part, count),
            block_hash=part_hash(meta.block_hash, part),
            fingerprint=meta.fingerprint,
            start=meta.start,
            codec=_LOSSLESS,
            rope=meta.rope,
        ).data
        for part in range(count)
    ]


def _rows(sections: Sequence[Tensor], part: int, count: int) -> list[Tensor]:
    """Return a part's rows of each section, as views; sections of fewer layers than parts give some parts none."""
    rows = (section[part_rows(section.shape[0], part, count)] for section in sections)
    return list(rows)


def _check_part(meta: RecordMeta, part: RecordMeta, number: int, count: int) -> None:
    shapes = [_part_shape(section.shape, number, count) for section in meta.sections]
    is_right = part.block_hash == part_hash(meta.block_hash, number) and part.dtype == meta.dtype
    if not is_right or [section.shape for section in part.sections] != shapes:
        raise CorruptionError(f"block {meta.digest.hex()}: the lake holds something else in the place of part {number}")


def _part_shape(shape: tuple[int, ...], number: int, count: int) -> tuple[int, ...]:
    rows = part_rows(shape[0], number, count)
    return (rows.stop - rows.start, *shape[1:])


def _is_one_band(dtype: str, section: SectionMeta) -> bool:
    """Say whether a part's section is one band, so that it can be a band of the block's section."""
    num_parts_of_band = {CodecId.RAW: 1, CodecId.PLANE: DTYPE_NBYTES[dtype], CodecId.NIB: 5}
    return num_parts_of_band.get(section.codec_id) == len(section.part_nbytes)


def _columns(metas: Sequence[RecordMeta]) -> list[list[SectionMeta]]:
    """Return for each section of the block what its parts say of it, parts without a row left out."""
    columns = zip(*(meta.sections for meta in metas), strict=True)
    return [[section for section in column if section.shape[0]] for column in columns]


def _joined(meta: RecordMeta, opened: Sequence[tuple[RecordMeta, memoryview]]) -> bytes:
    """Put the bands of the parts behind one another: they are the bands of the block's sections."""
    layouts = [payload_layout(part)[0] for part, _ in opened]
    sections, pieces = [], []
    for number, section in enumerate(meta.sections):
        bands = [
            (payload[place], nbytes)
            for (part, payload), layout in zip(opened, layouts, strict=True)
            for place, nbytes in zip(layout[number], part.sections[number].part_nbytes, strict=True)
            if part.sections[number].shape[0]
        ]
        pieces.append([data for data, _ in bands])
        sizes = tuple(nbytes for _, nbytes in bands)
        codec_id = next(part.sections[number].codec_id for part, _ in opened if part.sections[number].shape[0])
        sections.append(dataclasses.replace(section, codec_id=codec_id, part_nbytes=sizes))
    whole = dataclasses.replace(meta, sections=tuple(sections))
    stored = bytearray(pack_meta(whole))
    start = len(stored)
    for places, coded in zip(payload_layout(whole)[0], pieces, strict=True):
        for place, data in zip(places, coded, strict=True):
            stored += bytes(start + place.start - len(stored))
            stored += data
    return bytes(stored)


def _repacked(meta: RecordMeta, parts: Sequence[bytes]) -> bytes:
    """Decode the parts and code the block again, where its bands cannot stand behind one another."""
    out = [torch.empty(section.shape, dtype=getattr(torch, meta.dtype)) for section in meta.sections]
    for number, data in enumerate(parts):
        record_format.unpack(data, _rows(out, number, len(parts)))
    packed = record_format.pack(
        out,
        block_hash=meta.block_hash,
        fingerprint=meta.fingerprint,
        start=meta.start,
        codec=_LOSSLESS,
        rope=meta.rope,
    )
    if packed.digest != meta.digest:
        raise CorruptionError(f"block {meta.digest.hex()}: its parts in the lake do not give its digest")
    lossless, payload = unpack_meta(memoryview(packed.data))
    whole = dataclasses.replace(
        lossless,
        sections=tuple(
            dataclasses.replace(section, bound=known.bound)
            for section, known in zip(lossless.sections, meta.sections, strict=True)
        ),
        is_lossy=meta.is_lossy,
        is_parent_lossy=meta.is_parent_lossy,
        origin=meta.origin,
    )
    return pack_meta(whole) + payload
