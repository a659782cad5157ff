"""Sends messages to a branch, and lets the model answer.

A message is appended behind what is there. Of a whole list, what the branch holds already stays as it is, and a tail
that the list does not have goes on as a branch of its own.
"""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentmem.adapter import Adapter
from agentmem.chat.lint import LintMemory, template_finding
from agentmem.chat.log import KEY, hash_json, load_log
from agentmem.chat.messages import (
    Message,
    Messages,
    read_message,
    read_messages,
    read_tools,
    strip_earlier_thinking,
)
from agentmem.chat.plan import Plan, Planner
from agentmem.chat.render import Renderer
from agentmem.chat.thinking import plan_without_thinking
from agentmem.checkpoints import BranchEntry
from agentmem.errors import InvalidInputError
from agentmem.marks import MarkKind
from agentmem.stats import ChatDifference, Finding, ReuseReport

_THINKING = ("keep", "strip")

_MAX_BASE_NBYTES = 240
"""Most bytes of a branch's name in the name of its old tail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model answered.

    Attributes:
        text: Its text, without the token that ends it.
        tokens: The ids as sampled, the one that ends it included.
        message: The answer as a message, for a client that sends the whole list next time.
        report: What was reused and computed, and where the messages differ from what the branch held.
    """

    text: str
    tokens: tuple[int, ...]
    message: Message
    report: ReuseReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How messages are rendered.

    Attributes:
        tools: JSON schemas of the tools, shown once, at the beginning.
        thinking: "keep" leaves the thinking of earlier answers where it is; "strip" takes it out at each user message.
        template_options: More names for the template, such as `enable_thinking`.
    """

    tools: Sequence[Mapping[str, object]] | None = None
    thinking: str = "keep"
    template_options: Mapping[str, object] = field(default_factory=dict)


class Sampled(Protocol):
    """What a generation gives."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The new ids."""
        ...


class ChatBranch(Protocol):
    """What a conversation does with its branch."""

    def append(self, content: Sequence[int]) -> None:
        """Add token ids at the end."""
        ...

    def rewind(self, *, tokens: int) -> None:
        """Take tokens off the end."""
        ...

    def generate(self, **options: object) -> Sampled:
        """Let the model continue."""
        ...


class ChatOwner(Protocol):
    """What a conversation needs of its session."""

    adapter: Adapter
    lint: LintMemory

    @property
    def branches(self) -> list[str]:
        """The names of the branches."""
        ...

    def fork(self, name: str, *, branch: str) -> object:
        """Make a branch where another stands."""
        ...

    def drop(self, name: str) -> None:
        """Remove a branch."""
        ...


