"""Neighbour queries of another shape: subqueries turned into joins and back, set operations into conditions and back.

Each function yields the changes of one kind over all scopes of a query, the likeliest mistakes first.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlglot import exp

from env_server.test_suites.mutants_scopes import (
    FROM,
    Change,
    Edit,
    Place,
    Scope,
    Source,
    binary,
    conjuncts,
    deduplicated,
    identifier,
    interleaved,
    joined,
    operand,
    reshaped,
    shell,
    sides,
    where,
)
from env_server.test_suites.mutants_tree import QueryTree


def subqueries(tree: QueryTree) -> Iterator[Change]:
    """Turn `IN (SELECT ...)` into a join and a join into IN, and let a subquery share the outer conditions."""
    streams = [_inlined(tree, scope, node) for scope, node in tree.nodes(exp.In)]
    streams += [_shared_conditions(tree, scope, node) for scope, node in tree.nodes(exp.Subquery)]
    streams += [_semijoins(scope) for scope in tree.selects()]
    yield from interleaved(streams)


def _inlined(tree: QueryTree, scope: Scope, node: exp.Expression) -> Iterator[Change]:
    """`a IN (SELECT b FROM t WHERE c)` becomes a join with t: a row that has two partners then comes twice."""
    query = node.args["query"].this if isinstance(node.args.get("query"), exp.Subquery) else None
    if not (isinstance(query, exp.Select) and scope.is_select and scope.clause(node) == "where"):
        return
    inner = tree.scope_of(query)
    fixed = any(query.args.get(key) for key in ("group", "limit", "with_", "with")) or inner.is_aggregated
    if fixed or len(inner.projections) != 1 or not inner.sources or not all(each.table for each in inner.sources):
        return
    taken = {source.name.casefold() for source in scope.sources}
    names = [f"U{index}" if source.name.casefold() in taken else source.name
             for index, source in enumerate(inner.sources, start=1)]  # fmt: skip
    edits = list(scope.qualifications({name for source in inner.sources for name in source.columns}))
    for column in inner.columns:
        place = inner.local(column)
        if place:
            edits.append(Edit(column, identifier(names[inner.sources.index(place.source)]), "table"))
    renamed = [_renamed(source, name) for source, name in zip(inner.sources, names, strict=True)]
    more = [shell(exp.Join, this=renamed[0])]
    more += [reshaped(join, this=table) for join, table in zip(inner.joins, renamed[1:], strict=True)]
    edits.append(Edit(scope.query, [*scope.joins, *more], "joins"))

    value, condition = inner.projections[0], _condition(query)
    equal = binary(exp.EQ, node.this, value)
    target = node.parent if isinstance(node.parent, exp.Not) else node
    met = [joined((equal, condition))]
    if target is not node:
        met = [joined((binary(exp.NEQ, node.this, value), condition))]
        met += [joined((equal, _negated(condition)))] if condition else []
    for each in met:
        change = *edits, Edit(target, operand(each))
        yield change
        if deduplicated(scope):
            yield *change, *deduplicated(scope)


def _renamed(source: Source, name: str) -> exp.Expression:
    if source.name == name:
        return source.node
    return shell(exp.Table, this=source.node.this, alias=exp.TableAlias(this=identifier(name)))


def _condition(query: exp.Expression) -> exp.Expression | None:
    clause = query.args.get("where")
    return clause and clause.this


def _negated(condition: exp.Expression) -> exp.Expression:
    """Return the opposite, as a model would write it: `a != 1`, or NOT before the whole."""
    if isinstance(condition, exp.EQ | exp.NEQ):
        other = exp.NEQ if isinstance(condition, exp.EQ) else exp.EQ
        return binary(other, condition.this, condition.expression)
    return condition.this if isinstance(condition, exp.Not) else shell(exp.Not, this=operand(condition))


def _shared_conditions(tree: QueryTree, scope: Scope, node: exp.Expression) -> Iterator[Change]:
    """Put the conditions around a subquery into it too, where both read the same tables."""
    inner, outer = node.this, scope.query
    if not (isinstance(inner, exp.Select) and scope.is_select and scope.clause(node) == "where"):
        return
    if _without_conditions(tree, inner, expressions=[]) != _without_conditions(tree, outer, expressions=[]):
        return
    own = conjuncts(_condition(inner))
    known = {tree.fragment(each).casefold() for each in own}
    around = [each for each in conjuncts(_condition(outer)) if not any(part is node for part in each.walk())]
    others = [each for each in around if tree.fragment(each).casefold() not in known]
    if others:
        yield (Edit(inner, where(joined([*own, *others])), "where"),)


def _without_conditions(tree: QueryTree, query: exp.Expression, **args: object) -> str:
    """Return what tells apart two queries that differ in WHERE alone."""
    return tree.fragment(reshaped(query, where=None, **args)).casefold()


def _semijoins(scope: Scope) -> Iterator[Change]:
    """`t JOIN u ON t.a = u.b WHERE u.c = 1` becomes `t WHERE a IN (SELECT b FROM u WHERE c = 1)`: no row twice."""
    query = scope.query
    simple = not any(join.side or join.method or join.args.get("using") for join in scope.joins)
    if not simple or not scope.joins or scope.has_star or query.args.get("distinct") or scope.is_set:
        return
    shown = [scope.local(column) for column in scope.columns if scope.clause(column) not in ("joins", "where")]
    conditions = [each for join in scope.joins for each in conjuncts(join.args.get("on"))]
    conditions += conjuncts(_condition(query))
    for kept in scope.sources:
        if not all(place and place.source is kept for place in shown):
            continue
        rest = [source for source in scope.sources if source is not kept]
        sorted_out: dict[str, list[exp.Expression]] = {"outer": [], "inner": [], "both": []}
        for node in conditions:
            used = [place.source for place in map(scope.local, node.find_all(exp.Column)) if place]
            others = any(source is not kept for source in used)
            sorted_out["inner" if kept not in used else "both" if others else "outer"].append(node)
        link = sorted_out["both"][0] if len(sorted_out["both"]) == 1 else None
        if not (isinstance(link, exp.EQ) and all(isinstance(side, exp.Column) for side in sides(link))):
            continue
        mine, yours = sorted(sides(link), key=lambda side: getattr(scope.local(side), "source", None) is not kept)
        theirs = scope.local(yours)
        if theirs is None or (len(rest) == 1 and theirs.source.is_unique(theirs.column)):
            continue  # every row has one partner at most
        inner = shell(exp.Select, expressions=[yours], joins=[shell(exp.Join, this=each.node) for each in rest[1:]])
        inner.args.update({FROM: shell(exp.From, this=rest[0].node), "where": where(joined(sorted_out["inner"]))})
        member = shell(exp.In, this=mine, query=shell(exp.Subquery, this=inner))
        yield (
            Edit(query.args[FROM], kept.node, "this"),
            Edit(query, None, "joins"),
            Edit(query, where(joined([*sorted_out["outer"], member])), "where"),
        )


def set_operations(tree: QueryTree) -> Iterator[Change]:
    """Exchange set operations, keep one side, collapse both sides into one SELECT, and split one SELECT into two."""
    yield from interleaved([*(_set_operation(tree, node) for node in tree.compounds()), *map(_split, tree.scopes[:1])])


def _set_operation(tree: QueryTree, node: exp.Expression) -> Iterator[Change]:
    left, right = sides(node)
    if isinstance(left, exp.Select) and isinstance(right, exp.Select):
        yield from ((Edit(whole(node), ended(node, select)),) for select in _collapsed(tree, node))
    for kind, unlike in ((exp.Union, True), (exp.Union, False), (exp.Intersect, True), (exp.Except, True)):
        if (type(node), bool(node.args.get("distinct"))) != (kind, unlike):
            yield (Edit(node, shell(kind, **{**node.args, "distinct": unlike})),)
    for side in (left, right):
        if isinstance(side, exp.Select):
            yield (Edit(whole(node), ended(node, side)),)
    if isinstance(node, exp.Except) and isinstance(right, exp.Select):
        yield (Edit(node, reshaped(node, this=right, expression=left)),)


def whole(node: exp.Expression) -> exp.Expression:
    """Return a compound with the parentheses that sqlglot reads around one that is a side of another."""
    parent = node.parent
    return parent if isinstance(parent, exp.Subquery) and isinstance(parent.parent, exp.SetOperation) else node


def ended(node: exp.Expression, select: exp.Expression) -> exp.Expression:
    """Return a SELECT that takes a compound's place, with its WITH, ORDER BY and LIMIT."""
    kept = {key: node.args[key] for key in ("with_", "with", "order", "limit", "offset") if node.args.get(key)}
    return reshaped(select, **kept)


