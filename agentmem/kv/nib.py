"""The `nib` transform: 16-bit floats split into 8 raw bits and 4 bits that an entropy coder can shrink. Numpy version.

Per channel of a run of layers, a base is subtracted so that nearly every value fits 12 bits. Nothing is lost: values
that do not fit are listed. Knows nothing of zstd, of records or of torch (kv/nib_torch.py has the same
steps for a GPU).

Source: splitting exponents from mantissas is ZipNN's; the base per channel and the pairing are ours
(benchmarks/codec.py).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentmem.kv.scratch import SCRATCH

U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]

RANGE = 2047
"""A channel's base is this far below its largest magnitude: 11 bits, 16 octaves of bfloat16."""

MAX_ESCAPES = 64
"""One value in this many may be an escape; with more, byte planes are smaller."""

_UNUSED_BITS = np.uint16(0x7800)
_TOP_NIBBLE = np.uint16(0x0F00)
_LOW_BYTE = np.uint16(0x00FF)
_SIGN_AND_RANGE = np.uint16(0x8700)
_GROUP = 4
_UNUSED_BITS_OF_FOUR = np.uint64(0x7800_7800_7800_7800)


@dataclass(frozen=True, slots=True, kw_only=True)
class NibParts:
    """A run of layers after the transform; q = T // 4 groups of four consecutive tokens.

    Attributes:
        base: `[L, H, D]`, what was subtracted from each channel.
        nibbles: `[L, H, q, D]`, four 4-bit codes a word: token 0 of the group in the lowest bits, 3 in the highest.
            A code is the sign relative to the base (bit 3) and the distance in steps of 256 (bits 0-2). The two tokens
            that share a byte are neighbours, so that a byte-wise entropy coder profits.
        lows: `[2, L, H, q, D]`, low bytes: tokens 0 (low) and 1 (high) of the group in the first plane, 2 and 3 in the
            second.
        escape_index: ascending u32 positions in the flat `[L, H, T, D]` run of the values that do not fit.
        escape_value: The values at these positions.
        rest: `[L, H, T - 4q, D]`, the up to three tokens after the last group, as they are.
    """

    base: U16
    nibbles: U16
    lows: U16
    escape_index: U32
    escape_value: U16
    rest: U16


def split(values: U16) -> NibParts | None:
    """Split `values` `[L, H, T, D]` (T at least 4, any strides); None when so many do not fit that it does not pay."""
    num_groups = values.shape[2] // _GROUP
    grouped = values[:, :, : num_groups * _GROUP]
    base = _find_base(grouped)
    offsets = _subtract(grouped, base)
    escapes = _find_escapes(offsets)
    if escapes.size * MAX_ESCAPES > values.size:
        return None
    index = _position(escapes, offsets.shape, values.shape)
    return NibParts(
        base=base,
        nibbles=_pack_nibbles(offsets),
        lows=_pack_lows(offsets),
        escape_index=index.astype(np.uint32),
        escape_value=values[np.unravel_index(index, values.shape)],
        rest=np.ascontiguousarray(values[:, :, num_groups * _GROUP :]),
    )


def merge(parts: NibParts, out: U16) -> None:
    """Write the values that `split` was given into `out` `[L, H, T, D]`, any strides.

    Raises:
        IndexError: An escape lies outside `out`.
    """
    num_layers, num_heads, num_groups, dim = parts.nibbles.shape
    grouped = out[:, :, : num_groups * _GROUP]
    base = parts.base[:, :, None, :]
    shape = (num_layers, num_heads, num_groups, dim)
    pair, code, low = (SCRATCH.array(name, shape, np.uint16) for name in ("pair", "code", "low"))
    for parity in (0, 1):
        # Codes of tokens `parity` (in the low byte) and `parity + 2` (in the high byte).
        np.right_shift(parts.nibbles, np.uint16(4 * parity), out=pair)
        np.bitwise_and(pair, np.uint16(0x0F0F), out=pair)
        for half, spread in ((0, np.uint16(0x1100)), (1, np.uint16(0x0011))):
            # The product puts bit 3 of a code at bit 15 and bits 0-2 at bits 8-10; what else it leaves is masked.
            np.multiply(pair, spread, out=code)
            np.bitwise_and(code, _SIGN_AND_RANGE, out=code)
            if parity == 0:
                np.bitwise_and(parts.lows[half], _LOW_BYTE, out=low)
            else:
                np.right_shift(parts.lows[half], np.uint16(8), out=low)
            np.add(code, low, out=code)
            np.add(code, base, out=grouped[:, :, 2 * half + parity :: _GROUP])
    out[:, :, num_groups * _GROUP :] = parts.rest
    if parts.escape_index.size:
        out[_unravel(parts.escape_index, out.shape)] = parts.escape_value


