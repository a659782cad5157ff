"""The lossy codecs by name, for those who let a user choose one; `kv/quant.py` says what they do.

Knows nothing of tensors.
"""

import hashlib

LOSSY_CODECS = ("q1", "q2", "q3", "q4")
"""Codecs that do not give back every bit, the nearest to exact first."""

_TAG = b"agentmem/lossy/1"


def lossy_digest(codec: str) -> bytes:
    """Return what stands for a lossy codec in the names of KV that came through it: 32 bytes."""
    return hashlib.blake2b(_TAG + b"\0" + codec.encode(), digest_size=32).digest()
