"""What KV a transformers model makes, read from the model's own cache layers and one probe token.

Nothing here is decided by a model's name: a layer kind that is not known is refused before it can give a wrong answer.
"""

import inspect
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from agentmem.errors import InvalidInputError, UnsupportedModelError
from agentmem.kv.spec import DTYPE_NBYTES, KVSpec, LayerGroup, LayerKind, LayerSpec

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary schemes whose base depends on the length of the sequence: KV depends on more than its prefix."""


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name under which the model's forward takes its cache: "cache" from transformers 5.24 on."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def derive_spec(model: PreTrainedModel, block_size: int) -> KVSpec:
    """Return the geometry of the model's KV. Feeds the model one token.

    Raises:
        UnsupportedModelError: A layer, cache or position scheme is not stored yet; the message names it.
        InvalidInputError: The model is in training mode.
    """
    _refuse_unsupported(model)
    cache = _probe(model)
    kinds = [_kind(model, index, layer) for index, layer in enumerate(cache.layers)]
    shapes = [_shape(layer) for layer in cache.layers]
    if not any(shapes):
        raise UnsupportedModelError(
            f"{_name(model)} did not use the cache it was given: its state lives elsewhere and cannot be stored"
        )
    groups: dict[tuple[int, int, int], list[int]] = {}
    for index, shape in enumerate(shapes):
        if shape is not None:
            groups.setdefault(shape, []).append(index)
    order = list(groups)
    layers = []
    for index, (kind, shape) in enumerate(zip(kinds, shapes, strict=True)):
        if shape is None:
            layers.append(LayerSpec(kind=kind if kind is LayerKind.SHARED else LayerKind.EMPTY, group=None, row=0))
            continue
        window = getattr(cache.layers[index], "sliding_window", None)
        layers.append(LayerSpec(kind=kind, group=order.index(shape), row=groups[shape].index(index), window=window))
    return KVSpec(
        layers=tuple(layers),
        groups=tuple(
            LayerGroup(num_layers=len(groups[shape]), num_heads=shape[0], key_dim=shape[1], value_dim=shape[2])
            for shape in order
        ),
        dtype=_kv_dtype(model, cache),
        block_size=block_size,
    )


def _probe(model: PreTrainedModel) -> DynamicCache:
    """Feed one token through a stock cache and return it."""
    config = model.config.get_text_config(decoder=True)
    try:
        cache = DynamicCache(config=config)
    except KeyError as error:
        raise UnsupportedModelError(
            f"{_name(model)} has layers of type {error}, which agentmem does not store yet"
        ) from error
    for index, layer in enumerate(cache.layers):
        _kind(model, index, layer)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    try:
        with torch.no_grad():
            output = model(input_ids=token, use_cache=True, **{cache_argument(model): cache})
    except (AttributeError, TypeError) as error:  # it asks its cache for what only a cache of its own has
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


def _kind(model: PreTrainedModel, index: int, layer: object) -> LayerKind:
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None)
    if type(layer) is DynamicLayer:
        return LayerKind.FULL
    if type(layer) is DynamicSlidingWindowLayer:
        is_chunked = layer_types is not None and layer_types[index] == "chunked_attention"
        is_chunked = is_chunked or (layer_types is None and getattr(config, "attention_chunk_size", None) is not None)
        return LayerKind.CHUNKED if is_chunked else LayerKind.SLIDING
    if type(layer) is DummyLayer:
        modes = getattr(config, "kv_sharing_modes", None)
        return LayerKind.SHARED if modes is not None and modes[index] == "reuse" else LayerKind.EMPTY
    raise UnsupportedModelError(
        f"layer {index} of {_name(model)} keeps its state in a {type(layer).__name__}, which is not stored yet; "
        f"full, sliding-window, chunked and shared attention layers are supported"
    )


def _shape(layer: object) -> tuple[int, int, int] | None:
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


def _kv_dtype(model: PreTrainedModel, cache: DynamicCache) -> str:
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.numel()}
    if len(dtypes) != 1 or not dtypes <= DTYPE_NBYTES.keys():
        raise UnsupportedModelError(
            f"{_name(model)} has KV of dtypes {sorted(dtypes)}; agentmem stores one float dtype"
        )
    return dtypes.pop()


def _refuse_unsupported(model: PreTrainedModel) -> None:
    name = _name(model)
    if model.training:
        raise InvalidInputError(f"{name} is in training mode, where dropout changes KV at random; call model.eval()")
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model, which agentmem does not store yet")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or "meta" in {device.type for device in devices}:
        raise UnsupportedModelError(f"{name} lies on {sorted(map(str, devices))}; agentmem needs it on one device")
    for module in model.modules():
        if hasattr(module, "rope_deltas"):
            raise UnsupportedModelError(
                f"{name} keeps position deltas on a module ({type(module).__name__}.rope_deltas), which would leak "
                f"from one branch into another; agentmem does not support that yet"
            )
        for scheme in _rope_schemes(module):
            if any(word in scheme for word in _LENGTH_DEPENDENT_ROPE):
                raise UnsupportedModelError(
                    f"{name} uses {scheme!r} rotary positions, whose base depends on the sequence length: its KV "
                    f"cannot be shared by prefix, and agentmem does not support it yet"
                )


def _rope_schemes(module: torch.nn.Module) -> Iterator[str]:
    scheme = getattr(module, "rope_type", None)
    if isinstance(scheme, str):
        yield scheme
    elif isinstance(scheme, dict):
        yield from (value for value in scheme.values() if isinstance(value, str))


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__
