"""Several branches that go on together: what they share is held, and attended, once."""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from agentmem.adapter import Adapter
from agentmem.batch.feeder import Feeder
from agentmem.batch.generation import Continued, OnToken, generate, next_logits
from agentmem.batch.report import BatchReport, Score
from agentmem.batch.scoring import score
from agentmem.branch import Branch, Generation
from agentmem.checkpoints import BranchEntry
from agentmem.errors import ClosedError, InvalidInputError, NotFoundError
from agentmem.ledger import Ledger
from agentmem.operation import Operation
from agentmem.state import BranchState

Content = str | Iterable[int]
"""Text or token ids."""

Guard = contextlib.AbstractContextManager[None]


class BatchOwner(Protocol):
    """What a batch needs of a session."""

    ledger: Ledger
    adapter: Adapter

    @property
    def branches(self) -> list[str]:
        """The names of the session's branches."""
        ...

    def batching(self, entries: Collection[BranchEntry]) -> Guard:
        """Keep other threads out, and `entries` on the device, while a batch of them runs."""
        ...

    def member(self, branch: str | Branch) -> "Member":
        """Return a branch as a batch takes it."""
        ...

    def fork(self, name: str, *, branch: str) -> Branch:
        """Make a branch where another one stands."""
        ...

    def drop(self, name: str) -> None:
        """Remove a branch."""
        ...


@dataclass(frozen=True, slots=True)
class Member:
    """A branch in a batch.

    Attributes:
        key: What the batch calls it.
        owner: Its session.
        entry: What is kept of it.
    """

    key: str
    owner: BatchOwner
    entry: BranchEntry

    @property
    def state(self) -> BranchState:
        """Its tokens and KV."""
        return self.entry.state


Resolve = Callable[[str | Branch], Member]
"""Finds a branch that is to join."""


