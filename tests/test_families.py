"""Every family of models: bit-exact where it is supported, refused by name where it is not.

The models are tiny and random, with windows of 16 tokens: 60 tokens leave every window and several blocks behind.
"""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    DynamicCache,
)

import agentmem
from agentmem.errors import UnsupportedModelError
from agentmem.stats import Reason
from agentmem.testing.models import WINDOW, tiny_model

TOLERANCE = 1e-3
TOKENS = [(29 * index * index + 3 * index + 7) % 512 for index in range(40)]
CONFIG = agentmem.Config(block_size=16)

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "vocab_size": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GPT2_SHAPE = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}
_ALTERNATING = {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
_INDEXER = {**_MLA, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}

# Recipes that `agentmem.testing.models` does not have.
_MORE: dict[str, dict[str, Any]] = {
    "bigcode": {"model_type": "gpt_bigcode", **_GPT2_SHAPE, "multi_query": True},
    "bloom": {"model_type": "bloom", "n_layer": 4, "n_head": 4},
    "falcon": {"model_type": "falcon", "multi_query": True},
    "gemma": {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 16},
    "gemma2": {"model_type": "gemma2", **_ALTERNATING, "attn_implementation": "eager"},
    "gemma4": {
        "model_type": "gemma4_text",
        **_ALTERNATING,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 16,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        **_ALTERNATING,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "llama3-rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
    "mimo": {"model_type": "mimo_v2_flash"},
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
    },
    "opt": {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.1},
    "phi3": {"model_type": "phi3", "sliding_window": WINDOW},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "yarn": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 256,
        },
    },
}
_TINY = ["gemma3", "gemma3n", "gpt2", "llama", "llama4", "mha", "mistral", "mla", "mqa", "nemotron", "qwen3"]
STORED = sorted([*_TINY, *_MORE])

_INDEXED = "DynamicIndexedLayer"
_RECURRENT = "LinearAttentionLayer"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bamba": ({"model_type": "bamba", "attn_layer_indices": [1, 3], **_MAMBA2}, _RECURRENT),
    "bert": ({"model_type": "bert"}, "BertLMHeadModel"),
    "cross-attention": ({"model_type": "gpt2", **_GPT2_SHAPE, "add_cross_attention": True}, "EncoderDecoderCache"),
    "deepseek-v3.2": ({"model_type": "deepseek_v32", **_INDEXER}, _INDEXED),
    "dynamic-ntk": (
        {
            "model_type": "llama",
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
        },
        "'dynamic'",
    ),
    "falcon-h1": (
        {"model_type": "falcon_h1", "mamba_d_ssm": 64, **_MAMBA2, "mamba_n_heads": 4},
        "LinearAttentionAndFullAttentionLayer",
    ),
    "glm-dsa": ({"model_type": "glm_moe_dsa", **_INDEXER}, _INDEXED),
    "granite-hybrid": (
        {
            "model_type": "granitemoehybrid",
            "layer_types": ["mamba", "attention"] * 2,
            **_MAMBA2,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
        _RECURRENT,
    ),
    "jamba": (
        {
            "model_type": "jamba",
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 8,
        },
        _RECURRENT,
    ),
    "lfm2": ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2}, _RECURRENT),
    "longrope": (
        {
            "model_type": "phi3",
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 64,
            },
        },
        "'longrope'",
    ),
    "mamba": ({"model_type": "mamba", "state_size": 8}, _RECURRENT),
    "mamba2": (
        {
            "model_type": "mamba2",
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 1,
            "expand": 2,
        },
        _RECURRENT,
    ),
    "minimax": (
        {"model_type": "minimax", **_HYBRID, "num_local_experts": 2, "num_experts_per_tok": 1},
        _RECURRENT,
    ),
    "qwen3-next": (
        {
            "model_type": "qwen3_next",
            **_HYBRID,
            "head_dim": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        _RECURRENT,
    ),
    "recurrent-gemma": (
        {
            "model_type": "recurrent_gemma",
            "lru_width": 64,
            "attention_window_size": WINDOW,
            "num_key_value_heads": 1,
        },
        _RECURRENT,
    ),
    "rwkv": ({"model_type": "rwkv", "attention_hidden_size": 64}, "RwkvForCausalLM"),
    "xlstm": ({"model_type": "xlstm", "num_heads": 4, "num_blocks": 2}, "xLSTMForCausalLM"),
}


