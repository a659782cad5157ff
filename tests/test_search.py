"""Tree searches in a session: nodes are checkpoints, a step happens as a whole, budgets hold, equal seeds are equal.

Scores are functions of the ids below the root, so that what is best can be told beforehand. Policies alone are tested
in test_search_policies.py, kill -9 in test_search_crashes.py.
"""

import dataclasses
import hashlib
import itertools
import math
import random
import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import agentmem
from agentmem.errors import AlreadyExistsError, CorruptionError, InvalidInputError
from agentmem.reasons import Reason
from agentmem.search import (
    Budget,
    NodeState,
    Sampling,
    Together,
    beam,
    best_first,
    best_of_n,
    look,
    mcts,
    tree_of,
)
from agentmem.search.growth import child_seed

CONFIG = agentmem.Config(block_size=16)
CONTEXT = [(29 * index * index + 3 * index + 7) % 512 for index in range(40)]
SAMPLING = Sampling(max_new_tokens=4, temperature=1.5)


@pytest.fixture
def store(llama, tmp_path):
    """An empty store."""
    with agentmem.open(tmp_path / "store", model=llama, config=CONFIG) as opened:
        yield opened


@pytest.fixture
def session(store):
    """A session whose branch "main" has a context."""
    made = store.create("s")
    made.append(CONTEXT)
    return made


@pytest.fixture
def fresh(store):
    """Make further sessions of the same context."""
    numbers = itertools.count()

    def make():
        made = store.create(f"fresh{next(numbers)}")
        made.append(CONTEXT)
        return made

    return make


def below(branch):
    """Return the ids that a branch has below the root."""
    return branch.tokens[len(CONTEXT) :]


def noise(branch):
    """Score a branch by a number in [0, 1) that is a function of its ids."""
    digest = hashlib.blake2b(repr(below(branch)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") / 2**56


def draw(branch, seed):
    """Add three ids."""
    rng = random.Random(seed)
    branch.append([rng.randrange(1, 500) for _ in range(3)])


def digits(_branch, _seed):
    """Offer three moves."""
    return [[1], [2], [3]]


def same(found):
    """Return what of a result does not depend on what else the store has: KV found there is not fed."""
    return dataclasses.replace(found, num_fed=0)


def scores(session, name="search"):
    """Return what a search left: path and score of every node that is kept."""
    tree = tree_of(session, name)
    return {tree.path(node.number): node.score for node in tree.kept}


# -- what each search finds


def test_best_of_n_is_the_best_of_n_continuations_made_by_hand(session, fresh):
    other = fresh()
    for index in range(5):
        other.fork(f"{index}", branch="main").generate(seed=child_seed(7, (index,)), **SAMPLING.options)

    found = best_of_n(session, SAMPLING, noise, n=5, seed=7)

    by_hand = max((other.branch(f"{index}") for index in range(5)), key=noise)
    assert found.score == noise(by_hand)
    assert session.branch(found.best).tokens == by_hand.tokens
    assert (found.num_steps, found.num_nodes, found.stopped, found.is_done) == (1, 6, Reason.FINISHED, False)


def test_beam_finds_the_optimum_that_greedy_misses(session, fresh):
    def value(branch):  # 1 first looks better than 2; only 2, 3 is worth much
        return {(1,): 0.9, (2,): 0.8, (2, 3): 1.0}.get(tuple(below(branch)), 0.1)

    def is_done(branch):
        return len(below(branch)) == 2

    narrow = beam(fresh(), digits, value, width=1, is_done=is_done)
    wide = beam(session, digits, value, width=2, is_done=is_done)

    assert narrow.score == 0.1
    assert (wide.score, wide.is_done, wide.stopped) == (1.0, True, Reason.FINISHED)
    assert below(session.branch(wide.best)) == [2, 3]


def test_best_first_finds_the_shortest_way_through_a_grid(session):
    #   S . #      from S to G; . is free, # a wall
    #   # . #
    #   . . .
    #   . # G
    free = {(0, 0), (1, 0), (1, 1), (0, 2), (1, 2), (2, 2), (0, 3), (2, 3)}
    goal = (2, 3)
    moves = {1: (1, 0), 2: (0, 1), 3: (-1, 0), 4: (0, -1)}

    def way(branch):
        places = [(0, 0)]
        for move in below(branch):
            places.append((places[-1][0] + moves[move][0], places[-1][1] + moves[move][1]))
        return places

    def expand(branch, _seed):
        x, y = way(branch)[-1]
        return [[move] for move, (dx, dy) in moves.items() if (x + dx, y + dy) in free - set(way(branch))]

    def bound(branch):  # A*: minus the way so far and the least that is left
        x, y = way(branch)[-1]
        return -float(len(below(branch)) + abs(goal[0] - x) + abs(goal[1] - y))

    found = best_first(session, expand, bound, is_done=lambda branch: way(branch)[-1] == goal)

    assert (found.is_done, found.score) == (True, -5.0)
    assert way(session.branch(found.best)) == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 2), (2, 3)]


