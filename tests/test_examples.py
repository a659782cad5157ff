"""The example finishes, resumes and survives Ctrl-C: run as a user runs it, with a tiny model and a task of luck."""

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
COMMAND = [
    sys.executable,
    "-W",
    "error",
    str(EXAMPLES / "tree_search.py"),
    "--json",
    "--model",
    "tiny",
    "--task",
    "luck",
]
SIZE = ["--goal", "4", "--steps", "5", "--width", "3", "--line-tokens", "16", "--threads", "1"]

pytestmark = pytest.mark.slow


def start(store: Path, *flags: str) -> subprocess.Popen[str]:
    command = [*COMMAND, *SIZE, "--store", str(store), *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_heed_interrupts
    )


def _heed_interrupts() -> None:
    """Undo what a shell does to its background jobs: they, and all that they start, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run(store: Path, *flags: str) -> tuple[dict, str]:
    process = start(store, *flags)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    return json.loads(stdout), stderr


def interrupt(store: Path, *, after_line: str) -> tuple[int, str]:
    """Send Ctrl-C while the search is at work, right after it printed a line that starts so."""
    process = start(store, "--no-baseline")
    for line in process.stderr:
        if line.startswith(after_line):
            process.send_signal(signal.SIGINT)
            break
    _stdout, stderr = process.communicate(timeout=240)
    return process.returncode, stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict, str]:
    store = tmp_path_factory.mktemp("example") / "store.agentmem"
    return store, *run(store)


def doctest_task():
    spec = importlib.util.spec_from_file_location("example_tasks", EXAMPLES / "_tasks.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["example_tasks"] = module
    spec.loader.exec_module(module)
    return module.doctests()


def test_the_search_and_the_same_search_with_deep_copies_make_the_same_branches(finished):
    _store, found, _text = finished

    copies = found["baseline"]
    assert found["is_solved"]
    assert found["items"] == found["goal"] == 4
    assert (copies["branches"], copies["score"]) == (found["branches"], found["score"])
    assert copies["sampled"] == found["sampled"]


def test_a_branch_costs_its_own_tokens_in_compute_and_in_memory(finished):
    _store, found, _text = finished

    assert found["fed"] + found["prefill"]["fed"] < found["recomputing_would_feed"] / 2
    assert found["peak_nbytes"] < found["baseline"]["peak_nbytes"] / 2


def test_the_tree_is_printed_with_its_forks_and_scores(finished):
    _store, found, text = finished

    assert all(f"[{name}" in text for name in found["branches"])
    assert f"score={found['score']:.4g}" in text


def test_a_second_process_goes_on_from_the_best_branch_without_the_context(finished):
    store, found, _text = finished

    resumed, text = run(store, "--resume")

    assert resumed["leg"] == 2
    assert resumed["fed_before_first"] <= 3  # one a branch
    assert resumed["resumed"]["num_reused"] >= resumed["prefill"]["tokens"]
    assert set(found["branches"]) < set(resumed["branches"])
    assert resumed["items"] > found["items"]
    assert "token(s), one a branch, before it sampled its first ones" in text


def test_ctrl_c_loses_nothing_and_the_same_command_goes_on(finished, tmp_path):
    _store, whole, _text = finished

    status, text = interrupt(tmp_path / "store.agentmem", after_line="  1 ")
    rest, _text = run(tmp_path / "store.agentmem", "--no-baseline")

    assert status == 130, text
    assert "the same command goes on" in text
    assert rest["fed_before_first"] <= 3
    assert {name: rest[name] for name in ("branches", "score", "items", "dropped")} == {
        name: whole[name] for name in ("branches", "score", "items", "dropped")
    }


def test_a_search_that_came_to_its_end_is_started_over_by_the_same_command(tmp_path):
    first, _text = run(tmp_path / "store.agentmem", "--no-baseline")

    again, text = run(tmp_path / "store.agentmem", "--no-baseline")

    assert "starting over" in text
    assert again["prefill"]["fed"] == first["prefill"]["fed"] > 0
    assert again["branches"] == first["branches"]


def test_resume_without_a_stored_search_says_what_to_do(tmp_path):
    process = start(tmp_path / "store.agentmem", "--resume")

    _stdout, stderr = process.communicate(timeout=240)

    assert process.returncode == 1
    assert "run without --resume first" in stderr


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["title\n"], ""),
        (["title\n", "ab'.title()\n"], ""),
        (["title\n", "ab'.title()\n", "'Ab'\n"], ""),
        (["upper\n"], "str.upper has a test already"),
        (["index\n"], "str.index has a test already"),
        (["reverse\n"], "str.reverse is no method to test"),
        (["title"], "'title' has no end"),
        (["title\n", "ab'.title()\n", "'AB'\n"], "'ab'.title() is 'Ab', not 'AB'"),
        (["title\n", "ab'.lower()\n"], "'ab'.lower() raises SyntaxError"),
        (["title\n", "ab'.title().title()\n"], "'ab'.title().title() raises ValueError"),
        (["center\n", "ab'.center(999999999999)\n"], "'ab'.center(999999999999) raises OverflowError"),
        (["join\n", "ab'.join(open('/etc/passwd'))\n"], "'ab'.join(open('/etc/passwd')) raises ValueError"),
    ],
)
def test_the_verifier_runs_a_test_and_names_what_is_wrong(lines, problem):
    task = doctest_task()

    assert problem == task.check(lines, [["index\n", "a'.index('a')\n", "0\n"]])


def test_the_context_is_long_and_about_the_task():
    task = doctest_task()

    assert len(task.context.split()) > 1_000
    assert "str.title" in task.context
