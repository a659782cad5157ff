"""Which tokens of a branch are which message: a note in the branch's metadata that is believed only as far as it fits.

Tokens are the truth. A message's content is their text, so the note is a few numbers a message; only content that the
template did not copy word for word is written out. Knows nothing of templates.
"""

import dataclasses
import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentmem.chat.messages import Message

Decode = Callable[[Sequence[int]], str]
"""Gives the text of tokens, special ones included."""

KEY = "agentmem.chat"
"""Where the log is in a branch's extras."""

_VERSION = 1
_DIGEST_NBYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of a branch.

    Attributes:
        message: The message, without its content when that is the text of its tokens.
        start: Index of the token at which it begins: its header.
        body: Index of the token at which its content begins.
        end: Index of the token behind its content; None while the model is still writing it.
        is_sampled: Whether the model wrote it here.
    """

    message: Message
    start: int
    body: int
    end: int | None
    is_sampled: bool = False

    @property
    def role(self) -> str:
        """Who speaks."""
        return str(self.message["role"])

    def stop(self, tokens: Sequence[int], special: frozenset[int]) -> int:
        """Return the index of the token behind the content, also of an answer that is still being written."""
        if self.end is not None:
            return self.end
        is_stopped = len(tokens) > self.body and tokens[-1] in special
        return len(tokens) - is_stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatLog:
    """The messages of a branch, in order.

    Attributes:
        turns: They; a branch may have tokens between and behind them that no message accounts for.
        stop: Index of the token behind the closing of the last one. Of no meaning while it is being written.
        tools_hash: Names the tools that the template was given; "" for none.
        template_hash: Names the template.
    """

    turns: tuple[Turn, ...] = ()
    stop: int = 0
    tools_hash: str = ""
    template_hash: str = ""

    def dump(self, tokens: Sequence[int]) -> str:
        """Return what goes into the extras of a branch that ends with the last message, as JSON."""
        rows = [
            [turn.start, turn.body, turn.end, int(turn.is_sampled), _digest(tokens, turn), turn.message]
            for turn in self.turns
        ]
        end = self.turns[-1].end if self.turns else None
        closing = [] if end is None else list(tokens[end:])
        data = [_VERSION, self.template_hash, self.tools_hash, closing, rows]
        return json.dumps(data, separators=(",", ":"))


def load_log(extras: Mapping[str, object], tokens: Sequence[int]) -> ChatLog:
    """Return the log of a branch, as far as the branch still has the tokens that it speaks of."""
    data = extras.get(KEY)
    if not isinstance(data, str):
        return ChatLog()
    try:
        version, template_hash, tools_hash, closing, rows = json.loads(data)
        if version != _VERSION:
            return ChatLog()
        turns = [_read_row(row) for row in rows]
        digests = [str(row[4]) for row in rows]
    except (ValueError, TypeError, IndexError):
        return ChatLog()  # somebody else's metadata
    num_known = _num_fitting(turns, digests, tokens)
    return ChatLog(
        turns=tuple(turns[:num_known]),
        stop=_stop(turns, num_known, closing, tokens),
        tools_hash=str(tools_hash),
        template_hash=str(template_hash),
    )


def content_text(turn: Turn, tokens: Sequence[int], stop: int, decode: Decode) -> str:
    """Return the text of a message's content, read off its tokens."""
    # Some tokenizers drop the first space of what they decode: the text is what the header's text grows by.
    head = decode(tokens[turn.start : turn.body])
    whole = decode(tokens[turn.start : stop])
    return whole[len(head) :] if whole.startswith(head) else decode(tokens[turn.body : stop])


def message_of(turn: Turn, tokens: Sequence[int], special: frozenset[int], decode: Decode) -> Message:
    """Return a message as it was sent, or as the model wrote it."""
    if "content" in turn.message:
        return dict(turn.message)
    text = content_text(turn, tokens, turn.stop(tokens, special), decode)
    return {"role": turn.message["role"], "content": text, **turn.message}


def note_content(turn: Turn, tokens: Sequence[int], decode: Decode) -> Turn:
    """Leave out of a turn's message the content that its tokens say already."""
    content = turn.message.get("content")
    if turn.end is None or not isinstance(content, str) or content_text(turn, tokens, turn.end, decode) != content:
        return turn
    rest = {key: value for key, value in turn.message.items() if key != "content"}
    return dataclasses.replace(turn, message=rest)


def hash_json(value: object) -> str:
    """Name a JSON value by what a template would write of it, the order of keys included; "" for nothing."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=_DIGEST_NBYTES).hexdigest() if value else ""


def _read_row(row: Sequence[object]) -> Turn:
    start, body, end, is_sampled, _, message = row
    if not (isinstance(start, int) and isinstance(body, int) and isinstance(message, dict)):
        raise TypeError("not a turn")
    if not isinstance(message.get("role"), str) or not isinstance(end, int | None):
        raise TypeError("not a turn")
    return Turn(message=message, start=start, body=body, end=end, is_sampled=bool(is_sampled))


def _num_fitting(turns: Sequence[Turn], digests: Sequence[str], tokens: Sequence[int]) -> int:
    """Return how many leading turns have the tokens that the branch has."""
    for index, (turn, digest) in enumerate(zip(turns, digests, strict=True)):
        known = turn.body if turn.end is None else turn.end
        if known > len(tokens) or _digest(tokens, turn) != digest:
            return index
    return len(turns)


def _stop(turns: Sequence[Turn], num_known: int, closing: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the index of the token behind the closing of the last turn that the branch still has."""
    end = turns[num_known - 1].end if num_known else None
    if num_known < len(turns):
        return min(turns[num_known].start, len(tokens)) if num_known else 0
    if end is None:
        return len(tokens) if num_known else 0
    same = 0
    while same < len(closing) and list(tokens[end + same : end + same + 1]) == [closing[same]]:
        same += 1
    return end + same


def _digest(tokens: Sequence[int], turn: Turn) -> str:
    known = array("I", tokens[turn.start : turn.body if turn.end is None else turn.end])
    return hashlib.blake2b(known.tobytes(), digest_size=_DIGEST_NBYTES).hexdigest()
