"""A server that fails is left alone for a pause that doubles, and tried once a pause. Under a fake clock."""

import pytest

from agentmem.errors import CorruptionError, TierUnavailableError
from agentmem.tiers.breaker import Breaker


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Server:
    """Something to call through a breaker."""

    def __init__(self):
        self.clock = Clock()
        self.breaker = Breaker("the server", clock=self.clock, max_failures=3, pause_s=1.0, max_pause_s=8.0)
        self.is_up = True
        self.num_calls = 0

    def call(self):
        with self.breaker.guard():
            self.num_calls += 1
            if not self.is_up:
                raise TierUnavailableError("connection refused")

    def is_called(self, after_s=0.0):
        """Wait, call, and say whether the call reached the server."""
        self.clock.now_s += after_s
        before = self.num_calls
        try:
            self.call()
        except TierUnavailableError:
            return self.num_calls > before
        return True


@pytest.fixture
def server():
    return Server()


def give_up(server):
    server.is_up = False
    for _ in range(3):
        assert server.is_called()


def test_calls_go_through_while_the_server_answers(server):
    assert all(server.is_called() for _ in range(10))
    assert not server.breaker.is_open


def test_failures_in_a_row_open_the_breaker_and_the_next_call_is_refused_with_the_reason(server):
    give_up(server)

    with pytest.raises(TierUnavailableError, match=r"the server is left alone for 1\.0 s more.*connection refused"):
        server.call()
    assert server.breaker.is_open
    assert (server.num_calls, server.breaker.num_failed, server.breaker.num_skipped) == (3, 3, 1)
    assert server.breaker.num_opened == 1


def test_failures_that_are_not_in_a_row_do_not_open_it(server):
    for _ in range(5):
        server.is_up = False
        server.is_called()
        server.is_called()
        server.is_up = True
        server.is_called()

    assert not server.breaker.is_open


def test_one_call_a_pause_tries_the_server(server):
    give_up(server)

    assert not server.is_called(after_s=0.9)
    assert server.is_called(after_s=0.2)
    assert not server.is_called()


def test_the_pause_doubles_up_to_its_maximum_while_the_server_stays_away(server):
    give_up(server)
    pauses = []

    for _ in range(6):
        waited_s = 0
        while not server.is_called(after_s=0.5):
            waited_s += 0.5
        pauses.append(waited_s + 0.5)

    assert pauses == [1, 2, 4, 8, 8, 8]
    assert server.breaker.num_opened == 1


def test_a_try_that_succeeds_closes_it_and_the_pause_starts_anew(server):
    give_up(server)
    server.is_called(after_s=1.0)
    server.is_up = True

    assert server.is_called(after_s=2.0)
    assert not server.breaker.is_open
    assert server.is_called()
    give_up(server)
    assert not server.is_called(after_s=0.9)
    assert server.is_called(after_s=0.2)


def test_a_try_that_was_interrupted_leaves_the_next_one_after_a_pause(server):
    give_up(server)
    server.clock.now_s += 1.0

    with pytest.raises(KeyboardInterrupt), server.breaker.guard():
        raise KeyboardInterrupt

    assert not server.is_called()
    assert server.is_called(after_s=1.0)


def test_other_errors_say_nothing_of_the_server(server):
    for _ in range(5):
        with pytest.raises(CorruptionError), server.breaker.guard():
            raise CorruptionError("a damaged block")

    assert not server.breaker.is_open
    assert server.breaker.num_failed == 0
