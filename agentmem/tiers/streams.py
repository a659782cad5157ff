"""Orders what several threads do to one buffer on a device that works asynchronously; a CPU does all in order.

Each thread's work goes to its own current stream, and streams do not wait for each other by themselves: who reads what
another thread wrote, or writes where another one read, waits for an event that the other has noted.
"""

import threading

import torch


class Order:
    """What was done to a buffer last, by whichever thread. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        """Nothing was done yet."""
        self._device = device if device.type == "cuda" else None
        self._lock = threading.Lock()
        self._events: list[torch.cuda.Event] = []

    def note(self) -> None:
        """Note what this thread has handed to the device so far, for `follow`. Does not wait."""
        if self._device is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            with self._lock:
                self._events = [each for each in self._events if not each.query()] + [event]

    def follow(self) -> None:
        """Let what this thread does next on the device come after all that was noted. Does not wait on the CPU."""
        if self._device is not None:
            with self._lock:
                events = list(self._events)
            for event in events:
                torch.cuda.current_stream(self._device).wait_event(event)
