"""The planner: its geometry against the models' own, its figures against the published ones, and its command."""

import json
import math
import subprocess
import sys
from functools import partial

import pytest

from agentmem.adapters.transformers.encoder import probe_encoder_decoder
from agentmem.adapters.transformers.geometry import derive_spec
from agentmem.cli import main
from agentmem.errors import InvalidInputError, NotFoundError, UnsupportedModelError
from agentmem.planning.claims import check_claims
from agentmem.planning.compute import num_active_weights
from agentmem.planning.geometry import geometry_of, known_models, read_geometry
from agentmem.planning.plan import DECODE_RATE, FLOPS, Verdict, Wanted, make_plan
from agentmem.testing.recipes import RECIPES
from agentmem.tiers.pyramid import LOSSLESS, TierSpec, local_pyramid, micron_pyramid, read_pyramid

PAIRS = ("bart", "t5", "whisper")
STATEFUL = ("bamba", "falcon_h1", "inkling", "jamba", "kimi_linear", "lfm2", "mamba", "mamba2", "qwen3_next", "zaya")
LLAMA = {"model_type": "llama", "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4}
GB = 10**9


# -- geometry


@pytest.mark.parametrize("family", sorted(set(RECIPES) - {"rwkv", *PAIRS}))
def test_a_config_file_tells_what_the_model_itself_keeps(tiny, tmp_path, one_thread, family):
    model = tiny(family)
    model.config.save_pretrained(tmp_path)

    found, spec = read_geometry(str(tmp_path)), derive_spec(model, 16)

    assert found.token_nbytes("fp32") == spec.token_nbytes
    assert found.state_nbytes("fp32") == spec.state_nbytes
    assert [(layer.kind, layer.window) for layer in found.layers] == [(each.kind, each.window) for each in spec.layers]


@pytest.mark.parametrize("family", STATEFUL)
def test_parts_of_a_state_that_stay_fp32_in_a_bf16_model_are_counted_so(tiny, tmp_path, one_thread, family):
    import torch

    model = tiny(family, dtype=torch.bfloat16)
    model.config.save_pretrained(tmp_path)

    found = read_geometry(str(tmp_path / "config.json"))

    assert found.dtype == "bf16"
    assert found.state_nbytes("bf16") == derive_spec(model, 16).state_nbytes
    assert found.state_nbytes("int4") == found.state_nbytes("bf16")


@pytest.mark.parametrize("family", PAIRS)
def test_a_decoder_with_an_encoder_also_tells_what_its_input_takes(tiny, tmp_path, one_thread, family):
    model = tiny(family)
    model.config.save_pretrained(tmp_path)

    found = read_geometry(str(tmp_path))

    spec = derive_spec(model, 16, partial(probe_encoder_decoder, model))
    assert found.token_nbytes("fp32") == spec.token_nbytes
    assert found.source_nbytes("fp32") == spec.token_nbytes


def test_a_model_whose_state_is_not_known_is_refused_by_name(tiny, tmp_path):
    tiny("rwkv").config.save_pretrained(tmp_path)

    with pytest.raises(UnsupportedModelError, match="models of type rwkv"):
        read_geometry(str(tmp_path))


def kinds(**fields):
    return [layer.kind.value for layer in geometry_of({**LLAMA, **fields}, "test").layers]


def test_files_that_list_no_layers_mean_what_transformers_takes_them_for():
    assert kinds(sliding_window=8) == ["sliding"] * 6
    assert kinds(sliding_window=8, use_sliding_window=False) == ["full"] * 6
    assert kinds(sliding_window=8, use_sliding_window=True, max_window_layers=4) == ["full"] * 4 + ["sliding"] * 2
    assert kinds(sliding_window=8, sliding_window_pattern=3) == ["sliding", "sliding", "full"] * 2
    assert kinds(sliding_window=8, sliding_window_pattern="LLG") == ["sliding", "sliding", "full"] * 2
    assert kinds(model_type="gemma2", sliding_window=8) == ["sliding", "full"] * 3
    assert kinds(model_type="gemma3_text", sliding_window=8) == ["sliding"] * 5 + ["full"]
    assert kinds(attention_chunk_size=8) == ["chunked"] * 3 + ["full"] + ["chunked"] * 2
    assert kinds(attention_chunk_size=8, no_rope_layers=[1, 0] * 3) == ["chunked", "full"] * 3


def test_files_of_hybrids_that_list_no_layers_mean_what_transformers_takes_them_for():
    bamba = {"mamba_n_heads": 2, "mamba_d_head": 4, "mamba_d_state": 4, "mamba_d_conv": 4}
    net = {f"linear_{part}": 2 for part in ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim")}
    conv = {"conv_L_cache": 3}

    assert kinds(attn_layer_indices=[1], **bamba) == ["recurrent", "full"] + ["recurrent"] * 4
    assert kinds(attn_layer_period=3, attn_layer_offset=1, **bamba) == ["recurrent", "full", "recurrent"] * 2
    assert kinds(full_attn_idxs=[0, 5], **conv) == ["full"] + ["recurrent"] * 4 + ["full"]
    assert kinds(full_attention_interval=2, **net) == ["recurrent", "full"] * 3
    assert kinds(hybrid_override_pattern="M*-E", **bamba) == ["recurrent", "full", "empty", "empty"]


def test_what_writes_the_text_is_found_inside_of_a_model_that_sees():
    inner = {"num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10_240, "sliding_window": 1024}
    config = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": inner, "vision_config": {}}

    found = geometry_of(config, "gemma-3-4b-it")

    assert found.token_nbytes("bf16") == read_geometry("gemma-3-4b").token_nbytes("bf16")
    assert [layer.kind for layer in found.layers] == [layer.kind for layer in read_geometry("gemma-3-4b").layers]


def test_one_head_of_keys_serves_all_queries_under_multi_query_attention():
    falcon = {"multi_query": True, "num_kv_heads": 4, **LLAMA, "model_type": "falcon"}

    assert geometry_of(falcon, "old").token_nbytes("bf16") == 6 * 2 * 16 * 2
    assert geometry_of({**falcon, "new_decoder_architecture": True}, "new").token_nbytes("bf16") == 6 * 2 * 64 * 2


def test_windows_bound_what_the_next_token_sees_but_not_what_is_stored():
    found = read_geometry("gemma-3-270m")

    assert found.kv_nbytes(10_000, "bf16") == 10_000 * 18 * 2 * 256 * 2
    assert found.seen_nbytes(10_000, "bf16") == (10_000 * 3 + 512 * 15) * 2 * 256 * 2
    assert found.seen_nbytes(100, "bf16") == found.kv_nbytes(100, "bf16")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no num_hidden_layers"),
        ({**LLAMA, "num_hidden_layers": 0}, "describes no layer"),
        ({**LLAMA, "num_attention_heads": None}, "num_attention_heads"),
        ({**LLAMA, "num_attention_heads": "many"}, "no size"),
        ({**LLAMA, "layer_types": ["attention", "dream"]}, "layers of type 'dream'"),
        ({**LLAMA, "ssm_cfg": {"a": 1}}, "what ssm_cfg stands for"),
        ({**LLAMA, "layer_types": ["mamba"]}, "how large the layer states"),
        ({**LLAMA, "hybrid_override_pattern": "M?"}, "layers of type '[?]'"),
    ],
)
def test_a_configuration_that_does_not_say_enough_is_refused_with_what_is_missing(config, message):
    with pytest.raises((InvalidInputError, UnsupportedModelError), match=message):
        geometry_of(config, "test")


def test_a_file_that_is_no_configuration_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")

    with pytest.raises(InvalidInputError, match="holds a list"):
        read_geometry(str(tmp_path))
    with pytest.raises(InvalidInputError, match="no JSON"):
        read_geometry(str(tmp_path / "broken.json"))
    with pytest.raises(NotFoundError, match="smollm2-135m"):
        read_geometry("nobody-knows-me")


# -- published figures


@pytest.mark.parametrize(
    ("model", "num_tokens", "dtype", "nbytes"),
    [
        ("smollm2-135m", 1, "bf16", 23_040),
        ("smollm2-135m", 256, "bf16", 5_898_240),
        ("llama-3.3-70b", 1, "bf16", 327_680),
        ("meta-llama/Llama-3.3-70B", 100_000, "bf16", 32_768_000_000),
        ("llama-3.3-70b", 100_000, "fp8", 16_384_000_000),
        ("llama-3.3-70b", 100_000, "int4", 8_192_000_000),
        ("llama-3.3-70b", 128 * 1024, "bf16", 40 * 2**30),
        ("llama-3.1-405b", 1_000_000, "bf16", 516_096_000_000),
        ("llama-3.1-405b", 1_000_000, "fp8", 258_048_000_000),
        ("llama-3.1-405b", 1_000_000, "fp32", 1_032_192_000_000),
        ("llama-3.1-8b", 65_000, "bf16", 8_519_680_000),
        ("llama-3.1-70b", 65_000, "bf16", 21_299_200_000),
        ("kimi-k2.5", 100_000, "fp8", 3_513_600_000),
        ("deepseek-v3", 1, "bf16", 61 * (512 + 64) * 2),
        ("gemma-3-270m", 1, "bf16", 18 * 2 * 256 * 2),
        ("gpt-oss-20b", 1, "bf16", 24 * 2 * 8 * 64 * 2),
    ],
)
def test_published_models_take_the_published_bytes(model, num_tokens, dtype, nbytes):
    assert read_geometry(model).kv_nbytes(num_tokens, dtype) == nbytes


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama-3.1-8b", 7.0),
        ("llama-3.3-70b", 68.5),
        ("llama-3.1-405b", 401.7),
        ("qwen3-8b", 6.95),
        ("qwen3-32b", 31.2),
        ("deepseek-v3", 36.0),
        ("kimi-k2", 31.0),
        ("gemma-3-4b", 3.21),
    ],
)
def test_the_weights_that_a_token_meets_are_the_published_ones_less_embeddings(model, billions):
    assert num_active_weights(read_geometry(model)) / 1e9 == pytest.approx(billions, rel=0.03)


