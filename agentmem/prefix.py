"""What a branch has of its tokens: their KV and layer states, where they are, and how far they reach.

Bookkeeping only: nothing here runs the model, and nothing moves KV.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Self

from torch import Tensor

from agentmem.errors import InvalidInputError
from agentmem.ids import BlockHash
from agentmem.kv.hashing import chain_hash, root_state_hash, state_hash
from agentmem.kv.spec import KVSpec
from agentmem.marks import (
    Mark,
    MarkKind,
    Marks,
    by_start,
    lossy_marks,
    media_start,
    pack_marks,
    truncate_marks,
    without_splices,
)
from agentmem.reasons import Reason
from agentmem.revertible import Revertible
from agentmem.runtime import Runtime
from agentmem.stats import ReuseReport
from agentmem.tiers.blocks import SealedBlock
from agentmem.tiers.device import Workspace
from agentmem.tiers.layerstream import LayerStream
from agentmem.tiers.runs import Cursor, Storage
from agentmem.tiers.states import LayerState
from agentmem.tree.trail import Trail

_OF_KV = ("blocks", "tail", "num_kv", "num_computed", "points", "live", "before", "root", "regime", "cursor")
"""The fields that say what there is of the KV."""


class Prefix(Revertible):
    """Tokens of a branch, and what there is of their KV.

    The model can go on after the first `num_computed` tokens. KV may reach further, up to `num_kv`: a layer state is
    kept at some positions only, and media cannot be fed in parts. KV is on the device up to `cursor.length`, beyond it
    in `blocks` and `tail`.

    Attributes:
        name: For messages.
        tokens: All token ids.
        marks: What KV depends on beside them.
        blocks: The full blocks, in order.
        tail: A saved partial block from the end of `blocks` to `num_kv` or beyond; None when there is none.
        num_kv: Leading tokens whose KV exists somewhere.
        num_computed: Leading tokens after which the model can go on.
        points: Layer states that are kept, by position.
        live: The layer state after `num_computed` tokens; None for a model without, and before the first token.
        before: The layer state one pass earlier, so that the last pass can be taken back.
        borders: Positions, still to be computed, after which the layer state is to be kept.
        root: KV of the encoder's output; None for a model without an encoder, and before it has run.
        stream: What loads KV of the branch layer by layer while the model reads it; None when nothing is under way.
        regime: The rotary regime that the KV is in; b"" for models that have one only.
        foreseen: Tokens that the regime was chosen for, when the running operation began.
        cursor: Where the KV is on the device.
        loss: Why KV that once existed is gone; COMPLETE when none is, or when it was computed again.
        lost_stop: Position up to which KV existed when it was lost.
        num_fed: Tokens the model was fed through this branch.
        num_rewinds: How often tokens were taken off; while it stays, tokens that were there are there still.
        last_report: What the last operation reused and computed.
    """

    def __init__(self, runtime: Runtime, workspace: Workspace, name: str) -> None:
        """Start without tokens."""
        super().__init__()
        self.name = name
        self.tokens: Trail[int] = Trail(array("I"))
        self.marks: Marks = ()
        self.blocks: Trail[SealedBlock] = Trail([])
        self.tail: SealedBlock | None = None
        self.num_kv = 0
        self.num_computed = 0
        self.points: tuple[LayerState, ...] = ()
        self.live: LayerState | None = None
        self.before: LayerState | None = None
        self.borders: tuple[int, ...] = ()
        self.root: LayerState | None = None
        self.stream: LayerStream | None = None
        self.regime = runtime.adapter.regime(0)
        self.foreseen = 0
        self.cursor = Cursor(None, 0)
        self.loss = Reason.COMPLETE
        self.lost_stop = 0
        self.num_fed = 0
        self.num_rewinds = 0
        self.last_report = ReuseReport(operation="create", num_tokens=0)
        self._runtime = runtime
        self._workspace = workspace

    def fork(self, name: str) -> Self:
        """Return an independent prefix of the same tokens and KV. Copies neither."""
        other = object.__new__(type(self))
        other.__dict__.update(self.snapshot())
        other.name = name
        other.num_fed = other.num_rewinds = 0
        other.last_report = ReuseReport(operation="fork", num_tokens=len(self.tokens))
        return other

    @property
    def spec(self) -> KVSpec:
        """Geometry of the KV."""
        return self._runtime.adapter.spec

    @property
    def runtime(self) -> Runtime:
        """What all branches of the store share."""
        return self._runtime

    @property
    def workspace(self) -> Workspace:
        """Where the KV is while the model runs."""
        return self._workspace

    @property
    def pending(self) -> list[int]:
        """Tokens that the model was not fed yet."""
        return self.tokens.slice(self.num_computed)

    @property
    def num_pending(self) -> int:
        """Tokens that the model was not fed yet."""
        return len(self.tokens) - self.num_computed

    @property
    def is_hot(self) -> bool:
        """Whether all KV and the layer state of the branch are on the device."""
        is_live = not self.spec.states or not self.num_computed or self._tensors_of(self.live) is not None
        return self.cursor.length >= self.num_kv and is_live

    # -- growing

    def extend(self, tokens: Iterable[int], marks: Marks = ()) -> None:
        """Add tokens at the end, with their marks."""
        self.tokens.extend(tokens)
        self.marks = by_start((*self.marks, *marks)) if marks else self.marks

    def add_border(self, position: int) -> None:
        """Ask for the layer state after `position` tokens to be kept once it is computed."""
        if self.spec.states and position == self.num_computed:
            self.keep_state()
        elif self.spec.states and position > self.num_computed and position not in self.borders:
            self.borders = tuple(sorted((*self.borders, position)))

    def add_message_border(self) -> None:
        """Ask for the layer state here, where something is appended, unless one is kept less than a block before."""
        last = max([*self.borders, *(point.position for point in self.points)], default=0)
        if len(self.tokens) - last >= self.spec.block_size:
            self.add_border(len(self.tokens))

    def claim_state(self) -> Storage | None:
        """Count the layer states that a pass is about to leave, before they are allocated; None without any.

        Raises:
            CapacityError: They do not fit the device budget.
        """
        return self._runtime.states.claim()

    def hold(self, num_tokens: int, states: Sequence[Tensor], storage: Storage | None = None) -> LayerState | None:
        """Take over the layer states that a pass over `num_tokens` tokens left; None for a model without.

        Changes nothing of the branch, so that a pass whose states find no room can still be called off.

        Raises:
            CapacityError: They do not fit the device budget.
        """
        if not self.spec.states:
            return None
        return self._runtime.states.hold(self.num_computed + num_tokens, states, storage)

    def fed(self, tokens: Sequence[int], state: LayerState | None) -> None:
        """Note that the model was fed `tokens`, that their KV is at the cursor's end, and what `state` it left."""
        self.tokens.extend(tokens[self.num_pending :])
        self.num_computed += len(tokens)
        if self.num_computed > self.num_kv:
            self.marks = without_splices(self.marks, self.num_kv)  # what the model has just written was not moved
            self.num_kv, self.tail = self.num_computed, None
        self.seal()
        if state is not None:
            self.before, self.live = self.live, state
            if self.num_computed in self.borders:
                self.keep_state()
            self.borders = tuple(position for position in self.borders if position > self.num_computed)
        self.count_fed(len(tokens))
        self.note_point()

    def take_moved(self, tokens: Sequence[int], marks: Marks) -> None:
        """Note that KV of `tokens` was moved to the cursor's end from elsewhere; nothing is pending before them."""
        self.extend(tokens, marks)
        self.num_kv = self.num_computed = len(self.tokens)
        self.tail = None
        self.seal()
        self.note_point()

    def count_fed(self, num_tokens: int) -> None:
        """Note that the model was fed tokens through this branch."""
        self.num_fed += num_tokens
        self._runtime.counters.add("tokens_fed", num_tokens)

    def keep_state(self) -> None:
        """Keep the layer state that the branch stands at, so that the model can go on from here later."""
        state = self.live
        if state is not None and all(point.position != state.position for point in self.points):
            if state.name is None:
                self._runtime.states.name(state, self.state_name(state.position))
            self.points = (*(point for point in self.points if point.position < state.position), state)

    def tensors(self, state: LayerState) -> list[Tensor]:
        """Return a layer state's tensors on the device; nobody may write to them."""
        return self._runtime.states.load(state)[0]

    def keep_root(self, root: Sequence[Tensor]) -> None:
        """Keep the KV of the encoder's output for all that share its inputs."""
        self.root = self._runtime.states.hold(0, root)
        self._runtime.counters.add("encoder_runs")
        self._runtime.states.name(self.root, self.root_name())

    def seal(self) -> None:
        """Name the blocks that have become full."""
        block_size = self.spec.block_size
        while (len(self.blocks) + 1) * block_size <= self.num_kv:
            start = len(self.blocks) * block_size
            self.blocks.extend([self.seal_block(start, start + block_size)])

    def seal_block(self, start: int, stop: int) -> SealedBlock:
        """Name the tokens [start, stop), which are on the device, and let them be saved."""
        name, is_lossy = self.block_name(start, stop), bool(lossy_marks(self.marks, stop))
        return self._runtime.blocks.seal(self._workspace, self.cursor, start, stop, name, is_parent_lossy=is_lossy)

    # -- names

    def block_name(self, start: int, stop: int, parent: BlockHash | None = None) -> BlockHash:
        """Return the token name of the tokens [start, stop); `start` is a block's border."""
        before = self.parent_name(start) if parent is None else parent
        return chain_hash(before, self.tokens.slice(start, stop), pack_marks(self.marks, start, stop))

    def state_name(self, position: int, parent: BlockHash | None = None) -> BlockHash:
        """Return the name of the layer state after `position` tokens."""
        start = position - position % self.spec.block_size
        before = self.parent_name(start) if parent is None else parent
        return state_hash(before, self.tokens.slice(start, position), pack_marks(self.marks, start, position))

    def root_name(self) -> BlockHash:
        """Return the name of the KV of the encoder's output."""
        return root_state_hash(
            self._runtime.identity.root_of(b""),
            [mark.pack(0, 0) for mark in self.marks if mark.kind is MarkKind.ENCODER],
        )

    def parent_name(self, start: int) -> BlockHash:
        """Return the name of the block that ends at `start`, or of the root."""
        index = start // self.spec.block_size
        return self.blocks[index - 1].block_hash if index else self._runtime.identity.root_of(self.regime)

    # -- cutting

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and what there is of their KV. Moves nothing."""
        self.num_rewinds += num_tokens < len(self.tokens)
        self.tokens.truncate(num_tokens)
        self.marks = truncate_marks(self.marks, num_tokens)
        self.borders = tuple(position for position in self.borders if position <= num_tokens)
        self.truncate_kv(num_tokens)

    def truncate_kv(self, num_tokens: int) -> None:
        """Keep the KV of the first `num_tokens` tokens at most; the other tokens become pending. Moves nothing."""
        if num_tokens < self.num_kv:
            self._cut_blocks(num_tokens)
        if num_tokens < self.num_computed:
            self._step_to(num_tokens)
        self.note_point()

    def step_back(self, position: int) -> None:
        """Let the model go on after `position` tokens at most, from the nearest layer state; KV is kept."""
        self._step_to(position)
        self.note_point()

    def reach(self, position: int) -> int:
        """Return how many tokens, up to `position`, a fork cut there would have computed."""
        return self._restart(min(position, self.num_computed))

    def lack(self, reason: Reason) -> None:
        """Note that the KV of the last tokens is not to be had; what is computed in its stead is exact."""
        self.loss = reason
        self.marks = without_splices(self.marks, self.num_kv)

    def know(self, num_kv: int, states: Sequence[LayerState]) -> None:
        """Note how far the KV that is named in `blocks` and `tail` reaches, and which layer states are stored."""
        self.num_kv = num_kv
        self.root = next((state for state in states if state.position == 0), self.root)
        self.points += tuple(state for state in states if 0 < state.position <= num_kv)
        self.num_computed = self._restart(num_kv)
        self.live = next((state for state in self.points if state.position == self.num_computed), None)
        self.loss = Reason.COMPLETE if self.num_computed == num_kv else Reason.NO_STATE

    def drop_kv(self, reason: Reason) -> None:
        """Forget all KV: every token becomes pending, because of `reason`."""
        if self.num_computed:
            self.loss, self.lost_stop = reason, max(self.lost_stop, self.num_computed)
        self._cut_blocks(0)
        self.points, self.live, self.before, self.num_computed = (), None, None, 0

    def cool(self) -> None:
        """Let the device forget the branch's KV; `blocks`, `tail` and `points` say how to get it back."""
        self.cursor = Cursor(None, 0)
        self.before = None
        self.note_point()
        states = (*self.points, *([self.live] if self.live is not None else []))
        for state in (*states, *([self.root] if self.root is not None else [])):
            self._runtime.states.cool(state)

    def let_go(self) -> None:
        """Let the device forget the branch for good: what was not saved would stay there with the user's handles."""
        self.cool()
        self.live = self._point = None

    def cool_points(self) -> None:
        """Let the device forget the layer states that were saved, but for the one the branch stands at."""
        for point in self.points:
            if point is not self.live:
                self._runtime.states.cool(point)

    # -- sharing

    def adopt(self, other: "Prefix") -> None:
        """Take over what another branch of the same leading tokens has computed, or has on the device."""
        if other.regime == self.regime and other.marks == truncate_marks(self.marks, len(other.tokens)):
            if len(self.tokens) >= other.reach(other.num_computed) > self.num_computed:
                self._take_kv(other)
            self.adopt_cursor(other)
            self.root = self.root or other.root

    def adopt_cursor(self, other: "Prefix") -> None:
        """Take over what another state of the same leading tokens has on the device."""
        length = min(other.cursor.length, self.num_kv)
        is_same = truncate_marks(self.marks, length) == truncate_marks(other.marks, length)
        if length > self.cursor.length and is_same:  # else one of them has KV that came back from a lossy tier
            self.cursor = other.cursor.fork(length)

    # -- inside

    def _take_kv(self, other: "Prefix") -> None:
        taken = other.snapshot()
        self.__dict__.update({name: taken[name] for name in _OF_KV})

    def _cut_blocks(self, num_tokens: int) -> None:
        num_blocks = num_tokens // self.spec.block_size
        self.num_kv = num_tokens
        if len(self.blocks) > num_blocks:
            self.tail = self.blocks[num_blocks] if num_tokens % self.spec.block_size else None
            self.blocks.truncate(num_blocks)
        if self.cursor.length > num_tokens:
            self.cursor = self.cursor.fork(num_tokens)

    def _step_to(self, position: int) -> None:
        """Stand at `position` or, when the model cannot go on there, at the nearest place before where it can."""
        wanted = min(position, self.num_computed)
        found = self._restart(wanted)
        kept = {state.position: state for state in self._states()}
        self.num_computed = found
        self.live = kept.get(found)
        self.before = self.before if self.before is not None and self.before.position < found else None
        self.points = tuple(point for point in self.points if point.position <= found)
        if found < wanted and self.spec.states:
            self.loss, self.lost_stop = Reason.NO_STATE, wanted

    def _restart(self, position: int) -> int:
        """Return the last position up to `position` after which the model can go on."""
        position = media_start(self.marks, position)
        if not self.spec.states:
            return position
        return max((state.position for state in self._states() if state.position <= position), default=0)

    def _states(self) -> list[LayerState]:
        states = (*self.points, self.before, self.live)
        return [state for state in states if state is not None and not state.is_lost]

    def _tensors_of(self, state: LayerState | None) -> list[Tensor] | None:
        return None if state is None else state.tensors

    def media_at(self, position: int) -> Mark | None:
        """Return the media mark that starts at `position` and is not fed yet, or None."""
        return next((mark for mark in self.marks if mark.kind is MarkKind.MEDIA and mark.start == position), None)

    def check_not_empty(self) -> None:
        """Raise InvalidInputError when there is no token."""
        if not len(self.tokens):
            raise InvalidInputError(
                f"branch {self.name!r} has no tokens, so there is nothing to feed; append some first"
            )
