"""For a machine with a GPU, within six minutes: fork, switch, offload, load, resume, decode, batches; then tests.

    python benchmarks/gpu.py [--quick] [--contexts N ...] [--layers N]

The model is a Llama of Llama-3-8B's geometry (8 KV heads of 128, 128 KB of KV a token at 32 layers) with random weights
in bf16, so that nothing has to be fetched. Without CUDA it says so, runs the same steps with a small model on the CPU,
so that the script itself is tested, and claims nothing.
"""

import argparse
import contextlib
import copy
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from decode import median_ratio
from harness import (
    CONTEXTS,
    MB,
    Options,
    Row,
    Times,
    add_options,
    check,
    chosen_options,
    machine,
    prefill,
    say,
    show,
    stock_cache,
    time_calls,
)
from transformers import AutoConfig, AutoModelForCausalLM, Cache, PreTrainedModel

import agentmem
from agentmem.session import Session
from agentmem.store import Store

NUM_OWN = 64
MAX_ROWS = 16
GPU_CONTEXTS = (2048, 4096, 8192, 32_768)
TEST_TIMEOUT_S = 120
VOCAB_SIZE = 32_000


def main() -> int:
    """Measure everything and run the tests; return 1 when a step fails or a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--layers", type=int, default=32, help="layers of the model (32: 16 GB of weights)")
    parser.add_argument("--json", action="store_true", help="print JSON after the tables")
    arguments = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    say(json.dumps(machine(), indent=2))
    if not has_gpu:
        say("There is no CUDA device: a small model runs the steps on the CPU, and the numbers say nothing of a GPU.")
    with chosen_options(arguments) as options:
        result = run(options, has_gpu=has_gpu, num_layers=arguments.layers)
    show(result)
    if arguments.json:
        print(json.dumps(result, indent=2))
    is_tested = run_tests(has_gpu=has_gpu)
    return int(not is_tested or not all(claim["is_met"] for claim in result["checks"]))


def run(options: Options, *, has_gpu: bool, num_layers: int) -> dict[str, object]:
    """Measure every context."""
    torch.set_num_threads(options.num_threads)
    started = time.perf_counter()
    model = make_model(num_layers) if has_gpu else make_small_model()
    say(f"model ready after {time.perf_counter() - started:.0f} s")
    contexts = (256, 1024)
    if has_gpu:
        contexts = GPU_CONTEXTS if options.contexts == CONTEXTS else options.contexts
    path = options.folder / "gpu"
    rows = []
    for num_tokens in contexts:
        tokens = torch.randint(
            1, VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens)
        ).tolist()
        rows.append({"context": num_tokens, **measure(path, model, tokens, options)})
        say(f"{num_tokens:,} tokens done after {time.perf_counter() - started:.0f} s")
    checks = []
    if has_gpu:
        checks = [
            check("slowest median fork, us", max(row["fork us"] for row in rows), 20.0),
            check("slowest median switch between hot branches, ms", max(row["switch ms"] for row in rows), 1.0),
            *(
                check(f"decode, ours / stock at {row['context']:,}", row["decode ratio"], 1.0)
                for row in rows
                if row["context"] >= 2048
            ),
        ]
    return {
        "benchmark": "gpu",
        "what": torch.cuda.get_device_name() if has_gpu else "no CUDA device: CPU, small model",
        "rows": rows,
        "checks": checks,
    }


def make_model(num_layers: int) -> PreTrainedModel:
    """Return a random Llama of 8B geometry on the GPU."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=65_536,
    )
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def make_small_model() -> PreTrainedModel:
    """Return a random Llama that a CPU runs in milliseconds."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=16_384,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def measure(path: Path, model: PreTrainedModel, tokens: list[int], options: Options) -> Row:
    """Run every step at one context, in a session of its own."""
    name = f"{len(tokens)}"
    with agentmem.open(path, model=model) as store:
        session = store.create(name)
        compute = Times()
        with compute.run():
            session.append(tokens)
            session.forward()
            synchronize()
        save = Times()
        with save.run():
            session.checkpoint("trunk")
        forks = fork_often(session, options.repeats(full=300, quick=50))
        switches = switch_to_and_fro(session, options.repeats(full=50, quick=10))
        decode = decode_side_by_side(session, len(tokens), options.repeats(full=32, quick=8))
        batch = batch_side_by_side(session, len(tokens), options.repeats(full=12, quick=4))
        cache = stock_cache(session, len(tokens))
        deepcopy = time_calls(lambda: (copy.deepcopy(cache), synchronize()), options.repeats(full=5, quick=2))
        down, up = offload_and_load(store, session, options.repeats(full=5, quick=2))
        link_down, link_up = link(len(tokens) * session.adapter.spec.token_nbytes, options.repeats(full=5, quick=2))
        session.close()
    nbytes = len(tokens) * session.adapter.spec.token_nbytes
    return {
        "KV MB": nbytes / MB,
        "fork us": forks.median * 1e6,
        "deepcopy ms": deepcopy.median * 1e3,
        "switch ms": switches.median * 1e3,
        **decode,
        **batch,
        "offload GB/s": nbytes / down.median / 1e9,
        "load from host GB/s": nbytes / up.median / 1e9,
        "link down GB/s": nbytes / link_down.median / 1e9,
        "link up GB/s": nbytes / link_up.median / 1e9,
        "compute ms": compute.median * 1e3,
        "checkpoint ms": save.median * 1e3,
        **resume(path, model, name, nbytes),
    }


def fork_often(session: Session, num_forks: int) -> Times:
    """Time forks at a checkpoint."""
    trunk, numbers = session.active.tip, itertools.count()
    return time_calls(lambda: session.fork(f"fork-{next(numbers)}", at=trunk), num_forks)


def switch_to_and_fro(session: Session, num_rounds: int) -> Times:
    """Time switches between two hot branches with own tokens."""
    for name in "ab":
        session.fork(name, at="main")
        session.switch(name)
        session.append([ord(name)] * NUM_OWN)
        session.forward()
    times = Times()
    for number in range(2 * num_rounds):
        synchronize()
        with times.run():
            session.switch("ab"[number % 2])
            synchronize()
    session.switch("main")
    return times


def decode_side_by_side(session: Session, num_tokens: int, num_steps: int) -> Row:
    """Feed the same tokens to a branch's cache and to a stock one in turn; their logits must be equal."""
    stock, ours = Times(), Times()
    stock_side = stock_cache(session, num_tokens)
    token = session.active.tokens[-1]
    with session.cache() as our_side:
        for number in range(num_steps):
            sides = [(stock, stock_side), (ours, our_side)]
            if number % 2:
                sides.reverse()
            logits = [step(session.adapter.model, cache, token, times) for times, cache in sides]
            if not torch.equal(*logits):
                raise RuntimeError(f"logits differ at step {number}")
            token = int(logits[0].argmax())
    session.rewind(tokens=num_steps)
    return {
        "stock decode ms": stock.median * 1e3,
        "our decode ms": ours.median * 1e3,
        "decode ratio": median_ratio(ours.wall_s, stock.wall_s),
    }