def test_mcts_finds_a_needle_without_looking_everywhere(session):
    target = [2, 1, 3, 1]

    def value(branch):
        agreed = sum(one == other for one, other in zip(below(branch), target, strict=False))
        return agreed / 4 + 0.1 * noise(branch)

    found = mcts(session, digits, value, is_done=lambda branch: below(branch) == target, max_depth=4, num_answers=1)

    assert below(session.branch(found.best)) == target
    assert found.num_steps < 1 + 3 + 9 + 27


@pytest.mark.parametrize("family", ["mamba2", "falcon_h1", "gemma3"])
def test_searches_work_with_layer_states_and_sliding_windows(tiny, family, tmp_path):
    model = tiny(family)
    with agentmem.open(tmp_path / "store", model=model, config=CONFIG) as store:
        session = store.create("s")
        session.append(CONTEXT)

        found = best_first(session, SAMPLING, noise, children=2, budget=Budget(steps=3))
        best = session.branch(found.best)
        logits = best.forward()[0]

        with torch.no_grad():
            alone = model(torch.tensor([best.tokens])).logits[0, -1]
        assert found.num_nodes == 7
        assert found.num_fed <= 6 * 4
        assert torch.allclose(logits, alone, atol=1e-3)


# -- what a search is, in its session


def test_every_node_is_a_checkpoint_with_its_score(session):
    best_first(session, SAMPLING, noise, children=2, budget=Budget(steps=2))

    tree = tree_of(session)
    by_id = {checkpoint.checkpoint_id: checkpoint for checkpoint in session.checkpoints}
    for node in tree.nodes[1:]:
        checkpoint, branch = by_id[node.checkpoint_id], session.branch(f"search/{node.number}")
        assert branch.tip == checkpoint
        assert checkpoint.extras["score"] == branch.extras["score"] == node.score == noise(branch)
        assert checkpoint.extras["search"] == {
            "name": "search",
            "node": node.number,
            "parent": node.parent,
            "index": node.index,
            "depth": node.depth,
        }
        assert checkpoint.parent_id == tree.nodes[node.parent].checkpoint_id
        assert f"[search/{node.number}]  search/{node.number}" in session.log()
        assert f"score={node.score:.4g}" in session.log()


def test_a_branch_costs_its_own_tokens(session, store):
    found = best_first(session, SAMPLING, noise, children=3, budget=Budget(steps=3))

    assert found.num_fed == 9 * 4  # the pending token of the node, and all new ones but the last
    assert store.stats()["tokens_fed"] == len(CONTEXT) - 1 + 9 * 4
    assert found.nbytes == found.peak_nbytes == (len(CONTEXT) + 9 * 4) * session.adapter.spec.token_nbytes


