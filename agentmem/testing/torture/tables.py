"""The tables that `make torture` prints; pytest shows them with `-s`."""

import sys
from collections.abc import Mapping


def print_table(title: str, rows: Mapping[str, object]) -> None:
    """Print a title, and a line for each name and value."""
    width = max((len(name) for name in rows), default=0)
    lines = [f"\n== {title}", *(f"{name:<{width}}  {_text(value)}" for name, value in rows.items())]
    sys.stdout.write("\n".join(lines) + "\n")


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)
