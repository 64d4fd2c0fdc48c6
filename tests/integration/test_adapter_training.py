"""GRPO that starts from an adapter: continued, and resumed, a few steps long."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from env_server.data.loading import load_dataset
from inference.adapters import ModelRef, find_policy
from sqlenv import cli
from tests.integration.training import save_policy, surroundings_in
from trainer.eval.run_files import RunFolder
from trainer.models import load_policy

FLAGS = [
    *("--data", "synthetic", "--eval_episodes", "0", "--step_budget", "4", "--max_turn_length", "12"),
    *("--max_completion_length", "96", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1"),
    *("--num_generations", "4", "--learning_rate", "1e-2", "--lr_scheduler_type", "constant", "--logging_steps", "1"),
    *("--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false"),
    *("--report_to", "none", "--seed", "3", "--beta", "0.1", "--reward_weights", "1", "1", "1", "1"),
]
EACH_STEP = ("--save_strategy", "steps", "--save_steps", "1")
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module", autouse=True)
def surroundings(generated_cache: Path) -> Iterator[None]:
    with surroundings_in(generated_cache):
        yield


@pytest.fixture(scope="module")
def base(
    surroundings: None, random_policy: Callable[..., Qwen3ForCausalLM], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    texts = [question.text for question in load_dataset("synthetic").questions]
    return save_policy(random_policy, texts, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that changes the base's logprobs."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3, generator=generator)
    folder = tmp_path_factory.mktemp("adapter")
    adapted.save_pretrained(folder)
    return folder


def train(policy: Path, target: Path, *flags: str) -> RunFolder:
    assert cli.main(["train", "--model_name_or_path", str(policy), "--output_dir", str(target), *FLAGS, *flags]) == 0
    return RunFolder.open(target)


@pytest.fixture(scope="module")
def continued(adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Two steps on the adapter, with a checkpoint after each."""
    return train(adapter, tmp_path_factory.mktemp("runs") / "continued", "--max_steps", "2", *EACH_STEP)


def test_the_adapter_goes_on_being_trained_as_it_was_made(continued: RunFolder, adapter: Path, base: Path) -> None:
    before, after = load_file(adapter / WEIGHTS), load_file(continued.path / "model" / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    config = json.loads((continued.path / "model" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(base))
    assert continued.config()["model"]["lora_r"] == 4
    model, tokenizer = load_policy(str(continued.path))
    assert isinstance(model, PeftModel)
    assert tokenizer.chat_template


def test_the_kl_term_is_measured_from_the_adapter_not_from_its_base(continued: RunFolder) -> None:
    first, second = continued.metrics()
    assert first["kl"] < 1e-7 < second["kl"], "at first, nothing has been learned"


def test_a_resumed_run_goes_on_from_its_checkpoint(continued: RunFolder, adapter: Path, tmp_path: Path) -> None:
    assert not (continued.path / "checkpoint-1" / "ref").exists()
    stopped = shutil.copytree(continued.path, tmp_path / "stopped")
    for left in ("checkpoint-2", "model"):
        shutil.rmtree(stopped / left)
    again = train(adapter, stopped, "--max_steps", "2", *EACH_STEP, "--resume_from_checkpoint", "true")
    ours, theirs = load_file(again.path / "model" / WEIGHTS), load_file(continued.path / "model" / WEIGHTS)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert again.metrics()[-1]["kl"] == pytest.approx(continued.metrics()[-1]["kl"], rel=1e-4)


def test_a_finished_run_is_resumed_for_more_steps_alone(
    continued: RunFolder, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(continued.path, tmp_path / "run"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    resume = [*("train", "--model_name_or_path", str(adapter), "--output_dir", str(run)), *FLAGS, *EACH_STEP]
    for checkpoint in ("true", str(run / "checkpoint-1")):
        for steps in (["--max_steps", "2"], ["--max_steps", "1"], ["--num_train_epochs", "0.001"], []):
            capsys.readouterr()
            assert cli.main([*resume, *steps, "--resume_from_checkpoint", checkpoint]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert "--max_steps" in line
            assert "--output_dir" in line
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert cli.main([*resume, "--max_steps", "3", "--resume_from_checkpoint", "true"]) == 0
    assert [row["step"] for row in RunFolder.open(run).metrics()] == [1, 2, 3]
    assert cli.main([*resume, "--max_steps", "3", "--resume_from_checkpoint", "true"]) == 2


def test_without_a_folder_the_run_leaves_its_policy_alone(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    warm = Path(shutil.copytree(adapter, Path("runs", "warm")))
    before = {path: path.read_bytes() for path in warm.rglob("*")}
    assert cli.main(["train", "--model_name_or_path", "runs/warm", *FLAGS, "--max_steps", "1"]) == 0
    assert {path: path.read_bytes() for path in warm.rglob("*")} == before
    (run,) = (path for path in Path("runs").iterdir() if path != warm)
    assert find_policy(str(run)).ref == ModelRef(str(run / "model"))
    trained, untrained = load_file(run / "model" / WEIGHTS), load_file(warm / WEIGHTS)
    assert any(not torch.equal(trained[name], untrained[name]) for name in untrained)
