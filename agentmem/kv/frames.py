"""Parts of a coded band: zstd frames and plain arrays, read as what they have to be and nothing else.

Knows nothing of what the values mean. Nothing is allocated before a part's own claim of its size is found right.
"""

import math
from typing import TypeVar

import numpy as np
import zstandard
from numpy.typing import NDArray

from agentmem.errors import CorruptionError
from agentmem.kv.scratch import SCRATCH

Part = bytes | memoryview
"""Bytes of one part of a coded band."""

A = TypeVar("A", bound=np.generic)


def decompress_into(part: memoryview, out: NDArray[np.uint16]) -> None:
    """Decode one zstd frame of exactly the bytes of `out`, contiguous; it cannot write more.

    Raises:
        CorruptionError: It is another frame, or damaged.
    """
    _check_declared(part, out.nbytes)
    try:
        with SCRATCH.decompressor.stream_reader(part, read_size=part.nbytes) as reader:
            num_bytes = reader.readinto(out.reshape(-1).view(np.uint8).data)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"a zstd frame is damaged: {error}") from error
    if num_bytes != out.nbytes:
        raise CorruptionError(f"a zstd frame of {out.nbytes} bytes ends after {num_bytes}")


def decompress(part: memoryview, nbytes: int) -> memoryview:
    """Decode one zstd frame of exactly `nbytes`.

    Raises:
        CorruptionError: It is another frame, or damaged.
    """
    _check_declared(part, nbytes)
    try:
        return memoryview(SCRATCH.decompressor.decompress(part, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise CorruptionError(f"a zstd frame is damaged: {error}") from error


def inflate(part: memoryview, shape: tuple[int, ...], dtype: np.dtype[A]) -> NDArray[A]:
    """Decode one zstd frame that holds an array.

    Raises:
        CorruptionError: It is another frame, or damaged.
    """
    return read_array(decompress(part, math.prod(shape) * dtype.itemsize), shape, dtype)


def read_array(part: Part, shape: tuple[int, ...], dtype: np.dtype[A]) -> NDArray[A]:
    """View a part as an array.

    Raises:
        CorruptionError: It has another size.
    """
    if part_nbytes(part) != math.prod(shape) * dtype.itemsize:
        raise CorruptionError(f"a part for {shape} of {dtype} has {part_nbytes(part)} bytes")
    return np.frombuffer(part, dtype).reshape(shape)


def declared_nbytes(part: memoryview) -> int:
    """Return the size that a zstd frame claims to have when it is decoded.

    Raises:
        CorruptionError: It is no frame.
    """
    try:
        return zstandard.frame_content_size(part)
    except zstandard.ZstdError as error:
        raise CorruptionError(f"a zstd frame is damaged: {error}") from error


def part_nbytes(part: Part) -> int:
    """Return the bytes of a part."""
    return part.nbytes if isinstance(part, memoryview) else len(part)


def _check_declared(part: memoryview, nbytes: int) -> None:
    if (declared := declared_nbytes(part)) != nbytes:
        raise CorruptionError(f"a zstd frame of {nbytes} bytes declares {declared}")
