"""All nodes of a search, frozen: who continues whom, what each is worth, and what its KV takes.

Everything a policy may know. Nothing here changes, and nothing is random: ties go to the older node.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence

from agentmem.search.node import Node, NodeState


class SearchTree:
    """The nodes of a search at one moment. A node's ancestors are kept as long as it is.

    Attributes:
        nodes: All nodes there ever were, by number.
    """

    def __init__(self, nodes: Sequence[Node], *, token_nbytes: int = 1, state_nbytes: int = 0) -> None:
        """Take over the nodes.

        Args:
            nodes: All nodes, by number: a parent stands before its children.
            token_nbytes: Bytes of KV that one token takes.
            state_nbytes: Bytes of the layer states that a checkpoint keeps.
        """
        self.nodes = tuple(nodes)
        self._token_nbytes = token_nbytes
        self._state_nbytes = state_nbytes
        self._children: list[list[Node]] = [[] for _ in self.nodes]
        for node in self.nodes:
            if node.parent is not None:
                self._children[node.parent].append(node)

    @property
    def root(self) -> Node:
        """Where the search began."""
        return self.nodes[0]

    @property
    def kept(self) -> list[Node]:
        """The nodes whose KV is kept."""
        return [node for node in self.nodes if node.is_kept]

    @property
    def done(self) -> list[Node]:
        """The answers that are kept."""
        return [node for node in self.nodes if node.state is NodeState.DONE]

    @property
    def leaves(self) -> list[Node]:
        """The kept nodes that no kept one continues, but for the root."""
        return [node for node in self.kept[1:] if not self.kept_children(node.number)]

    @property
    def best(self) -> Node:
        """The answer with the highest score; without one, the node with the highest score; without any, the root."""
        answers = self.done or self.kept
        return max(answers, key=lambda node: (node.score, -node.number))

    def open_nodes(self, max_depth: int | None) -> list[Node]:
        """Return the nodes that may be expanded, if children at depth `max_depth` are the deepest allowed."""
        is_deep = math.inf if max_depth is None else max_depth
        return [node for node in self.nodes if node.state is NodeState.OPEN and node.depth < is_deep]

    def children(self, number: int) -> list[Node]:
        """Return all nodes that continue one, in the order of their indexes."""
        return list(self._children[number])

    def kept_children(self, number: int) -> list[Node]:
        """Return the kept nodes that continue one."""
        return [node for node in self._children[number] if node.is_kept]

    def lineage(self, number: int) -> Iterator[Node]:
        """Yield a node, its parent, and so on up to the root."""
        parent: int | None = number
        while parent is not None:
            yield self.nodes[parent]
            parent = self.nodes[parent].parent

    def path(self, number: int) -> tuple[int, ...]:
        """Return the indexes that lead from the root to a node."""
        return tuple(node.index for node in self.lineage(number) if node.parent is not None)[::-1]

    # -- what it is worth

    def rewards(self) -> list[float]:
        """Return the score of every node, scaled to [0, 1] over the scores there are; 0 for a dead node and the root.

        Source: MuZero (arXiv 1911.08265), appendix B: it makes one exploration constant good for any scale of scores.
        """
        scores = [node.score for node in self.nodes if math.isfinite(node.score)]
        low, high = min(scores, default=0.0), max(scores, default=0.0)
        width = high - low

        def reward(score: float) -> float:
            return 0.0 if not math.isfinite(score) else (score - low) / width if width else 1.0

        return [reward(node.score) for node in self.nodes]

    def visits(self) -> list[int]:
        """Count, for every node, the nodes below it that were scored, and itself: how often it was tried."""
        visits = [1] * len(self.nodes)
        for node in reversed(self.nodes[1:]):
            visits[node.parent or 0] += visits[node.number]
        return visits

    def values(self) -> list[float]:
        """Return, for every node, the mean reward of itself and of all below it."""
        totals = self.rewards()
        for node in reversed(self.nodes[1:]):
            totals[node.parent or 0] += totals[node.number]
        return [total / visits for total, visits in zip(totals, self.visits(), strict=True)]

    # -- what it takes

    def num_own_tokens(self, number: int) -> int:
        """Return the tokens that a node has and its parent has not."""
        node = self.nodes[number]
        return node.num_tokens - (0 if node.parent is None else self.nodes[node.parent].num_tokens)

    def own_nbytes(self, number: int) -> int:
        """Return the bytes of KV that a node adds to its parent's."""
        return self.num_own_tokens(number) * self._token_nbytes + self._state_nbytes

    @property
    def num_spent(self) -> int:
        """Tokens that all nodes took to make: those fed, or a node's own where their KV was found in the store.

        Does not depend on what else the store has, as the tokens fed do: a search that was killed finds there what it
        makes again.
        """
        below = self.nodes[1:]
        return sum(max(node.num_fed, self.num_own_tokens(node.number)) for node in below)

    @property
    def nbytes(self) -> int:
        """Bytes of KV of the kept nodes, the root's included: what they share is counted once."""
        return sum(self.own_nbytes(node.number) for node in self.kept)

    def with_states(self, numbers: Collection[int], state: NodeState) -> "SearchTree":
        """Return the tree with some of its nodes in another state."""
        changed = [dataclasses.replace(n, state=state) if n.number in numbers else n for n in self.nodes]
        return self.with_nodes(changed)

    def with_nodes(self, nodes: Sequence[Node]) -> "SearchTree":
        """Return a tree of other nodes, of the same model."""
        return SearchTree(nodes, token_nbytes=self._token_nbytes, state_nbytes=self._state_nbytes)
