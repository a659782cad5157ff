"""Records on their way to and from the disk: as they are, or in the boxes of an encrypted store.

Sealing happens in the thread that hands a record over, opening in the one that asked for it: never on the writer's.
"""

from dataclasses import replace

import torch

from agentmem._lmdb import Cipher
from agentmem.errors import CorruptionError, InvalidInputError
from agentmem.ids import BlockDigest, short
from agentmem.kv import record as record_format
from agentmem.kv.record import Record

_MAX_BOX_NBYTES = (1 << 31) - 1024
"""Longest record that is encrypted: OpenSSL takes less than 2 GiB at once."""

_MAX_RAW_NBYTES = 1 << 30
"""Most KV that a record may claim to hold before memory is taken for it."""


def sealed(cipher: Cipher | None, record: Record) -> Record:
    """Return the record with the bytes that are to be stored of it.

    Raises:
        InvalidInputError: It is too large to be encrypted.
    """
    if cipher is None:
        return record
    if len(record.data) > _MAX_BOX_NBYTES:
        raise InvalidInputError(
            f"block {short(record.digest)} has a record of {len(record.data):,} bytes: too large for an encrypted store"
        )
    return replace(record, data=cipher.close_record(record.digest, record.data))


def verified(data: bytes) -> Record:
    """Return the record in bytes that came from elsewhere, after decoding all of it.

    Raises:
        CorruptionError: The bytes are damaged.
        FormatVersionError: They were written in a format that this version does not read.
    """
    meta = record_format.read_meta(data)
    if meta.raw_nbytes > _MAX_RAW_NBYTES:
        raise CorruptionError(f"block {short(meta.digest)} claims {meta.raw_nbytes:,} bytes of KV; none is so large")
    dtype = getattr(torch, meta.dtype)
    record_format.unpack(data, [torch.empty(section.shape, dtype=dtype) for section in meta.sections])
    return Record.of(meta, bytes(data))


def opened(cipher: Cipher | None, digest: BlockDigest, stored: memoryview) -> memoryview:
    """Return the record in what is stored of it; in a store that is not encrypted these are the same bytes.

    Raises:
        CorruptionError: It is not as it was encrypted, or another block's.
    """
    return stored if cipher is None else memoryview(cipher.open_record(digest, stored))
