"""What a lake says of itself, and how its objects are closed to who has not the key.

A lake holds spaces: one for all stores that are not encrypted, and one for each key of encrypted stores. Stores with
the same key share a space; who has not the key can tell neither what is in it nor whose it is.

The object `keys/<who may open the space>`, little-endian:
     0  8  magic "AMLAKEFM"
     8  2  version of the writer
    10  2  min_reader: lowest version that can read the space
    12  4  incompat: feature bits that a reader must know
    16 16  uuid: random, names the space: the names of its objects begin with it, in hex
    32  n  the space's own key under the user's key, as _crypto.py describes it (61 bytes); nothing where none is needed
  32+n  8  xxh3-64 of everything before it
"""

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

import xxhash

from agentmem._crypto import Boxes, check_key, new_data_key, unwrap, wrap
from agentmem.errors import CorruptionError, FormatVersionError

VERSION = 1
"""Version of everything in a lake: the format object, segments, index objects."""

HEAD = struct.Struct("<8sHHI")
"""What every object of a lake begins with: magic, version, min_reader, incompat."""

_MAGIC = b"AMLAKEFM"
_UUID_NBYTES = 16
_SUM_NBYTES = 8
_KNOWN_INCOMPAT = 0
_OWNER_TAG = b"agentmem/lake/owner/1"
_NO_OWNER = "plain"
_NAME_TAG = b"agentmem/lake/name/1"


@dataclass(frozen=True, slots=True)
class Seal:
    """Closes and opens the objects of one space.

    Attributes:
        uuid: Names the space.
        boxes: What closes; None in a space that is not encrypted.
    """

    uuid: bytes
    boxes: Boxes | None

    def close(self, data: bytes, bound: bytes) -> bytes:
        """Return what is stored of `data`: it opens only together with `bound`."""
        return data if self.boxes is None else self.boxes.seal(data, bound)

    def open(self, stored: bytes, bound: bytes) -> bytes:
        """Return what was closed together with `bound`.

        Raises:
            CorruptionError: It was something else, or was changed since.
        """
        data = stored if self.boxes is None else self.boxes.open(stored, bound)
        if data is None:
            raise CorruptionError("it is not as it was encrypted")
        return data

    def hide(self, name: bytes) -> str:
        """Return 64 hex digits that stand for `name`; without the key they tell nothing of it."""
        if self.boxes is not None:
            return self.boxes.hide(name).hex()
        return hashlib.blake2b(name, key=_NAME_TAG, digest_size=32).hexdigest()


def key_object(key: bytes | None) -> str:
    """Return the name of the object that opens the space of stores with the user's `key`, None for those without.

    Raises:
        InvalidInputError: The key has not 32 bytes.
    """
    if key is None:
        return f"keys/{_NO_OWNER}"
    check_key(key)
    return f"keys/{hmac.digest(key, _OWNER_TAG, 'sha256')[:16].hex()}"


def new_format(key: bytes | None) -> bytes:
    """Return the format object of a new space.

    Raises:
        InvalidInputError: The package `cryptography` is not installed, or the key has not 32 bytes.
    """
    uuid = secrets.token_bytes(_UUID_NBYTES)
    return _format(uuid, b"" if key is None else wrap(key, new_data_key(), uuid))


def rewrapped(data: bytes, key: bytes, new_key: bytes, place: str) -> bytes:
    """Return a format object that `new_key` opens in the place of `key`.

    Raises:
        EncryptionError, CorruptionError, FormatVersionError: As `open_format`.
    """
    uuid, wrapped = _parts(data, place)
    return _format(uuid, wrap(new_key, unwrap(key, wrapped, uuid, place), uuid))


def open_format(data: bytes, key: bytes | None, place: str) -> Seal:
    """Return what opens the space whose format object is `data`, at `place` (for messages).

    Raises:
        CorruptionError: It is damaged.
        FormatVersionError: It needs a newer agentmem.
        EncryptionError: `key` does not open it.
        InvalidInputError: The package `cryptography` is not installed.
    """
    uuid, wrapped = _parts(data, place)
    return Seal(uuid, None if key is None else Boxes(unwrap(key, wrapped, uuid, place)))


def check_head(data: bytes, magic: bytes, what: str) -> None:
    """Check what an object begins with.

    Raises:
        CorruptionError: It is something else.
        FormatVersionError: It needs a newer agentmem.
    """
    if len(data) < HEAD.size or data[:8] != magic:
        raise CorruptionError(f"{what} is damaged: it begins with {data[:8]!r}")
    _, version, min_reader, incompat = HEAD.unpack_from(data)
    if min_reader > VERSION or incompat & ~_KNOWN_INCOMPAT:
        raise FormatVersionError(
            f"{what} has format {version} (for {min_reader} or newer, features {incompat:#x}); this agentmem reads up "
            f"to {VERSION}: install a newer one"
        )


def checksum(data: bytes) -> bytes:
    """Return the xxh3-64 of `data`, 8 bytes."""
    return xxhash.xxh3_64(data).intdigest().to_bytes(_SUM_NBYTES, "little")


def _format(uuid: bytes, wrapped: bytes) -> bytes:
    data = HEAD.pack(_MAGIC, VERSION, VERSION, 0) + uuid + wrapped
    return data + checksum(data)


def _parts(data: bytes, place: str) -> tuple[bytes, bytes]:
    if len(data) < HEAD.size + _UUID_NBYTES + _SUM_NBYTES or data[-_SUM_NBYTES:] != checksum(data[:-_SUM_NBYTES]):
        raise CorruptionError(f"the format object of {place} is damaged: restore it from a copy of the lake")
    check_head(data, _MAGIC, f"the format object of {place}")
    stop = HEAD.size + _UUID_NBYTES
    return data[HEAD.size : stop], data[stop:-_SUM_NBYTES]
