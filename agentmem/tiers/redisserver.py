"""A server that speaks the Redis protocol: many commands in one round trip, and every wait with an end.

The only file that knows redis-py. It speaks version 2 of the protocol, which every such server understands, and knows
nothing of what is stored. A call ends at a deadline that grows with the bytes it moves, whatever the server does:
redis-py's own timeout is for one read from the socket, which a server that sends byte by byte never exceeds.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from agentmem.errors import ClosedError, InvalidInputError, TierUnavailableError

try:
    from redis.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection, parse_url
    from redis.exceptions import AuthenticationError, OutOfMemoryError, RedisError, ResponseError
    from redis.exceptions import ConnectionError as LostConnectionError
except ModuleNotFoundError as error:
    raise InvalidInputError("a pool needs the package `redis`: pip install 'agentmem-kv[pool]'") from error

PASSWORD_VARIABLE = "REDISCLI_AUTH"  # noqa: S105 - the name of the variable that redis-cli reads, too
"""Environment variable of the password, for a URL that has none."""

_READ_NBYTES = 1 << 18
_SEND_NBYTES = 1 << 18
_REPLY_NBYTES = 4096
"""What an answer may take beside the bytes that are asked for: an error's text, a number, a length."""


class Refusal(StrEnum):
    """What a server may say to one command of many, and go on."""

    FULL = "full"
    """It has no memory left, and evicts nothing."""
    OTHER_TYPE = "other-type"
    """The key holds something that is no string."""


Command = tuple[bytes | str | int, ...]
Reply = bytes | int | Refusal | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a server may take.

    Attributes:
        connect_s: To accept a connection.
        idle_s: Between two pieces of an answer, and for an answer without any payload as a whole.
        min_nbytes_per_s: Slowest pace that is waited for: a call that moves n bytes may take n / this longer.
    """

    connect_s: float = 1.0
    idle_s: float = 2.0
    min_nbytes_per_s: float = 512 * 1024


class RedisServer:
    """A server, and connections to it that are kept between calls. Thread-safe; connects when it is first used."""

    def __init__(self, url: str, *, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the URL: `redis://`, `rediss://` (TLS) or `unix://`; the clock gives seconds.

        Raises:
            InvalidInputError: The URL is none of those, or has an option that is not known.
        """
        self.where = without_password(url)
        self._patience = patience
        self._clock = clock
        self._connection_class, self._arguments = _read_url(url, self.where, patience)
        self._lock = threading.Lock()
        self._idle: list[_Timed] = []
        self._is_closed = False
        self._connect()

    def run(self, commands: Sequence[Command], *, nbytes: int) -> list[Reply]:
        """Send commands, all before the first answer is read, and return the answers.

        Args:
            commands: To be sent together; all of them may be run twice, when an old connection turns out to be dead.
            nbytes: Bytes of payload that they move, in both directions; an answer with more is not taken.

        Raises:
            TierUnavailableError: There is no server, it is too slow, wants another password, or answers nonsense.
            ClosedError: `close` was called.
        """
        connection = self._take()
        is_used = connection is not None
        try:
            return self._run(connection or self._connect(), commands, nbytes)
        except LostConnectionError as error:
            if not is_used or isinstance(error, AuthenticationError):
                raise self._unavailable(error) from error
            self._drop_idle()  # the server was restarted, or hung up meanwhile: so it is with the others
        except (RedisError, OSError, ValueError, RecursionError) as error:
            raise self._unavailable(error) from error
        try:
            return self._run(self._connect(), commands, nbytes)
        except (RedisError, OSError, ValueError, RecursionError) as error:
            raise self._unavailable(error) from error

    def close(self) -> None:
        """Hang up; calls that run now end first. Again is harmless."""
        self._is_closed = True
        self._drop_idle()

    def _run(self, connection: "_Timed", commands: Sequence[Command], nbytes: int) -> list[Reply]:
        patience = self._patience
        connection.limits = _Limits(
            until_s=self._clock() + patience.idle_s + nbytes / patience.min_nbytes_per_s,
            idle_s=patience.idle_s,
            left_nbytes=nbytes + _REPLY_NBYTES * (len(commands) + 1),
            clock=self._clock,
        )
        try:
            connection.connect()
            connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            replies = [_reply(connection) for _ in commands]
        except BaseException:
            connection.disconnect()  # answers that are still to come would be taken for those of the next commands
            raise
        self._give_back(connection)
        return replies

    def _take(self) -> "_Timed | None":
        if self._is_closed:
            raise ClosedError(f"the handle on {self.where} was closed")
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: "_Timed") -> None:
        with self._lock:
            self._idle.append(connection)
        if self._is_closed:
            self._drop_idle()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def _connect(self) -> "_Timed":
        """Make a connection that connects when it is used.

        Raises:
            InvalidInputError: The URL has an option that redis-py does not know, or a value that it does not take.
        """
        try:
            return self._connection_class(**self._arguments)
        except (TypeError, ValueError, RedisError) as error:
            raise InvalidInputError(f"the URL {self.where!r} cannot be used: {error}") from error

    def _unavailable(self, error: Exception) -> TierUnavailableError:
        said = f"{type(error).__name__}: {error}"[:200]
        if isinstance(error, AuthenticationError):
            said = f"it refuses the user or password of the URL or of {PASSWORD_VARIABLE} ({said})"
        return TierUnavailableError(f"pool {self.where}: {said}")


