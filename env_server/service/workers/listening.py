"""The sockets that a server listens on, bound before its workers start.

With several workers each has a socket of its own on the same address (SO_REUSEPORT): the kernel then spreads
connections evenly, where workers that share one socket leave most of a burst to whichever is awake. The parent holds
them too, so that connections which wait for a worker that died are taken by the one that replaces it.

A peer that is gone without a word is noticed by the kernel within about two minutes: TCP's own probes find it, also
when its program is busy for minutes and could not answer a WebSocket ping.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from env_server.errors import SQLEnvError

BACKLOG = 2048
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 120_000}


class ListenError(SQLEnvError):
    """The address cannot be listened on; the text says why and what to change."""


def listen(host: str, port: int, workers: int = 1) -> list[list[socket.socket]]:
    """Return for each worker its listening sockets, one for each address of the host. Raises ListenError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ListenError(f"host {host!r} is not known here: {error.strerror}. Choose another with --host") from error
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    made: list[list[socket.socket]] = [[]]
    try:
        for family, address in addresses:
            try:
                made[0].append(_first(family, (address[0], port or _port_of(made[0]), *address[2:]), workers > 1))
            except OSError as error:
                missing = error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
                if not missing or (address == addresses[-1][1] and not made[0]):
                    raise
        for _ in range(workers - 1):
            made.append(bind_again(made[0]))
        for listener in (listener for sockets in made for listener in sockets):
            listener.listen(BACKLOG)
    except OSError as error:
        for sockets in made:
            close_all(sockets)
        raise ListenError(_advice(host, port, error)) from error
    return made


def bind_again(sockets: Sequence[socket.socket]) -> list[socket.socket]:
    """Return new sockets that share the addresses of a worker's; no connection reaches them until they `listen`.

    Raises OSError.
    """
    return [_bound(each.family, each.getsockname(), share=True) for each in sockets]


def close_all(sockets: Sequence[socket.socket]) -> None:
    """Close them; with the last process that holds one, its connections that nobody took are refused."""
    for each in sockets:
        each.close()


def url_of(sockets: Sequence[socket.socket]) -> str:
    """Return where a browser finds the server."""
    host, port = sockets[0].getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _port_of(sockets: Sequence[socket.socket]) -> int:
    return int(sockets[0].getsockname()[1]) if sockets else 0


def _first(family: int, address: tuple[str | int, ...], share: bool) -> socket.socket:
    if share and address[1]:
        # A socket that shares its port would share it with another server's, too; one that does not finds that out.
        _bound(family, address, share=False).close()
    return _bound(family, address, share=share)


def _bound(family: int, address: tuple[str | int, ...], *, share: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            # The unspecified address is every address, those of IPv4 too.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] != "::")
        # Connections inherit these.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if option := getattr(socket, name, None):
                listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.bind(address)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _advice(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} of {host} is in use. Choose another with --port, or 0 for a free one"
        case errno.EACCES:
            return f"port {port} may not be used by this user. Choose one above 1023 with --port"
        case errno.EADDRNOTAVAIL:
            return f"{host} is no address of this machine. Choose another with --host"
    return f"{host}:{port} cannot be listened on: {error.strerror}. Choose others with --host and --port"
