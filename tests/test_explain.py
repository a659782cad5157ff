"""`Branch.explain`: each kind of change and each limit once, and that what is foretold is what the model is fed."""

import json
import random
import shutil
import struct
import time
from array import array

import pytest
import torch

import agentmem
from agentmem._lmdb import Environment, Level, Table
from agentmem.errors import InvalidInputError
from agentmem.explain.lines import Line, Lines
from agentmem.explain.recorded import RecordedKv, RecordedLibrary
from agentmem.explain.search import explain
from agentmem.ids import BlockDigest, BlockHash, CheckpointId, Fingerprint, SessionId
from agentmem.kv.hashing import pack_tokens, unpack_tokens
from agentmem.reasons import Reason
from agentmem.testing.models import tiny_model
from agentmem.tiers.blockrows import BlockInfo
from agentmem.tree.catalog import Catalog
from agentmem.tree.checkpoint import BlockRef, BranchRecord, Checkpoint, SessionRecord
from agentmem.tree.trail import Trail

BLOCK = 16
CONFIG = agentmem.Config(block_size=BLOCK)
TOKENS = [(29 * index * index + 3 * index + 7) % 500 for index in range(150)]
OTHERS = [(31 * index * index + 5 * index + 11) % 500 for index in range(60)]
CLOCK_TEXT = "Current time: 12:00:01. You fix failing tests." + " Read the log and change as little as you can." * 9


@pytest.fixture
def store(store_path, llama):
    with agentmem.open(store_path, model=llama, config=CONFIG) as store:
        yield store


@pytest.fixture
def session(store):
    """Main with 150 tokens, all but the last fed; a checkpoint after 100, where branch "other" goes on."""
    session = store.create("task")
    session.append(TOKENS[:100])
    plan = session.checkpoint("plan")
    session.append(TOKENS[100:])
    session.fork("other", at=plan)
    session.append(OTHERS, branch="other")
    session.checkpoint("tried", branch="other")
    session.checkpoint("done")
    return session


def numbers(found):
    return found.change, found.first_difference, found.num_removed, found.num_inserted, found.num_equal_after


def reuse(found):
    return found.num_equal, found.num_reusable, found.num_reusable_fresh, found.limit


def fed_going_on(session, prompt, found):
    """Return how many tokens the model is fed for a prompt on a fork of what it matches, rewound to the difference."""
    fork = session.fork("probe", branch=found.match.branch)
    fork.rewind(tokens=fork.num_tokens - found.num_equal)
    fork.append(prompt[found.num_equal :])
    fork.forward()
    return fork.report.num_computed


def fed_fresh(store, prompt):
    """Return how many tokens the model is fed for a prompt in a new session."""
    session = store.create("probe")
    session.append(prompt)
    session.forward()
    return session.report.num_computed


def rows_of(environment, table):
    with environment.read() as txn:
        return [(key, row) for key, row in txn.scan_each(table)]


def flip(environment, info):
    """Flip one bit in the middle of a block's stored record."""

    def operation(txn):
        key = struct.pack(">QH", info.block_id, 0)
        chunk = bytearray(txn.get_view(Table.BLOCKS, key))
        chunk[info.stored_nbytes // 2] ^= 1
        txn.put_raw(Table.BLOCKS, [(key, chunk)])

    environment.submit(operation, level=Level.DURABLE).result()


# -- kinds of change


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (TOKENS, (Reason.IDENTICAL, None, 0, 0, 0)),
        ([*TOKENS, 1, 2], (Reason.EXTENDS, None, 0, 0, 0)),
        (TOKENS[:130], (Reason.SHORTER, None, 0, 0, 0)),
        (TOKENS[:100], (Reason.IDENTICAL, None, 0, 0, 0)),
        ([*TOKENS[:100], 1, 2], (Reason.EXTENDS, None, 0, 0, 0)),
        ([*TOKENS[:40], 1, 2, *TOKENS[40:]], (Reason.INSERTED, 40, 0, 2, 110)),
        ([*TOKENS[:40], *TOKENS[45:], 1], (Reason.REMOVED, 40, 5, 0, 105)),
        ([*TOKENS[:40], 1, *TOKENS[41:60]], (Reason.REPLACED, 40, 1, 1, 19)),
        ([*TOKENS[:40], 1, 2, 3], (Reason.REPLACED, 40, 110, 3, 0)),
        ([*TOKENS[:40], TOKENS[41], TOKENS[40], *TOKENS[42:]], (Reason.REORDERED, 40, 2, 2, 108)),
        ([1, 2, 3], (Reason.NOTHING_IN_COMMON, 0, 150, 3, 0)),
    ],
)
def test_each_kind_of_change_is_told_with_its_numbers(session, prompt, expected):
    found = session.explain(prompt)

    assert numbers(found) == expected
    assert found.num_tokens == len(prompt)
    assert (found.match.session, found.match.branch, found.match.is_own) == ("task", "main", True)


