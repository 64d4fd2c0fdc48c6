"""What the numbers that flags take must be: of SQLEnv's own, and of those of TRL and transformers that people type.

TRL and transformers check few of them, and what they let through divides by zero, or trains on NaN. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer.config import ConfigError


class Range(NamedTuple):
    """Finite numbers from `low` to `high`; `open_low` and `open_high` leave out the ends. `whole`: integers alone."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    whole: bool = False

    def admits(self, value: float) -> bool:
        """Whether a number is one of them; NaN and infinities never are."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return math.isfinite(value) and above and below and not (self.whole and value % 1)

    def __str__(self) -> str:
        low = "" if self.low == -math.inf else f"{'above' if self.open_low else 'at least'} {self.low:g}"
        high = "" if self.high == math.inf else f"{'below' if self.open_high else 'at most'} {self.high:,.12g}"
        kind = "a whole number, " if self.whole else ""
        return kind + (" and ".join(filter(None, (low, high))) or "a finite number")


_COUNT, _POSITIVE, _NOT_NEGATIVE = Range(1, whole=True), Range(0, open_low=True), Range(0)
_SHARE, _BELOW_ONE, _SEED = Range(0, 1), Range(0, 1, open_high=True), Range(0, 2**32 - 1, whole=True)


def _ranges(**groups: tuple[Range, str]) -> dict[str, Range]:
    return {name: allowed for allowed, names in groups.values() for name in names.split()}


RANGES: Mapping[str, Range] = _ranges(
    counts=(
        _COUNT,
        "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps steps_per_generation "
        "generation_batch_size num_iterations max_length save_total_limit lora_r lora_alpha",
    ),
    groups=(Range(2, whole=True), "num_generations"),
    positive=(
        _POSITIVE,
        "num_train_epochs logging_steps save_steps eval_steps repetition_penalty adam_epsilon",
    ),
    not_negative=(
        _NOT_NEGATIVE,
        "learning_rate weight_decay max_grad_norm warmup_steps eval_delay beta epsilon epsilon_high "
        "dynamic_sampling max_minutes",
    ),
    steps=(Range(-1, whole=True), "max_steps"),
    shares=(_SHARE, "min_p noisy_expert_fraction"),
    below_one=(_BELOW_ONE, "adam_beta1 adam_beta2 lora_dropout"),
    top_p=(Range(0, 1, open_low=True), "top_p"),
    seeds=(_SEED, "seed data_seed"),
    finite=(Range(), "reward_weights"),
)


def check_ranges(given: Mapping[str, Any]) -> None:
    """Refuse a number that its flag does not take. Raises ConfigError."""
    for name, allowed in RANGES.items():
        value = given.get(name)
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not isinstance(number, bool) and not allowed.admits(number):
                raise ConfigError(f"--{name} must be {allowed}, not {number}")
