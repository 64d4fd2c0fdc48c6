"""One capacity for all workers: never exceeded, never lost, first come first served."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from env_server.service import capacity as capacity_module
from env_server.service.capacity import (
    Capacity,
    CapacityReachedError,
    DrainingError,
    PlaceTable,
    QueueFullError,
)

WORKERS = 3
LONG_S = 1000.0


@pytest.fixture
def table() -> Iterator[PlaceTable]:
    table = PlaceTable(2)
    yield table
    table.close()


async def settle() -> None:
    """Let everything happen that can happen now, polls included: they are due at once here."""
    for _ in range(8):
        await asyncio.sleep(0)


async def test_without_a_queue_a_full_server_refuses_at_once() -> None:
    capacity = Capacity(2)
    assert [await capacity.acquire(LONG_S), await capacity.acquire(0)] == [0.0, 0.0]
    with pytest.raises(CapacityReachedError, match="all 2 sessions of this server are in use") as refused:
        await capacity.acquire(LONG_S)
    assert (refused.value.active, refused.value.max_sessions, refused.value.reason) == (2, 2, "capacity")


@pytest.mark.parametrize("timeout_s", [0.0, 0.001])
async def test_nobody_waits_longer_than_asked(timeout_s: float) -> None:
    capacity = Capacity(1, queue_size=4)
    assert capacity.try_acquire()
    with pytest.raises(CapacityReachedError):
        await capacity.acquire(timeout_s)
    assert (capacity.active(), capacity.waiting()) == (1, 0)


async def test_a_full_queue_refuses_at_once_whoever_waits_in_which_worker(table: PlaceTable) -> None:
    one, other = (Capacity(1, 1, table, worker) for worker in range(2))
    assert one.try_acquire()
    waiting = asyncio.ensure_future(one.acquire(LONG_S))
    await settle()
    for capacity in (one, other):
        with pytest.raises(QueueFullError, match="its queue is full") as refused:
            await capacity.acquire(LONG_S)
        assert (refused.value.reason, capacity.waiting()) == ("queue_full", 1)
    one.release()
    assert await waiting >= 0


async def test_a_place_freed_in_another_worker_is_noticed_and_who_comes_later_does_not_overtake(
    table: PlaceTable,
) -> None:
    one, other = (Capacity(1, 4, table, worker) for worker in range(2))
    assert one.try_acquire()
    waiting = asyncio.ensure_future(other.acquire(LONG_S))
    await settle()
    one.release()
    assert not other.try_acquire()
    await waiting
    assert (one.active(), one.waiting()) == (1, 0)


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("others", [0, 1])
async def test_a_place_is_not_lost_to_one_who_gives_up(granted: bool, others: int) -> None:
    """He gives up just before the place comes free, or just after."""
    capacity = Capacity(1, queue_size=2)
    assert capacity.try_acquire()
    first, *second = [asyncio.ensure_future(capacity.acquire(LONG_S)) for _ in range(1 + others)]
    await settle()
    for deed in (capacity.release, first.cancel) if granted else (first.cancel, capacity.release):
        deed()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.gather(*second)
    assert (capacity.active(), capacity.waiting()) == (others, 0)


async def test_a_closed_capacity_refuses_all_and_still_takes_places_back() -> None:
    capacity = Capacity(1, queue_size=2)
    assert capacity.try_acquire()
    waiting = asyncio.ensure_future(capacity.acquire(LONG_S))
    await settle()
    capacity.close()
    with pytest.raises(DrainingError, match="shutting down"):
        await waiting
    capacity.release()
    assert capacity.active() == 0
    assert not capacity.try_acquire()
    with pytest.raises(DrainingError) as refused:
        await capacity.acquire(LONG_S)
    assert refused.value.reason == "draining"


async def test_nothing_is_polled_while_nobody_waits(table: PlaceTable) -> None:
    capacity = Capacity(1, 4, table)
    assert await capacity.acquire(LONG_S) == 0.0
    assert capacity._poll is None


AT_ONCE = """
import os
from env_server.service.capacity import Capacity, PlaceTable

class Crowded(PlaceTable):
    # Another process comes between looking and counting.
    def total(self, column):
        found = super().total(column)
        os.sched_yield()
        return found

workers, limit, rounds = 4, 1, 500
table = Crowded(workers)
pids = []
for worker in range(workers):
    pid = os.fork()
    if pid == 0:
        capacity = Capacity(limit, 0, table, worker)
        most = taken = 0
        while taken < rounds:
            if capacity.try_acquire():
                taken += 1
                most = max(most, capacity.active())
                capacity.release()
        os._exit(most)
    pids.append(pid)
