"""Bit-exactness: against a stock `DynamicCache`, and across a checkpoint, a close and a new process.

Run as a script, this file is that new process: `python test_exactness.py MODEL STORE OUT NUM_TOKENS`.
"""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor

import agentmem

PROMPT = "A binary search keeps two borders and halves the distance between them. In Python that is"
UNSTABLE = [30, 1116, 34, 30]
"""Ids of SmolLM2's vocabulary that encode to others once they were text (research: ".\\n\\n2.")."""


class StockRun:
    """The same steps on transformers' own cache, without agentmem."""

    def __init__(self, model, cache=None):
        self.model = model
        self.cache = DynamicCache(config=model.config) if cache is None else cache

    def forward(self, tokens, *, num_logits=None):
        with torch.no_grad():
            inputs = torch.tensor([tokens])
            return self.model(inputs, cache=self.cache, logits_to_keep=num_logits or len(tokens)).logits[0]

    def fork(self):
        return StockRun(self.model, copy.deepcopy(self.cache))

    def rewind(self, num_tokens):
        self.cache.crop(-num_tokens)

    def greedy(self, prompt, num_tokens):
        """Return `num_tokens` greedy ids, and the logits `[num_tokens, V]` that chose each."""
        logits, tokens = [self.forward(prompt, num_logits=1)[-1]], []
        while True:
            tokens.append(int(logits[-1].argmax()))
            if len(tokens) == num_tokens:
                return tokens, torch.stack(logits)
            logits.append(self.forward(tokens[-1:])[-1])


