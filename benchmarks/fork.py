"""How long `session.fork` takes, beside `copy.deepcopy` of a stock cache: microseconds, the same for any context.

    python benchmarks/fork.py [--quick] [--contexts N ...]

Every fork queues its record: the writer runs meanwhile, as in real use. Three cases: at a checkpoint, at the tip of the
active branch, and where a branch has a token after its tip (which makes an automatic checkpoint).
"""

import copy
import itertools

from harness import Options, Row, Times, check, main, opened_copy, stock_cache, time_calls

from agentmem.session import Session

MAX_US = 20.0
MAX_SPREAD = 1.5


def run(options: Options) -> dict[str, object]:
    """Measure at every context."""
    with opened_copy(options) as store:
        rows = [measure(store.resume(str(num_tokens)), num_tokens, options) for num_tokens in options.contexts]
    medians = [row["at checkpoint us"] for row in rows]
    spread = max(medians) / min(medians)
    return {
        "benchmark": "fork",
        "what": "a new branch; no KV is copied, the record is queued",
        "rows": rows,
        "checks": [
            check("slowest median fork, us", max(medians), MAX_US),
            check("slowest median / fastest median over contexts", spread, MAX_SPREAD),
        ],
    }


def measure(session: Session, num_tokens: int, options: Options) -> Row:
    """Time forks at one context."""
    num_forks = options.repeats(full=500, quick=100)
    trunk = session.active.tip
    names = (f"b{number}" for number in itertools.count())
    at_checkpoint = time_calls(lambda: session.fork(next(names), at=trunk), num_forks)
    at_tip = time_calls(lambda: session.fork(next(names)), num_forks)
    with_tail = Times()
    for _ in range(num_forks // 4):
        session.append([1])
        with with_tail.run():
            session.fork(next(names))
    cache = stock_cache(session, num_tokens)
    deepcopy = time_calls(lambda: copy.deepcopy(cache), options.repeats(full=9, quick=3))
    session.close()
    return {
        "context": num_tokens,
        **at_checkpoint.columns("at checkpoint us", 1e6),
        "at tip us": at_tip.median * 1e6,
        "after its tip us": with_tail.median * 1e6,
        **deepcopy.columns("deepcopy ms", 1e3),
        "times faster": deepcopy.median / at_checkpoint.median,
    }


if __name__ == "__main__":
    main(run)
