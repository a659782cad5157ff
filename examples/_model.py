"""Loads the model of tree_search.py and says how it samples a line."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from agentmem.testing import models

CACHE = Path(__file__).parent.parent / ".models"
"""Where SmolLM2 is unpacked to, once: 270 MB."""


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer: SmolLM2-135M-Instruct, a tiny random one, or any that transformers loads.

    SmolLM2 computes in float32 here: what is sampled then does not hang on the rounding of bfloat16, which differs with
    the number of branches that are fed together, and the search can be compared with one that feeds them one by one.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if name == "smollm2":
        model, tokenizer = models.smollm2(CACHE)
        return model.float(), tokenizer
    if name != "tiny":
        return models.load(name)
    tokenizer = AutoTokenizer.from_pretrained(models.smollm2_folder(CACHE))
    return models.tiny_model("llama", vocab_size=len(tokenizer)), tokenizer


def line_sampling(tokenizer: PreTrainedTokenizerBase, *, temperature: float, max_new_tokens: int) -> dict[str, Any]:
    """Return the options of `generate` with which a model samples until its line ends."""
    ends = [token for token in range(len(tokenizer)) if "\n" in tokenizer.decode([token])]
    ends += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    shape = {"do_sample": True, "temperature": temperature, "top_p": 0.95, "top_k": 0}
    return {**shape, "max_new_tokens": max_new_tokens, "eos_token_id": ends}
