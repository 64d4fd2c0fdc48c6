"""The English of the questions: the templates of `wording.toml`, and the phrases that fill them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random

from env_server.data.synthetic.model import Column, Table

NUMERALS = {2: "two", 3: "three", 4: "four", 5: "five"}


@cache
def templates() -> dict[str, list[str]]:
    """Return the templates of every family."""
    return tomllib.loads(Path(__file__).with_name("wording.toml").read_text(encoding="utf-8"))


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
