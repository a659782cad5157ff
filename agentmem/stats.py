"""What happened and why: reason codes, the report of one operation, and the counters of a store.

Knows nothing of how the numbers arise.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Reason(StrEnum):
    """Why an operation reused what it did, and no more."""

    COMPLETE = "complete"
    """Everything that had been computed was reused."""
    FOREIGN_MODEL = "foreign-model"
    """The KV was computed by another model, adapter, dtype or block size."""
    DAMAGED = "damaged"
    """A stored block failed its checksum; the KV from there on is computed from the tokens."""
    MISSING = "missing"
    """A block is in no tier; the KV from there on is computed from the tokens."""
    NOT_SAVED = "not-saved"
    """The KV had not reached the disk when its process ended; the tokens had."""
    NO_STATE = "no-state"
    """The layer state at this point is not kept; the tokens after the nearest earlier one are computed again."""
    REGIME = "regime"
    """The branch crossed the length from which the model rotates all its keys in another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseReport:
    """What one operation reused, computed and moved.

    Attributes:
        operation: The verb, such as "switch" or "generate".
        num_tokens: Tokens of the branch after the operation.
        num_reused: Leading tokens whose KV was not computed by this operation.
        num_computed: Tokens the model was fed by this operation.
        num_pending: Tokens still to be fed, by the next operation that needs logits.
        from_tier: Tokens of `num_reused` by where their KV was found: "device", "host", "disk".
        moved_nbytes: Bytes of KV copied onto the device.
        first_difference: Index of the first token whose stored KV could not be used; None when all could.
        num_equivalent: Tokens of `num_reused` whose KV was computed elsewhere from the same tokens (equal within the
            tolerance of the dtype), because the branch's own bytes were gone.
        reason: Why reuse ended where it did.
        elapsed_s: Wall time of the operation, in seconds.
    """

    operation: str
    num_tokens: int
    num_reused: int = 0
    num_computed: int = 0
    num_pending: int = 0
    from_tier: dict[str, int] = field(default_factory=dict)
    moved_nbytes: int = 0
    first_difference: int | None = None
    num_equivalent: int = 0
    reason: Reason = Reason.COMPLETE
    elapsed_s: float = 0.0


class Counters:
    """Numbers that only grow, kept per open store. Thread-safe."""

    def __init__(self) -> None:
        """Start from zero."""
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Add `amount` to the counter `name`."""
        with self._lock:
            self._values[name] += amount

    def snapshot(self) -> dict[str, int]:
        """Return all counters, sorted by name."""
        with self._lock:
            return dict(sorted(self._values.items()))
