"""What every tier beyond this machine promises, as tests: subclass `RecordTierSuite`, give the hooks, run pytest.

Such a tier keeps records, not tensors, and may be slow, gone or wrong; whoever asks it verifies what it says.
"""

# ruff: noqa: S101 - these are tests

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentmem.errors import AgentMemError, ClosedError, TierUnavailableError
from agentmem.ids import BlockDigest, BlockHash
from agentmem.kv import record as record_format
from agentmem.kv.record import Record
from agentmem.testing.tier_suite import empty_like, make_block, make_record, same_bits
from agentmem.tiers.remote import RecordTier
from agentmem.tiers.sealing import verified

ABSENT = BlockDigest(bytes(32))
"""The digest of no block."""

BOUND_S = 20.0
"""Longest time that a call to a tier that does not answer may take here, on a loaded machine."""


def is_whole(data: bytes | None, digest: BlockDigest) -> bool:
    """Tell whether bytes are the record of the block `digest`, whole and undamaged."""
    if data is None:
        return False
    try:
        return verified(data).digest == digest
    except AgentMemError:
        return False


def holds(tier: RecordTier, record: Record) -> bool:
    """Tell whether a tier gives back a record byte for byte."""
    [data] = tier.fetch_many([record.digest])
    return data is not None and bytes(data) == record.data


