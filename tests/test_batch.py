"""Branches in a batch: the same as each alone, whatever they share, and theirs afterwards.

Models are tiny and fp32: equal within 1e-3 is equal. Unless a test says otherwise, everything that two rows have is
shared, however short.
"""

import contextlib
import random
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.modeling_utils import AttentionInterface

import agentmem
from agentmem.adapters.transformers import cascade
from agentmem.batching import BatchMode
from agentmem.errors import (
    AlreadyExistsError,
    CapacityError,
    ClosedError,
    InvalidInputError,
    NotFoundError,
    UnsupportedModelError,
)
from agentmem.testing.models import families, tiny_model
from agentmem.tiers.frontier import RowStorage

TOLERANCE = 1e-3
CONFIG = agentmem.Config(block_size=16)
ENCODERS = {
    "bart": {"input_ids": torch.tensor([[5, 6, 7, 8]])},
    "t5": {"input_ids": torch.tensor([[5, 6, 7, 8]])},
    "whisper": {"input_features": torch.ones(1, 8, 64)},
}
ONE_BY_ONE = {*ENCODERS, "deepseek_v32", "glm_moe_dsa"}
ROWS = {"deepseek_v3", "mla", "kimi_linear", "gemma2", "gemma3n", "gemma4", "inkling", "mamba", "mamba2", "recurrent"}


@pytest.fixture(autouse=True)
def share_everything(monkeypatch):
    monkeypatch.setattr(cascade, "CPU_SHARED_PRODUCT", 1)


@pytest.fixture
def session(llama, store_path):
    """A session whose active branch has 37 tokens."""
    with agentmem.open(store_path, model=llama, config=CONFIG) as store:
        session = store.create("s")
        session.forward(ids(37))
        yield session


def ids(count, seed=0):
    generator = random.Random(seed)
    return [generator.randrange(1, 490) for _ in range(count)]


def each(names, tokens):
    """Give every branch the same tokens."""
    return {name: list(tokens) for name in names}


