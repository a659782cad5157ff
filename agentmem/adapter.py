"""What the core asks of a model framework, and what it gives in return.

An adapter runs the model; a `Feed` is its side of one branch. Neither names a framework.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from agentmem.batching import BatchModel, Sampler, SamplerOptions
from agentmem.ids import Fingerprint
from agentmem.kv.spec import KVSpec
from agentmem.marks import Mark, MarkKind, Marks


@dataclass(slots=True, kw_only=True)
class Pass:
    """One forward pass over a branch: where its KV goes, and what comes before it.

    Attributes:
        layers: Keys and values of each stored layer, groups in order: `[1, H, capacity, D]`, slot i for token i. The
            pass writes the slots [position + num_kept, position + number of tokens).
        num_kept: Leading tokens of the pass whose KV is in place: it is read, and not written again.
        states: The layer states before the pass, one tensor per entry of `KVSpec.states`: copies that the model may
            overwrite. None before the first token.
        root: KV of the encoder's output, keys and values of each layer; None when the encoder has not run.
        wait: Called with a layer's index in `layers` before what it holds of earlier tokens is read: it may be on its
            way. None when all is there. What it raises ends the pass.
    """

    layers: list[tuple[Tensor, Tensor]]
    num_kept: int = 0
    states: list[Tensor] | None = None
    root: list[Tensor] | None = None
    wait: Callable[[int], None] | None = None


class Feed(Protocol):
    """What a framework's cache object asks of the branch it stands for, during forward passes."""

    @property
    def spec(self) -> KVSpec:
        """Geometry of the KV."""
        ...

    @property
    def position(self) -> int:
        """Tokens that the model sees as cached: the position of the next token to be fed."""
        ...

    @property
    def marks(self) -> Marks:
        """What the branch's KV depends on beside its tokens, as far as the branch's tokens reach."""
        ...

    @property
    def regime(self) -> bytes:
        """The rotary regime that the branch's KV is in (see `Adapter.regime`)."""
        ...

    def tokens(self, stop: int) -> list[int]:
        """Return the branch's first `stop` token ids."""
        ...

    def inputs(self, mark: Mark) -> dict[str, object]:
        """Return the model inputs behind a MEDIA or ENCODER mark, tensors on the CPU.

        Raises:
            NotFoundError: They are in no tier any more; append them again.
        """
        ...

    def begin(self, tokens: Sequence[int]) -> Pass:
        """Announce a forward pass over `tokens`, at `position`. What is returned is valid until the next `begin`.

        Raises:
            StaleCacheError: The branch moved on since the cache was made, or the cache was given back.
            InvalidInputError: The tokens contradict those that the branch has still pending.
            CapacityError: The device budget cannot hold them.
        """
        ...

    def keep_root(self, root: list[Tensor]) -> None:
        """Keep the KV of the encoder's output, computed in the running pass, for all that share its inputs."""
        ...

    def commit(self, states: Sequence[Tensor] = ()) -> None:
        """Make the tokens of the last `begin` part of the branch: every layer has written.

        Args:
            states: The layer states after the pass, one per entry of `KVSpec.states`. The branch keeps the tensors:
                nobody may write to them afterwards.
        """
        ...

    def crop(self, num_tokens: int) -> None:
        """Take the last `num_tokens` tokens back."""
        ...


class Rotation(Protocol):
    """What moving tokens to other positions does to a model's KV."""

    def rotate(self, sections: Sequence[Tensor], shift: int) -> None:
        """Make the KV in `sections` what it would be `shift` positions later (earlier: below 0), in place.

        Args:
            sections: One `[L, H, T, D]` per section, as the model wrote it.
            shift: Positions.
        """
        ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a text.

    Attributes:
        tokens: The ids.
        starts: Where in the text each of them begins, in characters.
    """

    tokens: list[int]
    starts: list[int]


class ChatTemplate(Protocol):
    """A tokenizer's chat template, and the tokenizer as the template needs it."""

    @property
    def special(self) -> frozenset[int]:
        """Ids that are no text, as begin and end of a turn. They never merge with what is beside them."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None,
        is_prompt: bool,
        options: Mapping[str, object],
    ) -> str:
        """Return the text of the messages; with `is_prompt` the header of the next answer, too.

        Args:
            messages: All messages.
            tools: JSON schemas of the tools.
            is_prompt: Whether the model is to answer.
            options: More names for the template, such as `enable_thinking`.

        Raises:
            InvalidInputError: The template refuses the messages.
        """
        ...

    def encode(self, text: str, *, after: int | None = None) -> Encoded:
        """Return the ids of `text` as they are behind the token `after`; None when nothing comes before it."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the exact text of the tokens, special ones included."""
        ...


