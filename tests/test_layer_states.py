"""Layers whose state cannot be cut by token, and layers with an indexer beside their keys: bits of a stock cache.

The models are tiny and random. Steps are given to both sides in the same passes, since chunking changes low bits.
"""

import copy
from functools import cache

import pytest
import torch
from transformers import DynamicCache

import agentmem
from agentmem.errors import InvalidInputError, SpecMismatchError, StaleCacheError
from agentmem.reasons import Reason
from agentmem.testing.models import tiny_model

CONFIG = agentmem.Config(block_size=16)
TOKENS = [(29 * index * index + 3 * index + 7) % 512 for index in range(40)]
TOLERANCE = 1e-3

RECURRENT = ["mamba", "mamba2"]
HYBRID = [
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "inkling",
    "jamba",
    "kimi_linear",
    "lfm2",
    "qwen3_5",
    "qwen3_next",
    "zaya",
]
INDEXED = ["deepseek_v32", "glm_moe_dsa"]
FORGETFUL = ["jamba", "mamba"]
"""Families whose models forget their state when they are fed several tokens on top of it (transformers 5.24)."""


@cache
def shared(family):
    return tiny_model(family)


@pytest.fixture(params=[*RECURRENT, *HYBRID, *INDEXED])
def family(request):
    """The name of a family with layer states or an indexer."""
    return request.param


@pytest.fixture(params=[*RECURRENT, *HYBRID])
def stateful(request):
    """The name of a family with layer states."""
    return request.param


class Stock:
    """The same passes on transformers' own cache, without agentmem."""

    def __init__(self, model, is_stepwise=False):
        self.model = model
        self.is_stepwise = is_stepwise
        self.cache = DynamicCache(config=model.config)
        self.num_tokens = 0

    def forward(self, tokens):
        """Feed `tokens` in one pass, or one by one where the model needs it; return their logits."""
        if self.is_stepwise and self.num_tokens:
            return torch.cat([self._pass([token]) for token in tokens])
        return self._pass(tokens)

    def fork(self):
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)
        return other

    def _pass(self, tokens):
        stop = self.num_tokens + len(tokens)
        # Bamba counts from 0 in every pass when it is not told the positions; the pure recurrent models know none.
        positions = {"position_ids": torch.arange(self.num_tokens, stop)[None]}
        if not any(hasattr(layer, "keys") for layer in self.cache.layers):
            positions = {}
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens]), cache=self.cache, **positions).logits[0]
        self.num_tokens = stop
        return logits


def stock(family):
    return Stock(shared(family), is_stepwise=family in FORGETFUL)


def test_prefill_and_decoding_have_the_bits_of_a_stock_cache(family, store_path):
    other, steps = stock(family), [TOKENS[:7], TOKENS[7:19], [1], [2], [3], TOKENS[:20], [4]]

    with agentmem.open(store_path, model=shared(family), config=CONFIG) as store:
        session = store.create("s")
        pairs = [(session.forward(step), other.forward(step)) for step in steps]

    assert [torch.equal(ours, theirs) for ours, theirs in pairs] == [True] * len(steps)


def test_a_text_in_many_passes_equals_one_pass(family, store_path):
    with torch.no_grad():
        expected = shared(family)(torch.tensor([TOKENS])).logits[0, -1]

    with agentmem.open(store_path, model=shared(family), config=CONFIG) as store:
        session = store.create("s")
        for start in range(0, 40, 8):
            logits = session.forward(TOKENS[start : start + 8])

    assert torch.allclose(logits[-1], expected, atol=TOLERANCE)


def test_siblings_forked_at_the_tip_take_turns_with_the_bits_of_stock_copies(family, store_path):
    other = stock(family)

    with agentmem.open(store_path, model=shared(family), config=CONFIG) as store:
        session = store.create("s")
        pairs = [(session.forward(TOKENS[:21]), other.forward(TOKENS[:21]))]
        copies = {"main": other, "a": other.fork(), "b": other.fork()}
        session.fork("a")
        session.fork("b")
        for turn in range(4):
            for offset, name in enumerate(copies):
                step = [100 * offset + turn] if turn % 2 else TOKENS[offset : offset + 3]
                pairs.append((session.forward(step, branch=name), copies[name].forward(step)))

    assert [torch.equal(ours, theirs) for ours, theirs in pairs] == [True] * len(pairs)


