"""Random damage to any file of a store: never wrong tokens, never wrong logits, never a signal.

Each damaged copy is opened in a fresh process, forked from a zygote (this file, run as a script), which resumes two
sessions and makes a new one.
"""

import collections
import json
import logging
import os
import random
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch

import agentmem
from agentmem._lmdb import engine
from agentmem.errors import AgentMemError
from agentmem.testing.torture.damage import KINDS
from agentmem.testing.torture.examine import TOLERANCE, cold_logits, look
from agentmem.testing.torture.tables import print_table
from agentmem.testing.torture.workers import SESSIONS, make_store, serve_tasks
from agentmem.testing.zygote import Zygote

NUM_CORRUPTIONS = int(os.environ.get("AGENTMEM_TORTURE_CORRUPTIONS", "45"))
CONFIG = agentmem.Config(block_size=16)
OUTCOMES = ["unharmed", "healed", "recomputed", "tokens lost, and said", "session refused by name", "refused by name"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def zygote():
    """One zygote for all damage."""
    with closing(Zygote(__file__)) as process:
        yield process


@pytest.fixture(scope="module")
def template(zygote, tmp_path_factory):
    """A store with two sessions, and the tokens of every branch."""
    folder = tmp_path_factory.mktemp("template")
    zygote.run("prepare", str(folder)).result()
    return folder


def test_damage_never_gives_a_wrong_answer_nor_a_signal(zygote, template, tmp_path):
    table = {kind: collections.Counter() for kind in KINDS}
    faults = []
    for seed in range(NUM_CORRUPTIONS):
        kind = list(KINDS)[seed % len(KINDS)]
        folder = tmp_path / f"damaged{seed}"
        shutil.copytree(template / "store", folder)
        rng = random.Random(seed)
        what = KINDS[kind](folder, rng)
        ending = zygote.run("use", str(folder), str(template / "truth"), rng.random() < 0.5, limit_s=60)
        found = ending.value or {"outcome": ending.signal or "unnamed error", "faults": [ending.signal or ending.error]}
        table[kind][found["outcome"]] += 1
        faults += [f"seed {seed}, {what}: {fault}" for fault in found["faults"]]
        if not found["faults"]:  # else it is left for whoever looks into it
            shutil.rmtree(folder)

    print_table("corruption", {kind: text_of(counts) for kind, counts in table.items()})
    print_table("corruption, in all", dict(sum(table.values(), collections.Counter())))
    assert not faults, "\n".join(faults)
    assert all(outcome in OUTCOMES for counts in table.values() for outcome in counts)


def text_of(counts):
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


# ---- in the zygote


def prepare(model, folder):
    """Make the store that is damaged, and write down what it holds."""
    folder = Path(folder)
    make_store(lambda: agentmem.open(folder / "store", model=model, config=CONFIG), folder, 30)
    shutil.copytree(folder / "store", folder / "copy")
    with agentmem.open(folder / "copy", model=model, config=CONFIG) as store:
        truth = {
            name: {branch: measure(store, name, branch) for branch in store.resume(name).branches} for name in SESSIONS
        }
    (folder / "truth").write_text(json.dumps(truth))


def measure(store, name, branch):
    """Return what an undamaged branch holds, and how many tokens it computes to go on."""
    session = store.resume(name, branch=branch)
    tokens = session.active.tokens
    session.forward() if tokens else None
    return {"tokens": tokens, "num_computed": session.report.num_computed if tokens else 0}


class Warnings(logging.Handler):
    """Counts what a person is warned of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def use(model, folder, truth, is_large):
    """Resume two sessions and make a new one; say what came of it. `is_large`: open it as a large store is opened."""
    if is_large:
        engine._MAX_VERIFY_NBYTES = 0
    warnings = Warnings()
    logging.getLogger("agentmem").addHandler(warnings)
    truth = json.loads(Path(truth).read_text())
    faults = []
    outcomes = []
    try:
        with agentmem.open(folder, model=model, config=CONFIG) as store:
            for name, branches in truth.items():
                outcomes.append(resume(model, store, name, branches, warnings, faults))
            outcomes.append(make_new(model, store, faults))
            if set(outcomes) == {"unharmed"} and (warnings.messages or look(store)):
                outcomes.append("healed" if not look(store) else "unharmed")
    except AgentMemError as error:
        outcomes.append("refused by name" if not outcomes else "session refused by name")
        if not str(error):
            faults.append(f"{type(error).__name__} says nothing")
    return {"outcome": max(outcomes, key=OUTCOMES.index), "faults": faults}


def resume(model, store, name, branches, warnings, faults):
    """Resume a session, and switch to each of its branches; return the worst outcome."""
    outcomes = ["unharmed"]
    try:
        session = store.resume(name)
        for branch in session.branches:
            session.switch(branch)
            outcomes.append(compare(model, session, branches.get(branch), warnings, faults))
        missing = branches.keys() - set(session.branches)
        if missing and not warnings.messages:
            faults.append(f"branches {sorted(missing)} of {name} are gone, and nobody says so")
        outcomes += ["tokens lost, and said"] if missing else []
    except AgentMemError:
        return "session refused by name"
    return max(outcomes, key=OUTCOMES.index)


def compare(model, session, known, warnings, faults):
    """Compare the active branch with the truth, and its logits with a run from nothing."""
    branch = session.active
    tokens, outcome = branch.tokens, "unharmed"
    known_tokens = [] if known is None else known["tokens"]
    if tokens != known_tokens:
        # Tokens after the tip may be lost, if that is said; other tokens than there were never.
        is_said = known is not None and tokens == known_tokens[: len(tokens)] and bool(warnings.messages)
        if not is_said:
            faults.append(f"branch {session.name}/{branch.name} has {len(tokens)} tokens, not the {len(known_tokens)}")
        outcome = "tokens lost, and said"
    if not tokens:
        return outcome
    logits = branch.forward()[-1]
    if not torch.allclose(logits, cold_logits(model, tokens), atol=TOLERANCE):
        faults.append(f"branch {session.name}/{branch.name} has other logits than a run from nothing")
    is_whole = known is not None and branch.report.num_computed <= known["num_computed"]
    return outcome if is_whole or outcome != "unharmed" else "recomputed"


def make_new(model, store, faults):
    """Make a session, which damage to others must not touch."""
    try:
        session = store.create("new")
        session.append([5, 6, 7] * 20)
        session.checkpoint()
    except AgentMemError:
        return "session refused by name"
    if not torch.allclose(session.forward()[-1], cold_logits(model, [5, 6, 7] * 20), atol=TOLERANCE):
        faults.append("a new session has other logits than a run from nothing")
    return "unharmed"


if __name__ == "__main__":
    serve_tasks({"prepare": prepare, "use": use})
