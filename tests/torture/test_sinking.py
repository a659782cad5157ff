"""kill -9 at every step of a block's way down to the lake and up again: a valid copy remains, and is used."""

import os
import random
import signal
from contextlib import closing
from pathlib import Path

import pytest
import torch

import agentmem
from agentmem.check import check
from agentmem.racing import PREFILL
from agentmem.testing.torture.tables import print_table
from agentmem.testing.torture.workers import serve_tasks
from agentmem.testing.zygote import Zygote
from agentmem.tiers.disk import DiskTier

NUM_ROUNDS = max(3, int(os.environ.get("AGENTMEM_TORTURE_KILLS", "12")) // 20)
TOKENS = [(29 * index * index + 3 * index + 7) % 490 + 1 for index in range(100)]
CONFIG = {"block_size": 16, "host_budget_nbytes": 0}
STEPS = {
    "before the push": ("agentmem.residency", "push", True),
    "after the push": ("agentmem.residency", "push", False),
    "before a segment is put": ("agentmem.lake.objects.Objects", "put_new", True),
    "after a segment is put": ("agentmem.lake.objects.Objects", "put_new", False),
    "within the transaction": ("agentmem.tiers.disk.DiskTier", "sink", False),
    "before the transaction": ("agentmem.tiers.disk.DiskTier", "sink", True),
    "after the transaction": ("agentmem.residency", "sink", False),
    "before a block rises": ("agentmem.tiers.disk.DiskTier", "rise", True),
    "after a block was handed to the disk": ("agentmem.tiers.disk.DiskTier", "rise", False),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def zygote():
    with closing(Zygote(__file__)) as process:
        yield process


@pytest.mark.parametrize("step", STEPS)
def test_a_valid_copy_remains_at_every_step(zygote, tmp_path, step):
    assert zygote.run("prepare", str(tmp_path)).error == ""

    ending = zygote.run("move", str(tmp_path), step, 1)

    assert ending.signal == "SIGKILL", ending.error
    found = zygote.run("look", str(tmp_path))
    assert found.error == ""
    assert found.value == {"num_reused": 99, "problems": 0, "is_right": True, "num_left": 0}


def test_a_valid_copy_remains_whenever_it_is_killed(zygote, tmp_path):
    rng, outcomes = random.Random(3), {}
    zygote.run("prepare", str(tmp_path))
    for _ in range(NUM_ROUNDS):
        step = rng.choice(list(STEPS))
        ending = zygote.run("move", str(tmp_path), step, rng.randrange(1, 9))
        found = zygote.run("look", str(tmp_path))
        kind = step if ending.signal == "SIGKILL" else "not killed"
        outcomes[kind] = outcomes.get(kind, 0) + 1
        assert found.error == ""
        assert found.value == {"num_reused": 99, "problems": 0, "is_right": True, "num_left": 0}

    print_table("kill -9 while blocks sink and rise", {"rounds": NUM_ROUNDS, **outcomes})


# ---- in the zygote


def opened(model, folder):
    config = agentmem.Config(**CONFIG, lake=f"file://{folder}/lake")
    store = agentmem.open(Path(folder) / "store", model=model, config=config)
    for _ in range(60):  # loading is tried first
        store._runtime.blocks.lower.rates.note(PREFILL, 20, 1.0)
        store._runtime.blocks.lower.rates.note("lake", 10**9, 1.0)
    return store


def prepare(model, folder):
    with opened(model, folder) as store:
        session = store.create("s")
        session.append(TOKENS)
        session.checkpoint()


def move(model, folder, step, nth):
    """Let the session sink and rise, until the `nth` time that a step is come to."""
    module, name, is_before = STEPS[step]
    kill_at(module, name, is_before=is_before, nth=nth)
    with opened(model, folder) as store:
        for _ in range(4):
            store.offload("s")
            store.resume("s").close()
            store.flush()


def kill_at(owner, name, *, is_before, nth):
    import importlib

    path, _, last = owner.rpartition(".")
    try:
        place = importlib.import_module(owner)
    except ModuleNotFoundError:
        place = getattr(importlib.import_module(path), last)
    work, left = getattr(place, name), [nth]

    def killed(*arguments, **keywords):
        left[0] -= 1
        if is_before and not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        result = work(*arguments, **keywords)
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(place, name, killed)


def look(model, folder):
    """Open what is left: all KV is to be had, wherever it is, and the session goes on."""
    with opened(model, folder) as store:
        session = store.resume("s")
        report = session.report
        logits = session.forward([5])
        with torch.no_grad():
            cold = model(input_ids=torch.tensor([[*TOKENS, 5]])).logits[0, -1:]
        is_right = torch.allclose(logits, cold, atol=1e-4)
        session.rewind(tokens=1)
        session.close()
        store.flush()
        problems = check(store.environment, DiskTier(store.environment), read_data=True).problems
        return {
            "num_reused": report.num_reused,
            "problems": len(problems),
            "is_right": is_right,
            "num_left": report.num_pending - 1,
        }


if __name__ == "__main__":
    serve_tasks({"prepare": prepare, "move": move, "look": look})
