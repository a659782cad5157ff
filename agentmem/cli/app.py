"""Run one command: parse, dispatch, print, and turn errors into one line and an exit code."""

import argparse
import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from agentmem.cli.parser import parse
from agentmem.cli.result import ExitCode, Result, error_kind, exit_code
from agentmem.cli.text import plain, to_json


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
    except KeyboardInterrupt:
        print("agentmem: interrupted; what was finished is kept", file=sys.stderr)
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
    match arguments.command:
        case "ls" | "log":
            from agentmem.cli import look

            return look.COMMANDS[arguments.command](arguments)
        case "show":
            from agentmem.cli import show

            return show.show(arguments)
        case "explain":
            from agentmem.cli import explain

            return explain.explain(arguments)
        case "stats" | "du":
            from agentmem.cli import sizes

            return sizes.COMMANDS[arguments.command](arguments)
        case "rm":
            from agentmem.cli import remove

            return remove.rm(arguments)
        case "check" | "gc" | "compact":
            from agentmem.cli import care

            return care.COMMANDS[arguments.command](arguments)
        case _:
            from agentmem.cli import move

            return move.COMMANDS[arguments.command](arguments)


def _complain(error: Exception, *, is_json: bool) -> int:
    code = exit_code(error)
    message = plain(str(error) or type(error).__name__)
    if is_json:
        print(json.dumps({"error": {"kind": error_kind(error), "message": message}}), file=sys.stderr)
        return code
    if code is ExitCode.INTERNAL:
        traceback.print_exception(error, file=sys.stderr)
    print(f"agentmem: {message}", file=sys.stderr)
    return code
