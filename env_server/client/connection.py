"""One socket to one environment server: one session, in OpenEnv's wire format. Objects in, objects out.

Promises:
- Every wait has a deadline.
- Each failure is a `ClientError`, and what it says about retrying holds. After anything but a RemoteActionError the
  socket is gone, so an answer that comes late is never taken for another request's.
- The token goes into the handshake and nowhere else.

Servers are reached directly, never through a proxy. Nothing is compressed: both ends have better use for the time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus
from websockets.frames import CloseCode
from websockets.protocol import State

from env_server.client.errors import (
    AuthenticationError,
    ClientError,
    ConnectionLostError,
    DeadlineError,
    ProtocolError,
    RemoteActionError,
    ServerBusyError,
    ServerDrainingError,
)
from env_server.client.servers import Server
from env_server.client.tls import client_context, not_trusted
from env_server.types import SERVES_HEADER

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Largest reply; OpenEnv's own limit."""
PING_INTERVAL_S = 20.0
PING_TIMEOUT_S = 60.0
"""How a peer that vanished is noticed. Generous, since a loop may be blocked by what its program computes."""
CLOSE_TIMEOUT_S = 2.0
TEXT_CHARS = 300
"""How much of a server's own text a message repeats."""

_LOG = logging.getLogger(f"{__name__}.frames")
# At DEBUG, websockets logs the headers of the handshake, and the token is one of them.
_LOG.setLevel(logging.INFO)

