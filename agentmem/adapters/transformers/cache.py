"""A transformers `Cache` that is a branch: what the layers write goes straight into the branch's workspace.

It drives the passes of one branch; what a layer does in a pass is in `layers`.
"""

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
)

from agentmem.adapter import Feed, Pass
from agentmem.adapters.transformers.layers import (
    BranchHybridLayer,
    BranchHybridSlidingLayer,
    BranchIndexedLayer,
    BranchLayer,
    BranchSlidingLayer,
    BranchStateLayer,
    CurrentPass,
    check_states,
)
from agentmem.errors import InvalidInputError, SpecMismatchError
from agentmem.kv.spec import KVSpec, LayerSpec, StateSpec

CacheLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer
"""What transformers allows in a cache's `layers`."""


class BranchCache(DynamicCache):
    """The cache of one branch, for `model(..., cache=...)`, `past_key_values=` and `generate`.

    It stands at the branch's tip and moves the branch with every forward pass. It is good until the branch moves by
    other hands, or until the `with` block that made it ends.

    Attributes:
        owner: The adapter whose hooks see the cache's passes.
        feed: The branch's side.
        begun: The running pass; None when there is none.
    """

    is_compileable = False

    def __init__(self, feed: Feed, owner: object) -> None:
        """Stand for the branch behind `feed`; `owner` is the adapter whose hooks see its passes."""
        self.owner = owner
        self.feed = feed
        self.begun: Pass | None = None
        self._current = CurrentPass(feed.position)
        layers = make_layers(feed.spec, self._current)
        self._stored = [layer for layer in layers if isinstance(layer, BranchLayer)]
        self._recurrent = [layer for layer in layers if isinstance(layer, BranchStateLayer)]
        Cache.__init__(self, layers=layers)

    def begin(self, tokens: Sequence[int]) -> Pass:
        """Announce a forward pass over `tokens` (see `Feed.begin`)."""
        self.abort()
        self.begun = begun = self.feed.begin(tokens)
        self._current.start(begun, self.feed.position, len(tokens))
        for stored in self._stored:
            stored.start()
        for recurrent in self._recurrent:
            recurrent.load()
        return begun

    def commit(self) -> None:
        """Make the pass's tokens part of the branch.

        Raises:
            SpecMismatchError: A layer did not write, or left states of another form; the branch is unchanged.
        """
        self.abort()
        missing = [
            index
            for index, layer in enumerate(self.layers)
            if (isinstance(layer, BranchLayer) and not layer.is_complete)
            or (isinstance(layer, BranchStateLayer) and not layer.has_touched_all)
        ]
        if missing:
            raise SpecMismatchError(
                f"{len(missing)} layers, from layer {missing[0]} on, did not write all their KV and states in this "
                f"pass; the branch is unchanged. Layers must not be skipped, and must use the cache that the model was "
                f"given"
            )
        self.feed.commit(self._take_states())
        self._current.position = self.feed.position

    def abort(self) -> None:
        """End the running pass, if there is one; the branch is unchanged."""
        self.begun, self._current.is_running = None, False

    @property
    def position(self) -> int:
        """Tokens that the model sees as cached."""
        return self.feed.position

    @property
    def is_linear(self) -> list[bool]:
        """Return which layers keep states only; none where all do.

        transformers takes a cache of such layers alone for one that cannot say how many tokens it stands for, and feeds
        all tokens again. This one can.
        """
        return super().is_linear if self._stored else [False] * len(self.layers)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether there are layer states: those of the running pass, or those that the next one begins with."""
        if self._current.is_running or not self._recurrent:
            return bool(super().has_previous_state(layer_idx, state_idx))
        return self.position > 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Hand out a convolution state, which the model may update in place; None before the first token."""
        self._touch(layer_idx, "conv", state_idx)
        state: Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Hand out a recurrent state, which the model may update in place; None before the first token."""
        self._touch(layer_idx, "recurrent", state_idx)
        state: Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
        return state

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens cached so far."""
        layer = self._attention(layer_idx)
        return self._current.position if layer is None else layer.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return how many keys the next queries see in a layer, and the position of the first."""
        layer = self._attention(layer_idx)
        return (self._current.position + query_length, 0) if layer is None else layer.get_mask_sizes(query_length)

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last `-tokens_to_remove` tokens back from the branch, as transformers' own caches do."""
        if tokens_to_remove > 0:
            raise InvalidInputError(f"crop takes minus the number of tokens to remove; found {tokens_to_remove}")
        self.feed.crop(-tokens_to_remove)
        self._current.position = self.feed.position

    def activate_past_recording(self) -> None:
        """Do nothing: every layer keeps all tokens anyway, and states are kept by the branch."""

    def reorder_cache(self, _beam_idx: Tensor) -> NoReturn:
        """Refuse: one branch has no beams."""
        raise InvalidInputError("beam search needs several branches; fork the branch for each beam")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refuse: one branch is one sequence."""
        raise InvalidInputError(
            f"the cache of one branch cannot stand for {repeats} sequences; fork the branch instead"
        )

    def batch_select_indices(self, _indices: Tensor) -> NoReturn:
        """Refuse: one branch is one sequence."""
        raise InvalidInputError("the cache of one branch has a batch of 1; nothing can be selected from it")

    def reset(self) -> NoReturn:
        """Refuse: it would empty the branch."""
        raise InvalidInputError("resetting this cache would empty its branch; use branch.rewind(tokens=...)")

    def __deepcopy__(self, _memo: object) -> NoReturn:
        """Refuse: it would copy all KV."""
        raise InvalidInputError("don't copy a branch's cache; session.fork(name) makes a branch in microseconds")

    def _attention(self, layer_idx: int) -> BranchLayer | None:
        """Return the attention layer that is asked for, else the first one; None when there is none."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if isinstance(layer, BranchLayer):
            return layer
        return self._stored[0] if self._stored else None

    def _touch(self, layer_idx: int, name: str, state_idx: int) -> None:
        layer = self.layers[layer_idx]
        if isinstance(layer, BranchStateLayer):
            layer.touch(name, state_idx)

    def _take_states(self) -> list[Tensor]:
        """Collect the layer states after the pass, in the order of the spec; the layers forget them."""
        found: dict[int, Tensor] = {}
        for layer in self._recurrent:
            found |= layer.unload()
        states = [found[place] for place in sorted(found)]
        check_states(states, self.feed.spec.states)
        return states


def make_layers(spec: KVSpec, current: CurrentPass) -> list[CacheLayer]:
    """Make the cache layers of a model, in order."""
    offsets = [sum(group.num_layers for group in spec.groups[:index]) for index in range(len(spec.groups))]
    states: dict[int, list[tuple[int, StateSpec]]] = {}
    for place, state in enumerate(spec.states):
        states.setdefault(state.layer, []).append((place, state))
    return [_make_layer(layer, current, offsets, states.get(index, [])) for index, layer in enumerate(spec.layers)]


def _make_layer(
    layer: LayerSpec, current: CurrentPass, offsets: list[int], states: list[tuple[int, StateSpec]]
) -> CacheLayer:
    if layer.group is None:
        return BranchStateLayer(current, states) if states else DummyLayer()
    index = offsets[layer.group] + layer.row
    if layer.window is not None:
        if states:
            return BranchHybridSlidingLayer(current, index, layer.window, states)
        return BranchSlidingLayer(current, index, layer.window)
    if layer.indexer_group is not None:
        return BranchIndexedLayer(current, index, offsets[layer.indexer_group] + layer.indexer_row)
    return BranchHybridLayer(current, index, states) if states else BranchLayer(current, index)
