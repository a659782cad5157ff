"""Sixteen branches of one trunk take turns, one token at a time, and disturb neither each other nor what is stored."""

import pytest
import torch

import agentmem
from agentmem.check import check
from agentmem.tiers.disk import DiskTier

NUM_BRANCHES = 16
NUM_STEPS = 24
TOLERANCE = 1e-4
TRUNK = [(11 * index + 5) % 512 for index in range(200)]


def first_token(number):
    return 17 * number + 1


def from_nothing(model, tokens):
    """Return the logits `[T, V]` of a run over all tokens, without a cache."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def records(store):
    """Return every stored record by digest, read from the disk and verified."""
    disk = DiskTier(store.environment)
    with store.environment.read() as txn:
        digests = [digest for digest, _ in disk.iter_index(txn)]
    return {digest: disk.load_record(digest) for digest in digests}


@pytest.fixture
def trunk(tiny, store_path, request):
    """A store with a durable trunk and sixteen branches of it; gives model, store, session and branches."""
    model = tiny(getattr(request, "param", "llama"))
    with agentmem.open(store_path, model=model) as store:
        session = store.create("s")
        session.append(TRUNK)
        plan = session.checkpoint("plan")
        branches = [session.fork(f"b{number}", at=plan) for number in range(NUM_BRANCHES)]
        yield model, store, session, branches


def take_turns(branches, num_steps):
    """Let each branch go one greedy token further, in turn; return the logits by branch."""
    logits = [[branch.forward([first_token(number)])[0]] for number, branch in enumerate(branches)]
    for _ in range(num_steps):
        for branch, seen in zip(branches, logits, strict=True):
            seen.append(branch.forward([int(seen[-1].argmax())])[0])
    return [torch.stack(seen) for seen in logits]


@pytest.mark.parametrize("trunk", ["llama", "mistral", "gemma3"], indirect=True)
def test_each_of_sixteen_branches_equals_its_own_run_from_nothing(trunk):
    model, _, _, branches = trunk

    interleaved = take_turns(branches, NUM_STEPS)

    for number, (branch, logits) in enumerate(zip(branches, interleaved, strict=True)):
        alone = from_nothing(model, branch.tokens)[len(TRUNK) :]
        assert branch.tokens[: len(TRUNK) + 1] == [*TRUNK, first_token(number)]
        assert len(branch.tokens) == len(TRUNK) + 1 + NUM_STEPS
        assert torch.allclose(logits, alone, atol=TOLERANCE)
        assert logits.argmax(-1).tolist() == alone.argmax(-1).tolist()


def test_no_stored_block_changes_while_branches_take_turns(trunk):
    _, store, session, branches = trunk
    store.flush()
    before = records(store)

    take_turns(branches, NUM_STEPS)
    for branch in branches[:4]:
        branch.checkpoint()
    store.flush()
    after = records(store)

    assert len(before) >= len(TRUNK) // store.config.block_size
    assert {digest: after[digest] for digest in before} == before
    assert check(store.environment, DiskTier(store.environment), read_data=True).is_sound
    assert session.active.tokens == TRUNK


def test_sixteen_branches_cost_the_device_their_own_tokens_only(trunk):
    _, store, session, branches = trunk

    take_turns(branches, 63)

    token_nbytes = session.ledger.workspace._tier.spec.token_nbytes
    own = sum(branch.num_tokens - len(TRUNK) for branch in branches)
    assert own == NUM_BRANCHES * 64
    assert store.stats()["device_nbytes"] <= (len(TRUNK) + own) * token_nbytes * 1.5


def test_the_trunk_is_fed_once_for_all_branches(trunk):
    _, store, _, branches = trunk

    take_turns(branches, 3)

    assert store.stats()["tokens_fed"] == len(TRUNK) + NUM_BRANCHES * 4


def test_branches_made_before_the_trunk_was_computed_share_its_computation(llama, store_path):
    with agentmem.open(store_path, model=llama) as store:
        session = store.create("s")
        session.append(TRUNK)
        branches = [session.fork(f"b{number}") for number in range(4)]

        for number, branch in enumerate(branches):
            branch.forward([first_token(number)])

        # each later branch takes the trunk's full blocks, and at most feeds what lies behind the last of them
        assert store.stats()["tokens_fed"] <= len(TRUNK) + 4 + 3 * (len(TRUNK) % store.config.block_size)


def test_branches_that_take_turns_through_a_small_device_budget_are_still_right(llama, store_path):
    token_nbytes = 4 * 2 * 2 * 16 * 4
    config = agentmem.Config(device_budget_nbytes=400 * token_nbytes, host_budget_nbytes=100 * token_nbytes)
    with agentmem.open(store_path, model=llama, config=config) as store:
        session = store.create("s")
        session.append(TRUNK)
        plan = session.checkpoint("plan")
        branches = [session.fork(f"b{number}", at=plan) for number in range(6)]

        interleaved = take_turns(branches, 12)
        stats = store.stats()

        for branch, logits in zip(branches, interleaved, strict=True):
            assert torch.allclose(logits, from_nothing(llama, branch.tokens)[len(TRUNK) :], atol=TOLERANCE)
        assert stats["device_nbytes"] <= config.device_budget_nbytes
        assert stats["tokens_fed"] == len(TRUNK) + sum(branch.num_tokens - len(TRUNK) for branch in branches)


def test_sessions_of_several_threads_do_not_disturb_each_other(llama, store_path):
    from concurrent.futures import ThreadPoolExecutor

    token_nbytes = 4 * 2 * 2 * 16 * 4
    config = agentmem.Config(device_budget_nbytes=1600 * token_nbytes)  # for the four that work, not for all six
    with agentmem.open(store_path, model=llama, config=config) as store:
        sessions = [store.create(f"s{number}") for number in range(6)]

        def work(number):
            session = sessions[number]
            session.append([*TRUNK, first_token(number)])
            session.fork("b")
            pieces = []
            for step in range(10):
                pieces.append(session.forward([step, number], branch="b"))
                session.switch("b" if step % 2 else "main")
                store.stats()
            return torch.cat(pieces)

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(work, range(6)))

        for session, logits in zip(sessions, answers, strict=True):
            tokens = session.branch("b").tokens
            assert torch.allclose(logits, from_nothing(llama, tokens)[-len(logits) :], atol=TOLERANCE)
        assert check(store.environment, DiskTier(store.environment)).is_sound
