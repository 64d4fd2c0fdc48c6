"""Guided starts: a question whose group is all wrong is played again from further on (`--guided_starts`).

Such a group teaches nothing about answers, and with small models most groups are such. Its question is asked a second
time, now, with the first steps of a way to the answer given: really taken in the environment, shown to the policy, and
not trained on. How many are left to the policy rises with its success, so that starts move back to the question itself,
level of difficulty by level of difficulty. The way is the oracle's, or, where there is an answer and no SQL, one that
the policy itself has found earlier in the run.

After reverse curricula: Florensa et al., 2017, "Reverse Curriculum Generation for Reinforcement Learning",
arXiv:1707.05300; Salimans and Chen, 2018, arXiv:1812.03381, who learn from one demonstration by starting ever earlier
on it; R3 (Xi et al., 2024, "Training Large Language Models for Reasoning through Reverse Curriculum Reinforcement
Learning", arXiv:2402.05808), who do that for language models. Here every question is first asked without help, and
helped only where no episode of its group is right. Guarantees:

1. What is given is a function of the question, and of the results of batches that had ended when the batch in question
   may have been begun (`lag`): the same on every rank, and in a run that resumes.
2. All episodes of a guided group begin with the same steps, so that they are compared with each other alone.
3. The last step is never given, and an unguided episode counts nowhere as a guided one, or the other way round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TypedDict

from env_server.dataset import Dataset
from env_server.sql.pool import DatabasePool
from env_server.types import ActionType, AnswerMode, SQLAction
from trainer.rollout.episodes import Episode, EpisodeRecord
from trainer.rollout.players import as_shown_to_players, oracle_plan
from trainer.training.stateful import Delayed

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


def follow(left: int, episodes: Sequence[GuidedEpisode]) -> int:
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
    left = {level: follow(known["left"].get(level, FIRST_LEFT), group) for level, group in by_hardness.items()}
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
