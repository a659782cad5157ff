"""The stored form of a block, and every check that stands between stored bytes and KV.

Knows nothing of where records are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from agentmem.errors import AgentMemError, CorruptionError, InvalidInputError, SpecMismatchError
from agentmem.ids import BlockDigest, BlockHash, Fingerprint
from agentmem.kv.codec import (
    CodecId,
    as_words,
    can_stack,
    decode_section,
    decode_stack,
    dtype_name,
    encode_section,
    error_bound,
)
from agentmem.kv.frames import Part
from agentmem.kv.hashing import content_digest, lossy_hash
from agentmem.kv.header import RecordMeta, SectionMeta, pack_meta, payload_layout, unpack_meta
from agentmem.kv.scratch import SCRATCH
from agentmem.levels import LOSSY_CODECS

_LOSSLESS = "lossless"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One block, ready to be stored.

    Attributes:
        digest: Byte name of the block.
        block_hash: Token name of the block.
        data: The stored bytes.
        raw_nbytes: Bytes of the decoded KV.
        num_tokens: T.
        codec_ids: How each section is coded.
        origin: Of a lossy record: the byte name of the block that it stands for. Its own is that of what it decodes to.
    """

    digest: BlockDigest
    block_hash: BlockHash
    data: bytes
    raw_nbytes: int
    num_tokens: int
    codec_ids: tuple[CodecId, ...]
    origin: BlockDigest | None = None

    @classmethod
    def of(cls, meta: RecordMeta, data: bytes) -> "Record":
        """Return the record that `data`, which was verified, says of itself in `meta`."""
        return cls(
            digest=meta.digest,
            block_hash=meta.block_hash,
            data=data,
            raw_nbytes=meta.raw_nbytes,
            num_tokens=meta.num_tokens,
            codec_ids=tuple(section.codec_id for section in meta.sections),
            origin=meta.origin,
        )


def pack(
    sections: Sequence[Tensor],
    *,
    block_hash: BlockHash,
    fingerprint: Fingerprint,
    start: int,
    codec: str = "lossless",
    rope: str = "",
    num_tokens: int | None = None,
    is_parent_lossy: bool = False,
) -> Record:
    """Code a block's sections, each `[L, H, T, D]` on the CPU with any strides, into a record that owns its bytes.

    A model whose layers all keep layer states only has blocks without sections: `num_tokens` says how long one is.
    With a lossy codec the record has names of its own, made of what it decodes to, and `origin` is the digest of what
    it was made of; where nothing was lost it is the record that "lossless" gives. What a lossy record decodes to must
    not be coded so again: `is_parent_lossy` says that the KV is such, or was computed from such KV before it.

    Raises:
        InvalidInputError: `codec` is unknown, there is nothing to store, or KV is not on the CPU.
        SpecMismatchError: The sections differ in dtype or number of tokens, or cannot be stored.
    """
    dtype, num_tokens = _common_form(sections) if sections or not num_tokens else ("float32", num_tokens)
    exact = section_sums(sections)
    coded = [encode_section(section, codec, is_key=index % 2 == 0) for index, section in enumerate(sections)]
    sums = [_coded_sum(*each) for each in zip(sections, coded, exact, strict=True)]
    is_lossy = sums != exact
    if not is_lossy and codec in LOSSY_CODECS:
        coded = [encode_section(section, _LOSSLESS) for section in sections]
    origin = content_digest(block_hash, exact) if is_lossy else None
    name = block_hash if origin is None else lossy_hash(origin, codec)
    meta = RecordMeta(
        block_hash=name,
        digest=content_digest(name, sums),
        is_lossy=is_lossy,
        is_parent_lossy=is_parent_lossy,
        origin=origin,
        fingerprint=fingerprint,
        start=start,
        num_tokens=num_tokens,
        dtype=dtype,
        rope=rope,
        sections=tuple(
            SectionMeta(
                shape=tuple(section.shape),
                codec_id=codec_id,
                sum=xxh3,
                part_nbytes=tuple(map(len, parts)),
                bound=error_bound(codec_id, parts, section.shape),
            )
            for section, (codec_id, parts), xxh3 in zip(sections, coded, sums, strict=True)
        ),
    )
    return Record.of(meta, _join(meta, [parts for _, parts in coded]))


