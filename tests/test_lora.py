"""Adapters are part of a model's identity by content, and the identity follows the model while a store is open.

Run as a script, this file is a process of its own: `python test_lora.py STORE ADAPTER`.
"""

import importlib.metadata
import json
import subprocess
import sys
import threading

import pytest
import torch

import agentmem
from agentmem.adapters.transformers.fingerprint import ModelIdentity, model_fingerprint
from agentmem.adapters.transformers.geometry import derive_spec
from agentmem.errors import InvalidInputError, UnsupportedModelError
from agentmem.reasons import Reason
from agentmem.testing.models import tiny_model

# peft warns of a second adapter and of what some options mean, and asks transformers for something that it renamed.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

TOKENS = [(13 * index + 1) % 512 for index in range(300)]
TARGETS = ["q_proj", "v_proj", "down_proj"]


# -- adapters, as peft makes them


def lora(**options):
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "init_lora_weights": False, **options})


def add(model, name, seed, config=None):
    """Put an adapter with random weights into the model and make it the active one; other adapters stay."""
    from peft.functional import inject_adapter_in_model

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config if config is not None else lora(), model, name)
    model.eval()


def use(model, *names):
    from peft.functional import set_adapter

    set_adapter(model, list(names))


def enable(model, is_enabled):
    for layer in tuner_layers(model):
        layer.enable_adapters(is_enabled)


def tuner_layers(model):
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def with_two_adapters(family="llama", **options):
    """Return a model with the adapters "a" and "b", neither enabled."""
    model = tiny_model(family)
    for seed, name in enumerate("ab"):
        add(model, name, seed, lora(**options))
    enable(model, is_enabled=False)
    return model


def turn_to(model, name):
    """Use the adapter `name`, or none."""
    enable(model, is_enabled=name is not None)
    if name is not None:
        use(model, name)


def fingerprint(model):
    return model_fingerprint(model, derive_spec(model, 64), 1)


def cold_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0, -1:]


def fed(store):
    return store.stats().get("tokens_fed", 0)


def num_fed_by(store, call):
    """Return what `call` returns, and how many tokens the model was fed meanwhile."""
    before = fed(store)
    result = call()
    return result, fed(store) - before


# -- the name of a model with adapters


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True},
        {"lora_bias": True, "target_modules": ["q_proj"], "bias": "none"},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"modules_to_save": ["norm"]},
        {"trainable_token_indices": [1, 2, 3]},
        {"rank_pattern": {"q_proj": 2}},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_an_adapter_that_does_nothing_is_not_there_and_one_at_work_makes_another_model(options):
    from peft.functional import delete_adapter

    model = tiny_model("llama")
    own = fingerprint(model)
    add(model, "a", 0, lora(**options))
    active = fingerprint(model)
    enable(model, is_enabled=False)
    disabled = fingerprint(model)
    enable(model, is_enabled=True)
    again = fingerprint(model)
    delete_adapter(model, "a", prefix="lora_")

    assert disabled == own
    assert active == again != own
    assert fingerprint(model) == own


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("IA3Config", {"feedforward_modules": []}),
        ("LoHaConfig", {}),
        ("LoKrConfig", {}),
        ("OFTConfig", {"oft_block_size": 8, "r": 0}),
        ("VeraConfig", {}),
        ("ShiraConfig", {"r": 2}),
        ("FourierFTConfig", {"n_frequency": 10}),
        ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    ],
)
def test_adapters_of_other_kinds_are_named_by_content_too(kind, options):
    import peft

    def with_adapter(amount, name="default"):
        torch.manual_seed(0)
        config = getattr(peft, kind)(**{"target_modules": ["q_proj", "o_proj"], **options})
        model = peft.get_peft_model(tiny_model("llama"), config, adapter_name=name).eval().get_base_model()
        with torch.no_grad():
            for layer in tuner_layers(model):
                for key, tensor in layer.named_parameters():
                    if not key.startswith("base_layer"):
                        tensor.add_(amount)
        return model

    own, first, second = tiny_model("llama"), with_adapter(0.1), with_adapter(0.2)

    assert len({fingerprint(own), fingerprint(first), fingerprint(second)}) == 3
    assert fingerprint(with_adapter(0.1, "renamed")) == fingerprint(first)
    enable(first, is_enabled=False)
    assert fingerprint(first) == fingerprint(own)


