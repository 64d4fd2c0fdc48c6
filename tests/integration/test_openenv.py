"""OpenEnv's wire format, as upstream's own client and validators judge it, against a real server process.

Upstream lives in a virtual environment of its own; what runs there are the scripts in `openenv/`. Without it those
tests are skipped. What is on the wire is also looked at frame by frame.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK
from websockets.sync.client import ClientConnection

from benchmarks.server_process import ROOT, ServerProcess
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Question
from env_server.environment import SQLEnvironment
from env_server.errors import SQLEnvError
from env_server.judging.answers import format_answer
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.types import SQLAction
from tests.integration.service import (
    WAIT_S,
    ask,
    complaints,
    events,
    get_json,
    metric,
    open_socket,
    receive,
    reset,
    serving,
    step,
    until,
    write_data,
)

SCRIPTS = Path(__file__).with_name("openenv")
UPSTREAM = ROOT / ".venv-openenv"
OLD = UPSTREAM / "old"
"""The oldest client that is tried, beside the new one: first on the path, it is the one imported."""
SCRIPT_TIMEOUT_S = 120.0
COUNTED = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {}) SELECT count(*) FROM n"
MEDIUM = COUNTED.format(20_000)
LONG = COUNTED.format(200_000)
"""More steps than the medium lane allows."""
SLOW = COUNTED.format(-1)
"""More than any lane allows."""
Plan = list[dict[str, Any]]


@pytest.fixture(scope="module")
def data(pets: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(pets, tmp_path_factory.mktemp("pets"))


@pytest.fixture(scope="module")
def dataset(data: Path) -> Dataset:
    return load_dataset(str(data))


@pytest.fixture(scope="module")
def server(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server for the tests that leave no trace in it. Whatever they did, it had nothing to complain of."""
    with serving(tmp_path_factory.mktemp("log"), data) as running:
        yield running
        assert running.stop() == 0
        assert complaints(running) == []


@pytest.fixture
def socket(server: ServerProcess) -> Iterator[ClientConnection]:
    with open_socket(server) as connection:
        yield connection


