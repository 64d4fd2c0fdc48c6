"""Draws questions for a database until each family has its share, and keeps only the good ones.

A question is kept if its gold answer is non-empty, without NULLs or repeated rows, at most `MAX_ROWS` rows,
`MAX_COLUMNS` columns and `MAX_CELLS` cells, short to type, unique (no tie decides it), and not one that a player
who answers with a random cell of the database would often hit. Answers of many cells and very small counts are
thinned out. Within a database no two questions share their text or their SQL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import apsw

from env_server.data.raw import RawQuestion
from env_server.data.synthetic.families import one_table, several_tables
from env_server.data.synthetic.families.common import Candidate
from env_server.data.synthetic.model import Database, create_statement
from env_server.dataset import Row, Split, SQLValue
from env_server.sql.hardness import hardness

MAX_ROWS = 8
MAX_COLUMNS = 3
MAX_CELLS = 10
_FEW_CELLS = 4
_MANY_CELLS_KEPT = 0.4
_SMALL_COUNT = 3
_SMALL_COUNT_KEPT = 0.25
_MAX_GUESS_RATE = 0.06
_ATTEMPTS_PER_QUESTION = 40
_PAGE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Family:
    """A question family and its share of the questions, in percent."""

    draw: Callable[[Database, Random], Candidate | None]
    share: float


FAMILIES: Mapping[str, Family] = {
    "count": Family(one_table.count, 11),
    "count_distinct": Family(one_table.count_distinct, 3),
    "filter": Family(one_table.filtered, 12),
    "lookup": Family(one_table.lookup, 10),
    "aggregate": Family(one_table.aggregate, 13),
    "order": Family(one_table.ordered, 13),
    "group": Family(one_table.grouped, 5),
    "having": Family(one_table.having, 3),
    "argmax_group": Family(one_table.best_group, 4),
    "join": Family(several_tables.joined, 11),
    "join3": Family(several_tables.joined_three, 4),
    "nested": Family(several_tables.nested, 3),
    "set": Family(several_tables.combined, 2.5),
    "date": Family(one_table.dated, 3.5),
    "null": Family(one_table.missing, 2),
}


def open_in_memory(database: Database) -> apsw.Connection:
    """Return a connection to an in-memory copy of the database."""
    connection = apsw.Connection(":memory:")
    connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    with connection:
        for table in database.tables:
            connection.execute(create_statement(table, database))
            marks = ", ".join("?" * len(table.columns))
            connection.executemany(f"INSERT INTO {table.sql} VALUES ({marks})", table.rows)
    return connection


def questions(
    database: Database, connection: apsw.Connection, count: int, split: Split, prefix: str, rng: Random
) -> list[RawQuestion]:
    """Return up to `count` questions on a database, ids `prefix-db_id-0000`; families in a random order."""
    judge = Judge(database, lambda sql: list(connection.execute(sql)), rng)
    kept: list[tuple[str, Candidate]] = []
    for family in _plan(count, rng):
        candidate = draw(FAMILIES[family], database, judge, rng)
        if candidate is not None:
            kept.append((family, candidate))
    while len(kept) < count:
        family = rng.choices(list(FAMILIES), [f.share for f in FAMILIES.values()])[0]
        candidate = draw(FAMILIES[family], database, judge, rng)
        if candidate is None:
            break
        kept.append((family, candidate))
    return [
        RawQuestion(
            question_id=f"{prefix}-{database.db_id}-{i:04d}",
            text=c.text,
            db_id=database.db_id,
            sql=c.sql,
            split=split,
            family=family,
            hardness=hardness(c.sql),
        )
        for i, (family, c) in enumerate(kept)
    ]


def _plan(count: int, rng: Random) -> list[str]:
    """Return `count` families: each its share, the remainder by systematic sampling."""
    total = sum(f.share for f in FAMILIES.values())
    position = rng.random()
    plan: list[str] = []
    for name, family in FAMILIES.items():
        end = position + family.share / total * count
        plan.extend([name] * (int(end) - int(position)))
        position = end
    rng.shuffle(plan)
    return plan[:count]


def draw(family: Family, database: Database, judge: Judge, rng: Random) -> Candidate | None:
    """Draw candidates of a family until the judge accepts one; None when it accepts none of many."""
    for _ in range(_ATTEMPTS_PER_QUESTION):
        candidate = family.draw(database, rng)
        if candidate is not None and judge.accepts(candidate):
            return candidate
    return None


class Judge:
    """Decides on candidates, and remembers those it has accepted.

    `rows` runs a query. `max_guess_rate`: how often a random cell may be the answer.
    """

    def __init__(
        self,
        database: Database,
        rows: Callable[[str], list[Row]],
        rng: Random,
        max_guess_rate: float = _MAX_GUESS_RATE,
    ) -> None:
        self._rows = rows
        self._rng = rng
        self._max_guess_rate = max_guess_rate
        self._seen: set[str] = set()
        self._guesses = _guess_rates(database)

    def accepts(self, candidate: Candidate) -> bool:
        """Tell whether the candidate is a good question, and is not known yet."""
        if candidate.text in self._seen or candidate.sql in self._seen:
            return False
        rows = self._rows(candidate.sql)
        if not (is_answerable(rows) and self._is_settled(candidate) and self._is_worth_it(candidate, rows)):
            return False
        self._seen.update((candidate.text, candidate.sql))
        return True

    def _is_settled(self, candidate: Candidate) -> bool:
        if not candidate.ties:
            return True
        values = [row[0] for row in self._rows(candidate.ties)]
        leading = values[: candidate.depth + 1]
        enough = len(values) >= candidate.depth and None not in values[: candidate.depth]
        return enough and len(set(leading)) == len(leading)

    def _is_worth_it(self, candidate: Candidate, rows: list[Row]) -> bool:
        cells = sum(len(row) for row in rows)
        if cells > _FEW_CELLS and self._rng.random() >= _MANY_CELLS_KEPT:
            return False
        if cells > 1:
            return True
        value = rows[0][0]
        if "COUNT(" in candidate.sql.partition(" FROM ")[0] and isinstance(value, int) and value <= _SMALL_COUNT:
            return self._rng.random() < _SMALL_COUNT_KEPT
        return self._guesses.get(value, 0.0) <= self._max_guess_rate


def is_answerable(rows: list[Row]) -> bool:
    """Return whether rows can be an answer: see the module's first paragraph."""
    if not 0 < len(rows) <= MAX_ROWS or len(rows[0]) > MAX_COLUMNS or len(rows) * len(rows[0]) > MAX_CELLS:
        return False
    if len(set(rows)) < len(rows) or rows == [(0,)]:
        return False
    return all(_is_short(cell) for row in rows for cell in row)


def _is_short(cell: SQLValue) -> bool:
    return cell is not None and (not isinstance(cell, float) or len(repr(cell).partition(".")[2]) <= 2)


def _guess_rates(database: Database) -> dict[SQLValue, float]:
    """Return for each value how often a random cell of a random table holds it."""
    rates: dict[SQLValue, float] = {}
    for table in database.tables:
        cells = [cell for row in table.rows for cell in row]
        for value, n in Counter(cells).items():
            rates[value] = rates.get(value, 0.0) + n / len(cells) / len(database.tables)
    return rates
