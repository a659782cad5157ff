"""Rotary schemes whose frequencies depend on the length: dynamic NTK up to its limit, longrope across its border.

Every answer is compared with the model's own, over all tokens in one pass.
"""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import agentmem
from agentmem.errors import UnsupportedModelError
from agentmem.reasons import Reason
from agentmem.testing.models import tiny_model
from agentmem.testing.recipes import SHAPE, SWITCH_LENGTH

LIMIT = SWITCH_LENGTH
CONFIG = agentmem.Config(block_size=16)
CHUNKED = agentmem.Config(block_size=16, prefill_chunk_tokens=16)
TOKENS = [(29 * index * index + 3 * index + 7) % 512 for index in range(2 * LIMIT)]
TOLERANCE = 1e-3
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "short_factor": [1.0] * 8,
    "long_factor": [3.0] * 8,
    "original_max_position_embeddings": LIMIT,
}


@pytest.fixture
def phi3():
    """A model with two regimes; tests change what is on its modules."""
    return tiny_model("phi3")


@pytest.fixture
def ntk():
    """A model whose frequencies are the trained ones up to 64 tokens; tests change what is on its modules."""
    return tiny_model("dynamic-ntk")


def stock(model, tokens):
    """Return the logits of the last token, computed at once by a model that nobody used before."""
    other = AutoModelForCausalLM.from_config(model.config)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        return other.eval()(torch.tensor([list(tokens)])).logits[0, -1]


def is_stock(model, branch, logits):
    return torch.allclose(logits[-1], stock(model, branch.tokens), atol=TOLERANCE)


def greedy(model, tokens, num_tokens):
    """Return the greedy continuation, every token from nothing."""
    tokens = list(tokens)
    for _ in range(num_tokens):
        tokens.append(int(stock(model, tokens).argmax()))
    return tuple(tokens[-num_tokens:])


def grow(model):
    """Use the model as somebody else, on a sequence beyond the limit."""
    with torch.no_grad():
        model(torch.tensor([TOKENS]))


def state_of(rotary):
    """What a rotary module is made of, by identity and by content."""
    buffers = {name: (id(buffer), buffer.tolist()) for name, buffer in rotary.named_buffers()}
    return buffers, float(rotary.max_seq_len_cached), "forward" in vars(rotary)


# -- dynamic


def test_dynamic_positions_are_exact_up_to_the_trained_length(ntk, store_path):
    with agentmem.open(store_path, model=ntk, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[: LIMIT - 4])
        below = session.forward()
        is_below = is_stock(ntk, session.active, below)
        at_limit = session.forward(TOKENS[LIMIT - 4 : LIMIT])
        is_at_limit = is_stock(ntk, session.active, at_limit)

    assert is_below
    assert is_at_limit


def feed_by_hand(model, session, tokens):
    with session.cache() as cache:
        model(torch.tensor([tokens]), cache=cache)


TOO_FAR = {
    "forward": lambda model, session: session.forward(TOKENS[LIMIT - 2 : LIMIT + 40]),
    "append": lambda model, session: (session.append(TOKENS[LIMIT - 2 : LIMIT + 2]), session.forward()),
    "generate": lambda model, session: session.generate(max_new_tokens=5, do_sample=False),
    "cache": lambda model, session: feed_by_hand(model, session, TOKENS[LIMIT - 2 : LIMIT + 1]),
}


@pytest.mark.parametrize("act", TOO_FAR)
def test_a_pass_beyond_the_trained_length_is_refused_before_anything_is_computed(act, ntk, store_path):
    with agentmem.open(store_path, model=ntk, config=CHUNKED) as store:
        session = store.create("s")
        session.forward(TOKENS[: LIMIT - 2])
        before = store.stats()["tokens_fed"]
        with pytest.raises(UnsupportedModelError, match=r"'dynamic'.* 64 tokens") as error:
            TOO_FAR[act](ntk, session)
        num_fed = store.stats()["tokens_fed"] - before
        num_added = session.active.num_tokens - (LIMIT - 2)
        session.rewind(tokens=num_added)
        logits = session.forward(TOKENS[LIMIT - 2 : LIMIT])
        is_usable = is_stock(ntk, session.active, logits)

    assert "yarn" in str(error.value)
    assert num_added == (4 if act == "append" else 0)
    assert num_fed == 0 or act == "generate"  # which finds out when it gets there
    assert is_usable


