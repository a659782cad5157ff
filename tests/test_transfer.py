"""export and import: one file with a session or a branch, verified completely, all or nothing."""

import random
import shutil
import struct
import tracemalloc

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import agentmem
from agentmem import gc
from agentmem._lmdb import Environment, Table
from agentmem.bundle import Kind, read_bundle, write_bundle
from agentmem.check import check
from agentmem.errors import (
    AlreadyExistsError,
    CorruptionError,
    FormatVersionError,
    InvalidInputError,
    NotFoundError,
)
from agentmem.tiers.disk import DiskTier
from agentmem.transfer import export_session, import_session
from agentmem.tree.catalog import Catalog

PROMPT = [token % 500 for token in range(200)]
HEAD_NBYTES, FOOT_NBYTES = 32, 72


class Place:
    """An open store without a model."""

    def __init__(self, path, *, create=True):
        self.environment = Environment.open(path, create=create)
        self.catalog = Catalog()
        self.disk = DiskTier(self.environment)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.environment.close()

    def export(self, name, file, **options):
        return export_session(self.environment, self.catalog, self.disk, name, file, **options)

    def import_(self, file, **options):
        return import_session(self.environment, self.catalog, self.disk, file, **options)

    def session_names(self):
        with self.environment.read() as txn:
            return [session.name for session in self.catalog.sessions(txn)]

    def num_checkpoints(self):
        with self.environment.read() as txn:
            return txn.count(Table.NREFS)

    def collect(self):
        return gc.collect(self.environment, self.catalog, self.disk, grace_s=0, now_s=2e9)


@pytest.fixture(scope="module")
def original(tmp_path_factory, llama):
    """A closed store: session "task" with a plan and two branches of it, one of them forked again."""
    path = tmp_path_factory.mktemp("original") / "store.agentmem"
    with agentmem.open(path, model=llama) as store:
        session = store.create("task", extras={"owner": "me"})
        session.append(PROMPT)
        plan = session.checkpoint("plan", extras={"score": 0.5})
        for name in ("a", "b"):
            session.fork(name, at=plan)
            session.switch(name)
            session.append([7, 8, ord(name)])
            session.generate(max_new_tokens=80, do_sample=False)
            session.checkpoint(f"tried {name}")
        session.fork("c")
    return path


@pytest.fixture
def source(original, tmp_path):
    """A copy of the original, for tests that change or open it."""
    return shutil.copytree(original, tmp_path / "source.agentmem")


