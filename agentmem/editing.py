"""The verbs of a branch that make another one with some tokens left out: `edit`, `truncate` and `compact`.

Each hands the work to an `Edit`.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from agentmem.adapter import Adapter
from agentmem.checkpoints import BranchEntry
from agentmem.edits import Cut, Edit, budget_cut, check_mode, range_cut, window_cut
from agentmem.ledger import Ledger

BranchT = TypeVar("BranchT", covariant=True)


class EditOwner(Protocol[BranchT]):
    """What an edit needs of its session."""

    ledger: Ledger
    adapter: Adapter

    def using(self, entry: BranchEntry) -> contextlib.AbstractContextManager[None]:
        """Keep other threads out and the branch on the device, while an operation runs."""
        ...

    def fork(self, name: str, *, branch: str) -> BranchT:
        """Make a branch where another one stands."""
        ...

    def add(self, name: str, operation: str, make: Callable[[], BranchEntry]) -> BranchT:
        """Enter the branch that `make` returns, unless its name is taken."""
        ...


class Editing(ABC, Generic[BranchT]):
    """A branch that others can be made from, without some of its tokens."""

    _owner: EditOwner[BranchT]
    _entry: BranchEntry

    @abstractmethod
    def _read(self, content: str | Iterable[int], *, is_first: bool | None = None) -> list[int]:
        """Return the ids of a text, or those that were given, if they are in the vocabulary."""

    def edit(
        self,
        name: str,
        start: int,
        end: int,
        replacement: str | Iterable[int] | None = None,
        *,
        mode: str = "splice",
    ) -> BranchT:
        """Make a branch `name` with `replacement` in the place of the tokens [start, end). This one stays as it is.

        Args:
            name: The new branch's name.
            start: The first token to leave out; the KV before it is shared.
            end: The first token to keep again.
            replacement: Text or ids to put there; nothing by default.
            mode: "splice" moves the KV of the tokens from `end` on, in milliseconds: keys are turned to their new
                positions, and the branch is marked approximate from there on, for that KV still knows of what was cut
                out. "exact" computes those tokens again, when they are needed.

        Raises:
            InvalidInputError: The range, the mode or an id is wrong, or the range cuts through one model input.
            UnsupportedModelError: KV would have to be moved, and this model's cannot be; mode="exact" works.
            AlreadyExistsError: The name is taken.
        """
        with self._owner.using(self._entry):
            check_mode(mode)
            tokens = () if replacement is None else self._read(replacement, is_first=start == 0)
            cut = range_cut(self._entry.state, start, end, tuple(tokens))
            return self._edited(name, cut, "edit", is_exact=mode == "exact")

    def truncate(self, name: str, *, keep_last: int, sinks: int = 4) -> BranchT:
        """Make a branch `name` of the first `sinks` and the last `keep_last` tokens, whose KV is moved (see `edit`).

        Attention leans on the first tokens of a text: without them (`sinks=0`) a model goes astray (docs/edits.md). A
        branch with no more tokens than that is forked.

        Raises:
            InvalidInputError: A number is out of range.
            UnsupportedModelError: This model's KV cannot be moved.
            AlreadyExistsError: The name is taken.
        """
        with self._owner.using(self._entry):
            return self._edited(name, window_cut(self._entry.state, keep_last, sinks), "truncate", is_exact=False)

    def compact(self, name: str, budget: int, *, strategy: str = "sink_window", sinks: int = 4) -> BranchT:
        """Make a branch `name` of at most `budget` tokens. The only strategy keeps the first and the last (`truncate`).

        Raises:
            InvalidInputError: The strategy is unknown, or the budget is not larger than `sinks`.
            UnsupportedModelError: This model's KV cannot be moved.
            AlreadyExistsError: The name is taken.
        """
        with self._owner.using(self._entry):
            cut = budget_cut(self._entry.state, budget, strategy, sinks)
            return self._edited(name, cut, "compact", is_exact=False)

    def _edited(self, name: str, cut: Cut | None, operation: str, *, is_exact: bool) -> BranchT:
        """Make the branch that a cut gives; a fork when it changes nothing."""
        owner = self._owner
        if cut is None:
            return owner.fork(name, branch=self._entry.name)
        edit = Edit(owner.ledger, owner.adapter, self._entry, cut)
        return owner.add(name, operation, lambda: edit.make(name, operation, is_exact=is_exact))
