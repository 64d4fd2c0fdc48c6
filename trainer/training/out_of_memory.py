"""GRPO that goes on when memory runs out: smaller micro-batches, the same rollouts, the same gradient.

Promises of `HalvingTrainer`:

1. Without a shortage it is the trainer that scores the trained tokens alone, bit for bit.
2. When scoring the rollouts, the loss or its backward pass run out, the micro-batch is halved and accumulation
   doubled, for the rest of the run. The step is taken again from the rollouts it has: no episode is played again, none
   is lost. It is said in one line.
3. Loss, gradient and metrics are those of the whole micro-batch to rounding, whatever the loss type and its
   normalisation. The load-balancing loss of a mixture of experts alone is a mean over the parts.
4. With one row at a time, in the optimizer, or on several ranks, the run ends with a sentence that says what to change.
   Ranks cannot go back over a step: the others are in the middle of a collective.

How a micro-batch is halved without touching the loss: only the model's pass is cut, by rows. Each part is
checkpointed: it keeps nothing but its logprobs and entropies, from which TRL computes its loss over the whole, and is
run again when the backward pass reaches it. So one part's activations exist at a time. That costs a second forward
pass; the line that is said names the flags with which a run does without.

A backward pass that failed may have added to some gradients and not to others. So all gradients are dropped, and the
micro-batches that this optimizer's step has seen so far are taken again; no copy of the gradients is kept for the case.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Trainer
from trl import GRPOConfig

from env_server.errors import SQLEnvError
from inference.out_of_memory import is_out_of_memory, release
from trainer.training.one_pass import OnePassTrainer
from trainer.training.trained_tokens import Scores

_LOG = logging.getLogger(__name__)


class TrainingMemoryError(SQLEnvError):
    """Memory is too small for this run; the text says what makes it fit."""


class HalvingTrainer(OnePassTrainer):
    """Takes smaller micro-batches when memory runs out. Raises TrainingMemoryError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows: int = self.args.per_device_train_batch_size
        self._window: list[dict[str, Any]] = []
        """The micro-batches that the optimizer's coming step has seen."""
        self._again: dict[str, Any] | None = None
        """The micro-batch that is taken again."""
        self._forget: Callable[[], None] = lambda: None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Add a micro-batch's gradient, in parts when it does not fit; returns its loss."""
        seen = len(self._window)
        while True:
            try:
                if len(self._window) > seen:
                    self._take_again(model, inputs, num_items_in_batch)
                loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
                break
            except RuntimeError as error:
                # Without inputs, it was the rollout or its rewards that ran out.
                if not is_out_of_memory(error) or len(self._window) == seen:
                    raise
                words = release(error)
            self._halve(len(self._window[-1]["completion_ids"]), words)
        self._again = None
        if self.accelerator.sync_gradients:
            self._window.clear()
        return loss

    def _take_again(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None) -> None:
        """Compute the gradient of the earlier micro-batches anew, and be ready for the last."""
        model.zero_grad()
        for earlier in self._window[:-1]:
            self._again = earlier
            Trainer.training_step(self, model, inputs, num_items_in_batch)
        self._again = self._window[-1]
        self._forget()

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        if self._again is not None:
            return self._again
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if self.model.training:
            self._window.append(inputs)
            self._forget = self._memory_of_measurements()
        return inputs

    def _memory_of_measurements(self) -> Callable[[], None]:
        """Return what brings TRL's measurements, and its control of the entropy, back to what they are now."""
        metrics = self._metrics["train"]
        counts = {name: len(values) for name, values in metrics.items()}
        names = ("_entropy_window_stats", "entropy_coef", "_last_world_entropy")
        control = {name: getattr(self, name) for name in names}

        def forget() -> None:
            for name, values in metrics.items():
                del values[counts.get(name, 0) :]
            for name, value in control.items():
                setattr(self, name, value)

        return forget

    def _score(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        logits_to_keep: int,
        batch_size: int | None,
        options: dict[str, Any],
    ) -> Scores:
        """Score completions, in as many rows at a time as fit."""
        score = partial(super()._score, model, logits_to_keep=logits_to_keep, options=options)
        tensors = (input_ids, attention_mask, labels)
        rows = len(input_ids)
        while True:
            try:
                if not torch.is_grad_enabled():
                    return score(*tensors, batch_size=min(batch_size or rows, self._rows))
                if rows <= self._rows:
                    return score(*tensors, batch_size=batch_size)
                return self._in_parts(partial(score, batch_size=None), tensors)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                words = release(error)
            self._halve(min(batch_size or rows, rows), words)

    def _in_parts(self, score: Callable[..., Scores], tensors: tuple[Tensor, ...]) -> Scores:
        parts = [
            checkpoint(score, *part, use_reentrant=False)
            for part in zip(*(torch.split(whole, self._rows) for whole in tensors), strict=True)
        ]
        logps, entropies, aux_losses = zip(*parts, strict=True)
        return (
            torch.cat(logps),
            None if entropies[0] is None else torch.cat(entropies),
            None if aux_losses[0] is None else torch.stack(aux_losses).mean(),
        )

    def _halve(self, rows: int, words: str) -> None:
        """Take half as many rows at a time from now on. Raises TrainingMemoryError."""
        rows = min(rows, self._rows)
        args, step = self.args, self.state.global_step + 1
        if self.accelerator.distributed_type is not DistributedType.NO:
            raise TrainingMemoryError(
                f"step {step} ran out of memory with micro-batches of {rows}, and several ranks cannot take a step "
                f"again; start again with {smaller_batch(args, max(1, rows // 2))}, for the same batch in smaller "
                f"parts, and --resume_from_checkpoint true where there is a checkpoint ({words})"
            )
        if rows == 1:
            raise TrainingMemoryError(
                f"step {step} ran out of memory with one row at a time; {_advice(args)} ({words})"
            )
        self._rows = (rows + 1) // 2
        accumulation = -(-args.per_device_train_batch_size // self._rows) * args.gradient_accumulation_steps
        _LOG.warning(
            "step %d ran out of memory: the micro-batch is halved to %d and accumulation doubled to %d, and the step "
            "is taken again from the same rollouts; a run that starts with %s takes less time (%s)",
            *(step, self._rows, accumulation, smaller_batch(args, self._rows), words),
        )


@contextmanager
def memory_errors(args: GRPOConfig, what: str) -> Iterator[None]:
    """Raise what runs out of memory in the block as a TrainingMemoryError that begins with `what`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingMemoryError(f"{what}: memory ran out; {_advice(args)} ({release(error)})") from None


def smaller_batch(args: GRPOConfig, rows: int) -> str:
    """The flags of the same batch in micro-batches of `rows`."""
    accumulation = -(-args.per_device_train_batch_size * args.gradient_accumulation_steps // rows)
    return f"--per_device_train_batch_size {rows} --gradient_accumulation_steps {accumulation}"


def _advice(args: GRPOConfig) -> str:
    """What makes a run smaller, of what it does not do yet."""
    ways = [f"a --max_completion_length below {args.max_completion_length}"]
    if not args.gradient_checkpointing:
        ways.append("--gradient_checkpointing true")
    ways += ["--use_peft true (LoRA)", "--load_in_4bit true", "a smaller model"]
    return f"what helps is {', '.join(ways[:-1])} or {ways[-1]}"
