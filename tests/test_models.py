"""The models that other tests rely on are what they say: repeatable, sensitive to their KV, and really SmolLM2."""

import pytest

from agentmem.errors import InvalidInputError

STORABLE = ["gemma3", "gemma3n", "gpt2", "llama", "llama4", "mha", "mistral", "mla", "mqa", "nemotron", "qwen3"]
LAYERS = {
    "convolution": ["LinearAttentionLayer", "DynamicLayer"] * 2,
    "gemma3": ["DynamicSlidingWindowLayer", "DynamicLayer"] * 2,
    "gemma3n": ["DynamicSlidingWindowLayer", "DynamicLayer", "DummyLayer", "DummyLayer"],
    "llama4": ["DynamicSlidingWindowLayer"] * 3 + ["DynamicLayer"],
    "mistral": ["DynamicSlidingWindowLayer"] * 4,
    "nemotron": ["DynamicLayer", "DummyLayer"] * 2,
    "recurrent": ["LinearAttentionLayer"] * 4,
}


def test_the_same_seed_gives_the_same_weights_and_another_seed_gives_others():
    import torch

    from agentmem.testing.models import tiny_model

    first, again, other = tiny_model("llama", 1), tiny_model("llama", 1), tiny_model("llama", 2)

    weights = [model.model.layers[0].self_attn.k_proj.weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_making_a_model_leaves_the_random_state_of_the_caller_alone():
    import torch

    from agentmem.testing.models import tiny_model

    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    tiny_model("llama", 1)

    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("family", STORABLE)
def test_the_logits_of_a_tiny_model_depend_on_its_early_tokens(tiny, family):
    import torch

    ids = torch.arange(40)[None] * 7 % 512
    changed = ids.clone()
    changed[0, 2] = 400

    with torch.no_grad():
        difference = (tiny(family)(ids).logits[0, -1] - tiny(family)(changed).logits[0, -1]).abs().max()

    assert difference > 0.1


@pytest.mark.parametrize("family", sorted(LAYERS))
def test_a_tiny_model_has_the_kinds_of_layers_that_its_family_stands_for(tiny, family):
    from transformers import DynamicCache

    cache = DynamicCache(config=tiny(family).config)

    assert [type(layer).__name__ for layer in cache.layers] == LAYERS[family]


def test_a_tiny_model_generates_as_many_tokens_as_it_is_asked_for(llama):
    import torch

    output = llama.generate(torch.arange(10)[None], max_new_tokens=20, do_sample=False)

    assert output.shape == (1, 30)


def test_an_unknown_family_is_refused_by_name():
    from agentmem.testing.models import tiny_model

    with pytest.raises(InvalidInputError, match=r"'lamma'.*llama"):
        tiny_model("lamma")


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(smollm2):
    import torch

    model, tokenizer = smollm2
    ids = torch.tensor([tokenizer("The capital of France is").input_ids])

    text = tokenizer.decode(model.generate(ids, max_new_tokens=2, do_sample=False)[0])

    assert "Paris" in text
    assert model.dtype == torch.bfloat16
