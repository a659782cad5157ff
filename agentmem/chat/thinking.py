"""Takes the thinking out of the answers that a branch holds, token by token."""

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from agentmem.adapter import ChatTemplate
from agentmem.chat.log import Turn, content_text, message_of, note_content
from agentmem.chat.messages import has_thinking, message_without_thinking, thinking_spans
from agentmem.chat.plan import Plan, Planner, delta_turn
from agentmem.chat.reason import Place
from agentmem.reasons import Reason

_SHOWN = 80
"""Characters of the branch shown on either side."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """Tokens [start, stop) of a branch give way to `tokens`."""

    start: int
    stop: int
    tokens: list[int]


def plan_without_thinking(planner: Planner) -> Plan | None:
    """Plan to take the thinking out of every answer of a branch; None when there is none.

    What is left of an answer keeps the ids that the model sampled, but where a token spans its border.
    """
    tokens, turns, message = list(planner.tokens), planner.finished(), -1
    for index in range(len(turns)):
        turns[index], cuts = _without(planner, turns, index, tokens)
        for cut in cuts:
            tokens[cut.start : cut.stop] = cut.tokens
            shift = len(cut.tokens) - (cut.stop - cut.start)
            turns[index + 1 :] = [_moved(turn, shift) for turn in turns[index + 1 :]]
            message = index if message < 0 else message
    if message < 0:
        return None
    if planner.log.turns[-1].end is None:
        turns[-1] = dataclasses.replace(turns[-1], end=None)  # it has no closing yet
    num_kept = _num_common(planner.tokens, tokens)
    decode = planner.template.decode
    place = Place(
        message=message,
        position=0,
        old=decode(planner.tokens[num_kept : num_kept + _SHOWN])[:_SHOWN],
        new=decode(tokens[num_kept : num_kept + _SHOWN])[:_SHOWN],
    )
    return Plan(
        num_kept=num_kept,
        tokens=tokens[num_kept:],
        num_before=len(tokens),
        log=dataclasses.replace(planner.log, turns=tuple(note_content(turn, tokens, decode) for turn in turns)),
        change=Reason.THINKING_STRIPPED,
        place=place,
    )


def _without(planner: Planner, turns: list[Turn], index: int, tokens: list[int]) -> tuple[Turn, list[_Cut]]:
    """Return a turn without thinking, and what to cut for that, the last place first."""
    turn, template = turns[index], planner.template
    end = len(tokens) if turn.end is None else turn.end
    if turn.role != "assistant" or not has_thinking(template.decode(tokens[turn.start : end])):
        return turn, []
    if "content" in turn.message or turn.body >= end:
        return _rendered(planner, turns, index, tokens)
    text = content_text(turn, tokens, end, template.decode)
    cuts = [_cut(turn, tokens, text, span, template) for span in reversed(thinking_spans(text))]
    shift = sum(len(cut.tokens) - (cut.stop - cut.start) for cut in cuts)
    return dataclasses.replace(turn, message=message_without_thinking(turn.message), end=end + shift), cuts


def _cut(turn: Turn, tokens: Sequence[int], text: str, span: tuple[int, int], template: ChatTemplate) -> _Cut:
    """Return the tokens of a block of thinking; what its first and last token say beside it is encoded again."""
    end = len(tokens) if turn.end is None else turn.end

    def length(stop: int) -> int:
        return len(content_text(turn, tokens, stop, template.decode))

    start = turn.body + bisect.bisect_right(range(turn.body, end), span[0], key=length) - 1
    stop = turn.body + bisect.bisect_left(range(turn.body, end), span[1], key=length)
    kept = text[length(start) : span[0]] + text[span[1] : length(stop)]
    return _Cut(start, stop, template.encode(kept, after=tokens[start - 1] if start else None).tokens if kept else [])


def _rendered(planner: Planner, turns: list[Turn], index: int, tokens: list[int]) -> tuple[Turn, list[_Cut]]:
    """Render an answer again that the template did not copy word for word."""
    turn, template = turns[index], planner.template
    messages = [message_of(other, tokens, template.special, template.decode) for other in turns[: index + 1]]
    message = message_without_thinking(messages.pop())
    if turn.start:
        delta = planner.renderer.delta(messages or None, message, is_prompt=False).alone()
    else:
        delta = planner.renderer.first(message)
    encoded = template.encode(delta.text, after=tokens[turn.start - 1] if turn.start else None)
    num_behind = len(planner.tokens) - planner.log.stop  # tokens that no message accounts for
    stop = turns[index + 1].start if index + 1 < len(turns) else len(tokens) - num_behind
    return delta_turn(message, delta, encoded, turn.start), [_Cut(turn.start, stop, encoded.tokens)]


def _num_common(old: Sequence[int], new: Sequence[int]) -> int:
    """Count the leading tokens that are the same."""
    limit = min(len(old), len(new))
    return next((at for at in range(limit) if old[at] != new[at]), limit)


def _moved(turn: Turn, shift: int) -> Turn:
    end = None if turn.end is None else turn.end + shift
    return dataclasses.replace(turn, start=turn.start + shift, body=turn.body + shift, end=end)
