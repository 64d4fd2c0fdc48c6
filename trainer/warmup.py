"""`sqlenv warmup`: supervised warm-up on multi-turn play that the environment has verified (TRL's SFTTrainer).

It teaches a model the moves, in either answer mode, before GRPO teaches it which of them pay. What it saves, a full
checkpoint or with `--use_peft` a LoRA adapter, is a policy that `sqlenv train`, `inference`, `evaluate` and `export`
take. Given an adapter, it goes on training that one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset as HubDataset
from rich.console import Console
from torch import nn
from torch.utils.data import Sampler
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_pt_utils import get_length_grouped_indices
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config, get_quantization_config

from env_server.types import AnswerMode
from inference.adapters import RUN_MODEL
from trainer.chat.format import ChatFormat, ChatSettings, Conversation
from trainer.config import ConfigError, advise
from trainer.demos.demonstrations import play_demonstrations
from trainer.demos.rejection_sampling import sample_by_rejection
from trainer.eval.output_folder import left_nothing, remove_on_failure
from trainer.flags.configs import WarmupConfig
from trainer.logprobs import IGNORED, trimmed
from trainer.models import (
    init_kwargs,
    keep_gradients,
    load_base,
    load_to_continue,
    load_tokenizer,
    repair_generation_settings,
)
from trainer.next_command import NextCommand, what_next
from trainer.policy import resolve_policy
from trainer.ranks import Ranks, abort_together
from trainer.signals import StopAfterStep, StopSignals
from trainer.training.arguments import parse_warmup
from trainer.training.checkpointing import (
    CheckpointingTrainer,
    Saved,
    SaveStates,
    policy_kept,
    writes_in_one_line,
)
from trainer.training.questions import QuestionFilter

MINUTES_FILE = "minutes.json"
"""What a checkpoint keeps of a deadline: the minutes that training has had."""


def encode(conversation: Conversation, chat: ChatFormat) -> dict[str, list[int]]:
    """An episode as `input_ids` and `labels`; the labels are the ids of what is learned, else IGNORED."""
    ids, learned = chat.encode(conversation)
    return {"input_ids": ids, "labels": [token if its else IGNORED for token, its in zip(ids, learned, strict=True)]}


class Deadline(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Stops training once its minutes are over, those before it was resumed included; all ranks after the same step."""

    def __init__(self, minutes: float, ranks: Ranks) -> None:
        self._seconds = 60 * minutes
        self._ranks = ranks
        self._started = time.monotonic()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock; a checkpoint is loaded after it."""
        self._started = time.monotonic()

    def minutes_left(self) -> float:
        """Until this rank's clock has had its minutes; never negative."""
        return max(0.0, self._seconds - (time.monotonic() - self._started)) / 60

    def state_dict(self) -> dict[str, Any]:
        """See `Stateful`."""
        return {"minutes": (time.monotonic() - self._started) / 60}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Stateful`."""
        self._started = time.monotonic() - 60 * state["minutes"]

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask the trainer to stop when the time is over."""
        control.should_training_stop |= any(self._ranks.gather([self.minutes_left() <= 0.0]))


class ProgressLine(TrainerCallback):  # type: ignore[misc]
    """Prints one line at each logging step: loss and accuracy on what is learned, the speed, and the time that is left.

    Tokens are those of the episodes, read or shared with others; padding is not counted.
    """

    def __init__(self, console: Console, deadline: Deadline | None = None) -> None:
        self._console = console
        self._deadline = deadline
        self._began = (0, 0.0)
        self._before = (0.0, 0.0)
        """Tokens and time at the line before."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock; a resumed run begins at its checkpoint's step."""
        self._began = (state.global_step, time.monotonic())
        self._before = (float(state.num_input_tokens_seen), time.monotonic())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print the line of a step; the summary at the end has no loss of its own."""
        if logs is None or "loss" not in logs:
            return
        step, began = self._began
        seconds = (time.monotonic() - began) / max(1, state.global_step - step)
        minutes = seconds * (state.max_steps - state.global_step) / 60
        if self._deadline is not None:
            minutes = min(minutes, self._deadline.minutes_left())
        tokens, now = logs.get("num_tokens", 0.0), time.monotonic()
        speed = (tokens - self._before[0]) / max(1e-9, now - self._before[1])
        self._before = (tokens, now)
        self._console.print(
            f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}  "
            f"tokens right {logs.get('mean_token_accuracy', 0.0):.1%}  {seconds:.1f} s a step, {speed:,.0f} tokens/s, "
            f"{minutes:.0f} min left",
            highlight=False,
            soft_wrap=True,
        )


def run(argv: Sequence[str]) -> int:
    """Parse the flags, play, train and save; returns the exit status. Raises SQLEnvError."""
    with (
        abort_together("sqlenv warmup"),
        StopSignals("sqlenv warmup", NextCommand.of("sqlenv warmup", argv)) as stopping,
    ):
        warm_up(argv, stopping).disconnect()
    return stopping.status


def warm_up(argv: Sequence[str], stopping: StopSignals) -> Ranks:
    """`run` within the `with` block of a `StopSignals`, which knows afterwards whether the run came to its end.

    Returns the ranks, still connected.
    """
    config, model_config = parse_warmup(argv)
    ranks = Ranks.of(config)
    ranks.log_on_rank_0()
    console = Console(file=sys.stderr, quiet=not ranks.is_main)
    folder = Path(config.output_dir)
    begins = ranks.is_main and not config.resume_from_checkpoint
    with (
        writes_in_one_line(str(folder)),
        remove_on_failure(folder, lambda: left_nothing(folder)) if begins else nullcontext(),
    ):
        _warm_up(config, model_config, ranks, console, stopping)
    return ranks


def _warm_up(
    config: WarmupConfig,
    model_config: ModelConfig,
    ranks: Ranks,
    console: Console,
    stopping: StopSignals,
) -> None:
    answer_mode = AnswerMode(config.answer_mode)
    sources = config.data.split(",")
    folder = Path(config.output_dir)
    target = folder / RUN_MODEL
    kept = QuestionFilter.of(config)
    with ranks.local_main_process_first():
        conversations = []
        if config.max_episodes:
            conversations += play_demonstrations(
                sources,
                config.seed,
                console,
                answer_mode=answer_mode,
                settings=config.environment,
                limit=config.max_episodes,
                explore=config.noisy_expert_fraction,
                kept=kept,
            )
        if config.rejection_sampling:
            samples = sample_by_rejection(
                config.rejection_sampling,
                sources,
                answer_mode,
                config.environment,
                config.samples_per_question,
                kept,
            )
            console.print(str(samples), highlight=False, soft_wrap=True)
            conversations += samples.conversations
    tokenizer = load_tokenizer(model_config, trust_remote_code=config.trust_remote_code)
    model = _load(model_config, config)
    settings = ChatSettings.of(config, config.template_variables)
    chat = ChatFormat(tokenizer, settings)
    for line in chat.lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    rows = [encode(conversation, chat) for conversation in conversations]
    context = model.config.get_text_config(decoder=True).max_position_embeddings
    rows = _short_enough(rows, config.max_length or context, console)
    play = replace(config.play_settings(), chat_template_kwargs=chat.settings.chat_template_kwargs)
    continued = hasattr(model, "peft_config")
    deadline = Deadline(config.max_minutes, ranks) if config.max_minutes > 0 else None
    trainer = WarmupTrainer(
        model=model,
        args=config,
        train_dataset=HubDataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=None if continued else get_peft_config(model_config),
        callbacks=[
            *([] if deadline is None else [deadline]),
            ProgressLine(console, deadline),
            StopAfterStep(stopping),
            SaveStates(play, [] if deadline is None else [Saved(deadline, MINUTES_FILE, flags=None)]),
        ],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    if room := trainer.try_saving(play.save):
        console.print(f"disk    {room}", highlight=False, soft_wrap=True)
    stopping.begin_training(ranks)

    def save() -> Path:
        _stop_where_turns_end(model, chat)
        return trainer.save_policy(target, play.save)

    with nullcontext() if trainer.is_sharded else policy_kept(save, lambda: trainer.state.global_step):
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    if stopping.stopped_after is not None:
        return
    stopping.conclude()
    save()
    if trainer.state.global_step >= trainer.state.max_steps:  # after a deadline, --max_minutes may be raised
        trainer.save_state()  # it says that the run is finished; see `trainer.eval.output_folder`
    console.print(f"policy  {target}", highlight=False, soft_wrap=True)
    if not stopping.part:
        train = ["train", "--model_name_or_path", str(folder), "--data", config.data]
        further = what_next(train, ["evaluate", "--policy", str(folder)])
        console.print(further, highlight=False, soft_wrap=True)


def _load(model_config: ModelConfig, config: SFTConfig) -> PreTrainedModel:
    """Load what is trained: a checkpoint, or an adapter on its base. Raises PolicyError."""
    policy = resolve_policy(str(model_config.model_name_or_path), model_config.model_revision)
    config.model_init_kwargs = init_kwargs(model_config, config)
    quantization = get_quantization_config(model_config)
    if policy.adapter is None:
        model = load_base(policy, config, quantization)
    else:
        model = load_to_continue(policy, config, quantization, lora_dropout=model_config.lora_dropout)
    if line := repair_generation_settings(model):
        advise("sqlenv warmup", [line])
    keep_gradients(model, model_config)
    return model


def _short_enough(rows: Sequence[dict[str, list[int]]], limit: int, console: Console) -> list[dict[str, list[int]]]:
    """Return the episodes of at most `limit` tokens. Raises ConfigError when there is none."""
    kept = [row for row in rows if len(row["input_ids"]) <= limit]
    if not kept:
        shortest = min(len(row["input_ids"]) for row in rows) if rows else 0
        raise ConfigError(f"no episode has at most {limit} tokens (--max_length); the shortest one has {shortest}")
    tokens = sum(len(row["input_ids"]) for row in kept)
    learned = sum(label >= 0 for row in kept for label in row["labels"])
    longer = f"; {len(rows) - len(kept):,} longer than {limit:,} are left out" if len(kept) < len(rows) else ""
    console.print(
        f"{len(kept):,} episodes, {tokens:,} tokens, {learned:,} of them the policy's own, which are learned{longer}",
        highlight=False,
    )
    return kept


def _stop_where_turns_end(model: PreTrainedModel, chat: ChatFormat) -> None:
    """Have plain generation stop where the policy has learned to, besides where it did."""
    if (config := model.generation_config) is None:
        return
    known = config.eos_token_id
    before = known if isinstance(known, list) else [] if known is None else [known]
    stops = list(dict.fromkeys((*chat.stop_ids, *before)))
    config.eos_token_id = stops[0] if len(stops) == 1 else stops


BY_LENGTH = "group_by_length"


class EpochsByLength(Sampler[int]):
    """Rows of like length side by side, in an order of chance that is the same for one seed and epoch."""

    def __init__(self, lengths: Sequence[int], batch: int, seed: int) -> None:
        self._lengths = list(lengths)
        self._batch = batch
        self._seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        chance = torch.Generator().manual_seed(self._seed + self.epoch)
        return iter(get_length_grouped_indices(self._lengths, self._batch, generator=chance))


class WarmupTrainer(CheckpointingTrainer, SFTTrainer):  # type: ignore[misc]  # TRL carries no types
    """TRL's trainer, computing logprobs of the labelled tokens alone (`trainer.logprobs`)."""

    _total_train_tokens: int

    _by_length: EpochsByLength | None = None

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's loss, with logprobs of the labelled tokens alone."""
        return super().compute_loss(trimmed(model, self.accelerator), inputs, *args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        if self.args.train_sampling_strategy != BY_LENGTH:
            sampler: Sampler[int] | None = super()._get_train_sampler(train_dataset)
            return sampler
        rows = self.train_dataset if train_dataset is None else train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps
        column = self.args.length_column_name
        lengths = rows[column] if column in rows.column_names else [len(ids) for ids in rows["input_ids"]]
        self._by_length = EpochsByLength(lengths, batch, seed)
        return self._by_length

    def _run_epoch(self, *args: Any, epoch: int, **kwargs: Any) -> None:
        if self._by_length is not None:
            self._by_length.epoch = epoch
        if self.args.include_num_input_tokens_seen == "no":
            self._total_train_tokens = max(self._total_train_tokens, self.state.num_input_tokens_seen)
        super()._run_epoch(*args, epoch=epoch, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        # TRL counts what it has read in no checkpoint; transformers' own count is off unless it is asked for.
        if self.args.include_num_input_tokens_seen == "no":
            self.state.num_input_tokens_seen = self._total_train_tokens
        super()._save_checkpoint(*args, **kwargs)
