"""`sqlenv simulate`, from its flags to its JSON line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sqlenv import cli
from trainer.simulation.presets import PRESETS

Captured = pytest.CaptureFixture[str]
QUICK = ("--episodes", "60", "--turns", "2", "--max_concurrency", "16")


def simulate(capsys: Captured, *flags: str) -> dict[str, Any]:
    assert cli.main(["simulate", "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_a_rehearsal_from_flags(capsys: Captured) -> None:
    found = simulate(capsys, *QUICK, "--replicas", "3", "--step_ms", "7", "--environment_ms", "2", "--batch", "20")
    assert (found["episodes"], found["failed"]) == (60, 0)
    assert found["episodes_per_second"] > 0
    deployment = found["deployment"]
    assert (deployment["replicas"], deployment["server"]["step_s"], deployment["batch"]) == (3, 0.007, 20)
    assert deployment["environments"]["call_s"] == 0.002
    assert set(found["used"]) == {"engine", "front end", "environments", "client", "concurrency"}
    assert set(found["turn_s"]) == {"mean", "p50", "p95", "p99", "max"}


def test_a_target_is_sized(capsys: Captured) -> None:
    plan = simulate(capsys, *QUICK, "--target_episodes_per_second", "8")["plan"]
    assert plan["steady_episodes_per_second"] >= plan["target"] == 8
    assert plan["deployment"]["replicas"] >= 1
    assert plan["trainer_ranks"] >= 1


def test_it_says_where_its_numbers_come_from(capsys: Captured) -> None:
    assert cli.main(["simulate", *QUICK, "--preset", "gpu-1.5b"]) == 0
    out = capsys.readouterr().out
    assert "a guess, not measured" in out
    assert "first: " in out
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(name in shown for name in PRESETS)


@pytest.mark.parametrize(
    "flags",
    [
        ["--like", "a", "--measure", "b"],
        ["--env", "local", "--target_episodes_per_second", "3"],
        ["--episodes", "0"],
        ["--step_ms", "-1"],
        ["--request_failure_share", "1"],
        ["--preset", "huge"],
    ],
    ids=" ".join,
)
def test_flags_that_make_no_sense_are_refused(flags: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["simulate", *flags])
    assert stopped.value.code == 2


def test_what_is_no_run_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["simulate", "--like", str(tmp_path)]) == 2
    assert "is not a run" in capsys.readouterr().err
