"""Where the metrics of the processes that have a store open are served: small files in the store's directory.

`metrics/N.json` is written by the handle whose byte in `holders.lock` is N, and is worth nothing once nobody holds that
byte: who died needs not clean up.
"""

import contextlib
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from agentmem._directory import HOLDERS_LOCK, METRICS_FOLDER
from agentmem._lock import Holders

logger = logging.getLogger(__name__)

_MAX_NBYTES = 4096
_SUFFIX = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process serves the metrics of a store.

    Attributes:
        url: The address.
        pid: The process, for people: one of another container has a number of its own.
    """

    url: str
    pid: int


def publish(store: Path, number: int, place: Place) -> None:
    """Write down where the handle with byte `number` serves; where that cannot be done, the address alone is known."""
    path = store / METRICS_FOLDER / f"{number}{_SUFFIX}"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _remove_dead(store)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor, for its mode
            json.dump(asdict(place), file)
    except OSError as error:
        logger.warning("`agentmem top` will not find %s by the store's directory: %s", place.url, error)


def withdraw(store: Path, number: int) -> None:
    """Remove what `publish` wrote; nothing happens when it is gone."""
    with contextlib.suppress(OSError):  # left behind, it is ignored
        (store / METRICS_FOLDER / f"{number}{_SUFFIX}").unlink(missing_ok=True)


def living(store: Path) -> list[Place]:
    """Return where the processes serve that have the store open now, in the order of their numbers."""
    files, alive = _files(store), _alive(store, list(_files(store)))
    places = [_read(path) for number, path in files.items() if number in alive]
    return sorted((place for place in places if place is not None), key=lambda place: place.pid)


def _remove_dead(store: Path) -> None:
    files = _files(store)
    alive = _alive(store, list(files))
    for number, path in files.items():
        if number not in alive:
            path.unlink(missing_ok=True)


def _files(store: Path) -> dict[int, Path]:
    found = sorted((store / METRICS_FOLDER).glob(f"*{_SUFFIX}"))
    return {int(path.stem): path for path in found if path.stem.isdecimal()}


def _alive(store: Path, numbers: list[int]) -> set[int]:
    holders = Holders.look(store / HOLDERS_LOCK)
    try:
        return {number for number in numbers if 0 < number < 1 << 63 and holders.is_alive(number)}
    finally:
        holders.release()


def _read(path: Path) -> Place | None:
    """Read a file that may be half-written, damaged, or gone by now."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MAX_NBYTES))
        return Place(url=str(found["url"]), pid=int(found["pid"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
