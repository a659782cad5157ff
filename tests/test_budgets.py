"""Byte budgets: sessions and branches that do not fit the device sink to the host and to disk, and come back exact."""

import random
from pathlib import Path
from typing import Any

import pytest

import agentmem

MIB = 1 << 20


def _tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1, 256), k=length)


def _budget(store: agentmem.Store, num_tokens: int) -> int:
    return num_tokens * store.token_nbytes


def _grow(store: agentmem.Store, num_sessions: int, num_branches: int) -> list[agentmem.Session]:
    """Make sessions of a trunk and short branches, going round all of them twice."""
    sessions = [store.create(f"s{number}") for number in range(num_sessions)]
    for number, session in enumerate(sessions):
        session.append(_tokens(number, 200))
        trunk = session.checkpoint("trunk")
        for branch in range(num_branches):
            session.fork(f"b{branch}", at=trunk)
    for round_number in range(2):
        for number, session in enumerate(sessions):
            for branch in range(num_branches):
                session.switch(f"b{branch}")
                session.forward(_tokens(1000 * round_number + 10 * number + branch, 30))
    return sessions


def _last_logits(sessions: list[agentmem.Session], num_branches: int) -> list[Any]:
    return [session.forward([7], branch=f"b{branch}")[-1] for session in sessions for branch in range(num_branches)]


def test_branches_come_back_bit_exact_from_host_and_disk_under_a_small_budget(llama: Any, tmp_path: Path) -> None:
    import torch

    with agentmem.open(tmp_path / "free", model=llama) as store:
        wanted = _last_logits(_grow(store, 4, 3), 3)
        budget = _budget(store, 700)
    config = agentmem.Config(device_budget_nbytes=budget, host_budget_nbytes=budget)

    highest = 0
    with agentmem.open(tmp_path / "tight", model=llama, config=config) as store:
        sessions = _grow(store, 4, 3)
        found = []
        for session in sessions:
            found += _last_logits([session], 3)
            highest = max(highest, store.stats()["device_nbytes"])
        stats = store.stats()

    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert highest <= budget
    assert stats["host_nbytes"] <= budget
    assert stats["branches_evicted"] > 0
    assert stats["host_to_device_nbytes"] > 0
    assert stats["disk_to_device_nbytes"] > 0
    assert stats["tokens_fed"] == 4 * 200 + 4 * 3 * (2 * 30 + 1), "each token once: what was evicted came back"


def test_a_branch_larger_than_the_device_budget_is_refused_by_name_and_keeps_its_tokens(
    llama: Any, store_path: Path
) -> None:
    with agentmem.open(store_path, model=llama) as store:
        budget = _budget(store, 256)
    config = agentmem.Config(device_budget_nbytes=budget)
    with agentmem.open(store_path, model=llama, config=config) as store:
        session = store.create("large")
        session.append(_tokens(1, 100))
        session.checkpoint("fits")
        before = session.active.tokens

        with pytest.raises(agentmem.CapacityError, match="device_budget_nbytes"):
            session.forward(_tokens(2, 400))

        assert session.active.tokens == before
        assert store.stats()["device_nbytes"] <= budget
        assert session.forward([5]).shape[0] == 1


def test_a_switch_after_eviction_says_from_which_tier_each_token_came(llama: Any, store_path: Path) -> None:
    with agentmem.open(store_path, model=llama) as store:
        budget = _budget(store, 450)
    config = agentmem.Config(device_budget_nbytes=budget, host_budget_nbytes=0)
    with agentmem.open(store_path, model=llama, config=config) as store:
        first, second = store.create("first"), store.create("second")
        for number, session in enumerate((first, second)):
            session.append(_tokens(number, 300))
            session.checkpoint("all but one token fed")

        first.switch("main")

        assert first.report.from_tier == {"disk": 299}
        assert first.report.num_reused == 299
        assert first.report.moved_nbytes == 299 * store.token_nbytes


def test_the_last_branch_to_leave_gives_the_workspace_back(llama: Any, store_path: Path) -> None:
    with agentmem.open(store_path, model=llama) as store:
        session = store.create("one")
        session.append(_tokens(3, 150))
        session.checkpoint()
        session.close()

        assert store.stats()["device_nbytes"] == 0


def test_a_dropped_branch_keeps_its_tokens_and_costs_no_saving_of_kv(llama: Any, store_path: Path) -> None:
    config = agentmem.Config(save_in_background=False)
    with agentmem.open(store_path, model=llama, config=config) as store:
        session = store.create("search")
        session.append(_tokens(1, 100))
        trunk = session.checkpoint("trunk")
        saved = store.stats()["device_to_disk_nbytes"]
        session.fork("dead end", at=trunk)
        session.forward(_tokens(2, 80), branch="dead end")
        tokens = session.branch("dead end").tokens

        session.drop("dead end")

        left = [checkpoint for checkpoint in session.checkpoints if checkpoint.is_auto]
        assert store.stats()["device_to_disk_nbytes"] == saved
        assert session.fork("again", at=left[-1]).tokens == tokens
        session.forward([9], branch="again")
        assert session.branch("again").report.reason is agentmem.Reason.NOT_SAVED
        assert session.branch("again").report.num_reused + session.branch("again").report.num_computed == 181
