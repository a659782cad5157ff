"""One list of reasons: every word that says why is in it once, in docs/reasons.md, and in a group."""

import ast
import enum
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentmem
from agentmem import Reason, errors, reasons
from agentmem.cli.result import error_kind
from agentmem.stats import Counters

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "agentmem").rglob("*.py"))
DOCUMENT = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8")
GROUPS = {
    name: group
    for name, group in vars(reasons).items()
    if isinstance(group, frozenset) and all(isinstance(word, Reason) for word in group)
}


def meanings() -> dict[str, str]:
    """Return what each word means: the string below it in the source."""
    [reason] = [
        node
        for node in ast.parse((ROOT / "agentmem" / "reasons.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    pairs = zip(reason.body, reason.body[1:], strict=False)
    return {
        ast.literal_eval(word.value): " ".join(ast.literal_eval(text.value).split())
        for word, text in pairs
        if isinstance(word, ast.Assign) and isinstance(text, ast.Expr)
    }


def calls(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the counters that are added to: a pattern of the name, and whether a reason is added to it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("counters.add"):
            yield _pattern(node.args[0]), any(keyword.arg == "reason" for keyword in node.keywords)


def _pattern(name: ast.expr) -> str:
    if isinstance(name, ast.JoinedStr):
        return "".join(
            re.escape(str(part.value)) if isinstance(part, ast.Constant) else "[a-z]+" for part in name.values
        )
    return re.escape(ast.literal_eval(name))


def words_in_use() -> set[str]:
    """Return the names of the words that some file says."""
    said: set[str] = set()
    for path in SOURCES:
        if path.name != "reasons.py":
            said |= set(re.findall(r"\bReason\.([A-Z_]+)", path.read_text(encoding="utf-8")))
    return said


def error_classes() -> list[type[agentmem.AgentMemError]]:
    return [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.AgentMemError)]


def test_every_reason_stands_in_the_document_with_its_meaning():
    rows = [f"| `{word}` | {meaning} |" for word, meaning in meanings().items()]

    assert [row for row in rows if row not in DOCUMENT] == []
    assert len(rows) == len(Reason)
    assert len(re.findall(r"^\| `[a-z-]+` \|", DOCUMENT, re.MULTILINE)) == len(Reason), "a row is of no use any more"


def test_every_reason_belongs_to_a_group_and_is_said_by_somebody():
    grouped = frozenset().union(*GROUPS.values())

    assert [word for word in Reason if word not in grouped] == []
    assert [word.name for word in Reason if word.name not in words_in_use()] == []


def test_every_group_of_reasons_is_explained_in_the_document():
    assert [name for name in GROUPS if f"`{name}`" not in DOCUMENT] == []


def test_no_other_list_of_words_repeats_a_reason():
    words = {str(word) for word in Reason}
    repeated = []

    for path in SOURCES:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if "(StrEnum)" in path.read_text(encoding="utf-8") and module != "agentmem.reasons":
            for each in vars(importlib.import_module(module)).values():
                is_list = isinstance(each, type) and issubclass(each, enum.StrEnum) and each is not Reason
                repeated += [member for member in each if member in words] if is_list else []

    assert repeated == []


@pytest.mark.parametrize("error", error_classes(), ids=lambda error: error.__name__)
def test_every_error_says_its_reason_in_a_word_that_is_its_name(error):
    name = re.sub(r"(?<!^)(?=[A-Z])", "-", error.__name__.removesuffix("Error")).lower()

    assert error.reason in reasons.REFUSALS
    assert error is agentmem.AgentMemError or error.reason == name


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (agentmem.CapacityError("x"), "capacity"),
        (OSError("x"), "system-error"),
        (ZeroDivisionError("x"), "internal"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_the_command_line_names_the_kind_of_every_error_by_a_reason(error, kind):
    assert error_kind(error) == kind
    assert error_kind(error) in reasons.REFUSALS


def test_every_counter_stands_in_the_document():
    documented = re.findall(r"^\| `([a-z_]+(?:_REASON)?)` \|", DOCUMENT, re.MULTILINE)
    counted = {found for path in SOURCES for found in calls(ast.parse(path.read_text(encoding="utf-8")))}
    patterns = [name + "_REASON" if has_reason else name for name, has_reason in counted]

    assert len(patterns) > 10
    assert [name for name in patterns if not any(re.fullmatch(name, row) for row in documented)] == []


def test_a_counter_with_a_reason_bears_its_word():
    counters = Counters()

    counters.add("tokens_lost", 3, reason=Reason.NO_STATE)
    counters.add("tokens_lost", 2)

    assert counters.snapshot() == {"tokens_lost": 2, "tokens_lost_no-state": 3}
