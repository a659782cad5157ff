"""The words of the command line and what each takes.

Knows nothing of what the words do: `agentmem --help` imports no store.
"""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from agentmem._version import __version__
from agentmem.config import Config
from agentmem.errors import InvalidInputError

_DESCRIPTION = "Look into stores of KV caches, and take care of them. No command needs a model."

_EPILOG = """\
every command:   agentmem COMMAND STORE ...   STORE is the directory of the store
                 (plan and simulate need none)
                 --json prints one JSON document; errors go to stderr
                 --key-file FILE opens an encrypted store (or the environment's AGENTMEM_KEY_FILE)

exit codes:      0 done    1 damage found    2 wrong input    3 locked by another process    4 not found
                 5 no room    6 not writable    7 needs a newer agentmem    8 a lake does not answer

examples:        agentmem ls runs.agentmem
                 agentmem show runs.agentmem ticket-4711/patch-a
                 agentmem check runs.agentmem --read-data=10%
"""

_TARGET = "SESSION[/NAME]"
_WHOLE = "100%"
_MAX_PAUSE_S = 3600


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are ours, so that they too come as one line or as JSON."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command.

        Raises:
            InvalidInputError: Always.
        """
        raise InvalidInputError(f"{message}; see `{self.prog} --help`")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return what a command line means: `command`, `store`, `json`, and what the command takes.

    Raises:
        InvalidInputError: It means nothing.
    """
    # argparse would take the word behind a bare --read-data for its value.
    return build_parser().parse_args([f"{word}={_WHOLE}" if word == "--read-data" else word for word in words])


