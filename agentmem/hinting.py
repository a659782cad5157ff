"""The verbs by which an agent says what it will need: hints, tool calls, prefetches. None of them changes an answer."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

from agentmem.checkpoints import BranchEntry
from agentmem.prefetching import Prefetch
from agentmem.tiers.hints import Hints

Key = tuple[str, str]
"""Session and branch."""


class Hinting(ABC):
    """What a session can be told of the time to come."""

    _hints: Hints[Key]

    @property
    @abstractmethod
    def name(self) -> str:
        """The session's name."""

    @abstractmethod
    def entry_of(self, branch: str | None) -> BranchEntry:
        """Return what is known of a branch; of the active one for None."""

    @abstractmethod
    def held(self) -> contextlib.AbstractContextManager[None]:
        """Keep other threads out, between operations."""

    def hint(
        self, *, steps: int | None = None, at: float | None = None, never: bool = False, branch: str | None = None
    ) -> None:
        """Say when a branch is needed next: who is needed last leaves the device first. The last word counts.

        Args:
            steps: After so many turns of other branches.
            at: At this time, seconds since 1970.
            never: Not any more.
            branch: Which; by default the active one.

        Raises:
            InvalidInputError: Not exactly one of the three was said, or it cannot be.
            NotFoundError: The session has no such branch.
        """
        self._hints.hint((self.name, self.entry_of(branch).name), steps=steps, at_s=at, never=never)

    @contextlib.contextmanager
    def tool_call(self, tool: str, *, expect: float | None = None, branch: str | None = None) -> Iterator[None]:
        """Say that a branch waits for a tool, for the time of a `with` block: it stays near for as long as that takes.

        How long calls of each tool take is learned. What waits longer than that may leave, and is expected back.

        Args:
            tool: The tool's name.
            expect: Seconds that this call takes; by default what its calls took before.
            branch: Who waits; by default the active branch.

        Raises:
            InvalidInputError: `expect` is no time.
            NotFoundError: The session has no such branch.
        """
        key = (self.name, self.entry_of(branch).name)
        self._hints.start_call(key, tool, expect_s=expect)
        try:
            yield
        finally:
            self._hints.end_call(key)

    def prefetch(self, branch: str | None = None) -> Prefetch:
        """Begin to bring a branch's KV from the lower tiers and the disk to host memory, in the background.

        It may be cancelled at any time, and costs the model nothing but bandwidth.

        Raises:
            NotFoundError: The session has no such branch.
        """
        with self.held():
            state = self.entry_of(branch).state
            blocks, wanted = state.runtime.blocks, state.saved_blocks()
        return Prefetch(lambda is_over: blocks.bring_near(wanted, is_over))