def test_every_known_model_has_a_size_and_a_prefill():
    plans = [make_plan(read_geometry(name), Wanted(num_tokens=1000), local_pyramid()) for name in known_models()]

    assert len(plans) >= 18
    assert all(plan.token_nbytes > 10_000 and math.isfinite(plan.recompute_s) for plan in plans)


def test_the_figures_of_the_articles_are_checked_and_those_that_are_off_are_named():
    claims = {claim.what: claim for claim in check_claims()}

    assert [what for what, claim in claims.items() if not claim.is_right] == [
        "the formula, for one token of Llama-3.3-70B in bf16",
        "Llama-3.1-405B, 1M tokens",
    ]
    assert claims["Llama-3.3-70B, 100k tokens"].found == 32.768e9
    assert claims["Llama-3.1-405B, 1M tokens"].found == 0.516096e12
    assert "gives 2.06 TB" in claims["Llama-3.1-405B, 1M tokens"].why
    assert "3.90 GB" in claims["Kimi K2.5, 100k tokens in fp8"].why


# -- plans


def plan(model="llama-3.3-70b", pyramid=None, **wanted):
    tokens = {"num_tokens": 100_000, "flops": FLOPS["accelerators"], **wanted}
    return make_plan(read_geometry(model), Wanted(**tokens), pyramid or micron_pyramid())


