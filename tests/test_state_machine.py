"""A whole store against a plain dict of tokens and runs from nothing: any order of any verbs, evictions, reopenings.

Tokens come from a small alphabet, so that branches and sessions often have the same prefixes by chance.
"""

import logging
import shutil
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import agentmem
from agentmem._lmdb import Environment, Level, Table
from agentmem.check import check
from agentmem.errors import CapacityError, InvalidInputError
from agentmem.gc import collect
from agentmem.racing import PREFILL
from agentmem.reasons import Reason
from agentmem.testing.models import tiny_model
from agentmem.tiers.blockrows import BlockInfo
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.sim import SimTier
from agentmem.tree.catalog import Catalog

TOLERANCE = 1e-4
TOKEN_NBYTES = 4 * 2 * 2 * 16 * 4
MAX_TOKENS = 150
FAR_FUTURE_S = 4e9

TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=24)
FEW_TOKENS = st.lists(st.integers(1, 3), max_size=3)
ANY = st.integers(0, 1000)

MODEL = tiny_model("llama")
_COLD: dict[tuple[int, ...], torch.Tensor] = {}


def cold(tokens):
    """Return the logits `[T, V]` of a run from nothing."""
    key = tuple(tokens)
    if key not in _COLD:
        with torch.no_grad():
            _COLD[key] = MODEL(torch.tensor([tokens])).logits[0]
    return _COLD[key]


