"""Sections of KV to bytes and back: bit for bit, unless a lossy codec is asked for by name.

A section is coded in bands: runs of whole layers, each coded by itself, small enough for a CPU cache and for loading
layer by layer. Knows nothing of records, blocks or storage; the bytes given to `decode_section` are not trusted.
"""

import math
from collections.abc import Iterator, Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentmem.errors import CorruptionError, InvalidInputError, SpecMismatchError
from agentmem.kv.frames import Part, declared_nbytes, decompress, decompress_into, inflate, part_nbytes, read_array
from agentmem.kv.nib import NibParts, merge, split
from agentmem.kv.quant import DTYPES, MIN_TOKENS, QuantParts, dequantise, max_step, quantise
from agentmem.kv.scratch import SCRATCH
from agentmem.levels import LOSSY_CODECS

Words = NDArray[np.unsignedinteger]
"""KV as unsigned integers of the dtype's size: `[L, H, T, D]`."""

CODECS = ("lossless", "raw", *LOSSY_CODECS)
"""Names that `encode_section` accepts."""

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
_NUM_QUANT_PARTS = 4
_ESCAPE_NBYTES = 6


class CodecId(IntEnum):
    """How one section's bytes are coded. On disk: never renumber.

    Each band is coded as a fixed number of parts:

    * RAW: 1 part, the band's values, contiguous `[L, H, T, D]`, little-endian.
    * PLANE: one part a byte of the dtype, most significant first: that byte of every value, as a zstd frame, or as it
      is when the part has exactly one byte a value.
    * NIB: 5 parts, see `kv/nib.py` (u16-le words): base as a zstd frame; nibbles as a zstd frame; lows; escapes (all
      u32-le positions, then all u16-le values); rest.
    * Q1 to Q4, lossy: 4 parts, see `kv/quant.py`: means as a zstd frame (u16-le); steps as a zstd frame (u16-le, one a
      layer or one a layer and token); codes as a zstd frame (i8); escapes (i32-le). They are decoded alike.
    """

    RAW = 0
    PLANE = 1
    NIB = 2
    Q1 = 3
    Q2 = 4
    Q3 = 5
    Q4 = 6

    @property
    def is_lossy(self) -> bool:
        """Whether what is decoded need not be what was coded."""
        return self >= CodecId.Q1


_LEVELS = {CodecId[level.upper()]: level for level in LOSSY_CODECS}


def encode_section(section: Tensor, codec: str, *, is_key: bool = True) -> tuple[CodecId, list[Part]]:
    """Code one section `[L, H, T, D]` of KV, any strides, on the CPU.

    "lossless" takes nib for bfloat16 of 16 tokens or more, else byte planes, and falls back to raw bytes when that is
    not smaller. A lossy codec is taken where every value is finite and comes back within the bound that `error_bound`
    reads, else "lossless" is. The parts own their memory, or view `section` when it is stored raw and contiguous.

    Args:
        section: What to code.
        codec: One of CODECS.
        is_key: Whether the section is keys; lossy codecs treat values otherwise.

    Raises:
        InvalidInputError: `codec` is unknown, or the section is not on the CPU.
        SpecMismatchError: The section's dtype or number of dimensions cannot be stored.
    """
    if codec not in CODECS:
        raise InvalidInputError(f"codec {codec!r} is unknown: use one of {CODECS}")
    words = as_words(section)
    if codec != "raw" and words.size:
        for codec_id in _candidates(section, codec):
            parts = _encode_bands(words, codec_id, dtype_name(section), is_key=is_key)
            if parts is not None and sum(map(part_nbytes, parts)) < words.nbytes:
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
    for band, layers in enumerate(_bands(words, num_bands)):
        _decode_band(CodecId(codec_id), parts[band * num_parts : (band + 1) * num_parts], layers, dtype_name(out))


def error_bound(codec_id: CodecId, parts: Sequence[Part], shape: Sequence[int]) -> float:
    """Return by how much a value of a coded section `[L, H, T, D]` may differ from what was coded; 0.0: not at all.

    Raises:
        CorruptionError: The parts cannot be what `encode_section` made for this shape.
    """
    if not codec_id.is_lossy:
        return 0.0
    num_bands, odd_parts = divmod(len(parts), _NUM_QUANT_PARTS)
    if odd_parts or not 1 <= num_bands <= max(1, shape[0]):
        raise CorruptionError(f"a section of {shape[0]} layers has {len(parts)} parts of codec {codec_id}")
    layers = _bands(np.empty((shape[0], 0), np.uint8), num_bands)
    steps = [_read_steps(parts[_NUM_QUANT_PARTS * band + 1], len(run), shape[2]) for band, run in enumerate(layers)]
    return max(map(max_step, steps))


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
        decompress_into(parts[0], base[number])
        decompress_into(parts[1], nibbles[number])
    lows = _side_by_side([read_array(parts[2], (2, *groups), np.dtype(np.uint16)) for parts in coded])
    rest = np.empty((num_blocks, num_layers, num_heads, num_tokens % 4, dim), np.uint16)
    for number, parts in enumerate(coded):
        rest[number] = read_array(parts[4], rest.shape[1:], np.dtype(np.uint16))
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


