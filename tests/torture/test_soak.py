"""Two processes with four client threads each on one store: no error, and nothing grows or slows down.

`make torture` lets it run for ten minutes. Run as a script, this file is a zygote.
"""

import ctypes
import itertools
import os
import statistics
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

import agentmem
from agentmem.testing.torture import promises
from agentmem.testing.torture.examine import examine
from agentmem.testing.torture.promises import PromiseBook
from agentmem.testing.torture.tables import print_table
from agentmem.testing.torture.work import Client
from agentmem.testing.torture.workers import serve_tasks
from agentmem.testing.zygote import Zygote

SOAK_S = float(os.environ.get("AGENTMEM_TORTURE_SOAK_S", "5"))
LONG_S = 120.0
"""From here on, throughput and memory are compared: less says nothing on a shared machine."""

NUM_PROCESSES = 2
NUM_THREADS = 4
ACTS_PER_SESSION = 40
GRACE_S = 1.0
SAMPLES_PER_RUN = 60
MIB = 1 << 20
CONFIG = agentmem.Config(block_size=16, device_budget_nbytes=3 << 20, host_budget_nbytes=1 << 20)
LOOK_CONFIG = agentmem.Config(block_size=16)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SOAK_S + 300)]


@pytest.fixture
def zygotes():
    """As many zygotes as processes work on the store."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Zygote(__file__))) for _ in range(NUM_PROCESSES)]


def test_eight_threads_of_two_processes_go_on_for_ever(zygotes, llama, tmp_path):
    agentmem.open(tmp_path / "store", model=llama, config=CONFIG).close()

    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        endings = list(pool.map(lambda pair: soak_in(*pair, tmp_path), enumerate(zygotes)))
    found = [ending.result() for ending in endings]
    books = [promise for number in range(NUM_PROCESSES) for promise in promises.read(tmp_path / f"book{number}")]
    left = examine(lambda: agentmem.open(tmp_path / "store", model=llama, config=LOOK_CONFIG), llama, books)

    rates, growths, files = zip(*(summary(each["samples"]) for each in found), strict=True)
    print_table(
        f"soak of {SOAK_S:g} s",
        {
            "operations": sum(each["samples"][-1][1] for each in found),
            "errors": sum(len(each["errors"]) for each in found),
            "throughput, last third to first": " ".join(f"{rate:.2f}" for rate in rates),
            "memory, last third less the middle": " ".join(f"{growth / MIB:+.1f} MiB" for growth in growths),
            "open files, first and last": " ".join(f"{before} {after}" for before, after in files),
            "data file": (tmp_path / "store" / "data.mdb").stat().st_size,
            "promises kept": left.num_kept,
        },
    )
    assert [error for each in found for error in each["errors"]] == []
    assert left.faults == []
    assert all(after <= before + 2 for before, after in files)
    if SOAK_S >= LONG_S:
        assert min(rates) >= 0.9
        assert max(growths) < 8 * MIB


def soak_in(number, zygote, folder):
    return zygote.run("soak", str(folder), number, SOAK_S, limit_s=int(SOAK_S) + 120)


def summary(samples):
    """Return the throughput of the last third by that of the first, the growth of memory since the middle, open files.

    The first third fills the caches of malloc and torch.
    """
    warm = samples[max(1, len(samples) // 10) :]
    third = max(2, len(warm) // 3)
    first, middle, last = warm[:third], warm[third : 2 * third], warm[-third:]
    rate = per_second(last) / max(per_second(first), 1e-9)
    growth = statistics.mean(sample[2] for sample in last) - statistics.mean(sample[2] for sample in middle)
    return rate, growth, (max(sample[3] for sample in first), max(sample[3] for sample in last))


def per_second(samples):
    return (samples[-1][1] - samples[0][1]) / max(samples[-1][0] - samples[0][0], 1e-9)


# ---- in the zygotes


class Soak:
    """What the threads of one process share."""

    def __init__(self, folder, number):
        self.end = time.monotonic() + SOAK_S
        self.number = number
        self.book = PromiseBook(folder / f"book{number}")
        self.num_acts = itertools.count()
        self.done = 0
        self.errors = []

    def client(self, store, thread):
        """Work on one session after the other; each is removed when it is done."""
        for turn in itertools.count():
            name = f"p{self.number}t{thread}n{turn}"
            client = Client(store, name, self.book, hash_of(self.number, thread, turn))
            for _ in range(ACTS_PER_SESSION):
                if time.monotonic() > self.end:
                    return
                client.act()
                self.done = next(self.num_acts)
            for branch in client.session.branches:
                self.book.withdraw(name, branch)
            self.book.withdraw(name, "main")
            client.session.close()
            store.remove(name)

    def sweep(self, store):
        while time.monotonic() < self.end:
            time.sleep(0.5)
            store.gc(grace_s=GRACE_S)

    def attempt(self, do, *arguments):
        try:
            do(*arguments)
        except Exception:  # noqa: BLE001 - whatever it is, the test tells
            self.errors.append(traceback.format_exc())

    def sample(self):
        started, samples = time.monotonic(), []
        while (now := time.monotonic()) < self.end:
            samples.append((now - started, self.done, anonymous_nbytes(), len(list(Path("/proc/self/fd").iterdir()))))
            time.sleep(max(0.05, SOAK_S / SAMPLES_PER_RUN))
        return samples


def soak(model, folder, number, seconds):
    """Let the threads of one process work; return samples and errors."""
    shared = Soak(Path(folder), number)
    shared.end = time.monotonic() + seconds
    with agentmem.open(Path(folder) / "store", model=model, config=CONFIG) as store:
        tasks = [(shared.sweep, store), *((shared.client, store, thread) for thread in range(NUM_THREADS))]
        threads = [threading.Thread(target=shared.attempt, args=task) for task in tasks]
        for thread in threads:
            thread.start()
        samples = shared.sample()
        for thread in threads:
            thread.join()
    return {"samples": samples, "errors": shared.errors}


def anonymous_nbytes():
    """Return the memory in use that is no file's: the map of the store is the page cache's."""
    ctypes.CDLL(None).malloc_trim(0)  # what is free, and only kept by malloc, is nobody's leak
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def hash_of(number, thread, turn):
    return (number * 100 + thread) * 100_000 + turn


if __name__ == "__main__":
    serve_tasks({"soak": soak})
