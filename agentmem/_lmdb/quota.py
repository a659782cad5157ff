"""The disk budget: live bytes of the data file, counted inside of each operation that changes them, before its commit.

Live are the pages that tables hold (rows, blocks, their copies and trees), the list of free pages and the two first
pages of the file. Pages in that list are not live: later writes use them again. Knows nothing of what is stored.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from agentmem import _directory
from agentmem._lmdb.transaction import ReadTransaction, WriteTransaction
from agentmem._writer import Level, Operation, Outcome
from agentmem.errors import StorageFullError

_RESERVED_PART = 16
_MAX_RESERVED_NBYTES = 16 << 20
_NUM_META_PAGES = 2
_SLACK_PAGES = 8
"""By so much the list of free pages may grow in a commit, which writes it last. An operation frees a few dozen pages
by copying what it changes, 8 bytes of the list each; one that frees thousands makes the store smaller by far more."""

_NUM_TRIES = 4
"""How often room is made for one write: other threads queue blocks meanwhile."""

_SMALL_NBYTES = 64 << 10
"""About the most that operations without blocks add, one by itself and those that are queued."""

_TREES_NBYTES, _TREES_PART = 64 << 10, 16
"""What is queued may add so much more to LMDB's trees: room is looked for before it is needed, not too late."""


class Quota:
    """Holds the live bytes of one data file within a budget.

    KV may take all but a sixteenth of it, 16 MiB at most: tokens, checkpoints and names still find room when KV does
    not. An operation that leaves fewer live bytes than it found is never refused.

    Attributes:
        budget_nbytes: Most live bytes; None: no limit.
        make_room: Called with the bytes that are missing, in the thread that is about to submit a write; removes what
            may be removed.
    """

    def __init__(self, data_file: Path, page_nbytes: int) -> None:
        """Watch over the file of an open environment, without a limit yet."""
        self.budget_nbytes: int | None = None
        self.make_room: Callable[[int], None] = lambda _missing_nbytes: None
        self._data_file = data_file
        self._page_nbytes = page_nbytes
        self._overhead_nbytes = 0
        self._live_nbytes = 0
        self._writer_id: int | None = None
        self._relieving = threading.local()

    def hold(self, budget_nbytes: int | None, txn: ReadTransaction) -> None:
        """Keep to a budget from now on. A file that is larger already may shrink or stay, not grow."""
        self._live_nbytes = self.live_nbytes(txn)
        self.budget_nbytes = budget_nbytes

    def live_nbytes(self, txn: ReadTransaction) -> int:
        """Return the live bytes of the file, as a transaction sees it."""
        num_pages = txn.num_pages() + _directory.free_list_pages(self._data_file) + _NUM_META_PAGES
        return num_pages * self._page_nbytes

    def make_ready(self, nbytes: int, queued_nbytes: Callable[[], int]) -> None:
        """Call `make_room` when `nbytes` of blocks (0: small records) would not fit beside what is queued.

        Raises:
            StorageFullError: There are blocks, and no room for them.
        """
        if self.budget_nbytes is None:
            return
        if nbytes > self._limit(nbytes):  # not even an empty store would hold it
            raise self._refusal(nbytes)

        def wanted_nbytes() -> int:
            queued = queued_nbytes()
            return nbytes + queued + queued // _TREES_PART + _TREES_NBYTES if nbytes else _SMALL_NBYTES

        if not self._has_room(wanted_nbytes, self._limit(nbytes)) and nbytes:
            raise self._refusal(nbytes)

    def _has_room(self, wanted_nbytes: Callable[[], int], limit_nbytes: int) -> bool:
        """Say whether there is room, after making some where there was none; nobody relieves a relief."""
        if getattr(self._relieving, "is_on", False) or threading.get_ident() == self._writer_id:
            return True
        for _ in range(_NUM_TRIES):
            missing_nbytes = self._live_nbytes + wanted_nbytes() - limit_nbytes
            if missing_nbytes <= 0:
                return True
            self._relieving.is_on = True
            try:
                self.make_room(missing_nbytes)
            finally:
                self._relieving.is_on = False
        # What was queued has been written meanwhile, and is counted.
        return self._live_nbytes + wanted_nbytes() <= limit_nbytes

    def begin(self, txn: ReadTransaction) -> None:
        """Count what is live when the writer begins a group."""
        self._writer_id = threading.get_ident()
        if self.budget_nbytes is not None:
            num_pages = _directory.free_list_pages(self._data_file) + _NUM_META_PAGES + _SLACK_PAGES
            self._overhead_nbytes = num_pages * self._page_nbytes
            self._live_nbytes = txn.num_pages() * self._page_nbytes + self._overhead_nbytes

    def require(self, nbytes: int) -> None:
        """Refuse an operation that cannot fit, before anything of it is done.

        Raises:
            StorageFullError: It adds more than the budget has left.
        """
        if self.budget_nbytes is not None and nbytes and self._live_nbytes + nbytes > self._limit(nbytes):
            raise self._refusal(nbytes)

    def check(self, txn: ReadTransaction, nbytes: int) -> None:
        """Count what is live after an operation, while it can still be undone.

        Raises:
            StorageFullError: It is more than the budget, and more than before.
        """
        if self.budget_nbytes is None:
            return
        live_nbytes = txn.num_pages() * self._page_nbytes + self._overhead_nbytes
        if live_nbytes > self._limit(nbytes) and live_nbytes > self._live_nbytes:
            raise self._refusal(max(nbytes, live_nbytes - self._live_nbytes))
        self._live_nbytes = live_nbytes

    def _limit(self, nbytes: int) -> int:
        """Return how many bytes may be live after an operation: fewer when it adds blocks than for small records."""
        budget = self.budget_nbytes or 0
        return budget - min(budget // _RESERVED_PART, _MAX_RESERVED_NBYTES) if nbytes else budget

    def _refusal(self, nbytes: int) -> StorageFullError:
        return StorageFullError(
            f"no room for {nbytes:,} bytes: {self._live_nbytes:,} bytes of the disk budget of "
            f"{self.budget_nbytes:,} are in use by what branches and pins hold, and a part is kept for tokens. Drop "
            f"branches, remove sessions, `agentmem prune`, or raise Config.disk_budget_nbytes; nothing stored was lost"
        )


def require_order(operations: Sequence[Operation[WriteTransaction]], outcomes: Sequence[Outcome]) -> None:
    """Undo a group of which a QUEUED operation found no room: what stands behind it must not come before it.

    Raises:
        StorageFullError: There was one, and others beside it.
    """
    for operation, outcome in zip(operations, outcomes, strict=True):
        if operation.level is Level.QUEUED and isinstance(outcome.error, StorageFullError) and len(operations) > 1:
            raise outcome.error
