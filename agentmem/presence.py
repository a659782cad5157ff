"""Something that is there for the time of a `with` block, and gone afterwards, whatever happened.

Knows nothing of what it is.
"""

import contextlib
from collections.abc import Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")


class Lock(Protocol):
    """A lock of `threading`."""

    def acquire(self, blocking: bool = ..., timeout: float = ...) -> bool:
        """Take it."""
        ...

    def release(self) -> None:
        """Let it go."""
        ...


@contextlib.contextmanager
def present(where: dict[object, T], value: T) -> Iterator[None]:
    """Have `value` in a dict while the block runs.

    Under a key of its own, and taken out without a call: no interrupt comes between, and it does not matter in which
    order blocks are left, as those are that an interrupt cut off just before they began.
    """
    key = object()
    try:
        where[key] = value
        yield
    finally:
        where.pop(key, None)


@contextlib.contextmanager
def taken_if_free(lock: Lock) -> Iterator[bool]:
    """Hold a lock while the block runs, unless another thread does; say which."""
    taken: list[bool] = []
    try:
        taken.extend(map(lock.acquire, (False,)))  # one step: no interrupt comes between taking and noting
        yield True in taken
    finally:
        if True in taken:
            lock.release()
