"""Sessions whose KV is on real servers: a Redis pool, an S3 lake. Whatever those do, answers are right and in time."""

import time
import urllib.request

import pytest
import torch

import agentmem
from agentmem import Reason
from agentmem.check import check
from agentmem.kv import record as record_format
from agentmem.kv.record import Record
from agentmem.racing import PREFILL
from agentmem.sinking import idle_blocks
from agentmem.testing.proxy import proxied
from agentmem.testing.redisprocess import RedisProcess, is_installed
from agentmem.tiers.disk import DiskTier

moto_server = pytest.importorskip("moto.server")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not is_installed(), reason="redis-server is not installed"),
]

TOKENS = [(29 * index * index + 3 * index + 7) % 490 + 1 for index in range(300)]
MORE = [7, 8, 9]
LIMIT_S = 60.0
RIGHT = {Reason.COMPLETE, Reason.MISSING, Reason.DAMAGED, Reason.TIER_UNAVAILABLE, Reason.FASTER}


@pytest.fixture(scope="module")
def s3():
    """The port of a server that speaks S3, with one bucket."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    request = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
    urllib.request.urlopen(request, timeout=10).close()
    yield port
    server.stop()


@pytest.fixture
def redis(tmp_path):
    process = RedisProcess(tmp_path / "redis")
    yield process
    process.kill()


class Far:
    """A store whose session's KV is on a server alone, behind a proxy."""

    def __init__(self, store, proxy, model, name):
        self.store, self.proxy, self.model, self.name = store, proxy, model, name
        session = store.create("s")
        session.forward(TOKENS)
        session.checkpoint("whole")
        session.close()
        self.leave_only_below()

    @property
    def blocks(self):
        return self.store._runtime.blocks

    def leave_only_below(self):
        if self.name == "lake":
            self.store.offload("s")
        else:
            self.leave_only_in_pool()
        self.blocks.host.clear()
        for _ in range(60):  # so slow a model that loading is tried first
            self.blocks.lower.rates.note(PREFILL, 20, 1.0)
            self.blocks.lower.rates.note(self.name, 10**9, 1.0)

    def leave_only_in_pool(self):
        disk = self.blocks.disk
        with self.store.environment.read() as txn:
            digests = idle_blocks(txn, [record.session_id for record in self.store.sessions()])
        found = [disk.load_record(digest) for digest in digests]
        records = [Record.of(record_format.read_meta(data), data) for data in found]
        assert all(self.blocks.lower.pool.put_many(records))
        self.store.environment.submit(lambda txn: disk.sink(txn, digests)).result()

    def resumed(self):
        """Resume, and go on; check that the answer is right, and in time. Return the reports of both."""
        started = time.monotonic()
        session = self.store.resume("s")
        resumed = session.active.report
        found = session.forward(MORE)
        assert time.monotonic() - started < LIMIT_S
        with torch.no_grad():
            cold = self.model(input_ids=torch.tensor([TOKENS + MORE])).logits[0, -3:]
        assert torch.allclose(found, cold, atol=1e-4)
        assert session.active.tokens == TOKENS + MORE
        assert {resumed.reason, session.active.report.reason} <= RIGHT
        assert check(self.store.environment, DiskTier(self.store.environment), read_data=True).problems == ()
        return resumed


@pytest.fixture
def far_pool(llama, store_path, redis):
    with proxied(redis.port) as proxy:
        config = agentmem.Config(block_size=16, pool=f"redis://127.0.0.1:{proxy.port}")
        with agentmem.open(store_path, model=llama, config=config) as store:
            far = Far(store, proxy, llama, "pool")
            far.redis = redis
            yield far


@pytest.fixture
def far_lake(llama, store_path, s3, monkeypatch, tmp_path):
    with proxied(s3) as proxy:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setattr("agentmem.lake.lake.TIMEOUT_S", 4.0)
        config = agentmem.Config(block_size=16, lake=f"s3://bucket/{tmp_path.name}")
        with agentmem.open(store_path, model=llama, config=config) as store:
            yield Far(store, proxy, llama, "lake")


@pytest.fixture(params=["pool", "lake"])
def far(request):
    return request.getfixturevalue(f"far_{request.param}")


def test_a_session_comes_back_from_a_server(far):
    report = far.resumed()

    assert report.reason is Reason.COMPLETE
    assert report.from_tier == {far.name: 300}
    assert report.num_computed == 0


def test_a_slow_server_costs_time(far):
    far.proxy.nbytes_per_s = 1_000_000

    assert far.resumed().reason is Reason.COMPLETE


def test_a_server_that_is_cut_off_costs_computing(far):
    far.proxy.close()

    assert far.resumed().num_reused == 0


def test_bytes_that_come_damaged_are_never_used(far):
    far.proxy.flip(40_000)

    report = far.resumed()

    assert report.reason in {Reason.COMPLETE, Reason.DAMAGED, Reason.TIER_UNAVAILABLE}


def test_a_pool_that_is_killed_costs_computing(far_pool):
    far_pool.redis.kill()

    report = far_pool.resumed()

    assert (report.reason, report.num_reused) == (Reason.TIER_UNAVAILABLE, 0)
    assert far_pool.store.stats()["pool_failures"] > 0


