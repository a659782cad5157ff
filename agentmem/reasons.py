"""Every reason that agentmem gives, in one list: the words of reports, log lines, counters, errors and commands.

Knows nothing of how a reason is found out. docs/reasons.md shows this list as a table; a test holds the two together.
"""

from enum import StrEnum


class Reason(StrEnum):
    """Why something is as it is, in a word. Groups of them, by what they are said of, follow below."""

    # -- why KV is reused as far as it is, and no further

    COMPLETE = "complete"
    """Everything that had been computed was reused."""
    FOREIGN_MODEL = "foreign-model"
    """The KV was computed by another model, adapter or dtype, or kept in blocks of another size or salt."""
    DAMAGED = "damaged"
    """A stored block or layer state failed its checksum; the KV from there on is computed from the tokens."""
    MISSING = "missing"
    """A block or layer state is in no tier; the KV from there on is computed from the tokens."""
    NOT_SAVED = "not-saved"
    """The KV had not reached the disk when its process ended; the tokens had."""
    NO_STATE = "no-state"
    """The layer state at this point is not kept; the tokens after the nearest earlier one are computed again."""
    FASTER = "faster"
    """Computing the KV again took less time than loading it would have."""
    REGIME = "regime"
    """The model rotates all its keys in another way at this length, so that none of the KV fits."""
    PENDING = "pending"
    """The model was not fed the last tokens yet."""
    FOREIGN_BLOCK_SIZE = "foreign-block-size"
    """The KV was stored with another `Config.block_size`."""
    FOREIGN_SALT = "foreign-salt"
    """The KV was stored with another `Config.salt`."""
    WITHIN_MEDIA = "within-media"
    """The difference lies inside of an image, audio or other media, which is fed as a whole."""
    APPROXIMATE = "approximate"
    """The KV was moved there by an edit, or came from a lossy tier, and never passes for exact."""
    WHOLE_BLOCKS = "whole-blocks"
    """Sessions share whole blocks only."""

    # -- how a prompt differs from what is stored

    IDENTICAL = "identical"
    """It is what is stored."""
    EXTENDS = "extends"
    """It is what is stored, and more."""
    SHORTER = "shorter"
    """It is the beginning of what is stored."""
    INSERTED = "inserted"
    """It has tokens that are not stored, and goes on as what is stored."""
    REMOVED = "removed"
    """It lacks stored tokens, and goes on as what is stored."""
    REPLACED = "replaced"
    """It has other tokens in the place of stored ones."""
    REORDERED = "reordered"
    """It has the same tokens, or the same JSON value, in another order."""
    RETOKENISED = "retokenised"
    """It has other tokens of the same text."""
    NOTHING_IN_COMMON = "nothing-in-common"
    """Not even the first token is the same, and the two do not meet."""

    # -- how a list of messages differs from what its branch holds

    SYSTEM_CHANGED = "system-changed"
    """The system message, or what the template puts in its place, has another text, or came, or went."""
    TOOLS_CHANGED = "tools-changed"
    """The messages are the same up to there; the tools are not."""
    TEMPLATE_CHANGED = "template-changed"
    """The tokenizer's chat template is another than the one that wrote the branch."""
    MESSAGE_CHANGED = "message-changed"
    """A message has another text."""
    MESSAGE_INSERTED = "message-inserted"
    """There are messages before one that the branch holds."""
    MESSAGE_REMOVED = "message-removed"
    """Messages that the branch holds are gone from between others."""
    THINKING_STRIPPED = "thinking-stripped"
    """An answer lacks its thinking, and is the same otherwise."""
    JSON_REORDERED = "json-reordered"
    """The same JSON values are spelled another way: keys in another order, other spaces."""
    WANDERING = "wandering"
    """Two lists in a row differed at the same place: a clock, a counter, a nonce."""

    # -- why a batch is not fed in a faster way

    HAS_ENCODER = "has-encoder"
    """The model has an encoder, whose output differs between branches."""
    HAS_INDEXER = "has-indexer"
    """The model chooses by an indexer what each token attends to."""
    STATES_ONLY = "states-only"
    """The model has layer states and no KV that branches could share."""
    NOT_PROVEN = "not-proven"
    """A few tokens that were fed together gave other logits than each branch alone, or an error."""

    # -- why a search ended

    RUNNING = "running"
    """It has not ended: its process was stopped, or one of the user's functions raised."""
    FINISHED = "finished"
    """The policy has nothing more to expand: it has its answers, or all there is was tried."""
    STEP_BUDGET = "step-budget"
    """The budget of steps is used up."""
    TOKEN_BUDGET = "token-budget"  # noqa: S105 - not that kind of token
    """The budget of tokens does not allow for another child."""
    BYTE_BUDGET = "byte-budget"
    """The budget of bytes does not allow for another child, whatever is let go of."""

    # -- why a verb was refused, or gave up: every error has one

    NOT_FOUND = "not-found"
    """What was asked for does not exist."""
    ALREADY_EXISTS = "already-exists"
    """The name is taken."""
    INVALID_INPUT = "invalid-input"
    """The input cannot be stored or fed."""
    SPEC_MISMATCH = "spec-mismatch"
    """KV of another geometry, dtype or model was offered where it cannot be used."""
    UNSUPPORTED_MODEL = "unsupported-model"
    """The model has something that agentmem does not store."""
    CAPACITY = "capacity"
    """A byte budget cannot hold what was asked, even after all was evicted that may be."""
    STORAGE_FULL = "storage-full"
    """The file system or the store's own quota has no room left."""
    CORRUPTION = "corruption"
    """Stored bytes fail their checksum or their structure."""
    FORMAT_VERSION = "format-version"
    """The store or file needs another version of agentmem."""
    STORE_LOCKED = "store-locked"
    """Another handle or process holds the store."""
    SESSION_LEASED = "session-leased"
    """Another handle or process writes to the session."""
    READ_ONLY = "read-only"
    """The store may not be written, or cannot be any more."""
    CLOSED = "closed"
    """The handle was closed, or belongs to another process."""
    STALE_CACHE = "stale-cache"
    """The branch moved on after its cache object was given out."""
    ENCRYPTION = "encryption"
    """The key of an encrypted store is missing or another one, or the store is not encrypted."""
    TIER_UNAVAILABLE = "tier-unavailable"
    """The server of a pool or lake does not answer, or too slowly; what it holds is computed again, or asked later."""
    SYSTEM_ERROR = "system-error"
    """The operating system refused."""
    INTERNAL = "internal"
    """A fault of agentmem itself."""
    INTERRUPTED = "interrupted"
    """The user stopped it: what was finished is kept."""


