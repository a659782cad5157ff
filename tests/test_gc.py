"""gc, check and compact on a real store with real blocks."""

import random
from array import array
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentmem import gc
from agentmem._lmdb import Environment, Level, Table
from agentmem.check import check
from agentmem.errors import NotFoundError, ReadOnlyError, StoreLockedError
from agentmem.ids import BlockHash, CheckpointId, Fingerprint, SessionId
from agentmem.kv import record
from agentmem.testing.damage import overwrite
from agentmem.tiers.disk import DiskTier
from agentmem.tree import refs, rows
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import BlockRef, BranchRecord, Checkpoint, Move, SessionRecord
from agentmem.tree.trail import Trail

SESSION = SessionId(b"session1")
GRACE_S = 100.0


class Store:
    """A store with a clock that stands still until a test moves it."""

    def __init__(self, path):
        self.path = path
        self.now_s = 1_000_000.0
        self.numbers = iter(range(1, 1_000_000))
        self.open()

    def open(self):
        self.environment = Environment.open(self.path, create=True)
        self.catalog = Catalog(clock=self.clock)
        self.disk = DiskTier(self.environment, clock=self.clock)

    def clock(self):
        return self.now_s

    def do(self, *operations):
        return self.environment.submit(lambda txn: [operation(txn) for operation in operations][-1]).result()

    def session(self, name="s"):
        record = SessionRecord(
            session_id=SESSION,
            name=name,
            active_branch="main",
            fingerprint=Fingerprint(bytes(32)),
            block_size=16,
            created_s=self.now_s,
            updated_s=self.now_s,
        )
        self.do(lambda txn: self.catalog.put_session(txn, record))

    def block(self, num_tokens=16):
        """Store a block of its own content and return its names."""
        number = next(self.numbers)
        torch.manual_seed(number)
        sections = [torch.randn(2, 2, num_tokens, 8) for _ in range(2)]
        block_hash = BlockHash(number.to_bytes(32, "big"))
        packed = record.pack(sections, block_hash=block_hash, fingerprint=Fingerprint(bytes(32)), start=0)
        self.disk.store([packed], level=Level.DURABLE).result()
        return BlockRef(block_hash, packed.digest)

    def checkpoint(self, parent=None, *, own=1, blocks=(), tail=None):
        number = next(self.numbers)
        made = Checkpoint(
            checkpoint_id=CheckpointId(number.to_bytes(4, "big") + bytes(12)),
            session_id=SESSION,
            parent_id=parent and parent.checkpoint_id,
            num_tokens=(parent.num_tokens if parent else 0) + own,
            tokens=b"\1\0\0\0" * own,
            blocks=tuple(blocks),
            tail=tail,
            fingerprint=Fingerprint(bytes(32)),
            created_s=self.now_s,
        )
        self.do(lambda txn: self.catalog.put_checkpoint(txn, made), lambda txn: self.disk.retain(txn, made.digests()))
        return made

    def branch(self, name, tip, num_open=0):
        record = BranchRecord(name=name, tip=tip and tip.checkpoint_id, created_s=self.now_s, updated_s=self.now_s)
        start = tip.num_tokens if tip else 0
        tokens = Trail(array("I", [1] * (start + num_open)))
        self.do(lambda txn: self.catalog.put_branch(txn, SESSION, record, tokens, start))

    def drop(self, name):
        self.do(lambda txn: self.catalog.remove_branch(txn, SESSION, name))

    def later(self, seconds=GRACE_S + 1):
        self.now_s += seconds

    def collect(self, grace_s=GRACE_S, **options):
        return gc.collect(self.environment, self.catalog, self.disk, grace_s=grace_s, now_s=self.now_s, **options)

    def check(self, **options):
        return check(self.environment, self.disk, **options)

    def stored(self):
        with self.environment.read() as txn:
            return {c.checkpoint_id for c in self.catalog.checkpoints(txn, SESSION)}

    def change(self, table, key, flip=-1):
        """Change one bit of a stored value behind the store's back."""
        with self.environment.read() as txn:
            value = bytearray(txn.get_view(table, key))
        value[flip] ^= 1
        self.do(lambda txn: overwrite(txn, table, key, value))