def _find_base(values: U16) -> U16:
    """Return `[L, H, D]`: each channel's largest magnitude less RANGE, with the sign of the value that has it."""
    positive = _max_over_tokens(values.view(np.int16)).astype(np.int32)
    negative = _max_over_tokens(values).astype(np.int32) - 0x8000
    is_negative = negative > positive
    # The low four bits are set so that bases of neighbouring channels compress.
    largest = np.where(is_negative, negative, positive) | 15
    return (largest - RANGE + (is_negative * np.int32(0x8000))).astype(np.uint16, order="C")


def _max_over_tokens(values: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return the maximum over T by halving: long contiguous runs, where `max(axis=2)` works on D values at a time."""
    while (num_tokens := values.shape[2]) > 1:
        half = num_tokens // 2
        halved = np.maximum(values[:, :, :half], values[:, :, half : 2 * half])
        if num_tokens % 2:
            np.maximum(halved[:, :, 0], values[:, :, -1], out=halved[:, :, 0])
        values = halved
    return values[:, :, 0]


def _subtract(values: U16, base: U16) -> U16:
    """Return `[4, L, H, q, D]`: values less their base, the n-th tokens of all groups together."""
    num_layers, num_heads, num_tokens, dim = values.shape
    offsets = SCRATCH.array("offsets", (_GROUP, num_layers, num_heads, num_tokens // _GROUP, dim), np.uint16)
    for member in range(_GROUP):
        np.subtract(values[:, :, member::_GROUP], base[:, :, None], out=offsets[member])
    return offsets


def _find_escapes(offsets: U16) -> NDArray[np.intp]:
    """Return flat positions in `offsets` whose value needs more than 12 bits; looks at four values at a time."""
    fours = offsets.reshape(-1).view(np.uint64)
    excess = SCRATCH.array("work", (fours.size,), np.uint64)
    np.bitwise_and(fours, _UNUSED_BITS_OF_FOUR, out=excess)
    hits = np.flatnonzero(excess != 0)
    which, member = np.nonzero(offsets.reshape(-1, 4)[hits] & _UNUSED_BITS)
    return hits[which] * 4 + member


def _position(escapes: NDArray[np.intp], offsets_shape: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[np.intp]:
    """Turn flat positions in `offsets` into ascending flat positions in `[L, H, T, D]`."""
    member, layer, head, group, channel = np.unravel_index(escapes, offsets_shape)
    return np.sort(np.ravel_multi_index((layer, head, group * _GROUP + member, channel), shape))


def _pack_nibbles(offsets: U16) -> U16:
    codes = SCRATCH.array("work", offsets.shape, np.uint16)
    np.right_shift(offsets, np.uint16(4), out=codes)
    np.bitwise_or(codes, offsets, out=codes)
    np.bitwise_and(codes, _TOP_NIBBLE, out=codes)
    codes[0] >>= np.uint16(8)
    codes[1] >>= np.uint16(4)
    codes[3] <<= np.uint16(4)
    packed: U16 = codes[0] | codes[1]
    packed |= codes[2]
    packed |= codes[3]
    return packed


def _pack_lows(offsets: U16) -> U16:
    lows = np.empty((2, *offsets.shape[1:]), np.uint16)
    low = SCRATCH.array("low", offsets.shape[1:], np.uint16)
    for plane in (0, 1):
        np.bitwise_and(offsets[2 * plane], _LOW_BYTE, out=low)
        np.left_shift(offsets[2 * plane + 1], np.uint16(8), out=lows[plane])
        np.bitwise_or(lows[plane], low, out=lows[plane])
    return lows


def _unravel(index: U32, shape: tuple[int, ...]) -> tuple[NDArray[np.intp], ...]:
    try:
        return np.unravel_index(index, shape)
    except ValueError as error:
        raise IndexError(f"an escape lies outside the {shape} run") from error
