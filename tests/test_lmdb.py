"""The environment: rows and their checksums, transactions, levels, handles."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentmem._lmdb import Environment, Level, Table, WriteTransaction
from agentmem._lmdb.transaction import _after_prefix
from agentmem.errors import ClosedError, CorruptionError, InvalidInputError, ReadOnlyError
from agentmem.testing.damage import flip, overwrite

ROOT = Path(__file__).parent.parent


@pytest.fixture
def environment(store_path: Path) -> Iterator[Environment]:
    with Environment.open(store_path, create=True) as environment:
        yield environment


def put(environment: Environment, key: bytes, value: bytes, level: Level = Level.DURABLE) -> Future[None]:
    return environment.submit(lambda txn: txn.put(Table.NODES, key, value), level=level)


def get(environment: Environment, key: bytes, table: Table = Table.NODES) -> bytes | None:
    with environment.read() as txn:
        return txn.get(table, key)


def run(code: str, path: Path) -> str:
    """Open the store read-only in another process as `env`, run `code` there, return what it printed."""
    program = f"""
import sys
from pathlib import Path
from agentmem._lmdb import Environment, Table
env = Environment.open(Path(sys.argv[1]), read_only=True)
{code}
"""
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=60)
    return (done.stdout + done.stderr).strip()


def move(environment: Environment, source: tuple[Table, bytes], target: tuple[Table, bytes]) -> None:
    """Copy a stored value, checksum and all, to where it does not belong."""

    def operation(txn: WriteTransaction) -> None:
        stored = txn.get_view(*source)
        assert stored is not None
        txn.put_raw(target[0], [(target[1], bytes(stored))])

    environment.submit(operation).result(20)


def test_a_row_comes_back(environment: Environment) -> None:
    put(environment, b"key", b"value").result(20)

    assert get(environment, b"key") == b"value"
    assert get(environment, b"other") is None
    assert get(environment, b"key", Table.TAILS) is None


def test_rows_outlive_the_handle(store_path: Path) -> None:
    with Environment.open(store_path, create=True) as environment:
        put(environment, b"key", b"value", Level.QUEUED)
        uuid = environment.format.uuid
    with Environment.open(store_path) as environment:
        assert get(environment, b"key") == b"value"
        assert environment.format.uuid == uuid


def test_a_deleted_row_is_gone(environment: Environment) -> None:
    put(environment, b"key", b"value").result(20)

    assert environment.submit(lambda txn: txn.delete(Table.NODES, b"key")).result(20)
    assert not environment.submit(lambda txn: txn.delete(Table.NODES, b"key")).result(20)
    assert get(environment, b"key") is None


@pytest.mark.parametrize("position", [0, 7, 8, 15, 16, 20])
def test_a_changed_byte_is_corruption_that_names_table_and_key(environment: Environment, position: int) -> None:
    put(environment, b"key", b"value").result(20)

    environment.submit(lambda txn: flip(txn, Table.NODES, b"key", position)).result(20)

    with pytest.raises(CorruptionError, match="6b6579 of table 'nodes'"):
        get(environment, b"key")


@pytest.mark.parametrize("target", [(Table.NODES, b"other"), (Table.TAILS, b"key")])
def test_a_row_in_the_place_of_another_is_corruption(environment: Environment, target: tuple[Table, bytes]) -> None:
    put(environment, b"key", b"value").result(20)
    move(environment, (Table.NODES, b"key"), target)

    with pytest.raises(CorruptionError):
        get(environment, target[1], target[0])


def test_a_damaged_row_does_not_stop_scan_each(environment: Environment) -> None:
    for key in (b"a", b"b", b"c"):
        put(environment, key, key)
    environment.submit(lambda txn: overwrite(txn, Table.NODES, b"b", b"too short")).result(20)

    with environment.read() as txn:
        rows = dict(txn.scan_each(Table.NODES))

    assert rows[b"a"] == b"a"
    assert rows[b"c"] == b"c"
    assert isinstance(rows[b"b"], CorruptionError)
    with environment.read() as txn, pytest.raises(CorruptionError):
        list(txn.scan(Table.NODES))


def test_scan_yields_the_rows_of_a_prefix_in_order(environment: Environment) -> None:
    for key in (b"b\xff\xff", b"a", b"b\x01", b"b", b"c"):
        put(environment, key, b"v" + key)
    environment.flush()

    with environment.read() as txn:
        assert [key for key, _ in txn.scan(Table.NODES, b"b")] == [b"b", b"b\x01", b"b\xff\xff"]
        assert [key for key, _ in txn.scan(Table.NODES)] == [b"a", b"b", b"b\x01", b"b\xff\xff", b"c"]
        assert list(txn.scan(Table.NODES, b"x")) == []
        assert txn.count(Table.NODES) == 5


def test_last_key_is_the_greatest_of_its_prefix(environment: Environment) -> None:
    for key in (b"a1", b"a2", b"c\xff\xff", b"\xff\xff"):
        put(environment, key, b"")
    environment.flush()

    with environment.read() as txn:
        assert txn.last_key(Table.NODES, b"a") == b"a2"
        assert txn.last_key(Table.NODES, b"b") is None
        assert txn.last_key(Table.NODES, b"c\xff") == b"c\xff\xff"
        assert txn.last_key(Table.NODES, b"\xff") == b"\xff\xff"
        assert txn.last_key(Table.NODES) == b"\xff\xff"
        assert txn.last_key(Table.TAILS) is None


@given(st.binary(max_size=4), st.binary(max_size=4))
def test_the_key_behind_a_prefix_divides_keys(prefix: bytes, key: bytes) -> None:
    behind = _after_prefix(prefix)

    assert behind is None or (key.startswith(prefix) <= (prefix <= key < behind))
    assert behind is None or ((prefix <= key < behind) <= key.startswith(prefix))


def test_a_read_sees_the_store_of_one_moment(environment: Environment) -> None:
    put(environment, b"key", b"old").result(20)

    with environment.read() as txn:
        put(environment, b"key", b"new").result(20)
        assert txn.get(Table.NODES, b"key") == b"old"

    assert get(environment, b"key") == b"new"


def test_an_operation_sees_its_own_changes(environment: Environment) -> None:
    def operation(txn: WriteTransaction) -> bytes | None:
        txn.put(Table.NODES, b"key", b"value")
        return txn.get(Table.NODES, b"key")

    assert environment.submit(operation).result(20) == b"value"


def test_a_failing_operation_changes_nothing_and_its_neighbours_are_kept(environment: Environment) -> None:
    def failing(txn: WriteTransaction) -> None:
        txn.put(Table.NODES, b"half", b"")
        raise ZeroDivisionError

    put(environment, b"before", b"", Level.QUEUED)
    failed = environment.submit(failing, level=Level.RELAXED)
    put(environment, b"after", b"").result(20)

    with pytest.raises(ZeroDivisionError):
        failed.result(20)
    assert get(environment, b"half") is None
    assert get(environment, b"before") == b""
    assert get(environment, b"after") == b""


def test_on_commit_runs_before_the_future_is_done_and_not_for_an_undone_operation(environment: Environment) -> None:
    seen: list[str] = []

    def kept(txn: WriteTransaction) -> None:
        txn.on_commit(lambda: seen.append("kept"))

    def undone(txn: WriteTransaction) -> None:
        txn.on_commit(lambda: seen.append("undone"))
        raise ZeroDivisionError

    environment.submit(undone, level=Level.RELAXED)
    environment.submit(kept).result(20)

    assert seen == ["kept"]


@pytest.mark.parametrize("key", [b"", b"k" * 512])
def test_a_key_of_a_wrong_length_is_refused(environment: Environment, key: bytes) -> None:
    with pytest.raises(InvalidInputError, match="1 to 511 bytes"):
        put(environment, key, b"").result(20)


def test_files_are_private(environment: Environment, store_path: Path) -> None:
    put(environment, b"key", b"").result(20)
    modes = {file.name: file.stat().st_mode & 0o777 for file in store_path.iterdir()}

    assert store_path.stat().st_mode & 0o777 == 0o700
    assert set(modes) >= {"data.mdb", "lock.mdb", "store.lock"}
    assert set(modes.values()) == {0o600}


def test_a_closed_handle_is_refused_by_name(store_path: Path) -> None:
    environment = Environment.open(store_path, create=True)
    environment.close()
    environment.close()

    with pytest.raises(ClosedError, match="closed"):
        put(environment, b"key", b"")
    with pytest.raises(ClosedError, match="closed"), environment.read():
        pass


def test_close_waits_for_a_read_in_another_thread(store_path: Path) -> None:
    environment = Environment.open(store_path, create=True)
    put(environment, b"key", b"value").result(20)
    reading, may_end = threading.Event(), threading.Event()
    seen: list[bytes | None] = []

    def work() -> None:
        with environment.read() as txn:
            reading.set()
            may_end.wait(20)
            seen.append(txn.get(Table.NODES, b"key"))

    reader = threading.Thread(target=work)
    reader.start()
    reading.wait(20)
    closer = threading.Thread(target=environment.close)
    closer.start()
    may_end.set()
    closer.join(20)
    reader.join(20)

    assert seen == [b"value"]


def test_readers_work_beside_a_writer_of_another_process(store_path: Path, environment: Environment) -> None:
    put(environment, b"key", b"value").result(20)

    printed = run("with env.read() as txn: print(txn.get(Table.NODES, b'key'))", store_path)

    assert printed == "b'value'"


def test_a_read_only_handle_refuses_writes(store_path: Path) -> None:
    Environment.open(store_path, create=True).close()

    with (
        Environment.open(store_path, read_only=True) as environment,
        pytest.raises(ReadOnlyError, match="reading only"),
    ):
        put(environment, b"key", b"")


def test_the_data_file_can_be_replaced_only_without_readers(store_path: Path) -> None:
    Environment.open(store_path, create=True).close()
    with Environment.open(store_path, exclusive=True):
        refused = run("pass", store_path)
    taken = run("pass", store_path)

    assert "StoreLockedError" in refused
    assert taken == ""


def test_a_copy_holds_every_row_and_less_space(store_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir(mode=0o700)
    with Environment.open(store_path, create=True) as environment:
        for number in range(50):
            put(environment, b"%d" % number, bytes(2000), Level.QUEUED)
        environment.submit(lambda txn: all(txn.delete(Table.NODES, b"%d" % number) for number in range(49))).result(20)
        environment.copy_to(copy / "data.mdb")
        assert environment.free_nbytes > 0
        assert (copy / "data.mdb").stat().st_size < environment.nbytes

    with Environment.open(copy) as environment:
        assert get(environment, b"49") == bytes(2000)
        assert environment.verify() == []


def test_verify_finds_a_sound_store_sound_while_it_is_written(environment: Environment) -> None:
    for number in range(200):
        put(environment, b"%d" % number, bytes(100), Level.QUEUED)

    assert environment.verify() == []
