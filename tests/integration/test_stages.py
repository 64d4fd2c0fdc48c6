"""Several stages in one run, for real: killed and stopped in each of them, resumed, ended by success, on two ranks.

Each stage is a few steps of the tiny policy on generated data. A run that was broken off is compared with the one that
was left alone, bit by bit.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Trainer

from sqlenv import cli
from tests.fork_server import ForkServer
from tests.integration.test_ranks import DEADLINE_S, FORKED
from tests.integration.test_training import comparable
from tests.integration.training import surroundings_in
from trainer.eval.run_files import RunFolder
from trainer.policy import SETTINGS_FILE
from trainer.stages import read_stages
from trainer.tiny import BASE_CHECKPOINT

SHARED: dict[str, Any] = {
    "data": "synthetic",
    "model_name_or_path": str(BASE_CHECKPOINT),
    "seed": 3,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "steps",
    "save_steps": 1,
    "gradient_accumulation_steps": 1,
    "eval_episodes": 4,
    "step_budget": 6,
    "max_turn_length": 16,
    "max_completion_length": 192,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "max_steps": 3,
}
STAGES: list[dict[str, Any]] = [
    {"kind": "warmup", "max_episodes": 16, "max_steps": 4, "learning_rate": 1e-4},
    {"kind": "grpo", "name": "easy", "difficulty": "easy"},
    {"kind": "grpo", "name": "all"},
]
FOLDERS = ("1-warmup", "2-easy", "3-all")

Interrupt = Callable[[str, int], None]

KILLED = """
import os, signal, sys
from pathlib import Path
from transformers import Trainer
from sqlenv import cli

name, checkpoint, *command = sys.argv[1:]
step = Trainer.training_step

def killed(self, *args, **kwargs):
    folder = Path(self.args.output_dir)
    if folder.name == name and list(folder.glob("checkpoint-*/" + checkpoint)):
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)

Trainer.training_step = killed
sys.exit(cli.main(command))
"""
"""A run that is killed in the step after the first checkpoint of a stage."""

SAVES_LAST = """
import os, sys, time
from pathlib import Path
from sqlenv import cli
from trainer.warmup import WarmupTrainer

done, *command = sys.argv[1:]
save = WarmupTrainer.save_model

def saved(self, folder=None, *args, **kwargs):
    if folder == self.args.output_dir:
        if os.environ["RANK"] != "0":
            Path(done).touch()
        while not Path(done).exists():
            time.sleep(0.01)
    save(self, folder, *args, **kwargs)

WarmupTrainer.save_model = saved
sys.exit(cli.main(command))
"""
"""Two ranks of which the main one saves a stage's policy only when the other one is at that point, too."""


@pytest.fixture(scope="module", autouse=True)
def surroundings(generated_cache: Path) -> Iterator[None]:
    with surroundings_in(generated_cache):
        yield


def config(folder: Path, stages: list[dict[str, Any]] | None = None, **shared: Any) -> list[str]:
    """Write the file, and return the command that runs it into a folder beside it."""
    path = folder / "stages.yaml"
    path.write_text(yaml.safe_dump({**SHARED, **shared, "stages": stages or STAGES}), encoding="utf-8")
    return ["train", "--config", str(path), "--output_dir", str(folder / "run")]


