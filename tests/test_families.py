"""Every family of models: bit-exact where it is supported, refused by name where it is not.

The models are tiny and random, with windows of 16 tokens: 60 tokens leave every window and several blocks behind.
"""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import agentmem
from agentmem.errors import UnsupportedModelError
from agentmem.reasons import Reason
from agentmem.testing.models import tiny_model
from agentmem.testing.recipes import WINDOW

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
_HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}

# Recipes that `agentmem.testing.models` does not have.
_MORE: dict[str, dict[str, Any]] = {
    "bigcode": {"model_type": "gpt_bigcode", **_GPT2_SHAPE, "multi_query": True},
    "bloom": {"model_type": "bloom", "n_layer": 4, "n_head": 4},
    "falcon": {"model_type": "falcon", "multi_query": True},
    "gemma": {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 16},
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
    "phi3-window": {"model_type": "phi3", "sliding_window": WINDOW},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
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
_TINY = [
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gpt2",
    "gpt_oss",
    "llama",
    "llama4",
    "mha",
    "mistral",
    "mla",
    "mqa",
    "nemotron",
    "qwen3",
    "qwen3_moe",
]
STORED = sorted([*_TINY, *_MORE])

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bert": ({"model_type": "bert"}, "BertLMHeadModel"),
    "cross-attention": ({"model_type": "gpt2", **_GPT2_SHAPE, "add_cross_attention": True}, "EncoderDecoderCache"),
    "deepseek-v4": (
        {"model_type": "deepseek_v4", "n_routed_experts": 8, "num_experts_per_tok": 1},
        "DeepseekV4HCACache",
    ),
    "minimax": (
        {"model_type": "minimax", **_HYBRID, "num_local_experts": 2, "num_experts_per_tok": 1},
        "cache of its own",
    ),
    "recurrent-gemma": (
        {
            "model_type": "recurrent_gemma",
            "lru_width": 64,
            "attention_window_size": WINDOW,
            "num_key_value_heads": 1,
        },
        "NoneType",
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
