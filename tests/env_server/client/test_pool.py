"""Sessions over servers that come and go: where they land, what is kept open, what is noticed; URLs and names."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.client.connection import Connection, Server, Timeouts, parse_servers
from env_server.client.errors import (
    AddressError,
    AuthenticationError,
    ClientError,
    ConnectionLostError,
    DeadlineError,
    NoServerError,
    RemoteActionError,
    ServerRefusesError,
)
from env_server.client.pool import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    LOST_ALLOWED,
    Lease,
    LoadBalancer,
    SessionPool,
    expand,
    look_up,
)
from env_server.dataset import Dataset
from tests.env_server.serving import Close, Die, Hang, PlayingServer, running_server

A, B, C = (Server("ws", host, 8000) for host in "abc")
TIMEOUT_S = 20.0
"""Long enough for every back-off that a test waits for."""


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("ws://host:8000/ws/", "ws://host:8000/ws"),
        ("http://host", "ws://host:80/ws"),
        ("https://host", "wss://host:443/ws"),
        ("wss://host/env/sql", "wss://host:443/env/sql/ws"),
        ("WS://Host:8000", "ws://host:8000/ws"),
        (" ws://[::1]:8000 ", "ws://[::1]:8000/ws"),
    ],
)
def test_a_url_in_any_of_its_forms(text: str, url: str) -> None:
    (server,) = parse_servers(text)
    assert (server.url, server.secure) == (url, url.startswith("wss"))


def test_several_urls_with_commas_or_as_a_list() -> None:
    assert parse_servers(["http://a:8000", "ws://b:8000"]) == (A, B)
    assert parse_servers("ws://a:8000, ws://b:8000/ws,http://a:8000/ws,") == (A, B), "a server counts once"


@pytest.mark.parametrize(
    "text", ["", " , ", "host:8000", "ftp://host", "ws://:8000", "ws://host:port", "ws://[::1", "ws://me:geheim@host"]
)
def test_what_is_no_url_is_refused_and_a_secret_not_repeated(text: str) -> None:
    with pytest.raises(AddressError) as refused:
        parse_servers(text)
    assert "geheim" not in str(refused.value)


def test_a_name_with_several_addresses_is_several_servers() -> None:
    several = expand(A, ["10.0.0.1", "10.0.0.2", "10.0.0.1", "::1"])
    assert [(server.address, server.url) for server in several] == [("10.0.0.1", A.url), ("10.0.0.2", A.url)]
    for addresses in (["127.0.0.1"], ["::1", "127.0.0.1", "::1"]):
        assert expand(A, addresses) == (A,), "one of each kind is one machine"


async def test_addresses_are_looked_up() -> None:
    servers = parse_servers("ws://localhost:8000,ws://127.0.0.1:8001")
    assert await look_up(servers) == servers


@given(
    st.integers(1, 4),
    st.integers(0, 1_000),
    st.lists(st.tuples(st.sampled_from(["open", "works", "fails", "busy", "ends"]), st.floats(0, 9), st.integers(0))),
)
def test_least_in_flight_and_back_off(count: int, seed: int, events: Sequence[tuple[str, float, int]]) -> None:
    """Sessions come, go and fail in any order."""
    servers = [Server("ws", f"host{n}", 1) for n in range(count)]
    balancer, now = LoadBalancer(servers, random.Random(seed)), 0.0
    leases: list[Lease] = []
    for event, seconds, number in events:
        now += seconds
        choice = balancer.choose(now)
        assert choice is not None
        server, wait_s = choice
        assert 0 <= wait_s <= LONGEST_BACKOFF_S
        healthy = [each for each in servers if balancer.healthy(each)]
        if healthy:
            assert wait_s == 0.0
            assert balancer.in_flight(server) <= min(map(balancer.in_flight, healthy))
        if event == "open" or not leases:
            leases.append(balancer.acquire(server, now))
            continue
        lease = leases[number % len(leases)]
        if event == "works":
            balancer.succeeded(lease)
        elif event == "ends":
            leases.remove(lease)
            balancer.release(lease)
        elif balancer.failed(lease, now, busy=event == "busy"):
            others = [each for each in servers if each != lease.server]
            again = balancer.choose(now, skip=others)
            assert again is not None
            assert again[1] >= FIRST_BACKOFF_S / 2
            assert balancer.choose(now, others, [lease.server]) == (lease.server, 0.0), "an idle session may be reused"
        assert [balancer.in_flight(each) for each in servers] == [
            sum(lease.server == each for lease in leases) for each in servers
        ]


def test_backoffs_grow_and_lost_together_is_one_failure() -> None:
    balancer = LoadBalancer([A, B], random.Random(0))
    one, other = balancer.acquire(A, 0.0), balancer.acquire(A, 0.0)
    assert balancer.failed(one, 1.0)
    balancer.succeeded(other)
    assert not balancer.healthy(A), "it was begun before"
    assert not balancer.failed(other, 100.0)
    now = 1.0
    for number in range(1, 30):
        now += LONGEST_BACKOFF_S
        assert balancer.failed(balancer.acquire(A, now), now)
        again = balancer.choose(now, skip=[B])
        assert again is not None
        bound = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2**number)
        assert bound / 2 <= again[1] <= bound
    balancer.replace([A, C])
    assert (balancer.choose(now), balancer.servers) == ((C, 0.0), (A, C)), "its health survives another look-up"
    balancer.succeeded(balancer.acquire(A, now + 20))
    assert balancer.healthy(A)


@pytest.fixture
def servers(pets: Dataset) -> Iterator[list[PlayingServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_server(pets)) for _ in range(3)]


@pytest.fixture
def notices() -> list[str]:
    return []


MakePool = Callable[..., SessionPool]


@pytest.fixture
async def make_pool(notices: list[str]) -> AsyncIterator[MakePool]:
    pools: list[SessionPool] = []

    def make(*servers: PlayingServer, **options: object) -> SessionPool:
        urls = [server.url for server in servers]
        pools.append(SessionPool(urls, **{"notice": notices.append, **options}))  # type: ignore[arg-type]
        return pools[-1]

    yield make
    for pool in pools:
        await pool.aclose()


async def reset(connection: Connection) -> str:
    return str((await connection.request("reset", {"question_id": "cats"}))["observation"]["question"])


def counts(servers: list[PlayingServer]) -> list[int]:
    return [server.opened for server in servers]


@asynccontextmanager
async def session(
    pool: SessionPool, work: Callable[[Connection], Awaitable[object]] = reset
) -> AsyncIterator[Connection]:
    connection, _ = await pool.open(work, TIMEOUT_S)
    try:
        yield connection
    finally:
        pool.release(connection)


async def test_sessions_are_spread_and_sockets_outlive_their_episodes(
    make_pool: MakePool, servers: list[PlayingServer]
) -> None:
    pool = make_pool(*servers)
    for _ in range(2):
        opened = await asyncio.gather(*(pool.open(reset) for _ in range(9)))
        assert counts(servers) == [3, 3, 3]
        for connection, question in opened:
            assert question == "How many cats are there?"
            pool.release(connection)
    kept, _ = await pool.open(reset)
    await pool.aclose()
    for server in servers:
        await asyncio.to_thread(server.wait_until, lambda server=server: server.sessions == 0)  # type: ignore[misc]
    pool.release(kept)


async def test_a_dead_server_costs_one_notice_and_no_session(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str]
) -> None:
    pool = make_pool(*servers)
    servers[1].die()
    opened = await asyncio.gather(*(pool.open(reset, TIMEOUT_S) for _ in range(12)))
    on = Counter(connection.server.port for connection, _ in opened)
    assert on == {servers[0].port: 6, servers[2].port: 6}
    (notice,) = notices
    assert str(servers[1].port) in notice


async def test_a_server_that_comes_back_is_used_again(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str], short_backoffs: None
) -> None:
    failing = asyncio.Event()

    def notice(text: str) -> None:
        notices.append(text)
        failing.set()

    pool = make_pool(servers[0], notice=notice)
    servers[0].die()
    waiting = [asyncio.create_task(pool.open(reset, TIMEOUT_S)) for _ in range(4)]
    await failing.wait()
    servers[0].start()
    for _, question in await asyncio.gather(*waiting):
        assert question == "How many cats are there?"
    assert len(notices) == 2


async def test_a_socket_that_has_become_old_or_was_closed_is_not_reused(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str]
) -> None:
    pool = make_pool(servers[0])
    async with session(pool) as first:
        pass
    first.reuse_until = 0.0
    async with session(pool) as second:
        assert second is not first
    servers[0].hang_up()
    await second._socket.wait_closed()
    async with session(pool) as third:
        assert third is not second
    # One that the server closes at the first request is not its failure either.
    servers[0].script = lambda request: Close() if request["type"] == "state" else None

    async def work(connection: Connection) -> object:
        return await (connection.request("state") if connection is third else reset(connection))

    async with session(pool, work) as fourth:
        assert fourth is not third
    assert notices == []


async def test_full_servers_pass_sessions_on_and_the_next_release_is_used(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str]
) -> None:
    for server, limit in zip(servers, (1, 2, 100), strict=True):
        server.max_sessions = limit
    pool = make_pool(*servers)
    opened = await asyncio.gather(*(pool.open(reset, TIMEOUT_S) for _ in range(14)))
    assert sum(Counter(connection.server.port for connection, _ in opened).values()) == 14
    assert 1 <= len(notices) <= 2, "one for each server that is full"
    full = make_pool(servers[0])
    for connection, _ in opened:
        pool.release(connection)
    await pool.aclose()
    await asyncio.to_thread(servers[0].wait_until, lambda: servers[0].sessions == 0)
    first, _ = await full.open(reset, TIMEOUT_S)
    waiting = asyncio.create_task(full.open(reset, TIMEOUT_S))
    opened_before = servers[0].opened
    await asyncio.to_thread(servers[0].wait_until, lambda: servers[0].opened > opened_before)
    full.release(first)
    assert (await waiting)[0] is first


async def test_each_server_is_tried_once_or_until_the_timeout(
    make_pool: MakePool, servers: list[PlayingServer]
) -> None:
    servers[0].max_sessions = 0
    servers[2].refuse_with = 503
    pool = make_pool(servers[0], servers[2])
    for attempt in (1, 2):
        with pytest.raises(NoServerError, match="no session at the first attempt") as failed:
            await pool.open(reset)
        names = {type(error).__name__ for error in failed.value.failures.values()}
        assert names == {"ServerBusyError", "ServerDrainingError"}
        assert (servers[0].opened, len(servers[2].headers)) == (attempt, attempt), "also while they are backed off from"
    with pytest.raises(NoServerError, match=r"no session in 0\.05 s"):
        await pool.open(reset, 0.05)
    for server in servers:
        server.token = "secret"
    with pytest.raises(AuthenticationError):
        await make_pool(*servers).open(reset, 1e9)


async def test_one_server_that_refuses_does_not_stop_the_others(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str]
) -> None:
    servers[0].token = "secret"

    async def check(connection: Connection) -> None:
        if connection.server.port == servers[1].port:
            raise ServerRefusesError(connection.server.name, "it is not the one")

    pool = make_pool(*servers, check=check)
    for connection, _ in await asyncio.gather(*(pool.open(reset, TIMEOUT_S) for _ in range(4))):
        assert connection.server.port == servers[2].port
    assert len(notices) == 2
    assert "SQLENV_TOKEN" in "".join(notices)
    await asyncio.to_thread(servers[1].wait_until, lambda: servers[1].sessions == 0)


async def test_a_complaint_about_the_request_is_not_tried_elsewhere(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str]
) -> None:
    async def wrong(connection: Connection) -> None:
        await connection.request("reset", {"question_id": "dogs"})

    pool = make_pool(*servers)
    with pytest.raises(RemoteActionError, match="no question 'dogs'"):
        await pool.open(wrong, TIMEOUT_S)
    assert sum(counts(servers)) == 1
    async with session(pool):
        assert sum(counts(servers)) in (1, 2), "the socket is kept"
    assert notices == []


@pytest.mark.parametrize("reused", [False, True])
async def test_a_request_that_brings_servers_down_does_not_bring_down_all(
    make_pool: MakePool, pets: Dataset, reused: bool
) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(running_server(pets)) for _ in range(LOST_ALLOWED + 3)]
        pool = make_pool(*servers)
        if reused:
            for connection, _ in await asyncio.gather(*(pool.open(reset) for _ in servers)):
                pool.release(connection)
        for server in servers:
            server.script = lambda _: Die()
        with pytest.raises(ConnectionLostError):
            await pool.open(reset, TIMEOUT_S)
        assert sum(server.listening for server in servers) >= 1


async def test_a_server_that_does_not_answer_is_left(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str]
) -> None:
    servers[0].script = servers[1].script = lambda _: Hang()
    pool = make_pool(*servers, timeouts=Timeouts(request_s=0.1))
    async with session(pool) as connection:
        assert connection.server.port == servers[2].port
    assert len(notices) <= 2


async def test_a_search_that_is_cancelled_leaves_nothing_behind(
    make_pool: MakePool, servers: list[PlayingServer]
) -> None:
    servers[0].script = lambda _: Hang()
    pool = make_pool(servers[0])
    task = asyncio.create_task(pool.open(reset, TIMEOUT_S))
    await asyncio.to_thread(servers[0].wait_until, lambda: bool(servers[0].requests))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(servers[0].wait_until, lambda: servers[0].sessions == 0)
    servers[0].script = lambda _: None
    async with session(pool):
        assert pool._balancer.in_flight(pool.servers[0]) == 1
    assert pool._balancer.in_flight(pool.servers[0]) == 0


async def test_sessions_that_are_lost_later_are_one_failure(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str]
) -> None:
    pool = make_pool(servers[0])
    opened = [connection for connection, _ in await asyncio.gather(*(pool.open(reset) for _ in range(3)))]
    servers[0].hang_up()
    for connection in opened:
        with pytest.raises(ConnectionLostError):
            await pool.resume(connection, reset)
    assert len(notices) == 1
    assert pool._balancer.in_flight(pool.servers[0]) == 0
    async with session(pool):
        assert len(notices) == 2, "it is back"


async def test_every_server_is_probed_at_the_start(
    make_pool: MakePool, servers: list[PlayingServer], notices: list[str]
) -> None:
    verdicts: dict[int, ClientError] = {}

    async def ask(server: Server) -> None:
        if server.port in verdicts:
            raise verdicts[server.port]

    lost = partial(ConnectionLostError, "x", "cannot be reached")
    verdicts[servers[0].port] = lost()
    await make_pool(*servers).probe(ask)
    assert len(notices) == 1
    verdicts[servers[1].port] = ServerRefusesError("y", "it is not the one")
    with pytest.raises(ServerRefusesError, match="it is not the one"):
        await make_pool(*servers).probe(ask)
    verdicts.update({server.port: lost() for server in servers})
    with pytest.raises(NoServerError):
        await make_pool(*servers).probe(ask)


async def test_names_are_looked_up_again(
    make_pool: MakePool, servers: list[PlayingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an autoscaler adds a server, and takes one away: what was begun there goes on."""
    monkeypatch.setattr("env_server.client.pool.REFRESH_EVERY_S", 0.0)
    first, second = (Server("ws", "127.0.0.1", server.port) for server in servers[:2])
    found, answers = [first], asyncio.Event()
    answers.set()

    async def looked_up(_: object) -> tuple[Server, ...]:
        await answers.wait()
        return tuple(found)

    monkeypatch.setattr("env_server.client.pool.look_up", looked_up)
    pool = make_pool(servers[0])
    async with session(pool) as one:
        found.append(second)
        async with session(pool) as other:
            assert (one.server, other.server) == (first, second)
        found.remove(first)
        async with session(pool) as other:
            assert other.server == second
        assert await pool.resume(one, reset)
    monkeypatch.setattr("env_server.client.pool.REFRESH_EVERY_S", 30.0)
    answers.clear()
    pool._looked_up_at = -1e9
    held_up = asyncio.ensure_future(pool.open(reset))
    await asyncio.sleep(0)
    async with session(pool):
        assert not held_up.done(), "one search alone waits for a look-up that hangs"
    answers.set()
    pool.release((await held_up)[0])


async def test_a_name_that_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionLostError, match="cannot be resolved"):
        await SessionPool("ws://nowhere.invalid:8000").open(reset, TIMEOUT_S)

    async def never(_: object) -> tuple[Server, ...]:
        await asyncio.Event().wait()
        return ()

    monkeypatch.setattr("env_server.client.pool.look_up", never)
    with pytest.raises(DeadlineError):
        await SessionPool("ws://host:1", timeouts=Timeouts(connect_s=0.1)).open(reset)


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "schlüssel", "\x00"])
def test_a_token_that_no_header_can_carry(token: str) -> None:
    with pytest.raises(AuthenticationError) as refused:
        SessionPool("ws://host:1", token)
    assert token not in str(refused.value)


async def test_the_line_break_of_a_token_file_does_not_matter(
    make_pool: MakePool, servers: list[PlayingServer]
) -> None:
    servers[0].token = "geheim"
    async with session(make_pool(servers[0], token="geheim\n")):
        pass
