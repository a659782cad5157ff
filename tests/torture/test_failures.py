"""The n-th write, sync, statvfs, mmap or open fails, for every n until nothing fails any more.

Whatever fails: the error has a name, nothing acknowledged is lost, and the store can be opened, checked and continued.
Run as a script, this file is a zygote under the library of faults.
"""

import collections
import errno
import os
import shutil
import sys
import traceback
from contextlib import closing
from pathlib import Path

import pytest

import agentmem
from agentmem.errors import AgentMemError
from agentmem.testing.torture import promises, shim
from agentmem.testing.torture.examine import examine
from agentmem.testing.torture.promises import PromiseBook
from agentmem.testing.torture.shim import Call, Faults
from agentmem.testing.torture.tables import print_table
from agentmem.testing.torture.work import Client
from agentmem.testing.torture.workers import SESSIONS, make_store, serve_tasks
from agentmem.testing.zygote import Zygote

STRIDE = int(os.environ.get("AGENTMEM_TORTURE_STRIDE", "23"))
"""Every how many-th n is tried; 1 for all."""

MOST_CALLS = 2000
NUM_ACTS = 7
# The reserve is for deletes: without it the disk is full when a write says so, not before.
CONFIG = agentmem.Config(block_size=16, disk_reserve_nbytes=0)

KINDS = {
    "write: EIO once": (Call.WRITE, errno.EIO, False),
    "write: EIO from then on": (Call.WRITE, errno.EIO, True),
    "write: short": (Call.WRITE, 0, False),
    "write: ENOSPC from then on": (Call.WRITE | Call.TRUNCATE, errno.ENOSPC, True),
    "sync: EIO once": (Call.SYNC, errno.EIO, False),
    "sync: EIO from then on": (Call.SYNC, errno.EIO, True),
    "statvfs: EIO once": (Call.STATVFS, errno.EIO, False),
    "mmap: ENOMEM once": (Call.MMAP, errno.ENOMEM, False),
    "mmap: ENODEV from then on": (Call.MMAP, errno.ENODEV, True),
    "open: EMFILE once": (Call.OPEN, errno.EMFILE, False),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        shim.find_compiler() is None, reason="failures come from a C library: there is no compiler (cc)"
    ),
]


@pytest.fixture(scope="module")
def worker(faults):
    """A zygote whose workers' calls can fail."""
    with closing(Zygote(__file__, preload=faults)) as process:
        yield process


def test_every_failure_has_a_name_and_takes_nothing(worker, template, tmp_path):
    table = {}
    faults = []
    for kind, (calls, error, is_persistent) in KINDS.items():
        outcomes = collections.Counter()
        for nth in range(1, MOST_CALLS, STRIDE):
            folder = tmp_path / "trial"
            shutil.copytree(template, folder)
            ending = worker.run("fail", str(folder), int(calls), nth, error, is_persistent)
            shutil.rmtree(folder)
            found = ending.value or {"faults": [ending.signal or ending.error], "outcomes": [], "failed": 1}
            if not found["failed"]:
                break
            outcomes.update(found["outcomes"] or ["nothing was noticed"])
            faults += [f"{kind}, call {nth}: {fault}" for fault in found["faults"]]
        table[kind] = f"{(nth - 1) // STRIDE} failures: {', '.join(f'{n} {what}' for what, n in outcomes.items())}"
        faults += [] if outcomes or STRIDE > 1 else [f"{kind}: never happened"]

    print_table("n-th failure", table)
    assert not faults, "\n".join(faults)


# ---- in the zygote


def prepare(model, folder):
    """Make the store that every trial begins with."""
    make_store(lambda: agentmem.open(Path(folder) / "store", model=model, config=CONFIG), Path(folder), 12)


def fail(model, folder, calls, nth, error, is_persistent):
    """Work on the store while a call fails; then mend, and see whether all is there and goes on."""
    folder, outcomes, faults = Path(folder), [], []
    breaker = Faults(folder / "store")
    breaker.fail(Call(calls), nth, error, is_persistent=is_persistent)
    try:
        work(model, folder, outcomes, faults)
    except AgentMemError as refused:
        outcomes.append(type(refused).__name__)
    except Exception:  # noqa: BLE001 - that it has another name is what is looked for
        faults.append(f"unnamed: {brief()}")
    num_failed = breaker.num_failed
    breaker.mend()
    found = examine(
        lambda: agentmem.open(folder / "store", model=model, config=CONFIG), model, promises.read(folder / "book")
    )
    return {"outcomes": outcomes, "faults": [*faults, *found.faults], "failed": num_failed}


def work(model, folder, outcomes, faults):
    """Open the store and let two clients act; note each kind of refusal once."""
    seen = set()
    book = PromiseBook(folder / "book")
    with agentmem.open(folder / "store", model=model, config=CONFIG) as store:
        clients = [Client(store, name, book, 6) for name in SESSIONS]
        for number in range(NUM_ACTS):
            try:
                clients[number % 2].act()
            except AgentMemError as refused:
                seen.add(type(refused).__name__)
            except Exception:  # noqa: BLE001 - that it has another name is what is looked for
                faults.append(f"unnamed: {brief()}")
        outcomes += sorted(seen)


def brief():
    """Return the error that is being handled, and where in agentmem it came from."""
    _, error, trace = sys.exc_info()
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(trace)]
    return f"{error!r} in {' '.join(places[-4:])}"


if __name__ == "__main__":
    serve_tasks({"prepare": prepare, "fail": fail})
