"""What a search decides: policies on trees that nobody computed. No session, no model, nothing random.

A toy problem says what the children of a path are; `grow` plays the part of the runner.
"""

import dataclasses
import hashlib
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentmem.errors import InvalidInputError
from agentmem.search import Budget, Expansion, Node, NodeState, SearchTree
from agentmem.search.budget import afford
from agentmem.search.growth import child_seed
from agentmem.search.policies.beam import Beam
from agentmem.search.policies.best_first import BestFirst
from agentmem.search.policies.best_of import BestOfN
from agentmem.search.policies.mcts import MCTS
from agentmem.search.prune import best_leaves, make_room, released, unique_tokens

ROOT = Node(
    number=0,
    parent=None,
    index=0,
    depth=0,
    checkpoint_id=b"root",
    score=-math.inf,
    num_tokens=100,
    num_fed=0,
    step=0,
    state=NodeState.OPEN,
)


def node(number, parent, *, score=0.0, num_tokens=1, state=NodeState.OPEN, index=None):
    """Make a node under `parent`, with `num_tokens` tokens of its own."""
    return Node(
        number=number,
        parent=parent.number,
        index=number if index is None else index,
        depth=parent.depth + 1,
        checkpoint_id=str(number).encode(),
        score=score,
        num_tokens=parent.num_tokens + num_tokens,
        num_fed=num_tokens,
        step=1,
        state=NodeState.DEAD if score == -math.inf else state,
    )


def tree_of(*rows, **sizes):
    """Make a tree of rows (parent, score, own tokens, state); parents come first, the root is there already."""
    nodes = [ROOT]
    for parent, score, num_tokens, state in rows:
        index = sum(each.parent == parent for each in nodes)
        nodes.append(node(len(nodes), nodes[parent], score=score, num_tokens=num_tokens, state=state, index=index))
    parents = {each.parent for each in nodes}
    expanded = [each.number for each in nodes if each.number in parents and each.state is NodeState.OPEN]
    return SearchTree(nodes, **sizes).with_states(expanded, NodeState.EXPANDED)


def grow(tree, policy, value, is_done=lambda _path: False):
    """Take one step, as the runner does; return None when the policy has nothing more to expand."""
    expansions = policy.choose(tree)
    if not expansions:
        return None
    nodes = list(tree.with_states({each.node for each in expansions}, NodeState.EXPANDED).nodes)
    for expansion in expansions:
        parent = nodes[expansion.node]
        first = len(tree.children(parent.number))
        for index in range(first, first + expansion.num_children):
            path = (*tree.path(parent.number), index)
            state = NodeState.DONE if is_done(path) else NodeState.OPEN
            nodes.append(node(len(nodes), parent, score=value(path), state=state, index=index))
    grown = tree.with_nodes(nodes)
    return grown.with_states(policy.prune(grown), NodeState.PRUNED)


def search(policy, value, is_done=lambda _path: False, num_steps=1000):
    """Search to the end; return the tree and the number of steps."""
    tree = SearchTree([ROOT])
    for step in range(num_steps):
        grown = grow(tree, policy, value, is_done)
        if grown is None:
            return tree, step
        tree = grown
    return tree, num_steps


def noise(path):
    """Return a number in [0, 1) that is a function of a path, and of nothing one could guess."""
    digest = hashlib.blake2b(bytes(path), digest_size=7).digest()
    return int.from_bytes(digest, "big") / 2**56


def leaf_value(path, depth=3, children=3):
    """Return the best noise of all leaves below a path: a bound that a search can trust."""
    return max(noise((*path, *rest)) for rest in itertools.product(range(children), repeat=depth - len(path)))


# -- best of n


def test_best_of_n_makes_n_children_and_takes_the_one_with_the_best_score():
    tree, num_steps = search(BestOfN(8, 1), noise)

    assert num_steps == 1
    assert tree.path(tree.best.number) == max(((index,) for index in range(8)), key=noise)