@dataclass(slots=True, kw_only=True)
class _Limits:
    """What the call that a connection is used for may still take."""

    until_s: float
    idle_s: float
    left_nbytes: int
    clock: Callable[[], float]

    def wait_s(self) -> float:
        """Return how long the next wait may be."""
        left_s = self.until_s - self.clock()
        if left_s <= 0:
            raise TimeoutError("too slow")
        return min(left_s, self.idle_s)

    def receive(self, nbytes: int) -> None:
        """Count bytes that came."""
        self.left_nbytes -= nbytes
        if self.left_nbytes < 0:
            raise OSError("the answer is longer than what was asked for")


class _TimedSocket:
    """A socket that waits no longer than its connection's limits allow, whatever timeout redis-py sets."""

    def __init__(self, connected: Any, connection: "_Timed") -> None:
        self._socket = connected
        self._connection = connection

    def recv(self, nbytes: int) -> bytes:
        self._socket.settimeout(self._connection.limits.wait_s())
        data: bytes = self._socket.recv(nbytes)
        self._connection.limits.receive(len(data))
        return data

    def recv_into(self, buffer: Any, *arguments: int) -> int:  # what the parser of hiredis uses
        self._socket.settimeout(self._connection.limits.wait_s())
        nbytes: int = self._socket.recv_into(buffer, *arguments)
        self._connection.limits.receive(nbytes)
        return nbytes

    def sendall(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            self._socket.settimeout(self._connection.limits.wait_s())
            left = left[self._socket.send(left[:_SEND_NBYTES]) :]

    def settimeout(self, timeout_s: float | None) -> None:
        """Leave it to the limits."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class _Timed(AbstractConnection):
    """A connection of redis-py whose socket keeps to the limits of the call that it is used for."""

    limits: _Limits

    def _connect(self) -> _TimedSocket:
        return _TimedSocket(super()._connect(), self)  # type: ignore[safe-super] # which is the other base's


class _TcpConnection(_Timed, Connection):
    pass


class _TlsConnection(_Timed, SSLConnection):
    pass


class _UnixConnection(_Timed, UnixDomainSocketConnection):
    pass


_CLASSES: dict[str, Callable[..., _Timed]] = {
    "redis": _TcpConnection,
    "rediss": _TlsConnection,
    "unix": _UnixConnection,
}


def _reply(connection: _Timed) -> Reply:
    """Read one answer; an error that concerns this command alone is an answer, too."""
    try:
        reply = connection.read_response(disable_decoding=True)
    except OutOfMemoryError:
        return Refusal.FULL
    except ResponseError as error:
        if str(error).startswith("WRONGTYPE"):
            return Refusal.OTHER_TYPE
        raise
    if reply is None or isinstance(reply, bytes | int):
        return reply
    raise ValueError(f"an answer of another kind than was asked for: {type(reply).__name__}")


def _read_url(url: str, where: str, patience: Patience) -> tuple[Callable[..., _Timed], dict[str, Any]]:
    """Return which connection a URL asks for, and with what arguments; the password may come from the environment."""
    scheme = where.partition("://")[0]
    if scheme not in _CLASSES:
        raise InvalidInputError(f"a pool is at redis://, rediss:// or unix://; found {where!r}")
    try:
        arguments = parse_url(url)
    except ValueError as error:
        raise InvalidInputError(f"the URL {where!r} cannot be read: {error}") from error
    arguments.pop("connection_class", None)
    password = arguments.get("password") or os.environ.get(PASSWORD_VARIABLE)
    if password:
        arguments["password"] = password
    arguments |= {
        "protocol": 2,
        "socket_connect_timeout": patience.connect_s,
        "socket_timeout": patience.idle_s,  # of a TLS handshake; a socket in use has limits of its own
        "socket_read_size": _READ_NBYTES,
        "retry_on_timeout": False,
        "health_check_interval": 0,
    }
    return _CLASSES[scheme], arguments


def without_password(url: str) -> str:
    """Return a URL as it may be printed: without user, password and options."""
    scheme, _, rest = url.partition("://")
    secret, _, shown = rest.rpartition("@")
    return f"{scheme}://{'...' if '?' in secret else shown.partition('?')[0]}"
