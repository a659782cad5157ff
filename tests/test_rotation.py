"""How keys move: found and proven on the model itself, or refused by name.

What a rotation writes is compared with what the model computes at the new positions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM, PreTrainedModel

from agentmem.adapters.transformers.geometry import cache_argument, derive_spec
from agentmem.adapters.transformers.rotation import KeyRotation
from agentmem.errors import UnsupportedModelError
from agentmem.kv.spec import KVSpec, StateSpec
from agentmem.testing.recipes import RECIPES, SHAPE

TOKENS = [(29 * index * index + 3 * index + 7) % 512 for index in range(14)]  # fewer than the windows hold
SHIFT = 333

_SHAPE = {**SHAPE, "vocab_size": 512, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
_ALTERNATING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}

# How each turns: half-split or interleaved, all of a key or part of it, some layers not at all.
MOVABLE: dict[str, dict[str, Any]] = {
    "llama": {},
    "yarn, which scales its keys": {"model_type": "llama", "rope_parameters": _YARN},
    "qwen3": {},
    "mistral": {"sliding_window": 16},
    "gemma3_text, with a base for each layer type": {**_ALTERNATING},
    "gemma4_text, with two key sizes": {
        **_ALTERNATING,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 16,
    },
    "gpt_neox, a quarter of a key": {"rotary_pct": 0.25},
    "glm, neighbours in half of a key": {"partial_rotary_factor": 0.5},
    "cohere2, neighbours in sliding layers, nothing in full ones": {**_ALTERNATING},
    "smollm3, every fourth layer without": {},
    "nanochat, the other way round": {},
    "nemotron_h, without positions": {"layers_block_type": ["attention", "mlp", "attention", "mlp"]},
    "deepseek_v3, beside a latent": RECIPES["deepseek_v3"],
}


def make_model(name: str, recipe: dict[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config = AutoConfig.for_model(**{**_SHAPE, "model_type": name.partition(",")[0], **recipe})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def kv_at(model: PreTrainedModel, spec: KVSpec, position: int) -> list[Tensor]:
    """Return the KV that the model computes for TOKENS at `position`, one `[L, H, T, D]` per section."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    positions = torch.arange(position, position + len(TOKENS))[None]
    with torch.no_grad():
        model(
            input_ids=torch.tensor([TOKENS]), position_ids=positions, use_cache=True, **{cache_argument(model): cache}
        )
    sections: list[list[Tensor]] = [[] for _ in range(2 * len(spec.groups))]
    for layer, cached in zip(spec.layers, cache.layers, strict=False):
        if layer.group is not None:
            sections[2 * layer.group].append(cached.keys[0])
            sections[2 * layer.group + 1].append(cached.values[0])
    return [torch.stack(rows) for rows in sections]


