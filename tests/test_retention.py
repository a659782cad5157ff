"""Retention, pins and gc beside open sessions: what goes, what it gives back, and that no token of a branch is lost."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agentmem
from agentmem.check import check
from agentmem.ids import BlockDigest, BlockHash, CheckpointId, Fingerprint, SessionId
from agentmem.kv.hashing import pack_tokens, unpack_tokens
from agentmem.retention import Retention, make_plan
from agentmem.tiers.disk import DiskTier
from agentmem.tree.checkpoint import BlockRef, BranchRecord, Checkpoint, SessionRecord
from agentmem.tree.tree import SessionTree

SESSION = SessionId(b"session1")
EVERYTHING = Retention(keep_named=False, keep_leaves=False, keep_branch_points=False)


def _tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1, 256), k=length)


@pytest.fixture
def store(llama: Any, store_path: Path) -> Iterator[agentmem.Store]:
    with agentmem.open(store_path, model=llama, config=agentmem.Config(block_size=16)) as store:
        yield store


def _grown(store: agentmem.Store, num_checkpoints: int = 4) -> agentmem.Session:
    """Return a session of one branch with checkpoints after every 25 tokens, none of them named."""
    session = store.create("s")
    for number in range(num_checkpoints):
        session.append(_tokens(number, 25))
        session.checkpoint()
    return session


def _is_sound(store: agentmem.StoreView) -> bool:
    report = check(store.environment, DiskTier(store.environment), read_data=True)
    return report.problems == ()


def _stored_nbytes(store: agentmem.Store) -> float:
    return store.stats()["disk_stored_nbytes"]


# -- what goes


def test_checkpoints_in_the_middle_of_a_line_are_merged_into_the_next_that_is_kept(store: agentmem.Store) -> None:
    session = _grown(store)
    tokens = session.active.tokens

    report = store.prune(Retention())

    assert [item.what for item in report.items] == ["merged"] * 3
    assert [checkpoint.num_own_tokens for checkpoint in session.checkpoints] == [100]
    assert session.active.tokens == tokens
    assert _is_sound(store)


def test_a_named_checkpoint_a_branch_point_a_tip_and_a_pin_are_kept(store: agentmem.Store) -> None:
    session = store.create("s")
    kept = []
    for number, message in enumerate(["", "named", "", "", ""]):
        session.append(_tokens(number, 20))
        kept.append(session.checkpoint(message))
    session.fork("other", at=kept[2])
    session.append([1, 2, 3], branch="other")
    session.checkpoint(branch="other")
    store.pin(kept[3])

    report = store.prune(Retention())

    assert [item.name for item in report.items] == [kept[0].checkpoint_id.hex()]
    assert _is_sound(store)


def test_what_is_young_is_kept(store: agentmem.Store) -> None:
    _grown(store)

    assert store.prune(Retention(older_than_s=3600)).items == ()


def test_a_branch_point_that_is_not_kept_loses_its_own_kv_and_no_token(store: agentmem.Store) -> None:
    session = store.create("s")
    session.append(_tokens(1, 25))
    point = session.checkpoint()
    for name in ("a", "b"):
        session.fork(name, at=point)
        session.append(_tokens(ord(name), 20), branch=name)
        session.checkpoint(branch=name)
    session.switch("a")
    session.drop("main")

    report = store.prune(Retention(keep_branch_points=False))

    thinned = session.resolve(point.checkpoint_id.hex())
    assert [item.what for item in report.items] == ["thinned"]
    assert (thinned.tail, thinned.num_pending, thinned.tokens) == (None, 9, point.tokens)
    assert session.fork("c", at=thinned).tokens == _tokens(1, 25)
    assert session.forward(branch="c").shape[0] == 1
    assert session.branch("c").report.num_computed <= 9
    assert _is_sound(store)


def test_old_branches_are_dropped_when_leaves_are_not_kept_but_not_the_active_one(store: agentmem.Store) -> None:
    session = _grown(store, 1)
    session.fork("old")
    session.append([1, 2, 3], branch="old")
    session.checkpoint(branch="old")
    session.fork("named")
    session.append([4, 5, 6], branch="named")
    session.checkpoint("keep me", branch="named")

    report = store.prune(Retention(keep_leaves=False))

    assert [(item.what, item.name) for item in report.items] == [("dropped", "old")]
    assert session.branches == ["main", "named"]
    assert _is_sound(store)


# -- what it gives back


def test_a_dry_run_lists_exactly_what_a_run_lets_go_of_and_the_bytes_that_gc_then_gives_back(
    store: agentmem.Store,
) -> None:
    session = _grown(store)
    session.fork("other")
    session.append(_tokens(9, 30), branch="other")
    session.checkpoint(branch="other")
    session.close()  # or it would hold on to blocks that it has in memory
    store.gc(grace_s=0)
    before = _stored_nbytes(store)

    preview = store.prune(EVERYTHING, dry_run=True)
    assert _stored_nbytes(store) == before
    report = store.prune(EVERYTHING)

    store.gc(grace_s=0)
    assert preview.items == report.items
    assert preview.is_dry_run
    assert before - _stored_nbytes(store) == report.nbytes > 0


def test_pruning_twice_finds_nothing_more(store: agentmem.Store) -> None:
    _grown(store)
    store.prune(Retention())

    assert store.prune(Retention()).items == ()


def test_the_kv_of_a_merged_line_comes_back_from_disk_without_computing(llama: Any, store_path: Path) -> None:
    config = agentmem.Config(block_size=16)
    with agentmem.open(store_path, model=llama, config=config) as store:
        _grown(store)
        store.prune(Retention())
        store.gc(grace_s=0)

    with agentmem.open(store_path, model=llama, config=config) as store:
        session = store.resume("s")

        assert session.report.num_reused == 99
        assert session.report.reason is agentmem.Reason.COMPLETE


def test_layer_states_of_merged_checkpoints_go_and_the_branch_goes_on(tiny: Any, store_path: Path) -> None:
    with agentmem.open(store_path, model=tiny("recurrent")) as store:
        session = _grown(store, 3)
        session.fork("copy")
        wanted = session.forward([7], branch="copy")
        session.close()
        before = _stored_nbytes(store)

        report = store.prune(Retention())

        store.gc(grace_s=0)
        assert report.nbytes > 0
        assert _stored_nbytes(store) == before - report.nbytes
        assert (store.resume("s").forward([7])[-1] - wanted[-1]).abs().max() < 1e-4
        assert _is_sound(store)


# -- beside open sessions


def test_a_session_that_goes_on_after_pruning_keeps_a_sound_store(store: agentmem.Store) -> None:
    session = _grown(store)
    tip = session.active.tip
    store.prune(Retention())

    session.fork("next", at=tip)
    session.append(_tokens(20, 40), branch="next")
    session.checkpoint(branch="next")
    session.rewind(tokens=90)
    session.append([5, 6, 7])
    session.checkpoint()

    assert session.active.tokens == [*_tokens(0, 10), 5, 6, 7][: len(session.active.tokens)]
    assert _is_sound(store)


def test_a_merged_checkpoint_cannot_be_forked_any_more_and_says_so(store: agentmem.Store) -> None:
    session = store.create("s")
    session.append(_tokens(1, 30))
    gone = session.checkpoint()
    session.append(_tokens(2, 30))
    session.checkpoint()
    store.prune(Retention())

    with pytest.raises(agentmem.NotFoundError, match="no checkpoint"):
        session.fork("again", at=gone)


def test_a_session_that_another_thread_works_on_is_left_out(store: agentmem.Store) -> None:
    import threading

    session = _grown(store)
    entered, done = threading.Event(), threading.Event()

    def work() -> None:
        with session.held():
            entered.set()
            done.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(30)
    report = store.prune(Retention())
    done.set()
    thread.join()

    assert (report.items, report.skipped) == ((), ("s",))
    assert len(store.prune(Retention()).items) == 3


def test_gc_takes_a_dropped_branch_of_an_open_session_and_the_session_forgets_it(store: agentmem.Store) -> None:
    session = _grown(store, 1)
    session.fork("twig")
    session.append([1, 2, 3], branch="twig")
    gone = session.checkpoint(branch="twig")
    session.drop("twig")

    report = store.gc(grace_s=0)

    assert report.checkpoints == (gone.checkpoint_id,)
    with pytest.raises(agentmem.NotFoundError):
        session.fork("again", at=gone)
    assert _is_sound(store)


def test_gc_without_grace_leaves_blocks_that_an_open_branch_has_not_named_yet(store: agentmem.Store) -> None:
    session = store.create("s")
    session.append(_tokens(1, 100))
    session.forward()
    store.flush()
    stored = store.stats()["disk_num_blocks"]

    report = store.gc(grace_s=0)

    assert stored > 0
    assert report.num_blocks == 0
    assert session.checkpoint().has_kv
    assert _is_sound(store)


# -- pins


def test_a_pinned_checkpoint_outlives_its_branch_and_gc_until_it_is_unpinned(store: agentmem.Store) -> None:
    session = _grown(store, 1)
    session.fork("twig")
    session.append([1, 2, 3], branch="twig")
    pinned = session.checkpoint(branch="twig")
    tokens = session.branch("twig").tokens

    assert store.pin(pinned)
    session.drop("twig")
    store.gc(grace_s=0)
    assert session.fork("again", at=pinned).tokens == tokens
    session.drop("again")
    assert _is_sound(store)

    assert store.unpin(pinned)
    store.gc(grace_s=0)
    assert pinned.checkpoint_id not in session.ledger.tree
    assert _is_sound(store)


def test_pinning_twice_counts_once(store: agentmem.Store) -> None:
    checkpoint = _grown(store, 1).active.tip
    assert checkpoint is not None

    assert [store.pin(checkpoint), store.pin(checkpoint)] == [True, False]
    assert [store.unpin(checkpoint), store.unpin(checkpoint)] == [True, False]
    assert _is_sound(store)


def test_removing_a_session_removes_its_pins(store: agentmem.Store) -> None:
    checkpoint = _grown(store, 1).active.tip
    assert checkpoint is not None
    store.pin(checkpoint)
    store.remove("s")

    report = store.gc(grace_s=0)

    assert report.checkpoints == (checkpoint.checkpoint_id,)
    assert _is_sound(store)


# -- the command line


def _run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "agentmem", *words], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_command_lists_what_would_go_and_then_lets_go_of_it(llama: Any, store_path: Path) -> None:
    with agentmem.open(store_path, model=llama) as store:
        session = _grown(store)
        name = session.checkpoints[0].checkpoint_id.hex()[:8]

    preview = _run("prune", str(store_path), "--dry-run")
    pinned = _run("pin", str(store_path), f"s/{name}")
    pruned = _run("prune", str(store_path), "--older-than", "0s")
    again = _run("prune", str(store_path), "--older-than", "1d")
    checked = _run("check", str(store_path))

    assert "would let go of" in preview.stdout
    assert preview.stdout.count("merged") == 4, "three of them, and the sum"
    assert "is now pinned" in pinned.stdout
    assert pruned.stdout.count("merged") == 3
    assert "0 checkpoints merged" in again.stdout
    assert [each.returncode for each in (preview, pinned, pruned, again, checked)] == [0] * 5


# -- any tree


@st.composite
def _trees(draw: st.DrawFn) -> tuple[list[Checkpoint], list[BranchRecord], set[CheckpointId], Retention]:
    """Return checkpoints of some tree of 4-token blocks, branches and pins on it, and rules."""
    made: list[Checkpoint] = []
    for number in range(draw(st.integers(1, 12))):
        parent = made[draw(st.integers(0, number - 1))] if number and draw(st.integers(0, 9)) else None
        own = draw(st.integers(1, 9))
        start = 0 if parent is None else parent.num_tokens
        first = draw(st.integers(max(start // 4 - draw(st.integers(0, 1)), 0), start // 4))
        stop = (start + own) // 4
        made.append(
            Checkpoint(
                checkpoint_id=CheckpointId(number.to_bytes(16, "big")),
                session_id=SESSION,
                parent_id=None if parent is None else parent.checkpoint_id,
                num_tokens=start + own,
                tokens=pack_tokens([number * 100 + index for index in range(own)]),
                first_block=first,
                blocks=tuple(_block(number, index) for index in range(first, stop)),
                tail=_block(number, 999) if (start + own) % 4 else None,
                fingerprint=Fingerprint(bytes([draw(st.integers(0, 9)) // 9]) * 32),
                message=draw(st.sampled_from(["", "", "named"])),
                created_s=float(number),
            )
        )
    branches = [
        BranchRecord(
            name=f"b{index}", tip=draw(st.sampled_from(made)).checkpoint_id, created_s=float(index), updated_s=99.0
        )
        for index in range(draw(st.integers(1, 4)))
    ]
    pinned = {checkpoint.checkpoint_id for checkpoint in made if not draw(st.integers(0, 7))}
    flags = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    rules = Retention(
        older_than_s=draw(st.sampled_from([0.0, 94.0])),
        keep_named=flags[0],
        keep_leaves=flags[1],
        keep_branch_points=flags[2],
    )
    return made, branches, pinned, rules


def _block(number: int, index: int) -> BlockRef:
    name = number.to_bytes(16, "big") + index.to_bytes(16, "big")
    return BlockRef(BlockHash(name), BlockDigest(name))


@settings(max_examples=300, deadline=None)
@given(tree=_trees())
def test_any_tree_keeps_the_tokens_and_the_blocks_of_every_branch_and_pin_that_stays(
    tree: tuple[list[Checkpoint], list[BranchRecord], set[CheckpointId], Retention],
) -> None:
    made, branches, pinned, rules = tree
    record = SessionRecord(
        session_id=SESSION,
        name="s",
        active_branch="b0",
        fingerprint=Fingerprint(bytes(32)),
        block_size=4,
        created_s=0.0,
        updated_s=0.0,
    )

    plan = make_plan(record, branches, made, pinned, rules, 99.0)

    before, after = SessionTree(made), SessionTree(made)
    for change in plan.changes:
        after.merge(change.removed, change.new)
    stays = {branch.tip for branch in branches if branch not in plan.branches} | pinned
    assert "b0" not in {branch.name for branch in plan.branches}
    for checkpoint_id in stays:
        assert checkpoint_id is not None
        assert unpack_tokens(after.tokens(checkpoint_id)) == unpack_tokens(before.tokens(checkpoint_id))
        assert after.blocks(checkpoint_id) == before.blocks(checkpoint_id)
        assert after.get(checkpoint_id).tail == before.get(checkpoint_id).tail
    for checkpoint in before:  # whoever else is still there has its tokens too
        if checkpoint.checkpoint_id in after:
            assert after.tokens(checkpoint.checkpoint_id) == before.tokens(checkpoint.checkpoint_id)
