"""What commands read: a store, what a word on the command line names in it, and how many bytes it takes.

Imports neither torch nor networkx, so that looking starts at once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentmem._lmdb import Environment, ReadTransaction, Table
from agentmem.config import Config
from agentmem.errors import CorruptionError
from agentmem.ids import BlockDigest, CheckpointId
from agentmem.tiers.blockindex import BlockInfo, read_info
from agentmem.tree import rows
from agentmem.tree.checkpoint import BranchRecord, Checkpoint, SessionRecord
from agentmem.view import StoreView


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


def open_view(path: Path) -> StoreView:
    """Open a store for reading, also beside a process that writes.

    Raises:
        AgentMemError: As `Environment.open`.
    """
    return StoreView(Environment.open(path, read_only=True), Config())


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
