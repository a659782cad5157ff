"""Damage heals while a store is open: rows from their other copy, KV from tokens; what cannot heal stays apart."""

import logging
import shutil
import struct
from pathlib import Path

import pytest
import torch

import agentmem
from agentmem._lmdb import Environment, Level, Table
from agentmem._lmdb.row import TAGS
from agentmem.check import check
from agentmem.errors import CorruptionError, InvalidInputError, ReadOnlyError
from agentmem.reasons import Reason
from agentmem.testing.damage import flip, overwrite, overwrite_copy
from agentmem.testing.models import tiny_model
from agentmem.tiers.blockrows import BlockInfo
from agentmem.tiers.disk import DiskTier
from agentmem.tree import rows

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = agentmem.Config(block_size=16)
TOKENS = [(29 * index * index + 3 * index + 7) % 500 for index in range(60)]


def do(path, *operations):
    with Environment.open(path) as environment:
        for operation in operations:
            environment.submit(operation, level=Level.DURABLE).result()


def keys(path, table, prefix=b""):
    with Environment.open(path, read_only=True) as environment, environment.read() as txn:
        return [key for key, _ in txn.scan_each(table, prefix)]


def problems(path, *, read_data=False):
    with Environment.open(path, read_only=True) as environment:
        return check(environment, DiskTier(environment), read_data=read_data).problems


