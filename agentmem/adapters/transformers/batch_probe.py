"""The proof that a model gives the same logits for several branches in one pass as for each alone.

Two rows that share a prefix, of different lengths, are fed on: twice, so that what the first pass wrote is read.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

from agentmem.adapters.transformers.geometry import cache_argument, new_cache, unchanged
from agentmem.batching import RowsPass, RowsResult
from agentmem.kv.spec import KVSpec
from agentmem.marks import Mark, Marks
from agentmem.tiers.frontier import LayerKV, SharedKV

_NUM_SHARED = 5
_OWN = ((3, 1), (2, 2))
"""For each row: tokens that it has alone, and tokens of the pass. Rows with layer states are of one length."""
_NUM_ROOM = 8
_TOLERANCES = {"float32": 0.01, "float64": 0.01}
_TOLERANCE = 0.1
"""Of the logits, relative. fp32: below 1e-4. bf16: 0.02 to 0.04 (SmolLM2), as in another batch or other passes. Without
what is shared, or with a wrong mask: 0.9 and more (tests/test_batch.py)."""
_NUM_TRIALS = 3
"""One that fits is enough: in bf16, a mixture of experts may choose others by chance."""

Run = Callable[[RowsPass], RowsResult]
Positions = Callable[[RowsPass], Tensor | None]
"""Gives the positions of the rows' tokens, as the model takes them; None for a model that takes none."""


class PlainText:
    """Tokens of the probe: text without media."""

    marks: Marks = ()

    def __init__(self, ids: Sequence[int], regime: bytes) -> None:
        """Stand for `ids`."""
        self._ids = list(ids)
        self.regime = regime

    def tokens(self, stop: int) -> list[int]:
        """Return the first `stop` token ids."""
        return self._ids[:stop]

    def inputs(self, mark: Mark) -> dict[str, object]:
        """Refuse: there are no media."""
        raise LookupError(f"the probe has no media; asked for {mark.kind}")


