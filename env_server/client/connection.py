"""One socket to one environment server: one session, in OpenEnv's wire format.

Guarantees:
- Every wait has a deadline.
- Each failure is a `ClientError`. After anything but a RemoteActionError the socket is gone, so a late answer is never
  taken for another request's.
- The token goes into the handshake and nowhere else.

Servers are reached directly, never through a proxy, and nothing is compressed. Certificates are checked against the
system's authorities and those in the file that SSL_CERT_FILE names.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import resource
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus
from websockets.frames import CloseCode
from websockets.protocol import State

from env_server.client.errors import (
    AddressError,
    AuthenticationError,
    CertificateError,
    ClientError,
    ConnectionLostError,
    DeadlineError,
    ProtocolError,
    RemoteActionError,
    ServerBusyError,
    ServerDrainingError,
)
from env_server.types import SERVES_HEADER, ResetRequest, SQLAction, SQLObservation

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Largest reply; OpenEnv's own limit."""
PING_INTERVAL_S = 20.0
PING_TIMEOUT_S = 60.0
"""Generous: a loop may be blocked by what its program computes."""
CLOSE_TIMEOUT_S = 2.0
MESSAGE_CHARS = 300
"""Characters of a server's own text that an error repeats."""
CA_VARIABLE = "SSL_CERT_FILE"
SPARE_FILES = 256
"""What a process has open besides the connections that it counts: libraries, logs, databases."""

_SCHEMES = {"ws": "ws", "http": "ws", "wss": "wss", "https": "wss"}
_LOG = logging.getLogger(f"{__name__}.frames")
# At DEBUG, websockets logs the headers of the handshake, and the token is one of them.
_LOG.setLevel(logging.INFO)


@dataclass(frozen=True, slots=True)
class Server:
    """One server: the parts of its URL, and the address found for its host ("": whatever the name resolves to)."""

    scheme: str
    """ws or wss."""
    host: str
    port: int
    path: str = ""
    """What comes before /ws and /ready."""
    address: str = ""

    @property
    def secure(self) -> bool:
        """Whether it is behind TLS."""
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
    """Read URLs (ws, wss, http or https, with or without /ws): an iterable, or one string with commas between.

    Raises AddressError.
    """
    texts = urls.split(",") if isinstance(urls, str) else urls
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
        # Without the text itself, which may hold a secret.
        raise AddressError(f"{parts.scheme}://{host}", "leave user names, tokens and queries out of the URL")
    scheme = _SCHEMES[parts.scheme]
    path = parts.path.rstrip("/").removesuffix("/ws").rstrip("/")
    return Server(scheme, host, port or (443 if scheme == "wss" else 80), path)


def client_context(server: Server) -> ssl.SSLContext:
    """Return what certificates are checked with; make one for all connections. Raises CertificateError.

    OpenSSL ignores a SSL_CERT_FILE that is missing or holds no certificate; here that is an error.
    """
    context = ssl.create_default_context()
    if file := os.environ.get(CA_VARIABLE):
        try:
            context.load_verify_locations(file)
        except OSError as error:
            why = "holds no certificate" if isinstance(error, ssl.SSLError) else f"cannot be read: {error.strerror}"
            raise CertificateError(server.name, f"the file that {CA_VARIABLE} names, {file}, {why}") from error
    return context


def allow_open_files(needed: int) -> int:
    """Let this process have `needed` files open, as far as it may decide that itself; return how many it may have.

    Sockets are files, and many a shell allows 1,024. For servers as for clients.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return needed if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines in seconds."""

    connect_s: float = 10.0
    """To open a connection."""
    request_s: float = 60.0
    """To answer one request."""


