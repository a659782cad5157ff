"""How long a new process takes from `store.resume` to KV on the device, and to the first logits.

    python benchmarks/resume.py [--quick] [--contexts N ...]

Every resume happens in a process of its own, which has loaded the model and opened the store before. Warm: the file is
in the page cache. Cold: it was dropped from there (posix_fadvise), which mincore confirms. Beside it, in the same
process: `torch.load` of the same KV into a stock cache (warm or cold too), and computing it again.
"""

import ctypes
import mmap
import os
import shutil
import tempfile
from pathlib import Path

import torch
from harness import (
    MB,
    Options,
    Row,
    Times,
    base_store,
    check,
    in_new_process,
    load_model,
    main,
    opened_copy,
    prefill,
    say,
    stock_cache,
)
from transformers import DynamicCache, PreTrainedModel

import agentmem

MIN_SPEEDUP = 40.0
AT_CONTEXT = 4096


def run(options: Options) -> dict[str, object]:
    """Measure every context, warm and cold."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        store = Path(folder) / "store"
        shutil.copytree(base_store(options), store)
        in_new_process(save_for_torch, options, Path(folder))
        rows = [
            measure(store, Path(folder), num_tokens, is_cold, options)
            for num_tokens in options.contexts
            for is_cold in (False, True)
        ]
    return {
        "benchmark": "resume",
        "what": "from store.resume() in a new process",
        "rows": rows,
        "checks": [
            check(
                f"{row['cache']}, {AT_CONTEXT} tokens: times faster than computing",
                row["x compute"],
                MIN_SPEEDUP,
                is_at_least=True,
            )
            for row in rows
            if row["context"] == AT_CONTEXT
        ],
    }


def measure(store: Path, folder: Path, num_tokens: int, is_cold: bool, options: Options) -> Row:
    """Resume one session in several processes; the first one computes its KV too."""
    runs = []
    for number in range(options.repeats(full=3, quick=1)):
        runs.append(in_new_process(resume_once, store, folder, num_tokens, is_cold, options, number == 0))
        say(f"  {num_tokens:,} tokens, {'cold' if is_cold else 'warm'}: ready in {runs[-1]['ready_s'] * 1e3:.0f} ms")
    ready, logits, load = (Times(wall_s=[run[name] for run in runs]) for name in ("ready_s", "logits_s", "load_s"))
    compute_s = runs[0]["compute_s"]
    nbytes = runs[0]["nbytes"]
    return {
        "context": num_tokens,
        "cache": "cold" if is_cold else "warm",
        "resident before": f"{max(run['resident'] for run in runs):.0%}",
        **ready.columns("KV ready ms", 1e3),
        "KV MB/s": nbytes / MB / ready.median,
        "first logits ms": logits.median * 1e3,
        "torch.load ms": load.median * 1e3,
        "compute ms": compute_s * 1e3,
        "x compute": compute_s / ready.median,
        "x torch.load": load.median / ready.median,
    }


def resume_once(
    store_path: Path, folder: Path, num_tokens: int, is_cold: bool, options: Options, with_compute: bool
) -> dict[str, float]:
    """Resume one session, load the same KV with torch, and compute it again if wanted."""
    model, tokenizer = load_model(options)
    data, saved = store_path / "data.mdb", folder / f"{num_tokens}.pt"
    resident = [set_page_cache(path, is_cold) for path in (data, saved)]
    store = agentmem.open(store_path, model=model, tokenizer=tokenizer)
    ready, logits, load, compute = Times(), Times(), Times(), Times()
    with logits.run():
        with ready.run():
            session = store.resume(str(num_tokens))
        found = session.forward()[-1]
    if session.report.num_computed != 1 or session.report.num_tokens != num_tokens:
        raise RuntimeError(f"the session did not come back whole: {session.report}")
    with load.run():
        cache = load_with_torch(model, saved)
    _check_same(session, cache)
    tokens = session.active.tokens
    store.close()
    if with_compute:
        with compute.run():
            _, computed = prefill(model, tokens)
        if int(found.argmax()) != int(computed.argmax()):
            raise RuntimeError("resumed and computed KV give different next tokens")
    return {
        "ready_s": ready.median,
        "logits_s": logits.median,
        "load_s": load.median,
        "compute_s": compute.median if with_compute else 0.0,
        "nbytes": num_tokens * session.adapter.spec.token_nbytes,
        "resident": max(resident),
    }


def save_for_torch(options: Options, folder: Path) -> None:
    """Save every context's KV with torch.save, as people do without agentmem."""
    with opened_copy(options) as store:
        for num_tokens in options.contexts:
            session = store.resume(str(num_tokens))
            layers = stock_cache(session, num_tokens).layers
            with (folder / f"{num_tokens}.pt").open("wb") as file:
                torch.save([(layer.keys, layer.values) for layer in layers], file)
                os.fsync(file.fileno())
            session.close()


def load_with_torch(model: PreTrainedModel, path: Path) -> DynamicCache:
    """Return a stock cache from a file of `save_for_torch`."""
    cache = DynamicCache(config=model.config)
    for index, (keys, values) in enumerate(torch.load(path, weights_only=True)):
        cache.update(keys, values, index)
    return cache


def set_page_cache(path: Path, is_cold: bool) -> float:
    """Drop a file from the page cache, or read it into it; return the share that is in it afterwards."""
    with path.open("rb") as file:
        if is_cold:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while file.read(1 << 24):
                pass
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
            return _resident(view)


def _resident(view: mmap.mmap) -> float:
    num_pages = -(-len(view) // mmap.PAGESIZE)
    pages = (ctypes.c_ubyte * num_pages)()
    start = ctypes.c_char.from_buffer(view)
    status = ctypes.CDLL(None, use_errno=True).mincore(
        ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(view)), pages
    )
    del start  # or the map could not be closed
    if status:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return sum(page & 1 for page in pages) / num_pages


def _check_same(session: object, cache: DynamicCache) -> None:
    for (keys, values), layer in zip(session.ledger.workspace.layers, cache.layers, strict=True):
        num_tokens = layer.keys.shape[2]
        if not torch.equal(keys[:, :, :num_tokens], layer.keys) or not torch.equal(
            values[:, :, :num_tokens], layer.values
        ):
            raise RuntimeError("the store and torch.save hold different KV")


if __name__ == "__main__":
    main(run)
