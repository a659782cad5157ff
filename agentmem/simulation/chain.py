"""A branch of a made-up session: a number of tokens, and the numbers of the blocks that they fill."""

from collections.abc import Iterator, Sequence

from agentmem.simulation.trace import Announcement, Request


class Chain:
    """Tokens that only become more, and the full blocks of them."""

    def __init__(
        self, numbers: Iterator[int], block_size: int, *, blocks: Sequence[int] = (), num_tokens: int = 0
    ) -> None:
        """Start with what is given; `numbers` gives each new block its number."""
        self._numbers = numbers
        self._block_size = block_size
        self._blocks = list(blocks)
        self.num_tokens = num_tokens

    def grow(self, num_tokens: int) -> None:
        """Append so many tokens."""
        self.num_tokens += num_tokens
        while len(self._blocks) < self.num_tokens // self._block_size:
            self._blocks.append(next(self._numbers))

    def fork(self) -> "Chain":
        """Return a chain that begins with all that this one has now.

        An unfinished block is filled by each of them on its own, and becomes another block in each.
        """
        return Chain(self._numbers, self._block_size, blocks=self._blocks, num_tokens=self.num_tokens)

    def turn(
        self,
        branch: str,
        time_s: float,
        num_output: int,
        *,
        tool: str | None = None,
        announced: tuple[Announcement, ...] = (),
    ) -> Request:
        """Return the request that reads all tokens as its prompt and appends what it generates."""
        num_input, num_prompt = self.num_tokens, len(self._blocks)
        self.grow(num_output)
        return Request(
            time_s=time_s,
            branch=branch,
            blocks=tuple(self._blocks),
            num_prompt=num_prompt,
            num_input=num_input,
            num_output=num_output,
            tool=tool,
            announced=announced,
        )
