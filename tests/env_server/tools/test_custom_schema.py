"""What the generator sees of a user's tables: kinds, phrases, links; and what is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from env_server.data.synthetic.domains import Kind
from env_server.data.synthetic.model import Column, Database
from env_server.tools.custom_schema import nouns_of
from env_server.tools.suggest import Source, read_custom_schema
from tests.env_server.data.folders import add_database

SHOP = """
CREATE TABLE Customers (
    CustomerID INTEGER PRIMARY KEY, CustomerName TEXT, city TEXT, joined_at TEXT, active INTEGER, member TEXT,
    birthYear INTEGER, age INTEGER, balance REAL, phone INTEGER, lat REAL, remark TEXT, zipCode TEXT, price TEXT);
INSERT INTO Customers VALUES
    (1, 'Ada', 'Oslo', '2023-01-15', 1, 'yes', 1990, 33, 5.5, 12345, 59.9138688, NULL, '00501', '$5'),
    (2, 'O''Neil', 'Lima', '2023-03-02', 0, 'no', 1985, 38, 7.25, 23456, 12.0431899, NULL, '00502', '7'),
    (3, 'Cy', 'Oslo', '2023-07-19', 1, 'yes', NULL, 41, 12, 34567, 59.9138688, NULL, '00503', 'N/A'),
    (4, 'Dee', NULL, '2024-02-11', 1, 'no', 1979, 44, 0.5, 45678, 41.8928899, NULL, '00504', '9');
CREATE TABLE matches (match_id INTEGER PRIMARY KEY, home_team_id INTEGER, away_team_id INTEGER, goals INTEGER);
INSERT INTO matches VALUES (1, 1, 2, 3), (2, 2, 1, 1), (3, 1, 2, 0);
CREATE TABLE teams (team_id INTEGER PRIMARY KEY, name TEXT);
INSERT INTO teams VALUES (1, 'Reds'), (2, 'Blues');
CREATE TABLE order_lines (customer INTEGER REFERENCES Customers, quantity INTEGER, item TEXT);
INSERT INTO order_lines VALUES (1, 2, 'lamp'), (1, 3, 'desk'), (3, 2, 'lamp');
CREATE TABLE bare (id INTEGER);
"""


@pytest.fixture
def schema(tmp_path: Path) -> Database:
    found = read_custom_schema(Source("shop", add_database(tmp_path, "shop.sqlite", SHOP), imported=False, asked=()))
    assert found is not None
    return found


def columns(schema: Database, table: str) -> dict[str, Column]:
    return {column.identifier: column for column in schema.table(table).columns}


def test_what_a_column_holds_is_told_by_its_values_and_its_name(schema: Database) -> None:
    found = columns(schema, "Customers")
    assert {name: (column.kind, column.phrase) for name, column in found.items()} == {
        "CustomerID": (Kind.ID, "id"),
        "CustomerName": (Kind.NAME, "name"),
        "city": (Kind.CATEGORY, "city"),
        "joined_at": (Kind.DATE, "joined date"),
        "active": (Kind.FLAG, "active"),
        "member": (Kind.CATEGORY, "member value"),
        "birthYear": (Kind.INTEGER, "birth year"),
        "age": (Kind.INTEGER, "age"),
        "balance": (Kind.REAL, "balance"),
        "phone": (Kind.INTEGER, "phone"),
    }
    assert [name for name, column in found.items() if column.nullable] == ["city", "birthYear"]
    assert [name for name, column in found.items() if column.sums] == ["balance"]
    assert found["birthYear"].is_year
    assert (schema.table("Customers").singular, schema.table("Customers").plural) == ("customer", "customers")


def test_links_lead_to_a_table_that_is_meant(schema: Database) -> None:
    lines = columns(schema, "order_lines")
    assert (lines["customer"].kind, lines["customer"].target, lines["customer"].phrase) == (
        Kind.LINK,
        "Customers",
        "customer",
    )
    assert not schema.table("order_lines").identified
    assert set(columns(schema, "matches")) == {"match_id", "goals"}, "which of two teams a match belongs to is open"
    assert [table.identifier for table in schema.tables] == ["Customers", "matches", "teams", "order_lines"]


@pytest.mark.parametrize(
    ("table", "nouns"),
    [
        ("orders", ("order", "orders")),
        ("OrderLines", ("order line", "order lines")),
        ("Student", ("student", "students")),
        ("categories", ("category", "categories")),
        ("Has_Allergy", ("has allergy", "has allergies")),
        ("people", ("person", "people")),
        ("box", ("box", "boxes")),
    ],
)
def test_nouns(table: str, nouns: tuple[str, str]) -> None:
    assert nouns_of(table) == nouns
