"""The parent of several workers: forks them, replaces them, stops them.

The parent runs no event loop and starts no thread, so that forking is safe, and the workers share the memory of what it
has loaded; one that dies is replaced within milliseconds.

Promises:
- A dead worker, whatever killed it, gives back its part of the capacity, and the others never notice. One that does
  not start is tried again, ever later; when none serves any more, the server gives up and says why.
- A worker whose event loop stands still is killed and replaced.
- SIGTERM or SIGINT drains all workers: exit status 0 when the running episodes could finish. A second one ends them at
  once. When the parent is killed, the workers drain by themselves.
"""

from __future__ import annotations

import logging
import os
import random
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from env_server.errors import SQLEnvError
from env_server.service.capacity import Capacity, PlaceTable
from env_server.service.logs import BackgroundHandler, configure, log
from env_server.service.metrics import Metrics, metrics_table
from env_server.service.settings import ServiceSettings
from env_server.service.shared_table import SharedTable
from env_server.service.workers.listening import bind_again, close_all, url_of
from env_server.service.workers.worker import CLOSE_S, DRAIN_MARGIN_S, STOP_SIGNALS, AppFactory, run_worker

CHECK_S = 1.0
"""How often the parent looks whether its workers' event loops turn."""
STUCK_CHECKS = 30
"""A worker whose loop has not turned between so many looks is killed. The parent's own pauses do not count."""
SETTLED_S = 1.0
"""A worker that served this long has started well."""
START_TRIES = 5
LONGEST_DELAY_S = 10.0

_READY = b"ready\n"


class WorkersFailedError(SQLEnvError):
    """No worker serves, and none can be started."""


class Restarts:
    """When the next worker is started for one that died. Pure."""

    def __init__(self) -> None:
        self._failures = 0

    def delay(self, served_s: float, *, others_serve: bool) -> float | None:
        """Return the seconds to wait before the next start, None to give up.

        `served_s` is how long the dead one had served, 0 when it never did.
        """
        if served_s >= SETTLED_S:
            self._failures = 0
            return 0.0
        self._failures += 1
        if self._failures >= START_TRIES and not others_serve:
            return None
        return 0.0 if self._failures == 1 else min(LONGEST_DELAY_S, 0.1 * 2.0 ** min(self._failures - 2, 10))


@dataclass(eq=False)
class _Worker:
    """A worker's place, and the process that holds it now, if any."""

    number: int
    sockets: list[socket.socket]
    pid: int | None = None
    status: int = -1
    """Reading end of the pipe on which it says that it serves, or why it does not."""
    serves_since: float | None = None
    start_at: float | None = None
    cause: str = ""
    beats: float = 0.0
    silent_checks: int = 0