@pytest.fixture
def store(store_path):
    store = Store(store_path)
    store.session()
    yield store
    store.environment.close()


def kinds(report):
    return Counter(problem.kind for problem in report.problems)


def test_gc_keeps_what_a_branch_reaches(store):
    root = store.checkpoint(blocks=[store.block()])
    tip = store.checkpoint(root, blocks=[store.block()], tail=store.block(3))
    store.branch("main", tip)
    store.later()

    report = store.collect(grace_s=0)

    assert report.checkpoints == ()
    assert report.num_blocks == 0
    assert store.stored() == {root.checkpoint_id, tip.checkpoint_id}
    assert store.check(read_data=True).problems == ()


def test_gc_removes_a_dropped_branch_only_after_the_grace(store):
    trunk = store.checkpoint(blocks=[store.block()])
    twig = store.checkpoint(trunk, blocks=[store.block()], tail=store.block(3))
    store.branch("main", trunk)
    store.branch("twig", twig)
    store.later()
    store.drop("twig")

    assert store.collect().checkpoints == ()

    store.later()
    assert store.collect().checkpoints == (twig.checkpoint_id,)
    assert store.disk.stats().num_blocks == 3  # they were named until now

    store.later()
    assert store.collect().num_blocks == 2
    assert store.disk.stats().num_blocks == 1
    assert store.check(read_data=True).problems == ()


def test_gc_without_grace_removes_checkpoints_and_blocks_in_one_run(store):
    tip = store.checkpoint(store.checkpoint(blocks=[store.block()]), blocks=[store.block()])
    store.branch("main", tip)
    store.drop("main")

    report = store.collect(grace_s=0)

    assert len(report.checkpoints) == 2
    assert report.num_blocks == 2
    assert report.nbytes > 0
    assert store.disk.stats().num_blocks == 0


def test_a_dry_run_says_what_a_run_would_do_and_does_nothing(store):
    trunk = store.checkpoint(blocks=[store.block()])
    store.branch("main", trunk)
    store.branch("twig", store.checkpoint(store.checkpoint(trunk, blocks=[store.block()]), blocks=[store.block()]))
    store.block()
    store.drop("twig")
    before = store.stored()

    preview = store.collect(grace_s=0, dry_run=True)

    assert store.stored() == before
    assert store.disk.stats().num_blocks == 4
    report = store.collect(grace_s=0)
    assert preview.is_dry_run
    assert (preview.checkpoints, preview.num_blocks, preview.nbytes) == (
        report.checkpoints,
        report.num_blocks,
        report.nbytes,
    )


def test_a_long_line_goes_in_one_run_and_without_recursion(store):
    def grow(txn):
        parent = None
        for number in range(3000):
            made = Checkpoint(
                checkpoint_id=CheckpointId(number.to_bytes(16, "big")),
                session_id=SESSION,
                parent_id=parent and parent.checkpoint_id,
                num_tokens=number + 1,
                tokens=b"\1\0\0\0",
                fingerprint=Fingerprint(bytes(32)),
                created_s=1.0,
            )
            store.catalog.put_checkpoint(txn, made)
            parent = made

    store.do(grow)
    store.later()

    assert len(store.collect().checkpoints) == 3000
    assert store.stored() == set()


def test_a_parent_that_a_branch_left_lately_does_not_go_with_its_old_child(store):
    parent = store.checkpoint()
    child = store.checkpoint(parent)
    store.branch("child", child)
    store.branch("parent", parent)
    store.drop("child")
    store.later()
    store.drop("parent")

    assert store.collect().checkpoints == (child.checkpoint_id,)

    store.later()
    assert store.collect().checkpoints == (parent.checkpoint_id,)


