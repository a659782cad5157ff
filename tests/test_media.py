"""Images among the tokens: their identity, their positions, and models that keep position deltas on a module.

Every answer is compared with the model's own, over all tokens and images in one pass.
"""

import dataclasses
from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import agentmem
from agentmem.adapters.transformers.fingerprint import model_fingerprint
from agentmem.adapters.transformers.geometry import derive_spec, unchanged
from agentmem.adapters.transformers.media import media_digest
from agentmem.errors import InvalidInputError, NotFoundError, UnsupportedModelError
from agentmem.reasons import Reason
from agentmem.testing.models import tiny_model
from agentmem.testing.recipes import SHAPE

CONFIG = agentmem.Config(block_size=16)
CHUNKED = agentmem.Config(block_size=16, prefill_chunk_tokens=16)
TEXT = [(29 * index * index + 3 * index + 7) % 490 + 1 for index in range(120)]
TOLERANCE = 1e-3
IMAGE, START, END = 500, 502, 503
_SIDE = 4  # pixels of a patch, of 3 channels and 2 frames


@dataclasses.dataclass(frozen=True)
class Picture:
    """An image as a model's processor hands it over: tokens, and what they stand for."""

    tokens: list[int]
    inputs: dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of model that sees images.

    Attributes:
        name: Its name.
        make: Makes a model.
        picture: Makes an image from a seed.
        types: The name of its per-token input.
    """

    name: str
    make: object
    picture: object
    types: str

    def inputs(self, tokens, *pictures):
        """What the model takes beside `tokens` in one pass over all of them."""
        types = torch.tensor([[int(token == IMAGE) for token in tokens]])
        names = pictures[0].inputs if pictures else {}
        joined = {name: torch.cat([picture.inputs[name] for picture in pictures]) for name in names}
        return {**joined, **({self.types: types} if pictures else {})}

    def append(self, session, *parts, **options):
        """Append text and images, as one processed prompt."""
        tokens = flat(parts)
        pictures = [part for part in parts if isinstance(part, Picture)]
        session.append(tokens, **self.inputs(tokens, *pictures), attention_mask=ones(tokens), **options)

    def stock(self, model, tokens, *pictures):
        """Return the last token's logits of one pass over everything."""
        with torch.no_grad(), unchanged(model):
            return model(torch.tensor([tokens]), **self.inputs(tokens, *pictures)).logits[0, -1]

    def is_stock(self, model, branch, pictures, logits):
        return torch.allclose(logits[-1], self.stock(model, branch.tokens, *pictures), atol=TOLERANCE)

    def greedy(self, model, tokens, pictures, num_tokens):
        """Return the greedy continuation, every token from nothing."""
        tokens = list(tokens)
        for _ in range(num_tokens):
            tokens.append(int(self.stock(model, tokens, *pictures).argmax()))
        return tuple(tokens[-num_tokens:])


def flat(parts):
    return [token for part in parts for token in (part.tokens if isinstance(part, Picture) else part)]


def ones(tokens):
    return torch.ones(1, len(tokens), dtype=torch.long)


def patches(seed, height=4, width=8):
    """An image of `height` x `width` patches; four of them make one token."""
    pixels = torch.randn(height * width, 3 * 2 * _SIDE**2, generator=torch.Generator().manual_seed(seed))
    tokens = [START, *[IMAGE] * (height * width // 4), END]
    return Picture(tokens, {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])})


def square(seed):
    """An image of fixed size, which makes 16 tokens."""
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    return Picture([START, *[IMAGE] * 16, END], {"pixel_values": pixels})


def gemma3(seed=0):
    """A model whose image tokens attend to each other both ways, with sliding layers."""
    text = {**SHAPE, "vocab_size": 512, "sliding_window": 16, "query_pre_attn_scalar": 16, "pad_token_id": 0}
    text |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "bos_token_id": None, "eos_token_id": None}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma3",
        text_config=text,
        vision_config={**vision, "image_size": 32, "patch_size": 4},
        mm_tokens_per_image=16,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.model.multi_modal_projector.mm_input_projection_weight.data.normal_(std=0.2)  # made of zeros
    return model