class Batch:
    """Branches that are fed together, in a `with` block.

    What they share stays where it is and is attended once for all of them; everything else of each is in a row of its
    own. Inside the block other threads wait, and the branches stay on the device; they may be forked, checkpointed and
    read as ever. Afterwards each has its new tokens, and their KV, without a copy.

    Branches are called by their names; in `Store.batch` by "session/branch".
    """

    def __init__(self, branches: Iterable[str | Branch], resolve: Resolve) -> None:
        """Stand for `branches`; made by `Session.batch` and `Store.batch`."""
        self._resolve = resolve
        self._members: dict[str, Member] = {}
        self._entries: list[BranchEntry] = []
        self._feeder: Feeder | None = None
        for branch in branches:
            self._add(resolve(branch))
        if not self._members:
            raise InvalidInputError("a batch needs at least one branch; none was named")

    def __repr__(self) -> str:
        return f"<Batch of {', '.join(self._members)}>"

    @contextlib.contextmanager
    def running(self) -> Iterator["Batch"]:
        """Hold the branches together for the time of a `with` block.

        A generator rather than `__enter__` and `__exit__`: when an interrupt arrives just between block and exit, all
        is let go as soon as the error has been handled, for nobody but the block has hold of it.
        """
        owners = {member.owner.ledger.record.session_id: member.owner for member in self._members.values()}
        with contextlib.ExitStack() as held:
            for _, owner in sorted(owners.items()):  # always in the same order, so that two batches cannot deadlock
                held.enter_context(owner.batching(self._entries))
            first = next(iter(self._members.values()))
            feeder = self._feeder = Feeder(first.state.runtime)
            try:
                yield self
            finally:
                self._feeder = None
                feeder.close()

    @property
    def names(self) -> list[str]:
        """The branches of the batch, in the order in which they came."""
        return list(self._members)

    @property
    def report(self) -> BatchReport:
        """How the branches are fed, what they share, and what it saves."""
        return self._running().report([member.state for member in self._members.values()])

    # -- feeding

    def forward(self, tokens: Mapping[str, Content] | Sequence[Content]) -> dict[str, Tensor]:
        """Feed branches their tokens, after what is pending; return the logits `[T, V]` of each one's tokens.

        Args:
            tokens: Text or ids per branch, by name, or for all branches in order. They may differ in length; what is
                not named is not fed. With none for a branch, its logits are those of its last token, `[1, V]`.

        Raises:
            InvalidInputError: An id is not in the vocabulary, or a branch is empty and nothing was given for it.
            CapacityError: The rows do not fit the device budget. Whatever is raised, all branches keep their tokens as
                they were.
        """
        asked = self._read_each(tokens)
        with self._working([(member, len(ids)) for member, ids in asked]) as feeder:
            busy = [(member, ids) for member, ids in asked if ids]
            idle = [member for member, ids in asked if not ids]
            last = next_logits(feeder, [member.state for member in idle])
            found = {member.key: logits.unsqueeze(0) for member, logits in zip(idle, last, strict=True)}
            fed = [[*member.state.pending, *ids] for member, ids in busy]
            logits = feeder.feed([member.state for member, _ in busy], fed, [len(ids) for _, ids in busy])
            found |= {member.key: rows for (member, _), rows in zip(busy, logits, strict=True)}
            return {member.key: found[member.key] for member, _ in asked}

    def generate(
        self,
        branches: Iterable[str] | None = None,
        *,
        per_branch: Mapping[str, Mapping[str, object]] | None = None,
        on_token: OnToken | None = None,
        **options: object,
    ) -> dict[str, Generation]:
        """Continue branches, each until it ends, as `Branch.generate` would.

        A branch that ends leaves the passes; the others go on.

        Args:
            branches: Which ones; by default all.
            per_branch: Options of single branches, over the common ones: `{"a": {"seed": 7, "stop_strings": ["."]}}`.
            on_token: Is called with a branch's name and every token that was chosen for it; when it returns true, the
                branch ends.
            **options: transformers' own options: max_new_tokens, do_sample, temperature, eos_token_id, stop_strings,
                stopping_criteria, logits_processor, generation_config ...; and `seed`: the branch at index i samples
                from `seed + i`, as `branch.generate(seed=seed + i)` does.

        Returns:
            The new ids of each, as sampled. The last one, which the model was not fed, is pending afterwards.

        Raises:
            InvalidInputError: A branch is empty, or an option is not known or needs more branches than there are.
            KeyboardInterrupt: Or whatever else stops it early: all branches keep their tokens as they were before.
        """
        members = [self._member(name) for name in (self.names if branches is None else branches)]
        chosen = [self._options(index, member, options, per_branch or {}) for index, member in enumerate(members)]
        with self._working([(member, 0) for member in members]) as feeder:
            continued = [
                Continued(member.key, member.state, member.owner.adapter.sampler(member.state.tokens.slice(), own))
                for member, own in zip(members, chosen, strict=True)
            ]
            feeder.expect(options.get("max_new_tokens"))
            generate(feeder, continued, on_token)
        decode = members[0].owner.adapter.decode if members else str
        return {each.key: Generation(tuple(each.tokens), decode(each.tokens)) for each in continued}

    def score(self, continuations: Mapping[str, Content | Sequence[Content]]) -> dict[str, list[Score]]:
        """Return how likely the model finds continuations of branches, which stay as they are.

        All continuations of all branches are fed together: what they share is attended once.

        Args:
            continuations: For each branch one continuation, text or ids, or a list of several.

        Raises:
            InvalidInputError: An id is not in the vocabulary, or a branch or a continuation is empty.
        """
        members = [self._member(name) for name in continuations]
        read = [[self._read(member, each) for each in _several(continuations[member.key])] for member in members]
        with self._working([(member, 0) for member in members]):
            tried = [(member, ids) for member, several in zip(members, read, strict=True) for ids in several]
            found = iter(score([member.state.fork(member.key) for member, _ in tried], [ids for _, ids in tried]))
        return {member.key: [next(found) for _ in several] for member, several in zip(members, read, strict=True)}

    # -- who is in it

    def fork(self, name: str, into: int | Iterable[str]) -> list[str]:
        """Fork a branch into others that join the batch; return their names. Copies no KV.

        Args:
            name: The branch, which stays.
            into: How many, or the names of the new branches in their session.

        Raises:
            AlreadyExistsError: A name is taken.
        """
        member = self._member(name)
        owner, source = member.owner, member.entry.name
        names = _free_names(source, into, owner.branches) if isinstance(into, int) else list(into)
        prefix = member.key.removesuffix(source)
        for new in names:
            owner.fork(new, branch=source)
            self._add(Member(f"{prefix}{new}", owner, owner.member(new).entry))
        return [f"{prefix}{new}" for new in names]

    def join(self, branch: str | Branch) -> None:
        """Take a branch into the batch.

        Raises:
            NotFoundError: There is no such branch.
            InvalidInputError: It is in the batch, or its session has no branch in it.
        """
        self._running()
        member = self._resolve(branch)
        if all(member.owner is not other.owner for other in self._members.values()):
            raise InvalidInputError(
                f"branch {member.key!r} can't join: no branch of its session was in the batch when it began"
            )
        self._add(member)

    def leave(self, name: str) -> None:
        """Let a branch go its own way, with all that it was fed."""
        member = self._member(name)
        del self._members[name]
        self._entries[:] = [entry for entry in self._entries if entry is not member.entry]

    def drop(self, name: str) -> None:
        """Remove a branch, as `Session.drop` does.

        Raises:
            InvalidInputError: It is the active one of its session.
        """
        member = self._member(name)
        member.owner.drop(member.entry.name)
        self.leave(name)

    # -- inside

    def _running(self) -> Feeder:
        if self._feeder is None:
            raise ClosedError("a batch is fed inside its `with` block: with session.batch([...]) as batch")
        return self._feeder

    def _member(self, name: str) -> Member:
        self._running()
        member = self._members.get(name)
        if member is None:
            raise NotFoundError(f"the batch has no branch {name!r}; it has {', '.join(self._members) or 'none'}")
        return member

    def _add(self, member: Member) -> None:
        if member.key in self._members:
            raise InvalidInputError(f"branch {member.key!r} is in the batch already")
        self._members[member.key] = member
        self._entries.append(member.entry)

    @contextlib.contextmanager
    def _working(self, fed: Sequence[tuple[Member, int]]) -> Iterator[Feeder]:
        """Bring branches onto the device, report on each, and take new tokens back when something fails.

        Args:
            fed: The branches, each with the number of tokens that it is going to be given.
        """
        feeder = self._running()
        try:
            with contextlib.ExitStack() as reports:
                operations = [
                    reports.enter_context(Operation(member.state, "batch", is_undone=True)) for member, _ in fed
                ]
                for (member, num_new), operation in zip(fed, operations, strict=True):
                    _prepare(member, num_new, operation)
                yield feeder
        finally:
            for member, _ in fed:
                member.owner.ledger.states.note_progress(member.entry)
                member.owner.ledger.write_branch(member.entry)

    def _read_each(self, tokens: Mapping[str, Content] | Sequence[Content]) -> list[tuple[Member, list[int]]]:
        if not isinstance(tokens, Mapping):
            if len(tokens) != len(self._members):
                raise InvalidInputError(
                    f"{len(tokens)} lists of tokens were given for {len(self._members)} branches; name them: "
                    f"{{name: tokens}}"
                )
            tokens = dict(zip(self._members, tokens, strict=True))
        return [(self._member(name), self._read(self._member(name), content)) for name, content in tokens.items()]

    def _read(self, member: Member, content: Content) -> list[int]:
        adapter = member.owner.adapter
        if isinstance(content, str):
            return adapter.encode(content, is_first=not len(member.state.tokens))
        tokens = [int(token) for token in content]
        adapter.check_tokens(tokens)
        return tokens

    def _options(
        self, index: int, member: Member, common: Mapping[str, object], per_branch: Mapping[str, Mapping[str, object]]
    ) -> dict[str, object]:
        """Return one branch's options of generation."""
        for name in per_branch:
            self._member(name)
        seed = common.get("seed")
        options = {**common, **({"seed": seed + index} if isinstance(seed, int) else {})}
        options |= per_branch.get(member.key, {})
        member.owner.adapter.check_options(options)
        member.state.check_not_empty()
        return options


def _prepare(member: Member, num_new: int, operation: Operation) -> None:
    """Bring a branch's KV onto the device, and KV that somebody else computed of its pending tokens."""
    state = member.state
    if not num_new:
        state.check_not_empty()
    member.owner.ledger.states.warm_up(member.entry)
    state.enter_regime(len(state.tokens) + num_new)
    operation.note_load(state.restore(is_next=False))
    if state.num_pending:
        operation.note_load(state.reuse_pending(keep=0 if num_new else 1))


def _several(content: Content | Sequence[Content]) -> list[Content]:
    """Return a list of continuations, of which there may be one."""
    if isinstance(content, str):
        return [content]
    items = list(content)
    if all(isinstance(item, int) for item in items):
        return [[item for item in items if isinstance(item, int)]]
    return [item for item in items if not isinstance(item, int)]


def _free_names(name: str, count: int, taken: Collection[str]) -> list[str]:
    """Return names for forks of a branch: its own, and a number."""
    numbers = itertools.count(1)
    free = (f"{name}-{number}" for number in numbers if f"{name}-{number}" not in taken)
    return list(itertools.islice(free, count))
