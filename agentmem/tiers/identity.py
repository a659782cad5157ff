"""Who computed the KV, and for whom: what every name in the store is derived from.

The one mutable place of it: switching an adapter changes the model, and with it every name from then on.
"""

from agentmem.ids import BlockHash, Fingerprint
from agentmem.kv.hashing import media_hash, root_hash


class Identity:
    """The model's fingerprint and the tenant's salt.

    Attributes:
        fingerprint: Names everything about the model that makes KV differ.
        salt: Keeps two tenants from sharing blocks.
    """

    def __init__(self, fingerprint: Fingerprint, salt: bytes) -> None:
        self.fingerprint = fingerprint
        self.salt = salt
        self._roots: dict[tuple[Fingerprint, bytes], BlockHash] = {}

    def root_of(self, regime: bytes) -> BlockHash:
        """Return the token name of the empty prefix, the parent of every first block.

        Args:
            regime: The rotary regime that the KV is in; b"" for models that have one only.
        """
        key = (self.fingerprint, regime)
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = root_hash(self.fingerprint, self.salt, regime)
        return root

    def media_name(self, digest: bytes) -> BlockHash:
        """Return the name of the record of model inputs whose content `digest` names, for this tenant."""
        return media_hash(self.salt, digest)
