"""Encryption at rest: the user's key, the store's key under it, and boxes that only the store's key opens.

    user's key (32 bytes, never stored)
      wraps  data key (32 random bytes; in the store, wrapped)
               gives  box key   one for every opening of the store: HKDF of the data key and 16 random bytes
                      name key  hides names: equal names look equal, and tell nothing else

A box, 40 bytes longer than what is in it:
    0 16  random bytes of the opening that sealed it
   16  8  number of the box in that opening, big-endian: with the box key never used twice
   24  n  AES-256-GCM ciphertext
  n+24 16  tag, over the ciphertext and over what the box is bound to

Numbers come from a counter in memory. An id from the store would be given out again after a transaction that was rolled
back, while the bytes that were sealed with it may be on the disk already: a nonce used twice, which breaks GCM.

The record of the wrapped data key, 61 bytes:
    0  1  version, 1
    1 12  random nonce
   13 48  AES-256-GCM of the data key under HKDF of the user's key, bound to the store's uuid

Knows nothing of rows, blocks or LMDB.
"""

import hashlib
import hmac
import importlib
import itertools
import secrets
import struct
from typing import Protocol, cast

from agentmem.errors import CorruptionError, EncryptionError, InvalidInputError

KEY_NBYTES = 32
BOX_NBYTES = 40
"""Bytes that a box takes beside what is in it."""

_VERSION = 1
_SALT_NBYTES = 16
_TAG_NBYTES = 16
_NONCE_NBYTES = 12
_HEAD = struct.Struct(">16sQ")
_WRAP_TAG = b"agentmem/wrap/1"
_BOX_TAG = b"agentmem/box/1"
_NAME_TAG = b"agentmem/names/1"

# 128 MiB and 0.4 s a try on one core of 2024. Source: RFC 7914; OWASP's password storage cheat sheet (N = 2^17).
_SCRYPT = {"n": 1 << 17, "r": 8, "p": 1, "maxmem": 1 << 28, "dklen": KEY_NBYTES}
_MIN_SALT_NBYTES = 8


class _Aead(Protocol):
    def seal(self, nonce: bytes, data: bytes | memoryview, bound: bytes) -> bytes: ...

    def open(self, nonce: bytes, data: bytes | memoryview, bound: bytes) -> bytes | None: ...


def key_from_passphrase(passphrase: str, salt: bytes) -> bytes:
    """Return the key that a passphrase stands for. Takes about half a second and 128 MiB, as it does for who guesses.

    Args:
        passphrase: What a person remembers.
        salt: At least 8 bytes that are your own, such as the store's name; no secret, but the same every time.

    Returns:
        32 bytes for `Config.encryption_key`.

    Raises:
        InvalidInputError: The passphrase is empty or the salt too short.
    """
    if not passphrase or len(salt) < _MIN_SALT_NBYTES:
        raise InvalidInputError(
            f"a key needs a passphrase, and a salt of at least {_MIN_SALT_NBYTES} bytes; found {len(salt)}"
        )
    return hashlib.scrypt(passphrase.encode(), salt=salt, **_SCRYPT)


def wrap(key: bytes, data_key: bytes, uuid: bytes) -> bytes:
    """Return the record of `data_key` that only `key` opens.

    Args:
        key: The user's key.
        data_key: The store's key.
        uuid: The store's.

    Raises:
        InvalidInputError: The package `cryptography` is not installed.
    """
    nonce = secrets.token_bytes(_NONCE_NBYTES)
    return bytes([_VERSION]) + nonce + _aead(_derive(key, b"", _WRAP_TAG)).seal(nonce, data_key, uuid)


def unwrap(key: bytes, record: bytes, uuid: bytes, place: str) -> bytes:
    """Return the data key in a record, about the store at `place` (for messages).

    Raises:
        EncryptionError: `key` is not the one that the record was wrapped with.
        CorruptionError: The record has another length or version.
        InvalidInputError: The package `cryptography` is not installed.
    """
    if len(record) != 1 + _NONCE_NBYTES + KEY_NBYTES + _TAG_NBYTES or record[0] != _VERSION:
        raise CorruptionError(f"the key record of {place} is damaged: restore the store from a backup")
    nonce, wrapped = record[1 : 1 + _NONCE_NBYTES], record[1 + _NONCE_NBYTES :]
    data_key = _aead(_derive(key, b"", _WRAP_TAG)).open(nonce, wrapped, uuid)
    if data_key is None:
        raise EncryptionError(f"the encryption key does not open {place}: it was made, or rekeyed, with another key")
    return data_key


def new_data_key() -> bytes:
    """Make a key for a new store."""
    return secrets.token_bytes(KEY_NBYTES)


class Boxes:
    """Seals and opens the boxes of one store, and hides names, from one opening of it. Thread-safe."""

    def __init__(self, data_key: bytes) -> None:
        """Use the store's key; what is sealed here gets a key of its own."""
        self._data_key = data_key
        self._name_key = _derive(data_key, b"", _NAME_TAG)
        self._salt = secrets.token_bytes(_SALT_NBYTES)
        self._numbers = itertools.count()
        self._aeads = {self._salt: self._new_aead(self._salt)}
        self._own = self._aeads[self._salt]

    def seal(self, data: bytes | memoryview, bound: bytes) -> bytes:
        """Return `data` in a box that opens only together with `bound`."""
        head = _HEAD.pack(self._salt, next(self._numbers))
        return head + self._own.seal(_nonce(head), data, bound)

    def open(self, box: bytes | memoryview, bound: bytes) -> bytes | None:
        """Return what is in a box; None when it is none of this store's for `bound`, or not as it was sealed."""
        if len(box) < BOX_NBYTES:
            return None
        head = bytes(box[: _HEAD.size])
        salt = head[:_SALT_NBYTES]
        aead = self._aeads.get(salt) or self._new_aead(salt)
        data = aead.open(_nonce(head), box[_HEAD.size :], bound)
        if data is not None:
            self._aeads[salt] = aead  # only now, so that garbage fills no memory
        return data

    def hide(self, name: bytes) -> bytes:
        """Return 32 bytes that stand for `name` in this store, and tell nothing of it to who lacks the key."""
        return hashlib.blake2b(name, key=self._name_key, digest_size=32).digest()

    def _new_aead(self, salt: bytes) -> _Aead:
        return _aead(_derive(self._data_key, salt, _BOX_TAG))


def check_key(key: bytes) -> None:
    """Refuse a key of another length.

    Raises:
        InvalidInputError: It has not 32 bytes.
    """
    if len(key) != KEY_NBYTES:
        raise InvalidInputError(
            f"an encryption key has {KEY_NBYTES} random bytes, this one has {len(key)}: make one with "
            "secrets.token_bytes(32), or from a passphrase with agentmem.key_from_passphrase"
        )


def _nonce(head: bytes) -> bytes:
    """Return the 12 bytes of a box's nonce: its number, which no other box of the same key has."""
    return bytes(4) + head[_SALT_NBYTES:]


def _derive(key: bytes, salt: bytes, tag: bytes) -> bytes:
    """Return HKDF-SHA256 of a key, 32 bytes (RFC 5869; one block of output)."""
    extracted = hmac.digest(salt or bytes(32), key, "sha256")
    return hmac.digest(extracted, tag + b"\x01", "sha256")


def _aead(key: bytes) -> _Aead:
    try:
        module = importlib.import_module("agentmem._aes")
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            "an encrypted store needs the package `cryptography`: pip install 'agentmem-kv[crypto]'"
        ) from error
    return cast("_Aead", module.Aes256Gcm(key))
