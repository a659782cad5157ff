"""Threads that give way: what they do is wanted some time, and whoever works for a caller comes first."""

import contextlib
import os
import threading

LEAST = 19
"""Linux's lowest priority: on busy cores a hundredth or so of the time."""

LESS = 5
"""A third of the time that others get, on busy cores."""


def give_way(niceness: int = LEAST) -> None:
    """Let the calling thread stand behind others for the rest of its life. Only Linux has priorities of threads."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
