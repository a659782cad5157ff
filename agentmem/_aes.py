"""AES-256-GCM: the only file that imports `cryptography`, which comes with the extra `crypto`."""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM


class Aes256Gcm:
    """Seals and opens under one key. Thread-safe."""

    __slots__ = ("_aead",)

    def __init__(self, key: bytes) -> None:
        """Use a key of 32 bytes."""
        self._aead = AESGCM(key)

    def seal(self, nonce: bytes, data: bytes | memoryview, bound: bytes) -> bytes:
        """Return ciphertext and tag of `data`, bound to `bound`; `nonce` must be new under this key."""
        return self._aead.encrypt(nonce, data, bound)

    def open(self, nonce: bytes, data: bytes | memoryview, bound: bytes) -> bytes | None:
        """Return what was sealed; None when anything is not as it was then."""
        try:
            return self._aead.decrypt(nonce, data, bound)
        except InvalidTag:
            return None
