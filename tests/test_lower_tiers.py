"""Blocks that are in a tier below the disk alone: they come back bit for bit, or the caller is told why not."""

import threading

import pytest
import torch

import agentmem
from agentmem import Reason
from agentmem.check import check
from agentmem.choosing import Way, choose
from agentmem.errors import CorruptionError, TierUnavailableError
from agentmem.racing import PREFILL
from agentmem.sinking import idle_blocks, sink
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.sim import SimTier

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = agentmem.Config(block_size=16)
TOKENS = [(29 * index * index + 3 * index + 7) % 490 + 1 for index in range(300)]
FAST = 1e12


class BrokenTier(SimTier):
    """A tier whose link can be cut."""

    num_left = 1 << 30

    def _pass(self, nbytes):
        self.num_left -= 1
        if self.num_left < 0:
            raise TierUnavailableError("the link is cut")
        super()._pass(nbytes)


class DamagedTier(SimTier):
    """A tier that may be damaged as a whole."""

    is_damaged = False

    def _pass(self, nbytes):
        if self.is_damaged:
            raise CorruptionError("the tier's index is damaged")
        super()._pass(nbytes)


class AskedTier(SimTier):
    """A tier that counts how often it is asked for names."""

    num_asked = 0

    def find_many(self, names):
        self.num_asked += 1
        return super().find_many(names)


class Sunk:
    """A store with a session whose blocks are below the disk alone, and what it was."""

    def __init__(self, store, tier, tokens):
        self.store, self.tier = store, tier
        session = store.create("s")
        self.logits = session.forward(tokens)
        session.checkpoint("whole")
        session.close()
        self.sink()

    @property
    def blocks(self):
        return self.store._runtime.blocks

    @property
    def rates(self):
        return self.blocks.lower.rates

    def sink(self):
        self.store.flush()
        self.blocks.host.clear()
        with self.store.environment.read() as txn:
            digests = idle_blocks(txn, [record.session_id for record in self.store.sessions()])
        return sink(self.store.environment, self.blocks.disk, self.tier, digests)

    def expect(self, *, prefill, bandwidth):
        """Let the store believe in a speed of the model and of the tier."""
        for _ in range(60):
            self.rates.note(PREFILL, int(prefill), 1.0)
            self.rates.note(self.tier.name, int(bandwidth), 1.0)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Cut even the tiny models' blocks into parts."""
    monkeypatch.setattr("agentmem.tiers.parts._MIN_PART_NBYTES", 256)


@pytest.fixture
def sunk(tiny, store_path):
    tier = BrokenTier(bandwidth=FAST)
    with agentmem.open(store_path, model=tiny("llama"), config=CONFIG, tiers=[tier]) as store:
        yield Sunk(store, tier, TOKENS)


def cold_logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0]


def test_what_sank_is_not_on_disk_any_more_and_the_store_checks_clean(sunk):
    totals = sunk.blocks.disk.stats()

    assert totals.num_blocks == 19
    assert totals.stored_nbytes == 0
    assert sunk.sink().num_blocks == 0
    assert check(sunk.store.environment, DiskTier(sunk.store.environment), read_data=True).problems == ()


def test_blocks_come_back_from_below_bit_for_bit_and_rise_to_the_disk(sunk):
    sunk.expect(prefill=1, bandwidth=1e9)

    session = sunk.store.resume("s")

    assert session.active.report.from_tier == {"sim": 300}
    assert session.active.report.choice.way is Way.LOAD
    sunk.store.flush()
    again = session.fork("again", at=session.active.tip)
    assert torch.equal(again.forward([]), session.branch("main").forward([]))
    assert sunk.blocks.disk.stats().stored_nbytes > 0
    session.close()
    sunk.blocks.host.clear()
    assert sunk.store.resume("s").active.report.from_tier == {"disk": 300}


