"""History edits: new branches that begin like another one and go on with its later tokens, without some in between.

`exact` computes those later tokens again, when they are needed. `splice` moves the KV that they have: keys are turned
to the new positions, once, from the bytes that the model wrote. What was moved still knows of what was cut out: it is
approximate, and marked so in its identity. The branch that is edited stays as it is.
"""

import dataclasses
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from agentmem.adapter import Adapter, Rotation
from agentmem.checkpoints import BranchEntry
from agentmem.errors import InvalidInputError, NotFoundError
from agentmem.ids import CheckpointId
from agentmem.kv.hashing import hash_fields
from agentmem.ledger import Ledger
from agentmem.marks import Mark, MarkKind, Marks, media_start
from agentmem.operation import Operation
from agentmem.reasons import Reason
from agentmem.state import BranchState
from agentmem.tiers.blocks import Loaded
from agentmem.tree.fields import copy_extras

MODES = ("splice", "exact")
STRATEGIES = ("sink_window",)
"""How `compact` chooses what to keep. sink_window: the first tokens, which attention leans on, and the last ones."""

_SPLICE_TAG = b"agentmem/splice/1"


@dataclass(frozen=True, slots=True)
class Cut:
    """What an edit does: the tokens [start, stop) are left out, `replacement` stands in their place."""

    start: int
    stop: int
    replacement: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a branch's tokens whose KV was written by the model in one place.

    Attributes:
        start: Position of its first token in the branch.
        stop: Position after its last.
        origin: The checkpoint whose KV it is, and the position there of the first token; None: the branch itself.
    """

    start: int
    stop: int
    origin: tuple[CheckpointId, int] | None

    @property
    def first(self) -> int:
        """Position of the first token where the model wrote it."""
        return self.start if self.origin is None else self.origin[1]


def check_mode(mode: str) -> None:
    """Raise InvalidInputError for a mode of `edit` that there is not."""
    if mode not in MODES:
        raise InvalidInputError(f"edit knows no mode {mode!r}; there are {' and '.join(MODES)}")


def range_cut(state: BranchState, start: int, stop: int, replacement: tuple[int, ...]) -> Cut | None:
    """Return the cut that replaces the tokens [start, stop); None when that changes nothing.

    Raises:
        InvalidInputError: The branch has no such tokens, or the cut goes through an image or other medium.
    """
    num_tokens = len(state.tokens)
    if not 0 <= start <= stop <= num_tokens:
        raise InvalidInputError(
            f"branch {state.name!r} has {num_tokens:,} tokens; [{start:,}, {stop:,}) is no range of them"
        )
    for position in (start, stop):
        _check_border(state, position)
    return None if tuple(state.tokens.slice(start, stop)) == replacement else Cut(start, stop, replacement)


def window_cut(state: BranchState, keep_last: int, sinks: int) -> Cut | None:
    """Return the cut that leaves the first `sinks` tokens and the last `keep_last`; None when that is all of them.

    An image or other medium that it would go through is left out whole.

    Raises:
        InvalidInputError: A number is out of range.
    """
    if keep_last < 1 or sinks < 0:
        raise InvalidInputError(
            f"keep_last={keep_last}, sinks={sinks}: keep at least one of the last tokens, and none or more of the first"
        )
    stop = len(state.tokens) - keep_last
    if stop <= sinks:
        return None
    return Cut(media_start(state.marks, sinks), _media_stop(state.marks, stop))


def budget_cut(state: BranchState, budget: int, strategy: str, sinks: int) -> Cut | None:
    """Return the cut that leaves at most `budget` tokens; None when there are no more.

    Raises:
        InvalidInputError: The strategy is unknown, or the budget leaves no room beside the sinks.
    """
    if strategy not in STRATEGIES:
        raise InvalidInputError(f"compact knows no strategy {strategy!r}; there is {', '.join(STRATEGIES)}")
    if not 0 <= sinks < budget:
        raise InvalidInputError(f"a budget of {budget:,} tokens and {sinks:,} sinks: give room for more than the sinks")
    return window_cut(state, budget - sinks, sinks)


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where the KV of a piece is to be had.

    Attributes:
        state: Has it on the device, as far as it is not lost.
        num_on_device: How many of its tokens were there before.
        tier: Where the others came from.
    """

    state: BranchState
    num_on_device: int
    tier: str


