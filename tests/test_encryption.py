"""Encryption at rest: what a stolen file tells, what opens it, and that nothing is ever sealed twice alike."""

import hashlib
import json
import os
import secrets
import sys
import threading
from pathlib import Path

import pytest
import torch

import agentmem
from agentmem import _crypto
from agentmem._lmdb import Cipher, Environment, Level, Table
from agentmem._lmdb.cipher import KEY_KEY
from agentmem.check import check
from agentmem.cli import main
from agentmem.errors import (
    AlreadyExistsError,
    CorruptionError,
    EncryptionError,
    InvalidInputError,
    NotFoundError,
    StoreLockedError,
)
from agentmem.kv.hashing import pack_tokens
from agentmem.rekey import rekey
from agentmem.tiers.disk import DiskTier
from agentmem.tree import rows

KEY = bytes(range(32))
OTHER_KEY = bytes(32)
TOKENS = [(29 * index * index + 3 * index + 7) % 490 + 1 for index in range(200)]
TELLING = {
    "the session's name": b"ticket-of-mrs-smith",
    "the branch's name": b"her-own-branch",
    "the message": b"diagnosis written",
    "the metadata": b"allergic to nuts",
    "tokens": pack_tokens(TOKENS[96:112]),
    "open tokens": pack_tokens([400, 401, 402, 403]),
}

pytestmark = pytest.mark.usefixtures("one_thread")


def config(key=KEY, **options):
    return agentmem.Config(block_size=16, codec="raw", encryption_key=key, **options)


def write(path, model, key=KEY):
    """Make a store that holds everything in TELLING, and return the KV of one of its blocks as it was stored."""
    with agentmem.open(path, model=model, config=config(key)) as store:
        session = store.create("ticket-of-mrs-smith", extras={"note": "allergic to nuts"})
        session.append(TOKENS)
        session.checkpoint("diagnosis written")
        session.fork("her-own-branch")
        session.switch("her-own-branch")
        session.forward([5, 6, 7])
        session.append([400, 401, 402, 403])
        store.flush()
        block = session.checkpoints[0].blocks[0]
        record = store._runtime.blocks.disk.load_record(block.digest)
        return {"KV": record[-200:-100], "a block's hash": block.block_hash, "a block's digest": block.digest}


def contents(path):
    """All bytes of all files of a store."""
    return b"".join(file.read_bytes() for file in sorted(path.iterdir()))


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory, llama):
    """An encrypted store, closed; tests that change it copy it."""
    path = tmp_path_factory.mktemp("encrypted") / "store.agentmem"
    write(path, llama)
    return path


@pytest.fixture
def environment(store_path):
    with Environment.open(store_path, create=True, key=KEY) as environment:
        yield environment


def put(environment, table, key, value):
    environment.submit(lambda txn: txn.put(table, key, value)).result()


def stored(environment, table, key):
    with environment.read() as txn:
        return bytes(txn.get_view(table, key))


# -- what a stolen file tells


def test_a_stolen_file_tells_neither_names_nor_tokens_nor_messages_nor_kv(llama, store_path):
    kv = write(store_path, llama)

    found = contents(store_path)
    assert {what for what, needle in {**TELLING, **kv}.items() if needle in found} == set()


def test_the_same_search_finds_all_of_it_in_a_store_that_is_not_encrypted(llama, store_path):
    kv = write(store_path, llama, key=None)

    found = contents(store_path)
    assert {what for what, needle in {**TELLING, **kv}.items() if needle not in found} == set()


def test_the_same_content_in_two_stores_has_no_row_in_common(llama, tmp_path):
    keys = []
    for name in ("one", "two"):
        write(tmp_path / name, llama)
        with Environment.open(tmp_path / name, read_only=True, key=KEY) as environment, environment.read() as txn:
            tables = (Table.CHAIN, Table.BINDEX, Table.SESSIONS, Table.BRANCHES, Table.TAILS)
            cursors = [txn._txn.cursor(txn._handles[table]) for table in tables]
            keys.append({bytes(place) for cursor in cursors for place in cursor.iternext(keys=True, values=False)})

    assert len(keys[0]) > 20
    assert keys[0] & keys[1] == set()


def test_equal_branch_names_of_two_sessions_do_not_look_alike():
    cipher = Cipher(KEY)
    first, second = (cipher.place(Table.BRANCHES, rows.branch_key(bytes([each]) * 8, "main")) for each in (1, 2))

    assert first[8:] != second[8:]


