"""What a session saved and had not named yet was removed by others: its checkpoint saves it again."""

import pytest
import torch

import agentmem
from agentmem.check import check
from agentmem.gc import collect
from agentmem.tiers.disk import DiskTier

CONFIG = agentmem.Config(block_size=16)
TOKENS = [(29 * index * index + 3 * index + 7) % 490 + 1 for index in range(40)]
FAR_AHEAD_S = 4e9

pytestmark = pytest.mark.usefixtures("one_thread")


def remove_what_nobody_names(store):
    """Remove every block without a name, as gc of a process that knows of no session here."""
    disk = DiskTier(store.environment)
    return store.environment.submit(lambda txn: disk.remove_unreferenced(txn, FAR_AHEAD_S, 1 << 30)).result(30)[0]


def image(seed):
    """The tokens and inputs of an image for the tiny Qwen 2.5 VL."""
    pixels = torch.randn(32, 3 * 2 * 4**2, generator=torch.Generator().manual_seed(seed))
    tokens = [502, *[500] * 8, 503]
    inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 8]])}
    return tokens, {**inputs, "mm_token_type_ids": torch.tensor([[int(token == 500) for token in tokens]])}


@pytest.mark.parametrize("family", ["llama", "mamba", "qwen3_next"])
def test_a_checkpoint_saves_again_what_was_removed_before_it_was_named(tiny, store_path, family):
    with agentmem.open(store_path, model=tiny(family), config=CONFIG) as store:
        session = store.create("s")
        expected = session.forward(TOKENS)[-1]
        session.active._entry.state.save()
        store.flush()
        num_removed = remove_what_nobody_names(store)

        session.checkpoint("whole")

        assert num_removed > 0
        assert check(store.environment, DiskTier(store.environment), read_data=True).problems == ()
        session.close()
        again = store.resume("s")
        assert again.report.num_reused == len(TOKENS)
        assert torch.allclose(again.forward([])[-1], expected, atol=1e-4)


def test_a_layer_state_that_is_in_no_tier_any_more_is_computed_again(tiny, store_path):
    config = agentmem.Config(block_size=16, host_budget_nbytes=0)
    with agentmem.open(store_path, model=tiny("mamba"), config=config) as store:
        session = store.create("s")
        expected = session.forward(TOKENS)[-1]
        session.active._entry.state.save()
        store.flush()
        session.evict("main")
        store.flush()
        remove_what_nobody_names(store)

        session.checkpoint("whole")

        assert check(store.environment, DiskTier(store.environment), read_data=True).problems == ()
        assert session.active.tokens == TOKENS
        assert torch.allclose(session.forward([])[-1], expected, atol=1e-4)


def test_an_image_that_was_removed_before_it_was_named_is_saved_again(tiny, store_path):
    with agentmem.open(store_path, model=tiny("qwen2_5_vl"), config=CONFIG) as store:
        session = store.create("s")
        tokens, inputs = image(1)
        session.append([*TOKENS, *tokens], **{**inputs, "mm_token_type_ids": with_text(inputs, len(TOKENS))})
        store.flush()
        assert remove_what_nobody_names(store) == 1

        session.checkpoint("whole")

        assert check(store.environment, DiskTier(store.environment), read_data=True).problems == ()


def test_gc_leaves_the_images_that_a_branch_needs_after_its_tip(tiny, store_path):
    with agentmem.open(store_path, model=tiny("qwen2_5_vl"), config=CONFIG) as store:
        session = store.create("s")
        tokens, inputs = image(2)
        session.append([*TOKENS, *tokens], **{**inputs, "mm_token_type_ids": with_text(inputs, len(TOKENS))})
        store.flush()

        report = collect(store.environment, store.catalog, DiskTier(store.environment), grace_s=0.0, now_s=FAR_AHEAD_S)

        assert report.num_blocks == 0
        [mark] = session.active._entry.state.marks
        assert DiskTier(store.environment).contains(mark.payload)


def with_text(inputs, num_tokens):
    return torch.cat([torch.zeros(1, num_tokens, dtype=torch.long), inputs["mm_token_type_ids"]], dim=1)