@pytest.fixture(scope="module")
def exported(original, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "task.export"
    with Place(original, create=False) as place:
        place.export("task", path)
    return path


def entries_of(path):
    with read_bundle(path) as reader:
        return list(reader.entries())


def rewritten(path, entries):
    """Write other entries into a file whose every checksum is right."""
    with write_bundle(path) as writer:
        for kind, data in entries:
            writer.put(kind, data)
    return path


def next_logits(path, model, session_name, branch, token):
    with agentmem.open(path, model=model) as store:
        session = store.resume(session_name, branch=branch)
        logits = session.forward([token])
        return logits.clone(), session.report, session.active.num_pending


@pytest.mark.parametrize("branch", ["a", "c", "main"])
def test_an_imported_branch_goes_on_with_the_same_bits_and_feeds_nothing_again(
    source, exported, store_path, llama, branch
):
    with Place(store_path) as place:
        place.import_(exported)

    expected, _, _ = next_logits(source, llama, "task", branch, 5)
    logits, report, _ = next_logits(store_path, llama, "task", branch, 5)

    assert torch.equal(logits, expected)
    assert report.num_computed <= 2  # what was pending, and the token itself
    assert report.reason == agentmem.Reason.COMPLETE


def test_tokens_records_and_metadata_come_through_unchanged(original, exported, store_path):
    with Place(store_path) as place:
        place.import_(exported)

    with agentmem.open(original) as old, agentmem.open(store_path) as new:
        before, after = old.view("task"), new.view("task")
        assert after.record.extras == {"owner": "me"}
        assert after.record.fingerprint == before.record.fingerprint
        assert [(b.name, b.tip, b.num_pending, b.extras) for b in after.branches] == [
            (b.name, b.tip, b.num_pending, b.extras) for b in before.branches
        ]
        assert [(c.checkpoint_id, c.tokens, c.blocks, c.tail, c.message) for c in after.checkpoints] == [
            (c.checkpoint_id, c.tokens, c.blocks, c.tail, c.message) for c in before.checkpoints
        ]
        assert {move.operation for move in new.moves("task")} == {"import"}


def test_a_store_is_sound_after_an_import(exported, store_path):
    with Place(store_path) as place:
        place.import_(exported)

        report = check(place.environment, place.disk, read_data=True)
        assert report.problems == ()
        assert report.num_blocks_read == place.disk.stats().num_blocks > 0


def test_one_branch_travels_without_its_siblings(source, store_path, tmp_path):
    file = tmp_path / "a.export"
    with Place(source, create=False) as place:
        report = place.export("task", file, branch="a")

    with Place(store_path) as place:
        arrived = place.import_(file)

    assert report.branches == arrived.branches == ("a",)
    assert arrived.num_checkpoints == 2
    with agentmem.open(store_path) as store:
        assert store.view("task").record.active_branch == "a"


def test_a_block_that_the_store_has_is_not_stored_twice(source, exported):
    with Place(source, create=False) as place:
        before = place.disk.stats()

        report = place.import_(exported, name="copy")

        assert report.num_blocks > 0
        assert report.num_new_blocks == 0
        assert place.disk.stats() == before


def test_a_file_can_be_imported_twice_under_two_names(exported, store_path, llama):
    with Place(store_path) as place:
        one, other = place.import_(exported), place.import_(exported, name="again")

        assert one.session_id != other.session_id
        assert sorted(place.session_names()) == ["again", "task"]
        assert check(place.environment, place.disk).problems == ()

    first, _, _ = next_logits(store_path, llama, "task", "a", 5)
    second, _, _ = next_logits(store_path, llama, "again", "a", 5)
    assert torch.equal(first, second)


def test_what_is_removed_of_one_import_stays_in_the_other(exported, store_path):
    with Place(store_path) as place:
        one = place.import_(exported)
        place.import_(exported, name="again")
        place.environment.submit(lambda txn: place.catalog.remove_session(txn, one.session_id)).result()

        place.collect()
        place.collect()
        assert place.session_names() == ["again"]
        assert check(place.environment, place.disk, read_data=True).problems == ()


def test_a_taken_name_is_refused_before_any_block_is_stored(exported, store_path, tmp_path):
    with Place(store_path) as place:
        place.import_(exported)
        blocks = place.disk.stats()

        with pytest.raises(AlreadyExistsError, match="'task'"):
            place.import_(exported)
        assert place.disk.stats() == blocks
        assert place.session_names() == ["task"]


def test_open_tokens_travel_from_a_store_that_is_being_used(source, store_path, tmp_path, llama):
    file = tmp_path / "open.export"
    with agentmem.open(source, model=llama) as store:
        session = store.resume("task", branch="a")
        session.active.extras["note"] = "in flight"
        session.append([11, 12, 13])
        store.flush()
        export_session(store.environment, store.catalog, DiskTier(store.environment), "task", file)
        expected = list(session.active.tokens)

    with Place(store_path) as place:
        place.import_(file)

    with agentmem.open(store_path, model=llama) as store:
        branch = store.resume("task", branch="a").active
        assert list(branch.tokens) == expected
        assert branch.extras["note"] == "in flight"


def test_a_file_belongs_to_its_owner_alone_and_leaves_nothing_beside_it(exported):
    assert exported.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in exported.parent.iterdir()] == [exported.name]


def test_an_older_export_is_replaced(source, tmp_path):
    file = tmp_path / "task.export"
    with Place(source, create=False) as place:
        place.export("task", file, branch="a")
        size = file.stat().st_size

        place.export("task", file)

    assert file.stat().st_size > size


def test_an_existing_file_that_is_no_export_is_left_alone(source, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")

    with Place(source, create=False) as place, pytest.raises(InvalidInputError, match="no export"):
        place.export("task", file)
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("file", "error"),
    [("source.agentmem/data.mdb", InvalidInputError), ("none/x", NotFoundError), (".", InvalidInputError)],
)
def test_a_path_that_cannot_be_a_file_is_refused_by_name(source, tmp_path, file, error):
    with Place(source, create=False) as place, pytest.raises(error):
        place.export("task", tmp_path / file)


