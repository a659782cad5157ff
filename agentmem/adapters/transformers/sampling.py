"""Choosing tokens as transformers' `generate` does, one branch at a time: its own processors, criteria and order.

Source: transformers' generation/utils.py (`generate`, `_sample`).
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import LongTensor, Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from agentmem.errors import InvalidInputError

_LISTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
_DEFAULT_NEW_TOKENS = 20
"""How many tokens transformers makes when nobody says."""


class _Mixin(Protocol):
    """What transformers' models have for generation, which its types hide."""

    def _prepare_generation_config(
        self, generation_config: object, **settings: object
    ) -> tuple[GenerationConfig, dict[str, object]]: ...

    def _prepare_special_tokens(
        self, config: GenerationConfig, has_mask: bool, *, device: torch.device, batch_size: int
    ) -> None: ...

    def _get_logits_processor(self, **options: object) -> LogitsProcessorList: ...

    def _get_stopping_criteria(self, **options: object) -> StoppingCriteriaList: ...


class TransformersSampler:
    """Chooses one branch's tokens.

    Attributes:
        is_greedy: Whether it takes the likeliest token as the model gives it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        prompt: Sequence[int],
        options: Mapping[str, object],
    ) -> None:
        """Prepare to continue `prompt` with transformers' own options, and `seed`.

        Raises:
            InvalidInputError: There is an option that generation does not know, or `seed` is no int.
        """
        settings = dict(options)
        seed = settings.pop("seed", None)
        given = {name: settings.pop(name, None) for name in _LISTS}
        config = _config(model, settings, len(prompt))
        self._is_sampling = bool(config.do_sample)
        self._ids = torch.tensor([list(prompt)], dtype=torch.long, device=model.device)
        self._generator = _generator(seed, model.device)
        mixin = cast(_Mixin, model)
        self._processors = mixin._get_logits_processor(  # noqa: SLF001 - the mixin's only door
            generation_config=config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=self._ids,
            prefix_allowed_tokens_fn=given["prefix_allowed_tokens_fn"],
            logits_processor=given["logits_processor"] or LogitsProcessorList(),
            device=str(model.device),
            model_kwargs={},
        )
        self._criteria = mixin._get_stopping_criteria(  # noqa: SLF001 - as above
            generation_config=config,
            stopping_criteria=given["stopping_criteria"] or StoppingCriteriaList(),
            tokenizer=tokenizer,
        )
        self.is_greedy = not self._is_sampling and not len(self._processors)

    def choose(self, logits: Tensor) -> int:
        """Return the next token, given the logits `[V]` after the last one."""
        scores = self._processors(cast(LongTensor, self._ids), logits.to(torch.float32, copy=True).unsqueeze(0))
        if not self._is_sampling:
            return int(scores.argmax(-1))
        probabilities = torch.nn.functional.softmax(scores, dim=-1)
        return int(torch.multinomial(probabilities, num_samples=1, generator=self._generator))

    def accept(self, token: int) -> bool:
        """Add a token that was chosen; return whether the branch ends with it."""
        self._ids = torch.cat([self._ids, self._ids.new_tensor([[token]])], dim=-1)
        return bool(self._criteria(self._ids, None).all())


def _config(model: PreTrainedModel, settings: Mapping[str, object], num_tokens: int) -> GenerationConfig:
    """Return the model's generation settings with the given ones, and the length they stand for."""
    settings = dict(settings)
    given = settings.pop("generation_config", None)
    config, rest = cast(_Mixin, model)._prepare_generation_config(given, **settings)  # noqa: SLF001 - the mixin's only door
    if rest:
        raise InvalidInputError(f"generate({next(iter(rest))}=...): generation of a batch knows no such option")
    cast(_Mixin, model)._prepare_special_tokens(config, True, device=model.device, batch_size=1)  # noqa: SLF001 - as above
    _set_lengths(model, config, num_tokens, has_length=_has_length(model, settings, given))
    return config


def _has_length(model: PreTrainedModel, settings: Mapping[str, object], given: object) -> bool:
    """Say whether somebody chose a length for prompt and continuation together."""
    found = (settings.get("max_length"), getattr(given, "max_length", None), model.generation_config.max_length)
    return any(length is not None for length in found)


def _set_lengths(model: PreTrainedModel, config: GenerationConfig, num_tokens: int, *, has_length: bool) -> None:
    """Let the settings' lengths count the prompt, as `generate` does."""
    if config.max_new_tokens is not None:
        config.max_length = num_tokens + config.max_new_tokens
    elif not has_length:
        longest = getattr(model.config, "max_position_embeddings", None)
        config.max_length = num_tokens + (config.max_length or _DEFAULT_NEW_TOKENS)
        config.max_length = config.max_length if longest is None else min(config.max_length, longest)
    if config.min_new_tokens is not None:
        config.min_length = num_tokens + config.min_new_tokens
    if config.max_length <= num_tokens:
        raise InvalidInputError(
            f"generate(max_length={config.max_length}): a branch has {num_tokens:,} tokens already; use max_new_tokens"
        )


def _generator(seed: object, device: torch.device) -> torch.Generator | None:
    """Return a generator that gives what torch's own, seeded so, gives; None for torch's own."""
    if seed is None:
        return None
    if not isinstance(seed, int):
        raise InvalidInputError(f"generate(seed=...) takes an int; found {seed!r}")
    return torch.Generator(device).manual_seed(seed)
