"""`sqlenv train` when memory runs out: a run that is short of it everywhere ends as the run that never was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from env_server.data.loading import load_dataset
from sqlenv import cli
from tests.integration.training import save_policy, surroundings_in
from trainer.eval.run_files import RunFolder

FLAGS = [
    *("--data", "synthetic", "--eval_episodes", "0", "--step_budget", "4", "--max_turn_length", "8"),
    *("--max_completion_length", "128", "--max_steps", "2", "--per_device_train_batch_size", "8"),
    *("--gradient_accumulation_steps", "2", "--num_generations", "4", "--learning_rate", "1e-3"),
    *("--lr_scheduler_type", "constant", "--logging_steps", "1", "--report_to", "none", "--save_strategy", "no"),
    *("--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false"),
    *("--optim", "adamw_torch", "--seed", "3"),
]


@pytest.fixture(autouse=True)
def surroundings(generated_cache: Path) -> Iterator[None]:
    with surroundings_in(generated_cache):
        yield


class Shortage:
    """Runs out of memory once in each place, and remembers where it has."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.places: list[str] = []
        forward = Qwen3Model.forward

        @functools.wraps(forward)  # the trainer looks at the signature
        def broken_forward(model: Qwen3Model, *args: Any, **kwargs: Any) -> Any:
            self._run_out("generation" if "packed_rows" in kwargs else "forward")
            output = forward(model, *args, **kwargs)
            if output.last_hidden_state.requires_grad and "generation" in self.places and "forward" in self.places:
                model.embed_tokens.weight.register_hook(lambda _: self._run_out("backward"))
            return output

        patch.setattr(Qwen3Model, "forward", broken_forward)

    def _run_out(self, place: str) -> None:
        if place not in self.places:
            self.places.append(place)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def test_a_run_that_is_short_of_memory_everywhere_is_the_run_that_never_was(
    random_policy: Callable[..., Qwen3ForCausalLM], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [question.text for question in load_dataset("synthetic").questions]
    policy = save_policy(random_policy, texts, tmp_path / "policy")

    def train(name: str) -> RunFolder:
        command = ["train", "--model_name_or_path", str(policy), "--output_dir", str(tmp_path / name), *FLAGS]
        assert cli.main(command) == 0
        return RunFolder.open(tmp_path / name)

    whole = train("whole")
    with pytest.MonkeyPatch.context() as patch:
        shortage = Shortage(patch)
        short = train("short")
    assert shortage.places == ["generation", "forward", "backward"]
    assert short.episodes_path.read_bytes() == whole.episodes_path.read_bytes()
    weights, expected = (load_file(run.path / "model" / "model.safetensors") for run in (short, whole))
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-5)  # of steps of 1e-3
    said = [record.getMessage() for record in caplog.records]
    for line, words in zip(
        said,
        (
            "generation ran out of memory with 16 episodes at a time; it goes on with 8",
            "the micro-batch is halved to 4, and the step is retried",
            "the micro-batch is halved to 2, and the step is retried",
        ),
        strict=True,
    ):
        assert words in line
