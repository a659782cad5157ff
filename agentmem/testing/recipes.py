"""Configurations of tiny models of every family: what differs from one shape that they share.

A recipe is what a family's configuration takes beside `SHAPE`; `agentmem.testing.models` builds the models. Recipes
have transformers' names of the families; a few say instead what is special about them.
"""

from typing import Any

WINDOW = 16
"""Tokens that the sliding and chunked layers of the tiny models see; a few dozen tokens leave it behind."""

SWITCH_LENGTH = 64
"""Tokens after which the rotary positions of `phi3` and `dynamic-ntk` change their base."""

VOCAB_SIZE = 512
"""Rows of the embedding, unless another number is asked for."""

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    # Five times the usual: with weights of 0.02 a random model's logits hardly depend on its KV, and no test would see
    # a wrong block.
    "initializer_range": 0.1,
}

_SLIDING_AND_FULL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
_PER_LAYER_INPUT = {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16}
_GATED_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_STRONG = {"initializer_range": 0.2}  # with less, a state forgets all but the last few tokens
_MAMBA2 = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 16, **_STRONG}
_MAMBA2_LAYERS = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # of the rotated part
    "v_head_dim": 12,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
_INDEXER = {**_MLA, "q_lora_rank": 16, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 8}
_MROPE_TEXT = {
    **SHAPE,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
}
_MEDIA_TOKENS = {
    "image_token_id": 500,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
}
_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "initializer_range": 0.1,
}
_SEQ2SEQ = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "init_std": 0.2,
    "decoder_start_token_id": 0,
}
_WITHOUT_SHAPE = ("bart", "qwen2_5_vl", "qwen3_vl", "t5", "whisper")
"""Types of models whose configuration has other names for their sizes, or one configuration inside another."""

RECIPES: dict[str, dict[str, Any]] = {
    # full attention
    "llama": {"model_type": "llama"},
    "mqa": {"model_type": "llama", "num_key_value_heads": 1},
    "mha": {"model_type": "llama", "num_key_value_heads": 4},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 1024},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe", **_EXPERTS},
    "nemotron": {"model_type": "nemotron_h", "layers_block_type": ["attention", "mlp", "attention", "mlp"]},
    # sliding windows, chunks, shared layers, attention sinks
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW},
    "gemma2": {"model_type": "gemma2", **_SLIDING_AND_FULL, "attn_implementation": "eager"},
    "gemma3": {"model_type": "gemma3_text", **_SLIDING_AND_FULL},
    "gemma3n": {
        "model_type": "gemma3n_text",
        **_SLIDING_AND_FULL,
        **_PER_LAYER_INPUT,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        **_SLIDING_AND_FULL,
        **_PER_LAYER_INPUT,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_SLIDING_AND_FULL,
        **_LOCAL_EXPERTS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "llama4": {
        "model_type": "llama4_text",
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "attention_chunk_size": WINDOW,
    },
    # latents, and latents with an indexer
    "mla": {"model_type": "deepseek_v3", **_MLA, "q_lora_rank": None},
    "deepseek_v3": {"model_type": "deepseek_v3", **_MLA, "q_lora_rank": None},
    "deepseek_v32": {"model_type": "deepseek_v32", **_INDEXER},
    "glm_moe_dsa": {"model_type": "glm_moe_dsa", **_INDEXER, "indexer_types": ["full", "shared"] * 2},
    # positions whose base depends on the length
    "dynamic-ntk": {
        "model_type": "llama",
        "max_position_embeddings": SWITCH_LENGTH,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    },
    "phi3": {
        "model_type": "phi3",
        "original_max_position_embeddings": SWITCH_LENGTH,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": SWITCH_LENGTH,
        },
    },
    # recurrent and convolution layers, alone, beside attention, and in one layer with it
    "mamba": {"model_type": "mamba", "state_size": 8, **_STRONG},
    "mamba2": {"model_type": "mamba2", **_MAMBA2},
    "recurrent": {"model_type": "mamba2", **_MAMBA2},
    "rwkv": {"model_type": "rwkv", "attention_hidden_size": 64},
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2},
    "convolution": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2},
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_GATED_DELTA_NET,
        **_EXPERTS,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5": {"model_type": "qwen3_5_text", **_GATED_DELTA_NET},
    "jamba": {
        "model_type": "jamba",
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
    },
    "bamba": {"model_type": "bamba", "attn_layer_indices": [1, 3], **_MAMBA2_LAYERS},
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention"] * 2,
        **_MAMBA2_LAYERS,
        **_LOCAL_EXPERTS,
    },
    "falcon_h1": {"model_type": "falcon_h1", **_MAMBA2_LAYERS, "mamba_d_ssm": 64, "mamba_n_heads": 4},
    "zaya": {"model_type": "zaya", "num_experts": 2, "moe_intermediate_size": 32, "router_hidden_size": 16},
    "inkling": {
        "model_type": "inkling_text",
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "sliding_window_size": WINDOW,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "rel_extent": 64,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "logits_mup_width_multiplier": 1.0,
    },
    "kimi_linear": {
        "model_type": "kimi_linear",
        **_MLA,
        "q_lora_rank": None,
        "num_experts": 2,
        "num_experts_per_token": 1,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    },
    # images
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        **_MEDIA_TOKENS,
        "text_config": _MROPE_TEXT,
        "vision_config": {**_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        **_MEDIA_TOKENS,
        "text_config": {
            **_MROPE_TEXT,
            "rope_parameters": {**_MROPE_TEXT["rope_parameters"], "mrope_interleaved": True},
        },
        "vision_config": {**_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
    },
    # an encoder beside the decoder
    "bart": {"model_type": "bart", **_SEQ2SEQ},
    "t5": {
        "model_type": "t5",
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
        "initializer_factor": 2.0,
        "decoder_start_token_id": 0,
    },
    "whisper": {
        "model_type": "whisper",
        **_SEQ2SEQ,
        "num_mel_bins": 8,
        "max_source_positions": 32,
        "max_target_positions": 256,
    },
}


def config_options(family: str, vocab_size: int = VOCAB_SIZE) -> dict[str, Any]:
    """Return what `AutoConfig.for_model` takes for a family, and `attn_implementation` where it matters.

    Raises:
        KeyError: There is no recipe for the family.
    """
    recipe = RECIPES[family]
    options = {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    if recipe["model_type"] not in _WITHOUT_SHAPE:
        return {**SHAPE, **options, **recipe}
    if "text_config" in recipe:
        return {**recipe, "text_config": {**recipe["text_config"], **options}}
    return {**options, **recipe}
