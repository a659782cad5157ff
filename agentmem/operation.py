"""Collects what one operation on a branch reused, computed and moved, and leaves the report on the branch."""

import time
from types import TracebackType
from typing import Protocol

from agentmem.marks import Marks, num_spliced
from agentmem.reasons import Reason
from agentmem.stats import ReuseReport
from agentmem.tiers.blocks import Loaded
from agentmem.tree.trail import Trail


class Reported(Protocol):
    """What a report is made from, and where it is left."""

    tokens: Trail[int]
    marks: Marks
    num_computed: int
    num_fed: int
    loss: Reason
    lost_stop: int
    last_report: ReuseReport

    def begin_operation(self) -> bool:
        """Begin to note points to go back to; return whether an operation was running already."""
        ...

    def go_back(self) -> None:
        """Go back to where the branch was whole last."""
        ...

    def end_operation(self, *, is_inner: bool) -> None:
        """Stop noting points, unless the operation was a part of another."""
        ...

    def give_up(self, num_tokens: int) -> None:
        """Take off all but the first `num_tokens` tokens; what was computed of the others is kept in the store."""
        ...

    @property
    def num_pending(self) -> int:
        """Tokens that the model was not fed yet."""
        ...


class Operation:
    """Collects what one operation did and leaves the report on the branch, also when it fails.

    When it fails, the branch goes back to where it was whole last: to the end of the last pass, or of the load.
    """

    def __init__(self, branch: Reported, operation: str, *, is_undone: bool = False) -> None:
        """Watch one operation; with `is_undone`, tokens that it added are taken off again when it fails."""
        self._branch = branch
        self._operation = operation
        self._is_undone = is_undone
        self._loads: list[Loaded] = []

    def __enter__(self) -> "Operation":
        self._started = time.perf_counter()
        self._num_fed = self._branch.num_fed
        self._num_tokens = len(self._branch.tokens)
        self._is_inner = self._branch.begin_operation()
        return self

    def forget_loads(self) -> None:
        """Begin again: what was loaded so far was of no use."""
        self._loads.clear()

    def note_load(self, loaded: Loaded) -> None:
        """Add what a load brought."""
        self._loads.append(loaded)

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        branch = self._branch
        if kind is not None:
            branch.go_back()
            if self._is_undone:
                branch.give_up(self._num_tokens)
        try:
            self._report()
        finally:
            branch.end_operation(is_inner=self._is_inner)

    def _report(self) -> None:
        branch = self._branch
        from_tier: dict[str, int] = {}
        for loaded in self._loads:
            for tier, num_tokens in loaded.from_tier.items():
                from_tier[tier] = from_tier.get(tier, 0) + num_tokens
        num_reused = sum(from_tier.values())
        is_lost = branch.loss is not Reason.COMPLETE
        branch.last_report = ReuseReport(
            operation=self._operation,
            num_tokens=len(branch.tokens),
            num_reused=num_reused,
            num_computed=branch.num_fed - self._num_fed,
            num_pending=branch.num_pending,
            from_tier=from_tier,
            moved_nbytes=sum(loaded.nbytes for loaded in self._loads),
            first_difference=num_reused if is_lost else None,
            num_equivalent=sum(loaded.num_equivalent for loaded in self._loads),
            num_approximate=num_spliced(branch.marks, branch.num_computed),
            reason=branch.loss,
            choice=next((loaded.choice for loaded in self._loads if loaded.choice is not None), None),
            elapsed_s=time.perf_counter() - self._started,
        )
        if is_lost and branch.num_computed >= branch.lost_stop:
            branch.loss = Reason.COMPLETE
