"""Messages, as clients write them: checked, copied, and with the thinking taken out.

Knows nothing of templates, tokens or branches.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from agentmem.errors import InvalidInputError

Message = dict[str, object]
"""One message, as in transformers: `role`, `content`, and what else the template reads."""

Messages = str | Mapping[str, object] | Sequence[Mapping[str, object]]
"""One message (a text is the user's), or the whole list."""

SYSTEM_ROLES = frozenset({"system", "developer"})

_REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})
"""Keys under which clients keep an answer's thinking beside its content."""

_THINKING = re.compile(r"(?:(?:\A\s*)?<think>(?:(?!</think>).)*|\A(?:(?!</?think>).)*)</think>\s*", re.DOTALL)
"""A block of thinking. The template may have opened the first one, so that the answer begins inside of it."""


def read_message(message: object) -> Message:
    """Return a checked deep copy of one message; a text is the user's.

    Raises:
        InvalidInputError: It is no message that a template could render from text.
    """
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if not isinstance(message, Mapping):
        raise InvalidInputError(f"a message is a dict with role and content, or a text; found {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidInputError(f"message without a role: role={role!r}; use 'system', 'user', 'assistant' or 'tool'")
    _check_content(role, message)
    return _plain(dict(message), f"the {role} message")


def read_messages(messages: Iterable[object]) -> list[Message]:
    """Return checked deep copies of a list of messages.

    Raises:
        InvalidInputError: The list is empty, or one of them is no message; names which.
    """
    read: list[Message] = []
    for index, message in enumerate(messages):
        try:
            read.append(read_message(message))
        except InvalidInputError as error:
            raise InvalidInputError(f"message {index}: {error}") from error
    if not read:
        raise InvalidInputError("an empty list of messages was sent; give at least one message")
    return read


def read_tools(tools: Sequence[Mapping[str, object]] | None) -> list[Message] | None:
    """Return a deep copy of the tools' schemas; none at all counts as None.

    Raises:
        InvalidInputError: One of them is not a JSON schema.
    """
    if not tools:
        return None
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise InvalidInputError(
                f"tools are JSON schemas (dicts); found {type(tool).__name__}: for a function, "
                f"transformers.utils.get_json_schema makes one"
            )
    return [_plain(dict(tool), "a tool") for tool in tools]


def common_prefix(one: str, other: str) -> str:
    """Return the beginning that two texts share."""
    limit = min(len(one), len(other))
    return one[: next((at for at in range(limit) if one[at] != other[at]), limit)]


def text_of(message: Message) -> str:
    """Return a message's text: its content, or the text parts of it."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


def has_thinking(text: str) -> bool:
    """Say whether a text holds a block of thinking."""
    return "</think>" in text


def without_thinking(text: str) -> str:
    """Return a text without its blocks of thinking, and without the spaces behind them."""
    return _THINKING.sub("", text) if has_thinking(text) else text


def thinking_spans(text: str) -> list[tuple[int, int]]:
    """Return where the blocks of thinking are in a text, with the spaces behind them."""
    return [match.span() for match in _THINKING.finditer(text)] if has_thinking(text) else []


def message_without_thinking(message: Message) -> Message:
    """Return an answer without its thinking; any other message as it is."""
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key not in _REASONING}
    content = kept.get("content")
    return {**kept, "content": without_thinking(content)} if isinstance(content, str) else kept


def strip_earlier_thinking(messages: list[Message]) -> list[Message]:
    """Return the messages with the thinking of every answer before the last user message taken out."""
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    last = users[-1] if users else 0
    return [message_without_thinking(message) if index < last else message for index, message in enumerate(messages)]


def _check_content(role: str, message: Mapping[str, object]) -> None:
    content = message.get("content")
    if content is None:
        if not message.get("tool_calls"):
            raise InvalidInputError(f"{role} message without content: give content= a text ('' is one), or tool_calls")
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidInputError(f"content of the {role} message is {type(content).__name__}; it must be a text")
    kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content]
    others = [kind for kind in kinds if kind != "text"]
    if others:
        raise InvalidInputError(
            f"content of the {role} message has a part of type {others[0]!r}: messages carry text only; render images "
            f"and audio with the model's processor and pass its outputs to append(ids, **model_inputs)"
        )


def _plain(value: dict[str, object], what: str) -> Message:
    """Return a deep copy as JSON gives it back, so that what is sent can be stored and compared."""
    try:
        copy: Message = json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{what} cannot be stored ({error}): use plain dicts, lists and text") from error
    return copy