def test_what_an_adapter_is_called_does_not_matter_and_what_it_does_does():
    def made(name, seed=0, **options):
        model = tiny_model("llama")
        add(model, name, seed, lora(**options))
        return fingerprint(model)

    own = made("a")

    assert made("b") == own
    assert made("weight") == own
    others = [made("a", seed=1), made("a", lora_alpha=16), made("a", r=8), made("a", target_modules=["q_proj"])]
    assert len({own, *others}) == 5


def test_an_adapter_that_adds_nothing_is_still_an_adapter():
    model = tiny_model("llama")
    own = fingerprint(model)
    add(model, "a", 0, lora(init_lora_weights=True))

    assert fingerprint(model) != own


def test_adapters_that_are_loaded_and_not_used_do_not_count():
    model = tiny_model("llama")
    add(model, "a", 0)
    alone = fingerprint(model)
    add(model, "b", 1)
    other = fingerprint(model)
    use(model, "a")

    assert fingerprint(model) == alone != other


def test_two_adapters_at_once_are_another_model_in_either_order():
    model = with_two_adapters()
    enable(model, is_enabled=True)
    found = set()
    for names in (("a",), ("b",), ("a", "b"), ("b", "a")):
        use(model, *names)
        found.add(fingerprint(model))

    assert len(found) == 4


def test_a_merged_adapter_is_a_changed_weight():
    from peft import get_peft_model

    def peft_model():
        torch.manual_seed(0)
        return get_peft_model(tiny_model("llama"), lora()).eval()

    merged, unloaded, active = peft_model(), peft_model(), peft_model()
    merged.merge_adapter()
    plain = unloaded.merge_and_unload()

    assert fingerprint(merged.get_base_model()) == fingerprint(plain)
    assert fingerprint(merged.get_base_model()) != fingerprint(active.get_base_model())


def test_an_adapter_saved_and_loaded_again_is_the_same(tmp_path):
    from peft import PeftModel, get_peft_model

    torch.manual_seed(0)
    first = get_peft_model(tiny_model("llama"), lora()).eval()
    first.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    second = PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "adapter", adapter_name="other").eval()

    assert fingerprint(second.get_base_model()) == fingerprint(first.get_base_model())


def test_the_identity_follows_every_change_and_nothing_is_read_without_one(monkeypatch):
    model = with_two_adapters()
    identity = ModelIdentity(model, derive_spec(model, 64), 1)
    own = identity.fingerprint
    reads = []
    monkeypatch.setattr(identity, "_read", lambda read=identity._read: reads.append(1) or read())

    def look(change):
        change()
        return identity.look()

    first = look(lambda: turn_to(model, "a"))
    second = look(lambda: turn_to(model, "b"))
    layer = model.model.layers[1].self_attn.q_proj
    scaled = look(lambda: layer.set_scale("b", 3.0))
    back = look(lambda: layer.set_scale("b", 1.0))
    written = look(lambda: layer.lora_A["b"].weight.data.data_ptr() and add_in_place(layer.lora_A["b"].weight))
    replaced = look(lambda: setattr(layer.lora_B["b"], "weight", torch.nn.Parameter(torch.ones(64, 4))))
    num_reads = len(reads)
    identity.look()

    assert len({own, first, second, scaled, written, replaced}) == 6
    assert back == second
    assert len(reads) == num_reads == 6
    assert identity.fingerprint == fingerprint(model)
    assert look(lambda: turn_to(model, None)) == own


def add_in_place(weight):
    with torch.no_grad():
        weight[0, 0] += 0.5


