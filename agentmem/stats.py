"""What happened: the report of one operation, and the counters of a store.

Knows nothing of how the numbers arise.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field

from agentmem.choosing import Choice
from agentmem.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDifference:
    """Where a list of messages first differs from what its branch held, and what became of that.

    Attributes:
        change: How, in a word of `reasons.CHAT_CHANGES`.
        token: Index of the first token that was not kept.
        message: Index of the message that differs, in the list that was sent. One past its end when it is shorter.
        old: What the branch held around that place, at most 80 characters.
        new: What the template made of the list there, at most 80 characters.
        kept_as: The branch that goes on as this one did before.
    """

    change: Reason
    token: int
    message: int
    old: str
    new: str
    kept_as: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to mend in what a client sends.

    Attributes:
        lint: In a word of `reasons.LINTS`.
        message: Index of the message.
        text: The text that changes, as it was sent now.
        old_text: The text that stood there before.
        advice: What to do about it.
    """

    lint: Reason
    message: int
    text: str
    old_text: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseReport:
    """What one operation reused, computed and moved.

    Attributes:
        operation: The verb, such as "switch" or "generate".
        num_tokens: Tokens of the branch after the operation.
        num_reused: Tokens whose KV was not computed by this operation: the leading ones, or the last ones after a race.
        num_computed: Tokens the model was fed by this operation.
        num_pending: Tokens still to be fed, by the next operation that needs logits.
        from_tier: Tokens of `num_reused` by where their KV was found: "device", "host", "disk".
        moved_nbytes: Bytes of KV copied onto the device.
        first_difference: Index of the first token whose stored KV could not be used, or that was sent otherwise than
            the branch held it; None when there is none.
        num_equivalent: Tokens of `num_reused` whose KV was computed elsewhere from the same tokens (equal within the
            tolerance of the dtype), because the branch's own bytes were gone.
        num_approximate: Tokens of the branch whose KV an edit moved from elsewhere, so that it still knows of what was
            cut out, or a tier gave that keeps it lossily (`Config.pool_codec`).
        reason: Why reuse ended where it did: COMPLETE, or a word of `reasons.LOSSES`.
        choice: Whether KV that was far away was loaded, computed again or both, and after which estimates; None when
            all of it was near.
        elapsed_s: Wall time of the operation, in seconds.
        difference: Where the messages that were sent differ from what the branch held; None when all of it was kept.
        lint: What to mend in the messages, so that more is reused.
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
    num_approximate: int = 0
    reason: Reason = Reason.COMPLETE
    choice: Choice | None = None
    elapsed_s: float = 0.0
    difference: ChatDifference | None = None
    lint: tuple[Finding, ...] = ()


class Counters:
    """Numbers that only grow, kept per open store. Thread-safe."""

    def __init__(self) -> None:
        """Start from zero."""
        self._lock = threading.Lock()
        self._values: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1, *, reason: Reason | None = None) -> None:
        """Add `amount` to the counter `name`; with a reason, to `name_reason`."""
        with self._lock:
            self._values[name if reason is None else f"{name}_{reason.value}"] += amount

    def snapshot(self) -> dict[str, int]:
        """Return all counters, sorted by name. Takes no lock: whoever watches must not hold up who counts."""
        return dict(sorted(dict(self._values).items()))  # a dict of text is copied in one step
