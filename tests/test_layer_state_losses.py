"""Layer states and encodings that find no room, or are gone: the branch stays right, and it is said."""

import pytest
import torch

import agentmem
from agentmem._lmdb import Environment, Level, Table
from agentmem.errors import CapacityError
from agentmem.reasons import Reason
from agentmem.testing.models import tiny_model

CONFIG = agentmem.Config(block_size=16)
TOKENS = [(29 * index * index + 3 * index + 7) % 500 for index in range(60)]


def cold(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1]


def forget(store_path, digests):
    """Remove records from the store as if they had never been written."""

    def operation(txn):
        for digest in digests:
            txn.delete(Table.BINDEX, digest)

    with Environment.open(store_path) as environment:
        environment.submit(operation, level=Level.DURABLE).result()


@pytest.mark.parametrize("family", ["lfm2", "mamba2", "qwen3_next"])
def test_states_that_find_no_room_leave_the_branch_as_it_was(family, store_path):
    model = tiny_model(family)
    num_refused = 0
    for budget in range(2_000, 160_000, 6_000):
        config = agentmem.Config(block_size=16, device_budget_nbytes=budget, save_in_background=False)
        with agentmem.open(store_path, model=model, config=config) as store:
            session = store.create(str(budget))
            session.append(TOKENS[:20])
            try:
                session.forward(TOKENS[20:30])
            except CapacityError:
                num_refused += 1
                assert session.active.tokens == TOKENS[:20]
            store._runtime.device.budget_nbytes = None
            logits = session.forward(TOKENS[30:40])[-1]

            assert float((logits - cold(model, session.active.tokens)).abs().max()) < 1e-3
    assert num_refused > 1


def test_a_state_that_is_gone_is_computed_again_and_counted(store_path):
    model = tiny_model("lfm2")
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(TOKENS[:40])
        point = session.checkpoint()
    forget(store_path, [digest for state in point.states for digest in state.digests])

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.resume("s")
        report = session.report
        logits = session.forward(TOKENS[40:45])[-1]

        assert report.reason is Reason.MISSING
        assert session.report.num_computed == 45
        assert store.stats()["tokens_lost_missing"] == 39
        assert float((logits - cold(model, session.active.tokens)).abs().max()) < 1e-3


def test_an_encoding_that_is_gone_is_made_again_and_counted(store_path):
    model = tiny_model("t5")
    encoded = torch.tensor([[5, 6, 7, 8, 9]])
    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append([0, *TOKENS[:20]], input_ids=encoded)
        point = session.checkpoint()
        assert store.stats()["encoder_runs"] == 1
    forget(store_path, [digest for state in point.states for digest in state.digests])

    with agentmem.open(store_path, model=model, config=CONFIG) as store:
        session = store.resume("s")
        num_lost = store.stats()["encodings_lost_missing"]
        logits = session.forward(TOKENS[20:25])[-1]
        with torch.no_grad():
            wanted = model(input_ids=encoded, decoder_input_ids=torch.tensor([session.active.tokens])).logits[0, -1]

        assert num_lost == store.stats()["encoder_runs"] == 1
        assert float((logits - wanted).abs().max()) < 1e-3


def test_a_state_stays_on_the_device_until_the_disk_has_it(store_path):
    config = agentmem.Config(block_size=16, host_budget_nbytes=0, save_in_background=False)
    with agentmem.open(store_path, model=tiny_model("lfm2"), config=config) as store:
        session = store.create("s")
        session.forward(TOKENS[:20])
        state = session._entries["main"].state
        state.keep_state()
        live, states = state.live, store._runtime.states
        states.save(live)
        states.cool(live)
        was_held = live.tensors is not None or all(stored.done() for stored in live.stored)
        store.flush()

        assert was_held
        assert live.tensors is None
        assert states.load(live)[1] == "disk"
