"""Where messages first differ from what a branch holds, both texts, and how, in a word.

Knows nothing of how it is mended.
"""

import bisect
import json
from collections.abc import Sequence
from dataclasses import dataclass

from agentmem.adapter import Encoded
from agentmem.chat.align import Alignment
from agentmem.chat.log import ChatLog, Decode, message_of
from agentmem.chat.messages import (
    SYSTEM_ROLES,
    Message,
    common_prefix,
    has_thinking,
    text_of,
    without_thinking,
)
from agentmem.chat.render import Rendering
from agentmem.reasons import Reason

_WINDOW = 40
"""Characters shown on either side of a difference."""

_MAX_COMMON, _MAX_REST = 64, 160
"""Tokens before and after a difference that are decoded to show it."""

_MAX_MESSAGES = 256
"""Messages behind a difference that are compared to tell an insertion from a change."""

_MAX_JSON = 1 << 16
"""Characters of a message in which JSON is looked for."""

_LINE_BREAKS = "\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a branch holds.

    Attributes:
        tokens: Its ids.
        log: Which of them are which message.
        special: Ids that are no text.
        decode: The tokenizer.
    """

    tokens: Sequence[int]
    log: ChatLog
    special: frozenset[int]
    decode: Decode

    def message(self, index: int) -> Message | None:
        """Return a message as it was sent or sampled; None when the log does not reach so far."""
        if index >= len(self.log.turns):
            return None
        return message_of(self.log.turns[index], self.tokens, self.special, self.decode)

    def text(self, index: int, start: int) -> str:
        """Return the text of a message, header and closing included; without a log, all text from token `start` on."""
        turns = self.log.turns
        if index >= len(turns):
            return self.decode(self.tokens[start : start + _MAX_JSON])
        stop = turns[index + 1].start if index + 1 < len(turns) else len(self.tokens)
        return self.decode(self.tokens[turns[index].start : stop])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What was sent.

    Attributes:
        messages: The list.
        rendering: Its text.
        encoded: Its ids.
        tools_hash: Names its tools.
        template_hash: Names the template.
    """

    messages: Sequence[Message]
    rendering: Rendering
    encoded: Encoded
    tools_hash: str
    template_hash: str

    def text(self, index: int) -> str:
        """Return the text of a message, header and closing included."""
        return self.rendering.text[self.rendering.starts[index] : self.rendering.stop(index)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the two first differ.

    Attributes:
        message: Index of the message; the number of messages when the list is a beginning of what the branch holds.
        position: The character of the rendering.
        old: The text of the branch around it.
        new: The text of the rendering around it.
    """

    message: int
    position: int
    old: str
    new: str


def locate(held: Held, sent: Sent, alignment: Alignment) -> Place:
    """Return where the two first differ."""
    kept, taken, common = alignment.num_kept, alignment.num_taken, min(alignment.run, _MAX_COMMON)
    before = held.decode(held.tokens[kept - common : kept])
    old = held.decode(held.tokens[kept - common : kept + _MAX_REST])
    new = held.decode(sent.encoded.tokens[taken - common : taken + _MAX_REST])
    same = len(common_prefix(old, new))
    starts, text = sent.encoded.starts, sent.rendering.text
    start = starts[taken] if taken < len(starts) else len(text)
    position = min(start + max(same - len(before), 0), len(text))
    is_shorter = position >= sent.rendering.prompt
    return Place(
        message=len(sent.messages) if is_shorter else sent.rendering.message_at(position),
        position=position,
        old=_window(old, same),
        new=_window(new, same),
    )


def change_of(held: Held, sent: Sent, place: Place, alignment: Alignment) -> Reason:
    """Say in a word how the two differ."""
    index = place.message
    if index == len(sent.messages):
        return Reason.SHORTER
    old, new = held.message(index), sent.messages[index]
    if old is not None and old["role"] == new["role"] and text_of(old) == text_of(new):
        if held.log.tools_hash != sent.tools_hash:
            return Reason.TOOLS_CHANGED
        if held.log.template_hash != sent.template_hash:
            return Reason.TEMPLATE_CHANGED
    if _is_system(sent, place, old):
        return Reason.SYSTEM_CHANGED
    start = sent.rendering.starts[index]
    first = bisect.bisect_left(sent.encoded.starts, start)
    return _change_of_text(held.text(index, alignment.place(first)), sent.text(index)) or _moved(held, sent, index)


def _is_system(sent: Sent, place: Place, old: Message | None) -> bool:
    """Say whether the difference lies in the system message, or in what the template says in its place."""
    index = place.message
    if sent.messages[index]["role"] in SYSTEM_ROLES or (old is not None and old["role"] in SYSTEM_ROLES):
        return True
    body = sent.rendering.bodies[0]
    return index == 0 and body is not None and place.position < body


def _change_of_text(old: str, new: str) -> Reason | None:
    """Say how the text of one message became another's, if it is one of the known ways."""
    if _is_stripped(old, new):
        return Reason.THINKING_STRIPPED
    if not _is_beginning(old, new) and _is_beginning(_sorted_json(old), _sorted_json(new)):
        return Reason.JSON_REORDERED
    return None


def _is_stripped(old: str, new: str) -> bool:
    """Say whether the new text is the old one without thinking; spaces are the template's affair."""
    if not has_thinking(old) or has_thinking(new):
        return False
    start = old.find("<think>")
    header = len(common_prefix(old if start < 0 else old[:start], new))
    kept, asked = without_thinking(old[header:]), new[header:]
    return _is_beginning("".join(kept.split()), "".join(asked.split()))


def _is_beginning(one: str, other: str) -> bool:
    """Say whether one text is the other's beginning: an unfinished answer has no closing yet."""
    return bool(one and other) and (one.startswith(other) or other.startswith(one))


def _moved(held: Held, sent: Sent, index: int) -> Reason:
    """Tell messages that came or went from one that has another text."""
    num_old = min(len(held.log.turns), index + _MAX_MESSAGES)
    num_new = min(len(sent.messages), index + _MAX_MESSAGES)
    old = [_key(held.message(at)) for at in range(index, num_old)]
    new = [_key(message) for message in sent.messages[index:num_new]]
    if not old or not new or old[1:2] == new[1:2]:
        return Reason.MESSAGE_CHANGED
    if new[0] in old[1:]:
        return Reason.MESSAGE_REMOVED
    return Reason.MESSAGE_INSERTED if old[0] in new[1:] else Reason.MESSAGE_CHANGED


def _key(message: Message | None) -> tuple[object, str]:
    return (None, "") if message is None else (message["role"], text_of(message).strip())


def _sorted_json(text: str) -> str:
    """Return a text with the JSON in it spelled in one way."""
    if len(text) > _MAX_JSON:
        return text
    decoder = json.JSONDecoder()
    pieces: list[str] = []
    at = 0
    while at < len(text):
        if text[at] in "{[":
            try:
                value, stop = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                pass
            else:
                pieces.append(json.dumps(value, sort_keys=True))
                at = stop
                continue
        pieces.append(text[at])
        at += 1
    return "".join(pieces)


def _window(text: str, at: int) -> str:
    """Return the text around a character, from the beginning of its line on."""
    start = max(at - _WINDOW, 0)
    breaks = [text.rfind(mark, start, at) for mark in _LINE_BREAKS]
    first = max(start, *(found + 1 for found in breaks))
    return text[first : first + 2 * _WINDOW]
