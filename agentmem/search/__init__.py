"""Tree search over the branches of a session: best of n, beam, best-first, Monte Carlo.

Every node is a checkpoint with its score; what branches share is fed and kept once; a search that was killed goes on.
Importing this package imports neither torch nor a framework.
"""

from agentmem.search.budget import Budget
from agentmem.search.growth import Sampling, Together
from agentmem.search.node import Expansion, Node, NodeState
from agentmem.search.policies.base import Policy
from agentmem.search.result import SearchResult
from agentmem.search.runner import look, run, tree_of
from agentmem.search.tree import SearchTree
from agentmem.search.verbs import beam, best_first, best_of_n, mcts

__all__ = [
    "Budget",
    "Expansion",
    "Node",
    "NodeState",
    "Policy",
    "Sampling",
    "SearchResult",
    "SearchTree",
    "Together",
    "beam",
    "best_first",
    "best_of_n",
    "look",
    "mcts",
    "run",
    "tree_of",
]
