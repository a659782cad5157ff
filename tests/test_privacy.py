"""Tenants that share a store, and sessions that are forgotten: no trace of them in any tier, nor in any file."""

import json
import random
import subprocess
import sys

import pytest
import torch

import agentmem
from agentmem._lmdb import Environment, Table
from agentmem.cli import main
from agentmem.errors import ClosedError, CorruptionError, NotFoundError
from agentmem.forget import forget
from agentmem.gc import compact
from agentmem.kv.hashing import pack_tokens
from agentmem.tiers.disk import DiskTier
from agentmem.tree import rows
from agentmem.tree.catalog import Catalog

SHARED = [(31 * index * index + 5 * index + 11) % 490 + 1 for index in range(64)]
OWN = [(29 * index * index + 3 * index + 7) % 490 + 1 for index in range(100)]
NEVER_SEEN = [(23 * index * index + 7 * index + 3) % 490 + 1 for index in range(100)]
FAMILIES = ["llama", "mamba2", "qwen3_next", "t5"]

LOOKING = {
    *("restoring.py", "prefix.py", "hashing.py", "identity.py", "blockstore.py", "states.py", "host.py", "disk.py"),
    *("blockindex.py", "chunks.py", "sealing.py", "transaction.py", "environment.py", "record.py", "codec.py"),
}
"""The files through which KV is looked for, found and decoded."""

pytestmark = pytest.mark.usefixtures("one_thread")


def config(**options):
    return agentmem.Config(**{"block_size": 16, "codec": "raw", **options})


def inputs_of(family):
    return {"input_ids": torch.tensor([[5, 6, 7, 8]])} if family == "t5" else {}


def compute(store, name, tokens, **inputs):
    """Make a session of these tokens and compute them; return how many the model was fed for it."""
    before = store.stats().get("tokens_fed", 0)
    session = store.create(name)
    session.append(tokens, **inputs)
    session.forward([])
    session.checkpoint()
    return store.stats()["tokens_fed"] - before


def contents(path):
    """All bytes of all files of a store."""
    return b"".join(file.read_bytes() for file in sorted(path.iterdir()))