def build(recipe, make=AutoModelForCausalLM.from_config):
    options = {**_SHAPE, **recipe}
    if recipe["model_type"] == "falcon":
        del options["initializer_range"]
    extra = {"attn_implementation": options.pop("attn_implementation")} if "attn_implementation" in options else {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(AutoConfig.for_model(**options), **extra).eval()


def fresh(family):
    """Make the family's model anew: the same weights in another object."""
    return build(_MORE[family]) if family in _MORE else tiny_model(family)


@cache
def shared(family):
    return fresh(family)


@pytest.fixture(params=STORED)
def family(request):
    """The name of a family that is supported."""
    return request.param


def cold(model, tokens):
    """Return the logits `[V]` of the last token in a run from nothing."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1]


def test_every_step_across_the_window_has_the_bits_of_a_stock_cache(family, store_path):
    model = shared(family)
    stock = DynamicCache(config=model.config)
    steps = [TOKENS[:7], TOKENS[7:12], TOKENS[12:], *([token] for token in range(1, 9)), TOKENS[:20], [3]]

    with agentmem.open(store_path, model=model, config=CONFIG) as store, torch.no_grad():
        session = store.create("s")
        pairs = [(session.forward(step), model(torch.tensor([step]), cache=stock).logits[0]) for step in steps]

    assert [torch.equal(ours, theirs) for ours, theirs in pairs] == [True] * len(steps)


def test_a_fresh_model_resumes_from_disk_with_the_bits_it_would_have_had(family, store_path):
    model = shared(family)
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([TOKENS]), cache=stock)
        expected = model(torch.tensor([[5]]), cache=stock).logits[0]
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        store.create("s").forward(TOKENS)

    with agentmem.open(store_path, model=fresh(family), config=CONFIG) as store:
        session = store.resume("s")
        report, logits = session.report, session.forward([5])

    assert (report.reason, report.from_tier, report.num_pending) == (Reason.COMPLETE, {"disk": 40}, 0)
    assert torch.equal(logits, expected)


def test_siblings_that_take_turns_equal_their_own_runs_from_nothing(family, store_path):
    model = shared(family)
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.forward(TOKENS)
        for name in ("a", "b"):
            session.fork(name)

        for step in range(5):
            found = {name: session.forward([100 * step + len(name) + ord(name)], branch=name) for name in ("a", "b")}

        assert session.branch("a").tokens != session.branch("b").tokens
        for name, logits in found.items():
            assert torch.allclose(logits[0], cold(model, session.branch(name).tokens), atol=TOLERANCE)
        assert session.active.tokens == TOKENS


def test_a_fork_at_an_earlier_token_across_the_window_equals_a_run_from_nothing(family, store_path):
    model = shared(family)
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.forward(TOKENS[:13])
        early = session.checkpoint("early")
        session.forward([*TOKENS[13:], *TOKENS])
        session.fork("back", at=early)

        logits = session.forward([9, 8, 7], branch="back")
        main = session.forward([6])

        assert torch.allclose(logits[-1], cold(model, [*TOKENS[:13], 9, 8, 7]), atol=TOLERANCE)
        assert torch.allclose(main[0], cold(model, [*TOKENS, *TOKENS, 6]), atol=TOLERANCE)


def test_a_rewind_across_the_window_generates_what_a_run_from_nothing_does(family, store_path):
    model = shared(family)
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.forward([*TOKENS, *TOKENS])
        session.rewind(tokens=51)

        logits = session.forward([11])
        sampled = list(session.generate(max_new_tokens=8, do_sample=False).tokens)

        tokens = [*TOKENS[:29], 11]
        assert torch.allclose(logits[0], cold(model, tokens), atol=TOLERANCE)
        assert sampled == greedy(model, tokens, 8)
        assert session.active.tokens == [*tokens, *sampled]


def test_a_restart_in_the_middle_of_two_branches_equals_runs_from_nothing(family, store_path):
    model = shared(family)
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.forward(TOKENS)
        session.fork("b")
        session.forward([21, 22, 23], branch="b")
        session.rewind(tokens=9)
        session.forward([31])

    with agentmem.open(store_path, model=fresh(family), config=CONFIG) as store:
        session = store.resume("s")
        main, other = session.forward([1]), session.forward([1], branch="b")
        num_fed = store.stats()["tokens_fed"]

    assert num_fed == 2
    assert torch.allclose(main[0], cold(model, [*TOKENS[:31], 31, 1]), atol=TOLERANCE)
    assert torch.allclose(other[0], cold(model, [*TOKENS, 21, 22, 23, 1]), atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore:.past_key_values.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_state_cannot_be_stored_is_refused_by_name(name, store_path):
    recipe, word = REFUSED[name]
    model = build(recipe)

    with pytest.raises(UnsupportedModelError) as error:
        agentmem.open(store_path, model=model)

    assert word in str(error.value)
    assert type(model).__name__ in str(error.value)


@pytest.mark.parametrize("kind", ["t5", "whisper", "bart"])
def test_an_encoder_decoder_model_is_refused(kind, store_path):
    shapes = {
        "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
        "whisper": {
            "d_model": 64,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
        },
        "bart": {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 96},
    }
    options = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **options, **shapes[kind], decoder_start_token_id=0)
    if kind == "whisper":
        from transformers import WhisperForConditionalGeneration

        model = WhisperForConditionalGeneration(config).eval()
    else:
        model = AutoModelForSeq2SeqLM.from_config(config).eval()

    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        agentmem.open(store_path, model=model)


def test_positions_that_depend_on_images_are_refused(store_path):
    text = {
        **_SHAPE,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
    }
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config).eval()

    with pytest.raises(UnsupportedModelError, match="rope_deltas"):
        agentmem.open(store_path, model=model)


def test_a_layer_that_nobody_knows_is_refused_by_name(store_path, monkeypatch):
    from transformers import cache_utils

    class MadeUpLayer(cache_utils.DynamicLayer):
        """A cache layer of some later release."""

    model = fresh("llama")
    monkeypatch.setattr(cache_utils, "DynamicLayer", MadeUpLayer)
    monkeypatch.setattr(cache_utils, "LAYER_TYPE_CACHE_MAPPING", {"full_attention": MadeUpLayer}, raising=False)
    monkeypatch.setattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", {"full_attention": MadeUpLayer}, raising=False)

    with pytest.raises(UnsupportedModelError, match=r"layer 0 .*MadeUpLayer"):
        agentmem.open(store_path, model=model)


def greedy(model, tokens, num_tokens):
    """Return the greedy continuation, each token from nothing."""
    tokens = list(tokens)
    for _ in range(num_tokens):
        tokens.append(int(cold(model, tokens).argmax()))
    return tokens[-num_tokens:]