def cold(model, tokens):
    """Return the logits `[T, V]` of a run from nothing."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def grow(session):
    """Fork a small tree: two branches share tokens beyond the trunk, one has nothing of its own."""
    session.fork("deep", branch="main")
    session.forward(ids(21, 1), branch="deep")
    for number, parent in enumerate(["main", "main", "deep", "deep"]):
        session.fork(f"leaf{number}", branch=parent)
    session.forward(ids(3, 2), branch="leaf1")
    session.append(ids(6, 3), branch="leaf2")
    return [f"leaf{number}" for number in range(4)]


def is_same(session, name, logits):
    expected = cold(session.adapter.model, session.branch(name).tokens)[-len(logits) :]
    return torch.allclose(logits, expected, atol=TOLERANCE)


# -- the same as each alone


@pytest.mark.parametrize("product", [1, 10**9])
def test_ragged_passes_over_a_tree_give_what_each_branch_gives_alone(session, monkeypatch, product):
    monkeypatch.setattr(cascade, "CPU_SHARED_PRODUCT", product)
    names = grow(session)

    with session.batch(names) as batch:
        for step, sizes in enumerate([(1, 1, 1, 1), (4, 1, 3, 2), (0, 7, 1, 0), (1, 1, 1, 1)]):
            tokens = {name: ids(size, 10 * step + size) for name, size in zip(names, sizes, strict=True) if size}
            found = batch.forward(tokens)

            assert found.keys() == tokens.keys()
            assert all(is_same(session, name, logits) for name, logits in found.items())
        report = batch.report

    assert report.mode is BatchMode.CASCADE
    assert (report.num_shared > 37) == (product == 1)


@pytest.mark.parametrize("family", [name for name in families() if name != "rwkv"])
def test_every_family_gives_the_tokens_of_each_branch_alone(family, store_path):
    model = tiny_model(family)
    start = 21 if family == "dynamic-ntk" else 37
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(ids(start), **ENCODERS.get(family, {}))
        session.forward()
        session.fork("a")
        session.forward(ids(9, 1), branch="a")
        session.fork("b", branch="a")
        session.fork("c", branch="main")
        names = ["a", "b", "c"]
        for name in names:
            session.fork(f"{name} alone", branch=name)

        with session.batch(names) as batch:
            found = batch.forward({"a": ids(3, 2), "b": ids(1, 3), "c": ids(5, 4)})
            sampled = batch.generate(max_new_tokens=5, do_sample=False)
            mode, why = batch.report.mode, batch.report.why

        for number, name in enumerate(names):
            alone = session.forward(ids(len(found[name]), number + 2), branch=f"{name} alone")
            assert torch.allclose(found[name], alone, atol=TOLERANCE)
            expected = session.generate(max_new_tokens=5, do_sample=False, branch=f"{name} alone")
            assert sampled[name].tokens == expected.tokens
            after = session.forward([7, 8], branch=name), session.forward([7, 8], branch=f"{name} alone")
            assert torch.allclose(*after, atol=TOLERANCE)
    assert mode is (
        BatchMode.ONE_BY_ONE if family in ONE_BY_ONE else BatchMode.ROWS if family in ROWS else BatchMode.CASCADE
    )
    assert (why == "") == (mode is BatchMode.CASCADE)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), product=st.sampled_from([1, 60, 10**9]))
def test_random_trees_of_branches_equal_runs_from_nothing(data, product, llama, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(cascade, "CPU_SHARED_PRODUCT", product)
    path = tmp_path_factory.mktemp("random") / "store"
    pick = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731 - a name for a draw
    with agentmem.open(path, model=llama, config=CONFIG) as store:
        session = store.create("s")
        session.forward(ids(pick(1, 40)))
        with session.batch(["main"]) as batch:
            for step in range(pick(3, 9)):
                name = data.draw(st.sampled_from(batch.names))
                action = data.draw(
                    st.sampled_from(["fork", "forward", "forward", "generate", "rewind", "alone", "other"])
                )
                if action == "fork" and len(batch.names) < 6:
                    batch.fork(name, pick(1, 2))
                elif action == "forward":
                    fed = data.draw(st.lists(st.sampled_from(batch.names), unique=True, min_size=1))
                    found = batch.forward({fed_name: ids(pick(0, 6), step) for fed_name in fed})
                    assert all(is_same(session, fed_name, logits) for fed_name, logits in found.items())
                elif action == "generate":
                    batch.generate(max_new_tokens=pick(1, 4), do_sample=False)
                elif action == "rewind":
                    count = min(pick(1, 9), session.branch(name).num_tokens - 1)
                    session.rewind(tokens=count, branch=name)
                elif action == "alone":
                    assert is_same(session, name, session.forward(ids(2, step), branch=name))
                else:
                    session.fork(f"other {step}", branch=name)
                    session.forward(ids(5, step), branch=f"other {step}")
        for name in session.branches:
            assert is_same(session, name, session.forward([3, 4], branch=name))


def test_a_batch_that_outgrows_its_rows_goes_on(session):
    names = grow(session)

    with session.batch(names) as batch:
        for step in range(5):
            found = batch.forward(each(names, ids(30, step)))
        found = batch.forward(each(names, [5]))

    assert all(is_same(session, name, logits) for name, logits in found.items())


def test_branches_with_different_images_go_on_together(store_path):
    inputs = {
        "pixel_values": torch.randn(32, 3 * 2 * 4**2, generator=torch.Generator().manual_seed(1)),
        "image_grid_thw": torch.tensor([[1, 4, 8]]),
    }
    picture = [502, *[500] * 8, 503]
    types = torch.tensor([[int(token == 500) for token in picture]])
    with agentmem.open(store_path, model=tiny_model("qwen2_5_vl"), config=CONFIG) as store:
        session = store.create("s")
        session.forward(ids(20))
        for number, name in enumerate(["a", "b", "c"]):
            session.fork(name, branch="main")
            if name != "c":
                mine = {**inputs, "pixel_values": inputs["pixel_values"] + number, "mm_token_type_ids": types}
                session.append(picture, branch=name, **mine)
            session.fork(f"{name} alone", branch=name)

        with session.batch(["a", "b", "c"]) as batch:
            steps = [ids(2, 1), ids(1, 2), ids(3, 3)]
            found = [batch.forward(each(batch.names, tokens)) for tokens in steps]
            num_passes = batch.report.num_passes

        assert num_passes == 2 + 1 + 2  # the images alone, their text with them
        for tokens, logits in zip(steps, found, strict=True):
            for name in ("a", "b", "c"):
                alone = session.forward(tokens, branch=f"{name} alone")
                assert torch.allclose(logits[name], alone, atol=TOLERANCE)


# -- generation


def test_seeds_give_what_each_branch_samples_alone(session):
    names = grow(session)
    options = {"max_new_tokens": 8, "do_sample": True, "temperature": 1.3, "top_k": 50, "top_p": 0.9}
    for name in names:
        session.fork(f"{name} alone", branch=name)

    with session.batch(names) as batch:
        found = batch.generate(seed=5, per_branch={"leaf3": {"seed": 99}}, **options)

    for name, seed in zip(names, (5, 6, 7, 99), strict=True):
        assert found[name].tokens == session.generate(branch=f"{name} alone", seed=seed, **options).tokens


def test_branches_that_end_early_leave_and_the_others_go_on(session):
    names = grow(session)
    for name in names:
        session.fork(f"{name} alone", branch=name)
    expected = [session.generate(branch=f"{name} alone", max_new_tokens=9, do_sample=False).tokens for name in names]
    seen = []

    with session.batch(names) as batch:
        found = batch.generate(
            max_new_tokens=9,
            do_sample=False,
            per_branch={"leaf0": {"eos_token_id": expected[0][2]}, "leaf1": {"max_new_tokens": 1}},
            on_token=lambda name, token: seen.append((name, token)) or (name == "leaf2" and len(seen) > 8),
        )
        num_rows = batch.report.num_rows

    assert found["leaf0"].tokens == expected[0][: expected[0].index(expected[0][2]) + 1]
    assert found["leaf1"].tokens == expected[1][:1]
    assert 1 < len(found["leaf2"].tokens) < 9
    assert found["leaf3"].tokens == expected[3]
    assert len(seen) == sum(len(result.tokens) for result in found.values())
    assert num_rows < 4
    assert [session.branch(name).num_pending for name in names] == [1, 1, 1, 1]


def test_stop_strings_and_processors_work_per_branch(tiny_chat, store_path):
    model, tokenizer = tiny_chat
    with agentmem.open(store_path, model=model, tokenizer=tokenizer, config=CONFIG) as store:
        session = store.create("s")
        session.append("Once upon a time there was")
        session.fork("a")
        session.fork("b")
        options = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.3}
        text = session.generate(branch="main", **options).text

        with session.batch(["a", "b"]) as batch:
            stops = {"a": {"stop_strings": [text.strip()[4:8]]}}
            found = batch.generate(per_branch=stops, **options)

        assert found["b"].text == text
        assert text.startswith(found["a"].text)
        assert len(found["a"].tokens) < 12


def test_an_interrupt_takes_back_what_was_generated(session):
    names = grow(session)
    before = {name: session.branch(name).tokens for name in names}

    def interrupt(name, token):
        if len(session.branch(name).tokens) > len(before[name]) + 3:
            raise KeyboardInterrupt

    with session.batch(names) as batch:
        with pytest.raises(KeyboardInterrupt):
            batch.generate(max_new_tokens=9, do_sample=False, on_token=interrupt)
        after = {name: session.branch(name).tokens for name in names}
        found = batch.forward(each(names, [5]))

    assert after == before
    assert all(is_same(session, name, logits) for name, logits in found.items())


def test_options_that_a_batch_does_not_know_are_refused_by_name(session):
    session.fork("a")

    with session.batch(["main", "a"]) as batch:
        with pytest.raises(InvalidInputError, match="num_beams"):
            batch.generate(num_beams=2)
        with pytest.raises(InvalidInputError, match="made_up"):
            batch.generate(made_up=2)
        with pytest.raises(NotFoundError, match="nobody"):
            batch.generate(per_branch={"nobody": {"seed": 1}})
        with pytest.raises(InvalidInputError, match=r"session\.batch"):
            session.generate(num_return_sequences=2)


# -- score


def test_scores_are_log_probabilities_and_leave_the_branches_alone(session):
    names = grow(session)
    before = {name: (session.branch(name).tokens, session.branch(name).num_pending) for name in names}
    continuations = {"leaf0": [ids(3, 7), ids(5, 8)], "leaf2": ids(4, 9)}

    with session.batch(names) as batch:
        batch.forward(each(["leaf1", "leaf3"], [5]))
        session.rewind(tokens=1, branch="leaf1")
        session.rewind(tokens=1, branch="leaf3")
        found = batch.score(continuations)

    assert {name: session.branch(name).tokens for name in names} == {
        name: tokens for name, (tokens, _) in before.items()
    }
    assert session.branch("leaf2").num_pending == before["leaf2"][1]
    for name, several in (("leaf0", continuations["leaf0"]), ("leaf2", [continuations["leaf2"]])):
        for score, tokens in zip(found[name], several, strict=True):
            rows = cold(session.adapter.model, [*before[name][0], *tokens])[-len(tokens) - 1 : -1].log_softmax(-1)
            expected = rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(score.logprobs), expected, atol=TOLERANCE)
            assert score.total == pytest.approx(float(expected.sum()), abs=TOLERANCE)
            assert score.mean == pytest.approx(float(expected.mean()), abs=TOLERANCE)


# -- who is in it


def test_branches_fork_join_leave_and_are_dropped_in_a_running_batch(session):
    names = grow(session)

    with session.batch(names[:2]) as batch:
        batch.forward(each(batch.names, [5]))
        children = batch.fork("leaf1", 2)
        named = batch.fork("leaf0", ["mine"])
        batch.join("leaf3")
        batch.drop("leaf0")
        batch.leave("leaf1")
        found = batch.forward({name: [6, 7 + number] for number, name in enumerate(batch.names)})
        with pytest.raises(AlreadyExistsError):
            batch.fork("mine", ["leaf3"])
        batch.join("main")
        with pytest.raises(InvalidInputError, match="active"):
            batch.drop("main")
        batch.leave("main")

    assert children == ["leaf1-1", "leaf1-2"]
    assert list(found) == [*children, *named, "leaf3"]
    assert all(is_same(session, name, logits) for name, logits in found.items())
    assert "leaf0" not in session.branches


def test_members_are_named_and_counted(session):
    session.fork("a")

    with session.batch([session.branch("a"), "main"]) as batch:
        names = batch.names
        with pytest.raises(NotFoundError, match="nobody"):
            batch.forward({"nobody": [1]})
        with pytest.raises(InvalidInputError, match="already"):
            batch.join("a")
        with pytest.raises(InvalidInputError, match="2 branches"):
            batch.forward([[1]])
        both = batch.forward([[1], [2]])
    with pytest.raises(ClosedError):
        batch.forward({"a": [1]})
    with pytest.raises(InvalidInputError, match="at least one"):
        session.batch([])

    assert names == ["a", "main"] == list(both)


# -- theirs afterwards


def test_new_tokens_stay_in_their_rows_without_a_copy(session):
    names = grow(session)

    with session.batch(names) as batch:
        batch.forward(each(names, ids(60)))
        batch.generate(max_new_tokens=3, do_sample=False)
        before = {name: pointer(session, name) for name in names}

    assert {name: pointer(session, name) for name in names} == before
    assert all(isinstance(segment_of(session, name).storage, RowStorage) for name in names)
    assert all(is_same(session, name, session.forward([9], branch=name)) for name in names)


def end(session, name):
    """Return where a branch's last tokens are."""
    return (
        session.entry_of(name).state.cursor.run.segment if hasattr(session, "entry_of") else segment_of(session, name)
    )


