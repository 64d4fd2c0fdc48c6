"""`sqlenv serve`: uvicorn around the application, in this process or, with `--workers`, in several that it supervises.

Guarantees:
- The address is bound first, so that one in use is an error at once; the data set is loaded once.
- SIGTERM and Ctrl-C drain (`env_server.service.app`), then the server ends with status 0.
- A worker that dies is replaced. Each has a socket of its own on the port (SO_REUSEPORT), among which the kernel
  spreads connections evenly, and its share of `--max_sessions` and `--queue_size`.
- A WebSocket is never closed for an unanswered ping: a training client may be busy for minutes. The pings keep proxies
  from closing a quiet connection, and TCP notices within two minutes where the other end is gone.

Standard output says what the settings are and, once connections are taken, where the server is; events are logged on
standard error (`logs`).
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import h11
import uvicorn
from prometheus_client.multiprocess import mark_process_dead
from rich.console import Console
from uvicorn.config import STARTUP_FAILURE
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.supervisors import Multiprocess

from env_server.client.connection import SPARE_FILES, allow_open_files
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset
from env_server.errors import SQLEnvError
from env_server.service.logs import configure, log
from env_server.service.metrics import SHARED_FOLDER
from env_server.service.settings import ServiceSettings, read_settings
from env_server.test_suites.store import TITLE, Progress, build_suites
from env_server.types import AnswerMode
from sqlenv.progress import reported

REQUEST_S = 20.0
PING_S = 20.0
CLOSE_S = 5.0
"""What open connections get after the drain to finish a reply."""
HEALTHCHECK_S = 60
"""A worker that does not answer its supervisor for so long is replaced; it answers once its modules are imported."""
DEAD_PEER_MS = 120_000
BACKLOG = 2048
YOUNG_COLLECTIONS = 200
"""Collections of the two younger generations between those of everything.

With 10,000 open sessions one of everything takes 300 to 560 ms, in which no step is answered; by Python's own number,
10, there are a dozen while they connect. What they wait for is small: about 1.4 KB of each closed session, measured.
"""

AppFactory = Callable[[ServiceSettings, Any], Any]
"""Makes the ASGI application of a worker from the settings and the data set."""


class ListenError(SQLEnvError):
    """The address cannot be listened on; the text says why and what to change."""


class StartError(SQLEnvError):
    """The application did not start; the log says why."""


def run(argv: Sequence[str]) -> int:
    """Run `sqlenv serve`; return its exit status. Raises SQLEnvError for what a person has to correct."""
    settings, resolved = read_settings(argv)
    _print(f"sqlenv serve, with these settings:\n{resolved}")
    if settings.insecure and settings.token is None:
        _print("insecure: everyone who reaches this address can use the server")
    return serve(settings, load=_load, announce=lambda url: _print(f"serving at {url}"))


def _load(settings: ServiceSettings) -> Dataset:
    with reported(TITLE, console=Console()) as progress:
        dataset = load_data(settings, progress.update)
    _print(f"{dataset.name}: {len(dataset.questions):,} questions about {len(dataset.databases):,} databases")
    return dataset


def _print(text: str) -> None:
    with suppress(OSError):  # nobody reads it, which is no reason to stop
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def load_data(settings: ServiceSettings, progress: Progress | None = None) -> Dataset:
    """Load the data set of the settings, and make what test databases its questions lack in `sql` mode.

    `progress` is of the latter. Raises DataError.
    """
    limits = settings.environment
    dataset = load_dataset(
        settings.data, answer_mode=settings.answer_mode, settings=limits, cache_dir=settings.cache_dir
    )
    if settings.answer_mode is AnswerMode.SQL and limits.judging.variants:
        build_suites(dataset.databases, dataset.questions, limits.sandbox, settings.cache_dir, progress=progress)
    return dataset


def _create_app(settings: ServiceSettings, dataset: Any) -> Any:
    from env_server.service.app import create_app

    return create_app(settings, dataset)


def serve(
    settings: ServiceSettings,
    create_app: AppFactory = _create_app,
    *,
    load: Callable[[ServiceSettings], Any] = load_data,
    announce: Callable[[str], None] = lambda _: None,
) -> int:
    """Serve until a stop signal; return the exit status. `announce` is called with the URL once it is served.

    With several workers `create_app` and the data set are pickled. Raises ListenError, DataError, StartError.
    """
    # Before the data set is loaded: a package that is missing is an error at once.
    for module in ("uvloop", "env_server.service.app"):
        importlib.import_module(module)
    atexit.register(configure(settings.log_level).stop)
    # Here and in all other processes, which inherit it: the same answer on every machine.
    os.environ["TZ"] = "UTC"
    time.tzset()
    sockets = bind(settings.host, settings.port, shared=settings.workers > 1)
    try:
        dataset = load(settings)
        url = _url_of(sockets[0])

        def ready() -> None:
            log(logging.INFO, "serving", url=url, workers=settings.workers)
            announce(url)

        if settings.workers == 1:
            return _serve_alone(settings, create_app, dataset, sockets, ready)
        with tempfile.TemporaryDirectory(prefix="sqlenv-metrics-") as folder:
            os.environ[SHARED_FOLDER] = folder
            try:
                config = _config(partial(_worker_app, settings, create_app, dataset), settings)
                # Of the parent, which sees no request, uvicorn's own events are worth a line: workers that die.
                logging.getLogger("uvicorn.error").setLevel(logging.INFO)
                return _Workers(config, sockets, ready).serve()
            finally:
                del os.environ[SHARED_FOLDER]
    finally:
        for each in sockets:
            each.close()


def _serve_alone(
    settings: ServiceSettings,
    create_app: AppFactory,
    dataset: Any,
    sockets: list[socket.socket],
    ready: Callable[[], None],
) -> int:
    stops: list[int] = []
    # uvicorn raises the signal again once it has stopped: this handler takes it, and the status is 0.
    before = [(each, signal.signal(each, lambda number, _: stops.append(number))) for each in _STOP_SIGNALS]
    try:
        server = _Server(_config(partial(_prepared_app, settings, create_app, dataset), settings), ready)
        with suppress(SystemExit):
            server.run(sockets)
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    if not server.started and not stops:
        raise StartError("the application did not start; the log says why")
    return 0


_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it takes connections."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then take connections."""
        await super().startup(sockets)
        if self.started:
            self._ready()


