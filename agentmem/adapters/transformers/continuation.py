"""Whether a model takes its layer states into account when it is fed several tokens on top of them.

Some models of transformers 5.24 do not: their scan over several tokens begins with an empty state, and what came before
is forgotten without a word (Mamba, Falcon-Mamba, Jamba, Zamba; transformers#45513 had more). They are right when they
are fed one token at a time. It is measured, so that a mended release is fast again.
"""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from agentmem.adapters.transformers.geometry import cache_argument, new_cache, unchanged
from agentmem.kv.spec import KVSpec

_NUM_TOKENS = 8
_NUM_ON_TOP = 2
_TOLERANCE = 0.03
"""Of a state, relative. Other chunks change bf16 states by up to 0.004; a forgotten past changes them by 0.15 and more
(23 families with random weights)."""


def needs_single_steps(model: PreTrainedModel, spec: KVSpec) -> bool:
    """Return whether the model must be fed one token at a time once it has states. Feeds it a few tokens."""
    if not spec.states:
        return False
    layer = spec.states[0].layer
    with unchanged(model):
        whole = _states(model, layer, [_NUM_TOKENS])
        parts = _states(model, layer, [_NUM_TOKENS - _NUM_ON_TOP, _NUM_ON_TOP])
    return any(_distance(one, other) > _TOLERANCE for one, other in zip(whole, parts, strict=True))


def _states(model: PreTrainedModel, layer_index: int, lengths: Sequence[int]) -> list[Tensor]:
    """Feed tokens in passes of the given lengths; return the states of one layer."""
    cache, tokens, position = new_cache(model), plain_tokens(model, sum(lengths)), 0
    has_positions = "position_ids" in inspect.signature(model.forward).parameters
    for length in lengths:
        part = slice(position, position + length)
        inputs = {"input_ids": torch.tensor([tokens[part]], device=model.device), cache_argument(model): cache}
        if has_positions:  # some models count from 0 in each pass when they are not told
            inputs["position_ids"] = torch.arange(part.start, part.stop, device=model.device)[None]
        with torch.no_grad():
            model(**inputs, use_cache=True)
        position += length
    layer = cache.layers[layer_index]
    states = [layer.conv_states, layer.recurrent_states] if isinstance(layer, LinearAttentionLayer) else []
    return [state for found in states for state in found.values() if state is not None]


def plain_tokens(model: PreTrainedModel, num_tokens: int) -> list[int]:
    """Return different token ids that stand for no media and no control of the model."""
    configs = (model.config, model.config.get_text_config(decoder=True))
    given = [value for config in configs for name, value in vars(config).items() if "token" in name]
    found = [token for value in given for token in (value if isinstance(value, list) else [value])]
    special = {token for token in found if isinstance(token, int)}
    return [token for token in range(num_tokens + len(special)) if token not in special][:num_tokens]


def _distance(one: Tensor, other: Tensor) -> float:
    """Return how far two states are apart, as a part of the first."""
    return float((one.float() - other.float()).norm() / one.float().norm().clamp(min=1e-12))