class RecordTierSuite(ABC):
    """The conformance suite; subclasses give the three hooks."""

    @abstractmethod
    def open_place(self, path: Path) -> Iterator[Callable[[], RecordTier]]:
        """Yield what opens handles on one place, empty at first, that may use the directory `path`; then clean up.

        Each call opens another handle, as another machine would. The suite closes the handles.
        """

    @abstractmethod
    def damage(self, tier: RecordTier, digest: BlockDigest) -> None:
        """Change one byte in the middle of a block's record where the tier keeps it."""

    @abstractmethod
    def open_unreachable(self) -> RecordTier:
        """Open a handle on a place where nobody answers: opening succeeds, using does not."""

    @pytest.fixture
    def open_handle(self, tmp_path: Path) -> Iterator[Callable[[], RecordTier]]:
        """What opens handles on one place; all are closed in the end."""
        handles: list[RecordTier] = []
        for open_one in self.open_place(tmp_path / "place"):

            def open_and_note(open_one: Callable[[], RecordTier] = open_one) -> RecordTier:
                handles.append(open_one())
                return handles[-1]

            yield open_and_note
            for handle in handles:
                handle.close()

    @pytest.fixture
    def tier(self, open_handle: Callable[[], RecordTier]) -> RecordTier:
        """A handle on an empty place."""
        return open_handle()

    def test_a_record_tier_says_what_it_is(self, tier: RecordTier) -> None:
        """Reports print the name; whether a copy may be the last one decides what is deleted."""
        assert tier.name.isidentifier()
        assert tier.is_durable in {True, False}

    def test_an_empty_record_tier_holds_nothing(self, tier: RecordTier) -> None:
        """Not here is an answer, not an error."""
        assert tier.contains_many([ABSENT]) == [False]
        assert tier.fetch_many([ABSENT]) == [None]
        assert tier.find_many([BlockHash(bytes(32))]) == [None]

    def test_asking_for_nothing_gives_nothing(self, tier: RecordTier) -> None:
        """Callers need no special case."""
        assert tier.contains_many([]) == []
        assert tier.fetch_many([]) == []
        assert tier.find_many([]) == []
        assert tier.put_many([]) == []
        tier.remove_many([])

    def test_a_record_comes_back_byte_for_byte(self, tier: RecordTier) -> None:
        """And decodes to the same KV, under the same name."""
        record = make_record(1)
        out = empty_like(make_block(1))

        assert tier.put_many([record]) == [True]
        assert tier.contains_many([record.digest]) == [True]
        [data] = tier.fetch_many([record.digest])
        assert data == record.data
        assert record_format.unpack(data, out).digest == record.digest
        assert same_bits(make_block(1), out)

    def test_answers_are_in_the_order_of_the_questions(self, tier: RecordTier) -> None:
        """With absent blocks between, and one that is asked for twice."""
        first, second = make_record(1), make_record(2)
        tier.put_many([first, second])
        asked = [second.digest, ABSENT, first.digest, second.digest]

        assert tier.contains_many(asked) == [True, False, True, True]
        assert tier.fetch_many(asked) == [second.data, None, first.data, second.data]
        assert tier.find_many([second.block_hash, BlockHash(bytes(32)), first.block_hash]) == [
            second.digest,
            None,
            first.digest,
        ]

    def test_many_records_go_in_and_out_in_one_call(self, tier: RecordTier) -> None:
        """However the tier cuts the call into batches."""
        records = [make_record(seed) for seed in range(1, 101)]

        assert tier.put_many(records) == [True] * 100
        assert tier.fetch_many([record.digest for record in records]) == [record.data for record in records]

    def test_storing_a_record_twice_does_no_harm(self, tier: RecordTier) -> None:
        """In one call or in two: the digest names the bytes."""
        record = make_record(1)

        assert tier.put_many([record, record]) == [True, True]
        assert tier.put_many([record]) == [True]
        assert holds(tier, record)

    def test_a_block_is_found_by_its_tokens(self, tier: RecordTier) -> None:
        """Two machines that computed the same tokens may have other bytes: either will do."""
        one, other = make_record(1, name=7), make_record(2, name=7)
        tier.put_many([one])
        tier.put_many([other])

        [found] = tier.find_many([one.block_hash])

        assert found in {one.digest, other.digest}

    def test_another_handle_sees_what_one_stored(self, open_handle: Callable[[], RecordTier]) -> None:
        """This is what the tier is for."""
        here, there = open_handle(), open_handle()
        record = make_record(1)
        here.put_many([record])

        assert there.contains_many([record.digest]) == [True]
        assert there.find_many([record.block_hash]) == [record.digest]
        assert holds(there, record)

    def test_records_outlive_the_handle_that_stored_them(self, open_handle: Callable[[], RecordTier]) -> None:
        """A process ends; the tier does not."""
        here = open_handle()
        here.put_many([make_record(1)])
        here.close()

        assert holds(open_handle(), make_record(1))

    def test_a_removed_record_is_gone_and_no_other_is(self, tier: RecordTier) -> None:
        """Nor is it found by its tokens."""
        kept, gone = make_record(1), make_record(2)
        tier.put_many([kept, gone])

        tier.remove_many([gone.digest, ABSENT])

        assert tier.contains_many([kept.digest, gone.digest]) == [True, False]
        assert tier.fetch_many([gone.digest]) == [None]
        assert tier.find_many([gone.block_hash, kept.block_hash]) == [None, kept.digest]
        assert holds(tier, kept)

    def test_a_removed_record_can_be_stored_again(self, tier: RecordTier) -> None:
        """Removal leaves no trace."""
        record = make_record(1)
        tier.put_many([record])
        tier.remove_many([record.digest])

        assert tier.put_many([record]) == [True]
        assert holds(tier, record)
        assert tier.find_many([record.block_hash]) == [record.digest]

    def test_damaged_bytes_never_pass_for_the_block(self, tier: RecordTier) -> None:
        """They are absent or fail their checks; and once removed and stored again, the block is whole."""
        good, bad = make_record(1), make_record(2)
        tier.put_many([good, bad])
        self.damage(tier, bad.digest)

        assert not is_whole(tier.fetch_many([bad.digest])[0], bad.digest)
        tier.remove_many([bad.digest])
        assert tier.put_many([bad]) == [True]
        assert is_whole(tier.fetch_many([bad.digest])[0], bad.digest)
        assert holds(tier, good)

    def test_threads_use_one_handle_at_once(self, tier: RecordTier) -> None:
        """Each gets its own answers."""
        records = [make_record(seed) for seed in range(1, 5)]
        wrong: list[Record] = []

        def work(record: Record) -> None:
            is_right = all(tier.put_many([record]) == [True] and holds(tier, record) for _ in range(10))
            if not is_right:
                wrong.append(record)

        threads = [threading.Thread(target=work, args=(record,)) for record in records]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert wrong == []

    def test_closing_twice_does_nothing_and_a_closed_handle_says_so(self, tier: RecordTier) -> None:
        """Rather than connect again behind the caller's back."""
        tier.close()
        tier.close()

        with pytest.raises(ClosedError):
            tier.contains_many([ABSENT])
        with pytest.raises(ClosedError):
            tier.put_many([make_record(1)])

    @pytest.mark.parametrize(
        "use",
        [
            pytest.param(lambda tier: tier.contains_many([ABSENT]), id="contains"),
            pytest.param(lambda tier: tier.fetch_many([ABSENT]), id="fetch"),
            pytest.param(lambda tier: tier.find_many([BlockHash(bytes(32))]), id="find"),
            pytest.param(lambda tier: tier.put_many([make_record(1)]), id="put"),
            pytest.param(lambda tier: tier.remove_many([ABSENT]), id="remove"),
        ],
    )
    def test_a_place_that_does_not_answer_is_a_named_error_in_bounded_time(
        self, use: Callable[[RecordTier], object]
    ) -> None:
        """Its caller computes instead."""
        tier = self.open_unreachable()
        start_s = time.monotonic()

        with pytest.raises(TierUnavailableError, match=tier.name):
            use(tier)
        tier.close()

        assert time.monotonic() - start_s < BOUND_S
