"""Drawn databases keep the invariants that the questions rely on, whatever the seed."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.data.synthetic.domains import DOMAINS, all_labels, all_nouns
from env_server.data.synthetic.model import Database, Table, literal, quoted
from env_server.data.synthetic.rows import populate
from env_server.data.synthetic.schema import draft, scramble
from env_server.data.synthetic.spec import Kind, labels, nouns
from env_server.data.synthetic.words import CITIES, PEOPLE, Pool


def draw_database(domain: int, seed: int, scrambled: bool) -> Database:
    rng = Random(f"test/{domain}/{seed}")
    shape = draft(DOMAINS[domain], rng)
    return populate("db", scramble(shape, rng) if scrambled else shape, rng)


databases = st.builds(
    draw_database,
    domain=st.integers(0, len(DOMAINS) - 1),
    seed=st.integers(0, 10_000),
    scrambled=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(database=databases)
def test_names_and_phrases_are_distinct(database: Database) -> None:
    singulars = {t.singular for t in database.tables}
    plurals = {t.plural for t in database.tables}
    assert len(singulars) == len(plurals) == len(database.tables)
    assert len({t.identifier.lower() for t in database.tables}) == len(database.tables)
    for table in database.tables:
        assert len({c.phrase for c in table.columns}) == len(table.columns)
        assert len({c.identifier.lower() for c in table.columns}) == len(table.columns)
        own = {c.phrase for c in table.columns if c.kind is not Kind.LINK}
        assert own.isdisjoint(singulars | plurals)


@settings(max_examples=60, deadline=None)
@given(database=databases)
def test_keys_names_and_links_are_whole(database: Database) -> None:
    for table in database.tables:
        assert table.key.kind is Kind.ID
        assert table.cells[table.key] == tuple(range(1, len(table.rows) + 1))
        assert len(table.of(Kind.NAME)) <= 1
        for column in table.of(Kind.NAME):
            assert len(set(table.cells[column])) == len(table.rows)
            assert None not in table.cells[column]
        for column in table.columns:
            assert column.nullable == (None in table.cells[column])
            assert not (column.nullable and column.kind in (Kind.ID, Kind.LINK, Kind.FLAG))


@settings(max_examples=60, deadline=None)
@given(database=databases)
def test_links_point_to_earlier_tables_and_leave_some_rows_without(database: Database) -> None:
    seen: list[str] = []
    links = 0
    for table in database.tables:
        for column in table.of(Kind.LINK):
            links += 1
            assert column.target in seen
            keys = set(database.table(column.target).cells[database.table(column.target).key])
            assert set(table.cells[column]) < keys
        seen.append(table.identifier)
    assert links >= 2


@settings(max_examples=60, deadline=None)
@given(database=databases)
def test_a_column_holds_what_its_kind_says(database: Database) -> None:
    types: dict[Kind, type] = {Kind.REAL: float, Kind.NAME: str, Kind.CATEGORY: str, Kind.DATE: str}
    for table in database.tables:
        for column in table.columns:
            cells = {cell for cell in table.cells[column] if cell is not None}
            assert all(isinstance(cell, types.get(column.kind, int)) for cell in cells)
            if column.kind is Kind.CATEGORY:
                assert len(cells) <= 8
            if column.kind is Kind.FLAG:
                assert cells <= {0, 1}


def test_variants_of_a_domain_differ() -> None:
    shapes = {
        tuple((t.identifier, tuple(c.identifier for c in t.columns)) for t in draw_database(0, s, False).tables)
        for s in range(4)
    }
    assert len(shapes) == 4


def test_scrambling_keeps_the_structure() -> None:
    shape = draft(DOMAINS[0], Random("structure"))
    mixed = scramble(shape, Random("names"))
    for before, after in zip(shape, mixed, strict=True):
        assert [link.target for link in before.links] == [link.target for link in after.links]
        assert [c.spec.kind for c in before.columns] == [c.spec.kind for c in after.columns]
    assert [t.noun for t in shape] != [t.noun for t in mixed]


def test_the_notation_for_names() -> None:
    plain, named, odd = labels("birth_date|qty:quantity|!Birth Date")
    assert (plain.identifier, plain.phrase, plain.awkward) == ("birth_date", "birth date", False)
    assert (named.identifier, named.phrase, named.awkward) == ("qty", "quantity", False)
    assert (odd.identifier, odd.phrase, odd.awkward) == ("Birth Date", "birth date", True)
    plural, single = nouns("pets:pet|!pet:pet:pets")
    assert (plural.identifier, plural.singular, plural.plural) == ("pets", "pet", "pets")
    assert (single.identifier, single.singular, single.plural) == ("pet", "pet", "pets")
    assert single.awkward
    assert not plural.awkward


@pytest.mark.parametrize(
    ("identifier", "sql"),
    [("age", "age"), ("order", '"order"'), ("Group", '"Group"'), ("late fee", '"late fee"'), ("match", "match")],
)
def test_identifiers_are_quoted_only_where_needed(identifier: str, sql: str) -> None:
    assert quoted(identifier) == sql


def test_literals() -> None:
    assert [literal("Oslo"), literal(7), literal(2.5)] == ["'Oslo'", "7", "2.5"]


def test_a_missing_table_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        Database("db", (Table("pets", "pet", "pets", (), ()),)).table("owners")


def test_a_pool_holds_no_word_twice() -> None:
    pools = [c.values for d in DOMAINS for t in d.tables for c in t.columns if c.values is not None]
    for pool in [*pools, PEOPLE, CITIES, Pool(("a",))]:
        assert len(set(pool.first)) == len(pool.first)
        assert len(set(pool.second)) == len(pool.second)


def test_awkward_names_are_a_minority_of_the_choices() -> None:
    for names in (all_labels(), all_nouns()):
        assert 0.1 < sum(n.awkward for n in names) / len(names) < 0.5