def test_the_users_metadata_goes_down_from_node_to_node(session):
    def expand(branch, seed):
        draw(branch, seed)
        branch.extras["trail"] = [*branch.extras.get("trail", []), seed]

    found = best_first(session, expand, noise, children=2, budget=Budget(steps=3))

    tree = tree_of(session)
    for node in tree.nodes[1:]:
        path = tree.path(node.number)
        trail = [child_seed(0, path[: index + 1]) for index in range(len(path))]
        assert session.branch(f"search/{node.number}").extras["trail"] == trail
    assert "trail" not in session.branch("main").extras
    assert "trail" not in session.branch("search").extras
    assert found.num_nodes == 7


def test_the_branch_it_began_from_and_the_active_one_stay_as_they_are(session):
    session.fork("other")
    session.switch("other")

    best_first(session, SAMPLING, noise, children=2, budget=Budget(steps=2), branch="main")

    assert session.active.name == "other"
    assert session.branch("main").tokens == session.branch("other").tokens == CONTEXT
    assert session.branch("main").extras == session.branch("other").extras == {}


def test_two_searches_in_one_session_know_nothing_of_each_other(session, fresh):
    alone = fresh()
    search = partial(best_first, expand=SAMPLING, score=noise, children=2)
    search(alone, name="one", budget=Budget(steps=4), seed=1)

    search(session, name="one", budget=Budget(steps=2), seed=1)
    search(session, name="two", budget=Budget(steps=3), seed=2)
    search(session, name="one", budget=Budget(steps=4), seed=1)
    below_one = search(session, name="three", budget=Budget(steps=2), branch="one/3")

    assert scores(session, "one") == scores(alone, "one")
    assert scores(session, "two") != scores(session, "one")
    start = session.branch("one/3").tokens
    assert session.branch(below_one.best).tokens[: len(start)] == start
    assert look(session, "one").num_steps == 4
    assert look(session, "two").num_steps == 3
    assert look(session, "four") is None
    assert tree_of(session, "four") is None


def test_the_seed_decides_and_nothing_else_is_random(session, fresh):
    search = partial(mcts, expand=SAMPLING, score=noise, children=2, budget=Budget(steps=3))
    others = [fresh(), fresh()]

    first = search(session, seed=5)
    torch.rand(9)
    second, other = search(others[0], seed=5), search(others[1], seed=6)

    assert (first, scores(session)) == (second, scores(others[0]))
    assert scores(session).values() != scores(others[1]).values()
    assert first.score != other.score


def test_torchs_generator_is_left_alone(session):
    before = torch.random.get_rng_state()

    best_of_n(session, SAMPLING, noise, n=2)

    assert torch.equal(before, torch.random.get_rng_state())


# -- going on


def test_children_may_be_grown_all_at_once_by_a_function(session, fresh):
    other = fresh()
    asked = []

    def expand(branches, seeds):
        asked.append(len(branches))
        names = [branch.name for branch in branches]
        with session.batch(names) as batch:
            seeded = {name: {"seed": seed} for name, seed in zip(names, seeds, strict=True)}
            batch.generate(per_branch=seeded, **SAMPLING.options)

    found = beam(session, Together(expand), noise, width=2, children=3, budget=Budget(steps=2))
    same_found = beam(other, SAMPLING, noise, width=2, children=3, budget=Budget(steps=2))

    assert asked == [3, 6]
    assert found == same_found
    assert scores(session) == scores(other)


def test_an_expand_may_say_what_its_checkpoint_is_called(session):
    def expand(branch, seed):
        draw(branch, seed)
        branch.extras["message"] = f"drew {below(branch)[-1]}"

    best_of_n(session, expand, noise, n=2)

    for number in (1, 2):
        branch = session.branch(f"search/{number}")
        assert branch.tip.message == f"drew {below(branch)[-1]}"
        assert "message" not in branch.extras


