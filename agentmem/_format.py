"""The record that makes a directory a store: who wrote it, and who may read it.

Knows nothing of where the record is kept.
"""

import secrets
import struct
import time
from dataclasses import dataclass

from agentmem.errors import CorruptionError, FormatVersionError, InvalidInputError

FORMAT_VERSION = 4
"""Version that this code writes; rises whenever a byte on disk changes its meaning.

1: checkpoints without marks and with bare digests of layer states. 2: marks, layer states with positions, regimes.
3: stamped rows, small records kept twice. 4: blocks whose records are in a tier below.
"""

OLDEST_READABLE = 4
"""Lowest version that this code reads."""

FORMAT_KEY = b"format"
"""Key of the record in the table `meta`."""

ENCRYPTED = 1
"""Feature bit, incompat: rows and records are in boxes that only the store's key opens."""

KNOWN_INCOMPAT = ENCRYPTED
"""Feature bits that this code understands; a store with any other incompat bit is refused."""

# Byte by byte, big-endian, 44 bytes; later versions may append:
#   0  8  magic "agentmem"
#   8  2  version of the writer
#  10  2  min_reader: lowest version that can read the store
#  12  4  compat: feature bits that a reader may ignore
#  16  4  incompat: feature bits that a reader must know
#  20 16  uuid: random, names the store
#  36  8  created: seconds since 1970, IEEE double
_LAYOUT = struct.Struct(">8sHHII16sd")
_MAGIC = b"agentmem"


def is_format_record(data: bytes) -> bool:
    """Tell whether bytes begin as a format record does."""
    return data.startswith(_MAGIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFormat:
    """The format of one store.

    Attributes:
        version: Format version of the code that made the store.
        min_reader: Lowest format version whose code can read it.
        compat: Feature bits that may be ignored.
        incompat: Feature bits that must be known.
        uuid: 16 random bytes that name the store.
        created_s: When it was made, seconds since 1970.
    """

    version: int
    min_reader: int
    compat: int
    incompat: int
    uuid: bytes
    created_s: float

    @classmethod
    def new(cls, *, is_encrypted: bool = False) -> "StoreFormat":
        """Describe a new store in today's format."""
        return cls(
            version=FORMAT_VERSION,
            min_reader=FORMAT_VERSION,
            compat=0,
            incompat=ENCRYPTED if is_encrypted else 0,
            uuid=secrets.token_bytes(16),
            created_s=time.time(),
        )

    @property
    def is_encrypted(self) -> bool:
        """Whether reading the store needs its key."""
        return bool(self.incompat & ENCRYPTED)

    def pack(self) -> bytes:
        """Return the record's bytes."""
        return _LAYOUT.pack(
            _MAGIC, self.version, self.min_reader, self.compat, self.incompat, self.uuid, self.created_s
        )

    @classmethod
    def unpack(cls, data: bytes, place: str) -> "StoreFormat":
        """Read the record at `place` (for messages) and refuse what this code cannot read.

        Raises:
            InvalidInputError: The record is not agentmem's.
            CorruptionError: It is too short.
            FormatVersionError: It needs newer code, or older.
        """
        if data[:8] != _MAGIC:
            raise InvalidInputError(f"{place} is no agentmem store: its format record starts with {data[:8]!r}")
        if len(data) < _LAYOUT.size:
            raise CorruptionError(f"format record of {place} has {len(data)} bytes; it must have {_LAYOUT.size}")
        _, version, min_reader, compat, incompat, uuid, created_s = _LAYOUT.unpack_from(data)
        if min_reader > FORMAT_VERSION or incompat & ~KNOWN_INCOMPAT:
            raise FormatVersionError(
                f"{place} has format {version} (readable from {min_reader}, features {incompat:#x}); "
                f"this agentmem reads up to {FORMAT_VERSION}: install a newer one"
            )
        if version < OLDEST_READABLE:
            raise FormatVersionError(
                f"{place} has format {version}; this agentmem reads {OLDEST_READABLE} to {FORMAT_VERSION}: use the "
                f"agentmem that made it"
            )
        return cls(
            version=version, min_reader=min_reader, compat=compat, incompat=incompat, uuid=uuid, created_s=created_s
        )