def test_only_weights_that_may_have_changed_are_read_again(monkeypatch):
    import agentmem.adapters.transformers.fingerprint as module

    model = with_two_adapters()
    identity = ModelIdentity(model, derive_spec(model, 64), 1)
    read = []
    digests = module.content_digests
    monkeypatch.setattr(module, "content_digests", lambda values, n: read.append(len(values)) or digests(values, n))
    turn_to(model, "a")
    identity.look()
    add_in_place(model.model.embed_tokens.weight)
    identity.look()

    assert read[0] == 0  # of the model's own weights, when an adapter is switched on
    assert read[2] == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.model.norm, "weight", torch.nn.Parameter(model.model.norm.weight + 1)),
        lambda model: setattr(model.model.layers[0].mlp, "up_proj", torch.nn.Linear(64, 96, bias=False)),
        lambda model: setattr(model.model.layers[0].mlp.up_proj.weight, "data", torch.ones(96, 64)),
        lambda model: add_in_place(model.lm_head.weight),
        lambda model: model.model.rotary_emb.inv_freq.mul_(1.01),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: add(model, "a", 0),
    ],
    ids=["parameter", "module", "data", "in-place", "buffer", "attention", "adapter"],
)
def test_a_changed_model_is_seen_and_named_as_a_new_one_would_be(change):
    model = tiny_model("llama")
    identity = ModelIdentity(model, derive_spec(model, 64), 1)
    own = identity.look()
    change(model)

    assert identity.look() == fingerprint(model) != own


def test_merging_and_taking_out_adapters_is_seen():
    from peft import get_peft_model

    model = get_peft_model(tiny_model("llama"), lora()).eval()
    base = model.get_base_model()
    identity = ModelIdentity(base, derive_spec(base, 64), 1)
    active = identity.look()
    model.merge_adapter()
    merged = identity.look()
    model.merge_and_unload()
    unloaded = identity.look()

    assert unloaded == merged == fingerprint(base) != active


@pytest.mark.parametrize("convert", [torch.nn.Module.half, torch.nn.Module.double])
def test_a_model_that_is_converted_under_an_open_store_is_refused(store_path, convert):
    model = tiny_model("llama")
    with agentmem.open(store_path, model=model) as store:
        session = store.create("s")
        session.append(TOKENS)
        convert(model)
        with pytest.raises(InvalidInputError, match="close the store"):
            session.forward([])
        model.float()
        session.forward([])

        assert session.active.num_pending == 0


def test_adapters_that_are_merged_and_disabled_are_refused():
    from peft import get_peft_model

    model = get_peft_model(tiny_model("llama"), lora()).eval()
    base = model.get_base_model()
    identity = ModelIdentity(base, derive_spec(base, 64), 1)
    model.merge_adapter()
    enable(model, is_enabled=False)
    with pytest.raises(InvalidInputError, match="unmerge_adapter"):
        identity.look()
    model.unmerge_adapter()

    assert identity.look() == fingerprint(base)


def test_an_adapter_that_drops_out_at_random_is_refused(store_path):
    model = tiny_model("llama")
    add(model, "a", 0, lora(lora_dropout=0.1))
    for layer in tuner_layers(model):
        layer.train()

    with pytest.raises(InvalidInputError, match="training mode"):
        agentmem.open(store_path, model=model)


# -- an open store


def test_switching_an_adapter_on_and_off_finds_the_old_kv_again(store_path):
    model = with_two_adapters()
    with agentmem.open(store_path, model=model) as store:
        session = store.create("s")
        session.forward(TOKENS)
        before = session.forward([])
        turn_to(model, "a")
        (under_a, num_a), report = num_fed_by(store, lambda: session.forward([])), session.report
        cold = cold_logits(model, TOKENS)
        turn_to(model, None)
        (after, num_back), back = num_fed_by(store, lambda: session.forward([])), session.report

    assert num_a == 300
    assert (report.reason, report.num_reused, report.first_difference) == (Reason.FOREIGN_MODEL, 0, 0)
    assert torch.allclose(under_a, cold, atol=1e-4)
    assert not torch.allclose(under_a, before, atol=1e-2)
    assert num_back == 1  # the last token, for its logits
    assert (back.reason, back.num_reused, back.first_difference) == (Reason.COMPLETE, 300, None)
    assert torch.equal(after, before)


@pytest.mark.parametrize("num_tokens", [300, 20])
@pytest.mark.parametrize("family", ["llama", "recurrent", "convolution"])
def test_adapters_in_turns_each_find_their_own_checkpoints(store_path, family, num_tokens):
    targets = {"recurrent": ["in_proj"], "convolution": ["q_proj", "in_proj"]}.get(family, TARGETS)
    model = with_two_adapters(family, target_modules=targets)
    tokens, logits, counts = TOKENS[:num_tokens], [], []
    with agentmem.open(store_path, model=model) as store:
        session = store.create("s")
        session.append(tokens)
        for name in "ababa":
            turn_to(model, name)
            (_, num_saved) = num_fed_by(store, session.checkpoint)
            (last, num), cold = num_fed_by(store, lambda: session.forward([])), cold_logits(model, tokens)
            logits.append(last)
            counts.append(num_saved + num)

            assert torch.allclose(last, cold, atol=1e-4)

    assert counts == [num_tokens, num_tokens, 1, 1, 1]
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[3])
    assert torch.equal(logits[0], logits[4])