def segment_of(session, name):
    """Return where a branch's last tokens are."""
    return session.member(name).state.cursor.run.segment


def pointer(session, name):
    segment = segment_of(session, name)
    return segment.storage.sections[0].data_ptr(), segment.offset


def test_a_few_tokens_do_not_keep_a_large_buffer_alive(session, monkeypatch):
    monkeypatch.setattr(cascade, "CPU_SHARED_PRODUCT", 10**9)
    names = grow(session)

    with session.batch(names) as batch:
        batch.forward(each(names, [5]))

    assert not any(isinstance(segment_of(session, name).storage, RowStorage) for name in names)
    assert all(is_same(session, name, session.forward([9], branch=name)) for name in names)


def test_checkpoints_of_a_batch_come_back_from_disk(llama, store_path):
    with agentmem.open(store_path, model=llama, config=CONFIG) as store:
        session = store.create("s")
        session.forward(ids(37))
        names = grow(session)
        with session.batch(names) as batch:
            batch.forward(each(names, ids(19)))
            batch.generate(max_new_tokens=3, do_sample=False)
            inside = session.checkpoint("inside", branch="leaf0")
            batch.generate(max_new_tokens=3, do_sample=False)
        for name in names:
            session.checkpoint("after", branch=name)
        tokens = {name: session.branch(name).tokens for name in names}

    with agentmem.open(store_path, model=tiny_model("llama"), config=CONFIG) as store:
        session = store.resume("s")
        session.fork("back", at=inside.checkpoint_id.hex())
        logits = {name: session.forward([7], branch=name) for name in [*names, "back"]}
        num_fed = store.stats()["tokens_fed"]

    assert num_fed <= 2 * len(logits)  # the pending token, and the new one
    assert all(session.branch(name).tokens == [*tokens[name], 7] for name in names)
    assert all(
        torch.allclose(rows, cold(llama, [*tokens[name], 7])[-1:], atol=TOLERANCE)
        for name, rows in logits.items()
        if name in tokens
    )


