"""What else may happen to a store: clocks that jump, a process that forks, another model on the same directory.

Run as a script, this file is a zygote under the library of faults.
"""

import logging
import os
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

import agentmem
from agentmem.errors import ClosedError, SessionLeasedError
from agentmem.reasons import Reason
from agentmem.testing.models import tiny_model
from agentmem.testing.torture import promises, shim
from agentmem.testing.torture.examine import cold_logits, examine
from agentmem.testing.torture.promises import PromiseBook
from agentmem.testing.torture.shim import Faults
from agentmem.testing.torture.work import Client
from agentmem.testing.torture.workers import serve_tasks
from agentmem.testing.zygote import Zygote

CONFIG = agentmem.Config(block_size=16)
PROMPT = [1 + index * index % 499 for index in range(70)]
YEAR_S = 365 * 24 * 3600
needs_compiler = pytest.mark.skipif(
    shim.find_compiler() is None, reason="clocks are made to jump by a C library: there is no compiler (cc)"
)


@pytest.fixture(scope="module")
def zygote(faults):
    """A zygote whose workers' clocks can jump."""
    with closing(Zygote(__file__, preload=faults)) as process:
        yield process


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("jump_s", [-10 * YEAR_S, -3600, 3600, 10 * YEAR_S])
def test_a_clock_that_jumps_loses_nothing_that_has_a_name(zygote, llama, tmp_path, jump_s):
    zygote.run("work_through_a_jump", str(tmp_path), jump_s).result()

    found = examine(
        lambda: agentmem.open(tmp_path / "store", model=llama, config=CONFIG), llama, promises.read(tmp_path / "book")
    )

    assert found.faults == []
    assert found.num_kept > 5


@needs_compiler
@pytest.mark.slow
def test_what_was_dropped_can_be_had_back_after_a_clock_went_back(zygote, tmp_path):
    num_removed = zygote.run("drop_in_the_future", str(tmp_path)).result()

    assert num_removed == 0


def test_a_forked_child_is_refused_by_every_verb_and_the_parent_goes_on(llama, store_path):
    with agentmem.open(store_path, model=llama, config=CONFIG) as store:
        session = store.create("s")
        session.append(PROMPT)
        session.checkpoint()
        verbs = [session.checkpoint, session.forward, lambda: session.fork("x"), lambda: store.create("t"), store.flush]
        refused = [in_child(verb) for verb in verbs]
        ended = in_child(store.close)

        session.append([5])
        session.checkpoint()
        assert refused == [ClosedError.__name__] * len(verbs)
        assert ended in {"", ClosedError.__name__}
        assert torch.allclose(session.forward()[0], cold_logits(llama, [*PROMPT, 5]), atol=1e-4)


def in_child(work):
    """Run `work` in a forked child; return the name of what it raised, "" for nothing."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if not pid:
        logging.disable()
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - its name is what is asked
            os.write(sender, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


def test_two_models_that_take_turns_on_a_store_never_meet(tiny, store_path, caplog):
    models = [tiny("llama", seed=seed) for seed in (0, 1)]
    caplog.set_level(logging.ERROR, "agentmem")

    for turn in range(3):
        for number, model in enumerate(models):
            with agentmem.open(store_path, model=model, config=CONFIG) as store:
                session = store.create(f"s{number}") if turn == 0 else store.resume(f"s{number}")
                session.append([7, turn] if turn else PROMPT)
                logits = session.forward()[0]
                session.checkpoint()

                assert torch.allclose(logits, cold_logits(model, session.active.tokens), atol=1e-4)
                assert session.report.num_computed <= (len(PROMPT) if turn == 0 else 3)


@needs_compiler
@pytest.mark.slow
def test_two_processes_with_other_models_work_on_one_store_at_once(zygote, llama, store_path):
    with agentmem.open(store_path, model=llama, config=CONFIG) as store:
        session = store.create("ours")
        session.append(PROMPT)
        session.checkpoint()

        other = zygote.run("use_another_model", str(store_path)).result()
        session.append([5])
        session.checkpoint()
        logits = session.forward()[0]
        names = {record.name for record in store.sessions()}

    assert other == {"refused": "SessionLeasedError", "num_reused": 0, "is_right": True}
    assert torch.allclose(logits, cold_logits(llama, [*PROMPT, 5]), atol=1e-4)
    assert names == {"ours", "theirs"}
    assert examine(lambda: agentmem.open(store_path, model=llama, config=CONFIG), llama, []).faults == []


def test_a_model_that_resumes_another_s_session_takes_its_tokens_and_none_of_its_kv(tiny, store_path, caplog):
    caplog.set_level(logging.ERROR, "agentmem")
    with agentmem.open(store_path, model=tiny("llama", seed=0), config=CONFIG) as store:
        session = store.create("s")
        session.append(PROMPT)
        session.checkpoint()
    other = tiny("llama", seed=1)

    with agentmem.open(store_path, model=other, config=CONFIG) as store:
        session = store.resume("s")
        reason = session.report.reason
        logits = session.forward()[0]

        assert session.active.tokens == PROMPT
        assert reason is Reason.FOREIGN_MODEL
        assert torch.allclose(logits, cold_logits(other, PROMPT), atol=1e-4)


# ---- in the zygote


def work_through_a_jump(model, folder, jump_s):
    """Work, let the clock jump, collect garbage, work on."""
    folder = Path(folder)
    faults = Faults(folder / "store")
    book = PromiseBook(folder / "book")
    for turn, offset_s in enumerate([0, jump_s, 0]):
        before = time.time()
        faults.jump(offset_s)
        if turn == 1 and abs(time.time() - before - jump_s) > 60:
            raise RuntimeError("the clock did not jump")
        with agentmem.open(folder / "store", model=model, config=CONFIG) as store:
            client = Client(store, "one", book, turn)
            for _ in range(8):
                client.act()
            store.gc(grace_s=60.0)


def drop_in_the_future(model, folder):
    """Drop a branch while the clock is ahead, and collect garbage when it is right again; return what was removed."""
    folder = Path(folder)
    faults = Faults(folder / "store")
    faults.jump(YEAR_S)
    with agentmem.open(folder / "store", model=model, config=CONFIG) as store:
        session = store.create("one")
        session.append(PROMPT)
        session.fork("other")
        session.append([1, 2, 3], branch="other")
        session.checkpoint(branch="other")
        session.drop("other")
        store.flush()
        faults.jump(0)
        return len(store.gc(grace_s=60.0).checkpoints)


def use_another_model(_model, path):
    """Put the same tokens into the store with a model of other weights; try to resume the session of another."""
    model = tiny_model("llama", seed=1)
    with agentmem.open(path, model=model, config=CONFIG) as store:
        session = store.create("theirs")
        session.append(PROMPT)
        session.checkpoint()
        num_reused = session.report.num_reused
        is_right = torch.allclose(session.forward()[0], cold_logits(model, PROMPT), atol=1e-4)
        try:
            store.resume("ours")
            refused = ""
        except SessionLeasedError as error:
            refused = type(error).__name__
    return {"refused": refused, "num_reused": num_reused, "is_right": is_right}


if __name__ == "__main__":
    serve_tasks(
        {
            "work_through_a_jump": work_through_a_jump,
            "drop_in_the_future": drop_in_the_future,
            "use_another_model": use_another_model,
        }
    )
