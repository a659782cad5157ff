"""The workspace of the hot tier against plain lists: any order of appends, forks, rewinds, switches and drops.

Every token has a value of its own, so that a slot that is overwritten, lost or mixed up is seen at once.
"""

import itertools
import sys
import threading

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentmem.errors import CapacityError, NotFoundError
from agentmem.kv.spec import KVSpec, LayerGroup, LayerKind, LayerSpec
from agentmem.tiers.device import GRANULE, KEEP_COPY_TOKENS, DeviceTier, Workspace, empty_sections
from agentmem.tiers.runs import Cursor

SPEC = KVSpec(
    layers=tuple(
        LayerSpec(kind=LayerKind.FULL, group=group, row=row) for group, rows in ((0, 2), (1, 1)) for row in range(rows)
    ),
    groups=(
        LayerGroup(num_layers=2, num_heads=1, key_dim=1, value_dim=2),
        LayerGroup(num_layers=1, num_heads=2, key_dim=1, value_dim=1),
    ),
    dtype="float32",
    block_size=16,
)
SHORT = st.integers(1, 40)
LONG = st.integers(KEEP_COPY_TOKENS - 2, KEEP_COPY_TOKENS + 40)
ANY = st.integers(0, 1000)


def device_tier(budget_tokens=None):
    budget = None if budget_tokens is None else budget_tokens * SPEC.token_nbytes
    return DeviceTier(SPEC, torch.device("cpu"), budget)


def write(workspace, start, values):
    """Put one value per token into every section, as the layers of a model would."""
    row = torch.tensor(values, dtype=torch.float32).view(1, 1, -1, 1)
    for slot in workspace.slots(start, start + len(values)):
        slot.copy_(row.expand_as(slot))


def append(workspace, cursor, values):
    write(workspace, workspace.begin(cursor, len(values)), values)
    workspace.commit(cursor, len(values))


def read(workspace, cursor):
    """Return the value of each token of the cursor's path; every section must agree."""
    sections = empty_sections(SPEC, cursor.length)
    for section in sections:
        section.fill_(-1)
    workspace.gather(cursor, 0, cursor.length, sections)
    values = sections[0][0, 0, :, 0]
    assert all(torch.equal(section, values.view(1, 1, -1, 1).expand_as(section)) for section in sections)
    return [int(value) for value in values]


class CursorsAndLists(RuleBasedStateMachine):
    """Every cursor beside the list of its tokens' values."""

    budget_tokens = None

    def __init__(self):
        super().__init__()
        self.tier = device_tier(self.budget_tokens)
        self.workspace = Workspace(self.tier)
        self.cursors = [(Cursor(None, 0), [])]
        self.values = itertools.count(1)

    def pick(self, index):
        return index % len(self.cursors)

    @rule(index=ANY, num_tokens=st.one_of(SHORT, SHORT, LONG))
    def grow(self, index, num_tokens):
        cursor, values = self.cursors[self.pick(index)]
        fresh = list(itertools.islice(self.values, num_tokens))
        append(self.workspace, cursor, fresh)
        values.extend(fresh)

    @rule(index=ANY, num_tokens=SHORT)
    def abort_a_pass(self, index, num_tokens):
        cursor, _ = self.cursors[self.pick(index)]
        write(self.workspace, self.workspace.begin(cursor, num_tokens), [-2] * num_tokens)

    @rule(index=ANY)
    def switch(self, index):
        cursor, values = self.cursors[self.pick(index)]
        moved = self.workspace.select(cursor)
        assert 0 <= moved <= len(values)
        assert [int(slot) for slot in self.layer(len(values))] == values

    @rule(index=ANY, length=ANY)
    def fork(self, index, length):
        cursor, values = self.cursors[self.pick(index)]
        length %= len(values) + 1
        self.cursors.append((cursor.fork(length), values[:length]))

    @rule(index=ANY, length=ANY)
    def rewind(self, index, length):
        position = self.pick(index)
        cursor, values = self.cursors[position]
        length %= len(values) + 1
        self.cursors[position] = (cursor.fork(length), values[:length])

    @rule()
    def start_anew(self):
        self.cursors.append((Cursor(None, 0), []))

    @precondition(lambda self: len(self.cursors) > 1)
    @rule(index=ANY)
    def drop(self, index):
        del self.cursors[self.pick(index)]

    @invariant()
    def every_cursor_still_reads_its_own_tokens(self):
        for cursor, values in self.cursors:
            assert cursor.length == len(values)
            assert read(self.workspace, cursor) == values

    def layer(self, num_tokens):
        return self.workspace.layers[0][0][0, 0, :num_tokens, 0] if num_tokens else []

    def teardown(self):
        self.cursors.clear()
        buffer = self.workspace.storage
        self.workspace.begin(Cursor(None, 0), 1)
        assert self.tier.nbytes == self.workspace.storage.nbytes
        del buffer
        self.workspace.clear()
        assert self.tier.nbytes == 0