# -- when something goes wrong


def test_a_pass_that_fails_leaves_every_branch_as_it_was(session):
    names = grow(session)
    model = session.adapter.model
    with session.batch(names) as batch:
        batch.forward(each(names, [5]))
        before = {name: (session.branch(name).tokens, session.branch(name).pending) for name in names}
        hook = model.model.layers[2].register_forward_pre_hook(fail)

        with pytest.raises(ArithmeticError, match="layer 2"):
            batch.forward({name: ids(3, number) for number, name in enumerate(names)})
        hook.remove()

        after = {name: (session.branch(name).tokens, session.branch(name).pending) for name in names}
        found = batch.forward(each(names, [6]))

    assert after == before
    assert all(is_same(session, name, logits) for name, logits in found.items())


def fail(*_args):
    raise ArithmeticError("layer 2 broke")


def test_rows_that_do_not_fit_are_refused_and_change_nothing(llama, store_path):
    config = agentmem.Config(block_size=16, device_budget_nbytes=300 * 1024)
    with agentmem.open(store_path, model=llama, config=config) as store:
        session = store.create("s")
        session.forward(ids(100))
        names = [f"b{number}" for number in range(12)]
        for name in names:
            session.fork(name)

        with session.batch(names) as batch, pytest.raises(CapacityError):
            batch.forward(each(names, ids(80)))
        with session.batch(names[:3]) as batch:
            found = batch.forward(each(names[:3], [5]))

        assert all(session.branch(name).num_tokens == 100 for name in names[3:])
        assert all(is_same(session, name, logits) for name, logits in found.items())


