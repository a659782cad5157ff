"""A real Redis server for tests: started in a directory, killed, and started again.

Debian's package `redis-server` has the program; `is_installed` says whether it is there.
"""

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

_PROGRAM = "redis-server"
_START_S = 30.0


def is_installed() -> bool:
    """Whether this machine has the program."""
    return shutil.which(_PROGRAM) is not None


class RedisProcess:
    """A server on a port of this machine that keeps everything in memory.

    Attributes:
        port: Its port, the same after every start; 0 for a server that speaks TLS only.
        tls_port: The port for TLS, when it has one.
    """

    def __init__(self, directory: Path, *options: str, has_tls: bool = False) -> None:
        """Start it, with further options as its command line takes them, and wait until it answers.

        Raises:
            RuntimeError: It does not start; the message holds what it said.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.port = 0 if has_tls else _free_port()
        self.tls_port = _free_port() if has_tls else 0
        self._directory = directory
        self._options = options
        self.start()

    def start(self) -> None:
        """Start it, empty, after it was killed."""
        command = [_PROGRAM, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self._directory)]
        command += ["--tls-port", str(self.tls_port)] if self.tls_port else []
        self._log = self._directory / "log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*command, *self._options], stdout=log, stderr=log)  # noqa: S603 - ours
        self._wait_until_it_listens()

    def kill(self) -> None:
        """End it at once, as a power cut would; nothing happens when it has ended."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _wait_until_it_listens(self) -> None:
        stop_s = time.monotonic() + _START_S
        while time.monotonic() < stop_s and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port or self.tls_port), timeout=1.0).close()
            except OSError:
                time.sleep(0.01)
            else:
                return
        self.kill()
        raise RuntimeError(f"{_PROGRAM} does not start: {self._log.read_text(errors='replace')[-2000:]}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
