"""What the question families share: the candidate they return, how they draw columns and measures, and their English.

The templates are in `wording.toml`; a phrase fills each of their places.

SQL style, kept the same everywhere: a single table is not aliased; joined tables are T1, T2, T3 in the order of
the FROM clause, child before parent.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from env_server.data.synthetic.conditions import Condition, any_condition
from env_server.data.synthetic.domains import Kind
from env_server.data.synthetic.model import Column, Database, Table

NUMBERS = (Kind.INTEGER, Kind.REAL)
READABLE = (Kind.NAME, Kind.CATEGORY, Kind.INTEGER, Kind.REAL, Kind.DATE)
SUPERLATIVES = {"DESC": ("highest", "largest"), "ASC": ("lowest", "smallest")}
COUNT_SUPERLATIVES = {"DESC": ("highest", "most"), "ASC": ("lowest", "fewest")}
DATE_SUPERLATIVES = {"DESC": ("latest", "most recent"), "ASC": ("earliest",)}
NUMERALS = {2: "two", 3: "three", 4: "four", 5: "five"}
_YEAR_MEASURES = {"MAX": "latest", "MIN": "earliest"}
_MEASURES = {"MAX": ("maximum", "highest", "largest"), "MIN": ("minimum", "lowest", "smallest")}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drawn question.

    `ties` is a query for the values that the answer is ordered by; the answer is only unique if the first
    `depth` + 1 of them differ.
    """

    text: str
    sql: str
    ties: str = ""
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Measure:
    """An aggregate of a column: its SQL function and its words ("average age")."""

    function: str
    column: Column
    words: str

    def sql(self, prefix: str = "") -> str:
        """The aggregate; an average is rounded to two decimals, as `rounding` says."""
        inner = f"{self.function}({prefix}{self.column.sql})"
        return f"ROUND({inner}, 2)" if self.function == "AVG" else inner

    @property
    def rounding(self) -> str:
        """What follows the question."""
        return ", rounded to 2 decimals" if self.function == "AVG" else ""


def draw_measure(table: Table, rng: Random, functions: Sequence[str] = ("MAX", "MIN", "AVG", "SUM")) -> Measure | None:
    """Draw an aggregate that means something for its column."""
    columns = table.of(*NUMBERS)
    if not columns:
        return None
    column = rng.choice(columns)
    allowed = [f for f in functions if f in _MEASURES or (column.sums if f == "SUM" else column.averages)]
    return measure(rng.choice(allowed), column, rng) if allowed else None


def measure(function: str, column: Column, rng: Random) -> Measure:
    """Put an aggregate into words."""
    if function == "SUM":
        spelled = column.phrase.startswith("total") or rng.random() < 0.25
        words = f"sum of the {column.phrase}" if spelled else f"total {column.phrase}"
    elif function == "AVG":
        words = f"{rng.choice(('average', 'average', 'mean'))} {column.phrase}"
    elif column.is_year:
        words = f"{_YEAR_MEASURES[function]} {column.phrase}"
    else:
        words = f"{rng.choice(_MEASURES[function])} {column.phrase}"
    return Measure(function, column, words)


def draw_columns(
    table: Table, rng: Random, without: Collection[Column] = (), most: int = 3, named: float = 0.7
) -> list[Column]:
    """Draw what to ask for: one column mostly, in a share `named` of the cases the name comes first.

    The key where there is nothing else.
    """
    options = [c for c in table.of(*READABLE) if c not in without]
    if not options:
        return [table.key]
    count = min(most, len(options), rng.choices((1, 2, 3), (70, 24, 6))[0])
    name = table.name
    if name in options and rng.random() < named:
        others = [c for c in options if c is not name]
        return [name, *rng.sample(others, min(count - 1, len(others)))]
    return rng.sample(options, count)


def select(columns: Sequence[Column], prefix: str = "") -> str:
    """Return the list after SELECT."""
    return ", ".join(f"{prefix}{c.sql}" for c in columns)


def draw_where(table: Table, rng: Random, without: Collection[Column] = ()) -> tuple[str, str, Condition | None]:
    """Draw a condition: its SQL with WHERE and its text, each with a leading space, and itself; or nothing."""
    condition = any_condition(table, rng, without)
    if condition is None:
        return "", "", None
    return f" WHERE {condition.sql()}", f" {condition.text(rng)}", condition


def mentioned(condition: Condition | None) -> frozenset[Column]:
    """Return the columns of the condition, which are not worth asking for."""
    return frozenset() if condition is None else condition.columns


def draw_table(db: Database, rng: Random) -> Table:
    """Draw a table."""
    return rng.choice(db.tables)


def rankable(table: Table, direction: str, kinds: Sequence[Kind] = NUMBERS) -> list[Column]:
    """Return the columns to order by; NULLs come first in ascending order, so such columns are left out there."""
    return [c for c in table.of(*kinds) if direction == "DESC" or not c.nullable]


@cache
def templates() -> dict[str, list[str]]:
    """Return the templates of every family."""
    return tomllib.loads(Path(__file__).parents[1].joinpath("wording.toml").read_text(encoding="utf-8"))


def fill(family: str, rng: Random, **phrases: object) -> str:
    """Choose a template of a family and fill it."""
    return rng.choice(templates()[family]).format(**phrases)


def listed(columns: Sequence[Column]) -> str:
    """Return "name", "name and age" or "name, age and weight"."""
    phrases = [c.phrase for c in columns]
    return phrases[0] if len(phrases) == 1 else f"{', '.join(phrases[:-1])} and {phrases[-1]}"


def asked(columns: Sequence[Column]) -> dict[str, str]:
    """Return the phrases `columns` and `be` for the columns that a question asks for."""
    return {"columns": listed(columns), "be": columns[0].be if len(columns) == 1 else "are"}


def noun(table: Table) -> dict[str, str]:
    """Return the phrases `singular` and `plural` of a table."""
    return {"singular": table.singular, "plural": table.plural}


def entity(table: Table, column: Column, value: object, rng: Random) -> str:
    """Return words for the row that has `value` in a column that tells the rows apart: "pet named Rex"."""
    if column.evident and rng.random() < 0.5:
        return f"{table.singular} {'named' if column.phrase.endswith('name') else 'titled'} {value}"
    if rng.random() < 0.5:
        return f"{table.singular} with {column.phrase} {value}"
    return f"{table.singular} whose {column.phrase} is {value}"
