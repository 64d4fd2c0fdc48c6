"""Which environment servers there are, and which one the next session goes to. No I/O but `look_up`.

A URL names one server, or several: a host name with several addresses of one kind stands for as many servers.
`ServerBoard` spreads sessions by what this process has in flight on each. A server that fails is left alone for a
while, an exponential backoff with jitter, so that clients do not come back in step; then one session tries it before
others follow.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from env_server.client.errors import AddressError, ConnectionLostError

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 15.0
"""A backoff is drawn between half of and all of a bound that doubles from FIRST_BACKOFF_S to LONGEST_BACKOFF_S."""

_SCHEMES = {"ws": "ws", "http": "ws", "wss": "wss", "https": "wss"}


@dataclass(frozen=True, slots=True)
class Server:
    """One server: what was asked for, and the address that was found for it ("": whatever the name resolves to)."""

    scheme: str
    """ws or wss."""
    host: str
    port: int
    path: str = ""
    """What comes before /ws and /ready."""
    address: str = ""

    @property
    def secure(self) -> bool:
        """Whether it is spoken to through TLS."""
        return self.scheme == "wss"

    @property
    def netloc(self) -> str:
        """The host and port, as a URL and the Host header have them."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL of its WebSocket."""
        return f"{self.scheme}://{self.netloc}{self.path}/ws"

    @property
    def name(self) -> str:
        """What messages call it."""
        address = f" ({self.address})" if self.address else ""
        return f"{self.scheme}://{self.netloc}{self.path}{address}"


def parse_servers(urls: str | Iterable[str]) -> tuple[Server, ...]:
    """Read URLs: an iterable of them, or one string with commas between. Raises AddressError."""
    texts = urls.split(",") if isinstance(urls, str) else list(urls)
    servers = [_parse(text.strip()) for text in texts if text.strip()]
    if not servers:
        raise AddressError("(none)", "no URL was given; give one such as ws://localhost:8000")
    return tuple(dict.fromkeys(servers))


def _parse(text: str) -> Server:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise AddressError(repr(text), f"this is no URL: {error}") from error
    if parts.scheme not in _SCHEMES or not host:
        raise AddressError(repr(text), "this is no URL of a server; write it like ws://localhost:8000 or wss://host")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        # Without the text itself: what is refused may be a secret.
        raise AddressError(f"{parts.scheme}://{host}", "leave user names, tokens and queries out of the URL")
    scheme = _SCHEMES[parts.scheme]
    path = parts.path.rstrip("/").removesuffix("/ws").rstrip("/")
    return Server(scheme, host, port or (443 if scheme == "wss" else 80), path)


def apart(server: Server, addresses: Sequence[str]) -> tuple[Server, ...]:
    """Return the servers that a host name with these addresses stands for.

    Those of the kind, IPv4 or IPv6, that it has more of; a name with one of each is one machine, reached by name.
    """
    found = dict.fromkeys(addresses)
    kinds = [[a for a in found if ":" not in a], [a for a in found if ":" in a]]
    several = max(kinds, key=len)
    if len(several) < 2:
        return (server,)
    return tuple(Server(server.scheme, server.host, server.port, server.path, a) for a in several)


async def look_up(servers: Iterable[Server]) -> tuple[Server, ...]:
    """Ask for the addresses of each server's host name. Raises ConnectionLostError when a name has none."""
    found: dict[Server, None] = {}
    for server in servers:
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConnectionLostError(server.name, f"its host name cannot be resolved ({error.strerror})") from error
        found |= dict.fromkeys(apart(server, [str(info[4][0]) for info in infos]))
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class Loan:
    """A session that is lent on a server, from `lend` to `give_back`."""

    server: Server
    after: int
    """How often the server had lost sessions when this one was begun."""


@dataclass(slots=True)
class _Standing:
    """How a server is doing."""

    in_flight: int = 0
    failures: int = 0
    """In a row."""
    losses: int = 0
    """Failures that may have ended its sessions, ever."""
    retry_at: float = 0.0
    trials: set[Loan] = field(default_factory=set)
    """The first sessions since it failed, as long as they have told nothing."""


