"""A transformers `Cache` that is a branch: what a layer writes goes straight into the branch's workspace.

The attention that reads it is transformers' own, on the same shapes as with a stock `DynamicCache`, so that logits are
bit-identical to it. Sliding layers keep all tokens and show a window, so that a branch can be cut anywhere.
"""

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
)

from agentmem.adapter import Feed
from agentmem.errors import InvalidInputError, SpecMismatchError, StaleCacheError
from agentmem.kv.spec import LayerKind, LayerSpec

CacheLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer
"""What transformers allows in a cache's `layers`."""


class _Pass:
    """One forward pass over a branch: where the new tokens go, and which layers have written them."""

    __slots__ = ("is_running", "layers", "num_tokens", "num_written", "position")

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.position = 0
        self.num_tokens = 0
        self.num_written = 0
        self.is_running = False


class BranchLayer(DynamicLayer):
    """A full-attention layer whose keys and values live in the branch's workspace."""

    def __init__(self, current: _Pass, index: int) -> None:
        """Write to layer `index` of the pass."""
        self._current = current
        self._index = index
        self._has_written = False
        self.is_initialized = True

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]  # a stock layer owns its tensors; here they are views
        """The visible keys `[1, H, T, D]`; a view. None before the first pass."""
        return self._visible(0)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]  # as above
        """The visible values `[1, H, T, D]`; a view. None before the first pass."""
        return self._visible(1)

    def start(self) -> None:
        """Get ready for the next pass."""
        self._has_written = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values `[1, H, q, D]`; return all that the layer's queries may see.

        Raises:
            StaleCacheError: No forward pass of the model is running.
            SpecMismatchError: Shape or dtype differ from the model that the store was opened with.
        """
        current = self._current
        if not current.is_running or self._has_written:
            raise StaleCacheError(
                "this cache only works inside the forward pass of the model that the store was opened with"
            )
        keys, values = current.layers[self._index]
        position, stop = current.position, current.position + current.num_tokens
        _check_fits(key_states, keys, current.num_tokens)
        _check_fits(value_states, values, current.num_tokens)
        keys.narrow(2, position, current.num_tokens).copy_(key_states.detach())
        values.narrow(2, position, current.num_tokens).copy_(value_states.detach())
        self._has_written = True
        current.num_written += 1
        first = self._first_visible(position)
        return keys.narrow(2, first, stop - first), values.narrow(2, first, stop - first)

    def get_seq_length(self) -> int:
        """Return the tokens cached so far, those of the running pass included once this layer has written them."""
        current = self._current
        return current.position + (current.num_tokens if self._has_written and current.is_running else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys the next queries see, and the position of the first."""
        position = self.get_seq_length()
        first = self._first_visible(position)
        return position + query_length - first, first

    def _first_visible(self, _position: int) -> int:
        return 0

    def _visible(self, which: int) -> Tensor | None:
        if not self._current.layers:
            return None
        first, stop = self._first_visible(self._current.position), self.get_seq_length()
        return self._current.layers[self._index][which].narrow(2, first, stop - first)


class BranchSlidingLayer(BranchLayer):
    """A sliding-window or chunked layer: shows the last window - 1 tokens before the new ones, as a stock one keeps."""

    is_sliding = True

    def __init__(self, current: _Pass, index: int, window: int) -> None:
        """Show at most `window` tokens to each query."""
        super().__init__(current, index)
        self.sliding_window = window

    def get_max_length(self) -> int:
        """Return the window."""
        return self.sliding_window

    def _first_visible(self, position: int) -> int:
        return max(position - self.sliding_window + 1, 0)


class BranchCache(DynamicCache):
    """The cache of one branch, for `model(..., cache=...)`, `past_key_values=` and `generate`.

    It stands at the branch's tip and moves the branch with every forward pass. It is good until the branch moves by
    other hands, or until the `with` block that made it ends.
    """

    def __init__(self, feed: Feed, owner: object) -> None:
        """Stand for the branch behind `feed`; `owner` is the adapter whose hooks see its passes."""
        self.owner = owner
        self._feed = feed
        self._current = _Pass()
        self._current.position = feed.position
        spec = feed.spec
        offsets = [sum(group.num_layers for group in spec.groups[:index]) for index in range(len(spec.groups))]
        layers: list[CacheLayer] = [_make_layer(layer, self._current, offsets) for layer in spec.layers]
        self._stored = [layer for layer in layers if isinstance(layer, BranchLayer)]
        Cache.__init__(self, layers=layers)

    def begin(self, tokens: Sequence[int]) -> None:
        """Announce a forward pass over `tokens` (see `Feed.begin`)."""
        current = self._current
        current.is_running = False
        current.layers = self._feed.begin(tokens)
        current.position = self._feed.position
        current.num_tokens = len(tokens)
        current.num_written = 0
        for layer in self._stored:
            layer.start()
        current.is_running = True

    def commit(self) -> None:
        """Make the pass's tokens part of the branch.

        Raises:
            SpecMismatchError: A layer did not write; the branch is unchanged.
        """
        current = self._current
        current.is_running = False
        if current.num_written != len(self._stored):
            raise SpecMismatchError(
                f"{current.num_written} of {len(self._stored)} layers wrote KV in this pass; the branch is unchanged. "
                f"Layers must not be skipped, and must use the cache that the model was given"
            )
        self._feed.commit()
        current.position = self._feed.position

    @property
    def position(self) -> int:
        """Tokens that the model sees as cached."""
        return self._feed.position

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens cached so far."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        return layer.get_seq_length() if isinstance(layer, BranchLayer) else self._stored[0].get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return how many keys the next queries see in a layer, and the position of the first."""
        layer = self.layers[layer_idx]
        return (layer if isinstance(layer, BranchLayer) else self._stored[0]).get_mask_sizes(query_length)

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last `-tokens_to_remove` tokens back from the branch, as transformers' own caches do."""
        if tokens_to_remove > 0:
            raise InvalidInputError(f"crop takes minus the number of tokens to remove; found {tokens_to_remove}")
        self._feed.crop(-tokens_to_remove)
        self._current.position = self._feed.position

    def activate_past_recording(self) -> None:
        """Do nothing: every layer keeps all tokens anyway."""

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


def _make_layer(layer: LayerSpec, current: _Pass, offsets: list[int]) -> BranchLayer | DummyLayer:
    if layer.group is None:
        return DummyLayer()
    index = offsets[layer.group] + layer.row
    if layer.kind in {LayerKind.SLIDING, LayerKind.CHUNKED} and layer.window is not None:
        return BranchSlidingLayer(current, index, layer.window)
    return BranchLayer(current, index)


def _check_fits(states: Tensor, slots: Tensor, num_tokens: int) -> None:
    wanted = (1, slots.shape[1], num_tokens, slots.shape[3])
    if tuple(states.shape) != wanted or states.dtype != slots.dtype:
        raise SpecMismatchError(
            f"a layer wrote KV {list(states.shape)} in {states.dtype}; the store was opened for {list(wanted)} in "
            f"{slots.dtype}. Open it with the model in the dtype it runs in, without autocast"
        )
