"""Run one command: parse, dispatch, print, and turn errors into one line and an exit code."""

import argparse
import importlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from agentmem.cli.parser import parse
from agentmem.cli.result import ExitCode, Result, error_kind, exit_code
from agentmem.cli.text import plain, to_json

_HOMES = {
    "agentmem.cli.look": ("ls", "log"),
    "agentmem.cli.show": ("show",),
    "agentmem.cli.explain": ("explain",),
    "agentmem.cli.sizes": ("stats", "du"),
    "agentmem.cli.remove": ("rm",),
    "agentmem.cli.care": ("check", "repair", "gc", "compact"),
    "agentmem.cli.retain": ("prune", "pin", "unpin"),
    "agentmem.cli.move": ("export", "import"),
    "agentmem.cli.privacy": ("forget", "rekey"),
    "agentmem.cli.plan": ("plan",),
    "agentmem.cli.simulate": ("simulate",),
    "agentmem.cli.top": ("top",),
    "agentmem.cli.lake": ("push", "pull", "lake"),
}
"""Where each command is."""


def main(words: Sequence[str] | None = None) -> int:
    """Run `agentmem` with `words` (by default those of the process) and return its exit code."""
    words = sys.argv[1:] if words is None else words
    # The library warns of damage that it passes over; a command says so itself.
    logging.getLogger("agentmem").addHandler(logging.NullHandler())
    try:
        return _run(words)
    except BrokenPipeError:
        # Whoever read stdout has seen enough (`agentmem log ... | head`); Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except KeyboardInterrupt as error:
        _say(error, "interrupted; what was finished is kept", is_json="--json" in words)
        return ExitCode.INTERRUPTED


def _run(words: Sequence[str]) -> int:
    try:
        arguments = parse(words)
        result = _dispatch(arguments)
        print(to_json(result.document) if arguments.json else result.text(), flush=True)
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the user gets one line and a code
        return _complain(error, is_json="--json" in words)
    for notice in result.notices if not arguments.json else ():
        print(f"agentmem: {plain(notice)}", file=sys.stderr)
    return result.exit_code


def _dispatch(arguments: argparse.Namespace) -> Result:
    """Import the command's file and no other: torch and networkx are loaded by those that need them."""
    home = next(home for home, words in _HOMES.items() if arguments.command in words)
    run: Callable[[argparse.Namespace], Result] = importlib.import_module(home).COMMANDS[arguments.command]
    return run(arguments)


def _complain(error: Exception, *, is_json: bool) -> int:
    code = exit_code(error)
    message = plain(str(error) or type(error).__name__)
    if code is ExitCode.INTERNAL and not is_json:
        traceback.print_exception(error, file=sys.stderr)
    _say(error, message, is_json=is_json)
    return code


def _say(error: BaseException, message: str, *, is_json: bool) -> None:
    if is_json:
        print(json.dumps({"error": {"kind": error_kind(error), "message": message}}), file=sys.stderr)
    else:
        print(f"agentmem: {message}", file=sys.stderr)
