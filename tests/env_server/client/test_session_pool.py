"""Sessions over servers that come and go: where they land, what is kept open, who is told what."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial

import pytest

from env_server.client.connection import Connection, Timeouts
from env_server.client.errors import (
    AuthenticationError,
    ClientError,
    ConnectionLostError,
    DeadlineError,
    NoServerError,
    RemoteActionError,
    ServerRefusesError,
)
from env_server.client.servers import Server
from env_server.client.session_pool import LOSSES_ALLOWED, SessionPool
from env_server.dataset import Dataset
from tests.env_server.serving import Close, Die, Hang, PlayingServer, running_server

PATIENCE_S = 20.0
"""Long enough for every backoff that a test waits for."""


@pytest.fixture
def servers(pets: Dataset) -> Iterator[list[PlayingServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_server(pets)) for _ in range(3)]


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
async def make_pool(notices: list[str]) -> AsyncIterator[Callable[..., SessionPool]]:
    pools: list[SessionPool] = []

    def make(*servers: PlayingServer, **options: object) -> SessionPool:
        urls = [server.url for server in servers]
        pool = SessionPool(urls, **{"notice": notices.append, **options})  # type: ignore[arg-type]
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        await pool.aclose()


async def nothing(_: Connection) -> None:
    """No work."""


async def reset(connection: Connection) -> str:
    return str((await connection.request("reset", {"question_id": "cats"}))["observation"]["question"])


def counts(servers: list[PlayingServer]) -> list[int]:
    return [server.opened for server in servers]


MakePool = Callable[..., SessionPool]


@asynccontextmanager
async def lent(pool: SessionPool, work: Callable[[Connection], Awaitable[object]]) -> AsyncIterator[Connection]:
    connection, _ = await pool.begin(work, PATIENCE_S)
    try:
        yield connection
    finally:
        pool.release(connection)


async def test_sessions_are_spread_over_the_servers(make_pool: MakePool, servers: list[PlayingServer]) -> None:
    pool = make_pool(*servers)
    began = await asyncio.gather(*(pool.begin(reset) for _ in range(9)))
    assert counts(servers) == [3, 3, 3]
    for connection, question in began:
        assert question == "How many cats are there?"
        pool.release(connection)


async def test_a_socket_outlives_its_episode(make_pool: MakePool, servers: list[PlayingServer]) -> None:
    pool = make_pool(servers[0])
    for _ in range(5):
        async with lent(pool, reset):
            pass
    assert (servers[0].opened, servers[0].sessions) == (1, 1)
    assert len(servers[0].played("reset")) == 5
    await pool.aclose()
    await asyncio.to_thread(servers[0].wait_until, lambda: servers[0].sessions == 0)


async def test_closing_drops_what_is_still_lent(make_pool: MakePool, servers: list[PlayingServer]) -> None:
    pool = make_pool(servers[0])
    connection, _ = await pool.begin(reset)
    await pool.aclose()
    await asyncio.to_thread(servers[0].wait_until, lambda: servers[0].sessions == 0)
    pool.release(connection)


async def test_a_dead_server_costs_one_message_and_no_session(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str]
) -> None:
    pool = make_pool(*servers)
    servers[1].die()
    began = await asyncio.gather(*(pool.begin(reset, PATIENCE_S) for _ in range(12)))
    on = Counter(connection.server.port for connection, _ in began)
    assert on == {servers[0].port: 6, servers[2].port: 6}
    (notice,) = notices
    assert notice.startswith(f"environment server ws://127.0.0.1:{servers[1].port}: it cannot be reached")
    for connection, _ in began:
        pool.release(connection)


async def test_a_server_that_comes_back_is_used_again(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str], short_backoffs: None
) -> None:
    failing = asyncio.Event()

    def notice(text: str) -> None:
        notices.append(text)
        failing.set()

    pool = make_pool(servers[0], notice=notice)
    servers[0].die()
    waiting = [asyncio.create_task(pool.begin(reset, PATIENCE_S)) for _ in range(4)]
    await failing.wait()
    servers[0].start()
    for connection, question in await asyncio.gather(*waiting):
        assert question == "How many cats are there?"
        pool.release(connection)
    assert len(notices) == 2
    assert notices[1] == f"environment server ws://127.0.0.1:{servers[0].port}: it takes sessions again"


@pytest.mark.parametrize(("age_s", "opened"), [(0.0, 3), (300.0, 1)])
async def test_a_socket_is_used_again_until_it_is_old(
    make_pool: MakePool, servers: list[PlayingServer], monkeypatch: pytest.MonkeyPatch, age_s: float, opened: int
) -> None:
    monkeypatch.setattr("env_server.client.session_pool.SOCKET_AGE_S", age_s)
    pool = make_pool(servers[0])
    for _ in range(3):
        async with lent(pool, reset):
            pass
    assert servers[0].opened == opened
    await asyncio.to_thread(servers[0].wait_until, lambda: servers[0].sessions == (1 if age_s else 0))


async def test_an_idle_socket_that_has_become_old_is_closed(make_pool: MakePool, servers: list[PlayingServer]) -> None:
    pool = make_pool(servers[0])
    async with lent(pool, reset) as first:
        pass
    first.keep_until = 0.0
    async with lent(pool, reset) as second:
        assert second is not first
        await asyncio.to_thread(servers[0].wait_until, lambda: servers[0].sessions == 1)


async def test_sessions_that_were_lost_together_are_one_failure(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str]
) -> None:
    """Behind a load balancer each finds out for itself that its server has gone, while others already play again."""
    pool = make_pool(servers[0])
    first, *others = [connection for connection, _ in await asyncio.gather(*(pool.begin(reset) for _ in range(3)))]
    servers[0].hang_up()
    with pytest.raises(ConnectionLostError):
        await pool.go_on(first, reset)
    async with lent(pool, reset) as again:
        for other in others:
            with pytest.raises(ConnectionLostError):
                await pool.go_on(other, reset)
        assert len(notices) == 2
        assert "takes sessions again" in notices[1]
        servers[0].hang_up()
        with pytest.raises(ConnectionLostError):
            await pool.go_on(again, reset)
        assert len(notices) == 3, "it was begun since"


async def test_idle_sockets_that_were_closed_are_not_used(make_pool: MakePool, servers: list[PlayingServer]) -> None:
    pool = make_pool(servers[0])
    began = await asyncio.gather(*(pool.begin(reset) for _ in range(LOSSES_ALLOWED + 2)))
    for connection, _ in began:
        pool.release(connection)
    servers[0].hang_up()
    for connection, _ in began:
        await connection._socket.wait_closed()
    async with lent(pool, reset):
        assert servers[0].opened == len(began) + 1


@pytest.mark.parametrize("healthy", [1, 3])
async def test_stale_idle_sockets_are_not_taken_for_losses(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str], healthy: int
) -> None:
    pool = make_pool(*servers[:healthy])
    idle = [connection for connection, _ in await asyncio.gather(*(pool.begin(reset) for _ in range(LOSSES_ALLOWED)))]
    for connection in idle:
        pool.release(connection)
    for server in servers:
        server.script = lambda request: Close() if request["type"] == "state" else None

    async def work(connection: Connection) -> str:
        # The server hangs up on whoever asks for the state, which those do that were idle.
        return str(await connection.request("state")) if connection in idle else await reset(connection)

    for _ in range(LOSSES_ALLOWED):
        async with lent(pool, work) as connection:
            assert connection not in idle
    assert notices == []
    assert sum(counts(servers)) <= 2 * LOSSES_ALLOWED


async def test_a_full_server_passes_sessions_on(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str]
) -> None:
    for server, limit in zip(servers, (1, 2, 100), strict=True):
        server.max_sessions = limit
    pool = make_pool(*servers)
    began = await asyncio.gather(*(pool.begin(reset, PATIENCE_S) for _ in range(15)))
    on = Counter(connection.server.port for connection, _ in began)
    assert on[servers[0].port] == 1
    assert on[servers[1].port] == 2
    assert on[servers[2].port] == 12
    assert len(notices) == 2
    assert "1 of 1 are taken: all in use" in "".join(notices)
    for connection, _ in began:
        pool.release(connection)


async def test_who_waits_for_a_full_server_gets_the_first_session_that_is_released(
    make_pool: MakePool, servers: list[PlayingServer]
) -> None:
    servers[0].max_sessions = 2
    pool = make_pool(servers[0])
    first, second = [connection for connection, _ in await asyncio.gather(pool.begin(reset), pool.begin(reset))]
    waiting = [asyncio.create_task(pool.begin(reset, PATIENCE_S)) for _ in range(3)]
    await asyncio.to_thread(servers[0].wait_until, lambda: servers[0].opened > 2)
    pool.release(first)
    pool.release(second)
    for task in asyncio.as_completed(waiting):
        connection, _ = await task
        assert connection in (first, second)
        pool.release(connection)


async def test_without_patience_each_server_is_tried_once(make_pool: MakePool, servers: list[PlayingServer]) -> None:
    servers[0].max_sessions = servers[1].max_sessions = 0
    servers[2].refuse_with = 503
    pool = make_pool(*servers)
    for attempt in (1, 2):
        with pytest.raises(NoServerError, match="no session at the first attempt") as failed:
            await pool.begin(reset)
        assert {type(error).__name__ for error in failed.value.failures.values()} == {
            "ServerBusyError",
            "ServerDrainingError",
        }
        assert counts(servers)[:2] == [attempt, attempt], "also while they are backed off from"
        assert len(servers[2].headers) == attempt


async def test_patience_ends(make_pool: MakePool, servers: list[PlayingServer]) -> None:
    servers[0].max_sessions = 0
    servers[1].die()
    with pytest.raises(NoServerError, match=r"no session in 0\.05 s \(.*cannot be reached.*\)"):
        await make_pool(*servers[:2]).begin(reset, 0.05)


async def test_patience_is_not_wasted_on_what_will_not_change(
    make_pool: MakePool, servers: list[PlayingServer]
) -> None:
    for server in servers:
        server.token = "secret"
    with pytest.raises(AuthenticationError):
        await make_pool(*servers).begin(reset, 1e9)


async def test_one_server_that_refuses_does_not_stop_the_others(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str]
) -> None:
    servers[0].token = "secret"
    pool = make_pool(*servers[:2])
    for connection, _ in await asyncio.gather(*(pool.begin(reset, PATIENCE_S) for _ in range(4))):
        assert connection.server.port == servers[1].port
        pool.release(connection)
    assert len(notices) == 1
    assert "SQLENV_TOKEN" in notices[0]


async def test_a_complaint_about_the_request_is_not_tried_elsewhere(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str]
) -> None:
    async def wrong(connection: Connection) -> None:
        await connection.request("reset", {"question_id": "dogs"})

    pool = make_pool(*servers)
    with pytest.raises(RemoteActionError, match="no question 'dogs'"):
        await pool.begin(wrong, PATIENCE_S)
    assert sum(counts(servers)) == 1
    async with lent(pool, reset):
        assert sum(counts(servers)) in (1, 2), "the socket is kept"
    assert notices == []


@pytest.mark.parametrize("reused", [False, True])
async def test_a_request_that_brings_servers_down_does_not_bring_down_all(
    make_pool: MakePool, pets: Dataset, reused: bool
) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(running_server(pets)) for _ in range(LOSSES_ALLOWED + 2)]
        pool = make_pool(*servers)
        if reused:
            for connection, _ in await asyncio.gather(*(pool.begin(reset) for _ in servers)):
                pool.release(connection)
        for server in servers:
            server.script = lambda _: Die()
        with pytest.raises(ConnectionLostError):
            await pool.begin(reset, PATIENCE_S)
        assert sum(server.listening for server in servers) == 2


async def test_a_server_that_does_not_answer_is_left(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str]
) -> None:
    servers[0].script = servers[1].script = lambda _: Hang()
    pool = make_pool(*servers, timeouts=Timeouts(request_s=0.1))
    async with lent(pool, reset) as connection:
        assert connection.server.port == servers[2].port
    assert all("no answer to a reset in 0.1 s" in notice for notice in notices)
    assert len(notices) <= 2


async def test_a_search_that_is_cancelled_leaves_nothing_behind(
    make_pool: MakePool, servers: list[PlayingServer]
) -> None:
    servers[0].script = lambda _: Hang()
    pool = make_pool(servers[0])
    task = asyncio.create_task(pool.begin(reset, PATIENCE_S))
    await asyncio.to_thread(servers[0].wait_until, lambda: bool(servers[0].requests))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(servers[0].wait_until, lambda: servers[0].sessions == 0)
    servers[0].script = lambda _: None
    async with lent(pool, reset):
        assert pool._board.in_flight(pool.servers[0]) == 1
    assert pool._board.in_flight(pool.servers[0]) == 0


async def test_a_session_that_fails_later_is_told_to_the_pool(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str]
) -> None:
    pool = make_pool(servers[0])
    connection, _ = await pool.begin(reset)
    servers[0].die()
    with pytest.raises(ConnectionLostError) as lost:
        await pool.go_on(connection, reset)
    assert notices == [f"{lost.value}; its sessions go elsewhere or wait, and it is tried again"]
    assert pool._board.in_flight(connection.server) == 0


async def test_a_check_is_asked_before_the_first_session_and_after_a_failure(
    make_pool: MakePool, servers: list[PlayingServer], short_backoffs: None
) -> None:
    asked: list[int] = []

    async def check(server: Server) -> None:
        asked.append(server.port)

    pool = make_pool(servers[0], check=check)
    began = [await pool.begin(reset) for _ in range(3)]
    assert asked == [servers[0].port]
    servers[0].die()
    servers[0].start()
    for connection, _ in began:
        with pytest.raises(ConnectionLostError):
            await pool.go_on(connection, reset)
    async with lent(pool, reset):
        assert asked == [servers[0].port] * 2


async def test_a_server_that_fails_its_check_is_not_used(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str]
) -> None:
    async def check(server: Server) -> None:
        if server.port != servers[2].port:
            raise ServerRefusesError(server.name, "it is not the one")

    pool = make_pool(*servers, check=check)
    began = await asyncio.gather(*(pool.begin(reset, PATIENCE_S) for _ in range(6)))
    assert counts(servers) == [0, 0, 6]
    assert len(notices) == 2
    for connection, _ in began:
        pool.release(connection)


async def test_every_server_is_checked_at_the_start(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str]
) -> None:
    verdicts: dict[int, ClientError] = {}

    async def check(server: Server) -> None:
        if server.port in verdicts:
            raise verdicts[server.port]

    lost = partial(ConnectionLostError, "x", "cannot be reached")
    await make_pool(*servers, check=check).check_all()
    verdicts[servers[0].port] = lost()
    await make_pool(*servers, check=check).check_all()
    assert len(notices) == 1
    verdicts[servers[1].port] = ServerRefusesError("y", "it is not the one")
    with pytest.raises(ServerRefusesError, match="it is not the one"):
        await make_pool(*servers, check=check).check_all()
    verdicts.update({server.port: lost() for server in servers})
    with pytest.raises(NoServerError, match="no session at the first attempt"):
        await make_pool(*servers, check=check).check_all()


async def test_a_name_is_looked_up_again_after_a_failure(
    make_pool: MakePool, servers: list[PlayingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a machine is replaced: its name has another address."""
    monkeypatch.setattr("env_server.client.session_pool.LOOK_UP_EVERY_S", 0.0)
    found = [Server("ws", "127.0.0.1", servers[0].port)]

    async def look_up(_: object) -> tuple[Server, ...]:
        return tuple(found)

    monkeypatch.setattr("env_server.client.session_pool.look_up", look_up)
    pool = make_pool(servers[0])
    async with lent(pool, reset) as connection:
        kept = connection
    servers[0].die()
    await kept._socket.wait_closed()
    found[:] = [Server("ws", "127.0.0.1", servers[1].port)]
    async with lent(pool, reset) as connection:
        assert connection.server.port == servers[1].port
    assert pool.servers == tuple(found)


