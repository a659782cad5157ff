"""Budgets are promises: the most that each tier held in 12 scenarios, beside its budget. Nothing may be above.

    python benchmarks/budgets.py

Memory is counted at every allocation while a tensor lives, the data file's live pages after every commit
(`agentmem.testing.meter`); what the tiers count themselves is not asked. Tiny models in fp32: a token's KV is 1 KB.
"Scratch" is beside the budgets: single blocks on their way to or from disk, one for each thread at it.
"""

import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from harness import Options, Row, check, main

import agentmem
from agentmem.config import MIB
from agentmem.gc import compact
from agentmem.retention import Retention
from agentmem.session import Session
from agentmem.store import Store
from agentmem.testing.meter import Meter
from agentmem.testing.models import tiny_model

KB = 1 << 10
NUM_FORKS = 100
MAX_FILE_PER_LIVE = 1.2
Scenario = Callable[[Path], Row]


def run(options: Options) -> dict[str, object]:
    """Run every scenario in a store of its own."""
    torch.set_num_threads(1)
    logging.getLogger("agentmem").setLevel(logging.CRITICAL)  # full disks are what it is about
    found = [(scenario, scenario(options.folder / f"budget-{number}")) for number, scenario in enumerate(SCENARIOS)]
    rows = [row for scenario, peaks in found for row in _rows((scenario.__doc__ or "").partition(".")[0], peaks)]
    last = found[-1][1]
    return {
        "benchmark": "budgets",
        "what": "the highest overshoot of each budget",
        "rows": rows,
        "checks": [
            check("highest overshoot of any budget, KB", max(row["over KB"] for row in rows), 0.0),
            check("100 forks, 99 dropped: live after gc / trunk + 1 tail", last["live / expected"], 1.0),
            check("the same: file after compact / live", last["file / live"], MAX_FILE_PER_LIVE),
        ],
    }


def _rows(name: str, peaks: Row) -> list[Row]:
    """Return a line for each tier with a budget."""
    tiers = [tier for tier in ("device", "host", "disk") if f"{tier} budget" in peaks]
    return [
        {
            "scenario": name if tier == tiers[0] else "",
            "tier": tier,
            "budget KB": peaks[f"{tier} budget"] / KB,
            "peak KB": peaks[f"{tier} peak"] / KB,
            "over KB": max(peaks[f"{tier} peak"] - peaks[f"{tier} budget"], 0) / KB,
            "scratch KB": peaks["scratch"] / KB,
            "file KB": peaks["file"] / KB,
        }
        for tier in tiers
    ]


# -- scenarios


def growing(path: Path) -> Row:
    """One branch that grows until two buffers of its size would not fit: it is copied by way of RAM."""
    with _measured(path, device_budget_nbytes=700 * KB) as (store, row):
        session = store.create("s")
        for step in range(30):
            session.forward(_tokens(step, 20))
    return row


def sessions(path: Path) -> Row:
    """Four sessions of three branches, in turn, three of which fit."""
    with _measured(path, device_budget_nbytes=700 * KB, host_budget_nbytes=700 * KB) as (store, row):
        for turn in range(3):
            for number in range(4):
                session = _session(store, f"s{number}", 200)
                for branch in range(3):
                    _branch(session, f"b{branch}")
                    session.switch(f"b{branch}")
                    session.forward(_tokens(10 * turn + branch, 30))
    return row


def too_large(path: Path) -> Row:
    """One branch larger than the device budget, in one step: it is refused."""
    with _measured(path, device_budget_nbytes=300 * KB) as (store, row):
        session = store.create("s")
        session.forward(_tokens(0, 100))
        with contextlib.suppress(agentmem.CapacityError):
            session.forward(_tokens(1, 600))
        session.forward([5])
    return row


def batched(path: Path) -> Row:
    """Eight branches that go on together, in rows of one buffer that grows."""
    with _measured(path, device_budget_nbytes=1500 * KB) as (store, row):
        session = _session(store, "s", 200)
        for branch in range(8):
            _branch(session, f"b{branch}")
        with session.batch([f"b{branch}" for branch in range(8)]) as batch:
            batch.forward([_tokens(branch, 20) for branch in range(8)])
            batch.generate(max_new_tokens=60)
    return row


def layer_states(path: Path) -> Row:
    """Layer states of a recurrent model at 20 checkpoints and forks, five of which fit."""
    with _measured(path, "mamba2", device_budget_nbytes=400 * KB, host_budget_nbytes=200 * KB) as (store, row):
        session = store.create("s")
        for number in range(20):
            session.forward(_tokens(number, 20))
            session.checkpoint()
            _branch(session, f"b{number}")
            session.forward([number + 1], branch=f"b{number}")
    return row


def media(path: Path) -> Row:
    """Model inputs (encoder's texts of 12 sessions), kept in RAM too."""
    with _measured(path, "t5", host_budget_nbytes=8 * KB) as (store, row):
        for number in range(12):
            ids = torch.tensor([_tokens(number, 300)])
            session = store.create(f"s{number}")
            session.append([0], input_ids=ids, attention_mask=torch.ones_like(ids))
            session.forward()
            session.checkpoint()
    return row