def dtype_name(section: Tensor) -> str:
    """Return torch's name of a section's dtype."""
    return str(section.dtype).removeprefix("torch.")


def _candidates(section: Tensor, codec: str) -> list[CodecId]:
    is_quantised = codec in LOSSY_CODECS and dtype_name(section) in DTYPES and section.shape[2] >= MIN_TOKENS
    is_nib = section.dtype == torch.bfloat16 and section.shape[2] >= _MIN_NIB_TOKENS
    lossy = [CodecId[codec.upper()]] if is_quantised else []
    return [*lossy, CodecId.NIB, CodecId.PLANE] if is_nib else [*lossy, CodecId.PLANE]


def _num_parts(codec_id: int, words: Words) -> int:
    if codec_id == CodecId.PLANE:
        return words.itemsize
    if codec_id == CodecId.NIB and words.itemsize == 2:
        return _NUM_NIB_PARTS
    if codec_id == CodecId.RAW:
        return 1
    if codec_id in _LEVELS and words.itemsize <= np.dtype(np.uint32).itemsize:
        return _NUM_QUANT_PARTS
    raise CorruptionError(f"codec {codec_id} cannot hold values of {words.itemsize} bytes")


def _bands(words: Words, num_bands: int) -> Iterator[Words]:
    """Cut the layers into `num_bands` runs of nearly equal length: the split is part of the format."""
    num_layers = words.shape[0]
    for band in range(num_bands):
        yield words[band * num_layers // num_bands : (band + 1) * num_layers // num_bands]


def _encode_bands(words: Words, codec_id: CodecId, dtype: str, *, is_key: bool) -> list[Part] | None:
    num_bands = min(words.shape[0], max(1, round(words.nbytes / _BAND_NBYTES)))
    parts: list[Part] = []
    for layers in _bands(words, num_bands):
        if codec_id.is_lossy:
            coded = _encode_quant(layers, dtype, _LEVELS[codec_id], is_key=is_key)
        else:
            coded = _encode_nib(layers) if codec_id == CodecId.NIB else _encode_planes(layers)
        if coded is None:
            return None
        parts += coded
    return parts


def _decode_band(codec_id: CodecId, parts: Sequence[memoryview], out: Words, dtype: str) -> None:
    if codec_id.is_lossy:
        _decode_quant(parts, out, dtype)
    else:
        {CodecId.RAW: _decode_raw, CodecId.PLANE: _decode_planes, CodecId.NIB: _decode_nib}[codec_id](parts, out)


def _encode_raw(words: Words) -> list[Part]:
    return [np.ascontiguousarray(words).reshape(-1).view(np.uint8).data]


def _decode_raw(parts: Sequence[memoryview], out: Words) -> None:
    out[...] = read_array(parts[0], out.shape, out.dtype)


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
        plane = read_array(
            part if part.nbytes == out.size else decompress(part, out.size), out.shape, np.dtype(np.uint8)
        )
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


def _encode_quant(words: Words, dtype: str, level: str, *, is_key: bool) -> list[Part] | None:
    coded = quantise(words, dtype, level, is_key=is_key)
    if coded is None:
        return None
    return [
        SCRATCH.compressor.compress(coded.mean.astype("<u2").data),
        SCRATCH.compressor.compress(coded.steps.astype("<u2").data),
        SCRATCH.compressor.compress(coded.codes.data),
        coded.escapes.astype("<i4").tobytes(),
    ]


def _decode_quant(parts: Sequence[memoryview], out: Words, dtype: str) -> None:
    num_layers, num_heads, num_tokens, dim = out.shape
    if parts[3].nbytes % 4:
        raise CorruptionError(f"a list of escapes has {parts[3].nbytes} bytes")
    coded = QuantParts(
        mean=inflate(parts[0], (num_layers, num_heads, dim), np.dtype(np.uint16)),
        steps=_read_steps(parts[1], num_layers, num_tokens),
        codes=inflate(parts[2], out.shape, np.dtype(np.int8)),
        escapes=np.frombuffer(parts[3], np.int32),
    )
    try:
        dequantise(coded, dtype, out)
    except ValueError as error:
        raise CorruptionError(f"a quantised band is damaged: {error}") from error


def _read_steps(part: Part, num_layers: int, num_tokens: int) -> NDArray[np.uint16]:
    """Read one step a layer, or one a layer and token: the part's own size says which."""
    view = memoryview(part)
    is_by_layer = declared_nbytes(view) == 2 * num_layers
    return inflate(view, (num_layers,) if is_by_layer else (num_layers, num_tokens), np.dtype(np.uint16))


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
    index = read_array(part[: 4 * num_escapes], (num_escapes,), np.dtype(np.uint32))
    if (index >= num_values).any():
        raise CorruptionError(f"an escape lies outside the run of {num_values} values")
    return index + np.uint32(first), read_array(part[4 * num_escapes :], (num_escapes,), np.dtype(np.uint16))