_BUSY = "CAPACITY_REACHED"
_NO_SESSION = frozenset({"FACTORY_ERROR", "SESSION_ERROR"})
"""Error codes after which the server closes the socket: a session that cannot be made, or goes on no longer."""


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
        self._busy = False
        self.keep_until = math.inf
        """By the loop's clock: after that, whoever lends it begins no other episode on it."""

    @classmethod
    async def open(
        cls,
        server: Server,
        token: str | None = None,
        timeouts: Timeouts | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Self:
        """Connect. Raises ClientError. That the server has a session to give, only its first reply tells.

        `tls` is what the certificate of a server behind wss:// is checked with, `tls.client_context()` without.
        """
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
            raise _why_not_connected(server, error, timeouts) from error
        return cls(server, socket, timeouts)

    @property
    def serves(self) -> str | None:
        """`ServedData.mark` of the server that the session is on; None where it does not say."""
        response = self._socket.response
        return response.headers.get(SERVES_HEADER) if response is not None else None

    @property
    def busy(self) -> bool:
        """Whether a request is under way, or ended so that the socket is of no more use."""
        return self._busy

    @property
    def usable(self) -> bool:
        """Whether the socket is open and between two requests, as far as this end knows."""
        return self._socket.state is State.OPEN and not self._busy

    async def request(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send one request and return the `data` of the reply. Raises ClientError."""
        if self._busy:
            raise RuntimeError("a session answers one request at a time; wait for the one before")
        message: dict[str, Any] = {"type": kind} if data is None else {"type": kind, "data": dict(data)}
        text = json.dumps(message, allow_nan=False)
        self._busy = True
        try:
            async with asyncio.timeout(self._timeouts.request_s):
                frame = await self._exchange(text)
            reply = self._read(frame, "state" if kind == "state" else "observation")
        except RemoteActionError:
            self._busy = False
            raise
        except TimeoutError as error:
            self.abort()
            waited = f"no answer to a {kind} in {self._timeouts.request_s:g} s"
            raise DeadlineError(self.server.name, f"{waited}; is it overloaded?") from error
        except BaseException:
            # The socket may hold half a request, or the answer to it.
            self.abort()
            raise
        self._busy = False
        return reply

    async def close(self) -> None:
        """Say goodbye and close; closing twice is allowed."""
        if self._busy:
            self.abort()
        else:
            await self._socket.close()

    def abort(self) -> None:
        """Drop the connection at once; the server then stops what it was doing for this session."""
        self._socket.transport.abort()

    async def _exchange(self, text: str) -> str | bytes:
        try:
            await self._socket.send(text)
        except ConnectionClosed as error:
            return await self._closing_frame(error)
        try:
            return await self._socket.recv()
        except ConnectionClosed as error:
            raise _why_closed(self.server, error) from error

    async def _closing_frame(self, error: ConnectionClosed) -> str | bytes:
        """Return the frame in which the server said why it closed, where it did."""
        try:
            return await self._socket.recv()
        except ConnectionClosed:
            raise _why_closed(self.server, error) from error

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


def _remote_error(server: Server, data: Mapping[str, Any]) -> ClientError:
    code, message = str(data.get("code", "")), _shown(str(data.get("message", "")))
    details = {key: value for key, value in data.items() if key not in ("code", "message")}
    if code == _BUSY:
        active, limit = (_count(data.get(key)) for key in ("active_sessions", "max_sessions"))
        taken = "" if active is None or limit is None else f", {active} of {limit} are taken"
        return ServerBusyError(server.name, f"it has no session to give{taken}: {message}", active, limit)
    if code in _NO_SESSION:
        return ConnectionLostError(server.name, f"it ended the session, {code}: {message}")
    return RemoteActionError(server.name, code, message, details)


def refused(server: Server, status: int, body: bytes | bytearray | None) -> ClientError:
    """The error for an HTTP status that is not the one wanted."""
    said = _shown(body.decode("utf-8", "replace")) if body else ""
    said = f" ({said})" if said else ""
    match status:
        case 400 if not server.secure:
            return ProtocolError(server.name, f"it answered HTTP 400; does it want wss://?{said}")
        case 401:
            return AuthenticationError(
                server.name, f"it wants a token, and this one is missing or wrong: --env_token or SQLENV_TOKEN{said}"
            )
        case 403:
            return AuthenticationError(server.name, f"it allows this neither with nor without this token{said}")
        case 404 | 405 | 426:
            return ProtocolError(server.name, f"there is no environment at this URL, HTTP {status}; check its path")
        case 429:
            return ServerBusyError(server.name, f"it takes no sessions now, HTTP {status}{said}")
        case 503:
            return ServerDrainingError(server.name, f"it is stopping or not up yet, HTTP {status}{said}")
        case _ if status >= 500:
            return ConnectionLostError(server.name, f"it failed, HTTP {status}{said}")
    return ProtocolError(server.name, f"it answered HTTP {status} instead of opening a session{said}")


def unreachable(server: Server, error: OSError) -> ClientError:
    """The error for a connection that could not be made."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return not_trusted(server, error)
    if isinstance(error, ssl.SSLError):
        return ProtocolError(server.name, f"it does not speak TLS as expected ({error.reason}); is it ws:// instead?")
    reason = _shown(error.strerror or str(error) or type(error).__name__)
    if isinstance(error, ConnectionResetError):
        return ConnectionLostError(server.name, f"it hung up: {reason}. {_hung_up_why(server)}")
    return ConnectionLostError(
        server.name,
        f"it cannot be reached: {reason}. Is it running, and is the port right? `sqlenv serve` starts one",
    )


def _why_not_connected(server: Server, error: Exception, timeouts: Timeouts) -> ClientError:
    match error:
        case TimeoutError():
            return DeadlineError(server.name, f"no connection in {timeouts.connect_s:g} s")
        case InvalidStatus():
            return refused(server, error.response.status_code, error.response.body)
        case InvalidMessage() if isinstance(error.__cause__, EOFError):
            return ConnectionLostError(server.name, f"it hung up during the handshake. {_hung_up_why(server)}")
        case OSError():
            return unreachable(server, error)
    return ProtocolError(server.name, f"no WebSocket handshake: {_shown(str(error))}")


def _hung_up_why(server: Server) -> str:
    """What to look for: a port with TLS hangs up on who speaks without, and the other way round."""
    return f"Is it stopping, or does it want {'ws' if server.secure else 'wss'}:// instead?"


def _why_closed(server: Server, error: ConnectionClosed) -> ClientError:
    received, sent = error.rcvd, error.sent
    if sent is not None and not error.rcvd_then_sent:
        # This end broke it off: for a reply that is too large, for bytes that are no frames, for a ping unanswered.
        if sent.code == CloseCode.MESSAGE_TOO_BIG:
            return ProtocolError(server.name, f"its reply is larger than {MAX_FRAME_BYTES} bytes")
        return ConnectionLostError(server.name, f"the connection broke: {sent.reason or sent.code}")
    said = f": {_shown(received.reason)}" if received is not None and received.reason else ""
    match received.code if received is not None else None:
        case CloseCode.GOING_AWAY | CloseCode.SERVICE_RESTART:
            return ServerDrainingError(server.name, f"it is stopping{said}")
        case CloseCode.POLICY_VIOLATION:
            return AuthenticationError(server.name, f"it closed the connection as not allowed{said}")
        case CloseCode.MESSAGE_TOO_BIG:
            return ProtocolError(server.name, f"it takes no request of this size{said}; send a shorter one")
        case CloseCode.TRY_AGAIN_LATER:
            return ServerBusyError(server.name, f"it takes no sessions now{said}")
    return ConnectionLostError(server.name, f"the connection was closed{said}")


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _shown(text: str | bytes) -> str:
    """One line of a server's own text, cut."""
    line = " ".join((text.decode("utf-8", "replace") if isinstance(text, bytes) else text).split())
    return line if len(line) <= TEXT_CHARS else line[: TEXT_CHARS - 1] + "…"
