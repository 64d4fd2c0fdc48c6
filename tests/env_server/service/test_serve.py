"""`sqlenv serve` as a whole: one process and several, on loopback."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import AsyncMock, Mock
from urllib.error import HTTPError

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from env_server.cache import Cache
from env_server.service.execution.executor import Executor
from env_server.service.serve import ListenError, StartError, bind, serve
from env_server.service.settings import ServiceSettings
from env_server.test_suites.store import KIND

LONGEST_S = 60.0
"""A server that is still there after so long is killed, and its test fails."""

Event = dict[str, Any]


class Server:
    """A server process; what it prints is read as it comes, so that nothing has to be slept for."""

    def __init__(self, data: Path, *flags: str, before: Sequence[str] = ()) -> None:
        command = (sys.executable, "-m", "sqlenv", "serve", "--data", str(data), "--cache_dir", str(data / "cache"))
        self.process = subprocess.Popen(
            [*before, *command, "--port", "0", "--query_workers=1,1", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._watchdog = threading.Timer(LONGEST_S, self.kill)
        self._watchdog.start()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._stdout = self.process.stdout
        self._stderr = self.process.stderr
        self.url = ""
        self.printed = ""

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.process.wait()
        self._watchdog.cancel()
        self._stdout.close()
        self._stderr.close()

    def wait_until_serving(self) -> Server:
        for line in self._stdout:
            self.printed += line
            if found := re.match("serving at (.*)", line):
                self.url = found[1]
                return self
        pytest.fail(f"it never served: {self._stderr.read()}")

    def events(self) -> Iterator[Event]:
        """What it logs, from now on, until all of its processes are gone."""
        for line in self._stderr:
            event = json.loads(line)
            assert isinstance(event, dict)
            yield event

    def wait_for(self, name: str, **fields: object) -> Event:
        """Read its log up to an event."""
        seen = []
        for event in self.events():
            seen.append(event)
            if event["event"] == name and fields.items() <= event.items():
                return event
        pytest.fail(f"{name} was never logged, but {seen}")

    def kill(self) -> None:
        """Kill all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        self.process.terminate()

    def press_ctrl_c(self) -> None:
        """As a terminal does: a signal to all of its processes."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Wait for its end; the exit status, and what it has logged since."""
        rest = self._stderr.read()
        return self.process.wait(), rest

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=LONGEST_S) as reply:
            body: bytes = reply.read()
        return body.decode()

    def connect(self, path: str = "/ws", headers: dict[str, str] | None = None) -> ClientConnection:
        url = self.url.replace("http", "ws") + path
        return connect(url, additional_headers=headers, open_timeout=LONGEST_S, proxy=None)


SECRET_SQL = "SELECT secret_name FROM nowhere"
TOKEN = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of one table and one question."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "customers.csv").write_text("name,city\nAda,Oslo\nBo,Lima\n", encoding="utf-8")
    question = {"question": "In which city does Bo live?", "sql": "SELECT city FROM customers WHERE name = 'Bo'"}
    (folder / "questions.jsonl").write_text(json.dumps(question) + "\n", encoding="utf-8")
    return folder


@contextmanager
def serving(data: Path, *flags: str) -> Iterator[Server]:
    with Server(data, *flags) as server:
        yield server.wait_until_serving()


def ask(client: ClientConnection, kind: str, **data: str) -> dict[str, Any]:
    client.send(json.dumps({"type": kind, "data": data} if data or kind != "state" else {"type": kind}))
    reply: dict[str, Any] = json.loads(client.recv(timeout=LONGEST_S))
    return reply


def answered(client: ClientConnection) -> bool:
    """End the episode; whether the answer was right."""
    verdict = ask(client, "step", action_type="ANSWER", argument="Lima")["data"]["metadata"]["verdict"]
    return bool(verdict == "correct")


