"""uvicorn's HTTP/1.1 connections, with two bounds that they lack.

A client gets `REQUEST_S` to send a request, and may send `HEAD_BYTES` plus the largest body; the same holds for the
request that opens a WebSocket. Without them, a client that sends slowly, or without end, holds a connection or memory
for as long as it likes.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

REQUEST_S = 20.0
HEAD_BYTES = 65_536

_TOO_LARGE = b"the request is too large"
_REPLY = (
    b"HTTP/1.1 413 Content Too Large\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
)


class BoundedHttpProtocol(HttpToolsProtocol):
    """A connection until it is closed, or handed to a WebSocket. The largest body is that of the largest frame."""

    _received = 0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._expect()
        self._received += len(data)
        if self._received > HEAD_BYTES + self.config.ws_max_size:
            self.transport.write(_REPLY % (len(_TOO_LARGE), _TOO_LARGE))
            self.transport.close()
            return
        super().data_received(data)

    def on_message_complete(self) -> None:
        """A request is here."""
        self._stop_waiting()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """The connection becomes a WebSocket."""
        self._stop_waiting()
        super().handle_websocket_upgrade()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_S, self._give_up)

    def _stop_waiting(self) -> None:
        self._received = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()
