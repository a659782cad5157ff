"""How two token sequences differ: where first, what was put in the place of what, and where they meet again.

Knows nothing of sessions, KV or storage. Sequences are u32-le bytes, four a token.
"""

import bisect
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from agentmem.kv.hashing import unpack_tokens
from agentmem.reasons import Reason

Decode = Callable[[list[int]], str]
"""Gives the text of some tokens."""

Data = TypeVar("Data", bytes, memoryview)

_NBYTES = 4
"""Bytes of a token."""

_RUN = 8
"""Equal tokens that count as meeting again: longer than what chat templates put between two messages (5 to 6)."""

_SHORT_RUN, _SHORT_REST = 3, 64
"""In the last tokens of a sequence so few equal tokens will do; a false meeting costs little there."""

_MAX_COMPARED = 1 << 17
"""Tokens after the difference that are compared; half a second for as many that differ throughout."""

_MAX_TEXT_TOKENS = 1024
"""Tokens on either side of the difference whose text is compared."""

_MAX_BRACKETS = 64
"""Brackets before the difference at which JSON may begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How a prompt differs from stored tokens.

    Attributes:
        change: In a word.
        position: Leading tokens that are the same.
        num_removed: Stored tokens after them that the prompt lacks, up to where the two meet again or to the end.
        num_inserted: Tokens that the prompt has in their place.
        num_equal_after: Tokens of the prompt behind that place that are stored too, in the same order.
        num_differences: Places where the two differ.
    """

    change: Reason
    position: int
    num_removed: int = 0
    num_inserted: int = 0
    num_equal_after: int = 0
    num_differences: int = 0

    @property
    def is_met_again(self) -> bool:
        """Whether the two go on alike behind the difference."""
        return self.num_equal_after > 0


@dataclass(frozen=True, slots=True)
class _Gap:
    """One place where the two differ, [start, stop) of each, and the equal tokens behind it."""

    old_start: int
    old_stop: int
    new_start: int
    new_stop: int
    num_equal: int


def common_prefix(one: Data, other: Data) -> int:
    """Count the leading tokens that are the same."""
    limit = min(len(one), len(other)) // _NBYTES
    same, step, is_growing = 0, 64, True
    while same < limit:
        piece = min(step, limit - same)
        start, stop = same * _NBYTES, (same + piece) * _NBYTES
        if one[start:stop] == other[start:stop]:
            same += piece
            step *= 2 if is_growing else 1
        elif piece == 1:
            break
        else:
            step, is_growing = piece // 2, False
    return same


def window(tokens: bytes, start: int, stop: int) -> list[int]:
    """Return the tokens of [start, stop), as far as there are any."""
    return list(unpack_tokens(tokens[max(start, 0) * _NBYTES : max(stop, 0) * _NBYTES]))


def compare(stored: bytes, asked: bytes, position: int, decode: Decode | None = None) -> Difference:
    """Return how `asked` differs from `stored`, whose first `position` tokens are the same.

    Args:
        stored: Stored tokens, from the root.
        asked: The prompt.
        position: Result of `common_prefix`.
        decode: The tokenizer; tells other tokens of the same text, and the same JSON, from other text.
    """
    old, new = stored[position * _NBYTES :], asked[position * _NBYTES :]
    if not old or not new:
        change = Reason.EXTENDS if new else Reason.SHORTER if old else Reason.IDENTICAL
        return Difference(change=change, position=position)
    gaps = list(_Comparison(old, new).gaps())
    first = gaps[0]
    difference = Difference(
        change=_change(old, new, first, position),
        position=position,
        num_removed=first.old_stop,
        num_inserted=first.new_stop,
        num_equal_after=sum(gap.num_equal for gap in gaps),
        num_differences=len(gaps),
    )
    return difference if decode is None else _read(difference, stored, asked, decode)


class _Runs:
    """Where each run of `length` tokens begins in a sequence."""

    def __init__(self, data: bytes, length: int) -> None:
        self.length = length
        self._nbytes = length * _NBYTES
        self._starts: dict[bytes, list[int]] = {}
        for start in range(_size(data) - length + 1):
            self._starts.setdefault(data[start * _NBYTES : start * _NBYTES + self._nbytes], []).append(start)

    def find(self, data: bytes, at: int, first: int) -> int | None:
        """Return where the run that `data` has at `at` begins, at `first` or later."""
        starts = self._starts.get(data[at * _NBYTES : at * _NBYTES + self._nbytes])
        if starts is None or starts[-1] < first:
            return None
        return starts[bisect.bisect_left(starts, first)]

    def nearest(self, data: bytes, at: int, first: int) -> tuple[int, int] | None:
        """Return where `data`, from `at` on, meets the sequence, from `first` on, after the fewest tokens of both."""
        found: tuple[int, int] | None = None
        best = 2 * _MAX_COMPARED
        for start in range(at, min(_size(data) - self.length + 1, at + _MAX_COMPARED)):
            if start - at >= best:
                break
            place = self.find(data, start, first)
            if place is not None and place - first + start - at < best:
                best, found = place - first + start - at, (place, start)
        return found


