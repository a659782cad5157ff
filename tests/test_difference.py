"""How two token sequences differ: every kind of change once, with exact numbers, and long ones compared fast."""

import json
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentmem.explain.difference import common_prefix, compare
from agentmem.kv.hashing import pack_tokens
from agentmem.reasons import Reason

STORED = list(range(100, 300))
FAST_S = 1.0


def difference(stored, asked, decode=None):
    old, new = pack_tokens(stored), pack_tokens(asked)
    return compare(old, new, common_prefix(old, new), decode)


def numbers(found):
    return (
        found.change,
        found.position,
        found.num_removed,
        found.num_inserted,
        found.num_equal_after,
        found.num_differences,
    )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (STORED, (Reason.IDENTICAL, 200, 0, 0, 0, 0)),
        ([*STORED, 7, 8], (Reason.EXTENDS, 200, 0, 0, 0, 0)),
        (STORED[:150], (Reason.SHORTER, 150, 0, 0, 0, 0)),
        ([*STORED[:50], 7, 8, *STORED[50:]], (Reason.INSERTED, 50, 0, 2, 150, 1)),
        ([7, *STORED], (Reason.INSERTED, 0, 0, 1, 200, 1)),
        ([*STORED[:50], *STORED[57:]], (Reason.REMOVED, 50, 7, 0, 143, 1)),
        (STORED[1:], (Reason.REMOVED, 0, 1, 0, 199, 1)),
        ([*STORED[:50], 7, 8, *STORED[51:]], (Reason.REPLACED, 50, 1, 2, 149, 1)),
        ([*STORED[:50], 7, *STORED[51:90], 8, *STORED[90:], 9, 9], (Reason.REPLACED, 50, 1, 1, 149, 2)),
        ([*STORED[:195], 7], (Reason.REPLACED, 195, 5, 1, 0, 1)),
        ([*STORED[:198], 7, STORED[199]], (Reason.REPLACED, 198, 1, 1, 1, 1)),
        ([*STORED[:50], STORED[52], STORED[50], STORED[51], *STORED[53:]], (Reason.REORDERED, 50, 3, 3, 147, 1)),
        ([1, 2, 3], (Reason.NOTHING_IN_COMMON, 0, 200, 3, 0, 1)),
    ],
)
def test_each_kind_of_change_is_told_with_its_numbers(asked, expected):
    assert numbers(difference(STORED, asked)) == expected


def test_an_equal_run_far_behind_a_short_rest_is_found():
    asked = [*STORED[:190], *range(1000, 1400), *STORED[190:], 7]

    assert numbers(difference(STORED, asked)) == (Reason.INSERTED, 190, 0, 400, 10, 1)


def test_templates_between_messages_are_no_meeting():
    between = [1, 2, 3, 4, 5]
    stored = [*STORED[:100], *range(1000, 1100), *between, *range(2000, 2100)]
    asked = [*STORED[:100], *range(3000, 3100), *between, *range(4000, 4100)]

    assert numbers(difference(stored, asked)) == (Reason.REPLACED, 100, 205, 205, 0, 1)


@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, 3), max_size=80))
def test_the_parts_of_a_difference_add_up(stored, asked):
    found = difference(stored, asked)

    start, removed, inserted = found.position, found.num_removed, found.num_inserted
    old, new = stored[start + removed :], asked[start + inserted :]
    assert stored[:start] == asked[:start]
    assert (not stored[start:] or not asked[start:]) == (found.num_differences == 0)
    assert start + inserted + found.num_equal_after <= len(asked)
    assert start + removed + found.num_equal_after <= len(stored)
    assert (found.num_equal_after > 0) == (found.num_differences > 0 and bool(old) and bool(new) and old[0] == new[0])


@given(st.binary(max_size=4000), st.integers(0, 1000), st.booleans())
def test_a_common_prefix_is_counted_as_one_token_after_the_other(data, cut, is_changed):
    data = data[: len(data) // 4 * 4]
    other = bytearray(data[: cut * 4])
    if is_changed and other:
        other[len(other) // 2] ^= 1

    tokens = [data[at : at + 4] == bytes(other[at : at + 4]) for at in range(0, min(len(data), len(other)), 4)]
    assert common_prefix(data, bytes(other)) == next((at for at, same in enumerate(tokens) if not same), len(tokens))


@pytest.mark.parametrize("kind", ["one token more", "another token every 20", "nothing the same", "one token repeated"])
def test_long_sequences_are_compared_in_less_than_a_second_of_one_core(kind):
    stored = [random.randrange(50_000) for _ in range(100_000)]
    asked = {
        "one token more": [*stored[:10], 60_000, *stored[10:]],
        "another token every 20": [60_000 if index % 20 == 10 else token for index, token in enumerate(stored)],
        "nothing the same": [random.randrange(50_000) for _ in range(100_000)],
        "one token repeated": [stored[0], *[7] * 100_000],
    }[kind]

    started_s = time.process_time()
    difference(stored, asked)

    assert time.process_time() - started_s < FAST_S


# -- text


def spelled(words):
    """Return ids and a decoder of a vocabulary of words, each word one token."""
    vocabulary = sorted({word for text in words for word in text})
    return [[vocabulary.index(word) for word in text] for text in words], lambda ids: "".join(
        vocabulary[token] for token in ids
    )


def test_other_tokens_of_the_same_text_are_told_from_other_text():
    (stored, same, other), decode = spelled(
        [
            ["Say ", ".\n\n", "2", ".", " x"],
            ["Say ", ".", "\n\n", "2", ".", " x"],
            ["Say ", "!", "\n\n", "2", ".", " x"],
        ]
    )

    assert numbers(difference(stored, same, decode)) == (Reason.RETOKENISED, 1, 1, 2, 3, 1)
    assert numbers(difference(stored, other, decode)) == (Reason.REPLACED, 1, 1, 2, 3, 1)


def test_a_border_that_text_crosses_in_one_token_is_retokenised():
    (stored, asked), decode = spelled([["Say", " a", "b"], ["Say", " abc", "d"]])

    assert difference(stored, asked, decode).change is Reason.RETOKENISED


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        (
            {"path": "a", "edits": [{"new": "x", "old": "y"}]},
            {"edits": [{"old": "y", "new": "x"}], "path": "a"},
            "reordered",
        ),
        ({"path": "a", "line": 3}, {"line": 3, "path": "b"}, "replaced"),
    ],
)
def test_json_of_the_same_value_is_told_from_other_json(old, new, change):
    texts = [f"Call [tool] {json.dumps(value)} now." for value in (old, new)]
    (stored, asked), decode = spelled([list(text) for text in texts])

    assert difference(stored, asked, decode).change == change
