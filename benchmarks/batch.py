"""Branches that decode together, beside a stock batched `DynamicCache` and the same branches one after the other.

    python benchmarks/batch.py [--quick] [--contexts N ...]

SmolLM2 in bf16. Every case is a tree of branches with tokens of their own. All three sides hold the same KV and are fed
the same tokens; they take turns, a few steps each, in one process. Stock: one `DynamicCache` with the whole context of
every branch, as `batch_repeat_interleave` makes it. One by one: `session.forward` on each branch in turn.
Ours: `batch.forward` of `session.batch`, all bookkeeping included. Ratios are of the medians of a step that feeds all
branches a token.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from harness import MB, Options, Row, Times, check, main, opened_copy, read_tokens, say, stock_cache
from transformers import DynamicCache

from agentmem.adapters.transformers import cascade
from agentmem.batch.report import BatchReport
from agentmem.session import Session

NUM_OWN = 64
MIN_BYTES_RATIO = {16: 10.0, 32: 14.0}
MIN_STOCK_RATIO = {16: 5.0, 32: 7.0}
MIN_ALONE_RATIO = {16: 7.0, 32: 10.0}
MIN_SMALL_RATIO = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A tree of branches.

    Attributes:
        trunk: Tokens that all have.
        num_middle: Branches of the trunk that are forked again; 0: none.
        middle: Tokens of each of these.
        num_leaves: Branches that are fed, of each that is forked last.
    """

    trunk: int
    num_leaves: int
    num_middle: int = 0
    middle: int = 0

    @property
    def num_branches(self) -> int:
        """Branches that are fed."""
        return self.num_leaves * max(self.num_middle, 1)

    @property
    def name(self) -> str:
        """What the case is called."""
        middle = f" > {self.num_middle} x {self.middle}" if self.num_middle else ""
        return f"{self.trunk}{middle} > {self.num_leaves}"


CASES = (
    Case(trunk=512, num_leaves=2),
    Case(trunk=512, num_leaves=4),
    Case(trunk=512, num_leaves=16),
    Case(trunk=2048, num_leaves=4),
    Case(trunk=2048, num_leaves=16),
    Case(trunk=4096, num_leaves=16),
    Case(trunk=4096, num_leaves=32),
    Case(trunk=2048, num_leaves=4, num_middle=4, middle=512),
)


def run(options: Options) -> dict[str, object]:
    """Measure every case whose trunk is among the contexts."""
    cases = [case for case in CASES if case.trunk in options.contexts]
    rows = []
    with opened_copy(options) as store:
        for case in cases:
            session = store.resume(str(case.trunk))
            rows.append(measure(session, case, options))
            say(f"{case.name}: {rows[-1]['x stock']:.2f} x stock, {rows[-1]['x one by one']:.2f} x one by one")
    return {
        "benchmark": "batch",
        "what": "a step that feeds every branch a token; medians",
        "rows": rows,
        "checks": [claim for row, case in zip(rows, cases, strict=True) for claim in claims(row, case)],
    }


def claims(row: Row, case: Case) -> list[Row]:
    """Return what is promised of a case, and whether it holds."""
    number, name = case.num_branches, case.name
    if case.trunk == 4096:
        return [
            check(f"{name}: tokens/s, ours / stock", row["x stock"], MIN_STOCK_RATIO[number], is_at_least=True),
            check(
                f"{name}: tokens/s, ours / one by one", row["x one by one"], MIN_ALONE_RATIO[number], is_at_least=True
            ),
            check(f"{name}: KV bytes, stock / ours", row["x bytes"], MIN_BYTES_RATIO[number], is_at_least=True),
        ]
    better = min(row["x stock"], row["x one by one"])
    return [check(f"{name}: tokens/s, ours / the better other", better, MIN_SMALL_RATIO, is_at_least=True)]


