"""What a store has acknowledged to its clients, kept outside of it: the measure of what a crash may not take.

A file of lines of JSON that survives a kill of its writer; a last line that was cut off promises nothing.
"""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentmem.tree.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A checkpoint whose making returned.

    Attributes:
        number: Which promise this is, from 1.
        session: The session's name.
        branch: The branch on which it was made.
        checkpoint: Its id, in hex; "" for the session itself.
        tokens: All tokens up to it.
    """

    number: int
    session: str
    branch: str
    checkpoint: str
    tokens: tuple[int, ...]


class PromiseBook:
    """Writes promises down. Thread-safe."""

    def __init__(self, path: Path, mark: Callable[[int], None] = lambda _: None) -> None:
        """Continue the file at `path`; `mark` is told each number once it is promised."""
        self._path = path
        self._mark = mark
        self._lock = threading.Lock()
        self._number = max((promise.number for promise in read(path)), default=0)

    def promise(self, session: str, branch: str, checkpoint: Checkpoint | None, tokens: Sequence[int]) -> None:
        """Note a checkpoint that is durable by now; None: the session itself."""
        with self._lock:
            self._number += 1
            name = "" if checkpoint is None else checkpoint.checkpoint_id.hex()
            self._add({"number": self._number, "session": session, "branch": branch, "checkpoint": name}, tokens)
            self._mark(self._number)

    def withdraw(self, session: str, branch: str) -> None:
        """Take back what was promised of a branch, before it is dropped."""
        with self._lock:
            self._add({"withdrawn": self._number, "session": session, "branch": branch}, ())

    def _add(self, fields: dict[str, object], tokens: Sequence[int]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({**fields, "tokens": list(tokens)}) + "\n")


def read(path: Path, until: int | None = None) -> list[Promise]:
    """Return the promises in force, oldest first; with `until`, those up to that number.

    What was withdrawn later than `until` is withdrawn too: the drop may have been on its way.
    """
    if not path.exists():
        return []
    promises: list[Promise] = []
    for line in path.read_text().split("\n")[:-1]:
        fields = json.loads(line)
        if "withdrawn" in fields:
            gone = (fields["session"], fields["branch"])
            promises = [promise for promise in promises if (promise.session, promise.branch) != gone]
        else:
            promises.append(Promise(**{**fields, "tokens": tuple(fields["tokens"])}))
    return [promise for promise in promises if until is None or promise.number <= until]