async def test_a_server_that_is_added_behind_a_name_gets_the_next_sessions(
    make_pool: MakePool, servers: list[PlayingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an autoscaler adds it: nothing fails, and one that is taken away gets no more."""
    monkeypatch.setattr("env_server.client.session_pool.REFRESH_EVERY_S", 0.0)
    first, second = (Server("ws", "127.0.0.1", server.port) for server in servers[:2])
    found = [first]

    async def look_up(_: object) -> tuple[Server, ...]:
        return tuple(found)

    monkeypatch.setattr("env_server.client.session_pool.look_up", look_up)
    pool = make_pool(servers[0])
    async with lent(pool, reset) as one:
        found.append(second)
        async with lent(pool, reset) as other:
            assert (one.server, other.server) == (first, second)
        found.remove(first)
        async with lent(pool, reset) as other:
            assert other.server == second
        assert await pool.go_on(one, reset), "what was begun there goes on"
    assert pool.servers == (second,)


async def test_a_look_up_that_hangs_when_all_is_well_holds_up_one_search_alone(
    make_pool: MakePool, servers: list[PlayingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("env_server.client.session_pool.REFRESH_EVERY_S", 0.0)
    server = Server("ws", "127.0.0.1", servers[0].port)
    hangs, answers = asyncio.Event(), asyncio.Event()
    answers.set()

    async def look_up(_: object) -> tuple[Server, ...]:
        if not answers.is_set():
            hangs.set()
        await answers.wait()
        return (server,)

    monkeypatch.setattr("env_server.client.session_pool.look_up", look_up)
    pool = make_pool(servers[0])
    async with lent(pool, reset):
        answers.clear()
        held_up = asyncio.ensure_future(pool.begin(reset))
        await hangs.wait()
        async with lent(pool, reset):
            assert not held_up.done()
        answers.set()
        connection, _ = await held_up
        pool.release(connection)


async def test_a_name_that_cannot_be_resolved() -> None:
    with pytest.raises(ConnectionLostError, match=r"nowhere\.invalid.*cannot be resolved"):
        await SessionPool("ws://nowhere.invalid:8000").begin(nothing, PATIENCE_S)


async def test_a_look_up_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look_up(_: object) -> tuple[Server, ...]:
        await asyncio.Event().wait()
        return ()

    monkeypatch.setattr("env_server.client.session_pool.look_up", look_up)
    with pytest.raises(DeadlineError, match=r"no address in 0\.1 s"):
        await SessionPool("ws://host:1", timeouts=Timeouts(connect_s=0.1)).begin(nothing)


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "schlüssel", "\x00"])
def test_a_token_that_no_header_can_carry(token: str) -> None:
    with pytest.raises(AuthenticationError, match="characters that no token has") as refused:
        SessionPool("ws://host:1", token)
    assert token not in str(refused.value)


async def test_the_line_break_of_a_token_file_does_not_matter(
    make_pool: MakePool, servers: list[PlayingServer]
) -> None:
    servers[0].token = "geheim"
    async with lent(make_pool(servers[0], token="geheim\n"), reset):
        pass
