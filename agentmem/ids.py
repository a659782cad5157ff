"""The kinds of names and numbers, each with a type of its own, and how they print.

Knows nothing of what the names stand for.
"""

import secrets
from typing import NewType

from agentmem.errors import InvalidInputError

BlockHash = NewType("BlockHash", bytes)
"""32 bytes: names tokens (a block's tokens and all before them, under one model). Says what may be reused."""

BlockDigest = NewType("BlockDigest", bytes)
"""32 bytes: names the KV bytes of one block. Says what a checkpoint is."""

BlockId = NewType("BlockId", int)
"""A block's number in one store's `blocks` table."""

CheckpointId = NewType("CheckpointId", bytes)
"""16 random bytes: names one checkpoint."""

SessionId = NewType("SessionId", bytes)
"""8 random bytes: names one session for its whole life."""

Fingerprint = NewType("Fingerprint", bytes)
"""32 bytes: names everything about a model that makes KV differ."""

MIN_PREFIX_DIGITS = 4
"""Shortest prefix of hex digits that is accepted for an id."""


def new_checkpoint_id() -> CheckpointId:
    """Make a name for a new checkpoint."""
    return CheckpointId(secrets.token_bytes(16))


def new_session_id() -> SessionId:
    """Make a name for a new session."""
    return SessionId(secrets.token_bytes(8))


def short(name: bytes) -> str:
    """Print an id as people see it: its first 8 hex digits."""
    return name[:4].hex()


def parse_prefix(text: str) -> str:
    """Return the lower-case hex prefix in `text`.

    Raises:
        InvalidInputError: `text` is no prefix of hex digits, or shorter than `MIN_PREFIX_DIGITS`.
    """
    prefix = text.strip().lower()
    if len(prefix) < MIN_PREFIX_DIGITS or any(digit not in "0123456789abcdef" for digit in prefix):
        raise InvalidInputError(
            f"{text!r} is no id: give at least {MIN_PREFIX_DIGITS} hex digits, as printed by `agentmem log`"
        )
    return prefix
