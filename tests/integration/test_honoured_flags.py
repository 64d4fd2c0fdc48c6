"""Flags of TRL's that are honoured, seen at work in real runs: what the model is like while it is trained."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from trl import GRPOTrainer

from benchmarks.server_process import ROOT
from env_server.cache import CACHE_VARIABLE
from sqlenv import cli
from tests.integration.training import save_policy, surroundings_in
from trainer.eval.run_files import RunFolder
from trainer.tiny import BASE_CHECKPOINT
from trainer.training.batches import Batches

FLAGS = [
    *("--data", "synthetic", "--eval_episodes", "0", "--step_budget", "4", "--max_turn_length", "16"),
    *("--max_completion_length", "192", "--max_steps", "2", "--per_device_train_batch_size", "4"),
    *("--gradient_accumulation_steps", "2", "--num_generations", "4", "--save_strategy", "no"),
    *("--use_cpu", "true", "--bf16", "false", "--seed", "3"),
]
BITSANDBYTES = ROOT / ".venv-bitsandbytes"
"""Where `make bitsandbytes` puts it: apart, for PEFT imports it wherever it is installed."""


@pytest.fixture(scope="module")
def cache(generated_cache: Path) -> Path:
    return generated_cache


@pytest.fixture(scope="module", autouse=True)
def surroundings(cache: Path) -> Iterator[None]:
    with surroundings_in(cache):
        yield


@pytest.fixture(scope="module")
def policy(random_policy: Callable[..., Qwen3ForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(random_policy, ["How many are there"], tmp_path_factory.mktemp("policy"))


def test_checkpointing_keeps_its_settings_after_a_rollout(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[tuple[bool, bool | None]]] = []
    play = Batches.__call__

    def settings(model: nn.Module) -> set[tuple[bool, bool | None]]:
        layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
        return {
            (x.gradient_checkpointing, x._gradient_checkpointing_func.keywords["preserve_rng_state"]) for x in layers
        }

    def watched(self: Batches, prompts: Any, trainer: GRPOTrainer) -> dict[str, Any]:
        rows = play(self, prompts, trainer)
        seen.append(settings(trainer.model))
        return rows

    monkeypatch.setattr(Batches, "__call__", watched)
    kwargs = '{"use_reentrant": false, "preserve_rng_state": false}'
    flags = ["--gradient_checkpointing", "true", "--gradient_checkpointing_kwargs", kwargs]
    command = ["train", *FLAGS, *flags, "--model_name_or_path", str(policy), "--output_dir", str(tmp_path / "run")]
    assert cli.main(command) == 0
    assert seen == [{(True, False)}] * 2, "a rollout switches it off, and on again as it was"


def test_turns_have_advantages_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    compute_loss = GRPOTrainer._compute_loss

    def watched(self: GRPOTrainer, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        assert inputs["advantages"].shape == mask.shape
        seen.extend(len(row[trained].unique()) > 1 for row, trained in zip(inputs["advantages"], mask, strict=True))
        loss: Tensor = compute_loss(self, model, inputs)
        return loss

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", watched)
    flags = ["--advantages", "turn", "--scale_rewards", "batch", "--temperature", "1.0"]
    command = ["train", *FLAGS, *flags, "--model_name_or_path", str(BASE_CHECKPOINT)]
    assert cli.main([*command, "--output_dir", str(tmp_path / "run")]) == 0
    assert len(seen) == 16
    assert any(seen), "the turns of an episode differ"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--use_peft", "true", "--lora_target_modules", "nonsense"), "nonsense not found in the base model"),
        (("--use_peft", "true", "--lora_target_modules", "lm_head"), "`lm_head` is not supported"),
        (("--attn_implementation", "nonsense"), "nonsense"),
        (("--model_init_kwargs", '{"nonsense": 1}'), "nonsense"),
        (("--lr_scheduler_type", "cosine_with_min_lr"), "min_lr"),
        (("--optim", "lomo"), "lomo"),
        (("--router_aux_loss_coef", "0.1"), "not a Mixture-of-Experts model"),
    ],
)
def test_what_does_not_fit_the_model_is_one_line(
    flags: tuple[str, ...], complaint: str, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    command = ["train", *FLAGS, *flags, "--model_name_or_path", str(policy), "--output_dir", str(folder)]
    assert cli.main(command) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("sqlenv train: ")
    assert complaint in line
    assert not (folder / "config.json").exists(), "there is no run"


@pytest.mark.skipif(not BITSANDBYTES.is_dir(), reason="`make bitsandbytes` installs it")
def test_an_adapter_is_trained_beside_weights_of_four_bits(policy: Path, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = ["--load_in_4bit", "true", "--use_peft", "true", "--use_bnb_nested_quant", "true"]
    command = ["train", *FLAGS, *flags, "--model_name_or_path", str(policy), "--output_dir", str(folder)]
    ended = subprocess.run(
        [sys.executable, "-m", "sqlenv", *command],
        env={**os.environ, CACHE_VARIABLE: str(cache), "PYTHONPATH": f"{ROOT}{os.pathsep}{BITSANDBYTES}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "autograd kernel was not registered" not in ended.stderr, "gradients pass through the weights"
    run = RunFolder.open(folder)
    for row in run.metrics():
        assert row["sampling/sampling_logp_difference/max"] < 1e-3, "rollouts ran on the same four bits"
        assert row["grad_norm"] > 0
    assert (folder / "model" / "adapter_config.json").is_file()