def test_less_than_a_block_is_kept_for_each_adapter_without_any_checkpoint(store_path):
    model = with_two_adapters()
    turn_to(model, "a")
    counts = []
    with agentmem.open(store_path, model=model) as store:
        session = store.create("s")
        session.append(TOKENS[:20])
        for name in ("a", "b", None, "a", "b", None):
            turn_to(model, name)
            _, num_fed = num_fed_by(store, lambda: session.forward([]))
            counts.append(num_fed)
        num_checkpoints = len(session.checkpoints)

    assert counts == [20, 20, 20, 1, 1, 1]
    assert num_checkpoints == 3  # going back and forth makes no more of them


def test_what_one_adapter_added_is_fed_to_the_other_and_nothing_else(store_path):
    model = with_two_adapters()
    with agentmem.open(store_path, model=model) as store:
        turn_to(model, "a")
        session = store.create("s")
        session.forward(TOKENS)
        turn_to(model, "b")
        session.forward([1, 2, 3])
        turn_to(model, "a")
        logits, num_fed = num_fed_by(store, lambda: session.forward([]))
        report = session.report
        turn_to(model, "b")
        _, num_again = num_fed_by(store, lambda: session.forward([]))

        assert session.active.tokens == [*TOKENS, 1, 2, 3]
    assert num_fed == 3
    assert (report.num_reused, report.reason, report.first_difference) == (300, Reason.FOREIGN_MODEL, 300)
    assert num_again == 1
    turn_to(model, "a")
    assert torch.allclose(logits, cold_logits(model, [*TOKENS, 1, 2, 3]), atol=1e-4)


def test_forks_made_before_a_switch_keep_their_tokens_and_their_handles(store_path):
    model = with_two_adapters()
    with agentmem.open(store_path, model=model) as store:
        turn_to(model, "a")
        session = store.create("s")
        session.forward(TOKENS)
        plan = session.checkpoint("plan")
        main, other = session.active, session.fork("other", at=plan)
        other.forward([7, 8, 9])
        turn_to(model, "b")
        logits = {branch.name: branch.forward([]) for branch in (main, other)}
        num_b = fed(store)
        turn_to(model, "a")
        _, num_back = num_fed_by(store, lambda: [branch.forward([]) for branch in (main, other)])
        late = session.fork("late", at=plan)
        _, num_late = num_fed_by(store, lambda: late.forward([]))

        assert (main.tokens, other.tokens) == (TOKENS, [*TOKENS, 7, 8, 9])
        assert session.branch("other").tokens == other.tokens
    turn_to(model, "b")
    assert torch.allclose(logits["main"], cold_logits(model, TOKENS), atol=1e-4)
    assert torch.allclose(logits["other"], cold_logits(model, [*TOKENS, 7, 8, 9]), atol=1e-4)
    assert num_b == 303 + 300 + 47  # under "b" too the fork finds its parent's blocks
    assert (num_back, num_late) == (2, 1)


def test_all_open_sessions_follow_a_switch(store_path):
    model = with_two_adapters()
    with agentmem.open(store_path, model=model) as store:
        turn_to(model, "a")
        first, second = store.create("first"), store.create("second")
        first.forward(TOKENS)
        second.forward(TOKENS[::-1])
        turn_to(model, "b")
        first.forward([])
        turn_to(model, "a")
        _, num_first = num_fed_by(store, lambda: first.forward([]))
        _, num_second = num_fed_by(store, lambda: second.forward([]))
        turn_to(model, "b")
        logits, num_new = num_fed_by(store, lambda: second.forward([]))

    assert (num_first, num_second, num_new) == (1, 1, 300)
    assert torch.allclose(logits, cold_logits(model, TOKENS[::-1]), atol=1e-4)


