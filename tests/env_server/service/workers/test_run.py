"""The processes of a server, on loopback, with a stand-in for the application; and `sqlenv serve` as a whole."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

STAND_IN = Path(__file__).with_name("stand_in_server.py")
FORKLESS_PARENT = Path(__file__).with_name("forkless_parent.py")
LONGEST_S = 60.0
"""A server that is still there after so long is killed, and its test fails."""

Event = dict[str, Any]


class Server:
    """A server process; what it prints is read as it comes, so that nothing has to be slept for."""

    def __init__(self, *flags: str, command: Sequence[str] = (sys.executable, str(STAND_IN))) -> None:
        self.process = subprocess.Popen(
            [*command, "--port", "0", *flags],
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

    def connect(self, path: str = "", headers: dict[str, str] | None = None) -> ClientConnection:
        url = self.url.replace("http", "ws") + path
        return connect(url, additional_headers=headers, open_timeout=LONGEST_S, compression=None, proxy=None)


@contextmanager
def serving(*flags: str) -> Iterator[Server]:
    with Server(*flags) as server:
        yield server.wait_until_serving()


def echoes(client: ClientConnection) -> bool:
    client.send("hello")
    return client.recv(timeout=LONGEST_S) == "hello"


def play(server: Server, stack: ExitStack) -> tuple[ClientConnection, int]:
    """Open a session; return it with its worker's process id."""
    client = stack.enter_context(server.connect())
    return client, int(client.recv(timeout=LONGEST_S))


def on_both(server: Server, stack: ExitStack) -> dict[int, list[ClientConnection]]:
    """Open sessions until both workers have one."""
    found: dict[int, list[ClientConnection]] = {}
    while len(found) < 2:
        client, pid = play(server, stack)
        found.setdefault(pid, []).append(client)
    return found


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("stop", [Server.stop, Server.press_ctrl_c])
def test_a_drain_lets_sessions_finish_and_still_answers(workers: int, stop: Callable[[Server], None]) -> None:
    with serving(f"--workers={workers}", "--grace_s=50") as server, ExitStack() as stack:
        client, _ = play(server, stack)
        stop(server)
        server.wait_for("draining", count=1)
        assert echoes(client)
        assert server.get("/active") == "1"
        client.close()
        assert server.end()[0] == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_what_outlasts_the_grace_period_is_closed(workers: int) -> None:
    with serving(f"--workers={workers}", "--grace_s=0.1") as server, ExitStack() as stack:
        client, _ = play(server, stack)
        server.stop()
        with pytest.raises(ConnectionClosed):
            client.recv(timeout=LONGEST_S)
        assert server.end()[0] == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_stop_ends_it_at_once(workers: int) -> None:
    with serving(f"--workers={workers}", "--grace_s=1000") as server, ExitStack() as stack:
        client, _ = play(server, stack)
        server.stop()
        server.wait_for("draining", count=1)
        server.stop()
        with pytest.raises(ConnectionClosed):
            client.recv(timeout=LONGEST_S)
        status, log = server.end()
        assert status == 1
        assert "ending_at_once" in log


def test_a_worker_whose_loop_stands_still_is_replaced() -> None:
    with serving("--workers=2", "--stuck_checks=2") as server, ExitStack() as stack:
        client, pid = play(server, stack)
        client.send("block")
        server.wait_for("worker_stuck", pid=pid)
        server.wait_for("worker_died", pid=pid)
        server.wait_for("worker_serving")
        assert pid not in on_both(server, stack)


def test_a_stop_for_one_worker_alone_drains_and_replaces_it() -> None:
    with serving("--workers=2", "--grace_s=50") as server, ExitStack() as stack:
        client, pid = play(server, stack)
        os.kill(pid, signal.SIGTERM)
        server.wait_for("draining", count=1)
        assert echoes(client)
        client.close()
        assert server.wait_for("worker_died", pid=pid)["reason"] == "ended with status 0"
        server.wait_for("worker_serving")
        server.stop()
        assert server.end()[0] == 0


def test_workers_end_when_their_parent_is_killed() -> None:
    with serving("--workers=2", "--grace_s=50") as server, ExitStack() as stack:
        client, _ = play(server, stack)
        server.process.kill()
        server.wait_for("parent_died")
        assert echoes(client), "a running session may finish"
        client.close()
        # The log ends when the last process that holds it does.
        assert [event["event"] for event in server.events()].count("stopped") == 2


@pytest.mark.parametrize(("workers", "prefix"), [(1, ""), (2, "no worker can be started: StartError: ")])
def test_workers_that_do_not_start_end_the_server_with_the_cause(workers: int, prefix: str, tmp_path: Path) -> None:
    fail = tmp_path / "fail"
    fail.touch()
    with Server(f"--workers={workers}", f"--fail={fail}") as server:
        status, log = server.end()
    assert status == 2
    assert log.splitlines()[-1] == f"{prefix}the application did not start; the log says why"


