"""What a server in OpenEnv's wire format has to hold to, wherever it is: alone, or behind a load balancer.

Upstream lives in a virtual environment of its own; what runs there are the scripts in `openenv/`. Without it whoever
asks for one of them is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server_process import ROOT
from env_server.dataset import Dataset, Question
from env_server.environment import SQLEnvironment
from env_server.errors import SQLEnvError
from env_server.judging.answers import format_answer
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.types import SQLAction
from tests.integration.service import WAIT_S, connected, reset, step

SCRIPTS = Path(__file__).with_name("openenv")
UPSTREAM = ROOT / ".venv-openenv"
OLD = UPSTREAM / "old"
"""The oldest client that is tried, beside the new one: first on the path, it is the one imported."""
SCRIPT_TIMEOUT_S = 120.0
COUNTED = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {}) SELECT count(*) FROM n"
MEDIUM = COUNTED.format(20_000)
LONG = COUNTED.format(200_000)
"""More steps than the fast pool allows."""
SLOW = COUNTED.format(-1)
"""More than any pool allows."""
Plan = list[dict[str, Any]]


def upstream(script: str, *arguments: str, given: object, old: bool = False) -> Any:
    """Run a script in upstream's virtual environment and return the JSON that it prints."""
    python = UPSTREAM / "bin" / "python"
    if not python.exists():
        pytest.skip("upstream's openenv is not installed: `make openenv`")
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


def action(kind: str, argument: str) -> dict[str, str]:
    return {"action_type": kind, "argument": argument}


def episode(question: Question, *ending: dict[str, str], episode_id: str) -> dict[str, Any]:
    """An episode with every kind of action, a query for each pool, mistakes, and a step too many."""
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


def check_the_client(url: str, dataset: Dataset, mode: str, *, old: bool = False) -> None:
    """Upstream's client, `async` or `sync`, sees what an environment in this process gives."""
    episodes = plan(dataset)
    found = upstream("play.py", url, mode, given=episodes, old=old)
    assert found["version"] == ("0.3.0" if old else "0.10.0")
    assert found["episodes"] == played_here(dataset, episodes, metadata=not old)
    endings = [played["steps"][-2]["done"] for played in found["episodes"]]
    assert endings == [True, True, True]
    assert all("EXECUTION_ERROR" in played["steps"][-1]["raised"] for played in found["episodes"])


def check_validators_and_graders(url: str, dataset: Dataset) -> None:
    """Upstream's validators and graders pass."""
    actions = [each for each in plan(dataset)[0]["actions"] if each["argument"] != "one step too many"]
    runtime = {"plan_schema_version": "1", "reset": {"episode_id": "graded", "seed": 7}, "actions": actions}
    found = upstream("grade.py", url, str(ROOT), given=runtime)
    assert found["report"]["passed"]
    assert (found["report"]["summary"]["passed_count"], found["report"]["summary"]["total_count"]) == (6, 6)
    assert found["failure"] is None, found["failure"]
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


def script(dataset: Dataset) -> list[str]:
    """Requests for many episodes: mistakes, queries for each pool, all endings."""
    requests: list[str] = []
    for each in plan(dataset):
        requests.append(json.dumps({"type": "reset", "data": each["reset"]}))
        requests += [json.dumps({"type": "step", "data": given}) for given in each["actions"]]
    requests.append(json.dumps(reset(seed=11)))
    requests += [json.dumps(step("QUERY", sql)) for sql in (LONG, SLOW)]
    return requests


def replies(url: str, requests: list[str], **options: Any) -> list[str]:
    """Send requests on one socket, one after the other, and return what comes."""
    with connected(url, **options) as socket:
        found = []
        for request in requests:
            socket.send(request)
            found.append(str(socket.recv(timeout=WAIT_S)))
        return found