def test_children_that_do_not_fit_the_device_together_are_sampled_in_smaller_groups(llama, tmp_path, session):
    whole = best_of_n(session, SAMPLING, noise, n=8)
    config = agentmem.Config(block_size=16, device_budget_nbytes=200 << 10)
    with agentmem.open(tmp_path / "small", model=llama, config=config) as store:
        small = store.create("s")
        small.append(CONTEXT)

        found = best_of_n(small, SAMPLING, noise, n=8)

        assert same(found) == same(whole)
        assert store.stats()["device_nbytes"] <= 200 << 10


@pytest.mark.parametrize("search", [best_first, mcts, partial(beam, width=2)])
def test_a_search_whose_budget_is_raised_goes_on_as_if_it_had_had_it_from_the_start(session, fresh, search):
    other = fresh()
    whole = search(other, SAMPLING, noise, children=3, budget=Budget(steps=5))

    for steps in (0, 1, 1, 3, 5):
        found = search(session, SAMPLING, noise, children=3, budget=Budget(steps=steps))
        assert (found.num_steps, found.stopped) == (steps, Reason.STEP_BUDGET)

    assert found == whole == look(session)
    assert scores(session) == scores(other)


def test_a_search_goes_on_in_another_process_from_what_is_on_disk(llama, tmp_path, fresh):
    other = fresh()
    whole = mcts(other, SAMPLING, noise, children=2, budget=Budget(steps=6))

    for steps in (2, 4, 6):
        with agentmem.open(tmp_path / "stored", model=llama, config=CONFIG) as store:
            names = [record.name for record in store.sessions()]
            session = store.resume("s") if names else store.create("s")
            if not names:
                session.append(CONTEXT)
            found = mcts(session, SAMPLING, noise, children=2, budget=Budget(steps=steps))
            assert store.stats()["tokens_fed"] == 2 * 2 * 4 + (len(CONTEXT) - 1 if not names else 0)
            assert scores(session).items() <= scores(other).items()

    assert found == whole


def test_is_done_is_asked_again_when_a_search_goes_on_with_another_goal(session):
    def longer_than(num_tokens):
        return lambda branch: len(below(branch)) >= num_tokens

    search = partial(best_first, session, draw, noise, children=2)
    first = search(is_done=longer_than(3))
    second = search(is_done=longer_than(9))
    third = search(is_done=longer_than(6))

    assert first.is_done
    assert second.is_done
    assert len(below(session.branch(second.best))) == 9
    assert third.num_steps == second.num_steps
    assert third.is_done


def test_a_node_is_expanded_where_it_was_made_whatever_became_of_its_branch(session, fresh):
    other = fresh()
    whole = best_first(other, SAMPLING, noise, children=2, budget=Budget(steps=4))
    found = best_first(session, SAMPLING, noise, children=2, budget=Budget(steps=2))
    session.switch(found.best)
    session.append([5, 6, 7])

    again = best_first(session, SAMPLING, noise, children=2, budget=Budget(steps=4))

    assert again == whole
    assert scores(session) == scores(other)
    assert session.branch(found.best).tokens[-3:] == [5, 6, 7]


def test_a_leaf_that_the_user_dropped_is_not_expanded_any_more(session):
    first = best_first(session, SAMPLING, noise, children=3, budget=Budget(steps=1))
    session.drop(first.best)

    second = best_first(session, SAMPLING, noise, children=3, budget=Budget(steps=4))

    tree = tree_of(session)
    gone = int(first.best.rpartition("/")[2])
    assert tree.nodes[gone].state is NodeState.PRUNED
    assert tree.children(gone) == []
    assert second.num_steps == 4
    assert second.best != first.best


# -- errors


class Trap:
    """Calls a function, and raises at its n-th call."""

    def __init__(self, function, fatal):
        self.function = function
        self.left = fatal

    def __call__(self, *arguments):
        self.left -= 1
        if self.left == 0:
            raise ZeroDivisionError
        return self.function(*arguments)


