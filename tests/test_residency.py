"""Sinking by time, hints and prefetches: where KV is, and that no answer depends on it."""

import math
import time

import pytest
import torch

import agentmem
from agentmem.adapters.transformers import TransformersAdapter
from agentmem.check import check
from agentmem.config import Residency
from agentmem.racing import PREFILL
from agentmem.sinking import idle_sessions
from agentmem.store import Store
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.pyramid import micron_pyramid
from agentmem.tiers.sim import SimTier

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = [(29 * index * index + 3 * index + 7) % 490 + 1 for index in range(64)]
FAST = 1e12
RESIDENCY = Residency(device_s=10.0, host_s=100.0, pool_s=1000.0, disk_s=10_000.0)


class Clock:
    """The time of day, and what a test adds to it."""

    def __init__(self):
        self.ahead_s = 0.0

    def __call__(self):
        return time.time() + self.ahead_s


class Tiers:
    """A store with all five tiers, none of them real but the disk."""

    def __init__(self, model, path, residency=RESIDENCY):
        self.clock = Clock()
        self.pool = SimTier(
            bandwidth=FAST, name="pool", is_durable=False, residency_s=residency.pool_s, clock=self.clock
        )
        self.lake = SimTier(bandwidth=FAST, name="lake", clock=self.clock)
        config = agentmem.Config(block_size=16, residency=residency)
        self.store = Store.open(
            path,
            lambda: TransformersAdapter(model, None, config),
            config,
            [self.pool, self.lake],
            clock=self.clock,
        )
        self.store._sweeper.close()  # each step is taken by the test

    @property
    def blocks(self):
        return self.store._runtime.blocks

    def where(self, digest):
        """Return the tiers that have a block, the nearest first."""
        found = ["device"] if self.store._runtime.device.nbytes else []
        found += ["host"] if self.blocks.host.contains(digest) else []
        found += ["pool"] if self.pool.contains_many([digest])[0] else []
        found += ["disk"] if self.blocks.disk.are_here([digest])[0] else []
        return found + (["lake"] if self.lake.contains_many([digest])[0] else [])

    def sweep_after(self, seconds):
        """Sweep when time has passed; return how many commits the store made for it."""
        self.store.flush()
        before = self.store.environment.last_commit
        self.clock.ahead_s += seconds
        self.store.sweep()
        self.store.environment.flush()
        return self.store.environment.last_commit - before


@pytest.fixture
def tiers(llama, store_path):
    found = Tiers(llama, store_path)
    with found.store:
        yield found


def sections_of(tiers, digest):
    """Return the KV of a block as its record on disk, or below, has it."""
    from agentmem.kv import record as record_format

    data = (
        tiers.blocks.disk.load_record(digest)
        if tiers.blocks.disk.are_here([digest])[0]
        else tiers.lake._records[digest]
    )
    meta = record_format.read_meta(data)
    out = [torch.empty(section.shape, dtype=getattr(torch, meta.dtype)) for section in meta.sections]
    record_format.unpack(data, out)
    return out


def test_one_block_walks_down_all_tiers_and_back_with_the_same_bytes(tiers):
    session = tiers.store.create("s")
    session.forward(TOKENS[:16])
    session.checkpoint()
    tiers.store.flush()
    [block] = session.active._entry.state.blocks
    walk, commits = [tiers.where(block.digest)], []
    before = sections_of(tiers, block.digest)

    commits.append(tiers.sweep_after(11))
    walk.append(tiers.where(block.digest))
    commits.append(tiers.sweep_after(101))
    walk.append(tiers.where(block.digest))
    commits.append(tiers.sweep_after(1001))
    walk.append(tiers.where(block.digest))
    session.close()
    tiers.blocks.host.clear()
    commits.append(tiers.sweep_after(10_001))
    walk.append(tiers.where(block.digest))

    assert walk == [["device", "disk"], ["host", "disk"], ["pool", "disk"], ["disk"], ["lake"]]
    assert max(commits) <= 1
    assert all(map(torch.equal, before, sections_of(tiers, block.digest)))
    tiers.blocks.lower.rates.note(PREFILL, 1, 1.0)
    tiers.blocks.lower.rates.note("lake", 10**9, 1.0)
    again = tiers.store.resume("s")
    assert again.report.from_tier == {"lake": 16}
    tiers.store.flush()
    assert tiers.where(block.digest) == ["device", "disk", "lake"]
    kv = [torch.empty_like(section) for section in before]
    again.ledger.workspace.gather(again.active._entry.state.cursor, 0, 16, kv)
    assert all(map(torch.equal, before, kv))
    assert check(tiers.store.environment, DiskTier(tiers.store.environment), read_data=True).problems == ()


