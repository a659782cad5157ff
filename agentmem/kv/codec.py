"""Sections of KV to bytes and back, bit for bit.

A section is coded in bands: runs of whole layers, each coded by itself, small enough for a CPU cache and for loading
layer by layer. Knows nothing of records, blocks or storage; the bytes given to `decode_section` are not trusted.
"""

import math
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import TypeVar

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from agentmem.errors import CorruptionError, InvalidInputError, SpecMismatchError
from agentmem.kv.nib import NibParts, merge, split
from agentmem.kv.scratch import SCRATCH

Part = bytes | memoryview
"""Bytes of one part of a coded band."""

Words = NDArray[np.unsignedinteger]
"""KV as unsigned integers of the dtype's size: `[L, H, T, D]`."""

CODECS = ("lossless", "raw")
"""Names that `encode_section` accepts."""

W = TypeVar("W", bound=np.unsignedinteger)

_INTEGER_DTYPES = {
    torch.bfloat16: (torch.int16, np.uint16),
    torch.float16: (torch.int16, np.uint16),
    torch.float32: (torch.int32, np.uint32),
    torch.float64: (torch.int64, np.uint64),
}
_BAND_NBYTES = 2 << 20
"""Raw bytes of a band: smaller ones cost calls and stop two threads from scaling. Source: benchmarks/codec.py."""

_MIN_NIB_TOKENS = 16
"""Below this the bases, 16 bits a channel, cost more than nib saves over byte planes."""

_NUM_NIB_PARTS = 5
_ESCAPE_NBYTES = 6


class CodecId(IntEnum):
    """How one section's bytes are coded. On disk: never renumber.

    Each band is coded as a fixed number of parts:

    * RAW: 1 part, the band's values, contiguous `[L, H, T, D]`, little-endian.
    * PLANE: one part a byte of the dtype, most significant first: that byte of every value, as a zstd frame, or as it
      is when the part has exactly one byte a value.
    * NIB: 5 parts, see `kv/nib.py` (u16-le words): base as a zstd frame; nibbles as a zstd frame; lows; escapes (all
      u32-le positions, then all u16-le values); rest.
    """

    RAW = 0
    PLANE = 1
    NIB = 2


def encode_section(section: Tensor, codec: str) -> tuple[CodecId, list[Part]]:
    """Code one section `[L, H, T, D]` of KV, any strides, on the CPU.

    "lossless" takes nib for bfloat16 of 16 tokens or more, else byte planes, and falls back to raw bytes when that is
    not smaller. The parts own their memory, or view `section` when it is stored raw and contiguous.

    Raises:
        InvalidInputError: `codec` is unknown, or the section is not on the CPU.
        SpecMismatchError: The section's dtype or number of dimensions cannot be stored.
    """
    if codec not in CODECS:
        raise InvalidInputError(f"codec {codec!r} is unknown: use one of {CODECS}")
    words = as_words(section)
    if codec == "lossless" and words.size:
        for codec_id in _candidates(section):
            parts = _encode_bands(words, codec_id)
            if parts is not None and sum(map(_nbytes, parts)) < words.nbytes:
                return codec_id, parts
    return CodecId.RAW, _encode_raw(words)


def decode_section(codec_id: int, parts: Sequence[memoryview], out: Tensor) -> None:
    """Decode one section into `out` `[L, H, T, D]`, in place, any strides.

    Nothing is allocated that `out` does not bound. After an error `out` holds neither the old values nor the new ones.

    Raises:
        CorruptionError: The parts cannot be what `encode_section` made for this shape.
        InvalidInputError: `out` is not on the CPU.
        SpecMismatchError: The dtype or number of dimensions of `out` cannot be stored.
    """
    words = as_words(out)
    num_parts = _num_parts(codec_id, words)
    num_bands, odd_parts = divmod(len(parts), num_parts)
    if odd_parts or not 1 <= num_bands <= max(1, words.shape[0]):
        raise CorruptionError(f"a section of {words.shape[0]} layers has {len(parts)} parts of codec {codec_id}")
    decode = {CodecId.RAW: _decode_raw, CodecId.PLANE: _decode_planes, CodecId.NIB: _decode_nib}[CodecId(codec_id)]
    for band, layers in enumerate(_bands(words, num_bands)):
        decode(parts[band * num_parts : (band + 1) * num_parts], layers)


