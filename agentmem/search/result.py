"""What a search found, and why it ended."""

from dataclasses import dataclass

from agentmem.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found, over all the processes that worked on it.

    Attributes:
        name: The search's name.
        best: The name of the best branch: the answer with the highest score; without an answer, the node with the
            highest score; when there is no node, the branch where the search began.
        score: Its score; -inf when there is no node.
        is_done: Whether it is an answer.
        stopped: Why the search ended, in a word of `reasons.STOPS`.
        num_steps: Steps.
        num_fed: Tokens that the model was fed by them.
        num_nodes: Nodes that were made, the root and the dead ones included.
        num_dead: Nodes that were given up at once.
        nbytes: Bytes of KV of the kept nodes now: tokens times the bytes of a token, what they share counted once.
        peak_nbytes: The most that `nbytes` ever was, with the children of a step before any of them was let go of.
    """

    name: str
    best: str
    score: float
    is_done: bool
    stopped: Reason
    num_steps: int
    num_fed: int
    num_nodes: int
    num_dead: int
    nbytes: int
    peak_nbytes: int
