"""An agent that searches a tree: it reads a long manual once, writes tests, and a verifier runs each of them.

Every branch of the search is a branch of an agentmem session: forked from the best one so far, rewound and sampled
again where a line fails, checkpointed when a test passes, dropped when nothing helps. Stop it at any moment and start
it again: it goes on where it was. `python examples/tree_search.py --help` lists the choices; `make demo` runs it twice.
"""

import argparse
import json
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _baseline import CopySession
from _model import line_sampling, load_model
from _options import parse
from _report import Meter, Say, Spent, numbers, print_goal, print_resumed, print_summary
from _tasks import TASKS, Task
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import agentmem

ROOT = "main"
TOTALS = ("forks", "rewinds", "dropped", "context", "sampled", "fed", "s", "peak_nbytes")


class Search:
    """Best-first search. What it knows is in the branches' extras, so that a stored session is a stored search.

    A branch is a node of the search when its extras name it: until its item is written and verified they are those of
    its parent. The root's extras also hold what concerns the whole search.
    """

    def __init__(
        self, session: Any, task: Task, options: argparse.Namespace, meter: Meter, held: Callable[[], float], say: Say
    ) -> None:
        """Search in `session`: an `agentmem.Session`, or a `CopySession`, which has the same verbs."""
        self.session = session
        self.task = task
        self.options = options
        self.meter = meter
        self.held = held
        self.say = say
        self.root: dict[str, Any] = session.branch(ROOT).extras

    @property
    def is_prepared(self) -> bool:
        """Whether the context was read."""
        return "node" in self.root

    def prepare(self) -> None:
        """Read the task, unless that is done: the one time that the model is fed the context."""
        if self.is_prepared:
            return
        self.say(f"reading {len(self.task.context):,} characters ...")
        with self.meter.spent() as prefill:
            self.session.switch(ROOT)
            if not self.session.active.num_tokens:
                self.session.append(self.task.context + self.task.leads[0])
            self.session.checkpoint("task")
        self.root.update(node=ROOT, items=[], score=0.0, tried=0, current="", leg=0)
        self.root["totals"] = dict.fromkeys(TOTALS, 0)
        self.root["prefill"] = {"tokens": self.session.active.num_tokens, "s": prefill.s, "fed": prefill.fed}
        self.set_goal(self.options.goal)

    def set_goal(self, goal: int) -> None:
        """Begin another leg of the search."""
        self.root.update(goal=goal, budget=self.options.steps, leg=self.root["leg"] + 1, is_reported=False)
        self.session.flush()

    def run(self) -> None:
        """Expand the best node until the goal is reached, the steps are used up or nothing is left to expand."""
        self._drop_unfinished()
        while self.root["current"] or (self.root["budget"] > 0 and not self.is_solved):
            node = self.root["current"] or self._best_open()
            if not node:
                self.say("every branch is a dead end")
                return
            self.root["current"] = node
            self._expand(node)
            self.root.update(current="", budget=self.root["budget"] - 1)
        self.session.flush()

    @property
    def nodes(self) -> dict[str, dict[str, Any]]:
        """The extras of all nodes, by name."""
        found = {name: self.session.branch(name).extras for name in self.session.branches}
        return {name: extras for name, extras in found.items() if extras.get("node") == name}

    @property
    def best(self) -> str:
        """The node with most items; of those, the one with the highest score."""
        return max(self.nodes.items(), key=lambda node: (len(node[1]["items"]), node[1]["score"], node[0]))[0]

    @property
    def is_solved(self) -> bool:
        """Whether a branch has as many items as were asked for."""
        return bool(len(self.nodes[self.best]["items"]) >= self.root["goal"])

    def _best_open(self) -> str:
        """Return the node with the highest score among those that have children to try; "" when there is none."""
        scores = [(node["score"], name) for name, node in self.nodes.items() if node["tried"] < self.options.width]
        return max(scores, default=(0.0, ""))[1]

    def _drop_unfinished(self) -> None:
        """Drop the branch that was being written when a process ended: its seeds will write it again."""
        for name in set(self.session.branches) - set(self.nodes):
            self.session.switch(name)
            self._prune(name, name.rpartition(".")[0] or ROOT)

    def _expand(self, node: str) -> None:
        """Try the children of a node that were not tried yet."""
        extras = self.session.branch(node).extras
        for index in range(extras["tried"], self.options.width):
            child = child_name(node, index)
            if child not in self.session.branches:  # else its process ended right after its checkpoint
                with self.meter.spent() as spent:
                    outcome = self._grow(node, child)
                self.say(f"{self.count('forks'):3}  {child:<16} {outcome}")
                self.count("s", spent.s)
                self.count("fed", spent.fed)
                self.root["totals"]["peak_nbytes"] = max(self.count("peak_nbytes"), self.held())
            extras["tried"] = index + 1
            self.session.flush()  # queued: costs microseconds

    def _grow(self, parent: str, child: str) -> str:
        """Fork a node, write one item, keep the branch if all lines pass; return what happened, in words."""
        session, node = self.session, self.session.branch(parent).extras
        session.fork(child, at=parent)
        session.switch(child)
        self.count("forks", 1)
        self.count("context", session.active.num_tokens)
        lines: list[str] = []
        num_rewinds = self.count("rewinds")
        before = [*node["items"], *self._items_after(parent)]
        for lead in self.task.leads:
            if lines:
                session.append(lead)
            problem = self._write_line(child, lines, before)
            if problem:
                self._prune(child, parent)
                self.count("dropped", 1)
                return f"dropped: {_short(problem)}"
        session.append(self.task.leads[0])
        score = round(node["score"] + 1 - 0.1 * (self.count("rewinds") - num_rewinds), 2)
        session.active.extras.update(node=child, items=[*node["items"], lines], score=score, tried=0)
        item = " ".join(lead.strip() + line.strip() for lead, line in zip(self.task.leads, lines, strict=True))
        session.checkpoint(item)  # on disk when it returns
        return f"score {score:4.1f}  {_short(item)}"

    def _prune(self, child: str, parent: str) -> None:
        """Drop a branch that leads nowhere; rewound first, so that what it wrote is not kept for a later fork."""
        session = self.session
        session.rewind(tokens=session.active.num_tokens - session.branch(parent).num_tokens)
        session.switch(parent)
        session.drop(child)

    def _items_after(self, parent: str) -> list[list[str]]:
        """Return the last items of a node's children: a new child has to find another one."""
        children = {child_name(parent, index) for index in range(self.options.width)}
        return [node["items"][-1] for name, node in self.nodes.items() if name in children]

    def _write_line(self, child: str, lines: list[str], before: Sequence[Sequence[str]]) -> str:
        """Sample a line until one passes, and add it to `lines`; else return what was wrong with the last one."""
        options, problem = self.options, ""
        for attempt in range(options.tries):
            seed = zlib.crc32(f"{options.seed}/{child}/{len(lines)}/{attempt}".encode())
            written = self.session.generate(seed=seed, **options.sampling)
            self.meter.note_sampled(len(written.tokens))
            self.count("sampled", len(written.tokens))
            problem = self.task.check([*lines, written.text], before)
            if not problem:
                lines.append(written.text)
                return ""
            self.session.rewind(tokens=len(written.tokens))
            self.count("rewinds", 1)
        return problem

    def count(self, name: str, amount: float = 0) -> Any:
        """Add to a total that outlives the process; return it."""
        self.root["totals"][name] += amount
        return self.root["totals"][name]


