"""A player who knows the moves and plays badly: what a base policy learns from beside good play."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from env_server.dataset import Question
from env_server.types import ActionType, SQLAction, SQLObservation
from trainer.demos.noisy_expert import damage
from trainer.rollout.players import mentioned_tables, table_names

GUESS = ""
"""Stands for an answer that is made up from what was seen last: one of its cells."""


class StumblingPlayer:
    """Knows the moves and plays badly, in one of five ways drawn per episode."""

    STYLES = ("peek", "peek", "hasty", "wander", "damaged", "misread")

    def __init__(self, question: Question, rng: random.Random) -> None:
        self._question = question
        self._rng = rng
        self._plan: Iterator[tuple[ActionType, str]] | None = None

    def act(self, observation: SQLObservation) -> SQLAction:
        """Return the next move of the plan; a GUESS is filled in from the last result."""
        if self._plan is None:
            self._plan = iter(self._make_plan(table_names(observation)))
        kind, argument = next(self._plan)
        if argument == GUESS:
            argument = self._guess(observation.result)
        return SQLAction(action_type=kind.value, argument=argument)

    def _make_plan(self, tables: Sequence[str]) -> list[tuple[ActionType, str]]:
        rng, sql = self._rng, self._question.gold_sql
        needed = mentioned_tables(sql, tables)
        answer = (ActionType.ANSWER, GUESS)
        describe_needed = [(ActionType.DESCRIBE, table) for table in needed]
        damaged = (ActionType.QUERY, damage(sql, rng))
        match rng.choice(self.STYLES):
            case "peek":
                return [(ActionType.SAMPLE, rng.choice(needed)), answer]
            case "hasty":
                return [damaged, answer]
            case "wander":
                looks = [(ActionType.DESCRIBE, rng.choice(tables)) for _ in range(rng.randint(1, 2))]
                return [*looks, (ActionType.SAMPLE, rng.choice(tables)), answer]
            case "damaged":
                return [*describe_needed, damaged, answer]
            case _:
                return [*describe_needed, (ActionType.QUERY, sql), (ActionType.SAMPLE, needed[0]), answer]

    def _guess(self, result: str) -> str:
        rows = [line for line in result.splitlines()[1:] if line.strip()]
        cells = [cell.strip() for row in rows for cell in row.split(" | ")]
        return self._rng.choice(cells) if cells else "0"
