"""The lake: one contract over files and S3, sessions that another machine pulls, damage, crashes, and collecting."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import agentmem
from agentmem._lmdb import Environment, Table
from agentmem.check import check
from agentmem.cli import main
from agentmem.errors import (
    AlreadyExistsError,
    CorruptionError,
    EncryptionError,
    InvalidInputError,
    NotFoundError,
    StorageFullError,
    TierUnavailableError,
)
from agentmem.ids import BlockDigest, BlockHash, Fingerprint
from agentmem.kv import record as record_format
from agentmem.lake.collecting import collect
from agentmem.lake.index import Label
from agentmem.lake.lake import Lake, Parcel
from agentmem.lake.objects import Objects
from agentmem.lake.seal import checksum, new_format, open_format
from agentmem.lake.segment import build, read_directory
from agentmem.lake.space import Space, rekey
from agentmem.offload import pull, push
from agentmem.testing.proxy import proxied
from agentmem.testing.record_tier_suite import RecordTierSuite, holds, is_whole
from agentmem.testing.tier_suite import make_record, same_bits
from agentmem.tiers import parts
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.sealing import verified
from agentmem.tree.catalog import Catalog

moto_server = pytest.importorskip("moto.server")

PROMPT = [token % 500 for token in range(200)]
KEY, OTHER_KEY = bytes(range(32)), bytes(32)
NOWHERE = "s3://bucket/nowhere"


@pytest.fixture(scope="module")
def s3():
    """The address of a server that speaks S3, with one bucket."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    with urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT"), timeout=10) as answer:
        assert answer.status == 200
    yield address
    server.stop()


@pytest.fixture
def s3_environment(monkeypatch, s3):
    """What the environment of a user of S3 holds."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)


@pytest.fixture(params=["file", "s3"])
def url(request, tmp_path):
    """The URL of an empty lake, over files and over S3."""
    if request.param == "file":
        return f"file://{tmp_path}/lake"
    request.getfixturevalue("s3_environment")
    return f"s3://bucket/{tmp_path.name}"


@pytest.fixture
def file_url(tmp_path):
    return f"file://{tmp_path}/lake"


def objects_of(folder: Path) -> dict[str, Path]:
    """Return every object of a lake of files, by its name behind the space's."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)).split("/", 1)[1]: path for path in files}


