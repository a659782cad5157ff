"""Why a prompt would or would not reuse what is stored: the place, the kind of change, its cost, and what to do.

Knows nothing of how it is found out.
"""

from dataclasses import dataclass

from agentmem.ids import CheckpointId, short
from agentmem.reasons import Reason

CONTINUING = frozenset({Reason.IDENTICAL, Reason.EXTENDS, Reason.SHORTER})
"""Changes in which no token differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The stored tokens that a prompt matches furthest.

    Attributes:
        session: Name of the session.
        branch: The branch that holds them; None when no branch of it does any more.
        checkpoint_id: The last checkpoint before the difference; None when there is none.
        num_tokens: How many they are, from the root to the end of the branch.
        is_own: Whether they are in the session that was asked.
    """

    session: str
    branch: str | None
    checkpoint_id: CheckpointId | None
    num_tokens: int
    is_own: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a prompt would or would not reuse what is stored.

    Attributes:
        num_tokens: Tokens of the prompt.
        match: What it matches furthest; None when nothing is stored.
        num_equal: Leading tokens that it shares with the match.
        num_reusable: Leading tokens that need not be fed, on a fork of the match that is rewound to the difference
            and goes on with the rest of the prompt; for the match of another session, on an empty branch.
        num_reusable_fresh: Leading tokens that need not be fed when all of the prompt is appended to an empty branch,
            in whatever session: whole blocks.
        change: How the prompt differs from the match, in a word of `reasons.CHANGES`.
        limit: Why `num_reusable` is less than `num_equal`, in a word of `reasons.LIMITS`; COMPLETE when it is not.
        first_difference: Index of the first token that differs; None when the prompt is the match, goes on where it
            ends, or ends within it.
        num_removed: Stored tokens there that the prompt lacks, up to where the two meet again or end.
        num_inserted: Tokens that the prompt has in their place.
        num_equal_after: Tokens behind that place that are the same in both.
        num_differences: Places at which the two differ.
        context: The last equal tokens before the difference.
        old_tokens: Stored tokens from the difference on, 16 at most; of a replacement, those that the prompt lacks.
        new_tokens: Tokens of the prompt from there on, 16 at most; of a replacement, those that are new.
        context_text: Text of `context`; "" without a tokenizer, as the next two.
        old_text: Text of `old_tokens`.
        new_text: Text of `new_tokens`.
    """

    num_tokens: int
    match: Match | None = None
    num_equal: int = 0
    num_reusable: int = 0
    num_reusable_fresh: int = 0
    change: Reason = Reason.NOTHING_IN_COMMON
    limit: Reason = Reason.COMPLETE
    first_difference: int | None = None
    num_removed: int = 0
    num_inserted: int = 0
    num_equal_after: int = 0
    num_differences: int = 0
    context: tuple[int, ...] = ()
    old_tokens: tuple[int, ...] = ()
    new_tokens: tuple[int, ...] = ()
    context_text: str = ""
    old_text: str = ""
    new_text: str = ""

    @property
    def num_to_compute(self) -> int:
        """Tokens that the model is fed for the logits of the last one, going on from the match; at least that one."""
        return max(self.num_tokens - self.num_reusable, 1)

    @property
    def num_to_compute_fresh(self) -> int:
        """Tokens that the model is fed for them on an empty branch."""
        return max(self.num_tokens - self.num_reusable_fresh, 1)

    @property
    def num_recomputed(self) -> int:
        """Tokens of `num_to_compute` that are stored in the match, word for word: what the change costs."""
        before = max(self.num_equal - self.num_reusable, 0)
        return min(before + self.num_equal_after, self.num_tokens - self.num_reusable)

    @property
    def advice(self) -> str:
        """What to do, in a sentence."""
        return _advice(self)


_OF_LIMITS = {
    Reason.PENDING: "the model was not fed these tokens yet; they are computed once",
    Reason.NOT_SAVED: "their KV was lost with its process; end one with checkpoint(), flush() or close()",
    Reason.MISSING: "their KV is stored nowhere any more; it is computed once, and stored again",
    Reason.DAMAGED: "their KV is damaged; it is computed once, and stored again; run `agentmem check`",
    Reason.FOREIGN_MODEL: "their KV belongs to another model or adapter; open the store with that one to use it",
    Reason.FOREIGN_BLOCK_SIZE: "their KV is in blocks of another size; open the store with that Config.block_size",
    Reason.FOREIGN_SALT: "their KV is stored under another salt; open the store with that Config.salt to use it",
    Reason.NO_STATE: "no layer state is kept nearer to the difference; make a checkpoint where prompts begin to differ",
    Reason.WITHIN_MEDIA: "an image or audio is fed as a whole; put what changes before or behind it",
    Reason.REGIME: "the model rotates its keys otherwise at this length; stay below it, or pay once",
    Reason.APPROXIMATE: "an edit moved their KV there, which is not exact; append to {line} to go on with it as it is",
    Reason.WHOLE_BLOCKS: "sessions share whole blocks only; fork in session {session!r} to reuse the rest too",
}
"""Advice when tokens are the same, and yet not reused."""

_OF_CHANGES = {
    Reason.IDENTICAL: "it is stored; go on with {point}",
    Reason.EXTENDS: "go on with {point} and append only the last {num_new}",
    Reason.SHORTER: "it is stored; fork {line} and rewind the fork to {num_equal}",
    Reason.RETOKENISED: "append token ids as they were sampled: their text was encoded again, into other ids",
    Reason.REORDERED: "append to what is stored instead of writing it again in another order",
    Reason.NOTHING_IN_COMMON: "nothing of it is stored; it is computed once, and reused from then on",
}
_MET_AGAIN = "append to what is stored instead of rendering it again, and put text that changes last"
_APART = "fork {line}, rewind the fork to {num_equal} and append the last {num_new}"


def _advice(explanation: Explanation) -> str:
    found = explanation
    is_limited = found.num_equal - found.num_reusable > max(found.num_equal_after, 1)
    sentence = _OF_LIMITS.get(found.limit) if is_limited else None
    if sentence is None:
        sentence = _OF_CHANGES.get(found.change, _MET_AGAIN if found.num_equal_after else _APART)
    return sentence.format(
        session="" if found.match is None else found.match.session,
        line=_line(found.match),
        point=_point(found.match, found.num_equal),
        num_equal=_tokens(found.num_equal),
        num_new=_tokens(found.num_tokens - found.num_equal),
    )


def _line(match: Match | None) -> str:
    """Name the stored tokens, as far as they go."""
    if match is None or (match.branch is None and match.checkpoint_id is None):
        return "what is stored"
    name = _checkpoint(match) if match.branch is None else f"branch {match.branch!r}"
    return name if match.is_own else f"{name} of session {match.session!r}"


def _point(match: Match | None, position: int) -> str:
    """Name what ends at `position`."""
    if match is None or match.branch is None or match.num_tokens == position:
        return _line(match)
    name = f"a fork at {_checkpoint(match)}"
    return name if match.is_own else f"{name} of session {match.session!r}"


def _checkpoint(match: Match) -> str:
    return "" if match.checkpoint_id is None else f"checkpoint {short(match.checkpoint_id)}"


def _tokens(number: int) -> str:
    return f"{number:,} token{'' if number == 1 else 's'}"
