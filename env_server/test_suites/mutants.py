"""Neighbour queries of a gold query: other queries that a model might have written instead, most of them wrong.

They serve to choose database variants that tell the gold from them (the method of distilled test suites: Zhong, Yu
and Klein, EMNLP 2020), and to measure how well that succeeds. `mutants` models the mistakes of text-to-SQL models
(a join too many, GROUP BY on the wrong key, INTERSECT as AND, LIMIT 1 for a maximum) beside changes of single tokens.

Promises: a pure function of its arguments; no text twice, none the gold's own; at most MAX_MUTANTS, drawn from the
kinds in turn and from each kind the likeliest first; never raises. A mutant is valid SQL as far as the schema tells;
some fail to run all the same, and some mean the same as the gold. What sqlglot cannot parse as one query has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from sqlglot.errors import SqlglotError

from env_server.sql.parsing import parse_query
from env_server.sql.schema import Schema
from env_server.test_suites import mutants_clauses, mutants_joins, mutants_queries, mutants_values
from env_server.test_suites.mutants_scopes import Change, interleaved
from env_server.test_suites.mutants_tree import QueryTree

MAX_MUTANTS = 200


class MutantKind(StrEnum):
    """What a mutant changes."""

    CONDITION = "condition"
    DISTINCT = "distinct"
    JOIN = "join"
    OPERATOR = "operator"
    GROUP = "group"
    AGGREGATE = "aggregate"
    EXTREME = "extreme"
    SET_OPERATION = "set operation"
    SUBQUERY = "subquery"
    CONSTANT = "constant"
    COLUMN = "column"
    ORDER = "order"
    LIMIT = "limit"
    LOGIC = "logic"
    ARITHMETIC = "arithmetic"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A neighbour query and what was changed."""

    sql: str
    kind: MutantKind


_RULES: dict[MutantKind, Callable[[QueryTree], Iterator[Change]]] = {
    MutantKind.CONDITION: mutants_values.conditions,
    MutantKind.DISTINCT: mutants_clauses.distinct,
    MutantKind.JOIN: mutants_joins.joins,
    MutantKind.OPERATOR: mutants_values.operators,
    MutantKind.GROUP: mutants_clauses.groups,
    MutantKind.AGGREGATE: mutants_clauses.aggregates,
    MutantKind.EXTREME: mutants_clauses.extremes,
    MutantKind.SET_OPERATION: mutants_queries.set_operations,
    MutantKind.SUBQUERY: mutants_queries.subqueries,
    MutantKind.CONSTANT: mutants_values.constants,
    MutantKind.COLUMN: mutants_clauses.columns,
    MutantKind.ORDER: mutants_clauses.orders,
    MutantKind.LIMIT: mutants_clauses.limits,
    MutantKind.LOGIC: mutants_values.connectives,
    MutantKind.ARITHMETIC: mutants_values.arithmetic,
    MutantKind.TABLE: mutants_joins.tables,
}


def mutants(sql: str, schema: Schema) -> tuple[Mutant, ...]:
    """Return neighbour queries of a query, the kinds in turn."""
    root = parse_query(sql)
    if root is None:
        return ()
    try:
        return tuple(islice(_new_texts(sql, QueryTree(root, schema)), MAX_MUTANTS))
    except (SqlglotError, RecursionError):
        return ()


def _new_texts(sql: str, tree: QueryTree) -> Iterator[Mutant]:
    seen = {sql, tree.original_text, tree.text()}
    streams = ((kind, rule(tree)) for kind, rule in _RULES.items())
    for kind, change in interleaved([_tagged(kind, changes) for kind, changes in streams]):
        text = tree.text(change)
        if text not in seen:
            seen.add(text)
            yield Mutant(text, kind)


def _tagged(kind: MutantKind, changes: Iterator[Change]) -> Iterator[tuple[MutantKind, Change]]:
    return ((kind, change) for change in changes)