def test_a_branch_costs_its_own_tokens_where_the_others_are_shared():
    found = plan(num_branches=8, shared=0.9)

    assert found.apart_nbytes == 8 * 32_768_000_000
    assert found.shared_nbytes == 327_680 * (90_000 + 8 * 10_000)
    assert found.coded_nbytes == pytest.approx(found.shared_nbytes / 1.5, abs=1)


def test_layer_states_are_kept_for_every_branch():
    config = {**LLAMA, "model_type": "mamba", "state_size": 16, "conv_kernel": 4, "intermediate_size": 128}
    geometry = geometry_of({**config, "num_attention_heads": None}, "mamba")

    found = make_plan(geometry, Wanted(num_tokens=1000, num_branches=4, shared=1.0), local_pyramid())

    assert found.token_nbytes == 0
    assert found.shared_nbytes == found.apart_nbytes == 4 * 6 * 128 * (4 * 2 + 16 * 4)


def test_moving_a_session_of_70b_takes_what_the_articles_tiers_give():
    found = {tier.name: tier for tier in plan().tiers}

    ranges = [(tier.best_load_s, tier.load_s) for tier in found.values()]
    expected = [(0.00164, 0.0328), (0.0655, 0.328), (0.164, 0.328), (0.164, 1.64), (3.28, 3.28)]
    assert [pytest.approx(pair, rel=0.01) for pair in expected] == ranges
    assert {tier.verdict for tier in found.values()} == {Verdict.LOAD}
    assert (found["near memory"].num_sessions, found["near memory"].best_num_sessions) == (0, 3)
    assert (found["near memory"].fits, found["near memory"].fits_at_best) == (False, True)