class StoreAndDict(RuleBasedStateMachine):
    """The store beside `{session: {branch: tokens}}` and the tokens of every checkpoint."""

    config = agentmem.Config(block_size=16)
    is_tight = False
    has_far_tier = False

    def __init__(self):
        super().__init__()
        logging.getLogger("agentmem").setLevel(logging.ERROR)  # damaged blocks are warned of by the hundred
        self.folder = Path(tempfile.mkdtemp())
        self.tiers = [SimTier(bandwidth=1e12)] if self.has_far_tier else []
        self.store = self.open()
        self.sessions = {}
        self.model = {}
        self.points = []
        self.count = 0
        self.is_damaged = False
        self.pending = {}

    def open(self):
        return agentmem.open(self.folder / "store", model=MODEL, config=self.config, tiers=self.tiers)

    def fresh_name(self, kind):
        self.count += 1
        return f"{kind}{self.count}"

    def pick(self, number):
        """Return a session, a branch's name and its tokens."""
        every = [(session, branch) for session in self.model for branch in self.model[session]]
        session, branch = every[number % len(every)]
        return self.sessions[session], branch, self.model[session][branch]

    def attempt(self, act):
        """Do `act`; with a tight budget it may be refused, and then nothing has happened."""
        try:
            return act()
        except CapacityError:
            if not self.is_tight:
                raise
            return None

    # -- verbs

    @initialize()
    def begin(self):
        self.create()

    @precondition(lambda self: len(self.model) < 2)
    @rule()
    def create(self):
        name = self.fresh_name("s")
        self.sessions[name] = self.store.create(name)
        self.model[name] = {"main": []}

    @rule(number=ANY, tokens=TOKENS)
    def append(self, number, tokens):
        session, branch, known = self.pick(number)
        if len(known) + len(tokens) <= MAX_TOKENS:
            session.append(tokens, branch=branch)
            known.extend(tokens)

    @rule(number=ANY, tokens=FEW_TOKENS)
    def forward(self, number, tokens):
        session, branch, known = self.pick(number)
        if not known + tokens or len(known) + len(tokens) > MAX_TOKENS:
            return
        logits = self.attempt(lambda: session.forward(tokens, branch=branch))
        if logits is not None:
            known.extend(tokens)
            expected = cold(known)[-max(len(tokens), 1) :]
            assert torch.allclose(logits, expected, atol=TOLERANCE)
            assert session.branch(branch).num_pending == 0

    @rule(number=ANY, num_tokens=st.integers(1, 5))
    def generate(self, number, num_tokens):
        session, branch, known = self.pick(number)
        if not known or len(known) + num_tokens > MAX_TOKENS:
            return
        sampled = self.attempt(lambda: session.generate(branch=branch, max_new_tokens=num_tokens, do_sample=False))
        if sampled is None:
            del known[:]
            known.extend(session.branch(branch).tokens)  # what it had sampled before it was refused is kept
            return
        for token in sampled.tokens:
            scores = cold(known)[-1]
            assert scores[token] >= scores.max() - TOLERANCE
            known.append(token)
        assert session.branch(branch).num_pending == 1

    @rule(number=ANY, tokens=FEW_TOKENS)
    def feed_through_a_cache(self, number, tokens):
        session, branch, known = self.pick(number)
        if not tokens or len(known) + len(tokens) > MAX_TOKENS:
            return

        def loop():
            with session.cache(branch=branch) as cache, torch.no_grad():
                fed = [*session.branch(branch).pending, *tokens]
                return MODEL(torch.tensor([fed]), cache=cache).logits[0]

        logits = self.attempt(loop)
        if logits is not None:
            known.extend(tokens)
            assert torch.allclose(logits[-1], cold(known)[-1], atol=TOLERANCE)

    @rule(number=ANY)
    def fork_here(self, number):
        session, branch, known = self.pick(number)
        if len(self.model[session.name]) < 6:
            name = self.fresh_name("b")
            session.fork(name, branch=branch)
            self.model[session.name][name] = list(known)

    @precondition(lambda self: self.points)
    @rule(number=ANY)
    def fork_at_a_checkpoint(self, number):
        name, point, tokens = self.points[number % len(self.points)]
        if len(self.model[name]) < 6:
            branch = self.fresh_name("b")
            self.sessions[name].fork(branch, at=point)
            self.model[name][branch] = list(tokens)

    @rule(number=ANY)
    def switch(self, number):
        session, branch, known = self.pick(number)
        if self.attempt(lambda: session.switch(branch)) is not None:
            assert session.active.name == branch
            assert session.report.num_tokens == len(known)

    @rule(number=ANY, num_tokens=ANY)
    def rewind(self, number, num_tokens):
        session, branch, known = self.pick(number)
        num_tokens %= len(known) + 1
        if self.attempt(lambda: session.rewind(tokens=num_tokens, branch=branch) or True):
            del known[len(known) - num_tokens :]

    @precondition(lambda self: self.points)
    @rule(number=ANY, which=ANY)
    def rewind_to_a_checkpoint(self, number, which):
        session, branch, known = self.pick(number)
        name, point, tokens = self.points[which % len(self.points)]
        if name != session.name:
            return
        try:
            session.rewind(point, branch=branch)
        except InvalidInputError:
            return  # the branch does not pass through it
        except CapacityError:
            assert self.is_tight
            return
        assert known[: len(tokens)] == tokens
        del known[len(tokens) :]

    @rule(number=ANY)
    def checkpoint(self, number):
        session, branch, known = self.pick(number)
        if known:
            point = self.attempt(lambda: session.checkpoint(branch=branch))
            if point is not None:
                self.points.append((session.name, point, list(known)))
                assert point.num_tokens == len(known)
                assert point.num_pending <= 1

    @rule(number=ANY)
    def drop(self, number):
        session, branch, _ = self.pick(number)
        if branch != session.active.name:
            session.drop(branch)
            del self.model[session.name][branch]

    @rule(number=ANY)
    def evict(self, number):
        session, branch, _ = self.pick(number)
        session.evict(branch)

    @rule()
    def flush(self):
        self.store.flush()

    # -- another process

    @rule(with_gc=st.booleans())
    def reopen(self, with_gc):
        self.pending = {
            (name, branch): session.branch(branch).num_pending
            for name, session in self.sessions.items()
            for branch in session.branches
        }
        self.store.close()
        self.look_into_the_store()
        if with_gc:
            self.collect()
            self.look_into_the_store()
        self.store = self.open()
        for name in self.sessions:
            self.sessions[name] = self.resume(name)

    def resume(self, name):
        """Resume a session; without damage, no full block that was computed is lost."""
        for branch in self.model[name]:
            session = self.attempt(lambda branch=branch: self.store.resume(name, branch=branch))
            if session is None:
                session = self.store._sessions[name]
            elif not self.is_damaged:
                report = session.report
                if self.has_far_tier and report.reason is Reason.FASTER:
                    continue
                assert report.reason in {Reason.COMPLETE, Reason.NOT_SAVED}
                assert report.num_pending - self.pending[name, branch] < self.config.block_size
        return session

    def look_into_the_store(self):
        with Environment.open(self.folder / "store") as environment:
            report = check(environment, DiskTier(environment), read_data=True)
        kinds = {problem.kind for problem in report.problems}
        assert not kinds or (self.is_damaged and kinds <= {"damaged"}), report.problems
        assert report.num_branches == sum(len(branches) for branches in self.model.values())

    def collect(self):
        """Remove what nothing reaches; checkpoints that no branch passes through are gone then."""
        with Environment.open(self.folder / "store") as environment:
            catalog = Catalog()
            collect(environment, catalog, DiskTier(environment), grace_s=0.0, now_s=FAR_FUTURE_S)
            with environment.read() as txn:
                left = {
                    checkpoint.checkpoint_id
                    for session in catalog.sessions(txn, [])
                    for checkpoint in catalog.checkpoints(txn, session.session_id, [])
                }
        self.points = [entry for entry in self.points if entry[1].checkpoint_id in left]

    @rule(number=ANY)
    def damage_a_block(self, number):
        self.store.close()
        with Environment.open(self.folder / "store") as environment:

            def flip(txn):
                rows = [(key, BlockInfo.unpack(value, key)) for key, value in txn.scan(Table.BINDEX)]
                rows = [(key, info) for key, info in rows if not info.is_below]
                if rows:
                    _, info = rows[number % len(rows)]
                    chunk_key = struct.pack(">QH", info.block_id, 0)
                    chunk = bytearray(txn.get_view(Table.BLOCKS, chunk_key))
                    chunk[number % info.stored_nbytes] ^= 0x10
                    txn.put_raw(Table.BLOCKS, [(chunk_key, chunk)])

            environment.submit(flip, level=Level.DURABLE).result()
        self.is_damaged = True
        self.store = self.open()
        for name in self.sessions:
            self.sessions[name] = self.resume(name)

    # -- always

    @invariant()
    def every_branch_has_its_tokens(self):
        for name, branches in self.model.items():
            session = self.sessions[name]
            assert {branch: session.branch(branch).tokens for branch in session.branches} == branches

    @invariant()
    def the_budget_holds(self):
        budget = self.config.device_budget_nbytes
        assert budget is None or self.store.stats()["device_nbytes"] <= budget

    def teardown(self):
        try:
            self.store.close()
            self.look_into_the_store()
        finally:
            logging.getLogger("agentmem").setLevel(logging.NOTSET)
            shutil.rmtree(self.folder)