class CursorsWithinABudget(CursorsAndLists):
    """The same with a budget that does not hold everything: a refused operation changes nothing."""

    budget_tokens = 600

    @rule(index=ANY, num_tokens=st.one_of(SHORT, LONG))
    def grow(self, index, num_tokens):
        cursor, values = self.cursors[self.pick(index)]
        fresh = list(itertools.islice(self.values, num_tokens))
        try:
            append(self.workspace, cursor, fresh)
        except CapacityError:
            return
        values.extend(fresh)

    @rule(index=ANY, num_tokens=SHORT)
    def abort_a_pass(self, index, num_tokens):
        cursor, _ = self.cursors[self.pick(index)]
        try:
            first = self.workspace.begin(cursor, num_tokens)
        except CapacityError:
            return
        write(self.workspace, first, [-2] * num_tokens)

    @rule(index=ANY)
    def switch(self, index):
        cursor, values = self.cursors[self.pick(index)]
        try:
            self.workspace.select(cursor)
        except CapacityError:
            return
        assert [int(slot) for slot in self.layer(len(values))] == values

    @invariant()
    def the_budget_holds(self):
        assert self.tier.nbytes <= self.tier.budget_nbytes


def test_tokens_beyond_a_cursor_are_refused_rather_than_left_to_chance():
    workspace = Workspace(device_tier())
    cursor = Cursor(None, 0)
    append(workspace, cursor, list(range(20)))

    with pytest.raises(NotFoundError, match="21"):
        workspace.gather(cursor, 16, 21, empty_sections(SPEC, 5))
    with pytest.raises(NotFoundError):
        workspace.gather(cursor.fork(10), 8, 12, empty_sections(SPEC, 4))


def test_a_fork_copies_nothing_and_a_diverging_branch_moves_only_what_others_need():
    tier = device_tier()
    workspace = Workspace(tier)
    trunk = Cursor(None, 0)
    append(workspace, trunk, list(range(100)))
    buffer_nbytes = tier.nbytes

    other = trunk.fork()
    append(workspace, trunk, [1000] * 10)
    before_divergence = tier.nbytes
    append(workspace, other, [2000])

    moved = -(-10 // GRANULE) * GRANULE * SPEC.token_nbytes
    assert before_divergence == buffer_nbytes
    assert tier.nbytes == buffer_nbytes + moved
    assert read(workspace, trunk) == [*range(100), *[1000] * 10]


def test_the_bytes_in_use_can_be_asked_for_while_other_threads_allocate():
    tier = device_tier(budget_tokens=GRANULE * 50)
    errors, interval = [], sys.getswitchinterval()

    def work():
        kept = []
        try:
            for _ in range(300):
                try:
                    kept.append(tier.allocate(GRANULE))
                except CapacityError:
                    kept.clear()
                assert tier.nbytes <= tier.budget_nbytes
        except (RuntimeError, AssertionError) as error:
            errors.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)

    assert errors == []
    assert tier.nbytes == 0


TestCursorsAndLists = CursorsAndLists.TestCase
TestCursorsAndLists.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCursorsWithinABudget = CursorsWithinABudget.TestCase
TestCursorsWithinABudget.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
