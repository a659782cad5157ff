"""A branch, as its user sees it: tokens that grow, a model that continues them, checkpoints, rewinding."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from agentmem.adapter import Adapter
from agentmem.chat.conversation import Conversation
from agentmem.chat.lint import LintMemory
from agentmem.chat.talk import Talk
from agentmem.checkpoints import BranchEntry
from agentmem.editing import Editing
from agentmem.errors import InvalidInputError
from agentmem.explain.explanation import Explanation
from agentmem.explain.live import Content, LiveLibrary
from agentmem.feed import BranchFeed
from agentmem.ids import CheckpointId, short
from agentmem.ledger import Ledger
from agentmem.marks import media_start
from agentmem.operation import Operation
from agentmem.stats import ReuseReport
from agentmem.tree.checkpoint import Checkpoint
from agentmem.tree.fields import copy_extras, own_extras

T = TypeVar("T")

Guard = contextlib.AbstractContextManager[None]


@dataclass(frozen=True, slots=True)
class Generation:
    """What `generate` returns.

    Attributes:
        tokens: The new token ids, as sampled.
        text: Their text, for people; "" without a tokenizer.
    """

    tokens: tuple[int, ...]
    text: str


class BranchOwner(Protocol):
    """What a branch needs of its session: a guard around every operation, and the model."""

    ledger: Ledger
    adapter: Adapter
    lint: LintMemory

    @property
    def branches(self) -> list[str]:
        """The names of the session's branches."""
        ...

    def using(self, entry: BranchEntry, *, is_computing: bool = True) -> Guard:
        """Keep other threads out and the branch on the device, while an operation runs."""
        ...

    def with_room(self, work: Callable[[], T]) -> T:
        """Do work that needs room on the device, and that may be done again when others had the room."""
        ...

    def resolve(self, checkpoint: Checkpoint | str) -> Checkpoint:
        """Return a checkpoint of the session by record, id prefix or branch name."""
        ...

    def fork(self, name: str, *, branch: str) -> "Branch":
        """Make a branch where another one stands."""
        ...

    def drop(self, name: str) -> None:
        """Remove a branch."""
        ...

    def add(self, name: str, operation: str, make: Callable[[], BranchEntry]) -> "Branch":
        """Enter the branch that `make` returns, unless its name is taken."""
        ...

    def library(self, entry: BranchEntry) -> LiveLibrary:
        """Return the store as it stands, for explaining what a prompt would reuse."""
        ...


