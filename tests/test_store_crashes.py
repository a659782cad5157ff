"""What second writers, forks, full disks and killed processes get: a named error, and nothing stored is lost."""

import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentmem import _directory
from agentmem._lmdb import Environment, Level, Table, WriteTransaction
from agentmem._lock import FileLock
from agentmem.errors import (
    ClosedError,
    ReadOnlyError,
    StorageFullError,
    StoreLockedError,
)
from agentmem.testing.tier_suite import make_record
from agentmem.tiers.disk import DiskTier

ROOT = Path(__file__).parent.parent
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


def in_child(work: Callable[[], object]) -> str:
    """Run `work` in a forked child; return the name of the error it raised and its message, "" when it raised none."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:  # noqa: BLE001
            os.write(sender, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as file:
        text = file.read().decode()
    os.waitpid(pid, 0)
    return text


def start(code: str, path: Path) -> "subprocess.Popen[str]":
    program = f"import sys\nfrom pathlib import Path\nfrom agentmem._lmdb import *\npath = Path(sys.argv[1])\n{code}"
    return subprocess.Popen([sys.executable, "-c", program, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def filled(store_path: Path) -> Path:
    """A closed store of 100 rows."""
    with Environment.open(store_path, create=True) as environment:
        fill(environment, 0, 100)
    return store_path


# ---- one writer


def test_a_second_open_in_the_same_process_is_refused(filled: Path) -> None:
    with Environment.open(filled) as environment:
        with pytest.raises(StoreLockedError, match=f"already open in this process, {os.getpid()} "):
            Environment.open(filled)
        with pytest.raises(StoreLockedError, match="already open in this process"):
            Environment.open(filled, read_only=True)
        assert held(environment) == list(range(100))

    Environment.open(filled).close()


@pytest.mark.parametrize("kind", ["", "read_only=True", "exclusive=True"])
def test_who_replaces_the_data_file_and_who_has_it_open_keep_each_other_out_by_name(filled: Path, kind: str) -> None:
    with start(
        f"import signal\nenv = Environment.open(path, {kind})\nprint('open', flush=True)\nsignal.pause()", filled
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(StoreLockedError, match=f"process {other.pid}\\b"):
            Environment.open(filled, exclusive=kind != "exclusive=True")
        os.kill(other.pid, signal.SIGKILL)
        other.wait(20)

    Environment.open(filled, exclusive=True).close()


def test_the_name_that_a_killed_process_left_in_a_lock_is_not_believed(filled: Path) -> None:
    with start("import os\nenv = Environment.open(path, exclusive=True)\nos._exit(0)", filled) as other:
        other.wait(20)
    (filled / "store.lock").read_text()

    with Environment.open(filled), pytest.raises(StoreLockedError, match=f"this very process .process {os.getpid()}"):
        FileLock.acquire(filled / "store.lock", exclusive=True)


def test_a_lock_is_free_once_its_holder_is_dead_even_if_a_child_lives(filled: Path) -> None:
    code = """
import os, signal
env = Environment.open(path)
if os.fork() == 0:
    print('child', os.getpid(), flush=True)
    signal.pause()
