"""One cache object's view of a branch: says where the next token goes, and when it has arrived.

Knows nothing of frameworks. While a forward pass runs, the branch does not change; it advances at `commit`.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from agentmem.adapter import Pass
from agentmem.errors import InvalidInputError, StaleCacheError
from agentmem.kv.spec import KVSpec
from agentmem.marks import Mark, Marks
from agentmem.tiers.device import Workspace
from agentmem.tiers.layerstream import LayerStream
from agentmem.tiers.runs import Cursor, Storage
from agentmem.tiers.states import LayerState
from agentmem.tree.trail import Trail


class FedBranch(Protocol):
    """What a feed needs of its branch."""

    name: str
    tokens: Trail[int]
    marks: Marks
    regime: bytes
    cursor: Cursor
    num_kv: int
    num_computed: int
    num_rewinds: int
    live: LayerState | None
    root: LayerState | None
    stream: LayerStream | None

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

    def inputs(self, mark: Mark) -> dict[str, object]:
        """Return the model inputs behind a mark."""
        ...

    def tensors(self, state: LayerState) -> list[Tensor]:
        """Return a layer state's tensors on the device; nobody may write to them."""
        ...

    def keep_root(self, root: Sequence[Tensor]) -> None:
        """Keep the KV of the encoder's output."""
        ...

    def grow_to(self, num_tokens: int) -> None:
        """Make ready for a pass that ends at `num_tokens` tokens; may feed the model the tokens before it again."""
        ...

    def count_fed(self, num_tokens: int) -> None:
        """Note that the model was fed tokens."""
        ...

    def claim_state(self) -> Storage | None:
        """Count the layer states that a pass is about to leave, before they are allocated."""
        ...

    def hold(self, num_tokens: int, states: Sequence[Tensor], storage: Storage | None) -> LayerState | None:
        """Take over the layer states that a pass left, before anything of the branch changes."""
        ...

    def fed(self, tokens: Sequence[int], state: LayerState | None) -> None:
        """Note that the model was fed `tokens`, that their KV is at the cursor's end, and what `state` it left."""
        ...

    def unfeed(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        ...

    def settle_stream(self) -> None:
        """Wait until KV that is on its way is there, and verified."""
        ...

    def go_back(self) -> None:
        """Go back to where the branch was whole last."""
        ...


class BranchFeed:
    """A `Feed` over a branch, good until the branch moves by other hands.

    With `is_again` the first pass feeds the branch's last token once more, for its logits. Its KV stays as it is.
    """

    def __init__(self, branch: FedBranch, *, is_again: bool = False) -> None:
        """Stand where the branch stands; `is_again` stands one token before."""
        self._branch = branch
        self._is_again = is_again
        self._is_open = True
        self._expected = branch.num_computed
        self._num_rewinds = branch.num_rewinds
        self._tokens: list[int] = []
        self._num_new = 0
        self._is_passing = False
        self._room: Storage | None = None

    @property
    def spec(self) -> KVSpec:
        """Geometry of the KV."""
        return self._branch.spec

    @property
    def position(self) -> int:
        """Tokens that the model sees as cached."""
        return self._expected - 1 if self._is_again else self._expected

    @property
    def marks(self) -> Marks:
        """What the branch's KV depends on beside its tokens."""
        return self._branch.marks

    @property
    def regime(self) -> bytes:
        """The rotary regime that the branch's KV is in."""
        return self._branch.regime

    def tokens(self, stop: int) -> list[int]:
        """Return the branch's first `stop` token ids."""
        return self._branch.tokens.slice(0, stop)

    def inputs(self, mark: Mark) -> dict[str, object]:
        """Return the model inputs behind a mark (see `agentmem.adapter.Feed.inputs`)."""
        return self._branch.inputs(mark)

    def begin(self, tokens: Sequence[int]) -> Pass:
        """Announce a forward pass (see `agentmem.adapter.Feed.begin`)."""
        branch, workspace = self._branch, self._branch.workspace
        if self._is_passing:  # the last pass was interrupted, perhaps in the middle of its commit
            branch.go_back()
            self._num_rewinds = branch.num_rewinds
        self._check(tokens)
        self._is_passing = True
        branch.grow_to(self.position + len(tokens))
        num_kept = min(max(branch.num_kv - self.position, 0), len(tokens))
        self._num_new = len(tokens) - num_kept
        workspace.begin(branch.cursor, self._num_new)
        if branch.stream is not None:
            branch.stream.check_place(workspace.storage)
        self._tokens = list(tokens)
        self._room = None  # of a pass that was interrupted
        self._room = branch.claim_state()
        return Pass(
            layers=workspace.layers,
            num_kept=num_kept,
            states=self._states(),
            root=None if branch.root is None else branch.tensors(branch.root),
            wait=None if branch.stream is None else branch.stream.wait,
        )

    def keep_root(self, root: list[Tensor]) -> None:
        """Keep the KV of the encoder's output (see `agentmem.adapter.Feed.keep_root`)."""
        self._branch.keep_root(root)

    def commit(self, states: Sequence[Tensor] = ()) -> None:
        """Make the announced tokens part of the branch."""
        room, self._room = self._room, None
        if self._is_again:
            self._is_again = self._is_passing = False
            self._branch.count_fed(1)
            return
        branch = self._branch
        branch.settle_stream()  # nothing of the pass is kept before all that it has read was verified
        state = branch.hold(len(self._tokens), states, room)
        if self._num_new:
            branch.workspace.commit(branch.cursor, self._num_new)
        branch.fed(self._tokens, state)
        self._expected, self._is_passing = branch.num_computed, False

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

    def close(self) -> None:
        """Refuse any further use."""
        self._is_open, self._room = False, None

    def _states(self) -> list[Tensor] | None:
        """Return copies of the layer states that the pass goes on from: the model updates them in place."""
        live = self._branch.live
        return None if live is None else [tensor.clone() for tensor in self._branch.tensors(live)]

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
