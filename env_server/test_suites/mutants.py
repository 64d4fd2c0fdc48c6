"""Mutants of a gold query: the same query with one piece changed, so that it asks something else. Pure.

`mutants` leaves out a condition or the order, or reads another column, table, constant or limit: with them is measured
how easily an answer is hit by luck. `read_clauses` leaves out each clause in turn: that shows whether the data test it.
Neither has a text twice or the gold's own. Some mutants fail to run, and some mean the same as the gold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, zip_longest

from sqlglot import exp

from env_server.sql.schema import Schema, Table, fold
from env_server.test_suites.constants import place_of

MAX_MUTANTS = 100
MAX_REPLACEMENTS = 4
"""Other columns, and other tables, that are tried in the place of one."""
_SET_OPERATIONS = {exp.Except: "EXCEPT", exp.Intersect: "INTERSECT", exp.Union: "UNION"}
_CONDITIONS = {"where": exp.Where, "having": exp.Having}
_FAMILIES = (("int", "real", "floa", "doub", "num", "dec", "bool"), ("date", "time"))

Tables = Mapping[str, Table]


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