def test_what_is_used_does_not_sink(tiers):
    session = tiers.store.create("s")
    session.forward(TOKENS)
    session.checkpoint()
    for _ in range(5):
        tiers.sweep_after(8)
        session.forward([])

    assert session.active.is_hot
    tiers.sweep_after(11)
    assert not session.active.is_hot


def test_a_session_that_was_used_since_is_not_idle(tiers):
    session = tiers.store.create("s")
    session.forward(TOKENS)
    session.checkpoint("made")
    made_s = time.time()
    session.forward([5])
    session.checkpoint("used")
    session.close()

    with tiers.store.environment.read() as txn:
        [record] = tiers.store.sessions()
        assert idle_sessions(txn, tiers.store.catalog, tiers.store.environment, made_s, []) == ([], [record.session_id])
        [idle], busy = idle_sessions(txn, tiers.store.catalog, tiers.store.environment, time.time(), [])
    assert (idle.session_id, busy) == (record.session_id, [])


def test_a_session_that_is_open_and_what_it_shares_stay_on_disk(tiers):
    for name in ("old", "open"):
        session = tiers.store.create(name)
        session.forward(TOKENS)
        session.checkpoint()
    tiers.store.resume("old").close()
    tiers.sweep_after(20_000)

    assert tiers.blocks.disk.stats().stored_nbytes > 0
    assert tiers.lake.nbytes == 0
    tiers.store.resume("open").close()
    tiers.sweep_after(20_000)
    assert tiers.blocks.disk.stats().stored_nbytes == 0
    assert tiers.lake.nbytes > 0


def test_a_lake_that_does_not_answer_leaves_everything_on_disk(tiers, monkeypatch):
    session = tiers.store.create("s")
    session.forward(TOKENS)
    session.checkpoint()
    session.close()

    def refuse(_nbytes):
        raise agentmem.TierUnavailableError("the link is cut")

    tiers.lake._pass = refuse
    tiers.sweep_after(20_000)

    assert tiers.blocks.disk.stats().stored_nbytes > 0
    assert tiers.store.resume("s").report.num_reused == 64


def test_sweeps_happen_by_themselves(llama, store_path):
    config = agentmem.Config(block_size=16, residency=Residency(device_s=0.2))
    with agentmem.open(store_path, model=llama, config=config) as store:
        session = store.create("s")
        session.forward(TOKENS)
        end = time.monotonic() + 20
        while session.active.is_hot and time.monotonic() < end:
            time.sleep(0.02)

        assert not session.active.is_hot
        assert session.forward([]).shape == (1, 512)


def test_by_default_nothing_sinks_and_no_thread_runs(llama, store_path):
    with agentmem.open(store_path, model=llama) as store:
        assert store._sweeper._thread.ident is None
        report = store.sweep()

    assert (report.num_branches, report.num_from_host, report.num_to_lake) == (0, 0, 0)


def test_the_micron_pyramid_is_a_preset():
    assert Residency.of(micron_pyramid()) == Residency(device_s=1.0, host_s=60.0, pool_s=3600.0, disk_s=86_400.0)
    assert Residency().device_s == math.inf
    with pytest.raises(agentmem.InvalidInputError, match="five tiers"):
        Residency.of(micron_pyramid()[:3])
    with pytest.raises(agentmem.InvalidInputError, match="device_s"):
        Residency(device_s=0)


# -- hints


