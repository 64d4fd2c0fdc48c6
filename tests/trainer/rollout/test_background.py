"""The rollouts' event loop: it goes on while its caller does not wait, and says whether it does."""

from __future__ import annotations

import asyncio
import threading

import pytest

from trainer.rollout.background import RolloutLoop


def test_what_was_started_goes_on_while_nobody_waits() -> None:
    done = threading.Event()

    async def work() -> int:
        done.set()
        return 3

    with RolloutLoop() as loop:
        future = loop.start(work())
        assert done.wait(30)
        assert loop.result(future) == 3
        with pytest.raises(ZeroDivisionError):
            loop.run(fail())


async def fail() -> None:
    raise ZeroDivisionError


def test_a_caller_that_waits_is_kept_and_one_that_does_not_is_not_waited_for() -> None:
    with RolloutLoop() as loop:

        async def ask() -> bool:
            with loop.caller_waits() as waits:
                return waits

        started = loop.start(ask())
        assert started.result() is False, "the caller has not called `result`"
        assert loop.run(ask()) is True

        order: list[str] = []
        held, go = threading.Event(), asyncio.Event()

        async def keep() -> None:
            with loop.caller_waits() as waits:
                assert waits
                held.set()
                await go.wait()
                order.append("kept")

        async def begin() -> None:
            keeping.append(asyncio.ensure_future(keep()))
            while not held.is_set():
                await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(go.set)

        keeping: list[asyncio.Future[None]] = []
        loop.run(begin())
        order.append("returned")
        assert order == ["kept", "returned"]


def test_leaving_cancels_what_runs() -> None:
    cancelled = threading.Event()
    started = threading.Event()

    async def forever() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with RolloutLoop() as loop:
        loop.start(forever())
        assert started.wait(30)
    assert cancelled.is_set()
