"""Retention: which checkpoints and branches a store keeps, and what becomes of the others. No token is lost.

A checkpoint that is not kept goes in one of two ways. Where one checkpoint alone goes on from it, that one takes over
its tokens and full blocks (merged). Where several do, its record stays and lets go of what only it needs, its tail and
its layer states (thinned). Pure functions over records; knows nothing of storage.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agentmem.ids import CheckpointId
from agentmem.tree.checkpoint import BranchRecord, Checkpoint, SessionRecord
from agentmem.tree.merging import can_join, joined, thinned


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What to keep. Whatever any rule keeps, stays; pins and the active branch always do.

    Attributes:
        older_than_s: Only what is older may go: checkpoints made, branches moved on, so many seconds ago or earlier.
        keep_named: Keep checkpoints with a message.
        keep_leaves: Keep branches. When False, those that are old enough are dropped, but for active ones and those
            whose tip another rule keeps.
        keep_branch_points: Keep checkpoints from which several others or branches go on.
    """

    older_than_s: float = 0.0
    keep_named: bool = True
    keep_leaves: bool = True
    keep_branch_points: bool = True


@dataclass(frozen=True, slots=True)
class Change:
    """A checkpoint's record that takes the place of others.

    Attributes:
        old: The records as they are: those that go, parents first, and at the end the one that stays.
        new: What the one that stays becomes.
    """

    old: tuple[Checkpoint, ...]
    new: Checkpoint

    @property
    def removed(self) -> tuple[CheckpointId, ...]:
        """Ids of the checkpoints that are no more."""
        return tuple(checkpoint.checkpoint_id for checkpoint in self.old[:-1])


@dataclass(slots=True)
class Plan:
    """What goes of one session.

    Attributes:
        session: The session.
        branches: Branches to drop.
        changes: Checkpoints to merge and to thin.
        checkpoints: All of its checkpoints.
        names: How often each is named, by children, branches and pins.
    """

    session: SessionRecord
    branches: list[BranchRecord]
    changes: list[Change]
    checkpoints: Mapping[CheckpointId, Checkpoint]
    names: Counter[CheckpointId] = field(default_factory=Counter)


def make_plan(
    session: SessionRecord,
    branches: Sequence[BranchRecord],
    checkpoints: Iterable[Checkpoint],
    pinned: Collection[CheckpointId],
    retention: Retention,
    now_s: float,
) -> Plan:
    """Say what goes of one session. Only what branches and pins reach is looked at: the rest is gc's."""
    known = {checkpoint.checkpoint_id: checkpoint for checkpoint in checkpoints}
    names = Counter(checkpoint.parent_id for checkpoint in known.values() if checkpoint.parent_id is not None)
    tips = {branch.tip for branch in branches if branch.tip is not None}
    names.update(branch.tip for branch in branches if branch.tip is not None)
    names.update(pinned)
    plan = Plan(session, [], [], known, names)
    before_s = now_s - retention.older_than_s
    marks = [mark for of in (*(c.marks for c in known.values()), *(b.marks for b in branches)) for mark in of]
    origins = {mark.origin[0] for mark in marks if mark.origin is not None}

    def is_kept(checkpoint: Checkpoint) -> bool:
        is_named = retention.keep_named and bool(checkpoint.message)
        is_needed = checkpoint.checkpoint_id in tips | origins or checkpoint.checkpoint_id in pinned
        is_crossing = retention.keep_branch_points and names[checkpoint.checkpoint_id] > 1
        return is_named or is_needed or is_crossing or checkpoint.created_s > before_s

    if not retention.keep_leaves:
        plan.branches = [b for b in branches if _may_drop(b, session, known, pinned, retention, before_s)]
    staying = {branch.tip for branch in branches if branch not in plan.branches and branch.tip is not None}
    reached = _reached(known, [*staying, *pinned])
    goes = {checkpoint_id for checkpoint_id in reached if not is_kept(known[checkpoint_id])}
    taken: set[CheckpointId] = set()
    for each in reached:  # the only child of a checkpoint comes before it
        change = None if each in taken else _change(known[each], known, names, goes, session)
        if change is not None:
            plan.changes.append(change)
            taken.update(change.removed)
    return plan


def _may_drop(
    branch: BranchRecord,
    session: SessionRecord,
    known: Mapping[CheckpointId, Checkpoint],
    pinned: Collection[CheckpointId],
    retention: Retention,
    before_s: float,
) -> bool:
    tip = None if branch.tip is None else known.get(branch.tip)
    # Closing a session writes all of its branches: only one with open tokens was certainly changed then.
    changed_s = max(branch.created_s, 0.0 if tip is None else tip.created_s, branch.updated_s if branch.num_open else 0)
    is_kept = tip is not None and (tip.checkpoint_id in pinned or (retention.keep_named and bool(tip.message)))
    return branch.name != session.active_branch and changed_s <= before_s and not is_kept


def _reached(known: Mapping[CheckpointId, Checkpoint], ends: Iterable[CheckpointId]) -> list[CheckpointId]:
    """Return the checkpoints that lie on the way to `ends`, each once."""
    found: dict[CheckpointId, None] = {}
    for end in ends:
        at: CheckpointId | None = end
        while at is not None and at in known and at not in found:
            found[at] = None
            at = known[at].parent_id
    return list(found)


def _change(
    checkpoint: Checkpoint,
    known: Mapping[CheckpointId, Checkpoint],
    names: Mapping[CheckpointId, int],
    goes: Collection[CheckpointId],
    session: SessionRecord,
) -> Change | None:
    """Return what becomes of a checkpoint whose record stays, None when that is nothing."""
    new, old = checkpoint, [checkpoint]
    if checkpoint.checkpoint_id in goes and checkpoint.fingerprint == session.fingerprint:
        new = thinned(checkpoint, session.block_size)
    while new.parent_id in goes and new.parent_id is not None:
        parent = known[new.parent_id]
        if names[parent.checkpoint_id] != 1 or not can_join(parent, new):
            break
        new, old = joined(parent, new), [parent, *old]
    return None if new == checkpoint else Change(tuple(old), new)
