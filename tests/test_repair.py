"""`repair`: whatever happens to the data file, the store is whole again, and what is lost is said."""

import contextlib
import os
import random
import shutil
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import agentmem
import agentmem.tree.tree
from agentmem import _directory, gc
from agentmem._format import FORMAT_KEY
from agentmem._lmdb import Environment, Level, Table, engine, pages
from agentmem._lmdb.row import TAGS
from agentmem.check import check
from agentmem.errors import (
    AgentMemError,
    CorruptionError,
    FormatVersionError,
    InvalidInputError,
    NotFoundError,
    StorageFullError,
    StoreLockedError,
)
from agentmem.repair import BACKUP_PREFIX, WORK_DIRECTORY, repair
from agentmem.testing.damage import overwrite
from agentmem.tiers.disk import DiskTier
from agentmem.tree import rows
from agentmem.tree.catalog import Catalog

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = agentmem.Config(block_size=16)
TOKENS = [(29 * index * index + 3 * index + 7) % 500 for index in range(60)]
PAGE = 4096
KEY = bytes(range(32))


@dataclass(frozen=True)
class Truth:
    """A store as it was made, and what it holds."""

    path: Path
    tokens: dict[tuple[str, str], list[int]]

    def copy(self, path):
        return Path(shutil.copytree(self.path, path))


def fill(path, model, config=CONFIG):
    with agentmem.open(path, model=model, config=config) as store:
        for name in ("a", "b"):
            session = store.create(name)
            session.append(TOKENS[:40])
            plan = session.checkpoint("plan")
            for number in range(3):
                session.fork(f"x{number}", at=plan)
                session.switch(f"x{number}")
                session.append([number] * 20)
                session.checkpoint("more")
                session.append([7, 8, number])
        sessions = [store.resume(name) for name in ("a", "b")]
        store.flush()
        shutil.copytree(path, path.with_name("killed"))  # as if the process had been killed: open tokens stay open
        return {(each.name, branch): each.branch(branch).tokens for each in sessions for branch in each.branches}


@pytest.fixture(scope="module")
def truth(tmp_path_factory, llama):
    path = tmp_path_factory.mktemp("truth") / "store"
    return Truth(path.with_name("killed"), fill(path, llama))


def found(path, key=None):
    """Return the tokens of every branch, as they are stored."""
    config = agentmem.Config(encryption_key=key)
    with agentmem.open(path, config=config) as view:
        tokens = {}
        for record in view.sessions():
            session = view.view(record.name)
            tree = agentmem.tree.tree.SessionTree(session.checkpoints)
            for branch in session.branches:
                before = [] if branch.tip is None else list(memoryview(tree.tokens(branch.tip)).cast("I"))
                tokens[record.name, branch.name] = before + view.open_tokens(record.session_id, branch.name)
        return tokens


def problems(path, key=None):
    with Environment.open(path, read_only=True, key=key) as environment:
        return check(environment, DiskTier(environment), read_data=True).problems


def do(path, *operations):
    with Environment.open(path) as environment:
        for operation in operations:
            environment.submit(operation, level=Level.DURABLE).result()


def wipe(path, table, key):
    """Make a row unreadable wherever it is in the file, in whatever version."""
    gc.compact(path)
    with Environment.open(path, read_only=True) as environment, environment.read() as txn:
        stored = bytes(txn.get_view(table, key))
    data = (path / "data.mdb").read_bytes()
    assert data.count(stored) >= 2
    (path / "data.mdb").write_bytes(data.replace(stored, b"x" * len(stored)))


def keys(path, table):
    with Environment.open(path, read_only=True) as environment, environment.read() as txn:
        return [key for key, _ in txn.scan_each(table)]


def root_of(path, table):
    """Return the number of a table's root page."""
    with pages.PageFile(path / "data.mdb") as file:
        walk = pages.Walk(file, file.metas()[0].main_root)
        return next(file.table_root(row)[0] for row in walk.rows() if row.key == table.value.encode())


def write_page(path, number, data):
    with (path / "data.mdb").open("r+b") as file:
        file.seek(number * PAGE)
        file.write(data)


def page(number):
    return slice(number * PAGE, (number + 1) * PAGE)


