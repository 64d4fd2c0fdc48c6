"""A loop in a thread: calls from everywhere, cancelled when they are given up, and an end that leaves nothing."""

from __future__ import annotations

import asyncio
import threading

import pytest

from env_server.client.loop_thread import LoopThread


async def answer(value: int) -> tuple[int, str]:
    await asyncio.sleep(0)
    return value, threading.current_thread().name


async def wait_for_ever(started: threading.Event, cancelled: threading.Event) -> None:
    started.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        cancelled.set()
        raise


async def test_a_running_loop_can_call_and_wait() -> None:
    with LoopThread("loop") as thread:
        assert await asyncio.to_thread(thread.call, answer(0)) == (0, "loop"), "from any thread"
        assert thread.call(answer(1)) == (1, "loop"), "as in a notebook"
        assert await asyncio.gather(*(thread.wait_for(answer(n)) for n in range(3))) == [(n, "loop") for n in range(3)]


def test_errors_come_out_where_the_call_was_made() -> None:
    async def fail() -> None:
        raise KeyError("x")

    with LoopThread("loop") as thread, pytest.raises(KeyError, match="x"):
        thread.call(fail())


async def test_giving_up_a_wait_cancels_what_was_waited_for() -> None:
    started, cancelled = threading.Event(), threading.Event()
    with LoopThread("loop") as thread:
        task = asyncio.create_task(thread.wait_for(wait_for_ever(started, cancelled)))
        assert await asyncio.to_thread(started.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(cancelled.wait, 30)


def test_an_interrupted_call_cancels_what_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    started, cancelled = threading.Event(), threading.Event()
    with LoopThread("loop") as thread:
        submit = thread.submit

        def interrupted(coroutine):  # type: ignore[no-untyped-def]
            future = submit(coroutine)

            def result(timeout: float | None = None) -> None:
                assert started.wait(30)
                raise KeyboardInterrupt

            monkeypatch.setattr(future, "result", result)
            return future

        monkeypatch.setattr(thread, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            thread.call(wait_for_ever(started, cancelled))
        assert cancelled.wait(30)


def test_closing_cancels_what_runs_and_ends_the_thread() -> None:
    started, cancelled = threading.Event(), threading.Event()
    thread = LoopThread("a loop that ends")
    future = thread.submit(wait_for_ever(started, cancelled))
    assert started.wait(30)
    thread.close()
    thread.close()
    assert cancelled.is_set()
    assert future.cancelled()
    assert thread.closed
    assert "a loop that ends" not in {running.name for running in threading.enumerate()}


def test_no_call_after_the_end() -> None:
    thread = LoopThread("loop")
    thread.close()
    with pytest.raises(RuntimeError, match="the loop is closed"):
        thread.call(answer(1))