def test_the_branch_that_goes_furthest_is_the_match(session):
    found = session.explain([*TOKENS[:100], *OTHERS[:30], 1, *OTHERS[31:]])

    assert numbers(found) == (Reason.REPLACED, 130, 1, 1, 29)
    assert (found.match.branch, found.match.num_tokens) == ("other", 160)
    assert found.match.checkpoint_id == next(c for c in session.checkpoints if c.message == "plan").checkpoint_id


def test_the_branch_that_is_asked_goes_before_others_that_are_as_good(session):
    prompt = [*TOKENS[:40], 1, *TOKENS[41:90]]

    assert [session.explain(prompt, branch=name).match.branch for name in ("main", "other")] == ["main", "other"]


def test_tokens_are_shown_before_the_difference_and_on_either_side(session):
    replaced = session.explain([*TOKENS[:40], 1, 2, *TOKENS[45:]])
    removed = session.explain([*TOKENS[:40], *TOKENS[45:]])

    assert replaced.context == removed.context == tuple(TOKENS[32:40])
    assert (replaced.old_tokens, replaced.new_tokens) == (tuple(TOKENS[40:45]), (1, 2))
    assert (removed.old_tokens, removed.new_tokens) == (tuple(TOKENS[40:56]), tuple(TOKENS[45:61]))
    assert (replaced.context_text, replaced.old_text, replaced.new_text) == ("", "", "")


def test_a_dropped_branch_is_still_a_match(session):
    session.drop("other")

    found = session.explain([*TOKENS[:100], *OTHERS[:30]])

    assert (found.match.branch, found.match.num_tokens, found.num_equal) == (None, 160, 130)
    assert numbers(found) == (Reason.SHORTER, None, 0, 0, 0)


def test_an_empty_session_has_nothing_in_common(store):
    found = store.create("empty").explain([1, 2, 3])

    assert numbers(found) == (Reason.NOTHING_IN_COMMON, 0, 0, 0, 0)
    assert (found.num_to_compute, found.num_to_compute_fresh, found.new_tokens) == (3, 3, (1, 2, 3))


def test_asking_changes_nothing(session):
    branch = session.branch("main")
    before = (branch.tokens, branch.pending, branch.report, len(session.checkpoints), session.log())

    session.explain([*TOKENS[:40], 1, *TOKENS])

    assert (branch.tokens, branch.pending, branch.report, len(session.checkpoints), session.log()) == before


@pytest.mark.parametrize("content", [[], [512], [1, {"role": "user"}], "text", [{"role": "user", "content": "text"}]])
def test_what_is_no_prompt_of_the_model_is_refused(session, content):
    with pytest.raises(InvalidInputError):
        session.explain(content)


# -- what is reused


def test_a_fork_reuses_each_token_and_an_empty_branch_whole_blocks(session):
    found = session.explain([*TOKENS[:107], 1, *TOKENS[108:]])

    assert reuse(found) == (107, 107, 96, Reason.COMPLETE)
    assert (found.num_to_compute, found.num_to_compute_fresh, found.num_recomputed) == (43, 54, 42)


def test_what_is_pending_is_not_reusable(session):
    session.append(OTHERS)

    found = session.explain([*TOKENS, *OTHERS[:50]])

    assert reuse(found) == (200, 149, 144, Reason.PENDING)
    assert found.num_recomputed == 51