def test_best_of_n_carries_each_of_its_n_on_until_it_is_done():
    tree, num_steps = search(BestOfN(4, None), noise, is_done=lambda path: len(path) >= 2 + path[0])

    assert num_steps == 5
    assert [tree.path(each.number) for each in tree.done] == [(index, *[0] * (1 + index)) for index in range(4)]
    assert tree.best.score == max(each.score for each in tree.done)


# -- beam


def deceptive(path):
    """Two moves: what looks best first is worst in the end."""
    return {(0,): 0.9, (1,): 0.8, (0, 0): 0.1, (0, 1): 0.2, (1, 0): 0.3, (1, 1): 1.0}[path]


def test_a_beam_of_two_finds_the_optimum_that_a_beam_of_one_misses():
    narrow, _steps = search(Beam(1, 2, 0.0, 2), deceptive, is_done=lambda path: len(path) == 2)
    wide, _steps = search(Beam(2, 2, 0.0, 2), deceptive, is_done=lambda path: len(path) == 2)

    assert narrow.path(narrow.best.number) == (0, 1)
    assert wide.path(wide.best.number) == (1, 1)


def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all_leaves():
    tree, num_steps = search(Beam(27, 3, 0.0, 3), noise, is_done=lambda path: len(path) == 3)

    assert num_steps == 3
    assert tree.best.score == leaf_value(())


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_beam_keeps_no_more_leaves_than_its_width_beside_the_best(width):
    tree = SearchTree([ROOT])
    policy = Beam(width, 3, 0.0, None)

    for _step in range(5):
        tree = grow(tree, policy, noise)

        assert len(tree.leaves) <= width + 1
        assert len(tree.open_nodes(None)) == width


def test_an_answer_keeps_its_place_in_the_beam_and_ends_the_search_when_all_are_answers():
    tree, num_steps = search(Beam(2, 2, 0.0, None), lambda path: -len(path) - noise(path), lambda path: path[-1] == 0)

    assert num_steps < 1000
    assert not tree.open_nodes(None)
    assert tree.best.state is NodeState.DONE


def test_a_price_for_kv_prefers_leaves_that_share_it():
    #            root ── 1 (100 tokens) ── 3, 4        equally good
    #                 └─ 2 (100 tokens) ── 5           a little better than 4
    tree = tree_of(
        (0, 0.0, 100, NodeState.OPEN),
        (0, 0.0, 100, NodeState.OPEN),
        (1, 0.9, 5, NodeState.OPEN),
        (1, 0.7, 5, NodeState.OPEN),
        (2, 0.8, 5, NodeState.OPEN),
    )

    free = best_leaves(tree, tree.leaves, 2, token_cost=0.0)
    priced = best_leaves(tree, tree.leaves, 2, token_cost=0.01)

    assert [leaf.number for leaf in free] == [3, 5]
    assert [leaf.number for leaf in priced] == [3, 4]


# -- best first


def test_best_first_with_a_bound_for_its_score_goes_straight_to_the_optimum():
    tree, num_steps = search(BestFirst(3, 3, 1), leaf_value, is_done=lambda path: len(path) == 3)

    assert num_steps == 3
    assert tree.best.state is NodeState.DONE
    assert tree.best.score == leaf_value(())


def test_best_first_comes_back_to_a_node_that_was_not_the_best_before():
    tree, _steps = search(BestFirst(2, 2, None), deceptive, num_steps=3)

    assert tree.path(tree.best.number) == (1, 1)


def test_best_first_ends_with_the_answers_that_were_asked_for():
    one, _steps = search(BestFirst(3, 3, 1), noise, is_done=lambda path: len(path) == 3)
    every, _steps = search(BestFirst(3, 3, None), noise, is_done=lambda path: len(path) == 3)

    assert 1 <= len(one.done) <= 3
    assert len(every.done) == 27
    assert every.best.score == leaf_value(())


# -- mcts


def mean_value(path):
    """A needle: one leaf of 64 is worth 1. Scores above it say how near it is, and half of them lie a little."""
    target = (2, 1, 3)
    agreed = sum(1 for one, other in zip(path, target, strict=False) if one == other)
    return 1.0 if path == target else 0.25 * agreed / len(path) + 0.2 * noise(path)


