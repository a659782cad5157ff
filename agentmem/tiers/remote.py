"""What a tier on another machine can do: it keeps records, as the disk stores them, and may fail at any time.

Knows no server. The conformance suite in `agentmem.testing.record_tier_suite` spells the contract out in tests.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from agentmem.ids import BlockDigest, BlockHash
from agentmem.kv.record import Record


class RecordTier(Protocol):
    """A place that keeps records by their digest. Thread-safe; every call takes bounded time.

    Every method but `close` raises `TierUnavailableError` when the server does not answer, answers too slowly, or
    failed so often that it is left alone for a while.
    """

    @property
    def name(self) -> str:
        """The glossary's word for the tier, as reports print it."""
        ...

    @property
    def is_durable(self) -> bool:
        """Whether a copy here may be the last one."""
        ...

    def contains_many(self, digests: Sequence[BlockDigest]) -> list[bool]:
        """Say of each block whether it is here."""
        ...

    def fetch_many(self, digests: Sequence[BlockDigest]) -> list[bytes | None]:
        """Return each block's record, None for one that is not here. Nobody has verified the bytes yet."""
        ...

    def put_many(self, records: Sequence[Record]) -> list[bool]:
        """Store records; say of each whether it is here now: False when there is no room for it."""
        ...

    def find_many(self, names: Sequence[BlockHash]) -> list[BlockDigest | None]:
        """Return for each token name a block of those tokens that is here, computed by whomever, or None."""
        ...

    def remove_many(self, digests: Sequence[BlockDigest]) -> None:
        """Drop this tier's copies; nothing happens for those that are not here."""
        ...

    def close(self) -> None:
        """Let go of the server; again is harmless."""
        ...


@runtime_checkable
class LayeredTier(RecordTier, Protocol):
    """A tier that also gives blocks layer by layer: the first layers of many blocks at once, then the next ones."""

    def fetch_heads(self, digests: Sequence[BlockDigest]) -> list[bytes | None]:
        """Return the first bytes of each block's record, up to its payload; None for one that is not here."""
        ...

    def fetch_parts(self, digests: Sequence[BlockDigest], part: int) -> list[bytes | None]:
        """Return one part (tiers/parts.py) of each block, None for one that is not here. Nobody has verified it yet."""
        ...
