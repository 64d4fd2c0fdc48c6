"""Questions to the index: which episodes, in what order, how many of each kind. Pure: statements and their values.

What a person types is a value and never a part of a statement. Words are looked for as prefixes, all of them; what is
in quotes is looked for as it stands, a word after a minus must not occur.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

COLUMNS = (
    *("id", "file", "step", "question_id", "db_id", "question", "hardness", "family", "outcome", "kind", "reward"),
    *("steps", "tokens", "prompt_tokens", "parse_rate"),
)
"""What a list of episodes shows of each."""
_TERM = re.compile(r'(-?)(?:"([^"]*)"|(\S+))')


class Order(StrEnum):
    """How a list is sorted; what was read last comes first among equals."""

    NEWEST = "newest"
    OLDEST = "oldest"
    REWARD_DOWN = "reward_down"
    REWARD_UP = "reward_up"
    STEPS_DOWN = "steps_down"
    TOKENS_DOWN = "tokens_down"


_ORDERS = {
    Order.NEWEST: "e.id DESC",
    Order.OLDEST: "e.id",
    Order.REWARD_DOWN: "e.reward DESC, e.id DESC",
    Order.REWARD_UP: "e.reward, e.id DESC",
    Order.STEPS_DOWN: "e.steps DESC, e.id DESC",
    Order.TOKENS_DOWN: "e.tokens DESC, e.id DESC",
}


@dataclass(frozen=True, slots=True)
class Filter:
    """Which episodes; None and "" leave a thing open. `files` are those that may be shown at all."""

    files: tuple[int, ...]
    outcome: str = ""
    kind: str = ""
    """A kind of failure, or "any" for all that failed."""
    db_id: str = ""
    hardness: str = ""
    question_id: str = ""
    min_step: int | None = None
    max_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    text: str = ""

    def without(self, name: str) -> Filter:
        """Return the filter with one word left open."""
        open_: dict[str, Any] = {name: ""}
        return replace(self, **open_)


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement with its values."""

    text: str
    values: Mapping[str, Any] = field(default_factory=dict)


def listing(wanted: Filter, order: Order, offset: int, limit: int) -> Statement:
    """The episodes themselves: COLUMNS of each."""
    source, values = _from(wanted)
    columns = ", ".join(f"e.{name}" for name in COLUMNS)
    text = f"SELECT {columns} {source} ORDER BY {_ORDERS[order]} LIMIT :limit OFFSET :offset"
    return Statement(text, {**values, "limit": limit, "offset": offset})


def count(wanted: Filter) -> Statement:
    """How many there are, how many of them are right, and their mean reward."""
    source, values = _from(wanted)
    return Statement(f"SELECT COUNT(*), COALESCE(SUM(e.outcome = 'correct'), 0), AVG(e.reward) {source}", values)


def counts_by(wanted: Filter, column: str) -> Statement:
    """How many there are of each value of one column, whatever the filter says of it; the most frequent first."""
    source, values = _from(wanted.without(column))
    text = f"SELECT e.{column}, COUNT(*) {source} GROUP BY 1 HAVING e.{column} IS NOT NULL ORDER BY 2 DESC, 1"
    return Statement(text, values)


def match_of(text: str) -> str:
    """Return what a person typed as an expression of the full-text index; "" when it holds no word."""
    wanted: list[str] = []
    unwanted: list[str] = []
    for minus, quoted, word in _TERM.findall(text.replace("\0", " ")):  # a statement ends at a zero byte
        if re.search(r"\w", quoted or word):
            phrase = '"' + (quoted or word).replace('"', '""') + '"'
            (unwanted if minus else wanted).append(phrase if quoted else f"{phrase} *")
    if not wanted:
        return ""
    both = " AND ".join(wanted)
    return f"({both}) NOT ({' OR '.join(unwanted)})" if unwanted else both


def _from(wanted: Filter) -> tuple[str, dict[str, Any]]:
    """The part of a statement from FROM on that the filter decides."""
    values: dict[str, Any] = {}
    parts = [f"e.file IN ({', '.join(map(str, map(int, wanted.files)))})"]
    for name in ("outcome", "kind", "db_id", "hardness", "question_id"):
        value = getattr(wanted, name)
        if name == "kind" and value == "any":
            parts.append("e.kind IS NOT NULL")
        elif value:
            parts.append(f"e.{name} = :{name}")
            values[name] = value
    for name, condition in _BOUNDS.items():
        if (bound := getattr(wanted, name)) is not None:
            parts.append(f"{condition} :{name}")
            values[name] = bound
    if match := match_of(wanted.text):
        parts.append("e.id IN (SELECT rowid FROM words WHERE words MATCH :match)")
        values["match"] = match
    elif wanted.text.strip():
        parts.append("0")  # signs alone are in no index
    return f"FROM episodes e WHERE {' AND '.join(parts)}", values


_BOUNDS: Mapping[str, str] = {
    "min_step": "e.step >=",
    "max_step": "e.step <=",
    "min_reward": "e.reward >=",
    "max_reward": "e.reward <=",
}


def same_question(files: Sequence[int], question_id: str, db_id: str, question: str, limit: int) -> Statement:
    """The episodes of one question, evaluations first, then the latest of training."""
    columns = ", ".join(f"e.{name}" for name in COLUMNS)
    source, values = _from(Filter(tuple(files), question_id=question_id, db_id=db_id))
    text = f"SELECT {columns} {source} AND e.question = :question ORDER BY e.step IS NOT NULL, e.step DESC, e.id DESC"
    return Statement(f"{text} LIMIT :limit", {**values, "question": question, "limit": limit})
