"""Worked episodes that a prompt shows before every question: `--few_shot`.

The oracle plays them on training databases, as many as there can be, in an order that depends on the data set alone.
Their questions are known to whoever reads the prompt, so they are not asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from env_server.dataset import Dataset, Question, Split, in_turn
from env_server.errors import SQLEnvError
from env_server.factory import EnvironmentFactory
from env_server.settings import EnvSettings, JudgingSettings
from env_server.types import AnswerMode
from trainer.chat.format import Conversation
from trainer.rollout.players import OraclePlayer, as_shown_to_players, play, with_sql


class FewShotError(SQLEnvError):
    """There are not as many worked episodes as were asked for; the text says how many there are."""


class Examples:
    """Worked episodes, and the questions that they give away."""

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
            for written in in_turn(sorted(training, key=attrgetter("db_id"))):
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