def unpack(data: bytes | memoryview, out: Sequence[Tensor]) -> RecordMeta:
    """Decode a record into `out`, the block's sections `[L, H, T, D]` with any strides, and verify all of it.

    Verified are the header, the metadata, every length, each section's sum over the decoded bytes, that the sums give
    the digest that the record claims, and that lossy sections keep to their bounds; the caller checks that this is the
    digest it asked for. After an error `out` holds neither the old values nor the new ones.

    Raises:
        CorruptionError: The bytes are damaged; the message names the block and what failed.
        FormatVersionError: The record was written in a format that this version does not read.
        InvalidInputError: `out` is not on the CPU.
        SpecMismatchError: `out` does not have the record's shapes and dtype.
    """
    meta, payload = unpack_meta(memoryview(data).cast("B"))
    _check_named(meta, out)
    layout, _ = payload_layout(meta)
    for number, (section, slices, target) in enumerate(zip(meta.sections, layout, out, strict=True)):
        stage = target if target.is_contiguous() else _staged(target)
        parts = [payload[part] for part in slices]
        try:
            _check_bound(section, parts)
            decode_section(section.codec_id, parts, stage)
        except CorruptionError as error:
            raise CorruptionError(f"block {meta.digest.hex()}: section {number}: {error}") from error
        if section_sum(stage) != section.sum:
            raise CorruptionError(f"block {meta.digest.hex()}: section {number}: its decoded bytes fail their checksum")
        if stage is not target:
            np.copyto(as_words(target), as_words(stage))
    return meta


def unpack_many(
    records: Sequence[bytes | memoryview], outs: Sequence[Sequence[Tensor]]
) -> list[RecordMeta | AgentMemError]:
    """Decode several records as `unpack` does each; return each one's metadata, or why it could not be decoded.

    Small blocks of the same shape are decoded together, which takes less time on one thread and scales over threads.
    """
    try:
        return [*_unpack_stack(records, outs)]
    except AgentMemError:
        return [_unpack_or_error(data, out) for data, out in zip(records, outs, strict=True)]


def read_meta(data: bytes | memoryview) -> RecordMeta:
    """Return a record's metadata, verified, without decoding its sections.

    Raises:
        CorruptionError: The header, the metadata or a length is damaged.
        FormatVersionError: The record was written in a format that this version does not read.
    """
    return unpack_meta(memoryview(data).cast("B"))[0]


def section_sums(sections: Sequence[Tensor]) -> list[bytes]:
    """Return the xxh3-128 of each section's raw bytes in `[L, H, T, D]` order, 16 bytes each, without a large copy."""
    return [section_sum(section) for section in sections]


def section_sum(section: Tensor) -> bytes:
    """Return the xxh3-128 of one section's raw bytes in `[L, H, T, D]` order; any strides.

    Raises:
        InvalidInputError: The section is not on the CPU.
        SpecMismatchError: The section's dtype or number of dimensions cannot be stored.
    """
    words = as_words(section)
    if words.flags.c_contiguous:
        return xxhash.xxh3_128(words.data).digest()
    state = xxhash.xxh3_128()
    is_head_contiguous = words[0, 0].flags.c_contiguous
    for layer in words:
        for head in layer:
            state.update(head if is_head_contiguous else head.tobytes())
    return state.digest()


def _coded_sum(section: Tensor, coded: tuple[CodecId, list[Part]], exact: bytes) -> bytes:
    """Return the sum of what a coded section decodes to, whose own sum is `exact`."""
    codec_id, parts = coded
    if not codec_id.is_lossy:
        return exact
    decoded = torch.empty_like(section, memory_format=torch.contiguous_format)
    decode_section(codec_id, [memoryview(part) for part in parts], decoded)
    return section_sum(decoded)


