"""What `agentmem top` shows: the numbers of one store at one moment, and how fast they grow. Knows no terminal."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from http.client import HTTPException
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from agentmem.errors import InvalidInputError, NotFoundError
from agentmem.metrics.exposition import Samples, parse

_TIMEOUT_S = 5.0
_MAX_NBYTES = 4 << 20

_ORDER = ("device", "host", "pool", "disk", "lake")
"""Tiers from the top down; those of users come last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLine:
    """A tier; what it has no number for is None.

    Attributes:
        tier: Its name.
        nbytes: Bytes in use.
        budget_nbytes: Most bytes that it may use.
        num_blocks: Blocks in it.
        hit_rate: Part of the bytes looked for in it that it had.
        nbytes_per_s: Bytes of KV per second that it gave lately.
    """

    tier: str
    nbytes: int | None
    budget_nbytes: int | None
    num_blocks: int | None
    hit_rate: float | None
    nbytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A number that grows.

    Attributes:
        name: What it counts: words that say which, such as two tiers.
        total: The number, since the store was opened.
        per_s: How much it grew each second since the look before; None at the first look.
    """

    name: tuple[str, ...]
    total: float
    per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One look at one store.

    Attributes:
        url: Where the numbers came from.
        path: The store's directory, on its machine.
        pid: The process that has it open.
        version: Its version of agentmem.
        prefill_tok_s: Tokens per second of the model's prefill lately; None when it was not measured.
        tiers: Tiers, the nearest first.
        moves: Bytes moved, by (from, to).
        tokens: Tokens, by what became of them.
        reasons: Why KV was lost or a tier left out, by (what, reason); what grew last comes first.
    """

    url: str
    path: str
    pid: str
    version: str
    prefill_tok_s: float | None
    tiers: list[TierLine] = field(default_factory=list)
    moves: list[Growth] = field(default_factory=list)
    tokens: list[Growth] = field(default_factory=list)
    reasons: list[Growth] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Samples of one moment.

    Attributes:
        url: Where they came from.
        samples: The numbers.
        taken_s: When, on whatever clock.
    """

    url: str
    samples: Samples
    taken_s: float


class _NoRedirects(HTTPRedirectHandler):
    """Goes nowhere else than it was told to."""

    def redirect_request(self, *_: object, **__: object) -> Request | None:
        """Refuse."""
        return None


def fetch(url: str) -> Samples:
    """Ask an endpoint for its numbers; takes some seconds at most for each packet.

    Raises:
        InvalidInputError: It is no address of HTTP, or what answers are no metrics of agentmem.
        NotFoundError: Nothing answers there.
    """
    if urlsplit(url).scheme not in {"http", "https"}:
        raise InvalidInputError(f"{url!r} is no address of metrics: it begins with http:// or https://")
    request = Request(url, headers={"Accept": "text/plain"})  # noqa: S310 - the scheme was looked at
    try:
        with _opener().open(request, timeout=_TIMEOUT_S) as answer:
            text = answer.read(_MAX_NBYTES).decode("utf-8", errors="replace")
    except (OSError, HTTPException, ValueError) as error:
        raise NotFoundError(f"no metrics at {url!r} ({error}): is a store open with Config.metrics there?") from error
    samples = parse(text)
    if not any(name == "store_info" for name, _ in samples):
        raise InvalidInputError(f"what answers at {url!r} is no store of agentmem")
    return samples


def make_frame(now: Look, before: Look | None) -> Frame:
    """Compare a look with the one before, if there was one, at the same address."""
    info = next((dict(labels) for name, labels in now.samples if name == "store_info"), {})
    return Frame(
        url=now.url,
        path=info.get("path", ""),
        pid=info.get("pid", ""),
        version=info.get("version", ""),
        prefill_tok_s=now.samples.get(("prefill_tokens_per_second", frozenset())),
        tiers=_tiers(now.samples),
        moves=_growths(now, before, "moved_bytes_total", ("from", "to")),
        tokens=_tokens(now, before),
        reasons=_reasons(now, before),
    )


def _opener() -> OpenerDirector:
    """Return what asks directly: a proxy would look for 127.0.0.1 on its own machine."""
    return build_opener(ProxyHandler({}), _NoRedirects)


def _tiers(samples: Samples) -> list[TierLine]:
    names = {dict(labels).get("tier", "") for name, labels in samples if name.startswith("tier_")}
    names |= {word for name, labels in samples if name == "moved_bytes_total" for _, word in labels}
    rank = {name: index for index, name in enumerate(_ORDER)}
    return [_tier(samples, name) for name in sorted(names - {""}, key=lambda name: (rank.get(name, len(rank)), name))]


def _tier(samples: Samples, tier: str) -> TierLine:
    def number(family: str) -> float | None:
        return samples.get((family, frozenset({("tier", tier)})))

    return TierLine(
        tier=tier,
        nbytes=_whole(number("tier_bytes")),
        budget_nbytes=_whole(number("tier_budget_bytes")),
        num_blocks=_whole(number("tier_blocks")),
        hit_rate=number("tier_hit_ratio"),
        nbytes_per_s=number("tier_bytes_per_second"),
    )


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


def _tokens(now: Look, before: Look | None) -> list[Growth]:
    """Add up what was lost for whatever reason; say 0 of what never happened."""
    found = _growths(now, before, "tokens_total", ("what",))
    per_s = None if before is None else 0.0
    return [
        _sum(what, [growth for growth in found if growth.name == (what,)], per_s)
        for what in ("fed", "reused", "restored", "on_device", "lost")
    ]


def _sum(what: str, growths: Iterable[Growth], per_s: float | None) -> Growth:
    total = 0.0
    for growth in growths:
        total += growth.total
        per_s = growth.per_s if per_s is None or growth.per_s is None else per_s + growth.per_s
    return Growth(name=(what,), total=total, per_s=per_s)


def _reasons(now: Look, before: Look | None) -> list[Growth]:
    lost = _growths(now, before, "tokens_total", ("what", "reason"))
    found = [growth for growth in lost if growth.name[1]]
    found += _named(_growths(now, before, "encodings_lost_total", ("reason",)), "encodings lost")
    found += _named(_growths(now, before, "tier_failures_total", ("tier",)), "did not answer")
    found += _named(_growths(now, before, "tier_damaged_blocks_total", ("tier",)), "damaged blocks")
    return sorted(found, key=lambda growth: (-(growth.per_s or 0.0), -growth.total, growth.name))


def _named(growths: Iterable[Growth], what: str) -> list[Growth]:
    return [Growth(name=(what, *growth.name), total=growth.total, per_s=growth.per_s) for growth in growths]


def _growths(now: Look, before: Look | None, family: str, labels: tuple[str, ...]) -> list[Growth]:
    found = sorted((key, value) for key, value in now.samples.items() if key[0] == family)
    return [
        Growth(name=tuple(dict(key[1]).get(label, "") for label in labels), total=value, per_s=_per_s(key, now, before))
        for key, value in found
    ]


def _per_s(key: tuple[str, frozenset[tuple[str, str]]], now: Look, before: Look | None) -> float | None:
    if before is None or now.taken_s <= before.taken_s:
        return None
    total, old = now.samples[key], before.samples.get(key, 0.0)
    grown = total - old if total >= old else total  # the process was started anew
    return grown / (now.taken_s - before.taken_s)
