"""Players that are not models: the oracle, the random player, and how to play an episode with one.

A player sees observations and returns actions. The oracle is given the question with its gold, so it exists only
where the data set is local; the random player reads observations alone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Protocol

from env_server.dataset import Dataset, Question, Split, round_robin
from env_server.environment import EnvironmentFactory
from env_server.errors import SQLEnvError
from env_server.judging.answers import format_answer
from env_server.settings import EnvSettings, JudgingSettings
from env_server.sql.pool import Databases
from env_server.sql.spelling import canonicalize
from env_server.types import ActionType, AnswerMode, SQLAction, SQLObservation, SQLState
from trainer.chat.actions import format_action
from trainer.chat.format import Conversation
from trainer.chat.prompts import first_message, observation_message
from trainer.rollout.episodes import Episode, Turn, episode_without_tokens, turn_of


class PlayedEnvironment(Protocol):
    """What playing an episode needs of an environment, wherever that is."""

    def reset(self, *, question_id: str) -> SQLObservation:
        """Start an episode."""

    def step(self, action: SQLAction) -> SQLObservation:
        """Take one action."""

    @property
    def state(self) -> SQLState:
        """The episode's id and step count."""


class NeedsSQLError(SQLEnvError):
    """What was asked for needs gold SQL, and the questions have answers alone."""


class Player(Protocol):
    """Chooses the next action."""

    def act(self, observation: SQLObservation) -> SQLAction:
        """Return the action to take on what is seen."""


_NAME = re.compile(r"""'(?:[^']|'')*'|"(?P<quoted>[^"]*)"|(?P<name>\w+)""")
"""A name, bare or quoted; string literals match without a group and are passed over."""


def _action(kind: ActionType, argument: str) -> SQLAction:
    return SQLAction(action_type=kind.value, argument=argument)


class OraclePlayer:
    """Knows the gold: describes the tables it uses, runs it, and answers with its rows (or with the SQL itself)."""

    def __init__(self, question: Question, answer_mode: AnswerMode = AnswerMode.VALUE) -> None:
        self._question = question
        self._answer_mode = answer_mode
        self._plan: Iterator[SQLAction] | None = None

    def act(self, observation: SQLObservation) -> SQLAction:
        """Return the next action of the plan."""
        if self._plan is None:
            self._plan = iter(oracle_plan(self._question, table_names(observation), self._answer_mode))
        return next(self._plan)


def oracle_plan(question: Question, tables: Sequence[str], answer_mode: AnswerMode) -> list[SQLAction]:
    """Return the oracle's actions on a question about a database with these tables."""
    sql = question.gold_sql
    by_value = answer_mode is AnswerMode.VALUE
    return [
        *(_action(ActionType.DESCRIBE, table) for table in mentioned_tables(sql, tables)),
        _action(ActionType.QUERY, sql),
        _action(ActionType.ANSWER, format_answer(question.gold.rows) if by_value else sql),
    ]


def as_shown_to_players(question: Question, databases: Databases) -> Question:
    """Return the question with its gold query in the spelling that DESCRIBE shows. Raises DataError."""
    return replace(question, gold_sql=canonicalize(question.gold_sql, databases.schema(question.db_id)))


def with_sql(questions: Sequence[Question], what: str) -> list[Question]:
    """Return the questions that have gold SQL. Raises NeedsSQLError when there are questions, and none has."""
    found = [question for question in questions if question.gold_sql]
    if questions and not found:
        raise NeedsSQLError(
            f"{what} needs gold SQL, and the questions have answers alone; give their SQL, or leave it out"
        )
    return found


def mentioned_tables(sql: str, tables: Sequence[str]) -> list[str]:
    """The tables that a query names, in the order of their first mention; every table when it names none."""
    names = {table.casefold(): table for table in tables}
    words = (match.group("name") or match.group("quoted") for match in _NAME.finditer(sql) if match.lastgroup)
    mentioned = dict.fromkeys(names[word.casefold()] for word in words if word.casefold() in names)
    return list(mentioned) or list(tables)