def _check_bound(section: SectionMeta, parts: Sequence[memoryview]) -> None:
    bound = error_bound(section.codec_id, parts, section.shape)
    if not bound <= section.bound:
        raise CorruptionError(f"its values may be {bound} off, and it claims {section.bound}")


def _common_form(sections: Sequence[Tensor]) -> tuple[str, int]:
    """Return dtype and number of tokens that all sections have."""
    forms = {(dtype_name(section), section.shape[2]) for section in sections if section.dim() == 4}
    if len(forms) > 1 or any(section.dim() != 4 for section in sections):
        found = [(dtype_name(section), tuple(section.shape)) for section in sections]
        raise SpecMismatchError(f"sections of a block must be [L, H, T, D] of one dtype and one T; found {found}")
    if not forms or (form := forms.pop())[1] == 0:
        raise InvalidInputError("a block needs at least one section and one token; found none")
    return form


def _check_fits(meta: RecordMeta, out: Sequence[Tensor]) -> None:
    wanted = [(meta.dtype, section.shape) for section in meta.sections]
    found = [(dtype_name(target), tuple(target.shape)) for target in out]
    if wanted != found:
        raise SpecMismatchError(f"block {meta.digest.hex()} holds {wanted}; it was to be decoded into {found}")


def _unpack_or_error(data: bytes | memoryview, out: Sequence[Tensor]) -> RecordMeta | AgentMemError:
    try:
        return unpack(data, out)
    except AgentMemError as error:
        return error


def _unpack_stack(records: Sequence[bytes | memoryview], outs: Sequence[Sequence[Tensor]]) -> list[RecordMeta]:
    """Decode records section by section, all blocks at once; one by one where their sections differ."""
    opened = [unpack_meta(memoryview(data).cast("B")) for data in records]
    metas = [meta for meta, _ in opened]
    for meta, out in zip(metas, outs, strict=True):
        _check_named(meta, out)
    forms = {
        tuple((section.shape, section.codec_id, len(section.part_nbytes)) for section in meta.sections)
        for meta in metas
    }
    if len(metas) < 2 or len(forms) != 1 or not all(can_stack(codec_id, num) for _, codec_id, num in forms.pop()):
        return [unpack(data, out) for data, out in zip(records, outs, strict=True)]
    layouts = [payload_layout(meta)[0] for meta in metas]
    for number, section in enumerate(metas[0].sections):
        stage = SCRATCH.array("stack", (len(metas), *section.shape), np.uint16)
        parts = [
            [payload[part] for part in layout[number]] for (_, payload), layout in zip(opened, layouts, strict=True)
        ]
        decode_stack(parts, stage)
        for words, meta, out in zip(stage, metas, outs, strict=True):
            if xxhash.xxh3_128(words.data).digest() != meta.sections[number].sum:
                raise CorruptionError(f"block {meta.digest.hex()}: section {number}: its bytes fail their checksum")
            np.copyto(as_words(out[number]), words)
    return metas


def _check_named(meta: RecordMeta, out: Sequence[Tensor]) -> None:
    """Check that a record fits `out` and that its sums give its name."""
    _check_fits(meta, out)
    if content_digest(meta.block_hash, meta.sums) != meta.digest:
        raise CorruptionError(f"block {meta.digest.hex()}: its section sums do not give its digest")


def _staged(target: Tensor) -> Tensor:
    """Return contiguous memory of this thread, shaped as `target`: decoding and hashing stay in the cache."""
    words = as_words(target)
    stage = torch.from_numpy(SCRATCH.array("section", words.shape, words.dtype).view(f"i{words.itemsize}"))
    return stage.view(target.dtype)


def _join(meta: RecordMeta, coded: Sequence[Sequence[Part]]) -> bytes:
    """Return head and payload as one bytes object; copies each part once."""
    pieces: list[Part] = [pack_meta(meta)]
    position = 0
    for slices, parts in zip(payload_layout(meta)[0], coded, strict=True):
        for place, part in zip(slices, parts, strict=True):
            pieces += [bytes(place.start - position), part]
            position = place.stop
    return b"".join(pieces)
