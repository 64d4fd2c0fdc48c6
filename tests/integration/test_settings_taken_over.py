"""A warm-up, GRPO on what came of it, and an evaluation: one task in all three, which is said once, to the first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from env_server.dataset import Dataset
from env_server.types import AnswerMode
from sqlenv import cli
from tests.integration.service import write_data
from tests.integration.training import surroundings_in
from trainer.config import ActionFormat
from trainer.eval.run_files import RunFolder
from trainer.policy import SETTINGS_FILE, TRAIN_NAMES, WARMUP_NAMES, PlaySettings, read_play
from trainer.tiny import BASE_CHECKPOINT

QUICK = [
    *("--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false"),
    *("--report_to", "none", "--max_steps", "1", "--gradient_accumulation_steps", "1", "--save_strategy", "no"),
]
PROMPT = "Explore the database, then answer with a query."


@pytest.fixture(autouse=True)
def surroundings(generated_cache: Path) -> Iterator[None]:
    with surroundings_in(generated_cache):
        yield


def test_a_warm_up_training_and_an_evaluation_play_alike(
    pets: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, warm, run, out = (tmp_path / name for name in ("prompt.txt", "warm", "run", "episodes.jsonl"))
    (tmp_path / "pets").mkdir()
    # Test databases are made of every question that is trained on.
    data = write_data(pets, tmp_path / "pets")
    prompt.write_text(PROMPT, encoding="utf-8")
    task = ["--data", str(data), "--answer_mode", "sql", "--step_budget", "5", "--system_prompt", str(prompt)]
    start = ["warmup", "--model_name_or_path", str(BASE_CHECKPOINT), "--output_dir", str(warm)]
    assert cli.main([*start, *QUICK, *task, "--max_episodes", "8", "--chat_template_kwargs", '{"level": 1}']) == 0
    prompt.unlink()  # its text is what the policy was taught, wherever the file has gone
    capsys.readouterr()

    # The lengths are what one step costs here; a warm-up says nothing of them.
    lengths = ["--max_turn_length", "16", "--max_completion_length", "160"]
    few = ["--eval_episodes", "2", "--per_device_train_batch_size", "4", "--num_generations", "4"]
    begin = ["train", "--model_name_or_path", str(warm), "--output_dir", str(run)]
    assert cli.main([*begin, *QUICK, *lengths, *few]) == 0
    assert f"taken over from {warm}: " in capsys.readouterr().err

    assert cli.main(["evaluate", "--policy", str(run), "--episodes_out", str(out), "--json"]) == 0
    said = capsys.readouterr()
    assert f"taken over from {run}: " in said.err

    warmed, trained = (read_play(folder / SETTINGS_FILE).settings for folder in (warm / "model", run / "model"))
    evaluated = json.loads(out.with_suffix(".evaluation.json").read_text(encoding="utf-8"))["settings"]
    expected = {
        **{name: getattr(PlaySettings(), name) for name in WARMUP_NAMES},
        "data": str(data),
        "answer_mode": AnswerMode.SQL,
        "action_format": ActionFormat.TEXT,
        "step_budget": 5,
        "custom_system_prompt": PROMPT,
        "chat_template_kwargs": {"level": 1},
    }
    for name, value in expected.items():
        assert getattr(warmed, name) == getattr(trained, name) == evaluated[name] == value
    for name in TRAIN_NAMES:
        assert getattr(trained, name) == evaluated[name]
    assert json.loads(said.out)["answer_mode"] == "sql"
    assert max(len(row.record.turns) for row in RunFolder.open(run).episodes()) <= 5