class Edit:
    """One edit of one branch."""

    def __init__(self, ledger: Ledger, adapter: Adapter, entry: BranchEntry, cut: Cut) -> None:
        """Get ready to make a new branch from `entry`; changes nothing."""
        self._ledger = ledger
        self._adapter = adapter
        self._entry = entry
        self._cut = cut
        self._shift = cut.start + len(cut.replacement) - cut.stop

    def make(self, name: str, operation: str, *, is_exact: bool) -> BranchEntry:
        """Return the new branch, whose later tokens are pending (`is_exact`) or moved.

        Raises:
            UnsupportedModelError: KV was to be moved, and this model's cannot be.
            CapacityError: The branch does not fit the device budget.
        """
        pieces = [] if is_exact else list(self._pieces())
        rotation = self._adapter.key_rotation() if pieces else None
        if pieces and self._ledger.tip_length(self._entry) < len(self._entry.state.tokens):
            self._ledger.mark(self._entry)  # a name for where the KV comes from
        state = self._kept(name)
        entry = BranchEntry(state, self._tip(), copy_extras(self._entry.extras), time.time())
        with Operation(state, operation) as report:
            state.append(self._cut.replacement, {})
            if rotation is not None:
                self._splice(state, pieces, rotation, report)
            self._append(state, len(self._entry.state.tokens))
        self._ledger.states.note_progress(entry)
        return entry

    def _pieces(self) -> Iterator[Piece]:
        """Yield what is to be moved: the computed tokens after the cut, by where the model wrote their KV.

        For KV that an earlier edit moved that is where it came from, not where it lies: it is turned once in its life,
        however often it moves.
        """
        position, stop = self._cut.stop, self._entry.state.num_computed
        for mark in self._entry.state.marks:
            if mark.origin is not None and mark.stop > position and mark.start < stop:
                if mark.start > position:
                    yield Piece(position, mark.start, None)
                start, position = max(position, mark.start), min(mark.stop, stop)
                yield Piece(start, position, (mark.origin[0], mark.origin[1] + start - mark.start))
        if position < stop:
            yield Piece(position, stop, None)

    def _kept(self, name: str) -> BranchState:
        """Return a state of what stands before the cut."""
        source, cut = self._entry.state, self._cut
        state = source.fork(name)
        state.truncate(cut.start)
        if source.lost_stop > cut.start:
            state.lost_stop = max(source.lost_stop + self._shift, cut.start)
        if state.num_computed >= state.lost_stop:
            state.loss = Reason.COMPLETE
        return state

    def _tip(self) -> CheckpointId | None:
        """Return the last checkpoint of the edited branch before the cut."""
        tree, tip = self._ledger.tree, self._entry.tip
        while tip is not None and tree.get(tip).num_tokens > self._cut.start:
            tip = tree.get(tip).parent_id
        return tip

    def _splice(self, state: BranchState, pieces: list[Piece], rotation: Rotation, report: Operation) -> None:
        """Move the pieces to the state's end, after computing what stands before them."""
        state.enter_regime(len(state.tokens))
        report.note_load(state.restore())
        origins = [self._origin(piece, state, report) for piece in pieces]
        report.note_load(state.reuse_pending(keep=0))
        for piece, origin in zip(pieces, origins, strict=True):
            have = piece.start if origin is None else self._move(state, piece, origin, rotation, report)
            if have < piece.stop:
                lost = Reason.COMPLETE if origin is None else origin.state.loss
                self._append(state, piece.stop)
                state.loss = Reason.MISSING if lost is Reason.COMPLETE else lost
                state.lost_stop = len(state.tokens)

    def _origin(self, piece: Piece, kept: BranchState, report: Operation) -> _Origin | None:
        """Bring a piece's KV onto the device as the model wrote it, as far as it can be had; None when it is gone."""
        try:
            source = self._entry.state if piece.origin is None else self._ledger.states.state_of(piece.origin[0])
        except NotFoundError:
            return None
        state = source.fork(source.name)
        state.truncate(piece.first + piece.stop - piece.start)
        if piece.origin is None:
            state.adopt_cursor(kept)  # its first tokens have just been brought there
        num_on_device = state.cursor.length - piece.first
        loaded = state.restore() if not state.is_hot else Loaded()
        report.note_load(Loaded(nbytes=loaded.nbytes))  # its tokens are counted when they are moved
        return _Origin(state, num_on_device, next((tier for tier in loaded.from_tier if tier != "device"), "device"))

    def _move(self, state: BranchState, piece: Piece, origin: _Origin, rotation: Rotation, report: Operation) -> int:
        """Move the KV of a piece to the state's end; return the piece's position up to which it was to be had."""
        num_tokens = self._num_available(piece, origin)
        if num_tokens:
            state.compute(keep=0)
            workspace = state.workspace
            position = workspace.begin(state.cursor, num_tokens)
            slots = workspace.slots(position, position + num_tokens)
            workspace.gather(origin.state.cursor, piece.first, piece.first + num_tokens, slots)
            rotation.rotate(slots, position - piece.first)
            workspace.commit(state.cursor, num_tokens)
            mark = self._mark(piece, origin, position, num_tokens)
            media = self._media(piece.start, piece.start + num_tokens)
            state.take_moved(self._entry.state.tokens.slice(piece.start, piece.start + num_tokens), (mark, *media))
            num_before = min(max(origin.num_on_device, 0), num_tokens)
            report.note_load(Loaded(from_tier=_counted(("device", num_before), (origin.tier, num_tokens - num_before))))
        return piece.start + num_tokens

    def _num_available(self, piece: Piece, origin: _Origin) -> int:
        """Return how many leading tokens of a piece have KV; those of a medium are moved together or not at all."""
        have = min(piece.start + origin.state.cursor.length - piece.first, piece.stop)
        return max(media_start(self._entry.state.marks, have) - piece.start, 0)

    def _mark(self, piece: Piece, origin: _Origin, position: int, num_tokens: int) -> Mark:
        """Return what says that the KV at `position` was moved: from after which tokens, and how far."""
        tip = self._entry.tip
        source = piece.origin if piece.origin is not None or tip is None else (tip, piece.start)
        place = struct.pack("<qq", piece.first, position - piece.first)
        digest = hash_fields(_SPLICE_TAG, (origin.state.state_name(piece.first), place))
        return Mark(kind=MarkKind.SPLICE, start=position, stop=position + num_tokens, digest=digest, origin=source)

    def _media(self, start: int, stop: int) -> Marks:
        """Return the media marks of the edited branch's tokens [start, stop), as they are in the new one."""
        return tuple(
            dataclasses.replace(mark, start=mark.start + self._shift, stop=mark.stop + self._shift)
            for mark in self._entry.state.marks
            if mark.kind is MarkKind.MEDIA and start <= mark.start and mark.stop <= stop
        )

    def _append(self, state: BranchState, stop: int) -> None:
        """Add the edited branch's next tokens up to `stop`, pending."""
        start = len(state.tokens) - self._shift
        state.extend(self._entry.state.tokens.slice(start, stop), self._media(start, stop))


def _check_border(state: BranchState, position: int) -> None:
    first, last = media_start(state.marks, position), _media_stop(state.marks, position)
    if first < last:
        raise InvalidInputError(
            f"position {position:,} of branch {state.name!r} lies among the tokens [{first:,}, {last:,}) of one model "
            f"input, which is kept or left out whole; edit from {first:,} or from {last:,}"
        )


def _counted(*tiers: tuple[str, int]) -> dict[str, int]:
    return {tier: num_tokens for tier, num_tokens in tiers if num_tokens}


def _media_stop(marks: Marks, position: int) -> int:
    """Return `position`, or where the media span ends that it would cut."""
    for mark in marks:
        if mark.kind is MarkKind.MEDIA and mark.start < position < mark.stop:
            return mark.stop
    return position
