"""Give up a stored branch, so that it can be had back until gc's grace has passed. Without a model.

A branch of a session that is open is dropped by the session (`Session.drop`). Imports no torch.
"""

import dataclasses
from array import array
from dataclasses import dataclass

from agentmem._lmdb import ReadTransaction, Table, WriteTransaction
from agentmem.errors import CorruptionError, InvalidInputError
from agentmem.ids import CheckpointId, new_checkpoint_id
from agentmem.kv.hashing import pack_tokens
from agentmem.tiers.blockrows import read_info
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import BranchRecord, Checkpoint, Move, SessionRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A branch that is to go.

    Attributes:
        session: Its session.
        name: Its name.
        record: The branch; None when it is damaged.
        tip: Its tip; None without one, or when that cannot be read.
        open_tokens: Its tokens after the tip, as far as they can be read.
        active_branch: The session's active branch afterwards.
    """

    session: SessionRecord
    name: str
    record: BranchRecord | None
    tip: Checkpoint | None
    open_tokens: "array[int]"
    active_branch: str


def leaving(txn: ReadTransaction, catalog: Catalog, session_name: str, name: str) -> Leaving:
    """Return what dropping a branch means.

    Raises:
        NotFoundError: There is no such session or branch.
        InvalidInputError: It is the only branch of its session.
    """
    session = catalog.find_session(txn, session_name)
    others = [branch.name for branch in catalog.branches(txn, session.session_id, []) if branch.name != name]
    record, tip, open_tokens = None, None, array("I")
    # A damaged branch can be given up too: what cannot be read is left out.
    try:
        record = catalog.branch(txn, session.session_id, name)
        tip = None if record.tip is None else catalog.checkpoint(txn, session.session_id, record.tip)
        open_tokens = catalog.open_tokens(txn, session.session_id, name)
    except CorruptionError:
        pass
    if not others:
        raise InvalidInputError(f"{name!r} is the only branch of session {session_name!r}: remove the session")
    is_active = session.active_branch == name
    return Leaving(
        session=session,
        name=name,
        record=record,
        tip=tip,
        open_tokens=open_tokens,
        active_branch=others[0] if is_active else session.active_branch,
    )


def drop(txn: WriteTransaction, catalog: Catalog, branch: Leaving, now_s: float) -> CheckpointId | None:
    """Drop a branch, and return where it can be forked again: its open tokens become a checkpoint of their own."""
    session_id = branch.session.session_id
    end = None if branch.tip is None else branch.tip.checkpoint_id
    if branch.record is not None and branch.open_tokens:
        checkpoint = _checkpoint_of(branch, branch.record, now_s)
        catalog.put_checkpoint(txn, checkpoint)
        _retain(txn, checkpoint)
        end = checkpoint.checkpoint_id
    catalog.remove_branch(txn, session_id, branch.name)
    if branch.active_branch != branch.session.active_branch:
        session = dataclasses.replace(branch.session, active_branch=branch.active_branch, updated_s=now_s)
        catalog.put_session(txn, session)
    catalog.record_move(txn, session_id, Move(branch=branch.name, operation="drop", old=end, new=None, time_s=now_s))
    return end


def _checkpoint_of(branch: Leaving, record: BranchRecord, now_s: float) -> Checkpoint:
    tip = branch.tip
    return Checkpoint(
        checkpoint_id=new_checkpoint_id(),
        session_id=branch.session.session_id,
        parent_id=record.tip,
        num_tokens=(0 if tip is None else tip.num_tokens) + len(branch.open_tokens),
        tokens=pack_tokens(branch.open_tokens),
        num_pending=record.num_pending,
        marks=record.marks,
        fingerprint=branch.session.fingerprint,
        extras=record.extras,
        is_auto=True,
        has_kv=False,
        created_s=now_s,
    )


def _retain(txn: WriteTransaction, checkpoint: Checkpoint) -> None:
    """Count one more name of the model inputs behind the checkpoint's marks, as far as they are stored."""
    for digest in checkpoint.digests():
        info = read_info(txn, digest)
        if info is not None:
            named = dataclasses.replace(info, refs=info.refs + 1, last_use_s=int(checkpoint.created_s))
            txn.put(Table.BINDEX, digest, named.pack())
