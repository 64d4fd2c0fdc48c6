"""The rules of the game: one episode at a time, one question about one hidden database. Pure, no I/O.

A step has three parts. `plan` returns the job that the action needs (`env_server.actions`), or its outcome where it
needs none. The caller runs the job. `apply` takes the outcome and returns the observation. Planning changes nothing, so
a step whose job was not run has not been taken; and no step is computed twice.

Invariants:
- An action takes time and memory that do not grow with it: a longer argument than MAX_ARGUMENT_CHARS is an error.
- The same data set, question and actions give byte-identical observations and rewards.
- Whatever an agent sends is answered by an observation; only the caller's own mistakes raise.
- A question without a gold is played as any other; its ANSWER ends the episode unjudged, and nothing pays progress.
- The gold SQL, the gold rows and anything derived from them leave only as reward numbers and, once done, as
  the verdict.

Free of global state. Used by one thread at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from env_server.actions import (
    HISTORY_CHARS,
    ActionContext,
    ActionOutcome,
    Job,
    JudgeJob,
    Outcome,
    plan_action,
    shorten,
)
from env_server.cache import LRUCache
from env_server.dataset import Dataset, Question, Split
from env_server.errors import EpisodeOverError, NoEpisodeError, SQLEnvError, StalePlanError
from env_server.judging.verdict import Judgement, judge_value
from env_server.reward import EpisodeRewards
from env_server.settings import EnvSettings
from env_server.sql.pool import QueryJob
from env_server.sql.schema import Schema
from env_server.types import ActionType, AnswerMode, RewardComponents, SQLAction, SQLObservation, SQLState, Verdict

MAX_SCORES = 8_192
LONGEST_TEXT = 1_000
"""Characters of a query or an answer whose score is cached."""

T = TypeVar("T", float, Judgement)


class ScoreCache(LRUCache[tuple[str, str], T]):
    """What texts are worth to questions: a function of both, since the same statement gives the same rows."""

    def score(self, question_id: str, text: str, compute: Callable[[], T]) -> T:
        """Return what a text is worth to a question; computed where it is not known."""
        key = (question_id, text)
        score = self.get(key)
        if score is None:
            score = compute()
            if len(text) <= LONGEST_TEXT:
                self.put(key, score)
        return score


class Scores:
    """The scores of a data set's questions; the rollouts of a group query and answer much the same.

    For all engines of one thread that play on it with the same settings.
    """

    def __init__(self, max_scores: int = MAX_SCORES) -> None:
        self.phi: ScoreCache[float] = ScoreCache(max_scores)
        """Of queries: how close their rows are to the gold rows."""
        self.judgements: ScoreCache[Judgement] = ScoreCache(max_scores)
        """Of typed answers."""


@dataclass(slots=True)
class _Episode:
    """What changes while an episode is played."""

    episode_id: str
    question: Question
    context: ActionContext
    rewards: EpisodeRewards
    schema_info: str
    described: set[str] = field(default_factory=set)
    history: list[str] = field(default_factory=list)
    steps: int = 0
    done: bool = False


class PlannedStep(NamedTuple):
    """An action, and what it needs: the outcome of `job`; where that is None, `outcome` is what the action gives."""

    kind: str
    argument: str
    job: Job | None
    outcome: Outcome | None
    episode: _Episode
    number: int
    """Steps that the episode had when the action was planned."""


class EpisodeEngine:
    """Plays episodes over a data set.

    `schema` returns a database's schema. `answer_mode` decides what ANSWER carries: a value, or a query that yields it,
    which takes a JudgeJob.
    """

    def __init__(
        self,
        dataset: Dataset,
        schema: Callable[[str], Schema],
        settings: EnvSettings | None = None,
        answer_mode: AnswerMode = AnswerMode.VALUE,
        scores: Scores | None = None,
    ) -> None:
        self._dataset = dataset
        self._schema = schema
        self._settings = settings or EnvSettings()
        self._answer_mode = answer_mode
        self._scores = scores or Scores(max_scores=0)
        self._episode: _Episode | None = None

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        question_id: str | None = None,
        split: Split = Split.ALL,
    ) -> SQLObservation:
        """Start an episode and return its first observation: the question and the table names.

        The question is `question_id`, else one of `split` drawn by `seed` (unseeded when None). Raises
        UnknownQuestionError, SQLEnvError when the split is empty, and what `schema` raises.
        """
        question = self._dataset.question(question_id) if question_id else self._draw(seed, split)
        schema = self._schema(question.db_id)
        judge = partial(self._judge, question)
        self._episode = episode = _Episode(
            episode_id=episode_id or f"{question.question_id}#{seed if seed is not None else 0}",
            question=question,
            context=ActionContext(question.db_id, schema, self._settings.display, judge),
            rewards=EpisodeRewards(
                question.gold,
                self._settings.reward,
                row_limit=self._settings.display.max_rows,
                cached=partial(self._scores.phi.score, question.question_id),
            ),
            schema_info="Tables: " + ", ".join(schema.table_names),
        )
        return self._observe(episode, ActionOutcome(), RewardComponents())

    def plan(self, action: SQLAction) -> PlannedStep:
        """Return what an action needs; changes nothing.

        Raises NoEpisodeError before `reset`, EpisodeOverError after the end.
        """
        episode = self._current()
        if episode.done:
            raise EpisodeOverError("the episode is over; call reset to start another one")
        # No action has a longer name, and one more character than the history shows tells that it is cut.
        kind = action.action_type.strip()[: HISTORY_CHARS + 1].upper()
        argument = action.argument.strip()
        need = plan_action(kind, argument, episode.context)
        job, outcome = (need, None) if isinstance(need, QueryJob | JudgeJob) else (None, need)
        return PlannedStep(kind, argument, job, outcome, episode, episode.steps)

    def apply(self, step: PlannedStep, outcome: Outcome | None = None) -> SQLObservation:
        """Take the step that was planned last; `outcome` is what its job gave, if it has one.

        Raises StalePlanError when the episode has gone on since the step was planned, or another one has begun.
        """
        episode = step.episode
        if episode is not self._episode or step.number != episode.steps:
            raise StalePlanError("the step was planned for an earlier state of the episode; plan it again")
        outcome = outcome or step.outcome
        assert outcome is not None, "the outcome of the step's job is given"
        episode.steps += 1
        episode.history.append(shorten(f"{step.kind} {step.argument}"))
        if isinstance(outcome, Judgement):
            return self._end(episode, step.argument, Verdict.CORRECT if outcome.correct else Verdict.WRONG)
        if step.kind == ActionType.ANSWER and not outcome.error:
            return self._end(episode, step.argument, Verdict.UNJUDGED)
        return self._explore(episode, step, outcome)

    @property
    def state(self) -> SQLState:
        """Episode id and step count, nothing more. Raises NoEpisodeError before `reset`."""
        episode = self._current()
        return SQLState(episode_id=episode.episode_id, step_count=episode.steps)

    @property
    def question(self) -> Question:
        """The question, its gold included: for who plays in this process. Raises NoEpisodeError before `reset`."""
        return self._current().question

    def _current(self) -> _Episode:
        if self._episode is None:
            raise NoEpisodeError("no episode: call reset first")
        return self._episode

    def _draw(self, seed: int | None, split: Split) -> Question:
        questions = self._dataset.select(split)
        if not questions:
            raise SQLEnvError(f"data set {self._dataset.name} has no usable question in split {split.value!r}")
        return random.Random(seed).choice(questions)

    def _judge(self, question: Question, argument: str) -> Job | Outcome:
        if not question.judged:
            return ActionOutcome()
        if self._answer_mode is AnswerMode.SQL:
            return JudgeJob(question, argument)
        return self._scores.judgements.score(
            question.question_id, argument, lambda: judge_value(argument, question.gold)
        )

    def _explore(self, episode: _Episode, step: PlannedStep, outcome: ActionOutcome) -> SQLObservation:
        if step.kind == ActionType.DESCRIBE and not outcome.error and outcome.result not in episode.described:
            episode.described.add(outcome.result)
            episode.schema_info += "\n\n" + outcome.result
        rows = outcome.rows if step.kind == ActionType.QUERY and episode.question.judged else None
        reward = episode.rewards.explore(
            step.kind,
            step.argument,
            ok=not outcome.error,
            rows=None if rows is None else rows.rows,
            row_count=None if rows is None else rows.row_count,
        )
        verdict = None
        if episode.steps >= self._settings.step_budget:
            episode.done, verdict = True, Verdict.OUT_OF_BUDGET
        return self._observe(episode, outcome, reward, verdict)

    def _end(self, episode: _Episode, argument: str, verdict: Verdict) -> SQLObservation:
        episode.done = True
        reward = episode.rewards.answer(argument, correct=verdict is Verdict.CORRECT)
        word = "not judged" if verdict is Verdict.UNJUDGED else verdict.value
        return self._observe(episode, ActionOutcome(result=f"The answer is {word}."), reward, verdict)

    def _observe(
        self,
        episode: _Episode,
        outcome: ActionOutcome,
        reward: RewardComponents,
        verdict: Verdict | None = None,
    ) -> SQLObservation:
        metadata: dict[str, object] = {}
        if episode.steps:
            metadata["reward_components"] = dict(vars(reward))
        if verdict is not None:
            metadata["verdict"] = verdict.value
        remaining = self._settings.step_budget - episode.steps
        return SQLObservation(
            done=episode.done,
            reward=reward.total,
            question=question_text(episode.question),
            schema_info=episode.schema_info,
            result=outcome.result,
            error=outcome.error,
            step_count=episode.steps,
            budget_remaining=remaining,
            action_history=list(episode.history),
            metadata=metadata,
        )


def question_text(question: Question) -> str:
    """Return a question as it is asked: with the outside knowledge that BIRD calls evidence."""
    return f"{question.text}\nHint: {question.evidence}" if question.evidence else question.text