class Connection:
    """A session on a server; make one with `open`. One request at a time."""

    def __init__(self, server: Server, socket: ClientConnection, timeouts: Timeouts) -> None:
        self.server = server
        self._socket = socket
        self._timeouts = timeouts
        self.busy = False
        """Whether a request is under way, or ended so that the socket is of no more use."""
        self.reuse_until = math.inf
        """By the loop's clock: no new episode begins on it after that."""

    @classmethod
    async def open(
        cls,
        server: Server,
        token: str | None = None,
        timeouts: Timeouts | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Self:
        """Connect. Raises ClientError. Whether the server has a session free, only its first reply says."""
        timeouts = timeouts or Timeouts()
        if server.secure and tls is None:
            tls = client_context(server)
        try:
            socket = await connect(
                server.url,
                additional_headers={"Authorization": f"Bearer {token}"} if token else None,
                open_timeout=timeouts.connect_s,
                close_timeout=CLOSE_TIMEOUT_S,
                ping_interval=PING_INTERVAL_S,
                ping_timeout=PING_TIMEOUT_S,
                max_size=MAX_FRAME_BYTES,
                compression=None,
                proxy=None,
                ssl=tls if server.secure else None,
                logger=_LOG,
                # Named even where it is the URL's own: a redirect to elsewhere is then refused, not followed.
                host=server.address or server.host,
                port=server.port,
            )
        except (OSError, InvalidHandshake, ValueError) as error:
            raise _connect_error(server, error, timeouts) from error
        return cls(server, socket, timeouts)

    @property
    def serves(self) -> str | None:
        """The dataset version tag (`ServedData.version_tag`) of the server that the session is on; None: not sent."""
        response = self._socket.response
        return response.headers.get(SERVES_HEADER) if response is not None else None

    @property
    def usable(self) -> bool:
        """Whether the socket is open and between two requests, as far as this end knows."""
        return self._socket.state is State.OPEN and not self.busy

    async def reset(self, request: ResetRequest) -> SQLObservation:
        """Start an episode. Raises ClientError."""
        return self._observation(await self.request("reset", request.model_dump(mode="json", exclude_defaults=True)))

    async def step(self, action: SQLAction) -> SQLObservation:
        """Take an action. Raises ClientError."""
        return self._observation(await self.request("step", action.model_dump(exclude_defaults=True)))

    async def request(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send one request and return the `data` of the reply. Raises ClientError."""
        if self.busy:
            raise RuntimeError("a session answers one request at a time; wait for the one before")
        message: dict[str, Any] = {"type": kind} if data is None else {"type": kind, "data": dict(data)}
        text = json.dumps(message, allow_nan=False)
        self.busy = True
        try:
            async with asyncio.timeout(self._timeouts.request_s):
                frame = await self._exchange(text)
            reply = self._read(frame, "state" if kind == "state" else "observation")
        except RemoteActionError:
            self.busy = False
            raise
        except TimeoutError as error:
            self.abort()
            waited = f"no answer to a {kind} in {self._timeouts.request_s:g} s"
            raise DeadlineError(self.server.name, f"{waited}; is it overloaded?") from error
        except BaseException:
            # The socket may hold half a request, or the answer to it.
            self.abort()
            raise
        self.busy = False
        return reply

    async def close(self) -> None:
        """Close the session; closing twice is allowed."""
        if self.busy:
            self.abort()
        else:
            await self._socket.close()

    def abort(self) -> None:
        """Drop the connection at once; the server then stops what it was doing for this session."""
        self.busy = True
        self._socket.transport.abort()

    async def _exchange(self, text: str) -> str | bytes:
        try:
            with contextlib.suppress(ConnectionClosed):  # the server may have said why before it closed
                await self._socket.send(text)
            return await self._socket.recv()
        except ConnectionClosed as error:
            raise _close_error(self.server, error) from error

    def _read(self, frame: str | bytes, expected: str) -> dict[str, Any]:
        try:
            reply = json.loads(frame)
            kind, data = reply["type"], reply["data"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ProtocolError(self.server.name, f"its reply is not OpenEnv's: {_shown(frame)}") from error
        if kind == expected and isinstance(data, dict):
            return data
        if kind == "error" and isinstance(data, dict):
            raise _remote_error(self.server, data)
        raise ProtocolError(self.server.name, f"it answered {kind!r} where {expected!r} was due: {_shown(frame)}")

    def _observation(self, data: Mapping[str, Any]) -> SQLObservation:
        beside = {"reward": data.get("reward") or 0.0, "done": data.get("done", False)}
        try:
            return SQLObservation.model_validate(
                {"metadata": data.get("metadata") or {}, **data["observation"], **beside}
            )
        except (KeyError, TypeError, ValidationError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else f"its reply holds {sorted(data)}"
            self.abort()
            raise ProtocolError(
                self.server.name, f"it plays another environment than SQLEnv, or another version of it: {why}"
            ) from error


def _remote_error(server: Server, data: Mapping[str, Any]) -> ClientError:
    details = dict(data)
    code, message = str(details.pop("code", "")), _shown(str(details.pop("message", "")))
    if code == "CAPACITY_REACHED":
        active, limit = (
            value if isinstance(value := data.get(key), int) else None for key in ("active_sessions", "max_sessions")
        )
        taken = "" if active is None or limit is None else f", {active} of {limit} are taken"
        return ServerBusyError(server.name, f"it has no session free{taken}: {message}", active, limit)
    if code in ("FACTORY_ERROR", "SESSION_ERROR"):
        return ConnectionLostError(server.name, f"it ended the session, {code}: {message}")
    return RemoteActionError(server.name, code, message, details)


def status_error(server: Server, status: int, body: bytes | bytearray | None) -> ClientError:
    """Return the error for an HTTP status that is not the one expected."""
    text = f" ({_shown(bytes(body))})" if body else ""
    match status:
        case 400 if not server.secure:
            return ProtocolError(server.name, f"it answered HTTP 400; does it expect wss://?{text}")
        case 401:
            return AuthenticationError(
                server.name, f"it needs a token, and this one is missing or wrong: --env_token or SQLENV_TOKEN{text}"
            )
        case 403:
            return AuthenticationError(server.name, f"it allows this neither with nor without this token{text}")
        case 404 | 405 | 426:
            return ProtocolError(server.name, f"there is no environment at this URL, HTTP {status}; check its path")
        case 429:
            return ServerBusyError(server.name, f"it takes no sessions now, HTTP {status}{text}")
        case 503:
            return ServerDrainingError(server.name, f"it is stopping or not up yet, HTTP {status}{text}")
    kind = ConnectionLostError if status >= 500 else ProtocolError
    return kind(server.name, f"it answered HTTP {status} instead of opening a session{text}")


def connection_error(server: Server, error: BaseException) -> ClientError:
    """Return the error for a connection that could not be made."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return CertificateError(
            server.name,
            f"its certificate is not trusted: {error.verify_message.rstrip('.')}. The URL must hold the name that the "
            f"certificate was made for; an authority of your own goes into the file that {CA_VARIABLE} names",
        )
    if isinstance(error, ssl.SSLError):
        return ProtocolError(server.name, f"it does not speak TLS as expected ({error.reason}); is it ws:// instead?")
    reason = _shown((error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__)
    if isinstance(error, ConnectionResetError | EOFError):
        # A port with TLS hangs up on a client without, and the other way round.
        other = "ws" if server.secure else "wss"
        return ConnectionLostError(server.name, f"it hung up: {reason}. Is it stopping, or does it want {other}://?")
    return ConnectionLostError(
        server.name, f"it cannot be reached: {reason}. Is it running, and is the port right? `sqlenv serve` starts one"
    )


def _connect_error(server: Server, error: Exception, timeouts: Timeouts) -> ClientError:
    match error:
        case TimeoutError():
            return DeadlineError(server.name, f"no connection in {timeouts.connect_s:g} s")
        case InvalidStatus():
            return status_error(server, error.response.status_code, error.response.body)
        case InvalidMessage() if isinstance(error.__cause__, EOFError):
            return connection_error(server, error.__cause__)
        case OSError():
            return connection_error(server, error)
    return ProtocolError(server.name, f"no WebSocket handshake: {_shown(str(error))}")


def _close_error(server: Server, error: ConnectionClosed) -> ClientError:
    received, sent = error.rcvd, error.sent
    if sent is not None and not error.rcvd_then_sent:
        # This end broke it off: for a reply that is too large, for bytes that are no frames, for a ping unanswered.
        if sent.code == CloseCode.MESSAGE_TOO_BIG:
            return ProtocolError(server.name, f"its reply is larger than {MAX_FRAME_BYTES} bytes")
        return ConnectionLostError(server.name, f"the connection broke: {sent.reason or sent.code}")
    text = f": {_shown(received.reason)}" if received is not None and received.reason else ""
    match received.code if received is not None else None:
        case CloseCode.GOING_AWAY | CloseCode.SERVICE_RESTART:
            return ServerDrainingError(server.name, f"it is stopping{text}")
        case CloseCode.POLICY_VIOLATION:
            return AuthenticationError(server.name, f"it closed the connection as not allowed{text}")
        case CloseCode.MESSAGE_TOO_BIG:
            return ProtocolError(server.name, f"it takes no request of this size{text}; send a shorter one")
        case CloseCode.TRY_AGAIN_LATER:
            return ServerBusyError(server.name, f"it takes no sessions now{text}")
    return ConnectionLostError(server.name, f"the connection was closed{text}")


def _shown(text: str | bytes) -> str:
    """Return a server's own text in one line, cut."""
    line = " ".join((text.decode("utf-8", "replace") if isinstance(text, bytes) else text).split())
    return line if len(line) <= MESSAGE_CHARS else line[: MESSAGE_CHARS - 1] + "…"
