"""Threads that give way: what they do is wanted some time, and whoever works for a caller comes first."""

import contextlib
import os
import threading

_NICENESS = 19
"""The lowest priority of Linux that still gets a share: on busy cores a hundredth or so."""


def give_way() -> None:
    """Let the calling thread run where nobody else wants to, for the rest of its life. Only Linux has it per thread."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
