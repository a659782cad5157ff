"""Trails against plain lists."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from agentmem.tree.trail import Trail

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def trail_of(items):
    return Trail(array("I", items))


class TrailsAndLists(RuleBasedStateMachine):
    """Every trail beside a list that went through the same."""

    trails = Bundle("trails")

    def __init__(self):
        super().__init__()
        self.pairs = []

    @rule(target=trails, items=TOKENS)
    def create(self, items):
        self.pairs.append((trail_of(items), list(items)))
        return self.pairs[-1]

    @rule(target=trails, pair=trails)
    def fork(self, pair):
        trail, items = pair
        self.pairs.append((trail.fork(), list(items)))
        return self.pairs[-1]

    @rule(pair=trails, items=TOKENS)
    def extend(self, pair, items):
        pair[0].extend(items)
        pair[1].extend(items)

    @rule(pair=trails, data=st.data())
    def truncate(self, pair, data):
        trail, items = pair
        length = data.draw(st.integers(0, len(items)))
        trail.truncate(length)
        del items[length:]

    @rule(pair=trails, start=st.integers(0, 60), stop=st.integers(0, 60) | st.none())
    def slice(self, pair, start, stop):
        trail, items = pair

        assert trail.slice(start, stop) == items[start:stop]

    @rule(one=trails, other=trails)
    def common_prefix_is_symmetric_and_never_too_long(self, one, other):
        common = one[0].common_prefix(other[0])

        assert common == other[0].common_prefix(one[0])
        assert one[1][:common] == other[1][:common]

    @invariant()
    def every_trail_equals_its_list(self):
        for trail, items in self.pairs:
            assert list(trail) == items
            assert len(trail) == len(items)
            assert [trail[index] for index in (0, -1) if items] == [items[index] for index in (0, -1) if items]


TestTrailsAndLists = TrailsAndLists.TestCase


@given(shared=TOKENS, mine=TOKENS, theirs=TOKENS)
def test_common_prefix_of_forks_is_what_they_shared_when_they_parted(shared, mine, theirs):
    one = trail_of(shared)
    other = one.fork()
    one.extend(mine)
    other.extend(theirs)

    assert one.common_prefix(other) == len(shared)


@given(shared=TOKENS, data=st.data())
def test_common_prefix_after_a_rewind_ends_where_the_rewind_ended(shared, data):
    length = data.draw(st.integers(0, len(shared)))
    one = trail_of(shared)
    other = one.fork()
    other.truncate(length)
    other.extend([7, 7, 7])

    assert one.common_prefix(other) == length


def test_common_prefix_with_a_stranger_of_equal_items_is_zero():
    assert trail_of([1, 2, 3]).common_prefix(trail_of([1, 2, 3])) == 0


@pytest.mark.parametrize("length", [-1, 4])
def test_truncate_refuses_a_length_outside(length):
    trail = trail_of([1, 2, 3])

    with pytest.raises(ValueError, match="cannot truncate 3 items"):
        trail.truncate(length)


@pytest.mark.parametrize("index", [3, -4])
def test_an_index_outside_is_an_index_error(index):
    trail = trail_of([1, 2, 3])

    with pytest.raises(IndexError):
        trail[index]


def test_ten_thousand_forks_in_a_row_are_read_without_recursion():
    trail = trail_of([0])
    for token in range(1, 10_000):
        other = trail.fork()
        trail.extend([token])
        other.extend([0])
        trail = trail.fork()

    assert trail.slice() == list(range(10_000))
