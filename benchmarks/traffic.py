"""What a policy sends to an environment server: scripted episodes over a data set, as JSON messages.

Every episode is `EPISODE` messages long: a reset on a question, two DESCRIBEs, a SAMPLE, four QUERYs and an ANSWER
(right every other time). Queries run on the question's own tables: half of them are its gold query in another guise,
one in eight fails. Two kinds of traffic:

- `distinct`: every session plays questions of its own and no query text occurs twice.
- `groups`: as in GRPO, eight sessions play the same question at the same time. They draw their queries from a handful,
  the likelier ones more often, so that they overlap; the groups share nothing with each other.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final

from env_server.dataset import Dataset, Question
from env_server.judging.answers import format_answer
from env_server.settings import SandboxSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.schema import Schema, Table, quote_identifier
from env_server.types import ActionType

KINDS: Final = ("distinct", "groups")
QUERIES: Final = 4
STEPS: Final = 4 + QUERIES
EPISODE: Final = 1 + STEPS
"""Messages of one episode: the reset and its steps."""
GROUP: Final = 8
"""Sessions that play the same question."""
POOL: Final = 8
"""Queries that a group draws from."""


def reset(question_id: str) -> str:
    """Return the message that starts an episode on a question."""
    return json.dumps({"type": "reset", "data": {"question_id": question_id}})


def step(kind: ActionType, argument: str) -> str:
    """Return the message that takes an action."""
    return json.dumps({"type": "step", "data": {"action_type": kind.value, "argument": argument}})


def scripts(dataset: Dataset, kind: str, sessions: int, episodes: int, seed: int = 0) -> list[list[str]]:
    """Return what each session sends: `episodes` episodes each, the same ones for the same seed."""
    pool = DatabasePool(dataset.databases, SandboxSettings())
    writer = _Writer(dataset, pool, seed)
    try:
        size = GROUP if kind == "groups" else 1
        texts: list[list[str]] = []
        for first in range(0, sessions, size):
            members: list[list[str]] = [[] for _ in range(min(size, sessions - first))]
            for _ in range(episodes):
                writer.play(members, together=kind == "groups")
            texts += members
        return texts
    finally:
        pool.close()


class _Writer:
    """Writes episodes; the number in each query makes it different from all others."""

    def __init__(self, dataset: Dataset, pool: DatabasePool, seed: int) -> None:
        self._random = random.Random(seed)
        self._pool = pool
        self._numbers = count(1_000)
        self._questions = self._shuffled(dataset.questions)

    def play(self, members: Sequence[list[str]], *, together: bool) -> None:
        """Append an episode on the same question to each member's messages."""
        question = next(self._questions)
        schema = self._pool.schema(question.db_id)
        shared = self._queries(question, schema, POOL) if together else []
        for messages in members:
            tables = self._random.choices(schema.tables, k=2)
            queries = self._draw(shared) if together else self._queries(question, schema, QUERIES)
            right = self._random.random() < 0.5
            answer = format_answer(question.gold.rows) if right else "no idea"
            messages.append(reset(question.question_id))
            messages += [step(ActionType.DESCRIBE, table.name) for table in tables]
            messages.append(step(ActionType.SAMPLE, tables[0].name))
            messages += [step(ActionType.QUERY, sql) for sql in queries]
            messages.append(step(ActionType.ANSWER, answer))

    def _shuffled(self, questions: Sequence[Question]) -> Iterator[Question]:
        while True:
            yield from self._random.sample(questions, len(questions))

    def _queries(self, question: Question, schema: Schema, many: int) -> list[str]:
        return [self._query(question, self._random.choice(schema.tables)) for _ in range(many)]

    def _query(self, question: Question, table: Table) -> str:
        number, form = next(self._numbers), self._random.randrange(8)
        if form == 0:
            return f"SELECT no_such_column_{number} FROM {quote_identifier(table.name)}"
        if form <= 3:
            names = [quote_identifier(column.name) for column in table.columns]
            shown = ", ".join(self._random.sample(names, min(len(names), 3)))
            return f"SELECT {shown} FROM {quote_identifier(table.name)} WHERE {names[0]} <> {number}"
        return f"SELECT * FROM ({question.gold_sql.strip().rstrip(';')}) LIMIT {number}"

    def _draw(self, shared: Sequence[str]) -> list[str]:
        """Return some of the shared queries, the first ones likelier."""
        keys = {query: self._random.random() ** (1 + place) for place, query in enumerate(shared)}
        return sorted(keys, key=lambda query: -keys[query])[:QUERIES]
