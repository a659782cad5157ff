"""An agent that searches a tree: it reads a long manual once, writes tests, and a verifier runs each of them.

`agentmem.search.best_first` does the searching: it forks the best branch so far a few times, lets the agent write one
more item on each fork, keeps what passes as a checkpoint and drops the rest. The forks are sampled together. Stop it at
any moment and start it again: it goes on where it was. `python examples/tree_search.py --help` lists the choices;
`make demo` runs it twice.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from _agent import Agent
from _baseline import CopySession
from _model import line_sampling, load_model
from _options import parse
from _report import Meter, Say, Spent, numbers, print_goal, print_resumed, print_summary
from _tasks import TASKS
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import agentmem
from agentmem.search import Budget, SearchResult, Together, best_first, look

ROOT = "main"
"""The branch that reads the context. Its extras hold what the agent did, over all processes."""


def search(agent: Agent) -> SearchResult:
    """Search until a branch has enough items or the steps are used up; go on with what an earlier process did."""
    with agent.measured():
        return best_first(
            agent.session,
            Together(agent.expand),
            agent.score,
            children=agent.options.width,
            is_done=agent.is_done,
            budget=Budget(steps=agent.root["max_steps"]),
            seed=agent.options.seed,
            branch=ROOT,
        )


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
        agent, resumed = open_agent(store, options, opened, say)
        agent.prepare()
        if options.resume and agent.root["is_reported"]:
            agent.set_goal(agent.num_items(look(agent.session)) + 1)
        print_goal(say, agent)
        result = search(agent)
        agent.session.switch(result.best)
        store.flush()
        say(f"\n{agent.session.log()}\n")
        found = numbers(agent, result, store.stats())
        is_compared = agent.root["leg"] == 1 and not options.no_baseline
        copies = run_baseline(agent, model, tokenizer) if is_compared else None
        print_summary(say, found, copies)
        agent.root["is_reported"] = True
    return {**found, "resumed": resumed, "baseline": copies}


def open_agent(
    store: agentmem.Store, options: argparse.Namespace, opened: Spent, say: Say
) -> tuple[Agent, dict[str, Any] | None]:
    """Return the agent at work on the stored search, with its best branch on the device, or on a new one.

    What resuming took comes second; None for a new one.
    """
    is_known = any(record.name == options.task for record in store.sessions())
    if options.resume and not is_known:
        raise SystemExit(f"{options.store} holds no search to resume: run without --resume first")
    meter = Meter(lambda: int(store.stats().get("tokens_fed", 0)))
    with meter.spent() as spent:
        session = store.resume(options.task) if is_known else store.create(options.task)
        found = look(session)
        if found is not None:
            session.switch(found.best)
    agent = Agent(session, session.branch(ROOT), TASKS[options.task](), options, meter, lambda: held(store), say)
    return agent, None if found is None else print_resumed(say, agent, found.best, opened, spent)


def held(store: agentmem.Store) -> float:
    """Return the bytes of KV in memory, on the device and beside it."""
    stats = store.stats()
    return stats["device_nbytes"] + stats["host_nbytes"]


def run_baseline(agent: Agent, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Run the whole search again on `CopySession` and return its numbers: the same seeds, so the same branches."""
    agent.say("the same search with a deep copy of the cache for every branch ...")
    copies = CopySession(model, tokenizer)
    meter, silent = Meter(lambda: copies.num_fed), lambda _text: None
    other = Agent(copies, copies.branch(ROOT), agent.task, agent.options, meter, lambda: copies.nbytes, silent)
    other.prepare()
    return numbers(other, search(other), {})


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


if __name__ == "__main__":
    sys.exit(main())
