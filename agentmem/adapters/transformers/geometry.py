"""What KV and which states a transformers model keeps, read from the model's own cache layers after a few probe tokens.

Nothing here is decided by a model's name: a layer kind that is not known is refused before it can give a wrong answer.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from agentmem.errors import InvalidInputError, UnsupportedModelError
from agentmem.kv.spec import DTYPE_NBYTES, KVSpec, LayerGroup, LayerKind, LayerSpec, StateSpec

Probe = Callable[[int], DynamicCache]
"""Feeds that many tokens, from the first on, through a fresh stock cache; returns the cache of the self-attention."""

_KINDS: dict[type, LayerKind] = {
    DynamicLayer: LayerKind.FULL,
    DynamicIndexedLayer: LayerKind.FULL,
    DynamicSlidingWindowLayer: LayerKind.SLIDING,
    LinearAttentionLayer: LayerKind.RECURRENT,
    LinearAttentionAndFullAttentionLayer: LayerKind.FULL,
    LinearAttentionAndSlidingWindowAttentionLayer: LayerKind.SLIDING,
    DummyLayer: LayerKind.EMPTY,
}
"""The cache layers that are known. A subclass may keep more than its base, so only these very classes count."""

_Shape = tuple[int, int, int]
"""Heads, key dim and value dim of what a layer stores for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What the probe left in one layer."""

    kind: LayerKind
    shape: _Shape | None
    indexer: _Shape | None
    states: tuple[StateSpec, ...]
    window: int | None


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name under which the model's forward takes its cache: "cache" from transformers 5.24 on."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def derive_spec(model: PreTrainedModel, block_size: int, probe: Probe | None = None) -> KVSpec:
    """Return the geometry of the model's KV and layer states. Feeds the model a few tokens, and leaves it as it was.

    Args:
        model: The model, in eval mode.
        block_size: Tokens per block.
        probe: Feeds the model; None for decoders, which take `input_ids` and a cache.

    Raises:
        UnsupportedModelError: A layer, cache or position scheme is not stored yet; the message names it.
        InvalidInputError: The model is in training mode.
    """
    _refuse_unsupported(model)
    probe = probe or functools.partial(probe_decoder, model)
    with unchanged(model):
        cache = probe(1)
        layers = [_look(model, index, layer) for index, layer in enumerate(cache.layers)]
        states = tuple(state for layer in layers for state in layer.states)
        if not states and not any(layer.shape for layer in layers):
            raise UnsupportedModelError(
                f"{_name(model)} did not use the cache it was given: its state lives elsewhere and cannot be stored"
            )
        if states:
            _check_states_are_steady(model, probe, states)
    specs, groups = _group(layers)
    dtype = _kv_dtype(model, cache.layers) if groups else states[0].dtype
    return KVSpec(layers=specs, groups=groups, dtype=dtype, block_size=block_size, states=states)


def probe_decoder(model: PreTrainedModel, num_tokens: int) -> DynamicCache:
    """Feed a decoder `num_tokens` tokens through a stock cache and return it (a `Probe`)."""
    cache = new_cache(model)
    tokens = torch.zeros((1, num_tokens), dtype=torch.long, device=model.device)
    try:
        with torch.no_grad():
            output = model(input_ids=tokens, use_cache=True, **{cache_argument(model): cache})
    except (AttributeError, TypeError, ValueError) as error:  # it asks its cache for what only one of its own has
        raise UnsupportedModelError(
            f"{_name(model)} does not work on the DynamicCache it is given ({error}); its state cannot be stored yet"
        ) from error
    returned: object = getattr(output, "cache", None)
    if returned is None:
        returned = getattr(output, "past_key_values", None)
    if returned is not cache:
        raise UnsupportedModelError(
            f"{_name(model)} does not work on the DynamicCache it is given (it returned {type(returned).__name__}); "
            f"agentmem cannot store its state yet"
        )
    return cache


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Return an empty stock cache with the layers of the model's decoder.

    Raises:
        UnsupportedModelError: A layer is of a kind that is not known.
    """
    try:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    except KeyError as error:
        raise UnsupportedModelError(
            f"{_name(model)} has layers of type {error}, which agentmem does not store yet"
        ) from error
    for index, layer in enumerate(cache.layers):
        _kind(model, index, layer)
    return cache


