"""KV from a lossy tier is used, said to be approximate, and never passes for exact, whatever happens afterwards."""

import pytest
import torch

import agentmem
from agentmem import Reason
from agentmem.check import check
from agentmem.errors import InvalidInputError
from agentmem.kv.record import Record, read_meta
from agentmem.levels import LOSSY_CODECS
from agentmem.marks import MarkKind
from agentmem.racing import PREFILL
from agentmem.sinking import idle_blocks, sink
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.lossy import LossyTier
from agentmem.tiers.sim import SimTier

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = agentmem.Config(block_size=16)
TOKENS = [(29 * index * index + 3 * index + 7) % 490 + 1 for index in range(300)]
NUM_BLOCKS = 19
LOSSY = slice(1, 18)
"""The blocks that a lossy tier codes: not the first one, and not the last one, which is short."""

FAST = 1e12


class World:
    """A store above a lossy pool and an exact lake, and what its session was before it sank."""

    def __init__(self, model, path, codec="q1"):
        self.server = SimTier(bandwidth=FAST, name="pool", is_durable=False)
        self.pool = LossyTier(self.server, codec)
        self.lake = SimTier(bandwidth=FAST, name="lake")
        self.store = agentmem.open(path, model=model, config=CONFIG, tiers=[self.pool, self.lake])
        session = self.store.create("s")
        self.logits = session.forward(TOKENS)
        session.checkpoint("whole")
        self.digests = [block.digest for block in session.branch("main")._entry.state.saved_blocks()]
        session.close()
        self.store.flush()
        self.records = [self.record(digest) for digest in self.digests]

    @property
    def blocks(self):
        return self.store._runtime.blocks

    def record(self, digest):
        data = self.blocks.disk.load_record(digest)
        return Record.of(read_meta(data), data)

    def sink(self, *, to_pool=True):
        """Leave exact KV in the lake alone, and lossy copies in the pool."""
        if to_pool:
            assert self.pool.put_many(self.records) == [True] * NUM_BLOCKS
        self.store.flush()
        self.blocks.host.clear()
        with self.store.environment.read() as txn:
            digests = idle_blocks(txn, [record.session_id for record in self.store.sessions()])
        sink(self.store.environment, self.blocks.disk, self.lake, digests)
        for _ in range(60):
            self.blocks.lower.rates.note(PREFILL, 1, 1.0)
            self.blocks.lower.rates.note("pool", 10**9, 1.0)
            self.blocks.lower.rates.note("lake", 10**9, 1.0)


@pytest.fixture
def world(tiny, store_path):
    made = World(tiny("llama"), store_path)
    yield made
    made.store.close()


def state_of(branch):
    return branch._entry.state


def cold_logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0]


def test_what_a_lossy_pool_gives_is_used_and_reported_as_approximate(world, tiny):
    world.sink()

    session = world.store.resume("s")

    report = session.active.report
    assert report.from_tier == {"pool": 300}
    assert (report.num_approximate, report.num_reused, report.reason) == (272, 300, Reason.COMPLETE)
    assert world.store._runtime.counters.snapshot()["pool_blocks_lossy"] == NUM_BLOCKS - 2
    assert world.store._runtime.counters.snapshot()["tokens_lossy"] == 272
    last = session.forward(TOKENS[:20])
    wanted = cold_logits(tiny("llama"), TOKENS + TOKENS[:20])[-20:]
    assert not torch.equal(last, wanted)
    assert torch.allclose(last, wanted, atol=0.2)


def test_approximate_kv_never_has_the_names_of_exact_kv(world):
    world.sink()
    exact = {record.block_hash for record in world.records[LOSSY]}

    session = world.store.resume("s")
    session.forward(TOKENS[:40])
    session.checkpoint("on")
    blocks = state_of(session.branch("main")).saved_blocks()[1:]

    assert exact.isdisjoint(block.block_hash for block in blocks)
    assert set(world.digests).isdisjoint(block.digest for block in blocks)
    assert all(read_meta(world.blocks.disk.load_record(block.digest)).is_parent_lossy for block in blocks)
    assert not any(world.blocks.disk.are_here(world.digests[LOSSY]))
    assert [world.blocks.disk.find(record.block_hash) for record in world.records] == world.digests


def test_that_kv_is_approximate_survives_a_checkpoint_and_a_restart(world, tiny, store_path):
    world.sink()
    session = world.store.resume("s")
    session.forward(TOKENS[:40])
    session.checkpoint("on")
    names = [block.block_hash for block in state_of(session.branch("main")).saved_blocks()]
    session.forward(TOKENS[:4])
    session.checkpoint("further")
    session.close()
    world.store.close()

    with agentmem.open(store_path, model=tiny("llama"), config=CONFIG) as store:
        session = store.resume("s")
        report, state = session.active.report, state_of(session.branch("main"))

        assert (report.num_approximate, report.from_tier) == (272, {"disk": 344})
        assert [mark.kind for mark in state.marks] == [MarkKind.SPLICE]
        assert [block.block_hash for block in state.saved_blocks()][:21] == names[:21]
        assert check(store.environment, DiskTier(store.environment), read_data=True).problems == ()


