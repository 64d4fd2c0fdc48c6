"""The clients, with async and without: whole episodes on the service, and on a server that fails."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from env_server.client import SQLEnvClient, SyncSQLEnvClient
from env_server.client.errors import (
    ConnectionLostError,
    FixTheCallError,
    ProtocolError,
    RemoteActionError,
    ServerBusyError,
)
from env_server.dataset import Dataset, Split
from env_server.environment import SQLEnvironment
from env_server.errors import NoEpisodeError
from env_server.types import SQLAction, SQLState
from tests.env_server.conftest import RunningServer
from tests.env_server.serving import EPISODE, Close, PlayingServer, action, played_locally, running_server


@pytest.fixture(params=["scripted", "service"])
def url(request: pytest.FixtureRequest, pets: Dataset) -> Iterator[str]:
    """A server that plays the pets: ours, and the one of the tests."""
    if request.param == "service":
        yield request.getfixturevalue("service").ws
    else:
        with running_server(pets, token="geheim") as running:
            yield running.url


def patient(url: str) -> SQLEnvClient:
    """A client that waits for the slot that another one has left."""
    return SQLEnvClient(url, "geheim", timeout_s=30.0)


@pytest.fixture
async def client(server: PlayingServer) -> AsyncIterator[SQLEnvClient]:
    async with SQLEnvClient(server.url) as connected:
        yield connected


async def test_an_episode_is_the_one_that_is_played_locally(url: str, environment: SQLEnvironment) -> None:
    expected = played_locally(environment)
    async with patient(url) as remote:
        for _ in range(2):
            seen = [await remote.reset(question_id="cats", episode_id="e")]
            for number, text in enumerate(EPISODE):
                assert await remote.state() == SQLState(episode_id="e", step_count=number)
                seen.append(await remote.step(action(text)))
            assert [o.model_dump_json() for o in seen] == [o.model_dump_json() for o in expected]
        for seed in range(4):
            assert await remote.reset(seed=seed) == environment.reset(seed=seed)
            assert (await remote.state()).episode_id == environment.state.episode_id
        assert (await remote.reset(split="eval")).question == "How many pets of each species are there?"


async def test_what_the_caller_does_wrong_keeps_the_session(service: RunningServer) -> None:
    async with patient(service.ws) as remote:
        for mistake in (remote.reset(question_id="dogs"), remote.step(action("ANSWER 2"))):
            with pytest.raises(RemoteActionError) as refused:
                await mistake
            assert refused.value.code == "EXECUTION_ERROR"
        for wrong in (remote.reset(seed=-1), remote.reset(split="night")):
            with pytest.raises(FixTheCallError):
                await wrong
        with pytest.raises(NoEpisodeError):
            await remote.state()
        await remote.reset(question_id="cats")
        assert (await remote.step(action("ANSWER 2"))).done
        with pytest.raises(RemoteActionError):
            await remote.step(action("ANSWER 2"))
        assert (await remote.state()).step_count == 1


async def test_a_full_service_says_how_full_it_is(service: RunningServer) -> None:
    async with patient(service.ws) as first:
        await first.reset(question_id="cats")
        with pytest.raises(ServerBusyError, match="--max_sessions") as busy:
            await SQLEnvClient(service.ws, "geheim").reset(question_id="cats")
        assert (busy.value.active_sessions, busy.value.max_sessions) == (1, 1)
    async with patient(service.ws) as second:
        assert (await second.reset(question_id="cats")).question == "How many cats are there?"


async def test_connecting_is_not_needed_and_not_done_twice(server: PlayingServer) -> None:
    remote = SQLEnvClient(server.url)
    on = [remote.server]
    for call in (remote.step(SQLAction(action_type="ANSWER")), remote.state()):
        with pytest.raises(NoEpisodeError):
            await call
    await remote.reset(question_id="cats")
    on.append(remote.server)
    await remote.connect()
    assert (await remote.state()).step_count == 0
    assert server.opened == 1
    await remote.close()
    await remote.close()
    assert [*on, remote.server] == [None, server.url, None]
    await asyncio.to_thread(server.wait_until, lambda: server.sessions == 0)


async def test_a_lost_step_is_not_sent_again_and_a_reset_begins_anew(
    client: SQLEnvClient, server: PlayingServer
) -> None:
    await client.reset(question_id="cats")
    server.script = lambda request: Close(1011) if request["type"] == "step" else None
    with pytest.raises(ConnectionLostError):
        await client.step(action("ANSWER 2"))
    with pytest.raises(NoEpisodeError):
        await client.step(action("ANSWER 2"))
    assert len(server.played("step")) == 1
    server.script = lambda _: None
    await client.reset(question_id="cats")
    server.hang_up()
    assert (await client.reset(question_id="oldest")).question == "What is the oldest pet's name?"
    assert (await client.step(action("ANSWER Max"))).done


async def test_two_calls_at_once_are_a_mistake_that_costs_nothing(client: SQLEnvClient) -> None:
    await client.reset(question_id="cats")
    step = asyncio.create_task(client.step(action("SAMPLE pets")))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one request at a time"):
        await client.state()
    assert (await step).step_count == 1
    assert (await client.state()).step_count == 1


@pytest.mark.parametrize("data", [{}, {"observation": []}, {"observation": {"board": "x"}}, {"reward": 1.0}])
async def test_another_environment_than_sqlenv(
    client: SQLEnvClient, server: PlayingServer, data: dict[str, Any]
) -> None:
    server.script = lambda _: json.dumps({"type": "observation", "data": data})
    with pytest.raises(ProtocolError, match="another environment than SQLEnv"):
        await client.reset()
    assert client.server is None
    server.script = lambda _: json.dumps({"type": "state", "data": {"episode_id": "e", "board": "x"}})
    await client.connect()
    with pytest.raises(ProtocolError, match="its state is not SQLEnv's"):
        await client.state()


async def test_an_episode_without_async_where_a_loop_runs_already(
    server: PlayingServer, environment: SQLEnvironment
) -> None:
    actions = [action("SAMPLE pets"), action("ANSWER 2")]
    expected = [environment.reset(1, "e", "cats", Split.TRAIN), *map(environment.step, actions)]
    with SyncSQLEnvClient([server.url]) as remote:
        assert remote.server == server.url
        assert [remote.reset(1, "e", "cats", Split.TRAIN), *map(remote.step, actions)] == expected
        assert remote.state() == environment.state
    server.wait_until(lambda: server.sessions == 0)
    remote.close()
    with pytest.raises(RuntimeError, match="the loop is closed"):
        remote.reset(question_id="cats")
    server.die()
    with pytest.raises(ConnectionLostError, match="Is it running"), SyncSQLEnvClient(server.url):
        pass
    assert "sqlenv-client" not in {thread.name for thread in threading.enumerate()}
