"""GRPO that computes logprobs of the trained tokens alone; TRL computes those of whole rows, and its loss masks most.

`TrainedTokensTrainer` is TRL's trainer with its scoring overridden: it knows which tokens of a batch are trained (the
completion's, without what the environment said), labels no others, and has the model read no more than that takes
(`trainer.training.scoring`). Logprobs and entropies of all other tokens are zero, and TRL multiplies them by zero.
Loss and gradients are TRL's to rounding.

Rows of like length share a micro-batch: within one optimizer step, and where the loss does not depend on which rows do
(a sum over tokens, or a mean over as many rows in each). What TRL logs as a mean over micro-batches, such as the
entropy, then differs as it would with another shuffle.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from trl import GRPOTrainer

from trainer.training.scoring import IGNORED, passes_are_collectives, read_less

_LOG = logging.getLogger(__name__)

ANY_ROWS = frozenset({"grpo", "dr_grpo", "dapo", "cispo", "vespo", "sapo", "luspo"})
"""Losses that are sums over an optimizer step, whichever rows share a micro-batch; `bnpo` is a mean over its tokens."""

Scores = tuple[Tensor, Tensor | None, Tensor | None]
"""Logprobs (rows, completion), entropies (rows, completion), and a mixture of experts' load-balancing loss."""


class TrainedTokensTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL carries no types
    """TRL's trainer, scoring the trained tokens alone."""

    _buffered_inputs: list[dict[str, Any]] | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trained: Tensor | None = None
        """Which tokens of the completions at hand are the policy's, (rows, completion); None: all."""
        one_pass = passes_are_collectives(self.accelerator)
        for model in (self.model, self.ref_model):
            if model is None:
                continue
            model = self.accelerator.unwrap_model(model)
            model = model.get_base_model() if isinstance(model, PeftModel) else model
            cast = self.args.cast_lm_head_to_fp32
            why_not = read_less(model, temperature=self.temperature, in_float32=cast, one_pass=one_pass)
            if why_not:
                _LOG.warning("rows are scored whole, padding and all: %s", why_not)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is None or self._buffered_inputs is before:
            return inputs
        self._buffered_inputs = self._dealt(self._buffered_inputs)
        dealt: dict[str, Any] = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return dealt

    def _dealt(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Deal the rows of each optimizer step out again, by their length; or leave them where that is not the same."""
        sums = self.loss_type in ANY_ROWS and not self._entropy_bonus_enabled and not self.aux_loss_enabled
        step = min(self.args.gradient_accumulation_steps, len(batches))
        whole = len(batches) % step == 0 and self.args.gradient_accumulation_steps % step == 0
        plain = all(isinstance(value, Tensor) for value in batches[0].values())
        if not (sums and whole and plain and self.top_entropy_quantile == 1.0):
            return batches
        return [dealt for begin in range(0, len(batches), step) for dealt in by_length(batches[begin : begin + step])]

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        masks: Sequence[Sequence[int]] | None = generated[2]
        if masks is not None:
            rows = [torch.tensor(mask) for mask in masks]
            self._trained = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.accelerator.device)
        return generated

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        try:
            scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self._trained = None
        return scored

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        self._trained = inputs.get("tool_mask")
        try:
            loss: Tensor = super()._compute_loss(model, inputs)
        finally:
            self._trained = None
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> Scores:
        """Score completions where they are trained."""
        # What is padded, or masked because it was cut off, is not; nor is the first token of a row without a prompt.
        trained = attention_mask.bool()
        trained[:, :-logits_to_keep] = False
        if self._trained is not None:
            known = self._trained.shape[1]
            trained[:, -logits_to_keep:][:, :known] &= self._trained.bool()
        labels = input_ids.masked_fill(~trained, IGNORED)
        return self._score(model, input_ids, attention_mask, labels, logits_to_keep, batch_size, options)

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
        """Score the completions' tokens that are labelled, `batch_size` rows at a time."""
        entropy = options.get("compute_entropy", False)
        if any(
            value is not None and value is not False for name, value in options.items() if name != "compute_entropy"
        ):
            scores: Scores = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **options
            )
            return scores
        rows = batch_size or len(input_ids)
        parts = []
        for tensors in zip(*(torch.split(whole, rows) for whole in (input_ids, attention_mask, labels)), strict=True):
            ids, mask, wanted = tensors
            with self.accelerator.autocast():
                parts.append(model(input_ids=ids, attention_mask=mask, labels=wanted, fused_lm_head=True))
        logps = torch.cat([part.log_probs[:, -logits_to_keep:] for part in parts])
        return logps, torch.cat([part.entropy[:, -logits_to_keep:] for part in parts]) if entropy else None, None


def trained_mask(inputs: dict[str, Any]) -> Tensor:
    """Which tokens of completions are trained, (rows, completion)."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def gradient_weight(inputs: dict[str, Any], chosen: Sequence[bool]) -> Tensor:
    """The sum over trained tokens of |advantage|: of the `chosen` rows, and of all; shape (2,)."""
    advantages = inputs["advantages"].abs()
    mask = trained_mask(inputs)
    weights = ((advantages if advantages.dim() == 2 else advantages[:, None]) * mask).sum(1)
    return torch.stack(((weights * torch.tensor(chosen, device=weights.device)).sum(), weights.sum()))


def by_length(batches: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Deal rows out again, the shortest first; a row is as long as it is read, up to its last trained token."""
    rows = len(batches[0]["completion_ids"])
    whole = {
        name: torch.cat([batch[name] for batch in batches]) if value.dim() else value
        for name, value in batches[0].items()
    }
    mask = trained_mask(whole)
    ends = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    order = (whole["prompt_mask"].sum(1) + (mask * ends).amax(1)).argsort(stable=True)
    return [
        {name: value[part] if value.dim() else value for name, value in whole.items()}
        for part in torch.split(order, rows)
    ]