def test_a_checkpoint_that_is_named_again_stays(store):
    tip = store.checkpoint()
    store.branch("main", tip)
    store.drop("main")
    store.later()
    store.branch("back", tip)

    assert store.collect(grace_s=0).checkpoints == ()
    assert store.stored() == {tip.checkpoint_id}


def test_what_is_named_again_between_plan_and_removal_stays(store):
    tip = store.checkpoint()
    sweep = gc._Sweep(store.environment, store.catalog, store.disk, gc.NOTHING_SPARED, before_s=store.now_s)
    sweep.plan()
    assert len(sweep.due) == 1

    store.branch("back", tip)

    assert sweep.remove_checkpoints() == []
    assert store.stored() == {tip.checkpoint_id}


def test_a_block_shared_by_two_checkpoints_stays_for_the_one_that_is_left(store):
    shared = store.block()
    one, other = store.checkpoint(blocks=[shared]), store.checkpoint(blocks=[shared])
    store.branch("one", one)
    store.branch("main", other)
    store.drop("one")

    assert store.collect(grace_s=0).checkpoints == (one.checkpoint_id,)
    assert store.disk.contains(shared.digest)
    assert store.check(read_data=True).problems == ()


def test_blocks_that_nobody_ever_named_go_after_the_grace(store):
    block = store.block()

    assert store.collect().num_blocks == 0
    store.later()
    assert store.collect().num_blocks == 1
    assert not store.disk.contains(block.digest)


def test_gc_passes_over_a_damaged_checkpoint_and_takes_the_others(store):
    damaged, sound = store.checkpoint(), store.checkpoint()
    store.change(Table.NODES, rows.node_key(SESSION, damaged.checkpoint_id))
    store.later()

    report = store.collect()

    assert report.checkpoints == (sound.checkpoint_id,)
    assert len(report.damaged) == 1
    assert damaged.checkpoint_id.hex() in report.damaged[0]


def test_gc_tells_of_a_checkpoint_whose_blocks_are_miscounted_and_takes_the_others(store):
    block = store.block()
    wrong, *others = [store.checkpoint(blocks=[block] if not n else []) for n in range(5)]
    store.do(lambda txn: store.disk.release(txn, [block.digest]))
    store.later()

    report = store.collect()

    assert set(report.checkpoints) == {c.checkpoint_id for c in others}
    assert len(report.damaged) == 1
    assert store.stored() == {wrong.checkpoint_id}


def test_gc_removes_tokens_of_no_branch(store):
    store.branch("main", None, num_open=10)
    store.do(lambda txn: txn.put(Table.TAILS, rows.tail_key(rows.branch_key(SESSION, "gone"), 0), b"\1\0\0\0"))
    assert kinds(store.check())["orphan"] == 1

    assert store.collect().num_rows == 1

    with store.environment.read() as txn:
        assert list(store.catalog.open_tokens(txn, SESSION, "main")) == [1] * 10
        assert txn.count(Table.TAILS) == 1


def test_gc_shortens_the_reflog_to_what_is_recent_or_among_the_last(store):
    def moves(txn):
        for number in range(gc.KEPT_MOVES + 50):
            time_s = store.now_s - (10 * GRACE_S if number < 20 else 0)
            move = Move(branch="main", operation="fork", old=None, new=None, time_s=time_s)
            store.catalog.record_move(txn, SESSION, move)

    store.do(moves)

    assert store.collect().num_rows == 20

    with store.environment.read() as txn:
        assert len(store.catalog.moves(txn, SESSION)) == gc.KEPT_MOVES + 30


