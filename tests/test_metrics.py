"""A store's numbers over HTTP: all of them, as Prometheus wants them, and without holding up the model."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

import agentmem
from agentmem.errors import InvalidInputError
from agentmem.metrics.endpoint import Endpoint
from agentmem.metrics.families import samples
from agentmem.metrics.places import Place, living, publish
from agentmem.tiers.sim import SimTier

pytestmark = pytest.mark.usefixtures("one_thread")

ANY_PORT = "127.0.0.1:0"
TOKENS = [(29 * index * index + 3 * index + 7) % 490 + 1 for index in range(100)]
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def config(**choices):
    return agentmem.Config(block_size=16, metrics=ANY_PORT, **choices)


def scrape(url, accept="text/plain"):
    request = urllib.request.Request(url, headers={"Accept": accept})
    with DIRECT.open(request, timeout=10) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def numbers(url):
    """Return what is served as {(name, labels)}: the parser is Prometheus' own."""
    families = text_string_to_metric_families(scrape(url)[0])
    return {(each.name, frozenset(each.labels.items())): each.value for family in families for each in family.samples}


def port_of(url):
    return int(re.search(r":(\d+)/", url)[1])


@pytest.fixture
def store(tiny, store_path):
    with agentmem.open(store_path, model=tiny("llama"), config=config(), tiers=[SimTier(bandwidth=1e12)]) as store:
        yield store


def worked(store):
    """Feed a session, and bring another back from disk."""
    session = store.create("s")
    session.forward(TOKENS)
    session.close()
    store._runtime.blocks.host.clear()
    return store.resume("s")


def test_every_number_of_a_store_is_served_once_with_its_value(store):
    worked(store)
    store.flush()
    stats = store.stats()

    served = numbers(store.metrics_url)

    for sample in samples(stats):
        assert served.pop((sample.name, frozenset(sample.labels.items()))) == pytest.approx(sample.value)
    assert [name for name, _ in served] == ["agentmem_store_info"]
    assert stats["disk_to_device_nbytes"] > 0


def test_names_follow_the_conventions_of_prometheus(store):
    worked(store)

    families = list(text_string_to_metric_families(scrape(store.metrics_url)[0]))

    assert [family.name for family in families if not re.fullmatch(r"agentmem_[a-z][a-z_]*", family.name)] == []
    assert [family.name for family in families if "nbytes" in family.name or not family.documentation] == []
    names = {sample.name for family in families for sample in family.samples if family.type == "counter"}
    assert {"agentmem_tokens_total", "agentmem_moved_bytes_total"} <= names
    assert all(name.endswith("_total") for name in names)


def test_a_scraper_that_wants_openmetrics_gets_it(store):
    text, content_type = scrape(store.metrics_url, accept="application/openmetrics-text; version=1.0.0")

    families = {family.name for family in openmetrics_families(text)}
    assert content_type.startswith("application/openmetrics-text")
    assert "agentmem_tier_bytes" in families


def test_labels_say_which_tier_which_way_and_why():
    stats = {
        "device_nbytes": 1,
        "disk_live_nbytes": 2,
        "pool_nbytes_per_s": 3.0,
        "disk_to_device_nbytes": 4,
        "tokens_lost_tier-unavailable": 5,
        "tokens_far_race": 6,
        "lake_failures": 7,
        "pool_blocks_damaged": 8,
        "blocks_damaged": 9,
        "pool_stored_nbytes": 10,
    }

    found = [(each.name.removeprefix("agentmem_"), dict(each.labels), each.value) for each in samples(stats)]

    assert found == [
        ("tier_bytes", {"tier": "device"}, 1),
        ("tier_bytes", {"tier": "disk"}, 2),
        ("tier_bytes_per_second", {"tier": "pool"}, 3.0),
        ("moved_bytes_total", {"from": "disk", "to": "device"}, 4),
        ("tokens_total", {"what": "lost", "reason": "tier-unavailable"}, 5),
        ("far_tokens_total", {"way": "race"}, 6),
        ("tier_failures_total", {"tier": "lake"}, 7),
        ("tier_damaged_blocks_total", {"tier": "pool"}, 8),
        ("blocks_damaged_total", {}, 9),
        ("pool_stored_bytes_total", {}, 10),
    ]


