"""What becomes of a session's branches when it is opened, saved, or met by another model: from records, and into them.

Knows nothing of locks or of the user's handles.
"""

import time
from collections.abc import Iterable, Sequence

from agentmem.checkpoints import BranchEntry
from agentmem.ledger import Ledger
from agentmem.state import BranchState
from agentmem.stats import Reason
from agentmem.tree.checkpoint import BranchRecord
from agentmem.tree.fields import copy_extras

MAIN = "main"
"""The name of a new session's first branch."""


def first_entry(ledger: Ledger) -> BranchEntry:
    """Make the empty branch that a new session starts with, and queue its record."""
    entry = BranchEntry(ledger.states.new_state(MAIN), None, {}, time.time())
    ledger.write_branch(entry, ledger.move(entry, "create", None, None))
    return entry


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
    return any(block.digest not in named for block in state.blocks)
