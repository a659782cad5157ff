"""Byte budgets: sessions and branches that do not fit the device sink to the host and to disk, and come back exact."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import agentmem
from agentmem.check import check
from agentmem.testing.meter import Meter
from agentmem.tiers.disk import DiskTier

KIB, MIB = 1 << 10, 1 << 20


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


# -- what is really held, at every allocation and every commit


def test_a_branch_grows_beyond_half_of_the_device_budget_by_way_of_ram_and_stays_bit_exact(
    llama: Any, tmp_path: Path
) -> None:
    import torch

    def grow(store: agentmem.Store) -> Any:
        session = store.create("s")
        for step in range(20):
            logits = session.forward(_tokens(step, 25))
        return logits

    with agentmem.open(tmp_path / "free", model=llama) as store:
        wanted = grow(store)
    config = agentmem.Config(device_budget_nbytes=620 * KIB)
    with Meter().measuring() as meter, agentmem.open(tmp_path / "tight", model=llama, config=config) as store:
        meter.reset()
        found = grow(store)
        with pytest.raises(agentmem.CapacityError):
            store.resume("s").forward(_tokens(99, 200))

    assert torch.equal(found, wanted)
    assert 500 * KIB < meter.peaks["device"] <= 620 * KIB


def test_a_branch_that_cannot_go_by_way_of_ram_is_refused_and_stays_whole(llama: Any, store_path: Path) -> None:
    config = agentmem.Config(device_budget_nbytes=620 * KIB, host_budget_nbytes=64 * KIB)
    with Meter().measuring() as meter, agentmem.open(store_path, model=llama, config=config) as store:
        meter.reset()
        session = store.create("s")
        refused = 0
        for step in range(20):
            try:
                session.forward(_tokens(step, 25))
            except agentmem.CapacityError:
                refused += 1

        assert meter.peaks["device"] <= 620 * KIB
        assert refused > 0
        assert session.active.num_tokens == (20 - refused) * 25


def test_the_host_tier_drops_before_it_copies(llama: Any, store_path: Path) -> None:
    config = agentmem.Config(device_budget_nbytes=600 * KIB, host_budget_nbytes=130 * KIB)
    with Meter().measuring() as meter, agentmem.open(store_path, model=llama, config=config) as store:
        meter.reset()
        _grow(store, 3, 2)

        assert 0 < meter.peaks["host"] <= 130 * KIB
        assert store.stats()["host_nbytes"] <= 130 * KIB


def test_layer_states_are_counted_before_they_are_there(tiny: Any, store_path: Path) -> None:
    config = agentmem.Config(device_budget_nbytes=300 * KIB, host_budget_nbytes=100 * KIB)
    with Meter().measuring() as meter, agentmem.open(store_path, model=tiny("recurrent"), config=config) as store:
        meter.reset()
        session = store.create("s")
        for number in range(8):
            session.forward(_tokens(number, 10))
            session.checkpoint()
            session.fork(f"b{number}")
            session.forward([number + 1], branch=f"b{number}")

        assert meter.peaks["device"] <= 300 * KIB
        assert meter.peaks["host"] <= 100 * KIB


def test_the_rows_of_a_batch_keep_the_device_budget(llama: Any, store_path: Path) -> None:
    config = agentmem.Config(device_budget_nbytes=1500 * KIB)
    with Meter().measuring() as meter, agentmem.open(store_path, model=llama, config=config) as store:
        meter.reset()
        session = store.create("s")
        session.append(_tokens(1, 100))
        session.checkpoint()
        names = [session.fork(f"b{number}").name for number in range(4)]
        with session.batch(names) as batch:
            batch.forward([_tokens(number, 10) for number in range(4)])
            batch.generate(max_new_tokens=20)

        assert 800 * KIB < meter.peaks["device"] <= 1500 * KIB


# -- the disk


def _is_sound(store: agentmem.StoreView) -> bool:
    return check(store.environment, DiskTier(store.environment), read_data=True).problems == ()


def _fill(session: agentmem.Session, start: int = 0) -> int:
    """Make checkpoints until the disk has no room for one more; return their number."""
    for number in range(1000):
        try:
            session.forward(_tokens(start + number, 100))
            session.checkpoint()
        except agentmem.StorageFullError:
            return number
    raise AssertionError("the disk never was full")


def test_forks_that_are_dropped_make_room_at_once_when_the_disk_budget_is_used_up(llama: Any, store_path: Path) -> None:
    config = agentmem.Config(disk_budget_nbytes=2 * MIB)
    with Meter().measuring() as meter, agentmem.open(store_path, model=llama, config=config) as store:
        session = store.create("s")
        session.append(_tokens(0, 200))
        trunk = session.checkpoint("trunk")
        for number in range(25):
            session.fork(f"b{number}", at=trunk)
            session.forward(_tokens(number, 130), branch=f"b{number}")
            session.checkpoint(branch=f"b{number}")
            session.drop(f"b{number}")

        assert 1.5 * MIB < meter.peaks["disk"] <= 2 * MIB
        assert meter.peaks["file"] <= 2.6 * MIB
        assert session.fork("last", at=trunk).num_tokens == 200
        assert _is_sound(store)


def test_a_full_disk_budget_is_a_named_error_and_dropping_helps(llama: Any, store_path: Path) -> None:
    config = agentmem.Config(disk_budget_nbytes=2 * MIB)
    with Meter().measuring() as meter, agentmem.open(store_path, model=llama, config=config) as store:
        session = store.create("s")
        session.append(_tokens(0, 100))
        trunk = session.checkpoint("trunk")
        session.fork("large", at=trunk)
        session.switch("large")
        _fill(session)
        tokens = session.active.tokens

        with pytest.raises(agentmem.StorageFullError, match=r"disk budget.*prune.*disk_budget_nbytes"):
            session.checkpoint()
        assert session.active.tokens == tokens
        session.switch("main")
        session.drop("large")
        session.append(_tokens(1, 100))

        assert session.checkpoint("fits again").has_kv
        assert meter.peaks["disk"] <= 2 * MIB
        assert _is_sound(store)


def test_tokens_find_room_when_kv_does_not_and_pins_are_never_removed_for_it(llama: Any, store_path: Path) -> None:
    config = agentmem.Config(disk_budget_nbytes=2 * MIB)
    with agentmem.open(store_path, model=llama, config=config) as store:
        session = store.create("s")
        session.append(_tokens(0, 100))
        session.checkpoint("trunk")
        session.fork("pinned")
        session.switch("pinned")
        session.forward(_tokens(1, 400))
        pinned = session.checkpoint()
        store.pin(pinned)
        session.switch("main")
        session.drop("pinned")
        _fill(session, 100)

        session.fork("more")
        session.append(_tokens(2, 500), branch="more")
        store.environment.flush()

        assert store.open_tokens(session.ledger.record.session_id, "more") == _tokens(2, 500)
        assert session.fork("again", at=pinned).num_tokens == 500
        session.drop("more")
        session.rewind(session.checkpoints[0])
        session.drop("again")
        store.unpin(pinned)
        assert _is_sound(store)


def test_tokens_that_find_no_room_either_wait_and_are_written_once_there_is_some(llama: Any, store_path: Path) -> None:
    config = agentmem.Config(disk_budget_nbytes=MIB, save_in_background=False)
    with agentmem.open(store_path, model=llama, config=config) as store:
        store.create("other").append(_tokens(0, 30_000))
        store.resume("other").close()
    with Meter().measuring() as meter, agentmem.open(store_path, model=llama, config=config) as store:
        session = store.create("s")
        is_full = False
        while not is_full:
            number = len(session.branches)
            session.fork(f"b{number}")
            session.append(_tokens(number, 3000))
            try:
                store.environment.flush()
            except agentmem.StorageFullError:
                is_full = True
        tokens = session.active.tokens

        store.remove("other")
        store.gc(grace_s=0)
        store.environment.flush()

        assert meter.peaks["disk"] <= MIB
        assert {branch.name for branch in store.view("s").branches} == set(session.branches)
        session.rewind(tokens=2500)
        store.environment.flush()
        assert session.active.tokens == tokens[:-2500]
        assert _is_sound(store)
        session.rewind(tokens=len(tokens) - 2500)


def test_one_entry_larger_than_the_disk_budget_is_refused_before_anything_is_written(
    tiny: Any, store_path: Path
) -> None:
    import torch

    config = agentmem.Config(disk_budget_nbytes=MIB)
    with agentmem.open(store_path, model=tiny("t5"), config=config) as store:
        session = store.create("s")
        store.flush()
        before = store.stats()["file_nbytes"]
        ids = torch.randint(1 << 62, (1, 200_000))

        with pytest.raises(agentmem.StorageFullError, match="disk budget"):
            session.append([0], input_ids=ids, attention_mask=torch.ones_like(ids))

        store.flush()
        assert store.stats()["file_nbytes"] <= before + 64 * KIB
        assert session.active.num_tokens == 0


def test_the_disk_budget_holds_over_restarts(llama: Any, store_path: Path) -> None:
    config = agentmem.Config(disk_budget_nbytes=2 * MIB)
    peaks = []
    for restart in range(3):
        with Meter().measuring() as meter:
            store = agentmem.open(store_path, model=llama, config=config)
            _fill(store.create(f"s{restart}"), 100 * restart)
            with pytest.raises(agentmem.StorageFullError):
                store.close()
        peaks.append(meter.peaks["disk"])

    assert max(peaks) <= 2 * MIB
    with agentmem.open(store_path) as view:
        assert _is_sound(view)


def test_a_hundred_forks_of_which_one_is_left_take_no_more_than_the_trunk_and_one_tail(
    llama: Any, tmp_path: Path
) -> None:
    from agentmem.gc import compact

    def stored(path: Path, num_forks: int) -> float:
        with agentmem.open(path, model=llama) as store:
            session = store.create("s")
            session.append(_tokens(0, 200))
            trunk = session.checkpoint("trunk")
            for number in range(num_forks):
                session.fork(f"b{number}", at=trunk)
                session.append(_tokens(number + 1, 3), branch=f"b{number}")
                session.checkpoint(branch=f"b{number}")
            for number in range(1, num_forks):
                session.drop(f"b{number}")
            session.close()
            store.gc(grace_s=0)
            return store.stats()["disk_stored_nbytes"]

    many, one = stored(tmp_path / "many", 100), stored(tmp_path / "one", 1)
    compact(tmp_path / "many")

    with agentmem.open(tmp_path / "many") as view:
        assert many == one
        assert view.environment.nbytes <= 1.2 * view.environment.live_nbytes


def test_stats_show_each_budget_beside_its_use_and_what_a_reused_token_cost_the_ssd(
    llama: Any, store_path: Path
) -> None:
    config = agentmem.Config(device_budget_nbytes=MIB, host_budget_nbytes=MIB, disk_budget_nbytes=4 * MIB)
    with agentmem.open(store_path, model=llama, config=config) as store:
        first = store.create("first")
        first.append(_tokens(0, 200))
        first.checkpoint()
        second = store.create("second")
        second.append(_tokens(0, 200))
        second.checkpoint()
        stats = store.stats()

    assert stats["device_nbytes"] <= stats["device_budget_nbytes"] == MIB
    assert stats["host_nbytes"] <= stats["host_budget_nbytes"] == MIB
    assert stats["disk_stored_nbytes"] < stats["disk_live_nbytes"] <= stats["disk_budget_nbytes"] == 4 * MIB
    assert stats["ssd_written_nbytes"] >= stats["disk_stored_nbytes"]
    assert stats["tokens_reused"] == 192
    assert stats["ssd_written_nbytes_per_token_reused"] == stats["ssd_written_nbytes"] / 192


def test_a_budget_that_cannot_work_is_refused() -> None:
    with pytest.raises(agentmem.InvalidInputError, match="disk_budget_nbytes"):
        agentmem.Config(disk_budget_nbytes=1000)


@pytest.mark.parametrize("budget_nbytes", [300_000, 350_000])
def test_a_branch_whose_growth_makes_room_takes_it_from_others_of_its_own_session(
    llama: Any, store_path: Path, budget_nbytes: int
) -> None:
    config = agentmem.Config(block_size=16, device_budget_nbytes=budget_nbytes)
    more = [1 + index % 300 for index in range(120)]
    with agentmem.open(store_path, model=llama, config=config) as store:
        session = store.create("s")
        session.append([1 + index % 400 for index in range(100)])
        session.checkpoint()
        for number in range(3):
            session.append([7 + number] * 20, branch=session.fork(f"b{number}").name)
            session.forward(branch=f"b{number}")
        session.append(more)

        try:
            logits = session.forward()[0]
        except agentmem.CapacityError:
            assert budget_nbytes < 320_000
        else:
            with torch.no_grad():
                alone = llama(torch.tensor([session.active.tokens])).logits[0, -1]
            assert torch.allclose(logits, alone, atol=1e-4)
        assert session.active.tokens[-len(more) :] == more
