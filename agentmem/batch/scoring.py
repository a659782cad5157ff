"""What the model thinks of continuations: the probability of each token, for all of them in as few passes as can be.

Knows nothing of sessions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from agentmem.batch.feeder import Feeder
from agentmem.batch.report import Score
from agentmem.errors import InvalidInputError
from agentmem.state import BranchState


def score(states: Sequence[BranchState], continuations: Sequence[Sequence[int]]) -> list[Score]:
    """Return what each state's continuation is worth. The states are used up: give forks of what shall stay.

    Raises:
        InvalidInputError: A branch or a continuation is empty.
    """
    for state, tokens in zip(states, continuations, strict=True):
        state.check_not_empty()
        if not tokens:
            raise InvalidInputError(f"a continuation of {state.name!r} has no tokens, so there is nothing to score")
        if not state.num_pending:
            state.truncate_kv(state.num_computed - 1)
    if not states:
        return []
    fed = [[*state.pending, *tokens[:-1]] for state, tokens in zip(states, continuations, strict=True)]
    found = Feeder(states[0].runtime).feed(states, fed, [len(tokens) for tokens in continuations])
    return [_score(tokens, logits) for tokens, logits in zip(continuations, found, strict=True)]


def _score(tokens: Sequence[int], logits: Tensor) -> Score:
    """Read the tokens' log-probabilities off the logits `[T, V]` before each of them."""
    wanted = torch.tensor(list(tokens), device=logits.device)[:, None]
    logprobs = logits.float().log_softmax(-1).gather(-1, wanted)[:, 0]
    return Score(tuple(tokens), tuple(logprobs.tolist()))
