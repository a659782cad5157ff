"""What a command gives back, and the codes that the process ends with.

Knows nothing of any command.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from agentmem import errors
from agentmem.reasons import Reason


class ExitCode(IntEnum):
    """What the process ends with."""

    OK = 0
    DAMAGE = 1
    """Damage was found: by `check`, or by reading what the command needed."""
    INPUT = 2
    """The command or what it was given is wrong: nothing was done."""
    LOCKED = 3
    """Another process writes to the session, or for `compact` and the like has the store open."""
    NOT_FOUND = 4
    """There is no such store, session, branch, checkpoint or file."""
    FULL = 5
    """The file system or a budget has no room."""
    READ_ONLY = 6
    """The store or file may not be written, or the device failed."""
    FORMAT = 7
    """The store or file needs a newer agentmem."""
    UNREACHABLE = 8
    """The server of a lake does not answer."""
    INTERNAL = 70
    """A fault of agentmem itself; its trace is on stderr."""
    INTERRUPTED = 130
    """Ctrl-C."""


_CODES: list[tuple[type[Exception], ExitCode]] = [
    (errors.CorruptionError, ExitCode.DAMAGE),
    (errors.StoreLockedError, ExitCode.LOCKED),
    (errors.SessionLeasedError, ExitCode.LOCKED),
    (errors.SessionLeasedError, ExitCode.LOCKED),
    (errors.NotFoundError, ExitCode.NOT_FOUND),
    (errors.StorageFullError, ExitCode.FULL),
    (errors.CapacityError, ExitCode.FULL),
    (errors.FormatVersionError, ExitCode.FORMAT),
    (errors.ReadOnlyError, ExitCode.READ_ONLY),
    (errors.TierUnavailableError, ExitCode.UNREACHABLE),
    (errors.AgentMemError, ExitCode.INPUT),
    (OSError, ExitCode.READ_ONLY),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a command found or did.

    Attributes:
        document: For programs; its keys are described in docs/cli.md and stay.
        text: Makes what people read, without the last line's end.
        exit_code: What the process ends with.
        notices: What people should look at, one line each; they go to stderr.
    """

    document: Mapping[str, object]
    text: Callable[[], str]
    exit_code: ExitCode = ExitCode.OK
    notices: list[str] = field(default_factory=list)


def exit_code(error: Exception) -> ExitCode:
    """Return the code for an error that ended a command."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.INTERNAL)


def error_kind(error: BaseException) -> Reason:
    """Return an error's kind for programs: NotFoundError is "not-found"."""
    if isinstance(error, errors.AgentMemError):
        return error.reason
    if isinstance(error, KeyboardInterrupt):
        return Reason.INTERRUPTED
    return Reason.SYSTEM_ERROR if isinstance(error, OSError) else Reason.INTERNAL
