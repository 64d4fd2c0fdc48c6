"""Drawn databases keep the invariants that the questions rely on, whatever the seed."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.data.synthetic.domains import Kind, all_domains
from env_server.data.synthetic.model import Column, Database, Table, literal, quoted
from env_server.data.synthetic.schema import draft, populate, scramble

DOMAINS = all_domains()


def draw_database(domain: int, seed: int, scrambled: bool) -> Database:
    rng = Random(f"test/{domain}/{seed}")
    shape = draft(DOMAINS[domain], rng)
    return populate("db", scramble(shape, rng) if scrambled else shape, rng)


@settings(max_examples=100, deadline=None)
@given(domain=st.integers(0, len(DOMAINS) - 1), seed=st.integers(0, 10_000), scrambled=st.booleans())
def test_a_drawn_database_keeps_the_invariants(domain: int, seed: int, scrambled: bool) -> None:
    database = draw_database(domain, seed, scrambled)
    nouns = {t.singular for t in database.tables} | {t.plural for t in database.tables}
    for names in zip(*((t.singular, t.plural, t.identifier.lower()) for t in database.tables), strict=True):
        assert len(set(names)) == len(database.tables)
    seen: set[str] = set()
    for table in database.tables:
        for names in zip(*((c.phrase, c.identifier.lower()) for c in table.columns), strict=True):
            assert len(set(names)) == len(table.columns)
        assert nouns.isdisjoint(c.phrase for c in table.columns if c.kind is not Kind.LINK)
        assert table.key.kind is Kind.ID
        assert table.cells[table.key] == tuple(range(1, len(table.rows) + 1))
        assert len(table.of(Kind.NAME)) <= 1
        for column in table.columns:
            holds(column, table, database, seen)
        seen.add(table.identifier)
    assert sum(len(table.of(Kind.LINK)) for table in database.tables) >= 2


def holds(column: Column, table: Table, database: Database, earlier: set[str]) -> None:
    """Check that a column holds what its kind says; a link refers to an earlier table, and leaves some rows alone."""
    cells = {cell for cell in table.cells[column] if cell is not None}
    types: dict[Kind, type] = {Kind.REAL: float, Kind.NAME: str, Kind.CATEGORY: str, Kind.DATE: str}
    assert all(isinstance(cell, types.get(column.kind, int)) for cell in cells)
    assert column.nullable == (None in table.cells[column])
    assert not (column.nullable and column.kind in (Kind.ID, Kind.LINK, Kind.FLAG, Kind.NAME))
    match column.kind:
        case Kind.NAME:
            assert len(cells) == len(table.rows)
        case Kind.CATEGORY:
            assert len(cells) <= 8
        case Kind.FLAG:
            assert cells <= {0, 1}
        case Kind.LINK:
            assert column.target in earlier
            target = database.table(column.target)
            assert cells < set(target.cells[target.key])


def test_scrambling_keeps_the_structure() -> None:
    shape = draft(DOMAINS[0], Random("structure"))
    mixed = scramble(shape, Random("names"))
    for before, after in zip(shape, mixed, strict=True):
        assert [link.target for link in before.links] == [link.target for link in after.links]
        assert [c.spec.kind for c in before.columns] == [c.spec.kind for c in after.columns]
    assert [t.noun for t in shape] != [t.noun for t in mixed]


@pytest.mark.parametrize(
    ("identifier", "sql"),
    [("age", "age"), ("order", '"order"'), ("Group", '"Group"'), ("late fee", '"late fee"'), ("match", "match")],
)
def test_identifiers_are_quoted_only_where_needed(identifier: str, sql: str) -> None:
    assert quoted(identifier) == sql
    assert [literal("Oslo"), literal(7), literal(2.5)] == ["'Oslo'", "7", "2.5"]


def test_a_pool_holds_no_word_twice() -> None:
    pools = [c.values for d in DOMAINS for t in d.tables for c in t.columns]
    for pool in pools:
        assert len(set(pool.first)) == len(pool.first)
        assert len(set(pool.second)) == len(pool.second)
