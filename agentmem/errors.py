"""Every error that agentmem raises on purpose.

Each message says what was asked, what was found and what to do. Each class is also the built-in error it is a kind of,
so that callers may catch either. This file knows nothing of the rest of the package but the words for reasons.
"""

from typing import ClassVar

from agentmem.reasons import Reason


class AgentMemError(Exception):
    """Base of every error that agentmem raises on purpose.

    Attributes:
        reason: The kind of error, in a word of `reasons.REFUSALS`.
    """

    reason: ClassVar[Reason] = Reason.INTERNAL


class NotFoundError(AgentMemError, LookupError):
    """A session, branch, checkpoint, block or store that was asked for does not exist."""

    reason = Reason.NOT_FOUND


class AlreadyExistsError(AgentMemError, ValueError):
    """A name that was to be created is taken."""

    reason = Reason.ALREADY_EXISTS


class InvalidInputError(AgentMemError, ValueError):
    """The input cannot be stored or fed: batch > 1, padding, shifted positions, a bad name, a bad option."""

    reason = Reason.INVALID_INPUT


class SpecMismatchError(AgentMemError, ValueError):
    """KV of another geometry, dtype or model was offered where it cannot be used."""

    reason = Reason.SPEC_MISMATCH


class UnsupportedModelError(AgentMemError, ValueError):
    """The model has a layer, cache or position scheme that agentmem does not store yet."""

    reason = Reason.UNSUPPORTED_MODEL


class CapacityError(AgentMemError, MemoryError):
    """A byte budget cannot hold what was asked, even after evicting all that may be evicted."""

    reason = Reason.CAPACITY


class StorageFullError(AgentMemError, OSError):
    """The file system or the store's own quota has no room left; nothing stored was lost."""

    reason = Reason.STORAGE_FULL


class CorruptionError(AgentMemError, OSError):
    """Stored bytes fail their checksum or their structure; the message names the record."""

    reason = Reason.CORRUPTION


class FormatVersionError(AgentMemError, OSError):
    """The store or file was written in a format that this version does not read."""

    reason = Reason.FORMAT_VERSION


class StoreLockedError(AgentMemError, OSError):
    """Somebody has the store open while it is to be replaced, or the other way round; the message names them."""

    reason = Reason.STORE_LOCKED


class ReadOnlyError(AgentMemError, OSError):
    """A write was asked of a store that is open for reading only, or that went read-only after a failed write."""

    reason = Reason.READ_ONLY


class ClosedError(AgentMemError, RuntimeError):
    """A handle was used after it was closed, after its session was closed, or in a forked child process."""

    reason = Reason.CLOSED


class StaleCacheError(AgentMemError, RuntimeError):
    """A cache object was handed to the model after its branch moved on."""

    reason = Reason.STALE_CACHE


class EncryptionError(AgentMemError, ValueError):
    """The store is encrypted and the key is missing or another one, or a key was given for a store that is not."""

    reason = Reason.ENCRYPTION


class SessionLeasedError(AgentMemError, OSError):
    """Another handle or process writes to the session; the message names it, and says since when."""

    reason = Reason.SESSION_LEASED


class TierUnavailableError(AgentMemError, OSError):
    """The server of a lower tier does not answer, or too slowly, or failed so often that it is left alone for now."""

    reason = Reason.TIER_UNAVAILABLE
