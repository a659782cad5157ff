"""What bad files, full disks, killed processes and foreign paths get: a named error, and nothing stored is lost."""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from agentmem import _directory
from agentmem._format import FORMAT_KEY, FORMAT_VERSION, StoreFormat
from agentmem._lmdb import Environment, Level, Table, WriteTransaction
from agentmem._lock import FileLock
from agentmem.errors import (
    AgentMemError,
    ClosedError,
    CorruptionError,
    FormatVersionError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    StorageFullError,
    StoreLockedError,
)
from agentmem.testing.tier_suite import empty_like, make_block, same_bits
from agentmem.tiers.disk import DiskTier
from tests.test_disk_tier import make_record

ROOT = Path(__file__).parent.parent
NOBODY = 65534
VALUE = bytes(range(256)) * 8


def fill(environment: Environment, start: int, stop: int) -> None:
    for number in range(start, stop):
        key = b"%04d" % number
        environment.submit(lambda txn, key=key: txn.put(Table.NODES, key, VALUE), level=Level.QUEUED)
    environment.flush()


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


# ---- formats


@pytest.mark.parametrize("change", [{"version": 9, "min_reader": 9}, {"incompat": 1}])
def test_a_newer_format_is_refused(filled: Path, change: dict[str, int]) -> None:
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
    chunk = bytes(65520)

    def put_and_delete(txn: WriteTransaction) -> None:
        txn.put_raw(Table.BLOCKS, [(b"%d" % number, chunk) for number in range(50)])
        for number in range(50):
            txn.delete(Table.BLOCKS, b"%d" % number)

    with Environment.open(filled) as environment:
        environment.submit(put_and_delete).result(20)
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


# ---- one writer


def test_a_second_open_in_the_same_process_is_refused(filled: Path) -> None:
    with Environment.open(filled) as environment:
        with pytest.raises(StoreLockedError, match="this very process"):
            Environment.open(filled)
        with pytest.raises(StoreLockedError, match="already open in this process"):
            Environment.open(filled, read_only=True)
        assert held(environment) == list(range(100))

    Environment.open(filled).close()


def test_a_second_writing_process_is_refused_by_the_first_one_s_name(filled: Path) -> None:
    with start("env = Environment.open(path)\nprint('open', flush=True)\nsys.stdin.read()", filled) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(StoreLockedError, match=f"process {other.pid} on "):
            Environment.open(filled)
        os.kill(other.pid, signal.SIGKILL)
        other.wait(20)

    Environment.open(filled).close()


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
            Environment.open(filled).close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_shared_lock_keeps_the_exclusive_one_out(tmp_path: Path) -> None:
    first = FileLock.acquire(tmp_path / "lock", exclusive=False)
    second = FileLock.acquire(tmp_path / "lock", exclusive=False)

    with pytest.raises(StoreLockedError, match="readers"):
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
        environment.submit(
            lambda txn: txn.put_raw(Table.BLOCKS, [(b"%d" % number, bytes(65520)) for number in range(100)])
        )
        for number in range(100):
            environment.submit(lambda txn, number=number: txn.delete(Table.BLOCKS, b"%d" % number))
    with Environment.open(store_path, reserve_nbytes=1 << 60) as environment:
        DiskTier(environment).store([make_record(1)]).result(20)

        assert DiskTier(environment).stats().num_blocks == 1


def test_a_failed_write_makes_the_store_read_only_until_it_is_opened_again(filled: Path) -> None:
    environment = Environment.open(filled)
    data_file = str(filled / "data.mdb")
    broken = os.open(data_file, os.O_RDONLY)
    for name in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{name}") == data_file and int(name) != broken:
            os.dup2(broken, int(name))  # every write of LMDB fails from here on, with EBADF rather than EIO

    with pytest.raises(ReadOnlyError, match="read-only from now on"):
        environment.submit(lambda txn: txn.put(Table.NODES, b"0100", VALUE)).result(20)
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
    assert errno.ENOSPC


# ---- killed processes


def test_pages_of_a_killed_reader_are_freed(filled: Path) -> None:
    code = "env = Environment.open(path, read_only=True)\nwith env.read():\n    print('reading', flush=True)\n    sys.stdin.read()"
    with Environment.open(filled) as environment:
        program = (
            f"import sys\nfrom pathlib import Path\nfrom agentmem._lmdb import *\npath = Path(sys.argv[1])\n{code}"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program, str(filled)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as reader:
            assert reader.stdout is not None
            reader.stdout.readline()
            assert environment.clear_stale_readers() == 0
            reader.kill()
            reader.wait(20)

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
            assert txn.get_view(Table.BLOCKS, b"%012d" % number) == b"%03d" % (number % 1000) * 5000
    return numbers