def test_an_estimated_prefill_of_70b_takes_eight_seconds_on_eight_accelerators():
    found = plan()

    assert found.recompute_s == pytest.approx(8.6, rel=0.05)
    assert found.break_even == pytest.approx(3.8 * GB, rel=0.05)
    assert found.prefill_basis.startswith("estimated: 2.68e+16 FLOP at 3.2e+15")


@pytest.mark.parametrize(("rate", "break_even"), [(400, 9.2e6), (570, 13.1e6)])
def test_the_break_even_bandwidth_is_bytes_per_token_times_measured_tokens_per_second(rate, break_even):
    found = plan("smollm2-135m", local_pyramid(), prefill_tok_s=float(rate))

    assert found.break_even == pytest.approx(break_even, rel=0.01)
    assert found.prefill_basis == "as given"


def test_a_window_makes_reading_a_long_prompt_cheaper():
    config = {**LLAMA, "intermediate_size": 64}
    wanted = Wanted(num_tokens=100_000)

    full, sliding = (
        make_plan(geometry_of({**config, "sliding_window": window}, "x"), wanted, local_pyramid()).recompute_s
        for window in (None, 100)
    )

    assert full > 100 * sliding


def test_a_tier_is_worth_it_only_where_it_is_faster_than_computing():
    def verdict(bandwidth, max_bandwidth=None, latency_s=0.0):
        tier = TierSpec(
            name="x", capacity_nbytes=1, bandwidth=bandwidth, max_bandwidth=max_bandwidth, latency_s=latency_s
        )
        return plan("smollm2-135m", (tier,), num_tokens=1000, prefill_tok_s=500.0).tiers[0].verdict

    assert verdict(12e6) is Verdict.LOAD
    assert verdict(11e6) is Verdict.RECOMPUTE
    assert verdict(11e6, max_bandwidth=12e6) is Verdict.EITHER
    assert verdict(1e12, latency_s=3.0) is Verdict.RECOMPUTE


def test_a_coding_tier_holds_more_and_has_to_decode():
    raw, coded = (TierSpec(name="x", capacity_nbytes=GB, bandwidth=1e9, codec=codec) for codec in ("raw", LOSSLESS))

    one, other = plan("smollm2-135m", (raw, coded), num_tokens=10_000).tiers

    assert (one.session_nbytes, other.session_nbytes) == (230_400_000, 153_600_000)
    assert other.load_s == pytest.approx(0.1536 + 0.2304e9 / DECODE_RATE)
    assert plan("smollm2-135m", (coded,), num_tokens=10_000, dtype="fp8").tiers[0].session_nbytes == 115_200_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_tokens": 0},
        {"num_branches": 0},
        {"shared": 1.5},
        {"shared": math.nan},
        {"prefill_tok_s": 0.0},
        {"dtype": "x"},
    ],
)
def test_what_cannot_be_planned_is_refused(wrong):
    with pytest.raises(InvalidInputError):
        Wanted(**{"num_tokens": 10, **wrong})


