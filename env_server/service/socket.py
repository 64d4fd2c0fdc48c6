"""`/ws`: one WebSocket is one session. A plain ASGI application, mounted beside the HTTP routes.

Guarantees:
- A socket gets a place before it gets an environment; the place comes back the moment the socket is gone, and a query
  that runs for it is interrupted.
- Replies come in the order of the requests. While one waits for the query pool, up to `MAX_WAITING` more are taken in.
- An idle session is told so, closed, and never stepped afterwards; so is every session when the server shuts down, once
  its episode is over or the grace period has passed.
- A client that sends faster than it may is read more slowly; nothing is dropped.
- Only its own socket's errors mean that a client has gone. Any other error ends the session, which is told so, and goes
  on to the server, which logs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, TypeVar

from env_server.service.access import DRAINING, SUBPROTOCOL, Access, Rejection
from env_server.service.capacity import Capacity, CapacityReachedError
from env_server.service.metrics import Metrics
from env_server.service.protocol import error_frame
from env_server.service.session import Session
from env_server.service.settings import ServiceSettings
from env_server.types import SERVES_HEADER, ErrorCode

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")

MAX_WAITING = 32
"""Requests of one session that wait while one runs; then its socket is not read."""
REJECTION_GRACE_S = 1.0
"""How long a socket without a place stays open for its client to read why."""
BURST_S = 2.0
"""Seconds' worth of messages that may come at once."""

_CLOSING_MESSAGES = {
    "idle": "the session was idle for longer than the server's idle_timeout_s; connect again, then reset",
    "drain": DRAINING.text,
}
_FAILED = "the server failed to answer; its log says why. Connect again, then reset"


class _ClientGoneError(Exception):
    """The client has closed its socket, or cannot be reached any more."""


