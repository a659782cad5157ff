"""One cache object's view of a branch: says where the next token goes, and when it has arrived.

Knows nothing of frameworks. While a forward pass runs, the branch does not change; it advances at `commit`.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from agentmem.errors import InvalidInputError, StaleCacheError
from agentmem.kv.spec import KVSpec
from agentmem.tiers.device import Workspace
from agentmem.tiers.runs import Cursor


class FedBranch(Protocol):
    """What a feed needs of its branch."""

    name: str
    cursor: Cursor
    num_computed: int
    num_rewinds: int

    @property
    def spec(self) -> KVSpec:
        """Geometry of the KV."""
        ...

    @property
    def workspace(self) -> Workspace:
        """Where the branch's KV is while the model runs."""
        ...

    @property
    def pending(self) -> list[int]:
        """Tokens that the model was not fed yet."""
        ...

    def count_fed(self, num_tokens: int) -> None:
        """Note that the model was fed tokens."""
        ...

    def fed(self, tokens: Sequence[int]) -> None:
        """Note that the model was fed `tokens` and their KV is at the cursor's end."""
        ...

    def unfeed(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        ...


class BranchFeed:
    """A `Feed` over a branch, good until the branch moves by other hands.

    With `is_again` the first pass feeds the branch's last token once more, for its logits: its KV is put back
    afterwards, so that stored bytes never change.
    """

    def __init__(self, branch: FedBranch, *, is_again: bool = False) -> None:
        """Stand where the branch stands; `is_again` stands one token before."""
        self._branch = branch
        self._is_again = is_again
        self._is_open = True
        self._expected = branch.num_computed
        self._num_rewinds = branch.num_rewinds
        self._tokens: list[int] = []
        self._saved: list[Tensor] = []

    @property
    def spec(self) -> KVSpec:
        """Geometry of the KV."""
        return self._branch.spec

    @property
    def position(self) -> int:
        """Tokens that the model sees as cached."""
        return self._expected - 1 if self._is_again else self._expected

    def begin(self, tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Announce a forward pass (see `agentmem.adapter.Feed.begin`)."""
        self._check(tokens)
        branch, workspace = self._branch, self._branch.workspace
        workspace.begin(branch.cursor, len(tokens))
        if self._is_again:
            saved = [slot.clone() for slot in workspace.slots(self.position, self.position + 1)]
            workspace.lock.acquire()  # no other thread may save the slot while it is overwritten
            self._saved = saved
        self._tokens = list(tokens)
        return workspace.layers

    def commit(self) -> None:
        """Make the announced tokens part of the branch."""
        if self._is_again:
            self.restore()
            self._branch.count_fed(1)
            return
        branch, num_tokens = self._branch, len(self._tokens)
        branch.workspace.commit(branch.cursor, num_tokens)
        branch.fed(self._tokens)
        self._expected += num_tokens

    def crop(self, num_tokens: int) -> None:
        """Take the last tokens back, as deferred stop checks and speculative loops do."""
        self._check_current()
        if num_tokens > self._expected:
            raise InvalidInputError(
                f"branch {self._branch.name!r} stands at {self._expected:,} tokens; {num_tokens:,} cannot be taken back"
            )
        if num_tokens:
            self._branch.unfeed(num_tokens)
            self._expected, self._num_rewinds = self._branch.num_computed, self._branch.num_rewinds

    def restore(self) -> None:
        """Put back the KV of a token that was fed again, after its pass or in its stead."""
        if self._is_again and self._saved:
            slots = self._branch.workspace.slots(self.position, self.position + 1)
            for saved, slot in zip(self._saved, slots, strict=True):
                slot.copy_(saved)
            self._is_again = False
            self._saved = []
            self._branch.workspace.lock.release()

    def close(self) -> None:
        """Refuse any further use."""
        self.restore()
        self._is_open = False

    def _check_current(self) -> None:
        name, computed = self._branch.name, self._branch.num_computed
        if not self._is_open:
            raise StaleCacheError(f"this cache of branch {name!r} was given back; take a new one with branch.cache()")
        if computed != self._expected or self._branch.num_rewinds != self._num_rewinds:
            raise StaleCacheError(
                f"this cache stands at {self._expected:,} tokens, but branch {name!r} has moved on to {computed:,}; "
                f"take a new one with branch.cache()"
            )

    def _check(self, tokens: Sequence[int]) -> None:
        self._check_current()
        name, computed = self._branch.name, self._branch.num_computed
        if not tokens:
            raise InvalidInputError(f"branch {name!r}: a forward pass needs at least one token")
        pending = self._branch.pending
        num_known = min(len(pending), len(tokens))
        if not self._is_again and list(tokens[:num_known]) != pending[:num_known]:
            raise InvalidInputError(
                f"branch {name!r} has pending tokens that start with {pending[:8]}, but the model was fed "
                f"{list(tokens[:8])} at position {computed:,}; feed the pending tokens first, or rewind the branch"
            )
