"""KV in a tier below the disk: never slower than computing, and hidden behind the model where it goes on at once.

    python benchmarks/tiers.py [--quick] [--contexts N]

The tier is simulated (`agentmem.tiers.sim`): a link of a given speed; all else is real. Two tables.

* Speeds: time from `resume` to the logits of one more token, when loading alone, computing alone, and as agentmem
  chooses, for links from 1 MB/s to 5 GB/s. What is measured of tier and model before is known, as after some use. A
  load that would take more than a minute is reckoned from its bytes.
* Overlap: a link on which loading takes as long as feeding the next tokens: one after the other, and layer by layer.

And how fast a branch decodes while another session sinks and rises in the background, all of it: every 2 s, and without
a pause.
"""

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import torch
from harness import Options, Row, check, main, opened_copy, plain_table, read_tokens, say

from agentmem import racing
from agentmem._background import give_way
from agentmem.choosing import Choice, Way
from agentmem.session import Session
from agentmem.sinking import idle_blocks, sink
from agentmem.store import Store
from agentmem.tiers.sim import SimTier

MAX_TIMES_BETTER = 1.1
MAX_TIMES_LONGER = 1.25
MIN_DECODE = 0.95
SPEEDS = (1e6, 5e6, 2e7, 1e8, 1e9, 5e9)
AT_CONTEXT = 2048
FAST = 1e13
NEXT_TOKENS = 256


def run(options: Options) -> dict[str, object]:
    """Measure all of it."""
    context = AT_CONTEXT if AT_CONTEXT in options.contexts else min(options.contexts)
    tier = SimTier(bandwidth=FAST, name="link")
    with opened_copy(options, tiers=[tier]) as store:
        bench = Bench(store, tier, str(context), options)
        speeds = [bench.at_speed(speed) for speed in SPEEDS]
        overlap = bench.overlap()
        decode = bench.decode()
    say(plain_table([overlap]))
    say(plain_table([decode]))
    return {
        "benchmark": "tiers",
        "what": f"SmolLM2 bf16, {context:,} tokens of KV behind a simulated link",
        "rows": speeds,
        "overlap": overlap,
        "decode": decode,
        "checks": [
            check("resume: times the better of loading and computing, at worst", worst(speeds), MAX_TIMES_BETTER),
            check("overlap: times the longer of loading and computing", overlap["times the longer"], MAX_TIMES_LONGER),
            check("overlap: logits differ by", overlap["logits differ by"], 0.0),
            check("decode with movement, of decode without", decode["of alone"], MIN_DECODE, is_at_least=True),
        ],
    }


def worst(rows: list[Row]) -> float:
    """Return the largest ratio of all speeds."""
    return max(float(row["times the better"]) for row in rows)  # type: ignore[arg-type]


@contextlib.contextmanager
def only(way: Way | None) -> Iterator[None]:
    """Let nothing be done but one way, for what it takes alone."""
    choose = racing.choose

    def forced(num_tokens: int, *_: object, **__: object) -> Choice:
        is_load = way in {Way.LOAD, Way.OVERLAP}
        estimates = {"load_s": 0.0 if is_load else 1e9, "compute_s": 1e9 if is_load else 0.0}
        return Choice(way=way or Way.LOAD, num_tokens=num_tokens, **estimates)

    try:
        racing.choose = choose if way is None else forced
        yield
    finally:
        racing.choose = choose


