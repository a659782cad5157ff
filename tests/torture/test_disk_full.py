"""The disk is full at every write of a checkpoint: the session stays usable, and with room again all can be saved.

Run as a script, this file is a zygote under the library of faults.
"""

import collections
import errno
import os
import shutil
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
import torch

import agentmem
from agentmem.errors import ReadOnlyError, StorageFullError
from agentmem.testing.torture import promises, shim
from agentmem.testing.torture.examine import cold_logits, examine
from agentmem.testing.torture.promises import PromiseBook
from agentmem.testing.torture.shim import Call, Faults
from agentmem.testing.torture.tables import print_table
from agentmem.testing.torture.workers import make_store, serve_tasks
from agentmem.testing.zygote import Zygote

STRIDE = int(os.environ.get("AGENTMEM_TORTURE_STRIDE", "4"))
"""Every how many-th write, and multiple of a page, is tried; 1 for all."""

MOST = 400
PAGE_NBYTES = 4096
# The reserve is for deletes: without it the disk is full when a write says so, not before.
CONFIG = agentmem.Config(block_size=16, disk_reserve_nbytes=0)
needs_compiler = pytest.mark.skipif(
    shim.find_compiler() is None, reason="the full disk is played by a C library: there is no compiler (cc)"
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def worker(faults):
    """A zygote whose workers' disk can be full."""
    with closing(Zygote(__file__, preload=faults)) as process:
        yield process


def fill_up(worker, template, folder, how, numbers):
    """Try each number until the disk is large enough; return the outcomes and what went wrong."""
    outcomes, faults = collections.Counter(), []
    for number in numbers:
        shutil.copytree(template, folder)
        ending = worker.run("fill", str(folder), how, number)
        shutil.rmtree(folder)
        found = ending.value or {"outcome": ending.signal or ending.error, "faults": [ending.signal or ending.error]}
        outcomes[found["outcome"]] += 1
        faults += [f"{how} {number}: {fault}" for fault in found["faults"]]
        if found["outcome"] == "saved at once":
            break
    return outcomes, faults


@needs_compiler
@pytest.mark.parametrize("how", ["write", "nbytes told", "nbytes untold"])
def test_a_full_disk_leaves_the_session_usable_and_all_is_saved_once_there_is_room(worker, template, tmp_path, how):
    numbers = range(1, MOST, STRIDE) if how == "write" else range(0, MOST * PAGE_NBYTES, STRIDE * PAGE_NBYTES)

    outcomes, faults = fill_up(worker, template, tmp_path / "trial", how, numbers)

    print_table(f"disk full, by {how}", {str(outcome): count for outcome, count in outcomes.items()})
    assert not faults, "\n".join(faults)
    assert outcomes["saved at once"] == 1
    assert outcomes["refused, then saved"] > 1


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m,mode=0700", "tmpfs", str(place)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_file_system_of_three_megabytes_is_filled_emptied_and_filled_again(small_disk, llama):
    store_path, ballast = small_disk / "store", small_disk / "ballast"
    ballast.write_bytes(bytes(2 << 20))
    with agentmem.open(store_path, model=llama, config=CONFIG) as store:
        session = store.create("s")
        kept = []
        with pytest.raises(StorageFullError):
            append_for_ever(session, kept)
        tokens = session.active.tokens
        ballast.unlink()
        session.checkpoint("with room again")
        store.flush()

    found = examine(lambda: agentmem.open(store_path, model=llama, config=CONFIG), llama, [])
    with agentmem.open(store_path, model=llama, config=CONFIG) as store:
        session = store.resume("s")
        assert found.faults == []
        assert len(kept) > 1
        assert session.active.tokens == tokens
        assert torch.allclose(session.forward()[0], cold_logits(llama, tokens), atol=1e-4)
        assert session.report.num_computed <= 1


def append_for_ever(session, kept):
    """Append and make checkpoints until that fails."""
    for number in range(1, 200):
        session.append([1 + number * index * index % 499 for index in range(1, 60)])
        kept.append(session.checkpoint().num_tokens)


# ---- in the zygote


def prepare(model, folder):
    """Make the store that every trial begins with."""
    make_store(lambda: agentmem.open(Path(folder) / "store", model=model, config=CONFIG), Path(folder), 12)


def fill(model, folder, how, number):
    """Let the disk be full somewhere in a checkpoint, go on without it, make room, and save all."""
    folder = Path(folder)
    breaker = Faults(folder / "store")
    book = PromiseBook(folder / "book")
    faults = []
    try:
        with agentmem.open(folder / "store", model=model, config=CONFIG) as store:
            session = store.resume("one")
            if how == "write":
                breaker.fail(Call.WRITE | Call.TRUNCATE, number, errno.ENOSPC, is_persistent=True)
            else:
                breaker.allow(number, is_told=how == "nbytes told")
            outcome = work(session, model, book, breaker, faults)
            faults += compare(session, model)
            store.flush()
    except ReadOnlyError:
        # The write was that of a page that LMDB writes in place, which only a copy-on-write file system refuses.
        outcome = "read-only until opened again"
        breaker.mend()
    found = examine(
        lambda: agentmem.open(folder / "store", model=model, config=CONFIG), model, promises.read(folder / "book")
    )
    return {"outcome": outcome, "faults": [*faults, *found.faults]}


def work(session, model, book, breaker, faults):
    """Append, fork, switch and save on a disk that may be full; then with room."""
    tokens = [1 + index * index % 499 for index in range(1, 40)]
    session.append(tokens)
    if save(session, book, "on a small disk"):
        breaker.mend()
        return "saved at once"
    before = session.active
    if before.tokens[-len(tokens) :] != tokens:
        faults.append("the tokens of a checkpoint that failed are gone")
    session.append([7, 8, 9])
    session.switch(session.fork("on a full disk").name)
    session.append([10, 11])
    if save(session, book, "still full"):
        faults.append("a checkpoint was made on a full disk")
    faults += compare(session, model)
    breaker.mend()
    for branch in (session.active, before):
        checkpoint = branch.checkpoint("with room again")
        book.promise(session.name, branch.name, checkpoint, branch.tokens)
    return "refused, then saved"


def save(session, book, message):
    """Make a checkpoint; return whether there was room for it."""
    try:
        checkpoint = session.checkpoint(message)
    except StorageFullError:
        return False
    book.promise(session.name, session.active.name, checkpoint, session.active.tokens)
    return True


def compare(session, model):
    """Return what is wrong with the logits of the active branch."""
    is_right = torch.allclose(session.forward()[0], cold_logits(model, session.active.tokens), atol=1e-4)
    return [] if is_right else ["the logits are not those of a run from nothing"]


if __name__ == "__main__":
    serve_tasks({"prepare": prepare, "fill": fill})