def test_a_rewind_to_a_checkpoint_goes_on_with_the_bits_of_a_run_that_stopped_there(family, store_path):
    other = stock(family)

    with agentmem.open(store_path, model=shared(family), config=CONFIG) as store:
        session = store.create("s")
        session.forward(TOKENS[:21])
        point = session.checkpoint("here")
        session.forward(TOKENS[21:])
        session.rewind(point)
        report, found = session.report, session.forward([5])

    other.forward(TOKENS[:21])
    assert report.reason is Reason.COMPLETE
    assert torch.equal(found, other.forward([5]))


def test_a_fresh_model_resumes_from_disk_with_the_bits_it_would_have_had(family, store_path):
    other = stock(family)
    with agentmem.open(store_path, model=shared(family), config=CONFIG) as store:
        session = store.create("s")
        session.forward(TOKENS)
        session.checkpoint("asleep")

    with agentmem.open(store_path, model=tiny_model(family), config=CONFIG) as store:
        session = store.resume("s")
        report, found, num_fed = session.report, session.forward([5]), store.stats()["tokens_fed"]

    other.forward(TOKENS)
    assert (report.reason, report.num_pending, num_fed) == (Reason.COMPLETE, 0, 1)
    assert torch.equal(found, other.forward([5]))


def test_generation_is_that_of_stock_transformers(family, store_path):
    model = shared(family)
    expected = model.generate(torch.tensor([TOKENS]), max_new_tokens=12, do_sample=False)[0, len(TOKENS) :].tolist()

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS)
        found = list(session.generate(max_new_tokens=12, do_sample=False).tokens)

    assert found == expected


def test_a_second_turn_generates_what_a_run_from_nothing_does(family, store_path):
    model = shared(family)

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[:20])
        session.generate(max_new_tokens=4, do_sample=False)
        session.append(TOKENS[20:30])
        before = session.active.tokens
        found = list(session.generate(max_new_tokens=6, do_sample=False).tokens)

    expected = model.generate(torch.tensor([before]), max_new_tokens=6, do_sample=False)[0, len(before) :].tolist()
    assert found == expected


def test_a_rewind_to_where_no_state_is_kept_computes_from_the_nearest_one_and_says_so(stateful, store_path):
    with torch.no_grad():
        expected = shared(stateful)(torch.tensor([[*TOKENS[:30], 5]])).logits[0, -1]

    with agentmem.open(store_path, model=shared(stateful), config=CONFIG) as store:
        session = store.create("s")
        session.forward(TOKENS[:21])
        session.checkpoint("near")
        session.forward(TOKENS[21:])
        session.rewind(tokens=10)
        found = session.forward([5])
        report = session.report

    assert (report.reason, report.num_reused, report.num_computed) == (Reason.NO_STATE, 21, 10)
    assert torch.allclose(found[-1], expected, atol=TOLERANCE)


def test_tokens_that_are_fed_again_for_their_state_keep_the_bytes_of_their_kv(store_path):
    model = shared("qwen3_next")

    def keys(session, branch):
        with session.cache(branch=branch) as own, torch.no_grad():
            model(torch.tensor([[7]]), cache=own)
            return own.layers[1].keys[:, :, :35].clone()

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.forward(TOKENS[:21])
        session.checkpoint("near")
        for token in TOKENS[21:]:
            session.forward([token])
        session.fork("again")
        before = keys(session, "main")
        session.rewind(tokens=5, branch="again")
        session.forward(branch="again")
        num_computed = session.branch("again").report.num_computed
        after = keys(session, "again")

    assert num_computed == 14  # in one pass, which gives other bytes than one token at a time
    assert torch.equal(before, after)


def test_a_pass_that_fails_leaves_the_states_as_they_were(stateful, store_path):
    model, other = shared(stateful), stock(stateful)
    head = model.get_output_embeddings()

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.forward(TOKENS[:9])
        handle = head.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            session.forward([1])
        handle.remove()
        found = session.forward([2])

    other.forward(TOKENS[:9])
    assert torch.equal(found, other.forward([2]))


def test_a_layer_that_is_skipped_leaves_the_branch_as_it_was(store_path):
    model, other = shared("qwen3_next"), stock("qwen3_next")

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.forward(TOKENS[:9])
        skipped = model.model.layers[2].linear_attn
        forward, skipped.forward = skipped.forward, lambda hidden_states, **_kwargs: hidden_states
        try:
            with pytest.raises(SpecMismatchError, match="layer 2"):
                session.forward([1])
        finally:
            skipped.forward = forward
        found = session.forward([2])

    other.forward(TOKENS[:9])
    assert torch.equal(found, other.forward([2]))


def test_autocast_is_refused_where_it_would_change_a_state_in_silence(store_path):
    model = shared("mamba2")

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.forward(TOKENS[:9])
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(SpecMismatchError, match="autocast"):
            session.forward([1])

        assert session.active.num_tokens == 9


