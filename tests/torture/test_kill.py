"""kill -9 at random times and at the n-th write, sync or open: what was acknowledged is there, and the store is sound.

Run as a script, this file is a zygote. A worker has several client threads with a session each, gc without grace, a
device budget that makes branches leave, and background saving; it works until it is killed.
"""

import itertools
import os
import random
import threading
import time
import traceback
from contextlib import closing
from pathlib import Path

import pytest

import agentmem
from agentmem.testing.torture import promises, shim
from agentmem.testing.torture.examine import examine
from agentmem.testing.torture.promises import PromiseBook
from agentmem.testing.torture.shim import KILL, Call, Faults
from agentmem.testing.torture.tables import print_table
from agentmem.testing.torture.work import Client
from agentmem.testing.torture.workers import serve_tasks
from agentmem.testing.zygote import Zygote, kill

NUM_ROUNDS = int(os.environ.get("AGENTMEM_TORTURE_KILLS", "12"))
ROUNDS_PER_STORE = 10
NUM_CLIENTS = 3
CONFIG = agentmem.Config(block_size=16, device_budget_nbytes=2 << 20, host_budget_nbytes=100_000)
LOOK_CONFIG = agentmem.Config(block_size=16)
POINTS = [Call.WRITE, Call.SYNC, Call.TRUNCATE, Call.OPEN, Call.STATVFS]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module")
def zygote(request):
    """One zygote for all rounds, under the library of faults where there is a compiler."""
    library = request.getfixturevalue("faults") if shim.find_compiler() else None
    with closing(Zygote(__file__, preload=library)) as process:
        process.has_faults = library is not None
        yield process


def wait_for(book, num_lines, process_id, limit_s=20.0):
    """Wait until the worker has acknowledged something, so that there is something to lose, or is dead."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if book.exists() and book.read_text().count("\n") >= num_lines:
            return
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            return
        time.sleep(0.001)


def die_at_random_time(zygote, folder, seed, rng):
    book = folder / "book"
    num_known = book.read_text().count("\n") if book.exists() else 0
    process_id = zygote.start("work", str(folder), "s", seed, 0, 0)
    if num_known:
        wait_for(book, num_known + rng.randrange(4), process_id)
    time.sleep(rng.random() * 0.15)
    kill(process_id)
    return "random time"


def die_at_a_call(zygote, folder, seed, rng):
    calls = rng.choice(POINTS)
    few = calls in {Call.TRUNCATE, Call.OPEN}
    ending = zygote.run("work", str(folder), "s", seed, int(calls), rng.randrange(1, 6 if few else 60), limit_s=3)
    if ending.signal == "SIGALRM":
        return "after three seconds"  # there were fewer such calls
    return f"before a {calls.name.lower()}" if ending.signal == "SIGKILL" else f"an error {ending.error}"


def die_in_company(zygote, folder, seed, rng):
    """Let two processes work on the store, and kill both, one a little later than the other."""
    process_ids = [zygote.start("work", str(folder), prefix, seed, 0, 0) for prefix in ("s", "t")]
    time.sleep(0.1 + rng.random() * 0.4)
    for process_id in rng.sample(process_ids, k=2):
        kill(process_id)
        time.sleep(rng.random() * 0.1)
    return "two processes"


def test_nothing_acknowledged_is_lost_to_a_kill(zygote, tmp_path):
    rng = random.Random(20)
    deaths, faults, num_kept, num_promises = {}, [], 0, 0
    for number in range(NUM_ROUNDS):
        folder = tmp_path / f"store{number // ROUNDS_PER_STORE}"  # a new one now and then: making one is killed too
        folder.mkdir(exist_ok=True)
        ways = [die_at_random_time, die_at_a_call if zygote.has_faults else die_at_random_time, die_in_company]
        death = ways[number % 3](zygote, folder, number, rng)
        deaths[death] = deaths.get(death, 0) + 1

        found = zygote.run("look", str(folder), number)
        value = found.value or {"faults": [found.signal or found.error], "kept": 0, "promises": 0}
        faults += [f"round {number}, {death}: {fault}" for fault in value["faults"]]
        num_kept += value["kept"]
        num_promises = max(num_promises, 0) + value["promises"]
    print_table("kill -9", {"rounds": NUM_ROUNDS, **deaths, "promises looked at": num_promises, "kept": num_kept})
    assert not faults, "\n".join(faults)
    assert num_kept > NUM_ROUNDS


# ---- in the zygote


def work(model, folder, prefix, seed, calls, nth):
    """Work on several sessions from several threads until killed."""
    folder = Path(folder)
    if calls:
        Faults(folder / "store").fail(Call(calls), nth, KILL)
    book = PromiseBook(folder / "book")
    with agentmem.open(folder / "store", model=model, config=CONFIG) as store:
        tasks = [
            (sweep, store),
            *((act, store, book, f"{prefix}{each}", seed * NUM_CLIENTS + each) for each in range(NUM_CLIENTS)),
        ]
        threads = [threading.Thread(target=attempt, args=(folder, *task)) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def attempt(folder, do, *arguments):
    """Do something in a thread; note what it raises, which nothing here should."""
    try:
        do(*arguments)
    except Exception:  # noqa: BLE001 - whatever it is, the test tells
        with (folder / "errors").open("a") as file:
            file.write(traceback.format_exc())
        os._exit(3)


def act(store, book, name, seed):
    client = Client(store, name, book, seed)
    while True:
        client.act()


def sweep(store):
    for _ in itertools.count():
        time.sleep(0.02)
        store.gc(grace_s=0)


def look(model, folder, seed):
    """Open what is left, and compare it with what was promised."""
    folder = Path(folder)
    Faults(folder / "store").mend() if has_faults() else None
    known = promises.read(folder / "book")
    found = examine(lambda: agentmem.open(folder / "store", model=model, config=LOOK_CONFIG), model, known, seed=seed)
    errors = folder / "errors"
    raised = [errors.read_text()] if errors.exists() else []
    errors.unlink(missing_ok=True)
    return {"faults": [*raised, *found.faults], "kept": found.num_kept, "promises": len(known)}


def has_faults():
    return "LD_PRELOAD" in os.environ


if __name__ == "__main__":
    serve_tasks({"work": work, "look": look})