def test_no_error_message_of_a_wrong_key_tells_what_is_in_the_store(encrypted):
    with pytest.raises(EncryptionError) as caught:
        agentmem.open(encrypted, config=config(OTHER_KEY))

    assert not any(needle.decode(errors="ignore") in str(caught.value) for needle in TELLING.values())
    assert OTHER_KEY.hex() not in str(caught.value)


def test_a_config_prints_neither_key_nor_salt():
    printed = repr(agentmem.Config(encryption_key=b"k" * 32, salt=b"salt of tenant 7"))

    assert "kkk" not in printed
    assert "tenant 7" not in printed


# -- what opens it


def test_what_was_stored_comes_back_bit_for_bit(llama, store_path):
    with agentmem.open(store_path, model=llama, config=config()) as store:
        session = store.create("s")
        session.forward(TOKENS)
        session.checkpoint()
        expected = session.forward([1, 2, 3])

    for _ in range(2):  # the second time through the subkeys of two earlier openings
        with agentmem.open(store_path, model=llama, config=config()) as store:
            session = store.resume("s")
            session.rewind(session.checkpoints[0])
            report, logits = session.report, session.forward([1, 2, 3])

        assert report.num_computed == 0
        assert torch.equal(logits, expected)


def test_a_new_session_finds_blocks_by_their_tokens(llama, store_path):
    write(store_path, llama)

    with agentmem.open(store_path, model=llama, config=config()) as store:
        session = store.create("another")
        session.append(TOKENS)
        session.forward([])

        assert session.report.num_reused == 192


def test_layer_states_and_an_encoders_inputs_come_back_too(tiny, store_path):
    for family, options in (("qwen3_next", {}), ("t5", {"input_ids": torch.tensor([[5, 6, 7]])})):
        with agentmem.open(store_path, model=tiny(family), config=config()) as store:
            session = store.create(family)
            session.append([0, *TOKENS[:50]], **options)
            expected = session.forward([9])
            session.checkpoint()
        with agentmem.open(store_path, model=tiny(family), config=config()) as store:
            session = store.resume(family)
            session.rewind(tokens=1)

            assert torch.allclose(session.forward([9]), expected, atol=1e-5)


@pytest.mark.parametrize("key", [None, OTHER_KEY])
def test_a_missing_or_wrong_key_is_refused_by_name_with_and_without_a_model(llama, encrypted, key):
    with pytest.raises(EncryptionError, match="key"):
        agentmem.open(encrypted, config=config(key))
    with pytest.raises(EncryptionError, match="key"):
        agentmem.open(encrypted, model=llama, config=config(key))


def test_a_key_for_a_store_that_is_not_encrypted_is_refused(store_path):
    Environment.open(store_path, create=True).close()

    with pytest.raises(EncryptionError, match="is not encrypted"):
        Environment.open(store_path, key=KEY)


def test_a_refused_opening_leaves_the_store_free(encrypted):
    with pytest.raises(EncryptionError):
        agentmem.open(encrypted, config=config(None))

    with agentmem.open(encrypted, config=config()) as store:
        assert [session.name for session in store.sessions()] == ["ticket-of-mrs-smith"]


@pytest.mark.parametrize("key", [b"", b"short", bytes(31), bytes(33)])
def test_a_key_of_another_length_is_refused(key):
    with pytest.raises(InvalidInputError, match="32 random bytes"):
        agentmem.Config(encryption_key=key)


def test_a_store_without_its_key_record_says_so(store_path):
    with Environment.open(store_path, create=True, key=KEY) as environment:
        environment.submit(lambda txn: txn.delete(Table.META, KEY_KEY)).result()

    with pytest.raises(CorruptionError, match="lost its key record"):
        Environment.open(store_path, key=KEY)


def test_without_the_package_the_message_says_what_to_install(store_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    monkeypatch.delitem(sys.modules, "agentmem._aes", raising=False)

    with pytest.raises(InvalidInputError, match=r"agentmem-kv\[crypto\]"):
        Environment.open(store_path, create=True, key=KEY)


def test_a_passphrase_gives_the_same_key_every_time_and_another_one_under_another_salt():
    key = agentmem.key_from_passphrase("correct horse", b"runs of team blue")

    assert len(key) == 32
    assert key == agentmem.key_from_passphrase("correct horse", b"runs of team blue")
    assert key != agentmem.key_from_passphrase("correct horse", b"runs of team red")


@pytest.mark.parametrize(("passphrase", "salt"), [("", b"long enough"), ("correct horse", b"short")])
def test_a_passphrase_needs_words_and_a_salt(passphrase, salt):
    with pytest.raises(InvalidInputError, match="salt of at least 8 bytes"):
        agentmem.key_from_passphrase(passphrase, salt)


def test_keys_are_derived_as_rfc_5869_says():
    """Test case 1 of its appendix; the first 32 of 42 bytes."""
    derived = _crypto._derive(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)))

    assert derived.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


