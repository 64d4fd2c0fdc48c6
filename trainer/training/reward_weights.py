"""Reward weights that follow what each reward still has to teach: `--reward_weighting adaptive`.

After SAW (He et al., 2026, arXiv:2606.07705). Over a batch, a reward's coefficient of variation is c = s / (m - l): its
spread within groups (what GRPO compares), its mean, and the least value seen so far. A mastered reward is high and
differs little, so its c is small. Correctness keeps its weight; the factor of every other reward goes RATE of the way
to its c in relation to correctness's, within [LEAST, 1], and to 1 where correctness tells no episodes of a batch apart.
So no weight exceeds its base, every rank has the same, and a run that resumes has the same to the bit (`Delayed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum, sqrt
from statistics import fmean
from typing import Any

from trainer.config import ConfigError
from trainer.training.stateful import Delayed

RATE = 0.1
LEAST = 0.1
TINY = 1e-9
"""Below any difference between two rewards; a rounded sum is not exactly 0."""

Values = dict[str, list[float]]


class AdaptiveWeights(Delayed[Values, Values]):
    """The reward weights of each batch. `base`: `--reward_weights`, correctness first; `lag`: see `Delayed`."""

    def __init__(self, base: Sequence[float], lag: int = 0) -> None:
        super().__init__({"factors": [1.0] * len(base), "least": []}, follow, lag)
        self._base = tuple(base)

    def of(self, batch: int) -> tuple[float, ...]:
        """Return the weights that a batch is judged and trained under."""
        return tuple(w * factor for w, factor in zip(self._base, self.state_of(batch)["factors"], strict=True))

    def observe(self, batch: int, groups: Sequence[Sequence[Sequence[float]]]) -> None:
        """Learn from a batch: for each group, the rewards of each episode that did not fail."""
        columns = [list(zip(*group, strict=True)) for group in groups if len(group) > 1]
        rewards = [[list(column) for column in of_groups] for of_groups in zip(*columns, strict=True)]
        values = [[value for column in of_groups for value in column] for of_groups in rewards]
        spreads = [sqrt(fmean(map(_variance, of_groups))) for of_groups in rewards]
        self.add(batch, {"means": [*map(fmean, values)], "spreads": spreads, "least": [*map(min, values)]})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Stateful`."""
        if len(state["state"]["factors"]) != len(self._base):
            raise ConfigError("the checkpoint is of a run with other --reward_functions; leave the flags as they were")
        super().load_state_dict(state)


def follow(known: Values, batch: Values) -> Values:
    """Return the factors after a batch; they stay where no group had two episodes to compare."""
    if not batch["means"]:
        return known
    least = [*map(min, zip(known["least"] or batch["least"], batch["least"], strict=True))]
    statistics = zip(batch["means"], batch["spreads"], least, strict=True)
    varied = [spread / (mean - low) if min(spread, mean - low) > TINY else 0.0 for mean, spread, low in statistics]
    targets = [min(1.0, max(LEAST, each / varied[0])) if varied[0] else 1.0 for each in varied]
    moved = [factor + RATE * (target - factor) for factor, target in zip(known["factors"], targets, strict=True)]
    return {"factors": moved, "least": least}


def _variance(values: Sequence[float]) -> float:
    mean = fmean(values)
    return fsum((value - mean) ** 2 for value in values) / len(values)