class _Comparison:
    """Two sequences that differ from their first token on."""

    def __init__(self, old: bytes, new: bytes) -> None:
        self._old = old
        self._new = new

    def gaps(self) -> Iterator[_Gap]:
        """Yield every place where the two differ; a rest that they do not share is the last one's."""
        num_old, num_new = _size(self._old), _size(self._new)
        old = new = 0
        while old < num_old and new < num_new:
            meeting = self._meeting(old, new)
            if meeting is None:
                yield _Gap(old, num_old, new, num_new, 0)
                return
            num_equal = common_prefix(
                _from(memoryview(self._old), meeting[0]), _from(memoryview(self._new), meeting[1])
            )
            yield _Gap(old, meeting[0], new, meeting[1], num_equal)
            old, new = meeting[0] + num_equal, meeting[1] + num_equal

    @functools.cached_property
    def _runs(self) -> _Runs:
        return _Runs(self._old[: _MAX_COMPARED * _NBYTES], _RUN)

    def _meeting(self, old: int, new: int) -> tuple[int, int] | None:
        """Return the nearest place behind `old` and `new` where the two go on alike again; None without one."""
        is_short = min(_size(self._old) - old, _size(self._new) - new) <= _SHORT_REST
        found = self._near_meeting(old, new) if is_short else None
        if found is None:
            found = self._runs.nearest(self._new, new, old)
        if found is None:
            num_equal = _common_suffix(_from(self._old, old), _from(self._new, new))
            if num_equal < (1 if is_short else _SHORT_RUN):
                return None
            found = _size(self._old) - num_equal, _size(self._new) - num_equal
        return self._run_start(old, new, found)

    def _near_meeting(self, old: int, new: int) -> tuple[int, int] | None:
        nbytes = 2 * _SHORT_REST * _NBYTES
        near = _Runs(_from(self._old, old)[:nbytes], _SHORT_RUN).nearest(_from(self._new, new)[:nbytes], 0, 0)
        return None if near is None else (old + near[0], new + near[1])

    def _run_start(self, old: int, new: int, found: tuple[int, int]) -> tuple[int, int]:
        """Move a meeting back to where its equal run begins."""
        place, start = found
        while place > old and start > new and _token(self._old, place - 1) == _token(self._new, start - 1):
            place, start = place - 1, start - 1
        return place, start


def _common_suffix(one: bytes, other: bytes) -> int:
    limit = min(_size(one), _size(other))
    last_one, last_other = _size(one) - 1, _size(other) - 1
    same = 0
    while same < limit and _token(one, last_one - same) == _token(other, last_other - same):
        same += 1
    return same


def _size(data: bytes) -> int:
    return len(data) // _NBYTES


def _from(data: Data, start: int) -> Data:
    return data[start * _NBYTES :]


def _token(data: bytes, index: int) -> bytes:
    return data[index * _NBYTES : (index + 1) * _NBYTES]


def _change(old: bytes, new: bytes, first: _Gap, position: int) -> Reason:
    if not first.num_equal and not position:
        return Reason.NOTHING_IN_COMMON
    if first.num_equal and not first.new_stop:
        return Reason.REMOVED
    if first.num_equal and not first.old_stop:
        return Reason.INSERTED
    removed, inserted = (
        sorted(unpack_tokens(data[: stop * _NBYTES])) for data, stop in ((old, first.old_stop), (new, first.new_stop))
    )
    return Reason.REORDERED if removed == inserted else Reason.REPLACED


# -- text


def _read(difference: Difference, stored: bytes, asked: bytes, decode: Decode) -> Difference:
    """Return the difference with what the texts say of it."""
    if _is_same_text(difference, stored, asked, decode):
        return dataclasses.replace(difference, change=Reason.RETOKENISED)
    start, stop = difference.position - _MAX_TEXT_TOKENS, difference.position + _MAX_TEXT_TOKENS
    if _is_same_json(decode(window(stored, start, stop)), decode(window(asked, start, stop))):
        return dataclasses.replace(difference, change=Reason.REORDERED)
    return difference


def _is_same_text(difference: Difference, stored: bytes, asked: bytes, decode: Decode) -> bool:
    """Say whether the two have the same text at the difference, or go on from the same text when they never meet."""
    if max(difference.num_removed, difference.num_inserted) > _MAX_TEXT_TOKENS:
        return False
    # A token's text may depend on its neighbours: some equal ones on either side are part of it.
    start = difference.position - _RUN
    after = _RUN if difference.is_met_again else 0
    old = decode(window(stored, start, difference.position + difference.num_removed + after))
    new = decode(window(asked, start, difference.position + difference.num_inserted + after))
    return bool(old) and (old == new or (not difference.is_met_again and (new.startswith(old) or old.startswith(new))))


def _is_same_json(old: str, new: str) -> bool:
    """Say whether the first difference of two texts lies in JSON of the same value."""
    common = next((at for at, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), 0)
    decoder = json.JSONDecoder()
    for start in [at for at, char in enumerate(old[:common]) if char in "{["][-_MAX_BRACKETS:]:
        try:
            (one, one_stop), (other, other_stop) = decoder.raw_decode(old, start), decoder.raw_decode(new, start)
        except (ValueError, RecursionError):
            continue
        if one == other and min(one_stop, other_stop) > common:
            return True
    return False
