"""What bad input gets: a named error that says what was asked, what was found and what to do; nothing stored is lost.

After every refusal the session still gives the logits it gave before, and `check` finds nothing. Run as a script, this
file is a process of its own that may change its user, its limits, or fork.
"""

import contextlib
import copy
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import agentmem
from agentmem import _format
from agentmem._lmdb import Environment, Level, Table
from agentmem.check import check
from agentmem.errors import (
    AlreadyExistsError,
    CapacityError,
    ClosedError,
    CorruptionError,
    FormatVersionError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    SessionLeasedError,
    SpecMismatchError,
    StaleCacheError,
    StorageFullError,
    StoreLockedError,
    UnsupportedModelError,
)
from agentmem.reasons import Reason
from agentmem.testing.damage import overwrite
from agentmem.tiers.blockrows import BlockInfo
from agentmem.tiers.disk import DiskTier

NOBODY = 65534
TOKENS = [(7 * index + 3) % 512 for index in range(150)]


class Stored:
    """A store with one session, and what it answers; `is_untouched` fails when that is no longer so."""

    def __init__(self, path, model):
        self.path = path
        self.model = model
        self.store = agentmem.open(path, model=model)
        self.session = self.store.create("s")
        self.logits = self.session.forward(TOKENS)[-1:]
        self.plan = self.session.checkpoint("plan")
        self.session.fork("other")

    def is_untouched(self):
        """Close, open again and ask everything that can be asked."""
        self.store.close()
        with agentmem.open(self.path, model=self.model) as store:
            session = store.resume("s")
            assert session.branches == ["main", "other"]
            assert session.report.reason is Reason.COMPLETE
            assert session.report.num_reused == len(TOKENS)
            for name in session.branches:
                assert session.branch(name).tokens == TOKENS
                assert torch.allclose(session.forward([], branch=name), self.logits, atol=1e-4)
            assert check(store.environment, DiskTier(store.environment), read_data=True).problems == ()
        return True


@pytest.fixture
def stored(llama, store_path):
    """A store with one session of 150 tokens."""
    kept = Stored(store_path, llama)
    yield kept
    with contextlib.suppress(ClosedError):
        kept.store.close()


def says(error, *words):
    """Tell whether the error's message has all the words."""
    return all(word in str(error.value) for word in words)


def run_script(*arguments, **options):
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


# -- names and handles


def test_an_unknown_session_names_those_there_are(stored):
    with pytest.raises(NotFoundError) as error:
        stored.store.resume("t")

    assert says(error, "'t'", "s")
    assert stored.is_untouched()


def test_an_unknown_branch_names_those_there_are(stored):
    for act in (
        lambda: stored.session.switch("nope"),
        lambda: stored.session.drop("nope"),
        lambda: stored.session.append([1], branch="nope"),
        lambda: stored.session.fork("new", branch="nope"),
        lambda: stored.store.resume("s", branch="nope"),
    ):
        with pytest.raises(NotFoundError) as error:
            act()
        assert says(error, "nope", "main", "other")

    assert stored.is_untouched()


def test_an_unknown_checkpoint_is_named(stored):
    for act in (
        lambda: stored.session.fork("new", at="ffffffff"),
        lambda: stored.session.rewind("ffffffff"),
    ):
        with pytest.raises(NotFoundError) as error:
            act()
        assert says(error, "ffffffff")

    assert stored.is_untouched()


def test_a_checkpoint_of_another_session_is_unknown_here(stored):
    other = stored.store.create("t")
    other.append([1, 2, 3])
    foreign = other.checkpoint()

    with pytest.raises(NotFoundError):
        stored.session.fork("new", at=foreign)
    with pytest.raises(NotFoundError):
        stored.session.rewind(foreign)

    assert stored.is_untouched()


def test_a_taken_name_is_refused(stored):
    with pytest.raises(AlreadyExistsError) as of_session:
        stored.store.create("s")
    with pytest.raises(AlreadyExistsError) as of_branch:
        stored.session.fork("other")

    assert says(of_session, "'s'", "resume")
    assert says(of_branch, "'other'", "another name")
    assert stored.is_untouched()


