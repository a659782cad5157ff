"""The layers of a branch's cache: each writes straight into the branch's workspace and reads from there.

The attention and the scans that read them are transformers' own, on the same shapes as with a stock `DynamicCache`, so
that logits are bit-identical to it. Sliding layers keep all tokens and show a window, so that a branch can be cut
anywhere. Layer states are handed over as a whole, before and after each pass.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from agentmem.adapter import Pass
from agentmem.errors import SpecMismatchError, StaleCacheError
from agentmem.kv.spec import StateSpec


class CurrentPass:
    """One forward pass over a branch, as its layers see it.

    Attributes:
        layers: Keys and values of each stored layer, `[1, H, capacity, D]`; [] before the first pass.
        states: The layer states before the pass; None when there are none.
        position: Tokens of the branch before the pass.
        num_tokens: Tokens of the pass.
        num_kept: How many of them are in place already, and must not be written again.
        is_running: Whether the model is between begin and commit.
    """

    __slots__ = ("_wait", "is_running", "layers", "num_kept", "num_tokens", "position", "states")

    def __init__(self, position: int) -> None:
        """Stand at `position`, with no pass running."""
        self.layers: list[tuple[Tensor, Tensor]] = []
        self.states: list[Tensor] | None = None
        self.position = position
        self.num_tokens = 0
        self.num_kept = 0
        self.is_running = False
        self._wait: Callable[[int], None] | None = None

    def start(self, begun: Pass, position: int, num_tokens: int) -> None:
        """Begin a pass over `num_tokens` tokens from `position` on."""
        self.layers, self.states = begun.layers, begun.states
        self.position, self.num_tokens, self.num_kept = position, num_tokens, begun.num_kept
        self._wait = begun.wait
        self.is_running = True

    def wait(self, index: int) -> None:
        """Wait until what layer `index` holds of earlier tokens is there."""
        if self._wait is not None:
            self._wait(index)

    def check_running(self) -> None:
        """Refuse to read or write outside of a pass.

        Raises:
            StaleCacheError: No forward pass of the model is running.
        """
        if not self.is_running:
            raise StaleCacheError(
                "this cache only works inside the forward pass of the model that the store was opened with"
            )


class BranchLayer(DynamicLayer):
    """A full-attention layer whose keys and values live in the branch's workspace."""

    def __init__(self, current: CurrentPass, index: int) -> None:
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

    @property
    def is_complete(self) -> bool:
        """Whether the layer has written all that it keeps in this pass."""
        return self._has_written

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
        current.check_running()
        if self._has_written:
            raise StaleCacheError("a layer wrote twice in one pass: begin the next pass with the model's own forward")
        keys, values = current.layers[self._index]
        _check_fits(key_states, keys, current.num_tokens)
        _check_fits(value_states, values, current.num_tokens)
        _write(key_states, keys, current)
        _write(value_states, values, current)
        current.wait(self._index)
        self._has_written = True
        first, stop = self._first_visible(current.position), current.position + current.num_tokens
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

    def __init__(self, current: CurrentPass, index: int, window: int) -> None:
        """Show at most `window` tokens to each query."""
        super().__init__(current, index)
        self.sliding_window = window

    def get_max_length(self) -> int:
        """Return the window."""
        return self.sliding_window

    def _first_visible(self, position: int) -> int:
        return max(position - self.sliding_window + 1, 0)


