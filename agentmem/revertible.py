"""Going back: what a branch was at a moment when all its fields fitted together.

An error, or Ctrl-C, may come between any two of the steps that change a branch. So an operation notes a point whenever
the branch is whole, and whoever fails goes back to the last one, in a single step.
"""

from agentmem.tiers.blocks import SealedBlock
from agentmem.tiers.runs import Cursor
from agentmem.tree.trail import Trail

Snapshot = dict[str, object]
"""The fields of a branch, as they were at some moment."""


class Revertible:
    """Something with tokens, blocks and a place on the device. Other fields are replaced, never changed.

    Attributes:
        tokens: All token ids.
        blocks: The full blocks, in order.
        cursor: Where the KV is on the device.
        num_rewinds: How often tokens were taken off; while it stays, tokens that were there are there still.
    """

    tokens: Trail[int]
    blocks: Trail[SealedBlock]
    cursor: Cursor
    num_rewinds: int

    def __init__(self) -> None:
        """Note no points yet."""
        self._point: Snapshot | None = None

    def snapshot(self) -> Snapshot:
        """Return all that the branch is now. Copies neither tokens nor KV."""
        return {
            **self.__dict__,  # all but the few below is immutable, or shared on purpose
            "tokens": self.tokens.fork(),
            "blocks": self.blocks.fork(),
            "cursor": self.cursor.fork(),
            "_point": None,
        }

    def put_back(self, snapshot: Snapshot) -> None:
        """Be what the branch was when the snapshot was taken, at a stroke; the snapshot is used up."""
        self.__dict__.update({**snapshot, "num_rewinds": self.num_rewinds + 1, "_point": self._point})

    def begin_operation(self) -> bool:
        """Begin to note points to go back to; return whether an operation was running already."""
        is_inner = self._point is not None
        self._point = self.snapshot()
        return is_inner

    def note_point(self) -> None:
        """Note that the branch is whole as it is: an operation that fails goes back to here."""
        if self._point is not None:
            self._point = self.snapshot()

    def go_back(self) -> None:
        """Go back to where the branch was whole last."""
        if self._point is not None:
            self.put_back(self._point)
            self._point = self.snapshot()

    def end_operation(self, *, is_inner: bool) -> None:
        """Stop noting points, unless the operation was a part of another."""
        self._point = self.snapshot() if is_inner else None
