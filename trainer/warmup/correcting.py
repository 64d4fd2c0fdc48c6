"""Corrections of a policy's own mistakes: the oracle takes over where one of its episodes first went wrong.

A policy that has learned from good play alone has never been where its own mistakes lead, and does there what comes
next in its text: it says the same again. So it is shown what to do there (DAgger: Ross et al., 2011,
arXiv:1011.0686): its actions up to the first that failed are taken again, and are read, not learned; from there the
oracle describes what is needed and was not described yet, asks the right query and answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from env_server.dataset import Question
from env_server.judging.answers import format_answer
from env_server.reward import normalize_action
from env_server.types import ActionType, AnswerMode, SQLAction, SQLObservation
from trainer.rollout.episodes import EpisodeRecord, Outcome
from trainer.rollout.players import mentioned_tables, table_names

Actions = tuple[SQLAction, ...]


class CorrectingPlayer:
    """Takes a policy's actions, and then the oracle's; knows the gold."""

    def __init__(self, question: Question, actions: Actions, answer_mode: AnswerMode = AnswerMode.VALUE) -> None:
        self._question = question
        self._actions = actions
        self._answer_mode = answer_mode
        self._plan: Iterator[SQLAction] | None = None

    @property
    def unlearned(self) -> frozenset[int]:
        """The numbers of the policy's own turns."""
        return frozenset(range(len(self._actions)))

    def act(self, observation: SQLObservation) -> SQLAction:
        """Return the next action."""
        if self._plan is None:
            self._plan = iter([*self._actions, *self._way_out(table_names(observation))])
        return next(self._plan)

    def _way_out(self, tables: Sequence[str]) -> list[SQLAction]:
        sql = self._question.gold_sql
        described = {a.argument.strip().casefold() for a in self._actions if a.action_type == ActionType.DESCRIBE}
        needed = [table for table in mentioned_tables(sql, tables) if table.casefold() not in described]
        by_value = self._answer_mode is AnswerMode.VALUE
        answer = format_answer(self._question.gold.rows) if by_value else sql
        plan = [
            *((ActionType.DESCRIBE, table) for table in needed),
            (ActionType.QUERY, sql),
            (ActionType.ANSWER, answer),
        ]
        return [SQLAction(action_type=kind.value, argument=argument) for kind, argument in plan]


def first_mistakes(records: Iterable[EpisodeRecord]) -> dict[tuple[str, str], list[Actions]]:
    """Return the different ways to a first action that failed, in episodes that were not right.

    By the id and the text of the question.
    """
    found: dict[tuple[str, str], dict[tuple[str, ...], Actions]] = {}
    for record in records:
        failed = next((number for number, turn in enumerate(record.turns) if turn["error"]), None)
        if failed is None or record.outcome in (Outcome.CORRECT, Outcome.FAILED):
            continue
        actions = tuple(
            SQLAction(action_type=turn["action_type"], argument=turn["argument"]) for turn in record.turns[: failed + 1]
        )
        same = tuple(normalize_action(action.action_type, action.argument) for action in actions)
        found.setdefault((record.question_id, record.question), {}).setdefault(same, actions)
    return {question: list(ways.values()) for question, ways in found.items()}