FAMILIES = {
    "qwen2_5_vl": Family("qwen2_5_vl", lambda: tiny_model("qwen2_5_vl"), patches, "mm_token_type_ids"),
    "qwen3_vl": Family("qwen3_vl", lambda: tiny_model("qwen3_vl"), patches, "mm_token_type_ids"),
    "gemma3": Family("gemma3", gemma3, square, "token_type_ids"),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    """A kind of model that sees images."""
    return FAMILIES[request.param]


@cache
def shared(name):
    return FAMILIES[name].make()


@pytest.fixture
def model(family):
    """A model of the family, which no test changes."""
    return shared(family.name)


@pytest.fixture
def qwen():
    """The kind of model that keeps a position delta on a module."""
    return FAMILIES["qwen2_5_vl"]


# -- right answers


@pytest.mark.parametrize("config", [CONFIG, CHUNKED], ids=["at-once", "chunked"])
@pytest.mark.parametrize("position", [0, 7, 40])
def test_an_image_anywhere_is_seen_as_the_model_itself_sees_it(position, config, family, model, store_path):
    picture = family.picture(1)

    with agentmem.open(store_path, model=model, config=config) as store:
        session = store.create("s")
        family.append(session, TEXT[:position], picture, TEXT[position : position + 20])
        logits = session.forward()
        is_right = family.is_stock(model, session.active, [picture], logits)

    assert is_right


def test_an_image_on_top_of_a_filled_cache_is_seen_as_in_one_pass(family, model, store_path):
    first, second = family.picture(1), family.picture(2)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TEXT[:21])
        session.forward()
        family.append(session, first)
        is_first = family.is_stock(model, session.active, [first], session.forward(TEXT[21:30]))
        family.append(session, TEXT[30:33], second, TEXT[33:36])
        is_second = family.is_stock(model, session.active, [first, second], session.forward())
        is_text = family.is_stock(model, session.active, [first, second], session.forward(TEXT[36:50]))

    assert is_first
    assert is_second
    assert is_text


def test_two_images_in_one_append_may_have_text_between_them(family, model, store_path):
    pictures = [family.picture(1), family.picture(2)]

    with agentmem.open(store_path, model=model, config=CHUNKED) as store:
        session = store.create("s")
        family.append(session, TEXT[:3], pictures[0], TEXT[3:13], pictures[1], TEXT[13:20])
        is_right = family.is_stock(model, session.active, pictures, session.forward())

    assert is_right


def test_generating_after_images_gives_the_tokens_of_the_model_itself(family, model, store_path):
    pictures = [family.picture(1), family.picture(2)]

    with agentmem.open(store_path, model=model, config=CHUNKED) as store:
        session = store.create("s")
        family.append(session, TEXT[:3], pictures[0], TEXT[3:9])
        family.append(session, pictures[1], TEXT[9:12])
        expected = family.greedy(model, session.active.tokens, pictures, 8)
        generated = session.generate(max_new_tokens=8, do_sample=False).tokens

    assert generated == expected


def test_a_branch_may_end_in_an_image(family, model, store_path):
    picture = family.picture(1)
    open_ended = Picture(picture.tokens[:-1], picture.inputs)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        family.append(session, TEXT[:5], open_ended)
        expected = family.greedy(model, session.active.tokens, [picture], 4)
        right = [family.is_stock(model, session.active, [picture], session.forward()) for _ in range(3)]
        session.fork("other")
        generated = session.generate(max_new_tokens=4, do_sample=False).tokens
        other = session.generate(max_new_tokens=4, do_sample=False, branch="other").tokens

    assert right == [True] * 3
    assert generated == other == expected


def test_the_users_own_loop_is_given_positions_and_images(family, model, store_path):
    picture = family.picture(1)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        family.append(session, TEXT[:5], picture, TEXT[5:9])
        with session.cache() as cache, torch.no_grad():
            logits = model(torch.tensor([session.active.pending]), cache=cache).logits[0]
            is_prefill = family.is_stock(model, session.active, [picture], logits)
            for token in TEXT[9:12]:
                logits = model(torch.tensor([[token]]), cache=cache).logits[0]
        is_decoded = family.is_stock(model, session.active, [picture], logits)

    assert is_prefill
    assert is_decoded


