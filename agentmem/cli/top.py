"""`top`: watch a store at work. TARGET is the URL of its metrics, or its directory, where their addresses are found."""

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agentmem.cli.result import Result
from agentmem.cli.source import open_view
from agentmem.cli.text import count, facts, plain, size, table
from agentmem.errors import InvalidInputError, NotFoundError
from agentmem.metrics.frame import Frame, Growth, Look, TierLine, fetch, make_frame
from agentmem.metrics.places import living
from agentmem.tiers.blockrows import read_sum

_SHOWN_REASONS = 8
_NOTHING = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """What the files of a store say by themselves."""

    store: str
    num_sessions: int
    disk_num_blocks: int
    disk_raw_nbytes: int
    disk_stored_nbytes: int
    file_nbytes: int


@dataclass(slots=True)
class _Seen:
    """What one look at the target showed.

    Attributes:
        stored: What the files say; None for a URL.
        frames: The processes that answered.
        silent: Why the others did not.
    """

    stored: _Stored | None = None
    frames: list[Frame] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)


class _Watch:
    """Looks at a target again and again, and knows the look before."""

    def __init__(self, arguments: argparse.Namespace, clock: Callable[[], float] = time.monotonic) -> None:
        self._arguments = arguments
        self._clock = clock
        self._before: dict[str, Look] = {}

    def look(self, *, is_first: bool) -> _Seen:
        """Look once; who does not answer is an error only the first time, and if nobody else was asked."""
        seen, is_url = _Seen(), "://" in self._arguments.target
        if is_url:
            urls = [self._arguments.target]
        else:
            seen.stored, urls = _stored(self._arguments), [place.url for place in living(Path(self._arguments.target))]
        for url in urls:
            try:
                seen.frames.append(self._frame(url))
            except (NotFoundError, InvalidInputError) as error:
                if is_url and is_first:
                    raise
                seen.silent.append(str(error))
        return seen

    def _frame(self, url: str) -> Frame:
        look = Look(url=url, samples=fetch(url), taken_s=self._clock())
        before, self._before[url] = self._before.get(url), look
        return make_frame(look, before)


def top(arguments: argparse.Namespace) -> Result:
    """Show the numbers of this moment, or until Ctrl-C where a person watches."""
    watch = _Watch(arguments)
    is_live = not (arguments.once or arguments.json) and sys.stdout.isatty()
    seen = watch.look(is_first=True)
    if is_live:
        seen = _live(watch, seen, arguments.interval)
    return Result(
        document={
            "target": arguments.target,
            "stored": None if seen.stored is None else asdict(seen.stored),
            "processes": [_document(frame) for frame in seen.frames],
            "silent": seen.silent,
        },
        text=lambda: _text(seen),
        notices=[] if is_live else seen.silent,
    )


COMMANDS = {"top": top}


def _live(watch: _Watch, seen: _Seen, interval_s: float) -> _Seen:
    """Show one look after the other on the whole screen until Ctrl-C; return the last."""
    try:
        live, text = importlib.import_module("rich.live").Live, importlib.import_module("rich.text").Text
    except ImportError as error:
        raise InvalidInputError(
            "the live view needs the package `rich`: pip install 'agentmem-kv[top]', or give --once"
        ) from error
    try:
        with live(text(_text(seen)), screen=True, auto_refresh=False) as screen:
            while True:
                time.sleep(interval_s)
                seen = watch.look(is_first=False)
                screen.update(text(_text(seen)), refresh=True)
    except KeyboardInterrupt:
        return seen


def _stored(arguments: argparse.Namespace) -> _Stored:
    arguments.store = Path(arguments.target)
    with open_view(arguments) as store, store.environment.read() as txn:
        totals = read_sum(txn).totals
        return _Stored(
            store=arguments.target,
            num_sessions=len(store.catalog.sessions(txn, [])),
            disk_num_blocks=totals.num_blocks,
            disk_raw_nbytes=totals.raw_nbytes,
            disk_stored_nbytes=totals.stored_nbytes,
            file_nbytes=store.environment.nbytes,
        )


def _document(frame: Frame) -> Mapping[str, object]:
    def grown(growths: list[Growth], *names: str) -> list[dict[str, object]]:
        return [
            dict(zip(names, each.name, strict=True)) | {"total": each.total, "per_s": each.per_s} for each in growths
        ]

    return asdict(frame) | {
        "moves": grown(frame.moves, "from", "to"),
        "tokens": grown(frame.tokens, "what"),
        "reasons": grown(frame.reasons, "what", "reason"),
    }


def _text(seen: _Seen) -> str:
    parts = [] if seen.stored is None else [_stored_text(seen.stored)]
    parts += [_frame_text(frame) for frame in seen.frames]
    parts += [f"! {plain(problem)}" for problem in seen.silent]
    if seen.stored is not None and not seen.frames and not seen.silent:
        parts.append("nobody serves metrics of it now: open it with Config(metrics='127.0.0.1:0')")
    return "\n\n".join(parts)


def _stored_text(stored: _Stored) -> str:
    return facts(
        [
            ("store", plain(stored.store)),
            ("holds", f"{count(stored.num_sessions, 'session')}, {count(stored.disk_num_blocks, 'block')}"),
            ("KV on disk", f"{size(stored.disk_raw_nbytes)}, stored in {size(stored.disk_stored_nbytes)}"),
            ("file", size(stored.file_nbytes)),
        ]
    )


def _frame_text(frame: Frame) -> str:
    process = f"{plain(frame.pid)}, agentmem {plain(frame.version)}, {plain(frame.url)}"
    rows = [("process", process), ("has open", plain(frame.path))]
    if frame.prefill_tok_s is not None:
        rows.append(("prefill", f"{frame.prefill_tok_s:,.0f} tokens/s"))
    parts = [
        facts(rows),
        table(("TIER", "BYTES", "BUDGET", "BLOCKS", "HITS", "GIVES"), [_tier_row(tier) for tier in frame.tiers]),
        table(("TOKENS", "TOTAL", "PER SECOND"), [_growth_row(each, f"{each.total:,.0f}") for each in frame.tokens]),
        table(("MOVED", "TOTAL", "PER SECOND"), [_move_row(each) for each in frame.moves]),
    ]
    if frame.reasons:
        reasons = frame.reasons[:_SHOWN_REASONS]
        parts.append(
            table(("WHY", "TOTAL", "PER SECOND"), [_growth_row(each, f"{each.total:,.0f}") for each in reasons])
        )
    return "\n\n".join(parts)


def _tier_row(tier: TierLine) -> tuple[str, ...]:
    return (
        plain(tier.tier),
        _or_nothing(tier.nbytes, size),
        _or_nothing(tier.budget_nbytes, size),
        _or_nothing(tier.num_blocks, "{:,}".format),
        _or_nothing(tier.hit_rate, "{:.1%}".format),
        _or_nothing(tier.nbytes_per_s, lambda rate: f"{size(int(rate))}/s"),
    )


def _move_row(move: Growth) -> tuple[str, str, str]:
    name = plain(" to ".join(move.name))
    return name, size(int(move.total)), _or_nothing(move.per_s, lambda rate: f"{size(int(rate))}/s")


def _growth_row(growth: Growth, total: str) -> tuple[str, str, str]:
    words = plain(": ".join(growth.name)).replace("_", " ")
    return words, total, _or_nothing(growth.per_s, lambda rate: f"{rate:,.1f}")


def _or_nothing(number: float | None, text: Callable[..., str]) -> str:
    return _NOTHING if number is None else text(number)
