"""Traces in the published shape of agent work: long sessions of short turns, tools, sub-agents and forks.

What is published: 33 turns in the middle session, 131 tokens of input for each of output, 94 % of the input repeated
(610 traces of Codex on SWE-bench Pro); sub-agents in 44 % of sessions, up to 180k tokens; tools take half of the time.
Sources: vLLM's blog on Mooncake Store (May 2026), vllm issue 57103, agentic-api issue 18. How the numbers below are
distributed around those figures is our choice. Seeded: the same arguments give the same trace.
"""

import itertools
import random

from agentmem.simulation.chain import Chain
from agentmem.simulation.trace import Announcement, Request, Trace

_SYSTEM_TOKENS = 9_000
_TASK_TOKENS = (6_000, 0.6)  # median, sigma of a lognormal distribution, here and below
_TURNS = (33, 0.45)
_HELPER_TURNS = (9, 0.4)
_FORK_TURNS = (6, 0.4)
_OUTPUT_TOKENS = (300, 0.7)
_RESULT_TOKENS = (900, 0.9)
_MAX_TOKENS = 180_000
_MAX_TURNS = 120
_P_HELPERS, _P_FORK = 0.44, 0.15
_DECODE_TOK_S = 50.0
_HELPER_TOOL = "agent"
_TOOLS = {  # weight, then seconds: median and sigma
    "read": (40, 0.3, 0.5),
    "edit": (20, 0.5, 0.5),
    "shell": (20, 4.0, 1.0),
    "test": (13, 22.0, 0.8),
    "web": (5, 3.0, 0.8),
    "person": (2, 90.0, 1.0),
}
_WEIGHTS = [weight for weight, _, _ in _TOOLS.values()]


def agents(*, num_agents: int = 16, num_sessions: int = 48, block_size: int = 256, seed: int = 0) -> Trace:
    """Return sessions of agents that work side by side, each on one session after the other.

    Args:
        num_agents: Agents at a time.
        num_sessions: Sessions of all of them.
        block_size: Tokens of a block.
        seed: Of what is left to chance.
    """
    chance = random.Random(seed)
    system = Chain(itertools.count(), block_size)
    system.grow(_SYSTEM_TOKENS)
    free_s = [agent * 5.0 for agent in range(num_agents)]
    requests: list[Request] = []
    for number in range(num_sessions):
        agent = min(range(num_agents), key=free_s.__getitem__)
        session = _Session(f"session-{number}", system, chance)
        free_s[agent] = session.run(free_s[agent])
        requests += session.requests
    requests.sort(key=lambda request: request.time_s)
    return Trace(tuple(requests), block_size)


class _Session:
    """One task: turns with tools between them, and perhaps helpers and a fork."""

    def __init__(self, name: str, system: Chain, chance: random.Random) -> None:
        self.requests: list[Request] = []
        self._name = name
        self._system = system
        self._chance = chance
        self._num_helpers = 0

    def run(self, now_s: float) -> float:
        """Make all requests from `now_s` on, and return when the session is over."""
        chain = self._prompt()
        num_turns = min(self._count(_TURNS), _MAX_TURNS)
        num_first = self._chance.randint(1, num_turns)
        helpers_at = self._chance.randint(1, num_first) if self._chance.random() < _P_HELPERS else 0
        now_s = self._turns(self._name, chain, now_s, num_first, helpers_at=helpers_at)
        if self._chance.random() >= _P_FORK:
            return self._turns(self._name, chain, now_s, max(1, num_turns - num_first), is_last=True)
        forks = {f"{self._name}/{letter}": chain.fork() for letter in "ab"}
        num_each = self._count(_FORK_TURNS)
        now_s = max([self._turns(branch, fork, now_s, num_each) for branch, fork in forks.items()])
        winner, loser = self._chance.sample(sorted(forks), 2)
        gone = (Announcement(loser, None), Announcement(self._name, None))
        return self._turns(
            winner, forks[winner], now_s, max(1, num_turns - num_first - num_each), is_last=True, announced=gone
        )

    def _turns(
        self,
        branch: str,
        chain: Chain,
        now_s: float,
        num_turns: int,
        *,
        is_last: bool = False,
        helpers_at: int = 0,
        announced: tuple[Announcement, ...] = (),
    ) -> float:
        """Make turns, each with a tool after it, and return when the branch would go on; the last may end it."""
        for turn in range(1, num_turns + 1):
            num_output = self._count(_OUTPUT_TOKENS)
            took_s = num_output / _DECODE_TOK_S
            if is_last and (turn == num_turns or chain.num_tokens >= _MAX_TOKENS):
                said = (*announced, Announcement(branch, None))
                self.requests.append(chain.turn(branch, now_s, num_output, announced=said))
                return now_s + took_s
            tool = _HELPER_TOOL if turn == helpers_at else self._chance.choices(list(_TOOLS), _WEIGHTS)[0]
            self.requests.append(chain.turn(branch, now_s, num_output, tool=tool, announced=announced))
            now_s += took_s
            now_s = self._helpers(now_s) if tool == _HELPER_TOOL else now_s + self._pause_s(tool)
            chain.grow(self._count(_RESULT_TOKENS))
            if chain.num_tokens >= _MAX_TOKENS and not is_last:
                break
            announced = ()
        return now_s

    def _helpers(self, now_s: float) -> float:
        """Let sub-agents work side by side on parts of the task, and return when all are done."""
        ends_s = []
        for _ in range(self._chance.randint(1, 3)):
            self._num_helpers += 1
            branch = f"{self._name}/helper-{self._num_helpers}"
            ends_s.append(self._turns(branch, self._prompt(), now_s, self._count(_HELPER_TURNS), is_last=True))
        return max(ends_s)

    def _prompt(self) -> Chain:
        chain = self._system.fork()
        chain.grow(self._count(_TASK_TOKENS))
        return chain

    def _pause_s(self, tool: str) -> float:
        _, median_s, sigma = _TOOLS[tool]
        return median_s * self._chance.lognormvariate(0.0, sigma)

    def _count(self, shape: tuple[int, float]) -> int:
        median, sigma = shape
        return max(1, round(median * self._chance.lognormvariate(0.0, sigma)))
