"""One serving process: uvicorn around the application, started and stopped our way.

Promises:
- The first stop (SIGTERM, or whatever the caller turns into `ServiceServer.stop`) drains: the application's
  `drain()` refuses new sessions and lets running ones finish within the grace period, while /ready and /metrics still
  answer; then everything is closed. A second stop ends the server at once.
- A WebSocket is never closed for an unanswered ping: a training client may be busy for minutes. The pings that are sent
  keep proxies from closing a quiet connection; a dead peer is noticed by TCP, a silent one by the idle timeout.
- The process may open as many files as its sessions need, or says in the log that it may not.
- Python's collector of garbage walks over all open sessions only when there is much to find.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import uvicorn
import uvloop

from env_server.errors import SQLEnvError
from env_server.open_files import SPARE_FILES, allow_open_files
from env_server.service.capacity import Capacity
from env_server.service.http_protocol import DeadlineProtocol
from env_server.service.logs import log, log_loop_errors
from env_server.service.metrics import Metrics
from env_server.service.settings import ServiceSettings

PING_S = 20.0
CLOSE_S = 5.0
"""What open connections get after the drain to finish a reply."""
DRAIN_MARGIN_S = 5.0
"""What the application's drain gets beyond the grace period to close sessions in."""

YOUNG_COLLECTIONS = 200
"""Collections of the two younger generations between those of everything.

With 10,000 open sessions one of everything takes 300 to 560 ms, in which no step is answered; by Python's own number,
10, there are a dozen while they connect. What they wait for is small: about 1.4 KB of each closed session, measured.
"""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StartError(SQLEnvError):
    """The application did not start; the log says why."""


class AppFactory(Protocol):
    """Makes the ASGI application of a worker; its `state.service.drain()` is awaited before the worker ends."""

    def __call__(self, settings: ServiceSettings, dataset: Any, *, capacity: Capacity, metrics: Metrics) -> Any:
        """Return the application."""


class ServiceServer(uvicorn.Server):
    """uvicorn's server, stopped by `stop` instead of by signal handlers of its own."""

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Callable[[], Awaitable[object]],
        *,
        grace_s: float,
        ready: Callable[[], None],
        beat: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._drain = drain
        self._grace_s = grace_s
        self._ready = ready
        self._beat = beat
        self._forced = asyncio.Event()
        self.cut_short = False

    def stop(self) -> None:
        """Begin to drain; when that has begun, end at once."""
        if self.should_exit and not self.force_exit:
            log(logging.WARNING, "ending_at_once")
            self.force_exit = self.cut_short = True
            self._forced.set()
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone; uvicorn would die of the signal after a clean end."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then take connections."""
        await super().startup(sockets)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        self._beat()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let sessions finish, then close everything."""
        draining = asyncio.ensure_future(self._drain())
        forced = asyncio.ensure_future(self._forced.wait())
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._grace_s + DRAIN_MARGIN_S
        while loop.time() < deadline and not (draining.done() or forced.done()):
            await asyncio.wait((draining, forced), timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            self._beat()
        forced.cancel()
        draining.cancel()
        (failure, _) = await asyncio.gather(draining, forced, return_exceptions=True)
        if isinstance(failure, Exception):
            log(logging.ERROR, "drain_failed", error=failure)
        await super().shutdown(sockets)
        log(logging.INFO, "stopped")


def run_worker(
    settings: ServiceSettings,
    dataset: Any,
    create_app: AppFactory,
    sockets: list[socket.socket],
    capacity: Capacity,
    metrics: Metrics,
    *,
    stop_signals: tuple[signal.Signals, ...] = STOP_SIGNALS,
    lifeline: int | None = None,
    ready: Callable[[], None] = lambda: None,
    beat: Callable[[], None] = lambda: None,
) -> int:
    """Serve on the sockets until a stop signal; return the exit status: 0, or 1 when episodes were cut short.

    `lifeline` is the reading end of a pipe: when it is closed, nobody needs the worker any more, and it drains. `ready`
    is called once connections are taken, `beat` ten times a second. Raises StartError.
    """
    _allow_files(settings)
    app = create_app(settings, dataset, capacity=capacity, metrics=metrics)
    config = _config(app, settings)
    # What is there now stays; the collector need not walk over it again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], YOUNG_COLLECTIONS)

    async def serve() -> int:
        loop = asyncio.get_running_loop()
        log_loop_errors(loop)
        drain = app.state.service.drain
        server = ServiceServer(config, drain, grace_s=settings.grace_s, ready=ready, beat=beat)
        for number in stop_signals:
            loop.add_signal_handler(number, server.stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals)
        if lifeline is not None:
            loop.add_reader(lifeline, _orphaned, loop, lifeline, server)
        try:
            await server.serve(sockets)
        except SystemExit as error:
            raise StartError("the application did not start; the log says why") from error
        return int(server.cut_short)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve())


def _config(app: Any, settings: ServiceSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
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
        backlog=2048,
        timeout_graceful_shutdown=int(CLOSE_S),
    )


def _orphaned(loop: asyncio.AbstractEventLoop, lifeline: int, server: ServiceServer) -> None:
    loop.remove_reader(lifeline)
    log(logging.ERROR, "parent_died")
    server.stop()


def _allow_files(settings: ServiceSettings) -> None:
    needed = settings.max_sessions + settings.queue_size + SPARE_FILES
    # Twice: a session that ends has its socket until both sides have said so.
    allowed = allow_open_files(2 * needed)
    if allowed < needed:
        log(logging.WARNING, "too_few_files", limit=allowed, needed=needed, fix="ulimit -n, or fewer --max_sessions")