def test_sessions_share_whole_blocks(store, session):
    found = store.create("new").explain([*TOKENS[:107], 1, *TOKENS[108:]])

    assert (found.match.session, found.match.branch, found.match.is_own) == ("task", "main", False)
    assert reuse(found) == (107, 96, 96, Reason.WHOLE_BLOCKS)
    assert numbers(found) == (Reason.REPLACED, 107, 1, 1, 42)


def test_another_session_with_less_than_a_block_in_common_is_named_too(store, session):
    found = store.create("new").explain([*TOKENS[:7], 1, *TOKENS[7:]])

    assert (found.match.session, found.num_equal, found.num_reusable) == ("task", 7, 0)
    assert numbers(found) == (Reason.INSERTED, 7, 0, 1, 143)


def test_a_tenant_learns_nothing_of_anothers_tokens(store_path, store, session, llama):
    store.close()
    with agentmem.open(store_path, model=llama, config=agentmem.Config(block_size=BLOCK, salt=b"tenant")) as other:
        found = other.create("new").explain(TOKENS)

    assert (found.match.session, found.num_equal, found.num_reusable) == ("new", 0, 0)


def test_another_block_size_is_told(store_path, store, session, llama):
    store.close()
    with agentmem.open(store_path, model=llama, config=agentmem.Config(block_size=32)) as other:
        found = other.resume("task").explain(TOKENS)

    assert reuse(found) == (150, 0, 0, Reason.FOREIGN_BLOCK_SIZE)
    assert "Config.block_size" in found.advice


def test_another_model_is_told(store_path, store, session):
    store.close()
    with agentmem.open(store_path, model=tiny_model("llama", seed=1), config=CONFIG) as other:
        found = other.resume("task").explain(TOKENS)

    assert reuse(found) == (150, 0, 0, Reason.FOREIGN_MODEL)
    assert found.num_recomputed == 150


def test_lost_blocks_are_told(store_path, store, session, llama):
    store.close()
    with Environment.open(store_path) as environment:
        for key, row in rows_of(environment, Table.BINDEX):
            if BlockInfo.unpack(row, key).num_tokens == BLOCK:
                environment.submit(lambda txn, key=key: txn.delete(Table.BINDEX, key), level=Level.DURABLE).result()
    with agentmem.open(store_path, model=llama, config=CONFIG) as other:
        found = other.resume("task", branch="other").explain(TOKENS, branch="main")

    assert reuse(found) == (150, 0, 0, Reason.MISSING)


def test_damaged_blocks_are_told_once_they_were_read(store_path, store, session, llama):
    store.close()
    with Environment.open(store_path) as environment:
        for key, row in rows_of(environment, Table.BINDEX):
            flip(environment, BlockInfo.unpack(row, key))
    with agentmem.open(store_path, model=llama, config=CONFIG) as other:
        found = other.resume("task", branch="main").explain(TOKENS)

    assert reuse(found) == (150, 0, 0, Reason.DAMAGED)


def test_kv_that_never_reached_the_disk_is_told(store_path, tmp_path, llama):
    config = agentmem.Config(block_size=BLOCK, save_in_background=False)
    with agentmem.open(store_path, model=llama, config=config) as store:
        session = store.create("task")
        session.forward(TOKENS)
        session.flush()
        store.environment.flush()
        shutil.copytree(store_path, tmp_path / "copy", ignore=shutil.ignore_patterns("*lock*"))
    with agentmem.open(tmp_path / "copy", model=llama, config=config) as store:
        found = store.resume("task").explain(TOKENS)

    assert reuse(found) == (150, 0, 0, Reason.NOT_SAVED)


def test_a_model_with_layer_states_goes_on_from_the_nearest_one(store_path):
    with agentmem.open(store_path, model=tiny_model("lfm2"), config=CONFIG) as store:
        session = store.create("task")
        session.forward(TOKENS[:100])
        session.checkpoint("plan")
        session.forward(TOKENS[100:])
        prompt = [*TOKENS[:130], 1, *TOKENS[131:]]
        found = session.explain(prompt)

        assert reuse(found) == (130, 100, 100, Reason.NO_STATE)
        assert found.num_recomputed == 30 + 19
        assert fed_going_on(session, prompt, found) == found.num_to_compute == 50


