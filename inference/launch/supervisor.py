"""The replicas of a launch under supervision: start, readiness, signals, restarts, and an end that leaves nothing.

One thread looks at all replicas in turn, so there is no state to guard; a thread per replica only copies its log.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from inference.launch.plan import LaunchError, ReplicaPlan
from inference.launch.process import VLLMProcess

GRACE_S = 15.0
"""How long servers may take to end after SIGTERM, all together."""
POLL_S = 0.1
DEAF_S = 10.0
"""How long a server that has answered may take no connections. vLLM closes its port when its engine dies, and may then
wait for ever for what the engine owed it."""
LOOK_S = 1.0
"""Between two looks at whether a server takes connections."""
TAIL_LINES = 25
LONGEST_BACKOFF_S = 60.0
SIGNALLED = 128
UNASKED = 1
"""The exit status when a replica ends with 0 though nobody asked it to."""


@dataclass(frozen=True, slots=True)
class Supervision:
    """How to look after the replicas."""

    startup_timeout_s: float
    restart: bool
    log_dir: Path | None = None


def say(text: str) -> None:
    """Tell the person who started the command something, beside the servers' logs."""
    with suppress(OSError):  # nobody reads it, which is no reason to stop
        sys.stderr.write(f"sqlenv inference: {text}\n")
        sys.stderr.flush()


def backoff_s(failures: int) -> float:
    """Return how long to wait before the next start after so many failures in a row."""
    return float(min(2 ** min(failures, 10) - 1, LONGEST_BACKOFF_S))


def exit_status(of_process: int) -> int:
    """Return a process's status as a shell reports it: 128 and the number for one that a signal ended."""
    return of_process if of_process >= 0 else SIGNALLED - of_process


class Supervisor:
    """The replicas from their start to the end of the last one."""

    def __init__(
        self, plans: Sequence[ReplicaPlan], supervision: Supervision, announce: Callable[[Sequence[str]], None]
    ) -> None:
        self._supervision = supervision
        self._announce = announce
        self._replicas = [_Replica(plan, supervision.log_dir) for plan in plans]
        self._announced = False
        self._asked_to_end = threading.Event()

    def run(self) -> int:
        """Start the replicas and stay until they have ended; return the exit status.

        Call it from the main thread. Raises LaunchError when a replica does not come up.
        """
        for replica in self._replicas:
            _check_port(replica.process.plan.url)
        with self._signals():
            try:
                return self._supervise()
            finally:
                self._end()

    def _supervise(self) -> int:
        while not self._asked_to_end.is_set():
            for replica in self._replicas:
                ended = self._look_at(replica)
                if ended is not None:
                    return ended
            if not self._announced and all(replica.healthy for replica in self._replicas):
                self._announced = True
                self._announce([replica.process.plan.url for replica in self._replicas])
            self._asked_to_end.wait(POLL_S)
        say("stopping")
        return 0

    def _look_at(self, replica: _Replica) -> int | None:
        """Bring one replica on; return an exit status when that ends the command."""
        now = time.monotonic()
        if not replica.started:
            if now >= replica.start_at:
                replica.start()
                say(f"{replica.name}: starting at {replica.process.plan.url}, process {replica.process.pid}")
            return None
        status = replica.process.exit_status()
        if status is not None:
            return self._ended(replica, status)
        if replica.healthy:
            silent_s = now - replica.heard_at
            if silent_s > LOOK_S and replica.process.takes_connections():
                replica.heard_at = now
            elif silent_s > DEAF_S:
                say(f"{replica.name} takes no connections any more; ending it")
                replica.process.kill()
        else:
            waited = now - replica.start_at
            if replica.process.is_healthy():
                replica.healthy, replica.failures, replica.heard_at = True, 0, now
                say(f"{replica.name}: answers after {waited:.0f} s")
            elif waited > self._supervision.startup_timeout_s:
                replica.process.kill()
                limit = f"{self._supervision.startup_timeout_s:g} s (--startup_timeout_s)"
                raise LaunchError(f"{replica.name} does not answer after {limit}; its log ends with:\n{replica.tail()}")
        return None

    def _ended(self, replica: _Replica, status: int) -> int | None:
        replica.process.kill()  # its children may live on
        if not self._announced and not replica.healthy:
            raise LaunchError(
                f"{replica.name} ended with status {exit_status(status)} before it answered; its log ends with:\n"
                f"{replica.tail()}\n"
                "Look for the first error above. Often it is the memory (--cpu_kv_cache_gb, --gpu_memory_utilization, "
                "--max_model_len), the name of the model, or a flag behind --"
            )
        if not self._supervision.restart:
            say(f"{replica.name} ended with status {exit_status(status)}; stopping")
            return exit_status(status) or UNASKED  # vLLM reports success when its engine has died
        wait_s = backoff_s(replica.failures)
        say(f"{replica.name} ended with status {exit_status(status)}; starting it again in {wait_s:g} s")
        replica.rest(wait_s)
        return None

    def _end(self) -> None:
        running = [replica for replica in self._replicas if replica.started]
        for replica in running:
            replica.process.ask_to_end()
        deadline = time.monotonic() + GRACE_S
        for replica in running:
            replica.process.stop(max(0.0, deadline - time.monotonic()))
            replica.close()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def ask(*_: object) -> None:
            self._asked_to_end.set()

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Replica:
    """One server, whether it runs or waits for its next start, and the end of its log."""

    def __init__(self, plan: ReplicaPlan, log_dir: Path | None) -> None:
        self.name = f"replica {plan.index}"
        self.process = VLLMProcess(plan)
        self.started = False
        self.start_at = 0.0
        self.healthy = False
        self.heard_at = 0.0
        self.failures = 0
        self._log = None if log_dir is None else log_dir / f"vllm-{plan.index}.log"
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._copier: threading.Thread | None = None

    def start(self) -> None:
        """Start the server; its log goes to its file, or to standard error line by line."""
        self.started, self.start_at, self.healthy = True, time.monotonic(), False
        if self._log is not None:
            with self._log.open("ab") as output:
                self.process.start(output)
            return
        reading, writing = os.pipe()
        lines = os.fdopen(reading, encoding="utf-8", errors="replace")
        with os.fdopen(writing, "wb") as output:
            self.process.start(output)
        self._copier = threading.Thread(target=self._copy, args=(lines,), daemon=True)
        self._copier.start()

    def rest(self, wait_s: float) -> None:
        """Wait with the next start."""
        self.close()
        self.started, self.healthy = False, False
        self.start_at = time.monotonic() + wait_s
        self.failures += 1

    def tail(self) -> str:
        """Return the last lines of the log of a server that has ended."""
        self.close()
        if self._log is None:
            return "\n".join(self._tail)
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])

    def close(self) -> None:
        """Copy what is left of the log of a server that has ended."""
        if self._copier is not None:
            self._copier.join(GRACE_S)

    def _copy(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._tail.append(line.rstrip("\n"))
                with suppress(OSError):
                    sys.stderr.write(line)


def _check_port(url: str) -> None:
    """Raise LaunchError when something listens already: it would be taken for our server."""
    address = urllib.parse.urlsplit(url)
    family = socket.AF_INET6 if ":" in str(address.hostname) else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.hostname, address.port))
        except OSError as error:
            raise LaunchError(f"cannot listen at {url}: {error.strerror}; choose another --port or --host") from error
