"""Two facts about a gold query that come from its text alone: how hard it is, and whether it orders its rows.

Hardness is the rule of Spider's own evaluation (Yu et al., EMNLP 2018; `eval_hardness` in the repository
taoyds/spider). Only the outermost SELECT is counted, and of a compound (UNION, INTERSECT, EXCEPT) only its first
SELECT; ORDER BY and LIMIT at the end of a compound belong to its last one:

- *clauses*: one each for WHERE, GROUP BY, ORDER BY and LIMIT, one for each join, each OR and each LIKE;
- *nesting*: one for each subquery that stands in a condition (ON, WHERE, HAVING), and one when the query is a
  compound, however long. A subquery in FROM counts as a table, not as nesting;
- *extras*: one each for more than one aggregate, more than one selected column, more than one condition in
  WHERE, more than one GROUP BY column.

The published labels come from a parser with habits of its own, and the syntax tree is counted as it would count: a
negation is an aggregate, so is each AND or OR in HAVING, an aggregate in HAVING is none, and a value that is a column
takes what follows it, up to the next AND, with it (`a < b OR c = 1`). So every gold of Spider has its published label.
Slips of that parser which no gold meets are not imitated. What it cannot read is counted by the same rules: nested
parentheses, outer and comma joins, EXISTS, window functions and CASE; a subquery in the select list, in GROUP BY or in
ORDER BY and each common table expression count as nesting; IS NOT NULL is no negation. What sqlglot cannot parse is
EXTRA.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlglot import exp

from env_server.dataset import Hardness
from env_server.sql.lexer import GAPS, tokens
from env_server.sql.parsing import parse_query

_COMPARISONS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Like)


@dataclass(frozen=True, slots=True)
class Complexity:
    """The three counts that the hardness rule compares with its thresholds."""

    clauses: int
    nesting: int
    extras: int


def hardness(sql: str) -> Hardness:
    """Return Spider's hardness of a query; EXTRA for what sqlglot cannot parse as one query. Never raises."""
    counts = complexity(sql)
    return Hardness.EXTRA if counts is None else classify(counts)


def classify(counts: Complexity) -> Hardness:
    """Return the hardness that the thresholds of `eval_hardness` give."""
    clauses, nesting, extras = counts.clauses, counts.nesting, counts.extras
    if nesting == 0:
        if clauses <= 1 and extras == 0:
            return Hardness.EASY
        if (clauses <= 1 and extras <= 2) or (clauses <= 2 and extras <= 1):
            return Hardness.MEDIUM
        if (clauses <= 2 and extras > 2) or (clauses == 3 and extras <= 2):
            return Hardness.HARD
    elif nesting == 1 and clauses <= 1 and extras == 0:
        return Hardness.HARD
    return Hardness.EXTRA


def complexity(sql: str) -> Complexity | None:
    """Count a query as the module describes; None for what sqlglot cannot parse as one query."""
    tree = parse_query(_normalised(sql))
    return None if tree is None else _count(tree)


def _count(query: exp.Query) -> Complexity:
    select: exp.Expression = query
    compound = False
    while isinstance(select, exp.SetOperation | exp.Subquery):
        compound = compound or isinstance(select, exp.SetOperation)
        select = select.this
    _forget_unseen(select)
    conditions = [node for clause in _conditions(select) for node in _shallow(clause)]
    columns = select.expressions
    group = _clause(select, exp.Group)
    return Complexity(
        clauses=sum(_clause(select, kind) is not None for kind in (exp.Where, exp.Group, exp.Order, exp.Limit))
        + sum(isinstance(node, exp.Join) for node in _shallow(select))
        + sum(isinstance(node, exp.Or | exp.Like) for node in conditions),
        nesting=len(query.ctes) + compound + _subqueries(select),
        extras=(_aggregates(select) > 1)
        + (len(columns) > 1)
        + any(isinstance(node, exp.Connector) for node in _shallow(_clause(select, exp.Where)))
        + (group is not None and len(group.expressions) > 1),
    )


def orders_at_top_level(sql: str) -> bool:
    """Tell whether the outermost query, or the whole compound, has an ORDER BY, so that row order is meant.

    Decided on the words outside quotes, comments and parentheses: ORDER is a reserved word, so there it can be
    nothing else. Holds for any text that SQLite accepts as one statement.
    """
    depth = 0
    previous = ""
    for token in tokens(sql):
        if token.lastgroup in GAPS:
            continue
        word = token[0].upper()
        depth += {"(": 1, ")": -1}.get(word, 0)
        if depth == 0 and previous == "ORDER" and word == "BY":
            return True
        previous = word
    return False


