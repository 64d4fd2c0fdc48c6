"""Which questions a batch asks, and which stand ready to replace those that teach nothing.

`EpochOrder` is TRL's own: every question once in an epoch, shuffled anew in each. `WeightedOrder` draws by what was
measured: a question that a group always or never solves gives no signal, so it comes seldom; one whose groups differ
comes often; none is ever left out. Promises of both:

- A function of the seed, the batch's number and what was observed of earlier batches: every rank, and a run that
  resumes, draws the same.
- A batch's results count from the batch `lag` + 1 after it. A batch that is played ahead of the trainer is drawn before
  the one in front of it has ended; so what it may know must not depend on how fast that is.

Weight of a question: max(EXPLORATION, p) ramp, where p is the probability that a group of n episodes is neither
solved by all nor by none, under the Beta posterior of its success rate with Jeffreys' prior, Beta(1/2 + solved,
1/2 + failed). Earlier counts fade by `MEMORY` with each group: the policy changes. It is the measure that DAPO's
dynamic sampling (Yu et al., 2025) filters by, here known before the group is played.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trl import GRPOConfig
from trl.trainer.utils import RepeatSampler

from env_server.dataset import Dataset, Hardness, Question, Split
from trainer.config import ConfigError, EpisodeArguments, SQLEnvArguments
from trainer.rollout.client import derive_seed

EXPLORATION = 0.1
"""The least weight, where the largest is 1: how seldom a question comes whose groups never differ."""
MEMORY = 0.7
"""What is left of a question's counts when it is played again."""
EASY = (Hardness.EASY, Hardness.MEDIUM)


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What was measured of one group. Failed episodes are not in `played`."""

    question_id: str
    solved: int
    played: int


class QuestionOrder(Protocol):
    """Draws the questions of batches."""

    def draw(self, batch: int, count: int) -> Sequence[str]:
        """Return the ids of all questions, each once: the batch's `count` first, then those that may replace them."""

    def observe(self, batch: int, results: Sequence[GroupResult]) -> None:
        """Learn what came out of a batch; called once for each, in their order."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; {} when there is nothing to keep."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint kept."""


