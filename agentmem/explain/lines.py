"""The stored tokens of a session as lines from the root, and how far a prompt follows each of them.

Imports neither torch nor networkx. Reading costs what the prompt and the stored tokens have in common, not what is
stored.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from agentmem.explain.difference import common_prefix
from agentmem.ids import CheckpointId
from agentmem.marks import Marks
from agentmem.tree.checkpoint import TOKEN_NBYTES, BranchRecord, Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Stored tokens from the root to an end: a branch, or a checkpoint that no branch passes through.

    Attributes:
        branch: The branch's name; None for checkpoints that no branch reaches any more.
        tip: The last checkpoint; None before the first.
        tokens: Those after the tip, as u32-le.
        num_pending: Trailing tokens that the model was not fed.
        marks: The marks of the tokens after the tip.
    """

    branch: str | None
    tip: CheckpointId | None
    tokens: bytes = b""
    num_pending: int = 0
    marks: Marks = ()


class Lines:
    """What is stored of one session.

    Attributes:
        session: The session's name.
        block_size: Tokens per block that it was made with.
        lines: Its lines, the most likely match first.
    """

    def __init__(
        self, session: str, block_size: int, checkpoints: Iterable[Checkpoint], branches: Iterable[Line]
    ) -> None:
        """Take over the checkpoints and branches; lines whose beginning is damaged are left out.

        Args:
            session: The session's name.
            block_size: Tokens per block that it was made with.
            checkpoints: In any order.
            branches: The most likely match first.
        """
        self.session = session
        self.block_size = block_size
        self._checkpoints = {checkpoint.checkpoint_id: checkpoint for checkpoint in checkpoints}
        self._in_order = self._from_the_roots()
        named = [line for line in branches if line.tip is None or line.tip in self._in_order]
        self.lines = [*named, *self._unnamed(named)]

    def reached(self, prompt: bytes) -> list[int]:
        """Return how many leading tokens the prompt shares with each of `lines`."""
        reached: dict[CheckpointId | None, int] = {None: 0}
        stops: dict[CheckpointId | None, int] = {None: 0}
        for checkpoint in self._in_order.values():
            parent, own = checkpoint.parent_id, checkpoint.tokens
            reached[checkpoint.checkpoint_id] = _further(prompt, reached[parent], stops[parent], own)
            stops[checkpoint.checkpoint_id] = checkpoint.num_tokens
        return [_further(prompt, reached[line.tip], stops[line.tip], line.tokens) for line in self.lines]

    def chain(self, line: Line) -> list[Checkpoint]:
        """Return the checkpoints of a line, from the root."""
        return list(self._lineage(line.tip))[::-1]

    def num_tokens(self, line: Line) -> int:
        """Count the tokens of a line."""
        return self.tip_length(line) + len(line.tokens) // TOKEN_NBYTES

    def tip_length(self, line: Line) -> int:
        """Count the tokens of a line up to its tip."""
        return 0 if line.tip is None else self._checkpoints[line.tip].num_tokens

    def tokens(self, line: Line) -> bytes:
        """Return all tokens of a line, as u32-le."""
        return b"".join((*(checkpoint.tokens for checkpoint in self.chain(line)), line.tokens))

    def marks(self, line: Line) -> Marks:
        """Return the marks of a line."""
        return (*(mark for checkpoint in self.chain(line) for mark in checkpoint.marks), *line.marks)

    def has_end(self, line: Line, position: int) -> bool:
        """Say whether the line ends at `position`, or has a checkpoint there."""
        found = self._last_before(line, position)
        return self.num_tokens(line) == position or (found is not None and found.num_tokens == position)

    def checkpoint_before(self, line: Line, position: int) -> CheckpointId | None:
        """Return the last checkpoint of a line whose tokens all lie before `position`; None without one."""
        found = self._last_before(line, position)
        return None if found is None else found.checkpoint_id

    def checkpoints(self) -> Iterator[Checkpoint]:
        """Yield every checkpoint whose beginning is sound, parents first."""
        yield from self._in_order.values()

    def _from_the_roots(self) -> dict[CheckpointId, Checkpoint]:
        children: dict[CheckpointId | None, list[Checkpoint]] = defaultdict(list)
        for checkpoint in self._checkpoints.values():
            children[checkpoint.parent_id].append(checkpoint)
        ordered: dict[CheckpointId, Checkpoint] = {}
        todo = children[None]
        while todo:
            ordered.update((checkpoint.checkpoint_id, checkpoint) for checkpoint in todo)
            todo = [child for checkpoint in todo for child in children[checkpoint.checkpoint_id]]
        return ordered

    def _unnamed(self, named: Sequence[Line]) -> list[Line]:
        """Return a line for each checkpoint that nothing continues, the newest first."""
        continued = {checkpoint.parent_id for checkpoint in self._in_order.values()} | {line.tip for line in named}
        ends = [checkpoint for checkpoint in self._in_order.values() if checkpoint.checkpoint_id not in continued]
        ends.sort(key=lambda checkpoint: checkpoint.created_s, reverse=True)
        return [Line(branch=None, tip=each.checkpoint_id, num_pending=each.num_pending) for each in ends]

    def _last_before(self, line: Line, position: int) -> Checkpoint | None:
        return next((each for each in self._lineage(line.tip) if each.num_tokens <= position), None)

    def _lineage(self, tip: CheckpointId | None) -> Iterator[Checkpoint]:
        while tip is not None:
            checkpoint = self._checkpoints[tip]
            yield checkpoint
            tip = checkpoint.parent_id


def branch_lines(branches: Iterable[tuple[BranchRecord, bytes]], first: Sequence[str | None]) -> list[Line]:
    """Return the lines of stored branches: those called as in `first`, in that order, and then the last changed."""
    rank = {name: index for index, name in reversed(list(enumerate(first)))}
    ordered = sorted(branches, key=lambda each: (rank.get(each[0].name, len(first)), -each[0].updated_s))
    return [
        Line(branch=record.name, tip=record.tip, tokens=tokens, num_pending=record.num_pending, marks=record.marks)
        for record, tokens in ordered
    ]


def _further(prompt: bytes, reached: int, start: int, tokens: bytes) -> int:
    """Return how far the prompt follows `tokens`, which begin at `start`, after the first `reached` tokens."""
    if reached < start:
        return reached
    return start + common_prefix(memoryview(prompt)[start * TOKEN_NBYTES :], memoryview(tokens))
