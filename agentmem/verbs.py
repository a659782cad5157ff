"""The verbs of a session that act on one branch, the active one or `branch=`, or on several together.

Each hands the work to `Branch`; nothing is decided here.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from agentmem.batch.batch import Batch, Member
from agentmem.branch import Branch, Generation
from agentmem.chat.conversation import Reply
from agentmem.chat.messages import Messages
from agentmem.explain.explanation import Explanation
from agentmem.explain.live import Content
from agentmem.stats import ReuseReport
from agentmem.tree.checkpoint import Checkpoint


class Verbs(ABC):
    """What a session does with one of its branches."""

    @abstractmethod
    def chosen(self, name: str | None) -> Branch:
        """Return the branch called `name`; the active one for None."""

    @abstractmethod
    def member(self, branch: str | Branch) -> Member:
        """Return a branch as a batch takes it."""

    def batch(self, branches: Iterable[str | Branch]) -> contextlib.AbstractContextManager[Batch]:
        """Continue several branches together: `with session.batch(["a", "b"]) as batch` (see `Batch`).

        Raises:
            NotFoundError: The session has no such branch.
            InvalidInputError: A branch is named twice, or none is.
        """
        return Batch(branches, self.member).running()

    def append(self, content: str | Iterable[int], *, branch: str | None = None, **model_inputs: object) -> None:
        """Add text or token ids at the end of a branch, with what the model takes for them (see `Branch.append`)."""
        self.chosen(branch).append(content, **model_inputs)

    def forward(self, tokens: Iterable[int] = (), *, branch: str | None = None) -> Tensor:
        """Feed tokens; return the logits `[T, V]` of each (see `Branch.forward`)."""
        return self.chosen(branch).forward(tokens)

    def generate(self, *, branch: str | None = None, **options: object) -> Generation:
        """Continue a branch with the model's generation (see `Branch.generate`)."""
        return self.chosen(branch).generate(**options)

    def send(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        thinking: str = "keep",
        template_options: Mapping[str, object] | None = None,
        branch: str | None = None,
    ) -> ReuseReport:
        """Put one message, or the whole list, on a branch (see `Branch.send`)."""
        return self.chosen(branch).send(messages, tools=tools, thinking=thinking, template_options=template_options)

    def chat(
        self,
        messages: Messages | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        thinking: str = "keep",
        template_options: Mapping[str, object] | None = None,
        branch: str | None = None,
        **options: object,
    ) -> Reply:
        """Put messages on a branch and let the model answer (see `Branch.chat`)."""
        return self.chosen(branch).chat(
            messages, tools=tools, thinking=thinking, template_options=template_options, **options
        )

    def checkpoint(
        self, message: str = "", *, extras: Mapping[str, object] | None = None, branch: str | None = None
    ) -> Checkpoint:
        """Make an immutable, durable point of a branch (see `Branch.checkpoint`)."""
        return self.chosen(branch).checkpoint(message, extras=extras)

    def rewind(
        self, to: Checkpoint | str | None = None, *, tokens: int | None = None, branch: str | None = None
    ) -> None:
        """Move a branch back (see `Branch.rewind`)."""
        self.chosen(branch).rewind(to, tokens=tokens)

    def edit(
        self,
        name: str,
        start: int,
        end: int,
        replacement: str | Iterable[int] | None = None,
        *,
        mode: str = "splice",
        branch: str | None = None,
    ) -> Branch:
        """Make a branch with other tokens in the place of some (see `Branch.edit`)."""
        return self.chosen(branch).edit(name, start, end, replacement, mode=mode)

    def truncate(self, name: str, *, keep_last: int, sinks: int = 4, branch: str | None = None) -> Branch:
        """Make a branch of the first and the last tokens (see `Branch.truncate`)."""
        return self.chosen(branch).truncate(name, keep_last=keep_last, sinks=sinks)

    def compact(
        self, name: str, budget: int, *, strategy: str = "sink_window", sinks: int = 4, branch: str | None = None
    ) -> Branch:
        """Make a branch of at most `budget` tokens (see `Branch.compact`)."""
        return self.chosen(branch).compact(name, budget, strategy=strategy, sinks=sinks)

    def explain(self, content: Content, *, branch: str | None = None) -> Explanation:
        """Say what a whole prompt would reuse, and why no more (see `Branch.explain`)."""
        return self.chosen(branch).explain(content)

    def cache(self, *, branch: str | None = None) -> contextlib.AbstractContextManager[object]:
        """Give a transformers `Cache` at a branch's tip (see `Branch.cache`)."""
        return self.chosen(branch).cache()
