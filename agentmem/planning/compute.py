"""How much a model computes to read a prompt, estimated from its config.json.

An estimate: norms, biases and routers are left out. Knows nothing of tiers.
"""

from agentmem.planning.fields import Fields
from agentmem.planning.geometry import Geometry, head_dim, kv_heads, query_heads, width
from agentmem.planning.states import NO_STATE

_UNGATED = ("bart", "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "opt", "phi", "t5", "whisper")
"""Families whose feed-forward layers are two matrices; those of all others are three."""

_MIXERS = 6
"""Squares of the width that a layer with a state takes: two projections in and one out, twice as wide (Mamba)."""


def prefill_flops(geometry: Geometry, num_tokens: int) -> float:
    """Return the floating-point operations that computing the KV of `num_tokens` tokens takes, the last logits aside.

    Two for each weight that a token meets, and two for each value of K and V that it attends to.
    """
    return num_tokens * 2.0 * num_active_weights(geometry) + _attention_flops(geometry, num_tokens)


def num_active_weights(geometry: Geometry) -> int:
    """Return the weights that one token meets, embeddings aside: of all experts, only those that are asked."""
    fields, layers = geometry.fields, geometry.layers
    states = sum(_MIXERS * width(fields) ** 2 for layer in layers if layer.state != NO_STATE)
    attention = sum(_attention_weights(fields) for layer in layers if layer.num_token_values)
    return states + attention + sum(_feed_forward_weights(fields, index) for index in range(len(layers)))


def _attention_weights(fields: Fields) -> int:
    model, heads = width(fields), query_heads(fields)
    if not fields.has("kv_lora_rank"):
        dim = head_dim(fields)
        return 2 * model * heads * dim + 2 * model * kv_heads(fields) * dim
    latent, rope, nope, value = _mla(fields)
    low = fields.number("q_lora_rank")
    queries = heads * (nope + rope) * (low or model) + model * (low or 0)
    return queries + model * (latent + rope) + latent * heads * (nope + value) + heads * value * model


def _feed_forward_weights(fields: Fields, layer: int) -> int:
    matrices = (2 if fields.model_type in _UNGATED else 3) * width(fields)
    dense = fields.number("intermediate_size", "ffn_dim", "decoder_ffn_dim", "d_ff", "n_inter", layer=layer)
    inner = 4 * width(fields) if dense is None else dense
    experts = fields.number("n_routed_experts", "num_experts", "num_local_experts")
    if not experts or layer < (fields.number("first_k_dense_replace") or 0):
        return matrices * inner
    own = fields.number("moe_intermediate_size") or inner
    asked = fields.number("num_experts_per_tok", "num_experts_per_token", "experts_per_token") or 1
    shared = fields.number("n_shared_experts", "num_shared_experts") or 0
    return matrices * ((asked + shared) * own + (fields.number("shared_expert_intermediate_size") or 0))


def _attention_flops(geometry: Geometry, num_tokens: int) -> float:
    if not any(layer.num_token_values for layer in geometry.layers):
        return 0.0
    fields = geometry.fields
    each = head_dim(fields)
    if fields.has("kv_lora_rank"):
        _, rope, nope, value = _mla(fields)
        each = (rope + nope + value) // 2
    attended = sum(_num_attended(num_tokens, layer.window) for layer in geometry.layers if layer.num_token_values)
    return 4.0 * query_heads(fields) * each * attended


def _num_attended(num_tokens: int, window: int | None) -> float:
    """Return how many tokens all tokens attend to together: each those before it, within the window."""
    seen = min(num_tokens, window or num_tokens)
    return num_tokens * seen - seen * seen / 2


def _mla(fields: Fields) -> tuple[int, int, int, int]:
    """Return the latent, rotated, unrotated and value widths of latent attention."""
    nope = fields.number("qk_nope_head_dim") or 128
    return fields.need("kv_lora_rank"), fields.need("qk_rope_head_dim"), nope, fields.number("v_head_dim") or nope
