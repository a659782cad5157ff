"""The KV of a model in numbers, by its config.json alone: without the model, without torch, in a millisecond.

`agentmem.adapters` reads the same from the model itself, which needs its weights; the tests hold the two together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentmem.errors import InvalidInputError, NotFoundError
from agentmem.kv.spec import LayerKind
from agentmem.planning.fields import Fields, load_config, read_fields
from agentmem.planning.kinds import Kind, layer_kinds, window
from agentmem.planning.models import CONFIGS
from agentmem.planning.states import NO_STATE, StateSize, state_size

DTYPE_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
"""Bits of a value of KV. agentmem stores the first three; the others are what engines keep."""

_WORDS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""The dtypes of configurations."""

_DEFAULTS: dict[str, dict[str, object]] = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
}
"""What published files leave out, because it is transformers' default for the family."""


_UNGROUPED = ("bloom", "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt")
"""Families in which each head of the queries has its own K and V, whatever else the file says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one layer keeps.

    Attributes:
        kind: What it does with KV.
        window: Tokens that it sees; None for all.
        num_keys: Values of a token's keys over all heads; of its latent under MLA.
        num_values: The same of its values; of the rotated part under MLA.
        num_indexed: Values of the keys of the layer's sparse-attention indexer.
        state: Of a recurrent or convolution layer, at one position.
    """

    kind: LayerKind
    window: int | None = None
    num_keys: int = 0
    num_values: int = 0
    num_indexed: int = 0
    state: StateSize = NO_STATE

    @property
    def num_token_values(self) -> int:
        """Values that one token leaves in the layer."""
        return self.num_keys + self.num_values + self.num_indexed


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What a model keeps.

    Attributes:
        name: Of the model, for people.
        dtype: Its own: "fp32", "bf16" or "fp16".
        layers: Of the decoder, in order.
        num_source_values: Values that one token of the encoder's input leaves in all layers; 0 without an encoder.
        fields: The configuration.
    """

    name: str
    dtype: str
    layers: tuple[Layer, ...]
    num_source_values: int
    fields: Fields

    def token_nbytes(self, dtype: str) -> float:
        """Return the bytes of KV that agentmem stores for one token; layers with a window store every token too."""
        return sum(layer.num_token_values for layer in self.layers) * DTYPE_BITS[dtype] / 8

    def kv_nbytes(self, num_tokens: int, dtype: str) -> int:
        """Return the bytes of KV of `num_tokens` tokens, without layer states."""
        return round(num_tokens * self.token_nbytes(dtype))

    def seen_nbytes(self, num_tokens: int, dtype: str) -> int:
        """Return the bytes that the next token can see: windows and chunks bound their layers."""
        seen = sum(min(num_tokens, layer.window or num_tokens) * layer.num_token_values for layer in self.layers)
        return round(seen * DTYPE_BITS[dtype] / 8)

    def state_nbytes(self, dtype: str) -> int:
        """Return the bytes of all layer states at one position. A state is not kept in less than 16 bits a value."""
        native = max(DTYPE_BITS[dtype], 16) // 8
        return sum(layer.state.num_native * native + layer.state.num_float32 * 4 for layer in self.layers)

    def source_nbytes(self, dtype: str) -> float:
        """Return the bytes that one token of the encoder's input takes, once for all branches."""
        return self.num_source_values * DTYPE_BITS[dtype] / 8


def read_geometry(model: str) -> Geometry:
    """Return the geometry of a model: a name of `known_models()`, a config.json, or the folder that it lies in.

    Raises:
        NotFoundError: There is neither such a name nor such a file.
        InvalidInputError: The file is no configuration, or lacks a size.
        UnsupportedModelError: The model keeps something that the planner does not know.
    """
    name = model.rsplit("/", 1)[-1].lower()
    if name in CONFIGS:
        return geometry_of(CONFIGS[name], name)
    path = Path(model)
    if not path.exists():
        raise NotFoundError(
            f"there is no file {model!r}, and no model of that name is known. Give a config.json, or one of "
            f"{', '.join(known_models())}"
        )
    return geometry_of(load_config(path), path.parent.resolve().name if path.is_file() else path.resolve().name)


def known_models() -> list[str]:
    """Return the names of models whose configuration is known without a file."""
    return sorted(CONFIGS)


