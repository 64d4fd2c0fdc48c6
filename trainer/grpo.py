"""TRL's GRPOTrainer on our batches, and how it is built: one subclass, which overrides four methods.

`SQLEnvTrainer` guarantees:

1. Loss, gradients and metrics are TRL's to rounding, from the tokens under the loss mask alone (`trainer.logprobs`).
2. Where all micro-batches of a rollout belong to one optimizer step and no dropout makes two passes differ, the loss's
   own logprobs are the old ones, and TRL's separate pass for them is skipped.
3. When the loss or its backward pass runs out of memory, the micro-batch is halved for the rest of the run, and the
   step is retried with the rollouts that it has. Several ranks end with the flags of the same batch.
4. Advantages may have the shape (rows, tokens); `--advantages turn` makes them so.
5. An evaluation leaves training alone: with and without it, a run's weights are equal to the bit.

The seam for an engine: TRL corrects for an engine's logprobs only where it believes that vLLM generates. So it is built
without vLLM, and `use_engine` makes ours the generator; TRL calls `sync_weights()` before each rollout.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from accelerate.utils import DistributedType
from datasets import Dataset as HubDataset
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, PrinterCallback, ProgressCallback, Trainer, TrainerControl
from transformers.trainer_utils import SaveStrategy
from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config, get_quantization_config
from trl.extras.profiling import profiling_context
from trl.trainer.utils import FusedCausalLMOutput

from env_server.dataset import Question
from inference.out_of_memory import is_out_of_memory, release
from trainer.chat.format import ChatFormat
from trainer.config import ConfigError, advise
from trainer.eval.statistics import EvaluationSummary
from trainer.flags.configs import check_optimizer
from trainer.logprobs import IGNORED, compact_head, trimmed
from trainer.models import init_kwargs, keep_gradients, load_to_continue, repair_generation_settings
from trainer.out_of_memory import halved
from trainer.policy import PolicyError, resolve_policy
from trainer.rollout.rewards import Reward, weights_of
from trainer.training.batches import Batches, prompt_of
from trainer.training.checkpointing import CheckpointingTrainer
from trainer.training.evaluations import evaluation_metrics, worst_metrics
from trainer.training.step_times import StepTimes

ENTROPY_CONTROL = ("_entropy_window_stats", "entropy_coef", "_last_world_entropy")
"""TRL's adaptive entropy bonus, which every loss moves."""


class WeightSync(Protocol):
    """What TRL calls before the rollout of a new step."""

    def sync_weights(self) -> None:
        """Bring the engine to the trainer's weights."""


Evaluate = Callable[[], EvaluationSummary | None]
"""Evaluates the policy as it is, or returns None where an evaluation was cut short; every rank calls it."""


