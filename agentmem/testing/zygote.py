"""A process that imports torch once and forks workers, which tests kill in the middle of their work.

A file that is run as a script calls `serve`; the test starts that file as a `Zygote`.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable


class Zygote:
    """The process, as the test sees it."""

    def __init__(self, script: str) -> None:
        """Start `script`, which calls `serve`."""
        self.process = subprocess.Popen(  # noqa: S603 - the test's own file
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        if self._read() != "ready":
            raise RuntimeError(f"{script} did not come up")

    def start(self, *arguments: object) -> int:
        """Fork a worker that is called with `arguments`, which JSON can hold; return its process id."""
        if self.process.stdin is None:
            raise RuntimeError("the process has no standard input")
        self.process.stdin.write(json.dumps(arguments) + "\n")
        return int(self._read())

    def close(self) -> None:
        """End the process; its workers live on."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.wait(timeout=60)

    def _read(self) -> str:
        return "" if self.process.stdout is None else self.process.stdout.readline().strip()


def serve(work: Callable[..., None]) -> None:
    """Fork a worker for each line of standard input; say "ready" and each worker's process id."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        process_id = os.fork()
        if not process_id:
            try:
                work(*json.loads(line))
            finally:
                os._exit(1)
        sys.stdout.write(f"{process_id}\n")
        sys.stdout.flush()
