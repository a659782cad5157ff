"""How many leading tokens of a prompt the model need not be fed: the rules of restoring.py, on names alone.

Moves no KV and imports no torch. Whether a stored block is damaged shows only when it is read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentmem.ids import BlockDigest, BlockHash
from agentmem.kv.hashing import chain_hash, state_hash
from agentmem.marks import MarkKind, Marks, media_start, pack_marks
from agentmem.reasons import Reason
from agentmem.tree.checkpoint import StateRef


class NamedBlock(Protocol):
    """A block by its two names."""

    @property
    def block_hash(self) -> BlockHash:
        """Its token name."""
        ...

    @property
    def digest(self) -> BlockDigest | None:
        """Its byte name; None when it was not saved yet."""
        ...


class Blocks(Protocol):
    """Blocks in order; `Trail[BlockRef]` and `Trail[SealedBlock]` are."""

    def __len__(self) -> int: ...

    def slice(self, start: int = 0, stop: int | None = None) -> Sequence[NamedBlock]:
        """Return the blocks of [start, stop)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What there is of the KV of stored tokens, on a branch that was cut back to some of them.

    Attributes:
        num_kv: Leading tokens whose KV exists, as far as the records say.
        num_hot: Leading tokens of these whose KV is on the device.
        blocks: The full blocks.
        tail: The partial block after them, if it is needed for `num_kv`.
        points: The layer states that are kept; one on the device has no digests.
        regime: The rotary regime that the KV is in.
        limit: Why `num_kv` is not the number of tokens.
        loss: Why blocks that are named here and nowhere to be found are gone.
        has_states: Whether the model has layer states, and so goes on from `points` only.
    """

    num_kv: int
    blocks: Blocks
    tail: NamedBlock | None = None
    num_hot: int = 0
    points: tuple[StateRef, ...] = ()
    regime: bytes = b""
    limit: Reason = Reason.COMPLETE
    loss: Reason = Reason.MISSING
    has_states: bool = False

    def reach(self, position: int) -> int:
        """Return the last position up to `position` after which the model can go on, as far as the records say."""
        if not self.has_states:
            return min(position, self.num_kv)
        return max((each.position for each in self.points if each.position <= min(position, self.num_kv)), default=0)


class Shelf(Protocol):
    """What a store has, by name, for the model that is asked about."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def has_states(self) -> bool:
        """Whether the model has layer states."""
        ...

    def root_of(self, regime: bytes) -> BlockHash | None:
        """Return the name of the empty prefix; None when it is not known."""
        ...

    def regime(self, num_tokens: int) -> bytes | None:
        """Return the rotary regime of so many tokens; None when it is not known."""
        ...

    def contains(self, digest: BlockDigest) -> bool:
        """Say whether these bytes can be had."""
        ...

    def find_block(self, name: BlockHash) -> bool:
        """Say whether a block of these tokens can be had."""
        ...

    def find_state(self, name: BlockHash) -> bool:
        """Say whether a layer state after these tokens can be had."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt.

    Attributes:
        tokens: All token ids; at least one.
        marks: What its KV depends on beside them.
    """

    tokens: Sequence[int]
    marks: Marks = ()


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What would be reused.

    Attributes:
        num_tokens: Leading tokens that the model need not be fed.
        limit: Why not all that are the same as the stored ones.
    """

    num_tokens: int
    limit: Reason


def shared_marks(marks: Marks, equal: int) -> Marks:
    """Return the marks of stored tokens that a prompt with the same first `equal` tokens has too.

    The same placeholders are taken for the same media; KV that an edit moved is nobody else's.
    """
    return tuple(mark for mark in marks if mark.kind is not MarkKind.SPLICE and mark.stop <= equal)


def foresee(asked: Asked, equal: int, kept: Kept, marks: Marks, shelf: Shelf) -> Foreseen:
    """Foresee what `append` and `forward` reuse of a prompt on a branch that was cut back to where both are the same.

    Args:
        asked: The prompt.
        equal: Leading tokens that the branch has already.
        kept: What there is of the branch's KV.
        marks: The branch's marks.
        shelf: What else is stored.
    """
    regime = shelf.regime(len(asked.tokens))
    if regime is not None and regime != kept.regime:
        num_tokens = _Chain(asked, shelf, regime).extended([], 0)
        return Foreseen(num_tokens, Reason.COMPLETE if num_tokens >= equal else Reason.REGIME)
    exact = _exact(marks, equal)
    num_kv = media_start(marks, _available(kept, min(equal, exact), shelf))
    num_tokens = position = _restart(num_kv, len(asked.tokens), kept, shelf)
    if position == num_kv:
        blocks = kept.blocks.slice(0, position // shelf.block_size)
        num_tokens = _Chain(asked, shelf, kept.regime).extended(blocks, position)
    if num_tokens >= equal:
        return Foreseen(num_tokens, Reason.COMPLETE)
    return Foreseen(num_tokens, _limit(kept, marks, equal, exact, num_kv, position))


def foresee_anew(asked: Asked, equal: int, kept: Kept, marks: Marks, shelf: Shelf) -> int:
    """Foresee how many tokens of a prompt `append` and `forward` reuse on an empty branch.

    Args:
        asked: The prompt.
        equal: Tokens that it has in common with some branch.
        kept: What there is of that branch's KV: names blocks when the empty prefix has no known name.
        marks: That branch's marks.
        shelf: What is stored.
    """
    regime = shelf.regime(len(asked.tokens))
    chain = _Chain(asked, shelf, kept.regime if regime is None else regime)
    return chain.extended(kept.blocks.slice(0, min(equal, _exact(marks, equal)) // shelf.block_size), 0)


def _exact(marks: Marks, equal: int) -> int:
    """Return how many of the first `equal` tokens lie before the first whose KV was moved there."""
    return min((mark.start for mark in marks if mark.kind is MarkKind.SPLICE), default=equal)


def _available(kept: Kept, equal: int, shelf: Shelf) -> int:
    """Return how many of the first `equal` tokens have KV that can be had."""
    wanted = min(equal, kept.num_kv)
    if wanted <= kept.num_hot:
        return wanted
    size = shelf.block_size
    blocks = [*kept.blocks.slice(0, -(-wanted // size))]
    if len(blocks) * size < wanted and kept.tail is not None:
        blocks.append(kept.tail)
    for index in range(kept.num_hot // size, len(blocks)):
        if not _has(shelf, blocks[index]):
            return max(index * size, kept.num_hot)
    return min(wanted, len(blocks) * size)


def _has(shelf: Shelf, block: NamedBlock) -> bool:
    """Say whether the block's own bytes, or others of the same tokens, can be had."""
    digest = block.digest
    return (digest is not None and shelf.contains(digest)) or shelf.find_block(block.block_hash)


