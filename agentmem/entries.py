"""What becomes of a session's branches when it is opened, saved, or met by another model: from records, and into them.

Knows nothing of locks or of the user's handles.
"""

import logging
import time
from collections.abc import Collection, Iterable, Sequence

from agentmem._lmdb import ReadTransaction
from agentmem.checkpoints import BranchEntry
from agentmem.errors import CorruptionError
from agentmem.ledger import Ledger
from agentmem.reasons import Reason
from agentmem.state import BranchState
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import BranchRecord, Checkpoint
from agentmem.tree.fields import copy_extras

logger = logging.getLogger(__name__)

MAIN = "main"
"""The name of a new session's first branch."""


def first_entry(ledger: Ledger) -> BranchEntry:
    """Make the empty branch that a new session starts with, and queue its record."""
    entry = BranchEntry(ledger.states.new_state(MAIN), None, {}, time.time())
    ledger.write_branch(entry, ledger.move(entry, "create", None, None))
    return entry


def fork_entry(ledger: Ledger, name: str, checkpoint: Checkpoint) -> BranchEntry:
    """Return a new branch that stands at a checkpoint, with its metadata."""
    state = ledger.states.state_of(checkpoint.checkpoint_id).fork(name)
    return BranchEntry(state, checkpoint.checkpoint_id, copy_extras(checkpoint.extras), time.time())


def fork_here(ledger: Ledger, name: str, source: BranchEntry) -> BranchEntry:
    """Return a new branch where another one stands, which gets a checkpoint there if it has tokens after its tip."""
    if has_open_tokens(ledger, source):
        ledger.mark(source)
    return BranchEntry(source.state.fork(name), source.tip, copy_extras(source.extras), time.time())


def evict_entry(ledger: Ledger, entry: BranchEntry, entries: Collection[BranchEntry]) -> bool:
    """Save a branch's KV to host and disk and let the device forget it; say whether it was the last of `entries`."""
    others = [other.state for other in entries if other is not entry and other.state.cursor.length]
    shared = max((entry.state.blocks.common_prefix(other.blocks) for other in others), default=0)
    ledger.demote(entry.state, shared)
    hot = [other for other in entries if other.state.cursor.length]
    ledger.states.cool_all_but(hot)
    return not hot


def step_aside(ledger: Ledger, entries: Iterable[BranchEntry]) -> bool:
    """Leave the device to others, with all branches of a session; always can."""
    for entry in entries:
        ledger.demote(entry.state, 0)
    ledger.states.cool_all_but(())
    ledger.workspace.clear()
    return True


def restore_entry(ledger: Ledger, record: BranchRecord, open_tokens: Iterable[int]) -> BranchEntry:
    """Return a stored branch, cold, with the tokens after its tip."""
    states = ledger.states
    state = states.new_state(record.name) if record.tip is None else states.state_of(record.tip).fork(record.name)
    state.extend(open_tokens, record.marks)
    num_fed = len(state.tokens) - record.num_pending
    if num_fed > state.num_computed and state.loss is Reason.COMPLETE:
        state.loss = Reason.NOT_SAVED
    state.lost_stop = max(state.lost_stop, num_fed)
    return BranchEntry(state, record.tip, dict(record.extras), record.created_s)


def restore_entries(ledger: Ledger, catalog: Catalog, txn: ReadTransaction) -> list[BranchEntry]:
    """Return the stored branches of a session, cold; those whose tokens cannot be had go to `ledger.damaged`."""
    entries: list[BranchEntry] = []
    for name, found in catalog.open_branches(txn, ledger.record.session_id):
        try:
            if isinstance(found, CorruptionError):
                raise found
            record, open_tokens = found
            ledger.tree.require_complete(record.tip)
            entries.append(restore_entry(ledger, record, open_tokens))
        except CorruptionError as error:
            logger.warning("session %s: branch %s cannot be opened: %s", ledger.record.name, name, error)
            ledger.damaged[name] = str(error)
    return sorted(entries, key=lambda entry: entry.created_s)


def has_open_tokens(ledger: Ledger, entry: BranchEntry) -> bool:
    """Say whether a branch has tokens after its tip."""
    return len(entry.state.tokens) > ledger.tip_length(entry)


def save_entry(ledger: Ledger, entry: BranchEntry) -> None:
    """Give a branch, and the checkpoints below it, a durable checkpoint of all its KV, if they lack one."""
    ledger.states.warm_up(entry)
    is_open = has_open_tokens(ledger, entry)
    if not is_open:
        ledger.attach_kv(entry)
    if is_open or _has_unnamed_kv(ledger, entry):
        ledger.commit(entry, message="", extras=copy_extras(entry.extras), is_auto=True)


def note_of(entry: BranchEntry) -> str:
    """Say where a branch's KV is, and its score when the user keeps one."""
    state, score = entry.state, entry.extras.get("score")
    tier = "tokens" if not state.num_computed else "device" if state.is_hot else "disk"
    return f"{tier}  score={score:.4g}" if isinstance(score, int | float) else tier


def rebuild_entries(ledger: Ledger, entries: Sequence[BranchEntry]) -> None:
    """Make branches that were saved anew from their records, as a resume would, for the model is another one now.

    The entries stay what they are, so that handles stay good. What they had on the device goes to the host tier. When
    it is interrupted, it can be done again.
    """
    records = [ledger.branch_record(entry) for entry in entries]
    for entry in entries:
        ledger.demote(entry.state, 0)
    ledger.states.clear()
    for entry, record in zip(entries, records, strict=True):
        open_tokens = entry.state.tokens.slice(ledger.tip_length(entry))
        entry.state = _successor(entry.state, restore_entry(ledger, record, open_tokens).state)
    ledger.follow_model()


def _successor(old: BranchState, new: BranchState) -> BranchState:
    """Return `new`, with what is told about a branch over its whole life."""
    new.num_fed, new.num_rewinds, new.last_report = old.num_fed, old.num_rewinds + 1, old.last_report
    return new


def _has_unnamed_kv(ledger: Ledger, entry: BranchEntry) -> bool:
    """Say whether the branch has KV that no checkpoint names: computed late, again after a loss, or by another model.

    A single token does not count: a checkpoint leaves the last one pending, and whoever goes on computes it.
    """
    if entry.tip is None:
        return False
    state = entry.state
    ours = [each for each in ledger.tree.lineage(entry.tip) if each.fingerprint == ledger.record.fingerprint]
    named = {digest for checkpoint in ours for digest in checkpoint.digests()}
    num_named = max((each.num_tokens - each.num_pending for each in ours[:1] if each.has_kv), default=0)
    last_state = max((ref.position for each in ours for ref in each.states), default=0)
    is_state_late = bool(state.spec.states) and state.num_computed - last_state > 1
    if state.num_kv - num_named > 1 or is_state_late:
        return True
    state.save_blocks()
    return any(block.digest not in named for block in state.blocks) or state.has_other_states(ours[:1], named)
