"""The writer thread: order, groups, levels, back-pressure and failures, over a commit that only keeps a list."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import pytest

from agentmem._writer import Level, Operation, Outcome, Writer
from agentmem.errors import ClosedError, ReadOnlyError, StorageFullError


class Log:
    """A store that is a list: `groups` has the group of every commit, `synced` how many were on disk at each sync."""

    def __init__(self) -> None:
        self.rows: list[object] = []
        self.groups: list[int] = []
        self.synced: list[int] = []
        self.started = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.failures: list[Exception] = []

    def commit(self, operations: Sequence[Operation[list[object]]], is_durable: bool) -> list[Outcome]:
        self.started.set()
        self.gate.wait(20)
        if self.failures:
            raise self.failures.pop(0)
        self.groups.append(len(operations))
        outcomes = [self._carry_out(operation) for operation in operations]
        if is_durable:
            self.synced.append(len(self.rows))
        return outcomes

    def _carry_out(self, operation: Operation[list[object]]) -> Outcome:
        try:
            return Outcome(operation.run(self.rows))
        except Exception as error:  # noqa: BLE001 - as the real one does
            return Outcome(error=error)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def writer(log: Log) -> Iterator[Writer[list[object]]]:
    writer = Writer(log.commit, window_s=60.0, group_nbytes=100, max_queued_nbytes=200)
    yield writer
    log.gate.set()
    writer.close()


def add(row: object) -> Callable[[list[object]], object]:
    def run(rows: list[object]) -> object:
        rows.append(row)
        return row

    return run


def fail(rows: list[object]) -> object:
    raise ZeroDivisionError("as asked")


def queue(writer: Writer[list[object]], row: object, nbytes: int = 0) -> Future[object]:
    return writer.submit(add(row), level=Level.QUEUED, nbytes=nbytes)


def test_a_durable_operation_carries_all_that_was_queued_before_it(writer: Writer[list[object]], log: Log) -> None:
    futures = [queue(writer, number) for number in range(10)]

    result = writer.submit(add("last"), level=Level.DURABLE, nbytes=0).result(20)

    assert result == "last"
    assert log.rows == [*range(10), "last"]
    assert all(future.done() for future in futures)
    assert log.synced == [11]


def test_queued_operations_are_written_within_the_window() -> None:
    log = Log()
    writer = Writer(log.commit, window_s=0.01)

    assert queue(writer, 1).result(20) == 1
    assert log.synced == []
    writer.close()


def test_queued_operations_share_a_commit() -> None:
    log = Log()
    writer = Writer(log.commit, window_s=0.05)
    futures = [queue(writer, number) for number in range(100)]

    assert [future.result(20) for future in futures] == list(range(100))
    assert len(log.groups) <= 3
    writer.close()


def test_a_failing_operation_fails_alone(writer: Writer[list[object]], log: Log) -> None:
    before = queue(writer, "before")
    failing = writer.submit(fail, level=Level.RELAXED, nbytes=0)
    after = writer.submit(add("after"), level=Level.DURABLE, nbytes=0)

    assert after.result(20) == "after"
    assert before.result(20) == "before"
    with pytest.raises(ZeroDivisionError):
        failing.result(20)


def test_a_queued_failure_is_raised_by_the_next_flush_and_only_once(writer: Writer[list[object]]) -> None:
    writer.submit(fail, level=Level.QUEUED, nbytes=0)

    with pytest.raises(ZeroDivisionError, match="as asked"):
        writer.flush()
    writer.flush()


def test_a_queued_failure_is_raised_by_the_next_durable_operation_which_is_stored(
    writer: Writer[list[object]], log: Log
) -> None:
    writer.submit(fail, level=Level.QUEUED, nbytes=0)

    future = writer.submit(add("stored"), level=Level.DURABLE, nbytes=0)

    with pytest.raises(ZeroDivisionError) as caught:
        future.result(20)
    assert "earlier queued write" in caught.value.__notes__[0]
    assert log.rows == ["stored"]


def test_a_queued_failure_is_raised_by_close() -> None:
    writer = Writer(Log().commit, window_s=60.0)
    writer.submit(fail, level=Level.QUEUED, nbytes=0)

    with pytest.raises(ZeroDivisionError):
        writer.close()
    writer.close()


def test_close_writes_and_syncs_what_is_queued() -> None:
    log = Log()
    writer = Writer(log.commit, window_s=60.0)
    queue(writer, 1)

    writer.close()

    assert log.rows == [1]
    assert log.synced == [1]


def test_a_closed_writer_takes_nothing() -> None:
    writer = Writer(Log().commit)
    writer.close()

    with pytest.raises(ClosedError, match="closed"):
        queue(writer, 1)


def test_flush_of_a_clean_writer_commits_nothing(writer: Writer[list[object]], log: Log) -> None:
    writer.submit(add(1), level=Level.DURABLE, nbytes=0).result(20)

    writer.flush()

    assert log.groups == [1]


def test_groups_end_at_their_limit_of_bytes(writer: Writer[list[object]], log: Log) -> None:
    for number in range(4):
        queue(writer, number, nbytes=40)
    writer.flush()

    assert log.rows == [0, 1, 2, 3]
    assert max(log.groups) <= 3


def test_an_operation_larger_than_a_group_goes_alone(writer: Writer[list[object]], log: Log) -> None:
    queue(writer, "small")
    queue(writer, "large", nbytes=1000)
    writer.flush()

    assert log.rows == ["small", "large"]


def test_submit_waits_while_too_many_bytes_are_under_way(writer: Writer[list[object]], log: Log) -> None:
    log.gate.clear()
    queue(writer, 0, nbytes=150)
    assert log.started.wait(20)
    thread = threading.Thread(target=queue, args=(writer, 1, 150))
    thread.start()
    thread.join(0.05)
    was_waiting = thread.is_alive()

    log.gate.set()
    thread.join(20)
    writer.flush()

    assert was_waiting
    assert log.rows == [0, 1]


def test_a_full_disk_takes_only_the_operations_that_do_not_fit(log: Log) -> None:
    writer = Writer(log.commit, window_s=60.0)
    full = StorageFullError("full")
    log.failures = [full, full]
    large = writer.submit(add("large"), level=Level.RELAXED, nbytes=90)
    small = queue(writer, "small")
    writer.flush()

    assert small.result(20) == "small"
    with pytest.raises(StorageFullError):
        large.result(20)
    writer.close()


def test_what_is_queued_on_a_full_disk_waits_for_room_in_its_order(writer: Writer[list[object]], log: Log) -> None:
    log.failures = [StorageFullError("full")] * 2
    queued = [queue(writer, number) for number in range(2)]
    with pytest.raises(StorageFullError):
        writer.submit(add("too early"), level=Level.DURABLE, nbytes=0).result(20)
    queued.append(queue(writer, 2))

    writer.flush()

    assert log.rows == [0, 1, 2]
    assert [future.result(20) for future in queued] == [0, 1, 2]


def test_a_removal_does_not_stand_behind_what_found_no_room(writer: Writer[list[object]], log: Log) -> None:
    log.failures = [StorageFullError("full")] * 2
    queue(writer, "queued")

    writer.submit(add("removal"), level=Level.REMOVAL, nbytes=0).result(20)
    writer.flush()

    assert log.rows == ["removal", "queued"]


def test_close_tells_of_what_never_found_room() -> None:
    log = Log()
    writer = Writer(log.commit, window_s=60.0)
    log.failures = [StorageFullError("full")] * 4
    queued = queue(writer, "queued")
    with pytest.raises(StorageFullError):
        writer.flush()

    with pytest.raises(StorageFullError):
        writer.close()
    with pytest.raises(StorageFullError):
        queued.result(20)


def test_a_failed_commit_fails_the_whole_group(writer: Writer[list[object]], log: Log) -> None:
    log.failures = [ReadOnlyError("broken disk")]
    relaxed = writer.submit(add(1), level=Level.RELAXED, nbytes=0)
    durable = writer.submit(add(2), level=Level.DURABLE, nbytes=0)

    for future in (relaxed, durable):
        with pytest.raises(ReadOnlyError):
            future.result(20)
    assert writer.submit(add(3), level=Level.DURABLE, nbytes=0).result(20) == 3


def test_an_operation_may_submit_another(writer: Writer[list[object]], log: Log) -> None:
    def outer(rows: list[object]) -> None:
        rows.append("outer")
        queue(writer, "inner", nbytes=1000)

    writer.submit(outer, level=Level.DURABLE, nbytes=150).result(20)
    writer.flush()

    assert log.rows == ["outer", "inner"]


def test_many_threads_keep_their_own_order(writer: Writer[list[object]], log: Log) -> None:
    def work(name: int) -> None:
        for number in range(200):
            queue(writer, (name, number), nbytes=1)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.flush()

    for name in range(4):
        assert [row[1] for row in log.rows if row[0] == name] == list(range(200))  # type: ignore[index]
