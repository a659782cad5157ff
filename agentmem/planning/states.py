"""How large the state is that a recurrent or convolution layer keeps, by its config.json alone.

The rules are those of transformers' models; the tests hold them against the models. Knows nothing of KV.
"""

from collections.abc import Callable
from dataclasses import dataclass

from agentmem.errors import UnsupportedModelError
from agentmem.planning.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSize:
    """Values of one layer's state.

    Attributes:
        num_native: Those in the model's dtype.
        num_float32: Those that are fp32 in every model.
    """

    num_native: int = 0
    num_float32: int = 0


NO_STATE = StateSize()
"""Of layers that keep none."""


def state_size(fields: Fields) -> StateSize:
    """Return the size of the state of one layer that has one.

    Raises:
        UnsupportedModelError: The layer is of no kind that is known.
        InvalidInputError: The file lacks a size.
    """
    rule = next((rule for sign, rule in _RULES.items() if fields.has(sign)), None)
    rule = _BY_TYPE.get(fields.model_type, rule)
    if rule is None:
        raise UnsupportedModelError(
            f"the planner does not know how large the layer states of models of type {fields.model_type!r} are; "
            f"agentmem.open reads it from the model itself"
        )
    return rule(fields)


def _ssm(fields: Fields, *, inner: int, heads: int, head_dim: int, state: str) -> StateSize:
    """Size a state-space layer in which heads share groups of B and C (Mamba-2)."""
    width, groups = fields.need(state), fields.number("mamba_n_groups", "n_groups") or 1
    kernel = fields.need("mamba_d_conv", "conv_kernel")
    return StateSize(num_native=(inner + 2 * groups * width) * kernel, num_float32=heads * head_dim * width)


def _mamba(fields: Fields) -> StateSize:
    inner = fields.number("intermediate_size") or _expanded(fields)
    width, kernel = fields.need("state_size"), fields.need("conv_kernel")
    return StateSize(num_native=inner * kernel, num_float32=inner * width)


def _mamba2(fields: Fields) -> StateSize:
    heads, head_dim = fields.need("num_heads"), fields.need("head_dim")
    return _ssm(fields, inner=_expanded(fields), heads=heads, head_dim=head_dim, state="state_size")


def _jamba(fields: Fields) -> StateSize:
    inner = _expanded(fields)
    return StateSize(num_native=inner * fields.need("mamba_d_conv"), num_float32=inner * fields.need("mamba_d_state"))


def _bamba(fields: Fields) -> StateSize:
    heads, head_dim = fields.need("mamba_n_heads"), fields.need("mamba_d_head")
    inner = fields.number("mamba_d_ssm") or _expanded(fields)
    return _ssm(fields, inner=inner, heads=heads, head_dim=head_dim, state="mamba_d_state")


def _nemotron(fields: Fields) -> StateSize:
    heads, head_dim = fields.need("mamba_num_heads"), fields.need("mamba_head_dim")
    return _ssm(fields, inner=heads * head_dim, heads=heads, head_dim=head_dim, state="ssm_state_size")


def _gated_delta_net(fields: Fields) -> StateSize:
    heads, keys, values = (
        fields.need(f"linear_{part}") for part in ("num_value_heads", "key_head_dim", "value_head_dim")
    )
    width = 2 * fields.need("linear_num_key_heads") * keys + heads * values
    return StateSize(
        num_native=width * (fields.number("linear_conv_kernel_dim") or 4), num_float32=heads * keys * values
    )


def _kimi_linear(fields: Fields) -> StateSize:
    inner = fields.inner("linear_attn_config")
    heads, dim, kernel = inner.need("num_heads"), inner.need("head_dim"), inner.need("short_conv_kernel_size")
    return StateSize(num_native=3 * heads * dim * kernel, num_float32=heads * dim * dim)


def _lfm2(fields: Fields) -> StateSize:
    return StateSize(num_native=fields.need("hidden_size") * fields.need("conv_L_cache"))


def _inkling(fields: Fields) -> StateSize:
    """Size the convolutions of keys, of values, and of the two streams around them."""
    width = 2 * fields.need("num_key_value_heads") * fields.need("head_dim") + 2 * fields.need("hidden_size")
    return StateSize(num_float32=width * fields.need("conv_kernel_size"))


def _zaya(fields: Fields) -> StateSize:
    heads, kv_heads, dim = (fields.need(name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    kernel = fields.need("cca_time0") + fields.need("cca_time1") - 2
    return StateSize(num_native=(heads + kv_heads) * dim * kernel + kv_heads * dim // 2)


def _expanded(fields: Fields) -> int:
    return (fields.number("mamba_expand", "expand") or 2) * fields.need("hidden_size")


_BY_TYPE: dict[str, Callable[[Fields], StateSize]] = {
    "falcon_mamba": _mamba,
    "inkling_text": _inkling,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "zaya": _zaya,
}
"""How the state is sized in families that no field tells apart."""

_RULES: dict[str, Callable[[Fields], StateSize]] = {
    "linear_attn_config": _kimi_linear,
    "linear_key_head_dim": _gated_delta_net,
    "conv_L_cache": _lfm2,
    "mamba_n_heads": _bamba,
    "mamba_num_heads": _nemotron,
    "mamba_d_state": _jamba,
}
"""How the state is sized where this field is there."""
