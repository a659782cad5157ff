"""What the agent of tree_search.py does on a branch: write one more item, line by line, until a verifier is content.

The three functions that `agentmem.search` asks for are here: `expand`, `score`, `is_done`. What they know of a branch
is in its extras, so that a stored session is a stored search.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from _report import Meter, Say, Spent
from _tasks import Task

from agentmem.search import SearchResult

TOTALS = ("forks", "rewinds", "context", "sampled", "fed", "s", "peak_nbytes")


class Agent:
    """Writes items on branches of an `agentmem.Session`, or of a `CopySession`, which has the same verbs."""

    def __init__(
        self,
        session: Any,
        root: Any,
        task: Task,
        options: argparse.Namespace,
        meter: Meter,
        held: Callable[[], float],
        say: Say,
    ) -> None:
        """Work in `session`; the branch `root` reads the context, and its extras keep what the agent did."""
        self.session = session
        self.task = task
        self.options = options
        self.meter = meter
        self.held = held
        self.say = say
        self.branch = root
        self.root: dict[str, Any] = root.extras

    # -- what agentmem.search asks for

    def expand(self, branch: Any, seed: int) -> None:
        """Write one item on a fork of a node; note in its extras what became of it."""
        self.count("forks", 1)
        self.count("context", branch.num_tokens)
        before = [*branch.extras.get("items", []), *self._items_beside(branch)]
        lines, problem, num_rewinds = self._write_item(branch, seed, before)
        item = short(" ".join(lead.strip() + line.strip() for lead, line in zip(self.task.leads, lines, strict=False)))
        branch.extras.update(problem=problem, rewinds=branch.extras.get("rewinds", 0) + num_rewinds, message=item)
        if not problem:
            branch.extras["items"] = [*branch.extras.get("items", []), lines]
        self._tell(branch, item)

    def score(self, branch: Any) -> float:
        """Return the number of items, minus a tenth for each rewind; nothing is to be had from a dead end."""
        if branch.extras.get("problem"):
            return float("-inf")
        return round(self.num_items(branch) - 0.1 * branch.extras.get("rewinds", 0), 2)

    def is_done(self, branch: Any) -> bool:
        """Say whether a branch has as many items as were asked for."""
        return bool(self.num_items(branch) >= self.root["goal"])

    # -- what concerns the whole search

    def prepare(self) -> None:
        """Read the task, unless that is done: the one time that the model is fed the context."""
        if "prefill" in self.root:
            return
        self.say(f"reading {len(self.task.context):,} characters ...")
        with self.meter.spent() as prefill:
            if not self.branch.num_tokens:
                self.branch.append(self.task.context + self.task.leads[0])
            self.branch.checkpoint("task")
        self.root.update(leg=0, max_steps=0, totals=dict.fromkeys(TOTALS, 0))
        self.root["prefill"] = {"tokens": self.branch.num_tokens, "s": prefill.s, "fed": prefill.fed}
        self.set_goal(self.options.goal)

    def set_goal(self, goal: int) -> None:
        """Begin another leg of the search."""
        max_steps = self.root["max_steps"] + self.options.steps
        self.root.update(goal=goal, max_steps=max_steps, leg=self.root["leg"] + 1, is_reported=False)
        self.session.flush()

    def num_items(self, found: Any) -> int:
        """Return how many items a branch has, or the best branch of a search."""
        branch = self.session.branch(found.best) if isinstance(found, SearchResult) else found
        return len(branch.extras.get("items", []))

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Add what the block takes to the totals, which outlive the process."""
        spent = Spent()
        try:
            with self.meter.spent() as spent:
                yield
        finally:
            self.count("s", spent.s)
            self.count("fed", spent.fed)
            self.session.flush()

    def count(self, name: str, amount: float) -> None:
        """Add to a total."""
        self.root["totals"][name] += amount

    # -- inside

    def _items_beside(self, branch: Any) -> list[list[str]]:
        """Return the last items of the children that the branch's node has already: a new one has to find another."""
        node = branch.extras["search"]["node"]  # a fresh fork has the extras of its node
        others = [self.session.branch(name).extras for name in self.session.branches]
        return [each["items"][-1] for each in others if each.get("search", {}).get("parent") == node]

    def _write_item(self, branch: Any, seed: int, before: Sequence[Sequence[str]]) -> tuple[list[str], str, int]:
        """Sample each line until it passes, a few times at most; return the lines, a problem, and how many failed."""
        lines: list[str] = []
        num_failed = 0
        for lead in self.task.leads:
            if lines:
                branch.append(lead)
            problem, tries = "no tries", self.options.tries
            for attempt in range(tries):
                written = self._sample(branch, seed + len(lines) * tries + attempt)
                problem = self.task.check([*lines, written.text], before)
                if not problem:
                    lines.append(written.text)
                    break
                branch.rewind(tokens=len(written.tokens))
                self.count("rewinds", 1)
                num_failed += 1
            if problem:
                return lines, problem, num_failed
        branch.append(self.task.leads[0])
        return lines, "", num_failed

    def _sample(self, branch: Any, seed: int) -> Any:
        written = branch.generate(seed=seed, **self.options.sampling)
        self.meter.note_sampled(len(written.tokens))
        self.count("sampled", len(written.tokens))
        return written

    def _tell(self, branch: Any, item: str) -> None:
        totals, problem = self.root["totals"], branch.extras["problem"]
        totals["peak_nbytes"] = max(totals["peak_nbytes"], self.held())
        outcome = f"dropped: {short(problem)}" if problem else f"score {self.score(branch):4.1f}  {item}"
        self.say(f"{totals['forks']:3}  {branch.name:<12} {outcome}")


def short(text: str) -> str:
    """Return a text on one line, cut to what is worth printing."""
    plain = " ".join(text.split())
    return plain if len(plain) <= 70 else f"{plain[:69]}…"