def test_a_damaged_block_stops_the_export_and_leaves_no_file(source, tmp_path):
    with Place(source, create=False) as place:
        with place.environment.read() as txn:
            digest, _ = next(txn.scan_each(Table.BINDEX))
        place.environment.submit(lambda txn: txn.delete(Table.BINDEX, digest)).result()

        with pytest.raises(CorruptionError, match=digest.hex()):
            place.export("task", tmp_path / "task.export")
    assert [path.name for path in tmp_path.iterdir()] == ["source.agentmem"]


def test_an_unknown_session_or_branch_is_not_found(source, tmp_path):
    with Place(source, create=False) as place:
        with pytest.raises(NotFoundError, match="did you mean 'task'"):
            place.export("tsak", tmp_path / "x")
        with pytest.raises(NotFoundError, match="'z'"):
            place.export("task", tmp_path / "x", branch="z")


def test_a_changed_byte_anywhere_is_found_and_nothing_is_imported(exported, store_path, tmp_path):
    data = exported.read_bytes()
    rng = random.Random(0)
    ends = [*range(HEAD_NBYTES + 24), *range(len(data) - FOOT_NBYTES, len(data))]
    damaged = tmp_path / "damaged"

    with Place(store_path) as place:
        for position in [*ends, *rng.sample(range(len(data)), 150)]:
            changed = bytearray(data)
            changed[position] ^= 1 << rng.randrange(8)
            damaged.write_bytes(changed)

            with pytest.raises((CorruptionError, FormatVersionError)):
                place.import_(damaged)
        assert place.session_names() == []
        assert place.num_checkpoints() == 0
        assert check(place.environment, place.disk, read_data=True).problems == ()


def test_a_file_cut_off_anywhere_is_refused_before_anything_is_stored(exported, store_path, tmp_path):
    data = exported.read_bytes()
    damaged = tmp_path / "damaged"

    with Place(store_path) as place:
        for length in [0, 1, 8, HEAD_NBYTES, *range(100, len(data), 9973), len(data) - 1]:
            damaged.write_bytes(data[:length])
            with pytest.raises(CorruptionError):
                place.import_(damaged)
        damaged.write_bytes(data + b"\0")
        with pytest.raises(CorruptionError):
            place.import_(damaged)

        assert place.disk.stats().num_blocks == 0


def test_gc_takes_the_blocks_of_an_import_that_failed(exported, store_path, tmp_path):
    entries = entries_of(exported)
    lacking = rewritten(tmp_path / "lacking", [entry for entry in entries if entry != entries[1]])

    with Place(store_path) as place:
        with pytest.raises(CorruptionError, match="not in the file"):
            place.import_(lacking)
        place.environment.flush()
        stored = place.disk.stats().num_blocks
        report = place.collect()

        assert report.num_blocks == stored == len([kind for kind, _ in entries if kind is Kind.BLOCK]) - 1
        assert place.disk.stats().num_blocks == 0


def test_a_file_of_a_later_version_is_refused_by_name(exported, store_path, tmp_path):
    data = bytearray(exported.read_bytes())
    data[10:12] = struct.pack("<H", 9)
    data[24:32] = xxhash.xxh3_64(data[:24]).intdigest().to_bytes(8, "little")
    (tmp_path / "later").write_bytes(data)

    with Place(store_path) as place, pytest.raises(FormatVersionError, match="install a newer one"):
        place.import_(tmp_path / "later")


def test_another_kind_of_file_is_refused(store_path, tmp_path):
    (tmp_path / "picture").write_bytes(b"\x89PNG" * 100)

    with Place(store_path) as place:
        with pytest.raises(CorruptionError, match="no export"):
            place.import_(tmp_path / "picture")
        with pytest.raises(NotFoundError):
            place.import_(tmp_path / "nothing")
        with pytest.raises(InvalidInputError):
            place.import_(tmp_path)


def swap_first(kind):
    """Return a change of entries that swaps the first two of one kind."""

    def change(entries):
        first, second = [index for index, entry in enumerate(entries) if entry[0] is kind][:2]
        entries[first], entries[second] = entries[second], entries[first]
        return entries

    return change