def test_one_adapter_s_kv_is_not_found_by_another_in_a_new_session(store_path):
    model = with_two_adapters()
    counts = []
    with agentmem.open(store_path, model=model) as store:
        for index, name in enumerate(["a", "b", "a", None, "b", None]):
            turn_to(model, name)
            session = store.create(f"s{index}")
            session.append(TOKENS)
            logits, num = num_fed_by(store, lambda session=session: session.forward([]))
            counts.append(num)

            assert torch.allclose(logits, cold_logits(model, TOKENS), atol=1e-4)

    assert counts == [300, 300, 44, 300, 44, 300 - 256]


def test_a_weight_of_an_adapter_changed_in_place_makes_its_kv_foreign(store_path):
    model = with_two_adapters()
    turn_to(model, "a")
    with agentmem.open(store_path, model=model) as store:
        session = store.create("s")
        session.forward(TOKENS)
        add_in_place(model.model.layers[2].self_attn.v_proj.lora_B["a"].weight)
        logits, num_fed = num_fed_by(store, lambda: session.forward([]))
        reason = session.report.reason

    assert (num_fed, reason) == (300, Reason.FOREIGN_MODEL)
    assert torch.allclose(logits, cold_logits(model, TOKENS), atol=1e-4)


def test_a_weight_of_the_model_changed_in_place_makes_its_kv_foreign(store_path):
    model = tiny_model("llama")
    weight = model.model.layers[1].self_attn.v_proj.weight
    with agentmem.open(store_path, model=model) as store:
        session = store.create("s")
        session.forward(TOKENS)
        before = session.forward([])
        kept = weight.detach().clone()
        add_in_place(weight)
        changed, num_fed = num_fed_by(store, lambda: session.forward([]))
        expected = cold_logits(model, TOKENS)
        with torch.no_grad():
            weight.copy_(kept)
        after, num_back = num_fed_by(store, lambda: session.forward([]))

    assert (num_fed, num_back) == (300, 1)
    assert torch.allclose(changed, expected, atol=1e-4)
    assert torch.equal(after, before)


def test_a_peft_model_is_served_through_its_base_model_merged_or_not(store_path):
    from peft import get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(tiny_model("llama"), lora()).eval()
    with agentmem.open(store_path, model=model) as store:
        session = store.create("s")
        session.append(TOKENS)
        active = session.forward([])
        expected = cold_logits(model, TOKENS)
        with model.disable_adapter():
            off, expected_off = session.forward([]), cold_logits(model, TOKENS)
        model.merge_adapter()
        (merged, num_merged), expected_merged = (
            num_fed_by(store, lambda: session.forward([])),
            cold_logits(model, TOKENS),
        )
        with session.cache() as cache, torch.no_grad():
            stepped = model(torch.tensor([[5]]), cache=cache).logits[0, -1:]

        assert session.active.tokens == [*TOKENS, 5]
    assert num_merged == 300
    for found, cold in ((active, expected), (off, expected_off), (merged, expected_merged)):
        assert torch.allclose(found, cold, atol=1e-4)
    assert torch.allclose(stepped, cold_logits(model, [*TOKENS, 5]), atol=1e-4)


