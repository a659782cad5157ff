"""A session: the branches of one agent's work, one of them active."""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

from agentmem.adapter import Adapter
from agentmem.batch.batch import Member
from agentmem.branch import Branch
from agentmem.chat.lint import LintMemory
from agentmem.checkpoints import BranchEntry
from agentmem.crowd import Crowd
from agentmem.entries import (
    MAIN,
    evict_entry,
    first_entry,
    fork_entry,
    fork_here,
    has_open_tokens,
    note_of,
    rebuild_entries,
    save_entry,
    step_aside,
)
from agentmem.errors import AlreadyExistsError, ClosedError, InvalidInputError
from agentmem.explain.live import LiveLibrary
from agentmem.hinting import Hinting, Key
from agentmem.ledger import Ledger
from agentmem.presence import present, taken_if_free
from agentmem.stats import ReuseReport
from agentmem.tiers.hints import Hints
from agentmem.tiers.policy import Candidate
from agentmem.tree.checkpoint import Checkpoint, check_name
from agentmem.tree.render import render
from agentmem.verbs import Verbs

T = TypeVar("T")


class Session(Hinting, Verbs):
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
        give_back: Callable[[Ledger], None],
        crowd: Crowd,
        hints: Hints[Key],
    ) -> None:
        """Serve the stored branches `entries`; made by the store.

        Args:
            ledger: The session's records.
            adapter: The model.
            entries: Its branches.
            check_open: Raises when the store cannot be used any more.
            follow_model: Saves and rebuilds all sessions when the model is another one than when it was last used.
            give_back: Lets others write to the session.
            crowd: Who works on the device at the same time.
            hints: What is known of the next use of every branch.
        """
        self.ledger = ledger
        self.adapter = adapter
        self.lint = LintMemory()
        self._entries = {entry.name: entry for entry in entries}
        if not self._entries and not ledger.damaged:
            self._entries[MAIN] = first_entry(ledger)
        is_known = ledger.record.active_branch in self._entries.keys() | ledger.damaged.keys()
        self._active = ledger.record.active_branch if is_known else next(iter(self._entries))
        self._check_open = check_open
        self._follow_model = follow_model
        self._give_back = give_back
        self._crowd = crowd
        self._hints = hints
        self._uses: dict[object, Collection[BranchEntry]] = {}  # the branches that running operations need
        self._lock = threading.RLock()
        self._workers: dict[object, int] = {}  # the thread that holds the lock, once for each time
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Session {self.name!r}: {len(self._entries)} branches, active {self._active!r}>"

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

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

    @property
    def damaged(self) -> dict[str, str]:
        """Branches whose tokens cannot be had, which are none of `branches`: by name, why not. `drop` takes them."""
        return dict(self.ledger.damaged)

    def branch(self, name: str) -> Branch:
        """Return a branch by name.

        Raises:
            NotFoundError: The session has no such branch; lists those it has.
            CorruptionError: Its tokens cannot be had; says why, and what to do.
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
        notes = {entry.name: note_of(entry) for entry in self._entries.values()}
        return render(self.ledger.tree, title=self.name, branches=records, active=self._active, notes=notes)

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

        def make() -> BranchEntry:
            if at is None:
                return fork_here(self.ledger, name, self.entry_of(branch))
            return fork_entry(self.ledger, name, self.resolve(at))

        return self.add(name, "fork", make)

    def add(self, name: str, operation: str, make: Callable[[], BranchEntry]) -> Branch:
        """Enter the branch that `make` returns, unless its name is taken; `operation` is what the reflog says."""
        check_name("branch", name)
        with self._guarded():
            if name in self._entries or name in self.ledger.damaged:
                raise AlreadyExistsError(f"session {self.name!r} has a branch {name!r} already; choose another name")
            entry = self._entries[name] = make()
            self._hints.touch((self.name, name))
            self.ledger.write_branch(entry, self.ledger.move(entry, operation, None, entry.tip))
            return Branch(self, entry)

    def switch(self, name: str, *, lazy: bool = False) -> Branch:
        """Make a branch the active one and bring its KV onto the device: only what is not there already.

        What cannot be had is reported, and computed when it is next needed. With `lazy` the KV stays where it is until
        a verb needs it: a forward pass over new tokens begins when the first layers have come.

        Raises:
            NotFoundError: The session has no such branch.
            CapacityError: The branch does not fit the device budget; the active branch stays what it was.
        """
        entry = self._entry(name)
        with self.using(entry):
            if not lazy:
                self.with_room(lambda: entry.state.make_hot("switch"))
            self.ledger.states.note_progress(entry)
        with self._guarded():
            if name != self._active:
                old = self._entries[self._active].tip if self._active in self._entries else None
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
            if name == self._active:
                raise InvalidInputError(f"branch {name!r} is the active one; switch to another before dropping it")
            if self.ledger.drop_damaged(name):
                return
            entry = self._entry(name)
            if has_open_tokens(self.ledger, entry):
                self.ledger.mark(entry)
            self.ledger.remove_branch(entry)
            del self._entries[name]
            self._hints.forget((self.name, name))
            entry.state.cool()
            self.ledger.states.forget_all_but(self._entries.values())

    def flush(self) -> None:
        """Queue the records of all branches, metadata included. `Store.flush` waits for them."""
        with self._guarded():
            for entry in self._entries.values():
                self.ledger.write_branch(entry)

    def close(self) -> None:
        """Make everything durable, KV included, with automatic checkpoints, and give device and session back.

        Raises:
            SessionLeasedError: Another handle took the session over; the session is closed all the same.
        """
        with self._lock:
            if self._is_closed:
                return
            self._check_open()
            try:
                self.save()
            finally:
                self._is_closed = True
                self.ledger.close(self._entries.values())
                self._give_back(self.ledger)

    def save(self) -> None:
        """Make everything durable, KV included, with automatic checkpoints."""
        self.flush()
        with self._guarded():
            for entry in self._entries.values():
                save_entry(self.ledger, entry)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other threads out, between operations. When the model is another one, branches are made anew for it.

        Raises:
            InvalidInputError: This thread is in the middle of an operation of the session.
        """
        with self._guarded():
            if self.is_in_use:
                self.ledger.require_same_model()
            yield

    def candidates(self, *, is_current: bool) -> list[Candidate[tuple["Session", str]]]:
        """List the branches with KV on the device.

        The one in use is pinned, and the active one of the session that is working (`is_current`).
        """
        return [
            Candidate(
                key=(self, entry.name),
                is_pinned=self._is_needed(entry) or (is_current and entry.name == self._active),
                priority=self._hints.priority((self.name, entry.name)),
            )
            for entry in list(self._entries.values())
            if entry.state.cursor.length
        ]

    def evict(self, name: str) -> bool:
        """Save a branch's KV to host and disk and let the device forget it; return False when the session is busy."""
        with self.idle() as is_idle:
            entry = self._entries.get(name)
            if not is_idle or entry is None or self._is_needed(entry):
                return False
            is_last = evict_entry(self.ledger, entry, self._entries.values())
            if is_last and not self.is_in_use:
                self.ledger.workspace.clear()
            return True

    def idle(self) -> contextlib.AbstractContextManager[bool]:
        """Keep other threads out, and say whether none is in. Does not wait."""
        return taken_if_free(self._lock)

    @property
    def entries(self) -> list[BranchEntry]:
        """What is written of each branch."""
        return list(self._entries.values())

    @property
    def is_in_use(self) -> bool:
        """Whether an operation of the session is running."""
        return len(self._uses) > 0

    @contextlib.contextmanager
    def using(self, entry: BranchEntry, *, is_computing: bool = True) -> Iterator[None]:
        """Keep other threads out and the branch on the device, while an operation runs, which follows the model."""
        with self.batching([entry], is_computing=is_computing):
            if self._entries.get(entry.name) is not entry:
                raise ClosedError(f"branch {entry.name!r} was dropped from session {self.name!r}; its handle is no use")
            self._hints.use((self.name, entry.name))
            self.ledger.states.warm_up(entry)
            yield

    @contextlib.contextmanager
    def batching(self, entries: Collection[BranchEntry], *, is_computing: bool = True) -> Iterator[None]:
        """Keep other threads out, and `entries` on the device, while a batch of them runs; it may change them."""
        if self._is_working:  # inside another operation, where it would be too late to follow
            self.ledger.require_same_model()
        elif is_computing:
            self._follow_model()
        with self._crowd.taken(self._lock), self._guarded(), present(self._uses, entries):
            yield

    def with_room(self, work: Callable[[], T]) -> T:
        """Do work that needs room on the device, and that may be done again when others had the room."""
        return self._crowd.with_room(work, lambda: len(self._uses) == 1 and step_aside(self.ledger, self.entries))

    def library(self, entry: BranchEntry) -> LiveLibrary:
        """Return the store as it stands, for explaining what a prompt would reuse: `entry` is compared first."""
        recent = sorted(
            self._entries.values(), key=lambda each: self._hints.used_s((self.name, each.name)), reverse=True
        )
        return self.ledger.library([entry, *(each for each in recent if each is not entry)])

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        key = object()
        with self._lock:
            try:
                self._workers[key] = threading.get_ident()  # as `present` does, which costs a microsecond
                self._check_current()
                yield
            finally:
                self._workers.pop(key, None)

    def _check_current(self) -> None:
        self._check_open()
        if self._is_closed:
            raise ClosedError(f"session {self.name!r} is closed; resume it from the store")
        self.ledger.lease.check()
        if not self.ledger.is_current:
            rebuild_entries(self.ledger, list(self._entries.values()))

    @property
    def _is_working(self) -> bool:
        """Whether this thread is inside of an operation of the session."""
        return threading.get_ident() in self._workers.values()

    def _is_needed(self, entry: BranchEntry) -> bool:
        """Say whether a running operation needs the branch on the device."""
        return any(entry is each for entries in tuple(self._uses.values()) for each in entries)

    def _entry(self, name: str) -> BranchEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise self.ledger.no_branch(name, self.branches)
        return entry

    def member(self, branch: str | Branch) -> Member:
        """Return a branch as a batch takes it."""
        name = branch if isinstance(branch, str) else branch.name
        return Member(name, self, self._entry(name))

    def entry_of(self, branch: str | None) -> BranchEntry:
        """Return what is known of a branch; of the active one for None."""
        return self._entry(self._active if branch is None else branch)

    def chosen(self, name: str | None) -> Branch:
        """Return the branch called `name`; the active one for None."""
        return self.branch(self._active if name is None else name)
