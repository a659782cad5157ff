"""Objects of one lake: whole, in ranges, put if absent, listed. The one home of obstore.

Knows nothing of what is in them. A failure is a `TierUnavailableError`, a full disk a `StorageFullError`; the circuit
breaker is here.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError
from obstore.store import LocalStore, MemoryStore, ObjectStore, from_url

from agentmem import _directory
from agentmem.errors import InvalidInputError, StorageFullError, TierUnavailableError
from agentmem.tiers.breaker import Breaker

_NO_SUCH_RANGE = "416"
"""Servers' word for a range behind the end of an object, which obstore has no error for."""


_NO_ROOM = "No space left on device"
"""The operating system's words, which obstore passes on in its own error."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a listing says of one object.

    Attributes:
        key: Its name.
        nbytes: Its size.
        changed_s: When it was put, Unix time by the server's clock.
    """

    key: str
    nbytes: int
    changed_s: float


class Objects:
    """The objects below one URL. Thread-safe.

    Attributes:
        url: Where they are.
        is_durable: They outlive this process.
        breaker: Leaves a server alone that fails.
    """

    def __init__(self, store: ObjectStore, url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Use a store of obstore's; see `open`."""
        self.url = url
        self.is_durable = not isinstance(store, MemoryStore)
        self.breaker = Breaker(f"the lake {url}", clock=clock)
        self._store = store

    @classmethod
    def open(cls, url: str, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> "Objects":
        """Open the place at a URL: s3://, gs://, az://, file:///; credentials come from the service's environment.

        Nothing is asked of the server yet.

        Args:
            url: The bucket or directory, and what its objects' names begin with; or a path that begins with "/" or ".".
            timeout_s: Longest time for one request; for so long failed ones are also tried again.
            clock: Seconds, for the circuit breaker.

        Raises:
            InvalidInputError: The URL names no place that obstore knows.
        """
        try:
            if url.startswith(("/", ".")):
                url = Path(url).absolute().as_uri()
            if url.startswith("file:"):
                return cls(from_url(url, mkdir=True), url, clock=clock)
            return cls(_remote(url, timeout_s), url, clock=clock)
        except (BaseError, ValueError, OSError) as error:
            raise InvalidInputError(f"{url!r} is no place for a lake: {_first_line(error)}") from error

    def get(self, key: str) -> bytes | None:
        """Return an object; None when there is none."""
        with self._named("get", key):
            try:
                return bytes(obstore.get(self._store, key).bytes())
            except FileNotFoundError:
                return None

    def get_ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[bytes] | None:
        """Return the bytes `[start, stop)` of each span, fewer where the object ends; None when there is none."""
        with self._named("get", key):
            try:
                starts, stops = [start for start, _ in spans], [stop for _, stop in spans]
                return [bytes(data) for data in obstore.get_ranges(self._store, key, starts=starts, ends=stops)]
            except FileNotFoundError:
                return None
            except (GenericError, ValueError) as error:
                if isinstance(error, GenericError) and _NO_SUCH_RANGE not in str(error) and self._is_remote:
                    raise
                return [b"" for _ in spans]  # it is shorter than it was

    def put_new(self, key: str, data: bytes) -> bool:
        """Store an object under a name that nobody has used; False when there is one already, which stays."""
        with self._named("put", key):
            try:
                obstore.put(self._store, key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            self._sync(key)
            return True

    def put(self, key: str, data: bytes) -> None:
        """Store an object, in the place of another one if there is one."""
        with self._named("put", key):
            obstore.put(self._store, key, data, use_multipart=False)
            self._sync(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield all objects whose names begin with `prefix` and a slash."""
        with self._named("list", prefix):
            pages = obstore.list(self._store, prefix)
            for page in pages:
                for each in page:
                    changed: datetime = each["last_modified"]
                    yield ObjectInfo(each["path"], each["size"], changed.timestamp())

    def has(self, key: str) -> bool:
        """Say whether there is such an object."""
        with self._named("look for", key):
            try:
                obstore.head(self._store, key)
            except FileNotFoundError:
                return False
            return True

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens when there is none."""
        with self._named("delete", key):
            try:
                obstore.delete(self._store, key)
            except FileNotFoundError:
                return

    @property
    def _is_remote(self) -> bool:
        return not isinstance(self._store, LocalStore | MemoryStore)

    def _sync(self, key: str) -> None:
        """Have a file on disk for good, which obstore leaves to the operating system."""
        if isinstance(self._store, LocalStore) and self._store.prefix is not None:
            path = Path(self._store.prefix) / key
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            for folder in list(path.parents)[: key.count("/") + 1]:
                _directory.sync(folder)

    @contextmanager
    def _named(self, verb: str, key: str) -> Iterator[None]:
        with self.breaker.guard():
            try:
                yield
            except (BaseError, OSError) as error:
                if _NO_ROOM in str(error):
                    raise StorageFullError(f"lake {self.url}: no room to {verb} {key}") from error
                raise TierUnavailableError(f"lake {self.url}: cannot {verb} {key}: {_first_line(error)}") from error


def _remote(url: str, timeout_s: float) -> ObjectStore:
    # obstore's types are of each service's own settings; these are common to all.
    client = {
        "timeout": timedelta(seconds=timeout_s),
        "connect_timeout": timedelta(seconds=min(5.0, timeout_s)),
        # Used only where the environment names an endpoint that begins with http://.
        "allow_http": True,
    }
    backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2}
    retry = {"max_retries": 3, "retry_timeout": timedelta(seconds=timeout_s), "backoff": backoff}
    return from_url(url, client_options=client, retry_config=retry)  # type: ignore[no-any-return, call-overload]


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:300] or type(error).__name__