def test_forks_with_different_images_take_turns(family, model, store_path):
    pictures = {name: [family.picture(seed)] for seed, name in enumerate(("a", "b", "c"))}

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TEXT[:20])
        plan = session.checkpoint()
        for name, (picture,) in pictures.items():
            session.fork(name, at=plan)
            family.append(session, picture, TEXT[20:23], branch=name)
        right = []
        for step in range(3):
            for name in (*pictures, "main"):
                logits = session.forward([30 + step], branch=name)
                right.append(family.is_stock(model, session.branch(name), pictures.get(name, []), logits))

    assert all(right)


def test_rewinding_into_an_image_goes_back_to_where_it_begins(family, model, store_path):
    first, second = family.picture(1), family.picture(2)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        family.append(session, TEXT[:9], first, TEXT[9:12])
        session.forward()
        session.rewind(tokens=3 + 3)
        tokens = session.active.tokens
        family.append(session, second, TEXT[12:15])
        is_right = family.is_stock(model, session.active, [second], session.forward())

    assert tokens == [*TEXT[:9], START]
    assert is_right


def test_a_branch_resumed_by_another_model_object_computes_nothing(family, model, store_path):
    picture = family.picture(1)
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        family.append(session, TEXT[:9], picture, TEXT[9:30])
        session.forward()
        session.checkpoint()
        length = session.active.num_tokens
    other = family.make()

    with agentmem.open(store_path, model=other, config=CONFIG) as store:
        session = store.resume("s")
        logits = session.forward([5])
        report, is_right = session.report, family.is_stock(other, session.active, [picture], logits)
        generated = session.generate(max_new_tokens=3, do_sample=False)
        is_after = family.is_stock(other, session.active, [picture], session.forward())

    assert (report.reason, report.num_reused, report.num_computed) == (Reason.COMPLETE, length, 1)
    assert is_right
    assert len(generated.tokens) == 3
    assert is_after


def test_lost_kv_is_computed_again_from_the_stored_images(family, store_path):
    model, picture = family.make(), family.picture(1)
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        family.append(session, TEXT[:9], picture, TEXT[9:30])
        session.fork("twin")
        session.checkpoint()
    model.lm_head.weight.data[0] += 1e-3  # another model: all KV is foreign, tokens and images are not

    with agentmem.open(store_path, model=model, config=CHUNKED) as store:
        session = store.resume("s")
        logits = session.forward([5])
        report, is_right = session.report, family.is_stock(model, session.active, [picture], logits)

    assert report.num_reused == 0
    assert report.reason is Reason.FOREIGN_MODEL
    assert is_right


def test_text_may_come_as_a_processor_hands_it_over(family, model, store_path):
    nothing = {"attention_mask": ones(TEXT[:20]), family.types: torch.zeros(1, 20, dtype=torch.long)}

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TEXT[:20], **nothing)
        is_right = family.is_stock(model, session.active, [], session.forward())
        other = store.create("other")
        other.append(TEXT[:20])
        other.forward()
        num_reused = other.report.num_reused

    assert is_right
    assert num_reused >= 16


# -- identity


def test_images_with_the_same_placeholders_share_no_block(family, model, store_path):
    one, other = family.picture(1), family.picture(2)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        first, second = store.create("first"), store.create("second")
        family.append(first, TEXT[:3], one, TEXT[3:11])
        logits = first.forward()
        family.append(second, TEXT[:3], other, TEXT[3:11])
        others = second.forward()
        report, is_other = second.report, family.is_stock(model, second.active, [other], others)

    assert report.num_reused == 0
    assert is_other
    assert (logits - others).abs().max() > 10 * TOLERANCE


def test_the_same_image_is_computed_once(family, model, store_path):
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        first, second = store.create("first"), store.create("second")
        family.append(first, TEXT[:3], family.picture(1), TEXT[3:60])
        first.forward()
        family.append(second, TEXT[:3], family.picture(1), TEXT[3:50])  # less text in the same append
        logits = second.forward()
        report, is_right = second.report, family.is_stock(model, second.active, [family.picture(1)], logits)

    assert report.num_reused >= 48
    assert is_right