def evicted_to_host(path: Path) -> Row:
    """Branches that leave the device for a host tier with room for two blocks."""
    with _measured(path, device_budget_nbytes=600 * KB, host_budget_nbytes=130 * KB) as (store, row):
        for turn in range(3):
            for number in range(3):
                session = _session(store, f"s{number}", 300)
                session.switch("main")
                session.forward(_tokens(turn, 5))
    return row


def dropped(path: Path) -> Row:
    """Forks that are kept, checkpointed and dropped, ten times what the disk budget holds: gc without grace."""
    with _measured(path, disk_budget_nbytes=4 * MIB) as (store, row):
        session = _session(store, "s", 300)
        for number in range(80):
            _branch(session, f"b{number}")
            session.forward(_tokens(number, 200), branch=f"b{number}")
            session.checkpoint(branch=f"b{number}")
            session.drop(f"b{number}")
    return row


def one_entry(path: Path) -> Row:
    """One model input larger than the whole disk budget: it is refused, and nothing of it written."""
    with _measured(path, "t5", disk_budget_nbytes=2 * MIB) as (store, row):
        ids = torch.randint(1 << 62, (1, 400_000))
        session = store.create("s")
        with contextlib.suppress(agentmem.StorageFullError):
            session.append([0], input_ids=ids, attention_mask=torch.ones_like(ids))
    return row


def filled(path: Path) -> Row:
    """Checkpoints until the disk is full, and then tokens only, until these are refused too."""
    with _measured(path, disk_budget_nbytes=2 * MIB) as (store, row):
        session = store.create("s")
        _until_full(lambda number: (session.forward(_tokens(number, 100)), session.checkpoint()))
        _until_full(lambda number: (session.fork(f"t{number}"), session.append(_tokens(number, 2000)), store.flush()))
    return row


def restarted(path: Path) -> Row:
    """Three restarts, each of which stores more than fits beside what is there already."""
    row: Row = {}
    for restart in range(4):
        with _measured(path, disk_budget_nbytes=3 * MIB) as (store, found):
            session = _session(store, f"s{restart}", 300)
            _until_full(lambda number, s=session: (s.forward(_tokens(number, 100)), s.checkpoint()), at_most=20)
        row = {name: max(value, row.get(name, 0)) for name, value in found.items()}
    return row


def forks(path: Path) -> Row:
    """100 forks of a trunk, 99 dropped, then gc, prune and compact."""
    with _measured(path, disk_budget_nbytes=64 * MIB) as (store, row):
        session = _session(store, "s", 500)
        for number in range(NUM_FORKS):
            _branch(session, f"b{number}")
            session.forward(_tokens(number, 70), branch=f"b{number}")
            session.checkpoint(branch=f"b{number}")
        session.switch("b0")
        for number in range(1, NUM_FORKS):
            session.drop(f"b{number}")
        session.drop("main")
        session.close()
        store.prune(Retention(keep_named=False, keep_branch_points=False))
        store.gc(grace_s=0)
        stored = store.stats()["disk_stored_nbytes"]
    with _measured(path.with_name("trunk")) as (store, _):
        session = _session(store, "s", 500)
        session.forward(_tokens(0, 70))
        session.checkpoint()
        session.close()
        store.prune(Retention(keep_named=False, keep_branch_points=False))
        store.gc(grace_s=0)
        expected = store.stats()["disk_stored_nbytes"]
    compact(path)
    with agentmem.open(path) as view:
        live, file = view.environment.live_nbytes, view.environment.nbytes
    return row | {"live / expected": stored / expected, "file / live": file / live}


SCENARIOS: tuple[Scenario, ...] = (
    growing,
    sessions,
    too_large,
    batched,
    layer_states,
    media,
    evicted_to_host,
    dropped,
    one_entry,
    filled,
    restarted,
    forks,
)


# -- inside


@contextlib.contextmanager
def _measured(path: Path, family: str = "llama", **budgets: int) -> Iterator[tuple[Store, Row]]:
    """Open a store with budgets; the row gets peaks and overshoots at the end."""
    row: Row = {}
    config = agentmem.Config(**budgets)
    with (
        Meter().measuring() as meter,
        contextlib.suppress(agentmem.StorageFullError),  # raised by closing a full store
        agentmem.open(path, model=tiny_model(family), config=config) as store,
    ):
        meter.reset()  # agentmem.open tries the model out
        yield store, row
    for tier in ("device", "host", "disk"):
        if f"{tier}_budget_nbytes" in budgets:
            row |= {f"{tier} budget": budgets[f"{tier}_budget_nbytes"], f"{tier} peak": meter.peaks[tier]}
    row |= {"file": meter.peaks["file"], "scratch": meter.peaks["scratch"]}


def _tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1, 256), k=length)


def _session(store: Store, name: str, num_tokens: int) -> Session:
    """Return a session with a trunk, made when there is none."""
    if any(record.name == name for record in store.sessions()):
        return store.resume(name)
    session = store.create(name)
    session.append(_tokens(len(name) * 1000 + ord(name[-1]), num_tokens))
    session.checkpoint("trunk")
    return session


def _branch(session: Session, name: str) -> None:
    if name not in session.branches:
        session.fork(name, at=session.checkpoints[0])


def _until_full(step: Callable[[int], object], at_most: int = 1000) -> None:
    """Do something again and again until the disk has no room for it."""
    with contextlib.suppress(agentmem.StorageFullError):
        for number in range(at_most):
            step(number)


if __name__ == "__main__":
    main(run)