def _normalised(sql: str) -> str:
    """Rewrite a query so that sqlglot reads it as Spider's parser would; its structure stays the same.

    Comments become blanks (sqlglot does not see ORDER BY around one); `! =`, `> =` and `< =` are joined.
    """
    parts: list[str] = []
    for token in tokens(sql):
        if token[0] == "=" and parts[-2:] in (["!", " "], [">", " "], ["<", " "]):
            parts.pop()
        if token.lastgroup not in GAPS:
            parts.append(token[0])
        elif parts[-1:] != [" "]:
            parts.append(" ")
    return "".join(parts)


def _shallow(node: exp.Expression | None) -> Iterator[exp.Expression]:
    """Yield the nodes of a tree; a query nested in it is yielded but not entered."""
    if node is not None:
        yield from node.walk(prune=lambda each: each is not node and isinstance(each, exp.Select | exp.SetOperation))


def _clause(select: exp.Expression, kind: type[exp.Expression]) -> exp.Expression | None:
    """Return the clause of this class; the names of the arguments differ between versions of sqlglot."""
    return next((value for value in select.args.values() if isinstance(value, kind)), None)


def _conditions(select: exp.Expression) -> Iterator[exp.Expression]:
    """Yield the WHERE and HAVING clauses and the ON condition of every join."""
    for kind in (exp.Where, exp.Having):
        clause = _clause(select, kind)
        if clause is not None:
            yield clause
    for node in _shallow(select):
        if isinstance(node, exp.Join) and node.args.get("on") is not None:
            yield node.args["on"]


def _forget_unseen(select: exp.Expression) -> None:
    """Leave out what the original takes for a part of a value: of `a < b OR c = 1 AND d = 2`, what is `OR c = 1`."""
    for clause in list(_conditions(select)):
        for node in reversed([each for each in _shallow(clause) if isinstance(each, exp.Or)]):
            last, first = node.this, node.expression
            while isinstance(last, exp.Connector):
                last = last.expression
            while isinstance(first, exp.Connector):
                first = first.this
            value = last.expression if isinstance(last, _COMPARISONS) else None
            if not isinstance(value, exp.Column) or value.this.quoted:
                continue
            if first is node.expression:
                node.replace(node.this)
            else:
                first.parent.replace(first.parent.expression)
                node.replace(exp.And(this=node.this, expression=node.expression))


def _subqueries(select: exp.Expression) -> int:
    """Count the queries nested in expressions: everywhere but in WITH and as a table in FROM."""
    return sum(
        isinstance(node, exp.Select | exp.SetOperation) and not _is_table(node, select)
        for node in _shallow(select)
        if node is not select
    )


def _is_table(query: exp.Expression, select: exp.Expression) -> bool:
    """Tell whether a nested query of `select` is a table in FROM or a common table expression."""
    node: exp.Expression = query
    while node.parent is not None and node.parent is not select:
        parent = node.parent
        if isinstance(parent, exp.CTE | exp.From):
            return True
        if isinstance(parent, exp.Join):
            return parent.this is node
        node = parent
    return False


def _aggregates(select: exp.Expression) -> int:
    """Count aggregates as the original does: a negation is one, and each AND or OR in HAVING."""
    where, having = _clause(select, exp.Where), _clause(select, exp.Having)
    return (
        sum(any(map(_is_aggregate, _shallow(column))) for column in select.expressions)
        + sum(map(_is_aggregate, _shallow(_clause(select, exp.Order))))
        + sum(map(_is_negation, _shallow(where)))
        + sum(_is_negation(node) or isinstance(node, exp.Connector) for node in _shallow(having))
    )


def _is_aggregate(node: exp.Expression) -> bool:
    scalar = isinstance(node, exp.Max | exp.Min) and bool(node.expressions)  # max(a, b) compares two values
    return isinstance(node, exp.AggFunc) and not scalar


def _is_negation(node: exp.Expression) -> bool:
    """NOT before an operator; sqlglot writes it as a node or, for LIKE in newer versions, as a flag."""
    if isinstance(node, exp.Not):
        return not isinstance(node.this, exp.Is)
    return bool(node.args.get("negate")) and not isinstance(node, exp.Is)
