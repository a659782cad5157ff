"""What the benchmarks share: the model, real text, stores to start from, timing, tables, a description of the machine.

Knows nothing of what is measured.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import pydoc_data.topics
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

import agentmem
from agentmem.session import Session
from agentmem.store import Store
from agentmem.testing.models import smollm2
from agentmem.tiers.remote import RecordTier

ROOT = Path(__file__).parent.parent
CONTEXTS = (512, 2048, 4096, 8000)
DEFAULT_THREADS = 2
MB = 1e6

T = TypeVar("T")
Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How much to measure.

    Attributes:
        contexts: Tokens of context that a benchmark runs at.
        is_quick: Fewer repeats, for a look.
        folder: Where the stores lie; on the disk that is measured.
        num_threads: Threads that torch computes with.
    """

    contexts: tuple[int, ...]
    is_quick: bool
    folder: Path
    num_threads: int = DEFAULT_THREADS

    def repeats(self, full: int, quick: int) -> int:
        """Return how often to repeat something."""
        return quick if self.is_quick else full


# -- the model and its text


def load_model(options: Options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return SmolLM2-135M in bf16, unpacked once into .models, and compute with the threads that were chosen."""
    torch.set_num_threads(options.num_threads)
    transformers_logging.disable_progress_bar()
    return smollm2(ROOT / ".models")


def read_tokens(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> list[int]:
    """Return the first tokens of real prose and code that every Python brings along: its language reference."""
    text = "\n".join(pydoc_data.topics.topics.values())
    tokens: list[int] = tokenizer(text[: 8 * num_tokens])["input_ids"][:num_tokens]
    if len(tokens) < num_tokens:
        raise ValueError(f"the text has {len(tokens)} tokens; {num_tokens} were asked for")
    return tokens


def prefill(model: PreTrainedModel, tokens: Sequence[int], step: int = 2048) -> tuple[DynamicCache, torch.Tensor]:
    """Compute the KV of `tokens` with transformers alone; return its cache and the last token's logits `[V]`."""
    cache = DynamicCache(config=model.config)
    logits = torch.empty(0)
    with torch.no_grad():
        for first in range(0, len(tokens), step):
            ids = torch.tensor([tokens[first : first + step]], device=model.device)
            logits = model(ids, cache=cache, logits_to_keep=1).logits[0, -1]
    return cache, logits


def stock_cache(session: Session, num_tokens: int) -> DynamicCache:
    """Return a stock cache with a copy of the KV of a hot branch's first `num_tokens` tokens."""
    cache = DynamicCache(config=session.adapter.model.config)
    for index, (keys, values) in enumerate(session.ledger.workspace.layers):
        cache.update(keys[:, :, :num_tokens].clone(), values[:, :, :num_tokens].clone(), index)
    return cache


# -- stores to start from


def base_store(options: Options) -> Path:
    """Return a store with a session for each context, named by its number of tokens, all of them with KV.

    It is made by the first benchmark that asks; the others copy it. A session is prefilled once: longer ones reuse the
    blocks of shorter ones.
    """
    path = options.folder / "base"
    if not path.exists():
        draft = options.folder / "base.draft"
        model, tokenizer = load_model(options)
        say(f"computing {max(options.contexts):,} tokens of KV for the benchmarks to start from ...")
        with agentmem.open(draft, model=model, tokenizer=tokenizer) as store:
            for num_tokens in sorted(options.contexts):
                session = store.create(str(num_tokens))
                session.append(read_tokens(tokenizer, num_tokens))
                session.forward()
                session.checkpoint("trunk")
                session.close()
        draft.rename(path)
    return path


@contextlib.contextmanager
def opened_copy(
    options: Options, config: agentmem.Config | None = None, tiers: Sequence[RecordTier] = ()
) -> Iterator[Store]:
    """Open a copy of the base store with the model; it is removed afterwards."""
    base = base_store(options)
    model, tokenizer = load_model(options)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "store"
        shutil.copytree(base, path)
        with agentmem.open(path, model=model, tokenizer=tokenizer, config=config, tiers=tiers) as store:
            yield store


# -- measuring


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of several runs of one thing: wall time, and CPU time of the whole process."""

    wall_s: list[float] = dataclasses.field(default_factory=list)
    cpu_s: list[float] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Time what happens inside."""
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.process_time() - cpu)

    @property
    def median(self) -> float:
        """The median of the wall times."""
        return statistics.median(self.wall_s)

    @property
    def cpu(self) -> float:
        """The median of the CPU times."""
        return statistics.median(self.cpu_s)

    def columns(self, name: str, scale: float) -> Row:
        """Return median, minimum and maximum of the wall times as columns, in units of 1 / `scale` seconds."""
        return {
            name: self.median * scale,
            f"{name} min": min(self.wall_s) * scale,
            f"{name} max": max(self.wall_s) * scale,
        }


