"""An open store as it stands, with what its branches have in memory, for `Branch.explain`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agentmem._lmdb import Environment, ReadTransaction
from agentmem.checkpoints import BranchEntry, Checkpoints
from agentmem.errors import InvalidInputError
from agentmem.explain.explanation import Explanation
from agentmem.explain.lines import Line, Lines
from agentmem.explain.recorded import RecordedKv, has_salt, read_lines
from agentmem.explain.reuse import Kept
from agentmem.explain.search import explain
from agentmem.ids import BlockDigest, BlockHash, CheckpointId
from agentmem.kv.hashing import pack_tokens
from agentmem.marks import marks_between, media_start
from agentmem.reasons import Reason
from agentmem.runtime import Runtime
from agentmem.state import BranchState
from agentmem.tiers.states import LayerState
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import SessionRecord, StateRef
from agentmem.tree.tree import SessionTree

Content = str | Iterable[int] | Iterable[Mapping[str, object]]
"""A prompt: text, token ids, or chat messages."""


class LiveShelf:
    """What all tiers of an open store have for its model."""

    def __init__(self, runtime: Runtime) -> None:
        """Look things up in an open store."""
        self._runtime = runtime

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._runtime.adapter.spec.block_size

    @property
    def has_states(self) -> bool:
        """Whether the model has layer states."""
        return bool(self._runtime.adapter.spec.states)

    def root_of(self, regime: bytes) -> BlockHash | None:
        """Return the name of the empty prefix."""
        return self._runtime.identity.root_of(regime)

    def regime(self, num_tokens: int) -> bytes | None:
        """Return the rotary regime of so many tokens."""
        return self._runtime.adapter.regime(num_tokens)

    def contains(self, digest: BlockDigest) -> bool:
        """Say whether these bytes are in host memory or on disk."""
        blocks = self._runtime.blocks
        return blocks.host.contains(digest) or blocks.disk.contains(digest)

    def find_block(self, name: BlockHash) -> bool:
        """Say whether a block of these tokens is on disk, or in a branch that is open."""
        return self._runtime.blocks.find(name, 0, self.block_size) is not None

    def find_state(self, name: BlockHash) -> bool:
        """Say whether a layer state after these tokens is on disk, or in a branch that is open."""
        return self._runtime.states.find(name, 0) is not None


@dataclass(kw_only=True)
class LiveLibrary:
    """An open store, as one of its sessions sees it.

    Other sessions are read from disk, and only those that are stored under the same salt: nobody learns of a tenant's
    tokens by asking.

    Attributes:
        runtime: The store's model and tiers.
        environment: Where it is stored.
        catalog: Reads it.
        record: The session that is asked.
        tree: Its checkpoints.
        states: What these stand for.
        entries: Its branches, the one that a prompt is compared with first.
    """

    runtime: Runtime
    environment: Environment
    catalog: Catalog
    record: SessionRecord
    tree: SessionTree
    states: Checkpoints
    entries: Sequence[BranchEntry]
    own: Lines = field(init=False)
    shelf: LiveShelf = field(init=False)

    def __post_init__(self) -> None:
        """Take down the session's lines as they stand."""
        lines = [self._line(entry) for entry in self.entries]
        self.own = Lines(self.record.name, self.record.block_size, self.tree, lines)
        self.shelf = LiveShelf(self.runtime)
        self._entries = {entry.name: entry for entry in self.entries}
        self._known: dict[str, RecordedKv] = {}

    def explain(self, content: Content) -> Explanation:
        """Explain what a prompt would reuse (see `Branch.explain`)."""
        adapter = self.runtime.adapter
        return explain(self._read(content), self, decode=adapter.decode if adapter.tokenizer_hash else None)

    def others(self) -> Iterator[Lines]:
        """Yield the other sessions under the same salt, as far as they can be read."""
        with self.environment.read() as txn:
            for record in self.catalog.sessions(txn, []):
                if record.session_id != self.record.session_id:
                    yield from self._readable(txn, record)

    def kept(self, lines: Lines, line: Line, equal: int) -> Kept:
        """Return what there is of the KV of a line that is cut back to its first `equal` tokens."""
        if lines is self.own and line.branch is not None:
            return self._kept_by(self._entries[line.branch], equal, lines.checkpoint_before(line, equal))
        recorded = self._known.get(lines.session)
        if recorded is None:
            identity, size = self.runtime.identity, self.shelf.block_size
            recorded = self._known[lines.session] = RecordedKv(
                lines, identity.fingerprint, size, has_states=self.shelf.has_states
            )
        return recorded.kept(line, equal)

    def _read(self, content: Content) -> list[int]:
        """Return the tokens of a prompt."""
        adapter = self.runtime.adapter
        if isinstance(content, str):
            return adapter.encode(content, is_first=True)
        given: list[int | Mapping[str, object]] = list(content)
        messages = [each for each in given if isinstance(each, Mapping)]
        if messages and len(messages) == len(given):
            template, is_prompt = adapter.chat_template(), messages[-1].get("role") != "assistant"
            return template.encode(template.render(messages, tools=None, is_prompt=is_prompt, options={})).tokens
        if messages:
            raise InvalidInputError("a prompt is text, token ids or chat messages, not a mixture of them")
        tokens = [int(each) for each in given if not isinstance(each, Mapping)]
        adapter.check_tokens(tokens)
        return tokens

    def _readable(self, txn: ReadTransaction, record: SessionRecord) -> Iterator[Lines]:
        lines = read_lines(txn, self.catalog, record, [])
        if has_salt(lines, self.runtime.identity.salt):
            yield lines

    def _line(self, entry: BranchEntry) -> Line:
        state = entry.state
        start = 0 if entry.tip is None else self.tree.get(entry.tip).num_tokens
        return Line(
            branch=entry.name,
            tip=entry.tip,
            tokens=pack_tokens(state.tokens.slice(start)),
            num_pending=state.num_pending,
            marks=marks_between(state.marks, start, len(state.tokens)),
        )

    def _kept_by(self, entry: BranchEntry, equal: int, tip: CheckpointId | None) -> Kept:
        """Return what a fork of the branch has once it is rewound to its first `equal` tokens, behind `tip`."""
        state = entry.state.fork(entry.name)
        if entry.tip is not None:
            state.adopt(self.states.state_of(entry.tip))
        limit = self._limit(state, equal)
        state.truncate(media_start(state.marks, equal))
        if tip is not None:
            state.adopt(self.states.state_of(tip))
        points = [*state.points, *(each for each in (state.before, state.live) if each is not None)]
        return Kept(
            num_kv=state.num_kv,
            num_hot=min(state.cursor.length, state.num_kv),
            blocks=state.blocks,
            tail=state.tail,
            points=tuple(_state_ref(point) for point in points),
            regime=state.regime,
            limit=limit,
            loss=Reason.DAMAGED if entry.state.loss is Reason.DAMAGED else Reason.MISSING,
            has_states=self.shelf.has_states,
        )

    def _limit(self, state: BranchState, equal: int) -> Reason:
        """Return why a branch has no KV of its first `equal` tokens, or cannot go on behind them."""
        if state.num_kv >= equal:
            return Reason.NO_STATE if self.shelf.has_states else Reason.COMPLETE
        if state.loss is Reason.COMPLETE:
            return Reason.PENDING
        is_resized = self.record.block_size != self.shelf.block_size
        is_foreign = state.loss is Reason.FOREIGN_MODEL
        return Reason.FOREIGN_BLOCK_SIZE if is_foreign and is_resized else state.loss


def _state_ref(state: LayerState) -> StateRef:
    return StateRef(state.position, () if state.tensors is not None else state.digests or ())
