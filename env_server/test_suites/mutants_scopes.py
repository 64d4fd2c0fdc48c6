"""What the parts of a query are: its nodes, and the SELECTs in it with the tables and columns that names mean there.

Rules write a changed query as an `Edit`, or several, of the gold's tree. The nodes they put in are made by `shell`
over nodes of the gold, which keep their parents: copying trees would cost more than writing them out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import apsw
from sqlglot import exp

from env_server.sql.schema import Column, Table

T = TypeVar("T")


def _argument(node: type[exp.Expression], name: str) -> str:
    """Return the name of an argument; versions of sqlglot differ in the underscore after a keyword."""
    return next(str(key) for key in node.arg_types if key.rstrip("_") == name)


FROM = _argument(exp.Select, "from")

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_FAMILIES = (
    ("number", ("int", "real", "floa", "doub", "num", "dec", "bool", "bit", "year")),
    ("time", ("date", "time")),
    ("text", ("char", "clob", "text")),
)


@dataclass(frozen=True, slots=True)
class Edit:
    """`target` gets `value` as its argument `key`; without a key, `value` takes the target's place."""

    target: exp.Expression
    value: object
    key: str = ""


Change = tuple[Edit, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One table of a FROM clause: `name` is what its columns are qualified with; `table` is None for a subquery."""

    name: str
    node: exp.Expression
    table: Table | None
    columns: dict[str, Column]

    @property
    def primary_key(self) -> list[Column]:
        """The primary key's columns; the first column where none is declared."""
        columns = list(self.columns.values())
        return [column for column in columns if column.primary_key] or columns[:1]

    def is_unique(self, column: Column) -> bool:
        """Tell whether the column alone is declared as the table's primary key."""
        return column.primary_key and len(self.primary_key) == 1

    @property
    def linking(self) -> set[str]:
        """The columns that are keys: the primary key's and the foreign keys'."""
        keys = self.table.foreign_keys if self.table else ()
        named = {name.casefold() for key in keys for name in key.columns}
        return named | {name for name, column in self.columns.items() if column.primary_key}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a column comes from."""

    source: Source
    column: Column

    @property
    def key(self) -> tuple[str, str]:
        """Tells the places of one scope apart."""
        return self.source.name.casefold(), self.column.name.casefold()


@dataclass(slots=True, eq=False)
class Scope:
    """One SELECT, or the ORDER BY and LIMIT of one compound, with the nodes that belong to no query inside it."""

    query: exp.Expression
    parent: Scope | None
    sources: list[Source] = field(default_factory=list)
    nodes: list[exp.Expression] = field(default_factory=list)

    @property
    def is_select(self) -> bool:
        """Whether this is a SELECT and not a compound."""
        return isinstance(self.query, exp.Select)

    @property
    def columns(self) -> list[exp.Expression]:
        """The references to columns."""
        return [node for node in self.nodes if isinstance(node, exp.Column) and not isinstance(node.this, exp.Star)]

    @property
    def projections(self) -> list[exp.Expression]:
        """The selected expressions, without their aliases."""
        return [node.unalias() for node in self.query.selects]

    @property
    def joins(self) -> list[exp.Expression]:
        """The joins of a SELECT; one without FROM has none."""
        return list(self.query.args.get("joins") or ()) if self.query.args.get(FROM) else []

    @property
    def is_aggregated(self) -> bool:
        """Whether the select list has an aggregate."""
        return any(has_aggregate(node) for node in self.projections)

    @property
    def is_operand(self) -> bool:
        """Whether this SELECT is one side of a compound."""
        return isinstance(self.query.parent, exp.SetOperation)

    @property
    def is_set(self) -> bool:
        """Whether it does not matter how often this SELECT returns a row."""
        parent = self.query.parent
        if self.is_operand:
            return bool(parent.args.get("distinct"))
        return isinstance(parent, exp.Exists) or isinstance(parent.parent, exp.In)

    @property
    def is_value(self) -> bool:
        """Whether this is a subquery in an expression, which stands for one value or is searched for one."""
        parent = self.query.parent
        return isinstance(parent, exp.Subquery) and not isinstance(parent.parent, exp.From | exp.Join | exp.Paren)

    @property
    def is_table(self) -> bool:
        """Whether another query reads this SELECT as a table, by the names of its columns."""
        parent = self.query.parent
        return isinstance(parent, exp.CTE) or isinstance(parent.parent, exp.From | exp.Join)

    @property
    def is_first(self) -> bool:
        """Whether there is a LIMIT 1."""
        limit = self.query.args.get("limit")
        return isinstance(limit, exp.Limit) and whole_number(limit.expression) == 1

    @property
    def shows_key(self) -> bool:
        """Whether the primary key of the only table is selected, so that no two rows are the same."""
        places = [self.local(node) for node in self.projections if isinstance(node, exp.Column)]
        return len(self.sources) == 1 and any(place and place.source.is_unique(place.column) for place in places)

    @property
    def has_star(self) -> bool:
        """Whether all columns are selected with `*`."""
        return any(node.is_star for node in self.query.selects)

    def clause(self, node: exp.Expression) -> str:
        """Return the argument of the query under which a node of this scope stands, such as `where`."""
        while node.parent is not self.query:
            node = node.parent
        return str(node.arg_key)

    def local(self, column: exp.Expression) -> Place | None:
        """Say which column of this scope's own tables is meant."""
        wanted, qualifier = column.name.casefold(), column.table.casefold()
        for source in self.sources:
            found = source.columns.get(wanted)
            if found and qualifier in ("", source.name.casefold()):
                return Place(source, found)
        return None

    def resolve(self, column: exp.Expression) -> Place | None:
        """Say which column is meant, in this scope or in one around it."""
        scope: Scope | None = self
        while scope:
            found = scope.local(column)
            if found:
                return found
            scope = scope.parent
        return None

    def places(self) -> list[Place]:
        """Every column of every table of this scope."""
        return [Place(source, column) for source in self.sources for column in source.columns.values()]

    def name(self, place: Place, qualified: bool = False) -> exp.Expression:
        """Return a reference to a column, qualified where that may be needed."""
        qualified = qualified or len(self.sources) > 1
        table = {"table": identifier(place.source.name)} if qualified else {}
        return exp.Column(this=identifier(place.column.name), **table)

    def equal_places(self) -> list[list[Place]]:
        """Return the classes of columns that conditions joined by AND make equal."""
        where = self.query.args.get("where")
        conditions = [each.args.get("on") for each in self.joins if not each.side] + [where and where.this]
        classes: list[list[Place]] = []
        for node in (conjunct for condition in conditions for conjunct in conjuncts(condition)):
            if not (isinstance(node, exp.EQ) and all(isinstance(side, exp.Column) for side in sides(node))):
                continue
            pair = [place for place in map(self.local, sides(node)) if place]
            if len(pair) == 2:
                met = [each for each in classes if {place.key for place in each} & {place.key for place in pair}]
                merged = [place for each in [*met, pair] for place in each]
                classes = [each for each in classes if each not in met]
                classes.append(list({place.key: place for place in merged}.values()))
        return classes

    def twins(self, place: Place) -> list[Place]:
        """Return the other columns that are made equal to this one."""
        keys = [each for each in self.equal_places() if place.key in [other.key for other in each]]
        return [other for each in keys for other in each if other.key != place.key]

    def qualifications(self, taken: Collection[str]) -> Change:
        """Qualify the unqualified columns whose (case-folded) names are in `taken`."""
        edits = []
        for column in self.columns:
            place = self.local(column)
            if place and not column.table and column.name.casefold() in taken:
                edits.append(Edit(column, identifier(place.source.name), "table"))
        return tuple(edits)


def deduplicated(scope: Scope) -> Change:
    """Put DISTINCT in, where it may matter; empty where it does not."""
    if scope.is_aggregated or scope.is_set or scope.is_first or any(map(scope.query.args.get, ("distinct", "group"))):
        return ()
    return (Edit(scope.query, exp.Distinct(), "distinct"),)


def shell(kind: type[exp.Expression], /, **args: object) -> exp.Expression:
    """Return a node over existing ones, which stay the children of their parents."""
    node = kind()
    node.args.update(args)
    return node


def reshaped(node: exp.Expression, **args: object) -> exp.Expression:
    """Return a node like this one, over the same children but for those given."""
    return shell(type(node), **{**node.args, **args})


def binary(kind: type[exp.Expression], left: exp.Expression, right: exp.Expression) -> exp.Expression:
    """Return an operator between two sides; division is SQLite's own, which sqlglot then leaves as it is."""
    return shell(kind, this=left, expression=right, **({"typed": True, "safe": True} if kind is exp.Div else {}))


def identifier(name: str) -> exp.Expression:
    """Return a name, quoted where SQLite needs it."""
    plain = _PLAIN_NAME.match(name) and name.upper() not in apsw.keywords
    return exp.Identifier(this=name, quoted=not plain)


def whole_number(node: exp.Expression | None) -> int | None:
    """Return the number that a literal writes with digits alone; None for anything else, and past 64 bits."""
    if not isinstance(node, exp.Literal) or node.is_string or len(node.this) > 18 or not node.this.isdecimal():
        return None
    return int(node.this)


def family(column: Column) -> str:
    """Return what a column's declared type holds: number, time, text, or "" where that is not said."""
    declared = column.type.casefold()
    return next((name for name, words in _FAMILIES if any(word in declared for word in words)), "")


def sides(node: exp.Expression) -> tuple[exp.Expression, exp.Expression]:
    """Return both sides of a binary operator."""
    return node.this, node.expression


def conjuncts(node: exp.Expression | None) -> list[exp.Expression]:
    """Return the conditions that AND joins."""
    if node is None:
        return []
    if isinstance(node, exp.And):
        return [each for side in sides(node) for each in conjuncts(side)]
    return conjuncts(node.this) if isinstance(node, exp.Paren) and isinstance(node.this, exp.And) else [node]


def joined(conditions: Iterable[exp.Expression | None], kind: type[exp.Expression] = exp.And) -> exp.Expression | None:
    """Join conditions by AND or OR; None where there is none."""
    whole: exp.Expression | None = None
    for condition in conditions:
        if condition is not None:
            part = operand(condition)
            whole = part if whole is None else shell(kind, this=whole, expression=part)
    return whole


def operand(condition: exp.Expression) -> exp.Expression:
    """Return a condition with parentheses where AND, OR or NOT beside it would tear it apart."""
    return shell(exp.Paren, this=condition) if isinstance(condition, exp.Connector) else condition


def where(condition: exp.Expression | None) -> exp.Expression | None:
    """Return the WHERE clause of a condition; None without one."""
    return None if condition is None else shell(exp.Where, this=condition)


def is_aggregate(node: exp.Expression) -> bool:
    """Tell whether this is a call of an aggregate function; max(a, b) is none."""
    return isinstance(node, exp.AggFunc) and not (isinstance(node, exp.Max | exp.Min) and bool(node.expressions))


def has_aggregate(node: exp.Expression) -> bool:
    """Tell whether an aggregate stands in an expression, outside the queries nested in it."""
    return any(is_aggregate(each) for each in node.walk(prune=lambda each: isinstance(each, exp.Query)))


def unique(items: Iterable[T], key: Callable[[T], object]) -> list[T]:
    """Return the items whose key is new, in their order."""
    found: dict[object, T] = {}
    for item in items:
        found.setdefault(key(item), item)
    return list(found.values())


def interleaved(streams: Iterable[Iterator[T]]) -> Iterator[T]:
    """Yield the first item of each stream, then the second of each, and so on."""
    waiting = list(streams)
    while waiting:
        rest = []
        for stream in waiting:
            for item in stream:
                yield item
                rest.append(stream)
                break
        waiting = rest
