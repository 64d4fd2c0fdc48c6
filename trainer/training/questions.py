"""How training is cut into batches, which questions each asks, and which stand ready to replace those without signal.

`EpochOrder` is TRL's own: every question once in an epoch, shuffled anew in each. It is a function of the seed and the
batch's number, so that every rank, and a run that resumes, draws the same.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from trl import GRPOConfig
from trl.trainer.utils import RepeatSampler

from env_server.dataset import Dataset, Hardness, Question, Split
from trainer.config import ConfigError, EpisodeArguments
from trainer.rollout.client import derive_seed


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How TRL cuts training into batches. A step is one update of the weights."""

    rows: int
    """Of one rank, in a batch."""
    generations: int
    """Episodes of a group."""
    batches_per_step: int
    steps_per_batch: int
    """One of the two is 1."""

    @classmethod
    def of(cls, grpo: GRPOConfig) -> BatchShape:
        """The shape of a run's batches."""
        micro_batches = grpo.steps_per_generation * grpo.num_iterations
        accumulated = grpo.gradient_accumulation_steps
        return cls(
            rows=grpo.per_device_train_batch_size * grpo.steps_per_generation,
            generations=grpo.num_generations,
            batches_per_step=max(1, accumulated // micro_batches),
            steps_per_batch=ceil(micro_batches / accumulated),
        )

    def step_of(self, batch: int) -> int:
        """The first step that trains on a batch."""
        return batch // self.batches_per_step * self.steps_per_batch

    def first_batch(self, step: int) -> int:
        """The first batch that is generated in a step, or that the step is in the midst of."""
        return step // self.steps_per_batch * self.batches_per_step

    def lag(self, staleness: int) -> int:
        """So many batches just before one may not have ended when it may be begun."""
        return (staleness + 1) * self.batches_per_step - 1 if staleness else 0


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
        """Return the ids of all questions, each once: the batch's `count` first, then those that may replace them.

        Batches are drawn in order; another one starts again from the first.
        """
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

    def _all(self, count: int) -> Iterator[list[int]]:
        sampler = RepeatSampler(
            self._ids, mini_repeat_count=1, batch_size=count, shuffle=self._shuffle, seed=self._seed
        )
        while True:
            epoch = list(sampler)
            yield from (epoch[start : start + count] for start in range(0, len(epoch), count))


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


def require_questions(questions: Sequence[Question], grpo: GRPOConfig) -> None:
    """Refuse a data set that does not fill one step: TRL would drop the step, and train nothing without a word.

    Raises ConfigError.
    """
    count = len(questions)
    wanted = grpo.generation_batch_size // grpo.num_generations
    if count < wanted:
        fix = "Give more questions, or lower --per_device_train_batch_size or --gradient_accumulation_steps"
        raise ConfigError(f"one step plays {wanted} questions, and the data set has {count} for training. {fix}")
