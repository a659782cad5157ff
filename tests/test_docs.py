"""The documents are true: their code runs, their commands work, their links lead somewhere, no name is left out.

In README.md and docs/*.md every ```python block is run, all blocks of a document one after another in one namespace;
in ```console blocks the `$ agentmem` lines are run too, in the same directory. `model` and `tokenizer` stand ready, and
`from_pretrained` gives them instead of downloading. A block under a comment `<!-- not run: why -->` is only compiled.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^>]+) -->\n+)?^```(?P<kind>python|console)\n(?P<text>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
TEST = re.compile(r"`(?P<file>tests/\w[\w/]*\.py)(?:::(?P<name>\w+))?`")
LINK = re.compile(r"\]\((?!https?:|mailto:|#)(?P<path>[^)#\s]+)(?:#[^)\s]*)?\)")


@dataclass(frozen=True)
class Block:
    """A piece of a document.

    Attributes:
        path: The document.
        line: Number of lines before the block's text.
        kind: "python" or "console".
        text: What is between the fences.
        is_run: False when a comment says why not.
    """

    path: Path
    line: int
    kind: str
    text: str
    is_run: bool

    def compile(self) -> CodeType:
        """Compile the code so that a traceback names the document and its line."""
        return compile("\n" * self.line + self.text, str(self.path), "exec")

    def commands(self) -> list[str]:
        """Return what follows the prompts."""
        return [line[2:].strip() for line in self.text.splitlines() if line.startswith("$ ")]


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("text"))
        yield Block(path, line, match["kind"], match["text"], match["reason"] is None)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def run_agentmem(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentmem", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def cli_words() -> list[str]:
    usage = run_agentmem("--help", cwd=ROOT).stdout
    match = re.search(r"\{([a-z,-]+)\}", usage)
    assert match, f"no list of commands in `agentmem --help`:\n{usage}"
    return match[1].split(",")


@pytest.fixture
def no_download(monkeypatch, tiny_chat):
    import transformers

    model, tokenizer = tiny_chat
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    return {"__name__": "__main__", "model": model, "tokenizer": tokenizer}


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if any(blocks(path))], ids=name_of)
def test_the_code_of_a_document_runs_from_top_to_bottom(path, no_download, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed = []

    for block in blocks(path):
        if block.kind == "python":
            code = block.compile()
            if block.is_run:
                exec(code, no_download)
        elif block.is_run:
            for command in block.commands():
                words = shlex.split(command, comments=True)
                if words[0] == "agentmem":
                    done = run_agentmem(*words[1:], cwd=tmp_path)
                    failed += [f"{command}: {done.stderr.strip()}"] if done.returncode else []

    assert failed == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_command_in_a_document_exists(path):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    unknown = []

    for block in blocks(path):
        for command in block.commands() if block.kind == "console" else []:
            words = shlex.split(command, comments=True)
            if words[0] == "make":
                unknown += [command for word in words[1:] if "=" not in word and word not in targets]
            elif "python" in words[0]:
                unknown += [command for word in words[1:2] if word.endswith(".py") and not (ROOT / word).exists()]

    assert unknown == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_link_of_a_document_leads_to_a_file(path):
    links = [match["path"] for match in LINK.finditer(path.read_text(encoding="utf-8"))]

    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_test_that_a_document_names_exists(path):
    named = TEST.findall(path.read_text(encoding="utf-8"))

    missing = [f"{file}::{name}" for file, name in named if not (ROOT / file).exists() or not has_test(file, name)]

    assert missing == []


def has_test(file, name):
    return not name or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_every_public_name_is_in_the_api_document():
    import agentmem

    document = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")

    assert [name for name in agentmem.__all__ if not re.search(rf"\b{name}\b", document)] == []


def test_every_word_of_the_command_line_is_documented_and_has_help():
    document = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    words = cli_words()

    assert [word for word in words if f"agentmem {word}" not in document] == []
    assert [word for word in words if run_agentmem(word, "--help", cwd=ROOT).returncode != 0] == []


def test_every_make_target_says_what_it_does():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split()

    assert [target for target in targets if not re.search(rf"^{target}:.*## \S", makefile, re.MULTILINE)] == []
