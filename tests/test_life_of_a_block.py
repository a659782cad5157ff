"""One block's life, step by step, with real parts: from a forward pass down to the disk, and back up into a pass.

The order is that of docs/how-it-works.md ("the straight line").
"""

import pytest
import torch

import agentmem
from agentmem._lmdb import Environment, Level, Table
from agentmem.adapters.transformers import TransformersAdapter
from agentmem.config import Config
from agentmem.feed import BranchFeed
from agentmem.kv import record as record_format
from agentmem.kv.hashing import chain_hash, content_digest, root_hash
from agentmem.kv.record import pack, read_meta, section_sums, unpack
from agentmem.reasons import Reason
from agentmem.runtime import make_runtime
from agentmem.state import BranchState
from agentmem.tiers.chunks import CHUNK_NBYTES
from agentmem.tiers.device import Workspace, empty_sections
from agentmem.tiers.disk import DiskTier
from agentmem.tiers.runs import Cursor
from agentmem.tree.checkpoint import BlockRef

TOKENS = [(5 * index + 2) % 512 for index in range(64)]


@pytest.fixture
def environment(store_path):
    """An open LMDB environment."""
    with Environment.open(store_path, create=True) as opened:
        yield opened


@pytest.fixture
def runtime(llama, environment):
    """The parts of an open store; the mover is off, so that each step is taken by the test."""
    config = Config(save_in_background=False)
    runtime = make_runtime(environment, TransformersAdapter(llama, None, config), config)
    yield runtime
    runtime.blocks.close()
    runtime.adapter.close()


def new_state(runtime):
    return BranchState(runtime, Workspace(runtime.device), "main")


def kv_of(llama, tokens):
    """Return the KV that a stock cache holds after `tokens`, as sections `[L, H, T, D]`."""
    from transformers import DynamicCache

    stock = DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(torch.tensor([tokens]), cache=stock)
    return [torch.cat([getattr(layer, name) for layer in stock.layers]) for name in ("keys", "values")]


def gathered(state, stop):
    sections = empty_sections(state.spec, stop)
    state.workspace.gather(state.cursor, 0, stop, sections)
    return sections


# -- down


def test_1_a_forward_pass_writes_its_kv_straight_into_the_workspace(llama, runtime):
    state = new_state(runtime)
    cache = runtime.adapter.cache(BranchFeed(state))

    with torch.no_grad():
        llama(torch.tensor([TOKENS[:10]]), cache=cache)

    slots = state.workspace.slots(0, 10)
    assert all(torch.equal(slot, kv) for slot, kv in zip(slots, kv_of(llama, TOKENS[:10]), strict=True))
    assert cache.layers[0].keys.data_ptr() == state.workspace.slots(0, 10)[0].data_ptr()


def test_2_the_branch_advances_when_all_layers_have_written_and_the_tokens_are_its_tail(runtime):
    state = new_state(runtime)

    state.forward(TOKENS[:63])

    assert (state.num_computed, len(state.blocks), state.cursor.length) == (63, 0, 63)
    assert state.tokens.slice() == TOKENS[:63]


def test_3_the_64th_token_seals_a_block_that_is_named_for_its_tokens_and_copies_nothing(runtime):
    state = new_state(runtime)
    state.forward(TOKENS[:63])
    nbytes = runtime.device.nbytes

    state.forward(TOKENS[63:])

    block = state.blocks[0]
    assert block.block_hash == chain_hash(root_hash(runtime.identity.fingerprint, b""), TOKENS)
    assert (block.start, block.stop, block.digest) == (0, 64, None)
    assert runtime.device.nbytes == nbytes
    assert runtime.blocks.find(block.block_hash, 0, 64) is block


def test_4_a_block_that_is_known_is_shared_and_not_computed(runtime):
    first, second = new_state(runtime), new_state(runtime)
    first.forward(TOKENS)
    runtime.blocks.save(first.saved_blocks())

    second.tokens.extend([*TOKENS, 1])
    second.forward([])

    assert second.num_fed == 1
    assert second.blocks[0] is first.blocks[0]
    assert all(torch.equal(a, b) for a, b in zip(gathered(first, 64), gathered(second, 64), strict=True))