@pytest.mark.parametrize("name", ["", " a", "a\n", "\0", "x" * 300, "é" * 200])
def test_a_name_that_cannot_be_printed_or_stored_is_refused(stored, name):
    with pytest.raises(InvalidInputError):
        stored.store.create(name)
    with pytest.raises(InvalidInputError):
        stored.session.fork(name)

    assert stored.is_untouched()


def test_the_active_branch_is_not_dropped(stored):
    with pytest.raises(InvalidInputError) as error:
        stored.session.drop("main")

    assert says(error, "'main'", "switch")
    assert stored.is_untouched()


def test_a_dropped_branchs_handle_is_refused(stored):
    branch = stored.session.fork("third")
    stored.session.drop("third")

    for act in (lambda: branch.append([1]), branch.forward, branch.checkpoint, lambda: branch.rewind(tokens=1)):
        with pytest.raises(ClosedError) as error:
            act()
        assert says(error, "'third'", "dropped")

    assert stored.is_untouched()


def test_a_closed_store_and_its_handles_are_refused(stored):
    branch = stored.session.active
    stored.store.close()

    for act in (
        lambda: stored.store.create("t"),
        lambda: stored.store.resume("s"),
        stored.store.sessions,
        stored.store.flush,
        lambda: stored.session.append([1]),
        lambda: stored.session.forward([1]),
        lambda: stored.session.generate(max_new_tokens=1),
        lambda: stored.session.fork("new"),
        lambda: stored.session.switch("other"),
        lambda: stored.session.cache().__enter__(),
        branch.checkpoint,
        lambda: branch.rewind(tokens=1),
    ):
        with pytest.raises(ClosedError) as error:
            act()
        assert says(error, "closed")

    assert stored.is_untouched()


def test_a_closed_sessions_handles_are_refused_and_the_store_resumes_it(stored):
    stored.session.close()

    with pytest.raises(ClosedError) as error:
        stored.session.append([1])

    assert says(error, "'s'", "resume")
    assert stored.store.resume("s").active.tokens == TOKENS
    assert stored.is_untouched()


# -- stores


def test_the_same_store_is_not_opened_twice_in_a_process(stored):
    with pytest.raises(StoreLockedError) as error:
        agentmem.open(stored.path, model=stored.model)

    assert says(error, str(stored.path), str(os.getpid()))
    assert stored.is_untouched()


def test_a_session_that_another_process_writes_is_refused_and_may_be_looked_at(stored):
    done = run_script("open", stored.path)

    assert done.stdout.split() == ["SessionLeasedError", str(os.getpid()), "s"], done.stderr
    assert stored.is_untouched()


def test_a_path_that_is_no_store_is_refused_and_left_as_it_is(llama, tmp_path):
    file, folder, missing = tmp_path / "file", tmp_path / "folder", tmp_path / "missing"
    file.write_text("mine")
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")

    for path in (file, folder):
        with pytest.raises(InvalidInputError) as error:
            agentmem.open(path, model=llama)
        assert says(error, str(path), "no store")
        with pytest.raises(InvalidInputError):
            agentmem.open(path)
    with pytest.raises(NotFoundError) as error:
        agentmem.open(missing)

    assert says(error, str(missing))
    assert not missing.exists()
    assert file.read_text() == (folder / "notes.txt").read_text() == "mine"
    assert [entry.name for entry in folder.iterdir()] == ["notes.txt"]


def test_a_data_file_of_something_else_is_refused_and_left_as_it_is(llama, store_path):
    store_path.mkdir(mode=0o700)
    (store_path / "data.mdb").write_bytes(b"SQLite format 3\0" * 1000)

    with pytest.raises(InvalidInputError) as error:
        agentmem.open(store_path, model=llama)

    assert says(error, "no store")
    assert (store_path / "data.mdb").read_bytes() == b"SQLite format 3\0" * 1000


def test_a_cut_off_data_file_is_corruption_and_not_a_crash(stored):
    stored.store.close()
    data = stored.path / "data.mdb"
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])

    for options in ({}, {"model": stored.model}):
        with pytest.raises(CorruptionError) as error:
            agentmem.open(stored.path, **options)
        assert says(error, str(data))

    data.write_bytes(whole)
    assert stored.is_untouched()