@pytest.mark.parametrize(("workers", "stop"), [(1, Server.press_ctrl_c), (2, Server.press_ctrl_c), (1, Server.stop)])
def test_a_drain_lets_episodes_finish_and_still_answers(
    shop: Path, workers: int, stop: Callable[[Server], None]
) -> None:
    with serving(shop, f"--workers={workers}", "--grace_s=50") as server, server.connect() as client:
        ask(client, "reset")
        stop(server)
        server.wait_for("draining", count=1)
        if workers == 1:
            with pytest.raises(HTTPError) as draining:
                server.get("/ready")
            assert json.load(draining.value)["status"] == "draining"
            draining.value.close()
        assert answered(client)
        assert server.end()[0] == 0


@pytest.mark.parametrize("again", [False, True])
def test_what_outlasts_the_grace_period_or_a_second_stop_is_closed(shop: Path, again: bool) -> None:
    with serving(shop, f"--grace_s={1000 if again else 0.1}") as server, server.connect() as client:
        ask(client, "reset")
        server.stop()
        server.wait_for("draining", count=1)
        if again:
            server.stop()
        with suppress(ConnectionClosed):
            list(client)  # until it is closed
        assert server.end()[0] == 0


def test_workers_share_a_port_and_the_capacity_and_a_dead_one_is_replaced(shop: Path) -> None:
    with serving(shop, "--workers=2", "--max_sessions=64", "--queue_size=0") as server, ExitStack() as stack:
        clients = [stack.enter_context(server.connect()) for _ in range(24)]
        for number, client in enumerate(clients):
            assert ask(client, "reset", episode_id=str(number))["type"] == "observation"
        ready = json.loads(server.get("/ready"))
        assert (ready["active_sessions"], ready["max_sessions"]) == (24, 64)
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        workers = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(workers) == 2
        os.kill(int(workers[0]), signal.SIGKILL)
        server.wait_for("library", message=f"Child process [{workers[0]}] died")
        alive = []
        for number, client in enumerate(clients):
            try:
                ask(client, "step", action_type="QUERY", argument="SELECT COUNT(*) FROM customers")
                assert ask(client, "state")["data"] == {"episode_id": str(number), "step_count": 1}
            except ConnectionClosed:
                continue
            alive.append(client)
        assert 0 < len(alive) < 24
        with server.connect() as new:
            assert ask(new, "reset")["type"] == "observation"
        assert f"sqlenv_sessions {len(alive)}.0" in server.get("/metrics")
        server.stop()
        assert all(answered(client) for client in alive)
        assert server.end()[0] == 0


def test_workers_end_when_their_parent_is_killed(shop: Path) -> None:
    with serving(shop, "--workers=2", "--grace_s=50") as server, server.connect() as client:
        ask(client, "reset")
        server.process.kill()
        server.wait_for("parent_died")
        assert answered(client), "a running episode may finish"
        # The log ends when the last process that holds it does.
        assert [event for event in server.events() if event["event"] == "ending_at_once"] == []


def test_an_application_that_does_not_start_ends_the_server(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Executor, "__aenter__", AsyncMock(side_effect=RuntimeError))
    monkeypatch.setattr("env_server.service.serve.configure", Mock())
    settings = ServiceSettings(data=str(shop), cache_dir=shop / "cache", port=0)
    with pytest.raises(StartError):
        serve(settings)


def test_files_and_addresses(shop: Path) -> None:
    shell = ("bash", "-c", 'ulimit -n 100; exec "$@"', "bash")
    with Server(shop, "--max_sessions=400", before=shell) as server:
        assert server.wait_for("too_few_files")["limit"] == 100
    (first,) = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    for shared in (False, True):
        with pytest.raises(ListenError, match=f"port {port} .*--port"):
            bind("127.0.0.1", port, shared=shared)
    first.close()
    for host in ("192.0.2.1", "nowhere.invalid"):
        with pytest.raises(ListenError, match="--host"):
            bind(host, 0)
    first, *others = bind("localhost", 0, shared=True)
    again = pickle.loads(ForkingPickler.dumps(first))
    assert {each.getsockname()[1] for each in (*others, again)} <= {first.getsockname()[1]}
    for each in (first, again, *others):
        each.close()


