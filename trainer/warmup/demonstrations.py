"""Play to learn from: clean play by the oracle, and play of mixed quality, both verified by the environment.

GRPO sharpens a skill that a policy has and uses badly; it does not teach a new one. A base model is exactly that:
it has seen good and bad play. So a base policy is trained on clean episodes beside episodes of a player who knows
the moves and stumbles: who guesses from a sample, wanders, damages the right query, or misreads its result.
Every episode is really played; what the environment answered is what the policy learns to expect.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

from env_server.dataset import Question
from env_server.environment import SQLEnvironment
from env_server.types import ActionType, AnswerMode, SQLAction, SQLObservation
from trainer.chat.format import Conversation
from trainer.rollout.episodes import Episode
from trainer.rollout.players import OraclePlayer, mentioned_tables, play, table_names

GUESS = ""
"""Stands for an answer that is made up from what was seen last: a cell, or the query that was run last."""

_SWAPS = (
    ("MAX(", "MIN("),
    ("AVG(", "SUM("),
    ("COUNT(DISTINCT ", "COUNT("),
    (" > ", " < "),
    (" >= ", " <= "),
    (" = '", " != '"),
    (" DESC", " ASC"),
    (" AND ", " OR "),
    (" NOT IN ", " IN "),
    (" INTERSECT ", " UNION "),
    (" EXCEPT ", " INTERSECT "),
)
_CLAUSE = re.compile(r" (?:WHERE|HAVING) .*?(?= GROUP BY | ORDER BY | LIMIT |$)", re.DOTALL)


def damage(sql: str, rng: random.Random) -> str:
    """Return a nearby wrong query: a condition lost, or an operator, aggregate or direction turned around."""
    candidates = [sql.replace(a, b, 1) for a, b in _SWAPS if a in sql]
    candidates += [sql.replace(b, a, 1) for a, b in _SWAPS if b in sql and a not in sql]
    if _CLAUSE.search(sql):
        candidates.append(_CLAUSE.sub("", sql, count=1))
    if " LIMIT " in sql:
        candidates.append(sql[: sql.rindex(" LIMIT ")])
    return rng.choice([c for c in candidates if c != sql] or [f"{sql} LIMIT 1"])


class StumblingPlayer:
    """Knows the moves and plays badly, in one of five ways drawn per episode."""

    STYLES = ("peek", "peek", "hasty", "wander", "damaged", "misread")

    def __init__(self, question: Question, rng: random.Random, answer_mode: AnswerMode = AnswerMode.VALUE) -> None:
        self._question = question
        self._rng = rng
        self._answer_mode = answer_mode
        self._query = ""
        self._plan: Iterator[tuple[ActionType, str]] | None = None

    def act(self, observation: SQLObservation) -> SQLAction:
        """Return the next move of the plan; a GUESS is filled in from the last result."""
        if self._plan is None:
            self._plan = iter(self._make_plan(table_names(observation)))
        kind, argument = next(self._plan)
        if kind is ActionType.QUERY:
            self._query = argument
        if kind is ActionType.ANSWER and argument == GUESS:
            if self._answer_mode is AnswerMode.SQL:
                argument = self._guess_sql(table_names(observation))
            else:
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

    def _guess_sql(self, tables: Sequence[str]) -> str:
        """The query that was run last, which was wrong or is damaged now, or a count where none was run."""
        sql = self._question.gold_sql
        if not self._query:
            return f'SELECT COUNT(*) FROM "{self._rng.choice(mentioned_tables(sql, tables))}"'
        return damage(sql, self._rng) if self._query == sql else self._query

    def _guess(self, result: str) -> str:
        rows = [line for line in result.splitlines()[1:] if line.strip()]
        cells = [cell.strip() for row in rows for cell in row.split(" | ")]
        return self._rng.choice(cells) if cells else "0"


def demonstrate(
    environment: SQLEnvironment,
    questions: Sequence[Question],
    good: float,
    seed: int,
    answer_mode: AnswerMode = AnswerMode.VALUE,
) -> Iterator[tuple[Episode, Conversation]]:
    """Play each question once, a share `good` of them by the oracle, the others by the stumbling player.

    `answer_mode` is the environment's. An oracle's episode that the environment does not judge correct is left out: it
    would teach a wrong answer.
    """
    if not 0.0 <= good <= 1.0:
        raise ValueError(f"the share of good play must lie in [0, 1], not {good}")
    rng = random.Random(seed)
    for question in questions:
        if rng.random() < good:
            episode, conversation = play(environment, question, OraclePlayer(question, answer_mode))
            if episode.correct:
                yield episode, conversation
        else:
            yield play(environment, question, StumblingPlayer(question, rng, answer_mode))
