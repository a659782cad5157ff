"""What commands read: a store, what a word on the command line names in it, and how many bytes it takes.

Imports neither torch nor networkx, so that looking starts at once.
"""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentmem._crypto import KEY_NBYTES
from agentmem._lmdb import Environment, ReadTransaction, Table
from agentmem.config import Config
from agentmem.errors import CorruptionError, InvalidInputError, NotFoundError
from agentmem.ids import BlockDigest, CheckpointId
from agentmem.tiers.blockrows import BlockInfo, read_info
from agentmem.tree import rows
from agentmem.tree.checkpoint import BranchRecord, Checkpoint, SessionRecord
from agentmem.view import SessionView, StoreView


@dataclass(frozen=True, slots=True)
class KvSize:
    """How much KV some blocks are.

    Attributes:
        num_blocks: Blocks that are stored.
        raw_nbytes: Bytes of their KV.
        stored_nbytes: Bytes of their records.
        num_missing_blocks: Blocks that are named but not stored, or whose row is damaged.
    """

    num_blocks: int = 0
    raw_nbytes: int = 0
    stored_nbytes: int = 0
    num_missing_blocks: int = 0


def open_store(
    arguments: argparse.Namespace, *, create: bool = False, read_only: bool = False, exclusive: bool = False
) -> Environment:
    """Open the store that a command was given, with the key that it was given.

    Raises:
        AgentMemError: As `Environment.open`, and as `read_key`.
    """
    key = read_key(arguments.key_file)
    return Environment.open(arguments.store, create=create, read_only=read_only, exclusive=exclusive, key=key)


def open_view(arguments: argparse.Namespace) -> StoreView:
    """Open the store that a command was given, for reading, also beside processes that write.

    Raises:
        AgentMemError: As `open_store`.
    """
    return StoreView(open_store(arguments, read_only=True), Config())


def read_key(path: Path | None) -> bytes | None:
    """Return the key in a file: 32 bytes, or 64 hex digits; None when there is no file to read.

    Raises:
        NotFoundError: The file does not exist.
        InvalidInputError: It holds no key.
    """
    if path is None:
        return None
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no key file {str(path)!r}") from error
    if len(data) != KEY_NBYTES:
        try:
            data = bytes.fromhex(data.decode("ascii"))
        except ValueError:
            data = b""
    if len(data) != KEY_NBYTES:
        raise InvalidInputError(f"{str(path)!r} holds no key: {KEY_NBYTES} bytes, or {2 * KEY_NBYTES} hex digits")
    return data


def split_target(store: StoreView, text: str) -> tuple[str, str | None]:
    """Return the session that `text` names, and what stands behind the slash; names may hold slashes themselves.

    Raises:
        NotFoundError: No session is called so; lists what is near.
    """
    with store.environment.read() as txn:
        keys = [key for key, _ in txn.scan_each(Table.SESSIONS, rows.SESSION_NAME_PREFIX)]
        known = {key[len(rows.SESSION_NAME_PREFIX) :].decode(errors="replace") for key in keys}
        cuts = [text, *(text[:at] for at in range(len(text) - 1, 0, -1) if text[at] == "/")]
        for name in cuts:
            if name in known:
                return name, text[len(name) + 1 :] or None
        return store.catalog.find_session(txn, cuts[-1]).name, None  # which says what names are near


def find_checkpoint(view: SessionView, name: str) -> Checkpoint:
    """Return the checkpoint that is called so in a session: by its id, the first digits of it, or a branch's tip.

    Raises:
        NotFoundError: There is none; lists what is near.
        InvalidInputError: Several ids begin so.
    """
    from agentmem.tree.tree import SessionTree  # networkx takes a fifth of a second

    return SessionTree(view.checkpoints).resolve(name, {branch.name: branch.tip for branch in view.branches})


def lineage(tip: CheckpointId | None, checkpoints: Mapping[CheckpointId, Checkpoint]) -> list[Checkpoint]:
    """Return a tip, its parent, and so on up to the root, or to the first that cannot be read."""
    line: list[Checkpoint] = []
    while tip is not None and tip in checkpoints:
        line.append(checkpoints[tip])
        tip = line[-1].parent_id
    return line


def num_tokens(branch: BranchRecord, checkpoints: Mapping[CheckpointId, Checkpoint]) -> int | None:
    """Return how many tokens a branch has; None when its tip cannot be read."""
    if branch.tip is None:
        return branch.num_open
    tip = checkpoints.get(branch.tip)
    return None if tip is None else tip.num_tokens + branch.num_open


def all_infos(txn: ReadTransaction) -> dict[BlockDigest, BlockInfo | None]:
    """Return what the store knows of every block; None where that cannot be read."""
    scanned = txn.scan_each(Table.BINDEX)
    return {BlockDigest(key): None if isinstance(row, CorruptionError) else _info(key, row) for key, row in scanned}


def infos_of(txn: ReadTransaction, digests: Iterable[BlockDigest]) -> dict[BlockDigest, BlockInfo | None]:
    """Return what the store knows of some blocks; None where there is nothing, or nothing that can be read."""
    found: dict[BlockDigest, BlockInfo | None] = {}
    for digest in digests:
        try:
            found[digest] = read_info(txn, digest)
        except CorruptionError:
            found[digest] = None
    return found


def kv_size(infos: Mapping[BlockDigest, BlockInfo | None], digests: Iterable[BlockDigest]) -> KvSize:
    """Return how much KV the blocks are, each counted once."""
    wanted = set(digests)
    found = [info for digest in wanted if (info := infos.get(digest)) is not None]
    return KvSize(
        num_blocks=len(found),
        raw_nbytes=sum(info.raw_nbytes for info in found),
        stored_nbytes=sum(info.stored_nbytes for info in found),
        num_missing_blocks=len(wanted) - len(found),
    )


def session_document(record: SessionRecord) -> dict[str, object]:
    """Return a session for programs."""
    return {
        "session": record.name,
        "session_id": record.session_id,
        "active_branch": record.active_branch,
        "model_name": record.model_name,
        "fingerprint": record.fingerprint,
        "block_size": record.block_size,
        "extras": record.extras,
        "created_s": record.created_s,
        "updated_s": record.updated_s,
    }


def branch_document(branch: BranchRecord, checkpoints: Mapping[CheckpointId, Checkpoint]) -> dict[str, object]:
    """Return a branch for programs."""
    return {
        "branch": branch.name,
        "tip": branch.tip,
        "num_tokens": num_tokens(branch, checkpoints),
        "num_open": branch.num_open,
        "num_pending": branch.num_pending,
        "extras": branch.extras,
        "created_s": branch.created_s,
        "updated_s": branch.updated_s,
    }


def checkpoint_document(checkpoint: Checkpoint) -> dict[str, object]:
    """Return a checkpoint for programs."""
    return {
        "checkpoint_id": checkpoint.checkpoint_id,
        "parent_id": checkpoint.parent_id,
        "message": checkpoint.message,
        "num_tokens": checkpoint.num_tokens,
        "num_own_tokens": checkpoint.num_own_tokens,
        "num_pending": checkpoint.num_pending,
        "num_own_blocks": len(set(checkpoint.digests())),
        "has_kv": checkpoint.has_kv,
        "is_auto": checkpoint.is_auto,
        "fingerprint": checkpoint.fingerprint,
        "extras": checkpoint.extras,
        "created_s": checkpoint.created_s,
    }


def _info(digest: bytes, row: bytes) -> BlockInfo | None:
    try:
        return BlockInfo.unpack(row, digest)
    except CorruptionError:
        return None
