"""The blocking client: the same episodes, wherever it is called from, and nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from env_server.client import Reply, SyncEnvClient, SyncSQLEnvClient
from env_server.client.errors import ConnectionLostError, RemoteActionError
from env_server.dataset import Dataset, Split
from env_server.environment import SQLEnvironment
from env_server.errors import NoEpisodeError
from env_server.types import SQLAction
from tests.env_server.conftest import Serve
from tests.env_server.serving import Close, PlayingServer, running_server


@pytest.fixture
def server(pets: Dataset) -> Iterator[PlayingServer]:
    with running_server(pets, token="geheim") as running:
        yield running


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    yield
    assert "sqlenv-client" not in {thread.name for thread in threading.enumerate()}


def play(url: str, environment: SQLEnvironment) -> None:
    actions = [SQLAction(action_type=kind, argument=a) for kind, a in [("SAMPLE", "pets"), ("ANSWER", "2")]]
    expected = [environment.reset(1, "e", "cats", Split.TRAIN), *map(environment.step, actions)]
    with SyncSQLEnvClient(url, "geheim") as remote:
        assert [remote.reset(1, "e", "cats", Split.TRAIN), *map(remote.step, actions)] == expected
        assert remote.state() == environment.state


def test_an_episode(server: PlayingServer, environment: SQLEnvironment) -> None:
    play(server.url, environment)
    server.wait_until(lambda: server.sessions == 0)


async def test_an_episode_where_a_loop_runs_already(server: PlayingServer, environment: SQLEnvironment) -> None:
    play(server.url, environment)


def test_an_episode_on_the_service(serve: Serve, environment: SQLEnvironment) -> None:
    play(serve(token="geheim").ws, environment)


def test_dictionaries_in_and_out(server: PlayingServer) -> None:
    with SyncEnvClient([server.url], "geheim") as remote:
        assert remote.server == server.url
        assert isinstance(remote.reset(question_id="cats", episode_id="e"), Reply)
        assert remote.step({"action_type": "ANSWER", "argument": "2"}).reward == 0.98
        assert remote.state() == {"episode_id": "e", "step_count": 1}


def test_errors_are_those_of_the_async_client(server: PlayingServer) -> None:
    with SyncSQLEnvClient(server.url, "geheim") as remote:
        with pytest.raises(RemoteActionError, match="no question 'dogs'"):
            remote.reset(question_id="dogs")
        remote.reset(question_id="cats")
        server.script = lambda _: Close(1011)
        with pytest.raises(ConnectionLostError):
            remote.step(SQLAction(action_type="ANSWER", argument="2"))
        with pytest.raises(NoEpisodeError):
            remote.state()


def test_a_server_that_is_not_there(server: PlayingServer) -> None:
    server.die()
    with pytest.raises(ConnectionLostError, match="Is it running"), SyncSQLEnvClient(server.url, "geheim"):
        pass


def test_without_a_with_block(server: PlayingServer) -> None:
    remote = SyncSQLEnvClient(server.url, "geheim")
    assert remote.reset(question_id="cats").question == "How many cats are there?"
    remote.close()
    remote.close()
    with pytest.raises(RuntimeError, match="the loop is closed"):
        remote.reset(question_id="cats")
