"""The clauses of a gold query that decide which rows it returns, each with the queries that show whether it is tested.

A clause is a condition of WHERE or HAVING, a LIMIT, or one side of a set operation, in any query of the gold. Its
probes are the gold without it and, for WHERE and HAVING, the gold in which they are never met. A suite tests the
clause when each of the probes differs from the gold on one of its variants. A clause that changes nothing, such as
HAVING COUNT(*) >= 1, cannot be tested. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlglot import exp
from sqlglot.errors import SqlglotError

from env_server.sql.parsing import parse_query
from env_server.sql.schema import Schema
from env_server.test_suites.mutants_queries import ended, whole
from env_server.test_suites.mutants_scopes import Change, Edit, Scope, conjuncts, joined, shell, sides
from env_server.test_suites.mutants_tree import QueryTree

_CONDITIONS = {"where": exp.Where, "having": exp.Having}
_NAMES = {exp.Except: "EXCEPT", exp.Intersect: "INTERSECT", exp.Union: "UNION"}


@dataclass(frozen=True, slots=True)
class Clause:
    """One clause, as SQL, and its probes."""

    text: str
    probes: tuple[str, ...]


def read_clauses(sql: str, schema: Schema) -> tuple[Clause, ...]:
    """Return the clauses of a query, the outermost query's first; none of what sqlglot cannot parse as a query."""
    root = parse_query(sql)
    if root is None:
        return ()
    try:
        tree = QueryTree(root, schema)
        found = [(text, tree.text(change)) for scope in tree.scopes for text, change in _of(tree, scope)]
        gold = tree.text()
    except (SqlglotError, RecursionError):
        return ()
    probes: dict[str, list[str]] = {}
    for text, probe in found:
        if probe != gold:
            probes.setdefault(text, []).append(probe)
    return tuple(Clause(text, tuple(dict.fromkeys(each))) for text, each in probes.items())


def _of(tree: QueryTree, scope: Scope) -> Iterator[tuple[str, Change]]:
    query = scope.query
    if not scope.is_select:
        left, right = (side.unnest() for side in sides(query))
        name = _NAMES[type(query)]
        yield f"{name} {tree.fragment(right)}", (Edit(whole(query), ended(query, left)),)
        if not isinstance(query, exp.Except):
            yield f"{tree.fragment(left)} {name}", (Edit(whole(query), ended(query, right)),)
        return
    for key, kind in _CONDITIONS.items():
        yield from _conditions(tree, query, key, kind)
    # A subquery that stands for one value takes the first row in any case.
    if query.args.get("limit") and not (scope.is_first and scope.is_value and not scope.is_set):
        yield f"{tree.fragment(query.args['limit']).strip()}", (Edit(query, None, "limit"), Edit(query, None, "offset"))


def _conditions(
    tree: QueryTree, query: exp.Expression, key: str, kind: type[exp.Expression]
) -> Iterator[tuple[str, Change]]:
    clause = query.args.get(key)
    if clause is None:
        return
    yield tree.fragment(clause).strip(), (Edit(query, shell(kind, this=exp.Literal.number(0)), key),)
    parts = conjuncts(clause.this)
    for part in parts:
        rest = joined(each for each in parts if each is not part)
        text = tree.fragment(shell(kind, this=part)).strip()
        yield text, (Edit(query, None if rest is None else shell(kind, this=rest), key),)