def largest_error(ours: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    return max(float((mine - other).abs().max()) for mine, other in zip(ours, wanted, strict=True) if mine.numel())


def moved(rotation: KeyRotation, sections: Sequence[Tensor], shift: int) -> list[Tensor]:
    out = [section.clone() for section in sections]
    rotation.rotate(out, shift)
    return out


@pytest.mark.parametrize("name", MOVABLE)
def test_moved_kv_is_what_the_model_computes_at_the_new_positions(name: str) -> None:
    model = make_model(name, MOVABLE[name])
    spec = derive_spec(model, 16)
    here, there = kv_at(model, spec, 0), kv_at(model, spec, SHIFT)

    rotation = KeyRotation.of(model, spec)

    assert largest_error(moved(rotation, here, SHIFT), there) < 1e-4
    assert largest_error(moved(rotation, there, -SHIFT), here) < 1e-4


@pytest.mark.parametrize("name", MOVABLE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_model_is_proven_too(name: str, dtype: torch.dtype) -> None:
    model, exact = make_model(name, MOVABLE[name], dtype), make_model(name, MOVABLE[name])
    spec = derive_spec(model, 16)

    turns = KeyRotation.of(model, spec).turns
    wanted = KeyRotation.of(exact, derive_spec(exact, 16)).turns

    assert [[turn is None for turn in rows] for rows in turns] == [[turn is None for turn in rows] for rows in wanted]


@pytest.mark.parametrize(
    ("name", "recipe", "reason"),
    [
        ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 1024}, "positions are not relative"),
        ("opt", {"ffn_dim": 96}, "positions are not relative"),
        ("biogpt", {}, "positions are not relative"),
        ("bloom", {"n_layer": 4, "n_head": 4}, "takes no position_ids"),
        (
            "llama4_text",
            {"intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": 16},
            "chunked attention",
        ),
        ("llama", {"max_position_embeddings": 16}, "knows 16 positions"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_cannot_be_moved_is_refused_with_the_reason(
    name: str, recipe: dict[str, Any], reason: str, dtype: torch.dtype
) -> None:
    model = make_model(name, recipe, dtype)
    spec = derive_spec(model, 16)

    with pytest.raises(UnsupportedModelError, match=rf"{type(model).__name__} cannot be moved.*{reason}.*mode='exact'"):
        KeyRotation.of(model, spec)


@pytest.mark.parametrize("scheme", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length_are_refused(tiny: Callable[..., Any], scheme: str) -> None:
    spec = derive_spec(tiny("llama"), 16)
    parameters: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    if scheme == "longrope":
        factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
        parameters = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, **factors}
    model = make_model("llama", {"rope_parameters": parameters})

    with pytest.raises(UnsupportedModelError, match=f"'{scheme}' rotary frequencies depend on the length"):
        KeyRotation.of(model, spec)


def test_layer_states_are_refused(llama: Any) -> None:
    spec = derive_spec(llama, 16)
    state = StateSpec(layer=0, name="conv", index=0, shape=(1, 4), dtype="float32")
    with_state = KVSpec(
        layers=spec.layers, groups=spec.groups, dtype=spec.dtype, block_size=spec.block_size, states=(state,)
    )

    with pytest.raises(UnsupportedModelError, match="recurrent layers"):
        KeyRotation.of(llama, with_state)


def test_positions_of_several_parts_are_refused() -> None:
    model = make_model("llama", {})
    spec = derive_spec(model, 16)
    model.model.rope_deltas = None

    with pytest.raises(UnsupportedModelError, match="M-RoPE"):
        KeyRotation.of(model, spec)


class LlamaWithoutPositionIds(LlamaForCausalLM):
    """Takes position_ids and ignores them, as some models in the wild do."""

    def forward(self, input_ids: Any, position_ids: Any = None, cache: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids, cache=cache, **kwargs)


def test_a_model_that_ignores_position_ids_does_not_pass_for_one_without_positions(llama: Any) -> None:
    model = LlamaWithoutPositionIds(llama.config).eval()
    spec = derive_spec(model, 16)

    with pytest.raises(UnsupportedModelError, match="not those that position_ids stand for"):
        KeyRotation.of(model, spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_layer_that_turns_at_another_speed_is_refused_by_number(dtype: torch.dtype) -> None:
    model = make_model("llama", {}, dtype)
    spec = derive_spec(model, 16)

    def three_times_as_fast(_module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        cos, sin = model.model.rotary_emb(kwargs["hidden_states"], 3 * kwargs["position_ids"])
        return args, {**kwargs, "position_embeddings": (cos, sin)}

    model.model.layers[2].self_attn.register_forward_pre_hook(three_times_as_fast, with_kwargs=True)

    with pytest.raises(UnsupportedModelError, match="what layer 2 writes"):
        KeyRotation.of(model, spec)


def test_16_bit_keys_are_turned_in_fp32_and_rounded_once(tiny: Callable[..., Any]) -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    spec = derive_spec(model, 16)
    rotation = KeyRotation.of(model, spec)
    sections = kv_at(model, spec, 0)

    ours = moved(rotation, sections, SHIFT)
    wide = moved(rotation, [section.float() for section in sections], SHIFT)

    assert all(torch.equal(mine, other.bfloat16()) for mine, other in zip(ours, wide, strict=True))


def test_turning_turned_keys_again_adds_up_errors_that_one_turn_has_not(tiny: Callable[..., Any]) -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    spec = derive_spec(model, 16)
    rotation = KeyRotation.of(model, spec)
    sections = kv_at(model, spec, 0)
    exact = moved(rotation, [section.double() for section in sections], 50 * 14)

    often = sections
    for _ in range(50):
        often = moved(rotation, often, 14)
    once = moved(rotation, sections, 50 * 14)

    assert largest_error([often[0].double()], [exact[0]]) > 3 * largest_error([once[0].double()], [exact[0]])


def test_no_shift_gives_the_same_bytes(llama: Any) -> None:
    spec = derive_spec(llama, 16)
    sections = kv_at(llama, spec, 0)

    ours = moved(KeyRotation.of(llama, spec), sections, 0)

    assert all(torch.equal(mine, other) for mine, other in zip(ours, sections, strict=True))


def test_the_proof_leaves_the_models_answers_alone(llama: Any) -> None:
    spec = derive_spec(llama, 16)
    before = kv_at(llama, spec, 0)

    KeyRotation.of(llama, spec)

    assert all(torch.equal(mine, other) for mine, other in zip(kv_at(llama, spec, 0), before, strict=True))
