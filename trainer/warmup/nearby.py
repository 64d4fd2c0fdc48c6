"""Queries near a gold query: steps on the way to it, and ways to miss it.

Pure functions of the query's text and the tables' names. They promise text, not success: what a query gives, an
episode shows. Spider's habit of writing texts in double quotes is known.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

from sqlglot import exp

from env_server.sql.display import sql_name
from env_server.sql.lexer import Token, tokens
from env_server.sql.parsing import parse_query

_SWAPS = (
    ("MAX(", "MIN("),
    ("AVG(", "SUM("),
    ("COUNT(DISTINCT ", "COUNT("),
    (" > ", " < "),
    (" >= ", " <= "),
    (" = '", " != '"),
    (" DESC", " ASC"),
    (" AND ", " OR "),
    (" NOT IN ", " IN "),
    (" INTERSECT ", " UNION "),
    (" EXCEPT ", " INTERSECT "),
)
_CLAUSE = re.compile(r" (?:WHERE|HAVING) .*?(?= GROUP BY | ORDER BY | LIMIT |$)", re.DOTALL)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
"""The words of which a column's name is made: `Song_release_year`, `petAge`."""


def damage(sql: str, rng: random.Random) -> str:
    """Return a nearby wrong query: a condition lost, or an operator, aggregate or direction turned around."""
    candidates = [sql.replace(a, b, 1) for a, b in _SWAPS if a in sql]
    candidates += [sql.replace(b, a, 1) for a, b in _SWAPS if b in sql and a not in sql]
    if _CLAUSE.search(sql):
        candidates.append(_CLAUSE.sub("", sql, count=1))
    if " LIMIT " in sql:
        candidates.append(sql[: sql.rindex(" LIMIT ")])
    return rng.choice([c for c in candidates if c != sql] or [f"{sql} LIMIT 1"])


def lookups(sql: str) -> list[str]:
    """Return queries that show the values of the columns which a query compares with a text."""
    found = []
    for node in _walk(sql, exp.EQ, exp.NEQ, exp.Like, exp.In):
        column = node.this
        others = node.expressions if isinstance(node, exp.In) else [node.expression]
        if isinstance(column, exp.Column) and any(_is_text(other) for other in others):
            table = _table_of(column)
            if table:
                found.append(f"SELECT DISTINCT {sql_name(column.name)} FROM {sql_name(table)}")
    return list(dict.fromkeys(found))


def parts(sql: str) -> list[str]:
    """Return the queries that a query is made of and that stand for themselves; none where it is a single one."""
    found = []
    for select in _walk(sql, exp.Select):
        inside = {name for table in select.find_all(exp.Table) for name in (table.name, table.alias)}
        qualifiers = {column.table for column in select.find_all(exp.Column) if column.table}
        if select.parent is not None and qualifiers <= inside:
            found.append(select.sql(dialect="sqlite"))
    return list(dict.fromkeys(found))


def misnamed(sql: str, of: Sequence[str], rng: random.Random) -> str | None:
    """Return a query with a column under a name that it might have had, one of the tables `of` if they have any.

    None where the query names no column.
    """
    columns = [column for column in _walk(sql, exp.Column) if column.name != "*" and not _is_text(column)]
    names = {column.name.casefold() for column in columns}
    wanted = {table.casefold() for table in of}
    first = [column for column in columns if _table_of(column).casefold() in wanted]
    candidates = []
    for column in first or columns:
        words = [word.lower() for word in _WORD.findall(column.name)]
        table = _table_of(column).lower().rstrip("s")
        invented = {
            "_".join(words),
            "".join(words),
            words[-1] if words else "",
            f"{table}_{'_'.join(words)}" if table else "",
            "_".join(words[1:]),
            f"{'_'.join(words)}_name",
        }
        candidates += [(column.name, name) for name in sorted(invented - names - {""})]
    if not candidates:
        return None
    name, instead = rng.choice(candidates)
    return _renamed(sql, name, instead)


def misplaced(sql: str, others: Sequence[str], rng: random.Random) -> tuple[str, str] | None:
    """Return a query of another table, and that table; None where the query has several, or there is no other."""
    named = list(_walk(sql, exp.Table))
    if len(named) != 1 or not others:
        return None
    other = rng.choice(others)
    return _renamed(sql, named[0].name, sql_name(other)), other


def misquoted(sql: str, rng: random.Random) -> str | None:
    """Return a query with a text constant written otherwise than the database writes it; None without one."""
    texts = {node.name for node in _walk(sql, exp.Literal, exp.Column) if _is_text(node)}
    places = [token for token in tokens(sql) if token.lastgroup in ("literal", "quoted") and token[0][1:-1] in texts]
    if not places:
        return None
    token = rng.choice(places)
    text = token[0][1:-1]
    ways = {text.lower(), text.upper(), text.title(), f"{text}s", text.split(" ")[0]} - {text, ""}
    return _replaced(sql, token, token[0][0] + rng.choice(sorted(ways)) + token[0][-1])


def _walk(sql: str, *kinds: type[exp.Expression]) -> Iterator[exp.Expression]:
    tree = parse_query(sql)
    return iter(()) if tree is None else tree.find_all(*kinds)


def _is_text(node: exp.Expression) -> bool:
    """Whether a node is a text; a lone double-quoted word beside a comparison is one in Spider."""
    if isinstance(node, exp.Literal):
        return bool(node.is_string)
    name = node.this if isinstance(node, exp.Column) else None
    return (
        isinstance(name, exp.Identifier)
        and bool(name.quoted)
        and not node.text("table")
        and isinstance(node.parent, exp.Binary | exp.In | exp.Between)
        and node.parent.this is not node
    )


def _table_of(column: exp.Expression) -> str:
    """The table that a column is of, by its qualifier or because there is no other; "" where that is not told."""
    select = column.find_ancestor(exp.Select)
    if select is None:
        return ""
    tables = [table for table in select.find_all(exp.Table) if table.find_ancestor(exp.Select) is select]
    qualifier = column.text("table").casefold()
    if not qualifier:
        return tables[0].name if len(tables) == 1 else ""
    return next((table.name for table in tables if table.alias_or_name.casefold() == qualifier), "")


def _renamed(sql: str, name: str, instead: str) -> str:
    """Put a name in the place of another, wherever that one stands."""

    def write(token: Token) -> str:
        kind, text = token.lastgroup, token[0]
        plain = text[1:-1] if kind == "quoted" else text
        return instead if kind in ("word", "quoted") and plain.casefold() == name.casefold() else text

    return "".join(map(write, tokens(sql)))


def _replaced(sql: str, token: Token, text: str) -> str:
    return sql[: token.start()] + text + sql[token.end() :]
