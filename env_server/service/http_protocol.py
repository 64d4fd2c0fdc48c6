"""uvicorn's HTTP/1.1 connections, with a deadline that they lack: a client gets `REQUEST_S` to send a request.

The same holds for the request that opens a WebSocket. Without it, whoever reaches the port, token or not, holds as many
connections as there may be files for as long as it likes, and nobody else gets in. h11 bounds the size of a head, at 64
KiB; of uvicorn's other parser, httptools, a single header without end takes the machine's memory.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 20.0


class DeadlineProtocol(H11Protocol):
    """A connection until it is closed, or handed to a WebSocket."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        if self._deadline is None:
            self._expect()
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_waiting()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """The connection becomes a WebSocket."""
        self._stop_waiting()
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
