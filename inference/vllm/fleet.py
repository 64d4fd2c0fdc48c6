"""The inference servers of a run: which ones there are, and which one gets a request; a state machine without I/O.

A replica is ready when it answers and holds the current weights. When a call fails it is down; it is tried again after
a pause that doubles, and becomes ready only when somebody who brought it to the current weights says so (`joined`).

Guarantees:
- A request goes to a ready replica or to none.
- An episode stays where its prefix is cached as long as that replica is ready; a new one goes where least is in flight,
  at random among equals: ranks with fewer episodes than there are replicas would all take the first ones.
- Nobody is asked in a tight loop, and not all at the same moment: pauses have jitter.
"""

from __future__ import annotations

import math
import random
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
REPORT_EVERY_S = 5.0
"""Between two reports of a wait for servers."""


def split_urls(text: str) -> tuple[str, ...]:
    """Return the base URLs of a flag that separates them by commas. Raises ValueError."""
    urls = tuple(dict.fromkeys(part.strip().rstrip("/") for part in text.split(",") if part.strip()))
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path or parts.query:
            raise ValueError(f"{url!r} is not the base URL of a server; write it as http://host:8001")
    if not urls:
        raise ValueError("no server is named; write http://host:8001, several separated by commas")
    return urls


Resolve = Callable[[str, int], Sequence[tuple[socket.AddressFamily, str]]]
"""Returns the addresses of a host and port. Raises OSError."""


def look_up(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """Ask the system's resolver. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, str(address[0])) for family, _, _, _, address in found]


def every_server(urls: Sequence[str], resolve: Resolve = look_up) -> tuple[str, ...]:
    """Return a URL for each address where a host has several of one kind; others as they are.

    So `docker compose up --scale inference=2` and headless services make them: each server needs the weights.

    An https URL stays, since the certificate is for the name; so does a name that cannot be resolved yet, as of a
    server that is still to come.
    """
    found: list[str] = []
    for url in urls:
        parts = urlsplit(url)
        addresses: set[tuple[socket.AddressFamily, str]] = set()
        if parts.scheme == "http" and parts.hostname:
            with suppress(OSError):
                addresses = set(resolve(parts.hostname, parts.port or 80))
        ipv4 = sorted(address for family, address in addresses if family == socket.AF_INET)
        ipv6 = sorted(f"[{address}]" for family, address in addresses if family == socket.AF_INET6)
        several = next((kind for kind in (ipv4, ipv6) if len(kind) > 1), None)
        found += [f"http://{each}:{parts.port or 80}" for each in several] if several else [url]
    return tuple(dict.fromkeys(found))


def pause_s(failures: int, jitter: float) -> float:
    """Return how long to wait after so many failures in a row; `jitter` in [0, 1) takes off up to a half."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures - 1, 10)) * (1 - jitter / 2))


@dataclass(slots=True)
class Wait:
    """A wait for a server to be ready, of at most `limit_s` seconds from `began`."""

    began: float
    limit_s: float
    report_at: float = -math.inf

    def left_s(self, now: float) -> float:
        """Return the time that is left; negative when it is up."""
        return self.began + self.limit_s - now

    def report(self, now: float, reasons: str) -> str:
        """Return the line that reports the wait, at once and then every few seconds; "" in between."""
        if now < self.report_at:
            return ""
        self.report_at = now + REPORT_EVERY_S
        return f"waiting for an inference server, {self.left_s(now):.0f} s left: {reasons}"


@dataclass(slots=True, eq=False)
class Replica:
    """One server as its clients know it."""

    url: str
    model: str = ""
    """The name that requests ask for."""
    max_model_len: int = 0
    is_known_short: bool = False
    """It was said that its context is shorter than an episode's."""
    fingerprint: str | None = None
    """Of the process that got the weights."""
    version: int = 0
    """Of the weights that it holds."""
    is_ready: bool = False
    in_flight: int = 0
    failures: int = 0
    """In a row."""
    retry_at: float = 0.0
    reason: str = "it has not been asked yet"
    """Why it is not ready."""
    computed: float = 0.0
    """Tokens, as it said when it was last looked at, which was at `counted_at`."""
    counted_at: float = -math.inf
    advanced_at: float = -math.inf
    """When it was last seen to have computed more."""

    def counted(self, computed: float, now: float) -> None:
        """Note how many tokens it says that it has computed since it was started."""
        if computed != self.computed:
            self.computed, self.advanced_at = computed, now
        self.counted_at = now


@dataclass(slots=True)
class Fleet:
    """All replicas of a run."""

    replicas: Sequence[Replica]
    chance: random.Random = field(default_factory=random.Random)
    held: bool = False
    """Nobody is tried again before this ends: all are about to get new weights."""

    @classmethod
    def of(cls, urls: Iterable[str]) -> Fleet:
        """A fleet of which nothing is known yet."""
        return cls([Replica(url) for url in urls])

    @property
    def ready(self) -> list[Replica]:
        """Those that may get requests."""
        return [replica for replica in self.replicas if replica.is_ready]

    def choose(self, preferred: Replica | None = None) -> Replica | None:
        """Return who gets a request; None when nobody may."""
        if preferred is not None and preferred.is_ready:
            return preferred
        return min(self.ready, key=lambda replica: (replica.in_flight, self.chance.random()), default=None)

    def joined(self, replica: Replica, version: int, fingerprint: str | None) -> bool:
        """Note that a replica holds the weights of `version`. Returns whether it was away before."""
        was_away = not replica.is_ready and replica.failures > 0
        replica.is_ready, replica.version, replica.fingerprint = True, version, fingerprint
        replica.failures, replica.reason = 0, ""
        return was_away

    def lost(self, replica: Replica, reason: str, now: float) -> bool:
        """Note that a replica failed. Returns whether it was ready until now."""
        was_ready = replica.is_ready
        replica.is_ready, replica.reason = False, reason
        replica.failures += 1
        replica.retry_at = now + pause_s(replica.failures, self.chance.random())
        return was_ready

    def due(self, now: float) -> list[Replica]:
        """Return those that are down and should be tried again."""
        if self.held:
            return []
        return [replica for replica in self.replicas if not replica.is_ready and replica.retry_at <= now]

    def next_due(self) -> float | None:
        """Return when the next one should be tried again; None when all are ready, or held."""
        if self.held:
            return None
        return min((replica.retry_at for replica in self.replicas if not replica.is_ready), default=None)

    def reasons(self) -> str:
        """Return in one line why those that are down are."""
        return "; ".join(replica.reason for replica in self.replicas if not replica.is_ready)