def test_a_pool_that_was_restarted_is_empty_and_costs_computing(far_pool):
    far_pool.redis.kill()
    far_pool.redis.start()

    report = far_pool.resumed()

    assert (report.reason, report.num_reused) == (Reason.MISSING, 0)


def test_a_pool_that_evicts_costs_what_it_evicted(far_pool):
    far_pool.blocks.lower.pool.remove_many(
        [block.digest for block in far_pool.store.resume("s", lazy=True).active._entry.state.blocks][5:6]
    )

    report = far_pool.resumed()

    assert (report.reason, report.from_tier) == (Reason.MISSING, {"pool": 80})


def test_a_pool_that_is_full_keeps_everything_on_disk(llama, store_path, tmp_path):
    process = RedisProcess(tmp_path / "small", "--maxmemory", "1500kb", "--maxmemory-policy", "noeviction")
    residency = agentmem.Residency(device_s=0.1, host_s=0.1)
    config = agentmem.Config(block_size=16, pool=f"redis://127.0.0.1:{process.port}", residency=residency)
    with agentmem.open(store_path, model=llama, config=config) as store:
        session = store.create("s")
        expected = session.forward(TOKENS)[-1]
        session.checkpoint()
        end = time.monotonic() + 20
        while (session.active.is_hot or store.stats()["host_nbytes"]) and time.monotonic() < end:
            time.sleep(0.05)

        assert store.stats()["host_nbytes"] == 0
        assert torch.allclose(session.forward([])[-1], expected, atol=1e-4)
        assert session.active.report.num_computed <= 1
    process.kill()


def test_a_lake_gives_a_session_to_another_machine_by_its_name(far_lake, llama, tmp_path):
    far_lake.store.resume("s", lazy=True).close()
    config = agentmem.Config(block_size=16, lake=far_lake.store.config.lake)
    with agentmem.open(tmp_path / "elsewhere", model=llama, config=config) as store:
        for _ in range(60):
            store._runtime.blocks.lower.rates.note(PREFILL, 20, 1.0)
            store._runtime.blocks.lower.rates.note("lake", 10**9, 1.0)
        session = store.resume("s")

        assert session.report.from_tier == {"lake": 300}
        found = session.forward(MORE)
        assert session.report.num_computed == 3 + session.report.num_pending
        with torch.no_grad():
            cold = llama(input_ids=torch.tensor([TOKENS + MORE])).logits[0, -3:]
        assert torch.allclose(found, cold, atol=1e-4)
        assert [checkpoint.message for checkpoint in session.checkpoints] == ["whole"]
        session.checkpoint("elsewhere")
        session.close()
        assert store.offload("s").num_to_lake > 0
        assert check(store.environment, DiskTier(store.environment), read_data=True).problems == ()


def test_a_name_that_neither_store_nor_lake_knows_is_not_found(far_lake):
    with pytest.raises(agentmem.NotFoundError):
        far_lake.store.resume("nobody")


def test_offload_needs_a_lake(llama, store_path):
    with agentmem.open(store_path, model=llama) as store:
        store.create("s").close()

        with pytest.raises(agentmem.NotFoundError, match=r"Config\.lake"):
            store.offload("s")


def test_what_one_machine_computed_another_finds_in_the_pool(far_pool, llama, tmp_path):
    config = agentmem.Config(block_size=16, pool=far_pool.store.config.pool)
    with agentmem.open(tmp_path / "elsewhere", model=llama, config=config) as store:
        for _ in range(60):
            store._runtime.blocks.lower.rates.note(PREFILL, 20, 1.0)
            store._runtime.blocks.lower.rates.note("pool", 10**9, 1.0)
        session = store.create("another")
        session.append(TOKENS)
        found = session.forward(MORE)

        assert session.report.from_tier == {"pool": 288}
        assert session.report.num_computed == 300 - 288 + 3
        with torch.no_grad():
            cold = llama(input_ids=torch.tensor([TOKENS + MORE])).logits[0, -3:]
        assert torch.allclose(found, cold, atol=1e-4)


def test_what_is_forgotten_leaves_pool_and_lake_too(far):
    session = far.store.resume("s", lazy=True)
    digests = [block.digest for block in session.active._entry.state.saved_blocks()]
    [tier] = far.blocks.lower.tiers
    assert all(tier.contains_many(digests))

    far.store.forget("s")

    if far.name == "pool":
        assert not any(tier.contains_many(digests))
    else:
        assert tier.names() == []
    with pytest.raises(agentmem.NotFoundError):
        far.store.resume("s")


def test_what_another_machine_put_into_the_lake_under_that_name_is_not_forgotten(far_lake, llama, tmp_path):
    config = agentmem.Config(block_size=16, lake=far_lake.store.config.lake)
    with agentmem.open(tmp_path / "elsewhere", model=llama, config=config) as store:
        session = store.create("s")
        session.forward(MORE)
        session.checkpoint()
        session.close()

        store.forget("s")

        [tier] = store._runtime.blocks.lower.tiers
        assert [label.name for label in tier.names()] == ["s"]
    far_lake.resumed()


def test_a_session_is_not_forgotten_in_part(far):
    far.proxy.close()

    with pytest.raises(agentmem.TierUnavailableError):
        far.store.forget("s")

    assert [record.name for record in far.store.sessions()] == ["s"]
