"""Trials on a real model: refused where they cannot work, and what is finished comes into the table.

The whole of it is `python -m benchmarks.real_model --quick` and then the trials on its folder: minutes, and vLLM.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from benchmarks.real_model_phases import Phase, evaluate
from benchmarks.real_model_recipe import RecipeError, read_recipe
from benchmarks.real_model_trials import TRIALS, Trials, check_unchanged, main, print_trials, read_trials, summary_of
from benchmarks.server_process import ROOT
from tests.integration.training import surroundings_in
from trainer.eval.run_files import RunFolder
from trainer.tiny import BASE_CHECKPOINT
from trainer.training.arguments import parse_train

SHIPPED: Mapping[str, Any] = yaml.safe_load((ROOT / TRIALS).read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def surroundings(generated_cache: Path) -> Iterator[None]:
    with surroundings_in(generated_cache):
        yield


def test_shipped_trials_are_taken_by_the_command(tmp_path: Path) -> None:
    recipe = read_recipe(yaml.safe_load((ROOT / "configs/real-model/recipe.yaml").read_text(encoding="utf-8")))
    trials = read_trials(SHIPPED)
    begin = ["--model_name_or_path", str(BASE_CHECKPOINT), "--output_dir", str(tmp_path / "run"), "--use_cpu", "true"]
    server = ["--use_vllm", "true"]
    for name, keys in trials.flags.items():
        together = {**recipe.grpo[0].keys, **keys, "max_steps": trials.steps}
        assert not keys.items() <= recipe.grpo[0].keys.items() or not keys, f"{name} is the recipe again"
        (tmp_path / "keys.yaml").write_text(yaml.safe_dump(together), encoding="utf-8")
        grpo, _ = parse_train(["--config", str(tmp_path / "keys.yaml"), *begin, *server])
        assert grpo.max_steps == trials.steps
        assert grpo.generation_batch_size == 48, f"{name}: episodes a step"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"waffle": 1}, "no section 'waffle'"),
        ({"steps": 0}, "steps must be"),
        ({"trials": {}}, "trials a name and flags"),
        ({"trials": {"a b": {}}}, "a b is no name"),
        ({"trials": {"a": {"max_steps": 3}}}, "max_steps is what steps says"),
        ({"trials": {"a": {"seed": 3}}}, "seed is the benchmark's to say"),
    ],
)
def test_trials_that_cannot_work_are_refused(change: Mapping[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        read_trials({**SHIPPED, **change})


def test_a_folder_without_a_warm_up_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path)]) == 1
    assert "no warm-up that is finished and evaluated" in capsys.readouterr().err
    assert main(["--out", str(tmp_path), "--only", "waffle"]) == 1
    assert "no trial 'waffle'; there are recipe," in capsys.readouterr().err


def test_a_trial_stays_what_it_was(tmp_path: Path) -> None:
    first = Trials(12, {"kl": {"beta": 0.1}, "lora": {"use_peft": True}})
    check_unchanged(tmp_path, first, ["kl"])
    check_unchanged(tmp_path, Trials(12, {**first.flags, "lora": {"use_peft": False}, "new": {}}), ["new"])
    for changed in (Trials(12, {"kl": {"beta": 0.2}}), Trials(13, first.flags)):
        with pytest.raises(RecipeError, match=r"trials/kl was begun with another \w+; give the trial another name"):
            check_unchanged(tmp_path, changed, [])


def test_what_is_finished_is_paired_with_the_policy_before(tmp_path: Path) -> None:
    flags = ["--data", "synthetic", "--episodes", "6"]
    evaluate(Phase(tmp_path / "before"), ["--policy", "random", *flags])
    evaluate(Phase(tmp_path / "trial" / "after"), ["--policy", "oracle", *flags])
    run = RunFolder.create(tmp_path / "trial" / "grpo" / "out", {})
    with run.metrics_writer() as writer:
        for step in range(1, 9):
            writer.write({"step": step, "step_time": 10.0, "rollout/success_rate": step / 10, "entropy": 1 / step})
    found = summary_of(tmp_path / "trial", tmp_path / "before", {"beta": 0.1})
    assert found["success_rate"] == found["gain"] == 1.0
    assert found["sampled_first"] == pytest.approx(0.15)
    assert found["sampled_last"] == pytest.approx(0.75)
    shown = Console(file=io.StringIO(), width=140)
    print_trials({"kl": found}, shown)
    said = shown.file.getvalue()  # type: ignore[attr-defined]
    for text in ("8 steps", "beta 0.1", "+100.0", "15.0%, 75.0%", "1.00, 0.12", "10"):
        assert text in said
