"""`explain`: why a prompt would or would not reuse what is stored. Beside a running process, and without torch."""

import argparse
from dataclasses import asdict

from agentmem.cli.prompt import Prompt, read_prompt
from agentmem.cli.result import ExitCode, Result
from agentmem.cli.source import open_view
from agentmem.cli.text import count, facts, plain
from agentmem.explain.explanation import Explanation, Match
from agentmem.explain.recorded import RecordedLibrary
from agentmem.explain.search import explain as explain_prompt
from agentmem.ids import short
from agentmem.reasons import Reason

_SALTED = "the session is stored under a salt, which is not: whether other sessions have more of the prompt is unknown"


def explain(arguments: argparse.Namespace) -> Result:
    """Say what a prompt would reuse of a session, and why no more."""
    prompt = read_prompt(arguments)
    decode = None if prompt.tokenizer is None else prompt.tokenizer.decode
    with open_view(arguments) as store, store.environment.read() as txn:
        library = RecordedLibrary(txn, store.catalog, arguments.session, arguments.branch)
        explanation = explain_prompt(prompt.tokens, library, decode=decode)
    damaged = [str(error) for error in library.damaged]
    return Result(
        document={"session": arguments.session, **_document(explanation), "damaged": damaged},
        text=lambda: _text(explanation, prompt),
        exit_code=ExitCode.DAMAGE if damaged else ExitCode.OK,
        notices=[*damaged, *([_SALTED] if library.shelf.is_salted else [])],
    )


COMMANDS = {"explain": explain}


def _document(explanation: Explanation) -> dict[str, object]:
    return asdict(explanation) | {
        "num_to_compute": explanation.num_to_compute,
        "num_to_compute_fresh": explanation.num_to_compute_fresh,
        "num_recomputed": explanation.num_recomputed,
        "advice": explanation.advice,
    }


def _text(explanation: Explanation, prompt: Prompt) -> str:
    found = explanation
    rows = [
        ("prompt", count(found.num_tokens, "token")),
        ("best match", "nothing is stored" if found.match is None else _match_text(found.match)),
        ("the same", _same_text(found)),
        ("reusable", f"{count(found.num_reusable, 'token')}, {found.num_to_compute:,} to compute"),
        ("on an empty branch", f"{found.num_reusable_fresh:,}, {found.num_to_compute_fresh:,} to compute"),
        ("change", f"{found.change}{_change_text(found)}"),
        *_sides(found, prompt),
        ("cost", f"{count(found.num_recomputed, 'token')} computed again that are stored"),
        ("advice", found.advice),
    ]
    return facts(rows)


def _match_text(match: Match) -> str:
    name = "a branch that was dropped" if match.branch is None else f"branch {plain(match.branch)}"
    return f"{name} of session {plain(match.session)}, {count(match.num_tokens, 'token')}"


def _same_text(found: Explanation) -> str:
    checkpoint = None if found.match is None else found.match.checkpoint_id
    last = "" if checkpoint is None else f", past checkpoint {short(checkpoint)}"
    limit = "" if found.limit is Reason.COMPLETE else f"; not all reusable: {found.limit}"
    return f"the first {count(found.num_equal, 'token')}{last}{limit}"


def _change_text(found: Explanation) -> str:
    if found.first_difference is None or found.change is Reason.NOTHING_IN_COMMON:
        return ""
    sides = f"{count(found.num_removed, 'stored token')} for {found.num_inserted:,}"
    again = f"{count(found.num_equal_after, 'token')} behind them are the same again" if found.num_equal_after else ""
    more = f", with {count(found.num_differences - 1, 'more difference')}" if found.num_differences > 1 else ""
    return f" at token {found.first_difference:,}: {sides}{'; ' if again else ''}{again}{more}"


def _sides(found: Explanation, prompt: Prompt) -> list[tuple[str, str]]:
    """Return what stands before the difference, and on either side of it."""
    sides = (
        ("before it", found.context, found.context_text),
        ("stored", found.old_tokens, found.old_text),
        ("prompt has", found.new_tokens, found.new_text),
    )
    is_text = prompt.tokenizer is not None
    return [(name, repr(text) if is_text else " ".join(map(str, ids))) for name, ids, text in sides if ids]
