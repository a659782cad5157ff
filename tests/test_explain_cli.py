"""`agentmem explain`: what people read, what programs read, how it takes prompts, and that it starts without torch."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import agentmem
from agentmem._lmdb import Environment, Table
from agentmem.cli import main
from agentmem.testing import models
from agentmem.testing.damage import overwrite

TEXT = "Current time: 12:00:01. You fix failing tests." + " Read the log and change as little as you can." * 9
CONFIG = agentmem.Config(block_size=16)
KEYS = {
    *("session", "num_tokens", "match", "num_equal", "num_reusable", "num_reusable_fresh", "change", "limit"),
    *("first_difference", "num_removed", "num_inserted", "num_equal_after", "num_differences", "context"),
    *("old_tokens", "new_tokens", "context_text", "old_text", "new_text", "num_to_compute", "num_to_compute_fresh"),
    *("num_recomputed", "advice", "damaged"),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory, tiny_chat):
    """A closed store: session "task" with two branches of one text, "new" with its start, and "salted" with another."""
    model, tokenizer = tiny_chat
    path = tmp_path_factory.mktemp("explain") / "store.agentmem"
    with agentmem.open(path, model=model, tokenizer=tokenizer, config=CONFIG) as store:
        session = store.create("task")
        session.append(TEXT)
        plan = session.checkpoint("plan")
        session.fork("b", at=plan)
        session.append([1, 2, 3], branch="b")
        session.checkpoint(branch="b")
        other = store.create("new")
        other.append(TEXT[:30])
        other.checkpoint()
    salted = agentmem.Config(block_size=16, salt=b"tenant")
    with agentmem.open(path, model=model, tokenizer=tokenizer, config=salted) as store:
        session = store.create("salted")
        session.append(range(2000, 2100))
        session.checkpoint()
    return path


@pytest.fixture(scope="module")
def ids(tiny_chat):
    return tiny_chat[1].encode(TEXT)


@pytest.fixture
def run(capsys):
    """Run `agentmem explain` in this process; return its exit code, stdout and stderr."""

    def run(*words):
        capsys.readouterr()
        code = main(["explain", *(str(word) for word in words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def ask(run):
    """Run `agentmem explain --json`, which must succeed without a notice; return its document."""

    def ask(*words):
        code, out, err = run(*words, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return ask


@pytest.fixture
def write(tmp_path):
    """Write a file; return its path."""

    def write(content, name="prompt"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="module")
def folder():
    return models.smollm2_folder(Path(__file__).parent.parent / ".models")


def changed(ids):
    """Return the prompt with its clock one second later."""
    return [*ids[:11], ids[11] + 1, *ids[12:]]


def test_people_read_what_is_reused_where_it_ends_and_what_to_do(run, write, store, ids):
    code, out, err = run(store, "task", "--tokens", write(changed(ids)))

    assert (code, err) == (0, "")
    assert [line.rstrip() for line in out.splitlines()] == [
        f"prompt              {len(ids)} tokens",
        f"best match          branch main of session task, {len(ids)} tokens",
        "the same            the first 11 tokens",
        f"reusable            11 tokens, {len(ids) - 11} to compute",
        f"on an empty branch  0, {len(ids)} to compute",
        f"change              replaced at token 11: 1 stored token for 1; {len(ids) - 12} tokens behind them are the "
        f"same again",
        f"before it           {' '.join(map(str, ids[3:11]))}",
        f"stored              {ids[11]}",
        f"prompt has          {ids[11] + 1}",
        f"cost                {len(ids) - 12} tokens computed again that are stored",
        "advice              append to what is stored instead of rendering it again, and put text that changes last",
    ]


def test_programs_read_one_document_with_fixed_keys(ask, write, store, ids):
    found = ask(store, "task", "--tokens", write(changed(ids)))

    assert set(found) == KEYS
    assert set(found["match"]) == {"session", "branch", "checkpoint_id", "num_tokens", "is_own"}
    assert (found["change"], found["limit"], found["num_equal"]) == ("replaced", "complete", 11)


def test_it_tells_what_an_open_store_tells(ask, write, store, ids, tiny_chat):
    prompt = [*ids, 7, 8]
    with agentmem.open(store, model=tiny_chat[0], config=CONFIG) as opened:
        live = opened.resume("task").explain(prompt, branch="b")
    found = ask(store, "task", "--branch", "b", "--tokens", write(prompt))

    assert found["match"]["checkpoint_id"] == live.match.checkpoint_id.hex()
    assert (found["num_reusable"], found["num_reusable_fresh"]) == (live.num_reusable, live.num_reusable_fresh)
    assert (found["change"], found["advice"]) == (live.change, live.advice)


def test_ids_may_stand_between_spaces_or_come_from_stdin(ask, write, store, ids, monkeypatch):
    from_list = ask(store, "task", "--tokens", write(ids))
    from_words = ask(store, "task", "--tokens", write(" ".join(map(str, ids))))
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(ids)))
    from_stdin = ask(store, "task", "--tokens", "-")

    assert from_list == from_words == from_stdin


def test_text_and_messages_need_a_tokenizer_which_shows_texts_too(ask, run, write, store, folder):
    prompt = write(TEXT.replace("00:01", "00:02"))
    messages = write([{"role": "user", "content": "Hello"}], "messages")

    found = ask(store, "task", "--text", prompt, "--tokenizer", folder)
    rendered = ask(store, "task", "--messages", messages, "--tokenizer", folder)
    _, out, _ = run(store, "task", "--text", prompt, "--tokenizer", folder)

    assert (found["context_text"], found["old_text"], found["new_text"]) == (" 12:00:0", "1", "2")
    assert "stored              '1'" in out
    assert rendered["num_tokens"] > 10


def test_another_session_may_have_more(ask, write, store, ids):
    found = ask(store, "new", "--tokens", write(ids))

    assert (found["match"]["session"], found["match"]["is_own"]) == ("task", False)
    assert (found["num_equal"], found["limit"]) == (len(ids), "whole-blocks")


def test_blocks_under_a_salt_are_found_through_the_session_that_has_them(ask, run, write, store):
    prompt = write([*range(2000, 2040), 7])

    own = ask(store, "salted", "--tokens", prompt)
    other = ask(store, "new", "--tokens", prompt)
    _, _, notices = run(store, "salted", "--tokens", prompt)

    assert (own["num_reusable"], own["num_reusable_fresh"], own["limit"]) == (40, 32, "complete")
    assert (other["match"]["session"], other["num_equal"], other["num_reusable"]) == ("salted", 40, 0)
    assert other["limit"] == "foreign-salt"
    assert "stored under a salt" in notices


@pytest.mark.parametrize(
    ("words", "content", "code", "kind"),
    [
        (["nothing", "--tokens", "FILE"], "[1]", 4, "not-found"),
        (["task", "--branch", "nothing", "--tokens", "FILE"], "[1]", 4, "not-found"),
        (["task", "--tokens", "missing"], "[1]", 4, "not-found"),
        (["task", "--tokens", "FILE", "--tokenizer", "missing"], "[1]", 4, "not-found"),
        (["task", "--tokens", "FILE"], "", 2, "invalid-input"),
        (["task", "--tokens", "FILE"], "[]", 2, "invalid-input"),
        (["task", "--tokens", "FILE"], "[1, -2]", 2, "invalid-input"),
        (["task", "--tokens", "FILE"], "[1, 4294967296]", 2, "invalid-input"),
        (["task", "--tokens", "FILE"], "[1, 2.5]", 2, "invalid-input"),
        (["task", "--tokens", "FILE"], "[1, [2]]", 2, "invalid-input"),
        (["task", "--tokens", "FILE"], "[1, ", 2, "invalid-input"),
        (["task", "--tokens", "FILE"], "one two", 2, "invalid-input"),
        (["task", "--text", "FILE"], "text", 2, "invalid-input"),
        (["task", "--messages", "FILE"], "[]", 2, "invalid-input"),
        (["task"], "", 2, "invalid-input"),
        (["task", "--tokens", "FILE", "--text", "FILE"], "1", 2, "invalid-input"),
    ],
)
def test_what_cannot_be_read_ends_with_its_code_and_kind(run, write, store, words, content, code, kind):
    path = str(write(content))

    found, out, err = run(store, *(path if word == "FILE" else word for word in words), "--json")

    assert (found, out) == (code, "")
    assert json.loads(err)["error"]["kind"] == kind


@pytest.mark.parametrize("content", ["no JSON", '{"role": "user"}', "[1]"])
def test_messages_that_are_none_are_refused(run, write, store, folder, content):
    code, _, err = run(store, "task", "--messages", write(content), "--tokenizer", folder)

    assert code == 2
    assert "JSON" in err


def test_a_folder_without_a_tokenizer_is_refused(run, write, store, tmp_path):
    code, _, err = run(store, "task", "--text", write("text"), "--tokenizer", tmp_path)

    assert code == 2
    assert "holds no tokenizer" in err


def test_a_damaged_branch_is_passed_over_and_told(tmp_path, run, write, store, ids):
    copy = shutil.copytree(store, tmp_path / "copy")
    with Environment.open(copy) as environment:
        with environment.read() as txn:
            key = next(key for key, _ in txn.scan_each(Table.NODES))
        environment.submit(lambda txn: overwrite(txn, Table.NODES, key, b"12345678damaged")).result()
    with agentmem.open(copy) as view:
        names = [record.name for record in view.sessions()]

    codes = [run(copy, name, "--tokens", write(ids))[0] for name in names]

    assert sorted(codes) == [0, 0, 1]


def test_it_starts_without_torch(write, store, ids):
    code = "from agentmem.cli import main; code = main(sys.argv[1:]); print(sorted(sys.modules)); sys.exit(code)"
    command = [sys.executable, "-c", f"import sys; {code}", "explain", store, "task", "--tokens", write(ids)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    modules = done.stdout.splitlines()[-1]
    assert done.returncode == 0
    assert "'agentmem.explain.search'" in modules
    assert not any(f"'{name}'" in modules for name in ("torch", "numpy", "transformers", "networkx"))
