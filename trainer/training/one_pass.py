"""GRPO with one forward pass less: the loss's own logprobs are the old ones where the weights are still the same.

To correct for an engine that samples with other logprobs than the trainer has, TRL reads each batch once before it is
trained on. Where all micro-batches of a rollout belong to one optimizer step, and no dropout makes two passes differ,
the pass that the loss takes anyway finds the same numbers. `OnePassTrainer` then leaves out the first one. Until the
loss is computed, what the engine sampled with stands in its place; then TRL's loss gets what it would have got, and so
do the metrics of the whole batch, when its last micro-batch is there. Otherwise it is TRL's way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from trainer.training.trained_tokens import Scores, TrainedTokensTrainer, trained_mask


class OnePassTrainer(TrainedTokensTrainer):
    """TRL's trainer, without a pass for logprobs that the loss finds, too."""

    _left_out = False
    """Whether the batch at hand is not read before it is trained on."""
    _sampled: list[list[float | None]] | None = None
    """What the engine sampled with, until it has stood in for that pass."""
    _open: dict[str, Any] | None = None
    """The micro-batch whose loss is being computed, until its old logprobs are known."""

    def _one_pass_is_enough(self) -> bool:
        """Whether the weights, and what they answer, are the same from the rollout to the last loss."""
        args = self.args
        aligned = args.gradient_accumulation_steps % (args.steps_per_generation * self.num_iterations) == 0
        dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in self.model.modules())
        config = self.model.config.get_text_config(decoder=True)
        return bool(
            self.model.training
            and self.use_vllm
            and self.vllm_importance_sampling_correction
            and aligned
            and not dropout
            and not getattr(config, "attention_dropout", 0.0)
        )

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        if self._left_out:
            self._sampled = generated[4]
        return generated

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._left_out = self._one_pass_is_enough()
        batch = super()._generate_and_score_completions(inputs)
        if self._left_out:
            batch["one_pass"] = torch.ones(len(batch["completion_ids"]), dtype=torch.bool)
        return batch

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        self._open = inputs if "one_pass" in inputs else None
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._open = None

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **options: Any,
    ) -> Scores:
        if self._sampled is not None:
            # TRL asks for the policy's before it asks for the reference's.
            rows, self._sampled = self._sampled, None
            logps = torch.zeros(len(rows), logits_to_keep)
            for row, values in enumerate(rows):
                logps[row, : len(values)] = torch.tensor([math.nan if v is None else v for v in values])
            return logps.to(input_ids.device), None, None
        scores = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **options
        )
        if self._open is not None:
            self._fill_in(self._open, scores[0].detach())
            self._open = None
        return scores

    def _fill_in(self, inputs: dict[str, Any], logps: Tensor) -> None:
        """Give a micro-batch its old logprobs and its ratio, as TRL computes it."""
        inputs["old_per_token_logps"] = logps
        mask = trained_mask(inputs)
        difference = torch.nan_to_num((logps - inputs["sampling_per_token_logps"]) * mask, nan=0.0)
        if self.vllm_importance_sampling_mode.startswith("sequence"):
            difference = difference.sum(dim=-1, keepdim=True)
        ratio = torch.exp(difference)
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if self.vllm_importance_sampling_mode.endswith("truncate"):
            ratio = torch.clamp(ratio, min=low, max=high)
        else:
            outside = (ratio < (-math.inf if low is None else low)) | (ratio > (math.inf if high is None else high))
            ratio = ratio.masked_fill(outside, 0.0)
        inputs["importance_sampling_ratio"] = ratio
        batches = self._buffered_inputs or []
        if batches and inputs is batches[-1]:
            self._measure_sampling(batches)

    def _measure_sampling(self, batches: list[dict[str, Any]]) -> None:
        """Replace the metrics of the batch, which were those of the stand-in."""
        deltas, ratios = [], []
        for inputs in batches:
            mask = trained_mask(inputs).bool()
            delta = (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]).abs()
            deltas.append(delta[mask & ~delta.isnan()])
            ratio = inputs["importance_sampling_ratio"]
            ratios.append(ratio[mask] if ratio.shape == mask.shape else ratio.flatten())
        nothing = torch.zeros(1, device=self.accelerator.device)
        delta, ratio = (torch.cat(parts) for parts in (deltas, ratios))
        delta, ratio = (one if one.numel() else nothing for one in (delta, ratio))
        local = torch.stack([delta.mean(), delta.max(), ratio.min(), ratio.mean(), ratio.max()])
        world = self.accelerator.gather(local.unsqueeze(0))
        metrics = self._metrics["train"]
        metrics["sampling/sampling_logp_difference/mean"][-1] = world[:, 0].mean().item()
        metrics["sampling/sampling_logp_difference/max"][-1] = world[:, 1].max().item()
        metrics["sampling/importance_sampling_ratio/min"][-1] = world[:, 2].min().item()
        metrics["sampling/importance_sampling_ratio/mean"][-1] = world[:, 3].mean().item()
        metrics["sampling/importance_sampling_ratio/max"][-1] = world[:, 4].max().item()
