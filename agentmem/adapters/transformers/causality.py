"""Whether a model's KV depends on nothing but the tokens before it: the promise that all sharing rests on.

Some models of transformers 5.24 break it: their tokens attend to later ones of the same pass (PaliGemma, whose prompt
is read as a whole), or count positions from 0 in every pass unless they are given (Bamba). It is measured on the model
itself, so that nobody has to know their names.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentmem.adapters.transformers.continuation import plain_tokens
from agentmem.adapters.transformers.geometry import cache_argument, new_cache, unchanged
from agentmem.adapters.transformers.regimes import settled
from agentmem.errors import UnsupportedModelError

_LENGTHS = (3, 1)
_NUM_TRIALS = 3
"""One that fits is enough: in bf16, a mixture of experts may choose others by chance."""
_TOLERANCE = 0.1
"""Of the logits, relative. In bf16, other passes make up to 0.02; attending to later tokens 0.3 (random weights)."""

Positions = Callable[[int, int], Tensor | None]
"""Gives the positions of the text tokens [start, stop); None when the model is to count by itself."""


def check_causal(model: PreTrainedModel, positions: Positions) -> None:
    """Refuse a model that is not causal (see `is_causal`).

    Raises:
        UnsupportedModelError: KV would depend on how the tokens were fed, or on tokens that come later.
    """
    if not is_causal(model, positions):
        raise UnsupportedModelError(
            f"{type(model).__name__} gives other logits for tokens fed in one pass than in two: its tokens attend to "
            f"later ones, or it does not go on from what its cache holds. Its KV can't be kept by prefix"
        )


def is_causal(model: PreTrainedModel, positions: Positions) -> bool:
    """Tell whether a decoder gives the same logits for tokens fed in one pass and in two. Feeds it a few tokens.

    Args:
        model: A decoder.
        positions: What it is given in the two passes; in the one it counts by itself.
    """
    tokens = plain_tokens(model, sum(_LENGTHS) + _NUM_TRIALS - 1)
    with unchanged(model), settled(model):
        return any(_fits(model, tokens[trial : trial + sum(_LENGTHS)], positions) for trial in range(_NUM_TRIALS))


def _fits(model: PreTrainedModel, tokens: Sequence[int], positions: Positions) -> bool:
    whole = _logits(model, tokens, (len(tokens),), lambda _start, _stop: None)
    parts = _logits(model, tokens, _LENGTHS, positions)
    return float((whole - parts).norm()) <= _TOLERANCE * float(whole.norm())


def _logits(model: PreTrainedModel, tokens: Sequence[int], lengths: Sequence[int], positions: Positions) -> Tensor:
    """Feed tokens in passes of the given lengths; return the last token's logits, less their mean."""
    cache, start, logits = new_cache(model), 0, torch.empty(0)
    for length in lengths:
        ids = torch.tensor([tokens[start : start + length]], device=model.device)
        given = positions(start, start + length)
        options = {} if given is None else {"position_ids": given}
        with torch.no_grad():
            output = model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}, **options)
        logits = output.logits[0, -1].float()
        start += length
    return logits - logits.mean()