class FarStoreAndDict(StoreAndDict):
    """The same with a tier below the disk, to which sessions sink; their KV is loaded from there, raced or computed."""

    has_far_tier = True

    @rule(number=ANY, is_lazy=st.booleans())
    def sink(self, number, is_lazy):
        session, _, _ = self.pick(number)
        name = session.name
        self.pending = {(name, branch): session.branch(branch).num_pending for branch in session.branches}
        self.store.offload(name)
        self.store._runtime.blocks.host.clear()
        self.sessions[name] = self.store.resume(name, lazy=True) if is_lazy else self.resume(name)

    @rule(prefill=st.sampled_from([1, 1000, 10**6]), far=st.sampled_from([10**3, 10**6, 10**9]))
    def believe_in_speeds(self, prefill, far):
        for _ in range(30):
            self.store._runtime.blocks.lower.rates.note(PREFILL, prefill, 1.0)
            self.store._runtime.blocks.lower.rates.note("sim", far, 1.0)


class TightStoreAndDict(StoreAndDict):
    """The same on a device that holds about two branches, and a host that holds one."""

    config = agentmem.Config(
        block_size=16, device_budget_nbytes=420 * TOKEN_NBYTES, host_budget_nbytes=100 * TOKEN_NBYTES
    )
    is_tight = True


BOUNDED = settings(
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    # No shrinking: it makes stores on disk for many minutes. Add Phase.shrink to look into a failure.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
TestStoreAndDict = pytest.mark.slow(StoreAndDict.TestCase)
TestStoreAndDict.settings = BOUNDED
TestTightStoreAndDict = pytest.mark.slow(TightStoreAndDict.TestCase)
TestTightStoreAndDict.settings = BOUNDED
TestFarStoreAndDict = pytest.mark.slow(FarStoreAndDict.TestCase)
TestFarStoreAndDict.settings = BOUNDED
