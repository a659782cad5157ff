"""Which layers of a model attend to all tokens, to a window, or keep a state, by its config.json alone.

The rules are transformers' own; the tests hold them against the models. A layer whose kind is not known is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass

from agentmem.errors import UnsupportedModelError
from agentmem.kv.spec import LayerKind
from agentmem.planning.fields import Fields


@dataclass(frozen=True, slots=True)
class Kind:
    """What a layer keeps.

    Attributes:
        attention: Of its KV; EMPTY when it keeps none.
        has_state: Whether it keeps a state that every token changes as a whole.
    """

    attention: LayerKind
    has_state: bool = False


_FULL, _SLIDING, _CHUNKED = Kind(LayerKind.FULL), Kind(LayerKind.SLIDING), Kind(LayerKind.CHUNKED)
_STATE, _NOTHING, _BOTH = Kind(LayerKind.RECURRENT, True), Kind(LayerKind.EMPTY), Kind(LayerKind.FULL, True)

_WORDS = {
    "full_attention": _FULL,
    "attention": _FULL,
    "indexed_attention": _FULL,
    "sliding_attention": _SLIDING,
    "chunked_attention": _CHUNKED,
    "linear_attention": _STATE,
    "mamba": _STATE,
    "mamba2": _STATE,
    "conv": _STATE,
    "hybrid": _BOTH,
    "hybrid_sliding": Kind(LayerKind.SLIDING, True),
    "mlp": _NOTHING,
    "moe": _NOTHING,
}
"""The kinds of layers, as configurations write them."""

_LETTERS = {"M": _STATE, "*": _FULL, "-": _NOTHING, "E": _NOTHING}
"""The same in a `hybrid_override_pattern`."""

_PERIODS = {
    "gemma2": 2,
    "gpt_oss": 2,
    "cohere2": 4,
    "exaone4": 4,
    "olmo3": 4,
    "gemma3n_text": 5,
    "gemma3_text": 6,
}
"""Families in which each n-th layer is full and the others slide, where the file does not list its layers."""

_ALL = {"mamba": _STATE, "mamba2": _STATE, "falcon_mamba": _STATE, "falcon_h1": _BOTH, "zaya": _BOTH}
"""Families all of whose layers are of one kind that no field names."""

_REFUSED = ("deepseek_v4", "minimax", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2")
"""Families that keep something whose size these rules do not know."""

_SIGNS = ("ssm_", "mamba_", "linear_", "rwkv", "lru_", "recurrent", "state_size", "compress_ratio", "attn_type_list")
"""Beginnings of fields that only models have whose layers keep more than KV."""


def layer_kinds(fields: Fields) -> list[Kind]:
    """Return the kind of each layer.

    Raises:
        UnsupportedModelError: A layer, or the family, keeps something that is not known here.
        InvalidInputError: The file does not say how many layers there are.
    """
    if fields.model_type.removesuffix("_text") in _REFUSED:
        raise _unknown(f"models of type {fields.model_type}")
    words = fields.words("layer_types", "layers_block_type")
    kinds = [_kind(word) for word in words] if words else _derived(fields)
    num_shared = fields.number("num_kv_shared_layers") or 0
    return kinds[: len(kinds) - num_shared] + [Kind(LayerKind.SHARED)] * num_shared


def num_layers(fields: Fields) -> int:
    """Return how many layers write and read KV.

    Raises:
        InvalidInputError: The file does not say.
    """
    if fields.flag("is_encoder_decoder"):
        return fields.need("num_decoder_layers", "decoder_layers", "num_layers")
    return fields.need("num_hidden_layers", "n_layer", "n_layers")


def _kind(word: str) -> Kind:
    if word not in _WORDS:
        raise _unknown(f"layers of type {word!r}")
    return _WORDS[word]


def _derived(fields: Fields) -> list[Kind]:
    """Find the kinds from other fields than a list of them, as transformers does for each family."""
    pattern = fields.values.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [_LETTERS[letter] if letter in _LETTERS else _kind(letter) for letter in pattern]
    count = num_layers(fields)
    if fields.model_type in _ALL:
        return [_ALL[fields.model_type]] * count
    for choose in (_by_index, _by_period, _by_window):
        is_full = choose(fields)
        if is_full is not None:
            other = _WORDS[_other(fields)]
            full = _BOTH if other.attention is LayerKind.SLIDING and other.has_state else _FULL
            return [full if is_full(index) else other for index in range(count)]
    for name in fields.values:
        if fields.has(name) and name.startswith(_SIGNS):
            raise _unknown(f"what {name} stands for in models of type {fields.model_type!r}")
    return [_FULL] * count


def _by_index(fields: Fields) -> Callable[[int], bool] | None:
    """Find which layers are full from a list of their indices, or of the others'."""
    for name in ("attn_layer_indices", "full_attn_idxs"):
        indices = fields.indices(name)
        if indices is not None:
            return indices.__contains__
    local = fields.indices("local_layer_ids")
    if local is not None:
        return lambda index: index not in local
    counted_from_1 = fields.inner("linear_attn_config").indices("full_attn_layers")
    return None if counted_from_1 is None else lambda index: index + 1 in counted_from_1


def _by_period(fields: Fields) -> Callable[[int], bool] | None:
    """Find which layers are full from how often one comes among layers with a state."""
    period = fields.number("attn_layer_period")
    if period:
        offset = fields.number("attn_layer_offset") or 0
        return lambda index: index % period == offset
    is_delta_net = fields.has("linear_key_head_dim")
    interval = fields.number("full_attention_interval") or (4 if is_delta_net else 0)
    return (lambda index: (index + 1) % interval == 0) if interval else None


def _by_window(fields: Fields) -> Callable[[int], bool] | None:
    """Find which layers are full in a model with windows or chunks."""
    if fields.has("attention_chunk_size"):
        rotated = fields.indices("no_rope_layers")
        if rotated:
            return lambda index: not rotated[index]
        period = fields.number("no_rope_layer_interval") or 4
    elif window(fields) is None:
        return None
    else:
        if fields.has("max_window_layers") and fields.flag("use_sliding_window"):
            first = fields.need("max_window_layers")
            return lambda index: index < first
        pattern = fields.values.get("sliding_window_pattern")
        written = len(pattern) if isinstance(pattern, str) else fields.number("sliding_window_pattern")
        period = written or _PERIODS.get(fields.model_type, 0)
    return lambda index: period > 0 and (index + 1) % period == 0


def window(fields: Fields) -> int | None:
    """Return how many tokens the layers with a window or a chunk see; None when all see all."""
    if fields.values.get("use_sliding_window") is False:
        return fields.number("attention_chunk_size")
    return fields.number("sliding_window", "sliding_window_size", "attention_chunk_size")


def _other(fields: Fields) -> str:
    """Return the word for the layers that are not full, where not all are."""
    if fields.has("local_layer_ids"):
        return "hybrid_sliding"
    if any(fields.has(name) for name in ("attn_layer_indices", "attn_layer_period", "linear_attn_config")):
        return "mamba"
    if fields.has("full_attn_idxs"):
        return "conv"
    if fields.has("linear_key_head_dim") or fields.has("full_attention_interval"):
        return "linear_attention"
    return "chunked_attention" if fields.has("attention_chunk_size") else "sliding_attention"


def _unknown(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the planner does not know what {what} keep, and does not guess; agentmem.open reads it from the model itself"
    )