class Supervisor:
    """The parent of several workers."""

    def __init__(
        self,
        settings: ServiceSettings,
        dataset: Any,
        create_app: AppFactory,
        sockets: list[list[socket.socket]],
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self._settings = settings
        self._dataset = dataset
        self._create_app = create_app
        self._announce = announce
        self._url = url_of(sockets[0])
        self._workers = [_Worker(number, each, start_at=0.0) for number, each in enumerate(sockets)]
        self._places = PlaceTable(len(sockets))
        self._counts = metrics_table(len(sockets))
        self._beats = SharedTable(len(sockets), 1)
        self._restarts = Restarts()
        self._selector = selectors.DefaultSelector()
        self._lifeline = os.pipe()
        self._announced = False
        self._kill_at: float | None = None
        self._next_check = time.monotonic() + CHECK_S
        self._exit_status = 0

    def run(self) -> int:
        """Keep the workers until a stop signal and their end; return the exit status. Raises WorkersFailedError."""
        with self._signals():
            try:
                while self._kill_at is None or any(worker.pid for worker in self._workers):
                    self._start_due()
                    for key, _ in self._selector.select(self._wait_s()):
                        key.data()
                    self._reap()
                    self._check()
            except BaseException:
                self._kill_all()
                raise
            finally:
                self._selector.close()
                for end in self._lifeline:
                    os.close(end)
                self._places.close()
        log(logging.INFO, "server_stopped", status=self._exit_status)
        return self._exit_status

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Make signals arrive in the selector."""
        reading, writing = socket.socketpair()
        reading.setblocking(False)
        writing.setblocking(False)
        numbers = (*STOP_SIGNALS, signal.SIGCHLD)
        before = [(number, signal.signal(number, lambda *_: None)) for number in numbers]
        wakeup = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        self._selector.register(reading, selectors.EVENT_READ, lambda: self._on_signals(reading.recv(4096)))
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before:
                signal.signal(number, handler)
            reading.close()
            writing.close()

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in STOP_SIGNALS:
                self._stop(number)

    def _stop(self, number: int) -> None:
        first = self._kill_at is None
        log(logging.INFO, "stopping" if first else "ending_at_once", signal=signal.Signals(number).name)
        grace_s = self._settings.grace_s + DRAIN_MARGIN_S if first else 0.0
        self._kill_at = time.monotonic() + grace_s + 2 * CLOSE_S
        for worker in self._workers:
            worker.start_at = None
            close_all(worker.sockets)
        self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.pid is not None:
                os.kill(worker.pid, number)

    def _kill_all(self) -> None:
        self._signal_all(signal.SIGKILL)
        for worker in self._workers:
            if worker.pid is not None:
                os.waitpid(worker.pid, 0)

    def _wait_s(self) -> float:
        now = time.monotonic()
        times = [worker.start_at for worker in self._workers if worker.start_at is not None]
        return max(0.0, min([*times, self._next_check]) - now)

    def _check(self) -> None:
        """Once a second: look for workers that stand still, and for the end of the grace period."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_S
        if self._kill_at is not None:
            if now >= self._kill_at:
                log(logging.ERROR, "killing_workers")
                self._signal_all(signal.SIGKILL)
            return
        for worker in self._workers:
            beats = self._beats.row(worker.number)[0]
            standing = worker.serves_since is not None and beats == worker.beats
            worker.silent_checks = worker.silent_checks + 1 if standing else 0
            worker.beats = beats
            if worker.silent_checks == STUCK_CHECKS and worker.pid is not None:
                log(logging.ERROR, "worker_stuck", worker=worker.number, pid=worker.pid)
                os.kill(worker.pid, signal.SIGKILL)

    def _start_due(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.start_at is not None and worker.start_at <= now:
                worker.start_at = None
                self._start(worker)

    def _start(self, worker: _Worker) -> None:
        try:
            if not worker.sockets:
                worker.sockets = self._sockets_again(worker)
            worker.beats = self._beats.row(worker.number)[0]
            pid, reading = self._fork(worker)
        except OSError as error:
            worker.cause = f"no process can be started: {error.strerror}"
            self._plan(worker, served_s=0.0)
            return
        worker.pid, worker.status, worker.cause = pid, reading, ""
        worker.serves_since, worker.silent_checks = None, 0
        self._selector.register(reading, selectors.EVENT_READ, lambda: self._on_status(worker))
        log(logging.INFO, "worker_started", worker=worker.number, pid=pid)

    def _fork(self, worker: _Worker) -> tuple[int, int]:
        """Start a process for the worker; return its id and the reading end of its status pipe. Raises OSError."""
        reading, writing = os.pipe()
        # A stop that arrives before the worker listens to signals waits until it does.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                self._be_worker(worker, writing)
        except OSError:
            os.close(reading)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            os.close(writing)
        return pid, reading

    def _sockets_again(self, worker: _Worker) -> list[socket.socket]:
        other = next(each for each in self._workers if each.sockets and each is not worker)
        return bind_again(other.sockets)

    def _on_status(self, worker: _Worker) -> None:
        message = os.read(worker.status, 4096)
        if not message:
            self._forget_status(worker)
        if message.startswith(_READY):
            message = message.removeprefix(_READY)
            worker.serves_since = time.monotonic()
            log(logging.INFO, "worker_serving", worker=worker.number, pid=worker.pid)
            if not self._announced and all(each.serves_since is not None for each in self._workers):
                self._announced = True
                log(logging.INFO, "serving", url=self._url, workers=len(self._workers))
                if self._announce is not None:
                    self._announce(self._url)
        if message:
            worker.cause = message.decode("utf-8", "replace")

    def _forget_status(self, worker: _Worker) -> None:
        self._selector.unregister(worker.status)
        os.close(worker.status)
        worker.status = -1

    def _reap(self) -> None:
        for worker in self._workers:
            if worker.pid is None:
                continue
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid:
                self._on_death(worker, pid, os.waitstatus_to_exitcode(status))

    def _on_death(self, worker: _Worker, pid: int, exit_code: int) -> None:
        while worker.status >= 0:
            self._on_status(worker)  # its exit reason
        served_s = time.monotonic() - worker.serves_since if worker.serves_since is not None else 0.0
        lost = self._places.clear(worker.number)
        worker.pid = worker.serves_since = None
        if self._kill_at is not None:
            log(logging.INFO, "worker_ended", worker=worker.number, pid=pid, status=exit_code)
            if exit_code:
                self._exit_status = 1
            return
        capacity = Capacity(self._settings.max_sessions, table=self._places, worker=worker.number)
        Metrics(capacity, self._counts, worker.number).worker_died(lost)
        worker.cause = worker.cause or (
            f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with status {exit_code}"
        )
        log(logging.ERROR, "worker_died", worker=worker.number, pid=pid, reason=worker.cause, active=lost)
        self._plan(worker, served_s)

    def _plan(self, worker: _Worker, served_s: float) -> None:
        """Decide when the worker is started again. Raises WorkersFailedError."""
        others_serve = any(each.serves_since is not None for each in self._workers)
        delay = self._restarts.delay(served_s, others_serve=others_serve)
        if delay is None:
            raise WorkersFailedError(f"no worker can be started: {worker.cause}")
        worker.start_at = time.monotonic() + delay
        if delay and others_serve:
            # What would wait for it goes to the others.
            close_all(worker.sockets)
            worker.sockets = []
            log(logging.WARNING, "worker_start_delayed", worker=worker.number, seconds=delay)

    def _be_worker(self, worker: _Worker, status: int) -> None:
        """Serve as this worker; never returns."""
        exit_status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # The terminal sends Ctrl-C to parent and workers alike; the parent's word counts.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._leave_parent(worker)
            random.seed()
            exit_status = self._work(worker, status)
        except BaseException as error:  # noqa: BLE001
            with suppress(OSError):
                os.write(status, self._exit_reason(worker, error))
            log(logging.ERROR, "worker_failed", error=error, worker=worker.number)
        finally:
            logging.shutdown()
            os._exit(exit_status)

    def _exit_reason(self, worker: _Worker, error: BaseException) -> bytes:
        # Once it has served, what an error says may quote a statement.
        served = self._beats.row(worker.number)[0] > worker.beats
        return (type(error).__name__ + ("" if served else f": {error}"))[:4000].encode()

    def _leave_parent(self, worker: _Worker) -> None:
        """Close what only the parent needs."""
        self._selector.close()
        os.close(self._lifeline[1])
        for other in self._workers:
            if other is not worker:
                close_all(other.sockets)
                if other.status >= 0:
                    os.close(other.status)

    def _work(self, worker: _Worker, status: int) -> int:
        configure(self._settings.log_level, BackgroundHandler())
        number = worker.number
        capacity = Capacity(self._settings.max_sessions, self._settings.queue_size, self._places, number)
        beats = self._beats.row(number)

        def ready() -> None:
            os.write(status, _READY)

        def beat() -> None:
            beats[0] += 1

        return run_worker(
            self._settings,
            self._dataset,
            self._create_app,
            worker.sockets,
            capacity,
            Metrics(capacity, self._counts, number),
            stop_signals=(signal.SIGTERM,),
            lifeline=self._lifeline[0],
            ready=ready,
            beat=beat,
        )
