"""The geometry that is read from a model: what each layer stores for a token, and what it keeps as a whole."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from agentmem.adapters.transformers.continuation import needs_single_steps
from agentmem.adapters.transformers.geometry import derive_spec, probe_decoder, unchanged
from agentmem.errors import UnsupportedModelError
from agentmem.kv.spec import StateSpec
from agentmem.testing.recipes import WINDOW, config_options

FULL, SLIDING, CHUNKED, RECURRENT = ("full", None), ("sliding", WINDOW), ("chunked", WINDOW), ("recurrent", None)
SHARED, EMPTY = ("shared", None), ("empty", None)

KINDS = {
    "llama": [FULL] * 4,
    "mistral": [SLIDING] * 4,
    "gemma2": [SLIDING, FULL] * 2,
    "gemma3n": [SLIDING, FULL, SHARED, SHARED],
    "gpt_oss": [SLIDING, FULL] * 2,
    "llama4": [CHUNKED, CHUNKED, CHUNKED, FULL],
    "nemotron": [FULL, EMPTY] * 2,
    "mla": [FULL] * 4,
    "deepseek_v32": [FULL] * 4,
    "mamba2": [RECURRENT] * 4,
    "lfm2": [RECURRENT, FULL] * 2,
    "qwen3_next": [RECURRENT, FULL] * 2,
    "jamba": [RECURRENT, FULL] * 2,
    "falcon_h1": [FULL] * 4,
    "inkling": [SLIDING, FULL] * 2,
}
"""Kind and window of each layer."""

GROUPS = {
    "llama": [(4, 2, 16, 16)],
    "gemma3n": [(2, 2, 16, 16)],
    "gemma4": [(1, 2, 16, 16), (1, 2, 32, 32)],
    "mla": [(4, 1, 32, 8)],
    "deepseek_v32": [(4, 1, 32, 8), (4, 1, 16, 0)],
    "glm_moe_dsa": [(4, 1, 32, 8), (2, 1, 16, 0)],
    "mamba2": [],
    "qwen3_next": [(2, 2, 16, 16)],
    "falcon_h1": [(4, 2, 16, 16)],
}
"""Layers, heads, key dim and value dim of each group."""

STATES = {
    "llama": [],
    "mamba2": [state for layer in range(4) for state in ((layer, "conv", 0), (layer, "recurrent", 0))],
    "lfm2": [(0, "conv", 0), (2, "conv", 0)],
    "qwen3_next": [(0, "conv", 0), (0, "recurrent", 0), (2, "conv", 0), (2, "recurrent", 0)],
    "inkling": [(layer, "conv", index) for layer in range(4) for index in range(4)],
}
"""Layer, name and index of each layer state."""


@pytest.mark.parametrize("family", KINDS)
def test_the_kind_of_each_layer_is_read_from_the_models_own_cache(tiny, family):
    spec = derive_spec(tiny(family), 16)

    assert [(layer.kind.value, layer.window) for layer in spec.layers] == KINDS[family]


@pytest.mark.parametrize("family", GROUPS)
def test_layers_of_one_geometry_are_stored_together_and_indexers_apart(tiny, family):
    spec = derive_spec(tiny(family), 16)

    found = [(group.num_layers, group.num_heads, group.key_dim, group.value_dim) for group in spec.groups]
    assert found == GROUPS[family]


@pytest.mark.parametrize("family", STATES)
def test_layer_states_are_named_one_by_one(tiny, family):
    spec = derive_spec(tiny(family), 16)

    assert [(state.layer, state.name, state.index) for state in spec.states] == STATES[family]


def test_a_layer_state_has_the_shape_and_dtype_that_the_model_gives_it(tiny):
    spec = derive_spec(tiny("mamba2", dtype=torch.bfloat16), 16)

    assert spec.states[:2] == (
        StateSpec(layer=0, name="conv", index=0, shape=(1, 160, 4), dtype="bfloat16"),
        StateSpec(layer=0, name="recurrent", index=0, shape=(1, 8, 16, 16), dtype="float32"),
    )
    assert (spec.dtype, spec.token_nbytes) == ("bfloat16", 0)


def test_layers_that_use_anothers_indexer_have_none_of_their_own(tiny):
    spec = derive_spec(tiny("glm_moe_dsa"), 16)

    assert [(layer.indexer_group, layer.indexer_row) for layer in spec.layers] == [(1, 0), (None, 0), (1, 1), (None, 0)]


def test_a_hybrid_layer_has_both_a_group_and_states(tiny):
    spec = derive_spec(tiny("falcon_h1"), 16)

    assert [layer.group for layer in spec.layers] == [0] * 4
    assert {state.layer for state in spec.states} == {0, 1, 2, 3}


@pytest.mark.parametrize("family", ["llama", "mamba2", "qwen3_next", "deepseek_v32"])
def test_reading_the_geometry_leaves_no_trace_on_the_model(tiny, family):
    model = tiny(family)
    before = traces(model)

    derive_spec(model, 16)

    assert traces(model) == before


def test_what_a_pass_leaves_on_a_module_is_taken_back(tiny):
    model = tiny("llama")
    inner, rotary = model.model, model.model.rotary_emb
    buffer = rotary.inv_freq

    with unchanged(model):
        inner.rope_deltas = torch.ones(1)
        rotary.register_buffer("inv_freq", torch.zeros(8), persistent=False)
        rotary.register_buffer("long_inv_freq", torch.zeros(8), persistent=False)

    assert not hasattr(inner, "rope_deltas")
    assert rotary.inv_freq is buffer
    assert not hasattr(rotary, "long_inv_freq")


def test_a_probe_may_be_given_for_models_that_are_fed_in_another_way(tiny):
    model = tiny("mamba2")
    lengths = []

    def probe(num_tokens):
        lengths.append(num_tokens)
        return probe_decoder(model, num_tokens)

    spec = derive_spec(model, 16, probe)

    assert spec == derive_spec(model, 16)
    assert lengths == [1, 6]  # more than the 4 tokens that the convolution sees


def test_states_that_grow_with_the_tokens_are_refused(tiny):
    model = tiny("lfm2")

    def probe(num_tokens):
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        with torch.no_grad():
            model(torch.zeros((1, num_tokens), dtype=torch.long), cache=cache)
        return cache

    with pytest.raises(UnsupportedModelError, match="layer states of one size"):
        derive_spec(model, 16, probe)


def test_states_of_integers_are_refused_by_dtype(tiny):
    model = tiny("lfm2")

    def probe(num_tokens):
        cache = probe_decoder(model, num_tokens)
        cache.layers[2].conv_states[0] = cache.layers[2].conv_states[0].long()
        return cache

    with pytest.raises(UnsupportedModelError, match=r"layer 2 .*int64"):
        derive_spec(model, 16, probe)


def test_a_recurrent_layer_that_keeps_its_state_elsewhere_is_refused(tiny):
    model = tiny("lfm2")

    def probe(num_tokens):
        cache = probe_decoder(model, num_tokens)
        cache.layers[0].conv_states[0] = None
        return cache

    with pytest.raises(UnsupportedModelError, match=r"layer 0 .*LinearAttentionLayer.*elsewhere"):
        derive_spec(model, 16, probe)


def test_an_indexer_with_positions_of_its_own_is_refused_by_name():
    options = {
        **config_options("qwen3_next"),
        "model_type": "qwen4_exp_text",
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options)).eval()

    with pytest.raises(UnsupportedModelError, match=r"layer 1 .*indexer_position_ids"):
        derive_spec(model, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "expected"),
    [("mamba", True), ("jamba", True), ("mamba2", False), ("qwen3_next", False), ("lfm2", False), ("llama", False)],
)
def test_models_that_forget_their_state_under_several_tokens_are_found(tiny, family, expected, dtype):
    model = tiny(family, dtype=dtype)

    assert needs_single_steps(model, derive_spec(model, 16)) is expected


def traces(model):
    """Return what is on the model's modules: attributes and buffers by identity."""
    return [
        ({name: id(value) for name, value in vars(module).items()}, dict(module.named_buffers(recurse=False)).keys())
        for module in model.modules()
    ]
