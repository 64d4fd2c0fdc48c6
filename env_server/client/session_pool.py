"""Sessions on several servers: opened where there is room, kept open between episodes for some minutes, begun elsewhere
on failure.

`SessionPool.begin` is the one way to a session: it takes an idle socket or opens one on the server that the board
chooses, and does the first piece of work on it, for only the first reply tells whether the server has a session to
give. A server that fails is backed off from and the next one is tried, as long as `patience_s` allows. Belongs to one
event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from env_server.client.connection import Connection, Timeouts
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
from env_server.client.servers import Loan, Server, ServerBoard, look_up, parse_servers
from env_server.client.tls import client_context

T = TypeVar("T")

LOSSES_ALLOWED = 3
"""Servers that one piece of work may bring down, or leave without an answer, before it is held to be the cause."""
LOOK_UP_EVERY_S = 5.0
"""How soon after a failure host names are looked up again, since a server that is replaced may have moved."""
REFRESH_EVERY_S = 30.0
"""How often they are looked up when all is well, since there may be more servers: nothing fails then."""
BUSY_NOTICE_EVERY_S = 300.0
SOCKET_AGE_S = 300.0
"""How long a socket is used for new episodes: between half of this and all of it, drawn for each. Behind a load
balancer, a server that has joined gets none but new ones."""

Check = Callable[[Server], Awaitable[None]]
"""Raises ClientError when a server must not be used."""
SessionCheck = Callable[[Connection], None]
"""Raises ClientError when a session that was just opened must not be used."""
Notice = Callable[[str], None]


class SessionPool:
    """The environment servers of one program. `urls` are as `parse_servers` takes them.

    `check` is asked before the first session on a server, and again before one on a server that has failed, or where
    no other one is open. `check_session` is asked about each new session, since behind a load balancer it may be on
    another server than the one that `check` asked. `notice` is told that a server fails, once for each time, and that
    it is back.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        token: str | None = None,
        timeouts: Timeouts | None = None,
        check: Check | None = None,
        check_session: SessionCheck = lambda _: None,
        notice: Notice = lambda _: None,
    ) -> None:
        self._named = parse_servers(urls)
        self.token = _clean(token, self._named[0])
        secure = next((server for server in self._named if server.secure), None)
        self.tls = client_context(secure) if secure else None
        """What certificates are checked with, where there are any."""
        self._timeouts = timeouts or Timeouts()
        self._check = check
        self._check_session = check_session
        self._notice = notice
        self._chance = random.Random()
        self._board = ServerBoard((), self._chance)
        self._looked_up_at = -math.inf
        self._stale = True
        self._looking_up = asyncio.Lock()
        self._checking: dict[Server, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._checked: set[Server] = set()
        self._errors: dict[Server, ClientError] = {}
        self._down: set[Server] = set()
        self._said_busy: dict[Server, float] = {}
        self._idle: dict[Server, list[Connection]] = defaultdict(list)
        self._lent: dict[Connection, Loan] = {}
        self._changed = asyncio.Event()

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers as last looked up."""
        return self._board.servers

    async def look_up(self) -> None:
        """Find the servers behind the names. Raises RetryableError when none were ever found."""
        self._looked_up_at = self._now()
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                found = await look_up(self._named)
        except (ConnectionLostError, TimeoutError) as error:
            if self.servers:
                return
            if isinstance(error, ConnectionLostError):
                raise
            names = ", ".join(server.name for server in self._named)
            raise DeadlineError(names, f"no address in {self._timeouts.connect_s:g} s") from error
        self._board.replace(found)
        self._stale = False

    async def check_all(self) -> None:
        """Ask `check` about every server at once, so that what has to be fixed is known at the start.

        Raises what a server is refused for, and RetryableError when none can be reached; some that cannot are noted.
        """
        await self.look_up()
        outcomes = await asyncio.gather(*map(self._ask_check, self.servers), return_exceptions=True)
        search = _Search(self._now(), 0.0)
        for server, outcome in zip(self.servers, outcomes, strict=True):
            if isinstance(outcome, RetryableError):
                search.failures[server] = outcome
            elif outcome is not None:
                raise outcome
        if len(search.failures) == len(self.servers):
            raise self._nowhere(search)
        for server, failure in search.failures.items():
            self._failed(server, failure)

    async def begin(self, work: Callable[[Connection], Awaitable[T]], patience_s: float = 0.0) -> tuple[Connection, T]:
        """Do `work` on a session of some server and return both; `go_on` goes on with it, `release` gives it back.

        Without patience each server is tried once, those in backoff last. With it, backoffs are kept, and servers are
        tried until it is over. Raises NoServerError, or the error itself where there is one server; the last error
        when `work` seems to bring servers down; ServerRefusesError when no server serves this client;
        RemoteActionError; and whatever else `work` raises.
        """
        search = _Search(self._now() + patience_s, patience_s)
        while True:
            doubted = search.doubted if search.doubted in self.servers else None
            search.doubted = None
            server = doubted or await self._next(search)
            connection = None if doubted else self._take_idle(server)
            reused = connection is not None
            loan = self._board.lend(server, reused=reused)
            try:
                connection = connection or await self._open(server)
                result = await work(connection)
            except (RetryableError, ServerRefusesError) as error:
                self._drop(loan, connection)
                if reused and isinstance(error, ConnectionLostError):
                    # It may have been closed for being idle: a new connection shows how the server is.
                    search.doubted = server
                    continue
                search.failures[server] = error
                self._failed(server, error, loan)
                asked = connection is not None or doubted is not None
                search.losses += asked and isinstance(error, ConnectionLostError | DeadlineError)
                if search.losses >= LOSSES_ALLOWED:
                    raise
            except RemoteActionError:
                self._works(loan)
                self._take_back(loan, connection)
                raise
            except BaseException:
                self._drop(loan, connection)
                self._wake()
                raise
            else:
                self._works(loan)
                self._lent[connection] = loan
                return connection, result

    async def go_on(self, connection: Connection, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Do more work on a session that `begin` gave. Unless it ends in a RemoteActionError, a failure ends it."""
        try:
            return await work(connection)
        except RemoteActionError:
            raise
        except RetryableError as error:
            loan = self._lent.pop(connection, None)
            if loan is not None:  # else the pool was closed, and has dropped it
                self._drop(loan, connection)
                self._failed(loan.server, error, loan)
            raise
        except BaseException:
            self.release(connection)
            raise

    def release(self, connection: Connection) -> None:
        """Take a session back; its socket is kept for another episode when it can be used."""
        loan = self._lent.pop(connection, None)
        if loan is not None:
            self._take_back(loan, connection)

    async def aclose(self) -> None:
        """Close the idle sockets, and drop those that are still lent."""
        idle = [connection for connections in self._idle.values() for connection in connections]
        self._idle.clear()
        for connection in self._lent:
            connection.abort()
        self._lent.clear()
        await asyncio.gather(*(connection.close() for connection in idle))

    async def _next(self, search: _Search) -> Server:
        """Choose a server, or wait until one can be chosen. Raises when there will be none."""
        while True:
            if self._stale or not self._looking_up.locked():  # when all is well, one search alone waits for the names
                async with self._looking_up:
                    if self._now() - self._looked_up_at >= self._look_up_every_s():
                        await self.look_up()
            now = self._now()
            refusing = [server for server, error in search.failures.items() if isinstance(error, ServerRefusesError)]
            skip = refusing if search.patience_s else list(search.failures)
            server = self._board.choose(now, skip, self._with_idle())
            if server is None and not search.patience_s:
                server = self._board.soonest(skip)
            if server is not None and (now < search.deadline or server not in search.failures):
                return server
            if now >= search.deadline or set(refusing).issuperset(self.servers):
                raise self._nowhere(search)
            # Until a backoff or the patience is over, or something else changes.
            pause = min(self._board.backoff(now) or search.deadline - now, search.deadline - now)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()

    def _look_up_every_s(self) -> float:
        if not self.servers:
            return 0.0
        return LOOK_UP_EVERY_S if self._stale else REFRESH_EVERY_S

    async def _open(self, server: Server) -> Connection:
        if self._board.in_flight(server) == 1:
            # Without another session open there, it may have been replaced by another server.
            self._checked.discard(server)
        await self._ask_check(server)
        connection = await Connection.open(server, self.token, self._timeouts, self.tls)
        try:
            self._check_session(connection)
        except ClientError:
            connection.abort()
            raise
        connection.keep_until = self._now() + SOCKET_AGE_S * (0.5 + 0.5 * self._chance.random())
        return connection

    async def _ask_check(self, server: Server) -> None:
        if self._check is not None:
            async with self._checking[server]:
                if server not in self._checked:
                    await self._check(server)
                    self._checked.add(server)

    def _with_idle(self) -> list[Server]:
        """The servers with an idle socket; those that were closed meanwhile, or are old, are dropped."""
        for server, connections in list(self._idle.items()):
            self._idle[server] = [connection for connection in connections if self._reusable(connection)]
            for connection in set(connections).difference(self._idle[server]):
                connection.abort()
            if not self._idle[server]:
                del self._idle[server]
        return list(self._idle)

    def _take_idle(self, server: Server) -> Connection | None:
        idle = self._idle.get(server)
        return idle.pop() if idle else None

    def _take_back(self, loan: Loan, connection: Connection | None) -> None:
        if connection is not None and self._reusable(connection) and loan.server in self.servers:
            self._board.give_back(loan)
            self._idle[loan.server].append(connection)
        else:
            self._drop(loan, connection)
        self._wake()

    def _reusable(self, connection: Connection) -> bool:
        return connection.usable and self._now() < connection.keep_until

    def _drop(self, loan: Loan, connection: Connection | None) -> None:
        self._board.give_back(loan)
        if connection is not None:
            connection.abort()

    def _works(self, loan: Loan) -> None:
        server = loan.server
        if self._board.succeeded(loan) and server in self._down:
            self._down.discard(server)
            self._notice(f"environment server {server.name}: it takes sessions again")
        self._wake()

    def _failed(self, server: Server, error: ClientError, loan: Loan | None = None) -> None:
        """Back off from the server, and say so, unless the session that failed tells nothing new of it."""
        if loan is not None and self._board.outdated(loan):
            self._wake()
            return
        self._errors[server] = error
        busy = isinstance(error, ServerBusyError)
        news = self._board.failed(server, self._now(), busy=busy)
        if busy:
            # A full server fails and works by turns, for as long as others use it too.
            news = news and self._now() - self._said_busy.get(server, -math.inf) >= BUSY_NOTICE_EVERY_S
            if news:
                self._said_busy[server] = self._now()
        else:
            # What else is open there is of no more use, and what comes back may be another server.
            for connection in self._idle.pop(server, []):
                connection.abort()
            self._checked.discard(server)
            self._stale = True
            news = news and server not in self._down
            self._down.add(server)
        if news:
            self._notice(f"{error}; its sessions go elsewhere or wait, and it is tried again")
        self._wake()

    def _nowhere(self, search: _Search) -> ClientError:
        """The error for a search that is over."""
        errors: dict[Server, ClientError] = {}
        for server in self.servers:
            error = search.failures.get(server) or self._errors.get(server)
            errors[server] = error or ConnectionLostError(server.name, "its turn did not come")
        refusals = [error for error in errors.values() if isinstance(error, ServerRefusesError)]
        if len(refusals) == len(errors) or len(errors) == 1:
            return next(iter(errors.values()))
        return NoServerError({server.name: error for server, error in errors.items()}, search.patience_s)

    def _wake(self) -> None:
        """Let every search that waits look again."""
        self._changed.set()
        self._changed.clear()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


@dataclass(slots=True)
class _Search:
    """The state of one `begin`."""

    deadline: float
    patience_s: float
    failures: dict[Server, ClientError] = field(default_factory=dict)
    losses: int = 0
    doubted: Server | None = None
    """Where an idle socket turned out to be closed: the next one to try, on a new connection."""


def _clean(token: str | None, server: Server) -> str | None:
    """Return the token without the line break that a file may have left on it. Raises AuthenticationError."""
    text = (token or "").strip()
    if not text.isascii() or not text.isprintable() or " " in text:
        raise AuthenticationError(server.name, "the token holds characters that no token has; was it cut or quoted?")
    return text or None