highest = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
assert highest == [limit] * workers, highest
assert table.total(0) == 0
print("done")
"""


def test_never_too_many_are_open_whatever_the_workers_do_at_the_same_time() -> None:
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_dead_worker_holds_nothing(table: PlaceTable) -> None:
    columns = (0, 1)  # those who play, those who wait
    assert all(table.take(worker, column, 2) for worker in (0, 1) for column in columns)
    assert table.clear(1) == 1
    assert [table.total(column) for column in columns] == [1, 1]


class Workers(RuleBasedStateMachine):
    """Sessions that come, wait, give up and go in several workers, and workers that are killed."""

    @initialize(limit=st.integers(1, 4), queue_size=st.integers(0, 4))
    def begin(self, limit: int, queue_size: int) -> None:
        self.limit, self.queue_size = limit, queue_size
        self.loop = asyncio.new_event_loop()
        self.polls = patch.object(capacity_module, "POLL_S", 0.0)
        self.polls.start()
        self.table = PlaceTable(WORKERS)
        self.views = [Capacity(limit, queue_size, self.table, worker) for worker in range(WORKERS)]
        self.held = [0] * WORKERS
        self.queues: list[list[asyncio.Task[float]]] = [[] for _ in range(WORKERS)]

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        for view in self.views:
            view.close()
        try:
            self.loop.run_until_complete(settle())
            assert all(isinstance(task.exception(), DrainingError) for queue in self.queues for task in queue)
        finally:
            self.polls.stop()
            self.loop.close()
            self.table.close()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something, and whatever follows from it at once; then see who got a place, in order."""

        async def all_of_it() -> None:
            await work
            await settle()

        self.loop.run_until_complete(all_of_it())
        for worker, queue in enumerate(self.queues):
            served = [task.done() for task in queue]
            assert served == sorted(served, reverse=True), "first come, first served"
            while queue and queue[0].done():
                queue.pop(0).result()
                self.held[worker] += 1

    @rule(worker=st.integers(0, WORKERS - 1))
    def come(self, worker: int) -> None:
        async def come() -> None:
            task = asyncio.ensure_future(self.views[worker].acquire(LONG_S))
            await asyncio.sleep(0)
            if task.done() and task.exception() is not None:
                error = task.exception()
                assert sum(self.held) + sum(map(len, self.queues)) >= self.limit
                assert isinstance(error, QueueFullError) == (self.queue_size > 0)
                assert sum(map(len, self.queues)) == self.queue_size
                return
            self.queues[worker].append(task)

        self.run(come())

    @rule(worker=st.integers(0, WORKERS - 1))
    def try_to_come(self, worker: int) -> None:
        free = sum(self.held) < self.limit
        taken = self.views[worker].try_acquire()
        assert taken == (free and not self.queues[worker])
        self.held[worker] += taken

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([worker for worker, held in enumerate(self.held) if held]))

        async def go() -> None:
            self.held[worker] -= 1
            self.views[worker].release()

        self.run(go())

    @precondition(lambda self: any(self.queues))
    @rule(data=st.data(), just_granted=st.booleans())
    def give_up(self, data: st.DataObject, just_granted: bool) -> None:
        worker = data.draw(st.sampled_from([worker for worker, queue in enumerate(self.queues) if queue]))
        queue = self.queues[worker]
        task = queue.pop(data.draw(st.integers(0, len(queue) - 1)))

        async def give_up() -> None:
            if just_granted and self.held[worker]:
                self.held[worker] -= 1
                self.views[worker].release()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        self.run(give_up())

    @rule(worker=st.integers(0, WORKERS - 1))
    def kill(self, worker: int) -> None:
        async def kill() -> None:
            # The worker's sessions and its view are gone without a word; the parent clears what it held.
            for task in self.queues[worker]:
                task.cancel()
            await asyncio.gather(*self.queues[worker], return_exceptions=True)
            self.queues[worker], self.held[worker] = [], 0
            self.table.clear(worker)
            self.views[worker] = Capacity(self.limit, self.queue_size, self.table, worker)

        self.run(kill())

    @invariant()
    def counted(self) -> None:
        if hasattr(self, "held"):
            view = self.views[0]
            assert view.active() == sum(self.held) <= self.limit
            assert view.waiting() == sum(map(len, self.queues)) <= self.queue_size
            assert not (view.waiting() and view.active() < self.limit), "nobody waits while a place is free"


Workers.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestWorkers = Workers.TestCase
