"""The disk tier: the conformance suite, chunks, names, references, removal, damage."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentmem._lmdb import Environment, Level, Table, WriteTransaction
from agentmem.errors import CorruptionError, InvalidInputError, NotFoundError, ReadOnlyError, SpecMismatchError
from agentmem.ids import BlockDigest, BlockHash, Fingerprint
from agentmem.kv import record as record_format
from agentmem.kv.record import Record
from agentmem.testing.damage import overwrite
from agentmem.testing.tier_suite import TierSuite, empty_like, make_block, make_record, same_bits
from agentmem.tiers.base import Tier
from agentmem.tiers.blockrows import BlockInfo, Totals, count_blocks, read_sum
from agentmem.tiers.chunks import CHUNK_NBYTES
from agentmem.tiers.disk import DiskTier

MISSING = BlockDigest(bytes(32))


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def environment(store_path: Path) -> Iterator[Environment]:
    with Environment.open(store_path, create=True) as environment:
        yield environment


@pytest.fixture
def disk(environment: Environment, clock: Clock) -> DiskTier:
    return DiskTier(environment, clock=clock)


def large_record(nbytes: int) -> tuple[Record, list[Tensor]]:
    """Pack a block of about `nbytes` that does not compress."""
    generator = torch.Generator().manual_seed(nbytes)
    words = torch.randint(-(1 << 15), 1 << 15, (1, 1, 16, nbytes // 32), generator=generator, dtype=torch.int16)
    sections = [words.view(torch.bfloat16)]
    return (
        record_format.pack(
            sections, block_hash=BlockHash(b"l" * 32), fingerprint=Fingerprint(bytes(32)), start=0, codec="raw"
        ),
        sections,
    )


def info(disk: DiskTier, environment: Environment, digest: BlockDigest) -> BlockInfo:
    with environment.read() as txn:
        found = dict(disk.iter_index(txn))[digest]
    assert isinstance(found, BlockInfo)
    return found


def damage(environment: Environment, table: Table, position: int = 2000) -> None:
    """Change one byte of the first row of `table`."""

    def flip(txn: WriteTransaction) -> None:
        key = next(iter(txn.scan_each(table)))[0]
        view = txn.get_view(table, key)
        assert view is not None
        stored = bytearray(view)
        stored[position % len(stored)] ^= 0x10
        overwrite(txn, table, key, stored)

    environment.submit(flip).result(20)


class TestDiskTier(TierSuite):
    """The disk tier keeps what every tier promises."""

    def open_tier(self, path: Path) -> Iterator[Tier]:
        with Environment.open(path, create=True) as environment:
            yield DiskTier(environment)

    def put(self, tier: Tier, sections: list[Tensor], seed: int) -> BlockDigest:
        assert isinstance(tier, DiskTier)
        record = make_record(seed, sections=sections)
        tier.store([record]).result(20)
        return record.digest


@pytest.mark.parametrize("nbytes", [32, 4080 - 300, 4096, CHUNK_NBYTES, 2 * CHUNK_NBYTES, 200_000, 1_500_000])
def test_a_record_of_any_size_is_cut_and_joined(disk: DiskTier, environment: Environment, nbytes: int) -> None:
    record, sections = large_record(nbytes)
    disk.store([record]).result(20)
    out = empty_like(sections)

    disk.load(record.digest, out)

    assert same_bits(sections, out)
    assert disk.load_record(record.digest) == record.data
    with environment.read() as txn:
        assert txn.count(Table.BLOCKS) == -(-len(record.data) // CHUNK_NBYTES)


def test_every_chunk_fills_a_power_of_two_of_pages(disk: DiskTier, environment: Environment) -> None:
    disk.store([large_record(nbytes)[0] for nbytes in (64, 9000, 70_000, 300_000)]).result(20)

    with environment.read() as txn:
        keys = [key for key, _ in txn.scan_each(Table.BLOCKS)]
        sizes = {len(txn.get_view(Table.BLOCKS, key) or b"") for key in keys}

    assert sizes <= {pages * 4096 - 16 for pages in (1, 2, 4, 8, 16)}


def test_blocks_outlive_the_handle(store_path: Path) -> None:
    record = make_record(1)
    with Environment.open(store_path, create=True) as environment:
        DiskTier(environment).store([record], level=Level.QUEUED)
    with Environment.open(store_path) as environment:
        disk = DiskTier(environment)
        out = empty_like(make_block(1))

        assert disk.contains_many([record.digest, MISSING]) == [True, False]
        assert disk.find(record.block_hash) == record.digest
        assert disk.load(record.digest, out).num_tokens == 16
        assert same_bits(make_block(1), out)


def test_a_read_only_handle_sees_what_was_stored_before_each_question(store_path: Path) -> None:
    first = make_record(1)
    with Environment.open(store_path, create=True) as environment:
        DiskTier(environment).store([first])
    with Environment.open(store_path, read_only=True) as environment:
        disk = DiskTier(environment)

        assert disk.contains_many([first.digest, MISSING]) == [True, False]
        assert disk.find(first.block_hash) == first.digest
        assert disk.find(BlockHash(bytes(32))) is None
        assert disk.stats().num_blocks == 1
        disk.mark_damaged(first.digest)
        assert disk.find(first.block_hash) is None
        with pytest.raises(ReadOnlyError):
            disk.store([first])


def test_stats_count_blocks_and_bytes(disk: DiskTier) -> None:
    records = [make_record(seed) for seed in range(3)]
    assert disk.stats() == Totals()
    assert disk.stats().ratio == 1.0
    disk.store(records).result(20)

    stored_nbytes = sum(len(record.data) for record in records)
    assert disk.stats() == Totals(3, sum(record.raw_nbytes for record in records), stored_nbytes)
    assert disk.nbytes == stored_nbytes


def test_a_loaded_block_that_is_missing_is_named(disk: DiskTier) -> None:
    with pytest.raises(NotFoundError, match=MISSING.hex()):
        disk.load(MISSING, make_block(1))
    with pytest.raises(NotFoundError, match=MISSING.hex()):
        disk.load_record(MISSING)


def test_the_first_block_of_some_tokens_keeps_their_name(disk: DiskTier) -> None:
    first, second = make_record(1, name=7), make_record(2, name=7)
    disk.store([first]).result(20)
    disk.store([second]).result(20)

    assert first.digest != second.digest
    assert disk.find(first.block_hash) == first.digest
    assert disk.contains_many([first.digest, second.digest]) == [True, True]


def test_storing_leaves_a_block_unnamed_and_retain_names_it(disk: DiskTier, environment: Environment) -> None:
    record = make_record(1)
    disk.store([record]).result(20)
    unnamed = info(disk, environment, record.digest)

    environment.submit(lambda txn: disk.retain(txn, [record.digest, record.digest])).result(20)
    environment.submit(lambda txn: disk.release(txn, [record.digest])).result(20)

    assert unnamed.refs == 0
    assert info(disk, environment, record.digest).refs == 1


def test_retaining_a_missing_block_undoes_the_whole_operation(disk: DiskTier, environment: Environment) -> None:
    record = make_record(1)
    disk.store([record]).result(20)

    def operation(txn: WriteTransaction) -> None:
        txn.put(Table.NODES, b"node", b"")
        disk.retain(txn, [record.digest, MISSING])

    with pytest.raises(NotFoundError, match=MISSING.hex()):
        environment.submit(operation).result(20)
    assert info(disk, environment, record.digest).refs == 0
    with environment.read() as txn:
        assert txn.get(Table.NODES, b"node") is None


def test_releasing_more_often_than_retained_is_corruption(disk: DiskTier, environment: Environment) -> None:
    record = make_record(1)
    disk.store([record]).result(20)

    with pytest.raises(CorruptionError, match=record.digest.hex()):
        environment.submit(lambda txn: disk.release(txn, [record.digest])).result(20)
    environment.submit(lambda txn: disk.release(txn, [MISSING])).result(20)


def test_only_old_unnamed_blocks_are_collected(disk: DiskTier, environment: Environment, clock: Clock) -> None:
    named, old, young = make_record(1), make_record(2), make_record(3)
    disk.store([named, old]).result(20)
    environment.submit(lambda txn: disk.retain(txn, [named.digest])).result(20)
    clock.now_s += 100
    disk.store([young]).result(20)

    removed = environment.submit(lambda txn: disk.remove_unreferenced(txn, clock.now_s - 50, 1 << 30)).result(20)

    assert removed == (1, len(old.data))
    assert disk.contains_many([named.digest, old.digest, young.digest]) == [True, False, True]
    assert disk.find(old.block_hash) is None
    assert disk.stats().num_blocks == 2
    with environment.read() as txn:
        assert txn.count(Table.BLOCKS) == 2
        assert txn.count(Table.CHAIN) == 2


def test_collection_goes_in_batches(disk: DiskTier, environment: Environment, clock: Clock) -> None:
    records = [make_record(seed) for seed in range(5)]
    disk.store(records).result(20)
    batches = []
    while (
        batch := environment.submit(
            lambda txn: disk.remove_unreferenced(txn, clock.now_s, 2 * len(records[0].data) - 100)
        ).result(20)
    ) != (0, 0):
        batches.append(batch[0])

    assert sum(batches) == 5
    assert max(batches) <= 3
    assert disk.stats() == Totals()


def test_storing_a_block_again_keeps_it_from_collection(disk: DiskTier, environment: Environment, clock: Clock) -> None:
    record = make_record(1)
    disk.store([record]).result(20)
    clock.now_s += 1000
    disk.store([record]).result(20)

    removed = environment.submit(lambda txn: disk.remove_unreferenced(txn, clock.now_s - 500, 1 << 30)).result(20)

    assert removed == (0, 0)


def test_a_named_block_cannot_be_removed(disk: DiskTier, environment: Environment) -> None:
    record = make_record(1)
    disk.store([record]).result(20)
    environment.submit(lambda txn: disk.retain(txn, [record.digest])).result(20)

    with pytest.raises(InvalidInputError, match="named by 1"):
        disk.remove(record.digest)
    assert disk.contains(record.digest)


@pytest.mark.parametrize("position", range(0, 4000, 250))
def test_a_damaged_record_is_never_returned(disk: DiskTier, environment: Environment, position: int) -> None:
    record = make_record(1)
    disk.store([record]).result(20)
    damage(environment, Table.BLOCKS, position)
    out = empty_like(make_block(1))

    if position < len(record.data):
        with pytest.raises(CorruptionError, match=record.digest.hex()):
            disk.load_record(record.digest)
    try:
        disk.load(record.digest, out)
    except (CorruptionError, SpecMismatchError):
        return
    assert same_bits(make_block(1), out)


def test_a_damaged_block_is_written_again_and_keeps_its_references(disk: DiskTier, environment: Environment) -> None:
    record = make_record(1)
    disk.store([record]).result(20)
    environment.submit(lambda txn: disk.retain(txn, [record.digest])).result(20)
    damage(environment, Table.BLOCKS, 1000)

    disk.mark_damaged(record.digest)
    was_known = disk.contains(record.digest) or disk.find(record.block_hash) is not None
    disk.store([record]).result(20)
    out = empty_like(make_block(1))
    disk.load(record.digest, out)

    assert not was_known
    assert same_bits(make_block(1), out)
    assert info(disk, environment, record.digest).refs == 1
    assert disk.stats().num_blocks == 1
    assert disk.find(record.block_hash) == record.digest


def test_another_block_takes_the_name_of_a_damaged_one(disk: DiskTier) -> None:
    first, second = make_record(1, name=7), make_record(2, name=7)
    disk.store([first]).result(20)

    disk.mark_damaged(first.digest)
    disk.store([second]).result(20)

    assert disk.find(first.block_hash) == second.digest


def test_a_block_whose_index_row_is_damaged_is_stored_again_and_never_collected(store_path: Path, clock: Clock) -> None:
    record = make_record(1)
    with Environment.open(store_path, create=True) as environment:
        DiskTier(environment, clock=clock).store([record]).result(20)
        damage(environment, Table.BINDEX, 20)
    with Environment.open(store_path) as environment:
        disk = DiskTier(environment, clock=clock)
        was_contained = disk.contains(record.digest)
        with pytest.raises(CorruptionError):
            disk.load(record.digest, make_block(1))
        disk.store([record]).result(20)
        out = empty_like(make_block(1))
        disk.load(record.digest, out)
        environment.submit(lambda txn: disk.release(txn, [record.digest])).result(20)

        assert not was_contained
        assert same_bits(make_block(1), out)
        assert not info(disk, environment, record.digest).is_counted
        assert environment.submit(lambda txn: disk.remove_unreferenced(txn, 2e9, 1 << 30)).result(20) == (0, 0)


def test_a_missing_chunk_is_corruption(disk: DiskTier, environment: Environment) -> None:
    record, sections = large_record(200_000)
    disk.store([record]).result(20)

    def drop_last(txn: WriteTransaction) -> None:
        key = txn.last_key(Table.BLOCKS)
        assert key is not None
        txn.delete(Table.BLOCKS, key)

    environment.submit(drop_last).result(20)

    with pytest.raises(CorruptionError, match="1 of its 4 chunks are missing"):
        disk.load(record.digest, empty_like(sections))


def test_a_block_in_the_place_of_another_is_corruption(disk: DiskTier, environment: Environment) -> None:
    first, second = make_record(1), make_record(2)
    disk.store([first]).result(20)

    def swap(txn: WriteTransaction) -> None:
        value = txn.get(Table.BINDEX, first.digest)
        assert value is not None
        txn.put(Table.BINDEX, second.digest, value)

    environment.submit(swap).result(20)

    with pytest.raises(CorruptionError, match=second.digest.hex()):
        disk.load(second.digest, empty_like(make_block(1)))
    with pytest.raises(CorruptionError, match=second.digest.hex()):
        disk.load_record(second.digest)


def test_an_imported_record_is_verified_first(disk: DiskTier) -> None:
    record = make_record(1)
    damaged = bytearray(record.data)
    damaged[-100] ^= 1

    disk.put_record(record.data).result(20)
    out = empty_like(make_block(1))
    disk.load(record.digest, out)

    assert same_bits(make_block(1), out)
    with pytest.raises(CorruptionError):
        disk.put_record(bytes(damaged))


def test_block_ids_are_not_used_twice(disk: DiskTier, environment: Environment) -> None:
    first, second = make_record(1), make_record(2)
    disk.store([first]).result(20)
    first_id = info(disk, environment, first.digest).block_id
    disk.remove(first.digest)
    disk.store([second, second]).result(20)

    assert info(disk, environment, second.digest).block_id > first_id
    assert disk.stats().num_blocks == 1


# ---- several handles


def test_two_handles_see_each_other_s_blocks_and_removals(environment: Environment) -> None:
    first, second = DiskTier(environment), DiskTier(environment)
    records = [make_record(seed) for seed in range(4)]
    first.store(records[:2]).result(20)
    assert first.contains_many([record.digest for record in records]) == [True, True, False, False]

    second.store(records[2:]).result(20)
    assert first.contains_many([record.digest for record in records]) == [True, True, True, True]
    assert [first.find(record.block_hash) for record in records] == [record.digest for record in records]

    second.remove(records[0].digest)
    first.remove(records[3].digest)
    second.store([records[3]]).result(20)
    for tier in (first, second, DiskTier(environment)):
        assert tier.contains_many([record.digest for record in records]) == [False, True, True, True]
        assert tier.find(records[0].block_hash) is None
        assert tier.find(records[3].block_hash) == records[3].digest


def test_a_handle_asks_for_nothing_while_it_writes_alone(environment: Environment, disk: DiskTier) -> None:
    disk.store([make_record(1)]).result(20)
    disk.contains(MISSING)
    environment.submit(lambda txn: txn.put(Table.NODES, b"key", b"somebody else's")).result(20)
    disk.store([make_record(2)]).result(20)
    disk.remove(make_record(1).digest)

    with environment.read() as txn:
        before = txn.id
        assert not disk.contains(MISSING)

    assert disk._index._is_complete
    assert before == environment.last_commit


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_sum_of_blocks_is_that_of_the_rows_and_counted_again_when_it_is_lost(
    environment: Environment, disk: DiskTier, is_lost: bool
) -> None:
    records = [make_record(seed) for seed in range(5)]
    disk.store(records).result(20)
    disk.store(records[:2]).result(20)
    disk.mark_damaged(records[1].digest)
    disk.store([records[1]]).result(20)
    disk.remove(records[2].digest)
    if is_lost:
        environment.submit(lambda txn: txn.delete(Table.META, b"blocks")).result(20)
    disk.store([make_record(9)]).result(20)

    with environment.read() as txn:
        found, counted = read_sum(txn), count_blocks(txn)
        assert found.totals == counted.totals == disk.stats()
        assert found.totals.num_blocks == 5
        assert found.next_id == counted.next_id
    assert disk.contains_many([record.digest for record in records]) == [True, True, False, True, True]
