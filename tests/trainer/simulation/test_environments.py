"""Simulated environments: their queue, and what an episode sees of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.types import SQLAction, SQLObservation
from inference.simulated.clock import run_skipping
from trainer.simulation.environments import EnvironmentProfile, SimulatedEnvironments, Workers
from trainer.simulation.scripts import Script, ScriptedTurn

SCRIPTS = [
    Script("How many?", "Tables: a, b", (ScriptedTurn("QUERY SELECT 1", result="1\n1"), ScriptedTurn("ANSWER 1"))),
    Script("Who?", "Tables: c", (ScriptedTurn("QUERY x", error="no such column: x"), ScriptedTurn("ANSWER Rex"))),
]
QUERY, ANSWER = SQLAction(action_type="QUERY", argument="x"), SQLAction(action_type="ANSWER", argument="1")


def test_workers_take_calls_as_they_come() -> None:
    workers = Workers(2)
    assert [workers.take(0.0, 3.0), workers.take(0.0, 1.0), workers.take(0.5, 1.0), workers.take(5.0, 1.0)] == [
        3.0,
        1.0,
        2.0,
        6.0,
    ]
    assert workers.busy_s == 6.0


@given(st.integers(1, 5), st.lists(st.tuples(st.floats(0, 3), st.floats(0, 2)), min_size=1, max_size=50))
def test_no_more_calls_run_at_once_than_there_are_workers(count: int, calls: list[tuple[float, float]]) -> None:
    workers, now, runs = Workers(count), 0.0, []
    for gap, seconds in calls:
        now += gap
        ends = workers.take(now, seconds)
        assert ends >= now + seconds
        runs.append((ends - seconds, ends))
    for start, _ in runs:
        assert sum(begin <= start < end - 1e-9 for begin, end in runs) <= count


def play(profile: EnvironmentProfile, episodes: int = 6, budget: int = 15) -> list[list[tuple[float, SQLObservation]]]:
    environments = SimulatedEnvironments(SCRIPTS, profile, budget)

    async def one(number: int) -> list[tuple[float, SQLObservation]]:
        loop, seen = asyncio.get_running_loop(), []
        async with environments.session() as session:
            seen.append((loop.time(), await session.reset(str(number), f"e{number}")))
            for action in (QUERY, ANSWER):
                if not seen[-1][1].done:
                    seen.append((loop.time(), await session.step(action)))
        return seen

    async def main() -> Any:
        return await asyncio.gather(*map(one, range(episodes)))

    found: list[list[tuple[float, SQLObservation]]] = run_skipping(main(), counts_work=False)
    return found


def test_an_episode_sees_its_script() -> None:
    first, second, *_ = play(EnvironmentProfile())
    assert [seen.question for _, seen in first] == ["How many?"] * 3
    assert (first[1][1].result, second[1][1].error) == ("1\n1", "no such column: x")
    assert first[2][1].metadata["verdict"] == "correct"
    assert [seen.done for _, seen in first] == [False, False, True]
    assert first[2][1].action_history == ["QUERY x", "ANSWER 1"]


def test_the_budget_of_steps_ends_an_episode() -> None:
    last = play(EnvironmentProfile(), budget=1)[0][-1][1]
    assert (last.done, last.metadata["verdict"], last.budget_remaining) == (True, "out_of_budget", 0)


def test_times_are_drawn_from_the_seed_and_failures_cost_time_alone() -> None:
    calm = play(EnvironmentProfile(servers=2))
    assert calm == play(EnvironmentProfile(servers=2))
    troubled = play(EnvironmentProfile(servers=2, failure_share=0.4))
    assert [[seen for _, seen in each] for each in troubled] == [[seen for _, seen in each] for each in calm]
    assert sum(each[-1][0] for each in troubled) > sum(each[-1][0] for each in calm)


@pytest.mark.parametrize("wrong", [{"servers": 0}, {"workers": 0}, {"call_s": -1.0}, {"failure_share": 1.0}])
def test_a_profile_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        EnvironmentProfile(**wrong)