def measure(session: Session, case: Case, options: Options) -> Row:
    """Let the three sides take turns at one case."""
    names = grow(session, case)
    num_rounds, num_steps = options.repeats(full=5, quick=2), options.repeats(full=6, quick=3)
    stock_side = stock_batch(session, names)
    stock, ours, alone, flat = Times(), Times(), Times(), Times()
    report = None
    tokens = read_tokens(session.adapter._tokenizer, 4096)  # noqa: SLF001 - any text will do
    for number in range(num_rounds):
        fed = tokens[number * 64 : number * 64 + num_steps]
        step_stock(session, stock_side, len(names), fed, stock)
        report = step_ours(session, names, fed, ours)
        step_alone(session, names, fed[:1], alone)
        if case.num_middle:
            with sharing_from(case.num_leaves * case.middle):
                step_ours(session, names, fed, flat)
        stock_side.crop(-num_steps)
    for name in names:
        session.drop(name)
    if report is None:
        raise RuntimeError("nothing was measured")
    return {
        "tree": case.name,
        "branches": case.num_branches,
        "stock ms": stock.median * 1e3,
        "one by one ms": alone.median * 1e3,
        "ours ms": ours.median * 1e3,
        "trunk alone shared ms": flat.median * 1e3 if flat.wall_s else "",
        "x stock": stock.median / ours.median,
        "x one by one": alone.median / ours.median,
        "CPU x stock": stock.cpu / ours.cpu,
        "CPU x one by one": alone.cpu / ours.cpu,
        "tokens/s": case.num_branches / ours.median,
        "KV MB stock": report.stock_nbytes / MB,
        "KV MB ours": report.kv_nbytes / MB,
        "x bytes": report.stock_nbytes / report.kv_nbytes,
        "shared": report.num_shared,
        "copied": report.num_copied,
    }


@contextlib.contextmanager
def sharing_from(product: int) -> Iterator[None]:
    """Share less than pays: only stretches from (rows - 1) x tokens on."""
    before, cascade.CPU_SHARED_PRODUCT = cascade.CPU_SHARED_PRODUCT, product
    try:
        yield
    finally:
        cascade.CPU_SHARED_PRODUCT = before


def grow(session: Session, case: Case) -> list[str]:
    """Fork the branches of a case and give each tokens of its own; return the names of those that are fed."""
    text = read_tokens(session.adapter._tokenizer, 8000)[::-1]  # noqa: SLF001 - any text will do
    parents = [session.active.name]
    if case.num_middle:
        parents = [f"{case.name} middle {number}" for number in range(case.num_middle)]
        for number, name in enumerate(parents):
            session.fork(name, branch=session.active.name)
            session.forward(text[number * case.middle : (number + 1) * case.middle], branch=name)
    names = []
    for number in range(case.num_branches):
        name = f"{case.name} leaf {number}"
        session.fork(name, branch=parents[number // case.num_leaves])
        names.append(name)
    with session.batch(names) as batch:
        batch.forward({name: text[number * NUM_OWN : (number + 1) * NUM_OWN] for number, name in enumerate(names)})
    return names


def stock_batch(session: Session, names: list[str]) -> DynamicCache:
    """Return a stock cache of all branches, each with a copy of all that it has."""
    caches = []
    for name in names:
        session.switch(name)
        caches.append(stock_cache(session, session.branch(name).num_tokens))
    session.switch("main")
    batch = DynamicCache(config=session.adapter.model.config)
    for index in range(len(caches[0].layers)):
        keys = torch.cat([cache.layers[index].keys for cache in caches])
        values = torch.cat([cache.layers[index].values for cache in caches])
        for cache in caches:
            cache.layers[index].keys = cache.layers[index].values = None
        batch.update(keys, values, index)
    return batch


def step_stock(session: Session, cache: DynamicCache, num_rows: int, tokens: list[int], times: Times) -> None:
    """Feed every row the tokens, one at a time."""
    for token in tokens:
        with times.run(), torch.no_grad():
            session.adapter.model(torch.full((num_rows, 1), token), cache=cache)


def step_ours(session: Session, names: list[str], tokens: list[int], times: Times) -> BatchReport:
    """Feed every branch the tokens in a batch, one at a time, and take them back."""
    with session.batch(names) as batch:
        batch.forward({name: list(tokens[:1]) for name in names})  # rows are made in the first pass
        for token in tokens:
            with times.run():
                batch.forward([[token] for _ in names])
        report = batch.report
    for name in names:
        session.rewind(tokens=len(tokens) + 1, branch=name)
    return report


def step_alone(session: Session, names: list[str], tokens: list[int], times: Times) -> None:
    """Feed the branches the tokens, one branch after the other, and take them back."""
    for token in tokens:
        with times.run():
            for name in names:
                session.forward([token], branch=name)
    for name in names:
        session.rewind(tokens=len(tokens), branch=name)


if __name__ == "__main__":
    main(run)
