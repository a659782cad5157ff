"""Runs a transformers model over branches: forward passes, generation, and the user's own loop.

Hooks on the model see every forward pass that is given a branch's cache: they check its inputs, learn the token ids
and, when all layers have written, advance the branch. A pass that fails leaves the branch as it was.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from agentmem.adapter import Feed
from agentmem.adapters.transformers.cache import BranchCache
from agentmem.adapters.transformers.fingerprint import model_fingerprint, tokenizer_hashes
from agentmem.adapters.transformers.geometry import cache_argument, derive_spec
from agentmem.config import Config
from agentmem.errors import InvalidInputError

_CACHE_NAMES = ("cache", "past_key_values")
_PLAIN_INPUTS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "token_type_ids", "logits_to_keep", "cache_position"}
)

_OURS = frozenset({*_CACHE_NAMES, "inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids"})
"""Options of `generate` that the branch itself fills in."""

_NEEDS_MORE = {
    "num_beams": (1, "beam search needs several branches"),
    "num_return_sequences": (1, "several sequences need a branch each: fork"),
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
        fingerprint: Its name.
        model_name: Its name for people.
        tokenizer_hash: Hex name of the tokenizer.
        template_hash: Hex name of the chat template.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, config: Config) -> None:
        """Read the model's geometry and name; feeds it one token and reads every weight once.

        Raises:
            UnsupportedModelError: The model keeps state that agentmem cannot store.
            InvalidInputError: `model` is no transformers model, or in training mode.
        """
        if not isinstance(model, PreTrainedModel):
            raise InvalidInputError(f"model must be a transformers PreTrainedModel; found {type(model).__name__}")
        self.model = model
        self.spec = derive_spec(model, config.block_size)
        self.fingerprint = model_fingerprint(model, self.spec, config.num_threads)
        self.model_name = str(model.config.name_or_path or type(model).__name__)
        self.tokenizer_hash, self.template_hash = tokenizer_hashes(tokenizer)
        self._tokenizer = tokenizer
        self._cache_argument = cache_argument(model)
        self._vocab_size = _vocab_size(model)
        self._hooks = [
            model.register_forward_pre_hook(self._before_pass, with_kwargs=True),
            model.register_forward_hook(self._after_pass, with_kwargs=True),
        ]

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.model.device

    def encode(self, text: str, *, is_first: bool) -> list[int]:
        """Return the ids of `text`; special tokens such as BOS are added only when it comes first."""
        if self._tokenizer is None:
            raise InvalidInputError("the store was opened without a tokenizer: append ids, or pass tokenizer= to open")
        return list(self._tokenizer(text, add_special_tokens=is_first)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens; "" without a tokenizer."""
        return str(self._tokenizer.decode(list(tokens))) if self._tokenizer is not None else ""

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse ids outside of the model's vocabulary."""
        for index, token in enumerate(tokens):
            if not 0 <= token < self._vocab_size:
                raise InvalidInputError(
                    f"token {token} at index {index} is not in the model's vocabulary of {self._vocab_size:,}; nothing "
                    f"was appended"
                )

    def forward(self, feed: Feed, tokens: Sequence[int], *, num_logits: int) -> Tensor:
        """Feed `tokens`; return the logits `[num_logits, V]` of the last `num_logits` of them."""
        inputs = torch.tensor([list(tokens)], dtype=torch.long, device=self.device)
        options = {self._cache_argument: BranchCache(feed, self), "use_cache": True, "logits_to_keep": num_logits}
        with torch.no_grad():
            logits: Tensor = self.model(input_ids=inputs, **options).logits[0]
        return logits[-num_logits:]

    def generate(self, feed: Feed, tokens: Sequence[int], options: Mapping[str, object]) -> list[int]:
        """Continue `tokens`; return the new ids as sampled. Options are transformers' own, and `seed`."""
        settings = dict(options)
        seed = settings.pop("seed", None)
        inputs = torch.tensor([list(tokens)], dtype=torch.long, device=self.device)
        settings[self._cache_argument] = BranchCache(feed, self)
        settings["attention_mask"] = torch.ones_like(inputs)
        if self._pad_token_id(settings) is None:
            settings["pad_token_id"] = 0  # never used in a batch of 1; silences a warning
        if settings.get("stop_strings") is not None:
            settings.setdefault("tokenizer", self._tokenizer)
        with _seeded(seed, self.device):
            output: Tensor = self.model.generate(inputs, **settings)  # type: ignore[operator]  # mixin method, seen as a module
        return [int(token) for token in output[0, len(tokens) :]]

    def cache(self, feed: Feed) -> BranchCache:
        """Return a cache for the user's own loop."""
        return BranchCache(feed, self)

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _before_pass(
        self, _module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        cache = self._own_cache(args, kwargs)
        if cache is not None:
            tokens = _read_tokens(args, kwargs)
            _check_plain(kwargs, cache.position, len(tokens))
            cache.begin(tokens)
        return None

    def _after_pass(
        self, _module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object], _output: object
    ) -> None:
        cache = self._own_cache(args, kwargs)
        if cache is not None:
            cache.commit()

    def check_options(self, options: Mapping[str, object]) -> None:
        """Refuse options of `generate` that a branch cannot serve, before anything is computed."""
        given = options.get("generation_config")
        for name in _OURS & options.keys():
            raise InvalidInputError(f"generate({name}=...): the branch's own tokens and cache are used; append instead")
        for name, (fine, why) in _NEEDS_MORE.items():
            value = options.get(name, getattr(given, name, None) if isinstance(given, GenerationConfig) else None)
            if value is not None and value != fine:
                raise InvalidInputError(f"generate({name}={value!r}): {why}")

    def _own_cache(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> BranchCache | None:
        """Return the cache that a pass was given, if it comes from this adapter: a model may serve several stores."""
        for value in (*(kwargs.get(name) for name in _CACHE_NAMES), *args):
            if isinstance(value, BranchCache) and value.owner is self:
                return value
        return None

    def _pad_token_id(self, options: Mapping[str, object]) -> object:
        given = options.get("generation_config", self.model.generation_config)
        return options.get("pad_token_id", getattr(given, "pad_token_id", None))


def _vocab_size(model: PreTrainedModel) -> int:
    weight = model.get_input_embeddings().weight
    if not isinstance(weight, Tensor):
        raise InvalidInputError(f"{type(model).__name__} has no table of token embeddings to check ids against")
    return int(weight.shape[0])


def _read_tokens(args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[int]:
    """Return the ids fed in this pass.

    Raises:
        InvalidInputError: There are none, or more than one sequence of them.
    """
    ids = kwargs.get("input_ids", args[0] if args else None)
    if kwargs.get("inputs_embeds") is not None or not isinstance(ids, Tensor):
        raise InvalidInputError("a branch stores token ids: pass input_ids, not inputs_embeds, together with its cache")
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise InvalidInputError(
            f"input_ids of shape {list(ids.shape)}: a branch takes one sequence, [1, tokens]; fork a branch for each"
        )
    return [int(token) for token in ids[0].tolist()]


def _check_plain(inputs: Mapping[str, object], position: int, num_tokens: int) -> None:
    """Refuse inputs that would make KV depend on more than the tokens: padding, shifted positions, media."""
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and (tuple(mask.shape) != (1, position + num_tokens) or not bool((mask == 1).all())):
        raise InvalidInputError(
            f"attention_mask of shape {list(mask.shape)} hides tokens or does not cover all {position + num_tokens:,} "
            f"tokens of the branch; a branch stores no padding: leave the mask out"
        )
    positions = inputs.get("position_ids")
    if isinstance(positions, Tensor):
        wanted = torch.arange(position, position + num_tokens, device=positions.device)
        if positions.ndim != 2 or not torch.equal(positions[0].long(), wanted):
            raise InvalidInputError(
                f"position_ids {positions.flatten()[:4].tolist()}... are shifted: the branch stands at {position:,} "
                f"and its tokens have consecutive positions; leave position_ids out"
            )
    kinds = inputs.get("token_type_ids")
    if isinstance(kinds, Tensor) and bool(kinds.any()):
        raise InvalidInputError("token_type_ids other than 0 are not part of a branch's identity and cannot be stored")
    for name, value in inputs.items():
        if isinstance(value, Tensor) and name not in _PLAIN_INPUTS and name not in _CACHE_NAMES:
            raise InvalidInputError(f"the input {name!r} is not part of a branch's identity and cannot be stored yet")


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
