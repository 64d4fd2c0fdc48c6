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
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

from env_server.dataset import Dataset
from env_server.sql.pool import DatabasePool
from env_server.types import ActionType, AnswerMode, SQLAction
from trainer.rollout.episodes import Episode
from trainer.rollout.players import as_shown_to_players, oracle_plan
from trainer.training.learnt import Delayed

FIRST_LEFT = 2
"""Steps that are left to the policy at first: as a rule, to ask the query and to answer."""
RISE = 0.25
"""Success of a batch's guided episodes from which on one step more is left to the policy; one less where none is right.

Low, since a group has signal as soon as one episode is right, and the fewer steps are given, the more is learnt that
counts without help: with all but the ANSWER given, a policy learns to copy.
"""

Actions = tuple[SQLAction, ...]
Give = Callable[[str], Actions]
"""The steps that are given to episodes of a question, by its id; none where no way is known."""


@dataclass(frozen=True, slots=True)
class GuidedResult:
    """What came of one guided group. Failed episodes are not in `played`."""

    hardness: str
    given: int
    solved: int
    played: int


Results = tuple[Sequence[GuidedResult], Mapping[str, Actions]]
"""Of a batch: its guided groups, and the policy's own ways."""


@dataclass(frozen=True, slots=True)
class Known:
    """What has been learnt: steps that are left to the policy, by difficulty, and ways of its own, by question."""

    left: Mapping[str, int]
    ways: Mapping[str, Actions]


def given_steps(steps: int, left: int) -> int:
    """Return how many of a way's steps are given: all but `left`, but one at least and never the last."""
    return max(0, min(steps - 1, max(1, steps - left)))


def follow(left: int, results: Sequence[GuidedResult]) -> int:
    """Return how many steps are left to the policy after guided groups of one difficulty."""
    success = sum(each.solved for each in results) / max(1, sum(each.played for each in results))
    if success >= RISE and any(each.given > 1 for each in results):
        return left + 1
    return left if success else max(1, left - 1)


def learn(known: Known, results: Iterable[GuidedResult], ways: Mapping[str, Actions]) -> Known:
    """Return what is known after a batch; of the ways to an answer, the shortest is kept."""
    by_hardness: defaultdict[str, list[GuidedResult]] = defaultdict(list)
    for result in results:
        if result.played:
            by_hardness[result.hardness].append(result)
    left = {level: follow(known.left.get(level, FIRST_LEFT), group) for level, group in by_hardness.items()}
    shorter = {name: way for name, way in ways.items() if name not in known.ways or len(way) < len(known.ways[name])}
    return Known({**known.left, **left}, {**known.ways, **shorter})


class GuidedStarts:
    """What episodes of a question are given. `lag`: so many batches before one may not have ended when it is begun."""

    def __init__(self, dataset: Dataset, databases: DatabasePool, answer_mode: AnswerMode, lag: int = 0) -> None:
        self._dataset = dataset
        self._databases = databases
        self._answer_mode = answer_mode
        self._known: Delayed[Known, Results] = Delayed(
            Known({}, {}), lambda known, results: learn(known, *results), lag
        )

    def of(self, batch: int) -> Give:
        """Return what a batch's guided groups are given."""
        return partial(self._give, self._known.state_of(batch))

    def _give(self, known: Known, question_id: str) -> Actions:
        question = self._dataset.question(question_id)
        way: Sequence[SQLAction] = known.ways.get(question_id, ())
        if question.gold_sql:
            shown = as_shown_to_players(question, self._databases)
            way = oracle_plan(shown, self._databases.schema(question.db_id).table_names, self._answer_mode)
        return tuple(way[: given_steps(len(way), known.left.get(question.hardness.value, FIRST_LEFT))])

    def ways(self, episodes: Iterable[Episode]) -> dict[str, Actions]:
        """Return the shortest right way, with a query on it, of each question that has no gold SQL."""
        found: dict[str, Actions] = {}
        for episode in sorted((each for each in episodes if each.correct), key=lambda each: len(each.turns)):
            asked = any(turn.action_type == ActionType.QUERY and not turn.error for turn in episode.turns)
            if asked and not self._dataset.question(episode.question_id).gold_sql:
                way = tuple(SQLAction(action_type=turn.action_type, argument=turn.argument) for turn in episode.turns)
                found.setdefault(episode.question_id, way)
        return found

    def observe(self, batch: int, results: Sequence[GuidedResult], ways: Iterable[Mapping[str, Actions]]) -> None:
        """Learn what came of a batch; `ways` are those of each rank. Called once for each batch, in their order."""
        merged: dict[str, Actions] = {}
        for part in ways:
            merged = dict(learn(Known({}, merged), (), part).ways)
        self._known.add(batch, (list(results), merged))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        known = self._known.state
        recent = [
            [batch, [astuple(each) for each in results], _written(ways)]
            for batch, (results, ways) in self._known.pending
        ]
        return {"left": dict(known.left), "ways": _written(known.ways), "recent": recent}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint kept."""
        self._known.state = Known(state["left"], _read(state["ways"]))
        self._known.pending = [
            (batch, ([GuidedResult(*each) for each in results], _read(ways)))
            for batch, results, ways in state["recent"]
        ]


def _written(ways: Mapping[str, Actions]) -> dict[str, list[list[str]]]:
    return {name: [[action.action_type, action.argument] for action in way] for name, way in ways.items()}


def _read(ways: Mapping[str, Sequence[Sequence[str]]]) -> dict[str, Actions]:
    return {
        name: tuple(SQLAction(action_type=kind, argument=argument) for kind, argument in way)
        for name, way in ways.items()
    }
