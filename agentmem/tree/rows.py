"""The rows of the catalog's tables: records to keys and values, and back.

Knows nothing of transactions. Every value is stored by `_lmdb` behind a head of its own; what is described here is what
comes after it. The sums in records hold the rows of one record together: rows of two versions of it never pass for one.
Numbers are big-endian, so that keys sort as the numbers in them.

    table     key                                        value
    sessions  "i" | session id (8)                       msgpack map of SessionRecord
              "n" | name (UTF-8)                         session id (8)
    branches  session id (8) | name (UTF-8) | 0          msgpack map of BranchRecord + {"start": u64, "stamp": u64,
                                                         "sums": xxh3-64 of each of its rows of `tails`, u64-be each}
    tails     session id (8) | name | 0 | row u32-be     token ids, u32-le, at most ROW_TOKENS
    nodes     session id (8) | checkpoint id (16)        number of pieces u16-be | xxh3-64 of the msgpack map, u64-be |
                                                         first piece of the map
              session id (8) | checkpoint id (16) | piece u16-be, from 1     that piece
    nrefs     session id (8) | checkpoint id (16)        refs u32-be | dropped u64-be
    tomb      dropped u64-be | session id | checkpoint id   empty
    reflog    session id (8) | sequence u64-be           msgpack map of Move

`dropped` is the time of the last loss of a reference, in nanoseconds of Unix time. A tomb row stands for exactly the
checkpoints whose refs are 0. Map keys that this version does not know are ignored.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_digest

from agentmem.errors import CorruptionError
from agentmem.ids import CheckpointId, Fingerprint, SessionId
from agentmem.tree.checkpoint import TOKEN_NBYTES, BranchRecord, Checkpoint, Move, SessionRecord
from agentmem.tree.fields import CHECKPOINT_ID_NBYTES, HASH_NBYTES, Fields, fields_of_marks, pack_map

SESSION_PREFIX = b"i"
SESSION_NAME_PREFIX = b"n"
SESSION_ID_NBYTES = 8
NODE_KEY_NBYTES = SESSION_ID_NBYTES + CHECKPOINT_ID_NBYTES

ROW_TOKENS = 992
"""Tokens per row of `tails`: a row fits one page (4096) with its head and LMDB's (16 + 16), in an encrypted store with
its box (42) too, behind a branch name of up to 53 bytes."""

PIECE_NBYTES = 65_464
"""Most bytes of one row of `nodes`: 16 pages with its head, LMDB's and a box (40), as large as a chunk of a block."""

SUM_NBYTES = 8
"""Bytes of the sum of a row of `tails`, or of a checkpoint."""

_REFS = struct.Struct(">IQ")
_PIECE_HEAD_NBYTES = 2 + SUM_NBYTES
_U16, _U32, _U64 = struct.Struct(">H"), struct.Struct(">I"), struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class StoredBranch:
    """A branch as the catalog stores it.

    Attributes:
        record: The branch.
        start: Index, from the root, of the first open token.
        stamp: Changes with every write; says which trail the rows of `tails` came from.
        sums: The sums of those rows, `SUM_NBYTES` each.
    """

    record: BranchRecord
    start: int
    stamp: int
    sums: bytes = b""


@dataclass(frozen=True, slots=True)
class NodeRefs:
    """How often a checkpoint is named by child checkpoints and branches, and when it last lost a name."""

    refs: int
    dropped_ns: int


def session_key(session_id: SessionId) -> bytes:
    """Return the key of a session's record."""
    return SESSION_PREFIX + session_id


def session_name_key(name: str) -> bytes:
    """Return the key of a session's name."""
    return SESSION_NAME_PREFIX + name.encode()


def branch_key(session_id: SessionId, name: str) -> bytes:
    """Return the key of a branch; no branch's key is a prefix of another's, for names hold no NUL."""
    return session_id + name.encode() + b"\0"


def branch_name(key: bytes) -> str:
    """Return the name in the key of a branch."""
    return key[SESSION_ID_NBYTES:-1].decode(errors="replace")


def tail_key(branch: bytes, row: int) -> bytes:
    """Return the key of one row of open tokens of the branch whose key is `branch`."""
    return branch + _U32.pack(row)


def split_tail_key(key: bytes) -> tuple[bytes, int]:
    """Return the key of the branch and the row in a key of `tails`."""
    return key[: -_U32.size], _U32.unpack(key[-_U32.size :])[0]


def node_key(session_id: SessionId, checkpoint_id: CheckpointId) -> bytes:
    """Return the key of a checkpoint, in `nodes` and `nrefs`."""
    return session_id + checkpoint_id