def child_name(parent: str, index: int) -> str:
    """Return the name of a node's child: "1", "1.0", "1.0.3"."""
    return str(index) if parent == ROOT else f"{parent}.{index}"


def run(options: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Search, or go on with a stored search, and return the numbers."""
    if not options.resume:
        forget_reported(options, say)
    say(f"loading {options.model} ...")
    model, tokenizer = load_model(options.model)
    options.sampling = line_sampling(tokenizer, temperature=options.temperature, max_new_tokens=options.line_tokens)
    started = time.perf_counter()
    with agentmem.open(options.store, model=model, tokenizer=tokenizer) as store:
        opened = Spent(time.perf_counter() - started)
        search, resumed = open_search(store, options, Meter(model), opened, say)
        search.prepare()
        if options.resume and search.root["is_reported"]:
            search.set_goal(len(search.nodes[search.best]["items"]) + 1)
        print_goal(say, search)
        search.run()
        search.session.switch(search.best)
        store.flush()
        say(f"\n{search.session.log()}\n")
        found = numbers(search, store.stats())
        is_compared = search.root["leg"] == 1 and not options.no_baseline
        copies = run_baseline(search, model, tokenizer) if is_compared else None
        print_summary(say, found, copies)
        search.root["is_reported"] = True
    return {**found, "resumed": resumed, "baseline": copies}


def open_search(
    store: agentmem.Store, options: argparse.Namespace, meter: Meter, opened: Spent, say: Say
) -> tuple[Search, dict[str, Any] | None]:
    """Return the stored search, with its best branch on the device, or a new one; and what resuming took."""
    is_known = any(record.name == options.task for record in store.sessions())
    if options.resume and not is_known:
        raise SystemExit(f"{options.store} holds no search to resume: run without --resume first")
    with meter.spent() as spent:
        session = store.resume(options.task) if is_known else store.create(options.task)
        search = Search(session, TASKS[options.task](), options, meter, lambda: held(store), say)
        if search.is_prepared:
            session.switch(search.best)
    return search, print_resumed(say, search, opened, spent) if search.is_prepared else None


def held(store: agentmem.Store) -> float:
    """Return the bytes of KV in memory, on the device and beside it."""
    stats = store.stats()
    return stats["device_nbytes"] + stats["host_nbytes"]


def run_baseline(search: Search, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Run the whole search again on `CopySession` and return its numbers: the same seeds, so the same branches."""
    search.say("the same search with a deep copy of the cache for every branch ...")
    copies = CopySession(model, tokenizer)
    other = Search(copies, search.task, search.options, Meter(model), lambda: copies.nbytes, lambda _text: None)
    other.prepare()
    other.run()
    return numbers(other, {})


def forget_reported(options: argparse.Namespace, say: Say) -> None:
    """Remove the store if all it holds is a search that came to its end, so that this one starts from nothing."""
    try:
        with agentmem.open(options.store) as view:
            names = [record.name for record in view.sessions()]
            branches = view.view(options.task).branches if names == [options.task] else []
    except agentmem.NotFoundError:
        return
    if any(branch.name == ROOT and branch.extras.get("is_reported") for branch in branches):
        say(f"the search in {options.store} came to its end: starting over (--resume would go on with it)")
        shutil.rmtree(options.store)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; return the exit status."""
    options = parse(__doc__, arguments)
    torch.set_num_threads(options.threads)

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    try:
        summary = run(options, say)
    except KeyboardInterrupt:
        say("\ninterrupted: what was done is on disk; the same command goes on with it")
        return 130
    if options.json:
        print(json.dumps(summary))
    return 0


def _short(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= 70 else f"{plain[:69]}…"


if __name__ == "__main__":
    sys.exit(main())
