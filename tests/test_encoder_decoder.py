"""Encoder-decoder models: branches of the decoder, and an encoder that runs once for its inputs.

Every answer is compared with the model's own, over all tokens in one pass with the encoder's inputs.
"""

from functools import partial

import pytest
import torch
from transformers import GenerationMixin

import agentmem
from agentmem.errors import InvalidInputError, UnsupportedModelError
from agentmem.reasons import Reason
from agentmem.testing.models import tiny_model

CONFIG = agentmem.Config(block_size=16, prefill_chunk_tokens=16)
TOKENS = [0, *((29 * index * index + 3 * index + 7) % 490 + 1 for index in range(99))]
"""The first one is the models' decoder_start_token_id."""
TOLERANCE = 1e-3


@pytest.fixture(params=["t5", "bart", "whisper"])
def family(request):
    """The name of a family with an encoder."""
    return request.param


@pytest.fixture
def model(family):
    """A model of the family; tests count what is done with it."""
    return tiny_model(family)


@pytest.fixture
def runs(model):
    """How often the encoder ran: one item each."""
    return watch(model)


def watch(model):
    runs = []
    model.get_encoder().register_forward_hook(lambda *_: runs.append(1))
    return runs


def inputs_of(family, seed=0):
    """Return inputs of the encoder, as a processor makes them for one sequence."""
    generator = torch.Generator().manual_seed(seed)
    if family == "whisper":
        return {"input_features": torch.randn(1, 8, 64, generator=generator)}
    ids = torch.randint(1, 490, (1, 13), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def stock(model, tokens, inputs):
    """Return the last token's logits, all computed at once, without counting the encoder's run."""
    hooks = dict(model.get_encoder()._forward_hooks)
    model.get_encoder()._forward_hooks.clear()
    with torch.no_grad():
        logits = model(decoder_input_ids=torch.tensor([list(tokens)]), **inputs).logits[0, -1]
    model.get_encoder()._forward_hooks.update(hooks)
    return logits


def is_stock(model, branch, inputs, logits):
    return torch.allclose(logits[-1], stock(model, branch.tokens, inputs), atol=TOLERANCE)


def test_a_prefix_is_computed_as_the_model_itself_does(family, model, runs, store_path):
    inputs = inputs_of(family)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[:40], **inputs)
        is_first = is_stock(model, session.active, inputs, session.forward())
        is_next = is_stock(model, session.active, inputs, session.forward(TOKENS[40:43]))

    assert is_first
    assert is_next
    assert len(runs) == 1


def test_generating_gives_the_tokens_of_the_model_itself(family, model, runs, store_path):
    inputs = inputs_of(family)
    ids = torch.tensor([TOKENS[:10]])
    plain = partial(GenerationMixin.generate, model)  # Whisper's own is for long recordings
    expected = plain(**inputs, decoder_input_ids=ids, max_new_tokens=12, do_sample=False)[0, 10:].tolist()
    runs.clear()

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[:10], **inputs)
        generated = session.generate(max_new_tokens=12, do_sample=False).tokens
        num_pending = session.active.num_pending
        is_after = is_stock(model, session.active, inputs, session.forward())

    assert list(generated) == expected
    assert num_pending == 1
    assert is_after
    assert len(runs) == 1


def test_a_first_token_other_than_the_models_own_is_the_users_choice(family, model, store_path):
    inputs = inputs_of(family)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[5:10], **inputs)
        generated = session.generate(max_new_tokens=3, do_sample=False).tokens
        tokens = session.active.tokens
        is_after = is_stock(model, session.active, inputs, session.forward())

    assert tokens == [*TOKENS[5:10], *generated]
    assert is_after


def test_siblings_that_take_turns_share_one_run_of_the_encoder(family, model, runs, store_path):
    inputs = inputs_of(family)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[:20], **inputs)
        plan = session.checkpoint()
        for name in ("a", "b", "c"):
            session.fork(name, at=plan)
        right = []
        for step in range(4):
            for index, name in enumerate(("a", "b", "c")):
                logits = session.forward([10 + 7 * step + index], branch=name)
                right.append(is_stock(model, session.branch(name), inputs, logits))

    assert all(right)
    assert len(runs) == 1


def test_branches_with_different_inputs_keep_them_apart(family, model, runs, store_path):
    one, other = inputs_of(family, 1), inputs_of(family, 2)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        first, second = store.create("first"), store.create("second")
        first.append(TOKENS[:20], **one)
        second.append(TOKENS[:20], **other)
        right = []
        for token in (5, 6, 7):
            right.append(is_stock(model, first.active, one, first.forward([token])))
            right.append(is_stock(model, second.active, other, second.forward([token])))
        report = second.report
        differ = not torch.allclose(first.forward(), second.forward(), atol=TOLERANCE)

    assert all(right)
    assert differ
    assert report.num_reused == 22  # of its own; nothing of the other's
    assert len(runs) == 2


def test_rewinding_keeps_the_encoders_part(family, model, runs, store_path):
    inputs = inputs_of(family)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[:40], **inputs)
        session.forward()
        right = []
        for num_tokens in (1, 15, 20):
            session.rewind(tokens=num_tokens)
            right.append(is_stock(model, session.active, inputs, session.forward([num_tokens])))

    assert all(right)
    assert len(runs) == 1