class Sockets:
    """The sockets of one worker."""

    def __init__(
        self,
        settings: ServiceSettings,
        access: Access,
        capacity: Capacity,
        metrics: Metrics,
        new_session: Callable[[], Session],
        serves: str,
    ) -> None:
        self._settings = settings
        self._access = access
        self._capacity = capacity
        self._metrics = metrics
        self._new_session = new_session
        self._headers = [(SERVES_HEADER.lower().encode(), serves.encode())]
        self._connections: set[_Connection] = set()
        self._gone = asyncio.Event()
        self.draining = False

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one socket."""
        await receive()
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        subprotocols = scope.get("subprotocols", [])
        rejection = self._access.check(
            headers.get(b"authorization"), headers.get(b"origin"), headers.get(b"host"), subprotocols
        )
        if rejection is None and self.draining:
            rejection = DRAINING
        if rejection is not None:
            self._metrics.refused.labels(rejection.reason).inc()
            await _deny(scope, send, rejection)
            return
        connection = _Connection(receive, send, self._settings.messages_per_s)
        try:
            chosen = SUBPROTOCOL if SUBPROTOCOL in subprotocols else None
            await connection.send({"type": "websocket.accept", "subprotocol": chosen, "headers": self._headers})
            has_slot = await self._get_slot(connection)
        except _ClientGoneError:
            return
        if has_slot:
            await self._serve(connection)

    @property
    def sessions(self) -> int:
        """Sessions that are open in this worker."""
        return len(self._connections)

    async def close_idle(self) -> None:
        """Close idle sessions, for ever; to be cancelled."""
        timeout = self._settings.idle_timeout_s
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, timeout / 4))
            for connection in list(self._connections):
                if connection.reading and loop.time() - connection.since > timeout:
                    connection.close("idle")

    async def drain(self, grace_s: float) -> None:
        """Take no more sessions, let the episodes end, close what is left after `grace_s`."""
        self.draining = True
        for connection in list(self._connections):
            if not connection.playing:
                connection.close("drain")
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._all_gone()
        for connection in list(self._connections):
            connection.close("drain")
        await self._all_gone()

    async def _all_gone(self) -> None:
        while self._connections:
            self._gone.clear()
            await self._gone.wait()

    async def _get_slot(self, connection: _Connection) -> bool:
        """Wait for a slot; False when there is none, which the client is sent. Raises _ClientGoneError."""
        if self._capacity.try_acquire():
            return True
        try:
            with self._metrics.sessions_waiting.track_inprogress():
                waited = await connection.run_until_disconnect(self._capacity.acquire(self._settings.queue_timeout_s))
        except CapacityReachedError as error:
            self._metrics.refused.labels(error.reason).inc()
            self._metrics.frame_errors.labels(ErrorCode.CAPACITY_REACHED).inc()
            details = {"active_sessions": error.active, "max_sessions": error.max_sessions}
            await connection.send(
                {"type": "websocket.send", "text": error_frame(ErrorCode.CAPACITY_REACHED, str(error), **details)}
            )
            # Some clients send before they read, and a socket that is closed by then hides the error from them.
            with suppress(TimeoutError):
                async with asyncio.timeout(REJECTION_GRACE_S):
                    await connection.frame()
            await connection.send({"type": "websocket.close", "code": 1000})
            return False
        self._metrics.queue_wait.observe(waited)
        return True

    async def _serve(self, connection: _Connection) -> None:
        self._metrics.opened.inc()
        self._metrics.sessions.inc()
        self._connections.add(connection)
        reason, closing_message = "error", ""
        try:
            reason = await self._play(connection, self._new_session())
            closing_message = _CLOSING_MESSAGES.get(reason, "")
        except _ClientGoneError:
            reason = "disconnect"
        except asyncio.CancelledError:
            if not connection.close_reason:
                raise
            connection.task.uncancel()
            reason = connection.close_reason
            closing_message = _CLOSING_MESSAGES[reason]
        except Exception:
            closing_message = _FAILED
            raise
        finally:
            self._connections.discard(connection)
            self._capacity.release()
            self._metrics.closed.labels(reason).inc()
            self._metrics.sessions.dec()
            self._gone.set()
            if closing_message:
                await connection.send_error(ErrorCode.SESSION_ERROR, closing_message)

    async def _play(self, connection: _Connection, session: Session) -> str:
        """Answer frames until the session ends; return why it does. Raises _ClientGoneError."""
        while True:
            reply = session.answer(await connection.frame())
            if reply is None:
                await connection.send({"type": "websocket.close", "code": 1000})
                return "client"
            if not isinstance(reply, str):
                reply = await connection.run_until_disconnect(reply)
            connection.playing = session.playing
            await connection.send({"type": "websocket.send", "text": reply})
            if self.draining and not session.playing:
                return "drain"


class WebSocketRouter:
    """An ASGI application in front of another one: `/ws` goes straight to the sockets.

    What is behind it is a stack of suspended calls, and does nothing for a WebSocket; a session would keep them as long
    as its socket is open, some kilobytes of them.
    """

    def __init__(self, app: Any, sockets: Sockets) -> None:
        self._app = app
        self._sockets = sockets

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve a request, or a session."""
        if scope["type"] == "websocket" and scope["path"].removeprefix(scope.get("root_path", "")) == "/ws":
            await self._sockets(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _Connection:
    """One socket: its frames, in order, and the ways in which it ends."""

    def __init__(self, receive: Receive, send: Send, messages_per_s: float) -> None:
        self._receive = receive
        self._send = send
        self._loop = asyncio.get_running_loop()
        self.task = _current_task()
        self._inbox: list[Message] = []  # MAX_WAITING at most; an empty deque takes ten times as much memory
        self._receiving: asyncio.Future[Message] | None = None
        self._rate = messages_per_s
        self._allowance = messages_per_s * BURST_S
        self._refilled = self._loop.time()
        self.close_reason = ""
        """Why the session was ended from this side."""
        self.since = self._loop.time()
        """Since when the session waits for its client."""
        self.reading = False
        """Whether the session waits for its client."""
        self.playing = False
        self._watching = False
        """Whether frames are taken in besides work."""

    async def frame(self) -> str | bytes:
        """Return the next frame. Raises _ClientGoneError."""
        message = self._inbox.pop(0) if self._inbox else await self._next()
        if message["type"] == "websocket.disconnect":
            raise _ClientGoneError
        if self._rate:
            await self._pace()
        frame: str | bytes | None = message.get("text")
        return bytes(message["bytes"]) if frame is None else frame

    async def send(self, message: Message) -> None:
        """Send a message. Raises _ClientGoneError."""
        try:
            await self._send(message)
        except OSError as error:
            raise _ClientGoneError from error

    def close(self, reason: str) -> None:
        """End the session, whatever it waits for."""
        if not self.close_reason:
            self.close_reason = reason
            self.task.cancel()

    async def send_error(self, code: ErrorCode, message: str, **details: object) -> None:
        """Send an error frame and close the socket."""
        with suppress(_ClientGoneError):
            await self.send({"type": "websocket.send", "text": error_frame(code, message, **details)})
            await self.send({"type": "websocket.close", "code": 1000})

    async def run_until_disconnect(self, work: Awaitable[T]) -> T:
        """Wait for work and take in frames meanwhile; cancels it and raises _ClientGoneError when the client goes."""
        if self._receiving is not None and self._receiving.done():
            self._buffer(self._receiving)
        if self._is_gone():
            asyncio.ensure_future(work).cancel()
            raise _ClientGoneError
        self._watching = True
        self._watch()
        try:
            return await work
        except asyncio.CancelledError:
            if not self._is_gone():
                raise
            self.task.uncancel()
            raise _ClientGoneError from None
        finally:
            self._watching = False

    def _watch(self) -> None:
        """Wait for a frame beside the work, if there is room for one."""
        if self._receiving is None and len(self._inbox) < MAX_WAITING:
            self._receiving = asyncio.ensure_future(self._receive())
            self._receiving.add_done_callback(self._arrived)

    def _arrived(self, receiving: asyncio.Future[Message]) -> None:
        if not self._watching or receiving is not self._receiving:
            return  # whoever needs it next takes it
        self._buffer(receiving)
        if self._is_gone():
            self.task.cancel()
        else:
            self._watch()

    def _buffer(self, receiving: asyncio.Future[Message]) -> None:
        if receiving.cancelled() or receiving.exception() is not None:
            return  # for `_next` to raise
        message, self._receiving = receiving.result(), None
        self._inbox.append(message)

    def _is_gone(self) -> bool:
        """Whether the client has gone, as far as the frames say that were taken in."""
        return bool(self._inbox) and self._inbox[-1]["type"] == "websocket.disconnect"

    async def _next(self) -> Message:
        self.since = self._loop.time()
        self.reading = True
        try:
            if self._receiving is None:
                return await self._receive()
            message, self._receiving = await self._receiving, None
            return message
        except OSError as error:
            raise _ClientGoneError from error
        finally:
            self.reading = False

    async def _pace(self) -> None:
        """Wait until one more message is allowed."""
        now = self._loop.time()
        self._allowance = min(self._rate * BURST_S, self._allowance + (now - self._refilled) * self._rate)
        self._refilled = now
        self._allowance -= 1
        if self._allowance < 0:
            await asyncio.sleep(-self._allowance / self._rate)


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "a socket is served in a task"
    return task


async def _deny(scope: MutableMapping[str, Any], send: Send, rejection: Rejection) -> None:
    """Refuse the handshake with a status and a sentence, where the server can send one."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close"})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    if rejection.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "websocket.http.response.start", "status": rejection.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": rejection.text.encode()})