def test_garbage_and_large_frames_harm_nobody_else_and_times_are_in_utc(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    with serving(shop, "--max_frame_bytes=2000") as server, server.connect() as client, server.connect() as large:
        assert client.protocol.extensions == [], "frames are not compressed"
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        for garbage in (b"\x00\xff\xfe\r\n\r\n", b"GET", b"GET /%FF%FE\xff HTTP/1.1\r\nUpgrade: websocket\r\n\r\n"):
            with socket.create_connection(address, timeout=LONGEST_S) as raw:
                raw.sendall(garbage)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):
                    pass
        large.send("x" * 2001)
        with pytest.raises(ConnectionClosed) as closed:
            large.recv(timeout=LONGEST_S)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        ask(client, "reset")
        query = "SELECT strftime('%H', '2026-07-01 12:00', 'local' || 'time') AS hour"
        assert "12" in ask(client, "step", action_type="QUERY", argument=query)["data"]["observation"]["result"]


@pytest.mark.parametrize("workers", [1])
def test_in_sql_mode_test_databases_are_made_before_it_serves_and_never_in_a_request(
    workers: int, tmp_path: Path
) -> None:
    (tmp_path / "people.csv").write_text("name,age\nAda,36\nBo,3\nCy,17\nDi,64\n", encoding="utf-8")
    golds = {str(age): f"SELECT COUNT(*) FROM people WHERE age > {age}" for age in range(20)}
    questions = [{"id": each, "question": f"Who is older than {each}?", "sql": sql} for each, sql in golds.items()]
    (tmp_path / "questions.json").write_text(json.dumps(questions), encoding="utf-8")
    flags = ("--answer_mode=sql", f"--workers={workers}")
    with serving(tmp_path, *flags) as server:
        folder = Cache(tmp_path / "cache").path(KIND, "")
        before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
        assert len(before) == len(golds) + 1, "and the lock"
        with server.connect() as client:
            for question_id, sql in golds.items():
                ask(client, "reset", question_id=question_id)
                last = ask(client, "step", action_type="ANSWER", argument=sql)
                assert last["data"]["metadata"]["verdict"] == "correct"
            ask(client, "reset", question_id="2")
            lucky = ask(client, "step", action_type="ANSWER", argument=golds["1"])
            assert lucky["data"]["metadata"]["verdict"] == "wrong"
        assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
        server.stop()
    with serving(tmp_path, *flags) as again:
        assert again.url
        assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_that_is_played_and_no_token_is_printed_or_logged(
    workers: int, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQLENV_TOKEN", TOKEN)
    with serving(shop, f"--workers={workers}", "--log_level=debug") as server:
        with server.connect(headers={"Authorization": f"Bearer {TOKEN}"}) as client:
            ask(client, "reset")
            for action, argument in (
                ("QUERY", SECRET_SQL),
                ("QUERY", f"WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM r) {SECRET_SQL}"),
                ("DESCRIBE", "secret_name"),
                ("secret_name", "secret_name"),
            ):
                ask(client, "step", action_type=action, argument=argument)
            client.send(SECRET_SQL)
            client.recv(timeout=LONGEST_S)
            client.send(SECRET_SQL.encode())
            client.recv(timeout=LONGEST_S)
            ask(client, "step", action_type="ANSWER", argument="Lima")
        with pytest.raises(InvalidStatus), server.connect("/ws?token=" + TOKEN):
            pass
        server.stop()
        status, log = server.end()
    printed = server.printed + log
    assert status == 0
    assert "not shown" in printed
    assert "serving at " in printed
    for secret in ("secret_name", "Lima", TOKEN):
        assert secret not in printed
    assert all(isinstance(json.loads(line), dict) for line in log.splitlines())
