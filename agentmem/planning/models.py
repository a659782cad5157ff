"""Published configurations of well-known models: only the fields that the planner reads.

Each was compared with stored copies of the public config.json, or of programs that carry its sizes; those of Qwen3-8B,
Qwen3-32B and Gemma-3-4B also by the published number of weights that they come to.
"""

_LLAMA: dict[str, object] = {"model_type": "llama", "num_key_value_heads": 8, "dtype": "bfloat16"}
_LLAMA_70B: dict[str, object] = {
    **_LLAMA,
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_attention_heads": 64,
}
_QWEN3: dict[str, object] = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
}
_MLA: dict[str, object] = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "dtype": "bfloat16",
}
_KIMI_K2: dict[str, object] = {
    **_MLA,
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
}
_GEMMA3: dict[str, object] = {"model_type": "gemma3_text", "dtype": "bfloat16"}
_GPT_OSS: dict[str, object] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "dtype": "bfloat16",
}

CONFIGS: dict[str, dict[str, object]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "dtype": "bfloat16",
    },
    "llama-3.1-8b": {
        **_LLAMA,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
    },
    "llama-3.1-70b": _LLAMA_70B,
    "llama-3.3-70b": _LLAMA_70B,
    "llama-3.1-405b": {
        **_LLAMA,
        "num_hidden_layers": 126,
        "hidden_size": 16_384,
        "intermediate_size": 53_248,
        "num_attention_heads": 128,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
    },
    "qwen3-4b": {
        **_QWEN3,
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
    },
    "qwen3-8b": {
        **_QWEN3,
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_attention_heads": 32,
    },
    "qwen3-32b": {
        **_QWEN3,
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_attention_heads": 64,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "mistral-7b-v0.1": {
        "model_type": "mistral",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 4096,
        "dtype": "bfloat16",
    },
    "gemma-3-270m": {
        **_GEMMA3,
        "num_hidden_layers": 18,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
    },
    "gemma-3-4b": {
        **_GEMMA3,
        "num_hidden_layers": 34,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
    },
    "gemma-3-27b": {
        **_GEMMA3,
        "num_hidden_layers": 62,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
    },
    "deepseek-v3": {
        **_MLA,
        "model_type": "deepseek_v3",
        "num_attention_heads": 128,
        "n_routed_experts": 256,
        "first_k_dense_replace": 3,
    },
    "kimi-k2": _KIMI_K2,
    "kimi-k2.5": _KIMI_K2,
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
}
"""Configurations by the model's name in lower case."""