def batch_side_by_side(session: Session, num_tokens: int, num_steps: int) -> Row:
    """Feed as many branches of the context as have room a token each: in a batch, in a stock cache, one by one."""
    num_rows = rows_that_fit(num_tokens * session.adapter.spec.token_nbytes)
    if num_rows < 2:
        return {"batch rows": num_rows}
    names = [f"row {number}" for number in range(num_rows)]
    for name in names:
        session.fork(name, branch="main")
    stock_side = stock_cache(session, num_tokens)
    stock_side.batch_repeat_interleave(num_rows)
    stock, ours, alone = Times(), Times(), Times()
    with session.batch(names) as batch:
        batch.forward({name: [number + 1] for number, name in enumerate(names)})
        for number in range(num_steps):
            ids = torch.full((num_rows, 1), number + 1, device=session.adapter.device)
            with stock.run(), torch.no_grad():
                session.adapter.model(ids, cache=stock_side)
                synchronize()
            with ours.run():
                batch.forward([[number + 1] for _ in names])
                synchronize()
        report = batch.report
    with alone.run():
        for name in names:
            session.forward([1], branch=name)
        synchronize()
    for name in names:
        session.drop(name)
    return {
        "batch rows": num_rows,
        "batch mode": report.mode.value,
        "batch ms": ours.median * 1e3,
        "batch x stock": stock.median / ours.median,
        "batch x one by one": alone.median / ours.median,
        "batch x bytes": report.stock_nbytes / report.kv_nbytes,
    }


