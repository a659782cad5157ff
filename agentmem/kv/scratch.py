"""What one thread keeps between two blocks so that coding a block allocates little: arrays and zstd contexts.

Knows nothing of what is coded.
"""

import math
import threading

import numpy as np
import zstandard
from numpy.typing import DTypeLike, NDArray

# zstd as a pure Huffman coder: with these parameters it finds next to no matches, and matches in float noise only cost
# time and bytes (level 3 needs 3.3 bits a symbol where order-0 entropy is 2.9). `target_length` must stay 0: any other
# value makes the fast strategy store literals raw. Source: benchmarks/codec.py and docs/experiments.md.
_HUFFMAN = zstandard.ZstdCompressionParameters.from_level(
    1,
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    hash_log=6,
    chain_log=6,
    target_length=0,
    write_content_size=True,
    write_checksum=False,
)


class Scratch(threading.local):
    """Arrays and zstd contexts of the calling thread.

    zstd contexts crash the process when two threads use one at once; fresh arrays of this size cost page faults.

    Attributes:
        compressor: Huffman coder of this thread.
        decompressor: Decoder of this thread.
    """

    def __init__(self) -> None:
        """Start a thread's scratch; runs once in each thread that touches the object."""
        self.compressor = zstandard.ZstdCompressor(compression_params=_HUFFMAN)
        self.decompressor = zstandard.ZstdDecompressor()
        self._buffers: dict[str, NDArray[np.uint8]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.uint16]:
        """Return an uninitialised array, valid until this thread asks for `name` again."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._buffers[name] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes].view(dtype).reshape(shape)


# The only state of kv/: per thread, invisible from outside, and nothing reads what an earlier call left in it.
SCRATCH = Scratch()
