"""Power cuts: whatever part of the unsynced pages is left, all durable promises are kept and the store goes on.

Run as a script, this file is a zygote: one with the library of faults makes the journal of a store at work, one without
it opens what power cuts could have left.
"""

import dataclasses
import os
import random
import shutil
from contextlib import closing
from pathlib import Path

import pytest

import agentmem
from agentmem import gc
from agentmem.testing.torture import journal, powerloss, promises, shim
from agentmem.testing.torture.examine import examine
from agentmem.testing.torture.promises import PromiseBook
from agentmem.testing.torture.shim import Faults
from agentmem.testing.torture.tables import print_table
from agentmem.testing.torture.work import Client
from agentmem.testing.torture.workers import serve_tasks
from agentmem.testing.zygote import Zygote

NUM_IMAGES = int(os.environ.get("AGENTMEM_TORTURE_IMAGES", "24"))
IMAGES_PER_JOURNAL = 100
NUM_ACTS = 14
CONFIG = agentmem.Config(block_size=16)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(shim.find_compiler() is None, reason="power cuts are built with a C library: no compiler (cc)"),
]


@pytest.fixture(scope="module")
def recorder(faults):
    """A zygote whose workers' files are watched."""
    with closing(Zygote(__file__, preload=faults)) as process:
        yield process


@pytest.fixture(scope="module")
def examiner():
    """A zygote whose workers open what is left."""
    with closing(Zygote(__file__)) as process:
        yield process


@dataclasses.dataclass
class Recording:
    """What a store did, and what it promised meanwhile."""

    events: list[journal.Event]
    book: Path


@pytest.fixture(scope="module")
def recording(recorder, tmp_path_factory):
    """Return a function that lets a store work under the eyes of the library."""

    def record(seed):
        folder = tmp_path_factory.mktemp("recording")
        recorder.run("work", str(folder), seed).result()
        return Recording(journal.read(folder / "journal"), folder / "book")

    return record


def cut_power(recording, examiner, folder, number, rng, *, is_honest=True):
    """Build `number` images and examine each; return the findings, one a line of a table."""
    events = recording.events if is_honest else powerloss.lie(recording.events)
    found = []
    for index, (image, mark) in enumerate(powerloss.cuts(events, number, rng)):
        path = folder / f"image{index}"
        powerloss.write(image, path)
        ending = examiner.run("examine", str(path), str(recording.book), mark)
        faults = [ending.signal or ending.error] if ending.value is None else ending.value["faults"]
        found.append({"image": index, "mark": mark, "faults": faults, "kept": (ending.value or {}).get("num_kept", 0)})
        shutil.rmtree(path)
    return found


def test_no_power_cut_takes_what_was_acknowledged(recording, examiner, tmp_path):
    rng = random.Random(1)
    found = []
    for seed in range(max(1, NUM_IMAGES // IMAGES_PER_JOURNAL)):
        folder = tmp_path / f"journal{seed}"
        folder.mkdir()
        found += cut_power(recording(seed), examiner, folder, min(NUM_IMAGES, IMAGES_PER_JOURNAL), rng)

    print_table(
        "power loss",
        {
            "images": len(found),
            "promises kept": sum(each["kept"] for each in found),
            "images with a fault": sum(bool(each["faults"]) for each in found),
        },
    )
    faults = [f"image {each['image']}, mark {each['mark']}: {fault}" for each in found for fault in each["faults"]]
    assert not faults, "\n".join(faults)
    assert sum(each["kept"] for each in found) > len(found)


def test_a_disk_that_does_not_sync_is_found_out(recording, examiner, tmp_path):
    found = cut_power(recording(1000), examiner, tmp_path, 12, random.Random(2), is_honest=False)

    assert any(each["faults"] for each in found)


# ---- in the zygotes


def work(model, folder, seed):
    """Let two clients work, with gc and background saving; close, compact, and work again."""
    folder = Path(folder)
    faults = Faults(folder / "store")
    faults.record(folder / "journal")
    book = PromiseBook(folder / "book", faults.mark)
    for turn in range(2):
        with agentmem.open(folder / "store", model=model, config=CONFIG) as store:
            clients = [Client(store, name, book, seed * 10 + turn) for name in ("one", "two")]
            for number in range(NUM_ACTS):
                clients[number % 2].act()
                if number % 5 == 4:
                    store.gc(grace_s=0)
        if turn == 0:
            gc.compact(folder / "store")


def examine_image(model, path, book, mark):
    """Return what is wrong with a store that was cut off after a mark."""
    if not mark and not (Path(path) / "data.mdb").exists():
        return {"faults": [], "num_kept": 0}
    found = examine(
        lambda: agentmem.open(path, model=model, config=CONFIG), model, promises.read(Path(book), mark), seed=mark
    )
    return {"faults": found.faults, "num_kept": found.num_kept}


if __name__ == "__main__":
    serve_tasks({"work": work, "examine": examine_image})
