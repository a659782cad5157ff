"""The real model in a batch: SmolLM2 gives every branch the ids and logits that it gives the branch alone.

In fp32 they are equal. In bf16 two passes of other shapes round otherwise, so what is compared is how far each is from
the fp32 model: the batch may be no further than a branch alone is, but for a margin.
"""

import argparse
import inspect

import pytest
import torch

import agentmem
from agentmem.batching import BatchMode

NUM_NEW = 8
FP32_TOLERANCE = 2e-3
MARGIN = 1.5


@pytest.fixture(scope="module")
def text(smollm2):
    """5,000 tokens of Python."""
    _, tokenizer = smollm2
    return tokenizer(inspect.getsource(argparse))["input_ids"][:5000]


@pytest.fixture
def model(smollm2):
    """SmolLM2; in its own dtype again afterwards."""
    model, _ = smollm2
    before = model.dtype
    yield model
    model.to(before)


def continued(model, path, prefix, tails):
    """Continue the prefix with every tail, together and alone: logits `[T, V]` and greedy ids of each."""
    names = [f"b{number}" for number in range(len(tails))]
    greedy = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": []}
    with agentmem.open(path, model=model) as store:
        session = store.create("s")
        session.forward(prefix)
        for name in names:
            session.fork(name, branch="main")
            session.fork(f"{name} alone", branch="main")
        with session.batch(names) as batch:
            logits = batch.forward(dict(zip(names, tails, strict=True)))
            ids = batch.generate(**greedy)
            report = batch.report
        alone = [session.forward(tail, branch=f"{name} alone") for name, tail in zip(names, tails, strict=True)]
        ids_alone = [session.generate(branch=f"{name} alone", **greedy).tokens for name in names]
    together = [logits[name].float() for name in names], [ids[name].tokens for name in names]
    return together, ([each.float() for each in alone], ids_alone), report


def furthest(left, right):
    return max((one - other).abs().max().item() for one, other in zip(left, right, strict=True))


def mean_divergence(truth, found):
    """Return the mean of KL(truth | found) over all tokens."""
    options = {"log_target": True, "reduction": "none"}
    pairs = ((one.log_softmax(-1), other.log_softmax(-1)) for one, other in zip(truth, found, strict=True))
    return torch.cat([torch.nn.functional.kl_div(q, p, **options).sum(-1) for p, q in pairs]).mean().item()


def gap(logits, prefix, tail, ids, other):
    """Return how much likelier than the first of `other` that differs the id in its place is; 0 for equal ids."""
    index = next((index for index, pair in enumerate(zip(ids, other, strict=True)) if len(set(pair)) == 2), None)
    if index is None:
        return 0.0
    row = logits([*prefix, *tail, *ids[:index]])
    return (row[ids[index]] - row[other[index]]).abs().item()


@pytest.mark.slow
@pytest.mark.parametrize(("num_branches", "num_tokens"), [(2, 512), (32, 512), (8, 4096)])
def test_smollm2_gives_every_branch_what_it_gives_it_alone(model, text, tmp_path, num_branches, num_tokens):
    prefix = text[:num_tokens]
    # Ragged: 1 to 40 tokens of their own, from different places of the text.
    tails = [text[num_tokens + 7 * number :][: 1 + (number * 13) % 40] for number in range(num_branches)]

    (exact, ids), (truth, truth_ids), report = continued(model.float(), tmp_path / "fp32", prefix, tails)

    assert report.mode is BatchMode.CASCADE
    assert report.num_shared == (0 if num_branches == 2 else num_tokens)  # two rows of 512 are faster apart
    assert furthest(exact, truth) <= FP32_TOLERANCE
    assert ids == truth_ids

    rounded, alone, _ = continued(model.bfloat16(), tmp_path / "bf16", prefix, tails)

    error = furthest(alone[0], truth)
    assert 0 < furthest(rounded[0], truth) <= MARGIN * error
    assert mean_divergence(truth, rounded[0]) <= MARGIN * mean_divergence(truth, alone[0])
    # Where the ids part, both were all but equally likely: closer than bf16 can tell.
    model.float()

    def last_logits(tokens):
        with torch.no_grad():
            return model(torch.tensor([tokens]), logits_to_keep=1).logits[0, -1]

    parted = [last for last in zip(tails, alone[1], rounded[1], strict=True) if last[1] != last[2]]
    assert len(parted) <= max(1, num_branches // 4)
    assert all(gap(last_logits, prefix, *each) <= 2 * error for each in parted)
