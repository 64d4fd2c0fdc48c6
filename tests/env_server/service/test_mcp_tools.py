"""The tools, played by the official client: over HTTP, and over the standard input of `sqlenv mcp`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult

from env_server.actions import ACTIONS
from env_server.dataset import Dataset
from env_server.environment import EnvironmentFactory
from env_server.types import SQLAction
from tests.env_server.conftest import RunningServer, Serve
from tests.integration.service import write_data

PLAY = (
    ("describe", {"table": "pets"}),
    ("query", {"sql": "SELEC 1"}),
    ("query", {"sql": "SELECT COUNT(*) FROM pets WHERE kind = 'cat'"}),
)


def text_of(result: CallToolResult) -> str:
    (part,) = result.content
    assert part.type == "text"
    return part.text


async def start(client: Client, **arguments: Any) -> str:
    """Begin an episode; returns its id."""
    begun = await client.call_tool("start", arguments)
    assert not begun.is_error, text_of(begun)
    assert begun.structured_content is not None
    return str(begun.structured_content["episode"])


async def act(client: Client, episode: str, tool: str, **arguments: str) -> CallToolResult:
    result: CallToolResult = await client.call_tool(tool, {"episode": episode, **arguments})
    return result


@asynccontextmanager
async def connected(server: RunningServer, token: str = "") -> AsyncIterator[Client]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        httpx2.AsyncClient(headers=headers) as http,
        Client(streamable_http_client(f"{server.http}/mcp", http_client=http)) as client,
    ):
        yield client


async def play(client: Client, answer: str) -> list[tuple[str, float, bool]]:
    """Play the question about cats; returns what each call said, its reward, and whether it ended the episode."""
    episode = await start(client, question_id="cats")
    seen = []
    for tool, arguments in (*PLAY, ("answer", {"value": answer})):
        result = await act(client, episode, tool, **arguments)
        facts = result.structured_content
        assert facts is not None
        seen.append((text_of(result), facts["reward"], facts["done"]))
    assert (await act(client, episode, "describe", table="pets")).is_error, "it is over"
    return seen


async def test_an_episode_is_the_environments_own(server: RunningServer, pets: Dataset) -> None:
    async with connected(server) as client:
        listed = (await client.list_tools()).tools
        assert [tool.name for tool in listed] == ["start", *(kind.lower() for kind in ACTIONS)]
        seen = await play(client, "2")
    with EnvironmentFactory(pets) as factory:
        environment = factory.make()
        environment.reset(question_id="cats")
        for (tool, arguments), (text, reward, done) in zip((*PLAY, ("answer", {"value": "2"})), seen, strict=True):
            (argument,) = arguments.values()
            observation = environment.step(SQLAction(action_type=tool, argument=argument))
            assert (observation.error or observation.result) in text
            assert (reward, done) == (observation.reward, observation.done)
    assert "correct" in seen[-1][0]
    assert server.call(lambda: server.capacity.active) == 0


async def test_many_episodes_at_once_are_apart(server: RunningServer) -> None:
    async with connected(server) as client:
        first, second = await asyncio.gather(start(client, question_id="cats"), start(client, question_id="cats"))
        results = await asyncio.gather(
            *(act(client, first, "query", sql=f"SELECT {number}") for number in range(3)),
            act(client, second, "answer", value="7"),
        )
        left = sorted(result.structured_content["steps_left"] for result in results[:3])
        assert left == [12, 13, 14], "one after another"
        assert results[3].structured_content["verdict"] == "wrong"
        assert not (await act(client, first, "describe", table="pets")).is_error
        await act(client, first, "answer", value="x")


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("start", {"question_id": "no such"}, "no such"),
        ("start", {"seed": -1}, "seed"),
        ("describe", {"episode": "0" * 32, "table": "pets"}, "`start` begins one"),
        ("drop", {"episode": ""}, "there is no tool"),
    ],
)
async def test_what_cannot_be_done_is_said(
    server: RunningServer, tool: str, arguments: dict[str, Any], said: str
) -> None:
    async with connected(server) as client:
        result = await client.call_tool(tool, arguments)
        assert result.is_error
        assert said in text_of(result)
    assert server.call(lambda: server.capacity.active) == 0


async def test_episodes_take_slots_and_idle_ones_release_theirs(serve: Serve) -> None:
    server = serve(max_sessions=1, idle_timeout_s=1e-6)
    async with connected(server) as client:
        episode = await start(client)
        server.call(server.service.mcp.close_idle)  # type: ignore[union-attr]
        assert (await act(client, episode, "describe", table="pets")).is_error
        await start(client)


async def test_a_full_server_and_one_of_several_workers_begin_nothing(serve: Serve) -> None:
    full = serve(max_sessions=1)
    async with connected(full) as client:
        await start(client)
        assert "all 1 sessions" in text_of(await client.call_tool("start", {}))
    async with connected(serve(workers=2)) as client:
        assert "--workers 1" in text_of(await client.call_tool("start", {}))


async def test_the_token_is_asked_for(serve: Serve) -> None:
    server = serve(token="s3cret")
    async with connected(server, "s3cret") as client:
        await start(client)
    asked = {"Accept": "application/json, text/event-stream"}
    assert httpx2.post(f"{server.http}/mcp", json={}, headers=asked).status_code == 401


async def test_a_desktop_client_starts_the_command(pets: Dataset, tmp_path: Path, server: RunningServer) -> None:
    folder = write_data(pets, tmp_path)
    command = ["-m", "sqlenv", "mcp", "--data", str(folder)]
    async with Client(StdioServerParameters(command=sys.executable, args=command, cwd=Path.cwd())) as client:
        played = await play(client, "2")
    async with connected(server) as client:
        assert played == await play(client, "2")
