"""Finds what a client should mend: text that changes where everything behind it must be computed again.

Remembers the last difference of each branch, in memory only.
"""

import logging

from agentmem.reasons import Reason
from agentmem.stats import ChatDifference, Finding

logger = logging.getLogger(__name__)

_NEAR = 0.01
"""Two differences this far apart, as a share of the tokens before them, are at the same place."""

_NEAR_TOKENS = 4
"""Or so many tokens: a clock's seconds and minutes."""

_VOLATILE = frozenset({Reason.SYSTEM_CHANGED, Reason.MESSAGE_CHANGED})

_PUT_LAST = (
    "put what changes every time last, into the newest user message, or send it as a message of its own: what comes "
    "before it is reused then"
)


class LintMemory:
    """What a session remembers of the lists that were sent to its branches."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._last: dict[str, ChatDifference] = {}

    def look(self, branch: str, difference: ChatDifference) -> tuple[Finding, ...]:
        """Return what to mend, given where a list differed from its branch; remember it for the next time."""
        before = self._last.get(branch)
        self._last[branch] = difference
        found = []
        if difference.change is Reason.SYSTEM_CHANGED:
            found.append(_finding(Reason.SYSTEM_CHANGED, difference, f"the system message has changed; {_PUT_LAST}"))
        if before is not None and _is_same_place(before, difference):
            found.append(_finding(Reason.WANDERING, difference, f"lists differ here again and again; {_PUT_LAST}"))
        for finding in found:
            # The text is the user's: it is in the report, not in the log.
            logger.warning(
                "branch %r: %s in message %d, token %d: the tokens behind it are computed again",
                branch,
                finding.lint,
                finding.message,
                difference.token,
            )
        return tuple(found)


def template_finding() -> Finding:
    """Return what to say when a branch was written by another chat template."""
    return Finding(
        lint=Reason.TEMPLATE_CHANGED,
        message=0,
        text="",
        old_text="",
        advice="the branch was written with another chat template: its messages stay as they are, new ones are "
        "rendered with this one; send the whole list to have them all rendered again",
    )


def _finding(lint: Reason, difference: ChatDifference, advice: str) -> Finding:
    return Finding(lint=lint, message=difference.message, text=difference.new, old_text=difference.old, advice=advice)


def _is_same_place(before: ChatDifference, now: ChatDifference) -> bool:
    """Say whether two lists differed from their branch at the same place, by text that never stays."""
    if now.change not in _VOLATILE or before.message != now.message or before.new == now.new:
        return False
    return abs(before.token - now.token) <= max(_NEAR_TOKENS, _NEAR * now.token)
