"""Neighbour queries of what a SELECT reads: joins that are missing, too many or of another kind, and other tables.

Each function yields the changes of one kind over all scopes of a query, the likeliest mistakes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from sqlglot import exp

from env_server.sql.schema import Table
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
    family,
    identifier,
    interleaved,
    joined,
    shell,
    where,
)
from env_server.test_suites.mutants_tree import QueryTree

MAX_TABLES = 3
"""Other tables that are tried in one place."""

_NULL_REFUSING = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Like, exp.Between, exp.In)
_NULL_ADMITTING = (exp.Is, exp.Coalesce, exp.Or, exp.Case, exp.If, exp.Subquery)


def joins(tree: QueryTree) -> Iterator[Change]:
    """Drop and add joined tables, join on other columns, and exchange inner and outer joins."""
    for scope in tree.selects():
        yield from interleaved(
            [_dropped_tables(tree, scope), _added_tables(tree, scope), _other_kinds(scope), _other_links(tree, scope)]
        )


def _other_kinds(scope: Scope) -> Iterator[Change]:
    """Exchange inner and outer joins, where rows without a partner are not refused anyway."""
    for index, join in enumerate(scope.joins):
        if join.method or join.kind not in ("", "INNER", "OUTER"):
            continue
        if join.side:
            yield (Edit(join, None, "side"), Edit(join, None, "kind"))
        elif join.args.get("on") or join.args.get("using"):
            earlier, later = scope.sources[: index + 1], scope.sources[index + 1]
            if not _refuses_nulls(scope, [later], index):
                yield Edit(join, "LEFT", "side"), Edit(join, None, "kind")
            if not _refuses_nulls(scope, earlier, index):
                yield Edit(join, "RIGHT", "side"), Edit(join, None, "kind")
        if join.args.get("on"):
            yield (Edit(join, None, "on"),)


def _refuses_nulls(scope: Scope, optional: Sequence[Source], index: int) -> bool:
    """Tell whether WHERE or a later join refuses the rows in which these tables are all NULL."""
    clause = scope.query.args.get("where")
    conditions = [join.args.get("on") for join in scope.joins[index + 1 :] if not join.side] + [clause and clause.this]
    for node in (each for condition in conditions for each in conjuncts(condition)):
        tested = node.this if isinstance(node, exp.Not) else node
        if isinstance(tested, _NULL_REFUSING) and not node.find(*_NULL_ADMITTING):
            places = [scope.local(column) for column in node.find_all(exp.Column)]
            if any(place and place.source in optional for place in places):
                return True
    return False


def _other_links(tree: QueryTree, scope: Scope) -> Iterator[Change]:
    """Join on another pair of columns."""
    streams = []
    for join in scope.joins:
        for node in conjuncts(join.args.get("on")):
            pair = [scope.local(side) if isinstance(side, exp.Column) else None for side in node.args.values()]
            if isinstance(node, exp.EQ) and len(pair) == 2 and pair[0] and pair[1]:
                streams.append(_relinked(tree, scope, node, pair[0], pair[1]))
    yield from interleaved(streams)


def _relinked(tree: QueryTree, scope: Scope, node: exp.Expression, left: Place, right: Place) -> Iterator[Change]:
    for one, other in tree.links(left.source, right.source):
        new = Place(left.source, one), Place(right.source, other)
        if {place.key for place in new} != {left.key, right.key}:
            yield (Edit(node, _equal(scope, *new)),)
    keys = {place.key for place in (left, right)}
    for mine, yours, flipped in ((left, right, False), (right, left, True)):
        others = [Place(mine.source, column) for name, column in mine.source.columns.items()
                  if (mine.source.name.casefold(), name) not in keys
                  and family(column) == family(mine.column)]  # fmt: skip
        others.sort(key=lambda place: place.key[1] not in place.source.linking)
        for place in others[:MAX_TABLES]:
            yield (Edit(node, _equal(scope, yours, place) if flipped else _equal(scope, place, yours)),)


def _equal(scope: Scope, left: Place, right: Place) -> exp.Expression:
    return binary(exp.EQ, scope.name(left, qualified=True), scope.name(right, qualified=True))


def _dropped_tables(tree: QueryTree, scope: Scope) -> Iterator[Change]:
    """Leave a table out, with the conditions on it; what else names it is taken from an equal column."""
    simple = not any(each.side or each.method or each.args.get("using") or each.kind == "CROSS" for each in scope.joins)
    if simple and len(scope.sources) > 1:
        for source in scope.sources[::-1]:
            change = _without(tree, scope, source)
            if change:
                yield change
                if deduplicated(scope):
                    yield *change, *deduplicated(scope)


def _without(tree: QueryTree, scope: Scope, gone: Source) -> Change:
    """Return the change that drops a table; empty where the query would not stay valid."""
    rest = [source for source in scope.sources if source is not gone]
    clause = scope.query.args.get("where")
    kept = conjuncts(clause and clause.this)
    edits: list[Edit] = []
    for column in scope.columns:
        place = scope.local(column)
        if place is None or place.source is not gone or scope.clause(column) == "joins":
            continue
        twin = _twin(scope, place, rest)
        if twin is None and scope.clause(column) == "where":
            kept = [node for node in kept if not any(each is column for each in node.walk())]
            continue
        twin = twin or next(
            (Place(each, each.columns[place.key[1]]) for each in rest if place.key[1] in each.columns), None
        )
        if twin is None:
            return ()
        edits += [
            Edit(column, identifier(twin.column.name), "this"),
            Edit(column, identifier(twin.source.name), "table"),
        ]
    links = _chained(tree, scope, rest, gone)
    if links is None:
        return ()
    edits.append(Edit(scope.query.args[FROM], rest[0].node, "this"))
    edits.append(Edit(scope.query, links, "joins"))
    if clause:
        edits.append(Edit(scope.query, where(joined(kept)), "where"))
    return tuple(edits)


def _twin(scope: Scope, place: Place, rest: Sequence[Source]) -> Place | None:
    return next((twin for twin in scope.twins(place) if twin.source in rest), None)


def _chained(tree: QueryTree, scope: Scope, rest: list[Source], gone: Source) -> list[exp.Expression] | None:
    """Join the tables that are left on the conditions that are left; None where nothing links one of them."""
    conditions = []
    for node in (each for join in scope.joins for each in conjuncts(join.args.get("on"))):
        used = [place.source for place in map(scope.local, node.find_all(exp.Column)) if place]
        if gone not in used:
            conditions.append((used, node))
    links = []
    for index, source in enumerate(rest[1:], start=1):
        placed = rest[:index]
        on = [node for used, node in conditions if source in used and all(each in (*placed, source) for each in used)]
        if not on:
            pairs = [_equal(scope, place, other) for group in scope.equal_places() for place in group
                     for other in group if place.source is source and other.source in placed]  # fmt: skip
            pairs += [_equal(scope, Place(each, one), Place(source, other))
                      for each in placed for one, other in tree.links(each, source)]  # fmt: skip
            on = pairs[:1]
        if not on:
            return None
        links.append(shell(exp.Join, this=source.node, on=joined(on)))
    return links


def _added_tables(tree: QueryTree, scope: Scope) -> Iterator[Change]:
    """Join one more table along a foreign key: rows multiply, or those without a partner vanish."""
    if scope.has_star:
        return
    taken = {source.name.casefold() for source in scope.sources}
    joined_already = {source.table.name for source in scope.sources if source.table}
    streams = []
    for source in scope.sources:
        tables = [table for table in tree.related(source) if table.name not in joined_already]
        streams.append(_joined(tree, scope, source, tables, taken))
    yield from islice(interleaved(streams), 2 * MAX_TABLES)


def _joined(tree: QueryTree, scope: Scope, source: Source, tables: list[Table], taken: set[str]) -> Iterator[Change]:
    once = scope.is_set or scope.query.args.get("distinct")
    plain = once and not scope.is_aggregated and not scope.query.args.get("group")
    for side in ("",) if plain else ("", "LEFT"):  # rows that are only repeated do not change a set
        for table in tables:
            new = _source(table)
            pairs = tree.links(source, new)
            if not pairs or new.name.casefold() in taken or (side and new.is_unique(pairs[0][1])):
                continue
            on = _equal(scope, Place(source, pairs[0][0]), Place(new, pairs[0][1]))
            join = shell(exp.Join, this=new.node, on=on, side=side)
            change = Edit(scope.query, [*scope.joins, join], "joins"), *scope.qualifications(new.columns)
            yield change
            if deduplicated(scope) and not side:
                yield *change, *deduplicated(scope)


def _source(table: Table) -> Source:
    columns = {column.name.casefold(): column for column in table.columns}
    return Source(table.name, exp.Table(this=identifier(table.name)), table, columns)


def tables(tree: QueryTree) -> Iterator[Change]:
    """Read another table that has the columns that are used."""
    streams = []
    for scope in tree.selects():
        used = [place for place in map(scope.local, scope.columns) if place]
        for source in scope.sources:
            names = {place.key[1] for place in used if place.source is source}
            if source.table:
                streams.append(_other_tables(tree, scope, source, names))
    yield from interleaved(streams)


def _other_tables(tree: QueryTree, scope: Scope, source: Source, names: set[str]) -> Iterator[Change]:
    near = tree.related(source)
    rest = [table for table in tree.schema.tables if table not in near and table is not source.table]
    fitting = [table for table in [*near, *rest] if names <= {column.name.casefold() for column in table.columns}]
    for table in fitting[:MAX_TABLES]:
        alias = exp.TableAlias(this=identifier(source.name))
        new = shell(exp.Table, this=identifier(table.name), alias=alias)
        names = {column.name.casefold() for column in table.columns}
        yield Edit(source.node, new), *(scope.qualifications(names) if len(scope.sources) > 1 else ())
