"""What a chat template makes of messages, and where in it each message is.

A template is a program: nothing says that what it makes of the first messages is how it begins with more of them. So a
message's place is found by rendering a second time, with a mark behind each content. Knows nothing of tokens.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentmem.adapter import ChatTemplate
from agentmem.chat.messages import SYSTEM_ROLES, Message, common_prefix, text_of
from agentmem.errors import InvalidInputError

_TOOL_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "x", "arguments": {}}}],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """The text of some messages.

    Attributes:
        text: What the template made of them, with the header of the next answer when it was asked for.
        starts: Where each message begins, its header included; the first one at 0, with whatever the template puts
            before it.
        bodies: Where the content of each begins; None where the template did not copy it word for word.
        ends: Where the content of each ends; None where that is not known.
        prompt: Where the header of the next answer begins: the end of the text when there is none.
    """

    text: str
    starts: tuple[int, ...]
    bodies: tuple[int | None, ...]
    ends: tuple[int | None, ...]
    prompt: int

    def message_at(self, position: int) -> int:
        """Return the index of the message that a character belongs to."""
        return max(index for index, start in enumerate(self.starts) if start <= position)

    def stop(self, index: int) -> int:
        """Return where a message ends, its closing included."""
        return self.starts[index + 1] if index + 1 < len(self.starts) else self.prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What the template adds behind the content of the last message.

    Attributes:
        text: The last message's closing, then the new message, then the header of the next answer, if asked for.
        start: Where the new message begins.
        body: Where its content begins; None when that is not known.
        end: Where its content ends; None when that is not known.
        prompt: Where the header begins.
    """

    text: str
    start: int
    body: int | None
    end: int | None
    prompt: int

    def alone(self) -> "Delta":
        """Return the new message without what comes before it."""
        return Delta(
            text=self.text[self.start :],
            start=0,
            body=None if self.body is None else self.body - self.start,
            end=None if self.end is None else self.end - self.start,
            prompt=self.prompt - self.start,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Renderer:
    """A template with what it is given beside the messages.

    Attributes:
        template: The template.
        tools: JSON schemas of the tools; None for none.
        options: More names for the template.
    """

    template: ChatTemplate
    tools: Sequence[Message] | None = None
    options: Mapping[str, object] = field(default_factory=dict)

    def render(self, messages: Sequence[Message], *, is_prompt: bool) -> Rendering:
        """Render a whole list of messages."""
        text = self._text(messages, is_prompt=False)
        ends = self._ends(messages, text)
        return Rendering(
            text=text + (self._prompt(messages, text, ends[-1]) if is_prompt else ""),
            starts=tuple(self._starts(messages, text, ends)),
            bodies=tuple(map(_body, messages, ends, [text] * len(messages))),
            ends=tuple(ends),
            prompt=len(text),
        )

    def delta(self, history: Sequence[Message] | None, message: Message | None, *, is_prompt: bool) -> Delta:
        """Render what comes behind `history`, whose contents do not matter; None when nothing is known of it.

        Raises:
            InvalidInputError: The template refuses the message there, or puts it where it cannot be told apart.
        """
        outline = [_outline(turn) for turn in history or ()]
        unsaid = [turn for turn in outline if turn["role"] not in SYSTEM_ROLES]
        # A template may show the system message once more, further down. It has been said.
        for told in (outline, unsaid, _made_up(message)):
            delta = self._delta(told, message, is_prompt) if told else None
            if delta is not None:
                return delta
        raise InvalidInputError(
            "the chat template does not say where the new message begins; send the whole list of messages"
        )

    def first(self, message: Message) -> Delta:
        """Render the first message, with whatever the template puts before it."""
        rendering = self.render([message], is_prompt=False)
        return Delta(
            text=rendering.text, start=0, body=rendering.bodies[0], end=rendering.ends[0], prompt=rendering.prompt
        )

    def _delta(self, outline: list[Message], message: Message | None, is_prompt: bool) -> Delta | None:
        new = [] if message is None else [message]
        renderer = Renderer(template=self.template, options=self.options)  # tools are shown once, at the beginning
        rendering = renderer.render([*outline, *new], is_prompt=is_prompt)
        known = rendering.ends[: len(outline)]
        cut = known[-1]
        if cut is None or any(end is not None and end > cut for end in known):
            return None
        is_new = message is not None
        body, end = (rendering.bodies[-1], rendering.ends[-1]) if is_new else (None, None)
        return Delta(
            text=rendering.text[cut:],
            start=(rendering.starts[-1] if is_new else rendering.prompt) - cut,
            body=None if body is None else body - cut,
            end=None if end is None else end - cut,
            prompt=rendering.prompt - cut,
        )

    def _text(self, messages: Sequence[Message], *, is_prompt: bool) -> str:
        return self.template.render(messages, tools=self.tools, is_prompt=is_prompt, options=self.options)

    def _prompt(self, messages: Sequence[Message], text: str, end: int | None) -> str:
        """Return the header of the next answer."""
        full = self._text(messages, is_prompt=True)
        if full.startswith(text):
            return full[len(text) :]
        closing = "" if end is None else text[end:]  # asked for an answer, the template shows the messages otherwise
        return full[full.rfind(closing) + len(closing) :] if closing in full else ""

    def _ends(self, messages: Sequence[Message], text: str) -> list[int | None]:
        """Return where the content of each message ends in the text."""
        mark = _unused_mark(messages)
        has_blanks = any(not text_of(message).strip() for message in messages)
        for is_blank_marked in (True, False) if has_blanks else (False,):
            marked = [_marked(message, f"{mark}{at}{mark}", is_blank_marked) for at, message in enumerate(messages)]
            unmarked, places = _without_marks(self._text(marked, is_prompt=False), mark)
            if unmarked == text:
                return [_over_spaces(message, places.get(at), text) for at, message in enumerate(messages)]
        return _sought_ends(messages, text)  # the template looks at how contents end

    def _starts(self, messages: Sequence[Message], text: str, ends: Sequence[int | None]) -> list[int]:
        """Return where each message begins: behind the closing of the one before."""
        starts = [0]
        closings: dict[object, str] = {}
        for index, end in enumerate(ends[:-1]):
            if end is None:
                starts.append(starts[-1])
                continue
            key = messages[index]["role"] if _is_bare(messages[index]) else None
            closing = closings.get(key, "")
            if not closing or not text.startswith(closing, end):
                closing = self._closing(messages[: index + 1])
                closing = common_prefix(closing, text[end : end + len(closing)])
                if key is not None:
                    closings[key] = closing
            starts.append(end + len(closing))
        return starts

    def _closing(self, messages: Sequence[Message]) -> str:
        """Return what the template puts behind the last content when no message follows."""
        users = [index for index, message in enumerate(messages) if message["role"] == "user"]
        for first in (users[-1] if users else 0, 0):
            few = list(messages[first:])
            try:
                text = self._text(few, is_prompt=False)
            except InvalidInputError:
                continue  # templates may want more of what came before
            end = self._ends(few, text)[-1]
            if end is not None:
                return text[end:]
        return ""


def _is_bare(message: Message) -> bool:
    """Say whether what follows a message's content depends on its role alone."""
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip()) and content == content.rstrip() and len(message) == 2