def test_the_hit_rate_of_a_tier_is_the_part_of_what_it_was_asked_for(store):
    resumed = worked(store)
    assert store.stats()["disk_hit_rate"] == 1.0
    assert store.stats()["host_hit_rate"] == 0.0
    assert "sim_hit_rate" not in store.stats()  # nobody asked it

    resumed.append([1, 2])
    resumed.generate(max_new_tokens=1, do_sample=False)

    stats = store.stats()
    num_loaded = stats["disk_to_device_nbytes"] / store.token_nbytes
    assert num_loaded == len(TOKENS)
    assert stats["device_hit_rate"] == stats["tokens_on_device"] / (stats["tokens_on_device"] + num_loaded)
    assert stats["tokens_on_device"] >= len(TOKENS)


def test_a_scrape_takes_no_lock_that_running_the_model_needs(store):
    worked(store)
    runtime = store._runtime
    locks = [runtime.counters._lock, runtime.device._lock, runtime.blocks.host._lock, runtime.blocks.lower.rates._lock]

    with store._lock, locks[0], locks[1], locks[2], locks[3]:
        served = numbers(store.metrics_url)

    assert served["agentmem_tokens_total", frozenset({("what", "fed")})] >= len(TOKENS)


def test_bytes_on_the_device_are_counted_while_other_threads_allocate(store):
    device, is_over = store._runtime.device, threading.Event()

    def allocate():
        while not is_over.is_set():
            [device.claim(1) for _ in range(50)]

    before = device.nbytes
    threads = [threading.Thread(target=allocate) for _ in range(2)]
    for thread in threads:
        thread.start()
    seen = [device.nbytes for _ in range(2000)]
    is_over.set()
    for thread in threads:
        thread.join()

    assert before <= min(seen)
    assert max(seen) <= before + 100
    assert device.nbytes == before


def test_nothing_is_served_unless_asked_for(tiny, store_path):
    with agentmem.open(store_path, model=tiny("llama"), config=agentmem.Config(block_size=16)) as store:
        assert store.metrics_url is None
        assert not (store_path / "metrics").exists()
        assert "agentmem-metrics" not in [thread.name for thread in threading.enumerate()]


def test_closing_a_store_frees_the_port_and_removes_its_file(tiny, store_path):
    with agentmem.open(store_path, model=tiny("llama"), config=config()) as store:
        url = store.metrics_url
        [place] = living(store_path)
        assert place == Place(url=url, pid=os.getpid())

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port_of(url)))
    assert list((store_path / "metrics").iterdir()) == []
    assert "agentmem-metrics" not in [thread.name for thread in threading.enumerate()]


def test_a_client_that_says_nothing_does_not_hold_up_scrapes_or_closing(tiny, store_path):
    with agentmem.open(store_path, model=tiny("llama"), config=config()) as store:
        silent = [socket.create_connection(("127.0.0.1", port_of(store.metrics_url))) for _ in range(3)]
        assert numbers(store.metrics_url)

    for sock in silent:
        sock.close()


def test_two_stores_of_one_process_serve_their_own_numbers(tiny, store_path):
    other_path = store_path.with_name("other.agentmem")
    with (
        agentmem.open(store_path, model=tiny("llama"), config=config()) as first,
        agentmem.open(other_path, model=tiny("llama"), config=config()) as second,
    ):
        first.create("s").forward(TOKENS)
        fed = ("agentmem_tokens_total", frozenset({("what", "fed")}))

        assert numbers(first.metrics_url)[fed] == len(TOKENS)
        assert fed not in numbers(second.metrics_url)


