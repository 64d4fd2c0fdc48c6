"""What a gold query says about the data that tell it from its neighbour queries: constants, sizes, equated columns.

Read from the query's syntax tree and the schema; pure. A constant belongs to the column that it is compared
with, through functions and arithmetic if need be; one that is compared with an aggregate, and LIMIT, gives a size
that groups should reach and miss. Two columns that a query equates, that both sides of a set
operation return, or one that it looks up in a subquery, are linked: their values must meet often enough in a variant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from sqlglot import exp

from env_server.dataset import SQLValue
from env_server.sql.parsing import parse_query
from env_server.sql.schema import Schema, Table

Place = tuple[str, str]
"""A table's and a column's name, both in lower case."""

_COMPARISONS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Like, exp.Is, exp.Glob)
_MAX_SIZE = 300

T = TypeVar("T")


@dataclass(slots=True)
class Hints:
    """What a query says about the data. `sizes`: numbers of rows that matter; `tables`: the tables that it names."""

    constants: dict[Place, list[SQLValue]] = field(default_factory=dict)
    patterns: dict[Place, list[str]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    links: list[tuple[Place, Place]] = field(default_factory=list)
    tables: set[str] = field(default_factory=set)


def parse(sql: str, schema: Schema) -> exp.Query | None:
    """Parse a query; a double-quoted word that names no column becomes the text that SQLite takes it for.

    None for what sqlglot cannot parse as one query.
    """
    tree = parse_query(sql)
    if tree is None:
        return None
    known = {column.name.casefold() for table in schema.tables for column in table.columns}
    known |= {each.alias.casefold() for each in tree.find_all(exp.Alias)}
    for column in list(tree.find_all(exp.Column)):
        name = column.this
        if isinstance(name, exp.Identifier) and name.quoted and not column.table and name.name.casefold() not in known:
            column.replace(exp.Literal.string(name.name))
    return tree


def read_hints(tree: exp.Expression, schema: Schema) -> Hints:
    """Collect a parsed query's hints."""
    hints = Hints()
    tables = {table.name.casefold(): table for table in schema.tables}
    hints.tables.update(each.name.casefold() for each in tree.find_all(exp.Table) if each.name.casefold() in tables)
    resolver = _Resolver(tables)
    for node in tree.walk():
        if isinstance(node, _COMPARISONS):
            _read_comparison(hints, resolver, node, node.this, [node.expression])
        elif isinstance(node, exp.Between):
            _read_comparison(hints, resolver, node, node.this, [node.args["low"], node.args["high"]])
        elif isinstance(node, exp.In):
            _read_in(hints, resolver, node)
        elif isinstance(node, exp.SetOperation):
            _read_set_operation(hints, resolver, node)
        elif isinstance(node, exp.Limit | exp.Offset):
            _add_sizes(hints, [node.expression])
    hints.sizes = sorted(set(hints.sizes))
    return hints


def spread(hints: Hints, references: Iterable[tuple[Place, Place]]) -> None:
    """Give every column the constants of those that it refers to, is referred to by, or is equated with."""
    groups: dict[Place, set[Place]] = {}
    for left, right in (*references, *hints.links):
        group = groups.get(left, {left}) | groups.get(right, {right})
        groups.update(dict.fromkeys(group, group))
    hints.constants = _shared(hints.constants, groups)
    hints.patterns = _shared(hints.patterns, groups)


def _shared(values: dict[Place, list[T]], groups: dict[Place, set[Place]]) -> dict[Place, list[T]]:
    """Return the values of each column, its own first, then those of the others of its group."""
    found = dict(values)
    for place, group in groups.items():
        others = [value for other in sorted(group - {place}) for value in values.get(other, ())]
        if others:
            found[place] = [*values.get(place, ()), *others]
    return found


def _read_comparison(
    hints: Hints, resolver: _Resolver, node: exp.Expression, left: exp.Expression, right: list[exp.Expression]
) -> None:
    sides = [left, *right]
    if any(side.find(exp.AggFunc) is not None and not isinstance(side, exp.Subquery) for side in sides):
        _add_sizes(hints, sides)
    literals = [value for side in sides for value in _literals(side)]
    columns = [place for side in sides for place in resolver.columns(side)]
    for place in columns:
        hints.constants.setdefault(place, []).extend(literals)
        if isinstance(node, exp.Like | exp.Glob):
            hints.patterns.setdefault(place, []).extend(value for value in literals if isinstance(value, str))
    if len(columns) > 1:
        hints.links.append((columns[0], columns[1]))


def _read_in(hints: Hints, resolver: _Resolver, node: exp.In) -> None:
    columns = resolver.columns(node.this)
    for place in columns:
        literals = [value for each in node.expressions for value in _literals(each)]
        hints.constants.setdefault(place, []).extend(literals)
    query = node.args.get("query")
    inner = query.find(exp.Select) if query is not None else None
    if inner is not None and columns:
        looked_up = [place for each in inner.expressions for place in resolver.columns(each)]
        hints.links.extend((columns[0], place) for place in looked_up[:1])


def _read_set_operation(hints: Hints, resolver: _Resolver, node: exp.SetOperation) -> None:
    """Link the columns that stand at the same place of both sides, so that the sides have rows in common."""
    for pair in zip(node.left.selects, node.right.selects, strict=False):
        left, right = (
            resolver.columns(each.unalias()) if isinstance(each.unalias(), exp.Column) else () for each in pair
        )
        if left and right and left[0] != right[0]:
            hints.links.append((left[0], right[0]))


def _add_sizes(hints: Hints, sides: list[exp.Expression]) -> None:
    for side in sides:
        hints.sizes += [value for value in _literals(side) if isinstance(value, int) and 0 < value <= _MAX_SIZE]


def _literals(side: exp.Expression) -> Iterator[SQLValue]:
    """Yield the constants of one side of a comparison, those of subqueries apart."""
    for node in side.walk(prune=lambda each: isinstance(each, exp.Query)):
        if isinstance(node, exp.Literal):
            value = _value(node)
            negative = isinstance(node.parent, exp.Neg) and isinstance(value, int | float)
            yield -value if negative and isinstance(value, int | float) else value


def _value(literal: exp.Literal) -> SQLValue:
    text = str(literal.this)
    if literal.is_string:
        return text
    try:
        number = int(text)
    except ValueError:
        return float(text)
    return number if abs(number) < 2**63 else float(number)


class _Resolver:
    """Finds the table that a column belongs to."""

    def __init__(self, tables: dict[str, Table]) -> None:
        self._tables = tables

    def columns(self, side: exp.Expression) -> list[Place]:
        """Return the columns of one side of a comparison that belong to tables of the database."""
        found = []
        for node in side.walk(prune=lambda each: isinstance(each, exp.Query)):
            place = self._place(node) if isinstance(node, exp.Column) else None
            if place is not None:
                found.append(place)
        return found

    def _place(self, column: exp.Column) -> Place | None:
        name = column.name.casefold()
        qualifier = column.table.casefold()
        select = column.find_ancestor(exp.Select)
        while select is not None:
            for source in _sources(select):
                table = self._tables.get(source.name.casefold())
                named = not qualifier or qualifier in (source.alias.casefold(), source.name.casefold())
                if table is not None and named and any(name == each.name.casefold() for each in table.columns):
                    return table.name.casefold(), name
            select = select.find_ancestor(exp.Select)
        return None


def _sources(select: exp.Select) -> Iterator[exp.Table]:
    """Yield the tables of a SELECT's FROM and joins; the names of the arguments differ between versions."""
    for value in select.args.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, exp.From | exp.Join) and isinstance(each.this, exp.Table):
                yield each.this
