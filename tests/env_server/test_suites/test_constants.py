"""What a query says about the data: which constants belong to which column, sizes, and linked columns."""

from __future__ import annotations

import pytest

from env_server.sql.schema import Column, Schema, Table
from env_server.test_suites.queries import QueryConstants, parse, read_constants


def _table(name: str, *columns: str) -> Table:
    return Table(name, tuple(Column(each, "", nullable=True, primary_key=False) for each in columns), (), 0)


SCHEMA = Schema((_table("Pets", "id", "name", "age", "owner"), _table("owners", "id", "city", "name")))


def said(sql: str) -> QueryConstants:
    tree = parse(sql, SCHEMA)
    assert tree is not None
    return read_constants(tree, SCHEMA)


@pytest.mark.parametrize(
    ("where", "constants"),
    [
        ("age > 3", {("pets", "age"): [3]}),
        ("-2.5 <= age", {("pets", "age"): [-2.5]}),
        ("name = 'Rex' OR name = \"Tom\"", {("pets", "name"): ["Rex", "Tom"]}),
        ("age BETWEEN 2 AND 4", {("pets", "age"): [2, 4]}),
        ("age IN (1, 2) AND name NOT IN ('x')", {("pets", "age"): [1, 2], ("pets", "name"): ["x"]}),
        ("lower(name) = 'rex'", {("pets", "name"): ["rex"]}),
        ("age * 2 > 10", {("pets", "age"): [2, 10]}),
        ("\"name\" = 'x'", {("pets", "name"): ["x"]}),
    ],
)
def test_a_constant_belongs_to_the_column_it_is_compared_with(where: str, constants: dict[object, object]) -> None:
    found = said(f"SELECT id FROM pets WHERE {where}").values
    assert {place: sorted(values, key=str) for place, values in found.items()} == {
        place: sorted(values, key=str)  # type: ignore[call-overload]
        for place, values in constants.items()
    }


def test_aliases_are_those_of_the_nearest_select() -> None:
    found = said(
        "SELECT T1.name FROM pets AS T1 WHERE T1.age = 1 AND T1.owner IN "
        "(SELECT T1.id FROM owners AS T1 WHERE T1.city = 'Oslo')"
    )
    assert found.values == {("pets", "age"): [1], ("owners", "city"): ["Oslo"], ("pets", "owner"): []}
    assert found.links == [(("pets", "owner"), ("owners", "id"))]
    assert found.tables == {"pets", "owners"}


def test_an_equation_of_columns_links_them() -> None:
    found = said("SELECT 1 FROM pets JOIN owners ON pets.name = owners.name")
    assert found.links == [(("pets", "name"), ("owners", "name"))]


def test_patterns_are_constants_too() -> None:
    found = said("SELECT id FROM pets WHERE name LIKE '%ex%'")
    assert found.patterns == {("pets", "name"): ["%ex%"]}
    assert found.values == {("pets", "name"): ["%ex%"]}


@pytest.mark.parametrize(
    ("tail", "sizes"),
    [
        ("GROUP BY name HAVING COUNT(*) >= 3", [3]),
        ("ORDER BY age LIMIT 2", [2]),
        ("ORDER BY age LIMIT 2 OFFSET 5", [2, 5]),
        ("GROUP BY name HAVING AVG(age) > 1000", []),
        ("WHERE age = 7", []),
    ],
)
def test_numbers_that_count_rows_are_sizes(tail: str, sizes: list[int]) -> None:
    assert said(f"SELECT name FROM pets {tail}").sizes == sizes


def test_a_double_quoted_word_that_names_no_column_is_a_text() -> None:
    tree = parse('SELECT "name", "nobody" FROM pets ORDER BY "n"', SCHEMA)
    assert tree is not None
    assert tree.sql(dialect="sqlite") == "SELECT \"name\", 'nobody' FROM pets ORDER BY 'n'"


@pytest.mark.parametrize("sql", ["", "SELECT a FROM (", "SELECT 1; SELECT 2", "DROP TABLE pets", "(" * 5_000])
def test_what_is_no_query_has_no_tree(sql: str) -> None:
    assert parse(sql, SCHEMA) is None
