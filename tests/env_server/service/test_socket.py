"""Sessions over real sockets: places, order, what ends a session, and what does not."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Origin, Subprotocol

from env_server.data.fingerprint import served_data
from env_server.dataset import Dataset
from env_server.environment import SQLEnvironment
from env_server.service.access import Access
from env_server.service.capacity import Capacity
from env_server.service.metrics import Metrics
from env_server.service.session import Session
from env_server.service.settings import ServiceSettings
from env_server.service.socket import Sockets
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.types import SERVES_HEADER, AnswerMode, SQLAction
from tests.env_server.conftest import RunningServer, Serve

SLOW = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT COUNT(*) FROM r"
"""Runs until its budget is used up, a second or so."""
FAST = "SELECT COUNT(*) FROM pets"


def counted(rows: int) -> str:
    """A query for the pool."""
    return f"WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r LIMIT {rows}) SELECT COUNT(*) FROM r"


async def ask(client: ClientConnection, request: object) -> dict[str, Any]:
    await client.send(request if isinstance(request, str | bytes) else json.dumps(request))
    return await answer(client)


async def answer(client: ClientConnection) -> dict[str, Any]:
    reply: dict[str, Any] = json.loads(await asyncio.wait_for(client.recv(), 20))
    return reply


async def state(client: ClientConnection) -> dict[str, Any]:
    found: dict[str, Any] = (await ask(client, {"type": "state"}))["data"]
    return found


async def closing_code(client: ClientConnection) -> int | None:
    """With which code the server closes, which it does next."""
    with pytest.raises(ConnectionClosed) as closed:
        await asyncio.wait_for(client.recv(), 20)
    return closed.value.rcvd.code if closed.value.rcvd else None


def reset(question_id: str = "cats", **data: str) -> dict[str, Any]:
    return {"type": "reset", "data": {"question_id": question_id, **data}}


def step(action_type: str, argument: str = "") -> dict[str, Any]:
    return {"type": "step", "data": {"action_type": action_type, "argument": argument}}


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the server, in its own thread, has come to it."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def is_busy(server: RunningServer) -> bool:
    return any(pool.running for pool in server.service.executor.pools.values())


async def test_an_episode_over_the_socket_is_the_episode_in_process(server: RunningServer, pets: Dataset) -> None:
    actions = [
        ("DESCRIBE", "pets"),
        ("SAMPLE", "owners"),
        ("QUERY", "SELECT COUNT(*) FROM pets"),
        ("QUERY", "SELECT COUNT(*) FROM pets"),
        ("QUERY", counted(3_000)),
        ("QUERY", "SELECT nonsense"),
        ("DANCE", ""),
        ("ANSWER", "2"),
    ]
    pool = DatabasePool(pets.databases, EnvSettings().sandbox)
    environment = SQLEnvironment(pets, pool)
    expected = [environment.reset(question_id="cats")]
    expected += [environment.step(SQLAction(action_type=kind, argument=argument)) for kind, argument in actions]
    pool.close()
    async with connect(server.ws) as client:
        replies = [await ask(client, reset())] + [await ask(client, step(*action)) for action in actions]
    for reply, observation in zip(replies, expected, strict=True):
        data = reply["data"]
        again = {**data["observation"], "reward": data["reward"], "done": data["done"], "metadata": data["metadata"]}
        assert again == json.loads(observation.model_dump_json())


async def test_the_handshake_says_what_is_served(server: RunningServer, pets: Dataset) -> None:
    async with connect(server.ws) as client:
        assert client.response is not None
        assert client.response.headers[SERVES_HEADER] == served_data(pets, AnswerMode.VALUE, EnvSettings()).version_tag


async def test_what_kills_an_upstream_session_leaves_ours_alive(server: RunningServer) -> None:
    async with connect(server.ws) as client:
        await ask(client, reset())
        for frame in ("[]", "3", "null", b"\x00\xff", "{", '{"type":"step","data":{"action_type":null}}'):
            assert (await ask(client, frame))["type"] == "error"
        assert (await ask(client, {"type": "mcp", "data": {"id": 5}}))["data"]["id"] == 5
        reply = await ask(client, step("QUERY", "SELECT 1"))
        assert reply["data"]["observation"]["step_count"] == 1


async def test_steps_out_of_turn_and_unknown_questions_are_errors_that_change_nothing(server: RunningServer) -> None:
    async with connect(server.ws) as client:
        for request in (step("SAMPLE", "pets"), reset("no such question")):
            assert (await ask(client, request))["data"]["code"] == "EXECUTION_ERROR"
        assert await state(client) == {"episode_id": None, "step_count": 0}
        await ask(client, reset(episode_id="one"))
        assert (await ask(client, step("ANSWER", "2")))["data"]["done"] is True
        late = await ask(client, step("ANSWER", "2"))
        assert (late["data"]["code"], "over" in late["data"]["message"]) == ("EXECUTION_ERROR", True)
        assert await state(client) == {"episode_id": "one", "step_count": 1}
        assert (await ask(client, reset(episode_id="two")))["data"]["done"] is False
        assert await state(client) == {"episode_id": "two", "step_count": 0}


async def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    """A query that needs the pool holds back the replies behind it, of its own session."""
    queries = [counted(5_000), "SELECT 1", counted(5_001), "SELECT 2", "SELEKT"]
    async with connect(server.ws) as client:
        for request in (reset(episode_id="piped"), *(step("QUERY", sql) for sql in queries)):
            await client.send(json.dumps(request))
            await client.send('{"type":"state"}')
            await client.send("no JSON")
        for number, sql in enumerate(["", *queries]):
            observation = (await answer(client))["data"]["observation"]
            assert (observation["step_count"], observation["action_history"][-1:]) == (
                number,
                [f"QUERY {sql}"][:number],
            )
            assert (await answer(client))["data"] == {"episode_id": "piped", "step_count": number}
            assert (await answer(client))["data"]["code"] == "INVALID_JSON"


async def test_close_ends_the_session_without_a_reply(server: RunningServer) -> None:
    async with connect(server.ws) as client:
        await ask(client, reset())
        await client.send('{"type":"close"}')
        assert await closing_code(client) == 1000
    await until(lambda: server.capacity.active == 0)


async def test_a_full_server_says_so(serve: Serve) -> None:
    server = serve(max_sessions=1, queue_size=0)
    async with connect(server.ws) as first:
        await ask(first, reset())
        async with connect(server.ws) as second:
            reply = await answer(second)
            assert reply["data"]["code"] == "CAPACITY_REACHED"
            assert (reply["data"]["active_sessions"], reply["data"]["max_sessions"]) == (1, 1)
            assert await closing_code(second) == 1000
    await until(lambda: server.capacity.active == 0)
    async with connect(server.ws) as third:
        assert (await ask(third, reset()))["type"] == "observation"


async def test_who_waits_gets_the_place_that_comes_free(serve: Serve) -> None:
    server = serve(max_sessions=1, queue_size=1, queue_timeout_s=20)
    async with connect(server.ws) as first:
        await ask(first, reset())
        async with connect(server.ws) as second:
            await second.send(json.dumps(reset("oslo")))
            await until(lambda: server.capacity.waiting == 1)
            await first.close()
            assert (await answer(second))["type"] == "observation"


async def test_who_gives_up_waiting_leaves_the_queue(serve: Serve) -> None:
    server = serve(max_sessions=1, queue_size=1, queue_timeout_s=60)
    async with connect(server.ws) as first:
        await ask(first, reset())
        async with connect(server.ws):
            await until(lambda: server.capacity.waiting == 1)
        await until(lambda: server.capacity.waiting == 0)
        assert server.capacity.active == 1


async def test_a_client_that_goes_frees_its_place_and_its_query(server: RunningServer) -> None:
    client = await connect(server.ws)
    await ask(client, reset())
    await client.send(json.dumps(step("QUERY", SLOW)))
    await until(lambda: is_busy(server))
    client.transport.abort()
    await until(lambda: server.capacity.active == 0)
    await until(lambda: not is_busy(server))


async def test_an_idle_session_is_told_and_closed(serve: Serve) -> None:
    server = serve(idle_timeout_s=0.2)
    async with connect(server.ws) as client:
        await ask(client, reset())
        reply = await answer(client)
        assert reply["data"]["code"] == "SESSION_ERROR"
        assert "idle" in reply["data"]["message"]
        assert await closing_code(client) == 1000
    await until(lambda: server.capacity.active == 0)
    assert closed_for(server.metrics) == {"idle": 1.0}


async def test_a_session_is_not_idle_while_its_query_runs(serve: Serve) -> None:
    async with connect(serve(idle_timeout_s=0.2).ws) as client:
        await ask(client, reset())
        reply = await ask(client, step("QUERY", SLOW))
        assert reply["type"] == "observation"


async def test_a_drain_lets_episodes_end(serve: Serve) -> None:
    server = serve(grace_s=20)
    async with connect(server.ws) as playing, connect(server.ws) as waiting:
        await ask(playing, reset())
        draining = asyncio.create_task(asyncio.to_thread(server.call, server.service.drain))
        told = await answer(waiting)
        assert told["data"]["code"] == "SESSION_ERROR"
        assert "shutting down" in told["data"]["message"]
        with pytest.raises(InvalidStatus) as refused:
            await connect(server.ws)
        assert refused.value.response.status_code == 503
        assert (await ask(playing, step("SAMPLE", "pets")))["type"] == "observation"
        last = await ask(playing, step("ANSWER", "2"))
        assert last["data"]["metadata"]["verdict"] == "correct"
        await draining
    assert server.capacity.active == 0


async def test_after_the_grace_period_the_rest_is_closed(serve: Serve) -> None:
    server = serve(grace_s=0.1)
    async with connect(server.ws) as client:
        await ask(client, reset())
        await client.send(json.dumps(step("QUERY", SLOW)))
        await until(lambda: is_busy(server))
        await asyncio.to_thread(server.call, server.service.drain)
        assert (await answer(client))["data"]["code"] == "SESSION_ERROR"
    assert server.capacity.active == 0


async def test_a_fast_sender_is_slowed_down_and_loses_nothing(serve: Serve) -> None:
    async with connect(serve(messages_per_s=50).ws) as client:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(130):
            await client.send('{"type":"state"}')
        replies = [await answer(client) for _ in range(130)]
        assert all(reply["type"] == "state" for reply in replies)
        assert loop.time() - began > 0.3, "100 at once, 30 more at 50 a second"


async def test_the_token_and_the_origin(serve: Serve) -> None:
    server = serve(token="s3cret")
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        with pytest.raises(InvalidStatus) as refused:
            await connect(server.ws, additional_headers=headers)
        assert refused.value.response.status_code == 401
        assert b"token" in refused.value.response.body
    right = {"Authorization": "Bearer s3cret"}
    async with connect(server.ws, additional_headers=right) as client:
        assert (await ask(client, reset()))["type"] == "observation"
    bearer = "bearer." + base64.urlsafe_b64encode(b"s3cret").decode().rstrip("=")
    async with connect(server.ws, subprotocols=[Subprotocol("openenv"), Subprotocol(bearer)]) as client:
        assert client.subprotocol == "openenv"
        assert (await ask(client, reset()))["type"] == "observation"
    with pytest.raises(InvalidStatus) as refused:
        await connect(server.ws, additional_headers=right, origin=Origin("http://evil.example.org"))
    assert refused.value.response.status_code == 403


async def test_the_route_of_a_step_is_counted_as_the_one_it_took(serve: Serve) -> None:
    server = serve()
    actions = [
        *(("DESCRIBE", "pets"), ("SAMPLE", "pets"), ("QUERY", FAST), ("QUERY", FAST), ("QUERY", "SELEC")),
        *(("QUERY", counted(3_000)), ("QUERY", counted(3_000)), ("DANCE", ""), ("ANSWER", "2")),
    ]
    async with connect(server.ws) as client:
        for request in (reset(), *(step(*action) for action in actions)):
            await ask(client, request)
    rendered = server.metrics.render().decode()
    assert dict(re.findall(r'step_seconds_count{source="(\w+)"} (\S+)', rendered)) == {
        "none": "3.0",
        "inline": "3.0",
        "cached": "2.0",
        "pool": "1.0",
    }


async def test_the_verdict_of_an_episode_is_the_outcome_of_its_last_step(serve: Serve) -> None:
    server = serve(step_budget=2)
    episodes = (
        [("DESCRIBE", "pets"), ("QUERY", FAST)],
        [("ANSWER", ""), ("SAMPLE", "dragons")],
        [("DANCE", ""), ("ANSWER", "3")],
        [("ANSWER", "2")],
    )
    async with connect(server.ws) as client:
        for actions in episodes:
            for request in (reset(), *(step(*action) for action in actions)):
                reply = await ask(client, request)
            assert reply["data"]["done"] is True
        page = await asyncio.to_thread(lambda: urlopen(f"{server.http}/metrics", timeout=20).read().decode())
    steps = re.findall(r'steps_total{action="(\w+)",outcome="(\w+)"} ([1-9]\S*)', page)
    assert sorted(steps) == [
        ("ANSWER", "correct", "1.0"),
        ("ANSWER", "error", "1.0"),
        ("ANSWER", "wrong", "1.0"),
        ("DESCRIBE", "ok", "1.0"),
        ("QUERY", "out_of_budget", "1.0"),
        ("SAMPLE", "out_of_budget", "1.0"),
        ("invalid", "error", "1.0"),
    ]


async def test_without_a_verdict_the_answer_is_an_error_and_can_be_given_again(serve: Serve) -> None:
    server = serve(answer_mode="sql")
    async with connect(server.ws) as client:
        await ask(client, reset())
        asking = asyncio.ensure_future(ask(client, step("ANSWER", SLOW)))
        while not asking.done():
            for pool in server.service.executor.pools.values():
                for pid in pool.pids if pool.running else ():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            await asyncio.wait({asking}, timeout=0.01)
        assert (await asking)["data"]["code"] == "EXECUTION_ERROR"
        assert (await state(client))["step_count"] == 0
        for query, verdict in (("SELECT COUNT(*) FROM pets WHERE species = 'cat'", "correct"), ("SELECT 2", "wrong")):
            last = await ask(client, step("ANSWER", query))
            assert last["data"]["metadata"]["verdict"] == verdict
            await ask(client, reset())


async def test_a_database_that_vanished_is_an_error_frame_and_a_line_in_the_log(
    serve: Serve, pets: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "moved.sqlite"
    path.write_bytes(pets.databases["pets"].read_bytes())
    server = serve(replace(pets, databases={"pets": path}))
    async with connect(server.ws) as client:
        await ask(client, reset())
        path.unlink()
        reply = await ask(client, step("QUERY", "SELECT 1"))
        assert (reply["type"], reply["data"]["code"]) == ("error", "EXECUTION_ERROR")
        assert "'pets' cannot be read" in reply["data"]["message"]
        assert (await ask(client, {"type": "state"}))["data"]["step_count"] == 0
    assert "a database cannot be used" in [record.msg for record in caplog.records]


class Socket:
    """The server's end of a socket: a client that connects and sends nothing; `error` is raised by what `at` names."""

    def __init__(self, at: str, error: OSError) -> None:
        self._at = at
        self._error = error
        self.sent: list[MutableMapping[str, Any]] = []
        self._connected = False

    async def receive(self) -> MutableMapping[str, Any]:
        if not self._connected:
            self._connected = True
            return {"type": "websocket.connect"}
        if self._at == "receive":
            raise self._error
        return {"type": "websocket.receive", "text": '{"type": "state"}'}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if self._at == "send" and self._connected and self.sent:
            raise self._error
        self.sent.append(message)