def finished(run: Path) -> list[str]:
    return [stage["name"] for stage in json.loads((run / "stages.json").read_bytes())["finished"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three stages in one go."""
    folder = tmp_path_factory.mktemp("whole")
    assert cli.main(config(folder)) == 0
    return folder / "run"


def weights(stage: Path, name: str = "model") -> bytes:
    (file,) = filter(Path.is_file, (stage / f"{name}.safetensors", stage / "model" / f"{name}.safetensors"))
    return file.read_bytes()


def logged(stage: Path) -> list[dict[str, Any]]:
    """What was measured in each step, times apart."""
    if stage.name != FOLDERS[0]:
        return comparable(RunFolder.open(stage))
    last = max(stage.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    history: list[dict[str, Any]] = json.loads((last / "trainer_state.json").read_bytes())["log_history"]
    return history


def assert_the_same(run: Path, whole: Path) -> None:
    """All stages are those of the run that was left alone: weights, metrics, episodes, evaluations."""
    assert finished(run) == finished(whole)
    for name in FOLDERS:
        assert weights(run / name) == weights(whole / name), name
        assert logged(run / name) == logged(whole / name), name
        if name != FOLDERS[0]:
            stage, other = RunFolder.open(run / name), RunFolder.open(whole / name)
            assert stage.episodes_path.read_bytes() == other.episodes_path.read_bytes()
            for label in ("before", "after"):
                assert stage.evaluation_episodes(label) == other.evaluation_episodes(label)


def test_each_stage_goes_on_from_the_one_before(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert finished(whole) == ["warmup", "easy", "all"]
    assert (
        len({weights(whole / name) for name in FOLDERS} | {(BASE_CHECKPOINT / "model.safetensors").read_bytes()}) == 4
    )
    easy, everything = (RunFolder.open(whole / name) for name in FOLDERS[1:])
    assert easy.config()["model"]["model_name_or_path"] == str(whole / "1-warmup")
    assert everything.config()["model"]["model_name_or_path"] == str(whole / "2-easy")
    assert everything.evaluation_episodes("before") == easy.evaluation_episodes("after")
    assert {row.record.hardness for row in easy.episodes()} == {"easy"}
    assert {row.record.hardness for row in everything.episodes()} > {"easy"}
    assert all((whole / name / "report.html").is_file() for name in FOLDERS[1:])


def test_a_run_that_is_killed_in_each_stage_ends_as_if_it_had_not_been(
    whole: Path, tmp_path: Path, forks: ForkServer, capsys: pytest.CaptureFixture[str]
) -> None:
    command = config(tmp_path)
    for place, name in enumerate(FOLDERS):
        done = forks.run([sys.executable, "-c", KILLED, name, SETTINGS_FILE, *command], timeout=DEADLINE_S)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert len(finished(tmp_path / "run")) == place
        command = [*config(tmp_path), "--resume_from_checkpoint", "true"]
    assert cli.main(command) == 0
    assert "stage 3 of 3 (all): sqlenv train, resumed from checkpoint-1" in capsys.readouterr().out
    assert_the_same(tmp_path / "run", whole)


def test_a_run_that_is_killed_after_its_last_step_takes_no_further_one(whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    progress = json.loads((run / "stages.json").read_bytes())
    del progress["finished"][-1]
    (run / "stages.json").write_text(json.dumps(progress))
    shutil.rmtree(run / "3-all" / "model")
    for file in ("report.html", "evaluations/after.json"):
        (run / "3-all" / file).unlink()
    assert cli.main([*config(tmp_path), "--resume_from_checkpoint", "true"]) == 0
    assert_the_same(run, whole)


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupt]:
    """Have a run in this process be sent SIGTERM in a step of a stage."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a late one must not end the tests
    training_step = Trainer.training_step

    def interrupt(folder: str, step: int) -> None:
        def told(self: Trainer, *args: Any, **kwargs: Any) -> Any:
            if Path(self.args.output_dir).name == folder and self.state.global_step == step - 1:
                signal.raise_signal(signal.SIGTERM)
            return training_step(self, *args, **kwargs)

        monkeypatch.setattr(Trainer, "training_step", told)

    yield interrupt
    signal.signal(signal.SIGTERM, before)


def test_a_run_that_is_stopped_in_a_stage_saves_its_step_and_goes_on(
    whole: Path, tmp_path: Path, interrupt: Interrupt, capsys: pytest.CaptureFixture[str]
) -> None:
    command = config(tmp_path, save_strategy="no")
    for name, step, title in (("1-warmup", 2, "stage 1 of 3 (warmup)"), ("3-all", 1, "stage 3 of 3 (all)")):
        interrupt(name, step)
        assert cli.main(command) == 0
        *_, saved, last = capsys.readouterr().out.splitlines()
        assert saved.startswith(f"{title}: stopped after step {step} of ")
        go_on = shlex.split(last)
        assert go_on == ["sqlenv", *config(tmp_path, save_strategy="no"), "--resume_from_checkpoint", "true"]
        assert [path.name for path in (tmp_path / "run" / name).glob("checkpoint-*")] == [f"checkpoint-{step}"]
        command = go_on[1:]
    interrupt("none", 0)
    assert cli.main(command) == 0
    assert finished(tmp_path / "run") == finished(whole)
    assert [weights(tmp_path / "run" / name) for name in FOLDERS] == [weights(whole / name) for name in FOLDERS]
    assert "the stages of" in capsys.readouterr().out
    assert cli.main(command) == 0, "there is nothing left to do"


def test_where_nothing_is_left_the_main_rank_alone_speaks(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert cli.main([*config(tmp_path), "--resume_from_checkpoint", "true"]) == 0
        assert ("the stages of" in capsys.readouterr().out) is (rank == "0")


def test_what_is_finished_stays_what_it_was(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = [*config(tmp_path), "--output_dir", str(whole)]
    resumed = [*again, "--resume_from_checkpoint", "true"]
    for command, complaint in (
        (again, f"{whole} holds a policy"),
        ([*resumed, "--learning_rate", "0.5"], "is finished, with learning_rate 0.0001, and is now to have 0.5"),
    ):
        assert cli.main(command) == 2
        assert complaint in capsys.readouterr().err
    (tmp_path / "run" / "2-easy").mkdir(parents=True)
    assert cli.main(config(tmp_path)) == 2
    assert "2-easy exists, and " in capsys.readouterr().err


def test_all_stages_are_looked_at_before_the_first_one_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages: list[dict[str, Any]] = [
        {"kind": "warmup", "use_peft": True, "lora_r": 4, "data": "/no/such/data"},
        {"kind": "grpo", "max_steps": "many"},
        {"kind": "grpo", "name": "narrow", "lora_r": 8},
        {"kind": "grpo", "name": "wide", "eval_strategy": "steps", "eval_episodes": 0},
        {"kind": "grpo", "name": "large", "per_device_train_batch_size": 99_999 * 4},
    ]
    assert cli.main(config(tmp_path, stages)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for complaint in (
        "stage 1 of 5 (warmup): '/no/such/data' names no data set and no folder",
        "stage 2 of 5 (grpo): --max_steps: invalid int value: 'many'",
        "stage 3 of 5 (narrow): --lora_r 8: the adapter",
        "stage 4 of 5 (wide): --eval_strategy steps evaluates as training goes on, and --eval_episodes 0",
        "stage 5 of 5 (large): one step plays 99999 questions, and the data set has 2871 for training",
    ):
        assert complaint in line
    assert not (tmp_path / "run").exists()


def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = {"use_vllm": True, "vllm_server_base_url": "http://127.0.0.1:1", "vllm_server_timeout": 0.5}
    stages = [{"kind": "grpo", "max_steps": 1, "eval_episodes": 0}]
    assert cli.main(config(tmp_path, stages, **nowhere)) == 2
    assert "stage 1 of 1 (grpo): " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert cli.main(config(tmp_path, stages)) == 0, "the same command, mended"


def test_a_dry_run_plans_each_stage_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*config(tmp_path), "--dry_run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("preflight OK") == 2
    assert not (tmp_path / "run").exists()


def test_a_stage_is_planned_as_the_policy_of_the_one_before_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [STAGES[0] | {"answer_mode": "sql"}, STAGES[1], STAGES[2] | {"answer_mode": "value"}]
    assert cli.main([*config(tmp_path, stages), "--dry_run"]) == 0
    said = capsys.readouterr()
    modes = [line.split(" mode:")[0].split()[-1] for line in said.out.splitlines() if " mode:" in line]
    assert modes == ["sql", "value"]
    assert said.err.count("taken over from") == 2
    assert "answer_mode value (it had sql)" in said.err


def test_a_stage_is_the_command_that_it_stands_for(tmp_path: Path) -> None:
    adapter = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"], "max_steps": 1}
    stages: list[dict[str, Any]] = [STAGES[0] | adapter, {"kind": "grpo", "seed": 5, "max_steps": 1}]
    assert cli.main(config(tmp_path, stages)) == 0
    start = str(BASE_CHECKPOINT)
    for stage in read_stages({**SHARED, "stages": stages}, [], tmp_path / "run"):
        alone = tmp_path / stage.folder.name
        path = tmp_path / "alone.yaml"
        keys = {**stage.keys, "model_name_or_path": start, "output_dir": str(alone)}
        path.write_text(yaml.safe_dump(keys), encoding="utf-8")
        assert cli.main([stage.command.split()[1], "--config", str(path)]) == 0
        start = str(alone)
        made, own = (weights(folder, "adapter_model") for folder in (stage.folder, alone))
        assert made == own


def test_two_ranks_go_from_stage_to_stage_together(tmp_path: Path, forks: ForkServer) -> None:
    """One of them with a reward function of one's own."""
    (tmp_path / "my.py").write_text("def brevity(episode):\n    return 1 / len(episode.turns)\n", encoding="utf-8")
    own = {"reward_functions": f"{tmp_path}/my.py:brevity"}
    stages: list[dict[str, Any]] = [{**STAGES[0], "max_steps": 2}, {**STAGES[1], **own, "max_steps": 1}]
    script = tmp_path / "saves_last.py"
    script.write_text(SAVES_LAST, encoding="utf-8")
    launched = forks.run([*FORKED, str(script), str(tmp_path / "done"), *config(tmp_path, stages)], timeout=DEADLINE_S)
    assert launched.returncode == 0, launched.stderr
    assert launched.stdout.count("stage 2 of 2 (easy): sqlenv train") == 1
    assert finished(tmp_path / "run") == ["warmup", "easy"]
    assert 0 < RunFolder.open(tmp_path / "run" / "2-easy").metrics()[-1]["rewards/reward_brevity/mean"] <= 1