def segments_of(folder: Path) -> list[Path]:
    return sorted(path for name, path in objects_of(folder).items() if name.startswith("segments/"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


class LakeSuite(RecordTierSuite):
    """What lakes over files and over S3 have in common."""

    def damage(self, tier, digest):
        segment, row = tier.shelf.places.find(digest)
        start, stop = segment.span(row, 0)
        objects, path = tier.space.objects, tier.space.path(tier.space.find_seal(), f"segments/{segment.name}")
        data = bytearray(objects.get(path))
        data[(start + stop) // 2] ^= 0xFF
        objects.put(path, bytes(data))

    def open_unreachable(self):
        return Lake.open("s3://bucket/x", timeout_s=1.0)

    @pytest.fixture(autouse=True)
    def nobody_answers(self, monkeypatch):
        """No server is at the address that an unreachable lake is given."""
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")


class TestFiles(LakeSuite):
    def open_place(self, path):
        yield lambda: Lake.open(f"file://{path}")


class TestS3(LakeSuite):
    @pytest.fixture(autouse=True)
    def nobody_answers(self, s3_environment):
        """The server is there; an unreachable lake is a bucket of another one."""

    def open_place(self, path):
        yield lambda: Lake.open(f"s3://bucket/{path.parent.name}")

    def open_unreachable(self):
        os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
        return Lake.open("s3://bucket/x", timeout_s=1.0)


class TestEncryptedFiles(LakeSuite):
    def open_place(self, path):
        yield lambda: Lake.open(f"file://{path}", key=KEY)


# -- parts


def layered(num_layers=(6, 2), num_tokens=64, dtype=torch.bfloat16, seed=1):
    """Return sections of two groups of layers, large enough to be cut."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(layers, 2, num_tokens, 256) for layers in num_layers for _ in range(2)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def record_of(sections, name=1, codec="lossless"):
    fingerprint = Fingerprint(bytes(32))
    return record_format.pack(
        sections, block_hash=BlockHash(bytes([name]) * 32), fingerprint=fingerprint, start=64, codec=codec, rope="x"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layers", [(6, 2), (20, 20), (33, 1)])
def test_a_block_that_was_cut_and_joined_is_the_same_block(dtype, layers):
    sections = layered(layers, dtype=dtype)
    record = record_of(sections)

    cut = parts.cut(record.data)
    joined = parts.join(cut.head, cut.parts)

    assert 1 < len(cut.parts) <= 16
    assert verified(joined).digest == record.digest
    out = [torch.empty_like(section) for section in sections]
    meta = record_format.unpack(joined, out)
    assert same_bits(sections, out)
    assert (meta.start, meta.rope, meta.block_hash) == (64, "x", record.block_hash)


def test_layers_whose_bytes_do_not_shrink_are_joined_with_those_that_do():
    sections = layered()
    sections[0][0] = torch.randint(-32768, 32767, sections[0][0].shape, dtype=torch.int16).view(torch.bfloat16)
    record = record_of(sections)

    cut = parts.cut(record.data)

    codecs = {record_format.read_meta(part).sections[0].codec_id for part in cut.parts}
    assert len(codecs) == 2
    assert verified(parts.join(cut.head, cut.parts)).digest == record.digest


def test_each_part_is_decoded_and_verified_alone_and_all_of_them_give_the_digest():
    sections = layered()
    cut = parts.cut(record_of(sections).data)
    out = [torch.zeros_like(section) for section in sections]
    count = len(cut.parts)

    parts.unpack_part(cut.head, cut.parts[0], 0, count, out)
    first_rows = [section[parts.part_rows(len(section), 0, count)] for section in out]

    assert same_bits([section[: len(rows)] for section, rows in zip(sections, first_rows, strict=True)], first_rows)
    with pytest.raises(CorruptionError, match="do not give its digest"):
        parts.check_whole(cut.head, out)
    for part in range(1, count):
        parts.unpack_part(cut.head, cut.parts[part], part, count, out)
    parts.check_whole(cut.head, out)
    assert same_bits(sections, out)


def test_a_part_in_the_place_of_another_is_damage():
    cut = parts.cut(record_of(layered()).data)
    other = parts.cut(record_of(layered(seed=2), name=2).data)

    with pytest.raises(CorruptionError, match="in the place of part 0"):
        parts.join(cut.head, (cut.parts[1], *cut.parts[1:]))
    with pytest.raises(CorruptionError, match="in the place of part 1"):
        parts.join(cut.head, (cut.parts[0], other.parts[1], *cut.parts[2:]))


def test_a_segment_holds_the_first_layers_of_all_blocks_first():
    blocks = [parts.cut(record_of(layered(seed=seed), name=seed).data) for seed in (1, 2, 3)]
    seal = open_format(new_format(None), None, "here")

    segment, data = build(blocks, seal)

    count = len(blocks[0].parts)
    spans = [segment.span(row, part) for part in range(count) for row in range(3)]
    assert [data[start:stop] for start, stop in spans] == [
        block.parts[part] for part in range(count) for block in blocks
    ]
    assert [start for start, _ in spans[1:]] == [stop for _, stop in spans[:-1]]
    assert read_directory(segment.name, data, seal).entries == segment.entries


def test_a_damaged_directory_of_a_segment_is_found():
    seal = open_format(new_format(None), None, "here")
    segment, data = build([parts.cut(make_record(1).data)], seal)

    for at in (0, 20, 35, 44, segment.data_start - 4):
        bad = bytearray(data)
        bad[at] ^= 1
        with pytest.raises((CorruptionError, agentmem.FormatVersionError)):
            read_directory(segment.name, bytes(bad), seal)


def test_one_request_brings_one_part_of_all_blocks_of_a_segment(file_url):
    records = [record_of(layered(seed=seed), name=seed) for seed in (1, 2, 3)]
    digests = [record.digest for record in records]
    with Lake.open(file_url) as lake:
        lake.put_many(records)
        entries = lake.find_entries(digests)
        before = lake.shelf.fetched_nbytes

        first = lake.fetch_parts(digests, 0)

        assert first == [parts.cut(record.data).parts[0] for record in records]
        assert lake.shelf.fetched_nbytes - before == sum(entry.part_nbytes[0] for entry in entries)
        assert lake.fetch_parts([*digests, BlockDigest(bytes(32))], 15) == [None] * 4


# -- sessions over two machines


class Machine:
    """A store without a model, and a lake."""

    def __init__(self, path, url, key=None):
        self.environment = Environment.open(path, create=True, key=key)
        self.catalog = Catalog()
        self.disk = DiskTier(self.environment)
        self.lake = Lake.open(url, key=key, timeout_s=10.0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lake.close()
        self.environment.close()

    def push(self, name, **options):
        return push(self.environment, self.catalog, self.disk, self.lake, name, **options)

    def pull(self, name, **options):
        return pull(self.environment, self.catalog, self.disk, self.lake, name, **options)

    def names(self):
        with self.environment.read() as txn:
            return [session.name for session in self.catalog.sessions(txn)]


@pytest.fixture(scope="module")
def original(tmp_path_factory, llama):
    """A closed store with a session "task": a plan and two branches of it."""
    return make_store(tmp_path_factory.mktemp("original") / "store.agentmem", llama)


def make_store(path, model, key=None):
    with agentmem.open(path, model=model, config=agentmem.Config(encryption_key=key)) as store:
        session = store.create("task", extras={"owner": "me"})
        session.append(PROMPT)
        plan = session.checkpoint("plan", extras={"score": 0.5})
        for name in ("a", "b"):
            session.fork(name, at=plan)
            session.switch(name)
            session.append([7, 8, ord(name)])
            session.generate(max_new_tokens=40, do_sample=False)
            session.checkpoint(f"tried {name}")
    return path


@pytest.fixture
def here(original, tmp_path):
    """The path of a store that a test may change."""
    return shutil.copytree(original, tmp_path / "here.agentmem")


def problems_of(path):
    with Environment.open(path, read_only=True) as environment:
        return list(check(environment, DiskTier(environment), read_data=True).problems)


def next_logits(path, model, branch, key=None, name="task"):
    with agentmem.open(path, model=model, config=agentmem.Config(encryption_key=key)) as store:
        session = store.resume(name, branch=branch)
        logits = session.forward([5])
        return logits.clone(), session.report


@pytest.mark.parametrize("branch", ["a", "main"])
def test_another_machine_goes_on_where_this_one_stopped_and_feeds_nothing_again(url, here, store_path, llama, branch):
    with Machine(here, url) as machine:
        pushed = machine.push("task")

    with Machine(store_path, url) as machine:
        pulled = machine.pull("task")

    expected, _ = next_logits(here, llama, branch)
    logits, report = next_logits(store_path, llama, branch)
    assert torch.equal(logits, expected)
    assert report.num_computed <= 2  # what was pending, and the token itself
    assert report.reason == agentmem.Reason.COMPLETE
    assert pulled.num_new_blocks == pulled.num_blocks == pushed.num_blocks == pushed.num_new_blocks
    assert pulled.num_lost_blocks == 0


def test_everything_of_a_session_comes_through_the_lake(file_url, here, store_path):
    with Machine(here, file_url) as machine:
        machine.push("task")
    with Machine(store_path, file_url) as machine:
        machine.pull("task")

    assert problems_of(store_path) == []
    with agentmem.open(here) as old, agentmem.open(store_path) as new:
        before, after = old.view("task"), new.view("task")
        assert after.record.extras == {"owner": "me"}
        assert [(b.name, b.tip, b.num_pending) for b in after.branches] == [
            (b.name, b.tip, b.num_pending) for b in before.branches
        ]
        assert [(c.checkpoint_id, c.tokens, c.blocks, c.tail) for c in after.checkpoints] == [
            (c.checkpoint_id, c.tokens, c.blocks, c.tail) for c in before.checkpoints
        ]
        moves = new.moves("task")
        assert moves[: -len(after.branches)] == old.moves("task")
        assert {move.operation for move in moves[-len(after.branches) :]} == {"pull"}


def test_a_session_goes_back_and_forth_and_only_new_blocks_travel(url, here, store_path, llama):
    with Machine(here, url) as machine:
        first = machine.push("task")
    with Machine(store_path, url) as machine:
        machine.pull("task")
    with agentmem.open(store_path, model=llama) as store:
        session = store.resume("task", branch="a")
        session.append(list(range(100)))
        session.checkpoint("went on")
    with Machine(store_path, url) as machine:
        second = machine.push("task")
        again = machine.push("task")

    assert (first.version, second.version, again.version) == (1, 2, 2)
    assert 0 < second.num_new_blocks <= 3
    assert again.put_nbytes == 0
    with Machine(here, url) as machine:
        change(machine)
        with pytest.raises(AlreadyExistsError, match="version 2 of session 'task'"):
            machine.push("task")
    with Machine(here, url) as machine:
        machine.pull("task", as_name="theirs")
        assert sorted(machine.names()) == ["task", "theirs"]


def change(machine):
    """Change a session's metadata, so that there is something to push."""
    with machine.environment.read() as txn:
        record = machine.catalog.find_session(txn, "task")
    changed = dataclasses.replace(record, extras={"changed": True})
    machine.environment.submit(lambda txn: machine.catalog.put_session(txn, changed)).result()


def test_of_two_that_push_one_name_at_once_one_wins_and_the_other_hears_of_it(url, original, tmp_path):
    machines = [Machine(shutil.copytree(original, tmp_path / f"{number}.agentmem"), url) for number in range(2)]
    outcomes = []

    def work(machine):
        try:
            outcomes.append(machine.push("task"))
        except AlreadyExistsError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=work, args=(machine,)) for machine in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for machine in machines:
        machine.__exit__()

    assert len(outcomes) == 2
    assert sum(isinstance(outcome, AlreadyExistsError) for outcome in outcomes) == 1


def test_two_that_push_different_names_at_once_lose_nothing(url, original, tmp_path, store_path):
    machines = [Machine(shutil.copytree(original, tmp_path / f"{number}.agentmem"), url) for number in range(2)]
    threads = [
        threading.Thread(target=machine.push, args=("task",), kwargs={"as_name": name})
        for machine, name in zip(machines, ("one", "two"), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for machine in machines:
        machine.__exit__()

    with Machine(store_path, url) as machine:
        assert [label.name for label in machine.lake.names()] == ["one", "two"]
        assert machine.pull("one").num_lost_blocks == machine.pull("two").num_lost_blocks == 0


def test_a_name_that_the_lake_lacks_says_so(url, store_path):
    with Machine(store_path, url) as machine, pytest.raises(NotFoundError, match="no session 'task'"):
        machine.pull("task")


def test_a_session_that_is_here_already_is_not_pulled_over(file_url, here):
    with Machine(here, file_url) as machine:
        machine.push("task")
        with pytest.raises(AlreadyExistsError, match="'task'"):
            machine.pull("task")


def test_what_a_session_goes_on_from_is_forgotten_with_it(file_url, here):
    with Machine(here, file_url) as machine:
        machine.push("task")
        machine.pull("task", as_name="copy")
        with machine.environment.read() as txn:
            session_id = machine.catalog.find_session(txn, "task").session_id
        machine.environment.submit(lambda txn: machine.catalog.remove_session(txn, session_id)).result()
        machine.push("copy")

        with machine.environment.read() as txn:
            bases = [key for key, _ in txn.scan_each(Table.META, b"lake")]
        assert len(bases) == 1


# -- damage


def test_damaged_and_missing_blocks_are_left_out_and_computed_again(file_url, here, store_path, tmp_path, llama):
    with Machine(here, file_url) as machine:
        machine.push("task")
    [segment] = segments_of(tmp_path / "lake")
    flip(segment, segment.stat().st_size // 2)

    with Machine(store_path, file_url) as machine:
        pulled = machine.pull("task")

    assert pulled.num_lost_blocks == 1
    assert problems_of(store_path) == []
    expected, _ = next_logits(here, llama, "a")
    logits, report = next_logits(store_path, llama, "a")
    assert torch.allclose(logits, expected, atol=1e-5)
    assert report.num_computed > 2


def test_a_missing_segment_costs_computing_and_nothing_else(file_url, here, store_path, tmp_path, llama):
    with Machine(here, file_url) as machine:
        machine.push("task")
    for segment in segments_of(tmp_path / "lake"):
        segment.unlink()

    with Machine(store_path, file_url) as machine:
        pulled = machine.pull("task")

    assert pulled.num_lost_blocks == pulled.num_blocks
    expected, _ = next_logits(here, llama, "b")
    logits, report = next_logits(store_path, llama, "b")
    assert torch.allclose(logits, expected, atol=1e-5)
    assert report.num_computed > 200


def test_a_segment_that_was_cut_off_is_damage_not_an_outage(file_url, tmp_path):
    with Lake.open(file_url) as lake:
        lake.put_many([make_record(1), make_record(2)])
        [segment] = segments_of(tmp_path / "lake")
        os.truncate(segment, segment.stat().st_size - 10)

        first, second = lake.fetch_many([make_record(1).digest, make_record(2).digest])

        assert first == make_record(1).data
        assert second == b""
        assert lake.shelf.num_damaged == 1


def test_every_damaged_byte_of_an_index_object_is_found(file_url, here, store_path, tmp_path):
    with Machine(here, file_url) as machine:
        machine.push("task")
    [path] = [path for name, path in objects_of(tmp_path / "lake").items() if name.startswith("sessions/")]
    good = path.read_bytes()

    with Machine(store_path, file_url) as machine:
        for at in range(0, len(good), max(1, len(good) // 40)):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            with pytest.raises((CorruptionError, agentmem.FormatVersionError)):
                machine.pull("task")
        path.write_bytes(good[:-5])
        with pytest.raises(CorruptionError):
            machine.pull("task")
        assert machine.names() == []
        path.write_bytes(good)
        assert machine.pull("task").num_lost_blocks == 0


def test_a_block_that_is_damaged_in_the_store_is_not_pushed(file_url, here):
    with Machine(here, file_url) as machine:
        with machine.environment.read() as txn:
            digest = next(digest for digest, _ in machine.disk.iter_index(txn))
        machine.environment.submit(lambda txn: machine.disk.discard(txn, [digest])).result()

        with pytest.raises(CorruptionError, match=digest.hex()):
            machine.push("task")
        assert machine.lake.names() == []


def test_a_lake_of_a_newer_format_is_refused_by_name(file_url, tmp_path):
    with Lake.open(file_url) as lake:
        lake.put_many([make_record(1)])
    path = tmp_path / "lake" / "keys" / "plain"
    data = bytearray(path.read_bytes())
    data[10] = 99
    path.write_bytes(data[:-8] + checksum(bytes(data[:-8])))

    with Lake.open(file_url) as lake, pytest.raises(agentmem.FormatVersionError, match="install a newer one"):
        lake.contains_many([make_record(1).digest])


# -- crashes


KILLED = """
import os, signal, sys
from pathlib import Path
from agentmem.lake.{module} import {owner}
from agentmem._lmdb import Environment
from agentmem.lake.lake import Lake
from agentmem.offload import push
from agentmem.tiers import parts
from agentmem.tiers.disk import DiskTier
from agentmem.tree.catalog import Catalog

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

{owner}.{method} = die
environment = Environment.open(Path(sys.argv[1]))
push(environment, Catalog(), DiskTier(environment), Lake.open(sys.argv[2]), "task")
"""


@pytest.mark.parametrize(
    ("module", "owner", "method"),
    [("sessions", "Sessions", "write"), ("shelf", "Shelf", "_put_segment"), ("shelf", "Shelf", "lost")],
)
def test_a_push_that_is_killed_leaves_the_old_version_or_the_new_one(
    file_url, here, store_path, tmp_path, module, owner, method
):
    code = KILLED.format(module=module, owner=owner, method=method)
    done = subprocess.run([sys.executable, "-c", code, here, file_url], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL

    is_there = method == "lost"
    with Machine(store_path, file_url) as machine:
        assert [label.name for label in machine.lake.names()] == (["task"] if is_there else [])
        if is_there:
            assert machine.pull("task").num_lost_blocks == 0
    if not is_there:
        with Machine(here, file_url) as machine:
            assert machine.push("task").version == 1
            collect(machine.lake, grace_s=0)
        with Machine(store_path, file_url) as machine:
            assert machine.pull("task").num_lost_blocks == 0
        assert len(segments_of(tmp_path / "lake")) == 1


# -- collecting


def test_what_nothing_names_is_marked_and_then_deleted_and_the_rest_stays(url, here, store_path):
    with Machine(here, url) as machine:
        machine.push("task")
        machine.push("task", as_name="copy")
        machine.lake.put_many([make_record(1)])
        machine.lake.put_many([make_record(2)])
        machine.lake.remove_many([make_record(2).digest])

        dry = collect(machine.lake, grace_s=0, dry_run=True)
        swept = collect(machine.lake, grace_s=0)
        again = collect(machine.lake, grace_s=0)

        assert (dry.num_marked, dry.num_removed) == (1, 0)
        assert (swept.num_segments, swept.num_marked, swept.num_removed) == (3, 1, 1)
        assert swept.removed_nbytes > 0
        assert (again.num_segments, again.num_marked, again.num_removed) == (2, 0, 0)
        assert holds(machine.lake, make_record(1))
    with Machine(store_path, url) as machine:
        assert machine.pull("task").num_lost_blocks == machine.pull("copy").num_lost_blocks == 0


def test_nothing_younger_than_the_grace_is_touched(file_url, here, tmp_path):
    with Machine(here, file_url) as machine:
        machine.push("task")
        machine.lake.remove("task")
        changed_s = max(info.changed_s for info in machine.lake.space.objects.list(""))

        def run(age_s):
            report = collect(machine.lake, grace_s=3600, clock=lambda: changed_s + age_s)
            return report.num_marked, report.num_removed

        assert run(3599) == (0, 0)
        assert run(3601) == (1, 0)
        [mark] = [path for name, path in objects_of(tmp_path / "lake").items() if name.startswith("doomed/")]
        os.utime(mark, (changed_s + 3601, changed_s + 3601))
        assert run(7200) == (0, 0)
        assert run(7202) == (0, 1)


def test_old_versions_go_once_a_newer_one_is_old_enough(file_url, here, store_path):
    with Machine(here, file_url) as machine:
        machine.push("task")
        change(machine)
        assert machine.push("task").version == 2

        young = collect(machine.lake, grace_s=3600)
        old = collect(machine.lake, grace_s=0)

        assert (young.num_versions, old.num_versions) == (0, 1)
    with Machine(store_path, file_url) as machine:
        with pytest.raises(NotFoundError, match="version 1"):
            machine.pull("task", version=1)
        assert machine.pull("task").version == 2


def test_who_names_a_segment_that_is_doomed_puts_its_blocks_again(file_url, here, store_path, tmp_path):
    with Machine(here, file_url) as machine:
        machine.push("task")
        machine.lake.remove("task")
        assert collect(machine.lake, grace_s=0, dry_run=False).num_removed == 1

    with Machine(here, file_url) as machine:  # knows nothing of what was deleted
        machine.lake.put_many([])
        first = machine.push("task")
        seal = machine.lake.space.find_seal()
        [segment] = segments_of(tmp_path / "lake")
        machine.lake.space.objects.put_new(machine.lake.space.path(seal, f"doomed/{segment.name}"), b"")
        second = machine.push("task", as_name="second")

        assert second.num_new_blocks == first.num_new_blocks
        machine.lake.remove("task")
        assert collect(machine.lake, grace_s=0).num_removed == 1
    with Machine(store_path, file_url) as machine:
        assert machine.pull("second").num_lost_blocks == 0


def test_a_segment_that_goes_while_it_is_named_is_put_again(file_url, here, store_path, tmp_path):
    """A collector that read all names just before the push deletes what the push relies on."""
    with Machine(here, file_url) as machine:
        machine.push("task")
        machine.lake.remove("task")
        [segment] = segments_of(tmp_path / "lake")
        write = machine.lake.sessions.write

        def write_as_the_collector_deletes(seal, index):
            write(seal, index)
            if index.label.version == 1:
                segment.unlink()

        machine.lake.sessions.write = write_as_the_collector_deletes
        pushed = machine.push("task", as_name="late")

    assert pushed.version == 2
    with Machine(store_path, file_url) as machine:
        assert machine.pull("late").num_lost_blocks == 0


def test_while_a_name_cannot_be_read_nothing_is_deleted(file_url, here, tmp_path):
    with Machine(here, file_url) as machine:
        machine.push("task")
        machine.lake.put_many([make_record(2)])
        machine.lake.remove_many([make_record(2).digest])
    [path] = [path for name, path in objects_of(tmp_path / "lake").items() if name.startswith("sessions/")]
    flip(path, path.stat().st_size - 50)

    with Lake.open(file_url) as lake, pytest.raises(CorruptionError, match="nothing of the lake is collected"):
        collect(lake, grace_s=0)
    assert len(segments_of(tmp_path / "lake")) == 2


def test_two_that_push_and_one_that_collects_lose_nothing(file_url, original, tmp_path, store_path):
    machines = [Machine(shutil.copytree(original, tmp_path / f"{number}.agentmem"), file_url) for number in range(3)]
    done = threading.Event()

    pushed = []

    def push_some(machine, number):
        for turn in range(4):
            # with no grace at all, all that a push puts may be collected again and again until it gives up
            with contextlib.suppress(TierUnavailableError):
                pushed.append(machine.push("task", as_name=f"{number}-{turn}").session)

    def sweep(machine):
        while not done.is_set():
            collect(machine.lake, grace_s=0)

    with ThreadPoolExecutor(3) as pool:
        sweeping = pool.submit(sweep, machines[2])
        pushing = [pool.submit(push_some, machine, number) for number, machine in enumerate(machines[:2])]
        for each in pushing:
            each.result()
        done.set()
        sweeping.result()
    for machine in machines:
        machine.__exit__()

    with Machine(store_path, file_url) as machine:
        assert [label.name for label in machine.lake.names()] == sorted(pushed)
        assert [machine.pull(name).num_lost_blocks for name in pushed] == [0] * len(pushed)


# -- encrypted stores


def test_stores_with_one_key_share_a_lake_and_nobody_else_reads_it(file_url, tmp_path, store_path, llama):
    here = make_store(tmp_path / "sealed.agentmem", llama, key=KEY)
    with Machine(here, file_url, KEY) as machine:
        machine.push("task")
    stored = b"".join(path.read_bytes() for path in (tmp_path / "lake").rglob("*") if path.is_file())

    with Machine(store_path, file_url, KEY) as machine:
        assert machine.pull("task").num_lost_blocks == 0
    expected, _ = next_logits(here, llama, "a", KEY)
    logits, report = next_logits(store_path, llama, "a", KEY)

    assert torch.equal(logits, expected)
    assert report.num_computed <= 2
    assert b"AMKB" not in stored
    assert b"task" not in stored
    for key in (None, OTHER_KEY):
        with Lake.open(file_url, key=key) as lake:
            assert lake.names() == []


def test_after_a_rekey_the_new_key_opens_the_lake_and_the_old_one_does_not(file_url):
    with Lake.open(file_url, key=KEY) as lake:
        lake.put_many([make_record(1)])
        rekey(lake.space.objects, KEY, OTHER_KEY)

    with Lake.open(file_url, key=OTHER_KEY) as lake:
        assert holds(lake, make_record(1))
    with Lake.open(file_url, key=KEY) as lake:
        assert lake.contains_many([make_record(1).digest]) == [False]
        with pytest.raises(EncryptionError, match="nothing that this key opens"):
            rekey(lake.space.objects, KEY, OTHER_KEY)


def test_objects_of_an_encrypted_lake_cannot_be_swapped(file_url, tmp_path):
    with Lake.open(file_url, key=KEY) as lake:
        lake.put_many([make_record(1), make_record(2)])
        digests = [make_record(1).digest, make_record(2).digest]
        segment, _ = lake.shelf.places.find(digests[0])
        [path] = segments_of(tmp_path / "lake")
        (start, middle), (_, stop) = segment.span(0, 0), segment.span(1, 0)
        data = path.read_bytes()
        path.write_bytes(data[:start] + data[middle:stop] + data[start:middle] + data[stop:])

        assert lake.fetch_many(digests) == [b"", b""]


# -- servers that fail


def test_a_server_that_went_away_is_left_alone_for_a_while_and_then_asked_again(s3_environment, monkeypatch):
    now_s = [0.0]
    lake = Lake.open("s3://bucket/away", timeout_s=2.0, clock=lambda: now_s[0])
    lake.put_many([make_record(1)])
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    away = Lake.open("s3://bucket/away", timeout_s=0.5, clock=lambda: now_s[0])

    for _ in range(3):
        with pytest.raises(TierUnavailableError, match="cannot get"):
            away.fetch_many([make_record(1).digest])
    with pytest.raises(TierUnavailableError, match="left alone"):
        away.fetch_many([make_record(1).digest])
    now_s[0] += 3600
    with pytest.raises(TierUnavailableError, match="cannot get"):
        away.fetch_many([make_record(1).digest])
    assert holds(lake, make_record(1))
    lake.close()
    away.close()


def test_a_bucket_that_does_not_exist_is_named(s3_environment):
    with (
        Lake.open("s3://no-such-bucket/x", timeout_s=2.0) as lake,
        pytest.raises(TierUnavailableError, match="no-such"),
    ):
        lake.put_many([make_record(1)])


def test_a_full_disk_refuses_blocks_and_loses_none(tmp_path):
    """A lake of files on a file system of 64 KiB."""
    small = tmp_path / "small"
    small.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        record = record_of(layered((20, 20)))
        with Lake.open(f"file://{small}/lake") as lake:
            assert lake.put_many([make_record(1)]) == [True]
            assert lake.put_many([record, make_record(1)]) == [False, True]
            assert holds(lake, make_record(1))
            label = Label(
                name="x",
                version=0,
                created_s=0.0,
                model_name="",
                num_branches=0,
                num_checkpoints=0,
                num_blocks=0,
                nbytes=0,
            )
            parcel = Parcel(label=label, entries=(), moves=(), digests=(record.digest,))
            with pytest.raises(StorageFullError):
                lake.push(parcel, lambda _: record.data)
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.fixture
def slow_network(s3, s3_environment, monkeypatch):
    """A proxy in front of the server; who opens a lake from now on goes through it."""
    with proxied(int(s3.rsplit(":", 1)[1])) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy


@pytest.fixture
def remote(slow_network, tmp_path):
    """A lake behind the proxy that holds three blocks of a megabyte, and these."""
    records = [record_of(layered(seed=seed), name=seed) for seed in (1, 2, 3)]
    with Lake.open(f"s3://bucket/{tmp_path.name}", timeout_s=4.0) as lake:
        lake.put_many(records)
        yield lake, records


def test_a_slow_server_costs_time_and_nothing_else(remote, slow_network):
    lake, records = remote
    nbytes = sum(len(record.data) for record in records)
    slow_network.nbytes_per_s = 1_000_000
    start_s = time.monotonic()

    fetched = lake.fetch_many([record.digest for record in records])

    assert [verified(data).digest for data in fetched] == [record.digest for record in records]
    assert nbytes / 1e6 * 0.8 < time.monotonic() - start_s < nbytes / 1e6 * 2 + 3


def test_a_server_that_stalls_is_given_up_in_bounded_time(remote, slow_network):
    lake, records = remote
    slow_network.is_stalled = True
    start_s = time.monotonic()

    with pytest.raises(TierUnavailableError, match="cannot get"):
        lake.fetch_many([record.digest for record in records])

    assert time.monotonic() - start_s < 4 * 4.0 + 3
    slow_network.cut()
    slow_network.is_stalled = False
    assert all(lake.fetch_many([record.digest for record in records]))


def test_a_connection_that_is_cut_in_mid_load_is_made_again(remote, slow_network):
    lake, records = remote
    slow_network.cut_after(500_000)

    fetched = lake.fetch_many([record.digest for record in records])

    assert [verified(data).digest for data in fetched] == [record.digest for record in records]


def test_bytes_that_the_network_damages_never_pass_for_a_block(remote, slow_network):
    lake, records = remote
    slow_network.flip(900_000)

    fetched = lake.fetch_many([record.digest for record in records])

    assert sum(is_whole(data, record.digest) for data, record in zip(fetched, records, strict=True)) == 2
    again = lake.fetch_many([record.digest for record in records])
    assert all(is_whole(data, record.digest) for data, record in zip(again, records, strict=True))


@pytest.mark.parametrize("url", ["", "nowhere", "ftp://x/y", "redis://x"])
def test_a_url_that_is_no_place_for_a_lake_is_refused_by_name(url):
    with pytest.raises(InvalidInputError, match="no place for a lake"):
        Lake.open(url)


def test_a_key_of_another_length_is_refused(file_url):
    with pytest.raises(InvalidInputError, match="32"):
        Space(Objects.open(file_url, timeout_s=1.0), b"short")


# -- the command line


@pytest.fixture
def ask(capsys):
    """Run a command with --json; return its exit code and its document, on stdout or stderr."""

    def ask(*words):
        capsys.readouterr()
        code = main([*map(str, words), "--json"])
        captured = capsys.readouterr()
        return code, json.loads(captured.out or captured.err)

    return ask


def test_the_commands_push_list_pull_remove_and_collect(ask, here, store_path, file_url):
    pushed = ask("push", here, "task", "--lake", file_url)
    listed = ask("lake", "ls", file_url)
    pulled = ask("pull", store_path, "task", "--lake", file_url, "--as", "copy")
    removed = ask("lake", "rm", file_url, "task")
    collected = ask("lake", "gc", file_url, "--grace", "0")

    codes, documents = zip(pushed, listed, pulled, removed, collected, strict=True)
    assert codes == (0,) * 5
    assert documents[0]["num_new_blocks"] == documents[2]["num_new_blocks"] > 0
    assert [(session["name"], session["version"]) for session in documents[1]["sessions"]] == [("task", 1)]
    assert (documents[2]["session"], documents[2]["num_lost_blocks"]) == ("copy", 0)
    assert documents[4]["num_removed"] == 1


def test_a_pull_of_what_is_not_there_makes_no_store_and_an_outage_has_a_code_of_its_own(ask, file_url, store_path):
    code, document = ask("pull", store_path, "task", "--lake", file_url)
    assert (code, document["error"]["kind"]) == (4, "not-found")
    assert not store_path.exists()

    code, document = ask("push", store_path, "task")
    assert (code, document["error"]["kind"]) in {(2, "invalid-input"), (4, "not-found")}


def test_a_lake_that_does_not_answer_ends_with_8(ask, s3_environment, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")

    code, document = ask("lake", "ls", "s3://bucket/x")

    assert (code, document["error"]["kind"]) == (8, "tier-unavailable")


def test_a_lake_gets_another_key_by_command(ask, tmp_path, file_url):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(KEY)
    new.write_bytes(OTHER_KEY)
    with Lake.open(file_url, key=KEY) as lake:
        lake.put_many([make_record(1)])

    code, _ = ask("lake", "rekey", file_url, "--key-file", old, "--new-key-file", new)

    assert code == 0
    with Lake.open(file_url, key=OTHER_KEY) as lake:
        assert holds(lake, make_record(1))


def test_a_directory_is_named_by_its_path_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Lake.open("./a lake") as lake:
        lake.put_many([make_record(1)])

    with Lake.open(f"{tmp_path}/a lake") as lake:
        assert holds(lake, make_record(1))


@pytest.mark.parametrize("lake", ["nowhere", ""])
def test_a_config_refuses_a_lake_that_is_no_place(lake):
    with pytest.raises(InvalidInputError, match=r"Config\.lake"):
        agentmem.Config(lake=lake)


def test_a_push_that_is_collected_again_and_again_gives_up_and_leaves_the_version_before(file_url, here, store_path):
    with Machine(here, file_url) as machine:
        machine.push("task")
        change(machine)
        lost = machine.lake.shelf.lost
        machine.lake.shelf.lost = lambda seal, named, safe=(): set(named) | lost(seal, (), ())

        with pytest.raises(TierUnavailableError, match="raise the collector's grace"):
            machine.push("task")
    with Machine(store_path, file_url) as machine:
        assert machine.pull("task").version == 1


def test_blocks_that_are_collected_again_and_again_are_refused_and_not_believed_to_be_there(file_url):
    with Lake.open(file_url) as lake:
        lost = lake.shelf.lost
        lake.shelf.lost = lambda seal, named, safe=(): set(named) | lost(seal, (), ())

        with pytest.raises(TierUnavailableError, match="raise the grace"):
            lake.put_many([make_record(1)])

        lake.refresh()
        assert lake.contains_many([make_record(1).digest]) == [False]
