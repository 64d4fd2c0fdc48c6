"""What a gold query says about the data that tell it from slightly wrong ones: constants, sizes, equated columns. Pure.

A constant belongs to the column that it is compared with, through functions and arithmetic if need be; one that is
compared with an aggregate, and LIMIT, gives a size that groups should reach and miss. Two columns that a query equates,
that both sides of a set operation return, or one that it looks up in a subquery, are linked: their
values must meet often enough in a test database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import sqlglot
from sqlglot import exp

from env_server.dataset import SQLValue
from env_server.sql.parsing import parse_query
from env_server.sql.schema import Schema, Table, fold

Place = tuple[str, str]
"""A table's and a column's name, both in lower case."""

_COMPARISONS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Like, exp.Is, exp.Glob, exp.Between, exp.In)
_MAX_SIZE = 300

T = TypeVar("T")


@dataclass(slots=True)
class QueryConstants:
    """What a query says about the data. `sizes`: numbers of rows that matter; `tables`: the tables that it names."""

    values: dict[Place, list[SQLValue]] = field(default_factory=dict)
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
    known = {fold(column.name) for table in schema.tables for column in table.columns}
    known |= {fold(each.alias) for each in tree.find_all(exp.Alias)}
    for column in list(tree.find_all(exp.Column)):
        name = column.this
        if isinstance(name, exp.Identifier) and name.quoted and not column.table and fold(name.name) not in known:
            column.replace(exp.Literal.string(name.name))
    return tree


def read_constants(tree: exp.Expression, schema: Schema) -> QueryConstants:
    """Collect what a parsed query says."""
    found = QueryConstants()
    tables = {fold(table.name): table for table in schema.tables}
    found.tables.update(fold(each.name) for each in tree.find_all(exp.Table) if fold(each.name) in tables)
    for node in tree.walk():
        if isinstance(node, _COMPARISONS):
            _read_comparison(found, tables, node)
        elif isinstance(node, exp.SetOperation):
            # The columns at the same place of both sides, so that the sides have rows in common.
            for one, other in zip(node.left.selects, node.right.selects, strict=False):
                pair = [
                    place_of(each.unalias(), tables) for each in (one, other) if isinstance(each.unalias(), exp.Column)
                ]
                _link(found, pair)
        elif isinstance(node, exp.Limit | exp.Offset):
            _add_sizes(found, [node.expression])
    found.sizes = sorted(set(found.sizes))
    return found


def propagate(found: QueryConstants, references: Iterable[tuple[Place, Place]]) -> None:
    """Give every column the constants of those that it refers to, is referred to by, or is equated with."""
    groups: dict[Place, set[Place]] = {}
    for left, right in (*references, *found.links):
        group = groups.get(left, {left}) | groups.get(right, {right})
        groups.update(dict.fromkeys(group, group))
    found.values = _shared(found.values, groups)
    found.patterns = _shared(found.patterns, groups)


def place_of(column: exp.Column, tables: Mapping[str, Table]) -> Place | None:
    """Return the table and column that a name means: those of the nearest SELECT that has them."""
    name, qualifier = fold(column.name), fold(column.table)
    select = column.find_ancestor(exp.Select)
    while select is not None:
        # The names of a SELECT's arguments differ between versions of sqlglot.
        parts = [each for value in select.args.values() for each in (value if isinstance(value, list) else [value])]
        for source in (each.this for each in parts if isinstance(each, exp.From | exp.Join)):
            table = tables.get(fold(source.name)) if isinstance(source, exp.Table) else None
            named = not qualifier or qualifier in (fold(source.alias), fold(source.name))
            if table is not None and named and any(name == fold(each.name) for each in table.columns):
                return fold(table.name), name
        select = select.find_ancestor(exp.Select)
    return None


def replace_tables(tree: exp.Expression, schema: Schema, rows: Callable[[Table], str]) -> None:
    """Read a subquery in the place of each table that a query names. `rows`: what it says."""
    tables = {fold(table.name): table for table in schema.tables}
    shadowed = {fold(each.alias) for each in tree.find_all(exp.CTE)}
    for node in list(tree.find_all(exp.Table)):
        table = tables.get(fold(node.name))
        if table is not None and fold(node.name) not in shadowed:
            query = sqlglot.parse_one(rows(table), read="sqlite")
            alias = exp.TableAlias(this=exp.to_identifier(node.alias or node.name, quoted=True))
            node.replace(exp.Subquery(this=query, alias=alias, joins=node.args.get("joins")))


def _read_comparison(found: QueryConstants, tables: Mapping[str, Table], node: exp.Expression) -> None:
    arguments = [node.this, *(node.args.get(key) for key in ("expression", "low", "high")), *node.expressions]
    sides = [side for side in arguments if side is not None]
    if any(side.find(exp.AggFunc) is not None and not isinstance(side, exp.Subquery) for side in sides):
        _add_sizes(found, sides)
    literals = [value for side in sides for value in _literals(side)]
    parts = [part for side in sides for part in _parts(side) if isinstance(part, exp.Column)]
    columns = [place for part in parts if (place := place_of(part, tables)) is not None]
    for place in columns:
        found.values.setdefault(place, []).extend(literals)
        if isinstance(node, exp.Like | exp.Glob):
            found.patterns.setdefault(place, []).extend(value for value in literals if isinstance(value, str))
    query = node.args.get("query")
    inner = query.find(exp.Select) if query is not None else None
    if inner is not None:
        shown = [part for each in inner.selects for part in _parts(each) if isinstance(part, exp.Column)]
        columns[1:] = [place for part in shown[:1] if (place := place_of(part, tables)) is not None]
    _link(found, columns)


def _link(found: QueryConstants, places: Sequence[Place | None]) -> None:
    if len(places) > 1 and places[0] is not None and places[1] is not None and places[0] != places[1]:
        found.links.append((places[0], places[1]))


def _shared(values: dict[Place, list[T]], groups: dict[Place, set[Place]]) -> dict[Place, list[T]]:
    """Return the values of each column, its own first, then those of the others of its group."""
    found = dict(values)
    for place, group in groups.items():
        others = [value for other in sorted(group - {place}) for value in values.get(other, ())]
        if others:
            found[place] = [*values.get(place, ()), *others]
    return found


def _add_sizes(found: QueryConstants, sides: Iterable[exp.Expression]) -> None:
    for side in sides:
        found.sizes += [value for value in _literals(side) if isinstance(value, int) and 0 < value <= _MAX_SIZE]


def _parts(side: exp.Expression) -> Iterator[exp.Expression]:
    """Yield the nodes of one side of a comparison, those of subqueries apart."""
    yield from side.walk(prune=lambda each: isinstance(each, exp.Query))


def _literals(side: exp.Expression) -> Iterator[SQLValue]:
    for node in _parts(side):
        if not isinstance(node, exp.Literal):
            continue
        if node.is_string:
            yield str(node.this)
            continue
        number = float(node.this)
        if str(node.this).isdecimal() and number < 2**63:
            number = int(node.this)
        yield -number if isinstance(node.parent, exp.Neg) else number
