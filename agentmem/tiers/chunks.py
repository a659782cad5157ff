"""A record's bytes in table `blocks`, cut into chunks.

A record of n bytes is chunks of 65,520 bytes, which fill 16 pages of LMDB exactly; the last chunk is padded with zeros
so that it fills 1, 2, 4, 8 or 16 pages. One value per block would make every later write search the free list for a
long run of pages (8-10 times the CPU on an aged store, docs/decisions). Key of a chunk:
    0  8  block id, u64-be
    8  2  number of the chunk, u16-be
"""

import struct
from collections.abc import Iterator

import xxhash

from agentmem._lmdb import ReadTransaction, Table, WriteTransaction
from agentmem.errors import CorruptionError
from agentmem.ids import BlockDigest, BlockId
from agentmem.tiers.blockrows import BlockInfo

PAGE_NBYTES = 4096
MAX_CHUNK_PAGES = 16
# LMDB keeps 16 bytes of a run of pages for itself.
CHUNK_NBYTES = MAX_CHUNK_PAGES * PAGE_NBYTES - 16

MAX_RECORD_NBYTES = CHUNK_NBYTES << 16
"""Longest record whose chunks can be numbered."""

_CHUNK_KEY = struct.Struct(">QH")


def chunk_keys(info: BlockInfo) -> list[bytes]:
    """Return the keys of a record's rows."""
    num_chunks = -(-info.stored_nbytes // CHUNK_NBYTES)
    return [_CHUNK_KEY.pack(info.block_id, number) for number in range(num_chunks)]


def chunks(block_id: BlockId, data: bytes) -> Iterator[tuple[bytes, memoryview | bytearray]]:
    """Yield the rows of a record."""
    view = memoryview(data)
    for number, start in enumerate(range(0, len(data), CHUNK_NBYTES)):
        chunk = view[start : start + CHUNK_NBYTES]
        yield _CHUNK_KEY.pack(block_id, number), chunk if len(chunk) == CHUNK_NBYTES else _padded(chunk)


def padded_nbytes(stored_nbytes: int) -> int:
    """Return the bytes of whole pages that a record takes in the data file."""
    whole, rest = divmod(stored_nbytes, CHUNK_NBYTES)
    num_pages = -(-(rest + 16) // PAGE_NBYTES) if rest else 0
    return (whole * MAX_CHUNK_PAGES + (1 << (num_pages - 1).bit_length() if num_pages else 0)) * PAGE_NBYTES


def _padded(chunk: memoryview) -> bytearray:
    """Return the chunk with zeros at its end, so that it fills a power of two of pages."""
    num_pages = -(-(len(chunk) + 16) // PAGE_NBYTES)
    padded = bytearray((1 << (num_pages - 1).bit_length()) * PAGE_NBYTES - 16)
    padded[: len(chunk)] = chunk
    return padded


def join(txn: ReadTransaction, digest: BlockDigest, info: BlockInfo, out: memoryview) -> None:
    """Copy a block's chunks into `out`, whose length is the record's.

    Raises:
        CorruptionError: Some are missing or too short.
    """
    keys = chunk_keys(info)
    views = txn.get_views(Table.BLOCKS, keys)
    if len(views) != len(keys):
        raise CorruptionError(f"block {digest.hex()}: {len(keys) - len(views)} of its {len(keys)} chunks are missing")
    for number, view in enumerate(views):
        target = out[number * CHUNK_NBYTES : (number + 1) * CHUNK_NBYTES]
        if len(view) < len(target):
            raise CorruptionError(f"block {digest.hex()}: chunk {number} has {len(view)} bytes, not {len(target)}")
        target[:] = view[: len(target)]


def joined(txn: ReadTransaction, digest: BlockDigest, info: BlockInfo) -> bytearray:
    """Return a block's chunks as one, compared with their checksum.

    Raises:
        CorruptionError: Some are missing, or not as they were written.
    """
    data = bytearray(info.stored_nbytes)
    join(txn, digest, info, memoryview(data))
    if xxhash.xxh3_128_digest(data) != info.checksum:
        raise CorruptionError(f"block {digest.hex()}: the stored record fails its checksum")
    return data


def delete_chunks(txn: WriteTransaction, info: BlockInfo) -> None:
    """Remove the rows of a record."""
    for key in chunk_keys(info):
        txn.delete(Table.BLOCKS, key)
