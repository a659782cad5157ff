"""Decides what a branch keeps and what is appended when messages are sent to it. Changes nothing."""

import bisect
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from agentmem.adapter import ChatTemplate, Encoded
from agentmem.chat.align import Aligner, Alignment
from agentmem.chat.log import ChatLog, Turn, hash_json, message_of, note_content
from agentmem.chat.messages import Message
from agentmem.chat.reason import Held, Place, Sent, change_of, locate
from agentmem.chat.render import Delta, Renderer
from agentmem.errors import InvalidInputError
from agentmem.reasons import Reason

_MAX_CLOSING = 16
"""Tokens at the end of a branch among which the closing of its last message is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done to a branch.

    Attributes:
        num_kept: Leading tokens that stay.
        tokens: Ids to append to them.
        num_before: Tokens of the branch afterwards that come before what was sent.
        log: The log afterwards.
        change: How what was sent differs from what the branch holds; None when all of it stays.
        place: Where it does.
    """

    num_kept: int
    tokens: list[int]
    num_before: int
    log: ChatLog
    change: Reason | None = None
    place: Place | None = None

    def then(self, plan: "Plan") -> "Plan":
        """Return this plan and, behind what it leaves on the branch, another one that keeps all of it."""
        tokens = [*self.tokens[: plan.num_kept - self.num_kept], *plan.tokens]
        return dataclasses.replace(self, tokens=tokens, num_before=plan.num_before, log=plan.log)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Makes plans for one branch as it is now.

    Attributes:
        renderer: The template.
        tokens: The branch's ids.
        log: Which of them are which message.
        template_hash: Names the template.
    """

    renderer: Renderer
    tokens: list[int]
    log: ChatLog
    template_hash: str

    @property
    def template(self) -> ChatTemplate:
        """The template."""
        return self.renderer.template

    def messages(self) -> list[Message]:
        """Return the messages that the branch holds."""
        special, decode = self.template.special, self.template.decode
        return [message_of(turn, self.tokens, special, decode) for turn in self.log.turns]

    def stop_of(self, turn: Turn) -> int:
        """Return the index of the token behind a turn's content."""
        return turn.stop(self.tokens, self.template.special)

    def finished(self) -> list[Turn]:
        """Return the turns, the last one ended where the branch ends."""
        return [dataclasses.replace(turn, end=self.stop_of(turn)) for turn in self.log.turns]

    # -- a whole list

    def plan_list(self, messages: Sequence[Message], *, is_prompt: bool) -> Plan:
        """Keep what the branch has in common with the whole list; append the rest."""
        sent = self._sent(messages, is_prompt=is_prompt)
        alignment = self._aligner().align(self.tokens, sent.encoded.tokens)
        if alignment.num_kept < len(self.tokens) or len(alignment.anchors) > 1:
            sent = dataclasses.replace(sent, encoded=self._respelled(sent))
            alignment = self._aligner().align(self.tokens, sent.encoded.tokens)
        num_kept = alignment.num_kept
        tokens = sent.encoded.tokens[alignment.num_taken :]
        turns = self._turns(sent, alignment, [*self.tokens[:num_kept], *tokens])
        if is_prompt:
            start = alignment.place(_token_at(sent.encoded, sent.rendering.prompt))
            turns.append(_open_turn(start, num_kept + len(tokens)))
        log = ChatLog(turns=tuple(turns), tools_hash=sent.tools_hash, template_hash=sent.template_hash)
        plan = Plan(num_kept=num_kept, tokens=tokens, num_before=num_kept, log=log)
        if num_kept == len(self.tokens) or self._is_only_closing(num_kept):
            return plan
        held = Held(tokens=self.tokens, log=self.log, special=self.template.special, decode=self.template.decode)
        place = locate(held, sent, alignment)
        return dataclasses.replace(plan, change=change_of(held, sent, place, alignment), place=place)

    def _sent(self, messages: Sequence[Message], *, is_prompt: bool) -> Sent:
        rendering = self.renderer.render(messages, is_prompt=is_prompt)
        return Sent(
            messages=messages,
            rendering=rendering,
            encoded=self.template.encode(rendering.text),
            tools_hash=hash_json(self.renderer.tools),
            template_hash=self.template_hash,
        )

    def _aligner(self) -> Aligner:
        sampled = [(turn.body, self.stop_of(turn)) for turn in self.log.turns if turn.is_sampled]
        return Aligner(special=self.template.special, decode=self.template.decode, sampled=sampled)

    def _respelled(self, sent: Sent) -> Encoded:
        """Return what was sent in the branch's own ids, as far as whole messages of the log read the same.

        Without special tokens between two messages, the end of one and the beginning of the next may be one token.
        """
        tokens, starts = self.tokens, list[int]()
        cut = 0
        for index, turn in enumerate(self.log.turns[: len(sent.messages)]):
            body, end = sent.rendering.bodies[index], sent.rendering.ends[index]
            is_last = index + 1 == len(self.log.turns)
            stop = self.log.stop if is_last else self.log.turns[index + 1].start
            text_stop = sent.rendering.stop(index)
            if turn.end is None and end is not None:  # an answer that has no closing yet
                stop, text_stop = self.stop_of(turn), end
            text = sent.rendering.text[sent.rendering.starts[index] : text_stop]
            if turn.start != len(starts) or not self._reads(turn, stop, text):
                break
            starts += [sent.rendering.starts[index]] * (turn.body - turn.start)
            starts += [sent.rendering.starts[index] if body is None else body] * (stop - turn.body)
            cut = text_stop
        if not starts:
            return sent.encoded
        rest = self.template.encode(sent.rendering.text[cut:], after=tokens[len(starts) - 1])
        return Encoded([*tokens[: len(starts)], *rest.tokens], [*starts, *(start + cut for start in rest.starts)])

    def _reads(self, turn: Turn, stop: int, text: str) -> bool:
        """Say whether a turn, up to the token `stop`, has this text; the spaces behind an answer may be trimmed."""
        old = self.template.decode(self.tokens[turn.start : stop]).lstrip()
        return old.rstrip() == text.strip() if turn.end is None else old == text.lstrip()

    def _turns(self, sent: Sent, alignment: Alignment, tokens: list[int]) -> list[Turn]:
        """Return the turns of the branch once it holds the list, as `tokens`: those that stay are as they were."""
        known = {turn.start: turn for turn in self.finished() if (turn.end or 0) <= alignment.num_kept}
        turns: list[Turn] = []
        for index in range(len(sent.messages)):
            turn = _turn(sent, index, alignment)
            old = known.get(turn.start)
            is_same = old is not None and old.role == turn.role and self._ends_alike(old, turn, sent, index, alignment)
            turns.append(old if is_same and old is not None else note_content(turn, tokens, self.template.decode))
        return turns

    def _ends_alike(self, old: Turn, turn: Turn, sent: Sent, index: int, alignment: Alignment) -> bool:
        """Say whether a message of the list ends where a turn of the branch does, but for spaces."""
        if old.end == turn.end:
            return True
        special, new = self.template.special, sent.encoded.tokens
        end = sent.rendering.ends[index]
        first = _token_at(sent.encoded, sent.rendering.stop(index) if end is None else end)
        border = _next_special(new, first, special)
        return alignment.place(border) == _next_special(self.tokens, old.end or 0, special)

    def after(self, plan: Plan) -> "Planner":
        """Return a planner for the branch as it is once a plan has been carried out."""
        tokens = [*self.tokens[: plan.num_kept], *plan.tokens]
        return dataclasses.replace(self, tokens=tokens, log=dataclasses.replace(plan.log, stop=len(tokens)))

    # -- one message

    def plan_next(self, message: Message | None, *, is_prompt: bool) -> Plan:
        """Append one message behind what is there, which stays; None appends the header of an answer only.

        Raises:
            InvalidInputError: There is nothing to answer, or the template refuses the message there.
        """
        if not self.tokens:
            if message is None:
                raise InvalidInputError("there is nothing to answer: give a message")
            return self.plan_list([message], is_prompt=is_prompt)
        delta = self.renderer.delta(self.messages() if self.is_logged else None, message, is_prompt=is_prompt)
        encoded = self.template.encode(delta.text, after=self.tokens[-1])
        closing = encoded.tokens[: _token_at(encoded, delta.start)]
        num_kept, num_there = self._closing_there(closing, delta.text[: delta.start])
        tokens = [*self.tokens[:num_kept], *encoded.tokens[num_there:]]
        shift = num_kept - num_there
        turns = self.finished()
        if message is not None:
            turns.append(note_content(delta_turn(message, delta, encoded, shift), tokens, self.template.decode))
        if is_prompt:
            turns.append(_open_turn(shift + _token_at(encoded, delta.prompt), len(tokens)))
        template_hash = self.log.template_hash or self.template_hash
        log = dataclasses.replace(self.log, turns=tuple(turns), template_hash=template_hash)
        return Plan(num_kept=num_kept, tokens=tokens[num_kept:], num_before=num_kept, log=log)

    @property
    def is_logged(self) -> bool:
        """Whether the log reaches to the end of the branch."""
        turns = self.log.turns
        return bool(turns) and (turns[-1].end is None or self.log.stop == len(self.tokens))

    @property
    def is_whole(self) -> bool:
        """Whether every token of the branch belongs to a message."""
        return self.is_logged and self.log.turns[0].start == 0

    def _closing_there(self, closing: list[int], text: str) -> tuple[int, int]:
        """Return how many tokens of the branch stay, and how many tokens of the closing are among them."""
        size, special = len(self.tokens), self.template.special
        if not self.is_logged:
            return size, self._closing_of_others(closing, text)
        turn = self.log.turns[-1]
        rest = self.tokens[self.stop_of(turn) :]
        if turn.end is not None:
            return self._closing_sent(closing, text, rest if turn.body < turn.end else None)
        if rest == closing[: len(rest)]:
            return size, len(rest)
        if rest[-1] in special and rest[-1] in closing:
            return size, closing.index(rest[-1]) + 1
        return size - 1, 0  # the model stopped with a token that the template has no use for, and puts its own

    def _closing_sent(self, closing: list[int], text: str, rest: list[int] | None) -> tuple[int, int]:
        """Return the same for a message that was sent, given what is behind its content, if that is known."""
        size = len(self.tokens)
        if self._ends_with(size, text):
            return size, len(closing)
        if rest is not None and rest == closing[: len(rest)]:
            return size, len(rest)
        # A template may close a message otherwise when another one follows: some put tool results into one message.
        for num_kept in range(size - 1, max(size - _MAX_CLOSING, 0), -1):
            if self._ends_with(num_kept, text) and not self._has_text(self.tokens[num_kept:]):
                return num_kept, len(closing)
        return size, len(closing)

    def _ends_with(self, num_tokens: int, text: str) -> bool:
        """Say whether the first tokens end with a text."""
        return self.template.decode(self.tokens[max(num_tokens - _MAX_CLOSING, 0) : num_tokens]).endswith(text)

    def _closing_of_others(self, closing: list[int], text: str) -> int:
        """Return how much of a closing there is behind tokens that were not sent as messages."""
        special, last = self.template.special, self.tokens[-1]
        if self._ends_with(len(self.tokens), text):
            return len(closing)
        if last in special and last in closing:
            return closing.index(last) + 1
        marks = [token for token in self.tokens[self.log.stop :] if token in special]
        is_open = bool(marks) and marks[-1] not in closing  # a message was begun and not ended
        return 0 if is_open or special.isdisjoint(closing) else len(closing)

    def _is_only_closing(self, num_kept: int) -> bool:
        """Say whether nothing but what closes the last message lies behind the first `num_kept` tokens."""
        if not self.is_logged or num_kept < self.stop_of(self.log.turns[-1]):
            return False
        return not self._has_text(self.tokens[num_kept:])

    def _has_text(self, tokens: Sequence[int]) -> bool:
        return bool(self.template.decode([token for token in tokens if token not in self.template.special]).strip())