def test_a_branch_goes_on_from_below_as_if_it_had_never_left(sunk, tiny):
    sunk.expect(prefill=1, bandwidth=1e9)
    session = sunk.store.resume("s")
    last = session.forward(TOKENS[:20])

    assert torch.allclose(last, cold_logits(tiny("llama"), TOKENS + TOKENS[:20])[-20:], atol=1e-4)


def test_what_is_faster_to_compute_is_computed_and_the_report_says_so(sunk, tiny):
    sunk.expect(prefill=1e9, bandwidth=1)

    session = sunk.store.resume("s")

    report = session.active.report
    assert (report.reason, report.num_reused, report.num_pending) == (Reason.FASTER, 0, 300)
    assert report.choice.way is Way.COMPUTE
    assert report.choice.load_s > report.choice.compute_s
    assert torch.allclose(session.forward([])[-1], cold_logits(tiny("llama"), TOKENS)[-1], atol=1e-4)
    assert session.active.report.num_computed == 300


def test_a_prompt_that_is_computed_sooner_than_loaded_says_so(sunk):
    sunk.expect(prefill=1e9, bandwidth=1)

    session = sunk.store.create("other")
    session.append(TOKENS)
    session.forward([7])

    assert session.active.report.choice.way is Way.COMPUTE
    assert session.active.report.num_computed == 301


def test_a_race_computes_from_the_front_and_loads_from_the_back(sunk, tiny):
    sunk.tier._bandwidth = 1e6
    sunk.expect(prefill=3000, bandwidth=1e6)

    session = sunk.store.resume("s")

    report = session.active.report
    assert report.choice.way is Way.RACE
    assert report.reason is Reason.COMPLETE
    assert report.num_computed + report.from_tier.get("sim", 0) == 300
    assert report.num_pending == 0
    assert session.active.tokens == TOKENS
    assert torch.allclose(session.forward([7])[-1], cold_logits(tiny("llama"), [*TOKENS, 7])[-1], atol=1e-4)
    session.checkpoint("after the race")
    assert check(sunk.store.environment, DiskTier(sunk.store.environment), read_data=True).problems == ()
    session.close()
    sunk.blocks.host.clear()
    assert torch.allclose(
        sunk.store.resume("s").forward([9]), cold_logits(tiny("llama"), [*TOKENS, 7, 9])[-1:], atol=1e-4
    )


def test_layers_are_loaded_while_the_model_computes_and_logits_are_the_same_bits(sunk):
    sunk.expect(prefill=300, bandwidth=1e9)
    session = sunk.store.resume("s")
    expected = session.forward(TOKENS[:50])
    session.rewind(tokens=50)
    session.checkpoint()
    session.close()
    sunk.sink()

    sunk.tier._bandwidth = 2e6
    sunk.expect(prefill=300, bandwidth=2e6)
    session = sunk.store.resume("s", lazy=True)
    assert not session.active.is_hot
    found = session.forward(TOKENS[:50])

    report = session.active.report
    assert report.choice.way is Way.OVERLAP
    assert (report.from_tier, report.num_computed) == ({"sim": 300}, 50)
    assert torch.equal(found, expected)


def test_layers_come_to_where_the_model_reads_them_however_many_tokens_are_fed(sunk):
    more = [(7 * index) % 490 + 1 for index in range(500)]
    sunk.expect(prefill=1, bandwidth=1e9)
    session = sunk.store.resume("s")
    expected = session.forward(more)
    session.rewind(tokens=500)
    session.close()
    sunk.sink()

    sunk.tier._bandwidth = 2e6
    sunk.expect(prefill=3000, bandwidth=2e6)
    session = sunk.store.resume("s", lazy=True)
    found = session.forward(more)

    assert session.active.report.choice.way is Way.OVERLAP
    assert session.active.report.from_tier == {"sim": 300}
    assert torch.equal(found, expected)


