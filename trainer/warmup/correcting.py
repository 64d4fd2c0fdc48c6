"""Corrections of a policy's own mistakes: the oracle takes over where one of its episodes first went wrong.

A policy that has learned from good play alone has never been where its own mistakes lead, and does there what comes
next in its text: it says the same again. So it is shown what to do there (DAgger: Ross et al., 2011,
arXiv:1011.0686): its actions up to the first that failed are taken again, and are read, not learned; from there the
oracle describes what is needed and was not described yet, asks the right query and answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from env_server.dataset import Question
from env_server.reward import normalize_action
from env_server.types import ActionType, AnswerMode, SQLAction, SQLObservation
from trainer.rollout.episodes import EpisodeRecord, Outcome
from trainer.rollout.players import OraclePlayer

Actions = tuple[SQLAction, ...]


def actions_of(turns: Iterable[Mapping[str, Any]]) -> Actions:
    """The actions of a record's turns."""
    return tuple(SQLAction(action_type=turn["action_type"], argument=turn["argument"]) for turn in turns)


def normalized(actions: Actions) -> tuple[str, ...]:
    """What two ways have in common that are the same play."""
    return tuple(normalize_action(action.action_type, action.argument) for action in actions)


class CorrectingPlayer:
    """Takes a policy's actions, and then the oracle's, but for the tables that were described."""

    def __init__(self, question: Question, actions: Actions, answer_mode: AnswerMode = AnswerMode.VALUE) -> None:
        self._actions = actions
        self._left: Iterator[SQLAction] = iter(actions)
        self._oracle = OraclePlayer(question, answer_mode)

    @property
    def unlearned(self) -> frozenset[int]:
        """The numbers of the policy's own turns."""
        return frozenset(range(len(self._actions)))

    def act(self, observation: SQLObservation) -> SQLAction:
        """Return the next action."""
        if (own := next(self._left, None)) is not None:
            return own
        described = {a.argument.strip().casefold() for a in self._actions if a.action_type == ActionType.DESCRIBE}
        action = self._oracle.act(observation)
        while action.action_type == ActionType.DESCRIBE and action.argument.casefold() in described:
            action = self._oracle.act(observation)
        return action


def first_mistakes(records: Iterable[EpisodeRecord]) -> dict[tuple[str, str], list[Actions]]:
    """Return the different ways to a first action that failed, in episodes that were not right.

    By the id and the text of the question.
    """
    found: dict[tuple[str, str], dict[tuple[str, ...], Actions]] = {}
    for record in records:
        failed = next((number for number, turn in enumerate(record.turns) if turn["error"]), None)
        if failed is None or record.outcome in (Outcome.CORRECT, Outcome.FAILED):
            continue
        actions = actions_of(record.turns[: failed + 1])
        found.setdefault((record.question_id, record.question), {}).setdefault(normalized(actions), actions)
    return {question: list(ways.values()) for question, ways in found.items()}
