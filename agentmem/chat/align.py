"""How far the tokens that a template makes of some messages are those that a branch holds.

Ids are the truth: between two special tokens, other ids of the same text are the same. Knows nothing of messages.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[Sequence[int]], str]
"""Gives the text of tokens, special ones included."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """What a branch's tokens and new ones have in common at their beginning.

    Attributes:
        num_kept: Leading tokens of the branch that stay.
        num_taken: Leading new tokens that they stand for.
        anchors: Pairs of indices, new and old, from which the two run alike, token by token.
    """

    num_kept: int
    num_taken: int
    anchors: tuple[tuple[int, int], ...]

    def place(self, index: int) -> int:
        """Return where in the branch a new token is, or will be; among others of the same text, near it."""
        if index >= self.num_taken:
            return self.num_kept + index - self.num_taken
        at = bisect.bisect_right(self.anchors, (index, self.num_kept)) - 1
        new, old = self.anchors[at]
        limit = self.anchors[at + 1][1] if at + 1 < len(self.anchors) else self.num_kept
        return min(old + index - new, limit)

    @property
    def run(self) -> int:
        """Tokens before the difference that are the same, one by one."""
        return self.num_taken - self.anchors[-1][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligner:
    """Compares tokens by their text.

    Attributes:
        special: Ids that are no text.
        decode: The tokenizer.
        sampled: Spans of the branch's tokens that the model wrote. A template may trim the spaces around them.
    """

    special: frozenset[int]
    decode: Decode
    sampled: Sequence[tuple[int, int]] = ()

    def align(self, old: Sequence[int], new: Sequence[int]) -> Alignment:
        """Compare the tokens of a branch, `old`, with those of what was sent."""
        anchors = [(0, 0)]
        at_old = at_new = border_old = border_new = 0
        while at_old < len(old) and at_new < len(new):
            if old[at_old] == new[at_new]:
                is_border = new[at_new] in self.special
                at_old, at_new = at_old + 1, at_new + 1
                if is_border:
                    border_old, border_new = at_old, at_new
                continue
            stop_old, stop_new = self._stop(old, at_old), self._stop(new, at_new)
            is_moving = stop_old > at_old or stop_new > at_new
            is_trimmable = stop_new < len(new)  # elsewhere the spaces may be the template's, to close the message
            if not is_moving or not self._is_same(old[:stop_old], border_old, new[border_new:stop_new], is_trimmable):
                break
            at_old, at_new = border_old, border_new = stop_old, stop_new
            anchors.append((at_new, at_old))
        return Alignment(at_old, at_new, tuple(anchors))

    def _stop(self, tokens: Sequence[int], start: int) -> int:
        """Return the index of the next special token."""
        return next((index for index in range(start, len(tokens)) if tokens[index] in self.special), len(tokens))

    def _is_same(self, old: Sequence[int], start: int, new: Sequence[int], is_trimmable: bool) -> bool:
        """Say whether the text of `old` from `start` on is that of `new`."""
        before = old[start - 1 : start] if start else []  # some tokenizers drop the first space of what they decode
        one, other = self.decode([*before, *old[start:]]), self.decode([*before, *new])
        if one == other:
            return True
        spans = [(max(first, start), stop) for first, stop in self.sampled if first < len(old) and stop > start]
        if not spans or not is_trimmable:
            return False
        head = self.decode([*before, *old[start : spans[-1][0]]]).rstrip()
        return other.startswith(head) and one.startswith(head) and _trimmed(one, head) == _trimmed(other, head)


def _trimmed(text: str, head: str) -> str:
    return text[len(head) :].strip()