def test_a_buffer_that_grows_under_a_load_ends_the_load(sunk, monkeypatch):
    sunk.expect(prefill=300, bandwidth=2e6)
    session = sunk.store.resume("s", lazy=True)
    begin = type(session.ledger.workspace).begin

    def begin_tightly(workspace, cursor, num_tokens):
        return begin(workspace, cursor, num_tokens - 500 if num_tokens > 500 else num_tokens)

    monkeypatch.setattr(type(session.ledger.workspace), "begin", begin_tightly)
    found = session.forward([5] * 499)

    monkeypatch.undo()
    session.rewind(tokens=499)
    assert torch.allclose(found, session.forward([5] * 499), atol=1e-4)


@pytest.mark.parametrize(("way", "num_calls"), [("load", 1), ("overlap", 4), ("race", 2)])
def test_a_link_that_is_cut_costs_time_and_never_an_answer(sunk, tiny, way, num_calls):
    speeds = {"load": (1, 1e9), "overlap": (300, 2e6), "race": (3000, 1e6)}[way]
    sunk.expect(prefill=speeds[0], bandwidth=speeds[1])
    sunk.tier._bandwidth = speeds[1]
    sunk.tier.num_left = num_calls

    session = sunk.store.resume("s", lazy=way == "overlap")
    found = session.forward(TOKENS[:50])

    assert torch.allclose(found, cold_logits(tiny("llama"), TOKENS + TOKENS[:50])[-50:], atol=1e-4)
    assert session.active.tokens == TOKENS + TOKENS[:50]
    assert sunk.store.stats()["sim_failures"] > 0


def test_damaged_bytes_below_are_noticed_and_computed_again(sunk, tiny):
    sunk.expect(prefill=1, bandwidth=1e9)
    digest = sorted(sunk.tier._records)[3]
    data = bytearray(sunk.tier._records[digest])
    data[-5] ^= 4
    sunk.tier._records[digest] = bytes(data)

    session = sunk.store.resume("s")

    assert session.active.report.reason is Reason.DAMAGED
    assert sunk.store.stats()["sim_blocks_damaged"] == 1
    assert torch.allclose(session.forward([7])[-1], cold_logits(tiny("llama"), [*TOKENS, 7])[-1], atol=1e-4)


def test_a_damaged_part_is_noticed_before_anything_of_the_pass_is_kept(sunk, tiny):
    sunk.expect(prefill=300, bandwidth=1e9)
    sunk.tier.fetch_parts(sorted(sunk.tier._records), 0)
    cut = sunk.tier._cut_blocks[sorted(sunk.tier._records)[3]]
    damaged = bytearray(cut.parts[-1])
    damaged[-3] ^= 8
    object.__setattr__(cut, "parts", (*cut.parts[:-1], bytes(damaged)))
    sunk.expect(prefill=100, bandwidth=1e6)

    session = sunk.store.resume("s", lazy=True)
    found = session.forward(TOKENS[:50])

    assert torch.allclose(found, cold_logits(tiny("llama"), TOKENS + TOKENS[:50])[-50:], atol=1e-4)
    assert session.active.report.reason is Reason.COMPLETE, "the records themselves are sound"


def test_a_tier_that_is_damaged_as_a_whole_costs_computing(tiny, store_path):
    tier = DamagedTier(bandwidth=FAST)
    with agentmem.open(store_path, model=tiny("llama"), config=CONFIG, tiers=[tier]) as store:
        sunk = Sunk(store, tier, TOKENS)
        sunk.expect(prefill=1, bandwidth=1e9)
        tier.is_damaged = True
        session = store.resume("s")

        assert session.active.report.reason is Reason.DAMAGED
        assert torch.allclose(session.forward([7])[-1], cold_logits(tiny("llama"), [*TOKENS, 7])[-1], atol=1e-4)
        assert store.stats()["sim_failures"] > 0


def test_the_tiers_below_are_asked_for_a_prompt_and_not_while_decoding(tiny, store_path):
    tier = AskedTier(bandwidth=FAST)
    with agentmem.open(store_path, model=tiny("llama"), config=CONFIG, tiers=[tier]) as store:
        session = store.create("s")
        session.append(TOKENS)
        session.forward([])
        num_asked = tier.num_asked
        for token in TOKENS[:40]:
            session.forward([token])

        assert tier.num_asked == num_asked > 0