def test_text_alone_shares_no_block_with_an_image_of_the_same_tokens(store_path):
    family = FAMILIES["gemma3"]
    model, picture = family.make(), family.picture(1)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        first, second = store.create("first"), store.create("second")
        family.append(first, TEXT[:3], picture, TEXT[3:40])
        first.forward()
        second.append(first.active.tokens, **picture.inputs)  # without types: its tokens attend one way only
        second.forward()
        report = second.report

    assert report.num_reused == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda inputs: {**inputs, "pixel_values": inputs["pixel_values"] + 1e-3},
        lambda inputs: {**inputs, "pixel_values": inputs["pixel_values"].double()},
        lambda inputs: {**inputs, "pixel_values": inputs["pixel_values"].reshape(1, 32, -1)},
        lambda inputs: {**inputs, "image_grid_thw": torch.tensor([[1, 8, 4]])},
        lambda inputs: {"pixel_values_videos": inputs["pixel_values"], "image_grid_thw": inputs["image_grid_thw"]},
        lambda inputs: {**inputs, "mm_token_type_ids": torch.tensor([[0, 1, 1]])},
        lambda inputs: {**inputs, "interpolate": True},
    ],
)
def test_every_part_of_an_input_is_in_its_name(change):
    inputs = patches(1).inputs

    assert media_digest(change(inputs)) != media_digest(inputs)


@pytest.mark.parametrize(
    "extra",
    [
        {"attention_mask": torch.ones(1, 40)},
        {"pixel_values_videos": None},
        {"mm_token_type_ids": torch.zeros(1, 9, dtype=torch.long)},
    ],
)
def test_what_says_nothing_about_an_image_is_not_in_its_name(extra):
    inputs = patches(1).inputs

    assert media_digest({**inputs, **extra}) == media_digest(inputs)


def test_the_text_around_an_image_is_not_in_its_name():
    types = torch.tensor([[0, 0, 1, 1, 0]])

    assert media_digest({"mm_token_type_ids": types}) == media_digest({"mm_token_type_ids": types[:, 1:4]})


# -- the model belongs to others too


def test_position_deltas_never_leak_between_branches_and_other_users(qwen, store_path):
    model, picture = qwen.make(), qwen.picture(1)
    theirs = qwen.picture(5)
    ids = flat([TEXT[:4], theirs, TEXT[4:8]])

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TEXT[:9])
        session.fork("seeing")
        qwen.append(session, picture, TEXT[9:12], branch="seeing")
        right, deltas = [], []
        for step in range(3):
            with torch.no_grad():
                model(torch.tensor([ids]), **qwen.inputs(ids, theirs))
            found = model.model.rope_deltas
            right.append(qwen.is_stock(model, session.active, [], session.forward([step])))
            right.append(
                qwen.is_stock(model, session.branch("seeing"), [picture], session.forward([step], branch="seeing"))
            )
            session.generate(max_new_tokens=2, do_sample=False, branch="seeing")
            session.rewind(tokens=2, branch="seeing")
            deltas.append(model.model.rope_deltas is found)

    assert all(right)
    assert all(deltas)
    assert int(found) != 0


def test_somebody_elses_generation_goes_on_between_our_passes(qwen, store_path):
    model, picture = qwen.make(), qwen.picture(1)
    ids = flat([TEXT[:4], qwen.picture(5), TEXT[4:8]])
    inputs = qwen.inputs(ids, qwen.picture(5))
    expected = qwen.greedy(model, ids, [qwen.picture(5)], 4)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        qwen.append(session, TEXT[:9], picture)
        right, cache, theirs, given = [], None, list(ids), {"input_ids": torch.tensor([ids]), **inputs}
        for _ in range(4):
            with torch.no_grad():
                output = model(**given, cache=cache, use_cache=True)
            cache = output.cache
            theirs.append(int(output.logits[0, -1].argmax()))
            given = {"input_ids": torch.tensor([theirs[-1:]])}
            right.append(qwen.is_stock(model, session.active, [picture], session.forward(theirs[-1:])))

    assert all(right)
    assert tuple(theirs[-4:]) == expected


def test_transformers_own_generation_may_be_given_a_branchs_cache(qwen, store_path):
    model, picture = qwen.make(), qwen.picture(1)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        qwen.append(session, TEXT[:5], picture, TEXT[5:9])
        session.forward()
        tokens = [*session.active.tokens, 7]
        expected = qwen.greedy(model, tokens, [picture], 4)
        with session.cache() as cache:
            output = model.generate(torch.tensor([tokens]), cache=cache, max_new_tokens=4, do_sample=False)

    assert tuple(output[0, -4:].tolist()) == expected


