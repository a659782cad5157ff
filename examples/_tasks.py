"""What the agent of tree_search.py works on: a long text to read, lines to write, and a verifier.

Knows nothing of models and of agentmem.
"""

import ast
import inspect
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

METHODS = [name for name in dir(str) if not name.startswith("_") and "format" not in name]
"""Methods whose results are small and quick to compute whatever a model passes to them."""

SHOWN = {
    "upper": ">>> 'hello'.upper()\n'HELLO'",
    "split": ">>> 'a-b-c'.split('-')\n['a', 'b', 'c']",
    "count": ">>> 'banana'.count('a')\n3",
    "endswith": ">>> 'report.txt'.endswith('.txt')\nTrue",
}
"""Doctests that the agent is shown; it has to find others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something to be written item by item, each checked by code.

    Attributes:
        context: The text that every branch reads first.
        leads: What is put before each line of an item; the model writes the rest of the line.
        check: Given the lines of an item written so far and the items before it, says what is wrong with the last line;
            "" when nothing is.
    """

    context: str
    leads: tuple[str, ...]
    check: Callable[[Sequence[str], Sequence[Sequence[str]]], str]


def doctests() -> Task:
    """Write doctests for methods of str, none twice, after reading their documentation in the installed Python."""
    manual = "\n\n".join(f"str.{name}\n{inspect.getdoc(getattr(str, name))}" for name in METHODS)
    shown = "".join(f"\n# str.{name}\n{test}\n" for name, test in SHOWN.items())
    context = f"Python's string methods\n\n{manual}\n\n\nExamples, one for each method\n{shown}"
    return Task(context=context, leads=("\n# str.", ">>> '", ""), check=check_doctest)


def check_doctest(lines: Sequence[str], before: Sequence[Sequence[str]]) -> str:
    """Check the name of a method, then a call of it, then the result, which Python computes to compare."""
    if "\n" not in lines[-1]:
        return f"{lines[-1]!r} has no end"
    name = lines[0].strip()
    if len(lines) == 1:
        if name in SHOWN or name in {item[0].strip() for item in before}:
            return f"str.{name} has a test already"
        return "" if name in METHODS else f"str.{name} is no method to test"
    call = f"'{lines[1].strip()}"
    try:
        found = _run(call, name)
    except Exception as error:  # noqa: BLE001  # what a model writes may raise anything
        return f"{call} raises {type(error).__name__}"
    if len(lines) == 2 or repr(found) == lines[2].strip():
        return ""
    return f"{call} is {found!r}, not {lines[2].strip() or 'nothing'}"


def _run(call: str, name: str) -> object:
    """Evaluate 'text'.name(literal, ...), and nothing else."""
    node = ast.parse(call, mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.keywords:
        raise SyntaxError("no call of a method")
    text, arguments = ast.literal_eval(node.func.value), [ast.literal_eval(argument) for argument in node.args]
    if not isinstance(text, str) or node.func.attr != name:
        raise SyntaxError(f"no call of str.{name}")
    if any(isinstance(argument, int) and abs(argument) > 99 for argument in arguments):
        raise OverflowError("a number too large for a test")
    return getattr(text, name)(*arguments)


def luck() -> Task:
    """Write lines that pass by chance, for models that cannot write Python: every second one does."""

    def check(lines: Sequence[str], _before: Sequence[Sequence[str]]) -> str:
        return "" if zlib.crc32(lines[0].encode()) % 2 else "no luck"

    return Task(context=f"{inspect.getdoc(str)}\n", leads=("\n> ",), check=check)


TASKS = {"doctests": doctests, "luck": luck}