def test_a_tier_that_may_lose_what_it_holds_takes_nothing_from_the_disk(sunk):
    with pytest.raises(agentmem.InvalidInputError, match="may lose"):
        sink(sunk.store.environment, sunk.blocks.disk, SimTier(bandwidth=FAST, is_durable=False), [])


def test_a_tier_that_is_full_leaves_the_rest_on_disk(tiny, store_path):
    tier = SimTier(bandwidth=FAST, capacity_nbytes=60_000)
    with agentmem.open(store_path, model=tiny("llama"), config=CONFIG, tiers=[tier]) as store:
        sunk = Sunk(store, tier, TOKENS)

        assert 0 < tier.nbytes <= 60_000
        assert sunk.blocks.disk.stats().stored_nbytes > 0
        sunk.expect(prefill=1, bandwidth=1e9)
        report = store.resume("s").active.report
        assert set(report.from_tier) == {"sim", "disk"}
        assert report.num_reused == 300


def test_a_store_that_is_closed_during_a_load_ends_its_threads(tiny, store_path):
    tier = SimTier(bandwidth=FAST)
    with agentmem.open(store_path, model=tiny("llama"), config=CONFIG, tiers=[tier]) as store:
        sunk = Sunk(store, tier, TOKENS)
        tier._bandwidth = 1e5
        sunk.expect(prefill=3000, bandwidth=1e5)
        store.resume("s")
    names = [thread.name for thread in threading.enumerate()]

    assert not any(name in {"agentmem-backward", "agentmem-layers"} for name in names)


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3", "deepseek_v3"])
def test_every_kind_of_kv_comes_back_from_below(tiny, store_path, family):
    tier = SimTier(bandwidth=FAST)
    with agentmem.open(store_path, model=tiny(family), config=CONFIG, tiers=[tier]) as store:
        sunk = Sunk(store, tier, TOKENS[:100])
        sunk.expect(prefill=1, bandwidth=1e9)
        found = store.resume("s").forward([5, 6, 7])

        assert torch.allclose(found, cold_logits(tiny(family), [*TOKENS[:100], 5, 6, 7])[-3:], atol=1e-3)


def test_tiers_without_a_model_are_refused(sunk):
    with pytest.raises(agentmem.InvalidInputError, match="give a model"):
        agentmem.open(sunk.store.path, tiers=[sunk.tier])


# -- the choice


def test_the_way_that_takes_the_least_time_is_chosen():
    assert choose(100, 1.0, 100.0).way is Way.LOAD
    assert choose(100, 100.0, 1.0).way is Way.COMPUTE
    assert choose(100, 1.0, 1.0, can_race=True).way is Way.RACE
    assert choose(100, 1.0, 100.0, 1.0, can_overlap=True, can_race=True).way is Way.OVERLAP
    assert choose(100, 0.0, 1.0, can_race=True).way is Way.LOAD


def test_where_nothing_is_known_both_are_tried_at_once():
    assert choose(100, None, None, can_race=True).way is Way.RACE
    assert choose(100, None, 1.0, can_overlap=True).way is Way.OVERLAP
    assert choose(100, None, 1.0).way is Way.LOAD


def test_rates_follow_what_is_measured():
    from agentmem.tiers.rates import Rates

    now = [0.0]
    rates = Rates(clock=lambda: now[0])
    with rates.measuring("disk") as measured:
        now[0] += 2.0
        measured.add(100)
    for _ in range(50):
        rates.note("disk", 10, 1.0)

    assert rates.get("disk") == pytest.approx(10.0, rel=0.01)
    assert rates.get("lake") is None


def test_a_simulated_link_takes_its_time():
    passed = []
    tier = SimTier(bandwidth=100.0, latency_s=0.5, sleep=passed.append)
    tier.contains_many([])

    assert passed == [0.5]