class EpochOrder:
    """TRL's order: `RepeatSampler` over the questions, as GRPOTrainer's own loader has it."""

    def __init__(self, question_ids: Sequence[str], seed: int, *, shuffle: bool = True) -> None:
        self._ids = list(question_ids)
        self._seed = seed
        self._shuffle = shuffle
        self._batches: Iterator[list[int]] = iter(())
        self._next = 0
        self._count = 0

    def draw(self, batch: int, count: int) -> Sequence[str]:
        """See `QuestionOrder`. Batches are drawn in order; another one starts again from the first."""
        if batch != self._next or count != self._count:
            self._batches, self._next, self._count = self._all(count), 0, count
        while self._next < batch:
            next(self._batches)
            self._next += 1
        chosen = next(self._batches)
        self._next += 1
        others = sorted(set(range(len(self._ids))) - set(chosen))
        random.Random(derive_seed(self._seed, "replacements", batch)).shuffle(others)
        return [self._ids[index] for index in (*chosen, *others)]

    def observe(self, batch: int, results: Sequence[GroupResult]) -> None:
        """Nothing: the order does not depend on results."""

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing."""

    def _all(self, count: int) -> Iterator[list[int]]:
        sampler = RepeatSampler(
            self._ids, mini_repeat_count=1, batch_size=count, shuffle=self._shuffle, seed=self._seed
        )
        while True:
            epoch = list(sampler)
            yield from (epoch[start : start + count] for start in range(0, len(epoch), count))


class WeightedOrder:
    """Draws by weight, without putting a question into a batch twice.

    `generations`: episodes in a group. `measured`: weigh by results. `ramp_batches`: over so many batches, hard and
    extra questions come in, from none to as many as there are.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        seed: int,
        generations: int,
        *,
        lag: int = 0,
        measured: bool = True,
        ramp_batches: int = 0,
    ) -> None:
        self._questions = tuple(questions)
        self._seed = seed
        self._generations = generations
        self._lag = lag
        self._measured = measured
        self._ramp_batches = ramp_batches
        self._counts: dict[str, tuple[float, float]] = {}
        """Solved and failed episodes of a question, faded."""
        self._recent: list[tuple[int, list[GroupResult]]] = []
        """Batches whose results do not count yet."""

    def draw(self, batch: int, count: int) -> Sequence[str]:
        """See `QuestionOrder`."""
        counts = self._known(batch)
        chance = random.Random(derive_seed(self._seed, "questions", batch))
        # Efraimidis and Spirakis (2006): the largest of log(u) / w are a weighted sample without replacement.
        keys = {q.question_id: _key(chance.random(), self._weight(q, batch, counts)) for q in self._questions}
        return sorted(keys, key=lambda question_id: keys[question_id], reverse=True)

    def observe(self, batch: int, results: Sequence[GroupResult]) -> None:
        """See `QuestionOrder`."""
        if not self._measured:
            return
        self._recent.append((batch, list(results)))
        # What the next batch to be drawn may know is known to all after it.
        while self._recent and self._recent[0][0] <= batch - self._lag:
            self._counts = _counted(self._counts, self._recent.pop(0)[1])

    def state(self) -> dict[str, Any]:
        """See `QuestionOrder`."""
        recent = [[batch, [[r.question_id, r.solved, r.played] for r in results]] for batch, results in self._recent]
        return {"counts": {name: list(count) for name, count in self._counts.items()}, "recent": recent}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `QuestionOrder`."""
        self._counts = {name: (float(solved), float(failed)) for name, (solved, failed) in state["counts"].items()}
        self._recent = [(batch, [GroupResult(*result) for result in results]) for batch, results in state["recent"]]

    def _known(self, batch: int) -> Mapping[str, tuple[float, float]]:
        counts = self._counts
        for earlier, results in self._recent:
            if earlier < batch - self._lag:
                counts = _counted(counts, results)
        return counts

    def _weight(self, question: Question, batch: int, counts: Mapping[str, tuple[float, float]]) -> float:
        solved, failed = counts.get(question.question_id, (0.0, 0.0))
        weight = max(EXPLORATION, signal(solved, failed, self._generations)) if self._measured else 1.0
        if question.hardness in EASY or not self._ramp_batches:
            return weight
        return weight * min(1.0, batch / self._ramp_batches)


def signal(solved: float, failed: float, generations: int) -> float:
    """Return the probability that a group's episodes are neither all solved nor all failed.

    `solved` and `failed` are earlier episodes of the question, with Jeffreys' prior.
    """
    a, b = 0.5 + solved, 0.5 + failed
    log_beta = _log_beta(a, b)
    none = math.exp(_log_beta(a, b + generations) - log_beta)
    all_of_them = math.exp(_log_beta(a + generations, b) - log_beta)
    return max(0.0, 1.0 - none - all_of_them)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _counted(
    counts: Mapping[str, tuple[float, float]], results: Sequence[GroupResult]
) -> dict[str, tuple[float, float]]:
    new = dict(counts)
    for result in results:
        solved, failed = new.get(result.question_id, (0.0, 0.0))
        new[result.question_id] = (
            MEMORY * solved + result.solved,
            MEMORY * failed + result.played - result.solved,
        )
    return new


def _key(chance: float, weight: float) -> tuple[float, float]:
    """The larger, the earlier; questions without weight come last, in the order of chance."""
    return (math.log(max(chance, 5e-324)) / weight, chance) if weight > 0 else (-math.inf, chance)


@dataclass(frozen=True, slots=True)
class QuestionFilter:
    """Which training questions are asked: of these levels, about databases of these folds out of so many.

    A database's fold follows from its name alone, so that it stays the same when others come or go.
    """

    levels: tuple[Hardness, ...] = tuple(Hardness)
    folds: frozenset[int] = frozenset((1,))
    of_folds: int = 1

    @classmethod
    def of(cls, arguments: EpisodeArguments) -> QuestionFilter:
        """What the flags ask for. Raises ConfigError."""
        return cls(arguments.difficulties, *arguments.kept_folds)

    def admits(self, question: Question) -> bool:
        """Whether a question is asked, if it is one for training."""
        return question.hardness in self.levels and fold_of(question.db_id, self.of_folds) in self.folds

    def asked(self, dataset: Dataset, data: str) -> list[Question]:
        """The training questions of a data set that are asked. Raises ConfigError when there are some, and none is."""
        questions = dataset.select(Split.TRAIN)
        kept = [question for question in questions if self.admits(question)]
        if questions and not kept:
            there = Counter(question.hardness for question in questions)
            counts = ", ".join(f"{there[level]:,} {level.value}" for level in Hardness if there[level])
            named = ",".join(level.value for level in self.levels)
            parts = ",".join(map(str, sorted(self.folds)))
            folds = "" if self.of_folds == 1 else f" with --folds {parts}/{self.of_folds}"
            raise ConfigError(f"--difficulty {named}{folds} leaves no training question of {data}, which has {counts}")
        return kept


ALL_QUESTIONS = QuestionFilter()
"""No training question is left out."""


def fold_of(db_id: str, count: int) -> int:
    """The fold of a database, 1 to `count`."""
    return 1 + derive_seed("fold", db_id) % count


def question_order(
    arguments: SQLEnvArguments, grpo: GRPOConfig, questions: Sequence[Question], lag: int
) -> QuestionOrder:
    """Return the order that the flags ask for; results count from the batch `lag` + 1 after theirs."""
    if arguments.question_sampler == "epochs" and not arguments.curriculum:
        return EpochOrder([q.question_id for q in questions], grpo.seed, shuffle=grpo.shuffle_dataset)
    return WeightedOrder(
        questions,
        grpo.seed,
        grpo.num_generations,
        lag=lag,
        measured=arguments.question_sampler == "measured",
        ramp_batches=arguments.curriculum,
    )
