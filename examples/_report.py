"""What tree_search.py measures and prints. Knows nothing of how the search works."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentmem.search import SearchResult

Say = Callable[[str], None]


@dataclass(slots=True)
class Spent:
    """What something took.

    Attributes:
        s: Wall time, in seconds.
        fed: Tokens that the model was fed.
    """

    s: float = 0.0
    fed: int = 0


class Meter:
    """Reads the tokens that a model was fed from whoever feeds it.

    Attributes:
        fed_before_first: Tokens fed before the first one was sampled; None until then.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        """Read what `count` returns: a number that only grows."""
        self._count = count
        self._first = count()
        self.fed_before_first: int | None = None

    @property
    def fed(self) -> int:
        """Tokens fed from the beginning."""
        return self._count() - self._first

    @contextlib.contextmanager
    def spent(self) -> Iterator[Spent]:
        """Measure what the block takes; the numbers are there when it has ended."""
        spent, started, fed = Spent(), time.perf_counter(), self.fed
        try:
            yield spent
        finally:
            spent.s, spent.fed = time.perf_counter() - started, self.fed - fed

    def note_sampling(self, num_branches: int) -> None:
        """Learn that branches are about to be sampled; the last token of each is fed first."""
        if self.fed_before_first is None:
            self.fed_before_first = self.fed + num_branches


def numbers(agent: Any, result: SearchResult, stats: Mapping[str, int | float]) -> dict[str, Any]:
    """Return what a search did, over all its processes, and what its store holds."""
    root = agent.root
    totals = {name: round(value, 3) for name, value in root["totals"].items()}
    return {
        **totals,
        "dropped": result.num_dead,
        "branches": sorted(name for name in agent.session.branches if name.startswith(f"{result.name}/")),
        "best": result.best,
        "score": result.score,
        "items": agent.num_items(result),
        "goal": root["goal"],
        "is_solved": result.is_done,
        "leg": root["leg"],
        "prefill": root["prefill"],
        "fed_before_first": agent.meter.fed_before_first,
        "fed_by_this_process": agent.meter.fed,
        "recomputing_would_feed": totals["context"] + totals["sampled"],
        "stored_nbytes": stats.get("disk_stored_nbytes", 0),
        "file_nbytes": stats.get("file_nbytes", 0),
    }


def print_resumed(say: Say, agent: Any, best: str, opened: Spent, resumed: Spent) -> dict[str, Any]:
    """Say what it took to have the KV of the best branch back, and return that."""
    report, prefill = agent.session.report, agent.root["prefill"]
    say(
        f"resumed branch {best!r}: {report.num_reused:,} of {report.num_tokens:,} tokens are back in "
        f"{resumed.s:.2f} s (opening the store took {opened.s:.2f} s), {resumed.fed} tokens fed;\n"
        f"reading the context took the first process {prefill['s']:.1f} s: {prefill['s'] / resumed.s:.0f} times as long"
    )
    return {"opened_s": opened.s, "resumed_s": resumed.s, "fed": resumed.fed, "num_reused": report.num_reused}


def print_goal(say: Say, agent: Any) -> None:
    """Say what the search is about to do."""
    root, options = agent.root, agent.options
    say(
        f"the context: {root['prefill']['tokens']:,} tokens, read once in {root['prefill']['s']:.1f} s\n"
        f"the goal: a branch with {root['goal']} verified items; at most {root['max_steps']} nodes to expand, "
        f"{options.width} children each\n"
    )


def print_summary(say: Say, ours: Mapping[str, Any], copies: Mapping[str, Any] | None) -> None:
    """Print what was found, and a table of what it took."""
    verdict = "solved" if ours["is_solved"] else "not solved within the steps allowed"
    say(f"{verdict}: {ours['items']} of {ours['goal']} items, score {ours['score']}, on branch {ours['best']!r}")
    say(
        f"{ours['forks']} forks, {ours['rewinds']} rewinds, {ours['dropped']} branches dropped; "
        f"{len(ours['branches'])} kept"
    )
    if ours["leg"] > 1:
        say(f"this process fed {ours['fed_before_first']} token(s), one a branch, before it sampled its first ones\n")
    recomputing = ours["recomputing_would_feed"] + ours["prefill"]["tokens"]
    rate = ours["prefill"]["tokens"] / ours["prefill"]["s"]
    rows = [
        ("tokens fed to the model", _total_fed(ours), _total_fed(copies), f"{recomputing:,}"),
        ("tokens reused", f"{recomputing - ours['fed'] - ours['prefill']['fed']:,}", "", "0"),
        ("KV held at most", _megabytes(ours, "peak_nbytes"), _megabytes(copies, "peak_nbytes"), ""),
        ("KV on disk", _megabytes(ours, "stored_nbytes"), "lost at exit", ""),
        ("file on disk", _megabytes(ours, "file_nbytes"), "", ""),
        ("reading the context", _seconds(ours["prefill"]), _seconds(copies and copies["prefill"]), ""),
        ("the search", _seconds(ours), _seconds(copies), f"about {recomputing / rate:,.0f} s to feed"),
    ]
    table = [("", "agentmem", "deepcopy per branch", "each branch from text"), *rows]
    say(_table(table if copies is not None else [(row[0], row[1], row[3]) for row in table]))
    if copies is not None:
        is_same = copies["branches"] == ours["branches"] and copies["score"] == ours["score"]
        memory, seconds = copies["peak_nbytes"] / ours["peak_nbytes"], copies["s"] / ours["s"]
        say(
            f"\nboth searches made {'the same branches' if is_same else 'DIFFERENT branches'}; deepcopy held "
            f"{memory:.1f} times the KV and took {seconds:.2f} times as long"
        )


def _total_fed(numbers: Mapping[str, Any] | None) -> str:
    return "" if numbers is None else f"{numbers['fed'] + numbers['prefill']['fed']:,}"


def _megabytes(numbers: Mapping[str, Any] | None, name: str) -> str:
    return "" if numbers is None else f"{numbers[name] / 1e6:,.1f} MB"


def _seconds(numbers: Mapping[str, Any] | None) -> str:
    return "" if numbers is None else f"{numbers['s']:.1f} s"


def _table(rows: list[tuple[str, ...]]) -> str:
    """Return rows with their columns under one another, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [f"{row[0]:<{widths[0]}}", *(f"{cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    )
