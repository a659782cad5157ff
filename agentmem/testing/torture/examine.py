"""Open a store that something was done to, and say what of its promises is broken. Leaves it open to nobody.

Logits are compared with a run of the model from nothing, so the model should be tiny and in fp32.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from agentmem.check import check
from agentmem.errors import AgentMemError
from agentmem.session import Session
from agentmem.store import Store
from agentmem.testing.torture.promises import Promise
from agentmem.tiers.disk import DiskTier

TOLERANCE = 1e-4


@dataclass(slots=True, kw_only=True)
class Findings:
    """What was found wrong; all lists are empty for a store that kept its word.

    Attributes:
        lost: Promises that are not kept: a session or checkpoint is gone, or has lost its KV.
        wrong: Tokens or logits that are not the right ones.
        problems: What `check` says, before and after the store was used.
        refused: Errors of a store or session that cannot be opened or used.
        num_kept: Promises that were looked at and kept.
    """

    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    num_kept: int = 0

    @property
    def faults(self) -> list[str]:
        """All that is wrong, in words."""
        return [*self.refused, *self.lost, *self.wrong, *self.problems]


def examine(
    open_store: Callable[[], Store], model: PreTrainedModel, promises: Sequence[Promise], *, seed: int = 0
) -> Findings:
    """Open the store, check it with all its data, compare every promise, go on with every session, check again."""
    findings = Findings()
    try:
        with open_store() as store:
            findings.problems += look(store)
            for name in sorted({promise.session for promise in promises}):
                of_session = [promise for promise in promises if promise.session == name]
                _examine_session(store, model, name, of_session, findings, random.Random(seed))
            findings.problems += look(store)
    except AgentMemError as error:
        findings.refused.append(f"{type(error).__name__}: {error}")
    return findings


def look(store: Store) -> list[str]:
    """Return what `check --read-data` finds wrong."""
    report = check(store.environment, DiskTier(store.environment), read_data=True)
    return [f"{problem.record}: {problem.kind}: {problem.advice}" for problem in report.problems]


def _examine_session(
    store: Store,
    model: PreTrainedModel,
    name: str,
    promises: Sequence[Promise],
    findings: Findings,
    rng: random.Random,
) -> None:
    try:
        session = store.resume(name)
    except AgentMemError as error:
        findings.lost.append(f"session {name}: {type(error).__name__}: {error}")
        return
    for promise in promises:
        _compare(session, promise, findings)
    for branch in rng.sample(session.branches, k=min(2, len(session.branches))):
        session.switch(branch)
        findings.wrong += go_on(session, model, [rng.randrange(1, 500) for _ in range(rng.randrange(1, 30))])


def _compare(session: Session, promise: Promise, findings: Findings) -> None:
    known = {checkpoint.checkpoint_id.hex(): checkpoint for checkpoint in session.checkpoints}
    if not promise.checkpoint:
        findings.num_kept += 1
        return
    checkpoint = known.get(promise.checkpoint)
    if checkpoint is None or not checkpoint.has_kv:
        what = "is gone" if checkpoint is None else "has no KV"
        findings.lost.append(f"promise {promise.number}: checkpoint {promise.checkpoint} {what}")
        return
    tokens = tuple(session.ledger.states.state_of(checkpoint.checkpoint_id).tokens.slice())
    if tokens != promise.tokens:
        findings.wrong.append(f"promise {promise.number}: checkpoint {promise.checkpoint} has other tokens")
        return
    findings.num_kept += 1


def go_on(session: Session, model: PreTrainedModel, tokens: Iterable[int]) -> list[str]:
    """Continue the active branch with `tokens`; return what is not as after a run from nothing."""
    wrong = []
    branch = session.active
    known = [*branch.tokens, *tokens]
    logits = branch.forward(known[branch.num_tokens :])[-1]
    branch.checkpoint("went on")
    if branch.tokens != known:
        wrong.append(f"branch {session.name}/{branch.name} has other tokens than it was given")
    if not torch.allclose(logits, cold_logits(model, known), atol=TOLERANCE):
        wrong.append(f"branch {session.name}/{branch.name} has other logits than a run from nothing")
    return wrong


def cold_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits `[V]` of the last token after a run from nothing."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0, -1]
    return logits
