"""The `nib` transform as torch operations, bit for bit the same as `kv/nib.py`, for KV that is still on a GPU.

Splitting before the copy down moves 12 of 16 bits over the bus, and merging after the copy up does the same. Knows
nothing of zstd or records.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentmem.kv.nib import MAX_ESCAPES, RANGE


@dataclass(frozen=True, slots=True, kw_only=True)
class NibTensors:
    """`kv.nib.NibParts` as tensors on the KV's device; 16-bit words are int16 with the same bits, positions int64.

    Attributes:
        base: `[L, H, D]`.
        nibbles: `[L, H, q, D]`.
        lows: `[2, L, H, q, D]`.
        escape_index: Ascending positions in the flat `[L, H, T, D]` run.
        escape_value: The values at these positions.
        rest: `[L, H, T - 4q, D]`.
    """

    base: Tensor
    nibbles: Tensor
    lows: Tensor
    escape_index: Tensor
    escape_value: Tensor
    rest: Tensor


def pack_nib(values: Tensor) -> NibTensors | None:
    """Split bfloat16 `values` `[L, H, T, D]` (T at least 4, any strides); None when too many values do not fit.

    Waits for the device once: the number of escapes must be known.
    """
    num_layers, num_heads, num_tokens, dim = values.shape
    num_groups = num_tokens // 4
    bits = values.view(torch.int16).to(torch.int32) & 0xFFFF
    base = _find_base(bits[:, :, : num_groups * 4])
    offsets = (bits[:, :, : num_groups * 4] - base[:, :, None]) & 0xFFFF
    escapes = _flat_positions((offsets & 0x7800) != 0, num_tokens)
    if escapes.numel() * MAX_ESCAPES > values.numel():
        return None
    groups = offsets.view(num_layers, num_heads, num_groups, 4, dim)
    # The same code as in numpy also where the value does not fit, so that the same section gives the same record.
    codes = ((groups >> 4 | groups) >> 8) & 0xF
    lows = groups & 0xFF
    return NibTensors(
        base=_to_int16(base),
        nibbles=_to_int16(codes[..., 0, :] | codes[..., 1, :] << 4 | codes[..., 2, :] << 8 | codes[..., 3, :] << 12),
        lows=_to_int16(torch.stack([lows[..., 0, :] | lows[..., 1, :] << 8, lows[..., 2, :] | lows[..., 3, :] << 8])),
        escape_index=escapes,
        escape_value=_to_int16(bits.flatten()[escapes]),
        rest=_to_int16(bits[:, :, num_groups * 4 :]),
    )


def unpack_nib(parts: NibTensors, out: Tensor) -> None:
    """Write the values that `pack_nib` was given into bfloat16 `out` `[L, H, T, D]`, any strides, same device.

    Does not wait for the device. Positions must come from `pack_nib` or have been checked.
    """
    num_layers, num_heads, num_groups, dim = parts.nibbles.shape
    nibbles = parts.nibbles.to(torch.int32)
    codes = torch.stack([nibbles >> shift for shift in (0, 4, 8, 12)], dim=3)
    pairs = parts.lows.to(torch.int32)
    lows = torch.stack([pairs[0], pairs[0] >> 8, pairs[1], pairs[1] >> 8], dim=3) & 0xFF
    offsets = ((codes & 8) << 12) + ((codes & 7) << 8) + lows
    grouped = (offsets + parts.base.to(torch.int32)[:, :, None, None]).view(num_layers, num_heads, num_groups * 4, dim)
    whole = torch.cat([_to_int16(grouped), parts.rest], dim=2)
    whole.view(-1).index_copy_(0, parts.escape_index, parts.escape_value)
    out.view(torch.int16).copy_(whole)


def _find_base(bits: Tensor) -> Tensor:
    """Return `[L, H, D]`: each channel's largest magnitude less RANGE, with the sign of the value that has it."""
    magnitude = bits & 0x7FFF
    is_negative = bits >> 15
    largest = torch.where(is_negative == 1, -1, magnitude).amax(dim=2)
    largest_negative = torch.where(is_negative == 1, magnitude, -1).amax(dim=2)
    is_base_negative = largest_negative > largest
    base = (torch.maximum(largest, largest_negative) | 15) - RANGE + is_base_negative * 0x8000
    return base & 0xFFFF


def _flat_positions(is_escape: Tensor, num_tokens: int) -> Tensor:
    """Return the flat positions in `[L, H, T, D]` of what is marked in `[L, H, 4q, D]`."""
    if is_escape.shape[2] != num_tokens:
        is_escape = torch.nn.functional.pad(is_escape, (0, 0, 0, num_tokens - is_escape.shape[2]))
    return is_escape.flatten().nonzero().flatten()


def _to_int16(bits: Tensor) -> Tensor:
    """Keep the low 16 bits of int32 `bits`; the narrowing cast wraps."""
    return bits.to(torch.int16)