def time_calls(call: Callable[[], object], num_calls: int) -> Times:
    """Time each of several calls."""
    times = Times()
    for _ in range(num_calls):
        with times.run():
            call()
    return times


def check(claim: str, value: float, limit: float, *, is_at_least: bool = False) -> Row:
    """Return one claim and whether it holds; a value may not be above its limit, or not below it."""
    is_met = value >= limit if is_at_least else value <= limit
    return {"claim": claim, "limit": f"{'>=' if is_at_least else '<='} {limit:g}", "measured": value, "is_met": is_met}


def in_new_process(function: Callable[..., T], *args: object) -> T:
    """Call a module's function in a new Python process and return what it returns."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


# -- showing


def say(text: str) -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)


def show(result: dict[str, object]) -> None:
    """Print a benchmark's rows and claims as tables."""
    say(f"\n== {result['benchmark']}: {result.get('what', '')}")
    say(plain_table(result["rows"]))
    if result.get("checks"):
        say(plain_table(result["checks"]))


def plain_table(rows: Sequence[Row]) -> str:
    """Return rows as columns for a terminal."""
    lines = _cells(rows)
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def markdown_table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table."""
    head, *body = _cells(rows)
    rule = ["---:" if body and _is_number(body[0][index]) else "---" for index in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *body])


def machine() -> dict[str, object]:
    """Describe where the numbers come from."""
    cpu_info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in cpu_info.splitlines() if line.startswith("model name")]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    packages = ("torch", "transformers", "numpy", "lmdb", "zstandard", "xxhash")
    return {
        "cpu": names[0] if names else platform.processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "agentmem": f"{agentmem.__version__} ({commit.stdout.strip() or 'no git'})",
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_average": os.getloadavg(),
    }


# -- running one benchmark by itself


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give a command line the options of every benchmark."""
    parser.add_argument("--quick", action="store_true", help="fewer repeats, for a look")
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=list(CONTEXTS), metavar="N", help="tokens of context"
    )
    parser.add_argument(
        "--threads", type=int, default=DEFAULT_THREADS, metavar="N", help="threads that torch computes with"
    )
    parser.add_argument("--folder", type=Path, help="where the stores lie (default: the temporary folder)")


@contextlib.contextmanager
def chosen_options(arguments: argparse.Namespace) -> Iterator[Options]:
    """Turn the command line into options, with a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="agentmem-bench-", dir=arguments.folder) as folder:
        yield Options(
            contexts=tuple(arguments.contexts),
            is_quick=arguments.quick,
            folder=Path(folder),
            num_threads=arguments.threads,
        )


def main(run: Callable[[Options], dict[str, object]]) -> None:
    """Run one benchmark by itself and print its tables, or JSON."""
    doc = sys.modules["__main__"].__doc__
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON after the tables")
    arguments = parser.parse_args()
    with chosen_options(arguments) as options:
        result = run(options)
    show(result)
    if arguments.json:
        print(json.dumps(result, indent=2))


# -- inside


def _cells(rows: Iterable[Row]) -> list[list[str]]:
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [names, *([_text(row.get(name, "")) for name in names] for row in rows)]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
        return f"{value:,.{digits}f}"
    return str(value)


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace(".", "").replace("-", "").isdigit()
