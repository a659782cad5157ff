"""What a model is made to say, for tests of what becomes of it."""

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import LogitsProcessor


class Script(LogitsProcessor):
    """Lets a model say some ids, one after the other, and nothing else: `generate(logits_processor=[Script(ids)])`."""

    def __init__(self, tokens: Iterable[int]) -> None:
        """Say `tokens`."""
        self.tokens = list(tokens)

    def __call__(self, _input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores `[1, V]` that leave the next id alone."""
        forced = torch.full_like(scores, -1e9)
        forced[:, self.tokens.pop(0)] = 0.0
        return forced