@pytest.mark.parametrize(
    ("search", "expand", "part"),
    [
        (mcts, draw, "expand"),
        (mcts, digits, "score"),
        (partial(beam, width=2), digits, "expand"),
        (partial(beam, width=2), draw, "score"),
        (best_first, draw, "is_done"),
    ],
)
def test_a_function_that_raises_leaves_whole_steps_and_the_same_call_goes_on(session, fresh, search, expand, part):
    other = fresh()
    options = {"children": 2, "max_depth": 3, "budget": Budget(steps=3)}
    functions = {"expand": expand, "score": noise, "is_done": lambda branch: sum(below(branch)) % 5 == 0}
    whole = search(other, **functions, **options)

    num_raised = 0
    for fatal in (1, 2, 3, 1, 4):
        steps = look(session).num_steps if "search" in session.branches else 0
        try:
            search(session, **{**functions, part: Trap(functions[part], fatal)}, **options)
        except ZeroDivisionError:
            num_raised += 1
        kept = {f"search/{node.number}" for node in tree_of(session).kept[1:]}
        assert set(session.branches) == {"main", "search", *kept}
        assert look(session).num_steps >= steps

    found = search(session, **functions, **options)
    assert num_raised >= 2
    assert same(found) == same(whole)
    assert scores(session) == scores(other)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_score_that_cannot_be_compared_is_refused_and_names_the_branch(session, wrong):
    with pytest.raises(InvalidInputError, match=r"score of branch 'search/1' is (nan|inf)"):
        best_of_n(session, SAMPLING, lambda _branch: wrong, n=2)

    assert session.branches == ["main", "search"]


def test_a_child_that_scores_minus_infinity_or_gets_no_token_is_given_up(session):
    def expand(branch, seed):
        if int(branch.name.rpartition("/")[2]) % 3:
            draw(branch, seed)

    def score(branch):
        return -math.inf if branch.name.endswith(("2", "5")) else noise(branch)

    found = best_of_n(session, expand, score, n=6)

    tree = tree_of(session)
    assert [node.state is NodeState.DEAD for node in tree.nodes] == [False, False, True, True, False, True, True]
    assert found.num_dead == 4
    assert session.branches == ["main", "search", "search/1", "search/4"]
    assert len(session.checkpoints) == 4  # main's, by the fork, the root's and two


def test_a_search_whose_children_all_die_ends_at_its_root(session):
    found = best_first(session, draw, lambda _branch: -math.inf, children=2, budget=Budget(steps=9))

    assert (found.best, found.score, found.stopped) == ("search", -math.inf, Reason.FINISHED)
    assert session.branches == ["main", "search"]


def test_what_the_score_appends_is_taken_off_again_and_counts_as_fed(session):
    question = [1, 2, 3]

    def score(branch):
        return float(branch.forward(question)[-1, 0])

    found = best_of_n(session, SAMPLING, score, n=3)

    assert all(len(below(session.branch(f"search/{number}"))) == 4 for number in (1, 2, 3))
    assert found.num_fed == 3 * (4 + 1 + len(question))
    assert found.score == max(session.branch(f"search/{number}").extras["score"] for number in (1, 2, 3))


def test_continuations_that_expand_returns_are_a_child_each(session):
    def moves(branch, _seed):
        return [[5], [6, 7], []] if not below(branch) else []

    found = best_first(session, moves, lambda branch: float(branch.num_tokens), max_depth=5)

    tree = tree_of(session)
    assert [below(session.branch(f"search/{number}")) for number in (1, 2)] == [[5], [6, 7]]
    assert [node.state.value for node in tree.nodes] == ["expanded", "expanded", "expanded", "dead", "dead", "dead"]
    assert (found.best, found.stopped) == ("search/2", Reason.FINISHED)


@pytest.mark.parametrize(
    ("expand", "message"),
    [
        (
            lambda branch, _seed: branch.append([1]) or [[2]],
            "returned 1 continuations of branch 'search/1' and changed",
        ),
        (lambda branch, _seed: branch.rewind(tokens=1), "took 1 tokens of its node off branch 'search/1'"),
    ],
)
def test_an_expand_that_makes_no_child_of_its_node_is_refused(session, expand, message):
    with pytest.raises(InvalidInputError, match=message):
        best_of_n(session, expand, noise, n=2)

    assert session.branches == ["main", "search"]