class SQLEnvTrainer(CheckpointingTrainer, GRPOTrainer):  # type: ignore[misc]  # TRL carries no types
    """TRL's trainer on our batches; see the module. `train_on` must come before `train`."""

    control: TrainerControl
    times: StepTimes
    _batches: Batches | None = None
    _evaluate_policy: Evaluate
    _sampled: tuple[tuple[Tensor, Tensor], ...] = ()
    """Of the micro-batches of a rollout so far: how far logprobs are from the engine's, and the ratios."""
    _most_rows: int | None = None
    """Rows of a pass with gradients, once memory has run out."""
    _window: tuple[dict[str, Any], ...] = ()
    """The micro-batches of the optimizer's coming step."""
    _measured: dict[str, int]
    """How many values each metric had before the last of them."""
    _control: dict[str, Any]
    _retrying = False
    _prepare_inputs: Any
    _last_loaded_step: int
    vllm_importance_sampling_correction: bool

    def train_on(self, batches: Batches, weights: WeightSync, evaluate: Evaluate) -> None:
        """Train on these batches, whatever the training data set's loader draws, and evaluate so on the way.

        `weights` brings the engine that plays them to the policy of now.
        """
        self.rollout_func = self._batches = batches
        self._evaluate_policy = evaluate
        # TRL averages them until its next log, with its own: the run's log and every tracker get both.
        self.times = StepTimes(lambda name, seconds: self._metrics["train"][name].append(seconds))
        self.add_callback(self.times)
        use_engine(self, weights)

    def sync_engine(self) -> None:
        """Bring the engine to the current weights, unless it has them. Collective: every rank calls it."""
        if self._last_loaded_step != self.state.global_step:
            with profiling_context(self, "sync_weights"), self.times.waiting("push"):
                self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate the policy as it is and log the numbers; one that was cut short counts as the worst."""
        summary = self._evaluate_policy()
        if self.control.should_training_stop and self.state.global_step < self.state.max_steps:
            # A run that was asked to stop needs its checkpoint, and `save_strategy best` would only save the best.
            self.args.save_strategy = SaveStrategy.STEPS
        if summary is None:
            return worst_metrics(self.args)
        self._log_metrics(metrics := evaluation_metrics(summary))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log_evaluation(self, summary: EvaluationSummary) -> None:
        """Log an evaluation after training, and let the trackers close what they open for it."""
        self._log_metrics(evaluation_metrics(summary))
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)

    def _log_metrics(self, metrics: dict[str, float]) -> None:
        # Not TRL's `log`: it would add, and forget, what has been measured in training since the last one.
        Trainer.log(self, dict(metrics))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch, of the prompts that `Batches` has played."""
        batches = self._batches
        if batches is not None:
            self.sync_engine()
            with self.times.waiting("rollout"):
                prompts = batches.prepare(self)
            self.times.played(batches.waits)
            inputs = [{**row, "prompt": prompt} for row, prompt in zip(inputs, prompts, strict=True)]
        correction = self.vllm_importance_sampling_correction
        # Without it TRL takes no pass for the old logprobs: `_correct_sampling` takes the loss's.
        self.vllm_importance_sampling_correction = correction and not self._reuses_logprobs()
        try:
            with compact_head():
                scored: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            self.vllm_importance_sampling_correction = correction
        if batches is None:
            return scored
        # TRL shuffles the rows next, and sums depend on their order: a run that resumes draws what it would have drawn.
        torch.manual_seed(self.args.seed + self.state.global_step)
        if batches.token_advantages is not None:
            of_tokens = pad_sequence([torch.tensor(row) for row in batches.token_advantages], batch_first=True)
            of_tokens = functional.pad(of_tokens, (0, scored["completion_ids"].shape[1] - of_tokens.shape[1]))
            scored["advantages"] = scored["advantages"][:, None] + of_tokens.to(scored["advantages"].device)
        decided, total = self.accelerator.reduce(gradient_weight(scored, batches.decided), "sum").tolist()
        if total > 0:
            self._metrics["train"]["gradient_share/correctness"].append(decided / total)
        return scored

    def _reuses_logprobs(self) -> bool:
        """Whether the weights, and what they answer, are the same from the rollout to the last loss."""
        args, config = self.args, self.model.config.get_text_config(decoder=True)
        one_step = args.gradient_accumulation_steps % (args.steps_per_generation * self.num_iterations) == 0
        dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in self.model.modules())
        dropout = dropout or bool(getattr(config, "attention_dropout", 0.0))
        return bool(self.model.training and self.use_vllm and one_step and not dropout)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """TRL's loss, with logprobs of the tokens under the loss mask alone."""
        if self.model.training and not self._retrying:
            self._window = (*self._window, inputs)
            self._measured = {name: len(values) for name, values in self._metrics["train"].items()}
            self._control = {name: getattr(self, name) for name in ENTROPY_CONTROL}
        mask = loss_mask(inputs).bool()
        score = trimmed(model, self.accelerator, self._most_rows)
        # TRL's own old logprobs, where it took a pass for them, have their ratio already.
        corrects = self.use_vllm and self.vllm_importance_sampling_correction and "old_per_token_logps" not in inputs

        def forward(*, labels: Tensor, **call: Any) -> FusedCausalLMOutput:
            labels[:, -mask.shape[1] :].masked_fill_(~mask, IGNORED)
            output: FusedCausalLMOutput = score(labels=labels, **call)
            if corrects:
                self._correct_sampling(inputs, output.log_probs[:, -mask.shape[1] :].detach())
            return output

        loss: Tensor = super().compute_loss(forward, inputs, return_outputs, num_items_in_batch)
        return loss

    def _correct_sampling(self, inputs: dict[str, Any], logps: Tensor) -> None:
        """Give a micro-batch its importance-sampling ratio, and log it, as TRL does from old logprobs. Collective."""
        mask, mode = loss_mask(inputs), self.vllm_importance_sampling_mode
        difference = logps - inputs["sampling_per_token_logps"]
        log_ratio = torch.nan_to_num(difference * mask, nan=0.0)
        ratio = torch.exp(log_ratio.sum(-1, keepdim=True) if mode.startswith("sequence") else log_ratio)
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        clipped = ratio.clamp(-math.inf if low is None else low, math.inf if high is None else high)
        ratio = clipped if mode.endswith("truncate") else ratio.masked_fill(clipped != ratio, 0.0)
        inputs["importance_sampling_ratio"] = ratio

        ratios = ratio[mask.bool()] if ratio.shape == mask.shape else ratio.flatten()
        self._sampled = (*self._sampled, (difference.abs()[mask.bool() & ~difference.isnan()], ratios))
        if len(self._sampled) < self.args.steps_per_generation:
            return
        differences, ratios = (torch.cat(parts) for parts in zip(*self._sampled, strict=True))
        self._sampled = ()
        for name, values, statistics in (
            ("sampling_logp_difference", differences, (torch.mean, torch.max)),
            ("importance_sampling_ratio", ratios, (torch.min, torch.mean, torch.max)),
        ):
            values = values if len(values) else values.new_zeros(1)
            for statistic in statistics:
                value = statistic(self.accelerator.gather(statistic(values))).item()
                self._metrics["train"][f"sampling/{name}/{statistic.__name__}"].append(value)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Add a micro-batch's gradient, in smaller parts where memory runs out. Raises TrainingMemoryError."""
        seen = len(self._window)
        take: Callable[[], Tensor] = partial(super().training_step, model, inputs, num_items_in_batch)
        while True:
            try:
                loss = take()
                break
            except RuntimeError as error:
                # Without a new micro-batch, it was the rollout or its rewards that ran out.
                if not is_out_of_memory(error) or len(self._window) == seen:
                    raise
                reason = release(error)
            rows = min(len(self._window[-1]["completion_ids"]), self._most_rows or sys.maxsize)
            one_process = self.accelerator.distributed_type is DistributedType.NO
            self._most_rows = halved(self.args, rows, self.state.global_step + 1, one_process, reason)
            take = partial(self._retry, model, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self._window = ()
        return loss

    def _retry(self, model: nn.Module, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Compute the gradient of this optimizer step's micro-batches anew: the failed pass may have added to it."""
        model.zero_grad()
        self._sampled = ()
        self._retrying, self._prepare_inputs = True, lambda prepared: prepared
        try:
            for earlier in self._window[:-1]:
                Trainer.training_step(self, model, earlier, num_items_in_batch)
            for name, values in self._metrics["train"].items():
                del values[self._measured.get(name, 0) :]
            for name, value in self._control.items():
                setattr(self, name, value)
            loss: Tensor = super().training_step(model, self._window[-1], num_items_in_batch)
        finally:
            self._retrying = False
            del self._prepare_inputs
        return loss


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """Which tokens of completions are trained, (rows, completion)."""
    mask: Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def gradient_weight(inputs: dict[str, Any], chosen: Sequence[bool]) -> Tensor:
    """The sum over trained tokens of |advantage|: of the `chosen` rows, and of all; shape (2,)."""
    advantages = inputs["advantages"].abs()
    weights = ((advantages if advantages.dim() == 2 else advantages[:, None]) * loss_mask(inputs)).sum(1)
    return torch.stack(((weights * torch.tensor(chosen, device=weights.device)).sum(), weights.sum()))


def prompt_rows(questions: Sequence[Question]) -> HubDataset:
    """The data set that TRL is given. Of what it draws from it, the number of rows alone matters; see `Batches`."""
    return HubDataset.from_list([{"prompt": prompt_of(question)} for question in questions])


def use_engine(trainer: GRPOTrainer, weights: WeightSync) -> None:
    """Tell the trainer that an engine of ours generates and `weights` syncs it; see the module's docstring."""
    trainer.use_vllm = True
    trainer.vllm_generation = weights
    trainer._last_loaded_step = -1


def stop_at_turns_ends(trainer: GRPOTrainer, chat: ChatFormat) -> None:
    """Have TRL know every token that a turn may end with: a row that ends with one is not truncated."""
    trainer.eos_token_ids = list(dict.fromkeys((*trainer.eos_token_ids, *chat.stop_ids)))


def model_arguments(grpo: GRPOConfig, model_config: ModelConfig) -> dict[str, Any]:
    """What GRPOTrainer is told of the policy; sets the config's `model_init_kwargs`. Raises PolicyError."""
    policy = resolve_policy(str(model_config.model_name_or_path), model_config.model_revision)
    grpo.model_init_kwargs = init_kwargs(model_config, grpo)
    quantization = get_quantization_config(model_config)
    if policy.adapter is None:
        adapter = get_peft_config(model_config)
        return {"model": policy.base.location, "quantization_config": quantization, "peft_config": adapter}
    return {"model": load_to_continue(policy, grpo, quantization, lora_dropout=model_config.lora_dropout)}


def build_trainer(
    grpo: GRPOConfig,
    model_config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    eval_questions: Sequence[Question],
    rewards: Sequence[Reward],
) -> SQLEnvTrainer:
    """TRL's trainer with our rewards, on a checkpoint or an adapter. Raises PolicyError, ConfigError."""
    grpo.reward_weights = weights_of(rewards, grpo.reward_weights)
    policy = model_arguments(grpo, model_config)
    try:
        trainer = SQLEnvTrainer(
            **policy,
            reward_funcs=list(rewards),
            args=grpo,
            train_dataset=prompt_rows(questions),
            # Only so that transformers lets evaluation happen; see `trainer.training.evaluations`.
            eval_dataset=prompt_rows(eval_questions) if eval_questions else None,
            processing_class=tokenizer,
        )
        check_optimizer(grpo, trainer.model)
    except OSError as error:
        if error.filename is not None and str(error.filename).startswith(grpo.output_dir):
            raise ConfigError(
                f"--output_dir {grpo.output_dir}: {error.strerror}; it has to belong to the user who runs this, "
                f"number {os.getuid()}"
            ) from error
        raise PolicyError(f"{model_config.model_name_or_path}: {' '.join(str(error).split())}") from error
    except (ValueError, TypeError, ImportError, NotImplementedError) as error:
        # What TRL, PEFT and transformers say of arguments that do not fit the model or each other.
        raise ConfigError(" ".join(str(error).split())) from error
    if line := repair_generation_settings(trainer.model):
        advise("sqlenv train", [line])
    keep_gradients(trainer.model, model_config)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer
