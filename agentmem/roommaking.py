"""Making room on the device: branches leave it, those first that are needed last."""

from collections.abc import Callable, Iterable

from agentmem._lmdb import Environment
from agentmem.runtime import Runtime
from agentmem.session import Session
from agentmem.tiers.policy import eviction_order


class RoomMaker:
    """Frees memory of the device, of whichever session has it."""

    def __init__(
        self, runtime: Runtime, environment: Environment, open_sessions: Callable[[], Iterable[Session]]
    ) -> None:
        """Serve one open store."""
        self._runtime = runtime
        self._environment = environment
        self._open_sessions = open_sessions

    def make_room(self, nbytes: int) -> None:
        """Move branches off the device, the one that is needed last first, until `nbytes` are free."""
        goal = self._runtime.device.nbytes - nbytes
        sessions = list(self._open_sessions())
        current = [session for session in sessions if session.is_in_use]
        candidates = [
            candidate for session in sessions for candidate in session.candidates(is_current=session in current)
        ]
        for session, name in eviction_order(candidates):
            if self._runtime.device.nbytes <= goal:
                return
            if session.evict(name):
                self._runtime.counters.add("branches_evicted")
            if self._runtime.device.nbytes > goal:
                self._free_saved()
        if self._runtime.device.nbytes > goal:
            self._free_saved()

    def _free_saved(self) -> None:
        """Wait until the disk has what it was given, and what was cut off meanwhile: until then it is on the device."""
        self._runtime.blocks.flush(is_patient=False)  # the caller has a workspace, which a patient other may want
        self._environment.flush()