def test_a_peft_model_that_feeds_virtual_tokens_is_refused(store_path):
    from peft import PrefixTuningConfig, get_peft_model

    model = get_peft_model(tiny_model("llama"), PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")).eval()

    with pytest.raises(UnsupportedModelError, match="PREFIX_TUNING"):
        agentmem.open(store_path, model=model)


def test_transformers_own_methods_switch_adapters(store_path, monkeypatch):
    import transformers.integrations.peft as integration

    # transformers asks for a peft that is newer than any that was published when this was written; its methods work.
    monkeypatch.setattr(integration, "MIN_PEFT_VERSION", importlib.metadata.version("peft"))
    model = tiny_model("llama")
    counts = []
    with agentmem.open(store_path, model=model) as store:
        session = store.create("s")
        session.append(TOKENS)
        changes = [
            lambda: None,
            lambda: model.add_adapter(lora(), "a"),
            lambda: model.add_adapter(lora(), "b"),
            lambda: model.set_adapter("a"),
            model.disable_adapters,
            model.enable_adapters,
            lambda: model.delete_adapter("b"),
            lambda: model.delete_adapter("a"),
        ]
        for change in changes:
            change()
            model.eval()
            logits, num = num_fed_by(store, lambda: session.forward([]))
            counts.append(num)

            assert torch.allclose(logits, cold_logits(model, TOKENS), atol=1e-4)

    assert counts == [300, 300, 300, 1, 1, 1, 1, 1]


def test_a_change_inside_of_a_cache_block_stops_other_verbs_until_the_block_is_left(store_path):
    model = with_two_adapters()
    turn_to(model, "a")
    with agentmem.open(store_path, model=model) as store:
        session, other = store.create("s"), store.create("other")
        session.forward(TOKENS)
        session.fork("side")
        with session.cache():
            turn_to(model, "b")
            for verb in (lambda: session.forward([1], branch="side"), lambda: other.append([1])):
                with pytest.raises(InvalidInputError, match="leave that block first"):
                    verb()
        logits = session.forward([])

        assert other.active.tokens == []
    assert torch.allclose(logits, cold_logits(model, TOKENS), atol=1e-4)


def test_following_a_model_that_is_interrupted_is_finished_by_the_next_verb(store_path, monkeypatch):
    import agentmem.entries as module

    model = with_two_adapters()
    turn_to(model, "a")
    with agentmem.open(store_path, model=model) as store:
        first, second = store.create("first"), store.create("second")
        for session in (first, second):
            session.forward(TOKENS)
            session.fork("side")
        restore, calls = module.restore_entry, []

        def interrupted(*args):
            calls.append(args)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return restore(*args)

        turn_to(model, "b")
        monkeypatch.setattr(module, "restore_entry", interrupted)
        with pytest.raises(KeyboardInterrupt):
            first.forward([])
        late = second.fork("late")
        logits = [branch.forward([]) for branch in (first.active, first.branch("side"), second.active, late)]

    assert all(torch.allclose(each, cold_logits(model, TOKENS), atol=1e-4) for each in logits)


def test_sessions_in_two_threads_follow_one_model(store_path):
    model = with_two_adapters()
    errors = []
    with agentmem.open(store_path, model=model) as store:
        sessions = [store.create(name) for name in ("first", "second")]
        for session in sessions:
            session.forward(TOKENS)
        turn_to(model, "a")

        def work(session):
            try:
                for token in range(20):
                    session.forward([token])
                    session.fork(f"fork-{token}")
            except Exception as error:  # noqa: BLE001  # shown by the assertion below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(session,)) for session in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

        assert errors == []
        assert not any(thread.is_alive() for thread in threads)
        assert [session.active.num_tokens for session in sessions] == [320, 320]
        assert torch.allclose(sessions[0].forward([]), cold_logits(model, [*TOKENS, *range(20)]), atol=1e-4)


def test_a_session_written_under_one_adapter_is_found_again_by_a_process_that_uses_it(store_path):
    first = in_a_new_process(store_path, "a")
    other = in_a_new_process(store_path, "b")
    again = in_a_new_process(store_path, "a")

    assert first["num_fed"] == 300
    assert (other["reason"], other["num_reused"], other["num_fed"]) == ("foreign-model", 0, 300)
    assert (again["reason"], again["num_reused"], again["num_fed"]) == ("complete", 300, 1)
    assert again["tokens"] == other["tokens"] == TOKENS
    assert again["fingerprint"] == first["fingerprint"] != other["fingerprint"]
    assert again["logits"] == first["logits"]


def in_a_new_process(path, name):
    done = subprocess.run([sys.executable, __file__, str(path), name], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def main(path, name):
    """Resume "s", or make it, under the adapter `name`; print what was reused and what was fed."""
    model = with_two_adapters()
    turn_to(model, name)
    with agentmem.open(path, model=model) as store:
        is_new = not store.sessions()
        session = store.create("s") if is_new else store.resume("s")
        report = session.report
        if is_new:
            session.append(TOKENS)
            session.forward([])
        num_before = fed(store) if is_new else 0
        last = session.forward([])
        found = {
            "fingerprint": fingerprint(model).hex(),
            "tokens": session.active.tokens,
            "num_fed": num_before or fed(store),
            "num_reused": report.num_reused,
            "reason": report.reason.value,
            "logits": [float(value).hex() for value in last[0, :8]],
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
