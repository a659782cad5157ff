"""A pool whose server is killed, slow, stalled, full, evicting, or wrong: bounded time, named errors, no wrong byte."""

import random
import threading
import time

import pytest
import torch
import xxhash

from agentmem.errors import AgentMemError, TierUnavailableError
from agentmem.ids import BlockHash, Fingerprint
from agentmem.kv.header import VERSION
from agentmem.kv.record import pack
from agentmem.reasons import Reason
from agentmem.stats import Counters
from agentmem.testing.proxy import proxied
from agentmem.testing.record_tier_suite import holds
from agentmem.testing.redisprocess import RedisProcess, is_installed
from agentmem.testing.tier_suite import make_record
from agentmem.tiers.pool import PoolTier
from agentmem.tiers.redisserver import Patience, RedisServer

pytestmark = pytest.mark.skipif(not is_installed(), reason="redis-server is not installed")

PATIENCE = Patience(connect_s=2.0, idle_s=1.0)


def big_record(seed, num_tokens=64):
    """Pack 8 KiB a token that do not compress."""
    generator = torch.Generator().manual_seed(seed)
    sections = [torch.randn((2, 4, num_tokens, 128), generator=generator) for _ in range(2)]
    return pack(
        sections, block_hash=BlockHash(bytes([seed]) * 32), fingerprint=Fingerprint(bytes(32)), start=0, codec="raw"
    )


class Pool:
    """A server, a proxy in front of it, a handle behind that, and a way past both."""

    def __init__(self, process, proxy, patience=PATIENCE):
        self.process = process
        self.proxy = proxy
        self.now_s = 0.0
        self.counters = Counters()
        self.raw = RedisServer(f"redis://127.0.0.1:{process.port}", patience=Patience())
        self.tier = self.handle(patience)

    def handle(self, patience=PATIENCE):
        return PoolTier(
            f"redis://127.0.0.1:{self.proxy.port}",
            counters=self.counters,
            patience=patience,
            clock=lambda: self.now_s + time.monotonic(),
        )

    def say(self, *command):
        return self.raw.run([command], nbytes=1 << 20)[0]

    def close(self):
        self.tier.close()
        self.raw.close()


@pytest.fixture(scope="module")
def shared_process(tmp_path_factory):
    process = RedisProcess(tmp_path_factory.mktemp("redis"))
    yield process
    process.kill()


@pytest.fixture
def pool(shared_process):
    with proxied(shared_process.port) as proxy:
        pool = Pool(shared_process, proxy)
        pool.say("FLUSHALL")
        pool.say("CONFIG", "SET", "maxmemory", "0")
        yield pool
        pool.close()


@pytest.fixture
def mortal(tmp_path):
    """A pool whose server the test may kill."""
    process = RedisProcess(tmp_path / "redis")
    with proxied(process.port) as proxy:
        pool = Pool(process, proxy)
        yield pool
        pool.close()
    process.kill()


class Stopwatch:
    """How long the block below took."""

    def __enter__(self):
        self._start_s = time.monotonic()
        return self

    def __exit__(self, *error):
        self.elapsed_s = time.monotonic() - self._start_s


# ---- killed, restarted


def test_a_server_killed_in_mid_load_is_unavailable_and_empty_afterwards(mortal):
    records = [big_record(seed) for seed in range(24)]  # 12 MiB, of which the kernel still delivers 2 or 3
    digests = [record.digest for record in records]
    mortal.tier.put_many(records)
    mortal.proxy.nbytes_per_s = 2_000_000
    threading.Timer(0.5, mortal.process.kill).start()

    with Stopwatch() as loading, pytest.raises(TierUnavailableError, match="pool redis://127"):
        mortal.tier.fetch_many(digests)
    mortal.proxy.nbytes_per_s = None
    mortal.process.start()

    assert 0.4 < loading.elapsed_s < 5.0
    assert mortal.tier.fetch_many(digests) == [None] * 24
    assert mortal.tier.put_many(records) == [True] * 24
    assert all(holds(mortal.tier, record) for record in records)
    assert mortal.counters.snapshot()["pool_calls_failed"] == 1


def test_a_connection_cut_in_mid_load_costs_one_try_more(pool):
    records = [big_record(seed) for seed in range(8)]
    pool.tier.put_many(records)
    pool.proxy.cut_after(1_000_000)

    assert pool.tier.fetch_many([record.digest for record in records]) == [record.data for record in records]


def test_a_restarted_server_is_empty_and_no_error(mortal):
    record = big_record(1)
    mortal.tier.put_many([record])
    mortal.process.kill()
    mortal.process.start()

    assert mortal.tier.contains_many([record.digest]) == [False]
    assert mortal.tier.put_many([record]) == [True]
    assert holds(mortal.tier, record)
    assert "pool_calls_failed" not in mortal.counters.snapshot()


