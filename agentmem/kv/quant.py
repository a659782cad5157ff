"""The `q` transform: floats to small integers that an entropy coder can shrink, with an error that is known. Lossy.

Per channel of a run of layers the mean is taken off, and what is left is rounded to steps: one step a layer for keys,
one a layer and token for values. Knows nothing of zstd, of records or of torch.

A value comes back within half a step before it is rounded to its dtype, and as it was a number of that dtype, within
one step afterwards: the stored step is the bound. `quantise` checks that, value by value. Decoding is a product and a
sum of float32, each rounded by itself: it gives the same bits everywhere.

Source: benchmarks/lossy.py, for what the levels cost; one step for all channels of the keys and one per token for the
values lost least there.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
Words = NDArray[np.unsignedinteger]

STEPS = {"q1": (0.06, 0.12), "q2": (0.125, 0.25), "q3": (0.25, 0.5), "q4": (0.5, 1.0)}
"""Of each level: the step of keys and of values, in root mean squares of what it is the step of."""

DTYPES = ("bfloat16", "float16", "float32")
"""What can be quantised, by torch's names."""

MIN_TOKENS = 16
"""Below this the means, 16 bits a channel, cost more than is saved; and a step a layer is not taken for one a token."""

ESCAPE = -128
"""The code of a value that is further from its mean than 127 steps: its own code is in the list of escapes."""

_EXPONENT = np.uint16(0x7F80)
_SMALLEST_NORMAL = np.float32(2.0**-126)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantParts:
    """A run of layers after the transform.

    Attributes:
        mean: `[L, H, D]`, what was subtracted from each channel: bits of bfloat16.
        steps: `[L]` or `[L, T]`: bits of bfloat16, finite and above zero.
        codes: `[L, H, T, D]`, int8: by how many steps a value differs from its channel's mean.
        escapes: int32, the codes of those that have ESCAPE in `codes`, in that order.
    """

    mean: U16
    steps: U16
    codes: NDArray[np.int8]
    escapes: NDArray[np.int32]


def quantise(words: Words, dtype: str, level: str, *, is_key: bool) -> QuantParts | None:
    """Quantise the values `[L, H, T, D]` of `words`; None when some are not finite, or would not keep to the bound."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        values = _floats(words, dtype)
        mean = _bfloat16(values.mean(axis=2, dtype=np.float64))
        rest = values - _floats(mean, "bfloat16")[:, :, None]
        axes = (1, 2, 3) if is_key else (1, 3)
        spread = np.sqrt(np.square(rest, dtype=np.float64).mean(axis=axes))
        steps = _bfloat16(np.maximum(spread * STEPS[level][0 if is_key else 1], _SMALLEST_NORMAL))
        wide = np.rint(rest / _over_values(steps))
        if not (np.isfinite(wide).all() and _are_sound(mean, steps)):
            return None
        parts = _narrow(wide.astype(np.int32), mean, steps)
        back = np.empty_like(words, order="C")
        dequantise(parts, dtype, back)
        is_kept = np.abs(_floats(back, dtype) - values) <= _over_values(steps)
    return parts if is_kept.all() else None


def dequantise(parts: QuantParts, dtype: str, out: Words) -> None:
    """Write what `quantise` made of values into `out` `[L, H, T, D]`, any strides.

    Raises:
        ValueError: A mean or a step is not a number that `quantise` gives, or there are more or fewer escapes.
    """
    if not _are_sound(parts.mean, parts.steps):
        raise ValueError("a mean or a step is not finite, or a step is not above zero")
    wide = parts.codes.astype(np.int32)
    escaped = wide == ESCAPE
    if np.count_nonzero(escaped) != parts.escapes.size:
        raise ValueError(f"{np.count_nonzero(escaped)} values are escaped; there are {parts.escapes.size} escapes")
    wide[escaped] = parts.escapes
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = wide.astype(np.float32)
        values *= _over_values(parts.steps)
        values += _floats(parts.mean, "bfloat16")[:, :, None]
        out[...] = _bits(values, dtype)


def max_step(steps: U16) -> float:
    """Return the largest of some steps: no value of theirs is further off."""
    return float(_floats(steps, "bfloat16").max(initial=0.0))


def _narrow(wide: NDArray[np.int32], mean: U16, steps: U16) -> QuantParts:
    """Put codes that do not fit a byte into the list of escapes."""
    is_escape = np.abs(wide) > -ESCAPE - 1
    codes = np.where(is_escape, ESCAPE, wide).astype(np.int8)
    return QuantParts(mean=mean, steps=steps, codes=codes, escapes=wide[is_escape])


def _over_values(steps: U16) -> F32:
    """Return steps as floats in a shape that spreads over `[L, H, T, D]`."""
    floats = _floats(steps, "bfloat16")
    return floats.reshape(-1, 1, 1, 1) if steps.ndim == 1 else floats[:, None, :, None]


def _are_sound(mean: U16, steps: U16) -> bool:
    """Say whether means are finite, and steps are finite, normal and above zero."""
    is_sound = bool(((mean & _EXPONENT) != _EXPONENT).all())
    return is_sound and bool(((steps < _EXPONENT) & (steps >= np.uint16(0x0080))).all())


def _floats(words: Words, dtype: str) -> F32:
    """Return the values that words of a dtype stand for."""
    if dtype == "bfloat16":
        return np.left_shift(words.astype(np.uint32), np.uint32(16)).view(np.float32)
    return np.ascontiguousarray(words).view(dtype).astype(np.float32)


def _bits(values: F32, dtype: str) -> Words:
    """Round values to a dtype, to even where they are halfway; return its words."""
    if dtype == "bfloat16":
        return _bfloat16(values)
    word = np.uint16 if dtype == "float16" else np.uint32
    return values.astype(dtype).view(word)


def _bfloat16(values: NDArray[np.floating]) -> U16:
    """Round values that are not NaN to bfloat16, to even where they are halfway; return the bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = np.right_shift(bits, np.uint32(16)) & np.uint32(1)
    return np.right_shift(bits + odd + np.uint32(0x7FFF), np.uint32(16)).astype(np.uint16)
