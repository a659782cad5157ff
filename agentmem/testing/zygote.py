"""A process that imports torch once and forks workers, which tests kill, starve or watch in the middle of their work.

A file that is run as a script calls `serve`; the test starts that file as a `Zygote`.
"""

import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a worker that was waited for ended.

    Attributes:
        signal: The name of the signal that ended it, "" when it ended by itself; SIGALRM: it took too long.
        value: What the work returned; None when it raised.
        error: The traceback of what it raised, "" for nothing.
    """

    signal: str
    value: Any
    error: str

    def result(self) -> Any:
        """Return what the work returned.

        Raises:
            RuntimeError: It raised something, or a signal ended it.
        """
        if self.error or self.signal:
            raise RuntimeError(f"the worker ended with {self.signal or self.error}")
        return self.value


class Zygote:
    """The process, as the test sees it."""

    def __init__(self, script: str, *, preload: Path | None = None) -> None:
        """Start `script`, which calls `serve`, with a library loaded before all others."""
        environment = {**os.environ, **({} if preload is None else {"LD_PRELOAD": str(preload)})}
        self.process = subprocess.Popen(  # noqa: S603 - the test's own file
            [sys.executable, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )
        if self._read() != "ready":
            raise RuntimeError(f"{script} did not come up")

    def start(self, *arguments: object) -> int:
        """Fork a worker that is called with `arguments`, which JSON can hold; return its process id."""
        self._send({"arguments": arguments, "limit_s": 0})
        return int(self._read())

    def run(self, *arguments: object, limit_s: int = 120) -> Ending:
        """Fork a worker and wait for its end; it is killed after `limit_s` seconds."""
        self._send({"arguments": arguments, "limit_s": limit_s})
        return Ending(**json.loads(self._read()))

    def close(self) -> None:
        """End the process; its workers live on."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.wait(timeout=60)

    def _send(self, request: dict[str, object]) -> None:
        if self.process.stdin is None:
            raise RuntimeError("the process has no standard input")
        self.process.stdin.write(json.dumps(request) + "\n")

    def _read(self) -> str:
        return "" if self.process.stdout is None else self.process.stdout.readline().strip()


def kill(process_id: int) -> None:
    """Kill a worker, and return when it is gone with all its locks; it may have ended by itself."""
    try:
        descriptor = os.pidfd_open(process_id)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [])
    finally:
        os.close(descriptor)


def serve(work: Callable[..., object]) -> None:
    """Fork a worker for each line of standard input; say "ready", and each worker's process id or ending."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _say("ready")
    for line in sys.stdin:
        request = json.loads(line)
        if request["limit_s"]:
            _say(_run(work, request["arguments"], request["limit_s"]))
        else:
            _say(str(_start(work, request["arguments"])))


def _start(work: Callable[..., object], arguments: list[Any]) -> int:
    process_id = os.fork()
    if not process_id:
        try:
            work(*arguments)
        finally:
            os._exit(1)
    return process_id


def _run(work: Callable[..., object], arguments: list[Any], limit_s: int) -> str:
    """Run a worker to its end; return the ending as JSON."""
    receiver, sender = os.pipe()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored children leave no status
    process_id = os.fork()
    if not process_id:
        _work_and_tell(work, arguments, limit_s, sender)
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        told = json.loads(pipe.read() or "{}")
    status = os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    name = signal.Signals(-status).name if status < 0 else ""
    return json.dumps({"signal": name, "value": None, "error": "", **told})


def _work_and_tell(work: Callable[..., object], arguments: list[Any], limit_s: int, sender: int) -> None:
    """What the child does: it never returns."""
    try:
        signal.alarm(limit_s)
        told = {"value": work(*arguments)}
    except BaseException:  # noqa: BLE001 - the test looks at whatever it is
        told = {"error": traceback.format_exc()}
    signal.alarm(0)
    with os.fdopen(sender, "w") as pipe:
        pipe.write(json.dumps(told))
    os._exit(0)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
