"""The tiers of a machine as numbers: how much each holds, how fast it is, and how long KV stays there.

Knows nothing of models, of stores or of tensors: planner and simulator reckon with these.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from agentmem.errors import InvalidInputError, NotFoundError

RAW, LOSSLESS = "raw", "nib"
"""Codecs of a tier: KV as it is, and the lossless codec of records."""

_MB, _GB, _TB, _PB = 10**6, 10**9, 10**12, 10**15
_MINUTE_S, _HOUR_S, _DAY_S, _YEAR_S = 60.0, 3600.0, 86_400.0, 365 * 86_400.0

_SIZES = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_TIMES = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": _MINUTE_S, "h": _HOUR_S, "d": _DAY_S, "y": _YEAR_S}
_QUANTITY = re.compile(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """One tier as numbers. Where only a range is known, the cautious end counts and `max_` has the other.

    Attributes:
        name: What the tier is called: "device", "host", "pool", "disk" or "lake" in agentmem.
        capacity_nbytes: Bytes that it holds.
        bandwidth: Bytes per second that come out of it, as they are stored.
        latency_s: Seconds until the first byte.
        residency_s: Seconds that untouched KV stays here: at least, at most. Past the second it sinks.
        codec: How KV is stored here: `RAW` or `LOSSLESS`.
        max_capacity_nbytes: The upper end of a range of capacities; None where there is one number.
        max_bandwidth: The upper end of a range of bandwidths; None where there is one number.
        note: What the tier is made of, for people.
    """

    name: str
    capacity_nbytes: int
    bandwidth: float
    latency_s: float = 0.0
    residency_s: tuple[float, float] = (0.0, math.inf)
    codec: str = RAW
    max_capacity_nbytes: int | None = None
    max_bandwidth: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        """Refuse numbers that no tier has.

        Raises:
            InvalidInputError: A size or a rate is not positive, a time is negative, a range is upside down, or the
                codec is not known.
        """
        low, high = self.residency_s
        wrong = {
            "capacity": self.capacity_nbytes <= 0 or (self.max_capacity_nbytes or math.inf) < self.capacity_nbytes,
            "bandwidth": not 0 < self.bandwidth < math.inf or (self.max_bandwidth or math.inf) < self.bandwidth,
            "latency": not 0 <= self.latency_s < math.inf,
            "residency": not 0 <= low <= high,
            "codec": self.codec not in (RAW, LOSSLESS),
        }
        for what in (what for what, is_wrong in wrong.items() if is_wrong):
            raise InvalidInputError(
                f"tier {self.name!r} has a {what} that no tier has ({self}): sizes and rates are above 0, times not "
                f"below 0, the lower end of a range comes first, and the codec is {RAW!r} or {LOSSLESS!r}"
            )

    def load_s(self, nbytes: int, *, bandwidth: float | None = None) -> float:
        """Return the seconds in which `nbytes` stored bytes come out of the tier, by its own bandwidth or another."""
        return self.latency_s + nbytes / (bandwidth or self.bandwidth)


Pyramid = tuple[TierSpec, ...]
"""Tiers from the nearest to the farthest."""


def micron_pyramid() -> Pyramid:
    """Return the five tiers that Micron's article gives for each GPU, with its own names and parts.

    Words became the smallest number that they mean: "100s GB" is 100 GB, "few TB" 3 TB, "PBs" 1 PB; "s - min" is from
    1 s to 1 min. The table has no latencies, and of the lake's bandwidth it says only "below 10 GB/s", which is what
    stands here. Source: Micron's article on KV memory, its table of five tiers.
    """
    return (
        TierSpec(
            name="near memory",
            capacity_nbytes=10 * _GB,
            max_capacity_nbytes=100 * _GB,
            bandwidth=1 * _TB,
            max_bandwidth=20 * _TB,
            residency_s=(1e-3, 1.0),
            note="HBM4, HBM3E, GDDR7",
        ),
        TierSpec(
            name="main memory",
            capacity_nbytes=200 * _GB,
            max_capacity_nbytes=400 * _GB,
            bandwidth=100 * _GB,
            max_bandwidth=500 * _GB,
            residency_s=(1.0, _MINUTE_S),
            note="DDR5 RDIMM, LPDDR SOCAMM2",
        ),
        TierSpec(
            name="expanded memory",
            capacity_nbytes=100 * _GB,
            max_capacity_nbytes=3 * _TB,
            bandwidth=100 * _GB,
            max_bandwidth=200 * _GB,
            residency_s=(_MINUTE_S, _HOUR_S),
            note="pooled DDR5",
        ),
        TierSpec(
            name="context memory storage",
            capacity_nbytes=10 * _TB,
            max_capacity_nbytes=100 * _TB,
            bandwidth=20 * _GB,
            max_bandwidth=200 * _GB,
            residency_s=(_HOUR_S, _DAY_S),
            note="9650 and 7600 SSD",
        ),
        TierSpec(
            name="network data lake",
            capacity_nbytes=1 * _PB,
            bandwidth=10 * _GB,
            residency_s=(_DAY_S, _YEAR_S),
            note="6600 ION; below 10 GB/s",
        ),
    )


def local_pyramid() -> Pyramid:
    """Return agentmem's five tiers on a plain machine without an accelerator: the default of planner and simulator.

    The rates are of the kind of machine that agentmem is tested on: one core copies memory at about 5 GB/s, an NVMe SSD
    reads 2 GB/s, redis over a socket gave 0.6 GB/s, and an object store 0.1 GB/s for one stream after 30 ms.
    """
    return (
        TierSpec(name="device", capacity_nbytes=4 * _GB, bandwidth=5 * _GB, residency_s=(0.0, _MINUTE_S)),
        TierSpec(name="host", capacity_nbytes=8 * _GB, bandwidth=5 * _GB, residency_s=(1.0, 10 * _MINUTE_S)),
        TierSpec(
            name="pool",
            capacity_nbytes=64 * _GB,
            bandwidth=600 * _MB,
            latency_s=1e-3,
            residency_s=(_MINUTE_S, _HOUR_S),
            codec=LOSSLESS,
        ),
        TierSpec(
            name="disk",
            capacity_nbytes=1 * _TB,
            bandwidth=2 * _GB,
            latency_s=1e-4,
            residency_s=(_HOUR_S, 7 * _DAY_S),
            codec=LOSSLESS,
        ),
        TierSpec(
            name="lake",
            capacity_nbytes=1 * _PB,
            bandwidth=100 * _MB,
            latency_s=0.03,
            residency_s=(_DAY_S, _YEAR_S),
            codec=LOSSLESS,
        ),
    )


PRESETS = {"local": local_pyramid, "micron": micron_pyramid}
"""Pyramids by name."""


def read_pyramid(name: str) -> Pyramid:
    """Return a preset, or the tiers of a TOML file: a `[[tier]]` for each, from the nearest to the farthest.

    A tier has `name`, `capacity` and `bandwidth`; and if wanted `latency`, `residency` (two times), `codec`,
    `max_capacity`, `max_bandwidth` and `note`. Sizes are bytes or "80GB", "1.5 TiB"; rates the same, for each second;
    times are seconds or "30ms", "5m", "2h", "7d", "1y".

    Raises:
        NotFoundError: There is neither a preset nor a file of that name.
        InvalidInputError: The file is no TOML, or says something that no tier has.
    """
    if name in PRESETS:
        return PRESETS[name]()
    try:
        document = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no file {name!r}, and the known pyramids are {', '.join(PRESETS)}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{name!r} is no TOML file: {error}") from error
    tiers = document.get("tier")
    if not isinstance(tiers, list) or not tiers:
        raise InvalidInputError(f"{name!r} has no tiers: give a [[tier]] for each, the nearest first")
    found = tuple(_tier(tier) for tier in tiers)
    if len({tier.name for tier in found}) != len(found):
        raise InvalidInputError(f"{name!r} gives two tiers one name: {', '.join(tier.name for tier in found)}")
    return found


def parse_nbytes(value: object) -> int:
    """Return the bytes that a number or a text such as "80GB", "1.5 TiB" or "200 MB/s" means.

    Raises:
        InvalidInputError: It means none.
    """
    return round(_quantity(value, _SIZES, "80GB or 1.5TiB"))


def parse_seconds(value: object) -> float:
    """Return the seconds that a number or a text such as "30ms", "5m" or "7d" means.

    Raises:
        InvalidInputError: It means none.
    """
    return _quantity(value, _TIMES, "30ms, 5m or 7d")


def _quantity(value: object, units: Mapping[str, float], example: str) -> float:
    text = value.removesuffix("/s") if isinstance(value, str) else repr(value)
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in units or match[1].count(".") > 1:
        raise InvalidInputError(f"{value!r} has no meaning here: give a number, or one with a unit such as {example}")
    try:
        return float(match[1]) * units[match[2].lower()]
    except ValueError as error:
        raise InvalidInputError(f"{value!r} is no number") from error


def _tier(row: object) -> TierSpec:
    if not isinstance(row, dict):
        _refuse(row, "is no table")
    unknown = row.keys() - {
        *("name", "capacity", "bandwidth", "latency", "residency", "codec", "max_capacity", "max_bandwidth", "note"),
    }
    missing = {"name", "capacity", "bandwidth"} - row.keys()
    if unknown or missing:
        _refuse(row, f"has no {', '.join(sorted(missing))}" if missing else f"has an unknown {', '.join(unknown)}")
    residency = row.get("residency", (0.0, math.inf))
    if not isinstance(residency, list | tuple) or len(residency) != 2:
        _refuse(row, "has a residency that is not two times")
    return TierSpec(
        name=str(row["name"]),
        capacity_nbytes=parse_nbytes(row["capacity"]),
        bandwidth=float(parse_nbytes(row["bandwidth"])),
        latency_s=parse_seconds(row.get("latency", 0.0)),
        residency_s=(_residency(residency[0]), _residency(residency[1])),
        codec=str(row.get("codec", RAW)),
        max_capacity_nbytes=None if "max_capacity" not in row else parse_nbytes(row["max_capacity"]),
        max_bandwidth=None if "max_bandwidth" not in row else float(parse_nbytes(row["max_bandwidth"])),
        note=str(row.get("note", "")),
    )


def _residency(value: object) -> float:
    """Return a time that may be without end: TOML has `inf`."""
    return math.inf if value == math.inf else parse_seconds(value)


def _refuse(row: object, what: str) -> NoReturn:
    raise InvalidInputError(f"the tier {row!r} {what}; each has name, capacity and bandwidth")
