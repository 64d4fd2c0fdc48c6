"""`sqlenv serve` as a real process, and a plain WebSocket client with a deadline on every wait."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from websockets.sync.client import ClientConnection, connect

from benchmarks.server_process import SQLENV, ServerProcess
from env_server.dataset import Dataset

WAIT_S = 30.0
"""Longest wait for a reply: far beyond what any of them takes, on a crowded machine too."""
POLL_S = 0.02


@contextmanager
def serving(folder: Path, data: Path, *flags: str) -> Iterator[ServerProcess]:
    """Run `sqlenv serve` on a data set for the `with` block; its log is kept in `folder`."""
    command = [*SQLENV, "serve", "--port", "{port}", "--data", str(data)]
    command += ["--query_workers", "1,1", *flags]
    with ServerProcess(command, folder / f"serve-{len(list(folder.glob('serve-*.log')))}.log") as server:
        yield server


def write_data(dataset: Dataset, folder: Path) -> Path:
    """Write a data set as a folder that `--data` reads, and return the folder."""
    for db_id, file in dataset.databases.items():
        shutil.copy(file, folder / f"{db_id}.sqlite")
    questions = [
        {"id": question.question_id, "question": question.text, "sql": question.gold_sql, "database": question.db_id}
        for question in dataset.questions
    ]
    (folder / "questions.json").write_text(json.dumps(questions), encoding="utf-8")
    return folder


def complaints(server: ServerProcess) -> list[str]:
    """Return what the server's log holds of tracebacks, errors and warnings."""
    return [line for line in server.log_text().splitlines() if "Traceback" in line or _is_bad(line)]


def _is_bad(line: str) -> bool:
    return line.startswith("{") and json.loads(line)["level"] in ("warning", "error", "critical")


def until(holds: Callable[[], bool], seconds: float = WAIT_S) -> None:
    """Wait until something holds that another process brings about; fail when it never does."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "waited for it in vain"
        time.sleep(POLL_S)


def get_json(server: Served, path: str) -> dict[str, Any]:
    """Return what a GET answers."""
    with urllib.request.urlopen(f"{server.url}{path}", timeout=WAIT_S) as reply:
        found: dict[str, Any] = json.load(reply)
        return found


class Served(Protocol):
    """Something that answers HTTP."""

    @property
    def url(self) -> str:
        """Where."""


def metric(server: Served, name: str, **labels: str) -> float:
    """Return the sum of the metric's series that have these labels."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=WAIT_S) as reply:
        lines: Iterable[str] = reply.read().decode().splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    series = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return sum(
        float(value)
        for head, _, value in series
        if head.partition("{")[0] == name and all(each in head for each in wanted)
    )


def open_socket(server: ServerProcess, **options: Any) -> ClientConnection:
    """Connect to a server's `/ws`."""
    return connected(server.ws_url, **options)


def connected(url: str, **options: Any) -> ClientConnection:
    """Open a WebSocket."""
    connection: ClientConnection = connect(url, open_timeout=WAIT_S, close_timeout=WAIT_S, compression=None, **options)
    return connection


def ask(socket: ClientConnection, request: object) -> dict[str, Any]:
    """Send a request, JSON unless it is text or bytes already, and return the reply."""
    socket.send(request if isinstance(request, str | bytes) else json.dumps(request))
    return receive(socket)


def receive(socket: ClientConnection) -> dict[str, Any]:
    """Return the next frame."""
    reply: dict[str, Any] = json.loads(socket.recv(timeout=WAIT_S))
    return reply


def step(action_type: str, argument: str) -> dict[str, Any]:
    """Return a request that takes an action."""
    return {"type": "step", "data": {"action_type": action_type, "argument": argument}}


def reset(**data: object) -> dict[str, Any]:
    """Return a request that starts an episode."""
    return {"type": "reset", "data": data}