def test_a_port_that_is_taken_is_refused_and_the_store_can_be_opened_again(tiny, store_path, store):
    other_path = store_path.with_name("other.agentmem")
    taken = f"127.0.0.1:{port_of(store.metrics_url)}"

    with pytest.raises(InvalidInputError, match="port 0 takes any that is free"):
        agentmem.open(other_path, model=tiny("llama"), config=agentmem.Config(block_size=16, metrics=taken))

    with agentmem.open(other_path, model=tiny("llama"), config=config()) as second:
        assert numbers(second.metrics_url)


@pytest.mark.parametrize("address", ["9464", ":9464", "localhost", "localhost:http", "::1:80", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(InvalidInputError, match="HOST:PORT"):
        agentmem.Config(metrics=address)


@pytest.mark.parametrize(("address", "url"), [("0.0.0.0:0", "http://127.0.0.1:"), ("[::1]:0", "http://[::1]:")])
def test_an_endpoint_names_an_address_that_this_machine_can_ask(address, url, tmp_path):
    endpoint = Endpoint(address)
    endpoint.serve(dict, store=tmp_path, number=7)
    try:
        assert endpoint.url.startswith(url)
        assert "agentmem_store_info" in scrape(endpoint.url)[0]
    finally:
        endpoint.close()


def test_only_the_metrics_are_served(store):
    with pytest.raises(urllib.error.HTTPError) as error:
        DIRECT.open(store.metrics_url.replace("/metrics", "/etc/passwd"), timeout=10)

    assert error.value.code == 404
    error.value.close()


def test_a_store_whose_numbers_cannot_be_read_says_why(tmp_path):
    def read():
        raise agentmem.ClosedError("closed")

    endpoint = Endpoint(ANY_PORT)
    endpoint.serve(read, store=tmp_path, number=7)
    try:
        with pytest.raises(urllib.error.HTTPError, match="closed") as error:
            DIRECT.open(endpoint.url, timeout=10)
        assert error.value.code == 503
        error.value.close()
    finally:
        endpoint.close()


def test_the_file_of_a_dead_process_is_ignored_and_removed_by_the_next(store_path, store):
    dead = store_path / "metrics" / "123.json"
    dead.write_text(json.dumps({"url": "http://127.0.0.1:1/metrics", "pid": 1}))
    (store_path / "metrics" / "words.json").write_text("{}")

    [place] = living(store_path)
    publish(store_path, store.environment.holders.number, place)

    assert place.url == store.metrics_url
    assert not dead.exists()


def test_a_damaged_file_of_a_living_process_is_passed_over(store_path, store):
    [file] = (store_path / "metrics").iterdir()

    file.write_text('{"url":')

    assert living(store_path) == []


def test_without_the_package_the_message_says_what_to_install():
    script = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import agentmem\nfrom agentmem.metrics.endpoint import Endpoint\n"
        "assert Endpoint(None).url is None\n"
        "try:\n    Endpoint('127.0.0.1:0')\nexcept agentmem.InvalidInputError as error:\n    print(error)"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parent)

    assert "pip install 'agentmem-kv[metrics]'" in done.stdout, done.stderr


def test_a_forked_child_neither_keeps_the_port_nor_removes_the_file(tmp_path):
    script = """
import os, signal, sys
from pathlib import Path
from agentmem.metrics.endpoint import Endpoint
endpoint = Endpoint("127.0.0.1:0")
endpoint.serve(dict, store=Path(sys.argv[1]), number=7)
port = endpoint.url.split(":")[2].split("/")[0]
child = os.fork()
if child == 0:
    signal.pause()
other = os.fork()
if other == 0:
    endpoint.close()
    os._exit(0)
os.waitpid(other, 0)
print(os.listdir(Path(sys.argv[1]) / "metrics"))
endpoint.close()
Endpoint(f"127.0.0.1:{port}").close()
print(os.listdir(Path(sys.argv[1]) / "metrics"))
os.kill(child, signal.SIGKILL)
"""

    words = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)

    assert done.stdout == "['7.json']\n[]\n", done.stderr
