"""What the agent of tree_search.py does on branches: write one more item each, until a verifier is content.

The three functions that `agentmem.search` asks for are here: `expand`, `score`, `is_done`. What they know of a branch
is in its extras, so that a stored session is a stored search.
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from _report import Meter, Say, Spent
from _tasks import Task

from agentmem.search import SearchResult

TOTALS = ("forks", "rewinds", "context", "sampled", "fed", "s", "peak_nbytes")


@dataclass(slots=True)
class Draft:
    """An item that is being written.

    Attributes:
        branch: Where.
        seed: Of its first sample.
        lines: The lines that passed.
        written: The last sample.
        problem: What is wrong with it; "" when nothing is.
        num_rewinds: Lines that failed.
    """

    branch: Any
    seed: int
    lines: list[str] = field(default_factory=list)
    written: Any = None
    problem: str = ""
    num_rewinds: int = 0


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

    def expand(self, branches: Sequence[Any], seeds: Sequence[int]) -> None:
        """Write an item on each of some forks of one node, all at once; note in its extras what became of it."""
        drafts = [Draft(branch, seed) for branch, seed in zip(branches, seeds, strict=True)]
        self.count("context", sum(branch.num_tokens for branch in branches))
        for lead in self.task.leads:
            self._write_line(drafts, lead)
        for draft in drafts:
            self.count("forks", 1)
            self._finish(draft)

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

    def _write_line(self, drafts: Sequence[Draft], lead: str) -> None:
        """Sample the next line of all drafts, and those that fail again: a few times, then a draft is a dead end."""
        drafts = [draft for draft in drafts if not draft.problem]
        number = max((len(draft.lines) for draft in drafts), default=0)
        for draft in drafts if number else ():
            draft.branch.append(lead)
        for attempt in range(self.options.tries):
            waiting = [draft for draft in drafts if len(draft.lines) == number]
            if waiting:
                self._sample(waiting, number * self.options.tries + attempt)
            for draft in waiting:
                self._check(draft, [other for other in drafts if other is not draft])

    def _sample(self, drafts: Sequence[Draft], offset: int) -> None:
        """Sample a line for each draft. What the branches share is read once a token for all of them."""
        names = [draft.branch.name for draft in drafts]
        self.meter.note_sampling(len(names))
        with self.session.batch(names) as batch:
            seeds = {draft.branch.name: {"seed": draft.seed + offset} for draft in drafts}
            found = batch.generate(per_branch=seeds, **self.options.sampling)
        for draft in drafts:
            draft.written = found[draft.branch.name]
            self.count("sampled", len(draft.written.tokens))

    def _check(self, draft: Draft, others: Sequence[Draft]) -> None:
        """Keep a line that passes; take one off that does not."""
        items = [*draft.branch.extras.get("items", []), *(other.lines for other in others if other.lines)]
        draft.problem = self.task.check([*draft.lines, draft.written.text], items)
        if not draft.problem:
            draft.lines.append(draft.written.text)
        else:
            draft.branch.rewind(tokens=len(draft.written.tokens))
            draft.num_rewinds += 1
            self.count("rewinds", 1)

    def _finish(self, draft: Draft) -> None:
        """Note in a branch's extras what became of it, and say so."""
        branch, extras = draft.branch, draft.branch.extras
        item = " ".join(lead.strip() + line.strip() for lead, line in zip(self.task.leads, draft.lines, strict=False))
        extras.update(problem=draft.problem, rewinds=extras.get("rewinds", 0) + draft.num_rewinds, message=short(item))
        if not draft.problem:
            extras["items"] = [*extras.get("items", []), draft.lines]
            branch.append(self.task.leads[0])
        totals = self.root["totals"]
        totals["peak_nbytes"] = max(totals["peak_nbytes"], self.held())
        outcome = (
            f"dropped: {short(draft.problem)}" if draft.problem else f"score {self.score(branch):4.1f}  {short(item)}"
        )
        self.say(f"{totals['forks']:3}  {branch.name:<12} {outcome}")


def short(text: str) -> str:
    """Return a text on one line, cut to what is worth printing."""
    plain = " ".join(text.split())
    return plain if len(plain) <= 70 else f"{plain[:69]}…"
