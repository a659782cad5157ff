"""The library `faults.c` in the hands of a test: build it, preload it, tell it what to break.

Linux with a C compiler only. Knows nothing of what a store is: it sees the files of one directory.
"""

import ctypes
import errno
import os
import shutil
import subprocess
import tempfile
from enum import IntFlag
from pathlib import Path

KILL = -1
"""An error for `Faults.fail`: the process is killed by SIGKILL before the call."""

_SOURCE = Path(__file__).with_name("faults.c")


class Call(IntFlag):
    """What may fail; the values are those of `enum call` in `faults.c`."""

    WRITE = 1
    SYNC = 2
    STATVFS = 4
    MMAP = 8
    TRUNCATE = 16  # and reserving space
    OPEN = 32


def find_compiler() -> str | None:
    """Return the path of a C compiler, None when there is none."""
    return shutil.which(os.environ.get("CC", "cc"))


def build() -> Path:
    """Compile the library into a new temporary folder, which the caller removes; return its path.

    Raises:
        RuntimeError: There is no compiler, or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("there is no C compiler (cc), which the library of faults needs")
    library = Path(tempfile.mkdtemp(prefix="agentmem-faults-")) / "faults.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE), "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own source
    if done.returncode:
        raise RuntimeError(f"{compiler} cannot build {_SOURCE.name}: {done.stderr}")
    return library


class Faults:
    """What this process, which was started with the library preloaded, wants to be broken.

    A child that it forks goes on with the same faults, and may choose others for itself.
    """

    def __init__(self, path: Path) -> None:
        """Watch the files in the directory `path`, which need not exist yet.

        Raises:
            RuntimeError: The library is not preloaded.
        """
        self._library = ctypes.CDLL(None)
        if not hasattr(self._library, "faults_watch"):
            raise RuntimeError("start this process with LD_PRELOAD set to the library that `build` makes")
        self._library.faults_mark.argtypes = [ctypes.c_uint64]
        self._library.faults_fail.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_int]
        self._library.faults_allow.argtypes = [ctypes.c_long, ctypes.c_int]
        self._library.faults_jump.argtypes = [ctypes.c_long, ctypes.c_long]
        for count in (self._library.faults_seen, self._library.faults_failed):
            count.restype = ctypes.c_long
        self._library.faults_watch(os.fsencode(path.resolve()))

    def record(self, journal: Path) -> None:
        """Write all that happens to the files to `journal` from now on (see journal.py)."""
        self._library.faults_record(os.fsencode(journal))

    def mark(self, number: int) -> None:
        """Write a mark into the journal: what was promised as number `number` must survive what comes."""
        self._library.faults_mark(number)

    def fail(self, calls: Call, nth: int, error: int = errno.EIO, *, is_persistent: bool = False) -> None:
        """Let the `nth` of the next `calls` fail, and with `is_persistent` all after it; an `error` of 0: short writes.

        Counts begin anew.
        """
        self._library.faults_fail(int(calls), nth, error, int(is_persistent))

    def allow(self, nbytes: int, *, is_told: bool = True) -> None:
        """Let the files grow by `nbytes` more, then the disk is full; `is_told`: the free space can be asked for."""
        self._library.faults_allow(nbytes, int(is_told))

    def jump(self, realtime_s: int, boottime_s: int = 0) -> None:
        """Let the wall clock be `realtime_s` seconds off from now on, and the clock since boot `boottime_s`."""
        self._library.faults_jump(realtime_s, boottime_s)

    def mend(self) -> None:
        """Break nothing any more."""
        self._library.faults_fail(0, 0, 0, 0)
        self._library.faults_allow(-1, 0)

    @property
    def num_seen(self) -> int:
        """Calls of the kind that `fail` chose, since it chose."""
        return int(self._library.faults_seen())

    @property
    def num_failed(self) -> int:
        """Calls that failed."""
        return int(self._library.faults_failed())
