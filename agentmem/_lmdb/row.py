"""The bytes of one row, and the second place where small records are kept.

Every value but those written with `put_raw` is stored behind 16 bytes:
    0  8  xxh3_64 of all that follows, big-endian, seeded with the xxh3_64 of the key, itself seeded with that of the
          table's name: a row found under another key or in another table fails too
    8  8  stamp, u64-be: number of the transaction that wrote it. It grows with every commit for the life of a store, so
          that of two sound versions of a row the later one is known
   16  n  the value

A row of a mirrored table is written a second time, byte for byte, into the table `mirror`:
    0  1  tag of its table
    1  n  its key

Knows nothing of transactions.
"""

import struct

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from agentmem._lmdb.tables import Table
from agentmem.errors import CorruptionError

HEAD_NBYTES = 16
"""Bytes before the value: two sound copies of a row are the same when these are."""

_STAMP = struct.Struct(">Q")

TAGS = {Table.META: b"\1", Table.SESSIONS: b"\2", Table.BRANCHES: b"\3", Table.NODES: b"\4", Table.TAILS: b"\5"}
"""First byte of the mirrored tables' keys in `mirror`: what cannot be made again from anything else."""

MIRRORED = {tag: table for table, tag in TAGS.items()}
"""The table of each tag."""

_SEEDS = {table: xxh3_64_intdigest(table.value.encode()) for table in Table}


def seal(table: Table, key: bytes, value: bytes, stamp: int) -> bytes:
    """Return the bytes that are stored for `value`."""
    body = _STAMP.pack(stamp) + value
    return _checksum(table, key, body) + body


def opened(table: Table, key: bytes, stored: bytes | memoryview) -> bytes | None:
    """Return the value in the stored bytes of a row; None when they fail their checksum."""
    body = bytes(stored[8:])
    is_good = len(stored) >= HEAD_NBYTES and _checksum(table, key, body) == stored[:8]
    return body[8:] if is_good else None


def unseal(table: Table, key: bytes, stored: bytes | memoryview) -> bytes:
    """Return the value in the stored bytes of a row.

    Raises:
        CorruptionError: They fail their checksum; the message names table and key.
    """
    value = opened(table, key, stored)
    if value is None:
        raise CorruptionError(f"row {key.hex()} of table {table.value!r} fails its checksum: run `agentmem check`")
    return value


def is_sound(table: Table, key: bytes, stored: bytes | memoryview) -> bool:
    """Tell whether stored bytes are a row of this table and key, as it was written at some time."""
    return opened(table, key, stored) is not None


def stamp_of(stored: bytes | memoryview) -> int:
    """Return the stamp in the stored bytes of a sound row."""
    return int(_STAMP.unpack_from(stored, 8)[0])


def _checksum(table: Table, key: bytes, body: bytes | memoryview) -> bytes:
    return xxh3_64_digest(body, seed=xxh3_64_intdigest(key, seed=_SEEDS[table]))
