"""Interrupts a piece of work at a chosen place, as Ctrl-C does: for tests of what is left behind.

Python lets a signal in when a function begins, when a call has returned and when a loop goes round, and nowhere else.
Those are the places here: in agentmem's own files, and in those of the standard library that its guards are made of.
Only the calling thread is interrupted, as the main thread is by Ctrl-C.
"""

import concurrent.futures
import contextlib
import dis
import functools
import itertools
import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

_FOLDERS = (
    str(Path(__file__).parent.parent),
    contextlib.__file__,
    threading.__file__,
    str(Path(concurrent.futures.__file__).parent),
)
"""Whose files have places to interrupt. The frameworks' own are theirs to mend."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place at which a signal may be let in.

    Attributes:
        code: The function.
        offset: The instruction that is run next.
    """

    code: CodeType
    offset: int

    @property
    def line(self) -> str:
        """File, line and function, for people."""
        numbers = [number for start, stop, number in self.code.co_lines() if start <= self.offset < stop]
        return f"{Path(self.code.co_filename).name}:{numbers[0] if numbers else 0} in {self.code.co_qualname}"


def places_of(work: Callable[[], object]) -> list[Place]:
    """Do `work`; return the places that it passed, in order."""
    passed: list[Place] = []
    with _Tracing(lambda place: passed.append(place)):
        work()
    return passed


def interrupt(work: Callable[[], object], at: int, error: BaseException) -> Place | None:
    """Do `work`, and raise `error` when it has passed `at` places; return the place, or None when it was done before.

    The error is not seen outside, and nothing of its traceback is kept: as in a program that handles it.

    Raises:
        BaseException: What else came of the work.
    """
    struck: list[Place] = []
    num_left = at

    def visit(place: Place) -> None:
        nonlocal num_left
        if num_left == 0 and not struck:
            struck.append(place)
            raise error
        num_left -= 1

    try:
        with _Tracing(visit):
            work()
    except BaseException as caught:
        if error not in (caught, caught.__context__):  # threading's own waits may raise another while they clean up
            raise
        caught.__traceback__ = caught.__context__ = error.__traceback__ = error.__context__ = None
    return struck[0] if struck else None


def chosen(places: Sequence[Place], most: int | None, seed: int = 0) -> list[int]:
    """Choose where to interrupt: each place when it is passed first and last, or `most` of these at random."""
    first = {place: index for index, place in reversed(list(enumerate(places)))}
    last = {place: index for index, place in enumerate(places)}
    indices = sorted({*first.values(), *last.values()})
    if most is None or len(indices) <= most:
        return indices
    return sorted(random.Random(seed).sample(indices, most))


class _Tracing:
    """Calls `visit` at every place of this thread, inside of a `with` block."""

    def __init__(self, visit: Callable[[Place], None]) -> None:
        self._visit = visit

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._called)

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, _event: str, _argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(_FOLDERS) or frame.f_code.co_filename == __file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "opcode" and frame.f_lasti in _open_offsets(frame.f_code):
            self._visit(Place(frame.f_code, frame.f_lasti))
        return self._stepped


@functools.cache
def _open_offsets(code: CodeType) -> frozenset[int]:
    """Return the offsets of the instructions before which Python lets signals in."""
    found: set[int] = set()
    steps = list(dis.get_instructions(code))
    for step, following in itertools.pairwise(steps):
        if "BACKWARD" in step.opname and "NO_INTERRUPT" not in step.opname:
            found.add(int(step.argval))
        elif step.opname == "RESUME" or (step.opname.startswith("CALL") and "INTRINSIC" not in step.opname):
            found.add(following.offset)
    return frozenset(found)