def test_a_server_that_stays_away_is_left_alone_and_found_again_when_it_is_back(mortal):
    record = big_record(1)
    mortal.tier.put_many([record])
    mortal.process.kill()

    for _ in range(10):
        with pytest.raises(TierUnavailableError):
            mortal.tier.contains_many([record.digest])

    assert mortal.tier.is_open
    assert mortal.counters.snapshot()["pool_calls_failed"] == 3
    assert mortal.counters.snapshot()["pool_calls_skipped"] == 7
    mortal.process.start()
    with pytest.raises(TierUnavailableError, match="left alone"):
        mortal.tier.put_many([record])
    mortal.now_s += 1.1
    assert mortal.tier.put_many([record]) == [True]
    assert not mortal.tier.is_open
    assert holds(mortal.tier, record)


# ---- slow


def test_a_server_at_one_megabyte_a_second_gives_right_bytes_in_the_time_that_takes(pool):
    records = [big_record(seed) for seed in range(4)]
    pool.tier.put_many(records)
    pool.proxy.nbytes_per_s = 1_000_000

    with Stopwatch() as loading:
        data = pool.tier.fetch_many([record.digest for record in records])

    assert data == [record.data for record in records]
    assert 1.5 < loading.elapsed_s < 10.0


def test_a_server_slower_than_one_is_willing_to_wait_for_is_unavailable_in_bounded_time(pool):
    record = big_record(1, num_tokens=512)
    pool.tier.put_many([record])
    hasty = pool.handle(Patience(idle_s=0.5, min_nbytes_per_s=8_000_000))
    pool.proxy.nbytes_per_s = 1_000_000

    with Stopwatch() as loading, pytest.raises(TierUnavailableError):
        hasty.fetch_many([record.digest])

    assert loading.elapsed_s < 4.0  # 0.5 s + 4 MB at 8 MB/s are 1 s; at 1 MB/s they are 4 s
    hasty.close()


def test_a_server_that_sends_drop_by_drop_does_not_hold_the_caller(pool):
    record = big_record(1)
    pool.tier.put_many([record])
    hasty = pool.handle(Patience(idle_s=1.0, min_nbytes_per_s=8_000_000))
    pool.proxy.nbytes_per_s = 40_000  # 800 bytes each 20 ms: never idle, and 13 s in all

    with Stopwatch() as loading, pytest.raises(TierUnavailableError):
        hasty.fetch_many([record.digest])

    assert loading.elapsed_s < 4.0
    hasty.close()


@pytest.mark.parametrize("verb", ["contains", "fetch", "put"])
def test_a_server_that_falls_silent_is_unavailable_in_bounded_time(pool, verb):
    stored, new = big_record(1), big_record(2)
    pool.tier.put_many([stored])
    pool.proxy.is_stalled = True
    verbs = {
        "contains": lambda: pool.tier.contains_many([stored.digest]),
        "fetch": lambda: pool.tier.fetch_many([stored.digest]),
        "put": lambda: pool.tier.put_many([new]),
    }

    with Stopwatch() as waiting, pytest.raises(TierUnavailableError):
        verbs[verb]()
    pool.proxy.is_stalled = False

    assert 0.9 < waiting.elapsed_s < 5.0
    assert holds(pool.tier, stored)


# ---- full, evicting


def test_a_full_server_refuses_some_and_keeps_the_others(pool):
    records = [big_record(seed) for seed in range(40)]
    pool.say("CONFIG", "SET", "maxmemory-policy", "noeviction")
    pool.say("CONFIG", "SET", "maxmemory", "10mb")

    stored = pool.tier.put_many(records)

    assert 5 < sum(stored) < 40
    assert [holds(pool.tier, record) for record in records] == stored
    assert pool.counters.snapshot()["pool_blocks_refused"] == 40 - sum(stored)
    assert "pool_calls_failed" not in pool.counters.snapshot()
    pool.say("CONFIG", "SET", "maxmemory", "0")
    assert pool.tier.put_many(records) == [True] * 40


