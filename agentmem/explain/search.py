"""Finds the stored tokens that a prompt matches furthest, and foresees what it would reuse of them.

Reads token ids and names; feeds no model, moves no KV and imports no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentmem.errors import InvalidInputError
from agentmem.explain.difference import Decode, Difference, compare, window
from agentmem.explain.explanation import CONTINUING, Explanation, Match
from agentmem.explain.lines import Line, Lines
from agentmem.explain.reuse import Asked, Foreseen, Kept, Shelf, foresee, foresee_anew, shared_marks
from agentmem.ids import BlockHash
from agentmem.kv.hashing import chain_hash, pack_tokens
from agentmem.marks import pack_marks
from agentmem.reasons import Reason
from agentmem.tree.checkpoint import TOKEN_NBYTES

_NUM_BEFORE, _NUM_SHOWN = 8, 16
"""Tokens that are shown before the difference, and of either side from it on."""


class Library(Protocol):
    """What explain looks at."""

    @property
    def own(self) -> Lines:
        """The session that is asked."""
        ...

    @property
    def shelf(self) -> Shelf:
        """All blocks of the store."""
        ...

    def others(self) -> Iterator[Lines]:
        """Yield the other sessions that may be looked at."""
        ...

    def kept(self, lines: Lines, line: Line, equal: int) -> Kept:
        """Return what there is of the KV of a line that is cut back to its first `equal` tokens."""
        ...


@dataclass(frozen=True, slots=True)
class _Found:
    """The lines of one session that a prompt follows furthest, the one to compare with, and what it would reuse."""

    lines: Lines
    tied: list[Line]
    line: Line
    equal: int
    foreseen: Foreseen
    num_anew: int


def explain(tokens: Sequence[int], library: Library, *, decode: Decode | None = None) -> Explanation:
    """Explain what a prompt would reuse.

    Other sessions are read only when they may have more of the prompt than the one that is asked.

    Args:
        tokens: The prompt.
        library: What is stored.
        decode: The tokenizer, for texts and for what only texts tell.

    Raises:
        InvalidInputError: The prompt is empty.
    """
    if not tokens:
        raise InvalidInputError("the prompt has no tokens, so there is nothing to explain")
    return _Search(tokens, library, decode).explanation()


class _Search:
    """One prompt in search of its match."""

    def __init__(self, tokens: Sequence[int], library: Library, decode: Decode | None) -> None:
        self._tokens = tokens
        self._packed = pack_tokens(tokens)
        self._library = library
        self._shelf = library.shelf
        self._decode = decode

    def explanation(self) -> Explanation:
        """Return what was found."""
        found = self._best()
        if found is None:
            return Explanation(num_tokens=len(self._tokens))
        stored = found.lines.tokens(found.line)
        difference = compare(stored, self._packed, found.equal, self._decode)
        if difference.is_met_again or difference.change not in {Reason.REPLACED, Reason.SHORTER}:
            return self._described(found, difference, stored)
        # The rest is no change of what is stored: where a branch may begin, the prompt begins one more.
        point = self._ending(found)
        if point is not None:
            found = self._on(found.lines, found.tied, point, found.equal)
            stored = stored[: found.equal * TOKEN_NBYTES]
            difference = compare(stored, self._packed, found.equal)
        return self._described(found, difference, stored)

    # -- where

    def _best(self) -> _Found | None:
        """Return the match in the session that is asked, or in another one that has more of the prompt."""
        best = self._in_session(self._library.own)
        if best is None or self._may_others_have_more(best):
            for lines in self._library.others():
                other = self._in_session(lines)
                if other is not None and other.equal and (best is None or _rank(other) > _rank(best)):
                    best = other
        return best

    def _may_others_have_more(self, own: _Found) -> bool:
        """Say whether stored blocks go further than the session does, or it has less than a block of the prompt."""
        reused = own.foreseen.num_tokens
        return own.equal < self._shelf.block_size or reused > own.equal or own.num_anew > reused

    def _in_session(self, lines: Lines) -> _Found | None:
        reached = lines.reached(self._packed)
        equal = max(reached, default=0)
        tied = [line for line, each in zip(lines.lines, reached, strict=True) if each == equal]
        if not tied:
            return None
        line = max(tied, key=lambda each: self._library.kept(lines, each, equal).reach(equal)) if equal else tied[0]
        return self._on(lines, tied, line, equal)

    def _on(self, lines: Lines, tied: list[Line], line: Line, equal: int) -> _Found:
        kept, marks = self._library.kept(lines, line, equal), lines.marks(line)
        asked = Asked(self._tokens, shared_marks(marks, equal))
        if lines is self._library.own:
            foreseen = foresee(asked, equal, kept, marks, self._shelf)
            num_anew = foresee_anew(asked, equal, kept, marks, self._shelf)
        else:
            num_anew = foresee_anew(asked, 0, kept, (), self._shelf)
            foreseen = Foreseen(num_anew, self._limit_elsewhere(asked, equal, kept, num_anew))
        return _Found(lines, tied, line, equal, foreseen, num_anew)

    def _ending(self, found: _Found) -> Line | None:
        """Return a line that has a checkpoint, or its end, just where the prompt leaves it; None without one."""
        if not found.equal:
            return None
        return next((line for line in found.tied if found.lines.has_end(line, found.equal)), None)

    # -- how much

    def _limit_elsewhere(self, asked: Asked, equal: int, kept: Kept, num_tokens: int) -> Reason:
        """Return why only `num_tokens` tokens are found by name of those that another session has."""
        size = self._shelf.block_size
        if num_tokens >= equal:
            return Reason.COMPLETE
        if num_tokens >= equal - size:
            return Reason.WHOLE_BLOCKS
        if kept.num_kv < equal - size and kept.limit is not Reason.COMPLETE:
            return kept.limit
        name = self._first_name(asked, kept.regime)
        is_ours = name is None or not len(kept.blocks) or kept.blocks.slice(0, 1)[0].block_hash == name
        limit = Reason.NO_STATE if self._shelf.has_states else Reason.MISSING
        return limit if is_ours else Reason.FOREIGN_SALT

    def _first_name(self, asked: Asked, regime: bytes) -> BlockHash | None:
        """Return the name of the prompt's first block; None when the name of the empty prefix is not known."""
        root, size = self._shelf.root_of(regime), self._shelf.block_size
        return None if root is None else chain_hash(root, asked.tokens[:size], pack_marks(asked.marks, 0, size))

    # -- what to say

    def _described(self, found: _Found, difference: Difference, stored: bytes) -> Explanation:
        equal = found.equal
        change = difference.change if equal or difference.is_met_again else Reason.NOTHING_IN_COMMON
        is_going_on = change in CONTINUING
        num_old = num_new = _NUM_SHOWN
        if difference.num_removed and difference.num_inserted:
            num_old, num_new = min(num_old, difference.num_removed), min(num_new, difference.num_inserted)
        context = window(stored, equal - _NUM_BEFORE, equal)
        old, new = window(stored, equal, equal + num_old), window(self._packed, equal, equal + num_new)
        return Explanation(
            num_tokens=len(self._tokens),
            match=self._match(found),
            num_equal=equal,
            num_reusable=found.foreseen.num_tokens,
            num_reusable_fresh=found.num_anew,
            change=change,
            limit=found.foreseen.limit,
            first_difference=None if is_going_on else equal,
            num_removed=difference.num_removed,
            num_inserted=difference.num_inserted,
            num_equal_after=difference.num_equal_after,
            num_differences=difference.num_differences,
            context=tuple(context),
            old_tokens=tuple(old),
            new_tokens=tuple(new),
            context_text=self._text(context),
            old_text=self._text(old),
            new_text=self._text(new),
        )

    def _match(self, found: _Found) -> Match:
        return Match(
            session=found.lines.session,
            branch=found.line.branch,
            checkpoint_id=found.lines.checkpoint_before(found.line, found.equal),
            num_tokens=found.lines.num_tokens(found.line),
            is_own=found.lines is self._library.own,
        )

    def _text(self, tokens: list[int]) -> str:
        return "" if self._decode is None or not tokens else self._decode(tokens)


def _rank(found: _Found) -> tuple[int, int]:
    return found.foreseen.num_tokens, found.equal