def rows_that_fit(nbytes: int) -> int:
    """Return for how many branches of a context a stock cache has room: a copy each, and one layer's twice."""
    if not torch.cuda.is_available():
        return 4
    free_nbytes, _ = torch.cuda.mem_get_info()
    return min(MAX_ROWS, int(0.8 * free_nbytes / nbytes))


def step(model: PreTrainedModel, cache: Cache, token: int, times: Times) -> torch.Tensor:
    """Feed one token and wait for its logits `[V]`."""
    ids = torch.tensor([[token]], device=model.device)
    with times.run(), torch.no_grad():
        logits: torch.Tensor = model(ids, cache=cache).logits[0, -1]
        synchronize()
    return logits


def offload_and_load(store: Store, session: Session, num_rounds: int) -> tuple[Times, Times]:
    """Time the way from the device to the host tier (pinned memory on CUDA) and back, for the whole context."""
    state = session.ledger.states.state_of(session.resolve("main").checkpoint_id)
    blocks, host = state.saved_blocks(), store._runtime.blocks.host  # noqa: SLF001 - the tier has no public door
    out = session.ledger.workspace.slots(0, blocks[-1].stop)
    down, up = Times(), Times()
    for _ in range(num_rounds):
        host.clear()
        with down.run():
            store._runtime.blocks.demote(blocks, session.ledger.workspace, state.cursor)  # noqa: SLF001 - as above
            synchronize()
        with up.run():
            for block in blocks:
                host.load(block.digest, [section[:, :, block.start : block.stop] for section in out])
            synchronize()
    return down, up


def link(nbytes: int, num_rounds: int) -> tuple[Times, Times]:
    """Time what offload and load could reach: one copy of as many bytes, pinned memory, a stream of its own."""
    has_gpu = torch.cuda.is_available()
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=has_gpu)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda" if has_gpu else "cpu")
    down, up = Times(), Times()
    with torch.cuda.stream(torch.cuda.Stream()) if has_gpu else contextlib.nullcontext():
        for _ in range(num_rounds):
            with down.run():
                host.copy_(device, non_blocking=True)
                synchronize()
            with up.run():
                device.copy_(host, non_blocking=True)
                synchronize()
    return down, up


def resume(path: Path, model: PreTrainedModel, name: str, nbytes: int) -> Row:
    """Open the store again and time the way from disk to the device, and to the first logits; compute it again too."""
    with agentmem.open(path, model=model) as store:
        ready, logits, compute = Times(), Times(), Times()
        with logits.run():
            with ready.run():
                session = store.resume(name, branch="main")
                synchronize()
            session.forward()
            synchronize()
        if session.report.from_tier.get("device", 0) + 1 < session.report.num_tokens:
            raise RuntimeError(f"the session did not come back whole: {session.report}")
        with compute.run():
            prefill(model, session.active.tokens)
            synchronize()
    return {
        "resume ms": ready.median * 1e3,
        "resume GB/s": nbytes / ready.median / 1e9,
        "first logits ms": logits.median * 1e3,
        "recompute ms": compute.median * 1e3,
        "x recompute": compute.median / ready.median,
    }


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_tests(*, has_gpu: bool) -> bool:
    """Run the tests that need a GPU; without one there is nothing to run."""
    if not has_gpu:
        say("\npytest -m gpu: skipped, there is no CUDA device")
        return True
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(command, check=False, timeout=TEST_TIMEOUT_S).returncode == 0


if __name__ == "__main__":
    raise SystemExit(main())
