"""Numbers, times and tables for people, and values for JSON.

Knows nothing of stores.
"""

import datetime
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence

_UNITS = ("KiB", "MiB", "GiB", "TiB")
_DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_TIMES = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def size(nbytes: int) -> str:
    """Return bytes with a unit: 1536 is "1.5 KiB"."""
    if nbytes < 1024:
        return f"{nbytes} B"
    amount = float(nbytes)
    for unit in _UNITS:
        amount /= 1024
        if amount < 999.95 or unit == _UNITS[-1]:
            return f"{amount:.1f} {unit}"
    raise RuntimeError("the last unit takes everything")


def amount(nbytes: float) -> str:
    """Return bytes in powers of 1000, as articles and makers of memory count: 32,768,000,000 is "32.8 GB"."""
    for unit in _DECIMAL_UNITS:
        if nbytes < 999.95 or unit == _DECIMAL_UNITS[-1]:
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1000
    raise RuntimeError("the last unit takes everything")


def duration(time_s: float) -> str:
    """Return a time with two digits or more in a unit that suits it: 0.0328 is "33 ms"."""
    size, unit = next((each for each in _TIMES if time_s >= each[0]), _TIMES[-1])
    number = time_s / size
    return f"{number:,.0f} {unit}" if number >= 10 else f"{number:.1f} {unit}"


def when(time_s: float) -> str:
    """Return a Unix time as people here write it, to the minute."""
    try:
        return datetime.datetime.fromtimestamp(time_s, datetime.UTC).astimezone().strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return "?"


def count(number: int, noun: str) -> str:
    """Return "1 branch", "2 branches"."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def plain(text: str) -> str:
    """Return stored text on one line without characters that a terminal would obey."""
    return "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return rows under a header, columns aligned: the first `left` to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(_width(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(_pad(cell, widths[column], to_left=column < left) for column, cell in enumerate(line)).rstrip()
        for line in lines
    )


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Return names and values, one a line, values under one another."""
    width = max(_width(name) for name, _ in rows)
    return "\n".join(f"{_pad(name, width, to_left=True)}  {value}".rstrip() for name, value in rows)


def to_json(document: Mapping[str, object]) -> str:
    """Return a document as JSON: bytes as hex; numbers that JSON lacks as text."""
    return json.dumps(_plain_value(document), indent=2, ensure_ascii=False, allow_nan=False)


def to_line(extras: Mapping[str, object]) -> str:
    """Return the user's metadata as JSON on one line."""
    return plain(json.dumps(_plain_value(extras), ensure_ascii=False))


def _plain_value(value: object) -> object:
    if isinstance(value, Mapping):
        return {_plain_key(key): _plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _plain_key(key: object) -> str:
    return key.hex() if isinstance(key, bytes) else str(key)


def _pad(cell: str, width: int, *, to_left: bool) -> str:
    space = " " * (width - _width(cell))
    return cell + space if to_left else space + cell


def _width(text: str) -> int:
    """Count the columns that a terminal gives to `text`."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )
