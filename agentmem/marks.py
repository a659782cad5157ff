"""Marks: what a branch's KV depends on beside its token ids, and where.

A mark is part of the identity of every block that it touches and, through the chain, of every block after it. Knows
nothing of tensors.
"""

import dataclasses
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from agentmem.ids import BlockDigest, CheckpointId

_PLACE = struct.Struct("<qq")


class MarkKind(StrEnum):
    """Why KV depends on more than tokens."""

    MEDIA = "media"
    """The tokens are placeholders of an image, audio or other input that the model was given."""
    ENCODER = "encoder"
    """The inputs of an encoder-decoder model's encoder; stands at position 0 and covers no token."""
    SPLICE = "splice"
    """The KV was computed elsewhere and moved here: approximate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkInput:
    """One model input behind a mark.

    Attributes:
        name: The keyword under which the model takes it.
        dtype: torch's name of its dtype; "json" for a value that is no tensor.
        shape: Its shape; empty for a value that is no tensor.
        value: The value as JSON when it is no tensor, else "".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What the KV of some tokens depends on beside them.

    Attributes:
        kind: Why.
        start: Position of the first token that it covers.
        stop: Position after the last; `start` when it covers none.
        digest: Names the content: 32 bytes.
        payload: The stored record of the inputs' bytes; None when there are none.
        inputs: The inputs, in the order of the record's sections.
        origin: Of a splice: the checkpoint whose KV was moved here, and the position there of the first token.
    """

    kind: MarkKind
    start: int
    stop: int
    digest: bytes
    payload: BlockDigest | None = None
    inputs: tuple[MarkInput, ...] = ()
    origin: tuple[CheckpointId, int] | None = None

    def touches(self, start: int, stop: int) -> bool:
        """Say whether the mark is part of the identity of the tokens [start, stop)."""
        return self.start < stop and (start < self.stop or start <= self.start == self.stop)

    def pack(self, start: int, stop: int) -> bytes:
        """Return what the mark adds to the identity of the tokens [start, stop)."""
        place = _PLACE.pack(self.start - start, min(self.stop, stop) - start)
        return self.kind.value.encode() + b"\0" + place + self.digest


Marks = tuple[Mark, ...]
"""The marks of a branch, by `start`. A splice may have moved media with it: only those overlap."""


def pack_marks(marks: Marks, start: int, stop: int) -> list[bytes]:
    """Return what the marks add to the identity of the tokens [start, stop)."""
    return [mark.pack(start, stop) for mark in marks if mark.touches(start, stop)]


def media_start(marks: Marks, position: int) -> int:
    """Return `position`, or where the media span starts that it would cut."""
    for mark in marks:
        if mark.kind is MarkKind.MEDIA and mark.start < position < mark.stop:
            return mark.start
    return position


def truncate_marks(marks: Marks, num_tokens: int) -> Marks:
    """Return the marks of the first `num_tokens` tokens; a splice is clipped, an encoder's mark always stays."""
    return tuple(
        mark if mark.stop <= num_tokens else dataclasses.replace(mark, stop=num_tokens)
        for mark in marks
        if mark.start < num_tokens or mark.kind is MarkKind.ENCODER
    )


def without_splices(marks: Marks, start: int) -> Marks:
    """Return the marks without what was moved to `start` or later, clipping a splice that reaches over it."""
    return tuple(
        dataclasses.replace(mark, stop=start) if mark.kind is MarkKind.SPLICE and mark.stop > start else mark
        for mark in marks
        if mark.kind is not MarkKind.SPLICE or mark.start < start
    )


def num_spliced(marks: Marks, stop: int) -> int:
    """Return how many of the first `stop` tokens have KV that was moved from elsewhere."""
    return sum(max(min(mark.stop, stop) - mark.start, 0) for mark in marks if mark.kind is MarkKind.SPLICE)


def marks_between(marks: Iterable[Mark], start: int, stop: int) -> Marks:
    """Return the marks that end in (start, stop], and for `start` 0 those at the root: the own marks of a record."""
    return tuple(mark for mark in marks if start < mark.stop <= stop or (mark.stop == start == 0))