def geometry_of(config: Mapping[str, object], name: str) -> Geometry:
    """Return the geometry that a configuration describes.

    Raises:
        InvalidInputError: It lacks a size.
        UnsupportedModelError: The model keeps something that the planner does not know.
    """
    fields = read_fields(config)
    fields = Fields(_DEFAULTS.get(fields.model_type, {}) | dict(fields.values))
    layers = tuple(_layer(fields, index, kind) for index, kind in enumerate(layer_kinds(fields)))
    if not any(layer.num_token_values or layer.state != NO_STATE for layer in layers):
        raise InvalidInputError(f"the configuration of {name!r} describes no layer that keeps anything")
    is_pair = fields.flag("is_encoder_decoder")
    return Geometry(
        name=name,
        dtype=_dtype(config, fields),
        layers=layers,
        num_source_values=sum(layer.num_token_values for layer in layers) if is_pair else 0,
        fields=fields,
    )


def _layer(fields: Fields, index: int, kind: Kind) -> Layer:
    state = state_size(fields) if kind.has_state else NO_STATE
    if kind.attention in (LayerKind.RECURRENT, LayerKind.EMPTY, LayerKind.SHARED):
        return Layer(kind=kind.attention, state=state)
    keys, values = _shape(fields, index, kind.attention)
    return Layer(
        kind=kind.attention,
        window=None if kind.attention is LayerKind.FULL else window(fields),
        num_keys=keys,
        num_values=values,
        num_indexed=_indexer(fields, index),
        state=state,
    )


def _shape(fields: Fields, index: int, kind: LayerKind) -> tuple[int, int]:
    """Return how many values a token's keys and its values have in a layer."""
    if fields.has("kv_lora_rank"):
        return fields.need("kv_lora_rank"), fields.need("qk_rope_head_dim")
    heads, dim = kv_heads(fields, index), head_dim(fields, index)
    if kind is LayerKind.SLIDING:
        heads = fields.number("swa_num_key_value_heads") or heads
        dim = fields.number("swa_head_dim") or dim
    elif fields.has("global_head_dim"):
        dim = fields.need("global_head_dim")
        heads = fields.number("num_global_key_value_heads") or heads
    own = fields.inner("per_layer_config").inner(str(index))
    heads, dim = own.number("num_key_value_heads") or heads, own.number("head_dim") or dim
    return heads * dim, heads * (fields.number("v_head_dim") or dim)


def query_heads(fields: Fields, layer: int = 0) -> int:
    """Return the heads of the queries of a layer.

    Raises:
        InvalidInputError: The file does not say.
    """
    names = ("decoder_attention_heads", "num_attention_heads", "n_head", "n_heads", "num_heads")
    return fields.need(*names, layer=layer)


def kv_heads(fields: Fields, layer: int = 0) -> int:
    """Return the heads of keys and values of a layer: fewer than those of the queries under GQA, one under MQA.

    Raises:
        InvalidInputError: The file does not say.
    """
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1
    if fields.model_type in _UNGROUPED:
        return query_heads(fields, layer)
    inside = fields.inner("attn_config").number("kv_n_heads")
    return inside or fields.number("num_key_value_heads", "num_kv_heads", layer=layer) or query_heads(fields, layer)


def head_dim(fields: Fields, layer: int = 0) -> int:
    """Return the width of one head.

    Raises:
        InvalidInputError: The file does not say.
    """
    written = fields.number("head_dim", "attention_head_dim", "d_kv", "kv_channels", layer=layer)
    return written or width(fields) // query_heads(fields, layer)


def width(fields: Fields) -> int:
    """Return how wide the model's stream is.

    Raises:
        InvalidInputError: The file does not say.
    """
    return fields.need("hidden_size", "n_embd", "d_model")


def _indexer(fields: Fields, index: int) -> int:
    dim, kinds = fields.number("index_head_dim"), fields.words("indexer_types")
    is_shared = kinds is not None and kinds[index] == "shared"
    return 0 if dim is None or is_shared else dim


def _dtype(config: Mapping[str, object], fields: Fields) -> str:
    """Return the dtype in which the model keeps its KV; bf16 where the file does not say, as most models do."""
    found = [each.values.get(name) for each in (fields, Fields(config)) for name in ("dtype", "torch_dtype")]
    return next((_WORDS[word] for word in found if isinstance(word, str) and word in _WORDS), "bf16")
