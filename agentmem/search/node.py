"""A node of a search: a checkpoint with a score. Knows nothing of sessions, nor of how a search goes on."""

from dataclasses import dataclass
from enum import StrEnum

from agentmem.errors import InvalidInputError


class NodeState(StrEnum):
    """What may still become of a node."""

    OPEN = "open"
    """It may be expanded."""
    EXPANDED = "expanded"
    """It has children, or was found to have none."""
    DONE = "done"
    """It is an answer; nothing is added to it."""
    DEAD = "dead"
    """It scored -inf, or added no token: it was given up at once and has no checkpoint."""
    PRUNED = "pruned"
    """Its branch was dropped to make room for better ones."""


_KEPT = frozenset({NodeState.OPEN, NodeState.EXPANDED, NodeState.DONE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node, as policies see it.

    Attributes:
        number: Its place in the order in which nodes were made; the root is 0. Its branch is called `SEARCH/NUMBER`.
        parent: The number of the node it continues; None for the root.
        index: Which child of its parent it is, from 0.
        depth: Number of nodes above it.
        checkpoint_id: Its checkpoint; b"" for a dead one.
        score: What the user's `score` said; -inf for the root, which is not asked about.
        num_tokens: Tokens from the session's root to here.
        num_fed: Tokens that the model was fed to make it.
        step: The step that made it, from 1; 0 for the root.
        state: What may still become of it.
    """

    number: int
    parent: int | None
    index: int
    depth: int
    checkpoint_id: bytes
    score: float
    num_tokens: int
    num_fed: int
    step: int
    state: NodeState

    @property
    def is_kept(self) -> bool:
        """Whether its KV is kept for the search."""
        return self.state in _KEPT


@dataclass(frozen=True, slots=True)
class Expansion:
    """A node to be expanded.

    Attributes:
        node: Its number.
        num_children: How many children to make. An `expand` that returns continuations makes as many as it returns.
    """

    node: int
    num_children: int


def require(name: str, value: float | None, lowest: float) -> None:
    """Raise InvalidInputError unless an option is None or at least `lowest`."""
    if value is not None and not value >= lowest:
        raise InvalidInputError(f"{name} must be at least {lowest}; found {value!r}")
