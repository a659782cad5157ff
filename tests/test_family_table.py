"""Every model family, forked, rewound, interleaved and resumed: as a cold run, and for how many tokens.

The table that these tests make is printed in docs/families.md; with AGENTMEM_WRITE_DOCS=1 they write it anew.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import agentmem
from agentmem.errors import UnsupportedModelError
from agentmem.testing.models import tiny_model

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
TOLERANCE = 1e-3
SYSTEM, PROMPT, OWN = 64, 100, 5
MAX_REFUSED = 3

COLUMNS = ("prompt", "tip", "siblings", "earlier", "rewind", "resume", "sibling grown")
FAMILIES = {
    "Llama": "llama",
    "Qwen3": "qwen3",
    "Mistral (window 16)": "mistral",
    "Gemma 2": "gemma2",
    "Gemma 3": "gemma3",
    "Gemma 3n (shared KV)": "gemma3n",
    "Gemma 4": "gemma4",
    "Llama 4 (chunked)": "llama4",
    "Phi-3 (longrope, beyond 64)": "phi3",
    "Llama (dynamic NTK, within 64)": "dynamic-ntk",
    "DeepSeek-V3 (MLA)": "deepseek_v3",
    "DeepSeek-V3.2 (MLA, indexer)": "deepseek_v32",
    "GLM MoE DSA (indexer)": "glm_moe_dsa",
    "Qwen3-MoE": "qwen3_moe",
    "GPT-OSS (sinks)": "gpt_oss",
    "Qwen3-Next (gated delta net)": "qwen3_next",
    "Qwen3.5 (gated delta net)": "qwen3_5",
    "Jamba (Mamba, attention)": "jamba",
    "Bamba (Mamba-2, attention)": "bamba",
    "Mamba": "mamba",
    "Mamba-2": "mamba2",
    "LFM2 (short convolution)": "lfm2",
    "Falcon-H1": "falcon_h1",
    "Granite 4 (hybrid)": "granitemoehybrid",
    "RWKV": "rwkv",
    "Qwen2.5-VL (M-RoPE, an image)": "qwen2_5_vl",
    "Qwen3-VL (M-RoPE, an image)": "qwen3_vl",
    "Whisper (encoder-decoder)": "whisper",
    "T5 (encoder-decoder)": "t5",
    "BART (encoder-decoder)": "bart",
}
ROWS: dict[str, list[str]] = {}


@dataclass
class Trial:
    """One family on its way through the scenarios.

    Attributes:
        model: A model object; replaced by a fresh one of the same weights at each restart.
        stock: Another, that agentmem never sees.
        inputs: What the model takes beside tokens, appended with `lead`.
        lead: Token ids that come first, with `inputs`.
        ids: Token ids to draw from.
        sizes: Tokens of the first message, of the whole prompt, of what a sibling grows by.
        worst: The largest difference to a cold run so far.
    """

    family: str
    path: Path
    model: torch.nn.Module
    stock: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    lead: list[int]
    ids: list[int]
    sizes: tuple[int, int, int]
    worst: float = 0.0
    row: list[str] = field(default_factory=list)

    def cold(self, tokens: list[int]) -> torch.Tensor:
        """Return the last logits of a run from nothing, on a model object that agentmem never sees."""
        return cold_logits(self.stock, tokens, self.inputs, len(self.lead))

    def check(self, branch: agentmem.Branch, tokens: list[int]) -> int:
        """Feed tokens to a branch and compare with a cold run; return how many tokens the model was fed."""
        logits = branch.forward(tokens)[-1]
        self.worst = max(self.worst, float((logits - self.cold(branch.tokens)).abs().max()))
        return branch.report.num_computed

    def draw(self, start: int, count: int) -> list[int]:
        """Return token ids that no other call with another start gave."""
        return [self.ids[(start + index) % len(self.ids)] for index in range(count)]


def cold_logits(model, tokens, inputs, num_lead):
    ids = torch.tensor([tokens])
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            return model(**inputs, decoder_input_ids=ids).logits[0, -1]
        kinds = {}
        if "mm_token_type_ids" in inputs:
            padded = torch.zeros_like(ids)
            padded[:, :num_lead] = inputs["mm_token_type_ids"]
            kinds["mm_token_type_ids"] = padded
        return model(input_ids=ids, **{**inputs, **kinds}).logits[0, -1]


def image_inputs(model):
    """Return tokens with an image among them, and the image, as the model's processor would make them."""
    config, tower = model.config, model.config.vision_config
    grid = torch.tensor([[1, 4, 4]])
    merged = 16 // tower.spatial_merge_size**2
    patch = 3 * tower.temporal_patch_size * tower.patch_size**2
    lead = [11, 12, config.vision_start_token_id, *[config.image_token_id] * merged, config.vision_end_token_id, 13]
    kinds = torch.tensor([[int(token == config.image_token_id) for token in lead]])
    pixels = torch.randn(16, patch, generator=torch.Generator().manual_seed(3))
    return lead, {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}


