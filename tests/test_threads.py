"""Threads that share a store: more of them than the device holds sessions, switching, feeding, forking, evicting.

AGENTMEM_STRESS_ROUNDS says how often each of the eight threads takes up a session, by default a few times; a thousand
make a soak.
"""

import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import agentmem
from agentmem.check import check
from agentmem.tiers.disk import DiskTier

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_THREADS, NUM_SESSIONS = 8, 12
ROUNDS = int(os.environ.get("AGENTMEM_STRESS_ROUNDS", "6"))
TRUNK, MOST = 120, 260
TOLERANCE = 5e-4
TIMEOUT_S = 200 + 10 * ROUNDS


class Agent:
    """One session, and what its branches must hold; the threads take turns on it, as the requests of a client do."""

    def __init__(self, model: Any, store: agentmem.Store, number: int) -> None:
        self.model = model
        self.store = store
        self.lock = threading.Lock()
        self.rng = random.Random(number)
        self.name = f"agent-{number}"
        session = store.create(self.name)
        self.tokens = {"main": self.random(TRUNK)}
        session.append(self.tokens["main"])
        session.checkpoint("trunk")

    def random(self, count: int) -> list[int]:
        return self.rng.choices(range(1, 256), k=count)

    def work(self) -> None:
        """Switch to a branch, do something, and compare logits and tokens with the model's own."""
        with self.lock:
            session = self.store.resume(self.name, branch=self.rng.choice(list(self.tokens)))
            name = session.active.name
            assert session.active.tokens == self.tokens[name]
            self.rng.choice([self.feed, self.generate, self.fork, self.rewind, self.checkpoint, self.drop, self.close])(
                session, name
            )
            self.compare(session)

    def compare(self, session: agentmem.Session) -> None:
        session = self.store.resume(self.name) if session.is_closed else session
        name = session.active.name
        logits = session.forward()[-1]
        with torch.no_grad():
            expected = self.model(input_ids=torch.tensor([self.tokens[name]])).logits[0, -1]
        assert session.active.tokens == self.tokens[name]
        assert float((logits - expected).abs().max()) < TOLERANCE

    # -- what an agent does

    def feed(self, session: agentmem.Session, name: str) -> None:
        added = self.random(self.rng.randrange(1, 40))
        session.forward(added)
        self.tokens[name] = [*self.tokens[name], *added]
        if len(self.tokens[name]) > MOST:
            self.rewind(session, name)

    def generate(self, session: agentmem.Session, name: str) -> None:
        found = session.generate(max_new_tokens=4, do_sample=False)
        self.tokens[name] = [*self.tokens[name], *found.tokens]

    def fork(self, session: agentmem.Session, name: str) -> None:
        if len(self.tokens) < 4:
            new = f"branch-{self.rng.randrange(10**9)}"
            session.fork(new)
            self.tokens[new] = self.tokens[name]
            session.switch(new)

    def rewind(self, session: agentmem.Session, name: str) -> None:
        count = self.rng.randrange(len(self.tokens[name]) - TRUNK + 1)
        session.rewind(tokens=count)
        self.tokens[name] = self.tokens[name][: len(self.tokens[name]) - count]

    def checkpoint(self, session: agentmem.Session, name: str) -> None:
        session.checkpoint(f"at {len(self.tokens[name])}")

    def drop(self, session: agentmem.Session, name: str) -> None:
        if name != "main":
            session.switch("main")
            session.drop(name)
            del self.tokens[name]

    def close(self, session: agentmem.Session, name: str) -> None:
        session.close()
        self.store.resume(self.name, branch=name)


def budget_of(model: Any, path: Path, num_sessions: int) -> int:
    """Return the bytes of so many sessions with a branch at its longest, and the room that buffers have to grow."""
    with agentmem.open(path, model=model) as store:
        return num_sessions * (MOST + 100) * store.token_nbytes


@pytest.mark.timeout(TIMEOUT_S)
def test_eight_threads_switch_among_twelve_sessions_on_a_device_that_holds_two(
    tiny: Callable[..., Any], tmp_path: Path
) -> None:
    model = tiny("llama", seed=3)
    budget = budget_of(model, tmp_path / "empty", 2)
    config = agentmem.Config(
        device_budget_nbytes=budget, host_budget_nbytes=2 * budget, block_size=16, prefill_chunk_tokens=64
    )
    highest = 0

    with agentmem.open(tmp_path / "store", model=model, config=config) as store:
        agents = [Agent(model, store, number) for number in range(NUM_SESSIONS)]

        def client(number: int) -> int:
            rng, high = random.Random(1000 + number), 0
            for _ in range(ROUNDS):
                rng.choice(agents).work()
                high = max(high, store.stats()["device_nbytes"])
            return int(high)

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            highest = max(pool.map(client, range(NUM_THREADS)))
        stats = store.stats()
    with agentmem.open(tmp_path / "store", model=model, config=config) as store:
        found = {agent.name: branches(store.resume(agent.name)) for agent in agents}

    assert found == {agent.name: agent.tokens for agent in agents}
    assert highest <= budget
    assert stats["branches_evicted"] > 0
    with agentmem.open(tmp_path / "store") as view:
        assert check(view.environment, DiskTier(view.environment), read_data=True).problems == ()


@pytest.mark.gpu
def test_what_is_copied_off_a_gpu_waits_for_the_kernels_that_write_it(tiny: Callable[..., Any]) -> None:
    from agentmem.kv.spec import KVSpec, LayerGroup, LayerKind, LayerSpec
    from agentmem.tiers.device import DeviceTier, Workspace, empty_sections
    from agentmem.tiers.runs import Cursor

    spec = KVSpec(
        layers=(LayerSpec(kind=LayerKind.FULL, group=0, row=0),),
        groups=(LayerGroup(num_layers=1, num_heads=2, key_dim=64, value_dim=64),),
        dtype="float32",
        block_size=64,
    )
    workspace, cursor = Workspace(DeviceTier(spec, torch.device("cuda"), None)), Cursor(None, 0)
    out = empty_sections(spec, 64)
    workspace.begin(cursor, 64)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        for section in workspace.slots(0, 64):
            section.fill_(7.0)
        workspace.commit(cursor, 64)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(workspace.gather, cursor, 0, 64, out).result()

    assert all(bool((section == 7.0).all()) for section in out)


def branches(session: agentmem.Session) -> dict[str, list[int]]:
    return {name: session.branch(name).tokens for name in session.branches}