def test_a_longer_prompt_in_another_rotary_regime_reuses_nothing(store_path):
    model = tiny_model("phi3")
    border = model.config.original_max_position_embeddings
    tokens = [token % 500 for token in range(border + 20)]
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("task")
        session.append(tokens[: border - 10])
        session.checkpoint()
        found = session.explain(tokens)

        assert reuse(found) == (border - 10, 0, 0, Reason.REGIME)
        assert fed_going_on(session, tokens, found) == found.num_to_compute == len(tokens)


def test_kv_that_an_edit_moved_is_never_exact(store, session):
    edited = session.edit("edited", 40, 60)
    prompt = edited.tokens

    found = edited.explain([*prompt, 1])

    assert reuse(found) == (130, 40, 32, Reason.APPROXIMATE)
    assert found.match.branch == "edited"
    assert fed_fresh(store, [*prompt, 1]) == found.num_to_compute_fresh == 131 - 32


def test_an_image_is_reused_as_a_whole(store_path):
    image, start, stop = 500, 21, 29
    tokens = [*TOKENS[:20], 502, *[image] * (stop - start), 503, *TOKENS[20:60]]
    types = torch.tensor([[int(token == image) for token in tokens]])
    with agentmem.open(store_path, model=tiny_model("qwen2_5_vl"), config=CONFIG) as store:
        session = store.create("task")
        pixels = {"pixel_values": torch.randn(32, 96), "image_grid_thw": torch.tensor([[1, 4, 8]])}
        session.append(tokens, mm_token_type_ids=types, **pixels)
        session.checkpoint()
        behind = [*tokens[:40], 1, *tokens[41:]]
        inside, found = session.explain([*tokens[:25], 1, 2, 3]), session.explain(behind)

        assert reuse(inside) == (25, start, BLOCK, Reason.WITHIN_MEDIA)
        assert reuse(found) == (40, 40, 2 * BLOCK, Reason.COMPLETE)
        assert fed_going_on(session, behind, found) == found.num_to_compute


def test_every_kind_and_limit_has_its_advice(session):
    advice = {
        session.explain(prompt).advice
        for prompt in (TOKENS, [*TOKENS, 1], TOKENS[:99], [*TOKENS[:40], 1, *TOKENS], [*TOKENS[:40], 1], [1])
    }

    assert len(advice) == 6
    assert "it is stored; go on with branch 'main'" in advice
    assert not any("{" in sentence for sentence in advice)


# -- against reality


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", ["llama", "gemma3", "mla", "mamba2", "lfm2", "qwen3_next"])
def test_what_is_foretold_is_what_the_model_is_fed(tmp_path, tiny, family, seed):
    model, foretold, fed = tiny(family), [], []

    for index, ask in enumerate((going_on, anew)):
        history = History(tmp_path / str(index), model, random.Random(seed))
        history.grow()
        prompt = history.prompt()
        expected, found = ask(history, prompt)
        foretold.append(expected)
        fed.append(found)
        history.store.close()

    assert fed == foretold


@pytest.mark.parametrize("seed", range(6))
def test_records_tell_what_the_open_store_tells(tmp_path, llama, seed):
    history = History(tmp_path / "store", llama, random.Random(100 + seed))
    history.grow()
    prompt = history.prompt()
    history.store.close()
    history.reopen()
    live = history.session.explain(prompt)
    history.store.close()

    with agentmem.open(history.path) as view, view.environment.read() as txn:
        recorded = explain(prompt, RecordedLibrary(txn, view.catalog, "task", history.session.active.name))

    assert reuse(recorded) == reuse(live)
    assert numbers(recorded) == numbers(live)


def going_on(history, prompt):
    found = history.session.explain(prompt)
    if found.match.is_own and found.match.branch is not None:
        return found.num_to_compute, fed_going_on(history.session, prompt, found)
    return anew(history, prompt)


def anew(history, prompt):
    return history.session.explain(prompt).num_to_compute_fresh, fed_fresh(history.store, prompt)


