"""A trace: which branch asked for which chain of blocks when, and what it said about its next use.

Knows nothing of tiers. Blocks are numbers: the same number is the same tokens after the same tokens.
"""

import statistics
from dataclasses import dataclass

from agentmem.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Announcement:
    """What is said of a branch's next use: after so many steps, or that there is none.

    Attributes:
        branch: Of which branch.
        steps: Turns of others until then; None for never.
    """

    branch: str
    steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One turn of one branch, as one moment: what it generates is there at once, and then the wait begins.

    Attributes:
        time_s: When it comes, in seconds from the start of the trace.
        branch: Whose turn it is.
        blocks: The whole chain at the end of the turn, the root first.
        num_prompt: How many of them are of the prompt; the turn generates the others.
        num_input: Tokens of the prompt, those of an unfinished last block included.
        num_output: Tokens generated.
        tool: What the branch waits for after the turn; None when it waits for nothing that has a name.
        announced: What is known after the turn about next uses.
    """

    time_s: float
    branch: str
    blocks: tuple[int, ...]
    num_prompt: int
    num_input: int
    num_output: int
    tool: str | None = None
    announced: tuple[Announcement, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their times.

    Attributes:
        requests: All of them.
        block_size: Tokens of a block.
    """

    requests: tuple[Request, ...]
    block_size: int

    def __post_init__(self) -> None:
        """Refuse a trace that is none.

        Raises:
            InvalidInputError: There is no request, or one comes before the one ahead of it.
        """
        times = [request.time_s for request in self.requests]
        if not times or times != sorted(times) or self.block_size < 1:
            raise InvalidInputError(
                f"{len(times)} requests with blocks of {self.block_size} tokens are no trace: give one request or "
                f"more, in the order of their times"
            )

    @property
    def num_blocks(self) -> int:
        """Different blocks."""
        return len({block for request in self.requests for block in request.blocks})

    @property
    def has_hints(self) -> bool:
        """Whether anything is said about next uses."""
        return any(request.tool is not None or request.announced for request in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a trace looks like, in the figures that are published of real ones.

    Attributes:
        num_requests: Turns of all branches.
        num_branches: Branches, sub-agents and forks included.
        median_turns: Turns of the middle one of the branches that take the most turns of their session.
        ratio: Tokens of input for each token of output.
        repeated: Part of the input that an unlimited cache would have, block by block.
        max_input: Tokens of the longest prompt.
        duration_s: From the first request to the last.
    """

    num_requests: int
    num_branches: int
    median_turns: float
    ratio: float
    repeated: float
    max_input: int
    duration_s: float


def shape_of(trace: Trace) -> Shape:
    """Return what `trace` looks like. A branch called "a/b" is of the session "a"."""
    turns: dict[str, dict[str, int]] = {}
    seen: set[int] = set()
    num_repeated = 0
    for request in trace.requests:
        branches = turns.setdefault(request.branch.partition("/")[0], {})
        branches[request.branch] = branches.get(request.branch, 0) + 1
        num_repeated += sum(block in seen for block in request.blocks[: request.num_prompt])
        seen.update(request.blocks)
    num_input = sum(request.num_input for request in trace.requests)
    return Shape(
        num_requests=len(trace.requests),
        num_branches=sum(map(len, turns.values())),
        median_turns=statistics.median(max(branches.values()) for branches in turns.values()),
        ratio=num_input / max(1, sum(request.num_output for request in trace.requests)),
        repeated=num_repeated * trace.block_size / max(1, num_input),
        max_input=max(request.num_input for request in trace.requests),
        duration_s=trace.requests[-1].time_s - trace.requests[0].time_s,
    )