def can_stack(codec_id: int, num_parts: int) -> bool:
    """Say whether `decode_stack` takes sections of this codec and number of parts: nib, in one band."""
    return codec_id == CodecId.NIB and num_parts == _NUM_NIB_PARTS


def decode_stack(coded: Sequence[Sequence[memoryview]], out: Words) -> None:
    """Decode the same nib section of n blocks at once into `out` `[n, L, H, T, D]`, contiguous if n is not 1.

    The blocks of a small model are too small for two threads: each numpy call lasts about as long as handing Python's
    lock to the other thread. Stacked, the calls are n times as long. Source: benchmarks/path.py.

    Raises:
        CorruptionError: The parts cannot be what `encode_section` made for this shape.
    """
    num_blocks, *shape = out.shape
    num_layers, num_heads, num_tokens, dim = shape
    groups = (num_layers, num_heads, num_tokens // 4, dim)
    base = SCRATCH.array("base", (num_blocks, num_layers, num_heads, dim), np.uint16)
    nibbles = SCRATCH.array("nibbles", (num_blocks, *groups), np.uint16)
    for number, parts in enumerate(coded):
        _decompress_into(parts[0], base[number])
        _decompress_into(parts[1], nibbles[number])
    lows = _side_by_side([_read(parts[2], (2, *groups), np.dtype(np.uint16)) for parts in coded])
    rest = np.empty((num_blocks, num_layers, num_heads, num_tokens % 4, dim), np.uint16)
    for number, parts in enumerate(coded):
        rest[number] = _read(parts[4], rest.shape[1:], np.dtype(np.uint16))
    escapes = [
        _read_escapes(parts[3], number * math.prod(shape), math.prod(shape)) for number, parts in enumerate(coded)
    ]
    stacked = NibParts(
        base=base.reshape(-1, num_heads, dim),
        nibbles=nibbles.reshape(-1, *groups[1:]),
        lows=lows.reshape(2, -1, *groups[1:]),
        escape_index=np.concatenate([index for index, _ in escapes]),
        escape_value=np.concatenate([values for _, values in escapes]),
        rest=rest.reshape(num_blocks * num_layers, *rest.shape[2:]),
    )
    merge(stacked, out.view(np.uint16).reshape(-1, *shape[1:]))


def as_words(section: Tensor) -> Words:
    """View a tensor `[L, H, T, D]` as unsigned integers of the same size, without a copy.

    Raises:
        InvalidInputError: The section is not on the CPU.
        SpecMismatchError: The section's dtype or number of dimensions cannot be stored.
    """
    if section.device.type != "cpu":
        raise InvalidInputError(f"KV to code must be on the CPU; found it on {section.device}")
    if section.dtype not in _INTEGER_DTYPES or section.dim() != 4:
        raise SpecMismatchError(f"KV must be [L, H, T, D] floats; found {section.dtype} {tuple(section.shape)}")
    torch_integer, numpy_integer = _INTEGER_DTYPES[section.dtype]
    words: Words = section.detach().view(torch_integer).numpy().view(numpy_integer)
    return words


def _candidates(section: Tensor) -> list[CodecId]:
    if section.dtype == torch.bfloat16 and section.shape[2] >= _MIN_NIB_TOKENS:
        return [CodecId.NIB, CodecId.PLANE]
    return [CodecId.PLANE]


def _num_parts(codec_id: int, words: Words) -> int:
    if codec_id == CodecId.PLANE:
        return words.itemsize
    if codec_id == CodecId.NIB and words.itemsize == 2:
        return _NUM_NIB_PARTS
    if codec_id == CodecId.RAW:
        return 1
    raise CorruptionError(f"codec {codec_id} cannot hold values of {words.itemsize} bytes")


def _bands(words: Words, num_bands: int) -> Iterator[Words]:
    """Cut the layers into `num_bands` runs of nearly equal length: the split is part of the format."""
    num_layers = words.shape[0]
    for band in range(num_bands):
        yield words[band * num_layers // num_bands : (band + 1) * num_layers // num_bands]


def _encode_bands(words: Words, codec_id: CodecId) -> list[Part] | None:
    num_bands = min(words.shape[0], max(1, round(words.nbytes / _BAND_NBYTES)))
    encode = _encode_nib if codec_id == CodecId.NIB else _encode_planes
    parts: list[Part] = []
    for layers in _bands(words, num_bands):
        coded = encode(layers)
        if coded is None:
            return None
        parts += coded
    return parts


def _encode_raw(words: Words) -> list[Part]:
    return [np.ascontiguousarray(words).reshape(-1).view(np.uint8).data]


def _decode_raw(parts: Sequence[memoryview], out: Words) -> None:
    out[...] = _read(parts[0], out.shape, out.dtype)


def _encode_planes(words: Words) -> list[Part]:
    parts: list[Part] = []
    for shift in range(8 * (words.itemsize - 1), -1, -8):
        plane = np.right_shift(words, words.dtype.type(shift)).astype(np.uint8, order="C").reshape(-1).data
        coded = SCRATCH.compressor.compress(plane)
        parts.append(coded if len(coded) < plane.nbytes else plane)
    return parts


def _decode_planes(parts: Sequence[memoryview], out: Words) -> None:
    out[...] = 0
    for part in parts:
        plane = _read(part if part.nbytes == out.size else _decompress(part, out.size), out.shape, np.dtype(np.uint8))
        out <<= out.dtype.type(8)
        out |= plane


def _encode_nib(words: Words) -> list[Part] | None:
    coded = split(words.astype(np.uint16, copy=False))
    if coded is None:
        return None
    escapes = coded.escape_index.astype("<u4").tobytes() + coded.escape_value.astype("<u2").tobytes()
    return [
        SCRATCH.compressor.compress(coded.base.data),
        SCRATCH.compressor.compress(coded.nibbles.data),
        coded.lows.reshape(-1).view(np.uint8).data,
        escapes,
        coded.rest.tobytes(),
    ]


def _decode_nib(parts: Sequence[memoryview], out: Words) -> None:
    decode_stack([parts], out[None])


def _side_by_side(lows: Sequence[NDArray[np.uint16]]) -> NDArray[np.uint16]:
    """Stack arrays `[2, ...]` to `[2, n, ...]`, in scratch; a single one is not copied."""
    if len(lows) == 1:
        return lows[0][:, None]
    stacked = SCRATCH.array("lows", (2, len(lows), *lows[0].shape[1:]), np.uint16)
    for number, low in enumerate(lows):
        stacked[:, number] = low  # lets other threads run, which np.stack does not
    return stacked


def _read_escapes(part: memoryview, first: int, num_values: int) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """Return positions, counted from `first` on, and values of a run of `num_values`."""
    num_escapes, odd_bytes = divmod(part.nbytes, _ESCAPE_NBYTES)
    if odd_bytes:
        raise CorruptionError(f"a list of escapes has {part.nbytes} bytes")
    index = _read(part[: 4 * num_escapes], (num_escapes,), np.dtype(np.uint32))
    if (index >= num_values).any():
        raise CorruptionError(f"an escape lies outside the run of {num_values} values")
    return index + np.uint32(first), _read(part[4 * num_escapes :], (num_escapes,), np.dtype(np.uint16))


def _decompress_into(part: memoryview, out: NDArray[np.uint16]) -> None:
    """Decode one zstd frame of exactly the bytes of `out`, contiguous; it cannot write more."""
    _check_declared(part, out.nbytes)
    try:
        with SCRATCH.decompressor.stream_reader(part, read_size=part.nbytes) as reader:
            num_bytes = reader.readinto(out.reshape(-1).view(np.uint8).data)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"a zstd frame is damaged: {error}") from error
    if num_bytes != out.nbytes:
        raise CorruptionError(f"a zstd frame of {out.nbytes} bytes ends after {num_bytes}")


def _check_declared(part: memoryview, nbytes: int) -> None:
    """Check a frame's own claim of its size, before anything is allocated for it."""
    try:
        declared = zstandard.frame_content_size(part)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"a zstd frame is damaged: {error}") from error
    if declared != nbytes:
        raise CorruptionError(f"a zstd frame of {nbytes} bytes declares {declared}")


def _decompress(part: memoryview, nbytes: int) -> memoryview:
    """Decode one zstd frame of exactly `nbytes`."""
    _check_declared(part, nbytes)
    try:
        return memoryview(SCRATCH.decompressor.decompress(part, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise CorruptionError(f"a zstd frame is damaged: {error}") from error


def _read(part: Part, shape: tuple[int, ...], dtype: np.dtype[W]) -> NDArray[W]:
    if _nbytes(part) != math.prod(shape) * dtype.itemsize:
        raise CorruptionError(f"a part for {shape} of {dtype} has {_nbytes(part)} bytes")
    return np.frombuffer(part, dtype).reshape(shape)


def _nbytes(part: Part) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)