@pytest.mark.parametrize(("version", "min_reader"), [(99, 99), (5, 5), (3, 3), (2, 2), (1, 1)])
def test_a_store_of_another_format_is_refused_by_version(stored, version, min_reader):
    stored.store.close()
    with Environment.open(stored.path) as environment:

        def renumber(txn, numbers):
            old = txn.get(Table.META, _format.FORMAT_KEY)
            txn.put(Table.META, _format.FORMAT_KEY, old[:8] + struct.pack(">HH", *numbers) + old[12:])

        environment.submit(lambda txn: renumber(txn, (version, min_reader)), level=Level.DURABLE).result()

    for options in ({}, {"model": stored.model}):
        with pytest.raises(FormatVersionError) as error:
            agentmem.open(stored.path, **options)
        assert says(error, str(min_reader), "agentmem")


def test_a_read_only_directory_is_refused_by_name():
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # not tmp_path: another user must be able to reach it
    folder.chmod(0o755)
    try:
        done = run_script("read-only", folder)
    finally:
        shutil.rmtree(folder)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["ReadOnlyError"] * 2


def test_a_forked_child_is_refused_and_harms_nothing(llama, store_path):
    done = run_script("fork", store_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["ClosedError"] * 6
    with agentmem.open(store_path, model=llama) as store:
        assert store.resume("s").active.tokens == [*TOKENS, 1]
        assert check(store.environment, DiskTier(store.environment), read_data=True).is_sound


# -- a full disk


def test_a_full_disk_is_named_and_what_is_on_the_device_stays_of_use(llama, store_path):
    config = agentmem.Config(disk_reserve_nbytes=1 << 60)
    store = agentmem.open(store_path, model=llama, config=config)
    session = store.create("s")
    logits = session.forward(TOKENS)

    with pytest.raises(StorageFullError) as error:
        session.checkpoint("never written")
    after = session.forward([1])
    with pytest.raises(StorageFullError):
        store.close()

    assert says(error, "no room", "free", str(store_path))
    assert (logits.shape[0], after.shape[0]) == (150, 1)
    with agentmem.open(store_path, model=llama) as store:
        session = store.resume("s")
        assert session.active.tokens == [*TOKENS, 1]  # tokens are the truth: they fit
        assert session.report.reason is Reason.NOT_SAVED
        assert torch.allclose(session.forward([]), after, atol=1e-4)
        assert check(store.environment, DiskTier(store.environment)).is_sound


def test_a_write_that_fails_may_be_tried_again_when_there_is_room(llama, store_path):
    done = run_script("full", store_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["StorageFullError", "150", "saved"]
    with agentmem.open(store_path, model=llama) as store:
        session = store.resume("s")
        assert session.report.num_reused == 149
        assert check(store.environment, DiskTier(store.environment), read_data=True).is_sound


# -- damage


def test_a_damaged_block_is_reported_and_computed_again(stored):
    stored.store.close()
    damage(stored.path, stored.plan.blocks[1].digest)

    with agentmem.open(stored.path, model=stored.model) as store:
        found = check(store.environment, DiskTier(store.environment), read_data=True).problems
        session = store.resume("s")
        report, logits = session.report, session.forward([])
        again = session.report
        session.checkpoint("healed")
    with agentmem.open(stored.path, model=stored.model) as store:
        healed = store.resume("s").report
        left = check(store.environment, DiskTier(store.environment), read_data=True).problems

    assert [problem.kind for problem in found] == ["damaged"]
    assert (report.reason, report.first_difference, report.num_reused) == (Reason.DAMAGED, 64, 64)
    assert again.num_computed == 150 - 64
    assert torch.allclose(logits, stored.logits, atol=1e-4)
    assert (healed.reason, healed.num_reused) == (Reason.COMPLETE, 150)
    assert left == ()


def test_a_removed_block_is_reported_as_missing_and_computed_again(stored):
    stored.store.close()
    with Environment.open(stored.path) as environment:

        def remove_all(txn):
            for key, _ in list(txn.scan(Table.BINDEX)):
                txn.delete(Table.BINDEX, key)

        environment.submit(remove_all, level=Level.DURABLE).result()

    with agentmem.open(stored.path, model=stored.model) as store:
        session = store.resume("s")
        report, logits = session.report, session.forward([])

    assert (report.reason, report.num_reused, report.first_difference) == (Reason.MISSING, 0, 0)
    assert torch.allclose(logits, stored.logits, atol=1e-4)


def test_a_damaged_checkpoint_record_is_named_and_the_other_sessions_open(stored):
    other = stored.store.create("t")
    other.append([1, 2, 3])
    stored.store.close()
    with Environment.open(stored.path) as environment, environment.read() as txn:
        key = next(key for key, _ in txn.scan(Table.NODES) if stored.plan.checkpoint_id in key)
    with Environment.open(stored.path) as environment:
        environment.submit(lambda txn: overwrite(txn, Table.NODES, key, b"\0" * 40), level=Level.DURABLE).result()

    with agentmem.open(stored.path, model=stored.model) as store:
        with pytest.raises(CorruptionError) as error:
            store.resume("s")
        others = store.resume("t").active.tokens
        names = [record.name for record in store.sessions()]

    assert says(error, stored.plan.checkpoint_id.hex()[:8])
    assert (others, names) == ([1, 2, 3], ["s", "t"])


# -- the model


def test_a_foreign_model_reads_the_session_and_uses_none_of_its_kv(stored, tiny):
    stored.store.close()
    foreign = tiny("llama", 1)

    with agentmem.open(stored.path, model=foreign) as store:
        session = store.resume("s")
        report, logits = session.report, session.forward([])
        tokens = session.active.tokens

    with torch.no_grad():
        expected = foreign(torch.tensor([TOKENS])).logits[0, -1:]
    assert (report.reason, report.num_reused, report.first_difference) == (Reason.FOREIGN_MODEL, 0, 0)
    assert tokens == TOKENS
    assert torch.allclose(logits, expected, atol=1e-4)


def test_a_model_in_training_mode_is_refused(store_path):
    from agentmem.testing.models import tiny_model

    with pytest.raises(InvalidInputError) as error:
        agentmem.open(store_path, model=tiny_model("llama").train())

    assert says(error, "eval()")


def test_what_is_no_model_is_refused(store_path):
    with pytest.raises(InvalidInputError) as error:
        agentmem.open(store_path, model=torch.nn.Linear(2, 2))

    assert says(error, "Linear", "PreTrainedModel")


def test_a_refused_model_leaves_the_store_open_for_others(stored, tiny):
    stored.store.close()

    with pytest.raises(UnsupportedModelError):
        agentmem.open(stored.path, model=tiny("rwkv"))

    assert stored.is_untouched()


# -- tokens and passes


@pytest.mark.parametrize("tokens", [[512], [-1], [3, 10**12], [2**32], ["a"], [None]])
def test_ids_outside_the_vocabulary_are_refused_before_anything_is_appended(stored, tokens):
    for act in (stored.session.append, stored.session.forward):
        with pytest.raises((InvalidInputError, TypeError, ValueError)):
            act(tokens)

    assert stored.is_untouched()


def test_text_without_a_tokenizer_is_refused(stored):
    with pytest.raises(InvalidInputError) as error:
        stored.session.append("text")

    assert says(error, "tokenizer")
    assert stored.is_untouched()


def test_an_empty_branch_has_no_logits_no_continuation_and_no_checkpoint(stored):
    empty = stored.store.create("empty")

    for act in (empty.forward, lambda: empty.generate(max_new_tokens=1), empty.checkpoint):
        with pytest.raises(InvalidInputError) as error:
            act()
        assert says(error, "no tokens")

    assert stored.is_untouched()


@pytest.mark.parametrize("options", [{}, {"to": "main", "tokens": 1}, {"tokens": -1}, {"tokens": 151}])
def test_a_rewind_that_makes_no_sense_is_refused(stored, options):
    with pytest.raises(InvalidInputError):
        stored.session.rewind(**options)

    assert stored.is_untouched()


def test_a_branch_is_not_rewound_to_a_checkpoint_it_does_not_pass_through(stored):
    stored.session.append([1], branch="other")
    elsewhere = stored.session.checkpoint(branch="other")

    with pytest.raises(InvalidInputError) as error:
        stored.session.rewind(elsewhere)

    stored.session.rewind(stored.plan, branch="other")
    assert says(error, "'main'", "fork")
    assert stored.is_untouched()


PASSES = {
    "two sequences": ({"input_ids": [[1, 2], [3, 4]]}, InvalidInputError, "[1, tokens]"),
    "no sequence": ({"input_ids": []}, InvalidInputError, "[1, tokens]"),
    "no tokens": ({"input_ids": [[]]}, InvalidInputError, "at least one token"),
    "padding": ({"input_ids": [[1]], "attention_mask": [[0] + [1] * 150]}, InvalidInputError, "attention_mask"),
    "a short mask": ({"input_ids": [[1]], "attention_mask": [[1]]}, InvalidInputError, "attention_mask"),
    "shifted positions": ({"input_ids": [[1]], "position_ids": [[149]]}, InvalidInputError, "shifted"),
    "positions of two": ({"input_ids": [[1, 2]], "position_ids": [[150, 152]]}, InvalidInputError, "shifted"),
    "embeddings": ({"inputs_embeds": [[[0.0] * 64]]}, InvalidInputError, "inputs_embeds"),
    "token types": ({"input_ids": [[1]], "token_type_ids": [[1]]}, InvalidInputError, "token_type_ids"),
    "pixels": ({"input_ids": [[1]], "pixel_values": [[1.0]]}, InvalidInputError, "pixel_values"),
}


@pytest.mark.parametrize("kind", PASSES)
def test_a_pass_that_a_branch_cannot_store_is_refused(stored, kind):
    inputs, error_type, word = PASSES[kind]

    with stored.session.cache() as cache, torch.no_grad(), pytest.raises(error_type) as error:
        stored.model(**{name: torch.tensor(value) for name, value in inputs.items()}, cache=cache)

    assert says(error, word)
    assert stored.is_untouched()


def test_a_four_dimensional_mask_that_hides_tokens_is_refused(stored):
    mask = torch.zeros(1, 1, 1, 151)
    mask[..., :3] = -torch.inf

    with stored.session.cache() as cache, torch.no_grad(), pytest.raises(InvalidInputError) as error:
        stored.model(torch.tensor([[1]]), cache=cache, attention_mask=mask)

    assert says(error, "attention_mask")
    assert stored.is_untouched()


def test_a_pass_that_contradicts_pending_tokens_is_refused(stored):
    stored.session.append([9, 8])

    with stored.session.cache() as cache, torch.no_grad(), pytest.raises(InvalidInputError) as error:
        stored.model(torch.tensor([[1]]), cache=cache)

    stored.session.rewind(tokens=2)
    assert says(error, "pending", "9")
    assert stored.is_untouched()


def test_a_pass_that_fails_half_way_leaves_the_branch_as_it_was(stored):
    def fail(_module, _args):
        raise RuntimeError("out of memory")

    hook = stored.model.model.layers[2].register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            stored.session.forward([1, 2, 3])
        with pytest.raises(RuntimeError, match="out of memory"):
            stored.session.generate(max_new_tokens=2)
    finally:
        hook.remove()

    assert stored.session.active.tokens == TOKENS
    assert stored.is_untouched()


def test_a_cache_whose_branch_moved_on_is_refused(stored):
    with stored.session.cache() as cache, torch.no_grad():
        stored.session.forward([1])
        with pytest.raises(StaleCacheError) as error:
            stored.model(torch.tensor([[2]]), cache=cache)
        stored.session.rewind(tokens=1)

    assert says(error, "'main'", "151", "branch.cache()")
    assert stored.is_untouched()


def test_a_cache_whose_branch_moved_on_and_back_with_other_tokens_is_refused(stored):
    with stored.session.cache() as cache, torch.no_grad():
        stored.model(torch.tensor([[1]]), cache=cache)
        stored.session.rewind(tokens=1)
        stored.session.forward([2])
        with pytest.raises(StaleCacheError):
            stored.model(torch.tensor([[3]]), cache=cache)
        stored.session.rewind(tokens=1)

    assert stored.is_untouched()


def test_a_cache_used_after_its_block_is_refused(stored):
    with stored.session.cache() as cache:
        pass

    with torch.no_grad(), pytest.raises(StaleCacheError) as error:
        stored.model(torch.tensor([[1]]), cache=cache)

    assert says(error, "given back", "branch.cache()")
    assert stored.is_untouched()


def test_a_cache_of_another_model_is_refused(stored, tiny):
    for other in (tiny("mqa"), tiny("llama", 1), tiny("llama", 0, dtype=torch.bfloat16)):
        with (
            stored.session.cache() as cache,
            torch.no_grad(),
            pytest.raises((SpecMismatchError, StaleCacheError)) as error,
        ):
            other(torch.tensor([[1]]), cache=cache)
        assert says(error, "the model that the store was opened with")

    assert stored.is_untouched()


def test_a_cache_is_not_copied_reordered_repeated_or_reset(stored):
    with stored.session.cache() as cache:
        for act in (
            lambda: copy.deepcopy(cache),
            lambda: cache.reorder_cache(torch.tensor([0])),
            lambda: cache.batch_repeat_interleave(2),
            lambda: cache.batch_select_indices(torch.tensor([0])),
            cache.reset,
            lambda: cache.crop(3),
            lambda: cache.crop(-151),
        ):
            with pytest.raises(InvalidInputError):
                act()

    assert stored.is_untouched()


def test_two_passes_may_not_share_a_cache_layer_outside_of_a_pass(stored):
    with stored.session.cache() as cache, pytest.raises(StaleCacheError) as error:
        cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)

    assert says(error, "forward pass")
    assert stored.is_untouched()


REFUSED_OPTIONS = {
    "beams": {"num_beams": 2},
    "several sequences": {"num_return_sequences": 2, "do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "contrastive": {"penalty_alpha": 0.5, "top_k": 4},
    "a static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "a dict": {"return_dict_in_generate": True},
    "own ids": {"input_ids": torch.tensor([[1]])},
    "own cache": {"past_key_values": DynamicCache()},
    "beams in a config": {"generation_config": GenerationConfig(num_beams=2)},
    "a bad seed": {"seed": "abc"},
}


@pytest.mark.parametrize("kind", REFUSED_OPTIONS)
def test_generation_that_needs_more_than_one_branch_is_refused(stored, kind):
    options = REFUSED_OPTIONS[kind]

    with pytest.raises(InvalidInputError) as error:
        stored.session.generate(max_new_tokens=2, **options)

    name = "num_beams" if "generation_config" in options else next(iter(options))
    assert says(error, name)
    assert stored.is_untouched()


def test_an_assistant_model_is_refused(stored, tiny):
    with pytest.raises(InvalidInputError) as error:
        stored.session.generate(max_new_tokens=2, assistant_model=tiny("mqa"))

    assert says(error, "assistant_model", "wrong text")
    assert stored.is_untouched()


def test_an_unknown_option_of_generate_is_refused_and_changes_nothing(stored):
    with pytest.raises(ValueError, match="max_tokens"):
        stored.session.generate(max_tokens=2)

    assert stored.is_untouched()


# -- budgets


def test_a_branch_over_the_device_budget_is_refused_and_stays_of_use(llama, store_path):
    token_nbytes = 2 * 2 * 16 * 4 * 4
    config = agentmem.Config(device_budget_nbytes=300 * token_nbytes)
    with agentmem.open(store_path, model=llama, config=config) as store:
        session = store.create("s")
        logits = session.forward(TOKENS)

        with pytest.raises(CapacityError) as error:
            session.forward(TOKENS * 3)

        assert says(error, "budget", "device_budget_nbytes")
        assert session.active.tokens == TOKENS
        assert torch.allclose(session.forward([])[0], logits[-1], atol=1e-4)
        assert store.stats()["device_nbytes"] <= config.device_budget_nbytes


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 1},
        {"codec": "zip"},
        {"num_threads": 0},
        {"prefill_chunk_tokens": 0},
        {"host_budget_nbytes": -1},
        {"device_budget_nbytes": 0},
        {"gc_grace_s": -1.0},
    ],
)
def test_a_choice_that_cannot_work_is_refused_by_name(options):
    with pytest.raises(InvalidInputError) as error:
        agentmem.Config(**options)

    assert says(error, *options)