def _next_special(tokens: Sequence[int], start: int, special: frozenset[int]) -> int:
    """Return the index of the first special token at or behind `start`; the number of tokens without one."""
    return next((index for index in range(start, len(tokens)) if tokens[index] in special), len(tokens))


def _token_at(encoded: Encoded, position: int) -> int:
    """Return the index of the first token that begins at a character, or behind it."""
    return bisect.bisect_left(encoded.starts, position)


def _open_turn(start: int, body: int) -> Turn:
    return Turn(message={"role": "assistant"}, start=start, body=body, end=None, is_sampled=True)


def _turn(sent: Sent, index: int, alignment: Alignment) -> Turn:
    """Return a message of a list as a turn of the branch."""
    rendering = sent.rendering
    start, stop = rendering.starts[index], rendering.stop(index)
    body, end = rendering.bodies[index], rendering.ends[index]
    places = (start, stop if body is None else body, stop if end is None else end)
    first, second, third = (alignment.place(_token_at(sent.encoded, place)) for place in places)
    return Turn(message=sent.messages[index], start=first, body=second, end=max(second, third))


def delta_turn(message: Message, delta: Delta, encoded: Encoded, shift: int) -> Turn:
    """Return a message that is appended as a turn of the branch."""
    body, end = (delta.prompt if place is None else place for place in (delta.body, delta.end))
    return Turn(
        message=message,
        start=shift + _token_at(encoded, delta.start),
        body=shift + _token_at(encoded, body),
        end=shift + _token_at(encoded, max(body, end)),
    )
