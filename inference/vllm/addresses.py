"""Several servers behind one name, as `docker compose up --scale inference=2` and headless services make them.

Each server needs the weights, so each is addressed by itself instead of by whichever address a connection gets.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

Resolve = Callable[[str, int], Sequence[tuple[socket.AddressFamily, str]]]
"""Returns the addresses of a host and port. Raises OSError."""


def look_up(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """Ask the system's resolver. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, str(address[0])) for family, _, _, _, address in found]


def every_server(urls: Sequence[str], resolve: Resolve = look_up) -> tuple[str, ...]:
    """Return a URL for each address where a host has several of one kind; others as they are.

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
