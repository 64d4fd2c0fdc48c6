"""What a run learns from its episodes besides the policy's weights: adaptive reward weights, and guided starts.

Adaptive weights (`--reward_weighting adaptive`) are after SAW (He et al., 2026, arXiv:2606.07705). Over a batch, a
reward's coefficient of variation is c = s / (m - l): its spread within groups (what GRPO compares), its mean, and the
least value seen so far. A mastered reward is high and differs little, so its c is small. Correctness keeps its weight;
the factor of every other reward goes RATE of the way to its c in relation to correctness's, within [LEAST, 1], and to 1
where correctness tells no episodes of a batch apart. So no weight exceeds its base.

Guided starts (`--guided_starts`) are reverse curricula (Florensa et al., 2017, arXiv:1707.05300; Salimans and Chen,
2018, arXiv:1812.03381; R3, Xi et al., 2024, arXiv:2402.05808), here for questions whose group is all wrong alone. Such
a question is asked a second time, with the first steps of a way to the answer given: really taken in the environment,
shown to the policy, and masked. How many steps are left to the policy rises with its success, by difficulty. The way is
the oracle's, or, where there is an answer and no SQL, one that the policy itself has found earlier in the run.

Guarantees:

1. Both are functions of the results of batches that had ended when the batch in question may have been begun: the same
   on every rank, and in a run that resumes (`Delayed`).
2. All episodes of a guided group begin with the same steps, so that they are compared with each other alone.
3. The last step is never given, and an unguided episode counts nowhere as a guided one, or the other way round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import fsum, sqrt
from statistics import fmean
from typing import Any, Generic, TypedDict, TypeVar

from env_server.dataset import Dataset
from env_server.sql.pool import DatabasePool
from env_server.types import ActionType, AnswerMode, SQLAction
from trainer.config import ConfigError
from trainer.rollout.episodes import Episode, EpisodeRecord
from trainer.rollout.players import as_shown_to_players, oracle_plan

S = TypeVar("S")
R = TypeVar("R")


class Delayed(Generic[S, R]):
    """A state that each batch's results update, as later batches may know it; both of JSON's types. `Stateful`.

    `lag`: the number of batches before one that may not have ended when it is started. `state_of` is a function of the
    batches before those, however early or late the others end: the same on every rank, and in a run that resumes.
    """

    def __init__(self, initial: S, update: Callable[[S, R], S], lag: int) -> None:
        self._state = initial
        """What every batch to come may know."""
        self._pending: list[tuple[int, R]] = []
        """Batches whose results are not in `_state` yet, with their results."""
        self._update = update
        self._lag = lag

    def state_of(self, batch: int) -> S:
        """Return what a batch may know."""
        state = self._state
        for earlier, results in self._pending:
            if earlier < batch - self._lag:
                state = self._update(state, results)
        return state

    def add(self, batch: int, results: R) -> None:
        """Take the results of a batch; called once for each batch, in their order."""
        self._pending.append((batch, results))
        while self._pending and self._pending[0][0] <= batch - self._lag:
            self._state = self._update(self._state, self._pending.pop(0)[1])

    def state_dict(self) -> dict[str, Any]:
        """See `Stateful`."""
        return {"state": self._state, "pending": list(self._pending)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Stateful`."""
        self._state = state["state"]
        self._pending = [(batch, results) for batch, results in state["pending"]]


RATE = 0.1
LEAST = 0.1
TINY = 1e-9
"""Below any difference between two rewards; a rounded sum is not exactly 0."""

Values = dict[str, list[float]]


class AdaptiveWeights(Delayed[Values, Values]):
    """The reward weights of each batch. `base`: `--reward_weights`, correctness first; `lag`: see `Delayed`."""

    def __init__(self, base: Sequence[float], lag: int = 0) -> None:
        super().__init__({"factors": [1.0] * len(base), "least": []}, move_factors, lag)
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


def move_factors(known: Values, batch: Values) -> Values:
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


FIRST_LEFT = 2
"""Steps that are left to the policy at first: as a rule, to ask the query and to answer."""
RISE = 0.25
"""Success of a batch's guided episodes from which on one step more is left to the policy; one less where none is right.

Low, since a group has signal as soon as one episode is right, and the fewer steps are given, the more is learnt that
counts without help: with all but the ANSWER given, a policy learns to copy.
"""