signal.pause()
"""
    with start(code, filled) as other:
        assert other.stdout is not None
        child = int(other.stdout.readline().split()[1])
        os.kill(other.pid, signal.SIGKILL)
        other.wait(20)
        try:
            Environment.open(filled, exclusive=True).close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_shared_lock_keeps_the_exclusive_one_out(tmp_path: Path) -> None:
    first = FileLock.acquire(tmp_path / "lock", exclusive=False)
    second = FileLock.acquire(tmp_path / "lock", exclusive=False)

    with pytest.raises(StoreLockedError, match="this very process"):
        FileLock.acquire(tmp_path / "lock", exclusive=True)
    first.release()
    second.release()
    second.release()
    FileLock.acquire(tmp_path / "lock", exclusive=True).release()


def test_a_handle_is_refused_in_a_forked_child_and_unharmed_by_it(filled: Path) -> None:
    with Environment.open(filled) as environment:

        def read() -> None:
            with environment.read():
                pass

        def write() -> None:
            environment.submit(lambda txn: None)

        assert "ClosedError: " in (refused := in_child(read))
        assert "forked" in refused
        assert "ClosedError: " in in_child(write)
        assert in_child(environment.close) == ""
        fill(environment, 100, 110)
        assert held(environment) == list(range(110))
        assert ClosedError.__name__ in in_child(environment.flush)


# ---- places that cannot be written


@pytest.fixture
def frozen() -> Iterator[Path]:
    """A closed store in a directory that its owner may not write to; the owner is nobody when the tests run as root."""
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / "store"
        with Environment.open(path, create=True) as environment:
            fill(environment, 0, 5)
        if os.geteuid() == 0:
            for place in (Path(parent), path, *path.iterdir()):
                os.chown(place, NOBODY, NOBODY)
        for file in path.iterdir():
            file.chmod(0o400)
        path.chmod(0o500)
        yield path
        path.chmod(0o700)


def as_owner(work: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        if os.geteuid() == 0:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        work()

    return run


def test_a_read_only_directory_can_be_read_and_not_written(frozen: Path) -> None:
    def read() -> None:
        with Environment.open(frozen, read_only=True) as environment:
            assert held(environment) == list(range(5))

    assert in_child(as_owner(read)) == ""
    assert in_child(as_owner(lambda: Environment.open(frozen))).startswith("ReadOnlyError: ")
    assert in_child(as_owner(lambda: Environment.open(frozen / "new", create=True))).startswith("ReadOnlyError: ")


# ---- full and failing disks


def test_the_reserve_is_kept_and_small_operations_go_on(store_path: Path) -> None:
    with Environment.open(store_path, create=True, reserve_nbytes=1 << 60) as environment:
        disk = DiskTier(environment)

        with pytest.raises(StorageFullError, match="kept for removals"):
            disk.store([make_record(1)]).result(20)
        fill(environment, 0, 3)
        assert held(environment) == [0, 1, 2]
        assert not environment.is_read_only


@pytest.fixture
def limit_file_size() -> Iterator[Callable[[int], None]]:
    """A limit on the size of files, which LMDB reports as it reports a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, old[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_full_disk_is_told_loses_nothing_and_can_be_mended(
    filled: Path, limit_file_size: Callable[[int], None]
) -> None:
    with Environment.open(filled) as environment:
        limit_file_size(environment.nbytes + 100_000)

        def put_much(txn: WriteTransaction) -> None:
            txn.put_raw(Table.BLOCKS, [(b"%d" % number, bytes(65520)) for number in range(20)])

        queued = environment.submit(put_much, level=Level.RELAXED)
        small = environment.submit(lambda txn: txn.put(Table.NODES, b"0100", VALUE))
        with pytest.raises(StorageFullError, match="nothing stored was lost"):
            queued.result(20)
        small.result(20)
        assert held(environment) == list(range(101))

        limit_file_size(resource.RLIM_INFINITY)
        environment.submit(put_much).result(20)
        assert environment.verify() == []


def test_free_pages_inside_the_file_can_be_used_on_a_full_disk(store_path: Path) -> None:
    with Environment.open(store_path, create=True) as environment:
        keys = [b"%d" % number for number in range(100)]
        environment.submit(lambda txn: txn.put_raw(Table.BLOCKS, [(key, bytes(65520)) for key in keys]))
        environment.submit(lambda txn: all(txn.delete(Table.BLOCKS, key) for key in keys))
    with Environment.open(store_path, reserve_nbytes=1 << 60) as environment:
        DiskTier(environment).store([make_record(1)]).result(20)

        assert DiskTier(environment).stats().num_blocks == 1


def test_a_failed_write_makes_the_store_read_only_until_it_is_opened_again(filled: Path) -> None:
    environment = Environment.open(filled)
    data_file = str(filled / "data.mdb")
    broken = os.open(data_file, os.O_RDONLY)
    for entry in Path("/proc/self/fd").iterdir():
        if os.path.realpath(entry) == data_file and int(entry.name) != broken:
            os.dup2(broken, int(entry.name))  # every write of LMDB fails from here on, with EBADF rather than EIO

    with pytest.raises(ReadOnlyError, match="read-only from now on"):
        environment.submit(put_row(100)).result(20)
    with pytest.raises(ReadOnlyError, match="a write failed"):
        environment.submit(lambda txn: None)
    assert environment.is_read_only
    assert held(environment) == list(range(100))
    environment.close()
    os.close(broken)

    with Environment.open(filled) as environment:
        fill(environment, 100, 101)
        assert held(environment) == list(range(101))


def test_a_small_address_space_gets_a_smaller_map(filled: Path) -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
with Environment.open(path) as env:
    env.submit(lambda txn: txn.put(Table.NODES, b"0100", b"")).result()
print('stored')
"""
    with start(code, filled) as other:
        assert other.communicate(timeout=60)[0] == "stored\n"


def test_a_probe_for_room_leaves_nothing_behind(filled: Path) -> None:
    assert _directory.has_room(filled, 1 << 20)
    assert not _directory.has_room(filled, 1 << 61)
    assert not (filled / "room.probe").exists()


# ---- killed processes


def test_pages_of_a_killed_reader_are_freed(filled: Path) -> None:
    code = """
import signal
with Environment.open(path, read_only=True).read():
    print('reading', flush=True)
    signal.pause()
"""
    with Environment.open(filled) as environment:
        with start(code, filled) as reader:
            assert reader.stdout is not None
            reader.stdout.readline()
            num_live = environment.clear_stale_readers()
            reader.kill()
            reader.wait(20)

        assert num_live == 0
        assert environment.clear_stale_readers() == 1
        assert environment.clear_stale_readers() == 0


WRITER = """
import random
generator = random.Random(int(sys.argv[1][-3:]) if sys.argv[1][-3:].isdigit() else 0)
env = Environment.open(path)
with env.read() as txn:
    first = int(txn.last_key(Table.NODES) or b"-1") + 1

def put(number):
    def operation(txn):
        txn.put(Table.NODES, b"%012d" % number, b"%d" % number * 50)
        txn.put_raw(Table.BLOCKS, [(b"%012d" % number, b"%03d" % (number % 1000) * 5000)])
        if number >= 200:
            txn.delete(Table.NODES, b"%012d" % (number - 200))
            txn.delete(Table.BLOCKS, b"%012d" % (number - 200))
    return operation

for number in range(first, first + 100_000):
    durable = number % 7 == 0
    future = env.submit(put(number), level=Level.DURABLE if durable else Level.QUEUED, nbytes=15_000)
    if durable:
        future.result()
        print(number, flush=True)
"""


def test_kill_9_at_random_moments_loses_nothing_that_was_acknowledged(store_path: Path) -> None:
    Environment.open(store_path, create=True).close()
    generator = random.Random(0)
    last_acknowledged = -1

    for _ in range(20):
        with start(WRITER, store_path) as writer:
            assert writer.stdout is not None
            first_line = writer.stdout.readline()
            try:
                writer.wait(generator.uniform(0.0, 0.15))
            except subprocess.TimeoutExpired:
                writer.kill()
            acknowledged = [int(line) for line in (first_line + writer.stdout.read()).split("\n")[:-1]]
        last_acknowledged = max(acknowledged, default=last_acknowledged)
        with Environment.open(store_path) as environment:
            numbers = check_rows(environment)
            assert environment.verify() == []

        assert numbers[-1] >= last_acknowledged

    assert last_acknowledged > 200


def check_rows(environment: Environment) -> list[int]:
    """Check that each operation is there as a whole or not at all; return the numbers that are."""
    with environment.read() as txn:
        numbers = [int(key) for key, _ in txn.scan(Table.NODES)]
        blocks = [int(key) for key, _ in txn.scan_each(Table.BLOCKS)]
        assert numbers == blocks
        assert numbers == list(range(max(0, numbers[-1] - 199), numbers[-1] + 1))
        for number in numbers:
            assert txn.get(Table.NODES, b"%012d" % number) == b"%d" % number * 50
            assert bytes(txn.get_view(Table.BLOCKS, b"%012d" % number) or b"") == b"%03d" % (number % 1000) * 5000
    return numbers