def test_a_sound_store_has_no_problems_and_every_block_is_read(store):
    store.branch("main", store.checkpoint(blocks=[store.block(), store.block()], tail=store.block(5)), num_open=3000)

    report = store.check(read_data=True)

    assert report.problems == ()
    assert report.is_sound
    assert (report.num_sessions, report.num_branches, report.num_checkpoints, report.num_blocks) == (1, 1, 1, 3)
    assert report.num_blocks_read == 3
    assert report.nbytes_read == store.disk.nbytes


def test_check_reads_about_the_fraction_that_was_asked_for(store):
    tip = store.checkpoint(blocks=[store.block() for _ in range(40)])
    store.branch("main", tip)

    report = store.check(read_data=True, fraction=0.25, rng=random.Random(1))

    assert 4 <= report.num_blocks_read <= 18


@pytest.mark.parametrize(
    "table",
    [Table.SESSIONS, Table.BRANCHES, Table.TAILS, Table.NODES, Table.NREFS, Table.REFLOG, Table.BINDEX, Table.CHAIN],
)
def test_check_finds_a_changed_bit_in_every_table(store, table):
    store.branch("main", store.checkpoint(blocks=[store.block()]), num_open=10)
    store.do(
        lambda txn: store.catalog.record_move(
            txn, SESSION, Move(branch="main", operation="fork", old=None, new=None, time_s=1.0)
        )
    )
    assert store.check().is_sound
    with store.environment.read() as txn:
        key = next(key for key, _ in txn.scan_each(table))

    store.change(table, key)

    assert kinds(store.check())["damaged"] >= 1


def test_only_reading_the_data_finds_a_changed_bit_in_a_block(store):
    block = store.block()
    store.branch("main", store.checkpoint(blocks=[block]))
    with store.environment.read() as txn:
        key = next(key for key, _ in txn.scan_each(Table.BLOCKS))

    store.change(Table.BLOCKS, key, flip=700)

    assert store.check().is_sound
    report = store.check(read_data=True)
    assert [problem.kind for problem in report.problems] == ["damaged"]
    assert block.digest.hex() in report.problems[0].record


def test_check_finds_a_checkpoint_without_its_parent_and_a_branch_without_its_tip(store):
    root = store.checkpoint()
    child = store.checkpoint(root)
    store.branch("main", child)
    for made in (root, child):
        store.do(lambda txn, made=made: txn.delete(Table.NODES, rows.node_key(SESSION, made.checkpoint_id)))

    report = store.check()

    assert kinds(report) == {"dangling": 1, "count": 2}


def test_check_finds_a_block_that_a_checkpoint_names_but_nobody_stored(store):
    block = store.block()
    store.branch("main", store.checkpoint(blocks=[block]))
    store.do(lambda txn: txn.delete(Table.BINDEX, block.digest))

    report = store.check()

    assert any("its blocks are not stored" in problem.advice for problem in report.problems)


@pytest.mark.parametrize(("delta", "word"), [(-1, "could remove"), (1, "for nothing")])
def test_check_recounts_the_names_of_checkpoints(store, delta, word):
    root = store.checkpoint()
    store.branch("main", store.checkpoint(root))
    store.branch("root", root)
    node = rows.node_key(SESSION, root.checkpoint_id)

    store.do(lambda txn: (refs.retain if delta > 0 else lambda t, n: refs.release(t, n, 1))(txn, node))

    report = store.check()
    assert [problem.kind for problem in report.problems] == ["count"]
    assert word in report.problems[0].advice


@pytest.mark.parametrize("delta", [-1, 1])
def test_check_recounts_the_names_of_blocks(store, delta):
    block = store.block()
    store.branch("main", store.checkpoint(blocks=[block]))

    change = store.disk.retain if delta > 0 else store.disk.release
    store.do(lambda txn: change(txn, [block.digest]))

    report = store.check()
    assert [problem.kind for problem in report.problems] == ["count"]
    assert block.digest.hex() in report.problems[0].record


