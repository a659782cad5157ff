"""Feeds several branches in one pass of a transformers model, in the fastest way that is proven right on that model."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentmem.adapters.transformers import cascade
from agentmem.adapters.transformers.batch_cache import RowsCache
from agentmem.adapters.transformers.batch_probe import Positions, Probe
from agentmem.adapters.transformers.geometry import cache_argument
from agentmem.adapters.transformers.split import SplitAttention
from agentmem.batching import BatchMode, RowsPass, RowsResult
from agentmem.errors import AgentMemError
from agentmem.kv.spec import KVSpec
from agentmem.reasons import Reason

Steering = Callable[[bytes], contextlib.AbstractContextManager[None]]
"""Holds the model's rotary modules to a regime, in this thread."""

_FAILURES = (AgentMemError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What models raise on shapes, masks and caches that they do not expect."""


class TransformersBatch:
    """One model that feeds several branches at once.

    Attributes:
        mode: How it does.
        reason: Why nothing faster is done; None for the fastest.
        why: The same in a sentence.
        num_private: How many of its last tokens each row must have in its own slots.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: KVSpec,
        positions: Positions,
        steering: Steering,
        probe: Probe,
        *,
        is_stepwise: bool,
    ) -> None:
        """Prove, on a few tokens, in which way the model can feed several branches at once.

        Args:
            model: The model.
            spec: Geometry of its KV.
            positions: Of a pass's tokens.
            steering: Holds the model to a rotary regime.
            probe: Feeds the model a few tokens to see what works.
            is_stepwise: Whether the model must be fed one token at a time once it has states.
        """
        self._model = model
        self._spec = spec
        self._positions = positions
        self._steering = steering
        self._is_stepwise = is_stepwise
        self._cache_argument = cache_argument(model)
        self._takes = inspect.signature(model.forward).parameters.keys()
        self._attention = SplitAttention(model)
        self.mode, self.reason, self.why = self._choose(probe)
        windows = [layer.window - 1 for layer in spec.layers if layer.window is not None]
        self.num_private = max(windows, default=0)

    def is_worth_sharing(self, num_rows: int, num_tokens: int) -> bool:
        """Say whether attending tokens once for so many rows is faster than copying them into each."""
        is_split = self.mode is BatchMode.CASCADE
        return is_split and cascade.is_worth_sharing(self._model.device, num_rows, num_tokens)

    def takes(self, num_tokens: Sequence[int]) -> bool:
        """Say whether rows can be fed these numbers of tokens in one pass: a state takes no filling."""
        if self.mode is BatchMode.ONE_BY_ONE:
            return False
        if not self._spec.states:
            return True
        return len(set(num_tokens)) == 1 and (num_tokens[0] == 1 or not self._is_stepwise)

    def run(self, rows: RowsPass) -> RowsResult:
        """Feed the rows (see `agentmem.batching.BatchModel.run`)."""
        return self._run(rows, is_split=self.mode is BatchMode.CASCADE)

    def _run(self, rows: RowsPass, *, is_split: bool) -> RowsResult:
        model = self._model
        cache = RowsCache(rows, self._spec, model.device, is_split=is_split)
        num_queries = cache.view.num_queries
        ids = torch.tensor(
            [[*tokens, *[0] * (num_queries - len(tokens))] for tokens in rows.tokens], device=model.device
        )
        options: dict[str, object] = {self._cache_argument: cache, "use_cache": True}
        positions = self._positions(rows)
        if positions is not None:
            options["position_ids"] = positions
        num_kept = num_queries - min(
            len(tokens) - wanted for tokens, wanted in zip(rows.tokens, rows.num_logits, strict=True) if tokens
        )
        if "logits_to_keep" in self._takes:
            options["logits_to_keep"] = num_kept
        with self._attention.running(cache), self._steering(rows.texts[0].regime), torch.no_grad():
            logits: Tensor = model(input_ids=ids, **options).logits
        cache.check_complete()
        skipped = num_queries - logits.shape[1]
        wanted = [
            row[len(tokens) - count - skipped : len(tokens) - skipped] if tokens else row[:0]
            for row, tokens, count in zip(logits, rows.tokens, rows.num_logits, strict=True)
        ]
        return RowsResult(logits=wanted, states=cache.take_states())

    def _choose(self, probe: Probe) -> tuple[BatchMode, Reason | None, str]:
        reason, why = self._one_by_one_reason()
        if reason is not None:
            return BatchMode.ONE_BY_ONE, reason, why
        reasons = []
        ways = [(BatchMode.CASCADE, True), (BatchMode.ROWS, False)]
        if not self._spec.groups:
            reason = Reason.STATES_ONLY
            reasons.append(f"{type(self._model).__name__} has layer states only, which nobody can share")
            del ways[0]
        for mode, is_split in ways:
            try:
                failure = probe.failure(functools.partial(self._run, is_split=is_split), is_split=is_split)
            except _FAILURES as error:
                failure = str(error)
            if not failure:
                return mode, reason, "; ".join(reasons)
            reason = Reason.NOT_PROVEN
            reasons.append(f"{mode.value} does not work on {type(self._model).__name__} ({failure})")
        return BatchMode.ONE_BY_ONE, reason, "; ".join(reasons)

    def _one_by_one_reason(self) -> tuple[Reason | None, str]:
        name = type(self._model).__name__
        if self._model.config.is_encoder_decoder:
            return Reason.HAS_ENCODER, f"{name} has an encoder, whose output differs between branches"
        if any(layer.indexer_group is not None for layer in self._spec.layers):
            return Reason.HAS_INDEXER, f"{name} chooses by an indexer what each token attends to"
        return None, ""
