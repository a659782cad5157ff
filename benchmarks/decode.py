"""Time per decoded token through a branch's cache, beside a stock `DynamicCache`.

    python benchmarks/decode.py [--quick] [--contexts N ...]

Both caches hold the same KV and are fed the same tokens in turn, in one process (stock, ours, ours, stock, ...); the
logits must be equal bit for bit. Ours saves sealed blocks in the background meanwhile, as it does by default. The ratio
is the median over steps of ours / stock in the same step, which other work on the machine moves least.
"""

import statistics

import torch
from harness import Options, Row, Times, check, main, opened_copy, stock_cache
from transformers import Cache, PreTrainedModel

from agentmem.session import Session

MAX_RATIO = 1.0
FROM_CONTEXT = 2048


def run(options: Options) -> dict[str, object]:
    """Measure at every context."""
    with opened_copy(options) as store:
        rows = [measure(store.resume(str(num_tokens)), num_tokens, options) for num_tokens in options.contexts]
    return {
        "benchmark": "decode",
        "what": "one token, batch 1, median; logits bit-identical",
        "rows": rows,
        "checks": [
            check(f"ours / stock at {row['context']:,} tokens", row["ratio"], MAX_RATIO)
            for row in rows
            if row["context"] >= FROM_CONTEXT
        ],
    }


def measure(session: Session, num_tokens: int, options: Options) -> Row:
    """Decode a number of tokens with both caches in turn."""
    model = session.adapter.model
    stock, ours = Times(), Times()
    stock_side = stock_cache(session, num_tokens)
    token = session.active.tokens[-1]
    with session.cache() as our_side:
        for number in range(options.repeats(full=96, quick=16)):
            sides = [(stock, stock_side), (ours, our_side)]
            if number % 2:
                sides.reverse()
            first, second = (step(model, cache, token, times) for times, cache in sides)
            if not torch.equal(first, second):
                raise RuntimeError(f"logits differ at step {number} of {num_tokens:,} tokens")
            token = int(first.argmax())
    session.close()
    return {
        "context": num_tokens,
        **stock.columns("stock ms", 1e3),
        **ours.columns("ours ms", 1e3),
        "ratio": median_ratio(ours.wall_s, stock.wall_s),
        "ratio of medians": ours.median / stock.median,
        "ratio of CPU time": median_ratio(ours.cpu_s, stock.cpu_s),
    }


def median_ratio(ours: list[float], stock: list[float]) -> float:
    """Return the median over steps of ours / stock."""
    return statistics.median(mine / theirs for mine, theirs in zip(ours, stock, strict=True))


def step(model: PreTrainedModel, cache: Cache, token: int, times: Times) -> torch.Tensor:
    """Feed one token and return its logits `[V]`."""
    ids = torch.tensor([[token]])
    with times.run(), torch.no_grad():
        logits: torch.Tensor = model(ids, cache=cache).logits[0, -1]
    return logits


if __name__ == "__main__":
    main(run)