# -- pyramids


def test_the_microns_preset_is_the_articles_table():
    minute, hour, day, year = 60, 3600, 86_400, 365 * 86_400

    found = [
        (tier.capacity_nbytes, tier.max_capacity_nbytes, tier.bandwidth, tier.max_bandwidth, tier.residency_s)
        for tier in micron_pyramid()
    ]

    assert found == [
        (10 * GB, 100 * GB, 1000 * GB, 20_000 * GB, (0.001, 1)),
        (200 * GB, 400 * GB, 100 * GB, 500 * GB, (1, minute)),
        (100 * GB, 3000 * GB, 100 * GB, 200 * GB, (minute, hour)),
        (10_000 * GB, 100_000 * GB, 20 * GB, 200 * GB, (hour, day)),
        (1_000_000 * GB, None, 10 * GB, None, (day, year)),
    ]


def test_the_default_pyramid_has_agentmems_tiers():
    assert [tier.name for tier in local_pyramid()] == ["device", "host", "pool", "disk", "lake"]


def test_tiers_are_read_from_a_file(tmp_path):
    file = tmp_path / "tiers.toml"
    file.write_text("""
        [[tier]]
        name = "device"
        capacity = "80GB"
        max_capacity = "0.5 TiB"
        bandwidth = "3.35 TB/s"
        max_bandwidth = 4e12
        residency = ["20ms", "5m"]

        [[tier]]
        name = "disk"
        capacity = 2_000_000_000_000
        bandwidth = "7GB/s"
        latency = "80us"
        residency = [60, inf]
        codec = "nib"
        note = "NVMe"
    """)

    device, disk = read_pyramid(str(file))

    assert (device.capacity_nbytes, device.max_capacity_nbytes) == (80 * GB, 2**39)
    assert (device.bandwidth, device.max_bandwidth, device.residency_s) == (3.35e12, 4e12, (0.02, 300))
    assert (disk.capacity_nbytes, disk.bandwidth, disk.latency_s) == (2000 * GB, 7e9, pytest.approx(80e-6))
    assert (disk.residency_s, disk.codec, disk.note) == ((60, math.inf), LOSSLESS, "NVMe")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[tier", "no TOML"),
        ("tier = 3", "has no tiers"),
        ("tier = [3]", "is no table"),
        ('[[tier]]\nname = "a"\ncapacity = 1', "has no bandwidth"),
        ('[[tier]]\nname = "a"\ncapacity = 1\nbandwidth = 1\ncolour = "red"', "unknown colour"),
        ('[[tier]]\nname = "a"\ncapacity = "big"\nbandwidth = 1', "'big' has no meaning"),
        ('[[tier]]\nname = "a"\ncapacity = "1.2.3GB"\nbandwidth = 1', "no meaning"),
        ('[[tier]]\nname = "a"\ncapacity = 1\nbandwidth = 0', "has a bandwidth that no tier has"),
        ('[[tier]]\nname = "a"\ncapacity = 1\nbandwidth = 1\nresidency = [2]', "not two times"),
        ('[[tier]]\nname = "a"\ncapacity = 1\nbandwidth = 1\nresidency = [2, 1]', "has a residency"),
        ('[[tier]]\nname = "a"\ncapacity = 1\nbandwidth = 1\ncodec = "zip"', "has a codec"),
        ('[[tier]]\nname = "a"\ncapacity = 2\nmax_capacity = 1\nbandwidth = 1', "has a capacity"),
        ('[[tier]]\nname = "a"\ncapacity = 1\nbandwidth = 1\n' * 2, "two tiers one name"),
    ],
)
def test_a_file_of_tiers_that_makes_no_sense_is_refused(tmp_path, text, message):
    file = tmp_path / "tiers.toml"
    file.write_text(text)

    with pytest.raises(InvalidInputError, match=message):
        read_pyramid(str(file))


def test_a_pyramid_that_is_neither_known_nor_a_file_is_not_found():
    with pytest.raises(NotFoundError, match="local, micron"):
        read_pyramid("nowhere.toml")