@pytest.fixture
def upstream() -> Callable[..., Any]:
    """Run a script in upstream's virtual environment and return the JSON that it prints."""
    python = UPSTREAM / "bin" / "python"
    if not python.exists():
        pytest.skip("upstream's openenv is not installed: `make openenv`")

    def run(script: str, *arguments: str, given: object, old: bool = False) -> Any:
        done = subprocess.run(
            [str(python), str(SCRIPTS / script), *arguments],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=SCRIPT_TIMEOUT_S,
            env={**os.environ, "PYTHONPATH": str(OLD) if old else ""},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


# --- upstream's client ---------------------------------------------------------------------------------------------


def action(kind: str, argument: str) -> dict[str, str]:
    return {"action_type": kind, "argument": argument}


def episode(question: Question, *ending: dict[str, str], episode_id: str) -> dict[str, Any]:
    """An episode with every kind of action, a query for each lane, mistakes, and a step too many."""
    actions = [
        action("DESCRIBE", "no such table"),
        action("describe", "pets"),
        action("SAMPLE", "owners"),
        action("QUERY", question.gold_sql),
        action("QUERY", "SELEKT 1"),
        action("QUERY", MEDIUM),
        action("DANCE", "tango"),
        *ending,
        action("ANSWER", "one step too many"),
    ]
    return {"reset": {"question_id": question.question_id, "episode_id": episode_id, "unknown": 1}, "actions": actions}


def plan(dataset: Dataset) -> Plan:
    """Three episodes: one that is won, one that is lost, one that runs out of budget."""
    first, second, third = dataset.questions[:3]
    right = action("ANSWER", format_answer(first.gold.rows))
    wrong = action("ANSWER", "no idea")
    budget = [action("QUERY", f"SELECT {number}") for number in range(EnvSettings().step_budget - 7)]
    return [
        episode(first, right, episode_id="won"),
        episode(second, wrong, episode_id="lost"),
        episode(third, *budget, episode_id="out of budget"),
    ]


def played_here(dataset: Dataset, plan: Plan, *, metadata: bool) -> list[dict[str, Any]]:
    """Play the plan on an environment in this process, and show it as upstream's client would."""
    pool = DatabasePool(dataset.databases, EnvSettings().sandbox)
    environment = SQLEnvironment(dataset, pool)

    def shown(call: Callable[[], Any]) -> dict[str, Any]:
        try:
            fields = call().model_dump()
        except SQLEnvError as error:
            return {"raised": f"Server error: {error} (code: EXECUTION_ERROR)"}
        beside = {"reward": fields.pop("reward"), "done": fields.pop("done"), "metadata": fields.pop("metadata")}
        return {"observation": fields, **beside, "metadata": beside["metadata"] if metadata else None}

    found: list[dict[str, Any]] = []
    for each in plan:
        asked = each["reset"]
        start = shown(partial(environment.reset, None, asked["episode_id"], asked["question_id"]))
        played: dict[str, Any] = {"reset": start, "steps": [], "states": [environment.state.model_dump()]}
        for given in each["actions"]:
            played["steps"].append(shown(partial(environment.step, SQLAction(**given))))
            played["states"].append(environment.state.model_dump())
        found.append(played)
    pool.close()
    return found


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("old", [False, True], ids=["0.10.0", "0.3.0"])
def test_the_real_client_sees_what_an_environment_in_process_gives(
    upstream: Callable[..., Any], server: ServerProcess, dataset: Dataset, mode: str, old: bool
) -> None:
    episodes = plan(dataset)
    found = upstream("play.py", server.url, mode, given=episodes, old=old)
    assert found["version"] == ("0.3.0" if old else "0.10.0")
    assert found["episodes"] == played_here(dataset, episodes, metadata=not old)
    endings = [played["steps"][-2]["done"] for played in found["episodes"]]
    assert endings == [True, True, True]
    assert all("EXECUTION_ERROR" in played["steps"][-1]["raised"] for played in found["episodes"])


def test_the_real_client_is_told_when_there_is_no_place(
    upstream: Callable[..., Any], dataset: Dataset, data: Path, tmp_path: Path
) -> None:
    with serving(tmp_path, data, "--max_sessions", "1", "--queue_size", "0") as server:
        with open_socket(server):
            refused = upstream("play.py", server.url, "async", given=plan(dataset)[:1])["episodes"][0]
        assert "CAPACITY_REACHED" in refused["raised"]
        assert metric(server, "sqlenv_refused_total", reason="capacity") >= 1
        # The place is free again the moment the socket is gone.
        admitted = upstream("play.py", server.url, "async", given=plan(dataset)[:1])["episodes"][0]
        assert admitted["states"][-1]["step_count"] == len(admitted["steps"]) - 1


def test_the_real_client_needs_the_token(
    upstream: Callable[..., Any], dataset: Dataset, data: Path, tmp_path: Path
) -> None:
    episodes = plan(dataset)[:1]
    with serving(tmp_path, data, "--token", "open-sesame") as server:
        for wrong in ((), ("open-sesam",)):
            refused = upstream("play.py", server.url, "async", *wrong, given=episodes)["episodes"][0]
            assert "401" in refused["raised"]
        admitted = upstream("play.py", server.url, "async", "open-sesame", given=episodes)["episodes"]
        assert admitted == played_here(dataset, episodes, metadata=True)
        assert "open-sesam" not in server.log_text()


def test_upstreams_validators_and_graders_pass(
    upstream: Callable[..., Any], server: ServerProcess, dataset: Dataset
) -> None:
    actions = [each for each in plan(dataset)[0]["actions"] if each["argument"] != "one step too many"]
    runtime = {"plan_schema_version": "1", "reset": {"episode_id": "graded", "seed": 7}, "actions": actions}
    found = upstream("grade.py", server.url, str(ROOT), given=runtime)
    assert found["report"]["passed"]
    assert (found["report"]["summary"]["passed_count"], found["report"]["summary"]["total_count"]) == (6, 6)
    assert found["failure"] is None
    assert found["operations"] == ["reset", "state"] + ["step", "state"] * len(actions)
    passed = {name for name, (status, _) in found["grades"].items() if status == "pass"}
    skipped = {name for name, (status, _) in found["grades"].items() if status == "skip"}
    assert passed == {
        "static.manifest",
        "runtime.reward_well_formed",
        "runtime.observation_schema",
        "runtime.state_contract",
    }, found["grades"]
    assert skipped == {"runtime.network_policy"}, "needs upstream's container"


# --- frame by frame ------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, object, str]] = [
    ("no JSON", "{", "INVALID_JSON"),
    ("an empty frame", "", "INVALID_JSON"),
    ("deep nesting", "[" * 100_000, "INVALID_JSON"),
    ("a number beyond all bounds", '{"type":"reset","data":{"seed":' + "9" * 5_000 + "}}", "INVALID_JSON"),
    ("bytes", b'{"type":"state"}', "INVALID_JSON"),
    ("bytes that are no text", b"\xff\xfe\x00", "INVALID_JSON"),
    ("a list", [], "VALIDATION_ERROR"),
    ("a number", 1, "VALIDATION_ERROR"),
    ("null", None, "VALIDATION_ERROR"),
    ("a string", '"state"', "VALIDATION_ERROR"),
    ("no type", {}, "UNKNOWN_TYPE"),
    ("an unknown type", {"type": "dance"}, "UNKNOWN_TYPE"),
    ("a type that is no string", {"type": ["reset"]}, "UNKNOWN_TYPE"),
    ("half a character as type", '{"type":"\\ud800"}', "INVALID_JSON"),
    ("half a character in an action", '{"type":"step","data":{"action_type":"\\udfff"}}', "INVALID_JSON"),
    ("state with data", {"type": "state", "data": {}}, "VALIDATION_ERROR"),
    ("an extra key", {"type": "reset", "data": {}, "extra": 1}, "VALIDATION_ERROR"),
    ("half a character as key", '{"type":"state","\\ud800":1}', "INVALID_JSON"),
    ("a negative seed", reset(seed=-1), "VALIDATION_ERROR"),
    ("a seed that is no number", reset(seed="x"), "VALIDATION_ERROR"),
    ("a long episode id", reset(episode_id="x" * 256), "VALIDATION_ERROR"),
    ("data that is no object", {"type": "reset", "data": []}, "VALIDATION_ERROR"),
    ("a step without data", {"type": "step"}, "VALIDATION_ERROR"),
    ("a step without an action", {"type": "step", "data": {}}, "VALIDATION_ERROR"),
    ("an action that is no text", {"type": "step", "data": {"action_type": 3}}, "VALIDATION_ERROR"),
    ("an unknown field", {"type": "step", "data": {"action_type": "QUERY", "sql": "SELECT 1"}}, "VALIDATION_ERROR"),
    ("an unknown question", reset(question_id="nowhere/1"), "EXECUTION_ERROR"),
]


