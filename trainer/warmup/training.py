"""TRL's supervised trainer for a warm-up, without the waste: it reads what is learned, and no padding.

Most of an episode is what the environment says, and all episodes begin with the same prompt. `WarmupTrainer` has the
model read no more than the labels need (`trainer.training.scoring`). Loss, gradients and metrics are TRL's to rounding.

A warm-up that is resumed goes on as if it had not been broken off, to the bit: `EpochsByLength` has the order of an
epoch depend on its number, where that of transformers depends on all that drew random numbers before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch.utils.data import Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices
from trl import SFTTrainer

from trainer.training.checkpointing import CheckpointingTrainer
from trainer.training.scoring import passes_are_collectives, read_less

_LOG = logging.getLogger(__name__)
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
    """TRL's trainer, reading what is learned alone."""

    _total_train_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._by_length: EpochsByLength | None = None
        model = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        self.why_not = read_less(
            model,
            temperature=1.0,
            outputs=("log_probs", "entropy", "is_top1"),
            one_pass=passes_are_collectives(self.accelerator),
        )
        """Why the model reads whole rows; "" where it does not."""
        if self.why_not:
            _LOG.warning("rows are read whole, padding and all: %s", self.why_not)

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
