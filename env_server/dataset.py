"""What a data set is: questions, their databases, and what was left out and why.

Plain data, no I/O. The gold SQL and the gold rows live here and never leave the server.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from env_server.errors import DataError, UnknownQuestionError

SQLValue = int | float | str | bytes | None
Row = tuple[SQLValue, ...]


class Split(StrEnum):
    """Train and evaluation are disjoint in databases."""

    TRAIN = "train"
    EVAL = "eval"
    ALL = "all"


class Hardness(StrEnum):
    """Spider's hardness rule (Yu et al., EMNLP 2018)."""

    EASY = "easy"
    MEDIUM = "medium"
    HARD = "hard"
    EXTRA = "extra"
    UNKNOWN = "unknown"
    """Of a question that has an answer and no SQL: the rule grades queries."""


@dataclass(frozen=True, slots=True)
class Gold:
    """The rows that the gold SQL returns, or that the question's answer states.

    `ordered`: the SQL orders at its top level, so order counts. `stated`: written by a person, so that a float stands
    for every number that rounds to it.
    """

    rows: tuple[Row, ...]
    ordered: bool
    stated: bool = False

    @property
    def width(self) -> int:
        """Number of columns; 0 when there is no row."""
        return len(self.rows[0]) if self.rows else 0

    @property
    def is_zero(self) -> bool:
        """Whether it is a single 0: an answer like any other, and the first that a guess would try."""
        return self.rows == ((0,),)


@dataclass(frozen=True, slots=True)
class Question:
    """One usable question. `split` is TRAIN or EVAL; `family` names the source's own sort of question.

    `duplicate_of` is the id of the first question of its database whose SQL differs in case, white space and comments
    at most; "" in that one. `gold_sql` is "" where the source has an answer and no SQL; `gold` is empty as well where
    a person asks and the answer is not known.
    """

    question_id: str
    text: str
    db_id: str
    gold_sql: str
    hardness: Hardness
    split: Split
    gold: Gold = field(repr=False)
    family: str = ""
    evidence: str = ""
    duplicate_of: str = ""

    @property
    def judged(self) -> bool:
        """Whether its answer is known, so that an ANSWER can be right or wrong."""
        return bool(self.gold.rows)


class ExclusionReason(StrEnum):
    """Why a question cannot be used."""

    GOLD_FAILS = "gold_fails"
    GOLD_TOO_SLOW = "gold_too_slow"
    GOLD_EMPTY = "gold_empty"
    GOLD_NULL = "gold_all_null"
    GOLD_TOO_LARGE = "gold_too_large"
    NO_SQL = "no_sql"
    NO_DATABASE = "no_database"


@dataclass(frozen=True, slots=True)
class Exclusion:
    """One question that was left out at load."""

    question_id: str
    db_id: str
    text: str
    reason: ExclusionReason
    detail: str = ""


@dataclass(frozen=True)
class Dataset:
    """Questions over SQLite files. `databases` maps db_id to the file; every question's db_id is in it."""

    name: str
    questions: tuple[Question, ...]
    databases: Mapping[str, Path]
    excluded: tuple[Exclusion, ...] = ()
    _by_id: Mapping[str, Question] = field(init=False, repr=False, compare=False)
    _by_split: Mapping[Split, tuple[Question, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_id = {q.question_id: q for q in self.questions}
        counts = Counter([q.question_id for q in self.questions] + [e.question_id for e in self.excluded])
        if repeated := [question_id for question_id, count in counts.items() if count > 1]:
            raise DataError(f"data set {self.name}: question ids occur more than once: {repeated[:5]}. Rename them")
        # A server selects at each reset, so no question is looked at then.
        by_split = {split: tuple(q for q in self.questions if q.split is split) for split in (Split.TRAIN, Split.EVAL)}
        object.__setattr__(self, "_by_id", by_id)
        object.__setattr__(self, "_by_split", {**by_split, Split.ALL: self.questions})

    def question(self, question_id: str) -> Question:
        """Return the question; raises UnknownQuestionError."""
        try:
            return self._by_id[question_id]
        except KeyError:
            raise UnknownQuestionError(
                f"data set {self.name} holds no question {question_id!r}; "
                f"it holds {len(self.questions)}, such as {[q.question_id for q in self.questions[:3]]}"
            ) from None

    def select(self, split: Split) -> Sequence[Question]:
        """Return the questions of a split, in the data set's order."""
        return self._by_split[split]

    def splits(self) -> dict[str, tuple[Split, ...]]:
        """Return the split of each database; both, train first, where its questions are split among themselves."""
        found: dict[str, set[Split]] = {}
        for question in self.questions:
            found.setdefault(question.db_id, set()).add(question.split)
        return {db_id: tuple(split for split in Split if split in splits) for db_id, splits in found.items()}


def round_robin(questions: Iterable[Question]) -> list[Question]:
    """Return the questions, taken in turn from each database; databases come in the order of their first questions."""
    by_database: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        by_database[question.db_id].append(question)
    rounds = zip_longest(*by_database.values())
    return [question for question in chain.from_iterable(rounds) if question is not None]


def rows_to_json(rows: tuple[Row, ...]) -> str:
    """Return the rows as JSON text, every value with its type: a blob is `{"blob": HEX}`."""
    return json.dumps([[_plain(value) for value in row] for row in rows])


def rows_from_json(text: str | bytes) -> tuple[Row, ...]:
    """Return the rows that `rows_to_json` wrote. Raises ValueError."""
    return tuple(tuple(_value(cell) for cell in row) for row in json.loads(text))


def _plain(value: SQLValue) -> object:
    return {"blob": value.hex()} if isinstance(value, bytes) else value


def _value(cell: Any) -> SQLValue:
    value: SQLValue = bytes.fromhex(cell["blob"]) if isinstance(cell, dict) else cell
    return value
