"""Several processes that write one store: who may write to a session, and what each sees of the others.

Run as a script, this file is a zygote whose workers are told over pipes what to do, one step at a time.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

import agentmem
from agentmem import leases
from agentmem._lmdb import Environment, Level, Table
from agentmem.check import check
from agentmem.errors import AlreadyExistsError, SessionLeasedError
from agentmem.leases import LeaseRecord
from agentmem.testing.zygote import Zygote, kill, serve
from agentmem.tiers.blockrows import count_blocks, read_sum
from agentmem.tiers.disk import DiskTier

CONFIG = agentmem.Config(block_size=16)
QUICK = dataclasses.replace(CONFIG, lease_s=0.4)
TOKENS = list(range(1, 60))
WAIT_S = 30
NUM_KILLS = int(os.environ.get("AGENTMEM_CRASH_ROUNDS", "5"))

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def zygote():
    with closing(Zygote(__file__)) as process:
        yield process


class Peer:
    """Another process that has the store open, and does what it is told."""

    _numbers = itertools.count()

    def __init__(self, zygote, folder, store_path, **options):
        paths = [folder / f"peer{next(self._numbers)}.{end}" for end in ("in", "out")]
        for path in paths:
            os.mkfifo(path)
        self.pid = zygote.start(str(store_path), *map(str, paths), options)
        self._to, self._from = paths[0].open("w", buffering=1), paths[1].open()

    def tell(self, *words):
        """Have it do something; `hear` returns what came of it."""
        self._to.write(json.dumps(words) + "\n")

    def hear(self):
        """Return what the last step gave, or raise the error that it ended with."""
        told = json.loads(self._from.readline())
        if "error" in told:
            raise getattr(agentmem, told["error"])(told["message"])
        return told["value"]

    def do(self, *words):
        self.tell(*words)
        return self.hear()

    def end(self):
        kill(self.pid)
        self._to.close()
        self._from.close()


@pytest.fixture
def peer(zygote, tmp_path, store_path):
    """Start peers on the test's store; they are killed at its end."""
    with contextlib.ExitStack() as ends:

        def start(**options):
            other = Peer(zygote, tmp_path, store_path, **options)
            ends.callback(other.end)
            other.hear()
            return other

        yield start


@pytest.fixture
def opened(llama, store_path):
    """Open the test's store in this process; closed at its end."""
    with contextlib.ExitStack() as ends:
        yield lambda config=CONFIG: ends.enter_context(agentmem.open(store_path, model=llama, config=config))


