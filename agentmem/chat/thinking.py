"""Takes the thinking out of the answers that a branch holds, token by token."""

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from agentmem.adapter import ChatTemplate
from agentmem.chat.log import Turn, content_text, note_content
from agentmem.chat.messages import has_thinking, message_without_thinking, thinking_spans
from agentmem.chat.plan import Plan, Planner
from agentmem.chat.reason import Place
from agentmem.stats import ChatChange

_SHOWN = 80


@dataclass(frozen=True, slots=True)
class _Cut:
    """Tokens [start, stop) give way to `tokens`."""

    start: int
    stop: int
    tokens: list[int]


def plan_without_thinking(planner: Planner) -> Plan | None:
    """Plan to take the thinking out of every answer of a branch; None when there is none.

    What is left of an answer keeps the ids that the model sampled, but where a token spans its border.
    """
    template, tokens, turns = planner.template, list(planner.tokens), planner.finished()
    first, message = len(tokens), -1
    for index in range(len(turns)):
        for cut in _cuts(turns[index], tokens, template):
            tokens[cut.start : cut.stop] = cut.tokens
            shift = len(cut.tokens) - (cut.stop - cut.start)
            turns[index:] = [_shortened(turns[index], shift), *(_moved(turn, shift) for turn in turns[index + 1 :])]
            first, message = min(first, cut.start), index if message < 0 else message
    if message < 0:
        return None
    turns = [note_content(_rewritten(turn), tokens, template.decode) for turn in turns]
    place = Place(
        message=message,
        position=0,
        old=template.decode(planner.tokens[first : first + _SHOWN])[:_SHOWN],
        new=template.decode(tokens[first : first + _SHOWN])[:_SHOWN],
    )
    return Plan(
        num_kept=first,
        tokens=tokens[first:],
        num_before=len(tokens),
        log=dataclasses.replace(planner.log, turns=tuple(turns)),
        change=ChatChange.THINKING_STRIPPED,
        place=place,
    )


def _cuts(turn: Turn, tokens: Sequence[int], template: ChatTemplate) -> list[_Cut]:
    """Return what to take out of a turn, the last block first, so that the others stay where they are."""
    end = len(tokens) if turn.end is None else turn.end
    if turn.role != "assistant" or turn.body >= end:
        return []
    text = content_text(turn, tokens, end, template.decode)
    spans = thinking_spans(text) if has_thinking(text) else []
    return [_cut(turn, tokens, text, span, template) for span in reversed(spans)]


def _cut(turn: Turn, tokens: Sequence[int], text: str, span: tuple[int, int], template: ChatTemplate) -> _Cut:
    """Return the tokens of a block of thinking; what its first and last token say beside it is encoded again."""
    end = len(tokens) if turn.end is None else turn.end

    def length(stop: int) -> int:
        return len(content_text(turn, tokens, stop, template.decode))

    start = turn.body + bisect.bisect_right(range(turn.body, end), span[0], key=length) - 1
    stop = turn.body + bisect.bisect_left(range(turn.body, end), span[1], key=length)
    kept = text[length(start) : span[0]] + text[span[1] : length(stop)]
    return _Cut(start, stop, template.encode(kept, after=tokens[start - 1] if start else None).tokens if kept else [])


def _shortened(turn: Turn, shift: int) -> Turn:
    return dataclasses.replace(turn, end=None if turn.end is None else turn.end + shift)


def _moved(turn: Turn, shift: int) -> Turn:
    end = None if turn.end is None else turn.end + shift
    return dataclasses.replace(turn, start=turn.start + shift, body=turn.body + shift, end=end)


def _rewritten(turn: Turn) -> Turn:
    return dataclasses.replace(turn, message=message_without_thinking(turn.message))