def _outline(message: Message) -> Message:
    """Return a message with a short content in the place of its own."""
    return {**message, "content": "x" if text_of(message).strip() or not message.get("tool_calls") else ""}


def _made_up(message: Message | None) -> list[Message]:
    """Return messages that a new one may follow, where nobody knows what it follows."""
    user: Message = {"role": "user", "content": "x"}
    assistant: Message = {"role": "assistant", "content": "x"}
    role = None if message is None else message["role"]
    if role == "tool":
        return [user, {**_TOOL_CALL, "content": "x"}]
    return [user] if role in {None, "assistant"} else [user, assistant]


def _unused_mark(messages: Sequence[Message]) -> str:
    """Return letters that no message has: they pass through a template, JSON included, as they are."""
    texts = repr(messages)
    mark = "qzx"
    while mark in texts:
        mark += "qzx"
    return mark


def _marked(message: Message, mark: str, is_blank_marked: bool) -> Message:
    """Return a message with a mark behind its content, before the spaces there: templates may trim them."""
    content = message.get("content")
    if isinstance(content, str) and (content.strip() or is_blank_marked):
        return {**message, "content": _with_mark(content, mark)}
    if isinstance(content, list) and text_of(message).strip():
        last = max(index for index, part in enumerate(content) if str(part.get("text", "")).strip())
        parts = [dict(part) for part in content]
        parts[last]["text"] = _with_mark(str(parts[last]["text"]), mark)
        return {**message, "content": parts}
    calls = message.get("tool_calls")
    return {**message, "tool_calls": _marked_calls(calls, mark)} if isinstance(calls, list) and calls else message


def _marked_calls(calls: list[object], mark: str) -> list[object]:
    """Return tool calls with a mark in the name of the last: what follows it belongs to the message's closing."""
    last = calls[-1]
    if not isinstance(last, dict):
        return calls
    function = last.get("function")
    if isinstance(function, dict) and "name" in function:
        return [*calls[:-1], {**last, "function": {**function, "name": f"{function['name']}{mark}"}}]
    return [*calls[:-1], {**last, "name": f"{last['name']}{mark}"}] if "name" in last else calls


def _with_mark(text: str, mark: str) -> str:
    kept = text.rstrip()
    return kept + mark + text[len(kept) :]


def _without_marks(text: str, mark: str) -> tuple[str, dict[int, int]]:
    """Take the marks out of a text; return where each stood, the last time when the template shows it twice."""
    pieces: list[str] = []
    places: dict[int, int] = {}
    length = at = 0
    for match in re.finditer(f"{mark}(\\d+){mark}", text):
        pieces.append(text[at : match.start()])
        length += match.start() - at
        places[int(match[1])] = length
        at = match.end()
    return "".join([*pieces, text[at:]]), places


def _over_spaces(message: Message, place: int | None, text: str) -> int | None:
    """Return where a content ends whose last letter ends at `place`: spaces behind it may have been kept."""
    content = text_of(message)
    spaces = content[len(content.rstrip()) :]
    return None if place is None else place + len(common_prefix(spaces, text[place : place + len(spaces)]))


def _sought_ends(messages: Sequence[Message], text: str) -> list[int | None]:
    """Return where the content of each message ends, by looking for one after the other."""
    ends: list[int | None] = []
    at = 0
    for message in messages:
        content = text_of(message).strip()
        found = text.find(content, at) if content else -1
        ends.append(found + len(content) if found >= 0 else None)
        at = ends[-1] or at
    return ends


def _body(message: Message, end: int | None, text: str) -> int | None:
    """Return where a message's content begins."""
    content = text_of(message)
    if end is None:
        return None
    for written in (content, content.lstrip(), content.rstrip(), content.strip()):
        if written and text.endswith(written, 0, end):
            return end - len(written)
    return None
