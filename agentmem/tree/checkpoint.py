"""The records of the metadata plane: checkpoints, branches, sessions and moves.

Knows nothing of how they are stored, nor of KV beyond its names.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from agentmem.errors import InvalidInputError
from agentmem.ids import BlockDigest, BlockHash, CheckpointId, Fingerprint, SessionId
from agentmem.marks import Marks

TOKEN_NBYTES = 4
"""Bytes per stored token id (u32-le)."""

MAX_NAME_NBYTES = 255
"""Longest name of a session or branch in UTF-8; names are part of LMDB keys, which end at 511 bytes."""


@dataclass(frozen=True, slots=True)
class BlockRef:
    """What a checkpoint says of one block.

    Attributes:
        block_hash: Names its tokens: what may be reused.
        digest: Names its bytes: what the checkpoint is.
    """

    block_hash: BlockHash
    digest: BlockDigest


@dataclass(frozen=True, slots=True)
class StateRef:
    """What a checkpoint says of one layer state.

    Attributes:
        position: Tokens that it has seen; 0 for the KV of an encoder's output, which belongs to the root.
        digests: Its records, one per dtype.
    """

    position: int
    digests: tuple[BlockDigest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An immutable point of a session: its tokens never change.

    Its record is replaced when KV is attached, and when retention lets go of its KV or merges its parent into it
    (docs/retention.md).

    Attributes:
        checkpoint_id: Its name.
        session_id: The session it belongs to.
        parent_id: The checkpoint it continues; None for a root.
        num_tokens: Tokens from the root to here, pending ones included.
        tokens: Its own tokens [parent.num_tokens, num_tokens), as u32-le.
        num_pending: Trailing tokens that the model was not fed.
        first_block: Index, from the root, of `blocks[0]`. Lower than the parent's number of full blocks when later
            blocks of the parent are no longer shared.
        blocks: Its own full blocks, in order.
        tail: The partial block after the last full one; None when there is none.
        states: Its own layer states (what cannot be cut by token), by position.
        marks: What the KV of its own tokens depends on beside them.
        regime: The rotary regime that the KV is in; b"" for models that have one only.
        fingerprint: The model that made the KV.
        message: What the user said of it.
        extras: The user's metadata.
        is_auto: Made by `fork`, `drop` or `close`, not asked for by the user.
        has_kv: The KV of all fed tokens is named here. False for tokens whose KV is not attached yet.
        created_s: Unix time.
    """

    checkpoint_id: CheckpointId
    session_id: SessionId
    parent_id: CheckpointId | None
    num_tokens: int
    tokens: bytes
    num_pending: int = 0
    first_block: int = 0
    blocks: tuple[BlockRef, ...] = ()
    tail: BlockRef | None = None
    states: tuple[StateRef, ...] = ()
    marks: Marks = ()
    regime: bytes = b""
    fingerprint: Fingerprint
    message: str = ""
    extras: Mapping[str, object] = field(default_factory=dict)
    is_auto: bool = False
    has_kv: bool = True
    created_s: float

    @property
    def num_own_tokens(self) -> int:
        """Tokens that this checkpoint adds to its parent."""
        return len(self.tokens) // TOKEN_NBYTES

    def digests(self) -> Iterator[BlockDigest]:
        """Yield every record this one holds a reference to: full blocks, tail, layer states, model inputs."""
        yield from (block.digest for block in self.blocks)
        if self.tail is not None:
            yield self.tail.digest
        for state in self.states:
            yield from state.digests
        yield from (mark.payload for mark in self.marks if mark.payload is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchRecord:
    """A movable name on a checkpoint. Its open tokens (those after the tip) are stored beside it.

    Attributes:
        name: Its name, unique in the session.
        tip: The checkpoint it points at; None before the first.
        num_open: Tokens after the tip.
        num_pending: Trailing tokens that the model was not fed; may reach back behind the tip.
        marks: What the KV of the tokens after the tip depends on beside them.
        extras: The user's metadata.
        created_s: Unix time.
        updated_s: Unix time of the last change.
    """

    name: str
    tip: CheckpointId | None
    num_open: int = 0
    num_pending: int = 0
    marks: Marks = ()
    extras: Mapping[str, object] = field(default_factory=dict)
    created_s: float
    updated_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """All branches of one agent's work.

    Attributes:
        session_id: Its name for the store, for life.
        name: Its name for people, unique in the store.
        active_branch: The branch the model continues.
        fingerprint: The model that the session's KV belongs to.
        model_name: That model's name, for people.
        tokenizer_hash: Hex name of the tokenizer; "" when none was given.
        template_hash: Hex name of the chat template; "" when there is none.
        block_size: Tokens per block.
        extras: The user's metadata.
        created_s: Unix time.
        updated_s: Unix time of the last change of this record.
    """

    session_id: SessionId
    name: str
    active_branch: str
    fingerprint: Fingerprint
    model_name: str = ""
    tokenizer_hash: str = ""
    template_hash: str = ""
    block_size: int
    extras: Mapping[str, object] = field(default_factory=dict)
    created_s: float
    updated_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One row of the reflog: what happened to a branch.

    Attributes:
        branch: The branch.
        operation: "create", "checkpoint", "fork", "rewind", "switch", "drop" ...
        old: Its tip before; None when it had none.
        new: Its tip after; None when it has none any more.
        time_s: Unix time.
    """

    branch: str
    operation: str
    old: CheckpointId | None
    new: CheckpointId | None
    time_s: float


def check_name(kind: str, name: str) -> str:
    """Return `name` if a session or branch may be called so.

    Args:
        kind: What is to be named, for the message: "session" or "branch".
        name: 1 to `MAX_NAME_NBYTES` bytes of printable text without spaces at its ends.

    Raises:
        InvalidInputError: It may not.
    """
    if not name or name != name.strip() or not name.isprintable():
        raise InvalidInputError(f"{kind} name {name!r}: give printable text without spaces at its ends")
    num_bytes = len(name.encode())
    if num_bytes > MAX_NAME_NBYTES:
        raise InvalidInputError(f"{kind} name of {num_bytes} bytes is too long: at most {MAX_NAME_NBYTES} in UTF-8")
    return name