def swap_bytes(kind, old, new):
    """Return a change of entries that replaces bytes in all of one kind."""
    return lambda entries: [(k, data.replace(old, new, 1) if k is kind else data) for k, data in entries]


LIES = {
    "no session": lambda entries: entries[1:],
    "two sessions": lambda entries: [entries[0], *entries],
    "nothing at all": lambda _: [],
    "a child before its parent": swap_first(Kind.CHECKPOINT),
    "a checkpoint twice": lambda entries: [*entries, next(e for e in entries if e[0] is Kind.CHECKPOINT)],
    "a branch twice": lambda entries: [*entries, entries[-1]],
    "a branch without its tip": lambda entries: [e for e in entries if e[0] is not Kind.CHECKPOINT],
    "other tokens": swap_bytes(Kind.CHECKPOINT, struct.pack("<3I", 70, 71, 72), struct.pack("<3I", 70, 71, 73)),
    "a cut record": lambda entries: [(k, d[:-1] if k is Kind.BLOCK else d) for k, d in entries],
    "a short branch": lambda entries: [(k, d[:5] if k is Kind.BRANCH else d) for k, d in entries],
    "open tokens too many": lambda entries: [(k, d + bytes(4) if k is Kind.BRANCH else d) for k, d in entries],
    "a branch without a name": lambda e: [(k, b"\0\0" + d[2:] if k is Kind.BRANCH else d) for k, d in e],
    "an empty checkpoint": lambda entries: [(k, b"" if k is Kind.CHECKPOINT else d) for k, d in entries],
    "an empty session": lambda entries: [(k, b"" if k is Kind.SESSION else d) for k, d in entries],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_contradicts_itself_is_refused_although_its_checksums_are_right(
    exported, store_path, tmp_path, lie
):
    lying = rewritten(tmp_path / "lying", LIES[lie](entries_of(exported)))

    with Place(store_path) as place:
        with pytest.raises(CorruptionError):
            place.import_(lying)
        assert place.session_names() == []
        assert place.num_checkpoints() == 0


def test_a_record_whose_kv_was_exchanged_is_refused(exported, store_path, tmp_path):
    entries = entries_of(exported)
    number, record = next((n, data) for n, (kind, data) in enumerate(entries) if kind is Kind.BLOCK)
    changed = bytearray(record)
    changed[-10] ^= 1
    entries[number] = (Kind.BLOCK, bytes(changed))

    with Place(store_path) as place, pytest.raises(CorruptionError):
        place.import_(rewritten(tmp_path / "changed", entries))


@given(st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=300)), max_size=8))
def test_what_is_put_into_a_file_comes_out_of_it(tmp_path_factory, entries):
    path = tmp_path_factory.mktemp("bundle") / "file"

    rewritten(path, entries)

    assert entries_of(path) == entries


def test_a_large_file_is_never_in_memory_as_a_whole(tmp_path):
    entry, num_entries = bytes(1 << 20), 32
    tracemalloc.start()

    rewritten(tmp_path / "large", ((Kind.BLOCK, entry) for _ in range(num_entries)))
    with read_bundle(tmp_path / "large") as reader:
        num_read = sum(1 for _ in reader.entries())
    _, peak_nbytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert num_read == num_entries
    assert peak_nbytes < 6 * len(entry)


def test_a_branch_whose_kv_was_moved_arrives_with_its_marks(llama, tmp_path):
    file = tmp_path / "task.bundle"
    config = agentmem.Config(block_size=16)
    with agentmem.open(tmp_path / "from", model=llama, config=config) as store:
        session = store.create("task")
        session.forward(PROMPT)
        session.checkpoint("plan")
        session.branch("main").edit("short", 40, 60)
        session.switch("short")
        session.checkpoint("moved")
        session.close()
    with Place(tmp_path / "from", create=False) as place:
        place.export("task", file)
    with Place(tmp_path / "to") as place:
        place.import_(file)

    with agentmem.open(tmp_path / "to", model=llama, config=config) as store:
        report = store.resume("task").active.report

        assert report.num_approximate == 140
        assert report.from_tier == {"disk": 180}
