"""Attention in parts equals attention in one: any tree of shared tokens, ragged rows, grouped heads, sinks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentmem.adapters.transformers.cascade import CPU_SHARED_PRODUCT, LayerRows, attend, is_worth_sharing

DIM = 16


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(query, keys, values, mask, sinks=None):
    """Attend one row's queries `[Hq, q, D]` to all its tokens `[H, T, D]`, the plain way, in fp64."""
    repeats = query.shape[0] // keys.shape[0]
    keys, values = (part.double().repeat_interleave(repeats, 0) for part in (keys, values))
    scores = query.double() @ keys.transpose(-1, -2) / DIM**0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        extra = sinks.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        return torch.cat([scores, extra], -1).softmax(-1)[..., :-1] @ values
    return scores.softmax(-1) @ values


def expected(query, rows, sinks=None):
    """Attend every row to its shared and its own tokens, put together."""
    results = []
    for index in range(query.shape[0]):
        parts = [(keys, values) for chosen, keys, values in rows.shared if index in chosen]
        keys = torch.cat([*(part[0] for part in parts), rows.keys[index]], 1)
        values = torch.cat([*(part[1] for part in parts), rows.values[index]], 1)
        own = torch.ones(query.shape[2], rows.keys.shape[2], dtype=torch.bool)
        own = own if rows.mask is None else rows.mask[index, 0]
        before = torch.ones(query.shape[2], keys.shape[1] - own.shape[1], dtype=torch.bool)
        results.append(whole(query[index], keys, values, torch.cat([before, own], 1), sinks))
    return torch.stack(results)


def make(num_rows, groups, num_queries, num_own, shared, *, dtype=torch.float32, value_dim=DIM, is_ragged=True):
    """Return random queries and rows; `shared` lists the rows and the length of each shared part."""
    query = random(num_rows, 2 * groups, num_queries, DIM, seed=1, dtype=dtype)
    mask = None
    if is_ragged:
        first = torch.arange(num_rows)[:, None, None] % num_own
        slots = torch.arange(num_own)[None, None, :]
        last = num_own - num_queries + torch.arange(num_queries)[None, :, None]
        mask = ((slots >= first.clamp(max=num_own - num_queries)) & (slots <= last))[:, None]
    rows = LayerRows(
        keys=random(num_rows, 2, num_own, DIM, seed=2, dtype=dtype),
        values=random(num_rows, 2, num_own, value_dim, seed=3, dtype=dtype),
        mask=mask,
        shared=[
            (
                chosen,
                random(2, size, DIM, seed=4 + n, dtype=dtype),
                random(2, size, value_dim, seed=50 + n, dtype=dtype),
            )
            for n, (chosen, size) in enumerate(shared)
        ],
    )
    return query, rows


@st.composite
def trees(draw):
    """Draw shared parts as a random tree gives them: each is for a subset of the rows above it."""
    num_rows = draw(st.integers(1, 6))
    shared, level = [], [tuple(range(num_rows))]
    for _ in range(draw(st.integers(0, 3))):
        shared += [(rows, draw(st.integers(1, 40))) for rows in level]
        level = [part for rows in level for part in (rows[::2], rows[1::2]) if part]
    return num_rows, shared


@settings(max_examples=40, deadline=None)
@given(tree=trees(), groups=st.integers(1, 3), num_queries=st.integers(1, 5), is_ragged=st.booleans())
def test_any_tree_of_shared_tokens_gives_what_one_attention_over_all_of_them_does(tree, groups, num_queries, is_ragged):
    num_rows, shared = tree
    is_ragged = is_ragged or num_queries > 1
    query, rows = make(num_rows, groups, num_queries, num_queries + 6, shared, is_ragged=is_ragged)

    found = attend(query, rows, scale=None)

    assert torch.allclose(found.double(), expected(query, rows), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_within_its_own_rounding(dtype):
    query, rows = make(8, 3, 1, 9, [(tuple(range(8)), 300), (tuple(range(4)), 40)], dtype=dtype)

    found = attend(query, rows, scale=None)

    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected(query, rows), atol=2e-2)


def test_a_sink_takes_its_part_of_every_softmax():
    query, rows = make(3, 2, 2, 8, [((0, 1, 2), 20)])
    sinks = random(4, seed=9)

    found = attend(query, rows, scale=None, sinks=sinks)

    assert torch.allclose(found.double(), expected(query, rows, sinks), atol=1e-5)
    assert not torch.allclose(found, attend(query, rows, scale=None), atol=1e-3)


def test_values_of_another_width_than_keys_are_attended_too():
    query, rows = make(3, 1, 2, 8, [((0, 1), 20)], value_dim=24)

    found = attend(query, rows, scale=None)

    assert found.shape == (3, 2, 2, 24)
    assert torch.allclose(found.double(), expected(query, rows), atol=1e-5)


def test_sharing_pays_from_a_number_of_rows_and_tokens_on():
    cpu = torch.device("cpu")

    assert is_worth_sharing(cpu, 2, CPU_SHARED_PRODUCT)
    assert not is_worth_sharing(cpu, 2, CPU_SHARED_PRODUCT - 1)
    assert not is_worth_sharing(cpu, 1, 100_000)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_queries", [1, 3])
def test_cuda_gives_what_the_cpu_does(dtype, num_queries):
    query, rows = make(5, 2, num_queries, 13, [((0, 1, 2, 3, 4), 100), ((0, 2), 17)], dtype=dtype)
    there = LayerRows(
        keys=rows.keys.cuda(),
        values=rows.values.cuda(),
        mask=rows.mask.cuda(),
        shared=[(chosen, keys.cuda(), values.cuda()) for chosen, keys, values in rows.shared],
    )

    found = attend(query.cuda(), there, scale=None)

    assert torch.allclose(found.double().cpu(), expected(query, rows), atol=1e-4 if dtype == torch.float32 else 3e-2)
