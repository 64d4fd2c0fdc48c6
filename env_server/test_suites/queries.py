"""What is read from a gold query's syntax tree, and the queries that are made of it. Pure.

A constant belongs to the column that it is compared with, through functions and arithmetic if need be; one that is
compared with an aggregate, and LIMIT, gives a size that groups should reach and miss. Two columns that a query equates,
that both sides of a set operation return, or one that it looks up in a subquery, are linked: their
values must meet often enough in a test database.

Mutants are the same query with one piece changed, so that it asks something else: a condition or the order left out,
another column, table, constant or limit. With them is measured how easily an answer is hit by luck. `read_clauses`
leaves out each clause in turn: that shows whether the data test it. Neither has a text twice or the gold's own. Some
mutants fail to run, and some mean the same as the gold. `reordered` reads the rows in other orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import TypeVar

import sqlglot
from sqlglot import exp

from env_server.dataset import SQLValue
from env_server.sql.lexer import fold
from env_server.sql.parsing import parse_query
from env_server.sql.schema import Schema, Table, quote_identifier

Place = tuple[str, str]
"""A table's and a column's name, both in lower case."""

_COMPARISONS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Like, exp.Is, exp.Glob, exp.Between, exp.In)
_MAX_SIZE = 300
MAX_MUTANTS = 100
MAX_REPLACEMENTS = 4
"""Other columns, and other tables, that are tried in the place of one."""
_SET_OPERATIONS = {exp.Except: "EXCEPT", exp.Intersect: "INTERSECT", exp.Union: "UNION"}
_CONDITIONS = {"where": exp.Where, "having": exp.Having}
_FAMILIES = (("int", "real", "floa", "doub", "num", "dec", "bool"), ("date", "time"))

Tables = Mapping[str, Table]

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


@dataclass(frozen=True, slots=True)
class Clause:
    """A condition of WHERE or HAVING, a LIMIT, or one side of a set operation, as SQL, and the gold without it.

    For WHERE and HAVING also the gold in which they are never met. The clause is tested where each of the probes
    returns other rows than the gold. One that changes nothing, such as HAVING COUNT(*) >= 1, cannot be tested.
    """

    text: str
    probes: tuple[str, ...]


def mutants(tree: exp.Query, schema: Schema) -> tuple[str, ...]:
    """Return at most `MAX_MUTANTS` queries, the kinds in turn. `tree`: the gold, parsed (`constants.parse`)."""
    tables = {fold(table.name): table for table in schema.tables}
    kinds = (_conditions, _columns, _constants, _limits, _orders, _tables)
    nodes = list(tree.walk())
    found = [[_with(tree, node, new) for node in nodes for new in kind(node, tables)] for kind in kinds]
    texts = dict.fromkeys(text for turn in zip_longest(*found) for text in turn if text is not None)
    texts.pop(_text(tree), None)
    return tuple(islice(texts, MAX_MUTANTS))


def read_clauses(tree: exp.Query) -> tuple[Clause, ...]:
    """Return the clauses of a parsed query, the outermost query's first."""
    gold = _text(tree)
    probes: dict[str, dict[str, None]] = {}
    for node in list(tree.walk()):
        for text, new in _clauses(node):
            probe = _with(tree, node, new)
            if probe != gold:
                probes.setdefault(text, {})[probe] = None
    return tuple(Clause(text, tuple(each)) for text, each in probes.items())


def _with(tree: exp.Expression, node: exp.Expression, new: exp.Expression) -> str:
    """Return the query with another node in the place of one."""
    if node is tree:
        return _text(new)
    node.replace(new)
    text = _text(tree)
    new.replace(node)
    return text


def _clauses(node: exp.Expression) -> Iterator[tuple[str, exp.Expression]]:
    if isinstance(node, exp.SetOperation):
        name = _SET_OPERATIONS[type(node)]
        yield f"{name} {_text(node.right)}", _side(node, node.left)
        if not isinstance(node, exp.Except):
            yield f"{_text(node.left)} {name}", _side(node, node.right)
    for key, kind in _CONDITIONS.items():
        clause = node.args.get(key) if isinstance(node, exp.Select) else None
        if clause is None:
            continue
        yield _text(clause), _changed(node, key, kind(this=exp.Literal.number(0)))
        parts = list(clause.this.flatten()) if isinstance(clause.this, exp.And) else [clause.this]
        for part in parts:
            others = [each for each in parts if each is not part]
            rest = kind(this=exp.and_(*others)) if others else None
            yield _text(kind(this=part.copy())), _changed(node, key, rest)
    # A subquery that stands for one value takes the first row in any case.
    value = isinstance(node.parent, exp.Subquery) and isinstance(node.parent.parent, exp.Binary | exp.Select)
    if isinstance(node, exp.Query) and node.args.get("limit") and not value:
        yield _text(node.args["limit"]), _changed(_changed(node, "limit"), "offset")


def _conditions(node: exp.Expression, _: Tables) -> Iterator[exp.Expression]:
    if isinstance(node, exp.Connector):
        yield node.left.copy()
        yield node.right.copy()
    if isinstance(node, exp.Select):
        yield from (_changed(node, key) for key in _CONDITIONS if node.args.get(key))


def _columns(node: exp.Expression, tables: Tables) -> Iterator[exp.Expression]:
    """Put another column of the same table in the place of each, those of its type first."""
    place = place_of(node, tables) if isinstance(node, exp.Column) else None
    if place is None:
        return
    columns = tables[place[0]].columns
    family = next(_family(column.type) for column in columns if fold(column.name) == place[1])
    others = [column for column in columns if fold(column.name) != place[1]]
    for column in sorted(others, key=lambda column: _family(column.type) != family)[:MAX_REPLACEMENTS]:
        yield _changed(node, "this", exp.to_identifier(column.name, quoted=True))