def build_parser() -> Parser:
    """Make the parser of all commands."""
    parser = Parser(
        prog="agentmem",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"agentmem {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, title="commands")
    for add in (_add_looking, _add_caring, _add_keeping, _add_moving, _add_privacy, _add_lake, _add_planning, _add_top):
        add(commands)
    return parser


def _add_looking(commands: "argparse._SubParsersAction[Parser]") -> None:
    _command(commands, "ls", "list the sessions of a store")
    log = _command(commands, "log", "draw a session's tree: checkpoints, branches, own and total tokens")
    log.add_argument("session", metavar="SESSION", help="name of the session")
    log.add_argument("--all", action="store_true", help="draw the automatic checkpoints too where nothing happens")
    show = _command(commands, "show", "tell everything about one session, branch or checkpoint")
    show.add_argument("target", metavar=_TARGET, help="a session; NAME is a branch or the first digits of an id")
    show.add_argument("--reflog", action="store_true", help="list every move of the branch, or of all branches")
    _add_explain(commands)
    _command(commands, "stats", "count sessions, blocks and bytes, raw and stored")
    du = _command(commands, "du", "tell the bytes of each branch: its own, and shared with others")
    du.add_argument("session", metavar="SESSION", nargs="?", help="only the branches of this session")


def _add_explain(commands: "argparse._SubParsersAction[Parser]") -> None:
    explain = _command(commands, "explain", "tell why a prompt would or would not reuse what a session has stored")
    explain.add_argument("session", metavar="SESSION", help="name of the session")
    explain.add_argument("--branch", metavar="BRANCH", help="compare with this branch first (default: the active one)")
    prompt = explain.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--tokens", metavar="FILE", type=Path, help="token ids: a JSON list, or with spaces between")
    prompt.add_argument("--text", metavar="FILE", type=Path, help="text; needs --tokenizer")
    prompt.add_argument("--messages", metavar="FILE", type=Path, help="a JSON list of chat messages; needs --tokenizer")
    explain.add_argument("--tokenizer", metavar="FOLDER", type=Path, help="the model's folder; also shows texts")


def _add_caring(commands: "argparse._SubParsersAction[Parser]") -> None:
    check = _command(commands, "check", "verify structure, checksums, references and counts")
    check.add_argument(
        "--read-data",
        metavar="N%",
        nargs="?",
        const=1.0,
        type=_fraction,
        help="also decode blocks and compare them with their names: all, or N%% chosen at random",
    )
    repair = _command(commands, "repair", "make a damaged store whole again, and keep what it was")
    repair.add_argument(
        "--previous-snapshot", action="store_true", help="go back to what was stored before the newest commit"
    )
    repair.add_argument("--dry-run", action="store_true", help="change nothing; say what would become of the store")
    gc = _command(commands, "gc", "remove what nothing names any more, once its grace is over")
    gc.add_argument(
        "--grace",
        metavar="SECONDS",
        type=_seconds,
        default=Config().gc_grace_s,
        help="for so long dropped things can be brought back (default: %(default)g)",
    )
    gc.add_argument("--dry-run", action="store_true", help="change nothing; say what would go")
    rm = _command(commands, "rm", "give up a session or a branch")
    rm.add_argument("target", metavar="SESSION[/BRANCH]", help="what to remove")
    rm.add_argument("--yes", action="store_true", help="do it; without, only say what would be removed")
    _command(commands, "compact", "rewrite the data file without its free space; nobody may have the store open")


def _add_keeping(commands: "argparse._SubParsersAction[Parser]") -> None:
    prune = _command(
        commands, "prune", "let go of checkpoints and branches that no rule keeps; tokens of branches stay"
    )
    prune.add_argument(
        "--older-than",
        metavar="TIME",
        type=_age,
        default=0.0,
        help="keep what is younger: seconds, or a number with m, h or d (default: 0, nothing is too young)",
    )
    prune.add_argument("--drop-named", action="store_true", help="do not keep checkpoints for their message")
    prune.add_argument("--drop-branch-points", action="store_true", help="do not keep all KV where branches part")
    prune.add_argument("--drop-leaves", action="store_true", help="drop branches too, but for active ones")
    prune.add_argument("--dry-run", action="store_true", help="change nothing; list what would go, and its bytes")
    for word, summary in (
        ("pin", "keep a checkpoint, and those before it, though no branch reaches it"),
        ("unpin", "leave a pinned checkpoint to gc again"),
    ):
        command = _command(commands, word, summary)
        command.add_argument("target", metavar="SESSION/NAME", help="NAME is the first digits of an id, or a branch")


def _add_moving(commands: "argparse._SubParsersAction[Parser]") -> None:
    export = _command(commands, "export", "write a session or a branch, KV included, into one portable file")
    export.add_argument("session", metavar="SESSION", help="name of the session")
    export.add_argument("file", metavar="FILE", type=Path, help="the file; an older export there is replaced")
    export.add_argument("--branch", metavar="BRANCH", help="only this branch (default: all)")
    import_ = _command(commands, "import", "read such a file into a store, verifying all of it")
    import_.add_argument("file", metavar="FILE", type=Path, help="a file that `agentmem export` wrote")
    import_.add_argument("--as", metavar="NAME", dest="name", help="call the session so (default: as in the file)")


def _add_privacy(commands: "argparse._SubParsersAction[Parser]") -> None:
    forget = _command(commands, "forget", "remove a session for good, at once, from the data file's free pages too")
    forget.add_argument("session", metavar="SESSION", help="name of the session")
    forget.add_argument("--yes", action="store_true", help="do it; without, only say what would be forgotten")
    rekey = _command(commands, "rekey", "let another key open an encrypted store; nobody may have the store open")
    rekey.add_argument(
        "--new-key-file", metavar="FILE", type=Path, required=True, help="the new key: 32 bytes, or 64 hex digits"
    )


def _add_lake(commands: "argparse._SubParsersAction[Parser]") -> None:
    push = _command(commands, "push", "put a session into a lake, for other machines to pull")
    pull = _command(commands, "pull", "bring a session from a lake into a store, verifying all of it")
    for command, place in ((push, "in the lake"), (pull, "here")):
        command.add_argument("session", metavar="SESSION", help="name of the session")
        command.add_argument("--as", metavar="NAME", dest="name", help=f"call the session so {place}")
        url = os.environ.get("AGENTMEM_LAKE")
        command.add_argument(
            "--lake",
            metavar="URL",
            default=url,
            help="s3://bucket/prefix, gs://, az:// or ./directory (default: $AGENTMEM_LAKE)",
        )
    lake = _storeless(commands, "lake", "list a lake's sessions, remove one, or collect what nothing names")
    lake.add_argument("action", choices=("ls", "rm", "gc", "rekey"), help="what to do")
    lake.add_argument("lake", metavar="URL", help="s3://bucket/prefix, gs://, az:// or ./directory")
    lake.add_argument("session", metavar="SESSION", nargs="?", help="which session to remove")
    grace_s = Config().gc_grace_s
    lake.add_argument(
        "--grace",
        metavar="SECONDS",
        type=_seconds,
        default=grace_s,
        help="age of what gc removes (default: %(default)g)",
    )
    lake.add_argument("--dry-run", action="store_true", help="gc: change nothing; say what would go")
    lake.add_argument(
        "--new-key-file", metavar="FILE", type=Path, help="rekey: the key that opens the lake from now on"
    )
    _add_key_file(lake)


def _add_planning(commands: "argparse._SubParsersAction[Parser]") -> None:
    plan = _storeless(commands, "plan", "tell what a model's KV takes, where it fits, and when loading beats computing")
    subject = plan.add_mutually_exclusive_group(required=True)
    subject.add_argument("--model", metavar="MODEL", help="a config.json, its folder, or a name like llama-3.3-70b")
    subject.add_argument("--check-claims", action="store_true", help="check what articles say of the size of KV")
    plan.add_argument("--tokens", metavar="N", help="tokens of each branch: 4096, 100k, 1M")
    plan.add_argument("--dtype", metavar="DTYPE", help="fp32, bf16, fp16, fp8, int8 or int4 (default: the model's)")
    plan.add_argument("--branches", metavar="N", type=int, default=1, help="how many branches (default: 1)")
    plan.add_argument(
        "--shared", metavar="P%", default="0%", help="part of their tokens that they share (default: 0%%)"
    )
    plan.add_argument(
        "--tiers", metavar="FILE", default="local", help="local (default), micron, or a TOML file of tiers"
    )
    plan.add_argument("--prefill", metavar="TOK_S", type=_number, help="measured tokens per second of prefill")
    plan.add_argument("--flops", metavar="RATE", type=_number, help="sustained FLOP/s, where prefill was not measured")
    _add_simulation(commands)


def _add_simulation(commands: "argparse._SubParsersAction[Parser]") -> None:
    simulate = _storeless(commands, "simulate", "tell what tiers and a policy would do with a trace of requests")
    subject = simulate.add_mutually_exclusive_group(required=True)
    subject.add_argument("--trace", metavar="FILE", type=Path, help="lines of JSON as in Mooncake's public traces")
    subject.add_argument("--generate", metavar="KIND", help="agents, round-robin or beam")
    simulate.add_argument("--seed", metavar="N", type=int, default=0, help="of what is generated (default: 0)")
    simulate.add_argument("--block-size", metavar="N", type=int, help="tokens of a block of the trace (default: 512)")
    simulate.add_argument("--policy", metavar="NAME", default="lru", help="lru (default), slru, arc or hints")
    simulate.add_argument(
        "--tiers", metavar="FILE", default="local", help="local (default), micron, or a TOML file of tiers"
    )
    simulate.add_argument(
        "--capacity", metavar="NAME=SIZE", action="append", default=[], help="another capacity: 80GB, or 400blocks"
    )
    simulate.add_argument("--model", metavar="MODEL", default="smollm2-135m", help="as of plan (default: smollm2-135m)")
    simulate.add_argument("--dtype", metavar="DTYPE", help="as of plan (default: the model's)")
    simulate.add_argument("--prefill", metavar="TOK_S", type=_number, help="measured tokens per second of prefill")


def _add_top(commands: "argparse._SubParsersAction[Parser]") -> None:
    top = _storeless(commands, "top", "watch a store at work: tiers, moves, tokens, reasons")
    top.add_argument("target", metavar="TARGET", help="the directory of a store, or the URL of its metrics")
    top.add_argument("--once", action="store_true", help="print the numbers of this moment and end; --json does too")
    top.add_argument(
        "--interval", metavar="SECONDS", type=_pause, default=2.0, help="time between two looks (default: %(default)g)"
    )
    _add_key_file(top)


def _command(commands: "argparse._SubParsersAction[Parser]", word: str, summary: str) -> Parser:
    command = _storeless(commands, word, summary)
    command.add_argument("store", metavar="STORE", type=Path, help="the store's directory")
    _add_key_file(command)
    return command


def _add_key_file(command: Parser) -> None:
    command.add_argument(
        "--key-file",
        metavar="FILE",
        type=Path,
        default=os.environ.get("AGENTMEM_KEY_FILE") or None,
        help="the key of an encrypted store: 32 bytes, or 64 hex digits (default: $AGENTMEM_KEY_FILE)",
    )


def _storeless(commands: "argparse._SubParsersAction[Parser]", word: str, summary: str) -> Parser:
    """Add a command that may need no store."""
    command = commands.add_parser(
        word, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False
    )
    command.add_argument("--json", action="store_true", help="print one JSON document")
    return command


def _fraction(text: str) -> float:
    number = _number(text.removesuffix("%")) / 100
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no part of the blocks: give more than 0% and at most 100%")
    return number


def _age(text: str) -> float:
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86_400}.get(text[-1:])
    return _seconds(text) if unit is None else _seconds(text[:-1]) * unit


def _seconds(text: str) -> float:
    number = _number(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: give 0 or more seconds")
    return number


def _pause(text: str) -> float:
    number = _number(text)
    if not 0 < number <= _MAX_PAUSE_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no pause: give more than 0 and at most {_MAX_PAUSE_S} seconds")
    return number


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return number