def until(act):
    """Repeat `act` until it is true."""
    deadline = time.monotonic() + WAIT_S
    while not (found := act()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def is_free(store, name):
    try:
        return store.resume(name)
    except SessionLeasedError:
        return None


def problems(store):
    return check(store.environment, DiskTier(store.environment), read_data=True).problems


# -- sessions


def test_two_processes_write_two_sessions_of_one_store_at_the_same_time(peer, opened):
    store, other = opened(), peer()
    mine = store.create("mine")
    other.do("create", "theirs")
    for number in range(5):
        other.tell("forward", "theirs", TOKENS[number * 7 : number * 7 + 7])
        mine.forward(TOKENS[number * 7 : number * 7 + 7])
        mine.checkpoint()
        other.hear()
        other.do("checkpoint", "theirs")
    other.do("close", "theirs")
    mine.close()

    assert store.resume("theirs").active.tokens == store.resume("mine").active.tokens == TOKENS[:35]
    assert problems(store) == ()
    with store.environment.read() as txn:
        assert read_sum(txn).totals == count_blocks(txn).totals


def test_a_leased_session_is_refused_by_its_holders_name_and_may_be_looked_at(peer, opened):
    store, other = opened(), peer()
    other.do("create", "s")
    other.do("forward", "s", TOKENS)
    other.do("checkpoint", "s")

    for act in (store.resume, store.remove, store.forget):
        with pytest.raises(SessionLeasedError, match=rf"process {other.pid} on \S+ since 2"):
            act("s")
    with pytest.raises(AlreadyExistsError, match=f"process {other.pid} "):
        store.create("s")
    assert [branch.num_open for branch in store.view("s").branches] == [0]

    other.do("close", "s")
    assert store.resume("s").active.tokens == TOKENS


def test_the_lease_of_a_killed_process_is_free_at_once_with_all_it_had_acknowledged(peer, opened):
    store, other = opened(), peer()
    other.do("create", "s")
    other.do("forward", "s", TOKENS)
    other.do("flush")
    kill(other.pid)

    session = store.resume("s")

    assert session.active.tokens == TOKENS
    assert problems(store) == ()


def test_a_stopped_process_loses_its_session_in_time_and_writes_nothing_to_it_afterwards(peer, opened):
    store, other = opened(QUICK), peer(lease_s=QUICK.lease_s)
    other.do("create", "s")
    other.do("forward", "s", TOKENS[:20])
    other.do("flush")
    other.do("create", "another")
    other.do("append", "s", [7, 7, 7])  # in memory, or on the way to the disk
    os.kill(other.pid, signal.SIGSTOP)
    session = until(lambda: is_free(store, "s"))
    tokens = session.active.tokens
    session.forward([5, 6])
    session.checkpoint()

    os.kill(other.pid, signal.SIGCONT)

    until(lambda: other.do("is_lost", "s"))
    for verb in (("append", "s", [8]), ("fork", "s", "b"), ("checkpoint", "s"), ("flush",)):
        with pytest.raises(SessionLeasedError, match=f"process {os.getpid()} on "):
            other.do(*verb)
    other.do("forward", "another", TOKENS)
    other.do("end")
    session.close()
    assert tokens in (TOKENS[:20], [*TOKENS[:20], 7, 7, 7])
    assert store.resume("s").active.tokens == [*tokens, 5, 6]
    assert store.resume("s").branches == ["main"]
    assert store.resume("another").active.tokens == TOKENS
    assert problems(store) == ()


def test_a_lost_session_is_resumed_by_the_same_handle_once_it_is_free(peer, opened):
    store, other = opened(QUICK), peer(lease_s=QUICK.lease_s)
    other.do("create", "s")
    os.kill(other.pid, signal.SIGSTOP)
    until(lambda: is_free(store, "s")).append(TOKENS)
    os.kill(other.pid, signal.SIGCONT)
    until(lambda: other.do("is_lost", "s"))
    with pytest.raises(SessionLeasedError):
        other.do("resume", "s")
    store.resume("s").close()

    other.do("resume", "s")

    assert other.do("tokens", "s") == TOKENS


def test_a_working_handle_renews_its_leases(peer, opened):
    store, other = opened(), peer(lease_s=QUICK.lease_s)
    other.do("create", "s")
    session_id = store.view("s").record.session_id

    def lease():
        with store.environment.read() as txn:
            return leases.holder_of(txn, store.environment, session_id)

    first = lease()
    until(lambda: lease().expires_s > first.expires_s + 1)

    later = lease()
    assert later.token == first.token
    assert later.since_s == first.since_s


@pytest.mark.parametrize("change", [{"boot_id": bytes(16)}, {"expires_s": 0.0}, {"holder": 12345}])
def test_a_lease_of_an_earlier_run_of_the_machine_or_of_nobody_is_void(peer, opened, change):
    store, other = opened(), peer()
    other.do("create", "s")
    session_id = store.view("s").record.session_id

    def alter(txn):
        record = LeaseRecord.unpack(session_id, txn.get(Table.LEASES, session_id))
        txn.put(Table.LEASES, session_id, dataclasses.replace(record, **change).pack())

    store.environment.submit(alter).result(WAIT_S)

    assert store.resume("s").name == "s"


def test_a_damaged_lease_is_void_and_its_holder_stops_writing(peer, opened):
    store, other = opened(), peer()
    other.do("create", "s")
    session_id = store.view("s").record.session_id
    store.environment.submit(lambda txn: txn.put_raw(Table.LEASES, [(session_id, bytes(80))])).result(WAIT_S)

    with pytest.raises(SessionLeasedError, match="damage"):
        until(lambda: other.do("append", "s", [1]))
    assert store.resume("s").active.tokens == []


def test_of_four_processes_that_create_a_session_one_does_on_a_store_that_all_four_make(zygote, tmp_path, store_path):
    peers = [Peer(zygote, tmp_path, store_path) for _ in range(4)]
    try:
        for other in peers:
            other.hear()
        for other in peers:
            other.tell("create", "s")
        outcomes = []
        for other in peers:
            try:
                outcomes.append(other.hear())
            except AlreadyExistsError:
                outcomes.append("taken")

        assert sorted(outcomes) == ["s", "taken", "taken", "taken"]
    finally:
        for other in peers:
            other.end()


def test_a_process_killed_within_a_write_holds_up_nobody_and_leaves_nothing(peer, opened):
    store, other = opened(), peer()
    session = store.create("s")
    other.do("create", "theirs")
    other.tell("die_writing")
    until(lambda: not is_running(other.pid))

    session.forward(TOKENS)
    session.checkpoint()

    theirs = until(lambda: is_free(store, "theirs"))  # its threads may be a moment behind
    assert theirs.active.tokens == []
    assert problems(store) == ()
    with store.environment.read() as txn:
        assert txn.get(Table.NODES, b"half") is None


def is_running(process_id):
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- blocks


def test_a_block_that_another_process_stored_is_found_and_reused(peer, opened):
    store, other = opened(), peer()
    mine = store.create("mine")
    mine.forward([9])  # what is stored has been asked for before
    other.do("create", "theirs")
    other.do("forward", "theirs", TOKENS)
    other.do("checkpoint", "theirs")

    fresh = store.create("fresh")
    fresh.append(TOKENS)
    fresh.forward([4])

    assert fresh.report.from_tier == {"disk": 48}
    assert fresh.report.num_computed == len(TOKENS) + 1 - 48


def test_a_block_that_another_process_removed_is_computed_again(peer, opened):
    store, other = opened(), peer()
    mine = store.create("mine")
    mine.forward(TOKENS)
    store.flush()
    store.remove("mine")
    fresh = store.create("fresh")
    fresh.append(TOKENS)
    other.do("gc")
    other.do("gc")
    expected = other.do("logits", [*TOKENS, 4])

    logits = fresh.forward([4])

    assert store.stats()["disk_num_blocks"] == 0
    assert fresh.report.from_tier == {}
    assert torch.allclose(logits[-1], torch.tensor(expected), atol=1e-4)


@pytest.mark.parametrize("place", ["device", "host", "nowhere"])
def test_a_checkpoint_survives_that_another_process_removed_its_blocks(peer, opened, place):
    budget = 0 if place == "nowhere" else CONFIG.host_budget_nbytes
    store, other = opened(dataclasses.replace(CONFIG, host_budget_nbytes=budget)), peer()
    session = store.create("s")
    session.forward(TOKENS)
    session.fork("b")
    session.forward([3], branch="b")
    store.flush()
    if place != "device":
        for name in ("b", "main"):
            session.active._entry.state.save_tail()
            assert session.evict(name)
        session.ledger.workspace.clear()
        store._runtime.blocks.save(session.active._entry.state.saved_blocks())
        store.environment.flush()
    assert other.do("gc") > 0

    checkpoint = session.checkpoint("m")

    assert checkpoint.num_tokens == len(TOKENS)
    assert problems(store) == ()
    session.close()
    again = store.resume("s")
    assert again.active.tokens == TOKENS
    if place != "nowhere":
        assert store.stats()["blocks_saved_again"] > 0
        assert again.report.num_reused >= 48
    alone = torch.tensor(other.do("logits", [*TOKENS, 4]))
    assert torch.allclose(again.forward([4])[-1], alone, atol=1e-4)


def test_gc_leaves_what_a_session_of_another_process_let_go_of(peer, opened):
    store, other = opened(), peer()
    session = store.create("s")
    session.forward(TOKENS)
    first = session.checkpoint("first")
    session.rewind(tokens=0)
    store.flush()

    other.do("gc")
    branch = session.fork("again", at=first)
    branch.checkpoint("kept")
    session.switch("again")
    session.drop("main")
    session.close()
    removed = other.do("gc")

    assert branch.tokens == TOKENS
    assert removed == 0
    assert store.resume("s").active.tokens == TOKENS


# -- the store


def test_a_process_with_a_small_map_follows_a_file_that_outgrows_it(peer, opened):
    store, other = opened(), peer(map_nbytes=1 << 20)
    session = store.create("s")
    for number in range(10):
        row = b"%032d" % number, bytes(300_000)
        store.environment.submit(lambda txn, row=row: txn.put(Table.CHAIN, *row)).result(WAIT_S)

    other.do("create", "theirs")
    other.do("forward", "theirs", TOKENS)
    other.do("checkpoint", "theirs")

    assert store.environment.nbytes > 2 << 20
    assert other.do("tokens", "theirs") == TOKENS
    assert session.active.tokens == []


def test_the_command_line_refuses_to_remove_what_a_process_writes_to(opened, store_path):
    store = opened()
    session = store.create("s")
    session.append(TOKENS)
    session.fork("b")
    store.flush()

    for target in ("s", "s/b"):
        command = [sys.executable, "-m", "agentmem", "rm", str(store_path), target, "--yes", "--json"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 3, done
        assert json.loads(done.stderr)["error"]["kind"] == "session-leased"
        assert str(os.getpid()) in done.stderr
    assert [branch.name for branch in store.view("s").branches] == ["main", "b"]


def test_a_forked_child_does_not_keep_a_holder_alive(store_path):
    code = """
import os, signal, sys
from pathlib import Path
from agentmem._lmdb import Environment
environment = Environment.open(Path(sys.argv[1]), create=True)
if os.fork() == 0:
    print(environment.holders.number, os.getpid(), flush=True)
    signal.pause()
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code, str(store_path)], stdout=subprocess.PIPE, text=True) as process:
        number, child = map(int, process.stdout.readline().split())
        try:
            with Environment.open(store_path) as environment:
                was_alive = environment.holders.is_alive(number)
                process.kill()
                process.wait(WAIT_S)
                is_alive = environment.holders.is_alive(number)
        finally:
            os.kill(child, signal.SIGKILL)

    assert was_alive
    assert not is_alive


def test_a_lease_costs_a_write_next_to_nothing(opened):
    store = opened()
    session = store.create("s")
    lease = session.ledger.lease

    def measure(txn):
        start = time.perf_counter()
        for _ in range(1000):
            lease.require(txn)
        return (time.perf_counter() - start) / 1000

    assert min(store.environment.submit(measure).result(WAIT_S) for _ in range(5)) < 50e-6


# -- many, killed at random


@pytest.mark.timeout(300)
def test_what_four_processes_acknowledged_survives_that_they_are_killed_at_random(
    zygote, llama, opened, tmp_path, store_path
):
    rng = random.Random(5)
    journal = tmp_path / "journal"
    journal.touch()
    workers = [zygote.start(str(store_path), str(journal), seed) for seed in range(4)]
    try:
        for seed in range(4, 4 + 10 * NUM_KILLS):
            if seed >= 4 + NUM_KILLS and has_changed_hands(journal):
                break
            num_lines = journal.read_text().count("\n")
            until(lambda at_least=num_lines + 2: journal.read_text().count("\n") >= at_least)
            kill(workers.pop(rng.randrange(4)))
            workers.append(zygote.start(str(store_path), str(journal), seed))
    finally:
        for worker in workers:
            kill(worker)

    lines = [json.loads(line) for line in journal.read_text().split("\n")[:-1]]
    expected = {line["checkpoint"]: line["tokens"] for line in lines}
    store = opened()
    assert problems(store) == ()
    assert len(expected) > NUM_KILLS
    assert has_changed_hands(journal)
    for name in {line["session"] for line in lines}:
        session = store.resume(name)
        for checkpoint in session.checkpoints:
            wanted = expected.pop(checkpoint.checkpoint_id.hex(), None)
            if wanted is not None:
                assert session.fork(f"look{len(expected)}", at=checkpoint).tokens == wanted
        with torch.no_grad():
            alone = llama(torch.tensor([session.active.tokens])).logits[0, -1]
        assert torch.allclose(session.forward([])[-1], alone, atol=1e-4)
    assert expected == {}


def has_changed_hands(journal):
    """Say whether some session went from one worker to another."""
    lines = [json.loads(line) for line in journal.read_text().split("\n")[:-1]]
    worked = {(line["session"], line["worker"]) for line in lines}
    return len(worked) > len({session for session, _ in worked})


def work_for_ever(path, journal, seed):
    """Work on whatever session nobody else has, and acknowledge every checkpoint that returned."""
    rng = random.Random(seed)
    with agentmem.open(path, model=MODEL, config=CONFIG) as store, Path(journal).open("a") as out:
        for _ in range(10**6):
            with contextlib.suppress(SessionLeasedError, AlreadyExistsError):
                name = f"s{rng.randrange(3)}"
                known = {record.name for record in store.sessions()}
                session = store.resume(name) if name in known else store.create(name)
                for _ in range(rng.randrange(1, 4)):
                    take_a_step(session, rng)
                    line = {
                        "session": name,
                        "worker": os.getpid(),
                        "checkpoint": session.checkpoint().checkpoint_id.hex(),
                        "tokens": session.active.tokens,
                    }
                    os.write(out.fileno(), (json.dumps(line) + "\n").encode())
                session.close()
            if rng.random() < 0.2:
                store.gc(grace_s=0)


def take_a_step(session, rng):
    if session.active.num_tokens > 150:
        name = f"from{rng.randrange(10**9)}"
        session.fork(name, at=rng.choice(session.checkpoints))
        session.switch(name)
    session.append([rng.randrange(1, 4) for _ in range(rng.randrange(1, 30))])
    if rng.random() < 0.3:
        session.generate(max_new_tokens=3, do_sample=False)


# -- what a peer does


def work(path, *arguments):
    """Be a peer, or one of the workers that are killed at random."""
    if len(arguments) == 2:
        work_for_ever(path, *arguments)
    else:
        be_a_peer(path, *arguments)


def be_a_peer(path, path_in, path_out, options):
    """Open the store, and do each step that is read from one pipe; write what came of it to the other."""
    from agentmem._lmdb import engine

    engine._MAX_MAP_NBYTES = options.pop("map_nbytes", engine._MAX_MAP_NBYTES)
    with Path(path_in).open() as steps, Path(path_out).open("w", buffering=1) as out:
        follow(steps, out, path, options)


def follow(steps, out, path, options):
    store = agentmem.open(path, model=MODEL, config=dataclasses.replace(CONFIG, **options))
    sessions = {}
    out.write('{"value": "open"}\n')
    for line in steps:
        verb, *words = json.loads(line)
        try:
            told = {"value": STEPS[verb](store, sessions, *words)}
        except agentmem.AgentMemError as error:
            told = {"error": type(error).__name__, "message": str(error)}
        out.write(json.dumps(told) + "\n")


def create(store, sessions, name):
    sessions[name] = store.create(name)
    return name


def resume(store, sessions, name):
    sessions[name] = store.resume(name)
    return name


def collect_garbage(store, _sessions):
    return store.gc(grace_s=-10).num_blocks


def logits(_store, _sessions, tokens):
    with torch.no_grad():
        return MODEL(torch.tensor([tokens])).logits[0, -1].tolist()


def die_writing(store, _sessions):
    def operation(txn):
        txn.put(Table.NODES, b"half", b"value")
        os.kill(os.getpid(), signal.SIGKILL)

    store.environment.submit(operation, level=Level.DURABLE).result()


STEPS = {
    "create": create,
    "resume": resume,
    "gc": collect_garbage,
    "logits": logits,
    "die_writing": die_writing,
    "end": lambda store, _: store.close(),
    "flush": lambda store, _: store.flush(),
    "close": lambda _, sessions, name: sessions[name].close(),
    "tokens": lambda _, sessions, name: sessions[name].active.tokens,
    "append": lambda _, sessions, name, tokens: sessions[name].append(tokens),
    "forward": lambda _, sessions, name, tokens: len(sessions[name].forward(tokens)),
    "fork": lambda _, sessions, name, branch: sessions[name].fork(branch).name,
    "checkpoint": lambda _, sessions, name: sessions[name].checkpoint().checkpoint_id.hex(),
    "is_lost": lambda _, sessions, name: sessions[name].ledger.lease.is_lost,
}


if __name__ == "__main__":
    from agentmem.testing.models import tiny_model

    torch.set_num_threads(1)  # no threads in the zygote: a forked child would wait for them for ever
    MODEL = tiny_model("llama")
    serve(work)
