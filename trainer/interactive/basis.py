"""What a policy's answer to a question without a gold rests on: which of its queries returned that answer.

Nobody knows whether the answer is right. Whether the policy read it off the database, or made it up, can be told. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, combinations, islice

from env_server.dataset import Gold, Row
from env_server.judging.answers import parse_answer
from env_server.judging.verdict import judge_value
from env_server.types import ActionType
from trainer.rollout.episodes import Turn

MAX_CHOICES = 100
"""Choices of columns that are compared with an answer."""


class Support(StrEnum):
    """How a query supports an answer, from the most to the least."""

    ROWS = "rows"
    """The answer is its rows, or some of their columns."""
    CELLS = "cells"
    """Every value of the answer is among its rows."""
    NONE = "none"
    """It ran, and the answer is not in what it returned."""


_ORDER = tuple(Support)


@dataclass(frozen=True, slots=True)
class Ran:
    """A query that succeeded, and the rows that the policy saw; `complete`: there are no more."""

    sql: str
    rows: Sequence[Row]
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Basis:
    """A query, and how it supports the answer."""

    sql: str
    support: Support


def basis_of(answer: str, queries: Sequence[Ran]) -> Basis | None:
    """Return the query that supports a typed answer best, the latest of several; None where none was run."""
    bases = [Basis(ran.sql, support_of(answer, ran)) for ran in reversed(queries)]
    return min(bases, key=lambda basis: _ORDER.index(basis.support), default=None)


def support_of(answer: str, ran: Ran) -> Support:
    """Tell how a query supports a typed answer."""
    if not ran.rows:
        return Support.ROWS if () in parse_answer(answer, 1) else Support.NONE
    if ran.complete and any(_is(answer, chosen) for chosen in _choices(ran.rows)):
        return Support.ROWS
    cells = [((cell,),) for row in ran.rows for cell in row]
    readings = [[cell.text for row in reading for cell in row] for reading in parse_answer(answer, 1)]
    found = any(reading and all(any(_is(text, cell) for cell in cells) for text in reading) for reading in readings)
    return Support.CELLS if found else Support.NONE


def successful_queries(turns: Sequence[Turn]) -> list[str]:
    """Return the statements of the turns that ran one, in order."""
    return [turn.argument for turn in turns if turn.action_type == ActionType.QUERY and not turn.error]


def _is(answer: str, rows: Sequence[Row]) -> bool:
    return judge_value(answer, Gold(tuple(rows), ordered=False)).correct


def _choices(rows: Sequence[Row]) -> Iterator[tuple[Row, ...]]:
    """The rows, then choices of their columns, the wider ones first."""
    width = len(rows[0])
    columns = chain.from_iterable(combinations(range(width), n) for n in range(width, 0, -1))
    for chosen in islice(columns, MAX_CHOICES):
        yield tuple(tuple(row[i] for i in chosen) for row in rows)