class _Workers(Multiprocess):
    """uvicorn's supervisor, which says when all workers take connections, and forgets the gauges of dead ones."""

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket], ready: Callable[[], None]) -> None:
        super().__init__(config, sockets)
        self._ready: Callable[[], None] | None = ready

    def serve(self) -> int:
        """Run the workers until a stop signal; return the exit status. Raises StartError."""
        self.run()
        if any(process.exitcode == STARTUP_FAILURE for process in self.processes):
            raise StartError("the application did not start; the log says why")
        return 0

    def keep_subprocess_alive(self) -> None:
        """Twice a second."""
        before = {process.pid for process in self.processes}
        super().keep_subprocess_alive()
        for pid in before - {process.pid for process in self.processes}:
            mark_process_dead(pid)  # type: ignore[no-untyped-call]
        if self._ready is not None and all(process.is_ready(HEALTHCHECK_S) for process in self.processes):
            self._ready()
            self._ready = None


class DeadlineProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 connections, with a deadline that they lack: a client gets `REQUEST_S` to send a request.

    The same holds for the request that opens a WebSocket. Without it, whoever reaches the port, token or not, holds as
    many connections as there may be files for as long as it likes, and nobody else gets in. h11 bounds the size of a
    head, at 64 KiB; of uvicorn's other parser, httptools, a single header without end takes the machine's memory.
    """

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


def _worker_app(settings: ServiceSettings, create_app: AppFactory, dataset: Any) -> Any:
    """Return the application of one of several workers, in its process."""
    atexit.register(configure(settings.log_level).stop)
    return _prepared_app(settings, create_app, dataset)


def _prepared_app(settings: ServiceSettings, create_app: AppFactory, dataset: Any) -> Any:
    """Return the application, and prepare the process: its open files and its garbage collector."""
    needed = settings.slots + settings.queue_slots + SPARE_FILES
    # Twice: a session that ends has its socket until both sides have said so.
    allowed = allow_open_files(2 * needed)
    if allowed < needed:
        log(logging.WARNING, "too_few_files", limit=allowed, needed=needed, fix="ulimit -n, or fewer --max_sessions")
    app = create_app(settings, dataset)
    # What is there now stays; the collector need not walk over it again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], YOUNG_COLLECTIONS)
    return app


def _config(factory: Callable[[], Any], settings: ServiceSettings) -> uvicorn.Config:
    return uvicorn.Config(
        factory,
        factory=True,
        workers=settings.workers,
        loop="uvloop",
        http=DeadlineProtocol,
        # The fastest of uvicorn's three: 27 us of processor time for a frame of 500 bytes and its echo, against 40.
        ws="websockets-sansio",
        ws_max_size=settings.max_frame_bytes,
        ws_ping_interval=PING_S,
        ws_ping_timeout=None,
        # Frames are a few hundred bytes; compressing them costs more than sending them.
        ws_per_message_deflate=False,
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(CLOSE_S),
        timeout_worker_healthcheck=HEALTHCHECK_S,
    )


class _SharedPort(socket.socket):
    """A bound socket that a worker does not share, but binds again: the kernel then gives each worker its part."""

    def __reduce__(self) -> tuple[Callable[..., socket.socket], tuple[Any, ...]]:
        return _bound, (self.family, self.getsockname(), True)


def bind(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """Return a bound socket for each address of the host; `shared`: workers bind them again. Raises ListenError."""
    made: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            at = (address[0], port or (made[0].getsockname()[1] if made else 0), *address[2:])
            try:
                if shared and at[1]:
                    # A socket that shares its port would share it with another server's, too; this one finds that out.
                    _bound(family, at, False).close()
                made.append(_bound(family, at, shared))
                if not shared:
                    made[-1].listen(BACKLOG)
            except OSError as error:
                # localhost may have an address of a kind that this machine lacks.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) or len(found) == 1:
                    raise
        if not made:
            raise OSError(errno.EADDRNOTAVAIL, "no address")
    except OSError as error:
        for each in made:
            each.close()
        raise ListenError(_listen_advice(host, port, error)) from error
    return made


def _bound(family: int, address: tuple[Any, ...], shared: bool) -> socket.socket:
    bound = (_SharedPort if shared else socket.socket)(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            # The unspecified address is every address, those of IPv4 too.
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] != "::")
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Connections inherit it; the pings above are what goes unanswered.
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS)
        bound.bind(address)
        bound.setblocking(False)
    except BaseException:
        bound.close()
        raise
    return bound


def _listen_advice(host: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"host {host!r} is not known here: {error.strerror}. Choose another with --host"
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} of {host} is in use. Choose another with --port, or 0 for a free one"
        case errno.EACCES:
            return f"port {port} may not be used by this user. Choose one above 1023 with --port"
        case errno.EADDRNOTAVAIL:
            return f"{host} is no address of this machine. Choose another with --host"
    return f"{host}:{port} cannot be listened on: {error.strerror}. Choose others with --host and --port"


def _url_of(bound: socket.socket) -> str:
    """Return where a browser finds the server."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