# -- the command


def run(capsys, *words):
    code = main(["plan", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_prints_a_plan(capsys):
    model = ("--model", "llama-3.3-70b", "--tokens", "100k", "--dtype", "bf16", "--tiers", "micron")

    code, out, _ = run(capsys, *model, "--branches", "8", "--shared", "90%")

    assert code == 0
    lines = {" ".join(line.split()) for line in out.splitlines()}
    assert "one branch 32.8 GB for 100,000 tokens" in lines
    assert "shared 55.7 GB with 90% of the tokens in common" in lines
    assert "break-even 3.9 GB/s: a tier that is faster beats computing" in lines
    assert "near memory 10.0 GB - 100.0 GB 0 - 3 at best 1.6 ms - 33 ms load" in lines
    assert "network data lake 1.0 PB 30,517 yes 3.3 s load" in lines


def test_the_command_tells_of_windows_states_and_encoders(capsys, tmp_path, tiny):
    for family in ("falcon_h1", "t5"):
        tiny(family).config.save_pretrained(tmp_path / family)

    window = run(capsys, "--model", "gemma-3-27b", "--tokens", "1M")[1]
    state = run(capsys, "--model", str(tmp_path / "falcon_h1"), "--tokens", "10")[1]
    encoder = run(capsys, "--model", str(tmp_path / "t5"), "--tokens", "10")[1]

    assert "by the next token: windows bound their layers" in window
    assert "of it layer states" in state
    assert "for each token of its input" in encoder


def test_the_document_of_a_plan_has_all_its_numbers(capsys):
    code, out, _ = run(capsys, "--model", "smollm2-135m", "--tokens", "4096", "--prefill", "500", "--json")

    document = json.loads(out)
    assert code == 0
    assert document["token_nbytes"] == 23_040
    assert document["break_even"] == pytest.approx(11.52e6)
    assert {tier["verdict"] for tier in document["tiers"]} == {"load"}
    assert document.keys() == {
        *("model", "dtype", "num_tokens", "num_branches", "shared", "token_nbytes", "state_nbytes", "source_nbytes"),
        *("session_nbytes", "seen_nbytes", "apart_nbytes", "shared_nbytes", "coded_nbytes", "prefill_tok_s"),
        *("prefill_basis", "recompute_s", "break_even", "tiers"),
    }


def test_the_command_says_which_figures_are_off(capsys):
    code, out, _ = run(capsys, "--check-claims")
    _, document, _ = run(capsys, "--check-claims", "--json")

    assert code == 0
    assert "OFF  Llama-3.1-405B, 1M tokens\n     said: more than 2 TB\n     is:   516.1 GB" in out
    assert [claim["is_right"] for claim in json.loads(document)["claims"]].count(False) == 2


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--model", "smollm2-135m"], 2, "give --tokens"),
        (["--model", "smollm2-135m", "--tokens", "some"], 2, "no number of tokens"),
        (["--model", "smollm2-135m", "--tokens", "inf"], 2, "no number of tokens"),
        (["--model", "smollm2-135m", "--tokens", "1k", "--shared", "half"], 2, "no part"),
        (["--model", "smollm2-135m", "--tokens", "1k", "--dtype", "fp3"], 2, "dtype 'fp3'"),
        (["--model", "smollm2-135m", "--tokens", "1k", "--flops", "0"], 2, "rates are above 0"),
        (["--model", "gpt-5", "--tokens", "1k"], 4, "no model of that name"),
        (["--tokens", "1k"], 2, "required"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(capsys, words, code, message):
    assert run(capsys, *words)[0] == code
    assert message in run(capsys, *words)[2]


def test_planning_loads_neither_torch_nor_numpy():
    script = (
        "import sys; from agentmem.cli import main; main(['plan', '--model', 'smollm2-135m', '--tokens', '1k']);"
        "print({'torch', 'numpy', 'transformers', 'lmdb'} & sys.modules.keys())"
    )

    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    assert out.splitlines()[-1] == "set()"
