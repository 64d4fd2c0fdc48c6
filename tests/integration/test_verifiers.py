"""SQLEnv as a taskset of `verifiers`: the real package plays it, by its own environment, interception and tool servers.

It lives in a virtual environment of its own (`make verifiers`); without it the test is skipped. The model is a script
behind an OpenAI endpoint. What its episodes are worth is compared with the same ones played here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server_process import ROOT
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Question, Split
from env_server.environment import EnvironmentFactory, SQLEnvironment
from env_server.judging.answers import format_answer
from env_server.settings import EnvSettings, RewardSettings
from env_server.types import SQLAction, SQLObservation
from tests.integration.service import write_data
from trainer.chat.prompts import observation_message

PAGE = ROOT / "docs" / "trl.md"
SCRIPTS = Path(__file__).with_name("verifiers")
PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
TIMEOUT_S = 600.0
"""Far beyond what it takes: it imports much, three times."""
STEP_BUDGET = 4
Script = list[tuple[str, str, str]]
"""Calls of tools: each its name, the name of its argument, and the argument."""


def scripts(questions: list[Question]) -> dict[str, Script]:
    """One question is answered rightly, one wrongly, one until the steps run out, one not at all."""
    right, wrong, long, silent = questions
    return {
        right.question_id: [
            ("describe", "table", "pets"),
            ("query", "sql", right.gold_sql),
            ("answer", "value", format_answer(right.gold.rows)),
            ("describe", "table", "owners"),
        ],
        wrong.question_id: [("query", "sql", "SELECT nothing"), ("answer", "value", "0")],
        long.question_id: [("sample", "table", "pets")] * 9,
        silent.question_id: [("sample", "table", "owners")],
    }


def played_here(environment: SQLEnvironment, question_id: str, script: Script) -> list[SQLObservation]:
    seen = [environment.reset(question_id=question_id)]
    for tool, _, argument in script:
        if not seen[-1].done:
            seen.append(environment.step(SQLAction(action_type=tool, argument=argument)))
    return seen[1:]


def played_there(data: Path, plan: dict[str, Script]) -> dict[str, list[dict[str, Any]]]:
    """With the page's configuration, on this data, in a chat loop that needs no package index."""
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    config = tomllib.loads(shown)["env"]
    config["taskset"] |= {"data": str(data), "split": "all", "step_budget": STEP_BUDGET}
    config["agent"]["harness"]["id"] = "chat_loop"
    path = os.pathsep.join((str(ROOT), str(SCRIPTS)))
    done = subprocess.run(
        [str(PYTHON), str(SCRIPTS / "play.py")],
        input=json.dumps({"config": config, "scripts": plan}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_episodes_are_worth_what_they_are_worth_here(pets: Dataset, tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("verifiers is not installed: `make verifiers`")
    data, settings = write_data(pets, tmp_path), EnvSettings(step_budget=STEP_BUDGET)
    dataset = load_dataset(str(data))
    plan = scripts(list(dataset.select(Split.ALL)))
    there = played_there(data, plan)
    assert set(there) == set(plan)
    with EnvironmentFactory(dataset, settings) as factory:
        for question_id, script in plan.items():
            first, second = there[question_id]
            assert first == second, "two episodes of one question at once do not meet"
            compare(first, played_here(factory.make(), question_id, script))
    assert {of_one[0]["verdict"] for of_one in there.values()} == {"correct", "wrong", "out_of_budget", None}


def compare(there: dict[str, Any], here: list[SQLObservation]) -> None:
    rewards = [seen.reward_components for seen in here if seen.reward_components is not None]
    verdict, done = here[-1].verdict, here[-1].done
    expected = {
        "correctness": float(verdict == "correct"),
        "progress": 0.2 * sum(reward.progress for reward in rewards) / RewardSettings().progress_scale,
        "operational": 0.2 * sum(reward.operational for reward in rewards),
    }
    assert (there["ok"], there["errors"]) == (True, [])
    assert {name: reward for name, (reward, _) in there["rewards"].items()} == pytest.approx(expected)
    assert there["reward"] == pytest.approx(sum(expected.values()))
    assert (there["verdict"], there["metrics"]) == (verdict, {"steps": len(here)})
    assert there["stop"] == ("over" if done else "agent_completed")
    # The last result of an episode that is over goes to no model, so it is not on the trace.
    texts = [observation_message(seen) for seen in here]
    assert there["tools"] == (texts[:-1] if done else texts)
