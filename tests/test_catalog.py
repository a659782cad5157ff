"""The catalog on a real environment."""

import itertools
import shutil
import tempfile
from array import array
from collections import Counter
from pathlib import Path

import msgpack
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentmem._lmdb import Environment, Level, Table
from agentmem.errors import AlreadyExistsError, CorruptionError, InvalidInputError, NotFoundError
from agentmem.ids import BlockDigest, BlockHash, CheckpointId, Fingerprint, SessionId
from agentmem.marks import Mark, MarkInput, MarkKind
from agentmem.testing.damage import overwrite
from agentmem.tree import nodes, refs, rows, tails
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import BlockRef, BranchRecord, Checkpoint, Move, SessionRecord, StateRef
from agentmem.tree.fields import MAX_EXTRAS_NBYTES, copy_extras
from agentmem.tree.rows import ROW_TOKENS
from agentmem.tree.trail import Trail

SESSION = SessionId(b"session1")
_numbers = itertools.count(1)


@pytest.fixture
def environment(store_path):
    with Environment.open(store_path, create=True) as environment:
        yield environment


@pytest.fixture
def catalog(environment):
    return Catalog(clock=lambda: 1000.0)


def session(name="ticket-4711", session_id=SESSION, **fields):
    return SessionRecord(
        session_id=session_id,
        name=name,
        active_branch="main",
        fingerprint=Fingerprint(b"f" * 32),
        block_size=64,
        created_s=1.0,
        updated_s=2.0,
        **fields,
    )


def branch(name="main", tip=None, **fields):
    return BranchRecord(name=name, tip=tip and tip.checkpoint_id, created_s=1.0, updated_s=2.0, **fields)


def checkpoint(parent=None, *, own=1, **fields):
    number = next(_numbers)
    fields.setdefault("checkpoint_id", CheckpointId(number.to_bytes(16, "big")))
    return Checkpoint(
        session_id=SESSION,
        parent_id=parent and parent.checkpoint_id,
        num_tokens=(parent.num_tokens if parent else 0) + own,
        tokens=b"\1\0\0\0" * own,
        fingerprint=Fingerprint(b"f" * 32),
        created_s=float(number),
        **fields,
    )


def trail(tokens=()):
    return Trail(array("I", tokens))


def do(environment, *operations):
    """Carry out operations as one."""
    return environment.submit(lambda txn: [operation(txn) for operation in operations][-1]).result()


def damage(environment, table, key):
    """Change one bit of a stored value."""
    with environment.read() as txn:
        stored = bytearray(txn.get_view(table, key))
    stored[-1] ^= 1
    environment.submit(lambda txn: overwrite(txn, table, key, stored)).result()


def counts(environment, stored):
    with environment.read() as txn:
        return refs.find(txn, rows.node_key(SESSION, stored.checkpoint_id))


def unnamed(environment):
    with environment.read() as txn:
        return [node[8:] for _, node in refs.unnamed(txn, 1 << 63)]


def test_a_session_comes_back_as_it_was_put(environment, catalog):
    record = session(model_name="SmolLM2", tokenizer_hash="ab", template_hash="cd", extras={"a": [1, None, b"x", 2.5]})

    do(environment, lambda txn: catalog.put_session(txn, record))

    with environment.read() as txn:
        assert catalog.find_session(txn, "ticket-4711") == record
        assert catalog.session(txn, SESSION) == record
        assert catalog.sessions(txn) == [record]


def test_a_taken_session_name_is_refused(environment, catalog):
    do(environment, lambda txn: catalog.put_session(txn, session()))

    with pytest.raises(AlreadyExistsError, match="ticket-4711"):
        do(environment, lambda txn: catalog.put_session(txn, session(session_id=SessionId(b"session2"))))


def test_a_renamed_session_frees_its_old_name(environment, catalog):
    do(environment, lambda txn: catalog.put_session(txn, session("old")))

    do(environment, lambda txn: catalog.put_session(txn, session("new")))
    do(environment, lambda txn: catalog.put_session(txn, session("old", session_id=SessionId(b"session2"))))

    with environment.read() as txn:
        assert catalog.find_session(txn, "new").session_id == SESSION
        assert catalog.find_session(txn, "old").session_id == b"session2"


