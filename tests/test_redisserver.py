"""Whatever answers in the place of a Redis server: bounded time and memory, and an error with a name."""

import contextlib
import socket
import threading
import time

import pytest

from agentmem.errors import TierUnavailableError
from agentmem.testing.record_tier_suite import ABSENT
from agentmem.tiers.pool import PoolTier
from agentmem.tiers.redisserver import Patience


class Stranger:
    """A server that gives each of two connections one answer, whatever it is asked, and counts what was taken."""

    def __init__(self, answer):
        self.num_sent = 0
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with self._listener:
            for _ in range(2):
                connection = self._listener.accept()[0]
                with connection, contextlib.suppress(OSError):
                    connection.recv(1 << 16)
                    for _ in range(4000 if b"..." in self._answer else 1):
                        connection.sendall(self._answer.replace(b"...", b"x" * (1 << 16)))
                        self.num_sent += 1 << 16


def ask(stranger):
    """Ask for a block, and return the seconds that it took to fail."""
    tier = PoolTier(f"redis://127.0.0.1:{stranger.port}", patience=Patience(idle_s=1.0))
    start_s = time.monotonic()
    with pytest.raises(TierUnavailableError, match=r"pool redis://127\.0\.0\.1"):
        tier.fetch_many([ABSENT])
    return time.monotonic() - start_s


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
        b"+PONG\r\n",
        b"*1\r\n:1\r\n",
        b"*-5\r\n",
        b":x\r\n",
        b"$-7\r\n",
        b"*1\r\n" * 5000,
        b"-ERR what?\r\n",
        b"-LOADING wait\r\n",
        b"-READONLY I am a replica\r\n",
        b"\r\n",
        b"",
    ],
)
def test_an_answer_that_makes_no_sense_is_a_named_error_in_bounded_time(answer):
    assert ask(Stranger(answer)) < 5.0


@pytest.mark.parametrize("answer", [b"$99999999999\r\n...", b"..."])
def test_an_answer_without_an_end_is_not_taken_in(answer):
    stranger = Stranger(answer)

    assert ask(stranger) < 5.0
    assert stranger.num_sent < 32 << 20  # of 262 MB; the kernel's buffers take some
