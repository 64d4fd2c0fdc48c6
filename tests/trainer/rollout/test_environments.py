"""The in-process environments: what a session answers, that sessions are independent, that the loop stays free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from env_server.dataset import Dataset
from env_server.environment import SQLEnvironment
from env_server.errors import EpisodeOverError
from env_server.settings import EnvSettings
from env_server.types import AnswerMode, SQLAction, SQLObservation
from tests.env_server.serving import EPISODE, action, played_locally
from trainer.rollout.environments import Environments, LocalEnvironments


@pytest.fixture
def environments(pets: Dataset) -> Iterator[Environments]:
    local = LocalEnvironments(pets, threads=2)
    yield local
    local.close()


async def test_a_session_answers_as_the_environment_does(
    environments: Environments, environment: SQLEnvironment
) -> None:
    async with environments.session() as session:
        for _ in range(2):
            seen = [await session.reset("cats", "e"), *[await session.step(action(text)) for text in EPISODE]]
            assert seen == played_locally(environment)
        with pytest.raises(EpisodeOverError):
            await session.step(action("ANSWER 2"))


async def test_sessions_play_at_once_without_touching_each_other(environments: Environments) -> None:
    async with environments.session() as one, environments.session() as other:
        await asyncio.gather(one.reset("cats", "a"), other.reset("oldest", "b"))
        await asyncio.gather(one.step(action("DESCRIBE pets")), other.step(action("SAMPLE owners")))
        right, wrong = await asyncio.gather(one.step(action("ANSWER 2")), other.step(action("ANSWER 2")))
    assert (right.metadata["verdict"], wrong.metadata["verdict"]) == ("correct", "wrong")
    assert right.action_history == ["DESCRIBE pets", "ANSWER 2"]
    assert wrong.action_history == ["SAMPLE owners", "ANSWER 2"]


async def test_settings_and_answer_mode_reach_the_environment(pets: Dataset) -> None:
    local = LocalEnvironments(pets, EnvSettings(step_budget=2), AnswerMode.SQL, threads=1)
    async with local.session() as session:
        assert (await session.reset("cats", "e")).budget_remaining == 2
        done = await session.step(action("ANSWER SELECT COUNT(*) FROM pets WHERE species = 'cat'"))
        assert done.metadata["verdict"] == "correct"
    local.close()


async def test_the_event_loop_is_free_while_a_query_runs(
    environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two queries run in threads until the event loop, which would be blocked by either, lets them go."""
    started, go = threading.Barrier(3), threading.Event()
    step = SQLEnvironment.step

    def held(environment: SQLEnvironment, sent: SQLAction) -> SQLObservation:
        started.wait(timeout=60)
        assert go.wait(timeout=60)
        return step(environment, sent)

    monkeypatch.setattr(SQLEnvironment, "step", held)
    async with environments.session() as one, environments.session() as other:
        await asyncio.gather(one.reset("cats", "a"), other.reset("cats", "b"))
        steps = asyncio.gather(one.step(action("ANSWER 2")), other.step(action("ANSWER 3")))
        await asyncio.to_thread(started.wait, timeout=60)
        go.set()
        first, second = await steps
    assert (first.metadata["verdict"], second.metadata["verdict"]) == ("correct", "wrong")


async def test_a_cancelled_step_does_not_disturb_other_sessions(
    environments: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go = threading.Event(), threading.Event()
    step = SQLEnvironment.step

    def held(environment: SQLEnvironment, sent: SQLAction) -> SQLObservation:
        if sent.argument == "slow":
            started.set()
            assert go.wait(timeout=60)
        return step(environment, sent)

    monkeypatch.setattr(SQLEnvironment, "step", held)
    async with environments.session() as slow, environments.session() as other:
        await asyncio.gather(slow.reset("cats", "a"), other.reset("cats", "b"))
        task = asyncio.create_task(slow.step(action("ANSWER slow")))
        await asyncio.to_thread(started.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await other.step(action("ANSWER 2"))).done
    go.set()
