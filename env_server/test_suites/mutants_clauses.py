"""Neighbour queries of a SELECT's clauses: DISTINCT, aggregates, columns, GROUP BY, ORDER BY, LIMIT, the extreme row.

Each function yields the changes of one kind over all scopes of a query, the likeliest mistakes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from sqlglot import exp

from env_server.test_suites.mutants_scopes import (
    FROM,
    Change,
    Edit,
    Place,
    Scope,
    binary,
    conjuncts,
    family,
    has_aggregate,
    identifier,
    interleaved,
    is_aggregate,
    joined,
    reshaped,
    shell,
    unique,
    where,
    whole_number,
)
from env_server.test_suites.mutants_tree import QueryTree

MAX_REPLACEMENTS = 4
"""Other columns that are tried in the place of one reference."""

_AGGREGATES = {
    exp.Max: (exp.Min, exp.Avg, exp.Sum, exp.Count),
    exp.Min: (exp.Max, exp.Avg, exp.Sum, exp.Count),
    exp.Avg: (exp.Sum, exp.Max, exp.Min, exp.Count),
    exp.Sum: (exp.Count, exp.Avg, exp.Max, exp.Min),
    exp.Count: (exp.Sum, exp.Max, exp.Min, exp.Avg),
}


def distinct(tree: QueryTree) -> Iterator[Change]:
    """Add or drop DISTINCT in select lists and in COUNT, SUM and AVG, where duplicates may matter."""
    for scope in tree.selects():
        if scope.query.args.get("distinct"):
            yield (Edit(scope.query, None, "distinct"),)
        elif _may_repeat(scope):
            yield (Edit(scope.query, exp.Distinct(), "distinct"),)
    for scope, node in tree.nodes(exp.Count, exp.Sum, exp.Avg):
        if isinstance(node.this, exp.Distinct) and len(node.this.expressions) == 1:
            yield (Edit(node, node.this.expressions[0], "this"),)
        elif not isinstance(node.this, exp.Star | exp.Distinct) and not isinstance(node.parent, exp.Window):
            place = scope.local(node.this) if isinstance(node.this, exp.Column) else None
            if not (place and len(scope.sources) == 1 and place.source.is_unique(place.column)):
                yield (Edit(node, shell(exp.Distinct, expressions=[node.this]), "this"),)


def _may_repeat(scope: Scope) -> bool:
    """Tell whether a SELECT without DISTINCT can return a row twice, and whether that can matter."""
    if scope.is_set or scope.is_value or scope.is_first:
        return False
    group = scope.query.args.get("group")
    if group:
        shown = {place.key for place in map(scope.local, _columns(scope.projections)) if place}
        keys = [scope.local(node) if isinstance(node, exp.Column) else None for node in group.expressions]
        return not all(key and key.key in shown for key in keys)
    return not scope.is_aggregated and not scope.shows_key and not scope.has_star


def _columns(nodes: list[exp.Expression]) -> list[exp.Expression]:
    return [node for node in nodes if isinstance(node, exp.Column)]


def aggregates(tree: QueryTree) -> Iterator[Change]:
    """Exchange aggregate functions and what is counted."""
    yield from interleaved(
        [_counted(scope, node) if isinstance(node.this, exp.Star) else _aggregate(node)
         for scope, node in tree.nodes(*_AGGREGATES) if is_aggregate(node)]
    )  # fmt: skip


def _counted(scope: Scope, node: exp.Expression) -> Iterator[Change]:
    """Count something else than rows, or sum it."""
    named = [place for place in map(scope.local, scope.columns) if place]
    keys = [Place(source, column) for source in scope.sources for column in source.primary_key]
    links = [place for place in scope.places() if place.key[1] in place.source.linking]
    nullable = [place for place in scope.places() if place.column.nullable and not place.column.primary_key]
    numbers = [place for place in nullable if family(place.column) == "number" and place not in links]
    alone = len(scope.sources) == 1
    outer = any(join.side for join in scope.joins)
    counted = unique([*(keys if outer else ()), *nullable], lambda place: place.key)
    many = unique([*named, *links, *keys, *nullable], lambda place: place.key)
    streams: list[Iterator[exp.Expression]] = [
        (shell(exp.Count, this=exp.Distinct(expressions=[scope.name(place)]))
         for place in many if not (alone and place.source.is_unique(place.column))),
        (shell(exp.Count, this=scope.name(place)) for place in counted[:2]),
        (shell(exp.Sum, this=scope.name(place)) for place in islice(numbers, 2)),
    ]  # fmt: skip
    for new in islice(interleaved(streams), 2 * MAX_REPLACEMENTS):
        yield (Edit(node, new),)


def _aggregate(node: exp.Expression) -> Iterator[Change]:
    whole = isinstance(node.this, exp.Distinct)
    if whole and len(node.this.expressions) != 1:
        return
    argument = node.this.expressions[0] if whole else node.this
    others = [shell(kind, this=argument) for kind in _AGGREGATES[type(node)]]
    rows = shell(exp.Count, this=exp.Star())
    if isinstance(node, exp.Count):
        others.insert(0, rows)
    elif isinstance(node, exp.Avg):
        others.insert(1, binary(exp.Div, shell(exp.Sum, this=argument), rows))
        filled = shell(exp.Coalesce, this=argument, expressions=[exp.Literal.number(0)])
        others.insert(2, shell(exp.Avg, this=filled))
    for other in others:
        yield (Edit(node, other),)
    if not isinstance(node.parent, exp.Window | exp.Filter):
        yield (Edit(node, argument),)


def columns(tree: QueryTree) -> Iterator[Change]:
    """Put another column in the place of each reference: of the same name first, then of the same type."""
    order = ("expressions", "group", "having", "order", "where")
    streams: list[tuple[int, Iterator[Change]]] = []
    for scope in tree.selects():
        for column in scope.columns:
            clause = scope.clause(column)
            if clause in order:
                streams.append((order.index(clause), _replacements(scope, column)))
    yield from interleaved([stream for _, stream in sorted(streams, key=lambda pair: pair[0])])


def _replacements(scope: Scope, column: exp.Expression) -> Iterator[Change]:
    here = scope.local(column)
    if here is None:
        return
    same = {place.key for place in scope.twins(here)}
    named = scope.is_table and column.parent is scope.query
    others = [place for place in scope.places() if place.key != here.key and place.key not in same]
    for place in sorted(others, key=lambda place: _distance(here, place))[:MAX_REPLACEMENTS]:
        new = scope.name(place, qualified=bool(column.table))
        yield (Edit(column, shell(exp.Alias, this=new, alias=identifier(column.name)) if named else new),)


def _distance(here: Place, there: Place) -> tuple[bool, int, bool]:
    """Order other columns by how easily they are mistaken for this one."""
    words = set(here.key[1].split("_")) & set(there.key[1].split("_"))
    likeness = (
        (family(here.column) == family(there.column))
        + ((here.key[1] in here.source.linking) == (there.key[1] in there.source.linking))
        + bool(words)
    )
    return here.key[1] != there.key[1], -likeness, here.source is not there.source


def groups(tree: QueryTree) -> Iterator[Change]:
    """Exchange, add and drop the columns of GROUP BY."""
    yield from interleaved([_groups(scope) for scope in tree.selects()])


def _groups(scope: Scope) -> Iterator[Change]:
    query = scope.query
    group = query.args.get("group")
    plain = [node for node in scope.projections if isinstance(node, exp.Column) and not node.is_star]
    if group is None:
        if scope.is_aggregated and plain:
            yield (Edit(query, shell(exp.Group, expressions=plain), "group"),)
        return
    keys = group.expressions
    if not keys:
        return
    places = [place for place in map(scope.local, _columns(keys)) if place]
    equal = [other for place in places for other in (place, *scope.twins(place))]
    settled = {place.source.name for place in equal if place.source.is_unique(place.column)}
    shown = [place for place in map(scope.local, plain) if place]
    primary = [Place(source, column) for source in scope.sources for column in source.primary_key]
    links = [place for place in scope.places() if place.key[1] in place.source.linking]
    candidates = [place for place in unique([*shown, *primary, *links], lambda place: place.key)
                  if place.key not in {each.key for each in equal}][: 2 * MAX_REPLACEMENTS]  # fmt: skip
    new = [scope.name(place) for place in candidates]
    for column in new:
        yield (Edit(group, [column, *keys[1:]], "expressions"),)
    for key in keys if len(keys) > 1 else ():
        yield (Edit(group, [each for each in keys if each is not key], "expressions"),)
    for place, column in zip(candidates, new, strict=True):
        if place.source.name not in settled:  # otherwise the keys already decide it
            yield (Edit(group, [*keys, column], "expressions"),)
        for index in range(1, len(keys)):
            yield (Edit(group, [*keys[:index], column, *keys[index + 1 :]], "expressions"),)
    yield _ungrouped(scope)


def _ungrouped(scope: Scope) -> Change:
    """Drop GROUP BY, and without an aggregate in the select list also what would then be invalid."""
    query = scope.query
    edits = [Edit(query, None, "group")]
    order = query.args.get("order")
    if not scope.is_aggregated:
        edits.append(Edit(query, None, "having"))
        if order and any(has_aggregate(key.this) for key in order.expressions):
            edits.append(Edit(query, None, "order"))
    return tuple(edits)


def orders(tree: QueryTree) -> Iterator[Change]:
    """Turn directions, drop, swap and add keys of ORDER BY."""
    for scope, order in tree.nodes(exp.Order):
        if order.parent is not scope.query:
            continue
        keys = order.expressions
        for index, key in enumerate(keys):
            yield (Edit(order, [*keys[:index], _turned(key), *keys[index + 1 :]], "expressions"),)
        if len(keys) > 1:
            yield (Edit(order, [_turned(key) for key in keys], "expressions"),)
            yield (Edit(order, keys[::-1], "expressions"),)
            for key in keys:
                yield (Edit(order, [each for each in keys if each is not key], "expressions"),)
        yield (Edit(scope.query, None, "order"),)
        if scope.is_select:
            yield from _ties_broken(scope, order)


def _turned(key: exp.Expression) -> exp.Expression:
    """Return a key of ORDER BY in the other direction; NULLs stay the smallest values."""
    falling = bool(key.args.get("desc"))
    return shell(exp.Ordered, this=key.this, desc=not falling, nulls_first=falling)


def _ties_broken(scope: Scope, order: exp.Expression) -> Iterator[Change]:
    taken = {place.key for place in map(scope.local, _columns([key.this for key in order.expressions])) if place}
    shown = [place for place in map(scope.local, _columns(scope.projections)) if place]
    primary = [Place(source, column) for source in scope.sources[:1] for column in source.primary_key[:1]]
    for place in [each for each in (*shown, *primary) if each.key not in taken][:1]:
        key = shell(exp.Ordered, this=scope.name(place), nulls_first=True)
        yield (Edit(order, [*order.expressions, key], "expressions"),)


def limits(tree: QueryTree) -> Iterator[Change]:
    """Return more rows, fewer, or others."""
    for scope, limit in tree.nodes(exp.Limit):
        count = whole_number(limit.expression)
        if count is None:
            continue
        offset = scope.query.args.get("offset")
        for other in (count + 1, count - 1, 1, 3):
            if other > 0 and other != count:
                yield (Edit(limit, exp.Literal.number(other), "expression"),)
        yield Edit(scope.query, None, "limit"), Edit(scope.query, None, "offset")
        if offset:
            yield (Edit(scope.query, None, "offset"),)
            skipped = whole_number(offset.expression)
            for number in (skipped + 1, max(skipped - 1, 0)) if skipped is not None else ():
                yield (Edit(offset, exp.Literal.number(number), "expression"),)
        else:
            yield (Edit(scope.query, exp.Offset(expression=exp.Literal.number(1)), "offset"),)


def extremes(tree: QueryTree) -> Iterator[Change]:
    """Exchange `ORDER BY a DESC LIMIT 1`, `WHERE a = (SELECT MAX(a) ...)` and `SELECT MAX(a)`: they differ in ties."""
    for scope in tree.selects():
        order = scope.query.args.get("order")
        if order and scope.is_first and not scope.query.args.get("offset"):
            yield from _all_first(scope, order.expressions[0])
        elif not order and not scope.is_operand and not scope.query.args.get("limit"):
            yield from _one_first(scope)


def _all_first(scope: Scope, key: exp.Expression) -> Iterator[Change]:
    """Return every row that shares the first place."""
    query, value = scope.query, _meaning(scope, key.this)
    best = exp.Max if key.args.get("desc") else exp.Min
    done = Edit(query, None, "order"), Edit(query, None, "limit")
    group = query.args.get("group")
    tables = {FROM: query.args.get(FROM), "joins": query.args.get("joins")}
    old = query.args.get("where")
    if group and has_aggregate(value):
        name = exp.Identifier(this="value", quoted=False)
        inner = shell(
            exp.Select, expressions=[shell(exp.Alias, this=value, alias=name)], where=old, group=group, **tables
        )
        outer = shell(exp.Select, expressions=[shell(best, this=exp.Column(this=name))])
        outer.args[FROM] = shell(exp.From, this=shell(exp.Subquery, this=inner))
        equal = binary(exp.EQ, value, shell(exp.Subquery, this=outer))
        having = query.args.get("having")
        both = joined((having and having.this, equal))
        yield *done, Edit(query, shell(exp.Having, this=both), "having")
    elif not group and not scope.is_aggregated and not has_aggregate(value) and not value.find(exp.Query):
        inner = shell(exp.Select, expressions=[shell(best, this=value)], where=old, **tables)
        smaller = [inner, reshaped(inner, where=None)]
        place = scope.local(value) if isinstance(value, exp.Column) else None
        if place and place.source.table:
            smaller.append(reshaped(inner, where=None, joins=None, **{FROM: shell(exp.From, this=place.source.node)}))
        for each in smaller:
            equal = binary(exp.EQ, value, shell(exp.Subquery, this=each))
            yield *done, Edit(query, where(joined((old and old.this, equal))), "where")


def _meaning(scope: Scope, value: exp.Expression) -> exp.Expression:
    """Return what a name stands for that the select list gives."""
    if isinstance(value, exp.Column) and not scope.local(value):
        for node in scope.query.selects:
            if isinstance(node, exp.Alias) and node.alias.casefold() == value.name.casefold():
                return node.this
    return value


def _one_first(scope: Scope) -> Iterator[Change]:
    """Return one row where all that share the first place are meant, or where an aggregate is."""
    query = scope.query
    for node in conjuncts(query.args["where"].this if query.args.get("where") else None):
        if isinstance(node, exp.EQ) and isinstance(node.expression, exp.Subquery):
            inner = node.expression.this
            best = inner.selects[0].unalias() if isinstance(inner, exp.Select) and len(inner.selects) == 1 else None
            if isinstance(best, exp.Max | exp.Min) and is_aggregate(best):
                rest = [each for each in conjuncts(query.args["where"].this) if each is not node]
                yield Edit(query, where(joined(rest)), "where"), *_sorted_by(scope, node.this, best)
    if len(scope.projections) == 1 and not query.args.get("group"):
        (best,) = scope.projections
        # As a single value in an expression, MAX of no rows and no row are both NULL.
        single = isinstance(best, exp.Max) and isinstance(query.parent, exp.Subquery)
        if isinstance(best, exp.Max | exp.Min) and is_aggregate(best) and not single:
            yield Edit(best, best.this), *_sorted_by(scope, best.this, best)


def _sorted_by(scope: Scope, value: exp.Expression, best: exp.Expression) -> Change:
    falling = isinstance(best, exp.Max)
    key = shell(exp.Ordered, this=value, desc=falling, nulls_first=not falling)
    return (
        Edit(scope.query, shell(exp.Order, expressions=[key]), "order"),
        Edit(scope.query, exp.Limit(expression=exp.Literal.number(1)), "limit"),
    )