class Branch(Talk, Editing["Branch"]):
    """A movable name on a checkpoint, plus an open tail of tokens.

    Handles are cheap and stay valid while the session is open; a dropped branch's handle raises `ClosedError`.
    """

    _owner: BranchOwner

    def __init__(self, owner: BranchOwner, entry: BranchEntry) -> None:
        """Stand for `entry`; made by the session."""
        self._owner = owner
        self._entry = entry

    def __repr__(self) -> str:
        return f"<Branch {self.name!r}: {self.num_tokens:,} tokens, {self.num_pending} pending>"

    @property
    def name(self) -> str:
        """The branch's name."""
        return self._entry.name

    @property
    def session(self) -> str:
        """The name of the branch's session."""
        return self._owner.ledger.record.name

    @property
    def tokens(self) -> list[int]:
        """All token ids, pending ones included. A copy."""
        return self._entry.state.tokens.slice()

    @property
    def num_tokens(self) -> int:
        """Number of tokens, pending ones included."""
        return len(self._entry.state.tokens)

    @property
    def pending(self) -> list[int]:
        """Tokens that were sampled or appended and that the model has not been fed."""
        return self._entry.state.pending

    @property
    def num_pending(self) -> int:
        """Number of pending tokens."""
        return self._entry.state.num_pending

    @property
    def num_fed(self) -> int:
        """Tokens that the model was fed through this branch, since it was made or its session was opened."""
        return self._entry.state.num_fed

    @property
    def tip(self) -> Checkpoint | None:
        """The checkpoint that the branch points at; None before the first."""
        tip = self._entry.tip
        return None if tip is None else self._owner.ledger.tree.get(tip)

    @property
    def extras(self) -> dict[str, object]:
        """The user's metadata: copied on fork, written with the branch's next change, `flush` or `close`."""
        return self._entry.extras

    @property
    def report(self) -> ReuseReport:
        """What the last operation reused, computed and moved, and why."""
        return self._entry.state.last_report

    @property
    def is_hot(self) -> bool:
        """Whether all KV of the branch is on the device."""
        return self._entry.state.is_hot

    @property
    def text(self) -> str:
        """The branch's text, for people; "" without a tokenizer. Ids are the truth: text is never fed."""
        return self._owner.adapter.decode(self.tokens)

    @contextlib.contextmanager
    def _conversation(self) -> Iterator[Conversation]:
        """Keep other threads out while messages are sent: what `send` and `chat` are made of."""
        with self._all_or_nothing():
            yield Conversation(self._owner, self, self._entry)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Use the branch, and leave it as it was when anything is raised inside."""
        with self._owner.using(self._entry):
            try:
                with self._entry.unchanged_on_error():
                    yield
            except BaseException:
                self._write()
                raise

    def append(self, content: str | Iterable[int], **model_inputs: object) -> None:
        """Add text or token ids at the end. Costs no computation: the model is fed when logits or a checkpoint need it.

        Args:
            content: Text or ids; among them the placeholders of images, audio and the like.
            **model_inputs: What the model takes for the placeholders, by its own keywords (pixel_values,
                image_grid_thw, input_features ...), as its processor makes them for one sequence. They are stored with
                the tokens and are part of their identity. For an encoder-decoder model: the encoder's inputs, with the
                first tokens of an empty branch.

        Raises:
            InvalidInputError: An id is not in the vocabulary, there is no tokenizer for text, or the model takes no
                such inputs there. Nothing was appended.
        """
        with self._all_or_nothing():
            state = self._entry.state
            tokens = self._read(content)
            state.add_message_border()
            state.append(tokens, model_inputs)
            self._write()

    def forward(self, tokens: Iterable[int] = ()) -> Tensor:
        """Feed `tokens`, after what is pending; return the logits `[len(tokens), V]` of every one of them.

        With no tokens, return the logits `[1, V]` of the branch's last token, feeding at most that one.

        Raises:
            InvalidInputError: An id is not in the vocabulary, or the branch is empty and nothing was given.
            CapacityError: The branch does not fit the device budget. Whatever is raised, the branch keeps its tokens as
                they were.
        """
        with self._owner.using(self._entry):
            try:
                read = self._read(tokens)
                return self._owner.with_room(lambda: self._entry.state.forward(read))
            finally:
                self._write()

    def generate(self, **options: object) -> Generation:
        """Continue with transformers' generation.

        Args:
            **options: transformers' own options: max_new_tokens, do_sample, temperature, stop_strings, streamer,
                generation_config, logits_processor ...; and `seed`, which leaves torch's global generator alone.

        Returns:
            The new ids as sampled. The last one, which the model was not fed, is pending afterwards.

        Raises:
            KeyboardInterrupt: Or whatever else stops it early: the branch keeps its tokens as they were before.
            InvalidInputError: The branch is empty, or an option needs more than one branch (beams, assistants).
        """
        with self._owner.using(self._entry):
            if not self.num_tokens:
                raise InvalidInputError(f"branch {self.name!r} has no tokens to continue; append some first")
            self._owner.adapter.check_options(options)
            try:
                sampled = self._entry.state.generate(dict(options), self._owner.with_room)
            finally:
                self._write()
            return Generation(tuple(sampled), self._owner.adapter.decode(sampled))

    @contextlib.contextmanager
    def cache(self) -> Iterator[object]:
        """Give a transformers `Cache` that stands at the tip, for the user's own loop.

        Pass it as `cache=` or `past_key_values=` to the model that the store was opened with, with the next token ids
        (pending ones first); the branch grows by every token that is fed. It must not be used after the block.
        """
        with self._owner.using(self._entry):
            state = self._entry.state
            with Operation(state, "cache") as operation:
                state.enter_regime(len(state.tokens))
                operation.note_load(state.restore())
                feed = BranchFeed(state)
                try:
                    yield self._owner.adapter.cache(feed)
                finally:
                    feed.close()
                    self._write()

    def checkpoint(self, message: str = "", *, extras: Mapping[str, object] | None = None) -> Checkpoint:
        """Make an immutable point of the branch; durable when it returns.

        Feeds what is pending but for the last token, so that the checkpoint's KV is worth resuming. KV that is there
        already needs no look at a model without adapters: it is kept under the model that computed it.

        Args:
            message: What to call it in `log`.
            extras: Metadata of the checkpoint; by default a copy of the branch's.

        Raises:
            StorageFullError: The disk has no room; nothing is lost, and it may be tried again.
            InvalidInputError: The branch is empty.
        """
        is_settled = not self._owner.adapter.has_adapters and self._entry.state.is_settled(keep=1)
        with self._owner.using(self._entry, is_computing=not is_settled):
            if not self.num_tokens:
                raise InvalidInputError(
                    f"branch {self.name!r} has no tokens, so there is nothing to keep; append some first"
                )
            if is_settled and not self._entry.state.is_settled(keep=1):  # another thread was faster
                self._owner.ledger.require_same_model()
            self._owner.with_room(lambda: self._entry.state.settle(keep=1))
            self._owner.ledger.states.note_progress(self._entry)
            kept = copy_extras(self._entry.extras if extras is None else {**own_extras(self._entry.extras), **extras})
            return self._owner.ledger.commit(self._entry, message=message, extras=kept)

    def rewind(self, to: Checkpoint | str | None = None, *, tokens: int | None = None) -> None:
        """Move the branch back, to one of its checkpoints or by a number of tokens. Costs microseconds.

        Checkpoints stay where they are: what is cut off can be reached from them. Media are taken off whole: a rewind
        into the tokens of an image ends before it.

        Args:
            to: A checkpoint that the branch passes through: the record, a prefix of its id.
            tokens: How many tokens to take off the end.

        Raises:
            InvalidInputError: Neither or both were given, or the branch does not reach back so far.
            NotFoundError: There is no such checkpoint.
        """
        with self._all_or_nothing():
            entry, ledger = self._entry, self._owner.ledger
            length = self._rewound_length(to, tokens)
            old = entry.tip
            tip = old
            while tip is not None and ledger.tree.get(tip).num_tokens > length:
                tip = ledger.tree.get(tip).parent_id
            entry.state.truncate(length)
            entry.tip = tip
            ledger.write_branch(entry, ledger.move(entry, "rewind", old, tip))

    def explain(self, content: Content) -> Explanation:
        """Say what a whole prompt would reuse of what is stored, and why no more. Computes and changes nothing.

        The prompt is compared with every branch and checkpoint of the session, with this branch first where several
        are as good, and with other sessions of the store (under the same salt) where these may have more of it.

        Args:
            content: All of the prompt, from its first token: text, token ids, or chat messages.

        Raises:
            InvalidInputError: It is empty, an id is not in the vocabulary, or there is no tokenizer for text.
        """
        with self._owner.using(self._entry):
            return self._owner.library(self._entry).explain(content)

    def _rewound_length(self, to: Checkpoint | str | None, tokens: int | None) -> int:
        if (to is None) == (tokens is None):
            raise InvalidInputError("rewind takes a checkpoint or tokens=, one of them")
        if tokens is not None:
            if not 0 <= tokens <= self.num_tokens:
                raise InvalidInputError(
                    f"branch {self.name!r} has {self.num_tokens:,} tokens; {tokens:,} cannot be taken off"
                )
            return media_start(self._entry.state.marks, self.num_tokens - tokens)
        checkpoint = self._owner.resolve(to if to is not None else "")
        if not self._passes_through(checkpoint.checkpoint_id):
            raise InvalidInputError(
                f"branch {self.name!r} does not pass through checkpoint {short(checkpoint.checkpoint_id)}; use "
                f"fork(name, at=...) to go on from there"
            )
        return checkpoint.num_tokens

    def _passes_through(self, checkpoint_id: CheckpointId) -> bool:
        tip = self._entry.tip
        lineage = () if tip is None else self._owner.ledger.tree.lineage(tip)
        return any(checkpoint.checkpoint_id == checkpoint_id for checkpoint in lineage)

    def _read(self, content: str | Iterable[int], *, is_first: bool | None = None) -> list[int]:
        adapter = self._owner.adapter
        if isinstance(content, str):
            return adapter.encode(content, is_first=not self.num_tokens if is_first is None else is_first)
        tokens = [int(token) for token in content]
        adapter.check_tokens(tokens)
        return tokens

    def _write(self) -> None:
        self._owner.ledger.states.note_progress(self._entry)
        self._owner.ledger.write_branch(self._entry)