@pytest.fixture
def crowded(llama, store_path):
    """A store whose device holds two of three branches."""
    with agentmem.open(store_path, model=llama, config=agentmem.Config(block_size=16)) as store:
        budget = 300 * store.token_nbytes
    config = agentmem.Config(block_size=16, device_budget_nbytes=budget)
    with agentmem.open(store_path, model=llama, config=config) as store:
        for name in ("a", "b", "c"):
            store.create(name)
        yield store


def used(store, *names):
    for name in names:
        store.resume(name).forward(TOKENS)


def hot(store):
    return {name for name in ("a", "b", "c") if store.resume(name, lazy=True).active.is_hot}


def test_without_hints_the_least_recently_used_leaves(crowded):
    used(crowded, "a", "b", "c")

    assert hot(crowded) == {"b", "c"}


def test_what_is_needed_last_leaves_first(crowded):
    used(crowded, "a", "b")
    crowded.resume("a", lazy=True).hint(steps=1)
    crowded.resume("b", lazy=True).hint(never=True)
    used(crowded, "c")

    assert hot(crowded) == {"a", "c"}


def test_who_waits_for_a_tool_stays(crowded):
    used(crowded, "a", "b")
    with crowded.resume("a", lazy=True).tool_call("pytest", expect=0.01):
        used(crowded, "c")

    assert hot(crowded) == {"a", "c"}


def test_a_hint_that_cannot_be_is_refused(crowded):
    session = crowded.resume("a", lazy=True)

    with pytest.raises(agentmem.InvalidInputError):
        session.hint()
    with pytest.raises(agentmem.NotFoundError):
        session.hint(steps=1, branch="none")


def test_a_prefetch_brings_kv_to_host_memory_and_may_be_cancelled(tiers):
    session = tiers.store.create("s")
    session.forward(TOKENS)
    session.checkpoint()
    session.close()
    tiers.blocks.host.clear()
    tiers.sweep_after(20_000)
    tiers.blocks.lower.rates.note(PREFILL, 1, 1.0)
    tiers.blocks.lower.rates.note("lake", 10**9, 1.0)
    session = tiers.store.resume("s", lazy=True)

    assert session.prefetch().wait(20) == 4
    assert session.prefetch().wait(20) == 0
    session.switch("main")
    assert session.report.from_tier == {"host": 64}
    cancelled = session.prefetch()
    cancelled.cancel()
    assert cancelled.wait(20) == 0


def test_sessions_that_nobody_has_open_sink_when_the_disk_budget_is_short(llama, store_path):
    lake = SimTier(bandwidth=FAST, name="lake")
    config = agentmem.Config(block_size=16, disk_budget_nbytes=3 << 20, codec="raw", host_budget_nbytes=0)
    with agentmem.open(store_path, model=llama, config=config, tiers=[lake]) as store:
        for number in range(6):
            session = store.create(f"s{number}")
            session.append([(7 * index + number) % 490 + 1 for index in range(500)])
            session.checkpoint()
            session.close()

        assert lake.nbytes > 0
        assert store.stats()["disk_live_nbytes"] <= 3 << 20
        assert [store.resume(f"s{number}").active.num_tokens for number in range(6)] == [500] * 6


@pytest.mark.parametrize("policy", ["lru", "slru", "arc"])
def test_any_policy_keeps_the_host_budget_and_the_bytes(llama, store_path, policy):
    config = agentmem.Config(block_size=16, host_budget_nbytes=40_000, host_policy=policy)
    with agentmem.open(store_path, model=llama, config=config) as store:
        session = store.create("s")
        expected = session.forward(TOKENS)
        for _ in range(3):
            session.evict("main")
            assert store.stats()["host_nbytes"] <= 40_000
            session.switch("main")

        session.rewind(tokens=1)
        assert torch.allclose(session.forward(TOKENS[-1:]), expected[-1:], atol=1e-4)


def test_a_policy_that_nobody_knows_is_refused():
    with pytest.raises(agentmem.InvalidInputError, match="host_policy"):
        agentmem.Config(host_policy="mru")
