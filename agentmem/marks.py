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
from agentmem.levels import LOSSY_CODECS, lossy_digest

_PLACE = struct.Struct("<qq")


class MarkKind(StrEnum):
    """Why KV depends on more than tokens."""

    MEDIA = "media"
    """The tokens are placeholders of an image, audio or other input that the model was given."""
    ENCODER = "encoder"
    """The inputs of an encoder-decoder model's encoder; stands at position 0 and covers no token."""
    SPLICE = "splice"
    """The KV is approximate: an edit moved it here from elsewhere, or it came back from a lossy tier."""


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
        origin: Of a splice that an edit made: the checkpoint whose KV was moved here, and the position there of the
            first token.
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
    """Return how many of the first `stop` tokens have KV that is approximate."""
    count = reached = 0
    for mark in sorted((mark for mark in marks if mark.kind is MarkKind.SPLICE), key=lambda mark: mark.start):
        last = min(mark.stop, stop)
        count += max(last - max(mark.start, reached), 0)
        reached = max(reached, last)
    return count


def lossy_mark(start: int, stop: int, codec: str) -> Mark:
    """Return what says that the KV of the tokens [start, stop) came back from a tier that keeps it lossily."""
    return Mark(kind=MarkKind.SPLICE, start=start, stop=stop, digest=lossy_digest(codec))


def with_lossy(marks: Marks, new: Iterable[Mark]) -> Marks:
    """Return marks and lossy ones by `start`; of neighbours with one codec one mark is made."""
    joined: list[Mark] = []
    for mark in new:
        last = joined[-1] if joined else None
        if last is not None and (last.stop, last.digest) == (mark.start, mark.digest):
            joined[-1] = dataclasses.replace(last, stop=mark.stop)
        else:
            joined.append(mark)
    return by_start((*marks, *(mark for mark in joined if mark not in marks)))


def by_start(marks: Iterable[Mark]) -> Marks:
    """Return marks by `start`, in their order where that is equal."""
    return tuple(sorted(marks, key=lambda mark: mark.start))


def lossy_marks(marks: Marks, stop: int) -> Marks:
    """Return the marks of KV before `stop` that came back from a lossy tier."""
    known = {lossy_digest(codec) for codec in LOSSY_CODECS}
    return tuple(mark for mark in marks if mark.start < stop and mark.digest in known)


def own_marks(marks: Marks, start: int, stop: int, inherited: Iterable[Mark]) -> Marks:
    """Return the own marks of a checkpoint of the tokens [start, stop): what came back lossily before it, too.

    Args:
        marks: Those of its branch.
        start: Where its own tokens begin.
        stop: Where they end.
        inherited: The marks that its ancestors name; looked at only when they matter.
    """
    lossy = lossy_marks(marks, start)
    known = set(inherited) if lossy else set()
    before = tuple(mark for mark in lossy if mark.stop <= start and mark not in known)
    return by_start((*before, *marks_between(marks, start, stop)))


def marks_between(marks: Iterable[Mark], start: int, stop: int) -> Marks:
    """Return the marks that end in (start, stop], and for `start` 0 those at the root: the own marks of a record."""
    return tuple(mark for mark in marks if start < mark.stop <= stop or (mark.stop == start == 0))