def test_the_checkpoint_before_still_names_the_exact_kv_and_gets_it_from_the_lake(world):
    world.sink()
    session = world.store.resume("s")
    whole = session.active.tip
    session.forward(TOKENS[:40])
    session.checkpoint("on")
    world.server.remove_many(list(world.server._records))

    branch = session.fork("exact", at=whole)
    branch.forward([])

    assert state_of(branch).marks == ()
    assert branch.report.num_approximate == 0
    assert [block.digest for block in state_of(branch).saved_blocks()] == world.digests
    assert branch.report.from_tier == {"lake": 272, "disk": 28}


def test_a_fork_of_the_exact_checkpoint_takes_no_lossy_kv_from_the_device(world):
    world.sink()
    session = world.store.resume("s")
    session.forward(TOKENS[:40])
    world.server.remove_many(list(world.server._records))

    branch = session.fork("exact", at=session.branch("main").tip)
    session.switch("exact")

    assert "device" not in branch.report.from_tier
    assert branch.report.num_approximate == 0


def test_where_the_pool_has_only_some_blocks_only_those_are_marked_but_all_after_them_are_renamed(world):
    world.sink(to_pool=False)
    world.pool.put_many(world.records[4:6])

    session = world.store.resume("s")
    state = state_of(session.branch("main"))

    assert session.active.report.from_tier == {"lake": 268, "pool": 32}
    assert session.active.report.num_approximate == 32
    assert [(mark.start, mark.stop) for mark in state.marks] == [(64, 96)]
    same = [
        block.block_hash == record.block_hash
        for block, record in zip(state.blocks.slice(), world.records, strict=False)
    ]
    assert same == [True] * 4 + [False] * 14


def test_two_resumes_from_one_lossy_pool_have_the_same_names_and_bytes(world):
    world.sink()
    session = world.store.resume("s")
    whole = session.active.tip
    session.checkpoint("one")
    one = [(block.block_hash, block.digest) for block in state_of(session.branch("main")).blocks.slice()]

    branch = session.fork("two", at=whole)
    branch.forward([])
    two = state_of(branch)
    two.save_blocks()

    assert [(block.block_hash, block.digest) for block in two.blocks.slice()] == one


def test_another_session_that_reuses_lossy_kv_is_marked_as_well(world):
    world.sink()
    session = world.store.create("other")

    session.append(TOKENS[:200])
    session.forward([])

    report, state = session.active.report, state_of(session.branch("main"))
    names = {block.block_hash for block in state.blocks.slice(1)}
    assert report.num_approximate == 176
    assert report.from_tier == {"pool": 192}
    assert names.isdisjoint(record.block_hash for record in world.records)


def test_lossy_kv_is_not_brought_near_under_the_name_of_exact_kv(world):
    world.sink()
    known = [
        world.blocks.known(each.block_hash, 16 * n, 16 * n + each.num_tokens, each.digest)
        for n, each in enumerate(world.records)
    ]

    num_blocks = world.blocks.bring_near(known[LOSSY], lambda: False)

    assert num_blocks == 0
    assert not any(world.blocks.host.contains(digest) for digest in world.digests)


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_a_lossy_tier_keeps_less_and_tells_nobody_that_asks_for_exact_blocks(tiny, store_path, codec):
    world = World(tiny("llama"), store_path, codec)
    world.pool.put_many(world.records)

    assert world.pool.contains_many(world.digests) == [True] * NUM_BLOCKS
    assert world.server.contains_many(world.digests[LOSSY]) == [False] * 17
    assert world.server.find_many([record.block_hash for record in world.records[LOSSY]]) == [None] * 17
    assert world.server.nbytes < sum(len(record.data) for record in world.records) / 1.5
    assert LossyTier(world.server, "q9").contains_many(world.digests[1:2]) == [False]
    world.pool.remove_many(world.digests)
    assert world.server.nbytes == 0
    world.store.close()


def test_what_was_lossy_once_is_not_coded_lossily_again(world):
    world.sink()
    session = world.store.resume("s")
    session.checkpoint("one")
    records = [world.record(block.digest) for block in state_of(session.branch("main")).saved_blocks()]

    world.pool.put_many(records)

    assert world.server.fetch_many([record.digest for record in records]) == [record.data for record in records]


def test_a_lossy_record_from_a_tier_that_is_not_lossy_is_not_used(tiny, store_path):
    world = World(tiny("llama"), store_path)
    world.pool.put_many(world.records)
    lossy = [data for data in world.server._records.values() if read_meta(data).is_lossy]
    liar = SimTier(bandwidth=FAST, name="liar", is_durable=False)
    liar._records.update({read_meta(data).origin: data for data in lossy})
    liar._used_s.update(dict.fromkeys(liar._records, liar._clock()))
    world.blocks.lower.tiers = (liar, world.lake)
    world.sink(to_pool=False)

    session = world.store.resume("s")

    assert session.active.report.num_approximate == 0
    assert world.store._runtime.counters.snapshot()["liar_blocks_damaged"] == len(lossy)
    assert "liar" not in session.active.report.from_tier
    world.store.close()


def test_a_lossy_tier_is_never_the_last_copy(world):
    tier = LossyTier(world.lake, "q1")

    with pytest.raises(InvalidInputError, match="may lose what it is given"):
        sink(world.store.environment, world.blocks.disk, tier, world.digests)


def test_an_unknown_codec_of_the_pool_is_refused():
    with pytest.raises(InvalidInputError, match="pool_codec"):
        agentmem.Config(pool="redis://127.0.0.1:1", pool_codec="q5")
