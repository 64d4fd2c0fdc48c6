"""From a run to what is done with its policy: evaluated as it was trained, exported, pushed. One real run, short."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import Qwen3ForCausalLM

import sqlenv
from env_server.data.loading import load_dataset
from tests.integration.training import save_policy, surroundings_in
from trainer.play_settings import SETTINGS_FILE
from trainer.run_files import RunFolder

FLAGS = [
    *("--data", "synthetic", "--eval_episodes", "8", "--step_budget", "6", "--max_turn_length", "16"),
    *("--max_completion_length", "192", "--max_context_length", "500", "--max_steps", "2"),
    *("--gradient_accumulation_steps", "1"),
    *("--per_device_train_batch_size", "4", "--num_generations", "4", "--learning_rate", "1e-3"),
    *("--lr_scheduler_type", "constant", "--save_strategy", "steps", "--save_steps", "1", "--report_to", "none"),
    *("--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false", "--torch_threads", "1"),
    *("--seed", "3", "--chat_template_kwargs", '{"opening": "DESCRIBE "}'),
]


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with surroundings_in(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="module")
def run(
    surroundings: None, random_policy: Callable[..., Qwen3ForCausalLM], tmp_path_factory: pytest.TempPathFactory
) -> RunFolder:
    """A run whose chat template has a variable, and a policy that cannot do without it."""
    texts = [question.text for question in load_dataset("synthetic").questions]
    policy = save_policy(random_policy, texts, tmp_path_factory.mktemp("policy"))
    template = policy / "chat_template.jinja"
    template.write_text(template.read_text().replace("<act>{% endif %}", "<act>{{ opening }}{% endif %}"))
    target = tmp_path_factory.mktemp("runs") / "run"
    assert sqlenv.main(["train", "--model_name_or_path", str(policy), "--output_dir", str(target), *FLAGS]) == 0
    return RunFolder.open(target)


def evaluate(policy: Path, out: Path, *flags: str) -> list[dict[str, object]]:
    """Return the episodes of `sqlenv evaluate`."""
    assert sqlenv.main(["evaluate", "--policy", str(policy), "--episodes_out", str(out), *flags]) == 0
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def after(run: RunFolder) -> list[dict[str, object]]:
    lines = (run.evaluations_path / "after.episodes.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("part", ["", "model"])
def test_an_evaluation_is_the_runs_own(
    part: str, run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(run.path / part, tmp_path / "e.jsonl") == after(run)
    said = capsys.readouterr().err
    assert "is played as it was trained" in said
    assert "the run had" not in said


def test_a_flag_that_differs_is_said_and_obeyed(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--step_budget", "3", "--episodes", "4", "--chat_template_kwargs", '{"opening": ""}')
    played = evaluate(run.path, tmp_path / "e.jsonl", *flags)
    said = capsys.readouterr().err.splitlines()
    assert "--step_budget 3, the run had 6" in said
    assert "--episodes 4, the run had 8" in said
    assert '--chat_template_kwargs {"opening": ""}, the run had {"opening": "DESCRIBE "}' in said
    assert len(played) == 4
    assert played != after(run)[:4]


def test_a_checkpoint_is_played_as_it_was_trained_too(run: RunFolder, tmp_path: Path) -> None:
    last = run.path / "checkpoint-2"
    assert (last / SETTINGS_FILE).read_bytes() == (run.path / "model" / SETTINGS_FILE).read_bytes()
    assert evaluate(last, tmp_path / "e.jsonl") == after(run)
