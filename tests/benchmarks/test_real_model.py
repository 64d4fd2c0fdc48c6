"""The benchmark on a real model: its recipes are refused where they cannot work, and a phase is run once.

The whole of it, killed and resumed, is `python -m benchmarks.real_model --quick`: minutes, and vLLM.
"""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from benchmarks.own_databases import write_folders
from benchmarks.real_model import main, same_as_before
from benchmarks.real_model_phases import (
    Finished,
    Phase,
    PhaseError,
    evaluate,
    minutes_learned,
    took_all_steps,
    train,
    trained_minutes,
)
from benchmarks.real_model_recipe import RecipeError, on_data, read_recipe, words
from benchmarks.real_model_table import gather, print_tables
from benchmarks.server_process import ROOT
from env_server.data.loading import load_dataset
from env_server.dataset import Split
from tests.integration.training import surroundings_in
from trainer.eval.run_files import RunFolder
from trainer.policy import SETTINGS_FILE
from trainer.tiny import BASE_CHECKPOINT
from trainer.training.arguments import parse_train, parse_warmup
from trainer.warmup import MINUTES_FILE

RECIPES = [ROOT / "configs" / "real-model" / name for name in ("recipe.yaml", "own-databases.yaml", "quick.yaml")]
QUICK: Mapping[str, Any] = yaml.safe_load((ROOT / "configs/real-model/quick.yaml").read_text(encoding="utf-8"))
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def surroundings(generated_cache: Path) -> Iterator[None]:
    with surroundings_in(generated_cache):
        yield


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_is_taken_by_the_commands(path: Path, tmp_path: Path) -> None:
    recipe = read_recipe(yaml.safe_load(path.read_text(encoding="utf-8")))
    begin = ["--model_name_or_path", str(BASE_CHECKPOINT), "--output_dir", str(tmp_path / "run"), "--use_cpu", "true"]

    def config(keys: Mapping[str, Any]) -> list[str]:
        (tmp_path / "keys.yaml").write_text(yaml.safe_dump(dict(keys)), encoding="utf-8")
        return ["--config", str(tmp_path / "keys.yaml"), *begin]

    for keys in filter(None, (recipe.warmup, recipe.replay, recipe.control)):
        assert parse_warmup(config({**keys, "max_episodes": 4}))[0].save_strategy == "steps"
    for stage in recipe.grpo:
        trained, _ = parse_train(config(stage.keys))
        assert trained.eval_episodes == 0
        assert trained.save_strategy == "steps"
    # Of the epochs that minutes end, a share is never over.
    assert recipe.control.get("warmup_steps", 0.05) == int(recipe.control.get("warmup_steps", 0.05))