# -- boxes


def test_no_two_boxes_have_the_same_head_whatever_thread_seals_them():
    boxes, heads = _crypto.Boxes(KEY), []

    def work():
        heads.extend(boxes.seal(b"data", b"")[:24] for _ in range(2000))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(heads)) == 8000


def test_two_openings_seal_under_different_keys():
    first, second = (_crypto.Boxes(KEY).seal(bytes(64), b"") for _ in range(2))

    assert first[:16] != second[:16]
    assert first[16:24] == second[16:24] == bytes(8)
    assert first[24:] != second[24:]


def test_an_operation_that_was_undone_gives_no_number_out_again(environment):
    heads = []

    def operation(txn):
        txn.put(Table.NODES, b"key", b"value")
        heads.append(bytes(txn.get_view(Table.NODES, b"key"))[16:40])
        if len(heads) == 1:
            raise NotFoundError("undone")

    with pytest.raises(NotFoundError):
        environment.submit(operation).result()
    environment.submit(operation).result()

    assert heads[0][:16] == heads[1][:16]
    assert heads[0][16:] != heads[1][16:]


@pytest.mark.parametrize(
    ("table", "key"),
    [
        (Table.NODES, b"session1checkpoint......"),
        (Table.SESSIONS, b"nname"),
        (Table.SESSIONS, b"isession1"),
        (Table.BRANCHES, b"session1main\0"),
        (Table.TAILS, b"session1main\0\0\0\0\1"),
        (Table.CHAIN, bytes(range(32))),
        (Table.BINDEX, bytes(32)),
    ],
)
def test_a_row_comes_back_under_its_key_by_get_and_by_scan(environment, table, key):
    put(environment, table, key, b"value")

    with environment.read() as txn:
        assert txn.get(table, key) == b"value"
        assert (key, b"value") in list(txn.scan(table))
    assert environment.submit(lambda txn: txn.delete(table, key)).result()


@pytest.mark.parametrize(
    ("table", "place"), [(Table.NODES, b"b" * 24), (Table.NREFS, b"a" * 24)], ids=["other key", "other table"]
)
def test_a_box_that_was_moved_to_another_row_does_not_open(table, place):
    cipher = Cipher(KEY)
    box = cipher.close(Table.NODES, b"a" * 24, b"a" * 24, b"value")

    assert cipher.open(Table.NODES, b"a" * 24, box) == (b"a" * 24, b"value")
    with pytest.raises(CorruptionError, match="not as it was encrypted"):
        cipher.open(table, place, box)


@pytest.mark.parametrize("position", [0, 15, 16, 23, 24, 30, -1])
def test_a_box_with_one_changed_bit_does_not_open(position):
    boxes = _crypto.Boxes(KEY)
    box = bytearray(boxes.seal(b"sixteen bytes...", b"bound"))
    box[position] ^= 1

    assert boxes.open(box, b"bound") is None
    assert boxes.open(box[:20], b"bound") is None


def test_garbage_fills_no_memory_with_keys():
    boxes = _crypto.Boxes(KEY)
    for _ in range(50):
        boxes.open(os.urandom(64), b"")

    assert len(boxes._aeads) == 1


def test_a_block_in_the_place_of_another_is_corruption(llama, store_path):
    write(store_path, llama)
    with Environment.open(store_path, key=KEY) as environment:
        disk = DiskTier(environment)
        with environment.read() as txn:
            (first, one), (second, two), *_ = [each for each in disk.iter_index(txn) if each[1].stored_nbytes > 8000]

        environment.submit(
            lambda txn: (txn.put(Table.BINDEX, first, two.pack()), txn.put(Table.BINDEX, second, one.pack()))
        ).result()

        with pytest.raises(CorruptionError, match="not as it was encrypted"):
            disk.load_record(first)


# -- a store like any other


def test_check_finds_an_encrypted_store_sound_and_reads_its_blocks(encrypted):
    with Environment.open(encrypted, read_only=True, key=KEY) as environment:
        report = check(environment, DiskTier(environment), read_data=True)

    assert report.problems == ()
    assert (report.num_sessions, report.num_branches) == (1, 2)
    assert report.num_blocks_read == report.num_blocks > 10


