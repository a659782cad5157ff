"""The command line of tree_search.py."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from _tasks import TASKS


def parse(description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add: Callable[..., object] = parser.add_argument
    add("--model", default="smollm2", help="smollm2, tiny (random), or a folder or hub id that transformers loads")
    add("--store", type=Path, default=Path("tree_search.agentmem"), help="directory of the store")
    add("--task", choices=TASKS, default="doctests", help="what to write")
    add("--resume", action="store_true", help="go on with a stored search, with a higher goal if it came to its end")
    add("--goal", type=int, default=5, help="items that a branch must have")
    add("--steps", type=int, default=8, help="nodes to expand at most")
    add("--width", type=int, default=8, help="children of a node, sampled together")
    add("--tries", type=int, default=3, help="samples of a line before its branch is dropped")
    add("--line-tokens", type=int, default=16, help="tokens of a line at most")
    add("--temperature", type=float, default=0.7, help="of sampling")
    add("--seed", type=int, default=0, help="of the search")
    add("--threads", type=int, default=2, help="threads of torch")
    add("--no-baseline", action="store_true", help="leave out the same search without agentmem")
    add("--json", action="store_true", help="print the numbers as JSON; everything else goes to stderr")
    return parser.parse_args(arguments)