@pytest.mark.parametrize("length", [LIMIT - 1, LIMIT])
def test_frequencies_that_somebody_else_has_grown_change_nothing(length, ntk, store_path):
    with agentmem.open(store_path, model=ntk, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[: LIMIT - 20])
        session.forward()
        grow(ntk)
        found = state_of(ntk.model.rotary_emb)
        logits = session.forward(TOKENS[LIMIT - 20 : length])
        left = state_of(ntk.model.rotary_emb)
        is_right = is_stock(ntk, session.active, logits)

    assert is_right
    assert left == found


def test_frequencies_that_have_grown_before_it_is_opened_do_not_rename_a_model(ntk, store_path):
    with agentmem.open(store_path, model=ntk, config=CONFIG) as store:
        store.create("s").append(TOKENS[:40])
        store.resume("s").forward()
    grow(ntk)
    found = state_of(ntk.model.rotary_emb)

    with agentmem.open(store_path, model=ntk, config=CONFIG) as store:
        session = store.resume("s")
        logits = session.forward(TOKENS[40:LIMIT])
        report, is_right = session.report, is_stock(ntk, session.active, logits)

    assert (report.reason, report.num_reused) == (Reason.COMPLETE, 40)
    assert is_right
    assert state_of(ntk.model.rotary_emb) == found


def test_a_module_that_has_reset_itself_does_not_rename_a_model(ntk, store_path):
    with agentmem.open(store_path, model=ntk, config=CONFIG) as store:
        store.create("s").forward(TOKENS[:40])
    grow(ntk)
    with torch.no_grad():
        ntk(torch.tensor([TOKENS[:5]]))  # transformers puts one tensor under both names

    with agentmem.open(store_path, model=ntk, config=CONFIG) as store:
        session = store.resume("s")
        session.forward(TOKENS[40:50])
        report = session.report

    assert (report.reason, report.num_reused) == (Reason.COMPLETE, 40)


# -- longrope


@pytest.mark.parametrize("config", [CONFIG, CHUNKED], ids=["at-once", "chunked"])
def test_a_prompt_beyond_the_border_is_computed_with_the_long_factors_from_its_first_chunk(config, phi3, store_path):
    with agentmem.open(store_path, model=phi3, config=config) as store:
        session = store.create("s")
        session.append(TOKENS)
        logits = session.forward()
        is_right = is_stock(phi3, session.active, logits)

    assert is_right


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1])
def test_both_sides_of_the_border_are_those_of_the_model_itself(length, phi3, store_path):
    with agentmem.open(store_path, model=phi3, config=CHUNKED) as store:
        session = store.create("s")
        session.append(TOKENS[: length - 1])
        logits = session.forward(TOKENS[length - 1 : length])
        is_right = is_stock(phi3, session.active, logits)

    assert is_right


def test_the_regimes_differ_in_these_tests(phi3):
    short = phi3.model.rotary_emb.original_inv_freq.tolist()
    grow(phi3)

    assert phi3.model.rotary_emb.inv_freq.tolist() != short


def test_appending_across_the_border_computes_all_tokens_again_and_says_so(phi3, store_path):
    with agentmem.open(store_path, model=phi3, config=CHUNKED) as store:
        session = store.create("s")
        session.append(TOKENS[:40])
        session.forward()
        session.append(TOKENS[40:80])
        logits = session.forward()
        report, is_right = session.report, is_stock(phi3, session.active, logits)

    assert is_right
    assert (report.reason, report.num_computed, report.first_difference) == (Reason.REGIME, 80, 0)


def test_generating_across_the_border_gives_the_tokens_of_the_model_itself(phi3, store_path):
    expected = greedy(phi3, TOKENS[: LIMIT - 6], 16)

    with agentmem.open(store_path, model=phi3, config=CHUNKED) as store:
        session = store.create("s")
        session.append(TOKENS[: LIMIT - 6])
        generated = session.generate(max_new_tokens=16, do_sample=False).tokens
        report, num_pending = session.report, session.active.num_pending
        logits = session.forward()
        is_right = is_stock(phi3, session.active, logits)

    assert generated == expected
    assert report.reason is Reason.REGIME
    assert num_pending == 1  # the cache was the branch's to the end
    assert is_right