def test_an_evicting_server_forgets_blocks_and_gives_the_others_whole(pool):
    records = [big_record(seed) for seed in range(40)]
    pool.say("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    pool.say("CONFIG", "SET", "maxmemory", "10mb")
    for record in records:
        pool.tier.put_many([record])

    data = pool.tier.fetch_many([record.digest for record in records])
    found = pool.tier.find_many([record.block_hash for record in records])

    assert 5 < sum(each is not None for each in data) < 40
    assert all(each in {None, record.data} for each, record in zip(data, records, strict=True))
    assert all((digest is not None) <= (each is not None) for digest, each in zip(found, data, strict=True))


# ---- damaged


def garbage(record):
    """Values that are not the record, by what they are."""
    newer = bytearray(record.data)
    newer[len(record.data) // 2] ^= 1
    other = make_record(9).data
    return {
        "noise": random.Random(0).randbytes(5000),
        "a byte": b"x",
        "cut short": (xxhash.xxh3_128_digest(record.data) + record.data)[:-1],
        "a flipped bit": xxhash.xxh3_128_digest(record.data) + bytes(newer),
        "another block": xxhash.xxh3_128_digest(other) + other,
        "no checksum": record.data,
    }


@pytest.mark.parametrize("kind", garbage(make_record(1)))
def test_a_value_that_is_not_the_block_is_counted_and_removed(pool, kind):
    record = make_record(1)
    pool.tier.put_many([record, make_record(2)])
    pool.say("SET", pool.tier._record_key(record.digest), garbage(record)[kind])

    assert pool.tier.fetch_many([record.digest, make_record(2).digest])[0] in {None, b""}
    assert pool.tier.fetch_many([make_record(2).digest]) == [make_record(2).data]
    assert pool.tier.contains_many([record.digest]) == [False]
    assert pool.tier.put_many([record]) == [True]
    assert holds(pool.tier, record)


def test_a_key_that_holds_no_string_is_removed_as_damaged(pool):
    record = make_record(1)
    pool.say("LPUSH", pool.tier._record_key(record.digest), b"x")
    pool.say("LPUSH", pool.tier._name_key(record.block_hash), b"x")

    assert pool.tier.find_many([record.block_hash]) == [None]
    assert pool.tier.fetch_many([record.digest]) == [None]
    assert pool.tier.put_many([record]) == [True]
    assert holds(pool.tier, record)


@pytest.mark.parametrize("value", [b"", b"x", bytes(32), bytes(33)])
def test_a_name_that_leads_nowhere_is_no_block(pool, value):
    record = make_record(1)
    pool.tier.put_many([record])
    pool.say("SET", pool.tier._name_key(record.block_hash), value)

    assert pool.tier.find_many([record.block_hash]) == [None]


def test_a_record_of_a_later_version_is_left_to_those_who_can_read_it(pool):
    record = make_record(1)
    newer = bytearray(record.data)
    newer[4] = VERSION + 1
    pool.say("SET", pool.tier._record_key(record.digest), xxhash.xxh3_128_digest(newer) + bytes(newer))

    assert pool.tier.fetch_many([record.digest]) == [None]
    assert pool.tier.contains_many([record.digest]) == [True]


def test_a_bit_flipped_anywhere_on_the_way_never_gives_another_block(pool):
    records = [make_record(seed) for seed in range(1, 4)]
    digests = [record.digest for record in records]
    wrong, kinds = [], set()
    offsets = random.Random(0).sample(range(sum(len(record.data) + 24 for record in records)), 40)

    for offset in [0, 1, 2, 3, 4, 5, *offsets]:
        tier = pool.handle(Patience(idle_s=0.15))
        tier.put_many(records)
        pool.proxy.flip(offset)
        try:
            data = tier.fetch_many(digests)
            wrong += [each for each, record in zip(data, records, strict=True) if each not in {None, b"", record.data}]
            kinds.add("absent" if {None, b""} & set(data) else "right")
        except TierUnavailableError:
            kinds.add("unavailable")
        tier.close()

    assert wrong == []
    assert kinds >= {"absent", "unavailable"}


# ---- the handle


def test_every_error_of_a_pool_is_one_of_ours(pool):
    pool.proxy.close()

    with pytest.raises(AgentMemError) as refused:
        pool.tier.usage()

    assert refused.value.reason is Reason.TIER_UNAVAILABLE


def test_an_interrupt_at_any_wait_leaves_a_handle_that_gives_right_answers(pool):
    records = [make_record(seed) for seed in range(1, 4)]
    pool.tier.put_many(records)
    countdown = [0]

    def clock():
        countdown[0] -= 1
        if countdown[0] == 0:
            raise KeyboardInterrupt
        return time.monotonic()

    tier = PoolTier(f"redis://127.0.0.1:{pool.process.port}", clock=clock)
    num_interrupted = 0
    for wait in range(1, 15):
        countdown[0] = wait
        try:
            tier.fetch_many([record.digest for record in records])
        except KeyboardInterrupt:
            num_interrupted += 1
        countdown[0] = 0
        assert tier.fetch_many([record.digest for record in records]) == [record.data for record in records]
    tier.close()

    assert num_interrupted > 5