def test_names_that_are_taken_or_unknown_are_told_as_ever(llama, store_path):
    write(store_path, llama)

    with agentmem.open(store_path, model=llama, config=config()) as store:
        with pytest.raises(AlreadyExistsError):
            store.create("ticket-of-mrs-smith")
        with pytest.raises(NotFoundError, match="did you mean 'ticket-of-mrs-smith'"):
            store.resume("ticket-of-mr-smith")
        with pytest.raises(AlreadyExistsError):
            store.resume("ticket-of-mrs-smith").fork("her-own-branch")


def test_a_damaged_row_is_told_by_its_place_and_can_be_removed(environment):
    for name in ("a", "b"):
        put(environment, Table.REFLOG, b"session1" + name.encode(), b"value")
        put(environment, Table.CHAIN, name.encode() * 32, b"value")

    def damage(txn):
        view = bytearray(txn.get_view(Table.CHAIN, b"a" * 32))
        view[-1] ^= 1
        txn._txn.put(txn.place(Table.CHAIN, b"a" * 32), bytes(view), db=txn._handles[Table.CHAIN])

    environment.submit(damage).result()
    with environment.read() as txn:
        [place] = [key for key, value in txn.scan_each(Table.CHAIN) if isinstance(value, CorruptionError)]

    assert place not in {b"a" * 32, b"b" * 32}
    assert environment.submit(lambda txn: txn.delete(Table.CHAIN, place)).result()
    with environment.read() as txn:
        assert [key for key, _ in txn.scan_each(Table.CHAIN)] == [b"b" * 32]


def test_a_row_of_which_one_copy_is_damaged_is_read_from_the_other_and_written_again(llama, store_path):
    write(store_path, llama)
    with Environment.open(store_path, key=KEY) as environment:
        key = rows.session_name_key("ticket-of-mrs-smith")

        def damage(txn):
            stored = bytearray(txn.get_view(Table.SESSIONS, key))
            stored[-1] ^= 1
            txn.put_raw(Table.SESSIONS, [(txn.place(Table.SESSIONS, key), stored)])

        environment.submit(damage).result()
        with environment.read() as txn:
            assert len(txn.get(Table.SESSIONS, key)) == 8
        environment.flush()

        assert environment.num_healed == 1


def test_an_open_branch_of_any_length_comes_back(llama, store_path):
    tokens = [token % 500 for token in range(2 * rows.ROW_TOKENS + 5)]
    with agentmem.open(store_path, model=llama, config=config()) as store:
        store.create("s").append(tokens)
        store.flush()
    with agentmem.open(store_path, config=config()) as store:
        record = store.view("s").record

        assert store.view("s").branches[0].num_open in {0, len(tokens)}
        assert sum(each.num_own_tokens for each in store.view("s").checkpoints) + len(
            store.open_tokens(record.session_id, "main")
        ) == len(tokens)


def test_a_row_of_open_tokens_fits_one_page(environment):
    session_id, name = b"session1", "n" * 53
    before = pages(environment)

    put(environment, Table.TAILS, rows.tail_key(rows.branch_key(session_id, name), 0), bytes(4 * rows.ROW_TOKENS))

    # The row and its copy, and a leaf of each table.
    assert pages(environment) - before <= 4


def pages(environment):
    with environment.read() as txn:
        return txn.num_pages()


# -- another key


def test_after_a_rekey_only_the_new_key_opens_and_nothing_of_the_old_record_is_left(llama, store_path):
    kv = write(store_path, llama)
    with Environment.open(store_path, read_only=True, key=KEY) as environment, environment.read() as txn:
        old = txn.get(Table.META, KEY_KEY)

    rekey(store_path, KEY, OTHER_KEY)

    assert old[13:] not in contents(store_path)
    with pytest.raises(EncryptionError):
        agentmem.open(store_path, config=config(KEY))
    with agentmem.open(store_path, model=llama, config=config(OTHER_KEY)) as store:
        assert store.resume("ticket-of-mrs-smith").report.num_computed == 0
    assert kv["KV"] not in contents(store_path)


def test_a_rekey_with_a_wrong_key_changes_nothing(llama, store_path):
    write(store_path, llama)

    with pytest.raises(EncryptionError):
        rekey(store_path, OTHER_KEY, KEY)
    with pytest.raises(InvalidInputError):
        rekey(store_path, KEY, b"short")

    agentmem.open(store_path, config=config(KEY)).close()


def test_a_store_that_is_open_cannot_be_rekeyed(store_path):
    with Environment.open(store_path, create=True, key=KEY), pytest.raises(StoreLockedError):
        rekey(store_path, KEY, OTHER_KEY)


# -- the command line


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key"
    path.write_text(KEY.hex() + "\n", encoding="ascii")
    return path