def piece_key(node: bytes, piece: int) -> bytes:
    """Return the key of one more piece of the checkpoint whose key is `node`."""
    return node + _U16.pack(piece)


def tomb_key(dropped_ns: int, node: bytes) -> bytes:
    """Return the key of a checkpoint's row in `tomb`."""
    return _U64.pack(dropped_ns) + node


def split_tomb_key(key: bytes) -> tuple[int, bytes]:
    """Return the time and the node key in a key of `tomb`."""
    return _U64.unpack(key[:8])[0], key[8:]


def move_key(session_id: SessionId, sequence: int) -> bytes:
    """Return the key of a row of `reflog`."""
    return session_id + _U64.pack(sequence)


def move_sequence(key: bytes) -> int:
    """Return the sequence number in a key of `reflog`."""
    return int(_U64.unpack(key[SESSION_ID_NBYTES:])[0])


def pack_session(record: SessionRecord) -> bytes:
    """Return the value of a session's row."""
    return pack_map(
        {
            "name": record.name,
            "active_branch": record.active_branch,
            "fingerprint": record.fingerprint,
            "model_name": record.model_name,
            "tokenizer_hash": record.tokenizer_hash,
            "template_hash": record.template_hash,
            "block_size": record.block_size,
            "extras": record.extras,
            "created_s": record.created_s,
            "updated_s": record.updated_s,
        }
    )


def unpack_session(key: bytes, value: bytes) -> SessionRecord:
    """Return the session in a row.

    Raises:
        CorruptionError: The row is no session; names it.
    """
    session_id = SessionId(key[len(SESSION_PREFIX) :])
    fields = Fields(f"session {session_id.hex()}", value)
    return SessionRecord(
        session_id=session_id,
        name=fields.text("name"),
        active_branch=fields.text("active_branch"),
        fingerprint=Fingerprint(fields.data("fingerprint", HASH_NBYTES)),
        model_name=fields.text("model_name"),
        tokenizer_hash=fields.text("tokenizer_hash"),
        template_hash=fields.text("template_hash"),
        block_size=fields.count("block_size"),
        extras=fields.mapping("extras"),
        created_s=fields.number("created_s"),
        updated_s=fields.number("updated_s"),
    )


def pack_branch(stored: StoredBranch) -> bytes:
    """Return the value of a branch's row."""
    record = stored.record
    return pack_map(
        {
            "tip": record.tip,
            "num_open": record.num_open,
            "num_pending": record.num_pending,
            "marks": fields_of_marks(record.marks),
            "extras": record.extras,
            "created_s": record.created_s,
            "updated_s": record.updated_s,
            "start": stored.start,
            "stamp": stored.stamp,
            "sums": stored.sums,
        }
    )


def unpack_branch(key: bytes, value: bytes) -> StoredBranch:
    """Return the branch in a row.

    Raises:
        CorruptionError: The row is no branch; names it.
    """
    name = branch_name(key)
    fields = Fields(f"branch {name!r} of session {key[:SESSION_ID_NBYTES].hex()}", value)
    record = BranchRecord(
        name=name,
        tip=fields.checkpoint_id("tip"),
        num_open=fields.count("num_open"),
        num_pending=fields.count("num_pending"),
        marks=fields.marks("marks"),
        extras=fields.mapping("extras"),
        created_s=fields.number("created_s"),
        updated_s=fields.number("updated_s"),
    )
    return StoredBranch(
        record,
        start=fields.count("start"),
        stamp=fields.count("stamp"),
        sums=fields.data("sums", multiple_of=SUM_NBYTES),
    )


def pack_checkpoint(checkpoint: Checkpoint) -> list[bytes]:
    """Return the values of a checkpoint's rows: its map in pieces, the first behind their number and its sum."""
    body = checkpoint_map(checkpoint)
    first = PIECE_NBYTES - _PIECE_HEAD_NBYTES
    pieces = [body[:first], *(body[start : start + PIECE_NBYTES] for start in range(first, len(body), PIECE_NBYTES))]
    return [_U16.pack(len(pieces)) + row_sum(body) + pieces[0], *pieces[1:]]


def checkpoint_map(checkpoint: Checkpoint) -> bytes:
    """Return the msgpack map of a checkpoint."""
    return pack_map(
        {
            "parent": checkpoint.parent_id,
            "num_tokens": checkpoint.num_tokens,
            "tokens": checkpoint.tokens,
            "num_pending": checkpoint.num_pending,
            "first_block": checkpoint.first_block,
            "blocks": b"".join(ref.block_hash + ref.digest for ref in checkpoint.blocks),
            "tail": None if checkpoint.tail is None else checkpoint.tail.block_hash + checkpoint.tail.digest,
            "states": [[state.position, b"".join(state.digests)] for state in checkpoint.states],
            "marks": fields_of_marks(checkpoint.marks),
            "regime": checkpoint.regime,
            "fingerprint": checkpoint.fingerprint,
            "message": checkpoint.message,
            "extras": checkpoint.extras,
            "is_auto": checkpoint.is_auto,
            "has_kv": checkpoint.has_kv,
            "created_s": checkpoint.created_s,
        }
    )


