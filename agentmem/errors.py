"""Every error that agentmem raises on purpose.

Each message says what was asked, what was found and what to do. Each class is also the built-in error it is a kind of,
so that callers may catch either. This file knows nothing of the rest of the package.
"""


class AgentMemError(Exception):
    """Base of every error that agentmem raises on purpose."""


class NotFoundError(AgentMemError, LookupError):
    """A session, branch, checkpoint, block or store that was asked for does not exist."""


class AlreadyExistsError(AgentMemError, ValueError):
    """A name that was to be created is taken."""


class InvalidInputError(AgentMemError, ValueError):
    """The input cannot be stored or fed: batch > 1, padding, shifted positions, a bad name, a bad option."""


class SpecMismatchError(AgentMemError, ValueError):
    """KV of another geometry, dtype or model was offered where it cannot be used."""


class UnsupportedModelError(AgentMemError, ValueError):
    """The model has a layer, cache or position scheme that agentmem does not store yet."""


class CapacityError(AgentMemError, MemoryError):
    """A byte budget cannot hold what was asked, even after evicting all that may be evicted."""


class StorageFullError(AgentMemError, OSError):
    """The file system or the store's own quota has no room left; nothing stored was lost."""


class CorruptionError(AgentMemError, OSError):
    """Stored bytes fail their checksum or their structure; the message names the record."""


class FormatVersionError(AgentMemError, OSError):
    """The store or file was written in a format that this version does not read."""


class StoreLockedError(AgentMemError, OSError):
    """Another handle or process holds the store for writing; the message names the holder."""


class ReadOnlyError(AgentMemError, OSError):
    """A write was asked of a store that is open for reading only, or that went read-only after a failed write."""


class ClosedError(AgentMemError, RuntimeError):
    """A handle was used after it was closed, after its session was closed, or in a forked child process."""


class StaleCacheError(AgentMemError, RuntimeError):
    """A cache object was handed to the model after its branch moved on."""
