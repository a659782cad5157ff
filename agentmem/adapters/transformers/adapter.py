"""The adapter for one transformers model: its names, its tokens, and what it is asked to compute.

How the model is fed is in `passes`.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from agentmem.adapter import Feed
from agentmem.adapters.transformers.batch_model import TransformersBatch
from agentmem.adapters.transformers.encoder import probe_encoder_decoder
from agentmem.adapters.transformers.fingerprint import ModelIdentity, tokenizer_hashes
from agentmem.adapters.transformers.geometry import derive_spec
from agentmem.adapters.transformers.lora import unwrapped
from agentmem.adapters.transformers.media import media_digest
from agentmem.adapters.transformers.passes import CACHE_NAMES, Cache, Passes
from agentmem.adapters.transformers.regimes import settled
from agentmem.adapters.transformers.rotation import KeyRotation
from agentmem.adapters.transformers.sampling import TransformersSampler
from agentmem.adapters.transformers.template import TokenizerTemplate
from agentmem.config import Config
from agentmem.errors import InvalidInputError
from agentmem.ids import Fingerprint
from agentmem.marks import MarkKind

_OURS = frozenset(
    {*CACHE_NAMES, "inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "encoder_outputs"}
    | {"decoder_input_ids", "decoder_attention_mask", "decoder_position_ids", "decoder_start_token_id"}
)
"""Options of `generate` that the branch itself fills in."""

_NEEDS_MORE = {
    "num_beams": (1, "beam search needs several branches: session.batch, or agentmem.search"),
    "num_return_sequences": (
        1,
        "several sequences need a branch each: session.batch forks and continues them together",
    ),
    "assistant_model": (None, "assisted decoding on a filled cache gives wrong text in transformers"),
    "prompt_lookup_num_tokens": (None, "prompt lookup on a filled cache gives wrong text in transformers"),
    "penalty_alpha": (None, "contrastive search needs several branches"),
    "dola_layers": (None, "DoLa decoding is not supported"),
    "cache_implementation": (None, "the branch is the cache"),
    "custom_generate": (None, "custom generation loops: use branch.cache() in your own loop"),
    "use_cache": (True, "a branch is a cache"),
    "return_dict_in_generate": (False, "the new token ids are returned; use branch.forward for logits"),
}
"""Options of `generate` that one branch cannot serve: the value that is fine, and why others are not."""


class TransformersAdapter:
    """One transformers model, with its tokenizer.

    Attributes:
        model: The model; hooks are on it until `close`.
        spec: Geometry of its KV.
        model_name: Its name for people.
        tokenizer_hash: Hex name of the tokenizer.
        template_hash: Hex name of the chat template.
    """

    def __init__(self, model: object, tokenizer: PreTrainedTokenizerBase | None, config: Config) -> None:
        """Read the model's geometry and name; feeds it one token and reads every weight once.

        Raises:
            UnsupportedModelError: The model keeps state that agentmem cannot store.
            InvalidInputError: `model` is no transformers model, or in training mode.
        """
        model = unwrapped(model)
        if not isinstance(model, PreTrainedModel):
            raise InvalidInputError(f"model must be a transformers PreTrainedModel; found {type(model).__name__}")
        self.model = model
        probe = partial(probe_encoder_decoder, model) if model.config.is_encoder_decoder else None
        with settled(model):
            self.spec = derive_spec(model, config.block_size, probe)
        self._identity = ModelIdentity(model, self.spec, config.num_threads)
        self.model_name = str(model.config.name_or_path or type(model).__name__)
        self.tokenizer_hash, self.template_hash = tokenizer_hashes(tokenizer)
        self._tokenizer = tokenizer
        self._rotation: KeyRotation | None = None
        self._vocab_size = _vocab_size(model)
        self._passes = Passes(model, self.spec)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.model.device

    @property
    def has_adapters(self) -> bool:
        """Whether the model has adapters that may be switched, as of the last `look`."""
        return self._identity.has_adapters

    def look(self) -> Fingerprint:
        """Return the model's name as it is now, with the adapters that are active now."""
        return self._identity.look()

    def encode(self, text: str, *, is_first: bool) -> list[int]:
        """Return the ids of `text`; special tokens such as BOS are added only when it comes first."""
        if self._tokenizer is None:
            raise InvalidInputError("the store was opened without a tokenizer: append ids, or pass tokenizer= to open")
        return list(self._tokenizer(text, add_special_tokens=is_first)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens; "" without a tokenizer."""
        return str(self._tokenizer.decode(list(tokens))) if self._tokenizer is not None else ""

    def chat_template(self) -> TokenizerTemplate:
        """Return the tokenizer's chat template."""
        return TokenizerTemplate(self._tokenizer)

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse ids outside of the model's vocabulary."""
        for index, token in enumerate(tokens):
            if not 0 <= token < self._vocab_size and token not in self._passes.media.placeholders:
                raise InvalidInputError(
                    f"token {token} at index {index} is not in the model's vocabulary of {self._vocab_size:,}; nothing "
                    f"was appended"
                )

    @property
    def is_stepwise(self) -> bool:
        """Whether the model forgets its states when it is fed several tokens on top of them."""
        return self._passes.is_stepwise

    def regime(self, num_tokens: int) -> bytes:
        """Name the rotary regime that KV of `num_tokens` tokens is in; b"" when no length matters."""
        return self._passes.regimes.regime(num_tokens)

    def media_spans(
        self, tokens: Sequence[int], inputs: Mapping[str, object], position: int
    ) -> list[tuple[MarkKind, int, int]]:
        """Return which of `tokens`, which begin at `position`, stand for `inputs`; an encoder's are for all of them."""
        encoder = self._passes.encoder
        if encoder is None:
            return self._passes.media.spans(tokens, inputs, position)
        encoder.check(tokens, inputs, position)
        return [(MarkKind.ENCODER, 0, 0)] if inputs else []

    def media_digest(self, inputs: Mapping[str, object]) -> bytes:
        """Return 32 bytes that name the inputs by content."""
        return media_digest(inputs)

    def forward(self, feed: Feed, tokens: Sequence[int], *, num_logits: int) -> Tensor:
        """Feed `tokens`; return the logits `[num_logits, V]` of the last `num_logits` of them."""
        return self._passes.run(feed, tokens, num_logits)

    def generate(self, feed: Feed, tokens: Sequence[int], options: Mapping[str, object]) -> list[int]:
        """Continue `tokens`; return the new ids as sampled. Options are transformers' own, and `seed`."""
        settings = dict(options)
        seed = settings.pop("seed", None)
        if self._pad_token_id(settings) is None:
            settings["pad_token_id"] = 0  # never used in a batch of 1; silences a warning
        if settings.get("stop_strings") is not None:
            settings.setdefault("tokenizer", self._tokenizer)
        with _seeded(seed, self.device):
            return self._passes.generate(feed, tokens, settings)

    def cache(self, feed: Feed) -> Cache:
        """Return a cache for the user's own loop."""
        return self._passes.cache(feed)

    def batch_model(self) -> TransformersBatch:
        """Return how the model feeds several branches at once, proven on it when it is first asked for."""
        return self._passes.batch()

    def sampler(self, prompt: Sequence[int], options: Mapping[str, object]) -> TransformersSampler:
        """Return what chooses the tokens that continue `prompt`, as `generate` would."""
        return TransformersSampler(self.model, self._tokenizer, prompt, options)

    def key_rotation(self) -> KeyRotation:
        """Return how the model's keys move, proven on the model when it is first asked for."""
        if self._rotation is None:
            self._rotation = KeyRotation.of(self.model, self.spec)
        return self._rotation

    def close(self) -> None:
        """Leave the model as it was found."""
        self._passes.close()

    def check_options(self, options: Mapping[str, object]) -> None:
        """Refuse options of `generate` that a branch cannot serve, before anything is computed."""
        given = options.get("generation_config")
        for name in _OURS & options.keys():
            raise InvalidInputError(f"generate({name}=...): the branch's own tokens and cache are used; append instead")
        for name, (fine, why) in _NEEDS_MORE.items():
            value = options.get(name, getattr(given, name, None) if isinstance(given, GenerationConfig) else None)
            if value is not None and value != fine:
                raise InvalidInputError(f"generate({name}={value!r}): {why}")

    def _pad_token_id(self, options: Mapping[str, object]) -> object:
        given = options.get("generation_config", self.model.generation_config)
        return options.get("pad_token_id", getattr(given, "pad_token_id", None))


def _vocab_size(model: PreTrainedModel) -> int:
    weight = model.get_input_embeddings().weight
    if not isinstance(weight, Tensor):
        raise InvalidInputError(f"{type(model).__name__} has no table of token embeddings to check ids against")
    return int(weight.shape[0])


@contextlib.contextmanager
def _seeded(seed: object, device: torch.device) -> Iterator[None]:
    """Sample from `seed` inside, and leave torch's generators as they were; None leaves them alone."""
    if seed is None:
        yield
        return
    if not isinstance(seed, int):
        raise InvalidInputError(f"generate(seed=...) takes an int; found {seed!r}")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
