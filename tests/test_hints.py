"""Hints: what is said and learned of next uses, and the order in which keys leave by it."""

import math
import threading

import pytest

from agentmem.errors import InvalidInputError
from agentmem.tiers.hints import FIRST_CALL_S, NEVER, PATIENCE_S, SLACK, Hints
from agentmem.tiers.policy import Candidate, eviction_order


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def hints(clock):
    return Hints(clock=clock)


def leaving(hints, *keys):
    return eviction_order(Candidate(key=key, last_used=0, priority=hints.priority(key)) for key in keys)


def test_without_a_word_the_least_recently_used_leaves_first(hints, clock):
    for key in "bca":
        hints.use(key)
        clock.now_s += 1

    assert leaving(hints, "a", "b", "c") == ["b", "c", "a"]


def test_where_hints_know_no_difference_the_number_of_the_last_use_decides():
    candidates = [Candidate(key="a", last_used=2), Candidate(key="b", last_used=1)]

    assert eviction_order(candidates) == ["b", "a"]
    assert eviction_order([*candidates, Candidate(key="c", last_used=0, is_pinned=True)]) == ["b", "a"]


def test_the_one_that_is_due_last_leaves_first_and_never_is_later_than_unknown(hints, clock):
    for key in "abcd":
        hints.use(key)
    hints.hint("a", at_s=clock.now_s + 5)
    hints.hint("b", at_s=clock.now_s + 50)
    hints.hint("c", never=True)

    assert leaving(hints, *"abcd") == ["c", "d", "b", "a"]
    assert hints.priority("c") == NEVER


def test_steps_count_down_while_others_take_their_turns(hints, clock):
    for key in "abc":
        hints.use(key)
        clock.now_s += 2
    hints.hint("a", steps=3)

    before = hints.priority("a")
    for key in "bbc":
        hints.use(key)
        clock.now_s += 2

    assert before == -6.0
    assert hints.priority("a") == pytest.approx(-2.0, rel=0.15)


def test_steps_keep_their_order_on_a_clock_that_stands(hints):
    for key in "abc":
        hints.use(key)
    hints.hint("a", steps=2)
    hints.hint("b", steps=1)

    assert leaving(hints, "b", "a") == ["a", "b"]


def test_a_use_makes_an_old_hint_void(hints):
    hints.hint("a", never=True)
    hints.use("a")

    assert hints.priority("a") == -PATIENCE_S


def test_a_look_does_not_make_a_hint_void(hints):
    hints.hint("a", never=True)
    hints.touch("a")

    assert hints.priority("a") == NEVER


def test_a_due_time_that_has_passed_fades_like_a_use(hints, clock):
    hints.hint("a", at_s=clock.now_s + 10)

    clock.now_s += 10
    due = hints.priority("a")
    clock.now_s += 40

    assert (due, hints.priority("a")) == (0.0, -40.0)


def test_what_several_share_is_needed_when_the_first_of_them_is(hints, clock):
    hints.hint("a", never=True)
    hints.hint("b", at_s=clock.now_s + 7)

    assert hints.shared_priority(["a", "b"]) == -7.0
    assert hints.shared_priority([]) == NEVER


def test_a_tool_call_pins_until_it_takes_too_long(hints, clock):
    hints.use("waits")
    hints.start_call("waits", "pytest", expect_s=10)
    clock.now_s += 1
    hints.use("idle")

    pinned = leaving(hints, "waits", "idle"), hints.is_pinned("waits")
    clock.now_s += 10 * SLACK
    expired = leaving(hints, "waits", "idle"), hints.is_pinned("waits")

    assert pinned == (["idle", "waits"], True)
    assert expired == (["waits", "idle"], False)


def test_no_pin_outlasts_patience(hints, clock):
    hints.start_call("a", "person", expect_s=86_400)

    assert hints.priority("a") == -PATIENCE_S
    clock.now_s += PATIENCE_S
    assert not hints.is_pinned("a")


def test_the_durations_of_a_tool_are_learned(hints, clock):
    for took_s in (8.0, 9.0, 30.0):
        hints.start_call("a", "pytest")
        clock.now_s += took_s
        hints.end_call("a")
    hints.start_call("a", "pytest")

    at_once = hints.priority("a")
    clock.now_s += 10
    later = hints.priority("a")

    assert (at_once, later) == (-9.0, -20.0), "the median of all, then of those that take longer than 10 s"
    assert hints.is_pinned("a")


def test_the_first_call_of_a_tool_is_waited_for_a_little(hints, clock):
    hints.start_call("a", "unheard of")

    assert hints.priority("a") == -FIRST_CALL_S
    clock.now_s += FIRST_CALL_S * SLACK
    assert not hints.is_pinned("a")


def test_after_its_call_a_key_is_expected_at_once(hints, clock):
    hints.start_call("a", "shell")
    clock.now_s += 2
    hints.end_call("a")
    hints.end_call("a")

    assert hints.priority("a") == 0.0


def test_what_is_forgotten_is_as_if_it_had_never_been(hints, clock):
    hints.use("a")
    hints.hint("a", never=True)
    hints.start_call("a", "shell")
    clock.now_s += 5
    hints.forget("a")

    assert hints.priority("a") == hints.priority("unheard of") == -PATIENCE_S - 5
    assert not hints.is_pinned("a")


def test_tools_and_durations_take_bounded_memory(hints, clock):
    for number in range(1000):
        hints.start_call("a", f"tool-{number}")
        clock.now_s += 50
        hints.end_call("a")
    hints.start_call("old", "tool-0")
    hints.start_call("new", "tool-999")

    assert (hints.priority("old"), hints.priority("new")) == (-FIRST_CALL_S, -50.0)


@pytest.mark.parametrize(
    "said", [{}, {"steps": 1, "never": True}, {"steps": -1}, {"at_s": math.nan}, {"at_s": math.inf}, {"never": False}]
)
def test_a_hint_that_says_nothing_or_too_much_is_refused(hints, said):
    with pytest.raises(InvalidInputError, match="a hint says one thing"):
        hints.hint("a", **said)


@pytest.mark.parametrize("expect_s", [-1.0, math.nan, math.inf])
def test_a_call_that_takes_no_time_is_refused(hints, expect_s):
    with pytest.raises(InvalidInputError, match="'shell'"):
        hints.start_call("a", "shell", expect_s=expect_s)


def test_many_threads_may_use_and_ask_at_once(hints):
    keys = [str(number) for number in range(50)]
    failures = []

    def work() -> None:
        try:
            for key in keys * 20:
                hints.use(key)
                hints.hint(key, steps=3)
                hints.start_call(key, "shell")
                hints.shared_priority(keys)
                hints.forget(key)
        except Exception as error:  # noqa: BLE001 - a thread's failure is the test's
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