def test_shifted_positions_of_the_users_own_are_refused(qwen, store_path):
    model, picture = qwen.make(), qwen.picture(1)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        qwen.append(session, TEXT[:5], picture, TEXT[5:9])
        session.forward()
        position = session.active.num_tokens
        for shifted in (torch.tensor([[position + 1]]), torch.tensor([[[position]], [[3]], [[3]]])):
            with session.cache() as cache, pytest.raises(InvalidInputError, match="shifted"):
                model(torch.tensor([[5]]), cache=cache, position_ids=shifted)

        assert session.active.num_tokens == position


# -- refusals


def test_inputs_that_a_model_does_not_take_are_refused_by_name(family, model, store_path):
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        with pytest.raises(InvalidInputError, match=r"pixel_values.* beside tokens; found sound"):
            session.append([1, IMAGE], sound=torch.zeros(3))

        assert session.active.tokens == []


def test_a_text_model_takes_no_images(store_path, llama):
    with agentmem.open(store_path, model=llama, config=CONFIG) as store:
        session = store.create("s")
        with pytest.raises(InvalidInputError, match="found pixel_values"):
            session.append([1, 2], **square(1).inputs)

        assert session.active.tokens == []


def test_inputs_without_a_placeholder_are_refused(family, model, store_path):
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        with pytest.raises(InvalidInputError, match=rf"none of the 4 tokens .*{IMAGE}|give mm_token_type_ids"):
            family.append(session, TEXT[:4], Picture([], family.picture(1).inputs))

        assert session.active.tokens == []


@pytest.mark.parametrize("act", ["append", "forward", "cache"])
def test_placeholders_without_inputs_are_refused(act, family, model, store_path):
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        with session.cache() as cache, pytest.raises(InvalidInputError, match=rf"token {IMAGE}.*nothing was given"):
            {
                "append": lambda: session.append([1, IMAGE]),
                "forward": lambda: session.forward([1, IMAGE]),
                "cache": lambda: model(torch.tensor([[1, IMAGE]]), cache=cache),
            }[act]()

        assert session.active.tokens == []


def test_positions_by_token_types_need_token_types(qwen, store_path):
    with agentmem.open(store_path, model=qwen.make(), config=CONFIG) as store:
        session = store.create("s")
        with pytest.raises(InvalidInputError, match="mm_token_type_ids"):
            session.append(qwen.picture(1).tokens, **qwen.picture(1).inputs)

        assert session.active.tokens == []


def test_token_types_of_another_length_are_refused(family, model, store_path):
    picture = family.picture(1)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        with pytest.raises(InvalidInputError, match=rf"{family.types} of shape \[1, 3\]"):
            session.append(picture.tokens, **picture.inputs, **{family.types: torch.ones(1, 3, dtype=torch.long)})

        assert session.active.tokens == []


def test_padding_is_refused(family, model, store_path):
    picture = family.picture(1)
    tokens = [1, *picture.tokens]
    mask = ones(tokens)
    mask[0, 0] = 0

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        with pytest.raises(InvalidInputError, match="attention_mask"):
            session.append(tokens, **family.inputs(tokens, picture), attention_mask=mask)

        assert session.active.tokens == []


def test_images_in_the_users_own_pass_are_refused(family, model, store_path):
    picture = family.picture(1)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        with session.cache() as cache, pytest.raises(InvalidInputError, match=r"branch\.append\(ids, "):
            model(torch.tensor([picture.tokens]), cache=cache, **family.inputs(picture.tokens, picture))

        assert session.active.tokens == []


def test_a_users_pass_that_cuts_an_image_is_refused(family, model, store_path):
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        family.append(session, family.picture(1))
        with session.cache() as cache, pytest.raises(InvalidInputError, match=r"cuts the media at \[1, "):
            model(torch.tensor([session.active.tokens[:4]]), cache=cache)

        assert session.active.num_pending == session.active.num_tokens


