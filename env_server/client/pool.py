"""Sessions on several servers: least in flight, exponential back-off, sockets reused between episodes.

`SessionPool.open` is the one way to a session: it takes an idle socket or opens one on the server that `LoadBalancer`
chooses, and does the first piece of work on it, since only the first reply says whether the server has a session free.
A server that fails is backed off from and another one is tried, until `timeout_s` is over. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from env_server.client.connection import Connection, Server, Timeouts, client_context, parse_servers
from env_server.client.errors import (
    AuthenticationError,
    ClientError,
    ConnectionLostError,
    DeadlineError,
    NoServerError,
    RemoteActionError,
    RetryableError,
    ServerBusyError,
    ServerRefusesError,
)

T = TypeVar("T")

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 15.0
"""A back-off is drawn between half of and all of a bound that doubles from the first to the longest."""
LOST_ALLOWED = 3
"""Servers that one piece of work may bring down, or leave without an answer, before it is held to be the cause."""
LOOK_UP_EVERY_S = 5.0
"""How often host names are looked up while a server fails: one that is replaced may have moved."""
REFRESH_EVERY_S = 30.0
"""How often they are looked up otherwise: there may be more servers."""
SOCKET_AGE_S = 300.0
"""How long a socket is used for new episodes (half of this to all of it): a server that has joined behind a load
balancer gets none but new ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """A session on a server, from `acquire` to `release`."""

    server: Server
    since: float


@dataclass(slots=True)
class ServerHealth:
    """What is known of a server."""

    in_flight: int = 0
    failures: int = 0
    """In a row."""
    failed_at: float = -math.inf
    """When it last lost sessions."""
    retry_at: float = 0.0