class Adapter(Protocol):
    """One model of one framework."""

    @property
    def spec(self) -> KVSpec:
        """Geometry of the model's KV."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        ...

    @property
    def model_name(self) -> str:
        """The model's name, for people."""
        ...

    @property
    def tokenizer_hash(self) -> str:
        """Hex name of the tokenizer; "" when there is none."""
        ...

    @property
    def template_hash(self) -> str:
        """Hex name of the chat template; "" when there is none."""
        ...

    @property
    def has_adapters(self) -> bool:
        """Whether the model has adapters that may be switched, as of the last `look`. Costs nothing."""
        ...

    def look(self) -> Fingerprint:
        """Return the name of everything about the model that makes KV differ, as it is now.

        Costs microseconds while the model is as it was; reads what may have changed when it is not.

        Raises:
            InvalidInputError: The model was changed into one that the store cannot go on with.
        """
        ...

    def encode(self, text: str, *, is_first: bool) -> list[int]:
        """Return the token ids of `text`; special tokens such as BOS are added only when it comes first.

        Raises:
            InvalidInputError: There is no tokenizer.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens, for people; "" without a tokenizer."""
        ...

    def chat_template(self) -> ChatTemplate:
        """Return the tokenizer's chat template.

        Raises:
            InvalidInputError: There is no tokenizer, or it has no template.
        """
        ...

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse ids that are outside of the model's vocabulary.

        Raises:
            InvalidInputError: Names the first bad id.
        """
        ...

    @property
    def is_stepwise(self) -> bool:
        """Whether the model must be fed one token at a time once it has layer states: its first pass takes all."""
        ...

    def regime(self, num_tokens: int) -> bytes:
        """Name the rotary regime that KV of `num_tokens` tokens is in; b"" for models whose KV depends on no length."""
        ...

    def media_spans(
        self, tokens: Sequence[int], inputs: Mapping[str, object], position: int
    ) -> list[tuple[MarkKind, int, int]]:
        """Return which of `tokens`, which begin at `position`, stand for `inputs`.

        Returns:
            Kind, start and stop of each span, counted from the first of `tokens`; an encoder's is (ENCODER, 0, 0).

        Raises:
            InvalidInputError: The model takes no such input there, or the tokens have no placeholder for it.
        """
        ...

    def media_digest(self, inputs: Mapping[str, object]) -> bytes:
        """Return 32 bytes that name the inputs by content: names, dtypes, shapes, bytes and plain values."""
        ...

    def forward(self, feed: Feed, tokens: Sequence[int], *, num_logits: int) -> Tensor:
        """Feed `tokens`; return the logits `[num_logits, V]` of the last `num_logits` of them."""
        ...

    def key_rotation(self) -> Rotation:
        """Return how the model's keys move, proven on the model when it is first asked for.

        Raises:
            UnsupportedModelError: Its KV cannot be moved, or that could not be proven; says why.
        """
        ...

    def check_options(self, options: Mapping[str, object]) -> None:
        """Refuse options of `generate` that a branch cannot serve, before anything is computed.

        Raises:
            InvalidInputError: An option needs more than one branch (beams, several sequences, assisted decoding).
        """
        ...

    def generate(self, feed: Feed, tokens: Sequence[int], options: Mapping[str, object]) -> list[int]:
        """Continue `tokens`, of which the first `feed.position` are cached; return the new ids as sampled."""
        ...

    def batch_model(self) -> BatchModel:
        """Return how the model feeds several branches at once, proven on it when it is first asked for."""
        ...

    def sampler(self, prompt: Sequence[int], options: SamplerOptions) -> Sampler:
        """Return what chooses the tokens that continue `prompt`, as `generate` would with these options.

        Raises:
            InvalidInputError: An option is not known, or its value is wrong.
        """
        ...

    def cache(self, feed: Feed) -> object:
        """Return the framework's cache object for the branch, for the user's own loop."""
        ...

    def close(self) -> None:
        """Leave the model as it was found."""
        ...