class Bench:
    """One store, one session of it below the disk, and a link to it."""

    def __init__(self, store: Store, tier: SimTier, name: str, options: Options) -> None:
        """Let the session sink."""
        self.store, self.tier, self.name = store, tier, name
        self.options = options
        self.tokens = read_tokens(store._runtime.adapter._tokenizer, 9000)[-NEXT_TOKENS:]  # noqa: SLF001
        self.blocks = store._runtime.blocks  # noqa: SLF001
        self.timed(self.resume, Way.COMPUTE)  # so that the speed of the model is known
        self.sink()

    def sink(self) -> None:
        """Let all of the session sink, at once."""
        bandwidth, self.tier._bandwidth = self.tier._bandwidth, FAST  # noqa: SLF001
        self.store.flush()
        self.blocks.host.clear()
        with self.store.environment.read() as txn:
            session_id = self.store.catalog.find_session(txn, self.name).session_id
            digests = idle_blocks(txn, [session_id])
        sink(self.store.environment, self.blocks.disk, self.tier, digests)
        self.tier._bandwidth = bandwidth  # noqa: SLF001

    def resume(self, tokens: tuple[int, ...] = (5,), *, lazy: bool = False) -> torch.Tensor:
        """Resume the session, feed tokens, and take them off again."""
        session = self.store.resume(self.name, lazy=lazy)
        logits = session.forward(list(tokens))
        session.rewind(tokens=len(tokens))
        self.session = session
        return logits

    def timed(self, work: Callable[[], torch.Tensor], way: Way | None) -> tuple[float, torch.Tensor, Session]:
        """Return the seconds that a resume takes, and its logits; afterwards the session is below again."""
        with only(way):
            started = time.perf_counter()
            logits = work()
            elapsed_s = time.perf_counter() - started
        self.session.close()
        self.sink()
        return elapsed_s, logits, self.session

    def at_speed(self, speed: float) -> Row:
        """Measure one speed of the link."""
        self.tier._bandwidth = speed  # noqa: SLF001
        load_alone_s = self.tier.nbytes / speed
        repeats = self.options.repeats(full=3, quick=1)
        loads = [load_alone_s] if load_alone_s > 60 else [self.timed(self.resume, Way.LOAD)[0] for _ in range(repeats)]
        self.learn(min(loads))
        computes = [self.timed(self.resume, Way.COMPUTE)[0] for _ in range(repeats)]
        chosen = [self.timed(self.resume, None)[0] for _ in range(repeats)]
        better = min(statistics.median(loads), statistics.median(computes))
        return {
            "link MB/s": speed / 1e6,
            "loading s": statistics.median(loads),
            "computing s": statistics.median(computes),
            "agentmem s": statistics.median(chosen),
            "times the better": statistics.median(chosen) / better,
        }

    def learn(self, load_s: float) -> None:
        """Let the store know a link on which all of the session takes so long, as it does after some use."""
        nbytes = int(self.name) * self.store.token_nbytes
        for _ in range(50):
            self.blocks.lower.rates.note(self.tier.name, nbytes, load_s)

    def overlap(self) -> Row:
        """Let loading take as long as feeding the next tokens."""
        tokens = tuple(self.tokens)
        self.tier._bandwidth = FAST  # noqa: SLF001
        feeding_s = statistics.median(
            self.timed(lambda: self.resume(tokens), Way.LOAD)[0] - self.timed(self.resume, Way.LOAD)[0]
            for _ in range(self.options.repeats(full=5, quick=2))
        )
        self.tier._bandwidth = self.tier.nbytes / feeding_s  # noqa: SLF001
        runs = range(self.options.repeats(full=5, quick=2))
        after = [self.timed(lambda: self.resume(tokens), Way.LOAD) for _ in runs]
        beside = [self.timed(lambda: self.resume(tokens, lazy=True), Way.OVERLAP) for _ in runs]
        load_s = statistics.median(self.timed(self.resume, Way.LOAD)[0] for _ in runs)
        together_s = statistics.median(seconds for seconds, _, _ in beside)
        return {
            "link MB/s": self.tier._bandwidth / 1e6,  # noqa: SLF001
            "loading s": load_s,
            f"feeding {NEXT_TOKENS} s": feeding_s,
            "one after the other s": statistics.median(seconds for seconds, _, _ in after),
            "layer by layer s": together_s,
            "times the longer": together_s / max(load_s, feeding_s),
            "logits differ by": float((after[0][1] - beside[0][1]).abs().max()),
        }

    def decode(self) -> Row:
        """Decode with and without blocks of another session that sink and rise meanwhile, in turns."""
        self.tier._bandwidth = 1e8  # noqa: SLF001
        self.learn(0.001)
        session = self.store.resume(next(name for name in map(str, self.options.contexts) if name != self.name))
        mover, found = Mover(self), dict[str, list[float]]()
        for _ in range(self.options.repeats(full=6, quick=3)):
            for name, pause_s in {"alone": None, "every 2 s": 2.0, "without a pause": 0.0}.items():
                mover.pause_s = pause_s
                time.sleep(0.3)
                found.setdefault(name, []).append(decoded(session))
        mover.stop()
        medians = {name: statistics.median(rates) for name, rates in found.items()}
        return {
            **{f"tok/s {name}": rate for name, rate in medians.items()},
            "of alone": medians["every 2 s"] / medians["alone"],
            "of alone, without a pause": medians["without a pause"] / medians["alone"],
            "blocks moved": mover.num_moved,
        }


def decoded(session: Session) -> float:
    """Return the tokens per second of a short generation."""
    started = time.perf_counter()
    session.generate(max_new_tokens=48, do_sample=False)
    elapsed_s = time.perf_counter() - started
    session.rewind(tokens=48)
    return 48 / elapsed_s


class Mover:
    """Lets a session sink and rise over and over, in a thread of its own.

    Attributes:
        pause_s: Seconds between two times; None: it rests.
        num_moved: Blocks that it brought up.
    """

    def __init__(self, bench: Bench) -> None:
        """Start the thread."""
        self.pause_s: float | None = None
        self.num_moved = 0
        self._bench, self._is_over = bench, False
        self._session = bench.store.resume(bench.name, lazy=True)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._is_over = True
        self._thread.join()

    def _run(self) -> None:
        give_way()  # as the store's own threads that sweep and prefetch do
        while not self._is_over:
            pause_s = self.pause_s
            if pause_s is not None:
                self._move()
            time.sleep(0.1 if pause_s is None else pause_s)

    def _move(self) -> None:
        store, blocks = self._bench.store, self._bench.blocks
        self.num_moved += self._session.prefetch().wait()
        blocks.host.clear()
        with store.environment.read() as txn:
            digests = idle_blocks(txn, [self._session.ledger.record.session_id])
        sink(store.environment, blocks.disk, self._bench.tier, digests)


if __name__ == "__main__":
    main(run)