class History:
    """A random session: branches that grow, fork, rewind and are reopened, and other sessions beside it."""

    def __init__(self, path, model, source):
        self.path = path
        self.model = model
        self.random = source
        self.store = None
        self.reopen()

    def reopen(self):
        is_new = self.store is None
        if not is_new:
            self.store.close()
        self.store = agentmem.open(self.path, model=self.model, config=CONFIG)
        self.session = self.store.create("task") if is_new else self.store.resume("task")

    def tokens(self, at_most=40):
        return [self.random.randrange(200) for _ in range(self.random.randrange(1, at_most))]

    def grow(self):
        for step in range(self.random.randrange(3, 14)):
            branch = self.session.branch(self.random.choice(self.session.branches))
            verbs = [self.append, self.append, self.forward, self.generate, self.checkpoint, self.checkpoint]
            verbs += [self.fork, self.fork_at, self.rewind, self.drop, self.share, lambda *_: self.reopen()]
            self.random.choice(verbs)(branch, f"branch-{step}")

    def append(self, branch, _name):
        branch.append(self.tokens())

    def forward(self, branch, _name):
        branch.forward(self.tokens())

    def generate(self, branch, _name):
        if branch.num_tokens:
            branch.generate(max_new_tokens=self.random.randrange(1, 30), do_sample=False)

    def checkpoint(self, branch, _name):
        if branch.num_tokens:
            branch.checkpoint()

    def fork(self, branch, name):
        self.session.fork(name, branch=branch.name)

    def fork_at(self, _branch, name):
        if self.session.checkpoints:
            self.session.fork(name, at=self.random.choice(self.session.checkpoints))

    def rewind(self, branch, _name):
        branch.rewind(tokens=self.random.randrange(branch.num_tokens + 1))

    def drop(self, branch, _name):
        if branch.name != self.session.active.name:
            self.session.drop(branch.name)

    def share(self, branch, name):
        other = self.store.create(name)
        other.append([*branch.tokens[: self.random.randrange(1, 200)], *self.tokens(4)])
        other.checkpoint()

    def prompt(self):
        stored = self.session.branch(self.random.choice(self.session.branches)).tokens or self.tokens()
        prompt = stored[: self.random.randrange(1, len(stored) + 1)]
        place = self.random.randrange(len(prompt))
        match self.random.choice(["cut", "insert", "remove", "replace", "extend"]):
            case "insert":
                prompt[place:place] = self.tokens(5)
            case "remove":
                prompt = [*prompt[:place], *prompt[place + 3 :]] or [1]
            case "replace":
                prompt[place] = (prompt[place] + 1) % 200
            case "extend":
                prompt = [*stored, *self.tokens()]
        return prompt


# -- text


@pytest.fixture
def chat(store_path, tiny_chat):
    model, tokenizer = tiny_chat
    with agentmem.open(store_path, model=model, tokenizer=tokenizer, config=CONFIG) as store:
        yield store.create("chat")


def test_a_clock_in_the_system_prompt_is_shown_as_text(chat):
    chat.append(CLOCK_TEXT)
    chat.checkpoint()

    found = chat.explain(CLOCK_TEXT.replace("00:01", "00:02"))

    assert numbers(found)[:4] == (Reason.REPLACED, 11, 1, 1)
    assert (found.context_text, found.old_text, found.new_text) == (" 12:00:0", "1", "2")
    assert found.num_recomputed == found.num_equal_after == found.num_tokens - 12


def test_ids_that_text_gives_another_way_are_retokenised(chat):
    """`.` and a blank line is one id or two (llama.cpp 11970)."""
    start = [504, 2365, 282]
    sampled, rendered = [30, 1116, 34, 30], [30, 198, 198, 34, 30]
    chat.append([*start, *sampled])
    chat.checkpoint()

    found = chat.explain([*start, *rendered])

    assert numbers(found) == (Reason.RETOKENISED, 4, 1, 2, 2)
    assert "sampled" in found.advice


def test_tool_json_with_its_keys_in_another_order_is_reordered(chat):
    call = {"path": "a.py", "edits": [{"new": "x = 1", "old": "x = 2"}]}
    chat.append("Call: " + json.dumps(call))

    found = chat.explain("Call: " + json.dumps(call, sort_keys=True))

    assert (found.change, found.num_equal, found.first_difference) == (Reason.REORDERED, 3, 3)


def test_messages_are_rendered_through_the_template(chat):
    messages = [{"role": "system", "content": "You fix tests."}, {"role": "user", "content": "Hello"}]
    prompt = chat.explain(messages)
    chat.append(chat.adapter.chat_template().render(messages, tools=None, is_prompt=True, options={}))

    found = chat.explain(messages)

    assert prompt.num_tokens == found.num_tokens
    assert found.change is Reason.IDENTICAL