def test_a_score_that_takes_tokens_off_is_refused(session):
    with pytest.raises(InvalidInputError, match="score took tokens off branch 'search/1'"):
        best_of_n(session, draw, lambda branch: branch.rewind(tokens=1) or 0.0, n=2)

    assert session.branches == ["main", "search"]


def test_a_search_is_not_gone_on_with_in_another_way(session):
    beam(session, draw, noise, width=2, max_depth=2, seed=3)

    with pytest.raises(InvalidInputError, match=r"was begun as Beam\(width=2.* with seed 3; found Beam\(width=3"):
        beam(session, draw, noise, width=3, max_depth=2, seed=3)
    with pytest.raises(InvalidInputError, match="with seed 4"):
        beam(session, draw, noise, width=2, max_depth=2, seed=4)
    with pytest.raises(InvalidInputError, match="found BestFirst"):
        best_first(session, draw, noise, max_depth=2, seed=3)


def test_what_can_be_no_search_is_refused_before_anything_is_done(session, store):
    session.fork("taken").append([1])
    empty = store.create("empty")
    before = session.branches

    with pytest.raises(AlreadyExistsError, match="has a branch 'taken' that is no search"):
        best_of_n(session, draw, noise, name="taken")
    with pytest.raises(InvalidInputError, match="give one without '/'"):
        best_of_n(session, draw, noise, name="one/2")
    with pytest.raises(InvalidInputError, match="has no tokens to search from"):
        best_of_n(empty, draw, noise)
    with pytest.raises(InvalidInputError, match="nothing would end this search"):
        mcts(session, draw, noise)
    with pytest.raises(InvalidInputError, match="no seed"):
        Sampling(max_new_tokens=3, seed=1)

    assert session.branches == before
    assert empty.branches == ["main"]


def test_a_root_that_was_forked_by_a_process_that_died_at_once_is_taken_over(session, fresh):
    other = fresh()
    whole = best_of_n(other, draw, noise, n=2)
    session.fork("search", branch="main")

    found = best_of_n(session, draw, noise, n=2)

    assert same(found) == same(whole)


def test_a_record_that_cannot_be_read_is_named(session):
    best_of_n(session, draw, noise, n=2)
    session.branch("search").extras["search"]["nodes"][1][2:4] = ["what", "ever"]

    with pytest.raises(CorruptionError, match="the record of search 'search' cannot be read"):
        best_of_n(session, draw, noise, n=2)
    with pytest.raises(CorruptionError, match="begin another search"):
        look(session)


# -- budgets


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_search_goes_beyond_its_budget(data, fresh, store):
    session = fresh()
    token_nbytes = session.adapter.spec.token_nbytes
    budget = Budget(
        steps=data.draw(st.integers(0, 4)),
        tokens=data.draw(st.none() | st.integers(0, 60)),
        nbytes=data.draw(st.none() | st.integers(0, 100).map(lambda count: count * token_nbytes)),
    )
    sampling = Sampling(max_new_tokens=data.draw(st.integers(1, 5)))
    children = data.draw(st.integers(1, 3))
    search = data.draw(
        st.sampled_from([partial(best_first, children=children), partial(mcts, children=children), best_of_n])
        | st.builds(lambda width: partial(beam, width=width, children=children), st.integers(1, 3))
    )
    is_done = data.draw(st.sampled_from([None, lambda branch: len(below(branch)) > 8]))
    session.checkpoint("the context is no part of the budget")
    fed_before = store.stats()["tokens_fed"]

    found = search(session, sampling, noise, is_done=is_done, budget=budget)

    tree = tree_of(session)
    held = sum(tree.num_own_tokens(node.number) for node in tree.kept)
    assert found.num_steps <= budget.steps
    assert store.stats()["tokens_fed"] - fed_before == found.num_fed
    assert budget.tokens is None or found.num_fed <= budget.tokens
    assert found.nbytes == held * token_nbytes <= found.peak_nbytes
    assert budget.nbytes is None or found.peak_nbytes <= max(budget.nbytes, len(CONTEXT) * token_nbytes)
    assert found.best in session.branches
    everything = [node.score for node in tree.nodes if node.state is not NodeState.DEAD]
    assert found.is_done or found.score == max(everything)


