"""What foreign paths, foreign formats and damaged files get: a named error, never wrong data and never a signal."""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest

from agentmem import _directory
from agentmem._format import FORMAT_KEY, FORMAT_VERSION, StoreFormat
from agentmem._lmdb import Environment, Level, Table, WriteTransaction
from agentmem.errors import (
    AgentMemError,
    CorruptionError,
    FormatVersionError,
    InvalidInputError,
    NotFoundError,
)
from agentmem.testing.tier_suite import empty_like, make_block, make_record, same_bits
from agentmem.tiers.disk import DiskTier

NOBODY = 65534
VALUE = bytes(range(256)) * 8


def fill(environment: Environment, start: int, stop: int) -> None:
    for number in range(start, stop):
        environment.submit(put_row(number), level=Level.QUEUED)
    environment.flush()


def put_row(number: int) -> Callable[[WriteTransaction], None]:
    return lambda txn: txn.put(Table.NODES, b"%04d" % number, VALUE)


def held(environment: Environment) -> list[int]:
    with environment.read() as txn:
        return [int(key) for key, value in txn.scan(Table.NODES) if value == VALUE]


@pytest.fixture
def filled(store_path: Path) -> Path:
    """A closed store of 100 rows."""
    with Environment.open(store_path, create=True) as environment:
        fill(environment, 0, 100)
    return store_path


# ---- paths that are no store


def test_a_missing_path_is_not_found_and_not_made(store_path: Path) -> None:
    with pytest.raises(NotFoundError, match=str(store_path)):
        Environment.open(store_path)
    assert not store_path.exists()


def test_an_empty_directory_is_not_found_until_it_is_made_a_store(store_path: Path) -> None:
    store_path.mkdir()

    with pytest.raises(NotFoundError, match="empty"):
        Environment.open(store_path)
    Environment.open(store_path, create=True).close()
    Environment.open(store_path).close()


def test_a_file_is_no_store(store_path: Path) -> None:
    store_path.write_text("hello")

    with pytest.raises(InvalidInputError, match="this is a file"):
        Environment.open(store_path, create=True)
    assert store_path.read_text() == "hello"


def test_a_directory_with_other_files_is_no_store_and_stays_as_it_is(store_path: Path) -> None:
    store_path.mkdir()
    (store_path / "thesis.tex").write_text("hello")

    with pytest.raises(InvalidInputError, match=r"thesis\.tex"):
        Environment.open(store_path, create=True)
    assert [file.name for file in store_path.iterdir()] == ["thesis.tex"]


def test_another_program_s_data_file_is_no_store(store_path: Path) -> None:
    store_path.mkdir()
    (store_path / "data.mdb").write_bytes(b"not LMDB at all, but long enough to hold a header" * 100)

    with pytest.raises(InvalidInputError, match="another kind of file"):
        Environment.open(store_path, create=True)


@pytest.mark.parametrize("table", [b"theirs", b"meta"])
def test_another_program_s_lmdb_is_no_store_and_stays_as_it_is(store_path: Path, table: bytes) -> None:
    store_path.mkdir()
    with lmdb.open(str(store_path), max_dbs=2) as theirs, theirs.begin(write=True) as txn:
        txn.put(b"key", b"value", db=theirs.open_db(table, txn=txn))

    with pytest.raises(InvalidInputError, match="no agentmem store"):
        Environment.open(store_path, create=True)
    with lmdb.open(str(store_path), max_dbs=2) as theirs, theirs.begin() as txn:
        assert txn.stat()["entries"] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_another_user_s_store_is_refused(filled: Path) -> None:
    os.chown(filled, NOBODY, NOBODY)

    with pytest.raises(InvalidInputError, match=f"user {NOBODY}"):
        Environment.open(filled)


def test_a_network_file_system_is_refused(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_directory, "_file_system", lambda path: "nfs4")

    with pytest.raises(InvalidInputError, match="nfs4"):
        Environment.open(filled)


def test_a_crash_while_the_store_was_made_is_mended_by_the_next_create(store_path: Path) -> None:
    store_path.mkdir()
    (store_path / "data.mdb").touch()
    (store_path / "store.lock").touch()

    with pytest.raises(NotFoundError):
        Environment.open(store_path)
    with Environment.open(store_path, create=True) as environment:
        fill(environment, 0, 3)
        assert held(environment) == [0, 1, 2]


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_store_that_lost_its_data_file_is_not_taken_for_a_new_one(filled: Path, is_gone: bool) -> None:
    (filled / "data.mdb").unlink()
    if not is_gone:
        (filled / "data.mdb").touch()

    with pytest.raises(CorruptionError, match=r"lost its data\.mdb.*backup"):
        Environment.open(filled, create=True)
    assert not is_gone or not (filled / "data.mdb").exists()


def test_an_emptied_data_file_is_not_taken_for_a_new_store(filled: Path, store_path: Path) -> None:
    empty = store_path.parent / "empty"
    lmdb.open(str(empty), map_size=1 << 20).close()
    with lmdb.open(str(empty), map_size=1 << 20) as environment, environment.begin(write=True) as txn:
        txn.put(b"k", b"v")
        txn.delete(b"k")
    shutil.copy(empty / "data.mdb", filled / "data.mdb")

    with pytest.raises(CorruptionError, match="lost its data"):
        Environment.open(filled, create=True)