def row_sum(data: bytes) -> bytes:
    """Return the sum of a row of `tails`, or of a checkpoint's map, by which the record that it belongs to knows it."""
    return xxh3_64_digest(data)


def num_pieces(first: bytes) -> int:
    """Return how many rows the checkpoint takes whose first row holds `first`; 0 when that is too short to say."""
    return int(_U16.unpack_from(first)[0]) if len(first) >= _U16.size else 0


def unpack_checkpoint(key: bytes, pieces: Sequence[bytes]) -> Checkpoint:
    """Return the checkpoint in the values of its rows.

    Raises:
        CorruptionError: The values are no checkpoint; names it.
    """
    name = _checkpoint_name(key)
    if num_pieces(pieces[0]) != len(pieces):
        raise CorruptionError(f"{name} is damaged: {len(pieces)} of {num_pieces(pieces[0])} pieces are there")
    body = b"".join((pieces[0][_PIECE_HEAD_NBYTES:], *pieces[1:]))
    if row_sum(body) != pieces[0][_U16.size : _PIECE_HEAD_NBYTES]:
        raise CorruptionError(f"{name} is damaged: its pieces are of several versions")
    return checkpoint_of(key, body)


def checkpoint_of(key: bytes, body: bytes) -> Checkpoint:
    """Return the checkpoint in a msgpack map.

    Raises:
        CorruptionError: The map is no checkpoint; names it.
    """
    name = _checkpoint_name(key)
    fields = Fields(name, body)
    tail = fields.refs("tail")
    checkpoint = Checkpoint(
        checkpoint_id=CheckpointId(key[SESSION_ID_NBYTES:]),
        session_id=SessionId(key[:SESSION_ID_NBYTES]),
        parent_id=fields.checkpoint_id("parent"),
        num_tokens=fields.count("num_tokens"),
        tokens=fields.data("tokens", multiple_of=TOKEN_NBYTES),
        num_pending=fields.count("num_pending"),
        first_block=fields.count("first_block"),
        blocks=fields.refs("blocks"),
        tail=tail[0] if tail else None,
        states=fields.states("states"),
        marks=fields.marks("marks"),
        regime=fields.data("regime"),
        fingerprint=Fingerprint(fields.data("fingerprint", HASH_NBYTES)),
        message=fields.text("message"),
        extras=fields.mapping("extras"),
        is_auto=fields.flag("is_auto"),
        has_kv=fields.flag("has_kv"),
        created_s=fields.number("created_s"),
    )
    if len(tail) > 1 or checkpoint.num_own_tokens > checkpoint.num_tokens:
        raise CorruptionError(f"{name} contradicts itself: {checkpoint.num_own_tokens} own of {checkpoint.num_tokens}")
    return checkpoint


def _checkpoint_name(key: bytes) -> str:
    return f"checkpoint {key[SESSION_ID_NBYTES:].hex()} of session {key[:SESSION_ID_NBYTES].hex()}"


def pack_refs(refs: NodeRefs) -> bytes:
    """Return the value of a row of `nrefs`."""
    return _REFS.pack(refs.refs, refs.dropped_ns)


def unpack_refs(key: bytes, value: bytes) -> NodeRefs:
    """Return the counts in a row of `nrefs`.

    Raises:
        CorruptionError: The value has another length; names the checkpoint.
    """
    if len(value) != _REFS.size:
        raise CorruptionError(f"the reference count of checkpoint {key[SESSION_ID_NBYTES:].hex()} is damaged")
    return NodeRefs(*_REFS.unpack(value))


def pack_move(move: Move) -> bytes:
    """Return the value of a row of `reflog`."""
    return pack_map(
        {
            "branch": move.branch,
            "operation": move.operation,
            "old": move.old,
            "new": move.new,
            "time_s": move.time_s,
        }
    )


def unpack_move(key: bytes, value: bytes) -> Move:
    """Return the move in a row of `reflog`.

    Raises:
        CorruptionError: The value is no move; names the row.
    """
    fields = Fields(f"reflog row {key.hex()}", value)
    return Move(
        branch=fields.text("branch"),
        operation=fields.text("operation"),
        old=fields.checkpoint_id("old"),
        new=fields.checkpoint_id("new"),
        time_s=fields.number("time_s"),
    )
