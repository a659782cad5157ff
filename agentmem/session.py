"""A session: the branches of one agent's work, one of them active."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from agentmem.adapter import Adapter
from agentmem.batch.batch import Member
from agentmem.branch import Branch
from agentmem.chat.lint import LintMemory
from agentmem.checkpoints import BranchEntry
from agentmem.entries import MAIN, first_entry, has_open_tokens, rebuild_entries, save_entry
from agentmem.errors import AlreadyExistsError, ClosedError, InvalidInputError, NotFoundError
from agentmem.explain.live import LiveLibrary
from agentmem.ledger import Ledger
from agentmem.stats import ReuseReport
from agentmem.tiers.policy import Candidate
from agentmem.tree.checkpoint import Checkpoint, check_name
from agentmem.tree.fields import copy_extras
from agentmem.tree.render import render
from agentmem.verbs import Verbs

logger = logging.getLogger(__name__)


class Session(Verbs):
    """All branches of one agent's work. Verbs act on the active branch, or on `branch=`.

    One thread at a time works on a session: others wait. Several sessions may be used from several threads.
    """

    def __init__(
        self,
        ledger: Ledger,
        adapter: Adapter,
        entries: Iterable[BranchEntry],
        *,
        check_open: Callable[[], None],
        follow_model: Callable[[], None],
        tick: Callable[[], int],
    ) -> None:
        """Serve the stored branches `entries`; made by the store.

        Args:
            ledger: The session's records.
            adapter: The model.
            entries: Its branches.
            check_open: Raises when the store cannot be used any more.
            follow_model: Saves and rebuilds all sessions when the model is another one than when it was last used.
            tick: Gives a number that grows with each use, over all sessions.
        """
        self.ledger = ledger
        self.adapter = adapter
        self.lint = LintMemory()
        self._entries = {entry.name: entry for entry in entries} or {MAIN: first_entry(ledger)}
        is_known = ledger.record.active_branch in self._entries
        self._active = ledger.record.active_branch if is_known else next(iter(self._entries))
        self._check_open = check_open
        self._follow_model = follow_model
        self._tick = tick
        self._last_used: dict[str, int] = {}
        self._in_use: BranchEntry | None = None
        self._batched: tuple[Collection[BranchEntry], ...] = ()
        self._lock = threading.RLock()
        self._worker: int | None = None  # the thread that holds the lock
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Session {self.name!r}: {len(self._entries)} branches, active {self._active!r}>"

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # -- what there is

    @property
    def name(self) -> str:
        """The session's name."""
        return self.ledger.record.name

    @property
    def is_closed(self) -> bool:
        """Whether the session was closed; the store resumes it again."""
        return self._is_closed

    @property
    def active(self) -> Branch:
        """The branch that verbs act on by default."""
        return self.branch(self._active)

    @property
    def branches(self) -> list[str]:
        """The names of the branches, oldest first."""
        return [entry.name for entry in sorted(self._entries.values(), key=lambda entry: entry.created_s)]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The session's checkpoints, oldest first, with those that no branch reaches until gc takes them."""
        return sorted(self.ledger.tree, key=lambda checkpoint: checkpoint.created_s)

    @property
    def report(self) -> ReuseReport:
        """What the active branch's last operation reused, computed and moved, and why."""
        return self.active.report

    def branch(self, name: str) -> Branch:
        """Return a branch by name.

        Raises:
            NotFoundError: The session has no such branch; lists those it has.
        """
        return Branch(self, self._entry(name))

    def resolve(self, checkpoint: Checkpoint | str) -> Checkpoint:
        """Return a checkpoint by its record, a prefix of its id, or the name of a branch whose tip it is.

        Raises:
            NotFoundError: There is none.
            InvalidInputError: The prefix fits several.
        """
        if isinstance(checkpoint, Checkpoint):
            return self.ledger.tree.get(checkpoint.checkpoint_id)
        return self.ledger.tree.resolve(checkpoint, {name: entry.tip for name, entry in self._entries.items()})

    def log(self) -> str:
        """Return the tree as text: who forked where, tokens own and total, tier, score."""
        records = [self.ledger.branch_record(entry) for entry in self._entries.values()]
        notes = {entry.name: self._note(entry) for entry in self._entries.values()}
        return render(self.ledger.tree, title=self.name, branches=records, active=self._active, notes=notes)

    # -- verbs of the tree

    def fork(self, name: str, *, at: Checkpoint | str | None = None, branch: str | None = None) -> Branch:
        """Make a branch at a checkpoint, or where a branch stands now. Microseconds; no KV is copied.

        A branch with tokens after its tip is given an automatic checkpoint there, so that both share them.

        Args:
            name: The new branch's name.
            at: A checkpoint: the record, a prefix of its id, or the name of a branch whose tip it is.
            branch: The branch to fork where it stands; by default the active one. Not together with `at`.

        Raises:
            AlreadyExistsError: The name is taken.
            NotFoundError: There is no such checkpoint or branch.
        """
        if at is not None and branch is not None:
            raise InvalidInputError("fork takes at= (a checkpoint) or branch= (where it stands now), not both")
        return self.add(
            name, "fork", lambda: self._fork_here(name, branch) if at is None else self._fork_at(name, self.resolve(at))
        )

    def add(self, name: str, operation: str, make: Callable[[], BranchEntry]) -> Branch:
        """Enter the branch that `make` returns, unless its name is taken; `operation` is what the reflog says."""
        check_name("branch", name)
        with self._guarded():
            if name in self._entries:
                raise AlreadyExistsError(f"session {self.name!r} has a branch {name!r} already; choose another name")
            entry = self._entries[name] = make()
            self._last_used[name] = self._tick()
            self.ledger.write_branch(entry, self.ledger.move(entry, operation, None, entry.tip))
            return Branch(self, entry)

    def switch(self, name: str) -> Branch:
        """Make a branch the active one and bring its KV onto the device: only what is not there already.

        What cannot be had is reported, and computed when it is next needed.

        Raises:
            NotFoundError: The session has no such branch.
            CapacityError: The branch does not fit the device budget; the active branch stays what it was.
        """
        entry = self._entry(name)
        self._make_hot(entry, "switch")
        with self._guarded():
            if name != self._active:
                old = self._entries[self._active].tip
                self._active = name
                self.ledger.activate(name)
                self.ledger.write_branch(entry, self.ledger.move(entry, "switch", old, entry.tip))
        return Branch(self, entry)

    def drop(self, name: str) -> None:
        """Remove a branch. Its checkpoints can be forked by id until gc's grace has passed.

        Tokens after its tip are given an automatic checkpoint first, so that they can be had back too; their KV is not
        saved for that.

        Raises:
            NotFoundError: The session has no such branch.
            InvalidInputError: It is the active one.
        """
        with self._guarded():
            entry = self._entry(name)
            if name == self._active:
                raise InvalidInputError(f"branch {name!r} is the active one; switch to another before dropping it")
            if has_open_tokens(self.ledger, entry):
                self.ledger.mark(entry)
            del self._entries[name]
            self._last_used.pop(name, None)
            self.ledger.remove_branch(entry)
            entry.state.cool()
            self.ledger.states.forget_all_but(self._entries.values())

    # -- saving

    def flush(self) -> None:
        """Queue the records of all branches, metadata included. `Store.flush` waits for them."""
        with self._guarded():
            for entry in self._entries.values():
                self.ledger.write_branch(entry)

    def close(self) -> None:
        """Make everything durable, KV included, with automatic checkpoints, and give the device back."""
        with self._lock:
            if self._is_closed:
                return
            self._check_open()
            try:
                self.save()
            finally:
                self._is_closed = True
                self._release()

    def save(self) -> None:
        """Make everything durable, KV included, with automatic checkpoints."""
        self.flush()
        with self._guarded():
            for entry in self._entries.values():
                save_entry(self.ledger, entry)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other threads out, between operations.

        Raises:
            InvalidInputError: This thread is in the middle of an operation of the session.
        """
        with self._guarded():
            if self.is_in_use:
                self._check_same_model()
            yield

    def rebuild(self) -> None:
        """Make every branch anew from its records, as a resume would: the model is another one. Save first.

        Handles stay good: what they stand for has other KV now, that of the new model, as far as it is stored.
        """
        with self._guarded():
            pass  # whoever comes in does it, so that nothing old is left when it is interrupted

    def candidates(self, *, is_current: bool) -> list[Candidate[tuple["Session", str]]]:
        """List the branches with KV on the device.

        The one in use is pinned, and the active one of the session that is working (`is_current`).
        """
        return [
            Candidate(
                key=(self, entry.name),
                last_used=self._last_used.get(entry.name, 0),
                is_pinned=self._is_needed(entry) or (is_current and entry.name == self._active),
            )
            for entry in self._entries.values()
            if entry.state.cursor.length
        ]

    def evict(self, name: str) -> bool:
        """Save a branch's KV to host and disk and let the device forget it; return False when the session is busy."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            entry = self._entries.get(name)
            if entry is None or self._is_needed(entry):
                return False
            others = [
                other.state for other in self._entries.values() if other is not entry and other.state.cursor.length
            ]
            shared = max((entry.state.blocks.common_prefix(other.blocks) for other in others), default=0)
            self.ledger.demote(entry.state, shared)
            hot = [other for other in self._entries.values() if other.state.cursor.length]
            self.ledger.states.cool_all_but(hot)
            if not hot and not self.is_in_use:
                self.ledger.workspace.clear()
            return True
        finally:
            self._lock.release()

    @property
    def is_in_use(self) -> bool:
        """Whether an operation of the session is running."""
        return self._in_use is not None or len(self._batched) > 0

    @contextlib.contextmanager
    def using(self, entry: BranchEntry) -> Iterator[None]:
        """Keep other threads out and the branch on the device, while an operation runs."""
        if self._worker != threading.get_ident():
            self._follow_model()
        else:  # inside another operation, where it would be too late to follow
            self._check_same_model()
        with self._guarded():
            if self._entries.get(entry.name) is not entry:
                raise ClosedError(
                    f"branch {entry.name!r} was dropped from session {self.name!r}; this handle is of no use"
                )
            before, self._in_use = self._in_use, entry
            self._last_used[entry.name] = self._tick()
            try:
                self.ledger.states.warm_up(entry)
                yield
            finally:
                self._in_use = before

    @contextlib.contextmanager
    def batching(self, entries: Collection[BranchEntry]) -> Iterator[None]:
        """Keep other threads out, and `entries` on the device, while a batch of them runs; it may change them."""
        if self._worker != threading.get_ident():
            self._follow_model()
        with self._guarded():
            before, self._batched = self._batched, (*self._batched, entries)
            try:
                yield
            finally:
                self._batched = before

    def library(self, entry: BranchEntry) -> LiveLibrary:
        """Return the store as it stands, for explaining what a prompt would reuse: `entry` is compared first."""
        recent = sorted(self._entries.values(), key=lambda each: self._last_used.get(each.name, 0), reverse=True)
        return self.ledger.library([entry, *(each for each in recent if each is not entry)])

    # -- inside

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        with self._lock:
            self._check_open()
            if self._is_closed:
                raise ClosedError(f"session {self.name!r} is closed; resume it from the store")
            before, self._worker = self._worker, threading.get_ident()
            try:
                if not self.ledger.is_current:
                    rebuild_entries(self.ledger, list(self._entries.values()))
                yield
            finally:
                self._worker = before

    def _is_needed(self, entry: BranchEntry) -> bool:
        """Say whether a running operation needs the branch on the device."""
        return entry is self._in_use or any(entry is each for entries in self._batched for each in entries)

    def _check_same_model(self) -> None:
        if self.adapter.look() != self.ledger.record.fingerprint:
            raise InvalidInputError(
                f"the model's adapters or weights changed while session {self.name!r} was in use (`with ... cache()`): "
                f"leave that block first, then change the model"
            )

    def _entry(self, name: str) -> BranchEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise NotFoundError(f"session {self.name!r} has no branch {name!r}; it has {', '.join(self.branches)}")
        return entry

    def member(self, branch: str | Branch) -> Member:
        """Return a branch as a batch takes it."""
        name = branch if isinstance(branch, str) else branch.name
        return Member(name, self, self._entry(name))

    def chosen(self, name: str | None) -> Branch:
        """Return the branch called `name`; the active one for None."""
        return self.branch(self._active if name is None else name)

    def _make_hot(self, entry: BranchEntry, operation: str) -> None:
        with self.using(entry):
            entry.state.make_hot(operation)
            self.ledger.states.note_progress(entry)

    def _fork_here(self, name: str, branch: str | None) -> BranchEntry:
        source = self._entry(self._active if branch is None else branch)
        if has_open_tokens(self.ledger, source):
            self.ledger.mark(source)
        return BranchEntry(source.state.fork(name), source.tip, copy_extras(source.extras), time.time())

    def _fork_at(self, name: str, checkpoint: Checkpoint) -> BranchEntry:
        state = self.ledger.states.state_of(checkpoint.checkpoint_id).fork(name)
        return BranchEntry(state, checkpoint.checkpoint_id, copy_extras(checkpoint.extras), time.time())

    def _release(self) -> None:
        for entry in self._entries.values():
            entry.state.cool()
        self.ledger.close()

    def _note(self, entry: BranchEntry) -> str:
        state, score = entry.state, entry.extras.get("score")
        tier = "tokens" if not state.num_computed else "device" if state.is_hot else "disk"
        return tier if score is None else f"{tier}  score={score:.4g}" if isinstance(score, int | float) else tier
