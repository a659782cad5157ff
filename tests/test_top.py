"""`agentmem top`: what a person or a program sees of a store at work, by its URL or by its directory."""

import http.server
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

import agentmem
from agentmem.cli import main
from agentmem.cli.result import ExitCode
from agentmem.metrics.frame import Look, make_frame

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = agentmem.Config(block_size=16, metrics="127.0.0.1:0")
TOKENS = [(29 * index * index + 3 * index + 7) % 490 + 1 for index in range(100)]


@pytest.fixture(scope="module")
def served(tiny, tmp_path_factory):
    """An open store that has fed a session."""
    path = tmp_path_factory.mktemp("top") / "runs.agentmem"
    with agentmem.open(path, model=tiny("llama"), config=CONFIG) as store:
        store.create("s").forward(TOKENS)
        store.flush()
        yield store


def run(*words):
    """Run a command as another process, as a person would."""
    return subprocess.run([sys.executable, "-m", "agentmem", *words], capture_output=True, text=True, timeout=60)


def total(document, what):
    return next(each["total"] for each in document["tokens"] if each["what"] == what)


def look(taken_s, **totals):
    samples = {("tokens_total", frozenset({("what", what)})): float(number) for what, number in totals.items()}
    return Look(url="u", samples=samples, taken_s=taken_s)


def test_a_url_shows_the_tiers_tokens_and_moves_of_a_store(served, capsys):
    code = main(["top", served.metrics_url, "--once"])

    out = capsys.readouterr().out
    assert code == ExitCode.OK
    assert str(served.path) in out
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "KiB" in lines["device"]
    assert lines["fed"].split() == ["fed", "100", "-"]
    assert "device to disk" in lines


def test_a_directory_shows_its_files_and_the_processes_that_have_it_open(served):
    done = run("top", str(served.path), "--json")

    document = json.loads(done.stdout)
    [process] = document["processes"]
    assert done.returncode == ExitCode.OK
    assert document["stored"]["num_sessions"] == 1
    assert document["stored"]["disk_num_blocks"] == served.stats()["disk_num_blocks"] > 0
    assert process["url"] == served.metrics_url
    assert process["pid"] == str(os.getpid())
    assert total(process, "fed") == len(TOKENS)
    assert process["tiers"][0]["tier"] == "device"
    assert process["tiers"][0]["nbytes"] == served.stats()["device_nbytes"]
    assert document["silent"] == []


def test_a_directory_that_nobody_has_open_shows_its_files_and_says_so(tiny, store_path, capsys):
    with agentmem.open(store_path, model=tiny("llama"), config=CONFIG) as store:
        store.create("s").forward(TOKENS)

    code = main(["top", str(store_path)])

    out = capsys.readouterr().out
    assert code == ExitCode.OK
    assert "1 session" in out
    assert "nobody serves metrics of it now" in out


def test_an_encrypted_store_is_watched_with_its_key(tiny, store_path, tmp_path, capsys):
    key = bytes(range(32))
    (tmp_path / "key").write_bytes(key)
    with agentmem.open(store_path, model=tiny("llama"), config=agentmem.Config(encryption_key=key)) as store:
        store.create("s")

    assert main(["top", str(store_path), "--once"]) == ExitCode.INPUT
    assert main(["top", str(store_path), "--once", "--key-file", str(tmp_path / "key")]) == ExitCode.OK
    assert "1 session" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("http://127.0.0.1:9/metrics", ExitCode.NOT_FOUND, "is a store open with Config.metrics there?"),
        ("file:///etc/passwd", ExitCode.INPUT, "no address of metrics"),
        ("nowhere.agentmem", ExitCode.NOT_FOUND, "nowhere.agentmem"),
    ],
)
def test_a_target_that_cannot_be_watched_is_said_to_be_so(target, code, message, capsys):
    assert main(["top", target, "--once"]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "message"), [("<html>", "no metrics in Prometheus' text format"), ("up 1\n", "is no store of agentmem")]
)
def test_what_is_no_store_of_agentmem_is_refused(body, message, capsys):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request).start()
        code = main(["top", f"http://127.0.0.1:{server.server_port}/metrics", "--once"])

    assert code == ExitCode.INPUT
    assert message in capsys.readouterr().err


def test_a_process_that_does_not_answer_is_named_and_the_rest_is_shown(served, store_path, tiny):
    with agentmem.open(store_path, model=tiny("llama"), config=CONFIG) as store:
        [file] = (store_path / "metrics").iterdir()
        file.write_text(json.dumps({"url": "http://127.0.0.1:9/metrics", "pid": 1}))
        done = run("top", str(store_path), "--once")
        store.create("s")

    assert done.returncode == ExitCode.OK
    assert "http://127.0.0.1:9/metrics" in done.stderr
    assert "0 sessions" in done.stdout


def test_speeds_are_those_between_two_looks_and_survive_a_restart():
    before, now = look(10.0, fed=100, reused=50), look(12.0, fed=140, reused=6)

    first, second = make_frame(before, None), make_frame(now, before)

    assert {each.name: each.per_s for each in first.tokens}["fed",] is None
    assert {each.name: each.per_s for each in second.tokens}["fed",] == 20.0
    assert {each.name: each.per_s for each in second.tokens}["reused",] == 3.0


def test_what_was_lost_is_summed_and_its_reasons_come_in_the_order_in_which_they_last_grew():
    def lost(taken_s, **totals):
        samples = {
            ("tokens_total", frozenset({("what", "lost"), ("reason", reason)})): float(number)
            for reason, number in totals.items()
        }
        samples["tier_failures_total", frozenset({("tier", "pool")})] = 1.0
        return Look(url="u", samples=samples, taken_s=taken_s)

    frame = make_frame(lost(2.0, damaged=64, missing=640), lost(1.0, damaged=16, missing=640))

    assert [each.name for each in frame.reasons] == [
        ("lost", "damaged"),
        ("lost", "missing"),
        ("did not answer", "pool"),
    ]
    assert next((each.total, each.per_s) for each in frame.tokens if each.name == ("lost",)) == (704.0, 48.0)


def test_in_a_terminal_it_goes_on_until_ctrl_c_and_leaves_the_last_look_behind(served):
    terminal, side = pty.openpty()
    # Whoever runs the tests in the background may have them ignore Ctrl-C.
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from agentmem.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", script, "top", served.metrics_url, "--interval", "0.1"]
    process = subprocess.Popen(
        words, stdin=side, stdout=side, stderr=subprocess.PIPE, env={**os.environ, "TERM": "xterm"}
    )
    os.close(side)
    shown, deadline = b"", time.monotonic() + 60
    while shown.count(b"PER SECOND") < 4 and time.monotonic() < deadline:  # two looks or more
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 1 << 16)

    process.send_signal(signal.SIGINT)
    rest = b""
    while time.monotonic() < deadline + 60 and select.select([terminal], [], [], 60.0)[0]:
        try:
            rest += os.read(terminal, 1 << 16)
        except OSError:  # nobody has the other side any more
            break
    _, err = process.communicate(timeout=60)
    os.close(terminal)

    assert (process.returncode, err) == (ExitCode.OK, b"")
    assert b"\x1b[?1049h" in shown
    assert b"fed" in rest.split(b"\x1b[?1049l")[-1]


def test_watching_starts_without_torch():
    script = "import sys, agentmem.cli.top; print([each for each in ('torch', 'numpy', 'rich') if each in sys.modules])"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    assert done.stdout == "[]\n", done.stderr
