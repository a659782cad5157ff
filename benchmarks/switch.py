"""How long `session.switch` takes: between two hot branches, and to a cold one that shares its prefix with the hot one.

    python benchmarks/switch.py [--quick] [--contexts N ...]

Both branches have 64 tokens of their own after the shared context. The cold one is on disk only: its session was just
resumed on the other branch. Beside it: copying a stock cache, and computing the 64 tokens again on one.
"""

import copy

import torch
from harness import MB, Options, Row, Times, check, main, opened_copy, read_tokens, stock_cache, time_calls

from agentmem.session import Session
from agentmem.store import Store

NUM_OWN = 64
MAX_HOT_MS = 1.0


def run(options: Options) -> dict[str, object]:
    """Measure at every context."""
    with opened_copy(options) as store:
        rows = [measure(store, num_tokens, options) for num_tokens in options.contexts]
    return {
        "benchmark": "switch",
        "what": f"to a branch with {NUM_OWN} own tokens",
        "rows": rows,
        "checks": [
            check("slowest median switch between hot branches, ms", max(row["hot ms"] for row in rows), MAX_HOT_MS),
            check(
                "bytes moved to a cold branch / bytes of its own tokens",
                max(row["cold moved MB"] / row["own MB"] for row in rows),
                1.0,
            ),
        ],
    }


def measure(store: Store, num_tokens: int, options: Options) -> Row:
    """Time switches at one context."""
    session = store.resume(str(num_tokens))
    make_branches(session)
    hot, hot_nbytes = switch_to_and_fro(session, options.repeats(full=50, quick=10))
    cache = stock_cache(session, num_tokens)
    deepcopy = time_calls(lambda: copy.deepcopy(cache), options.repeats(full=5, quick=2))
    recompute = time_recompute(session, num_tokens, options.repeats(full=5, quick=2))
    session.close()
    cold, cold_nbytes = switch_to_cold(store, str(num_tokens), options.repeats(full=9, quick=3))
    return {
        "context": num_tokens,
        **hot.columns("hot ms", 1e3),
        "hot moved MB": hot_nbytes / MB,
        **cold.columns("cold ms", 1e3),
        "cold moved MB": cold_nbytes / MB,
        "own MB": NUM_OWN * session.adapter.spec.token_nbytes / MB,
        "whole MB": (num_tokens + NUM_OWN) * session.adapter.spec.token_nbytes / MB,
        "deepcopy ms": deepcopy.median * 1e3,
        "recompute own ms": recompute.median * 1e3,
    }


def make_branches(session: Session) -> None:
    """Make branches "a" and "b" of different own tokens, with their KV durable."""
    tokens = read_tokens(session.adapter._tokenizer, 4 * NUM_OWN)  # noqa: SLF001 - any tokens do
    for number, name in enumerate("ab"):
        session.fork(name, at="main")
        session.switch(name)
        session.append(tokens[(number + 1) * NUM_OWN : (number + 2) * NUM_OWN])
        session.forward()
        session.checkpoint(name)


def switch_to_and_fro(session: Session, num_rounds: int) -> tuple[Times, int]:
    """Time switches between two hot branches; return the most bytes that one of them moved."""
    times, nbytes = Times(), 0
    for number in range(2 * num_rounds):
        with times.run():
            session.switch("ab"[number % 2])
        nbytes = max(nbytes, session.report.moved_nbytes)
    return times, nbytes


def switch_to_cold(store: Store, name: str, num_rounds: int) -> tuple[Times, int]:
    """Time switches to a branch whose own tokens are on disk; return the most bytes that one of them moved."""
    times, nbytes = Times(), 0
    for _ in range(num_rounds):
        session = store.resume(name, branch="a")
        with times.run():
            session.switch("b")
        report = session.report
        if report.from_tier.get("disk") != NUM_OWN or report.num_computed:
            raise RuntimeError(f"branch b was to come from disk: {report}")
        nbytes = max(nbytes, report.moved_nbytes)
        session.close()
    return times, nbytes


def time_recompute(session: Session, num_tokens: int, num_rounds: int) -> Times:
    """Time computing the own tokens again on a stock cache of the prefix."""
    times = Times()
    tokens = torch.tensor([session.active.tokens[-NUM_OWN:]])
    for _ in range(num_rounds):
        cache = stock_cache(session, num_tokens)
        with times.run(), torch.no_grad():
            session.adapter.model(tokens, cache=cache, logits_to_keep=1)
    return times


if __name__ == "__main__":
    main(run)