def test_a_function_of_the_users_stops_the_search_after_the_step_that_used_the_budget_up(session, fresh):
    other = fresh()
    token_nbytes = session.adapter.spec.token_nbytes

    by_tokens = best_first(session, draw, noise, children=2, budget=Budget(tokens=13))
    by_nbytes = best_first(
        other, draw, noise, children=2, budget=Budget(steps=9, nbytes=(len(CONTEXT) + 10) * token_nbytes)
    )

    assert by_tokens.stopped is Reason.TOKEN_BUDGET
    assert 13 <= by_tokens.num_fed < 13 + 2 * 3 + 1
    assert by_nbytes.nbytes <= (len(CONTEXT) + 10) * token_nbytes < by_nbytes.peak_nbytes


def test_a_budget_of_bytes_lets_go_of_the_least_worth_and_never_of_the_best(session, fresh):
    other = fresh()
    token_nbytes = session.adapter.spec.token_nbytes
    limit = (len(CONTEXT) + 5 * 4) * token_nbytes
    free = mcts(other, SAMPLING, noise, children=2, budget=Budget(steps=6))

    found = mcts(session, SAMPLING, noise, children=2, budget=Budget(steps=6, nbytes=limit))

    tree = tree_of(session)
    pruned = [node for node in tree.nodes if node.state is NodeState.PRUNED]
    assert free.peak_nbytes > limit >= found.peak_nbytes
    assert pruned
    assert {f"search/{node.number}" for node in pruned}.isdisjoint(session.branches)
    assert found.score == max(node.score for node in tree.nodes)
    assert found.num_steps > 3


def test_a_branch_that_the_user_works_on_is_not_dropped_when_its_node_is_let_go_of(session):
    first = beam(session, draw, noise, width=3, children=3, budget=Budget(steps=1))
    worst = min((f"search/{number}" for number in (1, 2, 3)), key=lambda name: noise(session.branch(name)))
    session.switch(worst)
    limit = first.nbytes + 3 * session.adapter.spec.token_nbytes

    found = beam(session, draw, noise, width=3, children=3, budget=Budget(steps=2, nbytes=limit))

    assert tree_of(session).nodes[int(worst.rpartition("/")[2])].state is NodeState.PRUNED
    assert session.active.name == worst
    assert found.nbytes <= limit


def test_no_byte_for_a_child_ends_the_search_and_says_so(session):
    limit = (len(CONTEXT) + 3) * session.adapter.spec.token_nbytes

    found = best_first(session, SAMPLING, noise, budget=Budget(steps=5, nbytes=limit))

    assert (found.stopped, found.num_nodes, found.best) == (Reason.BYTE_BUDGET, 1, "search")


def test_the_device_forgets_what_is_let_go_of(store, session):
    def expand(branch, seed):
        rng = random.Random(seed)
        branch.append([rng.randrange(1, 500) for _ in range(100)])

    found = beam(session, expand, noise, width=1, children=4, budget=Budget(steps=6))

    every_node = 6 * 4 * 100 * store.token_nbytes
    assert found.nbytes <= (len(CONTEXT) + 7 * 100) * store.token_nbytes
    assert store.stats()["device_nbytes"] < every_node


def test_searching_is_imported_without_torch():
    code = "import sys; from agentmem.search import best_of_n, beam, best_first, mcts; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == "False\n"
