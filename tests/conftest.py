"""Fixtures that every test may use: seeds, tiny models of every family, the real SmolLM2, a directory for a store.

torch and transformers are imported only by the fixtures that need them, so that a test of the metadata plane starts
at once.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
MODELS = ROOT / ".models"
CPUS = len(os.sched_getaffinity(0))

# Before torch is imported, here and in the processes that tests start: no test may reach the network, and the workers
# of pytest-xdist share the cores.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["OMP_NUM_THREADS"] = str(max(1, min(2, CPUS // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that need a GPU where there is none; the count is printed as deselected."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if item not in on_gpu]


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Start every test from the same random state."""
    random.seed(0)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(0)
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small matrices gain nothing from a second thread, and lose much when the cores are shared."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    """A path where a store may be made."""
    return tmp_path / "store.agentmem"


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """Make `tiny_model(family, seed=0, ...)` once per set of arguments. The models are shared: do not change them."""
    from functools import cache

    from agentmem.testing.models import tiny_model

    return cache(tiny_model)


@pytest.fixture(scope="session")
def llama(tiny: Callable[..., Any]) -> Any:
    """A tiny random Llama with grouped-query attention, fp32."""
    return tiny("llama")


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """The real SmolLM2-135M-Instruct in bf16, and its tokenizer; unpacked once into `.models/`."""
    from agentmem.testing import models

    return models.smollm2(MODELS)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tokenizer of SmolLM2, without its model."""
    from transformers import AutoTokenizer

    from agentmem.testing import models

    return AutoTokenizer.from_pretrained(models.smollm2_folder(MODELS))


@pytest.fixture(scope="session")
def tiny_chat(tiny: Callable[..., Any], tokenizer: Any) -> tuple[Any, Any]:
    """A tiny random Llama that speaks the tokens of SmolLM2, and that tokenizer: real text at no cost."""
    return tiny("llama", vocab_size=len(tokenizer)), tokenizer
