"""A transformers `Cache` of several branches: what the layers write goes into the branches' rows.

In cascade mode, `update` hands each layer's rows to our attention through the keyword arguments that transformers
passes on to it. In rows mode the model's own attention reads the rows, with masks that are made here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DummyLayer, DynamicCache, DynamicLayer

from agentmem.adapters.transformers.cache import CacheLayer
from agentmem.adapters.transformers.cascade import LayerRows, rows_of, shared_layer
from agentmem.adapters.transformers.layers import BranchStateLayer, CurrentPass
from agentmem.batching import RowsPass
from agentmem.errors import SpecMismatchError, UnsupportedModelError
from agentmem.kv.spec import KVSpec, LayerKind, LayerSpec, StateSpec

HANDOFF = "agentmem_rows"
"""The keyword argument under which a layer's rows travel from `update` to the attention."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """What `update` gives to the attention of its layer.

    Attributes:
        rows: What the layer's queries see.
        layer: The cache's layer, which counts what was attended.
    """

    rows: LayerRows
    layer: "RowsLayer"


class RowsView:
    """One pass, as its layers see it: where they write, and what their queries see.

    Attributes:
        rows: The pass.
        num_queries: Tokens that the longest row is fed; shorter rows are filled up behind their tokens.
        num_slots: Slots that queries may see.
        is_split: Whether our attention reads the rows, rather than the model's.
    """

    def __init__(self, rows: RowsPass, device: torch.device, *, is_split: bool) -> None:
        """Look at one pass."""
        self.rows = rows
        self.num_queries = rows.num_fed
        self.num_slots = max(rows.stops) + self.num_queries
        self.is_split = is_split
        self._device = device
        self._is_even = len(set(rows.stops)) == 1
        self._masks: dict[tuple[LayerKind, int | None], Tensor | None] = {}
        self._place: tuple[Tensor, Tensor] | None = None

    def write(self, states: Tensor, slots: Tensor) -> None:
        """Copy the new tokens' `[N, H, q, D]` into the rows' slots `[N, H, capacity, D]`."""
        if self._is_even:
            slots.narrow(2, self.rows.stops[0], self.num_queries).copy_(states.detach())
            return
        if self._place is None:
            numbers = torch.arange(len(self.rows.stops), device=self._device)[:, None]
            self._place = numbers, self._slots_of_queries()
        rows, places = self._place
        slots.transpose(1, 2)[rows, places] = states.detach().transpose(1, 2)

    def mask(self, kind: LayerKind, window: int | None) -> Tensor | None:
        """Return which slots the queries of a layer of this kind see, `[N, 1, q, S]`; None: every query sees all."""
        key = (kind, window)
        if key not in self._masks:
            self._masks[key] = self._mask(kind, window)
        return self._masks[key]

    def _slots_of_queries(self) -> Tensor:
        stops = torch.tensor(self.rows.stops, device=self._device)[:, None]
        return stops + torch.arange(self.num_queries, device=self._device)

    def _mask(self, kind: LayerKind, window: int | None) -> Tensor | None:
        is_full = self._is_even and self.num_queries == 1 and not any(self.rows.firsts)
        if is_full and (window is None or window >= self.num_slots) and kind is not LayerKind.CHUNKED:
            return None
        slots = torch.arange(self.num_slots, device=self._device)[None, None, :]
        firsts = torch.tensor(self.rows.firsts, device=self._device)[:, None, None]
        queries = self._slots_of_queries()[:, :, None]
        mask = (slots >= firsts) & (slots <= queries)
        if kind is LayerKind.SLIDING and window is not None:
            mask &= slots > queries - window
        if kind is LayerKind.CHUNKED and window is not None:
            ahead = torch.tensor(self._ahead(), device=self._device)[:, None, None]
            mask &= (slots + ahead).div(window, rounding_mode="floor") == (queries + ahead).div(
                window, rounding_mode="floor"
            )
        return mask[:, None]

    def _ahead(self) -> list[int]:
        """Return how far each row's positions are ahead of its slots, at its end."""
        return [length - stop for length, stop in zip(self.rows.lengths, self.rows.stops, strict=True)]


class RowsLayer(DynamicLayer):
    """An attention layer whose keys and values are in the branches' rows.

    Attributes:
        num_updates: How often it has written in this pass.
        num_attended: How often our attention has read it in this pass.
    """

    def __init__(self, view: RowsView, spec: LayerSpec, index: int) -> None:
        """Write to layer `index` of the pass."""
        self._view = view
        self._spec = spec
        self._index = index
        self.is_initialized = True
        self.is_sliding = spec.window is not None
        self.num_updates = 0
        self.num_attended = 0

    @property
    def is_complete(self) -> bool:
        """Whether the layer has written once, and what it handed over was read."""
        return self.num_updates == 1 and (not self._view.is_split or self.num_attended >= 1)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, kwargs: object = None, **_options: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values `[N, H, q, D]`; return the rows' slots, `[N, H, S, D]`."""
        view, layer = self._view, self._view.rows.layers[self._index]
        for states, slots in zip((key_states, value_states), layer, strict=True):
            _check_fits(states, slots, view.num_queries)
            view.write(states, slots)
        self.num_updates += 1
        keys, values = rows_of(layer, view.num_slots)
        if view.is_split:
            if not isinstance(kwargs, dict):
                raise UnsupportedModelError("its layers do not pass keyword arguments on to their attention")
            shared = [] if self.is_sliding else shared_layer(view.rows.shared, self._index)
            mask = view.mask(self._spec.kind, self._spec.window)
            kwargs[HANDOFF] = Handoff(LayerRows(keys=keys, values=values, mask=mask, shared=shared), self)
        return keys, values

    def get_seq_length(self) -> int:
        """Return the tokens of the longest row."""
        return max(self._view.rows.lengths)

    def get_mask_sizes(self, _query_length: int) -> tuple[int, int]:
        """Return how many slots the next queries see."""
        return self._view.num_slots, 0