def test_ones_own_databases_are_those_with_the_most_questions_and_no_query_is_on_both_sides(tmp_path: Path) -> None:
    dataset = load_dataset("synthetic")
    own, other = (load_dataset(folder) for folder in write_folders(dataset, 3, tmp_path))
    counts = Counter(question.db_id for question in dataset.questions)
    assert len(own.databases) == 3
    assert min(counts[db_id] for db_id in own.databases) >= max(counts[db_id] for db_id in other.databases)
    assert {*own.databases, *other.databases} == set(dataset.databases)
    sides = [{question.gold_sql.casefold() for question in own.select(split)} for split in (Split.TRAIN, Split.EVAL)]
    assert not sides[0] & sides[1]
    assert 0.15 < len(own.select(Split.EVAL)) / len(own.questions) <= 0.25
    assert not other.select(Split.EVAL)
    assert {q.question_id for q in (*own.questions, *other.questions)} == {q.question_id for q in dataset.questions}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"waffle": {}}, "no section 'waffle'"),
        ({"sampling": None}, "second round needs both"),
        ({"evaluation": None}, "evaluation is missing"),
        ({"warmup": {"output_dir": "x"}}, "output_dir is the benchmark's to say"),
        ({"evaluation": {"split": "train"}}, "split is the benchmark's to say"),
        ({"grpo": {"stages": []}}, "whose sum is 1"),
        ({"grpo": {"stages": [{"name": "a", "share": 0.5}]}}, "whose sum is 1"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(change: Mapping[str, Any], said: str) -> None:
    written = {name: value for name, value in {**QUICK, **change}.items() if value is not None}
    with pytest.raises(RecipeError, match=said):
        read_recipe(written)


def test_a_section_beside_another_adds_to_it() -> None:
    recipe = read_recipe(QUICK)
    assert recipe.control == {**QUICK["warmup"], **QUICK["control"]}
    assert recipe.replay == {**QUICK["warmup"], "max_episodes": 0}
    assert [stage.keys.get("difficulty") for stage in recipe.grpo] == ["easy,medium", None]
    assert words({"samples": 2, "json": True, "trust": False, "kwargs": {"a": False}, "name": "x"}) == [
        *("--samples", "2", "--json", "--kwargs", '{"a": false}', "--name", "x")
    ]


@pytest.mark.parametrize(
    ("keys", "data"),
    [({}, "spider:x"), ({"data": "synthetic"}, "synthetic"), ({"data": "{data},synthetic:3"}, "spider:x,synthetic:3")],
)
def test_a_section_may_say_what_is_learned_from(keys: Mapping[str, Any], data: str) -> None:
    assert on_data({**keys, "seed": 1}, "spider:x") == {"seed": 1, "data": data}


def test_a_folder_goes_on_with_what_it_was_begun_with(tmp_path: Path) -> None:
    same_as_before(tmp_path, {"recipe": {"a": (1, 2)}, "seed": 1})
    same_as_before(tmp_path, {"recipe": {"a": (1, 2)}, "seed": 1})
    with pytest.raises(RecipeError, match="begun with another seed"):
        same_as_before(tmp_path, {"recipe": {"a": (1, 2)}, "seed": 2})


def test_evaluations_are_played_once_and_come_into_the_tables(tmp_path: Path) -> None:
    costs: dict[str, Finished] = {}
    flags = ["--data", "synthetic", "--episodes", "6"]
    for name in ("random", "oracle"):
        costs[name] = evaluate(Phase(tmp_path / name), ["--policy", name, *flags])
        assert evaluate(Phase(tmp_path / name), ["--no_such_flag"]) == costs[name], "a finished phase is not run"
    result = gather(tmp_path, costs)
    assert result["policies"]["oracle"]["success_rate"] == 1.0
    assert sum(phase["share"] for phase in result["phases"].values()) == pytest.approx(1.0)
    shown = Console(file=io.StringIO(), width=120)
    print_tables(result, shown)
    said = shown.file.getvalue()  # type: ignore[attr-defined]
    assert "100.0%" in said
    assert "random play" in said


def test_a_command_that_fails_is_told_with_what_it_said(tmp_path: Path) -> None:
    phase = Phase(tmp_path / "zero_shot")
    with pytest.raises(PhaseError, match=r"(?s)zero_shot: sqlenv evaluate ended with status .*nowhere"):
        evaluate(phase, ["--policy", str(tmp_path / "nowhere"), "--data", "synthetic"])
    assert phase.finished is None


def test_steps_that_are_taken_again_count_once(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {})
    with run.metrics_writer() as writer:
        for step in (1, 2, 3):
            writer.write({"step": step, "step_time": 60.0})
    assert trained_minutes(run.path) == 3.0


def test_the_minutes_of_a_warm_up_are_those_that_it_has_had(tmp_path: Path) -> None:
    assert minutes_learned(None) == minutes_learned(tmp_path) == 0.0
    (tmp_path / MINUTES_FILE).write_text('{"minutes": 12.5}')
    assert minutes_learned(tmp_path) == 12.5
    for step, over in ((3, False), (4, True)):
        (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": step, "max_steps": 4}))
        assert took_all_steps(tmp_path) is over


class AskedAtOnce(Phase):
    """Asks at the beginning of a command whether it has done enough, and runs none."""

    enough = False

    def run(self, words: Sequence[str], enough: Callable[[], bool] = lambda: False) -> None:
        self.enough = enough()


def test_minutes_that_were_lost_do_not_end_a_run_that_goes_on(tmp_path: Path) -> None:
    phase = AskedAtOnce(tmp_path / "grpo")
    run = RunFolder.create(phase.out, {})
    with run.metrics_writer() as writer:
        for step in (1, 2, 3):
            writer.write({"step": step, "step_time": 60.0})
    (phase.out / "checkpoint-2").mkdir()
    (phase.out / "checkpoint-2" / SETTINGS_FILE).write_text("{}")
    with pytest.raises(PhaseError, match="the run was stopped"):
        train(phase, {}, [], lambda: "http://127.0.0.1:1", 2.5)
    assert not phase.enough
    assert train(phase, {}, [], lambda: "http://127.0.0.1:1", 2.0).steps == 2, "the checkpoint has all its minutes"


@pytest.mark.parametrize("flag", ["--questions", "--grpo_minutes"])
def test_a_number_of_nothing_is_refused(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["real_model", "--out", str(tmp_path / "out"), "--quick", flag, "0"])
    with pytest.raises(SystemExit):
        main()
    assert f"{flag} must be positive" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_a_phase_started_ends_with_the_process(tmp_path: Path) -> None:
    script = (
        "import signal, subprocess, sys\n"
        "from benchmarks.real_model_phases import with_parent\n"
        "child = subprocess.Popen(['sleep', '1000'], preexec_fn=with_parent(signal.SIGKILL))\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        child = os.pidfd_open(int(process.stdout.readline()))
    try:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert select.select([child], [], [], WAIT_S)[0], "the child is still there"
    finally:
        os.close(child)
