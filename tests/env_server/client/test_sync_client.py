"""The blocking client: the same episodes, wherever it is called from, and nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from env_server.client import SyncSQLEnvClient
from env_server.client.errors import ConnectionLostError
from env_server.dataset import Dataset, Split
from env_server.environment import SQLEnvironment
from tests.env_server.serving import PlayingServer, action, running_server


@pytest.fixture
def server(pets: Dataset) -> Iterator[PlayingServer]:
    with running_server(pets, token="geheim") as running:
        yield running


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    yield
    assert "sqlenv-client" not in {thread.name for thread in threading.enumerate()}


async def test_an_episode_where_a_loop_runs_already(server: PlayingServer, environment: SQLEnvironment) -> None:
    actions = [action("SAMPLE pets"), action("ANSWER 2")]
    expected = [environment.reset(1, "e", "cats", Split.TRAIN), *map(environment.step, actions)]
    with SyncSQLEnvClient([server.url], "geheim") as remote:
        assert remote.server == server.url
        assert [remote.reset(1, "e", "cats", Split.TRAIN), *map(remote.step, actions)] == expected
        assert remote.state() == environment.state
    server.wait_until(lambda: server.sessions == 0)


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
