"""kill -9 of a writer at random moments: what was acknowledged is there, and the store is sound.

Run as a script, this file is a zygote: it imports torch once and forks a writer for each line "STORE SEED" that it
reads. A writer works on a session and acknowledges on its standard output only what has returned.
"""

import json
import os
import random
import select
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

import agentmem
from agentmem.check import check
from agentmem.stats import Reason
from agentmem.testing.zygote import Zygote, serve
from agentmem.tiers.disk import DiskTier

NUM_ROUNDS = int(os.environ.get("AGENTMEM_CRASH_ROUNDS", "100"))
CONFIG = agentmem.Config(block_size=16)
MAX_TOKENS = 220


@pytest.fixture(scope="module")
def zygote():
    """One zygote for all rounds."""
    with closing(Zygote(__file__)) as process:
        yield process


def acknowledged(journal):
    """Return what the writer said before it was killed; its last line may be cut off."""
    lines = journal.read_text().split("\n")[:-1] if journal.exists() else []
    return [json.loads(line) for line in lines]


def wait_for(journal, num_lines, process_id):
    """Wait until the writer has acknowledged something, so that there is something to lose."""
    while not journal.exists() or journal.read_text().count("\n") < num_lines:
        os.kill(process_id, 0)
        time.sleep(0.001)


def kill(process_id):
    """Kill the writer, and return when it is gone with all its locks."""
    descriptor = os.pidfd_open(process_id)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [])
    finally:
        os.close(descriptor)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_was_acknowledged_survives_a_hundred_kills(zygote, llama, tmp_path):
    rng = random.Random(20)
    path, journal = tmp_path / "store", tmp_path / "journal"
    expected: dict[str, list[int]] = {}
    num_acknowledged = 0
    for number in range(NUM_ROUNDS):
        if number % 10 == 0:  # a new store now and then: making one is killed too
            path, journal = tmp_path / f"store{number}", tmp_path / f"journal{number}"
            expected = {}
        num_known = len(acknowledged(journal))
        process_id = zygote.start(str(path), str(journal), number)
        if number % 10:
            wait_for(journal, num_known + rng.randrange(3), process_id)
        time.sleep(rng.random() * 0.15)
        kill(process_id)

        lines = acknowledged(journal)
        expected.update({line["checkpoint"]: line["tokens"] for line in lines})
        num_acknowledged += len(lines) - num_known
        if lines:
            look(path, llama, expected, lines[-1], is_thorough=number % 10 == 9)
    assert num_acknowledged > NUM_ROUNDS


def look(path, model, expected, last, *, is_thorough):
    """Open the store that a killed writer left, and compare it with what it had acknowledged."""
    with agentmem.open(path, model=model, config=CONFIG) as store:
        report = check(store.environment, DiskTier(store.environment), read_data=True)
        session = store.resume("s", branch=last["branch"])
        found = {checkpoint.checkpoint_id.hex(): checkpoint for checkpoint in session.checkpoints}
        tokens = session.active.tokens
        resumed = session.report

        assert report.problems == ()
        assert expected.keys() <= found.keys()
        assert {name: found[name].num_tokens for name in expected} == {
            name: len(tokens) for name, tokens in expected.items()
        }
        assert all(checkpoint.has_kv for name, checkpoint in found.items() if name in expected)
        # what was done after the last acknowledgement may be there too, in part, but in order
        assert resumed.reason in {Reason.COMPLETE, Reason.NOT_SAVED}
        if tokens[: len(last["tokens"])] == last["tokens"]:
            assert resumed.num_reused >= len(last["tokens"]) - 1
        if is_thorough:
            for index, (name, wanted) in enumerate(expected.items()):
                branch = session.fork(f"look{index}", at=found[name])
                assert branch.tokens == wanted
                assert branch._entry.state.num_computed >= len(wanted) - 1
            with torch.no_grad():
                alone = model(torch.tensor([wanted])).logits[0, -1]
            assert torch.allclose(branch.forward([])[0], alone, atol=1e-4)
            assert branch.report.num_computed <= 1


def write(path, journal, seed):
    """Work on the session "s" for ever, and acknowledge every checkpoint that returned."""
    rng = random.Random(seed)
    with agentmem.open(path, model=MODEL, config=CONFIG) as store, Path(journal).open("a") as out:
        names = [record.name for record in store.sessions()]
        session = store.resume("s") if names else store.create("s")
        for number in range(10**6):
            act(session, rng, f"b{seed}-{number}")
            branch = session.active
            if branch.num_tokens:
                checkpoint = branch.checkpoint()
                line = {
                    "checkpoint": checkpoint.checkpoint_id.hex(),
                    "branch": branch.name,
                    "tokens": branch.tokens,
                }
                out.write(json.dumps(line) + "\n")
                out.flush()


def act(session, rng, name):
    """Do something with the session."""
    branch = session.active
    if branch.num_tokens > MAX_TOKENS:
        branch.rewind(tokens=rng.randrange(100, MAX_TOKENS))
    choice = rng.random()
    if choice < 0.5:
        branch.append([rng.randrange(1, 500) for _ in range(rng.randrange(1, 40))])
    elif choice < 0.7 and branch.num_tokens:
        branch.generate(max_new_tokens=rng.randrange(1, 4), do_sample=False)
    elif choice < 0.8 and len(session.branches) < 8:
        session.fork(name)
        session.switch(name)
    elif choice < 0.9:
        session.switch(rng.choice(session.branches))
    else:
        others = [other for other in session.branches if other != branch.name]
        if others:
            session.drop(rng.choice(others))


if __name__ == "__main__":
    from agentmem.testing.models import tiny_model

    torch.set_num_threads(1)  # no threads in the zygote: a forked child would wait for them for ever
    MODEL = tiny_model("llama")
    serve(write)
