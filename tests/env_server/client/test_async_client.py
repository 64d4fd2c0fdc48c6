"""The async client: whole episodes, typed and untyped, against the service and against a server that fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from env_server.client import EnvClient, Reply, SessionPool, SQLEnvClient, Timeouts
from env_server.client.errors import (
    AddressError,
    AuthenticationError,
    ConnectionLostError,
    DeadlineError,
    NoServerError,
    ProtocolError,
    RemoteActionError,
    ServerBusyError,
)
from env_server.dataset import Dataset, Split
from env_server.environment import SQLEnvironment
from env_server.errors import NoEpisodeError
from env_server.types import SQLAction, SQLObservation, SQLState
from tests.env_server.conftest import Serve
from tests.env_server.serving import Close, Hang, PlayingServer, running_server

EPISODE = (
    "DESCRIBE pets",
    "SAMPLE owners",
    "QUERY SELECT nothing",
    "QUERY SELECT COUNT(*) FROM pets WHERE species = 'cat'",
    "QUERY SELECT 1e999, -1.5, NULL, '猫'",
    "DANCE",
    "ANSWER 2",
)


def action(text: str) -> SQLAction:
    kind, _, argument = text.partition(" ")
    return SQLAction(action_type=kind, argument=argument)


@pytest.fixture
def server(pets: Dataset) -> Iterator[PlayingServer]:
    with running_server(pets) as running:
        yield running


@pytest.fixture(params=["scripted", "service"])
def url(request: pytest.FixtureRequest, serve: Serve, pets: Dataset) -> Iterator[str]:
    """A server that plays the pets: ours, and the one of the tests."""
    if request.param == "service":
        yield serve(token="geheim").ws
    else:
        with running_server(pets, token="geheim") as running:
            yield running.url


@pytest.fixture
async def client(server: PlayingServer) -> AsyncIterator[EnvClient]:
    async with EnvClient(server.url) as connected:
        yield connected


def played_locally(environment: SQLEnvironment) -> list[SQLObservation]:
    first = environment.reset(question_id="cats", episode_id="e")
    return [first, *(environment.step(action(text)) for text in EPISODE)]


async def test_an_episode_is_the_one_that_is_played_locally(url: str, environment: SQLEnvironment) -> None:
    expected = played_locally(environment)
    async with SQLEnvClient(url, "geheim") as remote:
        for _ in range(2):
            seen = [await remote.reset(question_id="cats", episode_id="e")]
            for number, text in enumerate(EPISODE):
                assert await remote.state() == SQLState(episode_id="e", step_count=number)
                seen.append(await remote.step(action(text)))
            assert seen == expected
            assert [o.model_dump_json() for o in seen] == [o.model_dump_json() for o in expected]


async def test_a_question_is_drawn_as_it_is_locally(url: str, environment: SQLEnvironment) -> None:
    async with SQLEnvClient(url, "geheim") as remote:
        for seed in range(4):
            assert await remote.reset(seed=seed) == environment.reset(seed=seed)
            assert (await remote.state()).episode_id == environment.state.episode_id
        assert (await remote.reset(split=Split.EVAL)).question == "How many pets of each species are there?"


async def test_dictionaries_in_and_out(url: str) -> None:
    async with EnvClient(url, "geheim") as remote:
        reply = await remote.reset(question_id="cats", episode_id="e")
        assert isinstance(reply, Reply)
        assert (reply.reward, reply.done, reply.metadata) == (0.0, False, {})
        assert reply.observation["question"] == "How many cats are there?"
        assert "reward" not in reply.observation
        reply = await remote.step({"action_type": "ANSWER", "argument": "2"})
        assert (reply.reward, reply.done, reply.metadata["verdict"]) == (0.98, True, "correct")
        assert await remote.state() == {"episode_id": "e", "step_count": 1}


async def test_a_wrong_token(url: str) -> None:
    for token in (None, "wrong"):
        with pytest.raises(AuthenticationError, match="--env_token or SQLENV_TOKEN"):
            await SQLEnvClient(url, token).connect()


async def test_what_the_caller_does_wrong_keeps_the_session(url: str) -> None:
    async with SQLEnvClient(url, "geheim") as remote:
        with pytest.raises(RemoteActionError, match=r"EXECUTION_ERROR: .*call reset"):
            await remote.step(action("ANSWER 2"))
        with pytest.raises(RemoteActionError, match=r"EXECUTION_ERROR: .*no question 'dogs'") as failed:
            await remote.reset(question_id="dogs")
        assert failed.value.code == "EXECUTION_ERROR"
        await remote.reset(question_id="cats")
        assert (await remote.step(action("ANSWER 2"))).done
        with pytest.raises(RemoteActionError, match="EXECUTION_ERROR: the episode is over"):
            await remote.step(action("ANSWER 2"))
        assert (await remote.state()).step_count == 1


async def test_what_a_server_cannot_read_comes_back_with_its_details(serve: Serve) -> None:
    async with EnvClient(serve().ws) as remote:
        with pytest.raises(RemoteActionError, match="VALIDATION_ERROR: action_type: Field required") as failed:
            await remote.step({"argument": "2"})
        assert failed.value.details["errors"][0]["loc"] == ["action_type"]
        await remote.reset(seed=1)


async def test_a_full_service_says_how_full_it_is(serve: Serve) -> None:
    url = serve(max_sessions=1, queue_size=0).ws
    async with SQLEnvClient(url) as first:
        await first.reset(question_id="cats")
        with pytest.raises(ServerBusyError, match=r"1 of 1 are taken: .*--max_sessions") as busy:
            await SQLEnvClient(url).reset(question_id="cats")
        assert (busy.value.active_sessions, busy.value.max_sessions) == (1, 1)
    waiting = SQLEnvClient(url, patience_s=30.0)
    assert (await waiting.reset(question_id="cats")).question == "How many cats are there?"
    await waiting.close()


async def test_one_socket_serves_episode_after_episode(client: EnvClient, server: PlayingServer) -> None:
    for _ in range(3):
        await client.reset(question_id="cats")
        await client.step({"action_type": "ANSWER", "argument": "2"})
    assert server.opened == 1


async def test_connecting_is_not_needed_and_not_done_twice(server: PlayingServer) -> None:
    remote = EnvClient(server.url)
    on = [remote.server]
    await remote.reset(question_id="cats")
    on.append(remote.server)
    await remote.connect()
    assert server.opened == 1
    await remote.close()
    on.append(remote.server)
    assert on == [None, server.url, None]
    await remote.close()
    await asyncio.to_thread(server.wait_until, lambda: server.sessions == 0)


async def test_a_step_without_an_episode(server: PlayingServer) -> None:
    for call in (EnvClient(server.url).step({}), EnvClient(server.url).state()):
        with pytest.raises(NoEpisodeError, match="call reset first"):
            await call


async def test_a_lost_step_is_not_sent_again_and_reset_begins_anew(client: EnvClient, server: PlayingServer) -> None:
    await client.reset(question_id="cats")
    server.script = lambda request: Close(1011) if request["type"] == "step" else None
    with pytest.raises(ConnectionLostError):
        await client.step({"action_type": "ANSWER", "argument": "2"})
    with pytest.raises(NoEpisodeError):
        await client.step({"action_type": "ANSWER", "argument": "2"})
    assert len(server.played("step")) == 1
    server.script = lambda _: None
    await client.reset(question_id="cats")
    assert (await client.step({"action_type": "ANSWER", "argument": "2"})).done


async def test_a_reset_survives_the_loss_of_its_session(client: EnvClient, server: PlayingServer) -> None:
    await client.reset(question_id="cats")
    server.hang_up()
    assert (await client.reset(question_id="oldest")).observation["question"] == "What is the oldest pet's name?"


async def test_a_reset_goes_to_another_server(pets: Dataset) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(running_server(pets)) for _ in range(3)]
        async with EnvClient(",".join(server.url for server in servers)) as remote:
            for _ in range(2):
                await remote.reset(question_id="cats")
                (used,) = (server for server in servers if server.url == remote.server)
                used.die()
            await remote.reset(question_id="cats")
            (used,) = (server for server in servers if server.url == remote.server)
            used.die()
            with pytest.raises(NoServerError, match="cannot be reached"):
                await remote.reset(question_id="cats")
            used.start()
            await remote.reset(question_id="cats")


async def test_no_answer_in_time(pets: Dataset) -> None:
    with running_server(pets) as server:
        remote = EnvClient(server.url, timeouts=Timeouts(request_s=0.1))
        await remote.reset(question_id="cats")
        server.script = lambda _: Hang()
        with pytest.raises(DeadlineError, match=r"no answer to a step in 0\.1 s"):
            await remote.step({"action_type": "ANSWER", "argument": "2"})
        with pytest.raises(DeadlineError, match=r"no answer to a reset in 0\.1 s"):
            await remote.reset(question_id="cats")
        await asyncio.to_thread(server.wait_until, lambda: server.sessions == 0)
        server.script = lambda _: None
        await remote.reset(question_id="cats")
        await remote.close()


async def test_a_cancelled_step_ends_the_session(client: EnvClient, server: PlayingServer) -> None:
    await client.reset(question_id="cats")
    server.script = lambda request: Hang() if request["type"] == "step" else None
    task = asyncio.create_task(client.step({"action_type": "ANSWER", "argument": "2"}))
    await asyncio.to_thread(server.wait_until, lambda: bool(server.played("step")))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(server.wait_until, lambda: server.sessions == 0)
    with pytest.raises(NoEpisodeError):
        await client.state()
    await client.reset(question_id="cats")


async def test_two_calls_at_once_are_a_mistake_that_costs_nothing(client: EnvClient) -> None:
    await client.reset(question_id="cats")
    step = asyncio.create_task(client.step({"action_type": "SAMPLE", "argument": "pets"}))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one request at a time"):
        await client.state()
    assert (await step).observation["step_count"] == 1
    assert (await client.state())["step_count"] == 1


async def test_clients_of_one_pool_share_its_servers_and_sockets(pets: Dataset) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(running_server(pets)) for _ in range(2)]
        pool = SessionPool([server.url for server in servers])
        for _ in range(3):
            clients = [EnvClient(pool) for _ in range(4)]
            await asyncio.gather(*(client.reset(question_id="cats") for client in clients))
            for client in clients:
                await client.close()
        assert [server.opened for server in servers] == [2, 2]
        await pool.aclose()


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"observation": []},
        {"observation": {}, "reward": "1"},
        {"observation": {}, "done": 1},
        {"observation": {}, "metadata": ["verdict"]},
    ],
)
async def test_an_observation_that_is_none(client: EnvClient, server: PlayingServer, data: dict[str, Any]) -> None:
    server.script = lambda _: json.dumps({"type": "observation", "data": data})
    with pytest.raises(ProtocolError, match="its observation is not OpenEnv's"):
        await client.reset()


@pytest.mark.parametrize(
    ("data", "reply"),
    [
        ({"observation": {"echo": 1}, "reward": None, "done": False}, Reply({"echo": 1}, None, False)),
        ({"observation": {"echo": 1}}, Reply({"echo": 1}, None, False)),
        ({"observation": {}, "reward": 1, "done": True, "metadata": None}, Reply({}, 1.0, True)),
        ({"observation": {}, "metadata": {"a": 1}, "later": "more"}, Reply({}, None, False, {"a": 1})),
    ],
)
async def test_observations_of_other_openenv_servers(
    client: EnvClient, server: PlayingServer, data: dict[str, Any], reply: Reply
) -> None:
    server.script = lambda _: json.dumps({"type": "observation", "data": data})
    assert await client.reset() == reply


async def test_another_environment_than_sqlenv(server: PlayingServer) -> None:
    server.script = lambda _: json.dumps({"type": "observation", "data": {"observation": {"board": "x"}}})
    async with SQLEnvClient(server.url) as remote:
        with pytest.raises(ProtocolError, match="another environment than SQLEnv"):
            await remote.reset()
        server.script = lambda _: json.dumps({"type": "state", "data": {"board": "x"}})
        with pytest.raises(ProtocolError, match="its state is not SQLEnv's"):
            await remote.state()


@pytest.mark.parametrize("urls", ["localhost:8000", ["ws://a", "b"], ""])
def test_a_url_that_is_none_is_known_before_anything_is_sent(urls: str | Sequence[str]) -> None:
    with pytest.raises(AddressError):
        SQLEnvClient(urls)
