"""What checking costs: resume and checkpoint with all checks, beside the same with each of them, and all, left out.

    python benchmarks/checks.py [--quick] [--contexts N ...]

Left out by patching, in a copy of the store for each: the sums of KV (xxh3-128 of every raw byte), the sums of rows,
the look whether the model has changed, the leases of sessions, the copies of small records. There is no such option.
Resume: KV from disk onto the device, warm. Checkpoint: 64 new tokens, all of whose saving it waits for
(`save_in_background=False`). CPU time of the whole process, in the run that took the least of it: what comes on top
is other work on the machine. A few per cent are less than such times differ by; so each check's own CPU time is
measured too, call by call, in runs of their own, and the claims are about that.
"""

import contextlib
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import xxhash
from harness import Options, Row, Times, base_store, check, load_model, main

import agentmem
from agentmem._lmdb import row, transaction
from agentmem.adapters.transformers.adapter import TransformersAdapter
from agentmem.kv import record
from agentmem.leases import Lease
from agentmem.store import Store
from agentmem.tiers import disk

MAX_SHARE = 5.0
AT_CONTEXT = 4096
NUM_TOKENS = 64
ALL = "nothing"
CONFIG = agentmem.Config(save_in_background=False)


def run(options: Options) -> dict[str, object]:
    """Measure every variant in turn, several times."""
    context = AT_CONTEXT if AT_CONTEXT in options.contexts else max(options.contexts)
    found = {name: (Times(), Times()) for name in VARIANTS}
    model, tokenizer = load_model(options)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name in VARIANTS:
            shutil.copytree(base_store(options), Path(folder) / name)
        for turn in range(options.repeats(full=4, quick=2)):
            names = list(VARIANTS)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                with VARIANTS[name]():
                    path = Path(folder) / name
                    with agentmem.open(path, model=model, tokenizer=tokenizer, config=CONFIG) as store:
                        measure(store, context, turn, options.repeats(full=8, quick=4), *found[name])
        clock = Clock()
        with (
            clock.counting(),
            agentmem.open(Path(folder) / ALL, model=model, tokenizer=tokenizer, config=CONFIG) as store,
        ):
            measure(store, context, 99, options.repeats(full=8, quick=4), *(clock.times(each) for each in OPERATIONS))
    rows = [
        row_of(operation, name, found[name][index].cpu_s, found[ALL][index].cpu_s, clock.share(operation, name))
        for index, operation in enumerate(OPERATIONS)
        for name in VARIANTS
    ]
    return {
        "benchmark": "checks",
        "what": f"SmolLM2 bf16, {context:,} tokens; a checkpoint of {NUM_TOKENS} tokens",
        "rows": rows,
        "checks": [
            check(f"{each['operation']}: all checks, % of its CPU time", each["own CPU, %"], MAX_SHARE)
            for each in rows
            if each["left out"] == "everything"
        ],
    }


def measure(store: Store, context: int, turn: int, num_runs: int, resumes: Times, checkpoints: Times) -> None:
    """Resume a session and make checkpoints of new tokens, some times each."""
    store.resume(str(context)).close()  # the first one pays for fresh memory
    for _ in range(num_runs):
        with resumes.run():
            session = store.resume(str(context))
        session.close()
    session = store.resume(str(context))
    for number in range(num_runs):
        session.fork(f"{turn}-{number}", at=session.checkpoints[0])
        session.switch(f"{turn}-{number}")
        session.forward(random.Random(1000 * turn + number).choices(range(1000), k=NUM_TOKENS))
        store.flush()
        with checkpoints.run():
            session.checkpoint()
        session.switch("main")
        session.drop(f"{turn}-{number}")


def row_of(operation: str, name: str, cpu_s: list[float], all_cpu_s: list[float], share: float) -> Row:
    """Return one line: how much of the whole time goes when these checks go."""
    own, whole = min(cpu_s), min(all_cpu_s)
    return {
        "operation": operation,
        "left out": "-" if name == ALL else name,
        "CPU ms": own * 1e3,
        "CPU ms median": statistics.median(cpu_s) * 1e3,
        "less by %": 100 * (whole - own) / whole,
        "own CPU, %": share,
    }


# -- leaving checks out


