"""Continues several branches until each has ended, a token a pass.

Knows nothing of sessions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentmem.batch.feeder import Feeder
from agentmem.batching import BatchMode, Sampler
from agentmem.state import BranchState

OnToken = Callable[[str, int], object]
"""Is given a branch's key and each token that was chosen for it; true ends the branch."""


@dataclass(slots=True)
class Continued:
    """One branch that is being continued.

    Attributes:
        key: Its name in the batch.
        state: The branch.
        sampler: Chooses its tokens.
        tokens: Those chosen so far.
    """

    key: str
    state: BranchState
    sampler: Sampler
    tokens: list[int] = field(default_factory=list)


def generate(feeder: Feeder, branches: Sequence[Continued], on_token: OnToken | None) -> None:
    """Continue every branch until it ends; the last token of each is pending afterwards."""
    if feeder.mode is BatchMode.ONE_BY_ONE:
        for branch in branches:  # each to its end, so that its KV moves to where the model reads it once
            _generate(feeder, [branch], on_token)
    elif branches:
        _generate(feeder, branches, on_token)


def next_logits(feeder: Feeder, states: Sequence[BranchState]) -> list[Tensor]:
    """Feed what is pending; return the logits `[V]` after each branch's last token."""
    last = [(state, feeder.last_logits(state)) for state in states]
    known = {id(state): logits.unsqueeze(0) for state, logits in last if logits is not None}
    idle = [state for state in states if not state.num_pending and id(state) not in known]
    known |= _repeated(feeder, idle)
    fed = [state for state in states if id(state) not in known]
    found = feeder.feed(fed, [state.pending for state in fed], [1] * len(fed)) if fed else []
    known |= {id(state): logits for state, logits in zip(fed, found, strict=True)}
    return [known[id(state)][-1] for state in states]


def _generate(feeder: Feeder, branches: Sequence[Continued], on_token: OnToken | None) -> None:
    running = list(branches)
    logits = next_logits(feeder, [branch.state for branch in running])
    while True:
        running = _choose(running, logits, on_token)
        if not running:
            return
        states = [branch.state for branch in running]
        found = feeder.feed(states, [state.pending for state in states], [1] * len(states))
        logits = [each[-1] for each in found]


def _choose(branches: Sequence[Continued], logits: Sequence[Tensor], on_token: OnToken | None) -> list[Continued]:
    """Choose a token for every branch; return those that go on."""
    if all(branch.sampler.is_greedy for branch in branches):
        tokens = torch.stack(list(logits)).argmax(-1).tolist()
    else:
        tokens = [branch.sampler.choose(row) for branch, row in zip(branches, logits, strict=True)]
    running = []
    for branch, token in zip(branches, tokens, strict=True):
        branch.state.extend([token])
        branch.tokens.append(token)
        is_over = branch.sampler.accept(token)
        is_over = bool(on_token(branch.key, token)) or is_over if on_token is not None else is_over
        if not is_over:
            running.append(branch)
    return running


def _repeated(feeder: Feeder, states: Sequence[BranchState]) -> dict[int, Tensor]:
    """Return the last token's logits of branches that were fed all they have, as far as each is asked alone.

    Branches that stand at the same place are asked once. Others give their last token's KV up, and are fed it together.
    """
    places: dict[tuple[int, int], list[BranchState]] = {}
    for state in states:
        places.setdefault((id(state.cursor.run), state.num_computed), []).append(state)
    is_alone = feeder.mode is BatchMode.ONE_BY_ONE or len(places) == 1
    found: dict[int, Tensor] = {}
    for standing in places.values():
        if is_alone or standing[0].spec.states:
            logits = standing[0].last_logits()
            found |= {id(state): logits for state in standing}
        else:
            for state in standing:
                state.truncate_kv(state.num_computed - 1)
    return found