class BranchIndexedLayer(BranchLayer):
    """A full-attention layer with the keys of an indexer beside its own."""

    is_indexer_initialized = True
    indexer_position_ids = None  # models that keep them are refused

    def __init__(self, current: CurrentPass, index: int, indexer: int) -> None:
        """Write the indexer's keys to layer `indexer` of the pass."""
        super().__init__(current, index)
        self._indexer = indexer
        self._has_indexed = False

    @property
    def indexer_keys(self) -> Tensor | None:
        """The indexer's keys `[1, T, D]`; a view. None before the first pass."""
        current = self._current
        stop = current.position + (current.num_tokens if self._has_indexed and current.is_running else 0)
        return current.layers[self._indexer][0].narrow(2, 0, stop).squeeze(1) if current.layers else None

    @property
    def is_complete(self) -> bool:
        """Whether the layer has written all that it keeps in this pass."""
        return self._has_written and self._has_indexed

    def start(self) -> None:
        """Get ready for the next pass."""
        super().start()
        self._has_indexed = False

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the indexer's keys `[1, q, D]` of the new tokens; return those of all tokens, `[1, T, D]`.

        Raises:
            StaleCacheError: No forward pass of the model is running.
            SpecMismatchError: Shape or dtype differ from the model that the store was opened with.
        """
        current = self._current
        current.check_running()
        keys, states = current.layers[self._indexer][0], indexer_key_states.unsqueeze(1)
        _check_fits(states, keys, current.num_tokens)
        _write(states, keys, current)
        current.wait(self._indexer)
        self._has_indexed = True
        return keys.narrow(2, 0, current.position + current.num_tokens).squeeze(1)


class BranchStateLayer(LinearAttentionLayer):
    """A recurrent or convolution layer: its states come from the branch before a pass and go back to it afterwards.

    During a pass it holds copies of its own, which the model updates in place as it does with a stock cache. Outside of
    a pass it holds nothing.
    """

    is_compileable = False

    def __init__(self, current: CurrentPass, states: Sequence[tuple[int, StateSpec]]) -> None:
        """Keep `states`, given with their places in `KVSpec.states`."""
        super().__init__(number_of_states=1 + max(state.index for _, state in states))
        self._current = current
        self._places = {(state.name, state.index): place for place, state in states}
        self._touched: set[tuple[str, int]] = set()

    @property
    def has_touched_all(self) -> bool:
        """Whether the model has written, or was handed to be written in place, every state in this pass."""
        return self._places.keys() == self._touched

    def load(self) -> None:
        """Take the states before the pass; none before the first token."""
        self._forget()
        states = self._current.states
        if states is not None:
            for (name, index), place in self._places.items():
                self._hold(name, index, states[place])

    def unload(self) -> dict[int, Tensor]:
        """Give up the states that the layer holds; return them by their places in `KVSpec.states`."""
        held = {("conv", index): state for index, state in self.conv_states.items()}
        held |= {("recurrent", index): state for index, state in self.recurrent_states.items()}
        self._forget()
        return {self._places[key]: state.detach() for key, state in held.items() if state is not None}

    def touch(self, name: str, index: int) -> None:
        """Note that a state is handed to the model, which updates it in place when it is fed one token.

        Raises:
            StaleCacheError: No forward pass of the model is running.
        """
        self._current.check_running()
        if (self.conv_states if name == "conv" else self.recurrent_states).get(index) is not None:
            self._touched.add((name, index))

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> Tensor:
        """Update a convolution state as a stock layer does; return the inputs that the convolution needs."""
        self._current.check_running()
        updated = super().update_conv_state(conv_states, state_idx, conv_kernel_size, **kwargs)
        self._touched.add(("conv", state_idx))
        return updated

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Update a recurrent state as a stock layer does; return it."""
        self._current.check_running()
        updated = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        self._touched.add(("recurrent", state_idx))
        return updated

    def _forget(self) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)
        self._touched = set()

    def _hold(self, name: str, index: int, state: Tensor) -> None:
        """Hold a state as a stock layer does after its first update."""
        if name == "conv":
            self.conv_states[index] = state
            self.conv_kernel_size[index] = state.shape[-1]
            self.is_conv_states_initialized[index] = self.has_previous_state[index] = True
        else:
            self.recurrent_states[index] = state
            self.is_recurrent_states_initialized[index] = True


class BranchHybridLayer(BranchStateLayer, BranchLayer):  # type: ignore[misc, override]  # as transformers' own hybrids
    """A layer with states, and full attention beside them."""

    def __init__(self, current: CurrentPass, index: int, states: Sequence[tuple[int, StateSpec]]) -> None:
        """Write to layer `index` of the pass and keep `states`."""
        BranchStateLayer.__init__(self, current, states)
        BranchLayer.__init__(self, current, index)


class BranchHybridSlidingLayer(BranchStateLayer, BranchSlidingLayer):  # type: ignore[misc, override]  # as above
    """A layer with states, and sliding-window attention beside them."""

    def __init__(self, current: CurrentPass, index: int, window: int, states: Sequence[tuple[int, StateSpec]]) -> None:
        """Write to layer `index` of the pass, show at most `window` tokens to each query, and keep `states`."""
        BranchStateLayer.__init__(self, current, states)
        BranchSlidingLayer.__init__(self, current, index, window)


def check_states(states: Sequence[Tensor], specs: Sequence[StateSpec]) -> None:
    """Refuse states that a pass left in another form than the model had when the store was opened.

    Raises:
        SpecMismatchError: Names the first such state; or autocast is on, which changes what the model computes.
    """
    if states and torch.is_autocast_enabled(states[0].device.type):
        raise SpecMismatchError(
            "autocast is on, which changes what the model's recurrent layers compute; run the model in the dtype that "
            "the store was opened with. The branch is unchanged"
        )
    for state, spec in zip(states, specs, strict=True):
        if tuple(state.shape) != spec.shape or state.dtype != getattr(torch, spec.dtype):
            raise SpecMismatchError(
                f"layer {spec.layer} left a {spec.name} state {list(state.shape)} in {state.dtype}; the store was "
                f"opened for {list(spec.shape)} in torch.{spec.dtype}. The branch is unchanged"
            )


def _write(states: Tensor, slots: Tensor, current: CurrentPass) -> None:
    """Copy the new tokens' `[1, H, q, D]` into their slots, all but those that are in place."""
    num_kept = current.num_kept
    place = slots.narrow(2, current.position + num_kept, current.num_tokens - num_kept)
    place.copy_(states.narrow(2, num_kept, current.num_tokens - num_kept).detach())


def _check_fits(states: Tensor, slots: Tensor, num_tokens: int) -> None:
    wanted = (1, slots.shape[1], num_tokens, slots.shape[3])
    if tuple(states.shape) != wanted or states.dtype != slots.dtype:
        raise SpecMismatchError(
            f"a layer wrote KV {list(states.shape)} in {states.dtype}; the store was opened for {list(wanted)} in "
            f"{slots.dtype}. Open it with the model in the dtype it runs in, without autocast"
        )