def test_mcts_finds_a_needle_without_looking_everywhere():
    tree, num_steps = search(MCTS(4, math.sqrt(2), 3, 1), mean_value, is_done=lambda path: path == (2, 1, 3))

    assert tree.path(tree.best.number) == (2, 1, 3)
    assert num_steps < 21  # as many nodes can be expanded


def test_mcts_without_exploration_is_greedy_and_with_much_of_it_goes_everywhere_alike():
    greedy, _steps = search(MCTS(2, 0.0, 6, None), lambda path: float(path[0] == 0), num_steps=6)
    even, _steps = search(MCTS(2, 100.0, 6, None), lambda path: float(path[0] == 0), num_steps=7)

    assert greedy.visits()[1] > 3 * greedy.visits()[2]
    assert even.visits()[1] == even.visits()[2]


def test_mcts_ends_when_there_is_nothing_left_to_expand():
    tree, num_steps = search(MCTS(3, math.sqrt(2), 3, None), noise)

    assert num_steps == 1 + 3 + 9
    assert len(tree.nodes) == 1 + 3 + 9 + 27


def test_visits_and_values_are_those_of_the_scores_below():
    tree = tree_of(
        (0, 1.0, 1, NodeState.OPEN),
        (0, 3.0, 1, NodeState.OPEN),
        (1, 5.0, 1, NodeState.OPEN),
        (1, -math.inf, 1, NodeState.DEAD),
    )

    assert tree.visits() == [5, 3, 1, 1, 1]
    assert tree.rewards() == [0.0, 0.0, 0.5, 1.0, 0.0]
    assert tree.values() == [pytest.approx(0.3), pytest.approx(1 / 3), 0.5, 1.0, 0.0]


# -- the tree


def test_the_best_node_is_an_answer_if_there_is_one_and_the_root_if_there_is_nothing():
    nothing = SearchTree([ROOT])
    no_answer = tree_of((0, 0.5, 1, NodeState.OPEN), (0, 0.9, 1, NodeState.OPEN))
    an_answer = tree_of((0, 0.5, 1, NodeState.DONE), (0, 0.9, 1, NodeState.OPEN))
    equals = tree_of((0, 0.9, 1, NodeState.OPEN), (0, 0.9, 1, NodeState.OPEN))

    assert [tree.best.number for tree in (nothing, no_answer, an_answer, equals)] == [0, 2, 1, 1]


def test_what_nodes_share_counts_once_and_what_was_let_go_of_not_at_all():
    tree = tree_of(
        (0, 0.1, 10, NodeState.OPEN),
        (1, 0.2, 3, NodeState.OPEN),
        (1, 0.3, 4, NodeState.OPEN),
        (0, -math.inf, 50, NodeState.DEAD),
        token_nbytes=8,
        state_nbytes=1000,
    )

    pruned = tree.with_states([2], NodeState.PRUNED)

    assert tree.nbytes == 8 * (100 + 10 + 3 + 4) + 4 * 1000
    assert pruned.nbytes == 8 * (100 + 10 + 4) + 3 * 1000
    assert tree.num_spent == pruned.num_spent == 10 + 3 + 4 + 50


@st.composite
def trees(draw):
    """Trees of up to 20 nodes, some of them pruned from the leaves up, as a search leaves them."""
    count = draw(st.integers(0, 20))
    rows = [
        (draw(st.integers(0, number)), draw(st.floats(-5, 5)), draw(st.integers(1, 9)), NodeState.OPEN)
        for number in range(count)
    ]
    tree = tree_of(*rows, token_nbytes=draw(st.integers(1, 3)), state_nbytes=draw(st.integers(0, 5)))
    for _round in range(draw(st.integers(0, 5))):
        if tree.leaves:
            leaf = draw(st.sampled_from([each.number for each in tree.leaves]))
            tree = tree.with_states([leaf], NodeState.PRUNED)
    return tree


