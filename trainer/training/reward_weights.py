"""Reward weights that follow what each reward still has to teach: `--reward_weighting adaptive`.

The weights are those of `--reward_weights`, each times a factor. After SAW (He et al., 2026, arXiv:2606.07705), what a
reward k can teach is read off its coefficient of variation over a batch,

    c_k = s_k / (m_k - l_k),

with m_k the mean of the reward, l_k the least value seen so far, and s_k its spread within groups (the root of the mean
variance of a group), since groups are what GRPO compares. A reward that is mastered is high and differs little: its c
is small. SAW shares out the weight in proportion to c. GRPO does not notice when all weights grow alike, so correctness
keeps its weight here, and the factors of the others follow their c against that of correctness:

    target_k = c_k / c_correctness, no less than LEAST and no more than 1;  factor_k += RATE (target_k - factor_k).

All factors begin at 1. Where correctness tells no episodes of a batch apart, the targets are 1: then the other rewards
are all there is to learn from. Promises:

1. A weight lies between LEAST times its base and its base, and correctness has its own, always. So whatever the base
   weights leave between an episode with a right answer and one without, these leave at least as much.
2. From one batch to the next, a factor moves by no more than RATE.
3. A function of the episodes of all ranks, in batches that had ended when the batch in question may have been begun
   (`lag`). So every rank has the same weights, groups are judged under the weights that they are trained under, and a
   run that resumes has the same ones to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from math import fsum, sqrt
from typing import Any

from trainer.training.learnt import Delayed

RATE = 0.1
"""How far a factor goes towards its target with each batch: half of the way in seven batches."""
LEAST = 0.1
"""The least factor: a group whose episodes differ in one reward alone still teaches that."""

Columns = Sequence[Sequence[float]]
"""The values of each reward function over the episodes of a group, correctness first."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A batch's rewards, correctness first: means, spreads within groups, and least values."""

    means: tuple[float, ...]
    spreads: tuple[float, ...]
    least: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Followed:
    """Where the factors are, and the least values seen on the way; no values before the first batch."""

    factors: tuple[float, ...]
    least: tuple[float, ...] = ()


class AdaptiveWeights:
    """The reward weights of each batch.

    `base`: `--reward_weights`. `lag`: so many batches before one may not have ended when it is begun.
    """

    def __init__(self, base: Sequence[float], lag: int = 0) -> None:
        self._base = tuple(base)
        self._followed = Delayed(Followed((1.0,) * len(self._base)), follow, lag)

    def of(self, batch: int) -> tuple[float, ...]:
        """Return the weights that a batch is judged and trained under."""
        factors = self._followed.state_of(batch).factors
        return tuple(weight * factor for weight, factor in zip(self._base, factors, strict=True))

    def observe(self, batch: int, groups: Sequence[Columns]) -> None:
        """Learn what the groups of a batch came to; called once for each batch, in their order."""
        measured = measure(groups)
        if measured is None:
            self._followed.advance(batch)
        else:
            self._followed.add(batch, measured)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        followed = self._followed.state
        recent = [[batch, *map(list, astuple(measured))] for batch, measured in self._followed.pending]
        return {"factors": list(followed.factors), "least": list(followed.least), "recent": recent}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint kept."""
        self._followed.state = Followed(tuple(state["factors"]), tuple(state["least"]))
        self._followed.pending = [(batch, Measured(*map(tuple, measured))) for batch, *measured in state["recent"]]


def measure(groups: Sequence[Columns]) -> Measured | None:
    """Return what groups came to; None where none has two episodes to compare."""
    compared = [group for group in groups if len(group[0]) > 1]
    if not compared:
        return None
    columns = [[value for column in columns for value in column] for columns in zip(*compared, strict=True)]
    variances = [[_variance(column) for column in columns] for columns in zip(*compared, strict=True)]
    return Measured(
        tuple(_mean(column) for column in columns),
        tuple(sqrt(_mean(of_groups)) for of_groups in variances),
        tuple(min(column) for column in columns),
    )


def follow(followed: Followed, measured: Measured) -> Followed:
    """Return where the factors are after a batch."""
    least = tuple(map(min, zip(followed.least or measured.least, measured.least, strict=True)))
    teaches = [
        # Neither is exactly 0 where a sum was rounded.
        spread / (mean - low) if spread > TINY and mean - low > TINY else 0.0
        for mean, spread, low in zip(measured.means, measured.spreads, least, strict=True)
    ]
    correctness = teaches[0]
    targets = [min(1.0, max(LEAST, teach / correctness)) if correctness else 1.0 for teach in teaches]
    factors = [factor + RATE * (target - factor) for factor, target in zip(followed.factors, targets, strict=True)]
    return Followed(tuple(factors), least)


TINY = 1e-9
"""Below any difference between two rewards."""


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return _mean([(value - mean) ** 2 for value in values])