def test_images_that_one_pass_cannot_take_together_are_fed_one_by_one(store_path):
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**SHAPE, "model_type": "llama", "vocab_size": 512, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(
        "llava",
        text_config=text,
        vision_config={"model_type": "clip_vision_model", **vision, "image_size": 16, "patch_size": 4},
        image_token_index=IMAGE,
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    pixels = [torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    layers = (-1, -2)  # of the tower; a pass takes one

    def alone(tokens, stop):
        return model(torch.tensor([tokens[:stop]]), pixel_values=torch.cat(pixels[:1]), vision_feature_layer=-1)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        for image, layer in zip(pixels, layers, strict=True):
            session.append([*TEXT[:3], *[IMAGE] * 16], pixel_values=image, vision_feature_layer=layer)
        all_logits = session.forward()
        again = store.create("again")
        again.append([*TEXT[:3], *[IMAGE] * 16], pixel_values=pixels[0], vision_feature_layer=-1)
        first = again.forward()
        again.append([*TEXT[:3], *[IMAGE] * 16], pixel_values=pixels[1], vision_feature_layer=-2)
        second = again.forward()
        with torch.no_grad():
            expected = alone(session.active.tokens, 19).logits[0, -1]

    assert torch.allclose(first[-1], expected, atol=TOLERANCE)
    assert torch.allclose(all_logits[-1], second[-1], atol=TOLERANCE)


def test_lost_inputs_are_named_when_they_are_needed(qwen, store_path):
    model = qwen.make()
    picture = qwen.picture(1)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        qwen.append(session, TEXT[:3], picture, TEXT[3:6])
        store.flush()
        mark = session.active._entry.state.marks[0]
        state = session.active._entry.state
        state.marks = (dataclasses.replace(mark, payload=bytes(32)),)
        with pytest.raises(NotFoundError):
            session.forward()
        state.marks = (mark,)

        assert session.active.num_pending == session.active.num_tokens


# -- models whose KV is not a function of the tokens before


def paligemma():
    text = {**SHAPE, "model_type": "gemma", "vocab_size": 512, "bos_token_id": None, "eos_token_id": None}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "paligemma",
        text_config=text,
        vision_config={**vision, "image_size": 16, "patch_size": 4},
        image_token_index=IMAGE,
        projection_dim=64,
        hidden_size=64,
    )
    return AutoModelForImageTextToText.from_config(config).eval()


def test_a_model_whose_tokens_attend_to_later_ones_is_refused(store_path):
    torch.manual_seed(0)

    with pytest.raises(UnsupportedModelError, match=r"PaliGemma.* attend to later ones"):
        agentmem.open(store_path, model=paligemma())


def test_types_of_zero_that_mean_something_are_refused_in_a_users_pass(store_path, tiny):
    model = tiny("gpt2")  # it adds the embedding of token 0 to tokens of type 0

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        with session.cache() as cache, pytest.raises(InvalidInputError, match="token_type_ids of 0 otherwise"):
            model(torch.tensor([[5]]), cache=cache, token_type_ids=torch.tensor([[0]]))

        assert session.active.tokens == []


def test_a_model_that_ignores_the_positions_it_is_given_is_refused(qwen, store_path):
    model = qwen.make()
    inner = model.model.forward
    model.model.forward = lambda *args, **kwargs: inner(*args, **{**kwargs, "position_ids": None})

    with pytest.raises(UnsupportedModelError):
        agentmem.open(store_path, model=model)


def test_a_plain_model_without_media_still_opens(store_path):
    config = AutoConfig.for_model("bloom", hidden_size=64, n_layer=2, n_head=4, vocab_size=512)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()  # takes no position_ids

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        logits = store.create("s").forward(TEXT[:20])

    with torch.no_grad():
        assert torch.allclose(logits, model(torch.tensor([TEXT[:20]])).logits[0], atol=TOLERANCE)


def retune(config):
    config.vision_config.window_size = 8


def move_placeholder(config):
    config.image_token_id = 499


@pytest.mark.parametrize("change", [retune, move_placeholder])
def test_what_configures_the_tower_is_part_of_a_models_name(change, qwen):
    model, other = qwen.make(), qwen.make()
    spec = derive_spec(model, 16)
    change(other.config)

    assert model_fingerprint(other, spec, 1) != model_fingerprint(model, spec, 1)