# ---- formats


@pytest.mark.parametrize("change", [{"version": 9, "min_reader": 9}, {"incompat": 1 << 31}])
def test_a_newer_format_is_refused(filled: Path, change: dict[str, Any]) -> None:
    with Environment.open(filled) as environment:
        foreign = replace(environment.format, **change)
        environment.submit(lambda txn: txn.put(Table.META, FORMAT_KEY, foreign.pack())).result(20)

    for read_only in (False, True):
        with pytest.raises(FormatVersionError, match="install a newer"):
            Environment.open(filled, read_only=read_only)


def test_a_newer_format_that_says_it_can_be_read_is_read(filled: Path) -> None:
    with Environment.open(filled) as environment:
        newer = replace(environment.format, version=FORMAT_VERSION + 1, compat=0xFF)
        environment.submit(lambda txn: txn.put(Table.META, FORMAT_KEY, newer.pack() + b"more")).result(20)

    with Environment.open(filled) as environment:
        assert held(environment) == list(range(100))


def test_a_format_record_of_another_kind_or_length_is_refused() -> None:
    packed = StoreFormat.new().pack()

    assert StoreFormat.unpack(packed, "here").pack() == packed
    with pytest.raises(CorruptionError, match="must have 44"):
        StoreFormat.unpack(packed[:20], "here")
    with pytest.raises(InvalidInputError, match="here"):
        StoreFormat.unpack(b"x" * 44, "here")


# ---- damaged files


@pytest.mark.parametrize("size", [1, 100, 4095, 4096, 8191, 8192, 3 * 4096, 20 * 4096])
def test_a_truncated_file_is_corruption_and_never_a_signal(filled: Path, size: int) -> None:
    os.truncate(filled / "data.mdb", size)

    for read_only in (False, True):
        with pytest.raises(CorruptionError, match=r"data\.mdb"):
            Environment.open(filled, read_only=read_only)


def test_a_file_that_is_short_of_unused_pages_only_is_whole(filled: Path) -> None:
    # LMDB never writes pages at the file's end that are taken and freed in one transaction. Our own writer did not do
    # so in any test, because its transactions are nested.
    def put(key: bytes) -> None:
        txn.put(key, random.randbytes(65520), db=blocks)

    with lmdb.open(str(filled), max_dbs=16, map_size=1 << 30) as env:
        blocks = env.open_db(b"blocks")
        for _ in range(3):
            with env.begin(write=True) as txn:
                for number in range(16):
                    put(b"%d" % number)
        with env.begin(write=True) as txn:
            for number in range(100, 150):
                put(b"%d" % number)
            for number in range(100, 150):
                txn.delete(b"%d" % number, db=blocks)
    was_missing = _directory.missing_nbytes(filled / "data.mdb")

    with Environment.open(filled) as environment:
        assert held(environment) == list(range(100))
        fill(environment, 100, 200)
        assert environment.verify() == []

    assert was_missing > 0
    assert _directory.missing_nbytes(filled / "data.mdb") == 0


def test_garbage_is_corruption(filled: Path) -> None:
    size = (filled / "data.mdb").stat().st_size
    (filled / "data.mdb").write_bytes(random.randbytes(size))

    with pytest.raises(CorruptionError, match="backup"):
        Environment.open(filled)


def test_garbage_behind_the_first_pages_is_never_returned(filled: Path) -> None:
    with (filled / "data.mdb").open("r+b") as file:
        file.seek(8192)
        file.write(random.randbytes((filled / "data.mdb").stat().st_size - 8192))

    with pytest.raises(AgentMemError):
        Environment.open(filled)


def test_a_garbage_lock_file_of_lmdb_does_not_matter(filled: Path) -> None:
    (filled / "lock.mdb").write_bytes(random.randbytes(8192))

    with Environment.open(filled) as environment:
        assert held(environment) == list(range(100))


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_never_give_wrong_data_nor_a_signal(store_path: Path, seed: int) -> None:
    records = {number: make_record(number) for number in range(12)}
    with Environment.open(store_path, create=True) as environment:
        DiskTier(environment).store(list(records.values())).result(20)
    whole = (store_path / "data.mdb").read_bytes()
    generator = random.Random(seed)
    num_found = 0
    # Half of the flips go where LMDB keeps its structure: to pages that do not start like a run of payload.
    pages = [page for page in range(2, len(whole) // 4096) if whole[page * 4096 + 10] & 3]

    for _ in range(40):
        damaged = bytearray(whole)
        for _ in range(2):
            damaged[generator.randrange(8192, len(whole))] ^= 1 << generator.randrange(8)
        if generator.random() < 0.5:
            damaged[generator.choice(pages) * 4096 + generator.randrange(4096)] ^= 1 << generator.randrange(8)
        (store_path / "data.mdb").write_bytes(damaged)
        try:
            with Environment.open(store_path, read_only=True) as environment:
                disk = DiskTier(environment)
                for number, record in records.items():
                    out = empty_like(make_block(number))
                    try:
                        disk.load(record.digest, out)
                    except AgentMemError:
                        num_found += 1
                        continue
                    assert same_bits(make_block(number), out)
        except AgentMemError:
            num_found += 1

    assert num_found > 0