def test_extras_that_cannot_be_stored_are_refused_before_anything_is_written(stored):
    with pytest.raises(InvalidInputError):
        stored.session.checkpoint("bad", extras={"tensor": object()})
    with pytest.raises(InvalidInputError):
        stored.store.create("t", extras={"a": {1, 2}})

    assert len(stored.session.checkpoints) == 1
    assert stored.is_untouched()


# -- a process of its own


def damage(path, digest):
    """Flip one bit in the middle of one block's stored record."""
    with Environment.open(path) as environment:

        def flip(txn):
            info = BlockInfo.unpack(txn.get(Table.BINDEX, digest), digest)
            key = struct.pack(">QH", info.block_id, 0)
            chunk = bytearray(txn.get_view(Table.BLOCKS, key))
            chunk[info.stored_nbytes // 2] ^= 1
            txn.put_raw(Table.BLOCKS, [(key, chunk)])

        environment.submit(flip, level=Level.DURABLE).result()


def tiny_llama():
    from agentmem.testing.models import tiny_model

    return tiny_model("llama")


def try_to_open(path):
    """Print the error's name, the process it names, and the sessions that can be seen all the same."""
    with agentmem.open(path, model=tiny_llama()) as store:
        try:
            store.resume("s")
        except SessionLeasedError as error:
            holder = next(word for word in str(error).replace(",", " ").split() if word.isdigit())
            print(type(error).__name__, holder, *[record.name for record in store.sessions()])


def open_read_only(folder):
    """Try to make a store where nothing may be written, and to open one there for writing."""
    model, path = tiny_llama(), Path(folder) / "store"
    agentmem.open(path, model=model).close()
    for name in (path, *path.iterdir(), Path(folder)):
        if os.geteuid() == 0:
            os.chown(name, NOBODY, NOBODY)
        name.chmod(0o555 if name.is_dir() else 0o444)
    if os.geteuid() == 0:  # to whom permissions mean nothing
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    for wanted in (path, Path(folder) / "new"):
        try:
            agentmem.open(wanted, model=model)
        except ReadOnlyError as error:
            print(type(error).__name__ if str(wanted) in str(error) else f"{wanted} is not named: {error}")
    if os.geteuid() != NOBODY:
        for name in (Path(folder), path):
            name.chmod(0o755)


def use_after_fork(path):
    """Use every handle in a forked child; go on in the parent."""
    torch.set_num_threads(1)
    store = agentmem.open(path, model=tiny_llama())
    session = store.create("s")
    session.append(TOKENS)
    session.checkpoint()
    child = os.fork()
    if not child:
        for act in (
            lambda: session.append([1]),
            lambda: session.forward([1]),
            lambda: session.fork("new"),
            session.checkpoint,
            lambda: store.create("t"),
            store.sessions,
        ):
            try:
                act()
            except ClosedError as error:
                print(type(error).__name__, flush=True)
        store.close()  # harmless
        os._exit(0)
    os.waitpid(child, 0)
    session.forward([1])
    store.close()


def fill_the_disk(path):
    """Let every write that grows the data file fail, as on a full disk; then let it grow again."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = agentmem.open(path, model=tiny_llama())
    session = store.create("s")
    size = store.environment.nbytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    session.append(TOKENS)
    try:
        session.checkpoint()
    except StorageFullError as error:
        print(type(error).__name__)
    print(session.active.num_tokens)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    session.checkpoint()
    print("saved")
    store.close()


if __name__ == "__main__":
    {"open": try_to_open, "read-only": open_read_only, "fork": use_after_fork, "full": fill_the_disk}[sys.argv[1]](
        sys.argv[2]
    )