class ServerBoard:
    """The standing of each server. Times are seconds of any one clock, given by the caller.

    The caller says `lend` before it opens or reuses a session, `succeeded` or `failed` when that has told something of
    the server, and `give_back` in the end, once for each `lend`.
    """

    def __init__(self, servers: Iterable[Server], chance: random.Random) -> None:
        self._chance = chance
        self._standings = {server: _Standing() for server in servers}

    @property
    def servers(self) -> tuple[Server, ...]:
        """The servers, in the order they were given."""
        return tuple(self._standings)

    def in_flight(self, server: Server) -> int:
        """How many sessions are lent there."""
        standing = self._standings.get(server)
        return standing.in_flight if standing else 0

    def replace(self, servers: Iterable[Server]) -> None:
        """Take the servers for those there are now; known ones keep their standing."""
        self._standings = {server: self._standings.get(server) or _Standing() for server in servers}

    def choose(self, now: float, skip: Collection[Server] = (), ready: Collection[Server] = ()) -> Server | None:
        """Return the server with the least in flight, at random among equals; None when all are backed off from.

        `ready` are servers that have a session to reuse, and may be backed off from.
        """
        waiting = [
            (standing.in_flight, self._chance.random(), server)
            for server, standing in self._standings.items()
            if server not in skip and (server in ready or (standing.retry_at <= now and not standing.trials))
        ]
        return min(waiting, key=lambda entry: entry[:2])[2] if waiting else None

    def soonest(self, skip: Collection[Server] = ()) -> Server | None:
        """Return the server whose backoff ends first, or that has none; None when `skip` holds all."""
        others = [server for server in self._standings if server not in skip]
        return min(others, key=lambda server: self._standings[server].retry_at, default=None)

    def backoff(self, now: float) -> float:
        """Return the seconds until the first backoff ends; 0 when there is none."""
        return min((s.retry_at - now for s in self._standings.values() if s.retry_at > now), default=0.0)

    def lend(self, server: Server, *, reused: bool = False) -> Loan:
        """Count a session there. One that is not `reused` is on trial when the server has failed before."""
        standing = self._standings[server]
        loan = Loan(server, standing.losses)
        standing.in_flight += 1
        if not reused and standing.failures:
            standing.trials.add(loan)
        return loan

    def give_back(self, loan: Loan) -> None:
        """Count the session no longer. A trial that has told nothing makes room for another one."""
        if (standing := self._standings.get(loan.server)) is not None:
            standing.in_flight = max(0, standing.in_flight - 1)
            standing.trials.discard(loan)

    def succeeded(self, loan: Loan) -> bool:
        """Note a session that works; return whether it was on trial.

        One that was begun before the failure proves nothing.
        """
        standing = self._standings.get(loan.server)
        if standing is None or loan not in standing.trials:
            return False
        standing.failures, standing.retry_at = 0, 0.0
        standing.trials.clear()
        return True

    def outdated(self, loan: Loan) -> bool:
        """Tell whether the server has failed since the session was begun: what ended that may have ended this one.

        Each of a server's sessions finds out for itself that the server has gone, the last one long after another is
        there in its place; and behind a load balancer, where several are one, most were never affected.
        """
        standing = self._standings.get(loan.server)
        return standing is not None and loan.after < standing.losses

    def failed(self, server: Server, now: float, *, busy: bool = False) -> bool:
        """Back off from the server; return whether it was well before. Sessions that fail meanwhile say nothing new.

        One that is `busy` goes on with the sessions it has.
        """
        standing = self._standings.get(server)
        if standing is None:
            return False
        if now < standing.retry_at:
            return False
        standing.trials.clear()
        standing.losses += not busy
        bound = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(standing.failures, 30))
        standing.failures += 1
        standing.retry_at = now + bound * (0.5 + 0.5 * self._chance.random())
        return standing.failures == 1