class RandomPlayer:
    """Takes random actions on what it has seen: tables, columns of described tables, cells of results.

    The floor of the comparison table: valid actions without any understanding of the question.
    """

    def __init__(self, seed: int, answer_mode: AnswerMode = AnswerMode.VALUE) -> None:
        self._random = random.Random(seed)
        self._answer_mode = answer_mode
        self._columns: dict[str, list[str]] = {}
        self._cells: list[str] = []
        self._described = ""

    def act(self, observation: SQLObservation) -> SQLAction:
        """Return a random action."""
        tables = table_names(observation)
        self._learn(observation)
        kinds = [ActionType.DESCRIBE, ActionType.SAMPLE, ActionType.QUERY]
        if self._cells and (observation.budget_remaining == 1 or self._random.random() < 0.25):
            return _action(ActionType.ANSWER, self._answer(tables))
        kind = self._random.choice(kinds)
        if kind is ActionType.QUERY:
            return _action(kind, self._query(tables))
        table = self._described = self._random.choice(tables)
        return _action(kind, table)

    def _learn(self, observation: SQLObservation) -> None:
        if not observation.result:
            return
        lines = observation.result.splitlines()
        if observation.action_history[-1].startswith(ActionType.DESCRIBE):
            self._columns[self._described] = [line.split(" ")[0] for line in lines[1:] if line]
        else:
            self._cells += [cell.strip() for line in lines[1:] for cell in line.split("|") if cell.strip()]

    def _query(self, tables: Sequence[str]) -> str:
        table = self._random.choice(tables)
        target = self._random.choice(["COUNT(*)", *self._columns.get(table, ["*"])])
        order = self._random.choice(["", " ORDER BY 1", " ORDER BY 1 DESC"])
        return f'SELECT {target} FROM "{table}"{order} LIMIT {self._random.randint(1, 5)}'

    def _answer(self, tables: Sequence[str]) -> str:
        if self._answer_mode is AnswerMode.SQL:
            return self._query(tables)
        return self._random.choice(self._cells)


def table_names(observation: SQLObservation) -> list[str]:
    """The database's tables, as `reset` shows them."""
    return observation.schema_info.splitlines()[0].removeprefix("Tables: ").split(", ")


def play(environment: PlayedEnvironment, question: Question, player: Player) -> tuple[Episode, Conversation]:
    """Play one episode; its token row is empty, since no tokens were generated."""
    observation = environment.reset(question_id=question.question_id)
    opening = first_message(observation)
    turns: list[Turn] = []
    chat: list[tuple[SQLAction, str]] = []
    while not observation.done:
        action = player.act(observation)
        text = format_action(action.action_type, action.argument)
        observation = environment.step(action)
        chat.append((action, "" if observation.done else observation_message(observation)))
        turns.append(turn_of(text, action, observation))
    episode = episode_without_tokens(question, environment.state.episode_id, observation, turns)
    return episode, Conversation(opening, tuple(chat))


class FewShotError(SQLEnvError):
    """There are not as many worked episodes as were asked for; the text says how many there are."""


class Examples:
    """Worked episodes that a prompt shows before every question (`--few_shot`), and the questions that they give away.

    The oracle plays them on training databases, as many as there can be, in an order that depends on the data set
    alone. Their questions are in the prompt, so they are not asked.
    """

    def __init__(self, worked: Sequence[tuple[Question, Conversation]] = ()) -> None:
        self.questions = [question for question, _ in worked]
        self.conversations = [conversation for _, conversation in worked]

    @classmethod
    def play(cls, dataset: Dataset, count: int, answer_mode: AnswerMode, step_budget: int) -> Examples:
        """Have the oracle play `count` episodes. Raises FewShotError."""
        if not count:
            return cls()
        worked: list[tuple[Question, Conversation]] = []
        settings = EnvSettings(step_budget=step_budget, judging=JudgingSettings(variants=False))
        with EnvironmentFactory(dataset, settings, answer_mode) as factory:
            environment = factory.make()
            training = with_sql(dataset.select(Split.TRAIN), "--few_shot")
            for written in round_robin(sorted(training, key=attrgetter("db_id"))):
                question = as_shown_to_players(written, factory.pool)
                episode, conversation = play(environment, question, OraclePlayer(question, answer_mode))
                if episode.correct:
                    worked.append((question, conversation))
                if len(worked) == count:
                    return cls(worked)
        raise FewShotError(f"--few_shot {count}: the training questions of {dataset.name} give {len(worked)} episodes")

    def without(self, questions: Sequence[Question]) -> list[Question]:
        """Return the questions that are not given away."""
        known = {question.question_id for question in self.questions}
        return [question for question in questions if question.question_id not in known]