def test_an_unknown_session_lists_near_names(environment, catalog):
    do(environment, lambda txn: catalog.put_session(txn, session()))

    with environment.read() as txn, pytest.raises(NotFoundError, match="did you mean 'ticket-4711'"):
        catalog.find_session(txn, "ticket-4712")


@pytest.mark.parametrize("own", [0, 1, 20_000, 100_000])
def test_a_checkpoint_of_any_size_comes_back_as_it_was_put(environment, catalog, own):
    blocks = tuple(BlockRef(BlockHash(bytes([n]) * 32), BlockDigest(bytes([n + 1]) * 32)) for n in range(min(own, 200)))
    stored = checkpoint(
        own=own,
        blocks=blocks,
        tail=BlockRef(BlockHash(b"t" * 32), BlockDigest(b"u" * 32)),
        states=(StateRef(7, (BlockDigest(b"s" * 32), BlockDigest(b"r" * 32))),),
        marks=(
            Mark(
                kind=MarkKind.MEDIA,
                start=2,
                stop=5,
                digest=b"m" * 32,
                payload=BlockDigest(b"p" * 32),
                inputs=(MarkInput(name="pixel_values", dtype="float32", shape=(4, 12)),),
            ),
            Mark(kind=MarkKind.SPLICE, start=5, stop=9, digest=b"d" * 32, origin=(CheckpointId(b"o" * 16), 11)),
        ),
        regime=b"long",
        num_pending=1,
        first_block=3,
        message="plan written",
        extras={"score": 0.5, "nested": {"list": [1, 2]}},
        is_auto=True,
        has_kv=False,
    )

    assert do(environment, lambda txn: catalog.put_checkpoint(txn, stored)) is None

    with environment.read() as txn:
        assert catalog.checkpoint(txn, SESSION, stored.checkpoint_id) == stored
        assert catalog.checkpoints(txn, SESSION) == [stored]


def test_no_row_of_a_checkpoint_is_larger_than_a_chunk_of_a_block(environment, catalog):
    do(environment, lambda txn: catalog.put_checkpoint(txn, checkpoint(own=100_000)))

    with environment.read() as txn:
        sizes = [len(value) for _, value in txn.scan(Table.NODES)]
        assert len(sizes) > 5
        assert max(sizes) + 8 + 16 <= 16 * 4096


def test_attaching_kv_replaces_the_record_and_returns_the_old_one(environment, catalog):
    bare = checkpoint(own=100_000, has_kv=False)
    full = checkpoint(own=1, checkpoint_id=bare.checkpoint_id)
    do(environment, lambda txn: catalog.put_checkpoint(txn, bare))

    assert do(environment, lambda txn: catalog.put_checkpoint(txn, full)) == bare

    with environment.read() as txn:
        assert catalog.checkpoints(txn, SESSION) == [full]
        assert txn.count(Table.NODES) == 1


def test_a_checkpoint_cannot_change_its_parent_or_lack_it(environment, catalog):
    root = checkpoint()
    stored = checkpoint(root)
    do(environment, lambda txn: catalog.put_checkpoint(txn, root), lambda txn: catalog.put_checkpoint(txn, stored))

    with pytest.raises(InvalidInputError, match="another parent"):
        do(environment, lambda txn: catalog.put_checkpoint(txn, checkpoint(checkpoint_id=stored.checkpoint_id)))
    with pytest.raises(NotFoundError, match="is not stored"):
        do(environment, lambda txn: catalog.put_checkpoint(txn, checkpoint(checkpoint())))


def test_names_are_counted_and_only_the_unnamed_may_go(environment, catalog):
    root, other = checkpoint(), checkpoint()
    child = checkpoint(root)
    do(environment, *(lambda txn, c=c: catalog.put_checkpoint(txn, c) for c in (root, other, child)))

    assert counts(environment, root).refs == 1
    assert set(unnamed(environment)) == {other.checkpoint_id, child.checkpoint_id}

    do(environment, lambda txn: catalog.put_branch(txn, SESSION, branch(tip=child), trail([1, 1]), 2))
    do(environment, lambda txn: catalog.put_branch(txn, SESSION, branch(tip=root), trail([1, 1]), 1))
    do(environment, lambda txn: catalog.put_branch(txn, SESSION, branch("other", other), trail([1]), 1))

    assert counts(environment, root).refs == 2
    assert unnamed(environment) == [child.checkpoint_id]

    do(environment, lambda txn: catalog.put_branch(txn, SESSION, branch("back", child), trail([1, 1]), 2))
    do(environment, lambda txn: catalog.remove_branch(txn, SESSION, "other"))

    assert unnamed(environment) == [other.checkpoint_id]