@pytest.mark.parametrize(("request_", "code"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_bad_frame_is_answered_and_changes_nothing(socket: ClientConnection, request_: object, code: str) -> None:
    assert ask(socket, reset(seed=1, episode_id="kept"))["type"] == "observation"
    assert ask(socket, step("QUERY", "SELECT 1"))["data"]["observation"]["step_count"] == 1
    refusal = ask(socket, request_)
    assert refusal["type"] == "error"
    assert refusal["data"]["code"] == code
    assert refusal["data"]["message"]
    if code == "VALIDATION_ERROR" and isinstance(request_, dict):
        assert refusal["data"]["errors"]
    assert ask(socket, {"type": "state"})["data"] == {"episode_id": "kept", "step_count": 1}
    assert ask(socket, step("QUERY", "SELECT 2"))["data"]["observation"]["step_count"] == 2


def test_steps_out_of_turn_are_errors_that_change_nothing(socket: ClientConnection) -> None:
    early = ask(socket, step("QUERY", "SELECT 1"))
    assert early["data"]["code"] == "EXECUTION_ERROR"
    assert ask(socket, {"type": "state"})["data"] == {"episode_id": None, "step_count": 0}
    ask(socket, reset(seed=1, episode_id="one"))
    assert ask(socket, step("ANSWER", "no idea"))["data"]["done"] is True
    late = ask(socket, step("QUERY", "SELECT 1"))
    assert late["data"]["code"] == "EXECUTION_ERROR"
    assert ask(socket, {"type": "state"})["data"] == {"episode_id": "one", "step_count": 1}
    again = ask(socket, reset(seed=1, episode_id="two"))
    assert again["data"]["done"] is False
    assert ask(socket, {"type": "state"})["data"] == {"episode_id": "two", "step_count": 0}


def test_close_is_not_answered_and_ends_the_session(socket: ClientConnection) -> None:
    ask(socket, reset(seed=1))
    socket.send('{"type":"close"}')
    with pytest.raises(ConnectionClosedOK) as closed:
        socket.recv(timeout=WAIT_S)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1000


def test_there_are_no_tools(socket: ClientConnection) -> None:
    call = {"jsonrpc": "2.0", "id": 5, "method": "tools/list"}
    reply = ask(socket, {"type": "mcp", "data": call})
    assert (reply["type"], reply["data"]["id"], reply["data"]["error"]["code"]) == ("mcp", 5, -32603)


def test_pipelined_requests_are_answered_in_order(socket: ClientConnection) -> None:
    """A query that needs a lane holds back the replies behind it, of its own session."""
    socket.send(json.dumps(reset(seed=1, episode_id="piped")))
    arguments = [MEDIUM, "SELECT 1", COUNTED.format(20_001), "SELECT 2", "SELEKT"]
    for argument in arguments:
        socket.send(json.dumps(step("QUERY", argument)))
        socket.send('{"type":"state"}')
        socket.send("no JSON")
    assert receive(socket)["data"]["observation"]["step_count"] == 0
    for number, argument in enumerate(arguments, start=1):
        observation = receive(socket)["data"]["observation"]
        assert (observation["step_count"], observation["action_history"][-1]) == (number, f"QUERY {argument}")
        assert receive(socket)["data"] == {"episode_id": "piped", "step_count": number}
        assert receive(socket)["data"]["code"] == "INVALID_JSON"


def test_a_frame_that_is_too_large_closes_the_socket(server: ServerProcess) -> None:
    with open_socket(server) as socket:
        with pytest.raises(ConnectionClosed) as closed:
            ask(socket, step("QUERY", "x" * 2_000_000))
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
    with open_socket(server) as socket:
        assert ask(socket, reset(seed=1))["type"] == "observation"


def test_a_socket_without_a_place_is_told_so_and_closed(data: Path, tmp_path: Path) -> None:
    flags = ("--max_sessions", "2", "--queue_size", "0")
    with (
        serving(tmp_path, data, *flags) as server,
        open_socket(server),
        open_socket(server),
        open_socket(server) as third,
    ):
        refusal = receive(third)
        assert refusal["data"]["code"] == "CAPACITY_REACHED"
        assert (refusal["data"]["active_sessions"], refusal["data"]["max_sessions"]) == (2, 2)
        with pytest.raises(ConnectionClosedOK) as closed:
            third.recv(timeout=WAIT_S)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1000


def test_an_idle_session_is_told_so_and_closed(data: Path, tmp_path: Path) -> None:
    with serving(tmp_path, data, "--idle_timeout_s", "0.2") as server, open_socket(server) as socket:
        ask(socket, reset(seed=1))
        assert receive(socket)["data"]["code"] == "SESSION_ERROR"
        with pytest.raises(ConnectionClosedOK):
            socket.recv(timeout=WAIT_S)
        assert metric(server, "sqlenv_sessions_closed_total", reason="idle") == 1


def test_a_server_that_stops_lets_the_episode_end(data: Path, tmp_path: Path) -> None:
    with serving(tmp_path, data) as server:
        with open_socket(server) as playing, open_socket(server) as waiting:
            ask(playing, reset(seed=1))
            server.process.send_signal(signal.SIGTERM)
            assert receive(waiting)["data"]["code"] == "SESSION_ERROR"
            assert ask(playing, step("QUERY", "SELECT 1"))["data"]["done"] is False
            assert ask(playing, step("ANSWER", "no idea"))["data"]["done"] is True
            assert receive(playing)["data"]["code"] == "SESSION_ERROR"
        assert server.process.wait(WAIT_S) == 0
        assert complaints(server) == []


# --- the same bytes everywhere -------------------------------------------------------------------------------------


def script(dataset: Dataset) -> list[str]:
    """Requests for many episodes: mistakes, queries for each lane, all endings."""
    requests: list[str] = []
    for each in plan(dataset):
        requests.append(json.dumps({"type": "reset", "data": each["reset"]}))
        requests += [json.dumps({"type": "step", "data": given}) for given in each["actions"]]
    requests.append(json.dumps(reset(seed=11)))
    requests += [json.dumps(step("QUERY", sql)) for sql in (LONG, SLOW)]
    return requests


def replies(server: ServerProcess, requests: list[str]) -> list[str]:
    with open_socket(server) as socket:
        found = []
        for request in requests:
            socket.send(request)
            found.append(str(socket.recv(timeout=WAIT_S)))
        return found


def test_a_replay_on_another_server_gives_the_same_bytes(
    server: ServerProcess, dataset: Dataset, data: Path, tmp_path: Path
) -> None:
    requests = script(dataset)
    first = replies(server, requests)
    assert '"result":"count(*)\\n200000"' in first[-2], "the slow lane has answered"
    assert "needs more than" in first[-1], "the last query runs out of budget"
    assert replies(server, requests) == first, "from the cache of results"
    with serving(tmp_path, data, "--workers", "2", "--lanes", "2,2") as other:
        assert replies(other, requests) == first


# --- two workers ---------------------------------------------------------------------------------------------------

SESSIONS = 16


def test_two_workers_have_one_capacity_and_one_dies_without_the_other_noticing(
    upstream: Callable[..., Any], dataset: Dataset, data: Path, tmp_path: Path
) -> None:
    flags = ("--workers", "2", "--max_sessions", str(SESSIONS), "--queue_size", "0")
    with serving(tmp_path, data, *flags) as server, ExitStack() as stack:
        sockets = [stack.enter_context(open_socket(server)) for _ in range(SESSIONS)]
        for number, socket in enumerate(sockets):
            ask(socket, reset(seed=number, episode_id=str(number)))
        assert get_json(server, "/ready")["active_sessions"] == SESSIONS
        with open_socket(server) as late:
            assert receive(late)["data"]["code"] == "CAPACITY_REACHED"

        os.kill(events(server, "worker_started")[0]["pid"], signal.SIGKILL)
        alive = []
        for number, socket in enumerate(sockets):
            with suppress(ConnectionClosed):
                assert ask(socket, step("QUERY", "SELECT 1"))["data"]["observation"]["step_count"] == 1
                alive.append((number, socket))
        assert 0 < len(alive) < SESSIONS, "connections are spread over the workers"
        # What the dead worker held is free, and no more than that.
        until(lambda: get_json(server, "/ready")["active_sessions"] == len(alive))
        found = upstream("play.py", server.url, "sync", given=plan(dataset))["episodes"]
        assert found == played_here(dataset, plan(dataset), metadata=True)
        for _ in range(SESSIONS - len(alive)):
            assert ask(stack.enter_context(open_socket(server)), reset(seed=1))["type"] == "observation"
        with open_socket(server) as late:
            assert receive(late)["data"]["code"] == "CAPACITY_REACHED"
        for number, socket in alive:
            assert ask(socket, {"type": "state"})["data"] == {"episode_id": str(number), "step_count": 1}
        until(lambda: len(events(server, "worker_serving")) == 3)
        assert [event["active"] for event in events(server, "worker_died")] == [SESSIONS - len(alive)]
