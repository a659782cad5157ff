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


class ChatChange(StrEnum):
    """How a list of messages differs from what its branch holds."""

    SYSTEM_CHANGED = "system-changed"
    """The system message, or what the template puts in its place, has another text, or came, or went."""
    TOOLS_CHANGED = "tools-changed"
    """The messages are the same up to there; the tools are not."""
    TEMPLATE_CHANGED = "template-changed"
    """The messages are the same up to there; the tokenizer's chat template is not."""
    MESSAGE_CHANGED = "message-changed"
    """A message has another text."""
    MESSAGE_INSERTED = "message-inserted"
    """There are messages before one that the branch holds."""
    MESSAGE_REMOVED = "message-removed"
    """Messages that the branch holds are gone from between others."""
    SHORTENED = "shortened"
    """The list ends before the branch does."""
    THINKING_STRIPPED = "thinking-stripped"
    """An answer lacks its thinking, and is the same otherwise."""
    JSON_REORDERED = "json-reordered"
    """The same JSON values are spelled another way: keys in another order, other spaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDifference:
    """Where a list of messages first differs from what its branch held, and what became of that.

    Attributes:
        change: In a word.
        token: Index of the first token that was not kept.
        message: Index of the message that differs, in the list that was sent. One past its end when it is shorter.
        old: What the branch held around that place, at most 80 characters.
        new: What the template made of the list there, at most 80 characters.
        kept_as: The branch that goes on as this one did before.
    """

    change: ChatChange
    token: int
    message: int
    old: str
    new: str
    kept_as: str


class Lint(StrEnum):
    """What makes a client lose the KV of its own chat."""

    SYSTEM_CHANGED = "system-changed"
    """The system message has another text than before: everything behind it is computed again."""
    WANDERING = "wandering"
    """Two lists in a row differed at the same place: a clock, a counter, a nonce."""
    TEMPLATE_CHANGED = "template-changed"
    """The tokenizer's chat template is another than the one that wrote the branch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to mend in what a client sends.

    Attributes:
        lint: In a word.
        message: Index of the message.
        text: The text that changes, as it was sent now.
        old_text: The text that stood there before.
        advice: What to do about it.
    """

    lint: Lint
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
        num_reused: Leading tokens whose KV was not computed by this operation.
        num_computed: Tokens the model was fed by this operation.
        num_pending: Tokens still to be fed, by the next operation that needs logits.
        from_tier: Tokens of `num_reused` by where their KV was found: "device", "host", "disk".
        moved_nbytes: Bytes of KV copied onto the device.
        first_difference: Index of the first token whose stored KV could not be used, or that was sent otherwise than
            the branch held it; None when there is none.
        num_equivalent: Tokens of `num_reused` whose KV was computed elsewhere from the same tokens (equal within the
            tolerance of the dtype), because the branch's own bytes were gone.
        num_approximate: Tokens of the branch whose KV an edit moved from elsewhere: it still knows of what was cut out.
        reason: Why reuse ended where it did.
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
    elapsed_s: float = 0.0
    difference: ChatDifference | None = None
    lint: tuple[Finding, ...] = ()


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