class LoadBalancer:
    """Which server the next session goes to. No I/O; times are seconds of any one clock, given by the caller."""

    def __init__(self, servers: Iterable[Server] = (), rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._health = {server: ServerHealth() for server in servers}

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers, in the order they were given."""
        return tuple(self._health)

    def in_flight(self, server: Server) -> int:
        """Return the number of sessions there."""
        return self._health[server].in_flight if server in self._health else 0

    def healthy(self, server: Server) -> bool:
        """Whether it is not backed off from."""
        return server in self._health and not self._health[server].failures

    def replace(self, servers: Iterable[Server]) -> None:
        """Set the servers; known ones keep their health."""
        self._health = {server: self._health.get(server) or ServerHealth() for server in servers}

    def choose(
        self, now: float, skip: Collection[Server] = (), idle: Collection[Server] = ()
    ) -> tuple[Server, float] | None:
        """Return the next server, and the seconds until it may be used; None where `skip` holds all.

        The least in flight, at random among equals. `idle` are servers with a session to reuse: they may be backed off.
        """
        candidates = [
            (0.0 if server in idle else max(0.0, health.retry_at - now), health.in_flight, self._rng.random(), server)
            for server, health in self._health.items()
            if server not in skip
        ]
        if not candidates:
            return None
        wait_s, _, _, server = min(candidates, key=lambda candidate: candidate[:3])
        return server, wait_s

    def acquire(self, server: Server, now: float) -> Lease:
        """Count a session there."""
        self._health[server].in_flight += 1
        return Lease(server, now)

    def release(self, lease: Lease) -> None:
        """Count the session no longer; once for each `acquire`."""
        if health := self._health.get(lease.server):
            health.in_flight = max(0, health.in_flight - 1)

    def succeeded(self, lease: Lease) -> None:
        """End the back-off, unless the session was begun before the server failed."""
        health = self._health.get(lease.server)
        if health is not None and lease.since >= health.failed_at:
            health.failures, health.retry_at = 0, 0.0

    def failed(self, lease: Lease, now: float, *, busy: bool = False) -> bool:
        """Back off from the server; return False where that is known: what ended other sessions ended this one too.

        One that is `busy` goes on with the sessions it has.
        """
        health = self._health.get(lease.server)
        if health is None or lease.since <= health.failed_at or now < health.retry_at:
            return False
        if not busy:
            health.failed_at = now
        bound = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(health.failures, 30))
        health.failures += 1
        health.retry_at = now + bound * (0.5 + 0.5 * self._rng.random())
        return True


def expand(server: Server, addresses: Sequence[str]) -> tuple[Server, ...]:
    """Return the servers that a host name with these addresses stands for.

    Those of the kind, IPv4 or IPv6, that it has more of; a name with one of each is one machine, reached by name.
    """
    found = dict.fromkeys(addresses)
    several = max(([a for a in found if ":" not in a], [a for a in found if ":" in a]), key=len)
    return (server,) if len(several) < 2 else tuple(replace(server, address=address) for address in several)


async def look_up(servers: Iterable[Server]) -> tuple[Server, ...]:
    """Resolve each server's host name. Raises ConnectionLostError."""
    found: dict[Server, None] = {}
    for server in servers:
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConnectionLostError(server.name, f"its host name cannot be resolved ({error.strerror})") from error
        found |= dict.fromkeys(expand(server, [str(info[4][0]) for info in infos]))
    return tuple(found)


async def _accept(_: Connection) -> None:
    """Check nothing."""


class SessionPool:
    """The environment servers of one program. `urls` are as `parse_servers` takes them.

    `check` looks at each new session and raises ClientError where it must not be used. `notice` gets a line when a
    server fails, and one when it is back.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        token: str | None = None,
        timeouts: Timeouts | None = None,
        check: Callable[[Connection], Awaitable[None]] = _accept,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._named = parse_servers(urls)
        # A file may have left a line break on it.
        self.token = (token or "").strip() or None
        if self.token and not (self.token.isascii() and self.token.isprintable() and " " not in self.token):
            raise AuthenticationError(
                self._named[0].name, "the token holds characters that no token has; was it cut or quoted?"
            )
        secure = next((server for server in self._named if server.secure), None)
        self.tls = client_context(secure) if secure else None
        """What certificates are checked with, where there are any."""
        self._timeouts = timeouts or Timeouts()
        self._check = check
        self._notice = notice
        self._rng = random.Random()
        self._balancer = LoadBalancer(rng=self._rng)
        self._looked_up_at = -math.inf
        self._looking_up = asyncio.Lock()
        self._errors: dict[Server, ClientError] = {}
        self._down: set[Server] = set()
        self._noticed_busy: set[Server] = set()
        self._idle: dict[Server, list[Connection]] = defaultdict(list)
        self._leases: dict[Connection, Lease] = {}
        self._changed = asyncio.Event()

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers as last looked up."""
        return self._balancer.servers

    async def probe(self, ask: Callable[[Server], Awaitable[None]]) -> None:
        """Ask every server at once, so that what has to be fixed is known at the start.

        Raises what a server is refused for, and RetryableError when none can be reached; some that cannot are noticed.
        """
        await self._refresh()
        search = _Search(_now(), 0.0)
        outcomes = await asyncio.gather(*map(ask, self.servers), return_exceptions=True)
        for server, outcome in zip(self.servers, outcomes, strict=True):
            if isinstance(outcome, RetryableError):
                search.failures[server] = outcome
            elif outcome is not None:
                raise outcome
        if len(search.failures) == len(self.servers):
            raise self._no_server(search)
        for server, failure in search.failures.items():
            self._drop(self._balancer.acquire(server, _now()), None, failure)

    async def open(self, work: Callable[[Connection], Awaitable[T]], timeout_s: float = 0.0) -> tuple[Connection, T]:
        """Do `work` on a session of some server and return both; `resume` goes on with it, `release` ends it.

        Without a timeout each server is tried once, those in back-off last. With one, servers are tried again until it
        is over. Raises NoServerError, or the error itself where there is one server; the last error when `work` seems
        to bring servers down; ServerRefusesError when no server serves this client; and whatever else `work` raises.
        """
        search = _Search(_now() + timeout_s, timeout_s)
        while True:
            server = await self._next(search)
            connection = None if search.retry_fresh else self._take_idle(server)
            reused = connection is not None
            lease = self._balancer.acquire(server, _now())
            try:
                connection = connection or await self._connect(server)
                result = await work(connection)
            except (RetryableError, ServerRefusesError) as error:
                if reused and isinstance(error, ConnectionLostError):
                    # It may have been closed for being idle, as the others there: a new connection shows the truth.
                    self._drop(lease, connection)
                    self._drop_idle(server)
                    search.retry_fresh = True
                    continue
                self._drop(lease, connection, error)
                search.failures[server] = error
                search.lost_count += connection is not None and isinstance(error, ConnectionLostError | DeadlineError)
                if search.lost_count >= LOST_ALLOWED:
                    raise
            except BaseException as error:
                if isinstance(error, RemoteActionError):
                    self._works(lease)
                self._end(lease, connection)
                raise
            else:
                self._works(lease)
                self._leases[connection] = lease
                return connection, result

    async def resume(self, connection: Connection, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Do more work on a session that `open` gave. Unless it ends in a RemoteActionError, a failure ends it."""
        try:
            return await work(connection)
        except RemoteActionError:
            raise
        except RetryableError as error:
            if lease := self._leases.pop(connection, None):  # else the pool was closed, and has dropped it
                self._drop(lease, connection, error)
            raise
        except BaseException:
            self.release(connection)
            raise

    def release(self, connection: Connection) -> None:
        """End a session; its socket is kept for another episode where it can be used."""
        if lease := self._leases.pop(connection, None):
            self._end(lease, connection)

    async def aclose(self) -> None:
        """Close the idle sockets, and drop those that are in use."""
        idle = [connection for connections in self._idle.values() for connection in connections]
        self._idle.clear()
        for connection in self._leases:
            connection.abort()
        self._leases.clear()
        await asyncio.gather(*(connection.close() for connection in idle))

    async def _next(self, search: _Search) -> Server:
        """Choose a server, or wait until one can be chosen. Raises when there will be none."""
        while True:
            await self._refresh()
            now = _now()
            refusing = [server for server, error in search.failures.items() if isinstance(error, ServerRefusesError)]
            idle = () if search.retry_fresh else self._with_idle()
            choice = self._balancer.choose(now, refusing if search.timeout_s else list(search.failures), idle)
            if choice is None:
                raise self._no_server(search)
            server, wait_s = choice
            late = search.timeout_s > 0 and now >= search.deadline
            if late and (wait_s or search.failures):
                raise self._no_server(search)
            if not wait_s or not search.timeout_s:
                return server
            # Until a back-off or the search is over, or something else changes.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, search.deadline - now)):
                    await self._changed.wait()

    async def _refresh(self) -> None:
        """Look up the names when it is time. Raises RetryableError when no server was ever found."""
        if not self.servers:
            async with self._looking_up:
                if not self.servers:
                    await self._look_up()
        elif _now() - self._looked_up_at >= (LOOK_UP_EVERY_S if self._down else REFRESH_EVERY_S):
            with contextlib.suppress(RetryableError):
                await self._look_up()

    async def _look_up(self) -> None:
        self._looked_up_at = _now()  # first: no other search waits for these names
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                self._balancer.replace(await look_up(self._named))
        except TimeoutError as error:
            names = ", ".join(server.name for server in self._named)
            raise DeadlineError(names, f"no address in {self._timeouts.connect_s:g} s") from error

    async def _connect(self, server: Server) -> Connection:
        connection = await Connection.open(server, self.token, self._timeouts, self.tls)
        try:
            await self._check(connection)
        except BaseException:
            connection.abort()
            raise
        connection.reuse_until = _now() + SOCKET_AGE_S * (0.5 + 0.5 * self._rng.random())
        return connection

    def _with_idle(self) -> list[Server]:
        """Return the servers with an idle socket; sockets that were closed meanwhile, or are old, are dropped."""
        for server, connections in list(self._idle.items()):
            for connection in [each for each in connections if not _reusable(each)]:
                connections.remove(connection)
                connection.abort()
            if not connections:
                del self._idle[server]
        return list(self._idle)

    def _drop_idle(self, server: Server) -> None:
        for connection in self._idle.pop(server, []):
            connection.abort()

    def _take_idle(self, server: Server) -> Connection | None:
        return self._idle[server].pop() if self._idle.get(server) else None

    def _end(self, lease: Lease, connection: Connection | None) -> None:
        if connection is not None and _reusable(connection) and lease.server in self.servers:
            self._balancer.release(lease)
            self._idle[lease.server].append(connection)
            self._wake()
        else:
            self._drop(lease, connection)

    def _drop(self, lease: Lease, connection: Connection | None, error: ClientError | None = None) -> None:
        """Give a session up; where it failed, back off from its server and say so, once."""
        self._balancer.release(lease)
        if connection is not None:
            connection.abort()
        if error is not None:
            self._failed(lease, error)
        self._wake()

    def _failed(self, lease: Lease, error: ClientError) -> None:
        server, busy = lease.server, isinstance(error, ServerBusyError)
        if not self._balancer.failed(lease, _now(), busy=busy):
            return
        self._errors[server] = error
        if not busy:
            self._drop_idle(server)
        # A full server fails and works by turns for as long as others use it, too.
        noticed = self._noticed_busy if busy else self._down
        if server not in noticed:
            noticed.add(server)
            self._notice(f"{error}; its sessions go elsewhere or wait, and it is tried again")

    def _works(self, lease: Lease) -> None:
        self._balancer.succeeded(lease)
        if lease.server in self._down and self._balancer.healthy(lease.server):
            self._down.discard(lease.server)
            self._notice(f"environment server {lease.server.name}: it takes sessions again")
        self._wake()

    def _no_server(self, search: _Search) -> ClientError:
        """Return the error for a search that is over."""
        errors = {
            server: search.failures.get(server)
            or self._errors.get(server)
            or ConnectionLostError(server.name, "its turn did not come")
            for server in self.servers
        }
        if len(errors) == 1 or all(isinstance(error, ServerRefusesError) for error in errors.values()):
            return next(iter(errors.values()))
        return NoServerError({server.name: error for server, error in errors.items()}, search.timeout_s)

    def _wake(self) -> None:
        """Let every search that waits look again."""
        self._changed.set()
        self._changed.clear()


@dataclass(slots=True)
class _Search:
    """The state of one `open`."""

    deadline: float
    timeout_s: float
    failures: dict[Server, ClientError] = field(default_factory=dict)
    lost_count: int = 0
    retry_fresh: bool = False
    """Idle sockets are left alone: one was dead."""


def _reusable(connection: Connection) -> bool:
    return connection.usable and _now() < connection.reuse_until


def _now() -> float:
    return asyncio.get_running_loop().time()