@contextlib.contextmanager
def unchanged(model: PreTrainedModel) -> Iterator[None]:
    """Put back what forward passes leave on the model's modules, such as position deltas and rotary buffers."""
    before = [(module, dict(vars(module)), dict(vars(module)["_buffers"])) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            attributes["_buffers"].clear()
            attributes["_buffers"].update(buffers)


def _look(model: PreTrainedModel, index: int, layer: object) -> _Found:
    """Read one layer after the probe's one token."""
    kind, shape, states = _kind(model, index, layer), _shape(layer), _states(model, index, layer)
    if isinstance(layer, LinearAttentionLayer) and not states:
        raise UnsupportedModelError(
            f"layer {index} of {_name(model)} left nothing in its {type(layer).__name__}: it keeps its state "
            f"elsewhere, where it would leak from one branch into another; agentmem cannot store it"
        )
    if shape is None and kind is not LayerKind.SHARED:
        kind = LayerKind.RECURRENT if states else LayerKind.EMPTY
    window = getattr(layer, "sliding_window", None) if shape is not None else None
    return _Found(kind=kind, shape=shape, indexer=_indexer_shape(model, index, layer), states=states, window=window)


def _kind(model: PreTrainedModel, index: int, layer: object) -> LayerKind:
    """Return the kind of a layer by its class, and by the configuration where one class serves two kinds."""
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None)
    kind = _KINDS.get(type(layer))
    if kind is None:
        raise UnsupportedModelError(
            f"layer {index} of {_name(model)} keeps its state in a {type(layer).__name__}, which is not stored yet; "
            f"attention, recurrent and convolution layers of transformers' own DynamicCache are supported"
        )
    if type(layer) is DynamicSlidingWindowLayer:
        is_chunked = layer_types is not None and layer_types[index] == "chunked_attention"
        is_chunked = is_chunked or (layer_types is None and getattr(config, "attention_chunk_size", None) is not None)
        return LayerKind.CHUNKED if is_chunked else kind
    if type(layer) is DummyLayer:
        modes = getattr(config, "kv_sharing_modes", None)
        return LayerKind.SHARED if modes is not None and modes[index] == "reuse" else kind
    return kind


def _shape(layer: object) -> _Shape | None:
    """Return (heads, key dim, value dim) of what the probe left in the layer; None when it left nothing."""
    if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None or not layer.keys.numel():
        return None
    keys, values = layer.keys, layer.values
    if (
        keys.ndim != 4
        or values.ndim != 4
        or keys.shape[:3] != (1, keys.shape[1], 1)
        or values.shape[:3] != keys.shape[:3]
    ):
        raise UnsupportedModelError(
            f"a layer's keys and values have the shapes {tuple(keys.shape)} and {tuple(values.shape)}; agentmem stores "
            f"[batch, heads, tokens, dim] with as many heads in both"
        )
    return keys.shape[1], keys.shape[3], values.shape[3]


def _indexer_shape(model: PreTrainedModel, index: int, layer: object) -> _Shape | None:
    """Return the shape of the keys of a layer's own indexer; layers may have none, or use another layer's."""
    if not isinstance(layer, DynamicIndexedLayer):
        return None
    if layer.indexer_position_ids is not None:
        raise UnsupportedModelError(
            f"layer {index} of {_name(model)} keeps position ids for its indexer (indexer_position_ids), which "
            f"agentmem does not store yet"
        )
    keys = layer.indexer_keys
    if keys is None or not keys.numel():
        return None
    if keys.ndim != 3 or keys.shape[:2] != (1, 1):
        raise UnsupportedModelError(
            f"the indexer of layer {index} of {_name(model)} has keys of shape {tuple(keys.shape)} after one token; "
            f"agentmem stores [batch, tokens, dim]"
        )
    return 1, keys.shape[2], 0