LOSSES = frozenset(
    {
        Reason.FOREIGN_MODEL,
        Reason.DAMAGED,
        Reason.MISSING,
        Reason.NOT_SAVED,
        Reason.NO_STATE,
        Reason.REGIME,
        Reason.FASTER,
        Reason.TIER_UNAVAILABLE,
    }
)
"""Why KV that once existed is computed again: what `ReuseReport.reason` and the `..._lost_...` counters say."""

LIMITS = LOSSES | {
    Reason.COMPLETE,
    Reason.PENDING,
    Reason.FOREIGN_BLOCK_SIZE,
    Reason.FOREIGN_SALT,
    Reason.WITHIN_MEDIA,
    Reason.APPROXIMATE,
    Reason.WHOLE_BLOCKS,
}
"""Why not all tokens that are the same as stored ones are reused: `Explanation.limit`."""

CHANGES = frozenset(
    {
        Reason.IDENTICAL,
        Reason.EXTENDS,
        Reason.SHORTER,
        Reason.INSERTED,
        Reason.REMOVED,
        Reason.REPLACED,
        Reason.REORDERED,
        Reason.RETOKENISED,
        Reason.NOTHING_IN_COMMON,
    }
)
"""How a prompt differs from the stored tokens that it matches furthest: `Explanation.change`."""

CHAT_CHANGES = frozenset(
    {
        Reason.SYSTEM_CHANGED,
        Reason.TOOLS_CHANGED,
        Reason.TEMPLATE_CHANGED,
        Reason.MESSAGE_CHANGED,
        Reason.MESSAGE_INSERTED,
        Reason.MESSAGE_REMOVED,
        Reason.SHORTER,
        Reason.THINKING_STRIPPED,
        Reason.JSON_REORDERED,
    }
)
"""How a list of messages differs from what its branch holds: `ChatDifference.change`."""

LINTS = frozenset({Reason.SYSTEM_CHANGED, Reason.WANDERING, Reason.TEMPLATE_CHANGED})
"""What makes a client lose the KV of its own chat: `Finding.lint`."""

BATCHING = frozenset({Reason.HAS_ENCODER, Reason.HAS_INDEXER, Reason.STATES_ONLY, Reason.NOT_PROVEN})
"""Why a batch is not fed in a faster way: `BatchReport.reason`."""

STOPS = frozenset({Reason.RUNNING, Reason.FINISHED, Reason.STEP_BUDGET, Reason.TOKEN_BUDGET, Reason.BYTE_BUDGET})
"""Why a search ended: `SearchResult.stopped`."""

REFUSALS = frozenset(
    {
        Reason.NOT_FOUND,
        Reason.ALREADY_EXISTS,
        Reason.INVALID_INPUT,
        Reason.SPEC_MISMATCH,
        Reason.UNSUPPORTED_MODEL,
        Reason.CAPACITY,
        Reason.STORAGE_FULL,
        Reason.CORRUPTION,
        Reason.FORMAT_VERSION,
        Reason.STORE_LOCKED,
        Reason.SESSION_LEASED,
        Reason.READ_ONLY,
        Reason.CLOSED,
        Reason.STALE_CACHE,
        Reason.ENCRYPTION,
        Reason.TIER_UNAVAILABLE,
        Reason.SYSTEM_ERROR,
        Reason.INTERNAL,
        Reason.INTERRUPTED,
    }
)
"""Why a verb was refused or gave up: `AgentMemError.reason`, and the kind of an error in the command line's JSON."""