class Conversation:
    """The messages of one branch."""

    def __init__(self, owner: ChatOwner, branch: ChatBranch, entry: BranchEntry) -> None:
        """Speak for a branch, while its session is guarded."""
        self._owner = owner
        self._branch = branch
        self._entry = entry

    def messages(self) -> list[Message]:
        """Return the messages that the branch holds."""
        return self._planner(ChatOptions()).messages()

    def send(self, messages: Messages, options: ChatOptions) -> ReuseReport:
        """Put messages on the branch (see `Talk.send`)."""
        started = time.perf_counter()
        plan = self._plan(messages, options, is_prompt=False)
        with self._no_new_branch_on_error():
            return self._noted(self._carry_out(plan), "send", started)

    def chat(self, messages: Messages | None, options: ChatOptions, generate: Mapping[str, object]) -> Reply:
        """Put messages on the branch and let the model answer (see `Talk.chat`)."""
        started = time.perf_counter()
        self._owner.adapter.check_options(generate)
        plan = self._plan(messages, options, is_prompt=True)
        with self._no_new_branch_on_error():
            report = self._carry_out(plan)
            generation = self._branch.generate(**generate)
        done = self._entry.state.last_report
        first = done.first_difference if report.difference is None else report.first_difference
        report = dataclasses.replace(done, first_difference=first, difference=report.difference, lint=report.lint)
        message = self.messages()[-1]
        return Reply(
            text=str(message["content"]),
            tokens=generation.tokens,
            message=message,
            report=self._noted(report, "chat", started),
        )

    @property
    def _tokens(self) -> list[int]:
        return self._entry.state.tokens.slice()

    # -- deciding

    def _planner(self, options: ChatOptions) -> Planner:
        template, tokens = self._owner.adapter.chat_template(), self._tokens
        return Planner(
            renderer=Renderer(template=template, tools=read_tools(options.tools), options=options.template_options),
            tokens=tokens,
            log=load_log(self._entry.extras, tokens),
            template_hash=self._owner.adapter.template_hash,
        )

    def _plan(self, messages: Messages | None, options: ChatOptions, *, is_prompt: bool) -> Plan:
        """Decide what to keep and what to append; nothing has changed when it raises."""
        if options.thinking not in _THINKING:
            raise InvalidInputError(f"thinking={options.thinking!r}: choose 'keep' or 'strip'")
        planner = self._planner(options)
        if messages is None:
            return planner.plan_next(None, is_prompt=is_prompt)
        if isinstance(messages, str | Mapping):
            return _plan_one(planner, read_message(messages), options, is_prompt=is_prompt)
        if any(mark.kind is MarkKind.MEDIA for mark in self._entry.state.marks):
            raise InvalidInputError(
                f"branch {self._entry.name!r} holds images or audio, which a list of texts does not: send new messages "
                f"one by one"
            )
        read = read_messages(messages)
        is_stripped = options.thinking == "strip"
        return planner.plan_list(strip_earlier_thinking(read) if is_stripped else read, is_prompt=is_prompt)

    def _check_media(self, plan: Plan) -> None:
        """Refuse to append again what stands for images or audio."""
        if any(mark.kind is MarkKind.MEDIA and mark.stop > plan.num_kept for mark in self._entry.state.marks):
            raise InvalidInputError(
                f"branch {self._entry.name!r} holds images or audio behind token {plan.num_kept:,}, from where on it "
                f"would be written anew; use thinking='keep', or fork before them"
            )

    # -- doing

    def _carry_out(self, plan: Plan) -> ReuseReport:
        """Change the branch as planned; return the report of that."""
        self._owner.adapter.check_tokens(plan.tokens)
        self._check_media(plan)
        num_tokens = len(self._entry.state.tokens)
        difference = self._keep_tail(plan)
        findings = () if difference is None else self._owner.lint.look(self._entry.name, difference)
        if plan.log.template_hash != self._owner.adapter.template_hash:
            findings = (*findings, template_finding())
        if num_tokens > plan.num_kept:
            self._branch.rewind(tokens=num_tokens - plan.num_kept)
        self._entry.extras[KEY] = plan.log.dump([*self._tokens, *plan.tokens])  # the record that append writes has it
        self._add_borders(plan)
        self._branch.append(plan.tokens)
        return self._report(difference, findings)

    def _keep_tail(self, plan: Plan) -> ChatDifference | None:
        """Give the branch as it is another name, if the plan cuts off what was said."""
        if plan.change is None or plan.place is None:
            return None
        base = self._entry.name.encode()[:_MAX_BASE_NBYTES].decode(errors="ignore")
        taken = set(self._owner.branches)
        name = next(name for number in itertools.count(1) if (name := f"{base}~{number}") not in taken)
        self._owner.fork(name, branch=self._entry.name)
        return ChatDifference(
            change=plan.change,
            token=plan.num_kept,
            message=plan.place.message,
            old=plan.place.old,
            new=plan.place.new,
            kept_as=name,
        )

    def _add_borders(self, plan: Plan) -> None:
        """Ask for layer states where messages begin: at the last two, and a block or more apart before them."""
        state = self._entry.state
        starts = [turn.start for turn in plan.log.turns if turn.start >= plan.num_kept]
        last = plan.num_kept
        for start in starts:
            if start in starts[-2:] or start - last >= state.spec.block_size:
                state.add_border(start)
                last = start

    @contextlib.contextmanager
    def _no_new_branch_on_error(self) -> Iterator[None]:
        """Give up the name for the old tail when messages could not be sent: the branch itself goes on with it."""
        before = set(self._owner.branches)
        try:
            yield
        except BaseException:
            for name in set(self._owner.branches) - before:
                self._owner.drop(name)
            raise

    def _report(self, difference: ChatDifference | None, findings: tuple[Finding, ...]) -> ReuseReport:
        state = self._entry.state
        return ReuseReport(
            operation="send",
            num_tokens=len(state.tokens),
            num_reused=state.num_computed,
            num_pending=state.num_pending,
            first_difference=None if difference is None else difference.token,
            difference=difference,
            lint=findings,
        )

    def _noted(self, report: ReuseReport, operation: str, started: float) -> ReuseReport:
        """Leave a report on the branch."""
        elapsed_s = time.perf_counter() - started
        self._entry.state.last_report = dataclasses.replace(report, operation=operation, elapsed_s=elapsed_s)
        return self._entry.state.last_report


def _plan_one(planner: Planner, message: Message, options: ChatOptions, *, is_prompt: bool) -> Plan:
    """Decide what becomes of one message."""
    is_cut = options.thinking == "strip" and message["role"] == "user"
    if planner.tokens and planner.renderer.tools and hash_json(planner.renderer.tools) != planner.log.tools_hash:
        if not planner.is_whole:
            raise InvalidInputError(
                "the tools have changed, and the branch has tokens that were not sent as messages: its beginning "
                "cannot be rendered again; send the whole list of messages"
            )
        messages = [*planner.messages(), message]
        return planner.plan_list(strip_earlier_thinking(messages) if is_cut else messages, is_prompt=is_prompt)
    stripped = plan_without_thinking(planner) if is_cut else None
    if stripped is None:
        return planner.plan_next(message, is_prompt=is_prompt)
    return stripped.then(planner.after(stripped).plan_next(message, is_prompt=is_prompt))