def played(socket: Socket, new_session: Callable[[], Session]) -> tuple[Capacity, Metrics, Awaitable[None]]:
    """Serve a socket on this thread's event loop; the result is the places, the counts and its end."""
    capacity = Capacity(1)
    metrics = Metrics()
    sockets = Sockets(ServiceSettings(), Access(None, ()), capacity, metrics, new_session, "")
    return capacity, metrics, sockets({"type": "websocket", "headers": []}, socket.receive, socket.send)


@pytest.mark.parametrize("at", ["receive", "send"])
async def test_an_error_of_the_socket_is_a_client_that_left(server: RunningServer, at: str) -> None:
    socket = Socket(at, ConnectionResetError("gone"))
    capacity, metrics, end = played(socket, server.service.sockets._new_session)
    await end
    assert closed_for(metrics) == {"disconnect": 1.0}
    assert capacity.active == 0


async def test_an_error_of_the_environment_is_not() -> None:
    def broken() -> Session:
        raise OSError(errno.EMFILE, "too many open files")

    socket = Socket("nowhere", OSError())
    capacity, metrics, end = played(socket, broken)
    with pytest.raises(OSError, match="too many open files"):
        await end
    _accepted, told, closed = socket.sent
    assert json.loads(told["text"])["data"]["code"] == "SESSION_ERROR"
    assert closed["type"] == "websocket.close"
    assert closed_for(metrics) == {"error": 1.0}
    assert capacity.active == 0


def closed_for(metrics: Metrics) -> dict[str, float]:
    """How many sessions were closed, by reason."""
    found = re.findall(r'sqlenv_sessions_closed_total{reason="(\w+)"} (\S+)', metrics.render().decode())
    return {reason: float(count) for reason, count in found if float(count)}