def test_a_parent_that_may_not_fork_says_so_and_leaves_no_file_open() -> None:
    ran = subprocess.run([sys.executable, str(FORKLESS_PARENT)], stdout=subprocess.PIPE, text=True, timeout=LONGEST_S)
    assert ran.stdout == (
        "no worker can be started: no process can be started: Resource temporarily unavailable; 0 more files\n"
    )


def test_a_worker_that_does_not_start_is_tried_again_while_another_one_serves(tmp_path: Path) -> None:
    fail = tmp_path / "fail"
    with serving("--workers=2", f"--fail={fail}") as server, ExitStack() as stack:
        sessions = on_both(server, stack)
        fail.touch()
        killed = next(iter(sessions))
        os.kill(killed, signal.SIGKILL)
        server.wait_for("worker_start_delayed")
        assert [play(server, stack)[1] for _ in range(8)] == [pid for pid in sessions if pid != killed] * 8, (
            "no connection waits for the worker that is not there"
        )
        fail.unlink()
        server.wait_for("worker_serving")
        assert len(on_both(server, stack)) == 2


def test_a_stop_while_workers_start_is_not_lost(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with gate.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with Server("--workers=2", f"--wait={gate}") as server:
            server.wait_for("worker_started", worker=1)
            server.stop()
            server.wait_for("stopping")
            fcntl.flock(file, fcntl.LOCK_UN)
            status, log = server.end()
    assert status == 0, log


def limited(files: str, *flags: str) -> Server:
    """A server that a shell starts after `ulimit`."""
    shell = ("bash", "-c", f'ulimit {files} 100; exec "$@"', "bash")
    return Server(*flags, command=(*shell, sys.executable, str(STAND_IN)))


def test_a_server_may_open_as_many_files_as_its_sessions_need() -> None:
    with limited("-Sn", "--max_sessions=400", "--queue_size=8") as server:
        server.wait_until_serving()
        assert int(server.get("/files")) >= 400 + 8
        server.stop()
        assert "too_few_files" not in server.end()[1]


def test_a_server_that_may_not_says_so() -> None:
    with limited("-n", "--max_sessions=400") as server:
        assert server.wait_for("too_few_files")["limit"] == 100


@pytest.fixture(scope="module")
def quiet() -> Iterator[Server]:
    """A server for tests that ask nothing of its end."""
    with serving("--max_frame_bytes=2000") as server:
        yield server


def test_a_frame_that_is_too_large_closes_its_session_alone(quiet: Server) -> None:
    with ExitStack() as stack:
        (large, _), (small, _) = play(quiet, stack), play(quiet, stack)
        large.send("x" * 2001)
        with pytest.raises(ConnectionClosed) as closed:
            large.recv(timeout=LONGEST_S)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        small.send("x" * 2000)
        assert small.recv(timeout=LONGEST_S) == "x" * 2000


def test_sessions_that_stay_are_not_looked_at_again_and_again_for_garbage(quiet: Server) -> None:
    assert int(quiet.get("/grow")) == 0


def test_frames_are_not_compressed(quiet: Server) -> None:
    with connect(quiet.url.replace("http", "ws"), proxy=None) as client:
        assert client.protocol.extensions == []


def test_garbage_does_not_harm_it(quiet: Server) -> None:
    address = ("127.0.0.1", int(quiet.url.rpartition(":")[2]))
    with ExitStack() as stack:
        client, _ = play(quiet, stack)
        for garbage in (b"\x00\xff\xfe\r\n\r\n", b"GET", b"GET /%FF%FE\xff HTTP/1.1\r\nUpgrade: websocket\r\n\r\n"):
            with socket.create_connection(address, timeout=LONGEST_S) as raw:
                raw.sendall(garbage)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(4096):
                    pass
        assert echoes(client)


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


def sqlenv_serve(shop: Path, *flags: str) -> Server:
    command = (sys.executable, "-m", "sqlenv", "serve", "--data", str(shop), "--cache_dir", str(shop / "cache"))
    return Server("--lanes=1,1", *flags, command=command)


def ask(client: ClientConnection, kind: str, **data: str) -> dict[str, Any]:
    client.send(json.dumps({"type": kind, "data": data}))
    reply: dict[str, Any] = json.loads(client.recv(timeout=LONGEST_S))
    return reply


def test_two_real_workers_play_on_when_one_is_killed_and_drain_in_the_end(shop: Path) -> None:
    with sqlenv_serve(shop, "--workers=2", "--max_sessions=32", "--queue_size=0") as server, ExitStack() as stack:
        pids = {server.wait_for("worker_serving")["pid"] for _ in range(2)}
        server.wait_until_serving()
        clients = [stack.enter_context(server.connect("/ws")) for _ in range(32)]
        first = [ask(client, "reset", episode_id=str(number)) for number, client in enumerate(clients)]
        assert {reply["type"] for reply in first} == {"observation"}
        with server.connect("/ws") as one_more:
            assert json.loads(one_more.recv(timeout=LONGEST_S))["data"]["code"] == "CAPACITY_REACHED"
        os.kill(pids.pop(), signal.SIGKILL)
        died = server.wait_for("worker_died", reason="killed by SIGKILL")
        server.wait_for("worker_serving")
        alive = []
        for number, client in enumerate(clients):
            try:
                reply = ask(client, "step", action_type="QUERY", argument="SELECT COUNT(*) FROM customers")
            except ConnectionClosed:
                continue
            assert "2" in reply["data"]["observation"]["result"]
            assert ask_state(client) == {"episode_id": str(number), "step_count": 1}
            alive.append(client)
        assert len(alive) == 32 - died["active"]
        assert 0 < len(alive) < 32
        new = [stack.enter_context(server.connect("/ws")) for _ in range(died["active"])]
        assert {ask(client, "reset")["type"] for client in new} == {"observation"}
        with server.connect("/ws") as one_more:
            assert json.loads(one_more.recv(timeout=LONGEST_S))["data"]["code"] == "CAPACITY_REACHED"
        metrics = server.get("/metrics").splitlines()
        assert "sqlenv_worker_deaths_total 1.0" in metrics
        assert f'sqlenv_sessions_closed_total{{reason="worker_died"}} {len(new)}.0' in metrics
        assert f"sqlenv_sessions_opened_total {32 + len(new)}.0" in metrics
        server.stop()
        for client in [*alive, *new]:
            verdict = ask(client, "step", action_type="ANSWER", argument="Lima")["data"]
            assert (verdict["done"], verdict["metadata"]["verdict"]) == (True, "correct")
        assert server.end()[0] == 0


def ask_state(client: ClientConnection) -> dict[str, Any]:
    client.send(json.dumps({"type": "state"}))
    state: dict[str, Any] = json.loads(client.recv(timeout=LONGEST_S))["data"]
    return state


def test_a_server_answers_in_utc_wherever_it_stands(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    with sqlenv_serve(shop) as server:
        server.wait_until_serving()
        with server.connect("/ws") as client:
            ask(client, "reset")
            query = "SELECT strftime('%H', '2026-07-01 12:00', 'local' || 'time') AS hour"
            assert "12" in ask(client, "step", action_type="QUERY", argument=query)["data"]["observation"]["result"]


@pytest.mark.parametrize("workers", [1, 2])
def test_in_sql_mode_test_databases_are_made_before_it_serves_and_never_in_a_request(
    workers: int, tmp_path: Path
) -> None:
    (tmp_path / "people.csv").write_text("name,age\nAda,36\nBo,3\nCy,17\nDi,64\n", encoding="utf-8")
    golds = {str(age): f"SELECT COUNT(*) FROM people WHERE age > {age}" for age in range(20)}
    questions = [{"id": each, "question": f"Who is older than {each}?", "sql": sql} for each, sql in golds.items()]
    (tmp_path / "questions.json").write_text(json.dumps(questions), encoding="utf-8")
    flags = ("--answer_mode=sql", f"--workers={workers}")
    with sqlenv_serve(tmp_path, *flags) as server:
        server.wait_until_serving()
        (made,) = (tmp_path / "cache").glob("test-databases-*/*.sqlite")
        before = (made.read_bytes(), made.stat().st_mtime_ns)
        with server.connect("/ws") as client:
            for question_id, sql in golds.items():
                ask(client, "reset", question_id=question_id)
                last = ask(client, "step", action_type="ANSWER", argument=sql)
                assert last["data"]["metadata"]["verdict"] == "correct"
            ask(client, "reset", question_id="2")
            lucky = ask(client, "step", action_type="ANSWER", argument=golds["1"])
            assert lucky["data"]["metadata"]["verdict"] == "wrong"
        assert (made.read_bytes(), made.stat().st_mtime_ns) == before
        server.stop()
    with sqlenv_serve(tmp_path, *flags) as again:
        again.wait_until_serving()
        assert (made.read_bytes(), made.stat().st_mtime_ns) == before


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_that_is_played_and_no_token_is_printed_or_logged(
    workers: int, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQLENV_TOKEN", TOKEN)
    with sqlenv_serve(shop, f"--workers={workers}", "--log_level=debug") as server:
        server.wait_until_serving()
        with server.connect("/ws", headers={"Authorization": f"Bearer {TOKEN}"}) as client:
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
