"""The engine without a model: what every engine guarantees, and its times."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.simulated import SimulatedEngine, TurnRequest
from inference.engine import EngineClosedError, EngineError, FinishReason, Sampling

STOP = 1


def three_tokens(request: TurnRequest) -> list[int]:
    return [10 + request.key, 20 + request.turn, STOP]


async def test_tokens_follow_from_the_session_and_the_turn_and_are_cut_at_the_limit() -> None:
    engine = SimulatedEngine(three_tokens, stop_ids=[STOP])
    engine.policy_version = 4
    async with engine.session(5) as session:
        first = await session.generate((7,), Sampling(8), 0)
        second = await session.generate((7, *first.token_ids, 9), Sampling(2), 0)
    assert (first.token_ids, first.finish_reason, first.policy_version) == ((15, 20, STOP), FinishReason.STOP, 4)
    assert (second.token_ids, second.finish_reason) == ((15, 21), FinishReason.LENGTH)
    assert all(len(each.logprobs) == len(each.token_ids) for each in (first, second))


async def test_a_turn_takes_a_step_for_each_of_its_tokens_beside_others() -> None:
    engine, loop = SimulatedEngine(three_tokens, stop_ids=[STOP], step_s=0.01), asyncio.get_running_loop()
    began = loop.time()

    async def episode(key: int) -> None:
        async with engine.session(key) as session:
            await session.generate((7,), Sampling(8), 0)
            await session.generate((7,), Sampling(1), 0)

    await asyncio.gather(*map(episode, range(50)))
    assert 0.04 <= loop.time() - began < 50 * 0.04


async def test_a_bad_request_and_a_closed_engine_are_errors() -> None:
    engine = SimulatedEngine(three_tokens, stop_ids=[STOP], step_s=0.01)
    async with engine.session(0) as session:
        with pytest.raises(EngineError):
            await session.generate((), Sampling(8), 0)
        outstanding = asyncio.create_task(session.generate((7,), Sampling(8), 0))
        await asyncio.sleep(0)
        await engine.aclose()
        with pytest.raises(EngineClosedError):
            await outstanding
        with pytest.raises(EngineClosedError):
            await session.generate((7,), Sampling(8), 0)