def test_the_users_own_loop_may_cross_the_border(phi3, store_path):
    with agentmem.open(store_path, model=phi3, config=CHUNKED) as store:
        session = store.create("s")
        session.forward(TOKENS[: LIMIT - 2])
        with session.cache() as cache, torch.no_grad():
            for token in TOKENS[LIMIT - 2 : LIMIT + 3]:
                logits = phi3(torch.tensor([[token]]), cache=cache).logits[0]
        is_right = is_stock(phi3, session.active, logits)
        tokens = session.active.tokens

    assert tokens == TOKENS[: LIMIT + 3]
    assert is_right


def test_forks_on_both_sides_of_the_border_keep_their_own_regime(phi3, store_path):
    with agentmem.open(store_path, model=phi3, config=CHUNKED) as store:
        session = store.create("s")
        session.append(TOKENS[: LIMIT - 10])
        plan = session.checkpoint("short")
        session.fork("short", at=plan)
        session.append(TOKENS[LIMIT - 10 : LIMIT + 10])
        far = session.checkpoint("long")
        session.fork("long", at=far)
        right = {}
        for step in range(3):
            for name in ("short", "long", "main"):
                session.switch(name)
                logits = session.forward([100 + step])
                right[name, step] = is_stock(phi3, session.active, logits)

    assert all(right.values())


def test_rewinding_below_the_border_goes_back_to_the_short_factors(phi3, store_path):
    with agentmem.open(store_path, model=phi3, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[: LIMIT + 10])
        session.forward()
        session.rewind(tokens=20)
        logits = session.forward([5])
        is_right = is_stock(phi3, session.active, logits)

    assert is_right


def test_kv_of_one_regime_is_never_reused_in_the_other(phi3, store_path):
    with agentmem.open(store_path, model=phi3, config=CONFIG) as store:
        store.create("short").append(TOKENS[:48])
        store.resume("short").forward()
        session = store.create("long")
        session.append(TOKENS[:80])
        logits = session.forward()
        report, is_right = session.report, is_stock(phi3, session.active, logits)

    assert report.num_reused == 0
    assert is_right


@pytest.mark.parametrize("length", [LIMIT - 10, LIMIT + 10])
def test_a_branch_resumed_by_another_model_object_computes_nothing(length, phi3, store_path):
    with agentmem.open(store_path, model=phi3, config=CONFIG) as store:
        store.create("s").forward(TOKENS[:length])
    grow(phi3)
    model = tiny_model("phi3")

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.resume("s")
        logits = session.forward([5])
        report, is_right = session.report, is_stock(model, session.active, logits)

    assert (report.reason, report.num_reused, report.num_computed) == (Reason.COMPLETE, length, 1)
    assert is_right


def test_somebody_else_may_use_the_model_between_our_passes_and_finds_it_as_it_was(phi3, store_path):
    with agentmem.open(store_path, model=phi3, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[: LIMIT - 4])
        right, theirs = [], []
        for token in TOKENS[LIMIT - 4 : LIMIT + 4]:
            logits = session.forward([token])
            right.append(is_stock(phi3, session.active, logits))
            for length in (10, 100):
                with torch.no_grad():
                    found = phi3(torch.tensor([TOKENS[:length]])).logits[0, -1]
                theirs.append(torch.allclose(found, stock(phi3, TOKENS[:length]), atol=TOLERANCE))

    assert all(right)
    assert all(theirs)


