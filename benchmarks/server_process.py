"""The processes of a benchmark: a server, looked at through /proc, and a load generator, led through its phases."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from benchmarks.load_generator import Load, Outcome, Ready

ROOT = Path(__file__).resolve().parents[1]
SQLENV = (sys.executable, "-m", "sqlenv")
"""The command, as this checkout has it: run it in ROOT, or with ROOT on PYTHONPATH."""
SERVE = (*SQLENV, "serve", "--port", "{port}")
"""Our server's command line."""
START_S = 120.0
"""Longest start: a data set may have to be generated first."""
STOP_S = 60.0
GET_S = 30.0
POLL_S = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ServerError(Exception):
    """The server did not start or did not stop; the text holds the end of its log."""


@contextmanager
def reserved_ports(count: int = 1) -> Iterator[list[int]]:
    """Successive ports of the loopback interface that nobody but the caller's servers gets while the block lasts.

    They are bound without listening: the kernel gives them to no other process and no outgoing connection, connections
    to them are refused, and a server can listen on them when it sets SO_REUSEADDR, as servers do. Only an asking for
    the number itself is not kept out.
    """
    while True:
        with ExitStack() as stack:
            first = _bound(stack, 0)
            try:
                for port in range(first + 1, first + count):
                    _bound(stack, port)
            except (OSError, OverflowError):  # one of them is taken, or beyond the last
                continue
            yield list(range(first, first + count))
            return


def _bound(stack: ExitStack, port: int) -> int:
    held = stack.enter_context(socket.socket())
    held.bind(("127.0.0.1", port))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after the bind: it shares with no one who came first
    found: int = held.getsockname()[1]
    return found


class ServerProcess:
    """A running server; a context manager. `command` holds `{port}` where the port goes; output goes to `log`.

    `before_exec` is called in its process before the command.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        start_s: float = START_S,
        before_exec: Callable[[], None] | None = None,
    ) -> None:
        self.log = log
        self._start_s = start_s
        with ExitStack() as stack, log.open("ab") as output:
            (self.port,) = stack.enter_context(reserved_ports())
            self.process = subprocess.Popen(
                [part.replace("{port}", str(self.port)) for part in command],
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=before_exec,
            )
            self._reservation = stack.pop_all()

    def __enter__(self) -> ServerProcess:
        try:
            self.wait_until_healthy()
        except BaseException:
            with self._reservation:
                self.process.kill()
                self.process.wait()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._reservation:
            if self.process.poll() is None:
                self.stop()

    @property
    def url(self) -> str:
        """Where it answers HTTP."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def ws_url(self) -> str:
        """Where a session is opened."""
        return f"ws://127.0.0.1:{self.port}/ws"

    def get(self, path: str) -> str:
        """Return what a GET answers."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=GET_S) as reply:
            text: str = reply.read().decode()
            return text

    def metric(self, name: str) -> float:
        """Return the sum of a metric's series."""
        return sum(value for _, value in self._series(name))

    def metric_by_label(self, name: str) -> dict[str, float]:
        """Return the series of a metric that has one label, by its value, but for zeros."""
        return {labels.split('"')[1]: value for labels, value in self._series(name) if value}

    def _series(self, name: str) -> Iterator[tuple[str, float]]:
        for line in self.get("/metrics").splitlines():
            series, _, value = line.rpartition(" ")
            found, _, labels = series.partition("{")
            if found == name:
                yield labels, float(value)

    def log_text(self) -> str:
        """Return all that it has printed."""
        return self.log.read_text(errors="replace")

    def wait_until_healthy(self) -> None:
        """Wait for GET /health. Raises ServerError."""
        deadline = time.monotonic() + self._start_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(f"the server ended with code {self.process.returncode}:\n{self.log_text()[-4000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(POLL_S)
        raise ServerError(f"the server is not healthy after {self._start_s:g} s:\n{self.log_text()[-4000:]}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the signal and return the exit code. Raises ServerError when it goes on."""
        self.process.send_signal(number)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            for pid in self.pids():
                os.kill(pid, signal.SIGKILL)
            self.process.wait()
            text = self.log_text()[-4000:]
            raise ServerError(f"the server went on for {STOP_S:g} s after signal {number}:\n{text}") from None

    def pids(self) -> list[int]:
        """Return its process and all below it."""
        found = [self.process.pid]
        for pid in found:
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                found += [int(child) for child in _read(task).split()]
        return found

    def rss(self) -> int:
        """Return the bytes of memory that its processes hold."""
        return sum(int(text.split()[1]) * _PAGE for pid in self.pids() if (text := _read(Path(f"/proc/{pid}/statm"))))

    def cpu_s(self) -> float:
        """Return the processor seconds that its processes have used."""
        texts = (_read(Path(f"/proc/{pid}/stat")) for pid in self.pids())
        fields = (text.rpartition(")")[2].split() for text in texts if text)
        return sum(int(field[11]) + int(field[12]) for field in fields) / _TICKS

    def threads(self) -> int:
        """Return the number of threads of its processes."""
        return sum(len(list(Path(f"/proc/{pid}/task").glob("*"))) for pid in self.pids())

    def handles(self) -> tuple[int, int]:
        """Return the number of sockets and of other open files of its processes."""
        found = [_link(file) for pid in self.pids() for file in Path(f"/proc/{pid}/fd").glob("*")]
        sockets = sum(target.startswith("socket:") for target in found)
        return sockets, len(found) - sockets


class Generator:
    """One load generator process, led through its phases."""

    def __init__(self, load: Load, folder: Path) -> None:
        spec = folder / "load.json"
        spec.write_text(load.model_dump_json())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.load_generator", str(spec)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def connect(self) -> float:
        """Wait until all sessions are idle; return the seconds that took."""
        return Ready.model_validate_json(self._line()).connect_s

    def play(self) -> Outcome:
        """Run the second phase."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = Outcome.model_validate_json(self._line())
        self._process.wait()
        return found

    def stop(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the load generator ended with code {self._process.wait()}; see above")
        return line


def _read(file: Path) -> str:
    """Return a file of /proc, or nothing when the process has ended."""
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _link(file: Path) -> str:
    try:
        return str(file.readlink())
    except (FileNotFoundError, ProcessLookupError):
        return ""
