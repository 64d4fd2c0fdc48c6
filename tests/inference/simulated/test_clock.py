"""The loop that does not sit out its waits."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from inference.simulated.clock import SkippingLoop, run_skipping

HOUR = 3_600.0


def test_an_hour_is_over_at_once() -> None:
    async def sleep_for_an_hour() -> float:
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(HOUR)
        return asyncio.get_running_loop().time() - began

    assert run_skipping(sleep_for_an_hour()) >= HOUR


def test_sleepers_wake_in_their_order_at_their_times() -> None:
    woken: list[tuple[float, int]] = []

    async def sleeper(seconds: int) -> None:
        await asyncio.sleep(seconds)
        woken.append((asyncio.get_running_loop().time(), seconds))

    async def main() -> None:
        await asyncio.gather(*map(sleeper, (30, 10, 20)))

    run_skipping(main(), counts_work=False)
    assert [seconds for _, seconds in woken] == [10, 20, 30]
    assert [at for at, _ in woken] == pytest.approx([10.0, 20.0, 30.0])


def test_work_counts_or_does_not() -> None:
    async def work() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        ends = time.thread_time() + 0.01
        while time.thread_time() < ends:
            pass
        return loop.time() - began

    assert run_skipping(work()) >= 0.01
    assert run_skipping(work(), counts_work=False) == 0.0


def test_work_in_a_thread_is_waited_for() -> None:
    """The clock is not put forward to a timer while a thread works: the thread ends first."""
    release = threading.Event()

    async def main() -> list[str]:
        order: list[str] = []
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(None, release.wait)
        loop.call_later(0.05, release.set)

        async def in_thread() -> None:
            await work
            order.append("thread")

        async def asleep() -> None:
            await asyncio.sleep(HOUR)
            order.append("timer")

        await asyncio.gather(asleep(), in_thread())
        return order

    assert run_skipping(main()) == ["thread", "timer"]


def test_it_is_an_event_loop_like_others() -> None:
    async def echo() -> bytes:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.read(5))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"hello")
        heard = await reader.read(5)
        writer.close()
        server.close()
        await server.wait_closed()
        return heard

    assert run_skipping(echo()) == b"hello"
    loop = SkippingLoop()
    loop.close()
    assert loop.is_closed()