# -- records


FINGERPRINT, SESSION_ID = Fingerprint(bytes(32)), SessionId(bytes(8))


def checkpoint(number, parent, tokens, *, own=None, first_block=0, num_blocks=0):
    return Checkpoint(
        checkpoint_id=name_of(number),
        session_id=SESSION_ID,
        parent_id=None if parent is None else name_of(parent),
        num_tokens=len(tokens),
        tokens=pack_tokens(tokens if own is None else own),
        first_block=first_block,
        blocks=tuple(
            BlockRef(BlockHash(bytes([number, index] * 16)), BlockDigest(bytes([number, index] * 16)))
            for index in range(num_blocks)
        ),
        num_pending=len(tokens) % BLOCK,
        fingerprint=FINGERPRINT,
        created_s=float(number),
    )


def name_of(number):
    return CheckpointId(number.to_bytes(16, "big"))


def many_checkpoints(trunk):
    """Yield a trunk of 500 checkpoints and 500 more behind its end, each of other tokens."""
    size = len(trunk) // 500
    for number in range(1, 501):
        tokens = trunk[: number * size]
        yield checkpoint(number, number - 1 or None, tokens, own=tokens[-size:])
    for number in range(501, 1001):
        own = own_tokens(number)
        yield checkpoint(number, 500, [*trunk, *own], own=own)


def own_tokens(number):
    return [(number * number + index) % 5_000 for index in range(10_000)]


def write(txn, catalog, checkpoints):
    record = SessionRecord(
        session_id=SESSION_ID,
        name="many",
        active_branch="main",
        fingerprint=FINGERPRINT,
        block_size=BLOCK,
        created_s=0.0,
        updated_s=0.0,
    )
    catalog.put_session(txn, record)
    for each in checkpoints:
        catalog.put_checkpoint(txn, each)
    tip = BranchRecord(name="main", tip=name_of(1000), created_s=0.0, updated_s=0.0)
    tokens = Trail(array("I", unpack_tokens(b"".join(each.tokens for each in [*checkpoints[:500], checkpoints[-1]]))))
    catalog.put_branch(txn, SESSION_ID, tip, tokens, len(tokens))


def test_a_long_prompt_against_many_checkpoints_takes_less_than_a_second_of_one_core(store_path):
    trunk = [token % 5_000 for token in range(90_000)]
    checkpoints = list(many_checkpoints(trunk))
    prompt = [*trunk, *own_tokens(700)[:40], 5_001, *own_tokens(700)[41:]]
    with Environment.open(store_path, create=True) as environment:
        catalog = Catalog()
        environment.submit(lambda txn: write(txn, catalog, checkpoints), level=Level.DURABLE).result()
        started_s = time.process_time()
        with environment.read() as txn:
            found = explain(prompt, RecordedLibrary(txn, catalog, "many", None))
        elapsed_s = time.process_time() - started_s

    assert (found.num_tokens, found.num_equal, found.change) == (100_000, 90_040, Reason.REPLACED)
    assert elapsed_s < 1.0


def test_a_line_whose_beginning_is_damaged_is_left_out():
    whole, orphan = checkpoint(1, None, [1, 2]), checkpoint(3, 2, [1, 2, 3])
    lines = Lines("task", BLOCK, [whole, orphan], [Line(branch="main", tip=orphan.checkpoint_id)])

    assert [line.tip for line in lines.lines] == [whole.checkpoint_id]
    assert lines.reached(pack_tokens([1, 2, 3])) == [2]


def test_a_checkpoint_takes_the_place_of_its_parents_last_blocks():
    parent = checkpoint(1, None, list(range(40)), num_blocks=2)
    child = checkpoint(2, 1, list(range(40)), first_block=1, num_blocks=1, own=[])
    lines = Lines("task", BLOCK, [parent, child], [])
    kept = RecordedKv(lines, FINGERPRINT, BLOCK, has_states=False).kept(lines.lines[0], 40)

    assert (kept.num_kv, len(kept.blocks)) == (32, 2)
    assert kept.blocks.slice()[1].block_hash == child.blocks[0].block_hash
