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
from agentmem.errors import UnsupportedModelError
from agentmem.reasons import Reason
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


def test_a_store_written_in_one_dtype_is_read_in_another_token_by_token_and_found_again_in_its_own(store_path):
    own, other = (tiny_model("llama", dtype=dtype) for dtype in (torch.bfloat16, torch.float16))
    with agentmem.open(store_path, model=own) as store:
        session = store.create("s")
        session.forward(TOKENS)
        before = session.forward([])
        session.checkpoint()

    with agentmem.open(store_path, model=other) as store:
        session = store.resume("s")
        report, tokens = session.report, session.active.tokens
        logits, num_fed = session.forward([]), store.stats()["tokens_fed"]
        session.checkpoint()
    with agentmem.open(store_path, model=own) as store:
        session = store.resume("s")
        back = session.report
        after, num_back = session.forward([]), store.stats()["tokens_fed"]
    with torch.no_grad():
        expected = other(torch.tensor([TOKENS])).logits[0, -1:]

    assert (report.reason, report.num_reused, report.first_difference) == (Reason.FOREIGN_MODEL, 0, 0)
    assert tokens == TOKENS
    assert num_fed == 300
    assert logits.dtype is torch.float16
    assert torch.allclose(logits, expected, atol=0.05)
    assert (back.reason, back.num_reused, back.from_tier) == (Reason.COMPLETE, 300, {"disk": 300})
    assert num_back == 1
    assert torch.equal(after, before)


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


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("is_persistent", [True, False])
def test_quantised_weights_in_any_dtype_are_named_by_content(dtype, is_persistent):
    def quantised(value):
        model = tiny_model("llama")
        layer = model.model.layers[1].mlp.up_proj
        layer.register_parameter("scales", torch.nn.Parameter(torch.ones(8)))
        layer.register_buffer("packed", torch.ones(64, 64).to(dtype), persistent=is_persistent)
        layer.packed[5, 7] = torch.tensor(value).to(dtype)
        return fingerprint(model)

    assert quantised(1) == quantised(1)
    assert quantised(1) != quantised(0)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_weights_that_a_layer_packs_away_are_named_by_what_it_saves():
    from torch.ao.quantization import quantize_dynamic

    def quantised(change=0.0):
        model = tiny_model("llama")
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 5] += change
        return quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

    own, again, other = quantised(), quantised(), quantised(change=0.2)
    rescaled = quantised()
    layer = rescaled.model.layers[1].mlp.up_proj
    weight, bias = layer._weight_bias()
    layer.set_weight_bias(
        torch._make_per_tensor_quantized_tensor(weight.int_repr(), weight.q_scale() * 1.01, weight.q_zero_point()), bias
    )

    assert "up_proj" not in str([name for name, _ in own.named_parameters()])
    assert fingerprint(own) == fingerprint(again)
    assert len({fingerprint(own), fingerprint(other), fingerprint(rescaled), fingerprint(tiny_model("llama"))}) == 4


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_layer_whose_packed_weights_nobody_can_read_is_refused(store_path):
    from torch.ao.nn.quantized.dynamic import Linear

    model = tiny_model("llama")
    packed = Linear(64, 96)._packed_params._packed_params
    model.model.layers[0].mlp.secret = packed

    with pytest.raises(UnsupportedModelError, match=r"mlp\.secret"):
        agentmem.open(store_path, model=model)


def test_tensors_within_a_tensor_are_named_by_content():
    from torch.testing._internal.two_tensor import TwoTensor  # what torchao and quanto make is such a tensor

    def wrapped(value):
        model = tiny_model("llama")
        model.model.layers[0].mlp.register_buffer("pair", TwoTensor(torch.ones(4, 4), torch.full((4, 4), value)))
        return fingerprint(model)

    assert wrapped(1.0) == wrapped(1.0)
    assert wrapped(1.0) != wrapped(2.0)


def test_what_a_quantiser_keeps_beside_the_parameters_is_named_by_content():
    class Packed:
        def __init__(self, value):
            self.storage = [torch.full((4, 4), value)]
            self.name = "not a tensor"

    def quantised(value, quantiser="any"):
        model = tiny_model("llama")
        model.hf_quantizer = quantiser
        model.model.layers[0].mlp.experts = Packed(value)
        return fingerprint(model)

    assert quantised(1.0) == quantised(1.0)
    assert quantised(1.0) != quantised(2.0)
    assert quantised(1.0, None) == quantised(2.0, None)  # what other models keep so is no weight


def test_a_model_whose_weights_are_elsewhere_is_refused():
    model = tiny_model("llama")
    spec = derive_spec(model, 64)
    model.model.layers[3].mlp.to("meta")

    with pytest.raises(UnsupportedModelError, match="offloaded"):
        model_fingerprint(model, spec, 1)


def test_frequencies_that_grew_with_a_long_text_are_no_part_of_the_identity():
    model = tiny_model("dynamic-ntk")
    own = fingerprint(model)
    with torch.no_grad():
        model(torch.zeros(1, model.config.max_position_embeddings + 8, dtype=torch.long))

    assert not torch.equal(model.model.rotary_emb.inv_freq, model.model.rotary_emb.original_inv_freq)
    assert model_fingerprint(model, derive_spec(tiny_model("dynamic-ntk"), 64), 1) == own


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
