"""The command line: what people read, what programs read, and how each error ends."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest

import agentmem
from agentmem._lmdb import Environment, Table
from agentmem.cli import app, main
from agentmem.cli.parser import build_parser, parse
from agentmem.cli.result import ExitCode, error_kind, exit_code
from agentmem.cli.text import plain, size, table, to_json
from agentmem.errors import AgentMemError, InvalidInputError
from agentmem.testing.damage import overwrite
from agentmem.tree import rows
from agentmem.tree.catalog import Catalog

PROMPT = [token % 500 for token in range(200)]
COMMANDS = [
    *("ls", "log", "show", "explain", "stats", "du", "check", "gc"),
    *("rm", "compact", "forget", "rekey", "export", "import", "push", "pull"),
]
STORELESS = ["lake", "plan", "simulate", "top"]
"""Commands that need no store; their documents are tested where they are."""

KEYS = {
    "ls": {"store", "sessions", "damaged"},
    "log task": {"session", "session_id", "active_branch", "branches", "checkpoints", "damaged"},
    "show task": {
        *("session", "session_id", "active_branch", "model_name", "fingerprint", "block_size", "extras", "created_s"),
        *("updated_s", "branches", "num_checkpoints", "damaged"),
    },
    "show task/a --reflog": {
        *("session", "branch", "tip", "num_tokens", "num_open", "num_pending", "extras", "created_s", "updated_s"),
        *("is_active", "checkpoint_ids", "kv", "moves", "damaged"),
    },
    "stats": {
        *("store", "uuid", "format_version", "created_s", "num_sessions", "num_branches", "num_checkpoints"),
        *("disk_num_blocks", "disk_raw_nbytes", "disk_stored_nbytes", "ratio", "file_nbytes", "free_nbytes", "damaged"),
    },
    "du": {"store", "branches", "dropped", "unnamed", "total", "damaged"},
    "check": {
        *("store", "is_sound", "problems", "num_sessions", "num_branches", "num_checkpoints", "num_blocks"),
        *("num_blocks_read", "nbytes_read"),
    },
    "gc --dry-run": {
        *("store", "checkpoints", "num_blocks", "nbytes", "num_rows", "num_stale_readers", "damaged", "is_dry_run"),
        "free_nbytes",
    },
    "compact": {"store", "before_nbytes", "after_nbytes"},
}


@pytest.fixture(scope="module")
def original(tmp_path_factory, llama):
    """A closed store: session "task" with a plan and two branches of it, and session "a/b" with one."""
    path = tmp_path_factory.mktemp("original") / "store.agentmem"
    with agentmem.open(path, model=llama) as store:
        session = store.create("task", extras={"owner": "me", "best": math.inf, "raw": b"\1"})
        session.forward(PROMPT)
        plan = session.checkpoint("plan\x1b[2J written")
        for name in ("a", "b"):
            session.fork(name, at=plan)
            session.switch(name)
            session.append([7, 8, ord(name)])
            session.generate(max_new_tokens=80, do_sample=False)
            session.branch(name).extras["score"] = 0.25
            session.checkpoint(f"tried {name}")
        other = store.create("a/b")
        other.append(PROMPT[:100])
        other.checkpoint("other")
    return path


@pytest.fixture
def store(original, tmp_path):
    """The path of a copy of the original that a test may change."""
    return shutil.copytree(original, tmp_path / "store.agentmem")


@pytest.fixture
def run(capsys):
    """Run a command in this process; return its exit code, stdout and stderr."""

    def run(*words):
        capsys.readouterr()
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def ask(run):
    """Run a command with --json that must succeed; return its document."""

    def ask(*words):
        code, out, err = run(*words, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return ask


def checkpoint_id(path, message):
    with agentmem.open(path) as store:
        return next(c.checkpoint_id.hex() for c in store.view("task").checkpoints if c.message.startswith(message))


def damage(path, table, key):
    """Replace a row by one whose checksum is that of another key."""
    with Environment.open(path) as environment:
        environment.submit(lambda txn: overwrite(txn, table, key, b"12345678damaged")).result()


def change(path, operation):
    with Environment.open(path) as environment:
        catalog = Catalog()
        return environment.submit(lambda txn: operation(txn, catalog)).result()


def run_process(*words, code="from agentmem.cli import main; sys.exit(main(sys.argv[1:]))"):
    command = [sys.executable, "-c", f"import sys; {code}", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


# -- looking


@pytest.mark.parametrize(
    "words", ["ls", "log task", "show task", "show task/a --reflog", "show task/main", "stats", "du"]
)
def test_looking_at_a_store_imports_no_torch(original, words):
    command, *rest = words.split()
    code = "from agentmem.cli import main; code = main(sys.argv[1:]); print(sorted(sys.modules)); sys.exit(code)"

    done = run_process(command, original, *rest, code=code)

    modules = done.stdout.splitlines()[-1]
    assert done.returncode == 0
    assert "'agentmem.view'" in modules
    assert not any(f"'{name}'" in modules for name in ("torch", "numpy", "transformers", "zstandard"))


def test_ls_needs_no_networkx_either(original):
    code = "from agentmem.cli import main; main(sys.argv[1:]); print('networkx' in sys.modules)"

    assert run_process("ls", original, code=code).stdout.splitlines()[-1] == "False"


def test_ls_lists_sessions_with_what_is_in_them(run, original):
    code, out, err = run("ls", original)

    lines = [line.split() for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert lines[0] == ["SESSION", "ACTIVE", "MODEL", "BRANCHES", "CHECKPOINTS", "TOKENS", "CHANGED"]
    assert lines[1][:6] == ["task", "b", "LlamaForCausalLM", "3", "3", "283"]
    assert lines[2][:6] == ["a/b", "main", "LlamaForCausalLM", "1", "1", "100"]


def test_ls_of_an_empty_store_says_so(run, store_path):
    Environment.open(store_path, create=True).close()

    assert run("ls", store_path) == (0, "no sessions\n", "")


def test_log_draws_the_tree_with_tier_and_score(run, original):
    _, out, _ = run("log", original, "task")

    lines = out.splitlines()
    assert "[main]  plan" in lines[1]
    assert "├─●" in lines[2]
    assert "[a]  tried a" in lines[2]
    assert lines[2].endswith("disk  score=0.25")
    assert "[b*]" in lines[3]


def test_show_tells_of_a_session_a_branch_and_a_checkpoint(run, original):
    plan = checkpoint_id(original, "plan")

    session, branch, checkpoint, other = (
        run("show", original, target)[1] for target in ("task", "task/a", f"task/{plan[:8]}", "a/b/main")
    )

    assert "block size     64 tokens" in session
    assert '"owner": "me"' in session
    assert "branch       a of session task" in branch
    assert "tokens       283, 0 of them after the tip" in branch
    assert f"checkpoint      {plan} of session task" in checkpoint
    assert "tip of          main" in checkpoint
    assert "branch       main of session a/b (active)" in other


def test_a_reflog_lists_the_moves_of_what_is_shown(ask, original):
    everything = ask("show", original, "task", "--reflog")["moves"]
    of_branch = ask("show", original, "task/a", "--reflog")["moves"]
    of_plan = ask("show", original, f"task/{checkpoint_id(original, 'plan')}", "--reflog")["moves"]

    assert [move["operation"] for move in of_branch] == ["fork", "switch", "checkpoint"]
    assert len(everything) > len(of_branch)
    assert {move["branch"] for move in of_plan} == {"main", "a", "b"}


def test_du_tells_own_bytes_from_shared_ones(ask, original):
    document = ask("du", original)

    costs = {(row["session"], row["branch"]): row for row in document["branches"]}
    main_, a, b = (costs["task", name] for name in ("main", "a", "b"))
    assert main_["own"]["stored_nbytes"] == 0
    assert a["own"]["num_blocks"] == b["own"]["num_blocks"] > 0
    assert a["shared"] == b["shared"] == main_["shared"]
    # task and a/b share their first 64 tokens
    assert costs["a/b", "main"]["shared"]["num_blocks"] == 1
    shared = main_["shared"]["stored_nbytes"] + costs["a/b", "main"]["own"]["stored_nbytes"]
    assert document["total"]["stored_nbytes"] == shared + a["own"]["stored_nbytes"] + b["own"]["stored_nbytes"]


def test_du_counts_what_was_dropped_and_what_nobody_names(ask, run, store):
    run("rm", store, "task/a", "--yes")
    run("rm", store, "a/b", "--yes")

    document = ask("du", store)

    assert [row["branch"] for row in document["branches"]] == ["main", "b"]
    assert document["dropped"]["num_blocks"] > 0
    assert document["unnamed"]["num_blocks"] == 0


def test_stats_agree_with_the_sizes_of_branches(ask, original):
    stats, total = ask("stats", original), ask("du", original)["total"]

    assert (stats["num_sessions"], stats["num_branches"], stats["num_checkpoints"]) == (2, 4, 4)
    assert stats["disk_stored_nbytes"] == total["stored_nbytes"]
    assert stats["ratio"] == pytest.approx(stats["disk_raw_nbytes"] / stats["disk_stored_nbytes"])


def test_reading_works_beside_a_process_that_writes(original, store):
    with Environment.open(store):
        for words in (
            ["ls", store],
            ["du", store],
            ["log", store, "task"],
            ["check", store],
            ["gc", store, "--dry-run"],
        ):
            done = run_process(*words)

            assert (done.returncode, done.stderr) == (0, "")


# -- for programs


@pytest.mark.parametrize("words", KEYS)
def test_the_keys_of_a_document_stay(ask, store, words):
    command, *rest = words.split()

    assert set(ask(command, store, *rest)) == KEYS[words]


def test_every_command_has_its_document_tested_or_moves_data():
    elsewhere = {"explain", "rm", "forget", "rekey", "export", "import", "push", "pull"}
    assert {words.split()[0] for words in KEYS} | elsewhere == set(COMMANDS)


def test_ids_are_hex_and_numbers_that_json_lacks_are_text(ask, original):
    document = ask("show", original, "task")

    assert len(bytes.fromhex(document["session_id"])) == 8
    assert document["extras"] == {"owner": "me", "best": "inf", "raw": "01"}


def test_an_error_is_one_line_and_with_json_one_document(run, tmp_path):
    assert run("ls", tmp_path / "none") == (4, "", run("ls", tmp_path / "none")[2])

    _, _, line = run("ls", tmp_path / "none")
    code, out, document = run("ls", tmp_path / "none", "--json")

    assert line.startswith("agentmem: there is no store at")
    assert line.count("\n") == 1
    assert (code, out) == (4, "")
    assert json.loads(document)["error"]["kind"] == "not-found"


# -- how things end


def test_every_error_of_the_library_has_a_code_and_a_kind():
    kinds = [error for error in vars(agentmem).values() if isinstance(error, type) and issubclass(error, AgentMemError)]

    assert len(kinds) > 10
    assert {exit_code(kind("x")) for kind in kinds} <= set(ExitCode) - {ExitCode.OK, ExitCode.INTERNAL}
    assert error_kind(InvalidInputError("x")) == "invalid-input"


@pytest.mark.parametrize(
    "words",
    [
        "",
        "nonsense",
        "ls",
        "ls {store} more",
        "log {store}",
        "check {store} --read-data=0%",
        "check {store} --read-data=101%",
        "check {store} --read-data=half",
        "gc {store} --grace -1",
        "gc {store} --grace nan",
        "show {store} task/0",
        "import {store}",
        "ls {store} --js",
    ],
)
def test_wrong_input_ends_with_2_and_says_where_help_is(run, original, words):
    code, out, err = run(*words.format(store=original).split())

    assert (code, out) == (2, "")
    assert err.startswith("agentmem: ")
    assert err.count("\n") == 1


def test_a_path_that_is_no_store_is_wrong_input(run, tmp_path):
    (tmp_path / "file").write_text("x")

    code, _, err = run("ls", tmp_path)

    assert code == 2
    assert "is no store" in err


@pytest.mark.parametrize(
    "words", ["log {store} tasks", "show {store} task/x", "show {store} task/ffffffff", "du {store} x"]
)
def test_an_unknown_name_ends_with_4_and_says_what_is_near(run, original, words):
    code, _, err = run(*words.format(store=original).split())

    assert code == 4
    assert "did you mean" in err


@pytest.mark.parametrize("words", ["gc {store}", "rm {store} task --yes", "import {store} {file} --as copy"])
def test_commands_that_write_work_beside_a_process_that_writes(run, store, tmp_path, words):
    file = tmp_path / "file"
    run("export", store, "a/b", file)

    with Environment.open(store):
        done = run_process(*words.format(store=store, file=file).split())

    assert done.returncode == 0, done


@pytest.mark.parametrize("read_only", [False, True])
def test_compact_ends_with_3_while_somebody_has_the_store_open_and_names_it(run, store, read_only):
    with Environment.open(store, read_only=read_only):
        done = run_process("compact", store)

    assert done.returncode == 3
    assert f"held by process {os.getpid()}" in done.stderr


def test_a_fault_of_our_own_shows_its_trace_and_ends_with_70(run, original, monkeypatch):
    def fail(_):
        raise RuntimeError("broken promise")

    monkeypatch.setattr(app, "_dispatch", fail)

    code, _, err = run("ls", original)

    assert code == 70
    assert "Traceback" in err
    assert err.endswith("agentmem: broken promise\n")


def test_ctrl_c_ends_with_130(run, original, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "_dispatch", interrupt)

    assert run("ls", original)[0] == 130


def test_a_reader_that_leaves_early_is_no_error(original):
    command = f"{sys.executable} -m agentmem log {original} task --json | head -c 1"

    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=120)

    assert (done.returncode, done.stderr) == (0, "")


# -- damage


def test_listing_goes_on_behind_a_damaged_session_and_ends_with_1(run, store):
    with agentmem.open(store) as view:
        session_id = view.view("task").record.session_id
    damage(store, Table.SESSIONS, rows.session_key(session_id))

    code, out, err = run("ls", store)

    assert code == 1
    assert "a/b" in out
    assert "fails its checksum" in err


def test_looking_goes_on_behind_a_damaged_checkpoint_and_ends_with_1(run, store):
    with agentmem.open(store) as view:
        session_id = view.view("task").record.session_id
    name = bytes.fromhex(checkpoint_id(store, "tried b"))
    damage(store, Table.NODES, session_id + name)

    results = [run(*words) for words in (["ls", store], ["log", store, "task"], ["show", store, "task"], ["du", store])]

    assert [code for code, _, _ in results] == [1, 1, 1, 1]
    assert all("fails its checksum" in err for _, _, err in results)
    assert "tried a" in results[1][1]


def test_check_finds_damage_and_ends_with_1(run, store):
    assert run("check", store, "--read-data")[0] == 0

    with Environment.open(store) as environment, environment.read() as txn:
        digest, _ = next(txn.scan_each(Table.BINDEX))
    damage(store, Table.BINDEX, digest)
    code, out, err = run("check", store)
    document = json.loads(run("check", store, "--json")[1])

    assert code == 1
    assert "damaged: row" in out
    assert "found" in err
    assert document["is_sound"] is False
    assert {"record", "kind", "advice"} == set(document["problems"][0])


@pytest.mark.parametrize(
    ("words", "fraction"),
    [
        ("check s", None),
        ("check --read-data s", 1.0),
        ("check s --read-data=25%", 0.25),
        ("check s --read-data=5", 0.05),
    ],
)
def test_read_data_takes_all_or_a_part(words, fraction):
    assert parse(words.split()).read_data == fraction


# -- changing


def test_rm_says_what_would_go_and_does_it_only_with_yes(run, store):
    code, out, err = run("rm", store, "task/a")

    assert code == 2
    assert "would remove   branch a of session task, 283 tokens" in out
    assert f"session.fork('a', at='{checkpoint_id(store, 'tried a')[:8]}')" in out
    assert err == "agentmem: nothing was removed: repeat with --yes\n"
    assert "[a]" in run("log", store, "task")[1]

    assert run("rm", store, "task/a", "--yes")[0] == 0
    assert "[a]" not in run("log", store, "task")[1]
    assert run("check", store)[0] == 0


def test_a_removed_branch_comes_back_as_rm_says(run, ask, store, llama):
    removed = ask("rm", store, "task/a", "--yes")

    with agentmem.open(store, model=llama) as opened:
        session = opened.resume("task")
        session.fork("a", at=removed["checkpoint_id"])
        session.switch("a")

        assert session.active.num_tokens == 283
        assert session.report.reason == agentmem.Reason.COMPLETE


def test_open_tokens_of_a_removed_branch_become_a_checkpoint(ask, run, store, llama):
    with agentmem.open(store, model=llama) as opened:
        session = opened.resume("task", branch="a")
        session.append([1, 2, 3])
        opened.flush()
        shutil.copytree(store, store.with_name("killed"))

    removed = ask("rm", store.with_name("killed"), "task/a", "--yes")

    assert removed["num_tokens"] == 286
    with agentmem.open(store.with_name("killed"), model=llama) as opened:
        session = opened.resume("task")
        session.fork("a", at=removed["checkpoint_id"])
        assert session.branch("a").tokens[-3:] == [1, 2, 3]
    assert run("check", store.with_name("killed"))[0] == 0


def test_removing_the_active_branch_makes_another_one_active(ask, store, llama):
    removed = ask("rm", store, "task/b", "--yes")

    assert removed["active_branch"] == "main"
    with agentmem.open(store, model=llama) as opened:
        assert opened.resume("task").active.name == "main"


def test_the_only_branch_is_not_removed(run, store):
    code, _, err = run("rm", store, "a/b/main", "--yes")

    assert code == 2
    assert "remove the session" in err


def test_rm_removes_a_session_for_good(run, store):
    code, out, _ = run("rm", store, "task")
    assert code == 2
    assert "session task with 3 branches" in out
    assert "`agentmem export` the session first" in out

    assert run("rm", store, "task", "--yes")[0] == 0
    assert "task" not in run("ls", store)[1]
    assert run("log", store, "task")[0] == 4
    assert run("check", store)[0] == 0


def test_damaged_sessions_and_branches_can_be_removed(run, store):
    with agentmem.open(store) as view:
        task, other = view.view("task").record.session_id, view.view("a/b").record.session_id
    damage(store, Table.BRANCHES, rows.branch_key(task, "a"))
    damage(store, Table.SESSIONS, rows.session_key(other))

    assert run("rm", store, "task/a", "--yes")[0] == 0
    assert run("rm", store, "a/b", "--yes")[0] == 0

    assert run("ls", store)[0] == 0


def test_gc_takes_what_was_dropped_once_its_grace_is_over(ask, run, store):
    run("rm", store, "task/a", "--yes")
    assert ask("gc", store)["checkpoints"] == []

    planned = ask("gc", store, "--dry-run", "--grace", "0")
    done = ask("gc", store, "--grace=0")

    assert planned["checkpoints"] == done["checkpoints"]
    assert len(done["checkpoints"]) == 1
    assert run("check", store, "--read-data")[0] == 0


def test_compact_makes_the_file_smaller(ask, run, store):
    for target in ("task", "a/b"):
        run("rm", store, target, "--yes")
    run("gc", store, "--grace=0")
    run("gc", store, "--grace=0")

    report = ask("compact", store)

    assert report["after_nbytes"] < report["before_nbytes"]
    assert run("check", store)[0] == 0


def test_export_and_import_carry_a_branch_into_a_store_that_is_made(ask, run, store, tmp_path):
    new, file = tmp_path / "new.agentmem", tmp_path / "a.export"

    exported = ask("export", store, "task", file, "--branch", "a")
    imported = ask("import", new, file, "--as", "copy")

    assert exported["branches"] == imported["branches"] == ["a"]
    assert exported["nbytes"] == file.stat().st_size
    assert imported["num_new_blocks"] == exported["num_blocks"]
    assert "[a*]  tried a" in run("log", new, "copy")[1]
    assert run("check", new, "--read-data")[0] == 0


def test_a_failed_import_ends_by_what_was_wrong_and_makes_no_store(run, store, tmp_path):
    new, file = tmp_path / "new.agentmem", tmp_path / "file"
    file.write_text("no export at all, but long enough to be one " * 9)

    assert run("import", new, file)[0] == 1
    assert run("import", new, tmp_path / "none")[0] == 4
    assert not new.exists()

    run("export", store, "a/b", file.with_name("export"))
    assert run("import", store, file.with_name("export"))[0] == 2


# -- texts


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])

    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert [word for word in [*COMMANDS, *STORELESS] if f"    {word} " not in out] == []
    assert "exit codes" in out


@pytest.mark.parametrize("command", [*COMMANDS, *STORELESS])
def test_every_command_has_help_and_takes_json_and_a_store_if_it_needs_one(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])

    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert ("STORE" in out) is (command in COMMANDS)
    assert "--json" in out


def test_options_are_not_guessed_from_their_beginning():
    assert build_parser().allow_abbrev is False


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1048575, "1.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (9 << 50, "9216.0 TiB"),
    ],
)
def test_sizes_have_units(nbytes, text):
    assert size(nbytes) == text


def test_columns_are_aligned_for_wide_characters_too():
    assert table(("A", "N"), [("日本", "1"), ("x", "22")]).splitlines() == ["A      N", "日本   1", "x     22"]


def test_stored_text_cannot_command_a_terminal(run, original):
    assert plain("a\x1b[2J\nb") == "a�[2J b"
    outputs = [run("log", original, "task")[1], run("show", original, f"task/{checkpoint_id(original, 'plan')}")[1]]

    assert not any("\x1b" in out for out in outputs)


def test_json_is_strict():
    text = to_json({"a": math.nan, "b": b"\xff", "c": [{b"k": 1}], "d": (1, None, True)})

    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": "nan",
        "b": "ff",
        "c": [{"6b": 1}],
        "d": [1, None, True],
    }