def random_tokens(num_tokens, seed=0, *, vocab_size=512):
    return torch.randint(0, vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def resume_in_a_new_process(model_name, path, out, num_tokens):
    """Resume the session "s" of the store at `path` elsewhere; return what the process found."""
    command = [sys.executable, __file__, model_name, str(path), str(out), str(num_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return {**json.loads((out / "found.json").read_text()), "logits": torch.load(out / "logits.pt")}


def generate_in_two_halves(model_name, model, prompt, num_tokens, path, out):
    half = num_tokens // 2
    with agentmem.open(path, model=model) as store:
        session = store.create("s")
        session.append(prompt)
        first = session.generate(max_new_tokens=half, do_sample=False)
        session.checkpoint("half way")
    second = resume_in_a_new_process(model_name, path, out, num_tokens - half)
    return list(first.tokens) + second["tokens"], second


def generate_at_once(model, prompt, num_tokens, path):
    """Return the ids, and the logits `[num_tokens, V]` that chose each."""
    seen = Seen()
    with agentmem.open(path, model=model) as store:
        session = store.create("s")
        session.append(prompt)
        generation = session.generate(max_new_tokens=num_tokens, do_sample=False, logits_processor=[seen])
    return list(generation.tokens), torch.cat(seen.logits)


@pytest.mark.slow
def test_200_tokens_are_the_same_at_once_and_with_a_new_process_in_the_middle(llama, tmp_path):
    prompt = random_tokens(100)

    at_once, logits = generate_at_once(llama, prompt, 200, tmp_path / "whole")
    in_halves, second = generate_in_two_halves("llama", llama, prompt, 200, tmp_path / "halves", tmp_path)

    expected, stock_logits = StockRun(llama).greedy(prompt, 200)
    assert at_once == expected
    assert torch.equal(logits, stock_logits)
    assert in_halves == at_once
    assert torch.equal(second["logits"], logits[100])
    assert (second["num_fed_before"], second["num_fed_for_logits"]) == (0, 1)


@pytest.mark.slow
def test_200_tokens_of_smollm2_are_the_same_at_once_and_with_a_new_process_in_the_middle(smollm2, tmp_path):
    model, tokenizer = smollm2
    prompt = tokenizer(PROMPT).input_ids

    at_once, logits = generate_at_once(model, prompt, 200, tmp_path / "whole")
    in_halves, second = generate_in_two_halves("smollm2", model, prompt, 200, tmp_path / "halves", tmp_path)

    assert in_halves == at_once
    assert torch.equal(second["logits"].float(), logits[100])
    assert (second["num_fed_before"], second["num_fed_for_logits"]) == (0, 1)


@pytest.mark.slow
def test_smollm2_gives_the_bits_of_a_stock_cache_through_forks_rewinds_and_the_disk(smollm2, store_path):
    model, tokenizer = smollm2
    stock, prompt = StockRun(model), tokenizer(PROMPT * 12).input_ids
    with agentmem.open(store_path, model=model) as store:
        session = store.create("s")
        pairs = [(session.forward(tokens), stock.forward(tokens)) for tokens in (prompt, prompt[:30], [7], [8])]
        session.fork("b")
        session.forward([9], branch="b")
        session.rewind(tokens=20)
        stock.rewind(20)
        pairs.append((session.forward([10]), stock.forward([10])))
    with agentmem.open(store_path, model=model) as store:
        session = store.resume("s")
        pairs.append((session.forward([11]), stock.forward([11])))

    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_every_step_gives_the_bits_of_a_stock_cache(tiny, family, store_path):
    model, num_steps = tiny(family), 12
    with agentmem.open(store_path, model=model) as store:
        session, stock = store.create("s"), StockRun(model)

        pairs = [(session.forward(random_tokens(n, n)), stock.forward(random_tokens(n, n))) for n in (1, 70, 200, 33)]
        pairs += [(session.forward([step]), stock.forward([step])) for step in range(num_steps)]

    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_forks_switches_and_rewinds_give_the_bits_of_stock_caches_that_were_copied_and_cropped(llama, store_path):
    stock = {"main": StockRun(llama)}
    pairs = []
    with agentmem.open(store_path, model=llama) as store:
        session = store.create("s")

        def step(branch, tokens):
            pairs.append((session.forward(tokens, branch=branch), stock[branch].forward(tokens)))

        step("main", random_tokens(150))
        session.fork("a")
        stock["a"] = stock["main"].fork()
        step("main", random_tokens(30, 1))
        step("a", random_tokens(5, 2))
        session.switch("a")
        step("a", random_tokens(90, 3))
        session.rewind(tokens=20, branch="a")
        stock["a"].rewind(20)
        session.fork("b", branch="a")
        stock["b"] = stock["a"].fork()
        for token in range(10):
            for branch in ("a", "b", "main"):
                step(branch, [token + len(branch)])
        session.rewind(tokens=100, branch="b")
        stock["b"].rewind(100)
        session.switch("b")
        step("b", random_tokens(64, 4))

    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert len(pairs) == 35


def test_kv_that_went_through_the_disk_gives_the_bits_of_kv_that_stayed(llama, store_path):
    stock = StockRun(llama)
    with agentmem.open(store_path, model=llama) as store:
        store.create("s").forward(random_tokens(333))
    stock.forward(random_tokens(333))

    with agentmem.open(store_path, model=llama) as store:
        session = store.resume("s")
        report = session.report
        logits = session.forward(random_tokens(7, 1))

    assert torch.equal(logits, stock.forward(random_tokens(7, 1)))
    assert (report.num_reused, report.from_tier, report.num_pending) == (333, {"disk": 333}, 0)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # both names work until it is gone
def test_a_cache_in_the_users_own_loop_gives_the_bits_of_a_stock_cache(llama, store_path):
    tokens = random_tokens(90)
    stock = StockRun(llama)
    with agentmem.open(store_path, model=llama) as store:
        session = store.create("s")
        with session.cache() as cache, torch.no_grad():
            first = llama(torch.tensor([tokens]), past_key_values=cache).logits[0]
            second = llama(torch.tensor([[5]]), cache=cache).logits[0]

        assert session.active.tokens == [*tokens, 5]
    assert torch.equal(first, stock.forward(tokens))
    assert torch.equal(second, stock.forward([5]))


def test_asking_for_the_last_logits_again_changes_no_stored_bit(llama, store_path):
    stock = StockRun(llama)
    with agentmem.open(store_path, model=llama) as store:
        session = store.create("s")
        stock.forward(random_tokens(100))
        last = session.forward(random_tokens(100))[-1]

        again = session.forward([])
        after = session.forward([3])

        assert session.active.num_tokens == 101
    assert torch.allclose(again[0], last, atol=1e-4)
    assert torch.equal(after, stock.forward([3]))


def test_ids_that_do_not_survive_as_text_are_kept_and_none_is_fed_again(tiny_chat, store_path):
    model, tokenizer = tiny_chat
    prompt, following = tokenizer("Count to three:").input_ids, tokenizer(" Go on.").input_ids
    options = {"max_new_tokens": len(UNSTABLE), "do_sample": False, "logits_processor": [Forced(len(prompt), UNSTABLE)]}
    stock = StockRun(model)
    for tokens in (prompt, *([token] for token in UNSTABLE[:-1])):
        stock.forward(tokens)
    with agentmem.open(store_path, model=model, tokenizer=tokenizer) as store:
        session = store.create("s")
        session.append("Count to three:")
        sampled = session.generate(**options)

    with agentmem.open(store_path, model=model, tokenizer=tokenizer) as store:
        session = store.resume("s")
        before = store.stats().get("tokens_fed", 0)
        session.append(" Go on.")
        logits = session.forward([])
        num_fed = store.stats()["tokens_fed"]
        kept = session.active.tokens

    assert tokenizer(tokenizer.decode(UNSTABLE)).input_ids != UNSTABLE
    assert list(sampled.tokens) == UNSTABLE
    assert kept == [*prompt, *UNSTABLE, *following]
    assert before == 0
    assert num_fed == 1 + len(following)  # the last sampled id was never fed before
    assert torch.equal(logits, stock.forward([UNSTABLE[-1], *following], num_logits=1))


def test_the_seed_of_a_generation_decides_it_and_leaves_the_global_generator_alone(llama, store_path):
    def sample(session, seed):
        return session.generate(max_new_tokens=12, do_sample=True, temperature=1.3, seed=seed).tokens

    torch.manual_seed(11)
    expected = torch.rand(2)
    with agentmem.open(store_path, model=llama) as store:
        session = store.create("s")
        session.append(random_tokens(20))
        for name in ("a", "b", "c"):
            session.fork(name)
        torch.manual_seed(11)

        samples = [sample(session.branch(name), seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]

    assert torch.equal(torch.rand(2), expected)
    assert samples[0] == samples[1]
    assert samples[0] != samples[2]


class Seen(LogitsProcessor):
    """Keeps the logits of every step of a generation."""

    def __init__(self):
        self.logits = []

    def __call__(self, input_ids, scores):
        self.logits.append(scores.clone())
        return scores


class Forced(LogitsProcessor):
    """Makes the model sample given ids."""

    def __init__(self, num_prompt, tokens):
        self.num_prompt, self.tokens = num_prompt, tokens

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.tokens[input_ids.shape[1] - self.num_prompt]] = 0
        return forced


def main(model_name, path, out, num_tokens):
    """Resume the session; write the logits of the first step and the ids generated after it."""
    from agentmem.testing import models

    root = Path(__file__).parent.parent
    model = models.smollm2(root / ".models")[0] if model_name == "smollm2" else models.tiny_model(model_name)
    with agentmem.open(path, model=model) as store:
        session = store.resume("s")
        num_fed_before = store.stats().get("tokens_fed", 0)
        logits = session.forward([])
        num_fed = store.stats()["tokens_fed"]
        first = int(logits[-1].argmax())
        session.append([first])
        rest = session.generate(max_new_tokens=int(num_tokens) - 1, do_sample=False).tokens
        found = {"tokens": [first, *rest], "num_fed_before": num_fed_before, "num_fed_for_logits": num_fed}
    torch.save(logits[-1], Path(out) / "logits.pt")
    (Path(out) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
