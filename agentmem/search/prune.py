"""Which nodes a search lets go of, so that the KV of better ones has room. Pure: the same tree, the same answer.

What is exact here, and estimated by searches on top of a prefix cache: how much KV a leaf alone holds. A leaf's own
tokens, and those of the nodes above it that nothing else continues, are what dropping it gives back.

Source: ETS (arXiv 2502.13575), which keeps the leaves with the best reward minus a price for each node of KV they need.
"""

from collections.abc import Collection, Sequence

from agentmem.search.node import Node, NodeState
from agentmem.search.tree import SearchTree


def released(tree: SearchTree, leaf: int, spared: Collection[int] = ()) -> list[int]:
    """Return the nodes that go with a leaf: itself, and what above it only it continues, up to a spared node."""
    gone: list[int] = []
    for node in tree.lineage(leaf):
        is_shared = len(tree.kept_children(node.number)) > bool(gone)
        if node.parent is None or is_shared or node.number in spared:
            break
        gone.append(node.number)
    return gone


def unique_tokens(tree: SearchTree, leaf: int) -> int:
    """Return how many tokens a leaf has that no other leaf has."""
    return sum(tree.num_own_tokens(number) for number in released(tree, leaf))


def best_leaves(tree: SearchTree, leaves: Sequence[Node], width: int, token_cost: float) -> list[Node]:
    """Choose `width` leaves, one after the other, each the best in score minus what its KV adds to those before it.

    Args:
        tree: The tree.
        leaves: The candidates.
        width: How many to choose at most.
        token_cost: What one token that no chosen leaf has yet costs, in units of score. ETS's lambda_b, for tokens.
    """
    chosen: list[Node] = []
    held = {0}
    left = list(leaves)

    def worth(leaf: Node) -> tuple[float, int]:
        fresh = (node.number for node in tree.lineage(leaf.number) if node.number not in held)
        return leaf.score - token_cost * sum(map(tree.num_own_tokens, fresh)), -leaf.number

    while left and len(chosen) < width:
        leaf = max(left, key=worth)
        left.remove(leaf)
        chosen.append(leaf)
        held.update(node.number for node in tree.lineage(leaf.number))
    return chosen


def all_but(tree: SearchTree, kept: Sequence[Node]) -> list[int]:
    """Return the kept nodes that none of `kept` continues, the root and the best node excepted."""
    needed = {0, *(node.number for leaf in (*kept, tree.best) for node in tree.lineage(leaf.number))}
    return [node.number for node in tree.kept if node.number not in needed]


def make_room(tree: SearchTree, nbytes: int, spared: Collection[int] = ()) -> list[int]:
    """Choose nodes to let go of until the tree takes at most `nbytes`: the least reward per unique byte goes first.

    The best node and those in `spared` stay, and so the tree may still be larger afterwards.
    """
    stay = {0, tree.best.number, *spared}
    gone: list[int] = []
    while tree.nbytes > nbytes:
        candidates = [leaf for leaf in tree.leaves if leaf.number not in stay]
        if not candidates:
            break
        freed = _least_worth(tree, candidates, stay)
        gone += freed
        tree = tree.with_states(freed, NodeState.PRUNED)
    return gone


def _least_worth(tree: SearchTree, leaves: Sequence[Node], stay: Collection[int]) -> list[int]:
    """Return what goes with the leaf that has the least reward for its bytes; of equals, with the youngest."""
    rewards = tree.rewards()

    def worth(leaf: Node) -> tuple[float, int]:
        nbytes = sum(map(tree.own_nbytes, released(tree, leaf.number, stay)))
        is_spent = leaf.state is NodeState.EXPANDED  # all of its children are gone: nothing can come of it
        return -1.0 if is_spent else rewards[leaf.number] / nbytes, -leaf.number

    return released(tree, min(leaves, key=worth).number, stay)
