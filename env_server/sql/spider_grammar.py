"""How Spider's own parser reads a query, as far as its hardness labels depend on it.

The labels of `eval_hardness` are counted over the output of `process_sql.py` (both in the repository taoyds/spider),
a parser for the queries that Spider's annotators wrote. It has habits that a real parser has not, and the published
labels contain them:

- words are split at white space and at some punctuation only, so that `a=1` is one word, which it cannot read;
- a value that is a column (`a < b OR c = 1`) takes everything up to the next AND, comma, closing parenthesis, clause
  or JOIN with it: what stands there is never seen. Where that ends in front of a subquery or a parenthesis, the
  rest of the query is never seen either;
- a GROUP BY or ORDER BY ends at the first thing that is not understood (`ORDER BY a COLLATE NOCASE LIMIT 1` has no
  LIMIT), and what follows the end of a query is ignored;
- a negation counts as an aggregate, and so does each AND or OR in HAVING; an aggregate in HAVING does not, nor does
  one in a SELECT column that does not begin with it (`a / count(*)`).

`read_complexity` gives exactly the counts of that parser wherever it reads the query to its end. Where it gives up,
so does this one, except on what only the schema can tell (an unknown column or alias), and there is no official label
to agree with. Pure, linear in the length of the text, never raises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_CLAUSES = frozenset(("select", "from", "where", "group", "order", "limit", "intersect", "union", "except"))
_JOINS = frozenset(("join", "on", "as"))
_VALUE_ENDS = _CLAUSES | _JOINS | frozenset(("", ",", ")", "and"))
_OPERATORS = frozenset(("not", "between", "=", ">", "<", ">=", "<=", "!=", "in", "like", "is", "exists"))
_ARITHMETIC = frozenset(("-", "+", "*", "/"))
_AGGREGATES = frozenset(("max", "min", "count", "sum", "avg"))
_COMPOUNDS = frozenset(("intersect", "union", "except"))
# Words that are no name of a column or table: the original looks them up in vain.
_RESERVED = _CLAUSES | _JOINS | _OPERATORS | frozenset(("and", "or", "having", "null", "case", "distinct", "all"))

_QUOTED = r'"[^"]*"'
_WORD = re.compile(
    rf"""(?: {_QUOTED} | [,:](?=\d) | -(?!-) | [^\s"()\[\]{{}}<>;@\#$%&?!*,:`-] )+ | -- | \S""", re.VERBOSE | re.DOTALL
)
_NAME = re.compile(r"(?!\d+\Z)\w+(?:\.\w+)?")


@dataclass(frozen=True, slots=True)
class Complexity:
    """The three counts that the hardness rule compares with its thresholds."""

    clauses: int
    nesting: int
    extras: int


class _GaveUpError(Exception):
    """The original parser cannot read the query."""


def read_complexity(sql: str) -> Complexity | None:
    """Count a query as the original does; None where the original gives up."""
    try:
        return _Reader(_words(sql)).query()
    except (_GaveUpError, RecursionError):
        return None


def _words(sql: str) -> list[str]:
    """Split a text as the original does: lower case, every quotation one word, `! =` and its like joined."""
    text = sql.replace("'", '"')
    if text.count('"') % 2:
        raise _GaveUpError
    words: list[str] = []
    for word in _WORD.findall(text.lower()):
        if word == "=" and words and words[-1] in ("!", ">", "<"):
            words[-1] += word
        else:
            words.append(word)
    return words


@dataclass(slots=True)
class _Conditions:
    """What is counted in an ON, WHERE or HAVING."""

    connectors: list[str] = field(default_factory=list)
    likes: int = 0
    negations: int = 0
    subqueries: int = 0


class _Reader:
    """Walks over the words. Its methods take what they are named after, or raise _GaveUpError."""

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._at = 0

    def query(self) -> Complexity:
        """Take a SELECT and the compound that it begins; count the SELECT."""
        in_parentheses = self._skip("(")
        start = self._at
        joins, on = self._tables()
        end, self._at = self._at, start
        columns, aggregates = self._columns()
        self._at = end
        where = self._conditions(_Conditions()) if self._skip("where") else None
        groups = self._groups() if self._skip("group") else []
        having = self._conditions(_Conditions()) if self._skip("having") else _Conditions()
        orders = self._orders() if self._skip("order") else []
        limit = self._limit()
        self._semicolons()
        if in_parentheses:
            self._expect(")")
            self._semicolons()
        compound = self._word() in _COMPOUNDS
        if compound:
            self._at += 1
            self.query()
        conditions = [on, having] if where is None else [on, where, having]
        aggregates += sum(groups) + sum(orders) + having.negations + len(having.connectors)
        aggregates += 0 if where is None else where.negations
        return Complexity(
            clauses=(where is not None)
            + bool(groups)
            + bool(orders)
            + limit
            + joins
            + sum(each.connectors.count("or") + each.likes for each in conditions),
            nesting=sum(each.subqueries for each in conditions) + compound,
            extras=(aggregates > 1)
            + (columns > 1)
            + (where is not None and bool(where.connectors))
            + (len(groups) > 1),
        )

    def _tables(self) -> tuple[int, _Conditions]:
        """Take the FROM clause, wherever it begins; return the number of joins and their conditions."""
        try:
            self._at = self._words.index("from", self._at) + 1
        except ValueError:
            raise _GaveUpError from None
        on = _Conditions()
        in_parentheses = self._skip("(")
        if self._word() == "select":
            self.query()
        else:
            self._table()
        joins = 0
        while True:
            if self._skip("on"):
                self._conditions(on)
            if in_parentheses:
                self._expect(")")
                in_parentheses = False
            if not self._word() or self._at_end_of_clause():
                return joins, on
            self._expect("join")
            self._table()
            joins += 1

    def _table(self) -> None:
        self._name()
        if self._word() == "as":
            self._at += 2

    def _columns(self) -> tuple[int, int]:
        """Take the SELECT list; return the number of its columns, and of those that begin with an aggregate."""
        self._expect("select")
        self._skip("distinct")
        columns = aggregates = 0
        while self._word() and self._word() not in _CLAUSES:
            if self._word() in _AGGREGATES:
                self._at += 1
                aggregates += 1
            star = self._word() == "*"
            self._term()
            columns += 1
            # The original needs no comma. `max(a) * b` is three columns to it, since `*` is one; it also takes an
            # alias without AS for a column where there is one of that name, which only the schema can tell.
            if not self._skip(",") and not star and self._word() not in _CLAUSES | {"*"}:
                raise _GaveUpError
        return columns, aggregates

    def _term(self) -> int:
        """Take a column, or two of them and an operator between; return how many are in an aggregate."""
        in_parentheses = self._skip("(")
        aggregates = int(self._column())
        if self._word() in _ARITHMETIC:
            self._at += 1
            aggregates += self._column()
        if in_parentheses:
            self._expect(")")
        return aggregates

    def _column(self) -> bool:
        """Take a column, perhaps in an aggregate; tell whether it is in one."""
        in_parentheses = self._skip("(")
        if self._word() in _AGGREGATES:
            self._at += 1
            self._expect("(")
            self._skip("distinct")
            self._name()
            self._expect(")")
            return True
        self._skip("distinct")
        self._name()
        if in_parentheses:
            self._expect(")")
        return False

    def _name(self) -> None:
        """Take the name of a column or table, or `*`; what a parenthesis follows is a function."""
        word = self._word()
        if word != "*" and (word in _RESERVED or not _NAME.fullmatch(word) or self._word(1) == "("):
            raise _GaveUpError
        self._at += 1

    def _conditions(self, found: _Conditions) -> _Conditions:
        while self._word():
            self._term()
            found.negations += self._skip("not")
            operator = self._word()
            if operator not in _OPERATORS:
                raise _GaveUpError
            self._at += 1
            found.likes += operator == "like"
            found.subqueries += self._value()
            if operator == "between":
                self._expect("and")
                found.subqueries += self._value()
            if not self._word() or self._at_end_of_clause() or self._word() in _JOINS:
                break
            if self._word() not in ("and", "or"):
                raise _GaveUpError
            found.connectors.append(self._word())
            self._at += 1
        return found

    def _value(self) -> bool:
        """Take the right side of a comparison; tell whether it is a subquery."""
        in_parentheses = self._skip("(")
        subquery = self._word() == "select"
        if subquery:
            self.query()
        elif self._word().startswith('"') or _is_number(self._word()):
            self._literal()
        elif in_parentheses:
            raise _GaveUpError
        else:
            self._skip("distinct")
            self._name()
            while self._word() not in _VALUE_ENDS:
                self._at += 1
        if in_parentheses:
            self._expect(")")
        return subquery

    def _literal(self) -> None:
        """Take a number or a quotation, which may not touch another word."""
        word = self._word()
        if not _is_number(word) and not re.fullmatch(_QUOTED, word):
            raise _GaveUpError
        self._at += 1

    def _groups(self) -> list[bool]:
        """Take the GROUP BY list; for each column, whether it is an aggregate."""
        self._expect("by")
        found: list[bool] = []
        while self._word() and not self._at_end_of_clause():
            found.append(self._column())
            if not self._skip(","):
                break
        return found

    def _orders(self) -> list[int]:
        """Take the ORDER BY list; for each term, the number of its aggregates."""
        self._expect("by")
        found: list[int] = []
        while self._word() and not self._at_end_of_clause():
            found.append(self._term())
            if self._word() in ("asc", "desc"):
                self._at += 1
            if not self._skip(","):
                break
        return found

    def _limit(self) -> bool:
        if not self._skip("limit"):
            return False
        if not self._word():
            raise _GaveUpError
        self._at += 1
        return True

    def _semicolons(self) -> None:
        while self._skip(";"):
            pass

    def _at_end_of_clause(self) -> bool:
        return self._word() in _CLAUSES or self._word() in (")", ";")

    def _word(self, ahead: int = 0) -> str:
        """Return the next word, or a later one; "" behind the last one."""
        index = self._at + ahead
        return self._words[index] if index < len(self._words) else ""

    def _skip(self, word: str) -> bool:
        """Take the word if it is the next one; tell whether it was."""
        if self._word() != word:
            return False
        self._at += 1
        return True

    def _expect(self, word: str) -> None:
        if not self._skip(word):
            raise _GaveUpError


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