def encoder_inputs(model):
    """Return the decoder's first token, and what the encoder reads."""
    generator = torch.Generator().manual_seed(3)
    start = model.config.decoder_start_token_id
    if model.main_input_name == "input_features":
        shape = (1, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        return [start], {"input_features": torch.randn(shape, generator=generator)}
    return [start], {"input_ids": torch.randint(3, 500, (1, 9), generator=generator)}


def new_trial(family: str, path: Path) -> Trial:
    model = tiny_model(family)
    lead, inputs = [], {}
    if model.config.is_encoder_decoder:
        lead, inputs = encoder_inputs(model)
    elif hasattr(model.config, "vision_config"):
        lead, inputs = image_inputs(model)
    ids = torch.randint(20, 490, (400,), generator=torch.Generator().manual_seed(1)).tolist()
    sizes = (20, 40, 15) if family == "dynamic-ntk" else (SYSTEM, PROMPT, 70)
    return Trial(family, path, model, tiny_model(family), inputs, lead, ids, sizes)


def in_one_process(trial: Trial) -> None:
    system, prompt, _ = trial.sizes
    with agentmem.open(trial.path, model=trial.model) as store:
        session = store.create("s")
        session.append(trial.lead, **trial.inputs)
        session.append(trial.draw(0, system - len(trial.lead)))
        session.append(trial.draw(system, prompt - system))
        point = session.checkpoint("prompt")
        trial.row.append(f"{session.report.num_computed}")
        trial.row.append(f"{trial.check(session.fork('tip', at=point), trial.draw(110, OWN))}")
        siblings = [session.fork(name, at=point) for name in ("x", "y")]
        fed = [0, 0]
        for step in range(OWN):
            for number, branch in enumerate(siblings):
                fed[number] += trial.check(branch, trial.draw(120 + 20 * number + step, 1))
        trial.row.append(" + ".join(map(str, fed)))
        early = session.fork("early", at=point)
        early.rewind(tokens=prompt // 5)
        trial.row.append(f"{trial.check(early, trial.draw(160, OWN))}")
        siblings[0].rewind(point)
        trial.row.append(f"{trial.check(siblings[0], trial.draw(170, OWN))}")
        session.switch("x")


def resumed(trial: Trial, work: Callable[[agentmem.Session], None]) -> None:
    trial.model = tiny_model(trial.family)
    with agentmem.open(trial.path, model=trial.model) as store:
        work(store.resume("s", branch="x"))


def in_three_more(trial: Trial) -> None:
    _, _, growth = trial.sizes
    resumed(trial, lambda session: trial.row.append(f"{trial.check(session.active, trial.draw(180, 3))}"))
    resumed(trial, lambda session: session.branch("y").forward(trial.draw(200, growth)))
    resumed(trial, lambda session: trial.row.append(f"{trial.check(session.active, trial.draw(190, 3))}"))


@pytest.mark.parametrize("label", FAMILIES)
def test_every_family_equals_a_cold_run_or_is_refused_before_any_answer(label, tmp_path):
    trial = new_trial(FAMILIES[label], tmp_path / "store")
    try:
        in_one_process(trial)
    except UnsupportedModelError as error:
        ROWS[label] = ["refused at `open`: " + re.split(r"[;.] ", str(error))[0]]
        assert not trial.row, "a model is refused before any answer, or never"
        return
    in_three_more(trial)
    ROWS[label] = trial.row

    assert trial.worst < TOLERANCE


def test_the_table_in_the_docs_is_the_one_that_the_tests_make():
    assert ROWS.keys() == FAMILIES.keys(), "run the whole file: the table is made by its tests"
    table = render()
    text = PAGE.read_text()
    if os.environ.get("AGENTMEM_WRITE_DOCS"):
        PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table}{END}", text, flags=re.DOTALL))
        return

    assert text.split(BEGIN)[1].split(END)[0].strip() == table.strip()
    assert sum(len(row) == 1 for row in ROWS.values()) <= MAX_REFUSED


def render() -> str:
    lines = [f"| configuration | {' | '.join(COLUMNS)} |", f"|---|{'--:|' * len(COLUMNS)}"]
    for label, row in ROWS.items():
        cells = row if len(row) > 1 else [*row, *[""] * (len(COLUMNS) - 1)]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