def _restart(num_kv: int, num_tokens: int, kept: Kept, shelf: Shelf) -> int:
    """Return the last position up to `num_kv` after which the model can go on, and has something left to be fed."""
    if not shelf.has_states:
        return num_kv
    points = (point for point in kept.points if point.position <= min(num_kv, num_tokens - 1))
    return max((point.position for point in points if all(map(shelf.contains, point.digests))), default=0)


def _limit(kept: Kept, marks: Marks, equal: int, exact: int, num_kv: int, position: int) -> Reason:
    if position < num_kv:
        return Reason.NO_STATE
    wanted = min(equal, exact)
    if num_kv < media_start(marks, wanted):
        return kept.limit if num_kv >= kept.num_kv and kept.limit is not Reason.COMPLETE else kept.loss
    return Reason.APPROXIMATE if exact < equal else Reason.WITHIN_MEDIA


class _Chain:
    """The names of a prompt's blocks and layer states, and which of them are stored."""

    def __init__(self, asked: Asked, shelf: Shelf, regime: bytes) -> None:
        self._asked = asked
        self._shelf = shelf
        self._size = shelf.block_size
        self._root = shelf.root_of(regime)

    def extended(self, blocks: Sequence[NamedBlock], position: int) -> int:
        """Return how far stored blocks continue the first `position` tokens.

        Args:
            blocks: The first full blocks of the prompt, whose names are known: at least those of the first `position`.
            position: Tokens that need no finding.
        """
        first = position - position % self._size
        stop = media_start(self._asked.marks, len(self._asked.tokens) - 1)
        names = [blocks[first // self._size - 1].block_hash] if first else [*self._beginning(blocks, stop)]
        if not names or stop <= position:
            return position
        # names[0] is the parent of the block that begins at `first`.
        first = first if first or self._root is not None else self._size
        names += self._stored(names[-1], first + (len(names) - 1) * self._size, stop)
        if self._shelf.has_states:
            return self._last_state(names, first, position, stop)
        return max(position, first + (len(names) - 1) * self._size)

    def _beginning(self, blocks: Sequence[NamedBlock], limit: int) -> Iterator[BlockHash]:
        """Yield the name of the empty prefix; when it is not known, those of the first blocks that are stored."""
        if self._root is not None:
            yield self._root
            return
        for block in blocks[: limit // self._size]:
            if not self._shelf.find_block(block.block_hash):
                return
            yield block.block_hash

    def _stored(self, parent: BlockHash, start: int, limit: int) -> list[BlockHash]:
        names: list[BlockHash] = []
        while start + self._size <= limit:
            parent = chain_hash(parent, *self._identity(start, start + self._size))
            if not self._shelf.find_block(parent):
                break
            names.append(parent)
            start += self._size
        return names

    def _last_state(self, names: Sequence[BlockHash], first: int, position: int, limit: int) -> int:
        """Return the last position up to `limit` whose layer state and KV are stored."""
        for index in reversed(range(len(names))):
            start = first + index * self._size
            has_block = index + 1 < len(names)
            for stop in range(min(start + self._size - 1, limit), max(start - 1, position), -1):
                if self._has_state(names[index], start, stop, has_block=has_block):
                    return stop
        return position

    def _has_state(self, parent: BlockHash, start: int, stop: int, *, has_block: bool) -> bool:
        """Say whether the layer state after `stop` is stored, and KV of the tokens [start, stop) of its block."""
        tokens, marks = self._identity(start, stop)
        if not self._shelf.find_state(state_hash(parent, tokens, marks)):
            return False
        return start == stop or has_block or self._shelf.find_block(chain_hash(parent, tokens, marks))

    def _identity(self, start: int, stop: int) -> tuple[Sequence[int], list[bytes]]:
        return self._asked.tokens[start:stop], pack_marks(self._asked.marks, start, stop)