Way = list[list[str]]
"""Actions, each as its type and argument."""
Give = Callable[[str], tuple[SQLAction, ...]]
"""The steps that are given to episodes of a question, by its id; none where no way is known."""


class Known(TypedDict):
    """What has been learnt: steps that are left to the policy, by difficulty, and ways of its own, by question."""

    left: dict[str, int]
    ways: dict[str, Way]


class GuidedEpisode(TypedDict):
    """What is kept of a guided episode."""

    hardness: str
    given_steps: int
    correct: bool


class Results(TypedDict):
    """Of a batch: the records of its guided episodes that did not fail, in brief, and the policy's own ways."""

    episodes: list[GuidedEpisode]
    ways: dict[str, Way]


def given_steps(steps: int, left: int) -> int:
    """Return how many of a way's steps are given: all but `left`, but one at least and never the last."""
    return max(0, min(steps - 1, max(1, steps - left)))


def steps_left(left: int, episodes: Sequence[GuidedEpisode]) -> int:
    """Return how many steps are left to the policy after guided episodes of one difficulty."""
    success = fmean(each["correct"] for each in episodes)
    if success >= RISE and any(each["given_steps"] > 1 for each in episodes):
        return left + 1
    return left if success else max(1, left - 1)


def learn(known: Known, results: Results) -> Known:
    """Return what is known after a batch; of the ways to an answer, the shortest is kept."""
    by_hardness: defaultdict[str, list[GuidedEpisode]] = defaultdict(list)
    for each in results["episodes"]:
        by_hardness[each["hardness"]].append(each)
    left = {level: steps_left(known["left"].get(level, FIRST_LEFT), group) for level, group in by_hardness.items()}
    return {"left": {**known["left"], **left}, "ways": shortest([known["ways"], results["ways"]])}


def shortest(parts: Iterable[Mapping[str, Way]]) -> dict[str, Way]:
    """Return the shortest way of each question; of equally long ones, the first."""
    merged: dict[str, Way] = {}
    for part in parts:
        merged |= {name: way for name, way in part.items() if name not in merged or len(way) < len(merged[name])}
    return merged


class GuidedStarts(Delayed[Known, Results]):
    """What episodes of a question are given. `lag`: see `Delayed`."""

    def __init__(self, dataset: Dataset, databases: DatabasePool, answer_mode: AnswerMode, lag: int = 0) -> None:
        super().__init__({"left": {}, "ways": {}}, learn, lag)
        self._dataset = dataset
        self._databases = databases
        self._answer_mode = answer_mode

    def of(self, batch: int) -> Give:
        """Return what a batch's guided groups are given."""
        return partial(self._give, self.state_of(batch))

    def _give(self, known: Known, question_id: str) -> tuple[SQLAction, ...]:
        question = self._dataset.question(question_id)
        found = known["ways"].get(question_id, [])
        way = [SQLAction(action_type=kind, argument=argument) for kind, argument in found]
        if question.gold_sql:
            shown = as_shown_to_players(question, self._databases)
            way = oracle_plan(shown, self._databases.schema(question.db_id).table_names, self._answer_mode)
        return tuple(way[: given_steps(len(way), known["left"].get(question.hardness.value, FIRST_LEFT))])

    def ways(self, episodes: Iterable[Episode]) -> dict[str, Way]:
        """Return the shortest right way, with a query on it, of each question that has no gold SQL."""
        return shortest(
            {episode.question_id: [[turn.action_type, turn.argument] for turn in episode.turns]}
            for episode in episodes
            if episode.correct
            and any(turn.action_type == ActionType.QUERY and not turn.error for turn in episode.turns)
            and not self._dataset.question(episode.question_id).gold_sql
        )

    def observe(self, batch: int, episodes: Iterable[EpisodeRecord], ways: Iterable[Mapping[str, Way]]) -> None:
        """Learn from a batch's guided episodes; `ways` are those of each rank. Called once for each batch, in order."""
        kept: list[GuidedEpisode] = [
            {"hardness": each.hardness, "given_steps": each.given_steps, "correct": each.correct}
            for each in episodes
            if not each.failed
        ]
        self.add(batch, {"episodes": kept, "ways": shortest(ways)})