def spoil(path, digests):
    """Change one bit in the middle of the stored records."""

    def operation(txn):
        for digest in digests:
            info = BlockInfo.unpack(txn.get(Table.BINDEX, digest), digest)
            key = struct.pack(">QH", info.block_id, 0)
            chunk = bytearray(txn.get_view(Table.BLOCKS, key))
            chunk[info.stored_nbytes // 2] ^= 1
            txn.put_raw(Table.BLOCKS, [(key, chunk)])

    do(path, operation)


def cold(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1]


def killed(store):
    """Return a copy of an open store as it would be if its process were killed now: no automatic checkpoints."""
    store.flush()
    return Path(shutil.copytree(store.path, store.path.with_name("killed")))


@pytest.fixture
def filled(store_path, llama):
    """A closed store: session "s" with branches "main" and "side" above one checkpoint, and session "t"."""
    with agentmem.open(store_path, model=llama, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[:20])
        plan = session.checkpoint("plan")
        session.fork("side", at=plan)
        session.append(TOKENS[20:40])
        session.checkpoint("more")
        store.create("t").append([1, 2, 3])
        return killed(store)


# -- rows that are kept twice


@pytest.mark.parametrize("table", list(TAGS))
@pytest.mark.parametrize("is_copy", [False, True])
def test_a_damaged_copy_of_a_row_is_read_from_the_other_and_written_again(filled, table, is_copy, caplog):
    for key in keys(filled, table):
        spoiled = (Table.MIRROR, TAGS[table] + key) if is_copy else (table, key)
        do(filled, lambda txn, spoiled=spoiled: txn.put_raw(spoiled[0], [(spoiled[1], b"damaged" * 9)]))
    before = problems(filled)

    with caplog.at_level(logging.WARNING), Environment.open(filled) as environment:
        with environment.read() as txn:
            list(txn.scan(table))
        environment.flush()
        num_healed = environment.num_healed

    assert {problem.kind for problem in before} == {"copy"}
    assert num_healed > 0
    assert "written again from their other copies" in caplog.text
    assert problems(filled) == ()


def test_a_session_with_one_damaged_copy_of_every_row_resumes_as_if_nothing_was(filled, llama):
    for table in TAGS:
        for key in keys(filled, table):
            do(filled, lambda txn, table=table, key=key: txn.put_raw(table, [(key, b"x" * 30)]))

    with agentmem.open(filled, model=llama, config=CONFIG) as store:
        session = store.resume("s")
        tokens, logits = session.active.tokens, session.forward([])
        with store.environment.read() as txn:
            for table in TAGS:
                list(txn.scan(table))
        store.flush()
        num_healed = store.stats()["records_healed"]

    assert tokens == TOKENS[:40]
    assert torch.allclose(logits[-1], cold(llama, tokens), atol=1e-4)
    assert num_healed > 5
    assert problems(filled) == ()


def test_a_row_that_is_missing_on_one_side_is_not_missing(filled):
    [key] = [key for key in keys(filled, Table.BRANCHES) if b"side" in key]
    do(filled, lambda txn: txn._txn.delete(key, db=txn._handles[Table.BRANCHES]))

    with agentmem.open(filled) as view:
        names = [branch.name for branch in view.view("s").branches]

    assert sorted(names) == ["main", "side"]


def test_of_two_sound_copies_the_later_one_counts(store_path):
    with Environment.open(store_path, create=True) as environment:
        environment.submit(lambda txn: txn.put(Table.META, b"key", b"old")).result()
        with environment.read() as txn:
            old = bytes(txn.get_view(Table.META, b"key"))
        environment.submit(lambda txn: txn.put(Table.META, b"key", b"new")).result()

        environment.submit(lambda txn: txn.put_raw(Table.META, [(b"key", old)])).result()
        with environment.read() as txn:
            first = txn.get(Table.META, b"key")
        environment.flush()
        environment.submit(lambda txn: overwrite_copy(txn, Table.META, b"key", old)).result()
        with environment.read() as txn:
            second = txn.get(Table.META, b"key")

    assert (first, second) == (b"new", b"new")


def test_a_read_only_handle_reads_the_other_copy_and_heals_nothing(filled):
    [key] = [key for key in keys(filled, Table.BRANCHES) if b"side" in key]
    do(filled, lambda txn: txn.put_raw(Table.BRANCHES, [(key, b"x" * 30)]))

    with Environment.open(filled, read_only=True) as environment, environment.read() as txn:
        found = dict(txn.scan(Table.BRANCHES))

    assert key in found
    assert [problem.kind for problem in problems(filled)] == ["copy"]


def test_stamps_go_on_after_the_file_was_compacted(filled):
    with Environment.open(filled) as environment:
        before = environment.submit(lambda txn: txn.id).result()

    agentmem.gc.compact(filled)
    with Environment.open(filled) as environment:
        after = environment.submit(lambda txn: txn.id).result()

    assert after > before


# -- records of which no copy is left


def test_a_lost_checkpoint_costs_the_branches_on_its_tokens_and_no_others(filled, llama):
    with agentmem.open(filled) as view:
        more = next(each for each in view.view("s").checkpoints if each.message == "more")
    do(filled, lambda txn: flip(txn, Table.NODES, rows.node_key(more.session_id, more.checkpoint_id), 40))

    with agentmem.open(filled, model=llama, config=CONFIG) as store:
        with pytest.raises(CorruptionError, match=f"{more.checkpoint_id.hex()} is lost"):
            store.resume("s")
        session = store.resume("s", branch="side")
        session.append(TOKENS[20:30])
        session.checkpoint("went on")

        assert list(session.damaged) == ["main"]
        assert session.branches == ["side"]
        with pytest.raises(CorruptionError, match="agentmem repair"):
            session.branch("main")
        assert torch.allclose(session.forward([])[-1], cold(llama, TOKENS[:30]), atol=1e-4)


def test_a_damaged_branch_keeps_its_name_until_it_is_dropped(filled, llama):
    [key] = [key for key in keys(filled, Table.BRANCHES) if b"side" in key]
    do(filled, lambda txn: overwrite(txn, Table.BRANCHES, key, b"x" * 30))

    with agentmem.open(filled, model=llama, config=CONFIG) as store:
        session = store.resume("s")
        taken = dict(session.damaged)
        with pytest.raises(agentmem.AlreadyExistsError):
            session.fork("side")
        session.drop("side")
        session.fork("side")

        assert list(taken) == ["side"]
        assert session.damaged == {}
        assert sorted(session.branches) == ["main", "side"]
    with agentmem.open(filled) as view:
        assert view.view("s").damaged == []


def test_tokens_after_the_tip_that_are_lost_are_never_left_out_silently(store_path, llama):
    with agentmem.open(store_path, model=llama, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[:20])
        plan = session.checkpoint("plan")
        session.fork("side", at=plan)
        session.append(TOKENS[20:40])
        path = killed(store)
    [key] = keys(path, Table.TAILS)
    do(path, lambda txn: flip(txn, Table.TAILS, key))

    with agentmem.open(path, model=llama, config=CONFIG) as store:
        with pytest.raises(CorruptionError, match="table 'tails'"):
            store.resume("s")
        session = store.resume("s", branch="side")
        session.fork("again", at=plan.checkpoint_id.hex())
        session.drop("main")

        assert session.branch("again").tokens == TOKENS[:20]
        assert session.damaged == {}


def test_the_active_branch_is_not_dropped_although_it_is_damaged(filled, llama):
    [key] = [key for key in keys(filled, Table.BRANCHES) if b"main" in key and key.startswith(_session_id(filled, "s"))]
    do(filled, lambda txn: overwrite(txn, Table.BRANCHES, key, b"x" * 30))

    with agentmem.open(filled, model=llama, config=CONFIG) as store:
        with pytest.raises(CorruptionError):
            store.resume("s")
        session = store._sessions["s"]
        with pytest.raises(InvalidInputError, match="active"):
            session.drop("main")


def test_a_damaged_count_lets_the_branch_go_on_and_gc_leaves_it(filled, llama):
    for key in keys(filled, Table.NREFS):
        do(filled, lambda txn, key=key: flip(txn, Table.NREFS, key))

    with agentmem.open(filled, model=llama, config=CONFIG) as store:
        session = store.resume("s")
        session.append([1, 2, 3])
        made = session.checkpoint("went on")

    assert made.num_tokens == 43
    assert {problem.kind for problem in problems(filled)} <= {"count", "damaged"}


def _session_id(path, name):
    with agentmem.open(path) as view:
        return view.view(name).record.session_id


# -- KV


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "bamba"])
def test_a_layer_state_is_not_gone_on_from_when_the_kv_before_it_is_lost(family, store_path):
    model = tiny_model(family)
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[:40])
        point = session.checkpoint()
    spoil(store_path, [point.blocks[0].digest])

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.resume("s")
        logits = session.forward(TOKENS[40:45])[-1]

    assert torch.allclose(logits, cold(model, TOKENS[:45]), atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen3_next", "t5"])
def test_damaged_kv_of_every_kind_is_computed_and_stored_again(family, store_path):
    model = tiny_model(family)
    prompt = {"input_ids": torch.tensor([TOKENS[:30]])} if family == "t5" else {}
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append([0, *TOKENS[1:40]], **prompt)
        expected = session.forward([])[-1]
        point = session.checkpoint()
    digests = [*(block.digest for block in point.blocks), point.tail and point.tail.digest]
    digests += [digest for state in point.states for digest in state.digests]
    spoil(store_path, [digest for digest in digests if digest])

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.resume("s")
        report, healing = session.report, session.forward([])[-1]
        session.checkpoint("healed")
        store.flush()
        stats = store.stats()
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        again = store.resume("s")
        num_lost = again.report.num_pending
        logits = again.forward([])[-1]

    assert report.reason is Reason.DAMAGED
    assert torch.allclose(healing, expected, atol=1e-4)
    assert stats["blocks_healed"] >= len(point.blocks) + (point.tail is not None)
    assert torch.allclose(logits, expected, atol=1e-4)
    assert num_lost <= 1


def test_a_damaged_block_shortens_the_prefix_to_the_blocks_before_it(filled, llama):
    with agentmem.open(filled) as view:
        more = next(each for each in view.view("s").checkpoints if each.message == "more")
    spoil(filled, [more.blocks[-1].digest])

    with agentmem.open(filled, model=llama, config=CONFIG) as store:
        session = store.resume("s")
        report = session.report

        assert report.reason is Reason.DAMAGED
        assert report.num_reused == report.first_difference == 16
        assert torch.allclose(session.forward([])[-1], cold(llama, TOKENS[:40]), atol=1e-4)


# -- LMDB itself


def test_damage_that_lmdb_finds_makes_the_handle_read_only(filled, monkeypatch):
    import lmdb

    with Environment.open(filled) as environment:

        def operation(txn):
            raise lmdb.CorruptedError("mdb_put: MDB_CORRUPTED")

        with pytest.raises(CorruptionError, match="agentmem check"):
            environment.submit(operation).result()
        with pytest.raises(ReadOnlyError, match="agentmem repair"):
            environment.submit(lambda txn: txn.put(Table.META, b"key", b"")).result()
        with environment.read() as txn:
            assert len(list(txn.scan(Table.SESSIONS))) == 4


def test_damage_that_lmdb_finds_in_a_read_makes_the_handle_read_only_too(filled):
    import lmdb

    with Environment.open(filled) as environment:
        with pytest.raises(CorruptionError, match="agentmem check"), environment.read():
            raise lmdb.CorruptedError("mdb_get: MDB_CORRUPTED")

        assert environment.is_read_only
        with pytest.raises(ReadOnlyError, match="agentmem repair"):
            environment.submit(lambda txn: None)
