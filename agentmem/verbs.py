"""The verbs of a session that act on one branch: the active one, or `branch=`.

Each hands the work to `Branch`; nothing is decided here.
"""

import contextlib
from collections.abc import Iterable, Mapping

from torch import Tensor

from agentmem.branch import Branch, Generation
from agentmem.tree.checkpoint import Checkpoint


class Verbs:
    """What a session does with one of its branches."""

    def chosen(self, name: str | None) -> Branch:
        """Return the branch called `name`; the active one for None."""
        raise NotImplementedError

    def append(self, content: str | Iterable[int], *, branch: str | None = None, **model_inputs: object) -> None:
        """Add text or token ids at the end of a branch, with what the model takes for them (see `Branch.append`)."""
        self.chosen(branch).append(content, **model_inputs)

    def forward(self, tokens: Iterable[int] = (), *, branch: str | None = None) -> Tensor:
        """Feed tokens; return the logits `[T, V]` of each (see `Branch.forward`)."""
        return self.chosen(branch).forward(tokens)

    def generate(self, *, branch: str | None = None, **options: object) -> Generation:
        """Continue a branch with the model's generation (see `Branch.generate`)."""
        return self.chosen(branch).generate(**options)

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

    def cache(self, *, branch: str | None = None) -> contextlib.AbstractContextManager[object]:
        """Give a transformers `Cache` at a branch's tip (see `Branch.cache`)."""
        return self.chosen(branch).cache()
