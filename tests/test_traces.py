"""Traces: made-up ones against the published shape, and public ones as they are read."""

import itertools
import json

import pytest

from agentmem.errors import InvalidInputError, NotFoundError
from agentmem.simulation.agents import agents
from agentmem.simulation.reader import read_trace
from agentmem.simulation.trace import Request, Trace, shape_of
from agentmem.simulation.workloads import beam, round_robin

MOONCAKE = [
    {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3052, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 3]},
    {"timestamp": 3052, "input_length": 300, "output_length": 9, "hash_ids": [4], "session_id": "a"},
]


@pytest.mark.parametrize("seed", range(3))
def test_agent_work_has_the_published_shape(seed):
    shape = shape_of(agents(seed=seed))

    assert 27 <= shape.median_turns <= 39
    assert 110 <= shape.ratio <= 150
    assert 0.942 <= shape.repeated <= 0.987
    assert 100_000 < shape.max_input < 200_000


def test_agent_work_has_helpers_and_forks_whose_losers_end():
    work = agents()

    ended = {said.branch for request in work.requests for said in request.announced}
    branches = {request.branch for request in work.requests}

    assert any("/helper-" in branch for branch in branches)
    assert any(branch.endswith("/a") for branch in branches)
    assert branches == ended, "every branch is over at the end, and says so"


@pytest.mark.parametrize("make", [agents, round_robin, beam])
def test_a_seed_gives_one_trace_and_another_seed_another(make):
    assert make(seed=3) == make(seed=3) != make(seed=4)


@pytest.mark.parametrize("make", [agents, round_robin, beam])
def test_each_block_hangs_on_one_other_and_times_do_not_go_back(make):
    trace = make()
    parents = {}

    for request in trace.requests:
        for parent, block in itertools.pairwise((None, *request.blocks)):
            assert parents.setdefault(block, parent) == parent


def test_a_trace_of_nothing_or_out_of_order_is_refused():
    late, early = (
        Request(time_s=t, branch="a", blocks=(), num_prompt=0, num_input=0, num_output=0) for t in (2.0, 1.0)
    )

    for requests in ((), (late, early)):
        with pytest.raises(InvalidInputError, match="no trace"):
            Trace(requests, 16)


def test_a_public_trace_is_read(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in MOONCAKE) + "\n\n", encoding="utf-8")

    trace = read_trace(path)

    assert [request.blocks for request in trace.requests] == [(0, 1, 2), (0, 1, 3), (4,)]
    assert [request.time_s for request in trace.requests] == [0.0, 3.052, 3.052]
    assert trace.requests[2].branch == "a"
    assert (trace.block_size, trace.num_blocks, trace.has_hints) == (512, 5, False)


@pytest.mark.parametrize(
    "line",
    [
        "no JSON",
        "[]",
        "{}",
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": 3}',
        '{"timestamp": "x", "input_length": 1, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": -1, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1, 1]}',
        "[" * 100_000,
    ],
)
def test_a_line_that_is_no_request_is_refused_by_its_number(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(MOONCAKE[0]) + "\n" + line, encoding="utf-8")

    with pytest.raises(InvalidInputError, match=r"trace\.jsonl:2"):
        read_trace(path)


def test_a_trace_that_is_not_there_or_no_text_is_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(NotFoundError, match="no trace"):
        read_trace(tmp_path / "none")
    with pytest.raises(InvalidInputError, match="no text"):
        read_trace(tmp_path / "binary")