class RowsHybridLayer(BranchStateLayer, RowsLayer):  # type: ignore[misc, override]  # as transformers' own hybrids
    """A layer with states, one per row, and attention beside them."""

    def __init__(
        self,
        view: RowsView,
        spec: LayerSpec,
        index: int,
        current: CurrentPass,
        states: Sequence[tuple[int, StateSpec]],
    ) -> None:
        """Write to layer `index` of the pass and keep `states`."""
        BranchStateLayer.__init__(self, current, states)
        RowsLayer.__init__(self, view, spec, index)


class RowsCache(DynamicCache):
    """The cache of one pass over several branches.

    Attributes:
        view: The pass.
        asked: The layer whose mask sizes were asked for last: a mask is made right afterwards, of its kind.
    """

    is_compileable = False

    def __init__(self, rows: RowsPass, spec: KVSpec, device: torch.device, *, is_split: bool) -> None:
        """Stand for the rows of one pass of a model with this geometry."""
        self.view = RowsView(rows, device, is_split=is_split)
        self.asked = 0
        self._spec = spec
        self._states = CurrentPass(max(rows.lengths))
        self._states.states = rows.states
        self._states.is_running = True
        layers = self._make_layers()
        self._rows = [layer for layer in layers if isinstance(layer, RowsLayer)]
        self._recurrent = [layer for layer in layers if isinstance(layer, BranchStateLayer)]
        for layer in self._recurrent:
            layer.load()
        Cache.__init__(self, layers=layers)

    @property
    def is_linear(self) -> list[bool]:
        """Return which layers keep states only; none where all do (see `BranchCache.is_linear`)."""
        return super().is_linear if self._rows else [False] * len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - transformers passes it by name
        """Return the tokens of the longest row."""
        return max(self.view.rows.lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return how many slots the next queries see in a layer."""
        self.asked = layer_idx
        return self.view.num_slots if self._rows else self.get_seq_length() + query_length, 0

    def mask_asked_for(self) -> Tensor | None:
        """Return the mask `[N, 1, q, S]` for the layers of the kind that was asked about last."""
        layers = self._spec.layers
        layer = layers[self.asked] if self.asked < len(layers) else layers[0]
        return self.view.mask(layer.kind, layer.window)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Hand out the rows' convolution states, which the model may update in place."""
        self._touch(layer_idx, "conv", state_idx)
        state: Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Hand out the rows' recurrent states, which the model may update in place."""
        self._touch(layer_idx, "recurrent", state_idx)
        state: Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
        return state

    def check_complete(self) -> None:
        """Refuse a pass in which a layer did not write, or whose rows were not read by our attention.

        Raises:
            SpecMismatchError: Names the first such layer; what branches share would be missing without a word.
        """
        for index, layer in enumerate(self.layers):
            is_complete = layer.is_complete if isinstance(layer, RowsLayer) else True
            if isinstance(layer, BranchStateLayer):
                is_complete = is_complete and layer.has_touched_all
            if not is_complete:
                raise SpecMismatchError(
                    f"layer {index} did not write its KV and states, or its attention did not read what the branches "
                    f"share, in a pass over several branches; they are unchanged"
                )

    def take_states(self) -> list[Tensor]:
        """Collect the rows' layer states `[N, ...]` after the pass, in the order of the spec."""
        found: dict[int, Tensor] = {}
        for layer in self._recurrent:
            found |= layer.unload()
        return [found[place] for place in sorted(found)]

    def _touch(self, layer_idx: int, name: str, state_idx: int) -> None:
        layer = self.layers[layer_idx]
        if isinstance(layer, BranchStateLayer):
            layer.touch(name, state_idx)

    def _make_layers(self) -> list[CacheLayer]:
        spec = self._spec
        offsets = [sum(group.num_layers for group in spec.groups[:index]) for index in range(len(spec.groups))]
        states: dict[int, list[tuple[int, StateSpec]]] = {}
        for place, state in enumerate(spec.states):
            states.setdefault(state.layer, []).append((place, state))
        return [self._make_layer(layer, offsets, states.get(index, [])) for index, layer in enumerate(spec.layers)]

    def _make_layer(self, layer: LayerSpec, offsets: Sequence[int], states: list[tuple[int, StateSpec]]) -> CacheLayer:
        if layer.group is None:
            return BranchStateLayer(self._states, states) if states else DummyLayer()
        index = offsets[layer.group] + layer.row
        if states:
            return RowsHybridLayer(self.view, layer, index, self._states, states)
        return RowsLayer(self.view, layer, index)


def _check_fits(states: Tensor, slots: Tensor, num_queries: int) -> None:
    wanted = (slots.shape[0], slots.shape[1], num_queries, slots.shape[3])
    if tuple(states.shape) != wanted or states.dtype != slots.dtype:
        raise SpecMismatchError(
            f"a layer wrote KV {list(states.shape)} in {states.dtype}; the store was opened for {list(wanted)} in "
            f"{slots.dtype}. Open it with the model in the dtype it runs in, without autocast"
        )
