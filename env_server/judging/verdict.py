"""The verdict on an ANSWER: does it equal the gold rows?

Whole tables are compared: the same number of rows and columns, rows as a multiset (as a list where the gold SQL orders
at its top level), under one permutation of the columns for the whole table.

`judge_value` (the agent typed the answer; `answers.parse_answer` gives its readings):
- integers exactly; `42`, `42.0`, `+42`, `1,234` and `1e3` are read as numbers;
- floats to the precision given, never looser than 1%: the answer is at most half a unit of its last digit and at
  most 1% of the gold value away. A relative error of 1e-9 is rounding noise and always accepted. There is no
  absolute tolerance: a gold of 0 wants 0, a gold of 1e-9 wants about 1e-9;
- text trimmed, NFKC and case-folded; a text that looks like a number ('007') is compared as text;
- NULL is a bare NULL or None in any case. A bare `NULL` is never a text, the quoted one always is; a blob is x'..';
- a text with unprintable characters may also be typed as `display` shows it.

`judge_rows` (the agent submitted SQL) compares cells as Python values: 1 equals 1.0, 1 differs from '1', None equals
None, no float tolerance. Under `SQLRule.SPIDER` it is the execution rule of Spider's test-suite evaluation (Zhong et
al., EMNLP 2020; `exec_eval.py` in taoyds/test-suite-sql-eval, distinct kept): tables without rows are equal whatever
their columns. Under `SQLRule.BIRD` the sets of rows are equal, columns in place. Verdicts differ from Spider's script,
which runs both queries itself, in these cases:

- order: it counts rows as a list when `order by` occurs anywhere in the gold's text, in a subquery or in a string, and
  as a multiset for `ORDER  BY` or a line break between; here the gold's top level decides;
- whole floats: it sorts each row by the text of its cells first, so that a table with (1, 10) differs from one with
  (1.0, 10); here 1 equals 1.0 wherever it stands;
- the text (`submissions`): it fails on a code fence, on `;;` and on `YEAR(CURDATE()) AND` (it glues 2020 to AND), joins
  `> =` in strings too, and its command line replaces the word ` value ` in a prediction by ` 1 `;
- text that is not UTF-8: it drops the bytes, so that x'61' and x'61FF' are one text; here they are marked, and differ;
- SQLite: it uses the one that Python was built with; from 3.43 on, and so here, the order of rows hardly changes the
  last digits of a sum;
- the sandbox: a query that writes, asks for chance or the time zone, or needs more steps, bytes or rows than allowed is
  wrong; it runs such queries, and its time limit has no effect.

Guarantees: the judges are deterministic, never raise, and their work is bounded; a comparison that would exceed the
bound is judged wrong (it takes a table built for it, over which the script would not end). Judging right needs an
explicit match of every row.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from env_server.dataset import Gold, Row, SQLValue
from env_server.judging.answers import NULL_WORDS, Cell, format_answer, normalize_text, parse_answer
from env_server.judging.tables import Budget, TooCostlyError, same_table, tables_match
from env_server.settings import SQLRule
from env_server.sql.display import shortened

_RELATIVE_TOLERANCE = Decimal("0.01")
_ROUNDING_NOISE = Decimal("1e-9")
_COARSEST_STATED = Decimal("0.05")
"""A stated float has one decimal at least."""
_MAX_NUMBER_CHARS = 400
_VALUE_WORK, _VALUE_WORK_PER_CELL = 200_000, 20
_ROWS_WORK, _ROWS_WORK_PER_CELL = 3_000_000, 50
"""Units of work that one verdict may cost: a constant, and per gold cell. A unit is up to a microsecond in value mode,
and about a tenth of one for rows."""
_LONGEST_ESCAPE = 6
"""Characters that `display` needs at most for one."""
_SPARE_CHARS = 10_000
_SPARE_FACTOR = 8
"""An answer may be this many times as long as the canonical one, plus the spare characters."""

_NUMBER = re.compile(r"[+-]?(?:(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]{1,4})?")
_SPECIAL = {
    sign + word: value
    for word, number in (("inf", math.inf), ("infinity", math.inf), ("nan", math.nan))
    for sign, value in (("", repr(number)), ("+", repr(number)), ("-", repr(-number)))
}


class Judgement(NamedTuple):
    """Whether the answer is right. `reason` is for logs and tests and is never sent to the agent."""

    correct: bool
    reason: str


_EQUAL = Judgement(True, "equal")
_DIFFERENT = Judgement(False, "the values differ")
_TOO_COSTLY = Judgement(False, "the tables are too ambiguous to compare")


def judge_value(answer: str, gold: Gold) -> Judgement:
    """Judge a typed answer."""
    longest = _SPARE_CHARS + _SPARE_FACTOR * len(format_answer(gold.rows))
    if len(answer) > longest:
        return Judgement(False, f"the answer has {len(answer)} characters, more than {longest}")
    readings = [table for table in parse_answer(answer, gold.width) if len(table) == len(gold.rows)]
    if not readings:
        return Judgement(False, f"no reading has {len(gold.rows)} rows of {gold.width} columns")
    columns = [_ValueColumn(column, gold.stated) for column in zip(*gold.rows, strict=True)]
    budget = Budget(_VALUE_WORK + _VALUE_WORK_PER_CELL * len(gold.rows) * gold.width)
    for table in readings:
        typed = [[_typed(cell) for cell in column] for column in zip(*table, strict=True)]
        try:
            if tables_match(columns, typed, budget, ordered=gold.ordered):
                return _EQUAL
        except TooCostlyError:
            return _TOO_COSTLY
    return _DIFFERENT


def judge_rows(rows: Sequence[Row], gold: Gold, rule: SQLRule = SQLRule.SPIDER) -> Judgement:
    """Judge all the rows that a submitted query returned."""
    if rule is SQLRule.BIRD:
        return _EQUAL if set(rows) == set(gold.rows) else _DIFFERENT
    if len(rows) != len(gold.rows):
        return Judgement(False, f"{len(rows)} rows, not {len(gold.rows)}")
    if not rows:
        return _EQUAL
    if len(rows[0]) != gold.width:
        return Judgement(False, f"{len(rows[0])} columns, not {gold.width}")
    budget = Budget(_ROWS_WORK + _ROWS_WORK_PER_CELL * len(rows) * gold.width)
    try:
        return _EQUAL if same_table(rows, gold.rows, budget, ordered=gold.ordered) else _DIFFERENT
    except TooCostlyError:
        return _TOO_COSTLY


# --- cells ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Typed:
    """A cell of an answer, ready to be compared: its normalised text and its number, if it reads as one."""

    text: str
    may_be_null: bool
    may_be_text: bool
    number: Decimal | None


def _typed(cell: Cell) -> _Typed:
    text = normalize_text(cell.text)
    number = None
    if len(text) <= _MAX_NUMBER_CHARS and _NUMBER.fullmatch(text):
        number = Decimal(text.replace(",", ""))
    return _Typed(
        text=text,
        may_be_null=not cell.quoted and text in NULL_WORDS,
        may_be_text=cell.quoted or cell.text.strip() != "NULL",
        number=number,
    )


def floats_agree(answer: Decimal, gold: Decimal, stated: bool = False) -> bool:
    """Tell whether a typed number is the gold float, to the precision given and never looser than 1%.

    The precision is that of the answer; and any answer that rounds to a stated gold agrees.
    """
    error = abs(answer - gold)
    if stated and error <= min(_half_unit(gold), _COARSEST_STATED):
        return True
    return error <= abs(gold) * _ROUNDING_NOISE or error <= min(_half_unit(answer), abs(gold) * _RELATIVE_TOLERANCE)


def _half_unit(number: Decimal) -> Decimal:
    """Half a unit of the last digit written."""
    return Decimal((0, (5,), int(number.as_tuple().exponent) - 1))


class _ValueColumn:
    """A gold column under the rules for typed answers."""

    def __init__(self, values: Sequence[SQLValue], stated: bool = False) -> None:
        self._stated = stated
        number: dict[tuple[str, object], int] = {}
        self.ids = [number.setdefault(_key(value), len(number)) for value in values]
        for value, own in zip(values, self.ids, strict=True):
            if isinstance(value, str):
                shown = shortened(value, _LONGEST_ESCAPE * len(value) + 1)
                number.setdefault(("text", normalize_text(shown)), own)
        self._number = number
        self._floats = sorted({Decimal(repr(v)) for v in values if isinstance(v, float) and math.isfinite(v)})

    def candidates(self, cell: _Typed) -> tuple[int, ...]:
        """Return the values that the cell may stand for: NULL, text, blob, integer, then floats by closeness."""
        keys: list[tuple[str, object]] = []
        if cell.may_be_null:
            keys.append(("null", None))
        if cell.may_be_text:
            keys += [("text", cell.text), ("blob", cell.text)]
        if cell.text in _SPECIAL:
            keys.append(("special", _SPECIAL[cell.text]))
        if cell.number is not None:
            keys.append(("int", cell.number))
            keys += [("float", value) for value in self._close_floats(cell.number)]
        return tuple(self._number[key] for key in keys if key in self._number)

    def _close_floats(self, number: Decimal) -> list[Decimal]:
        # The window is a little wider than any tolerance; `floats_agree` decides.
        loosest = min(_half_unit(number), abs(number) * _RELATIVE_TOLERANCE * 2)
        window = max(loosest, abs(number) * _ROUNDING_NOISE * 2, _COARSEST_STATED if self._stated else 0)
        first = bisect_left(self._floats, number - window)
        last = bisect_right(self._floats, number + window)
        close = [value for value in self._floats[first:last] if floats_agree(number, value, self._stated)]
        return sorted(close, key=lambda value: abs(value - number))


def _key(value: SQLValue) -> tuple[str, object]:
    """Return the identity of a gold value."""
    if value is None:
        return ("null", None)
    if isinstance(value, str):
        return ("text", normalize_text(value))
    if isinstance(value, bytes):
        return ("blob", f"x'{value.hex()}'")
    if isinstance(value, int):
        return ("int", Decimal(value))
    return ("float", Decimal(repr(value))) if math.isfinite(value) else ("special", repr(value))
