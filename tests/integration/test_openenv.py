"""OpenEnv's wire format, as upstream's own client and validators judge it, against a real server process.

Upstream lives in a virtual environment of its own; what runs there are the scripts in `openenv/`. Without it those
tests are skipped. The same episodes give the same bytes on any server.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server_process import ROOT, ServerProcess
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Question
from env_server.environment import SQLEnvironment
from env_server.errors import SQLEnvError
from env_server.judging.answers import format_answer
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.types import SQLAction
from tests.integration.service import WAIT_S, complaints, metric, open_socket, reset, serving, step, write_data

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