def test_a_branch_on_an_unknown_checkpoint_is_refused_and_leaves_nothing(environment, catalog):
    with pytest.raises(NotFoundError, match="is not stored"):
        do(environment, lambda txn: catalog.put_branch(txn, SESSION, branch(tip=checkpoint()), trail([1, 2]), 1))

    with environment.read() as txn:
        assert catalog.branches(txn, SESSION) == []
        assert txn.count(Table.TAILS) == 0


def test_open_tokens_come_back_and_an_append_rewrites_one_row(environment, catalog):
    tokens = trail(range(3 * ROW_TOKENS))
    do(environment, lambda txn: catalog.put_branch(txn, SESSION, branch(), tokens.fork(), 0))
    tokens.extend([7])
    written = []

    def append(txn):
        put = txn.put
        watched = type("Watched", (), {"get": txn.get, "delete": txn.delete})()
        watched.put = lambda table, key, value: (written.append(table), put(table, key, value))
        catalog.put_branch(watched, SESSION, branch(), tokens.fork(), 0)

    do(environment, append)

    assert written.count(Table.TAILS) == 1
    with environment.read() as txn:
        assert list(catalog.open_tokens(txn, SESSION, "main")) == list(tokens)
        assert catalog.branch(txn, SESSION, "main").num_open == len(tokens)


def test_a_write_that_was_undone_does_not_fool_the_next_one(environment, catalog):
    tokens = trail(range(2000))
    do(environment, lambda txn: catalog.put_branch(txn, SESSION, branch(), tokens.fork(), 0))
    tokens.truncate(10)
    tokens.extend([5] * 3000)

    def fail(txn):
        catalog.put_branch(txn, SESSION, branch(), tokens.fork(), 0)
        raise RuntimeError("undo")

    with pytest.raises(RuntimeError, match="undo"):
        do(environment, fail)
    tokens.extend([6])
    do(environment, lambda txn: catalog.put_branch(txn, SESSION, branch(), tokens.fork(), 0))

    with environment.read() as txn:
        assert list(catalog.open_tokens(txn, SESSION, "main")) == list(tokens)


def test_a_trail_that_goes_on_after_it_was_written_is_written_again(environment, catalog):
    tokens = trail(range(10))
    do(environment, lambda txn: catalog.put_branch(txn, SESSION, branch(), tokens, 0))

    tokens.extend([7, 8])
    do(environment, lambda txn: catalog.put_branch(txn, SESSION, branch(), tokens, 0))

    with environment.read() as txn:
        assert list(catalog.open_tokens(txn, SESSION, "main")) == [*range(10), 7, 8]


def test_a_forgotten_session_is_written_in_full_and_read_as_before(environment, catalog):
    tokens = trail(range(3000))
    do(environment, lambda txn: catalog.put_branch(txn, SESSION, branch(), tokens, 0))
    catalog.forget(SESSION)

    tokens.extend([7])
    do(environment, lambda txn: catalog.put_branch(txn, SESSION, branch(), tokens, 0))

    with environment.read() as txn:
        assert list(catalog.open_tokens(txn, SESSION, "main")) == [*range(3000), 7]


def test_a_checkpoint_that_is_named_cannot_be_removed(environment, catalog):
    root = checkpoint()
    child = checkpoint(root)
    do(environment, *(lambda txn, c=c: catalog.put_checkpoint(txn, c) for c in (root, child)))

    with pytest.raises(InvalidInputError, match="is named 1 times"):
        do(environment, lambda txn: catalog.remove_checkpoint(txn, root))


def test_unknown_branches_and_checkpoints_are_not_found(environment, catalog):
    with environment.read() as txn:
        with pytest.raises(NotFoundError, match="no branch 'main'"):
            catalog.branch(txn, SESSION, "main")
        with pytest.raises(NotFoundError, match="is not stored"):
            catalog.checkpoint(txn, SESSION, CheckpointId(bytes(16)))
    with pytest.raises(NotFoundError, match="no branch 'main'"):
        do(environment, lambda txn: catalog.remove_branch(txn, SESSION, "main"))


