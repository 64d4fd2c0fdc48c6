"""A worker's capacity: never exceeded, never lost, first come first served."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.service.capacity import Capacity, CapacityReachedError

LONG_S = 1000.0


async def settle() -> None:
    """Let everything happen that can happen now."""
    for _ in range(8):
        await asyncio.sleep(0)


async def test_a_full_server_rejects_and_says_how_full_it_is() -> None:
    capacity = Capacity(2)
    assert [await capacity.acquire(LONG_S), await capacity.acquire(0)] == [0.0, 0.0]
    with pytest.raises(CapacityReachedError, match="--max_sessions") as rejected:
        await capacity.acquire(LONG_S)
    assert (rejected.value.active, rejected.value.max_sessions, rejected.value.reason) == (2, 2, "capacity")


@pytest.mark.parametrize("timeout_s", [0.0, 0.001])
async def test_none_waits_longer_than_asked(timeout_s: float) -> None:
    capacity = Capacity(1, queue_size=4)
    assert capacity.try_acquire()
    with pytest.raises(CapacityReachedError):
        await capacity.acquire(timeout_s)
    assert (capacity.active, capacity.waiting) == (1, 0)


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("others", [0, 1])
async def test_a_slot_is_not_lost_to_one_that_gives_up(granted: bool, others: int) -> None:
    """It gives up just before the slot comes free, or just after."""
    capacity = Capacity(1, queue_size=2)
    assert capacity.try_acquire()
    first, *second = [asyncio.ensure_future(capacity.acquire(LONG_S)) for _ in range(1 + others)]
    await settle()
    for call in (capacity.release, first.cancel) if granted else (first.cancel, capacity.release):
        call()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.gather(*second)
    assert (capacity.active, capacity.waiting) == (others, 0)


async def test_a_closed_capacity_rejects_all_and_still_takes_slots_back() -> None:
    capacity = Capacity(1, queue_size=2)
    assert capacity.try_acquire()
    waiting = asyncio.ensure_future(capacity.acquire(LONG_S))
    await settle()
    capacity.close()
    with pytest.raises(CapacityReachedError):
        await waiting
    capacity.release()
    assert capacity.active == 0
    assert not capacity.try_acquire()
    with pytest.raises(CapacityReachedError) as rejected:
        await capacity.acquire(LONG_S)
    assert rejected.value.reason == "draining"


@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(["come", "try", "go", "give up"]), st.integers(0, 9)), max_size=40),
)
def test_sessions_that_come_wait_give_up_and_go(limit: int, queue_size: int, events: Sequence[tuple[str, int]]) -> None:
    async def play() -> None:
        capacity, held = Capacity(limit, queue_size), 0
        queue: list[asyncio.Task[float]] = []
        for event, number in events:
            if event == "come":
                task = asyncio.ensure_future(capacity.acquire(LONG_S))
                await settle()
                if task.done() and (error := task.exception()):
                    assert held == limit
                    assert len(queue) == queue_size
                    assert isinstance(error, CapacityReachedError)
                    assert error.reason == ("queue_full" if queue_size else "capacity")
                else:
                    queue.append(task)
            elif event == "try":
                held += capacity.try_acquire()
            elif event == "go" and held:
                held -= 1
                capacity.release()
            elif event == "give up" and queue:
                queue.pop(number % len(queue)).cancel()
            await settle()
            served = [task.done() for task in queue]
            assert served == sorted(served, reverse=True), "first come, first served"
            held += sum(served)
            queue = [task for task in queue if not task.done()]
            assert capacity.active == held <= limit
            assert capacity.waiting == len(queue) <= queue_size
            assert not (queue and held < limit), "none waits while a slot is free"
        capacity.close()
        for task in queue:
            with pytest.raises(CapacityReachedError):
                await task

    asyncio.run(play())
