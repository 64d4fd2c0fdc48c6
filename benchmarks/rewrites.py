"""Rewrites of a query that mean the same on every database of its schema, for judges that must not reject them. Pure.

Each rule changes every place that it applies to. NULLs, duplicates and the order of rows are respected; which of
several equal rows a LIMIT or a GROUP BY takes is left to chance in the gold, and may come out otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sqlglot import exp

from env_server.sql.hardness import orders_at_top_level
from env_server.sql.parsing import parse_query
from env_server.sql.schema import Schema

_FLIPPED = {exp.GT: exp.LT, exp.LT: exp.GT, exp.GTE: exp.LTE, exp.LTE: exp.GTE, exp.EQ: exp.EQ, exp.NEQ: exp.NEQ}
_OPPOSITE = {exp.GT: exp.LTE, exp.LT: exp.GTE, exp.GTE: exp.LT, exp.LTE: exp.GT, exp.EQ: exp.NEQ, exp.NEQ: exp.EQ}


def rewrites(sql: str, schema: Schema) -> Iterator[tuple[str, str]]:
    """Yield the name of a rule and the query rewritten by it, for each rule that changes the query."""
    tree = parse_query(sql)
    if tree is None:
        return
    plain = tree.sql(dialect="sqlite")
    ordered = orders_at_top_level(sql)
    for rule in _RULES:
        copy = tree.copy()
        rule(copy, schema)
        text = copy.sql(dialect="sqlite")
        if text != plain:
            yield rule.__name__, text
    if not ordered and not tree.ctes:
        yield "in_a_subquery", f"SELECT * FROM ({plain}) AS wrapped"
        yield "in_a_common_table", f"WITH wrapped AS ({plain}) SELECT * FROM wrapped"


def other_aliases(tree: exp.Expression, _: Schema) -> None:
    """Give each table another alias."""
    names = {each.name.casefold() for alias in tree.find_all(exp.TableAlias) if (each := alias.this) is not None}
    for alias in list(tree.find_all(exp.TableAlias)):
        if alias.this is not None:
            alias.set("this", exp.to_identifier(f"{alias.name.casefold()}_x"))
    for column in tree.find_all(exp.Column):
        if column.table.casefold() in names:
            column.set("table", exp.to_identifier(f"{column.table.casefold()}_x"))
    for table in tree.find_all(exp.Table):
        if not table.alias and table.name.casefold() in {each.alias[:-2] for each in tree.find_all(exp.CTE)}:
            table.set("this", exp.to_identifier(f"{table.name.casefold()}_x"))


def commuted(tree: exp.Expression, _: Schema) -> None:
    """Exchange the sides of AND and OR."""
    for node in list(tree.find_all(exp.And, exp.Or)):
        left, right = node.this, node.expression
        node.set("this", exp.paren(right) if isinstance(right, exp.Or) or isinstance(node, exp.Or) else right)
        node.set("expression", exp.paren(left) if isinstance(left, exp.Connector) else left)


def flipped(tree: exp.Expression, _: Schema) -> None:
    """Exchange the sides of comparisons."""
    for node in list(tree.find_all(*_FLIPPED)):
        node.replace(_FLIPPED[type(node)](this=node.expression, expression=node.this))


def negated(tree: exp.Expression, _: Schema) -> None:
    """Say a comparison as NOT of its opposite."""
    for node in list(tree.find_all(*_OPPOSITE)):
        opposite = _OPPOSITE[type(node)](this=node.this, expression=node.expression)
        node.replace(exp.paren(exp.Not(this=exp.paren(opposite))))


def bounds(tree: exp.Expression, _: Schema) -> None:
    """Say BETWEEN with two comparisons."""
    for node in list(tree.find_all(exp.Between)):
        low = exp.GTE(this=node.this.copy(), expression=node.args["low"])
        high = exp.LTE(this=node.this.copy(), expression=node.args["high"])
        node.replace(exp.paren(exp.And(this=low, expression=high)))


def alternatives(tree: exp.Expression, _: Schema) -> None:
    """Say IN with a list as equations joined by OR."""
    for node in list(tree.find_all(exp.In)):
        if node.expressions and all(isinstance(each, exp.Literal) for each in node.expressions):
            equal = [exp.EQ(this=node.this.copy(), expression=each) for each in node.expressions]
            node.replace(exp.paren(exp.or_(*equal)))


def existence(tree: exp.Expression, _: Schema) -> None:
    """Say IN with a subquery as EXISTS; not below NOT, where a NULL makes a difference."""
    for node in list(tree.find_all(exp.In)):
        query = node.args.get("query")
        inner = query.this if isinstance(query, exp.Subquery) else None
        parent = node.parent
        while isinstance(parent, exp.And | exp.Paren):
            parent = parent.parent
        if not (isinstance(inner, exp.Select) and isinstance(parent, exp.Where)) or len(inner.selects) != 1:
            continue
        inner.set("expressions", [exp.alias_(inner.selects[0].unalias(), "member")])
        found = exp.select("1").from_(exp.Subquery(this=inner, alias=exp.TableAlias(this=exp.to_identifier("found"))))
        equal = exp.EQ(this=node.this.copy(), expression=exp.column("member", table="found"))
        node.replace(exp.Exists(this=found.where(equal)))


def comma_joins(tree: exp.Expression, _: Schema) -> None:
    """Put the conditions of inner joins into WHERE."""
    for select in list(tree.find_all(exp.Select)):
        joins = select.args.get("joins") or []
        if joins and all(each.args.get("on") and not each.side and each.kind in ("", "INNER") for each in joins):
            conditions = [each.args["on"] for each in joins]
            for join in joins:
                join.set("on", None)
                join.set("kind", "CROSS")
            old = select.args.get("where")
            both = [exp.paren(each) for each in (*conditions, *([old.this] if old else []))]
            select.set("where", exp.Where(this=exp.and_(*both)))


def turned_joins(tree: exp.Expression, _: Schema) -> None:
    """Begin a join of two tables with the other one."""
    for select in list(tree.find_all(exp.Select)):
        joins = select.args.get("joins") or []
        if len(joins) == 1 and not joins[0].side and joins[0].kind in ("", "INNER") and not select.is_star:
            start = select.find(exp.From)
            first, second = start.this, joins[0].this
            start.set("this", second.copy())
            joins[0].set("this", first.copy())


def counted_ones(tree: exp.Expression, _: Schema) -> None:
    """Count a constant instead of rows."""
    for node in list(tree.find_all(exp.Count)):
        if isinstance(node.this, exp.Star):
            node.set("this", exp.Literal.number(1))


def counted_keys(tree: exp.Expression, schema: Schema) -> None:
    """Count the key of the only table instead of its rows."""
    keys = {
        table.name.casefold(): column.name
        for table in schema.tables
        for column in table.columns
        if column.primary_key and sum(each.primary_key for each in table.columns) == 1
    }
    for select in tree.find_all(exp.Select):
        start = select.find(exp.From)
        table = start.this if start is not None and start.parent is select else None
        if (
            not isinstance(table, exp.Table)
            or select.args.get("joins")
            or table.name in [cte.alias for cte in tree.ctes]
        ):
            continue
        key = keys.get(table.name.casefold())
        if key:
            for node in select.expressions:
                count = node.unalias()
                if isinstance(count, exp.Count) and isinstance(count.this, exp.Star):
                    count.set("this", exp.column(key, quoted=True))


def grouped(tree: exp.Expression, _: Schema) -> None:
    """Say DISTINCT with GROUP BY."""
    for select in list(tree.find_all(exp.Select)):
        others = any(select.args.get(key) for key in ("group", "having", "order", "limit"))
        columns = [each.unalias() for each in select.selects]
        plain = not others and not select.is_star and all(isinstance(each, exp.Column) for each in columns)
        if plain and select.args.get("distinct"):
            select.set("distinct", None)
            select.set("group", exp.Group(expressions=[each.copy() for each in columns]))


def divided_sums(tree: exp.Expression, _: Schema) -> None:
    """Say AVG as a sum divided by a count."""
    for node in list(tree.find_all(exp.Avg)):
        if not isinstance(node.this, exp.Distinct) and not isinstance(node.parent, exp.Window | exp.Filter):
            total = exp.Mul(this=exp.Sum(this=node.this.copy()), expression=exp.Literal.number("1.0"))
            quotient = exp.Div(
                this=exp.paren(total), expression=exp.Count(this=node.this.copy()), typed=True, safe=True
            )
            node.replace(exp.paren(quotient))


def turned_compounds(tree: exp.Expression, _: Schema) -> None:
    """Exchange the sides of a UNION or INTERSECT of two SELECTs."""
    if isinstance(tree, exp.Union | exp.Intersect) and not tree.args.get("order") and not tree.ctes:
        left, right = tree.this, tree.expression
        if isinstance(left, exp.Select) and isinstance(right, exp.Select) and not tree.args.get("limit"):
            tree.set("this", right)
            tree.set("expression", left)


_RULES: tuple[Callable[[exp.Expression, Schema], None], ...] = (
    other_aliases,
    commuted,
    flipped,
    negated,
    bounds,
    alternatives,
    existence,
    comma_joins,
    turned_joins,
    counted_ones,
    counted_keys,
    grouped,
    divided_sums,
    turned_compounds,
)