def test_a_checkpoint_leaves_no_open_tokens_behind(environment, catalog):
    tokens = trail(range(5000))
    root = checkpoint(own=5000)
    do(environment, lambda txn: catalog.put_branch(txn, SESSION, branch(), tokens.fork(), 0))

    do(
        environment,
        lambda txn: catalog.put_checkpoint(txn, root),
        lambda txn: catalog.put_branch(txn, SESSION, branch(tip=root), tokens.fork(), 5000),
    )

    with environment.read() as txn:
        assert txn.count(Table.TAILS) == 0
        assert list(tails.orphans(txn)) == []


def test_names_that_begin_alike_do_not_mix_their_tokens(environment, catalog):
    do(environment, lambda txn: catalog.put_branch(txn, SESSION, branch("a"), trail([1, 2]), 0))
    do(environment, lambda txn: catalog.put_branch(txn, SESSION, branch("ab"), trail([3]), 0))

    do(environment, lambda txn: catalog.remove_branch(txn, SESSION, "a"))

    with environment.read() as txn:
        assert list(catalog.open_tokens(txn, SESSION, "ab")) == [3]
        assert [record.name for record in catalog.branches(txn, SESSION)] == ["ab"]


def test_a_branch_open_from_beyond_its_end_is_refused(environment, catalog):
    with pytest.raises(InvalidInputError, match="cannot be open from 3 on"):
        do(environment, lambda txn: catalog.put_branch(txn, SESSION, branch(), trail([1, 2]), 3))


def test_moves_come_back_in_order(environment, catalog):
    moves = [Move(branch="main", operation="create", old=None, new=None, time_s=float(n)) for n in range(300)]
    for move in moves:
        environment.submit(lambda txn, move=move: catalog.record_move(txn, SESSION, move), level=Level.QUEUED)
    environment.flush()

    with environment.read() as txn:
        assert catalog.moves(txn, SESSION) == moves


def test_removing_a_session_removes_all_but_its_checkpoints(environment, catalog):
    root = checkpoint()
    do(
        environment,
        lambda txn: catalog.put_session(txn, session()),
        lambda txn: catalog.put_checkpoint(txn, root),
        lambda txn: catalog.put_branch(txn, SESSION, branch(tip=root), trail(range(3000)), 1),
        lambda txn: catalog.record_move(
            txn, SESSION, Move(branch="main", operation="create", old=None, new=None, time_s=1.0)
        ),
    )

    do(environment, lambda txn: catalog.remove_session(txn, SESSION))

    assert unnamed(environment) == [root.checkpoint_id]
    with environment.read() as txn:
        assert [txn.count(table) for table in (Table.SESSIONS, Table.BRANCHES, Table.TAILS, Table.REFLOG)] == [0] * 4
        assert catalog.checkpoints(txn, SESSION) == [root]
    with pytest.raises(NotFoundError):
        do(environment, lambda txn: catalog.remove_session(txn, SESSION))


def test_a_damaged_record_does_not_stop_the_listing_of_the_others(environment, catalog):
    checkpoints = [checkpoint() for _ in range(3)]
    do(environment, *(lambda txn, c=c: catalog.put_checkpoint(txn, c) for c in checkpoints))
    damage(environment, Table.NODES, rows.node_key(SESSION, checkpoints[1].checkpoint_id))

    damaged = []
    with environment.read() as txn:
        assert catalog.checkpoints(txn, SESSION, damaged) == [checkpoints[0], checkpoints[2]]
        assert len(damaged) == 1
        with pytest.raises(CorruptionError, match=checkpoints[1].checkpoint_id.hex()):
            catalog.checkpoints(txn, SESSION)


def test_a_damaged_branch_and_session_can_be_removed(environment, catalog):
    do(
        environment,
        lambda txn: catalog.put_session(txn, session()),
        lambda txn: catalog.put_branch(txn, SESSION, branch(), trail([1]), 0),
    )
    damage(environment, Table.BRANCHES, rows.branch_key(SESSION, "main"))
    damage(environment, Table.SESSIONS, rows.session_key(SESSION))

    do(environment, lambda txn: catalog.remove_session(txn, SESSION))

    with environment.read() as txn:
        assert [txn.count(table) for table in (Table.SESSIONS, Table.BRANCHES, Table.TAILS)] == [0] * 3