def any_page(data, generator):
    return page(generator.randrange(2, len(data) // PAGE))


def zero(data, generator):
    for _ in range(generator.randrange(1, 8)):
        data[any_page(data, generator)] = bytes(PAGE)


def garble(data, generator):
    data[any_page(data, generator)] = generator.randbytes(PAGE)


def swap(data, generator):
    first, second = any_page(data, generator), any_page(data, generator)
    data[first], data[second] = data[second], data[first]


def flip_bits(data, generator):
    for _ in range(generator.randrange(1, 30)):
        data[generator.randrange(2 * PAGE, len(data))] ^= 1 << generator.randrange(8)


def truncate(data, generator):
    del data[generator.randrange(2, len(data) // PAGE) * PAGE :]


def garble_a_meta_page(data, generator):
    data[page(generator.randrange(2))] = generator.randbytes(PAGE)


def garble_both_meta_pages(data, generator):
    data[: 2 * PAGE] = generator.randbytes(2 * PAGE)


def damage(path, kind, seed):
    data = bytearray((path / "data.mdb").read_bytes())
    kind(data, random.Random(seed))
    (path / "data.mdb").write_bytes(data)


# -- nothing wrong


def test_a_sound_store_comes_out_as_it_was_and_the_old_file_is_kept(truth, tmp_path, llama):
    path = truth.copy(tmp_path / "s")
    before = (path / "data.mdb").read_bytes()

    report = repair(path)
    backup = path / report.backup

    assert (report.faults, report.lost, report.problems, report.num_salvaged) == ((), (), (), 0)
    assert report.backup.startswith(BACKUP_PREFIX)
    assert backup.read_bytes() == before
    assert backup.stat().st_mode & 0o777 == 0o600
    assert found(path) == truth.tokens
    assert problems(path) == ()
    with agentmem.open(path, model=llama, config=CONFIG) as store:
        session = store.resume("a")
        assert session.report.num_pending <= 4  # the open tokens, that were never saved
        session.append([1, 2, 3])
        session.checkpoint("went on")


def test_a_dry_run_says_the_same_and_changes_nothing(truth, tmp_path):
    path = truth.copy(tmp_path / "s")
    damage(path, zero, 5)
    before = {file.name: file.read_bytes() for file in path.iterdir()}

    dry = repair(path, dry_run=True)
    after = {file.name: file.read_bytes() for file in path.iterdir()}
    real = repair(path)

    assert dry.is_dry_run
    assert dry.backup is None
    assert after == before
    assert (dry.faults, len(dry.lost), dry.num_rows) == (real.faults, len(real.lost), real.num_rows)


def test_rows_that_were_removed_do_not_come_back(truth, tmp_path):
    path = truth.copy(tmp_path / "s")
    with agentmem.open(path) as view:
        session_id = view.view("a").record.session_id
    with Environment.open(path) as environment:
        environment.submit(lambda txn: Catalog().remove_session(txn, session_id)).result()

    repair(path)

    assert {name for name, _ in found(path)} == {"b"}


# -- any damage


@pytest.mark.parametrize("kind", [zero, garble, swap, flip_bits, truncate, garble_a_meta_page, garble_both_meta_pages])
def test_after_any_damage_every_branch_is_whole_or_said_to_be_lost(kind, truth, tmp_path):
    for seed in range(8):
        path = truth.copy(tmp_path / str(seed))
        damage(path, kind, seed)
        try:
            report = repair(path)
        except CorruptionError:
            assert kind is truncate  # nothing is left but the first pages
            continue
        tokens = found(path)
        other = {place for place in truth.tokens if tokens.get(place) != truth.tokens[place]}
        said = {
            (session, branch)
            for session, branch in other
            if any(
                line.startswith(
                    (f"branch {branch!r} of session {session!r}", f"session {session!r}:", "the newest commit")
                )
                for line in report.lost
            )
        }
        is_session_lost = {session for session, _ in other} - {session for session, _ in tokens}

        assert report.problems == ()
        assert problems(path) == ()
        assert {place for place in other if place[0] not in is_session_lost} <= said
        assert not is_session_lost or report.lost


def test_a_repaired_store_gives_the_same_logits(truth, tmp_path, llama):
    path = truth.copy(tmp_path / "s")
    damage(path, flip_bits, 3)
    repair(path)
    tokens = found(path)

    with agentmem.open(truth.copy(tmp_path / "sound"), model=llama, config=CONFIG) as store:
        expected = {name: store.resume(name).forward([])[-1] for name in ("a", "b")}
    with agentmem.open(path, model=llama, config=CONFIG) as store:
        logits = {name: store.resume(name).forward([])[-1] for name in ("a", "b")}

    assert tokens == truth.tokens
    assert all((logits[name] - expected[name]).abs().max() < 1e-4 for name in expected)


@pytest.mark.parametrize("table", list(TAGS))
def test_a_table_of_small_records_may_be_lost_as_a_whole(table, truth, tmp_path):
    path = truth.copy(tmp_path / "s")
    write_page(path, root_of(path, table), bytes(PAGE))

    with pytest.raises(CorruptionError, match="agentmem repair"):
        Environment.open(path)
    report = repair(path)

    assert found(path) == truth.tokens
    assert report.num_healed > 0
    assert report.lost == ()


def test_rows_that_no_tree_leads_to_are_found_by_a_search_of_the_file(truth, tmp_path):
    path = truth.copy(tmp_path / "s")
    with pages.PageFile(path / "data.mdb") as file:
        main = file.metas()[0].main_root
    write_page(path, main, bytes(PAGE))

    report = repair(path)

    assert found(path) == truth.tokens
    assert report.num_salvaged > 40
    assert all("outside of the tables" in line or "nothing else tells" in line for line in report.lost)


# -- records of which nothing is left


def test_a_branch_whose_record_is_lost_stands_again_where_the_reflog_says(truth, tmp_path):
    path = truth.copy(tmp_path / "s")
    with agentmem.open(path) as view:
        session_id = view.view("a").record.session_id
    key = rows.branch_key(session_id, "x1")
    wipe(path, Table.BRANCHES, key)

    report = repair(path)
    tokens = found(path)

    assert tokens["a", "x1"] == truth.tokens["a", "x1"][:60]
    assert {place: tokens[place] for place in truth.tokens if place != ("a", "x1")} == {
        place: value for place, value in truth.tokens.items() if place != ("a", "x1")
    }
    assert any("'x1'" in line for line in report.lost)


def test_a_session_whose_record_is_lost_is_made_again(truth, tmp_path, llama):
    path = truth.copy(tmp_path / "s")
    with agentmem.open(path) as view:
        session_id = view.view("a").record.session_id
    wipe(path, Table.SESSIONS, rows.session_key(session_id))

    report = repair(path)

    assert found(path) == truth.tokens
    assert any("session 'a'" in line for line in report.lost)
    with agentmem.open(path, model=llama, config=CONFIG) as store:
        assert store.resume("a", branch="x1").active.tokens == truth.tokens["a", "x1"]


def test_branches_above_a_lost_checkpoint_stand_before_it(truth, tmp_path):
    path = truth.copy(tmp_path / "s")
    with agentmem.open(path) as view:
        session = view.view("a")
    tip = next(branch.tip for branch in session.branches if branch.name == "x1")
    more = next(each for each in session.checkpoints if each.checkpoint_id == tip)
    key = rows.node_key(more.session_id, more.checkpoint_id)
    wipe(path, Table.NODES, key)

    repair(path)
    tokens = found(path)

    assert tokens["a", "x1"] == TOKENS[:40]
    assert tokens["a", "x0"] == truth.tokens["a", "x0"]


def test_wrong_counts_are_counted_again(truth, tmp_path):
    path = truth.copy(tmp_path / "s")
    for table in (Table.NREFS, Table.TOMB, Table.BINDEX):
        for key in keys(path, table)[:2]:
            do(path, lambda txn, table=table, key=key: overwrite(txn, table, key, b"x" * 40))

    report = repair(path)

    assert problems(path) == ()
    assert report.problems == ()
    assert found(path) == truth.tokens


# -- snapshots


def test_the_previous_snapshot_is_the_store_before_its_newest_commit(truth, tmp_path):
    path = truth.copy(tmp_path / "s")
    do(path, lambda txn: txn.put(Table.META, b"probe", b"old"))
    do(path, lambda txn: txn.put(Table.META, b"probe", b"new"))

    repair(path, previous_snapshot=True)

    with Environment.open(path) as environment:
        with environment.read() as txn:
            probe = txn.get(Table.META, b"probe")
        environment.submit(lambda txn: txn.put(Table.META, b"probe", b"newer")).result()
        with environment.read() as txn:
            assert txn.get(Table.META, b"probe") == b"newer"
    assert probe == b"old"
    assert found(path) == truth.tokens


def test_without_an_earlier_snapshot_it_is_said(truth, tmp_path):
    path = truth.copy(tmp_path / "s")
    damage(path, garble_a_meta_page, 0)

    with pytest.raises(CorruptionError, match="without --previous-snapshot"):
        repair(path, previous_snapshot=True)


# -- refusals


def test_a_store_that_is_open_is_not_repaired(truth, tmp_path):
    path = truth.copy(tmp_path / "s")

    with Environment.open(path), pytest.raises(StoreLockedError):
        repair(path)


def test_what_is_no_store_is_not_repaired(tmp_path):
    with pytest.raises(NotFoundError):
        repair(tmp_path / "none")
    with pytest.raises(NotFoundError):
        repair(tmp_path)
    (tmp_path / "data.mdb").write_text("hello" * 1000)
    with pytest.raises(InvalidInputError):
        repair(tmp_path)


def test_without_room_for_a_second_file_nothing_is_done(truth, tmp_path, monkeypatch):
    path = truth.copy(tmp_path / "s")
    monkeypatch.setattr(_directory, "free_nbytes", lambda _: 1000)

    with pytest.raises(StorageFullError, match="1,000 bytes free"):
        repair(path)
    assert not (path / WORK_DIRECTORY).exists()


def test_a_store_of_a_newer_format_is_left_alone(truth, tmp_path):
    path = truth.copy(tmp_path / "s")
    with Environment.open(path) as environment:
        record = bytearray(environment.format.pack())
        record[8:12] = struct.pack(">HH", 99, 99)
        environment.submit(lambda txn: txn.put(Table.META, FORMAT_KEY, bytes(record))).result()
    before = (path / "data.mdb").read_bytes()

    with pytest.raises(FormatVersionError):
        repair(path)
    assert (path / "data.mdb").read_bytes() == before


def test_an_encrypted_store_is_repaired_with_its_key_only(tmp_path, llama):
    path = tmp_path / "s"
    config = agentmem.Config(block_size=16, encryption_key=KEY)
    tokens = fill(path, llama, config)
    write_page(path, root_of(path, Table.BRANCHES), bytes(PAGE))

    with pytest.raises(AgentMemError, match="key"):
        repair(path)
    report = repair(path, key=KEY)

    assert report.lost == ()
    assert found(path, KEY) == tokens
    assert problems(path, KEY) == ()


# -- interrupted


def test_a_repair_that_is_killed_at_any_time_leaves_the_old_store_or_the_new_one(truth, tmp_path):
    path = truth.copy(tmp_path / "s")
    damage(path, zero, 5)
    started = time.monotonic()
    repair(Path(shutil.copytree(path, tmp_path / "timed")))
    elapsed_s = time.monotonic() - started
    damaged = (path / "data.mdb").read_bytes()

    for number in range(20):
        child = os.fork()
        if not child:
            repair(path)
            os._exit(0)
        time.sleep(elapsed_s * 1.2 * number / 20)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        is_old = (path / "data.mdb").read_bytes() == damaged
        assert is_old or problems(path) == ()
        for backup in path.glob(f"{BACKUP_PREFIX}*"):
            assert backup.read_bytes() == damaged
            backup.unlink()
        if not is_old:
            (path / "data.mdb").write_bytes(damaged)

    report = repair(path)
    assert not (path / WORK_DIRECTORY).exists()
    assert report.problems == ()


# -- what LMDB may be given


def test_a_length_that_reaches_out_of_a_large_file_is_found_before_lmdb_reads_it(truth, tmp_path, monkeypatch):
    path = truth.copy(tmp_path / "s")
    monkeypatch.setattr(engine, "_MAX_VERIFY_NBYTES", 0)
    Environment.open(path).close()
    leaf = root_of(path, Table.BLOCKS)
    data = bytearray((path / "data.mdb").read_bytes())
    [first] = struct.unpack_from("=H", data, leaf * PAGE + pages.HEAD_NBYTES)
    struct.pack_into("=H", data, leaf * PAGE + first + 2, 0xFF00)  # upper half of the length of the first value
    (path / "data.mdb").write_bytes(data)

    with pytest.raises(CorruptionError, match="out of the file"):
        Environment.open(path)
    assert repair(path).problems == ()


def test_damage_of_a_large_file_is_never_a_signal(truth, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "_MAX_VERIFY_NBYTES", 0)
    path = truth.copy(tmp_path / "s")
    whole = (path / "data.mdb").read_bytes()
    structure = [page for page in range(2, len(whole) // PAGE) if whole[page * PAGE + 10] in {1, 2}]

    for seed in range(80):
        generator = random.Random(seed)
        data = bytearray(whole)
        for _ in range(3):
            data[generator.choice(structure) * PAGE + generator.randrange(PAGE)] ^= 1 << generator.randrange(8)
        (path / "data.mdb").write_bytes(data)
        child = os.fork()
        if not child:
            try:
                _read_everything(path)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)

        assert os.WIFEXITED(status), f"seed {seed}: signal {os.WTERMSIG(status)}"
        assert os.WEXITSTATUS(status) == 0, f"seed {seed}"


def _read_everything(path):
    """End the process with 0 when everything could be read, or was refused by name."""
    with contextlib.suppress(AgentMemError), Environment.open(path, read_only=True) as env, env.read() as txn:
        for table in Table:
            if table is Table.BLOCKS:
                txn.get_views(table, list(txn.keys(table)))
            else:
                list(txn.scan_each(table))
    os._exit(0)
