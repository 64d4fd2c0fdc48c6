"""Training when memory runs out: errors are injected where a GPU raises them, and the run must be the unbroken one.

The trainer here is the real one on a random policy; its rollouts are made up, so that a case takes a second.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from trl import GRPOConfig

from inference.out_of_memory import is_out_of_memory, release
from tests.trainer.grpo.made_up import ROWS, WINDOW, Train, require_equal
from trainer.out_of_memory import TrainingMemoryError, halved, memory_errors

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB."
CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
)


@pytest.fixture(scope="module")
def whole(train: Train) -> Train:
    """A run that is never short of memory; played once for each set of flags."""
    return cache(train)


def failing(skip: int, times: int = 1, words: str = CUDA) -> Callable[[], None]:
    """What raises on `times` calls after the first `skip`."""
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if skip < calls <= skip + times:
            raise torch.OutOfMemoryError(words) if words == CUDA else RuntimeError(words)

    return call


@contextmanager
def broken_layer(fail: Callable[[], None], *, place: str) -> Iterator[None]:
    """Call `fail` in each pass through a layer: in the loss, or in its backward pass."""
    forward = Qwen3MLP.forward

    def broken(self: Qwen3MLP, hidden: Tensor) -> Tensor:
        # A checkpointed pass is run without gradients first; it scores nothing.
        if place == "loss" and torch.is_grad_enabled():
            fail()
        output: Tensor = forward(self, hidden)
        if place == "backward" and output.requires_grad:
            output.register_hook(lambda _: fail())  # type: ignore[no-untyped-call]
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3MLP, "forward", broken)
        yield


@pytest.mark.parametrize(("place", "words"), [("loss", CPU), ("backward", CUDA)])
@pytest.mark.parametrize(("skip", "times"), [(5, 1), (2, 2)])
def test_a_run_that_is_short_of_memory_is_the_unbroken_run(
    train: Train, whole: Train, caplog: pytest.LogCaptureFixture, place: str, skip: int, times: int, words: str
) -> None:
    expected, played = whole()
    assert not caplog.records
    with broken_layer(failing(skip, times, words), place=place):
        short, again = train()
    assert again.batches == played.batches, "no episode is played again, and none is lost"
    require_equal(short, expected)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == times
    for line, rows in zip(said, (2, 1), strict=False):
        assert f"the micro-batch is halved to {rows}, and the step is retried" in line
        assert f"--per_device_train_batch_size {rows} --gradient_accumulation_steps {ROWS * WINDOW // rows}" in line
        assert words[:40] in line


def test_one_row_that_does_not_fit_ends_the_run_with_what_helps(train: Train) -> None:
    helps = "one row at a time; what helps is a --max_completion_length below 12, --gradient_checkpointing true"
    with broken_layer(failing(0, times=3), place="backward"), pytest.raises(TrainingMemoryError, match=helps):
        train()


def test_other_errors_are_left_alone(train: Train, caplog: pytest.LogCaptureFixture) -> None:
    words = "mat1 and mat2 shapes cannot be multiplied"
    with broken_layer(failing(0, words=words), place="backward"), pytest.raises(RuntimeError, match=words):
        train()
    assert not caplog.records


def test_several_ranks_end_with_the_flags_of_the_same_batch() -> None:
    args = GRPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2, use_cpu=True, bf16=False)
    flags = "--per_device_train_batch_size 2 --gradient_accumulation_steps 4"
    with pytest.raises(TrainingMemoryError, match=f"several ranks cannot retry a step; start again with {flags}"):
        halved(args, 4, step=3, one_process=False, reason=CUDA)


LOSSES: list[dict[str, Any]] = [
    {"loss_type": "grpo", "scale_rewards": "batch", "beta": 0.1},
    {"loss_type": "bnpo", "steps_per_generation": 1, "gradient_checkpointing": True},
    {"loss_type": "dr_grpo", "scale_rewards": "none", "mask_truncated_completions": True, "top_entropy_quantile": 0.5},
    {"loss_type": "sapo", "num_iterations": 2, "max_steps": 4},
    {"loss_type": "cispo", "use_adaptive_entropy": True, "entropy_coef": 0.01},
    {"loss_type": "vespo", "steps_per_generation": 4, "max_steps": 4},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
]


@pytest.mark.parametrize("flags", LOSSES, ids=str)
def test_the_gradient_is_that_of_the_whole_micro_batch(train: Train, flags: dict[str, Any]) -> None:
    # Plain descent: Adam divides by a gradient's size, and makes rounding as large as the rest.
    flags = {"optim": "sgd", "learning_rate": 0.1} | flags
    whole, played = train(**flags)
    with broken_layer(failing(3), place="backward"):
        short, again = train(**flags)
    assert again.batches == played.batches
    require_equal(short, whole)


@pytest.mark.parametrize(
    ("error", "is_shortage"),
    [
        (torch.OutOfMemoryError(CUDA), True),
        (RuntimeError(CPU), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_says_that_memory_ran_out(error: Exception, is_shortage: bool) -> None:
    assert is_out_of_memory(error) == is_shortage


def test_a_failed_attempt_is_let_go_of() -> None:
    held: list[weakref.ref[Tensor]] = []

    def attempt() -> None:
        large = torch.ones(1000)
        held.append(weakref.ref(large))
        try:
            raise torch.OutOfMemoryError(f"{CUDA}\n" + 100 * "So it goes. ")
        finally:
            raise RuntimeError("while that was handled")

    try:
        attempt()
    except RuntimeError as error:
        words = release(error)
    assert words == "while that was handled"
    assert held[0]() is None


def test_what_else_runs_out_becomes_a_sentence() -> None:
    args = GRPOConfig(max_completion_length=99, use_cpu=True, bf16=False, report_to="none")
    sentence = r"the model: memory ran out; .* below 99, .* \(CUDA out of memory"
    with pytest.raises(TrainingMemoryError, match=sentence), memory_errors(args, "the model"):
        raise torch.OutOfMemoryError(CUDA)
    with pytest.raises(RuntimeError, match="something else"), memory_errors(args, "the model"):
        raise RuntimeError("something else")
