"""How much a search may take, and what of a step it can still afford. Pure functions of numbers and of the tree."""

from collections.abc import Sequence
from dataclasses import dataclass

from agentmem.search.node import Expansion, require


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bounds on a whole search, over all the processes that worked on it. None: no bound.

    A step with `Sampling` begins only if it cannot go beyond a bound; children that would are left out. What an
    `expand` of the user's takes is known when it has returned: the search stops after the step that used the budget up.

    Attributes:
        steps: Steps: of beam search, levels; of the other policies, expansions.
        tokens: Tokens that the model is fed by steps, scoring included; a node's tokens whose KV was found in the store
            count too. The context before the root does not.
        nbytes: Bytes of KV that the kept nodes hold, the root's context included; what they share counts once. When a
            step would not fit, leaves with the least reward for the bytes that they alone hold are let go of first.
    """

    steps: int | None = None
    tokens: int | None = None
    nbytes: int | None = None

    def __post_init__(self) -> None:
        """Refuse bounds below zero."""
        require("Budget.steps", self.steps, 0)
        require("Budget.tokens", self.tokens, 0)
        require("Budget.nbytes", self.nbytes, 0)

    @property
    def is_bounded(self) -> bool:
        """Whether it ends every search."""
        return self.steps is not None or self.tokens is not None


UNLIMITED = Budget()
"""No bound at all."""


def afford(expansions: Sequence[Expansion], num_children: int) -> list[Expansion]:
    """Return the expansions, in order, with `num_children` children at most among them."""
    kept: list[Expansion] = []
    for expansion in expansions:
        taken = min(expansion.num_children, num_children)
        if taken > 0:
            kept.append(Expansion(expansion.node, taken))
            num_children -= taken
    return kept


def count_children(expansions: Sequence[Expansion]) -> int:
    """Return how many children the expansions make."""
    return sum(expansion.num_children for expansion in expansions)