@given(trees())
def test_the_unique_tokens_of_a_leaf_are_what_the_others_do_not_have(tree):
    for leaf in tree.leaves:
        others = {each.number for other in tree.leaves if other != leaf for each in tree.lineage(other.number)}
        own = [each.number for each in tree.lineage(leaf.number) if each.number not in {0, *others}]

        assert released(tree, leaf.number) == own
        assert unique_tokens(tree, leaf.number) == sum(map(tree.num_own_tokens, own))


@given(trees(), st.integers(0, 200), st.data())
def test_making_room_keeps_the_best_node_and_what_is_spared_and_lets_go_of_no_more_than_it_must(tree, nbytes, data):
    spared = data.draw(st.sets(st.sampled_from([each.number for each in tree.kept]), max_size=2))

    gone = make_room(tree, nbytes, spared)

    left = tree.with_states(gone, NodeState.PRUNED)
    assert left.best == tree.best
    assert spared <= {each.number for each in left.kept}
    assert all(left.nodes[each.parent].is_kept for each in left.kept[1:])
    assert left.nbytes <= nbytes or {each.number for each in left.leaves} <= {tree.best.number, *spared}
    assert not gone or tree.nbytes > nbytes


def test_room_is_made_where_the_reward_for_a_byte_is_least_and_spent_nodes_go_first():
    tree = tree_of(
        (0, 0.9, 10, NodeState.OPEN),  # the best
        (0, 0.5, 10, NodeState.OPEN),
        (0, 0.6, 100, NodeState.OPEN),  # better, but ten times as large
        (0, 0.8, 1, NodeState.EXPANDED),  # all its children are gone
        (0, 0.0, 50, NodeState.OPEN),
    )

    assert make_room(tree, tree.nbytes - 1) == [4]
    assert make_room(tree, tree.nbytes - 2) == [4, 5]
    assert make_room(tree, tree.nbytes - 52) == [4, 5, 3]
    assert make_room(tree, 0) == [4, 5, 3, 2]


@given(trees(), st.integers(1, 5), st.sampled_from([0.0, 0.1]))
def test_policies_say_the_same_of_the_same_tree_and_only_of_nodes_that_may_be_expanded(tree, children, token_cost):
    policies = [
        BestOfN(children, 3),
        Beam(2, children, token_cost, 4),
        BestFirst(children, None, 1),
        MCTS(children, 1.4, None, None),
    ]
    again = SearchTree([dataclasses.replace(each) for each in tree.nodes])

    for policy in policies:
        chosen = list(policy.choose(tree))

        assert chosen == list(policy.choose(again))
        assert all(tree.nodes[each.node].state is NodeState.OPEN for each in chosen)
        assert all(tree.nodes[number].is_kept for number in policy.prune(tree))
        assert tree.best.number not in policy.prune(tree)


# -- budgets and seeds


def test_what_can_be_afforded_is_the_first_children_in_order():
    wanted = [Expansion(1, 3), Expansion(2, 3)]

    assert afford(wanted, 10) == wanted
    assert afford(wanted, 4) == [Expansion(1, 3), Expansion(2, 1)]
    assert afford(wanted, 0) == []


@given(st.lists(st.lists(st.integers(0, 30), max_size=6).map(tuple), max_size=30, unique=True), st.integers())
def test_every_place_in_the_tree_has_a_seed_of_its_own_that_torch_takes(paths, seed):
    seeds = [child_seed(seed, path) for path in paths]

    assert len(set(seeds)) == len(paths)
    assert all(0 <= each < 2**63 for each in seeds)


@pytest.mark.parametrize(
    "make",
    [
        lambda: BestOfN(0, None),
        lambda: Beam(0, 1, 0.0, None),
        lambda: Beam(1, 1, -1.0, None),
        lambda: Beam(1, 1, math.nan, None),
        lambda: BestFirst(1, 0, None),
        lambda: BestFirst(1, None, 0),
        lambda: MCTS(1, -0.5, None, None),
        lambda: Budget(steps=-1),
    ],
)
def test_options_out_of_range_are_refused(make):
    with pytest.raises(InvalidInputError, match="must be at least"):
        make()