def _collapsed(tree: QueryTree, node: exp.Expression) -> Iterator[exp.Expression]:
    """Say with conditions, or with IN, what a compound of two SELECTs says with a set operation."""
    left, right = sides(node)
    one, other = _condition(left), _condition(right)
    merged: list[exp.Expression] = []
    if _without_conditions(tree, left) == _without_conditions(tree, right):
        if isinstance(node, exp.Except):
            merged = [reshaped(left, where=where(joined((one, _negated(other)))))] if other else []
        elif one and other:
            kinds = (exp.Or, exp.And) if isinstance(node, exp.Union) else (exp.And, exp.Or)
            merged = [reshaped(left, where=where(joined((one, other), kind))) for kind in kinds]
            merged += _counted_twice(tree, left, one, other) if isinstance(node, exp.Intersect) else []
    if isinstance(node, exp.Except) and other:
        merged.append(reshaped(right, where=where(_negated(other))))
    for select in merged:
        yield from _with_and_without_duplicates(select)
    if not isinstance(node, exp.Union):
        yield from _as_membership(tree, node)


def _with_and_without_duplicates(select: exp.Expression) -> Iterator[exp.Expression]:
    if not select.args.get("distinct") and not select.args.get("group"):
        yield reshaped(select, distinct=exp.Distinct())
    yield select