class _Same(bytes):
    """Bytes that are the same as any."""

    __slots__ = ()

    def __eq__(self, _other: object) -> bool:
        return True

    def __ne__(self, _other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


class _NoSum:
    """Stands where a sum is computed."""

    result: ClassVar[bytes] = _Same(16)

    def update(self, _data: object) -> None:
        """Do nothing."""

    def digest(self) -> bytes:
        """Return the same for everything."""
        return self.result


@contextlib.contextmanager
def _patched(*changes: tuple[object, str, object]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def _no_kv_sums() -> contextlib.AbstractContextManager[None]:
    fake = SimpleNamespace(xxh3_128=lambda *_: _NoSum(), xxh3_128_digest=lambda _: bytes(16))
    return _patched(
        (record, "xxhash", fake), (disk, "xxhash", fake), (record, "_check_named", vars(record)["_check_fits"])
    )


def _no_row_sums() -> contextlib.AbstractContextManager[None]:
    return _patched((row, "_checksum", lambda *_: _Same(8)))


def _no_look() -> contextlib.AbstractContextManager[None]:
    look, known = TransformersAdapter.look, {}
    return _patched(
        (TransformersAdapter, "look", lambda self: known.setdefault(id(self), None) or _first(look, known, self))
    )


def _first(look: Callable[[object], object], known: dict[int, object], adapter: object) -> object:
    known[id(adapter)] = look(adapter)
    return known[id(adapter)]


def _no_leases() -> contextlib.AbstractContextManager[None]:
    return _patched(
        (Lease, "is_held", lambda _self, _txn: True),
        (Lease, "require", lambda _self, _txn: None),
        (Lease, "check", lambda _self: None),
    )


def _no_copies() -> contextlib.AbstractContextManager[None]:
    return _patched((transaction, "TAGS", {}))


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    with _no_kv_sums(), _no_row_sums(), _no_look(), _no_leases(), _no_copies():
        yield


# -- counting what they take


class _Counted(Times):
    """Times of one operation, and what the checks took of it."""

    def __init__(self, clock: "Clock", operation: str) -> None:
        super().__init__()
        object.__setattr__(self, "_clock", clock)
        object.__setattr__(self, "_operation", operation)

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Time what happens inside."""
        self._clock.begin(self._operation)
        with super().run():
            yield
        self._clock.end(self.cpu_s[-1])


class Clock:
    """Adds up the CPU time of each check's functions, whichever thread calls them, for each operation."""

    def __init__(self) -> None:
        self._spent: Counter[tuple[str, str]] = Counter()
        self._total: Counter[str] = Counter()
        self._operation = ""

    def times(self, operation: str) -> Times:
        """Return times of an operation whose checks are counted."""
        return _Counted(self, operation)

    def begin(self, operation: str) -> None:
        """Count for an operation from now on."""
        self._operation = operation

    def end(self, cpu_s: float) -> None:
        """End the operation, which took so much CPU time."""
        self._total[self._operation] += cpu_s
        self._operation = ""

    def share(self, operation: str, name: str) -> float:
        """Return what a check took of an operation's CPU time, in per cent."""
        names = VARIANTS if name == "everything" else [name]
        return 100 * sum(self._spent[operation, each] for each in names) / self._total[operation]

    def counted(self, name: str, function: Callable[..., object]) -> Callable[..., object]:
        """Return a function that counts what it takes."""

        def call(*arguments: object) -> object:
            started = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self._spent[self._operation, name] += time.thread_time() - started

        return call

    def counting(self) -> contextlib.AbstractContextManager[None]:
        """Count every call of a check."""
        counted = self.counted

        class Sum:
            """The sum of KV that comes in pieces."""

            def __init__(self, *data: object) -> None:
                self._state = counted("sums of KV", xxhash.xxh3_128)(*data)
                self.update = counted("sums of KV", self._state.update)
                self.digest = self._state.digest

        reading, writing = transaction.ReadTransaction, transaction.WriteTransaction
        sums = SimpleNamespace(xxh3_128=Sum, xxh3_128_digest=counted("sums of KV", xxhash.xxh3_128_digest))
        return _patched(
            (record, "xxhash", sums),
            (disk, "xxhash", sums),
            (row, "_checksum", counted("sums of rows", vars(row)["_checksum"])),
            (TransformersAdapter, "look", counted("look at the model", TransformersAdapter.look)),
            (Lease, "is_held", counted("leases", Lease.is_held)),
            (reading, "_copy", counted("copies of records", vars(reading)["_copy"])),
            # Both copies, of which the first would be written anyway: no less than the copy takes.
            (writing, "_put_both", counted("copies of records", vars(writing)["_put_both"])),
        )


OPERATIONS = ("resume", "checkpoint")
VARIANTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    ALL: contextlib.nullcontext,
    "sums of KV": _no_kv_sums,
    "sums of rows": _no_row_sums,
    "look at the model": _no_look,
    "leases": _no_leases,
    "copies of records": _no_copies,
    "everything": _nothing,
}


if __name__ == "__main__":
    main(run)
