"""What every engine promises, and what the simulated one does beyond it: its latencies, its failures, its cache."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from inference.engine import Completion, ContextOverflowError, EngineClosedError, EngineError, FinishReason, Sampling
from inference.simulated.clock import run_skipping
from inference.simulated.engine import Asked, SimulatedEngine, SimulatedOutageError
from inference.simulated.profile import Faults, ServerProfile

T = TypeVar("T")

STOP = 1
PROFILE = ServerProfile(
    max_sequences=8,
    step_s=0.01,
    step_s_per_sequence=0.001,
    prefill_tokens_per_s=2_000.0,
    request_s=0.001,
    network_s=0.002,
)


def says(asked: Asked) -> tuple[int, ...]:
    """A turn of 1 to 40 tokens, ended in three of four cases, by session and turn alone."""
    chance = random.Random(f"{asked.key}/{asked.turn}")
    words = tuple(chance.randrange(2, 60) for _ in range(chance.randint(1, 39)))
    return (*words, STOP) if chance.random() < 0.75 else words


def engine_of(**changes: Any) -> SimulatedEngine:
    return SimulatedEngine(says, changes.pop("profile", PROFILE), stop_ids=[STOP], **changes)


def simulate(main: Coroutine[Any, Any, T]) -> T:
    return run_skipping(main, counts_work=False)


async def episode(engine: SimulatedEngine, key: int, turns: int = 4) -> list[tuple[float, Completion]]:
    """Turns with pauses between them; when each ended."""
    loop = asyncio.get_running_loop()
    prompt: tuple[int, ...] = tuple(range(2, 40)) + (key + 2,) * 5
    found = []
    async with engine.session(key) as session:
        for turn in range(turns):
            completion = await session.generate(prompt, Sampling(64), seed=turn)
            found.append((loop.time(), completion))
            prompt += (*completion.token_ids, 7, 7, 7)
            await asyncio.sleep(0.05)
    return found


async def crowd(engine: SimulatedEngine, episodes: int = 40) -> list[list[tuple[float, Completion]]]:
    try:
        return await asyncio.gather(*(episode(engine, key) for key in range(episodes)))
    finally:
        await engine.aclose()


def words_of(played: list[list[tuple[float, Completion]]]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for _, completion in each] for each in played]


def test_two_runs_are_the_same_to_the_last_bit() -> None:
    first, second = (simulate(crowd(engine_of(replicas=2))) for _ in range(2))
    assert first == second
    assert len({end for each in first for end, _ in each}) > 40


def test_completions_are_what_engines_promise() -> None:
    played = simulate(crowd(engine_of()))
    completions = [completion for each in played for _, completion in each]
    for c in completions:
        assert 1 <= len(c.token_ids) == len(c.logprobs) <= 40
        assert (c.token_ids[-1] == STOP) == (c.finish_reason is FinishReason.STOP)
        assert all(logprob < 0 for logprob in c.logprobs)
    assert {c.finish_reason for c in completions} == set(FinishReason)


def test_a_turn_is_cut_where_its_tokens_are_used_up() -> None:
    async def main() -> Completion:
        engine = SimulatedEngine(lambda _: [5, 6, 7, STOP], PROFILE, stop_ids=[STOP])
        async with engine.session(0) as session:
            return await session.generate((2,), Sampling(3), 0)

    completion = simulate(main())
    assert (completion.token_ids, completion.finish_reason) == ((5, 6, 7), FinishReason.LENGTH)


def test_a_prefix_that_was_read_is_not_read_again() -> None:
    engine = engine_of()
    simulate(crowd(engine, 2))
    (usage,) = engine.usage
    # 43 tokens, then 5 of them again for the other question; then, for 3 turns each, what came since.
    assert usage.prompt_tokens == 43 + 5 + 2 * 3 * (3 + 1)


def test_a_group_reads_its_prompt_once() -> None:
    async def main() -> int:
        engine = engine_of()
        prompt = tuple(range(2, 102))
        async with AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(engine.session(key)) for key in range(8)]
            for session in sessions:
                await session.generate(prompt, Sampling(8), 0)
            return engine.usage[0].prompt_tokens

    assert simulate(main()) == 100 + 7, "the last token of a prompt is always read"


def test_load_goes_to_the_replica_with_the_least() -> None:
    engine = engine_of(replicas=4)
    simulate(crowd(engine))
    jobs = [usage.jobs for usage in engine.usage]
    assert jobs == [40, 40, 40, 40]


def test_more_replicas_are_faster() -> None:
    ends = [max(end for each in simulate(crowd(engine_of(replicas=count))) for end, _ in each) for count in (1, 2, 4)]
    assert ends == sorted(ends, reverse=True)


def test_a_replica_that_dies_costs_time_and_no_words() -> None:
    async def main() -> list[list[tuple[float, Completion]]]:
        engine = engine_of(replicas=2)

        async def fail() -> None:
            await asyncio.sleep(0.3)
            engine.kill(0)
            await asyncio.sleep(0.3)
            engine.revive(0)
            await asyncio.sleep(0.1)
            engine.kill(1)

        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            played = group.create_task(crowd(engine))
        return played.result()

    calm, troubled = simulate(crowd(engine_of(replicas=2))), simulate(main())
    assert words_of(troubled) == words_of(calm)
    assert max(end for each in troubled for end, _ in each) > max(end for each in calm for end, _ in each)


def test_random_failures_cost_time_and_no_words() -> None:
    faults = Faults(request_share=0.2, mean_uptime_s=1.0, restart_s=0.5, seed=3)
    engine = engine_of(replicas=2, faults=faults)
    troubled = simulate(crowd(engine))
    assert words_of(troubled) == words_of(simulate(crowd(engine_of(replicas=2))))
    assert sum(usage.down_s for usage in engine.usage) > 0
    again = simulate(crowd(engine_of(replicas=2, faults=faults)))
    assert again == troubled


def test_without_a_replica_for_too_long_a_request_fails() -> None:
    async def main() -> float:
        engine = engine_of(server_timeout_s=60.0)
        loop = asyncio.get_running_loop()
        async with engine.session(0) as session:
            engine.kill(0)
            began = loop.time()
            with pytest.raises(SimulatedOutageError, match="60 s"):
                await session.generate((5,), Sampling(2), 0)
            return loop.time() - began

    assert simulate(main()) == pytest.approx(60.0)


def test_a_cancelled_request_frees_its_place() -> None:
    async def main() -> tuple[float, float]:
        engine = SimulatedEngine(lambda _: [5] * 100, replace(PROFILE, max_sequences=1), stop_ids=[STOP])
        loop = asyncio.get_running_loop()

        async def ask(key: int) -> float:
            async with engine.session(key) as session:
                await session.generate((5,), Sampling(100), 0)
            return loop.time()

        first, second = asyncio.create_task(ask(0)), asyncio.create_task(ask(1))
        await asyncio.sleep(0.1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await second, engine.usage[0].busy_s

    ended, busy = simulate(main())
    assert ended == pytest.approx(0.1 + 1.005 + 1 / 2_000)
    assert busy < ended


async def test_a_bad_request_is_refused_and_the_session_goes_on() -> None:
    engine = engine_of(max_context=20)
    async with engine.session(0) as session:
        for ids, sampling in [((), Sampling(4)), ((5,), Sampling(0)), ((5,), Sampling(4, -1.0))]:
            with pytest.raises(EngineError):
                await session.generate(ids, sampling, 0)
        with pytest.raises(ContextOverflowError) as overflow:
            await session.generate((5,) * 10, Sampling(11), 0)
        assert overflow.value.allowed == 20
        assert (await session.generate((5, 6), Sampling(2), 0)).token_ids == says(Asked(0, 0, (5, 6), 0))[:2]


async def test_a_session_must_be_open_and_makes_one_request_at_a_time() -> None:
    engine = engine_of()
    session = engine.session(0)
    with pytest.raises(EngineError, match="not open"):
        await session.generate((5,), Sampling(2), 0)
    async with session:
        first = asyncio.create_task(session.generate((5,), Sampling(2), 0))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="one at a time"):
            await session.generate((5,), Sampling(2), 0)
        await first


async def test_closing_fails_outstanding_and_later_requests() -> None:
    engine = engine_of()
    async with engine.session(0) as idle, engine.session(1) as session:
        outstanding = asyncio.create_task(session.generate((5,), Sampling(10), 0))
        await asyncio.sleep(0)
        await engine.aclose()
        with pytest.raises(EngineClosedError):
            await outstanding
        with pytest.raises(EngineClosedError):
            await idle.generate((5,), Sampling(10), 0)
    with pytest.raises(EngineClosedError):
        async with engine.session(2):
            pass
    await engine.aclose()


def test_one_engine_serves_one_loop_after_another() -> None:
    engine = engine_of()

    async def main() -> list[tuple[float, Completion]]:
        return await episode(engine, 0)

    first, second = simulate(main()), simulate(main())
    assert first == second
    assert engine.usage[0].jobs == 8


def test_completions_carry_the_version_that_was_set() -> None:
    async def main() -> list[int]:
        engine = engine_of()
        found = []
        async with engine.session(0) as session:
            for version in (0, 4):
                engine.set_policy_version(version)
                found.append((await session.generate((5,), Sampling(2), 0)).policy_version)
        return found

    assert simulate(main()) == [0, 4]
