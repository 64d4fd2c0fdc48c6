"""What a run of stages goes on from: finished stages stay what they were, wherever the folder is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inference.adapters import Place, PolicyNameError, find_policy
from trainer.eval.output_folder import FINAL_STATE
from trainer.policy import SETTINGS_FILE
from trainer.stages.checks import same_precision
from trainer.stages.plan import Kind, Plan, Stage, StageError
from trainer.stages.progress import FinishedStage, clear, read_finished, write_finished

KEYS = {"learning_rate": 0.1, "vllm_server_base_url": "http://there:1", "save_steps": 5}


def plan_of(folder: Path, *, resume: bool = True, **changed: Any) -> Plan:
    keys = {**KEYS, **changed}
    stages = (
        Stage(1, "warm", Kind.WARMUP, {"explore": 1}),
        Stage(2, "easy", Kind.GRPO, keys),
        Stage(3, "all", Kind.GRPO, {}),
    )
    return Plan(folder, stages, resume)


def finished_of(plan: Plan, count: int) -> list[FinishedStage]:
    return [FinishedStage(stage.name, stage.kind.value, stage.settings) for stage in plan.stages[:count]]


def test_what_is_finished_is_read_back_wherever_the_folder_is(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "run")
    finished = finished_of(plan, 2)
    write_finished(plan, finished)
    assert read_finished(plan) == finished
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    assert read_finished(plan_of(moved)) == finished
    assert str(tmp_path) not in (moved / "stages.json").read_text()


@pytest.mark.parametrize(
    "changed",
    [
        {"vllm_server_base_url": "http://here:2"},
        {"env_server": "ws://here"},
        {"save_steps": 9},
        {"max_concurrency": 8},
    ],
)
def test_the_next_machine_may_be_another_one(tmp_path: Path, changed: dict[str, Any]) -> None:
    plan = plan_of(tmp_path)
    write_finished(plan, finished_of(plan, 3))
    assert len(read_finished(plan_of(tmp_path, **changed))) == 3


def test_the_folder_is_the_policy_of_its_last_stage(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    *_, last = plan.stages
    model = plan.folder(last) / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    write_finished(plan, finished_of(plan, 2))
    with pytest.raises(PolicyNameError, match="2 of 3 stages are finished"):
        find_policy(str(tmp_path))
    write_finished(plan, finished_of(plan, 3))
    assert find_policy(str(tmp_path)).place == Place(str(model))


def test_a_stage_that_its_folder_says_is_finished_is(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    write_finished(plan, finished_of(plan, 1))
    model = plan.folder(plan.stages[1]) / "model"
    model.mkdir(parents=True)
    (model.parent / FINAL_STATE).write_text('{"global_step": 3, "max_steps": 3}')
    assert read_finished(plan) == finished_of(plan, 1), "its policy is not there"
    (model / "config.json").write_text("{}")
    assert read_finished(plan) == finished_of(plan, 2)


def test_what_is_learned_may_not_change(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    write_finished(plan, finished_of(plan, 2))
    with pytest.raises(StageError, match=r"stage 2 of 3 \(easy\) is finished, with learning_rate 0.1, .* to have 0.2"):
        read_finished(plan_of(tmp_path, learning_rate=0.2))
    with pytest.raises(StageError, match=r"with beta left out, and is now to have 1"):
        read_finished(plan_of(tmp_path, beta=1))


@pytest.mark.parametrize("text", ["{", "[]", '{"stages": []}', '{"finished": [{"name": 1}]}'])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "stages.json").write_text(text)
    with pytest.raises(StageError, match=r"stages\.json cannot be read"):
        read_finished(plan_of(tmp_path))


def test_what_a_stage_has_left_is_removed_unless_it_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    first, second, _ = plan.stages
    for stage, file in ((first, "half"), (second, SETTINGS_FILE)):
        (plan.folder(stage) / "checkpoint-1").mkdir(parents=True)
        (plan.folder(stage) / "checkpoint-1" / file).write_text("{}")
        clear(plan, stage)
    assert not plan.folder(first).exists()
    assert plan.folder(second).is_dir()


def test_a_stage_leaves_the_precision_of_the_process_alone() -> None:
    backends: Any = torch.backends
    before = backends.fp32_precision
    with same_precision():
        backends.fp32_precision = "tf32"
    assert backends.fp32_precision == before