def test_check_finds_open_tokens_that_do_not_start_at_the_tip(store):
    tip = store.checkpoint(own=5)
    tokens = Trail(array("I", [1] * 9))
    record = BranchRecord(name="main", tip=tip.checkpoint_id, created_s=1.0, updated_s=1.0)

    store.do(lambda txn: store.catalog.put_branch(txn, SESSION, record, tokens, 7))

    assert kinds(store.check()) == {"contradiction": 1}


def test_check_finds_a_session_without_its_active_branch(store):
    assert [problem.kind for problem in store.check().problems] == ["dangling"]


def test_a_read_only_handle_can_check_and_preview(store):
    store.branch("main", store.checkpoint(blocks=[store.block()]))
    lost = store.checkpoint()
    store.environment.close()

    with Environment.open(store.path, read_only=True) as environment:
        catalog, disk = Catalog(), DiskTier(environment)
        preview = gc.collect(environment, catalog, disk, grace_s=0, now_s=store.now_s, dry_run=True)

        assert check(environment, disk, read_data=True).problems == ()
        assert preview.checkpoints == (lost.checkpoint_id,)
        with pytest.raises(ReadOnlyError):
            gc.collect(environment, catalog, disk, grace_s=0, now_s=store.now_s)


def test_compact_gives_space_back_and_loses_nothing(store):
    kept = store.block()
    store.branch("main", store.checkpoint(blocks=[kept]))
    for _ in range(300):
        store.block(512)
    store.collect(grace_s=0)
    store.environment.close()

    report = gc.compact(store.path)

    assert report.after_nbytes < report.before_nbytes / 2
    assert (store.path / "data.mdb").stat().st_mode & 0o777 == 0o600
    assert not (store.path / "data.mdb.compact").exists()
    store.open()
    assert store.check(read_data=True).problems == ()
    assert store.disk.contains(kept.digest)
    store.block()
    assert store.check(read_data=True).problems == ()


def test_compact_refuses_a_store_that_is_open(store):
    with pytest.raises(StoreLockedError):
        gc.compact(store.path)

    store.environment.close()
    with Environment.open(store.path, read_only=True), pytest.raises(StoreLockedError):
        gc.compact(store.path)
    store.open()


def test_compact_of_nothing_is_an_error(tmp_path):
    with pytest.raises(NotFoundError):
        gc.compact(tmp_path / "nowhere")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), min_size=5, max_size=30))
def test_any_history_leaves_a_sound_store_and_gc_keeps_exactly_what_branches_reach(tmp_path_factory, steps):
    store = Store(tmp_path_factory.mktemp("gc") / "store")
    store.session()
    tips = {"main": None}
    made, blocks = {}, []
    for what, number in steps:
        name = sorted(tips)[number % len(tips)] if tips else "main"
        if what in {0, 1}:
            blocks.append(store.block())
            parent = tips.get(name)
            tips[name] = store.checkpoint(parent, blocks=[blocks[-1]], tail=blocks[number % len(blocks)])
            made[tips[name].checkpoint_id] = tips[name]
            store.branch(name, tips[name])
        elif what == 2 and made:
            tips[f"b{number}"] = list(made.values())[number % len(made)]
            store.branch(f"b{number}", tips[f"b{number}"])
        elif what == 3 and name in tips and tips[name] is not None:
            store.drop(name)
            del tips[name]
        elif what == 4:
            store.collect(grace_s=0)
            stored = store.stored()
            made = {key: value for key, value in made.items() if key in stored}
            blocks = [block for block in blocks if store.disk.contains(block.digest)]
    store.collect(grace_s=0)

    reached = set()
    for tip in tips.values():
        while tip is not None:
            reached.add(tip.checkpoint_id)
            tip = made.get(tip.parent_id)
    report = store.check(read_data=True)
    assert store.stored() == reached
    assert [problem for problem in report.problems if "active branch" not in problem.advice] == []
    named = {digest for checkpoint_id in reached for digest in made[checkpoint_id].digests()}
    assert report.num_blocks == len(named)
    store.environment.close()
