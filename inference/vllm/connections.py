"""Connections to inference servers: HTTP/1.1 for many small requests at a time, as a transport of httpx.

httpx's own pool looks through all its connections for each request, which costs more than the request where hundreds
are in flight. Here a request takes an idle connection to its server, or opens one.

Promises:
- As many connections as requests in flight, one request at a time on each; they are kept for the next ones.
- A connection that the server closed while it was idle is no failure: the request goes out again on a new one. A
  request is repeated only where the server sent no byte of an answer to it, and then once.
- Failures and deadlines are httpx's own errors. A cancelled request closes its connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import h11
import httpx

READ_BYTES = 65_536
Origin = tuple[str, str, int]
Timeouts = Mapping[str, float | None]


class KeptConnections(httpx.AsyncBaseTransport):
    """The connections of one event loop, to any number of servers."""

    def __init__(self) -> None:
        self._idle: defaultdict[Origin, list[_Connection]] = defaultdict(list)
        self._open: set[_Connection] = set()
        self._tls: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Make a request and read its answer. Raises httpx.TransportError."""
        url, body = request.url, await request.aread()
        origin = (url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80))
        timeouts: Timeouts = request.extensions.get("timeout", {})
        idle = self._idle[origin]
        kept = True
        while kept:
            connection = self._last_usable(idle)
            kept = connection is not None
            if connection is None:
                connection = await self._connect(origin, timeouts.get("connect"))
            try:
                response = await connection.exchange(request, body, timeouts)
            except _UnansweredError as error:
                self._drop(connection)
                if kept:  # it went while it was idle
                    continue
                raise error.cause from error
            except BaseException:
                self._drop(connection)
                raise
            if connection.is_usable:
                idle.append(connection)
            else:
                self._drop(connection)
            return response
        raise AssertionError("a new connection answers or fails")

    async def aclose(self) -> None:
        """Close every connection."""
        self._idle.clear()
        for connection in list(self._open):
            self._drop(connection)

    def _last_usable(self, idle: list[_Connection]) -> _Connection | None:
        while idle:
            connection = idle.pop()
            if connection.is_usable:
                return connection
            self._drop(connection)
        return None

    def _drop(self, connection: _Connection) -> None:
        self._open.discard(connection)
        connection.close()

    async def _connect(self, origin: Origin, timeout_s: float | None) -> _Connection:
        scheme, host, port = origin
        if scheme == "https" and self._tls is None:
            self._tls = httpx.create_ssl_context()
        try:
            async with asyncio.timeout(timeout_s):
                streams = await asyncio.open_connection(host, port, ssl=self._tls if scheme == "https" else None)
        except TimeoutError as error:
            raise httpx.ConnectTimeout("") from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        connection = _Connection(*streams)
        self._open.add(connection)
        return connection


class _UnansweredError(Exception):
    """The server closed the connection before it answered; `cause` is what a caller is told."""

    def __init__(self, cause: httpx.TransportError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Connection:
    """One request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._state = h11.Connection(h11.CLIENT)

    @property
    def is_usable(self) -> bool:
        """Whether it is idle and, as far as is known here, not closed by the server."""
        return self._state.our_state is h11.IDLE and not (self._reader.at_eof() or self._reader.exception())

    async def exchange(self, request: httpx.Request, body: bytes, timeouts: Timeouts) -> httpx.Response:
        """Send a request and read its answer. Raises _UnansweredError, httpx.TransportError."""
        state = self._state
        head = h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw)
        sent = b"".join(state.send(event) or b"" for event in (head, h11.Data(data=body), h11.EndOfMessage()))
        self._writer.write(sent)
        try:
            async with _limited(timeouts.get("write"), httpx.WriteTimeout):
                await self._writer.drain()
        except OSError as error:
            raise _UnansweredError(httpx.WriteError(str(error))) from error
        answer: h11.Response | None = None
        content: list[bytes] = []
        while True:
            try:
                event = state.next_event()
                if event is h11.NEED_DATA:
                    await self._read(timeouts.get("read"), begun=answer is not None)
                    continue
            except h11.RemoteProtocolError as error:
                raise httpx.RemoteProtocolError(str(error)) from error
            if isinstance(event, h11.Response):
                answer = event
            elif isinstance(event, h11.Data):
                content.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                break
        assert answer is not None, "a message has a head"
        if state.our_state is h11.DONE and state.their_state is h11.DONE:
            state.start_next_cycle()
        stream = httpx.ByteStream(b"".join(content))
        return httpx.Response(answer.status_code, headers=answer.headers.raw_items(), stream=stream)

    async def _read(self, timeout_s: float | None, *, begun: bool) -> None:
        try:
            async with _limited(timeout_s, httpx.ReadTimeout):
                data = await self._reader.read(READ_BYTES)
        except OSError as error:
            lost = httpx.ReadError(str(error))
            raise (lost if begun or self._has_bytes else _UnansweredError(lost)) from error
        if not data and not begun and not self._has_bytes:
            raise _UnansweredError(httpx.RemoteProtocolError("Server disconnected without sending a response."))
        self._state.receive_data(data)

    @property
    def _has_bytes(self) -> bool:
        return bool(self._state.trailing_data[0])

    def close(self) -> None:
        """Close at once."""
        self._writer.close()


@asynccontextmanager
async def _limited(timeout_s: float | None, error: type[httpx.TimeoutException]) -> AsyncIterator[None]:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            yield
    except TimeoutError as late:
        if not limit.expired():
            raise
        raise error("") from late
