"""What tree_search.py measures and prints. Knows nothing of how the search works."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

Say = Callable[[str], None]
MB = 1e6


@dataclass(slots=True)
class Spent:
    """What something took: seconds, and tokens that the model was fed.

    Attributes:
        s: Wall time.
        fed: Tokens.
        num_sampled: Tokens that were sampled; all but the last were fed too.
    """

    meter: "Meter"
    started_s: float
    s: float = 0.0
    fed: int = 0
    num_sampled: int = 0

    def stop(self) -> None:
        """Stop the clock."""
        self.s = self.s or time.perf_counter() - self.started_s
        self.fed = self.meter.fed - self.fed


class Meter:
    """Counts the tokens that the model is really fed, by a hook of its own on the model, and the bytes held at most."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Count from now on."""
        self.fed = 0
        self.peak_nbytes = 0
        self.fed_before_first: int | None = None
        self.held: Callable[[], int] = lambda: 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _model: object, _args: object, kwargs: dict[str, Any]) -> None:
        self.fed += kwargs["input_ids"].shape[1]