class Probe:
    """Feeds a model the same tokens as rows of one pass, and alone."""

    def __init__(
        self, model: PreTrainedModel, spec: KVSpec, positions: Positions, text: Sequence[int], regime: bytes
    ) -> None:
        """Prepare.

        Args:
            model: The model.
            spec: Geometry of its KV.
            positions: Of a pass's tokens.
            text: Different token ids that stand for no media.
            regime: The rotary regime of short sequences.
        """
        self._model = model
        self._spec = spec
        self._positions = positions
        self._text = text
        self._regime = regime
        self._argument = cache_argument(model)

    def failure(self, run: Run, *, is_split: bool) -> str:
        """Return why rows can't be fed in one pass; "" when they give the logits that each gives alone."""
        with unchanged(self._model):
            distances = [self._distance(run, trial, is_split=is_split) for trial in range(_NUM_TRIALS)]
        if min(distances) <= _TOLERANCES.get(self._spec.dtype, _TOLERANCE):
            return ""
        return f"logits differ by {min(distances):.0%} from those of each branch alone"

    def _distance(self, run: Run, trial: int, *, is_split: bool) -> float:
        shared, own = self._tokens(trial)
        before = [[*shared, *mine[0]] for mine in own]
        caches = [self._alone(tokens) for tokens in before]
        has_window = any(layer.window is not None for layer in self._spec.layers)  # whose tokens rows have themselves
        num_shared = len(shared) if is_split and not has_window else 0
        rows = self._rows(caches, before, [mine[1] for mine in own], num_shared=num_shared)
        distance = 0.0
        for _ in range(2):
            found = run(rows)
            expected = [self._logits(cache, rows, index) for index, cache in enumerate(caches)]
            pairs = zip(found.logits, expected, strict=True)
            distance = max(distance, *(_difference(mine[-1], theirs) for mine, theirs in pairs))
            rows = self._next(rows, found.states)
        return distance

    def _tokens(self, trial: int) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
        """Return the shared tokens and, per row, its own and those of the pass."""
        ids = iter(self._text[trial:])
        shared = [next(ids) for _ in range(_NUM_SHARED)]
        sizes = ((1, 1),) * len(_OWN) if self._spec.states else _OWN
        return shared, [([next(ids) for _ in range(own)], [next(ids) for _ in range(fed)]) for own, fed in sizes]

    def _alone(self, tokens: Sequence[int]) -> DynamicCache:
        """Feed one row's tokens through a stock cache."""
        cache = new_cache(self._model)
        self._feed(cache, tokens, 0)
        return cache

    def _logits(self, cache: DynamicCache, rows: RowsPass, index: int) -> Tensor:
        return self._feed(cache, rows.tokens[index], rows.lengths[index])

    def _feed(self, cache: DynamicCache, tokens: Sequence[int], length: int) -> Tensor:
        """Feed one row alone; return the last token's logits `[V]`."""
        given = {self._argument: cache, "use_cache": True}
        positions = self._positions(
            RowsPass(
                texts=[PlainText(tokens, self._regime)],
                tokens=[tokens],
                lengths=[length],
                firsts=[0],
                stops=[0],
                layers=[],
                shared=[],
                states=None,
                num_logits=[1],
            )
        )
        if positions is not None:
            given["position_ids"] = positions
        with torch.no_grad():
            logits: Tensor = self._model(
                input_ids=torch.tensor([list(tokens)], device=self._model.device), **given
            ).logits
        return logits[0, -1]

    def _rows(
        self,
        caches: Sequence[DynamicCache],
        before: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        *,
        num_shared: int,
    ) -> RowsPass:
        """Return the pass that goes on from the stock caches: rows, and what they share."""
        border = max(len(mine) for mine in before) - num_shared
        firsts = [border - (len(mine) - num_shared) for mine in before]
        stacks = [self._stack(caches, index, firsts, num_shared) for index in self._stored()]
        views = [tuple(part[0, :, :num_shared] for part in self._kv(caches[0], index)) for index in self._stored()]
        shared = SharedKV(
            rows=tuple(range(len(before))), num_tokens=num_shared, layers=[(keys, values) for keys, values in views]
        )
        return RowsPass(
            texts=[PlainText([*mine, *fed], self._regime) for mine, fed in zip(before, tokens, strict=True)],
            tokens=tokens,
            lengths=[len(mine) for mine in before],
            firsts=firsts,
            stops=[border] * len(before),
            layers=stacks,
            shared=[shared] if num_shared else [],
            states=self._states(caches),
            num_logits=[1] * len(before),
        )

    def _next(self, rows: RowsPass, states: list[Tensor]) -> RowsPass:
        """Return the pass after `rows`: one token more in each."""
        sizes = [len(tokens) for tokens in rows.tokens]
        return RowsPass(
            texts=rows.texts,
            tokens=[[self._text[0]] for _ in sizes],
            lengths=[length + size for length, size in zip(rows.lengths, sizes, strict=True)],
            firsts=rows.firsts,
            stops=[stop + size for stop, size in zip(rows.stops, sizes, strict=True)],
            layers=rows.layers,
            shared=rows.shared,
            states=[state.clone() for state in states] if states else None,
            num_logits=rows.num_logits,
        )

    def _stored(self) -> list[int]:
        """Return the indices of the layers that store KV, in the order of the groups."""
        layers = [(layer.group, layer.row, index) for index, layer in enumerate(self._spec.layers)]
        return [index for group, _, index in sorted((g, r, i) for g, r, i in layers if g is not None) if group >= 0]

    def _kv(self, cache: DynamicCache, index: int) -> LayerKV:
        layer = cache.layers[index]
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise LookupError(f"layer {index} has no KV")
        return layer.keys, layer.values

    def _stack(self, caches: Sequence[DynamicCache], index: int, firsts: Sequence[int], num_shared: int) -> LayerKV:
        """Return one layer's rows `[N, H, capacity, D]`, filled from the stock caches."""
        stacked = []
        for parts in zip(*(self._kv(cache, index) for cache in caches), strict=True):
            rows = parts[0].new_zeros((len(parts), parts[0].shape[1], max(firsts) + _NUM_ROOM * 2, parts[0].shape[3]))
            for row, part, first in zip(rows, parts, firsts, strict=True):
                own = part[0, :, num_shared:]
                row[:, first : first + own.shape[1]] = own
            stacked.append(rows)
        return stacked[0], stacked[1]

    def _states(self, caches: Sequence[DynamicCache]) -> list[Tensor] | None:
        if not self._spec.states:
            return None
        found = []
        for state in self._spec.states:
            held = [self._held(cache.layers[state.layer], state.name, state.index) for cache in caches]
            found.append(torch.cat(held))
        return found

    def _held(self, layer: object, name: str, index: int) -> Tensor:
        if not isinstance(layer, LinearAttentionLayer):
            raise LookupError(f"a layer with states became {type(layer).__name__}")  # noqa: TRY004 - of the model, not of a caller
        state = (layer.conv_states if name == "conv" else layer.recurrent_states)[index]
        if state is None:
            raise LookupError(f"a {name} state is missing")
        return state


def _difference(one: Tensor, other: Tensor) -> float:
    """Return how far logits are apart, less their means, as a part of the second."""
    one, other = one.float() - one.float().mean(), other.float() - other.float().mean()
    return float((one - other).norm() / other.norm().clamp(min=1e-12))