def test_states_are_out_of_reach_outside_of_a_pass(store_path):
    with agentmem.open(store_path, model=shared("qwen3_next"), config=CONFIG) as store:
        session = store.create("s")
        session.forward(TOKENS[:9])

        with session.cache() as own:
            assert own.has_previous_state(0)
            with pytest.raises(StaleCacheError):
                own.get_conv_state(0)
            with pytest.raises(StaleCacheError):
                own.update_recurrent_state(torch.zeros(1, 4, 8, 8), 0)


def test_the_cache_of_a_recurrent_model_knows_how_many_tokens_it_stands_for(store_path):
    with agentmem.open(store_path, model=shared("mamba2"), config=CONFIG) as store:
        session = store.create("s")
        session.forward(TOKENS[:9])

        with session.cache() as own:
            assert own.get_seq_length() == 9
            assert own.get_mask_sizes(3, 0) == (12, 0)
            assert own.is_linear == [False] * 4
            assert not own.is_compileable


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "falcon_h1"])
def test_the_users_own_loop_has_the_bits_of_a_stock_cache(family, store_path):
    model, other = shared(family), stock(family)

    with agentmem.open(store_path, model=model, config=CONFIG) as store, torch.no_grad():
        session = store.create("s")
        with session.cache() as own:
            steps = [TOKENS[:9], [1], [2]]
            pairs = [(model(torch.tensor([step]), cache=own).logits[0], other.forward(step)) for step in steps]

    assert [torch.equal(ours, theirs) for ours, theirs in pairs] == [True] * 3
    assert all(not tensor.requires_grad for pair in pairs for tensor in pair)


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "deepseek_v32"])
def test_transformers_own_generate_goes_on_from_the_cache_when_it_is_given_all_ids(family, store_path):
    model = shared(family)
    expected = model.generate(torch.tensor([TOKENS]), max_new_tokens=6, do_sample=False)[0].tolist()

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.forward(TOKENS[:30])
        with session.cache() as own:
            output = model.generate(torch.tensor([TOKENS]), cache=own, max_new_tokens=6, do_sample=False)
        num_fed = store.stats()["tokens_fed"]

    assert output[0].tolist() == expected
    assert num_fed == 40 + 5


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_a_prompt_may_be_generated_from_in_chunks(family, store_path):
    model = shared(family)
    expected = model.generate(torch.tensor([TOKENS]), max_new_tokens=6, do_sample=False)[0, 40:].tolist()

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS)
        found = session.generate(max_new_tokens=6, do_sample=False, prefill_chunk_size=16)

    assert list(found.tokens) == expected


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "deepseek_v32"])
def test_a_cache_takes_its_last_pass_back(family, store_path):
    other = stock(family)

    with agentmem.open(store_path, model=shared(family), config=CONFIG) as store, torch.no_grad():
        session = store.create("s")
        session.forward(TOKENS[:20])
        with session.cache() as own:
            shared(family)(torch.tensor([[1]]), cache=own)
            own.crop(-1)
            found = shared(family)(torch.tensor([[2]]), cache=own).logits[0]

    other.forward(TOKENS[:20])
    assert torch.equal(found, other.forward([2]))


def test_a_cache_does_not_go_back_to_where_no_state_is_kept(store_path):
    model = shared("qwen3_next")

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.forward(TOKENS[:20])

        with session.cache() as own:
            with pytest.raises(InvalidInputError, match="layer state at 15"):
                own.crop(-5)
            assert own.position == 20
        assert session.active.num_tokens == 20


def test_several_tokens_at_once_are_refused_where_the_model_would_forget_what_came_before(store_path):
    model, other = shared("jamba"), stock("jamba")

    with agentmem.open(store_path, model=model, config=CONFIG) as store, torch.no_grad():
        session = store.create("s")
        session.forward(TOKENS[:20])
        with session.cache() as own:
            with pytest.raises(InvalidInputError, match="one at a time"):
                model(torch.tensor([[1, 2]]), cache=own)
            found = model(torch.tensor([[1]]), cache=own).logits[0]

    other.forward(TOKENS[:20])
    assert torch.equal(found, other.forward([1]))


def test_states_are_kept_free_of_the_graph_when_gradients_are_on(store_path):
    model, other = shared("mamba2"), stock("mamba2")

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        with session.cache() as own:
            model(torch.tensor([TOKENS[:9]]), cache=own)
            model(torch.tensor([[1]]), cache=own)
        found = session.forward([2])

    for step in (TOKENS[:9], [1]):
        other.forward(step)
    assert torch.equal(found, other.forward([2]))


def fail(_module, _inputs):
    raise ZeroDivisionError
