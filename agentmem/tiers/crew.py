"""Threads that work for one caller at a time, and for it no more once it goes on: also when it is interrupted.

Knows nothing of what the work is.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")
ResultT = TypeVar("ResultT")

_Result = tuple[int, list[ResultT], BaseException | None]


class Crew:
    """A few threads that do what they are given. Thread-safe.

    Caller and crew share queues only, which are C: an interrupt of the caller cannot leave a lock behind that the crew
    would wait for, as the standard library's executors can.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        """Start the threads."""
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._loop, name=f"{name}-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def do(self, work: Callable[[T], ResultT], tasks: Sequence[T]) -> list[ResultT]:
        """Do every task; return the results in order.

        However this is left, nobody works on any of the tasks any more.

        Raises:
            BaseException: What the first task raised that did, once all are done.
        """
        done: SimpleQueue[_Result[ResultT]] = SimpleQueue()
        claims = [[index] for index in range(len(tasks))]
        results: list[_Result[ResultT]] = []
        try:
            for task, claim in zip(tasks, claims, strict=True):
                self._work.put(_job(work, task, claim, done))
            while len(results) < len(tasks):
                results += map(SimpleQueue.get, (done,))  # one step: no interrupt comes between taking and having it
        finally:
            num_given_up = sum(_is_claimed(claim) for claim in claims)
            while len(results) < len(tasks) - num_given_up:
                results += map(SimpleQueue.get, (done,))
        results.sort(key=lambda result: result[0])
        for _, _, error in results:
            if error is not None:
                raise error
        return [values[0] for _, values, _ in results]

    def close(self) -> None:
        """End the threads, once they have done what they were given."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()

    def _loop(self) -> None:
        while (job := self._work.get()) is not None:
            job()
            del job  # or the thread would hold what it needed while it waits for the next


def _job(
    work: Callable[[T], ResultT], task: T, claim: list[int], done: "SimpleQueue[_Result[ResultT]]"
) -> Callable[[], None]:
    """Return what does one task, unless its caller has given it up."""

    def job() -> None:
        try:
            index = claim.pop()
        except IndexError:
            return
        try:
            done.put((index, [work(task)], None))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            done.put((index, [], error))

    return job


def _is_claimed(claim: list[int]) -> bool:
    """Give a task up; say whether nobody had begun it."""
    try:
        claim.pop()
    except IndexError:
        return False
    return True