def test_an_emptied_branch_may_be_given_other_inputs(family, model, store_path):
    one, other = inputs_of(family, 1), inputs_of(family, 2)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[:5], **one)
        session.forward()
        session.rewind(tokens=5)
        session.append(TOKENS[:5], **other)
        is_other = is_stock(model, session.active, other, session.forward())

    assert is_other


def test_another_session_with_the_same_inputs_runs_no_encoder(family, model, runs, store_path):
    inputs = inputs_of(family)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        first = store.create("first")
        first.append(TOKENS[:20], **inputs)
        first.checkpoint()
        store.flush()
        second = store.create("second")
        second.append(TOKENS[:10], **inputs_of(family))
        is_shared = is_stock(model, second.active, inputs, second.forward())

    assert is_shared
    assert len(runs) == 1


def test_a_branch_resumed_by_another_model_object_computes_nothing(family, model, store_path):
    inputs = inputs_of(family)
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[:40], **inputs)
        session.checkpoint()
    other = tiny_model(family)
    runs = watch(other)

    with agentmem.open(store_path, model=other, config=CONFIG) as store:
        runs.clear()
        session = store.resume("s")
        logits = session.forward([5])
        report, is_right = session.report, is_stock(other, session.active, inputs, logits)
        fresh = store.create("fresh")
        fresh.append(TOKENS[:3], **inputs_of(family))
        is_fresh = is_stock(other, fresh.active, inputs, fresh.forward())

    assert (report.reason, report.num_reused) == (Reason.COMPLETE, 39)  # the last one had not been fed
    assert is_right
    assert is_fresh
    assert not runs


def test_the_users_own_loop_feeds_the_decoder_only(family, model, runs, store_path):
    inputs = inputs_of(family)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[:3], **inputs)
        with session.cache() as cache:  # and with gradients
            for first, stop in ((0, 3), (3, 4), (4, 8)):
                logits = model(decoder_input_ids=torch.tensor([TOKENS[first:stop]]), cache=cache).logits[0].detach()
        is_right = is_stock(model, session.active, inputs, logits)
        tokens = session.active.tokens

    assert tokens == TOKENS[:8]
    assert is_right
    assert len(runs) == 1


def test_a_pass_that_fails_in_the_decoder_leaves_the_branch_as_it_was(family, model, store_path):
    inputs = inputs_of(family)

    def fail(*_args):
        raise RuntimeError("stop")

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[:5], **inputs)
        hook = model.get_output_embeddings().register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="stop"):
            session.forward()
        hook.remove()
        num_pending = session.active.num_pending
        is_right = is_stock(model, session.active, inputs, session.forward())

    assert num_pending == 5
    assert is_right


def test_somebody_elses_passes_between_ours_change_nothing(family, model, store_path):
    inputs, others = inputs_of(family), inputs_of(family, 9)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[:5], **inputs)
        right = []
        for token in (5, 6):
            right.append(is_stock(model, session.active, inputs, session.forward([token])))
            GenerationMixin.generate(model, **others, max_new_tokens=4)

    assert all(right)


# -- refusals

REFUSED = {
    "inputs later on": (TOKENS[:3], {}, [5], r"belong to a whole branch.*has 3"),
    "inputs without tokens": ([], None, [], r"decoder_start_token_id is 0"),
    "inputs that it does not take": ([], {"foo": 3}, [5], r"takes .*found foo"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inputs_that_do_not_belong_there_are_refused_and_nothing_is_appended(name, family, model, store_path):
    before, extra, tokens, words = REFUSED[name]
    inputs = inputs_of(family) | (extra or {})

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(before)
        with pytest.raises(InvalidInputError, match=words):
            session.append(tokens, **inputs)
        found = session.active.tokens

    assert found == before


def test_padding_of_the_encoders_inputs_is_refused(store_path):
    inputs = inputs_of("t5")
    inputs["attention_mask"][0, -1] = 0

    with agentmem.open(store_path, model=tiny_model("t5"), config=CONFIG) as store:
        session = store.create("s")
        with pytest.raises(InvalidInputError, match="attention_mask"):
            session.append(TOKENS[:3], **inputs)

        assert session.active.tokens == []


def test_a_branch_without_inputs_is_told_what_it_lacks(family, model, store_path):
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        with pytest.raises(InvalidInputError, match=r"no inputs for the encoder.*decoder_start_token_id is 0"):
            session.forward(TOKENS[:3])

        assert session.active.tokens == []


@pytest.mark.parametrize("name", ["input_ids", "encoder_outputs"])
def test_a_pass_that_brings_its_own_encoder_part_is_refused(name, store_path):
    model = tiny_model("t5")
    brought = {"input_ids": torch.ones(1, 3, dtype=torch.long), "encoder_outputs": (torch.zeros(1, 3, 64),)}

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[:3], **inputs_of("t5"))
        with session.cache() as cache, pytest.raises(InvalidInputError, match=name):
            model(decoder_input_ids=torch.tensor([TOKENS[:3]]), cache=cache, **{name: brought[name]})

        assert session.active.num_pending == 3


def test_a_decoder_that_reads_the_encoders_output_in_every_pass_is_refused(store_path):
    model = tiny_model("bart")

    def add(_module, args, kwargs):
        states = kwargs.get("encoder_hidden_states", args[2] if len(args) > 2 else None)
        return (args[0] + states.mean(), *args[1:]), kwargs

    for layer in model.model.decoder.layers:
        layer.register_forward_pre_hook(add, with_kwargs=True)

    with pytest.raises(UnsupportedModelError, match="in every pass"):
        agentmem.open(store_path, model=model)
