"""The models that other tests rely on are what they say: repeatable, sensitive to their KV, and really SmolLM2."""

import pytest

from agentmem.errors import InvalidInputError

CAUSAL = [
    "bamba",
    "deepseek_v32",
    "dynamic-ntk",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "glm_moe_dsa",
    "gpt2",
    "gpt_oss",
    "granitemoehybrid",
    "inkling",
    "jamba",
    "kimi_linear",
    "lfm2",
    "llama",
    "llama4",
    "mamba",
    "mamba2",
    "mha",
    "mistral",
    "mla",
    "mqa",
    "nemotron",
    "phi3",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl",
    "rwkv",
    "zaya",
]
SEQ2SEQ = ["bart", "t5", "whisper"]
ALIASES = {"convolution": "lfm2", "deepseek_v3": "mla", "recurrent": "mamba2"}
LAYERS = {
    "deepseek_v32": ["DynamicIndexedLayer"] * 4,
    "falcon_h1": ["LinearAttentionAndFullAttentionLayer"] * 4,
    "gemma3": ["DynamicSlidingWindowLayer", "DynamicLayer"] * 2,
    "gemma3n": ["DynamicSlidingWindowLayer", "DynamicLayer", "DummyLayer", "DummyLayer"],
    "inkling": ["LinearAttentionAndSlidingWindowAttentionLayer", "LinearAttentionAndFullAttentionLayer"] * 2,
    "lfm2": ["LinearAttentionLayer", "DynamicLayer"] * 2,
    "llama4": ["DynamicSlidingWindowLayer"] * 3 + ["DynamicLayer"],
    "mamba2": ["LinearAttentionLayer"] * 4,
    "mistral": ["DynamicSlidingWindowLayer"] * 4,
    "nemotron": ["DynamicLayer", "DummyLayer"] * 2,
    "qwen3_next": ["LinearAttentionLayer", "DynamicLayer"] * 2,
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


def test_every_family_is_tried():
    from agentmem.testing.models import families

    assert sorted([*CAUSAL, *SEQ2SEQ, *ALIASES]) == families()


@pytest.mark.parametrize(("alias", "family"), ALIASES.items())
def test_an_alias_has_the_recipe_of_its_family(alias, family):
    from agentmem.testing.recipes import RECIPES

    assert RECIPES[alias] == RECIPES[family]


@pytest.mark.parametrize("family", CAUSAL)
def test_the_logits_of_a_tiny_model_depend_on_its_early_tokens(tiny, family):
    import torch

    ids = torch.arange(40)[None] * 7 % 490
    changed = ids.clone()
    changed[0, 2] = 400

    with torch.no_grad():
        difference = (tiny(family)(ids).logits[0, -1] - tiny(family)(changed).logits[0, -1]).abs().max()

    assert difference > 0.1


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_the_logits_of_an_encoder_decoder_depend_on_both_sides(tiny, family):
    import torch

    model = tiny(family)
    name, given = encoder_inputs(family)
    ids = torch.arange(40)[None] * 7 % 490
    changed = ids.clone()
    changed[0, 2] = 400

    with torch.no_grad():
        logits = model(**{name: given}, decoder_input_ids=ids).logits[0, -1]
        by_decoder = model(**{name: given}, decoder_input_ids=changed).logits[0, -1]
        by_encoder = model(**{name: given.flip(-1)}, decoder_input_ids=ids).logits[0, -1]

    assert (logits - by_decoder).abs().max() > 0.1
    assert (logits - by_encoder).abs().max() > 0.1


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_the_logits_of_a_vision_model_depend_on_its_images(tiny, family):
    import torch

    # 4 x 4 patches of 4 x 4 pixels, 3 colours and 2 frames, which the tower merges into 4 tokens
    ids = torch.tensor([[5, 6, 502, 500, 500, 500, 500, 503, 7, 8]])
    images = torch.randn((2, 16, 96))

    with torch.no_grad():
        first, second = (
            tiny(family)(
                input_ids=ids,
                mm_token_type_ids=(ids == 500).int(),
                pixel_values=image,
                image_grid_thw=torch.tensor([[1, 4, 4]]),
            ).logits[0, -1]
            for image in images
        )

    assert (first - second).abs().max() > 0.1


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


def encoder_inputs(family):
    """Return the name of an encoder's input, and one input: 32 frames of sound for Whisper, else 20 tokens."""
    import torch

    if family == "whisper":
        return "input_features", torch.randn((1, 8, 64))
    return "input_ids", torch.arange(20)[None] * 11 % 490
