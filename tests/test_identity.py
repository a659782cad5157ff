"""What blocks may be shared: same tokens under the same model, in any process; nothing else.

Run as a script, this file is a process of its own: `python test_identity.py STORE`.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

import agentmem
from agentmem.adapters.transformers.fingerprint import model_fingerprint
from agentmem.adapters.transformers.geometry import derive_spec
from agentmem.stats import Reason
from agentmem.testing.models import tiny_model

TOKENS = [(13 * index + 1) % 512 for index in range(300)]
NUM_FULL = 300 // 64 * 64


def fingerprint(model, block_size=64):
    return model_fingerprint(model, derive_spec(model, block_size), 1)


def write(path, model, **choices):
    """Store a session "s" of 300 computed tokens; return the logits of its last token."""
    with agentmem.open(path, model=model, config=agentmem.Config(**choices)) as store:
        session = store.create("s")
        logits = session.forward(TOKENS)[-1]
        session.checkpoint()
        return logits


def num_fed_for_the_same_tokens(path, model, **choices):
    """Make a session "t" of the same tokens and compute it; return how many the model was fed."""
    with agentmem.open(path, model=model, config=agentmem.Config(**choices)) as store:
        session = store.create("t")
        session.append(TOKENS)
        logits = session.forward([])
        num_fed = store.stats()["tokens_fed"]
    with torch.no_grad():
        assert torch.allclose(logits, model(torch.tensor([TOKENS])).logits[0, -1:], atol=1e-4)
    return num_fed


def in_a_new_process(path, hash_seed):
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(
        [sys.executable, __file__, str(path)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_process_with_another_hash_seed_finds_every_block(store_path):
    first = in_a_new_process(store_path, 1)
    second = in_a_new_process(store_path, 2)

    assert first["fingerprint"] == second["fingerprint"]
    assert first["hash_of_a_text"] != second["hash_of_a_text"]
    assert first["num_fed"] == {"s": 300}
    assert second["resumed"] == {"reused": 300, "from_tier": {"disk": 300}, "reason": "complete"}
    assert second["num_fed"] == {"t": 300 - NUM_FULL}


def test_a_new_session_feeds_none_of_the_full_blocks_that_another_has_computed(llama, store_path):
    with agentmem.open(store_path, model=llama) as store:
        store.create("a").forward(TOKENS)
        before = store.stats()["tokens_fed"]
        session = store.create("b")
        session.append(TOKENS)
        session.forward([])
        report, after = session.report, store.stats()["tokens_fed"]

    assert after - before == 300 - NUM_FULL
    assert report.num_reused == NUM_FULL
    assert report.num_computed == 300 - NUM_FULL


def test_a_new_session_reuses_what_an_earlier_process_stored(llama, store_path):
    write(store_path, llama)

    assert num_fed_for_the_same_tokens(store_path, llama) == 300 - NUM_FULL


def test_a_prompt_that_is_stored_in_full_needs_one_token_for_its_logits(llama, store_path):
    with agentmem.open(store_path, model=llama) as store:
        expected = store.create("a").forward(TOKENS[:NUM_FULL])[-1:]
        before = store.stats()["tokens_fed"]
        session = store.create("b")
        session.append(TOKENS[:NUM_FULL])
        session.checkpoint()
        logits = session.forward([])
        num_fed = store.stats()["tokens_fed"] - before

    assert torch.allclose(logits, expected, atol=1e-4)
    assert num_fed <= 64  # the last block holds the last token, whose logits nobody stored


def test_two_branches_that_append_the_same_text_compute_it_once(llama, store_path):
    with agentmem.open(store_path, model=llama) as store:
        session = store.create("s")
        session.append(TOKENS[:100])
        plan = session.checkpoint()
        for name in ("a", "b"):
            session.fork(name, at=plan)
            session.append(TOKENS[100:], branch=name)
        first = session.forward([], branch="a")
        before = store.stats()["tokens_fed"]
        second = session.forward([], branch="b")
        num_fed = store.stats()["tokens_fed"] - before

    assert num_fed == 300 - NUM_FULL
    assert torch.allclose(first, second, atol=1e-4)


def test_different_tokens_anywhere_before_a_block_make_another_block(llama, store_path):
    write(store_path, llama)
    changed = [TOKENS[0] + 1, *TOKENS[1:]]

    with agentmem.open(store_path, model=llama) as store:
        session = store.create("t")
        session.append(changed)
        logits = session.forward([])
        num_fed = store.stats()["tokens_fed"]

    with torch.no_grad():
        expected = llama(torch.tensor([changed])).logits[0, -1:]
    assert num_fed == 300
    assert torch.allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize("through_data", [False, True])
def test_one_changed_weight_element_lets_nothing_be_reused_and_everything_be_read(store_path, through_data):
    model = tiny_model("llama")
    write(store_path, model)
    weight = model.model.layers[1].self_attn.v_proj.weight
    if through_data:
        weight.data[3, 5] += 0.5
    else:
        with torch.no_grad():
            weight[3, 5] += 0.5

    with agentmem.open(store_path, model=model) as store:
        session = store.resume("s")
        report, tokens = session.report, session.active.tokens
        logits = session.forward([])
        num_fed = store.stats()["tokens_fed"]
        session.checkpoint("recomputed")
    with agentmem.open(store_path, model=model) as store:
        again = store.resume("s").report
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0, -1:]

    assert (report.reason, report.num_reused, report.first_difference) == (Reason.FOREIGN_MODEL, 0, 0)
    assert tokens == TOKENS
    assert num_fed == 300
    assert torch.allclose(logits, expected, atol=1e-4)
    assert (again.reason, again.num_reused) == (Reason.COMPLETE, 300)


def test_a_session_that_went_through_another_model_is_still_complete_for_its_own(tiny, store_path):
    own, foreign = tiny("llama"), tiny("llama", 1)
    expected = write(store_path, own)
    with agentmem.open(store_path, model=foreign) as store:
        session = store.resume("s")
        session.forward([1])
        session.checkpoint("elsewhere")
        plan = session.checkpoints[0]

    with agentmem.open(store_path, model=own) as store:
        session = store.resume("s")
        tip_report = session.report
        session.fork("back", at=plan)
        session.switch("back")
        report, logits = session.report, session.forward([], branch="back")

    assert tip_report.reason is Reason.FOREIGN_MODEL
    assert (report.reason, report.num_reused) == (Reason.COMPLETE, 300)
    assert torch.allclose(logits[0], expected, atol=1e-4)


def test_a_session_of_a_foreign_model_can_be_saved_closed_and_continued_without_a_word_lost(tiny, store_path):
    write(store_path, tiny("llama"))
    with agentmem.open(store_path, model=tiny("llama", 1)) as store:
        store.resume("s").forward([])  # computed for its logits only: no checkpoint

    with agentmem.open(store_path, model=tiny("llama", 1)) as store:
        session = store.resume("s")

        assert session.active.tokens == TOKENS
        assert session.report.reason is Reason.COMPLETE
        assert session.report.num_reused == 300


def test_tenants_with_different_salts_share_no_block(llama, store_path):
    write(store_path, llama, salt=b"a")

    assert num_fed_for_the_same_tokens(store_path, llama, salt=b"b") == 300


def test_another_block_size_finds_nothing_and_is_right(llama, store_path):
    write(store_path, llama, block_size=64)

    assert num_fed_for_the_same_tokens(store_path, llama, block_size=32) == 300


@pytest.mark.parametrize(
    "choices", [{"num_threads": 1}, {"codec": "raw"}, {"host_budget_nbytes": 0}, {"prefill_chunk_tokens": 100}]
)
def test_choices_that_change_no_kv_do_not_keep_blocks_from_being_found(llama, store_path, choices):
    write(store_path, llama)

    assert num_fed_for_the_same_tokens(store_path, llama, **choices) == 300 - NUM_FULL


def test_another_dtype_is_another_model(store_path):
    models = [tiny_model("llama", dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]

    assert len({fingerprint(model) for model in models}) == 3


def test_what_makes_kv_differ_makes_the_fingerprint_differ():
    def changed(change):
        model = tiny_model("llama")
        change(model)
        return fingerprint(model)

    def set_rope(model):
        model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 20_000.0}

    def set_frequencies(model):
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 1.01

    def set_norm(model):
        model.config.rms_norm_eps = 1e-3

    def set_bit(model):
        model.model.embed_tokens.weight.data.view(torch.int32)[0, 0] ^= 1

    def set_last_layer(model):
        model.model.layers[-1].mlp.down_proj.weight.data[-1, -1] += 1e-3

    def swap(model):
        first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn
        first.k_proj, second.k_proj = second.k_proj, first.k_proj

    own = fingerprint(tiny_model("llama"))
    changes = [set_rope, set_frequencies, set_norm, set_bit, set_last_layer, swap]
    found = [changed(change) for change in changes]

    assert fingerprint(tiny_model("llama")) == own
    assert len({own, *found, fingerprint(tiny_model("llama"), 32)}) == len(changes) + 2


def test_the_kind_of_attention_is_part_of_the_identity():
    sdpa, eager = tiny_model("llama"), tiny_model("llama")
    eager.set_attn_implementation("eager")

    assert fingerprint(sdpa) != fingerprint(eager)


def test_the_name_and_the_place_of_a_model_are_no_part_of_its_identity(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_model("llama")
    own = fingerprint(model)
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()

    assert fingerprint(loaded) == own


def main(path):
    """Resume "s" or make it, make "t" when "s" was there, and print what was fed."""
    from agentmem.testing import models

    model = models.tiny_model("llama")
    with agentmem.open(path, model=model) as store:
        is_second = bool(store.sessions())
        found = {"fingerprint": fingerprint(model).hex(), "hash_of_a_text": hash("agentmem")}
        if is_second:
            report = store.resume("s").report
            found["resumed"] = {
                "reused": report.num_reused,
                "from_tier": report.from_tier,
                "reason": report.reason.value,
            }
        session = store.create("t" if is_second else "s")
        session.append(TOKENS)
        session.forward([])
        found["num_fed"] = {session.name: store.stats()["tokens_fed"]}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