def _states(model: PreTrainedModel, index: int, layer: object) -> tuple[StateSpec, ...]:
    """Describe what the layer keeps that cannot be cut by token."""
    if not isinstance(layer, LinearAttentionLayer):
        return ()
    found = {("conv", key): state for key, state in layer.conv_states.items()}
    found |= {("recurrent", key): state for key, state in layer.recurrent_states.items()}
    states = []
    for (name, key), state in found.items():
        if state is not None:
            dtype = _dtype_name(state)
            if dtype not in DTYPE_NBYTES:
                raise UnsupportedModelError(
                    f"layer {index} of {_name(model)} has a {name} state of dtype {dtype}; agentmem stores float states"
                )
            states.append(StateSpec(layer=index, name=name, index=key, shape=tuple(state.shape), dtype=dtype))
    return tuple(states)


def _check_states_are_steady(model: PreTrainedModel, probe: Probe, states: tuple[StateSpec, ...]) -> None:
    """Refuse states whose shape or dtype depends on how many tokens a pass has: more than a convolution holds, too."""
    num_tokens = max(state.shape[-1] for state in states if state.name == "conv") + 2 if states else 2
    layers = enumerate(probe(num_tokens).layers)
    found = tuple(state for index, layer in layers for state in _states(model, index, layer))
    if found != states:
        before, after = next((pair for pair in zip(states, found, strict=False) if pair[0] != pair[1]), (states, found))
        raise UnsupportedModelError(
            f"{_name(model)} keeps {before} after one token, but {after} after {num_tokens} tokens; agentmem stores "
            f"layer states of one size"
        )


def _group(layers: list[_Found]) -> tuple[tuple[LayerSpec, ...], tuple[LayerGroup, ...]]:
    """Put layers of the same geometry into groups, in the order in which they come; indexers after all KV."""
    groups: dict[tuple[str, _Shape], list[int]] = {}
    for name in ("kv", "indexer"):
        for index, layer in enumerate(layers):
            shape = layer.shape if name == "kv" else layer.indexer
            if shape is not None:
                groups.setdefault((name, shape), []).append(index)
    order = list(groups)

    def place(name: str, shape: _Shape | None, index: int) -> tuple[int | None, int]:
        return (None, 0) if shape is None else (order.index((name, shape)), groups[name, shape].index(index))

    specs = []
    for index, layer in enumerate(layers):
        (group, row), (indexer, indexer_row) = place("kv", layer.shape, index), place("indexer", layer.indexer, index)
        specs.append(
            LayerSpec(
                kind=layer.kind,
                group=group,
                row=row,
                window=layer.window,
                indexer_group=indexer,
                indexer_row=indexer_row,
            )
        )
    sizes = [(len(groups[key]), *key[1]) for key in order]
    return tuple(specs), tuple(
        LayerGroup(num_layers=size[0], num_heads=size[1], key_dim=size[2], value_dim=size[3]) for size in sizes
    )


def _kv_dtype(model: PreTrainedModel, layers: Iterable[object]) -> str:
    """Return the one dtype of all that is stored for each token."""
    tensors = [
        getattr(layer, name, None)
        for layer in layers
        if isinstance(layer, DynamicLayer)
        for name in ("keys", "values", "indexer_keys")
    ]
    dtypes = {_dtype_name(tensor) for tensor in tensors if isinstance(tensor, Tensor) and tensor.numel()}
    if len(dtypes) != 1 or not dtypes <= DTYPE_NBYTES.keys():
        raise UnsupportedModelError(
            f"{_name(model)} has KV of dtypes {sorted(dtypes)}; agentmem stores one float dtype"
        )
    return dtypes.pop()


def _refuse_unsupported(model: PreTrainedModel) -> None:
    if model.training:
        raise InvalidInputError(
            f"{_name(model)} is in training mode, where dropout changes KV at random; call model.eval()"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or "meta" in {device.type for device in devices}:
        raise UnsupportedModelError(
            f"{_name(model)} lies on {sorted(map(str, devices))}; agentmem needs it on one device"
        )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__
