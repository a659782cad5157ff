"""What `agentmem.open` takes, and where the time goes. Every weight is read: no other model passes for this one.

python benchmarks/open.py [--quick]
"""

import tempfile
from pathlib import Path

from harness import MB, Options, Row, Times, check, load_model, main, time_calls

import agentmem
from agentmem._lmdb import Environment
from agentmem.adapters.transformers.fingerprint import ModelIdentity, model_fingerprint, tokenizer_hashes
from agentmem.adapters.transformers.geometry import derive_spec

MAX_S = 1.0


def run(options: Options) -> dict[str, object]:
    """Time the whole and each part."""
    model, tokenizer = load_model(options)
    num_calls = options.repeats(full=7, quick=3)
    spec = derive_spec(model, 64)
    nbytes = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "store"
        whole = Times()
        for _ in range(num_calls):
            with whole.run():
                store = agentmem.open(path, model=model, tokenizer=tokenizer)
            store.close()
        directory = time_calls(lambda: Environment.open(path).close(), num_calls)
    probe = time_calls(lambda: derive_spec(model, 64), num_calls)
    weights = time_calls(lambda: model_fingerprint(model, spec, agentmem.Config().num_threads), num_calls)
    unchanged = time_calls(ModelIdentity(model, spec, 1).look, 20 * num_calls)
    names = time_calls(lambda: tokenizer_hashes(tokenizer), num_calls)
    rows = [
        row("agentmem.open", whole),
        row("  feed one token, read the geometry", probe),
        row(f"  hash {nbytes / MB:,.0f} MB of weights", weights) | {"GB/s": nbytes / weights.median / 1e9},
        row("  hash tokenizer and template", names),
        row("  (each verb: has the model changed?)", unchanged),
        row("  open and close the directory", directory),
    ]
    return {
        "benchmark": "open",
        "what": f"SmolLM2 bf16, {options.num_threads} threads",
        "rows": rows,
        "checks": [check("agentmem.open, s", whole.median, MAX_S)],
    }


def row(what: str, times: Times) -> Row:
    """Return one line of the table."""
    return {"what": what, **times.columns("ms", 1e3), "CPU ms": times.cpu * 1e3}


if __name__ == "__main__":
    main(run)