def test_every_way_to_give_the_key_opens_the_store(encrypted, key_file, tmp_path, monkeypatch, capsys):
    raw = tmp_path / "raw"
    raw.write_bytes(KEY)

    assert main(["ls", str(encrypted), "--key-file", str(key_file)]) == 0
    assert main(["ls", str(encrypted), "--key-file", str(raw)]) == 0
    monkeypatch.setenv("AGENTMEM_KEY_FILE", str(key_file))
    assert main(["ls", str(encrypted)]) == 0
    assert capsys.readouterr().out.count("ticket-of-mrs-smith") == 3


@pytest.mark.parametrize("content", [b"", b"no key", b"ab" * 31, bytes(33)])
def test_a_file_that_holds_no_key_is_refused_by_name(encrypted, tmp_path, capsys, content):
    path = tmp_path / "no-key"
    path.write_bytes(content)

    assert main(["ls", str(encrypted), "--key-file", str(path)]) == 2
    assert "holds no key" in capsys.readouterr().err


def test_a_key_file_that_is_missing_and_a_missing_key_are_told(encrypted, tmp_path, capsys):
    assert main(["ls", str(encrypted), "--key-file", str(tmp_path / "nowhere")]) == 4
    assert main(["ls", str(encrypted), "--json"]) == 2

    error = capsys.readouterr().err
    assert "no key file" in error
    assert '"kind": "encryption"' in error


COMMANDS = [
    "ls",
    "log ticket-of-mrs-smith",
    "show ticket-of-mrs-smith/her-own-branch",
    "explain ticket-of-mrs-smith --tokens {tokens}",
    "stats",
    "du",
    "check --read-data",
    "gc",
    "export ticket-of-mrs-smith {file}",
    "import {file} --as copy",
    "repair",
    "rm copy --yes",
    "compact",
]


def test_every_command_works_on_an_encrypted_store(llama, store_path, key_file, tmp_path, monkeypatch, capsys):
    write(store_path, llama)
    monkeypatch.setenv("AGENTMEM_KEY_FILE", str(key_file))
    (tmp_path / "tokens").write_text(str(TOKENS), encoding="ascii")
    codes = {}
    for command in COMMANDS:
        word, *others = command.format(tokens=tmp_path / "tokens", file=tmp_path / "bundle").split()
        codes[command] = main([word, str(store_path), *others])

    assert codes == dict.fromkeys(COMMANDS, 0)
    assert "the store is encrypted, the file is not" in capsys.readouterr().err


def test_rekey_on_the_command_line(llama, store_path, key_file, tmp_path, capsys):
    write(store_path, llama)
    new = tmp_path / "new"
    new.write_bytes(OTHER_KEY)

    assert main(["rekey", str(store_path), "--new-key-file", str(new)]) == 2
    capsys.readouterr()
    assert main(["rekey", str(store_path), "--key-file", str(key_file), "--new-key-file", str(new), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"store", "before_nbytes", "after_nbytes"}
    assert main(["ls", str(store_path), "--key-file", str(key_file)]) == 2
    assert main(["ls", str(store_path), "--key-file", str(new)]) == 0


def test_an_encrypted_session_travels_into_another_encrypted_store(llama, encrypted, key_file, tmp_path):
    other, file = tmp_path / "other", tmp_path / "bundle"
    other_key = tmp_path / "other-key"
    other_key.write_bytes(secrets.token_bytes(32))
    main(["export", str(encrypted), "ticket-of-mrs-smith", str(file), "--key-file", str(key_file)])

    assert main(["import", str(other), str(file), "--key-file", str(other_key)]) == 0

    with agentmem.open(other, model=llama, config=config(other_key.read_bytes())) as store:
        assert store.resume("ticket-of-mrs-smith").report.num_computed == 0
    assert hashlib.sha256(contents(other)).digest() != hashlib.sha256(contents(encrypted)).digest()
    assert TELLING["tokens"] not in contents(other)


def test_the_last_key_of_a_table_that_hides_none_is_found(environment):
    future = environment.submit(lambda txn: txn.put(Table.REFLOG, b"session1", b"x"), level=Level.QUEUED)
    environment.flush()

    assert future.done()
    with environment.read() as txn:
        assert txn.last_key(Table.REFLOG, b"session") == b"session1"


def test_every_command_opens_the_store_with_the_key_that_it_was_given():
    """A new command that opens a store in its own way would leave encrypted stores out."""
    folder = Path(agentmem.__file__).parent / "cli"
    openings = [path.name for path in sorted(folder.glob("*.py")) if "Environment.open(" in path.read_text("utf-8")]

    assert openings == ["source.py"]
