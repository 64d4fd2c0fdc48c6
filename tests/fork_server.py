"""Starts Python processes that have imported what would take each of them seconds of a core: forks of one that has.

A `ForkServer` runs an interpreter that imports some modules, once, and then waits to be asked for processes. A process
is what the command line would have started: its arguments, environment, folder, streams, `__main__` and exit status
are its own. What is imported ahead has seen the environment that the fork server was started with. The fork server
ends with the tests, however they end, and its processes with it: by SIGTERM, frozen ones too, and after a grace period
by SIGKILL. Of a process with a session, nothing is left of that.

The interpreter may be of another environment: this file is its program as well, and needs the standard library alone.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_SET_PDEATHSIG = 1
_MESSAGE = 2**20
GRACE_S = 30.0
"""Between SIGTERM and SIGKILL, where a process has run out of time."""


class ForkServer:
    """Forks processes of an interpreter that has imported `preload`, which it finds by `PYTHONPATH` of `environment`.

    It starts at once and imports while others work; the first process waits for that. Its messages go to `log`.
    """

    def __init__(self, python: str | Path, preload: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._python, self._log, self._lock = str(python), log, threading.Lock()
        self._python_path = environment.get("PYTHONPATH", "")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        with theirs, log.open("wb") as output:
            # -P: the folder of this file is no place for modules.
            self._process = subprocess.Popen(
                [self._python, "-P", __file__, str(theirs.fileno()), str(os.getpid()), *preload],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def start(
        self,
        command: Sequence[str],
        *,
        output: IO[Any],
        errors: IO[Any] | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        new_session: bool = False,
    ) -> ForkedProcess:
        """Start a command of this interpreter, with `-m`, `-c` or a file; `errors` go to `output` unless they are told.

        None of the others: the folder of this process, and its environment with the `PYTHONPATH` of the fork server.
        """
        python, *arguments = command
        assert python == self._python
        request = {
            "arguments": arguments,
            "environment": dict(environment or {**os.environ, "PYTHONPATH": self._python_path}),
            "folder": str(folder or Path.cwd()),
            "new_session": new_session,
        }
        return ForkedProcess(self, self._ask(request, [output.fileno(), (errors or output).fileno()]))

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, as `subprocess.run` does, and return what it said. Raises TimeoutExpired."""
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            process = self.start(command, output=output, errors=errors, environment=environment, folder=folder)
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.terminate()  # a launcher ends its ranks
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
                process.send_signal(signal.SIGKILL)
                process.wait()
                raise
            said = []
            for file in (output, errors):
                file.seek(0)
                said.append(file.read())
        return subprocess.CompletedProcess(command, status, *said)

    def status(self, pid: int) -> int | None:
        """Return the exit status of a process, negative for a signal, or None while it runs; once only."""
        found: int | None = self._ask({"status": pid})
        return found

    def close(self) -> None:
        """End it, and what it has started."""
        self._channel.close()
        self._process.wait()

    def _ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> Any:
        with self._lock:
            try:
                socket.send_fds(self._channel, [json.dumps(request).encode()], list(files))
                reply = self._channel.recv(_MESSAGE)
            except (BrokenPipeError, ConnectionResetError):
                reply = b""
        if not reply:
            raise RuntimeError(f"the fork server has ended:\n{self._log.read_text(errors='replace')[-4000:]}")
        return json.loads(reply)


class ForkedProcess:
    """A process of a fork server; the part of `subprocess.Popen` that tests use."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self.handle = os.pidfd_open(pid)
        """Can be read when it has ended. Nobody else has its number before its status is asked for."""

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.status(self.pid)
            if self.returncode is not None:
                os.close(self.handle)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status. Raises TimeoutExpired."""
        if self.returncode is None:
            ended = select.poll()
            ended.register(self.handle, select.POLLIN)
            if not ended.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)


def end_with_parent(parent: int, number: int) -> None:
    """Have the kernel send a signal to this process when the thread ends that started it; `parent` is its process."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def _serve(channel: socket.socket, tests: int) -> list[str]:
    """Answer requests; returns in each new process, with its arguments, and ends the one that it forks from.

    `tests` is the process of the tests.
    """
    parent = os.getpid()
    running: dict[int, bool] = {}
    """The processes that were not waited for, and whether each has a session."""

    def end(*_: object) -> None:
        _end(running)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    end_with_parent(tests, signal.SIGTERM)  # a process that the tests have forked may hold their end of the channel
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    while True:
        message, files, _, _ = socket.recv_fds(channel, _MESSAGE, 2)
        if not message:
            end()
        request = json.loads(message)
        if "status" in request:
            pid, status = os.waitpid(request["status"], os.WNOHANG)
            found = os.waitstatus_to_exitcode(status) if pid else None
            if pid:
                del running[pid]
            channel.send(json.dumps(found).encode())
        else:
            assert len(list(Path("/proc/self/task").iterdir())) == 1, (
                "another thread's locks would stay locked in a fork"
            )
            # Until the new process has its own handler: it would end its siblings.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            child = os.fork()
            if not child:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            else:
                running[child] = request["new_session"]
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            if not child:
                try:
                    _settle(request, files, parent, inherited)
                finally:
                    channel.send(json.dumps(os.getpid()).encode())
                    channel.close()
                arguments: list[str] = request["arguments"]
                return arguments
        for file in files:
            os.close(file)


def _end(running: Mapping[int, bool]) -> None:
    """End processes, and wait for them."""
    for pid in running:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + GRACE_S
    for pid, has_session in running.items():
        ended = select.poll()
        ended.register(os.pidfd_open(pid), select.POLLIN)
        ended.poll(max(0.0, deadline - time.monotonic()) * 1000)
        with suppress(ProcessLookupError):
            # Nobody else has these numbers before it was waited for.
            (os.killpg if has_session else os.kill)(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _settle(request: dict[str, Any], files: Sequence[int], parent: int, inherited: Sequence[str]) -> None:
    """Be the new process in all that it does not share."""
    if request["new_session"]:
        os.setsid()
    end_with_parent(parent, signal.SIGTERM)
    for stream, file in enumerate(files, 1):
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    own = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [*own, *(part for part in sys.path if part not in inherited)]


def _run(arguments: Sequence[str]) -> None:
    """Run what stands behind the interpreter's name on a command line."""
    match arguments:
        case ["-m", name, *rest]:
            sys.path.insert(0, str(Path.cwd()))
            sys.argv = [name, *rest]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.path.insert(0, "")
            sys.argv = ["-c", *rest]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), main.__dict__)
        case [file, *rest]:
            sys.path.insert(0, str(Path(file).parent))
            sys.argv = [file, *rest]
            runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    for module in sys.argv[3:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is shared stays so
    _run(_serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))