def test_threads_in_different_regimes_do_not_disturb_each_other(phi3, store_path):
    lengths = {"short": LIMIT // 2, "long": LIMIT + 20}

    def work(session, length):
        session.append(TOKENS[:length])
        for token in range(12):
            logits = session.forward([token])
        return logits

    with agentmem.open(store_path, model=phi3, config=CONFIG) as store:
        sessions = {name: store.create(name) for name in lengths}
        with ThreadPoolExecutor(2) as pool:
            futures = {name: pool.submit(work, sessions[name], length) for name, length in lengths.items()}
            right = [is_stock(phi3, sessions[name].active, future.result()) for name, future in futures.items()]

    assert all(right)


def test_a_pass_that_fails_leaves_the_regime_to_nobody(phi3, store_path):
    def fail(*_args):
        raise RuntimeError("stop")

    with agentmem.open(store_path, model=phi3, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS)
        hook = phi3.model.layers[-1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="stop"):
            session.forward()
        hook.remove()
        with torch.no_grad():
            short = phi3(torch.tensor([TOKENS[:20]])).logits[0, -1]
        is_theirs = torch.allclose(short, stock(phi3, TOKENS[:20]), atol=TOLERANCE)
        is_ours = is_stock(phi3, session.active, session.forward())

    assert is_theirs
    assert is_ours


def test_per_layer_schemes_are_held_to_the_regime_too(store_path):
    rope = {"full_attention": _LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    options = {**SHAPE, "vocab_size": 512, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    layers = ["sliding_attention", "full_attention"] * 2
    config = AutoConfig.for_model(
        "gemma3_text", **options, sliding_window=32, layer_types=layers, rope_parameters=rope, use_cache=True
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()

    with agentmem.open(store_path, model=model, config=CHUNKED) as store:
        session = store.create("s")
        session.append(TOKENS[:40])
        is_short = is_stock(model, session.active, session.forward())
        session.append(TOKENS[40:100])
        is_long = is_stock(model, session.active, session.forward())

    assert is_short
    assert is_long


# -- positions that are not the token's index


def test_a_model_that_counts_from_its_padding_id_is_left_to_count(store_path):
    options = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
    config = AutoConfig.for_model("roberta", **options, vocab_size=512, is_decoder=True, pad_token_id=1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = [token % 500 + 5 for token in TOKENS[:40]]

    with agentmem.open(store_path, model=model, config=CHUNKED) as store:
        session = store.create("s")
        session.append(tokens[:36])
        right = [is_stock(model, session.active, session.forward([token])) for token in tokens[36:]]

    assert all(right)


def test_a_model_that_counts_from_0_in_every_pass_is_told_the_positions(store_path, tiny):
    with agentmem.open(store_path, model=tiny("bamba"), config=CONFIG) as store:  # counts from 0 in every pass
        session = store.create("s")
        session.append(TOKENS[:20])
        session.forward()
        is_right = is_stock(tiny("bamba"), session.active, session.forward(TOKENS[20:24]))

    assert is_right


# -- modules


def test_closing_gives_the_modules_back_in_any_order(phi3, tmp_path):
    first = agentmem.open(tmp_path / "a.agentmem", model=phi3, config=CONFIG)
    second = agentmem.open(tmp_path / "b.agentmem", model=phi3, config=CONFIG)
    session = second.create("s")
    session.append(TOKENS)

    first.close()
    is_right = is_stock(phi3, session.active, session.forward())
    second.close()

    assert is_right
    assert "forward" not in vars(phi3.model.rotary_emb)


def test_a_store_that_is_closed_is_not_kept_alive_by_the_model(phi3, store_path):
    import weakref

    with agentmem.open(store_path, model=phi3, config=CONFIG) as store:
        store.create("s").forward(TOKENS[:5])
        ref = weakref.ref(store)
    del store
    gc.collect()

    assert ref() is None


def test_borders_at_several_lengths_are_refused(store_path):
    other = {**_LONGROPE, "original_max_position_embeddings": 32}
    options = {**SHAPE, "vocab_size": 512, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    rope = {"full_attention": _LONGROPE, "sliding_attention": other}
    layers = ["sliding_attention", "full_attention"] * 2
    config = AutoConfig.for_model("gemma3_text", **options, sliding_window=32, layer_types=layers, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config).eval()

    with pytest.raises(UnsupportedModelError, match=r"\[32, 64\]"):
        agentmem.open(store_path, model=model)


def test_a_scheme_without_its_buffers_is_refused(ntk, store_path):
    del ntk.model.rotary_emb.original_inv_freq

    with pytest.raises(UnsupportedModelError, match=r"'dynamic'.*original_inv_freq"):
        agentmem.open(store_path, model=ntk)
