"""One space of a lake: the objects of all stores with one key, and what opens them.

Knows nothing of what the objects are.
"""

import threading

from agentmem.errors import EncryptionError, NotFoundError
from agentmem.lake.objects import Objects
from agentmem.lake.seal import Seal, key_object, new_format, open_format, rewrapped


class Space:
    """The objects of one space. Thread-safe.

    Attributes:
        objects: All objects of the lake.
    """

    def __init__(self, objects: Objects, key: bytes | None) -> None:
        """Look for nothing yet; `key` is that of encrypted stores."""
        self.objects = objects
        self._key = key
        self._key_object = key_object(key)
        self._seal: Seal | None = None
        self._lock = threading.Lock()

    def find_seal(self) -> Seal | None:
        """Return what opens the space's objects; None when nobody has put anything into it.

        Raises:
            TierUnavailableError: The lake cannot be reached.
            CorruptionError, FormatVersionError, EncryptionError: The space cannot be opened.
        """
        with self._lock:
            if self._seal is None:
                data = self.objects.get(self._key_object)
                if data is not None:
                    self._seal = open_format(data, self._key, f"lake {self.objects.url}")
            return self._seal

    def make_seal(self) -> Seal:
        """Return what opens the space's objects, making the space when there is none; of several that do, one wins."""
        seal = self.find_seal()
        if seal is None:
            self.objects.put_new(self._key_object, new_format(self._key))
            seal = self.find_seal()
        if seal is None:
            raise NotFoundError(f"lake {self.objects.url} lost {self._key_object}, which was just written")
        return seal

    def path(self, seal: Seal, name: str) -> str:
        """Return the name in the lake of the space's object `name`."""
        return f"{seal.uuid.hex()}/{name}"


def rekey(objects: Objects, key: bytes, new_key: bytes) -> None:
    """Let `new_key` open the space that `key` opens, and `key` no more. Nothing is encrypted anew.

    Raises:
        EncryptionError: The lake has no space of `key`, or has one of `new_key` already.
        TierUnavailableError: The lake cannot be reached.
    """
    old, new = key_object(key), key_object(new_key)
    data = objects.get(old)
    if data is None:
        raise EncryptionError(f"lake {objects.url} holds nothing that this key opens")
    if not objects.put_new(new, rewrapped(data, key, new_key, f"lake {objects.url}")):
        raise EncryptionError(f"lake {objects.url} holds something of the new key's already: choose another")
    objects.delete(old)
