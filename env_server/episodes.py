"""SQLEnvironment: one episode at a time, one question about one hidden database.

Promises:
- The same data set, question and actions give byte-identical observations and rewards.
- Whatever an agent sends is answered by an observation; only the caller's own mistakes raise.
- The gold SQL, the gold rows and anything derived from them leave only as reward numbers and, once done, as
  the verdict.

Synchronous and free of global state. Many environments share one data set and one pool of databases; a single
environment is used by one thread at a time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

from env_server.dataset import Dataset, Question, Split
from env_server.errors import EpisodeOverError, NoEpisodeError, SQLEnvError
from env_server.explorer import ActionOutcome, Explorer, Outcomes, one_line
from env_server.judging.verdict import judge_value
from env_server.reward import EpisodeRewards
from env_server.scores import Scores
from env_server.settings import EnvSettings
from env_server.sql.pool import Databases
from env_server.test_suites.judge import QueryJudge, SQLJudge
from env_server.types import (
    ActionType,
    AnswerMode,
    RewardComponents,
    SQLAction,
    SQLObservation,
    SQLState,
    Verdict,
)

HISTORY_CHARS = 200
"""Longest entry of `action_history`: a reminder for the agent, not a transcript."""


@dataclass(slots=True)
class _Episode:
    """What changes while an episode is played."""

    episode_id: str
    question: Question
    explorer: Explorer
    rewards: EpisodeRewards
    schema_info: str
    described: set[str] = field(default_factory=set)
    history: list[str] = field(default_factory=list)
    steps: int = 0
    done: bool = False


class SQLEnvironment:
    """Plays episodes over a data set.

    `databases` must hold the data set's. `answer_mode` decides what ANSWER carries: a value, or a query
    that yields it, which `sql_judge` judges (when None, on the database alone). `outcomes` may be shared by all
    environments of the same databases and display settings, `scores` by all of one thread that play the same data set
    with the same settings. `EnvironmentFactory` puts it together.
    """

    def __init__(
        self,
        dataset: Dataset,
        databases: Databases,
        settings: EnvSettings | None = None,
        answer_mode: AnswerMode = AnswerMode.VALUE,
        sql_judge: QueryJudge | None = None,
        outcomes: Outcomes | None = None,
        scores: Scores | None = None,
    ) -> None:
        self._dataset = dataset
        self._databases = databases
        self._settings = settings or EnvSettings()
        self._answer_mode = answer_mode
        self._outcomes = outcomes
        self._scores = scores or Scores(max_scores=0)
        self._sql_judge: QueryJudge = sql_judge or SQLJudge(databases, settings=self._settings.judging)
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
        UnknownQuestionError, and SQLEnvError when the split is empty.
        """
        question = self._dataset.question(question_id) if question_id else self._draw(seed, split)
        schema = self._databases.schema(question.db_id)
        self._episode = episode = _Episode(
            episode_id=episode_id or f"{question.question_id}#{seed if seed is not None else 0}",
            question=question,
            explorer=Explorer(self._databases, question.db_id, self._settings.display, self._outcomes),
            rewards=EpisodeRewards(
                question.gold,
                self._settings.reward,
                row_limit=self._settings.display.max_rows,
                remember=partial(self._scores.phi.get, question.question_id),
            ),
            schema_info="Tables: " + ", ".join(schema.table_names),
        )
        return self._observe(episode, ActionOutcome(), RewardComponents())

    def step(self, action: SQLAction) -> SQLObservation:
        """Take one action. Raises NoEpisodeError before `reset`, EpisodeOverError after the end.

        What `databases` raises, but for SQLError, goes through; the step is then not taken.
        """
        episode = self._current()
        if episode.done:
            raise EpisodeOverError("the episode is over; call reset to start another one")
        kind = action.action_type.strip().upper()
        argument = action.argument.strip()
        # Whatever can raise comes first, so that a step that raises has changed nothing and can be taken again.
        if kind == ActionType.ANSWER and argument:
            correct = self._judge(episode.question, argument)
            self._count(episode, kind, argument)
            return self._end(episode, argument, correct=correct)
        outcome = self._explore(episode, kind, argument)
        self._count(episode, kind, argument)
        if kind == ActionType.DESCRIBE and outcome.ok and outcome.result not in episode.described:
            episode.described.add(outcome.result)
            episode.schema_info += "\n\n" + outcome.result
        rows = outcome.rows if kind == ActionType.QUERY else None
        reward = episode.rewards.explore(
            kind,
            argument,
            ok=outcome.ok,
            rows=None if rows is None else rows.rows,
            row_count=None if rows is None else rows.row_count,
        )
        verdict = None
        if episode.steps >= self._settings.step_budget:
            episode.done, verdict = True, Verdict.OUT_OF_BUDGET
        return self._observe(episode, outcome, reward, verdict)

    @property
    def state(self) -> SQLState:
        """Episode id and step count, nothing more. Raises NoEpisodeError before `reset`."""
        episode = self._current()
        return SQLState(episode_id=episode.episode_id, step_count=episode.steps)

    def _current(self) -> _Episode:
        if self._episode is None:
            raise NoEpisodeError("no episode: call reset first")
        return self._episode

    def _draw(self, seed: int | None, split: Split) -> Question:
        questions = self._dataset.select(split)
        if not questions:
            raise SQLEnvError(f"data set {self._dataset.name} has no usable question in split {split.value!r}")
        return random.Random(seed).choice(questions)

    def _explore(self, episode: _Episode, kind: str, argument: str) -> ActionOutcome:
        match kind:
            case ActionType.DESCRIBE:
                return episode.explorer.describe(argument)
            case ActionType.SAMPLE:
                return episode.explorer.sample(argument)
            case ActionType.QUERY:
                return episode.explorer.query(argument)
            case ActionType.ANSWER:
                return ActionOutcome(error="ANSWER needs the answer")
        return ActionOutcome(error=one_line(f"unknown action {_shorten(kind)!r}; use one of {', '.join(ActionType)}"))

    def _count(self, episode: _Episode, kind: str, argument: str) -> None:
        episode.steps += 1
        episode.history.append(_shorten(f"{kind} {argument}"))

    def _end(self, episode: _Episode, argument: str, *, correct: bool) -> SQLObservation:
        episode.done = True
        reward = episode.rewards.answer(argument, correct=correct)
        verdict = Verdict.CORRECT if correct else Verdict.WRONG
        outcome = ActionOutcome(result=f"The answer is {verdict.value}.")
        return self._observe(episode, outcome, reward, verdict)

    def _judge(self, question: Question, argument: str) -> bool:
        if self._answer_mode is AnswerMode.VALUE:
            return self._scores.correct.get(
                question.question_id, argument, lambda: judge_value(argument, question.gold).correct
            )
        return self._sql_judge.judge(question, argument).correct

    def _observe(
        self,
        episode: _Episode,
        outcome: ActionOutcome,
        reward: RewardComponents,
        verdict: Verdict | None = None,
    ) -> SQLObservation:
        metadata: dict[str, object] = {}
        if episode.steps:
            metadata["reward_components"] = reward.model_dump()
        if verdict is not None:
            metadata["verdict"] = verdict.value
        return SQLObservation(
            done=episode.done,
            reward=reward.total,
            question=_question_text(episode.question),
            schema_info=episode.schema_info,
            result=outcome.result,
            error=outcome.error,
            step_count=episode.steps,
            budget_remaining=self._settings.step_budget - episode.steps,
            action_history=list(episode.history),
            metadata=metadata,
        )


def _question_text(question: Question) -> str:
    """The question, with the outside knowledge that BIRD calls evidence."""
    return f"{question.text}\nHint: {question.evidence}" if question.evidence else question.text


def _shorten(text: str) -> str:
    return text if len(text) <= HISTORY_CHARS else text[: HISTORY_CHARS - 1] + "…"