def record_pieces(store, session):
    """A piece from the middle of each record that the session's checkpoints name, as it is on disk."""
    digests = {digest for checkpoint in session.checkpoints for digest in checkpoint.digests()}
    records = [store._runtime.blocks.disk.load_record(digest) for digest in digests]
    return [record[len(record) // 2 :][:64] for record in records]


# -- tenants


@pytest.mark.parametrize("family", FAMILIES)
def test_tenants_share_no_record_of_any_kind_and_each_finds_its_own(tiny, store_path, family):
    digests, num_fed = {}, []
    for salt in (b"a", b"b"):
        with agentmem.open(store_path, model=tiny(family), config=config(salt=salt)) as store:
            num_fed.append(compute(store, f"first of {salt}", [0, *OWN], **inputs_of(family)))
            num_fed.append(compute(store, f"second of {salt}", [0, *OWN, 9], **inputs_of(family)))
            names = [store.view(f"{each} of {salt}").checkpoints for each in ("first", "second")]
            digests[salt] = {digest for each in names for checkpoint in each for digest in checkpoint.digests()}

    assert digests[b"a"] & digests[b"b"] == set()
    assert num_fed[0] == num_fed[2] == 101
    assert num_fed[1] == num_fed[3] < 20


def test_blocks_of_another_tenant_in_memory_are_not_found_either(llama, store_path):
    """The host tier and the blocks that are known in memory belong to one handle, whose salt may change."""
    with agentmem.open(store_path, model=llama, config=config(salt=b"a")) as store:
        compute(store, "a", OWN)
        identity = store._runtime.identity
        store._runtime.identity.__init__(identity.fingerprint, b"b")

        assert compute(store, "b", OWN) == len(OWN)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_probe_of_another_tenants_tokens_takes_the_path_of_a_miss(tiny, store_path, family):
    """Not one call more or less: nothing that could be told from the time it takes."""
    with agentmem.open(store_path, model=tiny(family), config=config(salt=b"a")) as store:
        compute(store, "a", OWN)
    options = {"save_in_background": False, "salt": b"b"}
    with agentmem.open(store_path, model=tiny(family), config=config(**options)) as store:
        compute(store, "warm-up", SHARED)

        probe, miss = (calls_of(store, name, tokens) for name, tokens in (("probe", OWN), ("miss", NEVER_SEEN)))

    assert len(miss) > 100
    assert probe == miss


def calls_of(store, name, tokens):
    """What feeding these tokens calls of all that looks for KV, in order."""
    session, called = store.create(name), []
    store.flush()

    def note(frame, event, _):
        file = frame.f_code.co_filename.rpartition("/")[2]
        if event == "call" and file in LOOKING:
            called.append(f"{file}:{frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        session.append(tokens)
        session.forward([])
    finally:
        sys.setprofile(None)
    return called


# -- forgetting


def write(path, model, **options):
    """A session to forget beside one that begins alike; return what tells of the first alone."""
    with agentmem.open(path, model=model, config=config(**options)) as store:
        keep = store.create("kept")
        keep.forward(SHARED)
        keep.checkpoint("kept message")
        session = store.create("mrs smith", extras={"note": "allergic to nuts"})
        session.append(SHARED)
        session.forward([])
        session.checkpoint("as the other")
        session.forward(OWN)
        plan = session.checkpoint("diagnosis written")
        session.fork("second-opinion", at=plan)
        session.fork("given-up", at=plan)
        session.switch("given-up")
        session.forward([401, 402, 403])
        session.checkpoint("doubtful message")
        session.switch("second-opinion")
        session.drop("given-up")
        session.append([411, 412, 413, 414])
        store.flush()
        kept = set(record_pieces(store, keep))
        return {
            *(b"mrs smith", b"allergic", b"diagnosis", b"doubtful", b"second-opinion", b"given-up"),
            *(pack_tokens(OWN[:16]), pack_tokens([411, 412, 413, 414]), pack_tokens([401, 402, 403])),
            *(piece for piece in record_pieces(store, session) if piece not in kept),
        }


def left(path, telling):
    found = contents(path)
    return {each for each in telling if each in found}


def test_a_forgotten_session_leaves_no_byte_in_any_file(llama, store_path):
    telling = write(store_path, llama)
    before = left(store_path, telling)

    with agentmem.open(store_path, model=llama, config=config()) as store:
        store.resume("mrs smith")
        store.resume("kept")
        report = store.forget("mrs smith")
    compact(store_path)

    assert before == telling
    assert len(telling) > 15
    assert left(store_path, telling) == set()
    assert report.num_checkpoints >= 3
    assert report.num_blocks > 6
    assert report.damaged == ()


def test_what_another_session_shares_stays_bit_for_bit_and_is_told(llama, store_path):
    write(store_path, llama)
    with agentmem.open(store_path, model=llama, config=config()) as store:
        before = record_pieces(store, store.resume("kept"))
        report = store.forget("mrs smith")

        assert report.shared_with == ("kept",)
        assert report.num_shared_blocks == len(SHARED) // 16

    with agentmem.open(store_path, model=llama, config=config()) as store:
        session = store.resume("kept")

        assert session.report.num_computed == 0
        assert record_pieces(store, session) == before
    with Environment.open(store_path, read_only=True) as environment, environment.read() as txn:
        infos = [info for _, info in DiskTier(environment).iter_index(txn)]
        assert all(info.refs > 0 for info in infos)


def test_nothing_of_a_forgotten_session_is_found_or_reused(llama, store_path):
    write(store_path, llama)
    with agentmem.open(store_path, model=llama, config=config()) as store:
        session = store.resume("mrs smith")
        store.forget("mrs smith")

        assert [record.name for record in store.sessions()] == ["kept"]
        assert store.stats()["host_nbytes"] == store.stats()["device_nbytes"] == 0
        with pytest.raises(NotFoundError):
            store.resume("mrs smith")
        with pytest.raises(ClosedError):
            session.append([1])
        assert compute(store, "again", [*SHARED, *OWN]) == len(OWN)


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "t5"])
def test_layer_states_and_inputs_of_an_encoder_are_forgotten_too(tiny, store_path, family):
    with agentmem.open(store_path, model=tiny(family), config=config()) as store:
        compute(store, "gone", [0, *OWN], **inputs_of(family))
        pieces = record_pieces(store, store.resume("gone"))

        store.forget("gone")

        assert store.stats()["disk_num_blocks"] == 0
    compact(store_path)
    assert left(store_path, [piece for piece in pieces if len(set(piece)) > 8]) == set()


def test_blocks_that_no_checkpoint_ever_named_are_forgotten_too(llama, store_path):
    with agentmem.open(store_path, model=llama, config=config()) as store:
        session = store.create("gone")
        session.forward(OWN)
        store.flush()
        session.rewind(tokens=len(OWN) - 1)
        assert store.stats()["disk_num_blocks"] > 0

        store.forget("gone")

        assert store.stats()["disk_num_blocks"] == 0


def test_a_session_that_was_being_dropped_within_the_grace_counts_as_another(llama, store_path):
    with agentmem.open(store_path, model=llama, config=config()) as store:
        compute(store, "removed", OWN)
        compute(store, "gone", OWN)
        store.remove("removed")

        report = store.forget("gone")

    assert report.num_shared_blocks == len(OWN) // 16 + 1  # the tail too
    assert report.shared_with[0].startswith("removed session ")


def test_a_damaged_session_can_be_forgotten_and_what_may_be_left_is_told(llama, store_path):
    with agentmem.open(store_path, model=llama, config=config()) as store:
        compute(store, "gone", OWN)
        view = store.view("gone")
        store.pin(view.checkpoints[0])
        session_id = view.record.session_id
    with Environment.open(store_path) as environment:
        for table in (Table.NODES, Table.NREFS, Table.BRANCHES):
            environment.submit(lambda txn, table=table: damage(txn, table, session_id)).result()
        catalog, disk = Catalog(), DiskTier(environment)

        report = forget(environment, catalog, disk, "gone")

        with environment.read() as txn:
            tables = (Table.SESSIONS, Table.BRANCHES, Table.TAILS, Table.NODES, Table.NREFS, Table.TOMB, Table.REFLOG)
            assert [txn.count(table) for table in tables] == [0] * len(tables)
            assert [key for key, _ in txn.scan_each(Table.META) if session_id in key] == []
    assert len(report.damaged) == 1


def damage(txn, table, session_id):
    """Break every copy of every row of a session in a table."""
    for key, _ in list(txn.scan(table, session_id)):
        stored = bytearray(txn.get_view(table, key))
        stored[-1] ^= 1
        txn._put_both(table, key, bytes(stored))
        with pytest.raises(CorruptionError):
            txn.get(table, key)


def test_forgetting_an_unknown_session_says_what_is_near(llama, store_path):
    with agentmem.open(store_path, model=llama, config=config()) as store:
        store.create("mrs smith")

        with pytest.raises(NotFoundError, match="did you mean 'mrs smith'"):
            store.forget("mr smith")


def test_a_new_data_file_holds_nothing_that_was_removed(store_path):
    """LMDB's own compacting copy fails this: it copies the unused ends of pages."""
    rng = random.Random(1)
    with Environment.open(store_path, create=True) as environment:
        for _ in range(100):
            values = ((rng.randbytes(24), each) for each in (b"SECRET" * 600, b"public" * 400))
            environment.submit(lambda txn, values=values: [txn.put(Table.NODES, *each) for each in values]).result()

        def remove(txn):
            for key in [key for key, value in txn.scan(Table.NODES) if value.startswith(b"SECRET")]:
                txn.delete(Table.NODES, key)

        environment.submit(remove).result()
    assert b"SECRET" in contents(store_path)

    compact(store_path)

    assert b"SECRET" not in contents(store_path)
    assert contents(store_path).count(b"public" * 400) >= 100


def test_transactions_go_on_counting_after_a_compaction(store_path):
    """Their numbers are the stamps of rows: a later version of a row must have the greater one."""
    with Environment.open(store_path, create=True) as environment:
        for number in range(30):
            environment.submit(lambda txn, number=number: txn.put(Table.REFLOG, b"key", b"%d" % number)).result()
        before = environment.last_commit

    for _ in range(2):  # once with an odd number, once with an even one
        compact(store_path)
        with Environment.open(store_path) as environment:
            assert environment.last_commit >= before
            before = environment.last_commit + 1
            environment.submit(lambda txn: txn.put(Table.REFLOG, b"key", b"later")).result()
            assert environment.last_commit == before
            assert environment.verify() == []


# -- the command line


def test_forget_on_the_command_line_does_nothing_before_yes_and_everything_then(llama, store_path, capsys):
    telling = write(store_path, llama)

    assert main(["forget", str(store_path), "mrs smith"]) == 2
    assert left(store_path, telling) == telling
    out, err = capsys.readouterr()
    assert "would forget" in out
    assert "repeat with --yes" in err
    assert main(["forget", str(store_path), "mrs smith", "--yes"]) == 0
    assert left(store_path, telling) == set()
    assert "4 blocks that others name too: kept" in capsys.readouterr().out


def test_the_keys_of_the_json_document_stay(llama, store_path, capsys):
    write(store_path, llama)

    main(["forget", str(store_path), "mrs smith", "--yes", "--json"])

    assert set(json.loads(capsys.readouterr().out)) == {
        *("store", "session", "num_branches", "num_checkpoints", "num_blocks", "nbytes", "num_shared_blocks"),
        *("shared_with", "damaged", "is_dry_run", "is_compact"),
    }


def test_what_a_dry_run_says_is_what_goes(llama, store_path):
    write(store_path, llama)
    with Environment.open(store_path) as environment:
        catalog, disk = Catalog(), DiskTier(environment)
        planned = forget(environment, catalog, disk, "mrs smith", dry_run=True)
        done = forget(environment, catalog, disk, "mrs smith")

    assert planned.is_dry_run
    assert not done.is_dry_run
    assert (planned.num_checkpoints, planned.num_shared_blocks) == (done.num_checkpoints, done.num_shared_blocks)
    assert 0 < planned.num_blocks <= done.num_blocks


def test_a_store_that_is_open_elsewhere_keeps_free_pages_and_the_command_says_so(llama, store_path, capsys):
    telling = write(store_path, llama)
    holding = "import sys; from pathlib import Path; from agentmem._lmdb import Environment; "
    holding += "Environment.open(Path(sys.argv[1]), read_only=True); print('open', flush=True); sys.stdin.read()"
    reader = subprocess.Popen(
        [sys.executable, "-c", holding, str(store_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with reader:
        reader.stdout.readline()
        code = main(["forget", str(store_path), "mrs smith", "--yes"])
        reader.stdin.close()

    assert code == 3
    assert "stay in the data file's free pages" in capsys.readouterr().err
    assert main(["compact", str(store_path)]) == 0
    assert left(store_path, telling) == set()


def test_a_copy_in_the_directory_is_named(llama, store_path, capsys):
    write(store_path, llama)
    (store_path / "data.mdb.before-repair-1").write_bytes(b"copy")

    main(["forget", str(store_path), "mrs smith", "--yes"])

    assert "'data.mdb.before-repair-1' is in the store's directory too" in capsys.readouterr().err


def test_names_in_keys_of_a_forgotten_session_are_gone_from_the_tables(llama, store_path):
    write(store_path, llama)
    with agentmem.open(store_path, model=llama, config=config()) as store:
        session_id = store.view("mrs smith").record.session_id
        store.forget("mrs smith")
        with store.environment.read() as txn:
            tables = [table for table in Table if table not in {Table.BLOCKS, Table.MIRROR}]
            keys = [(table, key) for table in tables for key, _ in txn.scan_each(table)]

    assert len(keys) > 10
    assert [each for each in keys if session_id in each[1] or each[1] == rows.session_name_key("mrs smith")] == []


def test_a_session_that_another_process_writes_to_is_not_forgotten(llama, store_path, capsys):
    telling = write(store_path, llama)
    with agentmem.open(store_path) as store:
        session_id = store.view("mrs smith").record.session_id
    holding = "import sys; from pathlib import Path; from agentmem._lmdb import Environment; "
    holding += "from agentmem.leases import Leases; environment = Environment.open(Path(sys.argv[1])); "
    holding += "leases = Leases(environment, 60.0); session_id = bytes.fromhex(sys.argv[2]); "
    holding += "environment.submit(lambda txn: leases.take(txn, session_id, '')).result(); "
    holding += "print('held', flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", holding, str(store_path), session_id.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        holder.stdout.readline()
        code = main(["forget", str(store_path), "mrs smith", "--yes"])
        holder.stdin.close()

    assert code == 3
    assert "is written to by process" in capsys.readouterr().err
    assert left(store_path, telling) == telling
    assert main(["forget", str(store_path), "mrs smith", "--yes"]) == 0