def _counted_twice(
    tree: QueryTree, select: exp.Expression, one: exp.Expression, other: exp.Expression
) -> list[exp.Expression]:
    """`a = 1 INTERSECT a = 2` becomes `a = 1 OR a = 2` in groups of two: of rows, or of different a for one key."""
    if not (isinstance(one, exp.EQ) and isinstance(other, exp.EQ)) or select.args.get("group"):
        return []
    scope = tree.scope_of(select)
    shown = scope.local(scope.projections[0]) if isinstance(scope.projections[0], exp.Column) else None
    key = [scope.name(Place(shown.source, column)) for column in shown.source.primary_key[:1]] if shown else []
    different = shell(exp.Count, this=shell(exp.Distinct, expressions=[one.this]))
    rows = shell(exp.Count, this=exp.Star())
    found = []
    for keys, count in ((scope.projections, rows), (key, different)):
        having = shell(exp.Having, this=binary(exp.GTE, count, exp.Literal.number(2)))
        group = shell(exp.Group, expressions=keys)
        either = where(joined((one, other), exp.Or))
        found += [reshaped(select, where=either, group=group, having=having)] if keys else []
    return found


def _as_membership(tree: QueryTree, node: exp.Expression) -> Iterator[exp.Expression]:
    """INTERSECT becomes `IN (right side)` and EXCEPT `NOT IN`: on the table's key, and on the selected column."""
    left, right = sides(node)
    outer, inner = tree.scope_of(left), tree.scope_of(right)
    if outer.is_aggregated or not outer.projections or not inner.projections:
        return
    pairs: list[tuple[exp.Expression, exp.Expression]] = []
    value, shown = outer.projections[0], inner.projections[0]
    mine, yours = (scope.local(each) if isinstance(each, exp.Column) else None
                   for scope, each in ((outer, value), (inner, shown)))  # fmt: skip
    if mine and yours and mine.source.table and mine.source.table is yours.source.table:
        key = mine.source.primary_key[0]
        pairs.append((outer.name(Place(mine.source, key)), inner.name(Place(yours.source, key))))
    if len(outer.projections) == 1:
        pairs.append((value, shown))
    for compared, member in pairs:
        subquery = shell(exp.Subquery, this=reshaped(right, expressions=[member]))
        met = shell(exp.In, this=compared, query=subquery)
        if isinstance(node, exp.Except):
            met = shell(exp.Not, this=met)
        select = reshaped(left, where=where(joined((_condition(left), met))))
        # On the selected column itself, only the duplicates tell it from the gold.
        yield from [select] if compared is value else _with_and_without_duplicates(select)


def _split(scope: Scope) -> Iterator[Change]:
    """Make an INTERSECT of two conditions joined by AND, and an EXCEPT of a negated one."""
    query = scope.query
    fixed = not scope.is_select or scope.is_aggregated or scope.shows_key
    if fixed or any(map(query.args.get, ("group", "order", "limit"))):
        return
    conditions = conjuncts(_condition(query))
    for node in conditions:
        rest = where(joined(each for each in conditions if each is not node))
        if isinstance(node, exp.NEQ) or (isinstance(node, exp.Not) and not isinstance(node.this, exp.Is)):
            kind, alone = exp.Except, where(_negated(node))
        elif len(conditions) > 1:
            kind, alone = exp.Intersect, where(node)
        else:
            continue
        pair = reshaped(query, where=rest), reshaped(query, where=alone, **dict.fromkeys(("with_", "with")))
        yield (Edit(query, shell(kind, this=pair[0], expression=pair[1], distinct=True)),)