def test_5_saving_packs_the_blocks_bytes_into_a_record_whose_name_covers_them(llama, runtime):
    state = new_state(runtime)
    state.forward(TOKENS)
    sections = gathered(state, 64)

    record = pack(sections, block_hash=state.blocks[0].block_hash, fingerprint=runtime.identity.fingerprint, start=0)

    meta = read_meta(record.data)
    assert all(torch.equal(section, kv) for section, kv in zip(sections, kv_of(llama, TOKENS), strict=True))
    assert record.digest == content_digest(state.blocks[0].block_hash, section_sums(sections))
    assert (meta.digest, meta.num_tokens, meta.dtype) == (record.digest, 64, "float32")
    assert len(record.data) < record.raw_nbytes


def test_6_the_disk_tier_writes_the_record_as_chunks_in_one_transaction(environment, runtime):
    state = new_state(runtime)
    state.forward(TOKENS)

    runtime.blocks.save(state.saved_blocks())
    environment.flush()

    block = state.blocks[0]
    with environment.read() as txn:
        num_chunks = txn.count(Table.BLOCKS)
        assert txn.get(Table.CHAIN, block.block_hash) == block.digest
    assert runtime.blocks.disk.contains(block.digest)
    assert num_chunks == -(-len(runtime.blocks.disk.load_record(block.digest)) // CHUNK_NBYTES)
    assert block.source is None  # the device may forget it now


def test_7_the_catalog_names_the_block_in_a_durable_checkpoint_that_holds_a_reference(llama, store_path):
    with agentmem.open(store_path, model=llama) as store:
        session = store.create("s")
        session.append(TOKENS)
        session.forward([])

        checkpoint = session.checkpoint("plan")

        block = session.active._entry.state.blocks[0]
        with store.environment.read() as txn:
            info = next(info for digest, info in DiskTier(store.environment).iter_index(txn) if digest == block.digest)
            stored = store.catalog.checkpoints(txn, checkpoint.session_id, [])
    assert checkpoint.blocks == (BlockRef(block.block_hash, block.digest),)
    assert (checkpoint.tail, checkpoint.num_pending) == (None, 0)
    assert stored == [checkpoint]
    assert info.refs == 1


# -- up


@pytest.fixture
def stored(llama, store_path):
    """A store that was closed, with one checkpoint of 64 tokens; gives its checkpoint."""
    with agentmem.open(store_path, model=llama) as store:
        session = store.create("s")
        session.append(TOKENS)
        session.forward([])
        return session.checkpoint("plan")


def test_8_a_new_process_reads_names_and_tokens_from_the_catalog_alone(store_path, stored):
    with agentmem.open(store_path) as view:
        found = view.view("s")

    assert found.checkpoints == [stored]
    assert [branch.tip for branch in found.branches] == [stored.checkpoint_id]
    assert found.record.fingerprint == stored.fingerprint


def test_9_the_record_is_read_from_lmdb_verified_and_decoded_into_the_slots_it_is_meant_for(llama, store_path, stored):
    with Environment.open(store_path) as environment:
        wide = [torch.zeros(4, 2, 100, 16), torch.zeros(4, 2, 100, 16)]
        slots = [section[:, :, 20:84] for section in wide]

        meta = DiskTier(environment).load(stored.blocks[0].digest, slots)

    assert meta.block_hash == stored.blocks[0].block_hash
    assert all(torch.equal(slot, kv) for slot, kv in zip(slots, kv_of(llama, TOKENS), strict=True))
    assert all(not section[:, :, :20].any() and not section[:, :, 84:].any() for section in wide)


def test_10_the_block_store_brings_what_is_missing_above_and_says_from_where(runtime):
    state = new_state(runtime)
    state.forward(TOKENS)
    before = gathered(state, 64)
    runtime.blocks.save(state.saved_blocks())
    state.cool()

    loaded = state.restore()

    assert (loaded.from_tier, loaded.reason) == ({"disk": 64}, Reason.COMPLETE)
    assert loaded.nbytes == sum(section.nbytes for section in before)
    assert all(torch.equal(a, b) for a, b in zip(before, gathered(state, 64), strict=True))


def test_11_a_copy_in_the_host_tier_is_taken_before_the_one_on_disk(runtime):
    state = new_state(runtime)
    state.forward(TOKENS)
    runtime.blocks.save(state.saved_blocks())
    runtime.blocks.demote(state.saved_blocks(), state.workspace, state.cursor)
    state.cool()

    loaded = state.restore()

    assert loaded.from_tier == {"host": 64}


def test_12_the_model_goes_on_from_the_restored_block_as_if_it_had_never_left(llama, store_path, stored):
    with torch.no_grad():
        from transformers import DynamicCache

        stock = DynamicCache(config=llama.config)
        llama(torch.tensor([TOKENS]), cache=stock)
        expected = llama(torch.tensor([[9]]), cache=stock).logits[0]

    with agentmem.open(store_path, model=llama) as store:
        session = store.resume("s")
        logits = session.forward([9])
        num_fed = store.stats()["tokens_fed"]

    assert torch.equal(logits, expected)
    assert num_fed == 1


# -- the order of writing


def test_a_checkpoint_saves_a_block_again_that_was_removed_before_it_was_named(llama, store_path):
    with agentmem.open(store_path, model=llama) as store:
        session = store.create("s")
        session.forward(TOKENS)
        store.flush()
        disk = store._runtime.blocks.disk
        digest = session.active._entry.state.blocks[0].digest
        disk.remove(digest)

        checkpoint = session.checkpoint("names a block that was gone")

        assert checkpoint.blocks[0].digest == digest
        assert disk.contains(digest)
        assert store.stats()["blocks_saved_again"] == 1
        assert store.stats()["tokens_fed"] == len(TOKENS)


def test_a_block_that_nobody_names_may_exist_and_gc_takes_it(llama, store_path):
    from agentmem.gc import collect

    with agentmem.open(store_path, model=llama) as store:
        session = store.create("s")
        session.forward(TOKENS)
        store.flush()  # sealed and stored; no checkpoint names it
        disk = store._runtime.blocks.disk
        session.rewind(tokens=64)

        report = collect(store.environment, store.catalog, disk, grace_s=0.0, now_s=2e9)

        assert report.num_blocks == 1
        assert disk.stats().num_blocks == 0


def test_a_truncated_record_never_reaches_the_model(runtime, environment):
    state = new_state(runtime)
    state.forward(TOKENS)
    runtime.blocks.save(state.saved_blocks())
    environment.flush()
    with environment.read() as txn:
        key = txn.last_key(Table.BLOCKS)
    environment.submit(lambda txn: txn.delete(Table.BLOCKS, key), level=Level.DURABLE).result()
    state.cool()

    loaded = state.restore()

    assert (loaded.blocks, loaded.reason, state.num_computed) == ([], Reason.DAMAGED, 0)
    assert state.num_pending == 64


def test_what_is_not_on_the_device_is_not_copied_into_the_host_tier(runtime):
    state = new_state(runtime)
    state.forward([*TOKENS, *TOKENS])
    before = gathered(state, 128)
    runtime.blocks.save(state.saved_blocks())
    state.cursor = state.cursor.fork(100)  # the second block is only in part on the device

    runtime.blocks.demote(state.saved_blocks(), state.workspace, state.cursor)
    state.cool()
    loaded = state.restore()

    assert loaded.from_tier == {"host": 64, "disk": 64}
    assert all(torch.equal(a, b) for a, b in zip(before, gathered(state, 128), strict=True))


def test_a_branch_that_is_evicted_twice_comes_back_as_it_was(llama, store_path):
    with agentmem.open(store_path, model=llama) as store:
        session = store.create("s")
        expected = session.forward([*TOKENS, *TOKENS])[-1]
        session.checkpoint()
        session.fork("b")
        for _ in range(2):
            session.evict("main")
            session.evict("b")

        logits = session.forward([])

        assert torch.allclose(logits[0], expected, atol=1e-4)


def test_a_record_unpacks_into_nothing_but_its_own_geometry(runtime):
    state = new_state(runtime)
    state.forward(TOKENS)
    record = pack(
        gathered(state, 64),
        block_hash=state.blocks[0].block_hash,
        fingerprint=runtime.identity.fingerprint,
        start=0,
    )

    with pytest.raises(agentmem.SpecMismatchError):
        unpack(record.data, [torch.empty(4, 2, 63, 16), torch.empty(4, 2, 63, 16)])
    assert record_format.read_meta(record.data).num_tokens == 64


def test_a_cursor_that_is_gone_lets_its_kv_go(runtime):
    state = new_state(runtime)
    state.forward(TOKENS)
    workspace = state.workspace
    del state

    workspace.begin(Cursor(None, 0), 1)

    assert workspace.num_attached == 0