def test_the_model_is_left_as_it_was_and_other_threads_run_as_ever(session):
    model = session.adapter.model
    names, before = (
        grow(session),
        (model.config._attn_implementation, session.adapter.look(), dict(AttentionInterface._global_mapping)),
    )
    expected, found = cold(model, ids(9)), []

    def other(*_args):
        if not found:
            found.append(None)
            thread = threading.Thread(target=lambda: found.append((cold(model, ids(9)), session.adapter.look())))
            thread.start()
            thread.join()

    with session.batch(names) as batch:
        batch.forward(each(names, [4]))
        hook = model.model.layers[1].register_forward_pre_hook(other)
        batch.forward(each(names, [5]))
        hook.remove()

    assert torch.equal(found[1][0], expected)
    assert found[1][1] == before[1]
    assert before == (model.config._attn_implementation, session.adapter.look(), AttentionInterface._global_mapping)


def test_a_layer_whose_attention_reads_nothing_is_an_error_and_no_silent_loss(session):
    names = grow(session)
    model = session.adapter.model
    with session.batch(names) as batch:
        batch.forward(each(names, [5]))
        before = {name: session.branch(name).tokens for name in names}
        layer = model.model.layers[1].self_attn
        layer.forward, kept = forgetful(layer), layer.forward
        try:
            with pytest.raises((UnsupportedModelError, agentmem.errors.SpecMismatchError)):
                batch.forward(each(names, [6]))
        finally:
            layer.forward = kept
            with contextlib.suppress(AttributeError):
                del layer.forward

    assert {name: session.branch(name).tokens for name in names} == before


def forgetful(layer):
    """Return the layer's forward with what the cache hands over lost on the way."""
    forward = type(layer).forward

    class Deaf:
        def __init__(self, cache):
            self.cache = cache

        def update(self, keys, values, index, **_kwargs):
            return self.cache.update(keys, values, index, kwargs={})

    def wrapped(hidden_states, **kwargs):
        cache = kwargs.pop("cache")
        return forward(layer, hidden_states, cache=Deaf(cache), **kwargs)

    return wrapped


# -- several sessions


def test_sessions_that_hold_the_same_blocks_share_them_in_one_batch(llama, store_path):
    with agentmem.open(store_path, model=llama, config=CONFIG) as store:
        sessions = [store.create(name) for name in ("one", "two")]
        for number, session in enumerate(sessions):
            session.append(ids(48))
            session.forward(ids(5, number + 1))
            session.fork("other")

        with store.batch([session.branch(name) for session in sessions for name in ("main", "other")]) as batch:
            found = batch.forward({name: ids(2, number) for number, name in enumerate(batch.names)})
            report = batch.report
            forked = batch.fork("two/other", 1)
            again = batch.forward(each(batch.names, [5]))

        assert list(found) == ["one/main", "one/other", "two/main", "two/other"]
        assert forked == ["two/other-1"]
        assert report.num_shared == 48 + 5 + 5
        for logits, names in ((again, [*found, *forked]),):
            for name in names:
                session, branch = name.split("/")
                assert is_same(store.resume(session), branch, logits[name])
