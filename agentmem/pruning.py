"""Let go of what retention does not keep, and of what it gives back tell the bytes.

Knows nothing of open sessions: whoever prunes beside them says which to leave out, and lets the others know.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from agentmem._future import Future
from agentmem._lmdb import Environment, Level, ReadTransaction, WriteTransaction
from agentmem.dropping import drop, leaving
from agentmem.errors import AgentMemError, CorruptionError, InvalidInputError
from agentmem.ids import BlockDigest, CheckpointId, SessionId, short
from agentmem.leases import leased_by_others, require_free
from agentmem.retention import Change, Plan, Retention, make_plan
from agentmem.tiers.blockrows import BlockInfo, read_info
from agentmem.tiers.disk import DiskTier
from agentmem.tree import nodes, pins, refs, rows
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import SessionRecord

_NOBODY: Mapping[str, Callable[[str], None]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedItem:
    """One thing that goes.

    Attributes:
        session: Name of its session.
        what: "dropped" (a branch), "merged" (a checkpoint, into the next one) or "thinned" (a checkpoint's own KV).
        name: The branch's name, or the checkpoint's id in hex.
        message: The checkpoint's message; "" of a branch.
        num_tokens: Tokens from the root to there.
        nbytes: Stored bytes that nobody needs without it.
    """

    session: str
    what: str
    name: str
    message: str
    num_tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReport:
    """What pruning let go of, or with `dry_run` would.

    Attributes:
        items: One by one.
        nbytes: Stored bytes that nobody needs any more: gc gives them back once its grace is over.
        skipped: Names of sessions that were left out, because somebody is working on them.
        damaged: What could not be read, or was named otherwise when its turn came; it was left as it is.
        is_dry_run: Nothing was changed.
    """

    items: tuple[PrunedItem, ...]
    nbytes: int
    skipped: tuple[str, ...]
    damaged: tuple[str, ...]
    is_dry_run: bool


def prune(
    environment: Environment,
    catalog: Catalog,
    disk: DiskTier,
    retention: Retention,
    *,
    now_s: float,
    spared: Collection[SessionId] = (),
    drop: Mapping[str, Callable[[str], None]] = _NOBODY,
    dry_run: bool = False,
) -> tuple[PruneReport, dict[SessionId, list[Change]]]:
    """Let go of what `retention` does not keep.

    Args:
        environment: The store.
        catalog: Its catalog.
        disk: Its blocks.
        retention: What to keep.
        now_s: Unix time.
        spared: Sessions that are left as they are, beside those that other handles write to.
        drop: By the name of a session that is open: what drops a branch of it.
        dry_run: Change nothing; say what would go.

    Returns:
        The report, and the changes that were made of each session.

    Raises:
        ReadOnlyError: The store cannot be written, and this is no dry run.
    """
    damaged: list[str] = []
    with environment.read() as txn:
        sessions = catalog.sessions(txn, [])
        spared = {*spared, *leased_by_others(txn, environment)}
        plans = [
            _plan_of(txn, catalog, session, retention, now_s, damaged)
            for session in sessions
            if session.session_id not in spared
        ]
        items = _items(txn, plans)
    made: dict[SessionId, list[Change]] = {}
    if not dry_run:
        work = _Work(environment, catalog, disk, now_s, damaged)
        made = {plan.session.session_id: work.carry_out(plan, drop.get(plan.session.name)) for plan in plans}
    report = PruneReport(
        items=tuple(items),
        nbytes=sum(item.nbytes for item in items),
        skipped=tuple(session.name for session in sessions if session.session_id in spared),
        damaged=tuple(damaged),
        is_dry_run=dry_run,
    )
    return report, made


def _plan_of(
    txn: ReadTransaction,
    catalog: Catalog,
    session: SessionRecord,
    retention: Retention,
    now_s: float,
    damaged: list[str],
) -> Plan:
    """Plan one session; a session of which something cannot be read is left as it is."""
    errors: list[CorruptionError] = []
    branches = catalog.branches(txn, session.session_id, errors)
    checkpoints = catalog.checkpoints(txn, session.session_id, errors)
    pinned = {CheckpointId(node[rows.SESSION_ID_NBYTES :]) for node in pins.each(txn, session.session_id)}
    if errors:
        damaged.append(f"session {session.name!r} was left as it is: {errors[0]}")
        return Plan(session, [], [], {})
    return make_plan(session, branches, checkpoints, pinned, retention, now_s)


# -- what it gives back


def _items(txn: ReadTransaction, plans: Sequence[Plan]) -> list[PrunedItem]:
    """List what goes, each with the bytes that nobody needs once it and all before it in the list are gone."""
    ledger = _Ledger(txn)
    return [item for plan in plans for item in (*_branch_items(plan, ledger), *_change_items(plan, ledger))]


class _Ledger:
    """Counts references to blocks down, and tells which bytes nobody needs any more."""

    def __init__(self, txn: ReadTransaction) -> None:
        self._txn = txn
        self._infos: dict[BlockDigest, BlockInfo | None] = {}
        self._refs: Counter[BlockDigest] = Counter()

    def release(self, digests: Iterable[BlockDigest]) -> int:
        """Count one name less for each; return the stored bytes of those that lose their last one."""
        return sum(self._release(digest, number) for digest, number in Counter(digests).items())

    def _release(self, digest: BlockDigest, number: int) -> int:
        if digest not in self._infos:
            self._infos[digest] = info = _readable(self._txn, digest)
            self._refs[digest] = 0 if info is None else info.refs
        info = self._infos[digest]
        self._refs[digest] -= number
        is_last = info is not None and info.is_counted and self._refs[digest] == 0
        return info.stored_nbytes if info is not None and is_last else 0


def _readable(txn: ReadTransaction, digest: BlockDigest) -> BlockInfo | None:
    try:
        return read_info(txn, digest)
    except CorruptionError:
        return None


def _branch_items(plan: Plan, ledger: _Ledger) -> Iterable[PrunedItem]:
    left = plan.names.copy()
    for branch in plan.branches:
        tip = None if branch.tip is None else plan.checkpoints.get(branch.tip)
        nbytes, at = 0, None if branch.num_open else tip
        while at is not None:
            left[at.checkpoint_id] -= 1
            if left[at.checkpoint_id]:
                break
            nbytes += ledger.release(at.digests())
            at = None if at.parent_id is None else plan.checkpoints.get(at.parent_id)
        num_tokens = branch.num_open + (0 if tip is None else tip.num_tokens)
        yield PrunedItem(
            session=plan.session.name,
            what="dropped",
            name=branch.name,
            message="",
            num_tokens=num_tokens,
            nbytes=nbytes,
        )


def _change_items(plan: Plan, ledger: _Ledger) -> Iterable[PrunedItem]:
    for change in plan.changes:
        kept = set(change.new.digests())
        for checkpoint in change.old:
            stays = checkpoint is change.old[-1]
            released = [digest for digest in checkpoint.digests() if digest not in kept]
            if released or not stays:
                yield PrunedItem(
                    session=plan.session.name,
                    what="thinned" if stays else "merged",
                    name=checkpoint.checkpoint_id.hex(),
                    message=checkpoint.message,
                    num_tokens=checkpoint.num_tokens,
                    nbytes=ledger.release(released),
                )


# -- doing it


class _Work:
    """Carries out plans, one operation a branch and a change."""

    def __init__(
        self, environment: Environment, catalog: Catalog, disk: DiskTier, now_s: float, damaged: list[str]
    ) -> None:
        self._environment = environment
        self._catalog = catalog
        self._disk = disk
        self._now_s = now_s
        self._damaged = damaged

    def carry_out(self, plan: Plan, drop_open: Callable[[str], None] | None) -> list[Change]:
        """Do what was planned for a session; return the changes that were made."""
        for branch in plan.branches:
            if drop_open is not None:
                drop_open(branch.name)
            else:
                work = partial(self._drop, plan=plan, name=branch.name)
                self._wait(plan, self._environment.submit(work, level=Level.REMOVAL))
        futures = [
            self._environment.submit(partial(self._apply, plan=plan, change=change), level=Level.RELAXED)
            for change in plan.changes
        ]
        self._environment.submit(lambda _: None, level=Level.REMOVAL).result()
        return [change for change, future in zip(plan.changes, futures, strict=True) if self._wait(plan, future)]

    def _drop(self, txn: WriteTransaction, *, plan: Plan, name: str) -> None:
        require_free(txn, self._environment, plan.session.session_id, plan.session.name)
        drop(txn, self._catalog, leaving(txn, self._catalog, plan.session.name, name), self._now_s)

    def _apply(self, txn: WriteTransaction, *, plan: Plan, change: Change) -> None:
        """Put one record in the place of several.

        Raises:
            SessionLeasedError: Another handle has opened the session meanwhile.
            InvalidInputError: One of them is another by now, or is named by others too.
        """
        require_free(txn, self._environment, plan.session.session_id, plan.session.name)
        keys = [rows.node_key(each.session_id, each.checkpoint_id) for each in change.old]
        for key, checkpoint in zip(keys, change.old, strict=True):
            counts = refs.find(txn, key)
            if nodes.find(txn, key) != checkpoint or (
                checkpoint is not change.old[-1] and (counts is None or counts.refs != 1)
            ):
                raise InvalidInputError(f"checkpoint {short(checkpoint.checkpoint_id)} changed meanwhile; prune again")
        self._disk.retain(txn, change.new.digests())
        for key, checkpoint in zip(keys, change.old, strict=True):
            self._disk.release(txn, checkpoint.digests())
            nodes.remove(txn, key)
            if checkpoint is not change.old[-1]:
                refs.remove(txn, key)
        nodes.put(txn, change.new)

    def _wait(self, plan: Plan, future: "Future[None]") -> bool:
        """Say whether an operation was carried out; note it when something stood in its way."""
        try:
            future.result()
        except AgentMemError as error:
            self._damaged.append(f"session {plan.session.name!r}: {error}")
            return False
        return True