def test_a_missing_piece_of_a_checkpoint_is_damage(environment, catalog):
    stored = checkpoint(own=50_000)
    node = rows.node_key(SESSION, stored.checkpoint_id)
    do(environment, lambda txn: catalog.put_checkpoint(txn, stored))

    do(environment, lambda txn: txn.delete(Table.NODES, rows.piece_key(node, 2)))

    with environment.read() as txn:
        with pytest.raises(CorruptionError, match="pieces"):
            catalog.checkpoint(txn, SESSION, stored.checkpoint_id)
        assert [type(found) for _, found in nodes.each(txn)] == [CorruptionError]


def test_missing_open_tokens_are_damage(environment, catalog):
    do(environment, lambda txn: catalog.put_branch(txn, SESSION, branch(), trail(range(3000)), 0))

    do(environment, lambda txn: txn.delete(Table.TAILS, rows.tail_key(rows.branch_key(SESSION, "main"), 1)))

    with environment.read() as txn, pytest.raises(CorruptionError, match="3000 tokens after its tip"):
        catalog.open_tokens(txn, SESSION, "main")


HOSTILE = {
    "not msgpack": b"\xc1\xc1",
    "cut off": msgpack.packb({"parent": None, "num_tokens": 5})[:-1],
    "a list": msgpack.packb([1, 2]),
    "integer keys": msgpack.packb({1: 2}),
    "an extension": msgpack.packb({"parent": msgpack.ExtType(5, b"x")}),
    "a timestamp": msgpack.packb({"parent": msgpack.Timestamp(1)}),
    "deeply nested": b"\x91" * 5000,
    "a length beyond the end": b"\xdf\xff\xff\xff\xff",
    "wrong types": msgpack.packb({"parent": 7}),
    "a negative count": msgpack.packb({"parent": None, "tail": None, "num_tokens": -1}),
    "an odd number of bytes": msgpack.packb({"parent": None, "tail": None, "num_tokens": 1, "tokens": b"abc"}),
    "invalid text": b"\x81\xa1\xff\x01",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_a_corruption_error_that_names_the_checkpoint(body):
    with pytest.raises(CorruptionError, match="checkpoint 636363"):
        rows.checkpoint_of(SESSION + b"c" * 16, body)


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_of_other_records_are_corruption_errors_too(body):
    with pytest.raises(CorruptionError, match="session 73657373"):
        rows.unpack_session(rows.session_key(SESSION), body)
    with pytest.raises(CorruptionError, match="branch 'main'"):
        rows.unpack_branch(rows.branch_key(SESSION, "main"), body)
    with pytest.raises(CorruptionError, match="reflog row"):
        rows.unpack_move(rows.move_key(SESSION, 1), body)


def test_fields_of_a_later_version_are_ignored():
    body = rows.checkpoint_map(checkpoint())
    later = msgpack.packb(msgpack.unpackb(body) | {"mood": "good"})

    assert rows.checkpoint_of(SESSION + b"c" * 16, later).message == ""


def test_copied_extras_share_nothing_with_the_original():
    extras = {"scores": [1, 2], "pair": (1, 2)}

    copy = copy_extras(extras)
    extras["scores"].append(3)

    assert copy == {"scores": [1, 2], "pair": [1, 2]}


@pytest.mark.parametrize("extras", [{"a": object()}, {1: 2}, {"a": 1 << 70}, {"a": {2: 3}}, {"a": {4}}])
def test_extras_that_cannot_be_stored_are_refused(extras):
    with pytest.raises(InvalidInputError, match="extras cannot be stored"):
        copy_extras(extras)


def test_extras_that_are_too_large_are_refused():
    with pytest.raises(InvalidInputError, match="at most 1,048,576"):
        copy_extras({"a": b"x" * MAX_EXTRAS_NBYTES})


class CatalogAndModel(RuleBasedStateMachine):
    """One session in the catalog beside dicts that went through the same, over reopens and undone operations."""

    NAMES = st.sampled_from(["main", "a", "ab", "日本"])

    @initialize()
    def open(self):
        self.folder = Path(tempfile.mkdtemp())
        self.trails = {}
        self.tips = {}
        self.checkpoints = {}
        self.reopen()

    @rule()
    def reopen(self):
        if hasattr(self, "environment"):
            self.environment.close()
        self.environment = Environment.open(self.folder / "store", create=True)
        self.catalog = Catalog(clock=lambda: 5.0)

    def teardown(self):
        if hasattr(self, "environment"):
            self.environment.close()
            shutil.rmtree(self.folder)

    def start(self, name):
        tip = self.tips[name]
        return self.checkpoints[tip].num_tokens if tip else 0

    def put(self, name, tip, start):
        record = BranchRecord(name=name, tip=tip, created_s=1.0, updated_s=1.0)
        snapshot = self.trails[name].fork()
        return lambda txn: self.catalog.put_branch(txn, SESSION, record, snapshot, start)

    def do(self, *operations):
        do(self.environment, *operations)

    @rule(name=NAMES, source=NAMES)
    def fork(self, name, source):
        if name in self.tips:
            return
        tip = self.tips.get(source)
        self.trails[name] = self.trails[source].fork() if source in self.trails else trail()
        self.tips[name] = tip
        self.trails[name].truncate(self.start(name))
        self.do(self.put(name, tip, self.start(name)))

    @precondition(lambda self: self.tips)
    @rule(data=st.data(), length=st.sampled_from([0, 1, 5, ROW_TOKENS - 1, ROW_TOKENS, 2500]), is_undone=st.booleans())
    def append(self, data, length, is_undone):
        name = data.draw(st.sampled_from(sorted(self.tips)))
        if is_undone:
            before = self.trails[name].fork()
            self.trails[name].extend(range(length))
            with pytest.raises(ZeroDivisionError):
                self.do(self.put(name, self.tips[name], self.start(name)), lambda txn: 1 // 0)
            self.trails[name] = before
        else:
            self.trails[name].extend(range(length))
            self.do(self.put(name, self.tips[name], self.start(name)))

    @precondition(lambda self: self.tips)
    @rule(data=st.data())
    def rewind(self, data):
        name = data.draw(st.sampled_from(sorted(self.tips)))
        self.trails[name].truncate(data.draw(st.integers(self.start(name), len(self.trails[name]))))
        self.do(self.put(name, self.tips[name], self.start(name)))

    @precondition(lambda self: self.tips)
    @rule(data=st.data())
    def make_checkpoint(self, data):
        name = data.draw(st.sampled_from(sorted(self.tips)))
        made = Checkpoint(
            checkpoint_id=CheckpointId(next(_numbers).to_bytes(16, "big")),
            session_id=SESSION,
            parent_id=self.tips[name],
            num_tokens=len(self.trails[name]),
            tokens=array("I", self.trails[name].slice(self.start(name))).tobytes(),
            fingerprint=Fingerprint(bytes(32)),
            created_s=float(next(_numbers)),
        )
        self.checkpoints[made.checkpoint_id] = made
        self.tips[name] = made.checkpoint_id
        self.do(
            lambda txn: self.catalog.put_checkpoint(txn, made), self.put(name, made.checkpoint_id, self.start(name))
        )

    @precondition(lambda self: self.tips)
    @rule(data=st.data())
    def drop(self, data):
        name = data.draw(st.sampled_from(sorted(self.tips)))
        del self.tips[name], self.trails[name]
        self.do(lambda txn: self.catalog.remove_branch(txn, SESSION, name))

    @invariant()
    def the_catalog_says_what_the_model_says(self):
        with self.environment.read() as txn:
            found = {record.name: record.tip for record in self.catalog.branches(txn, SESSION)}
            assert found == self.tips
            for name, whole in self.trails.items():
                assert list(self.catalog.open_tokens(txn, SESSION, name)) == whole.slice(self.start(name))
            assert {c.checkpoint_id: c for c in self.catalog.checkpoints(txn, SESSION)} == self.checkpoints
            assert list(tails.orphans(txn)) == []

    @invariant()
    def the_counts_are_exact(self):
        expected = Counter(tip for tip in self.tips.values() if tip)
        expected.update(c.parent_id for c in self.checkpoints.values() if c.parent_id)
        with self.environment.read() as txn:
            found = {key[8:]: rows.unpack_refs(key, value).refs for key, value in txn.scan(Table.NREFS)}
            assert found == {checkpoint_id: expected[checkpoint_id] for checkpoint_id in self.checkpoints}
            gone = {node[8:] for _, node in refs.unnamed(txn, 1 << 63)}
            assert gone == {checkpoint_id for checkpoint_id in self.checkpoints if not expected[checkpoint_id]}


TestCatalogAndModel = CatalogAndModel.TestCase
TestCatalogAndModel.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