def _constants(node: exp.Expression, _: Tables) -> Iterator[exp.Expression]:
    if not isinstance(node, exp.Literal) or isinstance(node.parent, exp.Limit | exp.Offset | exp.Ordered | exp.Group):
        return
    text = node.name
    if isinstance(node.parent, exp.Like):
        body = text.strip("%")
        others = [body, f"{body}%", f"%{body}"]
    elif node.is_string:
        others = [text.swapcase(), text[:-1], text[1:], text.split(" ")[0]]
    else:
        step = 10.0 ** -len(text.partition(".")[2])
        others = [f"{number:.12g}" for number in (float(text) + step, float(text) - step, 0, 10 * float(text))]
    yield from (_changed(node, "this", other) for other in others)


def _limits(node: exp.Expression, _: Tables) -> Iterator[exp.Expression]:
    limit = node.args.get("limit") if isinstance(node, exp.Query) else None
    if limit is None or not limit.expression.name.isdecimal():
        return
    yield _changed(_changed(node, "limit"), "offset")
    count = int(limit.expression.name)
    for other in (count + 1, count - 1, 3):
        if other > 0:
            yield _changed(node, "limit", exp.Limit(expression=exp.Literal.number(other)))
    skipped = None if node.args.get("offset") else exp.Offset(expression=exp.Literal.number(1))
    yield _changed(node, "offset", skipped)


def _orders(node: exp.Expression, _: Tables) -> Iterator[exp.Expression]:
    if isinstance(node, exp.Ordered):
        falling = bool(node.args.get("desc"))
        yield exp.Ordered(this=node.this.copy(), desc=not falling, nulls_first=falling)
    if isinstance(node, exp.Query) and node.args.get("order"):
        yield _changed(node, "order")


def _tables(node: exp.Expression, tables: Tables) -> Iterator[exp.Expression]:
    """Read another table that has the columns that are used."""
    here = tables.get(fold(node.name)) if isinstance(node, exp.Table) else None
    if here is None:
        return
    places = [place_of(column, tables) for column in node.root().find_all(exp.Column)]
    used = {place[1] for place in places if place is not None and place[0] == fold(here.name)}
    names = {table.name: {fold(column.name) for column in table.columns} for table in tables.values()}
    for name in [name for name in names if name != here.name and used <= names[name]][:MAX_REPLACEMENTS]:
        new = _changed(node, "this", exp.to_identifier(name, quoted=True))
        yield _changed(new, "alias", exp.TableAlias(this=exp.to_identifier(node.alias_or_name, quoted=True)))


def _family(declared: str) -> int:
    return next((i for i, words in enumerate(_FAMILIES) if any(word in declared.casefold() for word in words)), -1)


def _changed(node: exp.Expression, key: str, value: object = None) -> exp.Expression:
    copy = node.copy()
    copy.set(key, value)
    return copy


def _side(node: exp.Expression, side: exp.Expression) -> exp.Expression:
    """Return one side of a set operation, with what stands around both."""
    side = side.copy().unnest()
    for key, value in node.args.items():
        if value and key.rstrip("_") in ("with", "order", "limit", "offset"):
            side.set(key, value.copy())
    return side


def _text(node: exp.Expression) -> str:
    return str(node.sql(dialect="sqlite")).strip()


def reordered(tree: exp.Expression, schema: Schema) -> list[str]:
    """Return the query twice more, reading its tables in other orders and breaking ties in opposite ways.

    Tables are read by their first column backwards, and by their last one; each ORDER BY goes on with the columns of
    the result, upwards and downwards, and a DISTINCT row that stands for several stands where the first or the last of
    them would. What either changes, the query leaves to chance.
    """
    texts = []
    for order, descending in (("1 DESC", False), ("{last}, 1 DESC", True)):
        copy = tree.copy()
        for clause in copy.find_all(exp.Order):
            if isinstance(clause.parent, exp.Query):
                if isinstance(clause.parent, exp.Select):
                    _settle_distinct(clause.parent, clause, exp.Max if descending else exp.Min)
                width = len(clause.parent.selects)
                ties = (exp.Literal.number(place) for place in range(1, width + 1))
                keys = (exp.Ordered(this=tie, desc=descending, nulls_first=not descending) for tie in ties)
                clause.set("expressions", [*clause.expressions, *keys])

        def rows(table: Table, order: str = order) -> str:
            # The LIMIT keeps SQLite from dropping the sort.
            by = order.format(last=len(table.columns))
            return f"SELECT * FROM {quote_identifier(table.name)} ORDER BY {by} LIMIT -1"

        replace_tables(copy, schema, rows)
        texts.append(copy.sql(dialect="sqlite"))
    return texts


def _settle_distinct(select: exp.Select, order: exp.Order, which: type[exp.AggFunc]) -> None:
    """Sort DISTINCT rows by the least or the greatest value of what is not selected."""
    shown = [each.unalias() for each in select.selects]
    names = {fold(each.alias_or_name) for each in select.selects}
    if not select.args.get("distinct") or select.args.get("group") or select.is_star or select.find(exp.AggFunc):
        return
    select.set("distinct", None)
    select.set("group", exp.Group(expressions=[each.copy() for each in shown]))
    for key in order.expressions:
        named = isinstance(key.this, exp.Column) and not key.this.table and fold(key.this.name) in names
        if not (named or key.this in shown or isinstance(key.this, exp.Literal)):
            key.set("this", which(this=key.this))
