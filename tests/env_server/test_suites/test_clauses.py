"""Each clause of a gold is read with its probes, tested by a variant where that can be, and named where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from env_server.settings import SandboxSettings
from env_server.sql.schema import Column, Schema, Table
from env_server.test_suites.clauses import Clause, read_clauses
from env_server.test_suites.suite import Suite, SuiteMaker, killed_by
from tests.env_server.test_suites.databases import database, profile_of

DATABASE = """
CREATE TABLE branches (id INTEGER PRIMARY KEY, city TEXT, opened TEXT, members TEXT);
CREATE TABLE visits (id INTEGER PRIMARY KEY, branch INTEGER REFERENCES branches(id), pounds REAL);
CREATE TABLE offices (place TEXT, staff INTEGER);
INSERT INTO branches VALUES (1, 'London', '2001', '112'), (2, 'Oxford', '2013', '11'), (3, 'Leeds', '2009', '6'),
    (4, 'York', '2012', '1418'), (5, 'Ely', '2014', '56'), (6, 'Bath', '2015', '91');
INSERT INTO visits(branch, pounds) VALUES (1, 10.5), (1, 3), (2, 8), (3, 1.25);
INSERT INTO offices VALUES ('Rome', 4), ('Oslo', 9), ('Lima', 20);
"""
SCHEMA = Schema(
    (Table("t", (Column("a", "INT", True, False), Column("b", "INT", True, False)), foreign_keys=(), row_count=1),)
)


@pytest.fixture(scope="module")
def suite_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Suite]:
    path = database(tmp_path_factory.mktemp("clauses"), DATABASE)
    return cache(SuiteMaker(profile_of(path), SandboxSettings()).make)


@pytest.mark.parametrize(
    ("gold", "lucky"),
    [
        ("SELECT DISTINCT city FROM branches WHERE members >= 100", "SELECT DISTINCT city FROM branches"),
        ("SELECT COUNT(*) FROM branches WHERE opened > 2010", "SELECT COUNT(*) FROM branches WHERE opened > 2009"),
        ("SELECT city FROM branches EXCEPT SELECT place FROM offices", "SELECT DISTINCT city FROM branches"),
        ("SELECT place FROM offices INTERSECT SELECT city FROM branches", "SELECT place FROM offices WHERE staff < 0"),
        (
            "SELECT branch FROM visits GROUP BY branch HAVING COUNT(*) > 200",
            "SELECT branch FROM visits GROUP BY branch HAVING COUNT(*) > 100",
        ),
        (
            "SELECT branch FROM visits GROUP BY branch HAVING COUNT(*) <= 100",
            "SELECT DISTINCT branch FROM visits WHERE branch IS NOT NULL OR branch IS NULL",
        ),
    ],
)
def test_a_query_without_one_clause_is_wrong_on_a_variant(
    suite_of: Callable[[str], Suite], gold: str, lucky: str
) -> None:
    suite = suite_of(gold)
    assert {query for variant in suite.variants for query in killed_by(variant, [gold, lucky])} == {lucky}
    assert suite.untested == ()


@pytest.mark.parametrize(
    ("gold", "untested"),
    [
        ("SELECT branch FROM visits GROUP BY branch HAVING COUNT(*) >= 1", ("HAVING COUNT(*) >= 1",)),
        ("SELECT branch FROM visits GROUP BY branch HAVING COUNT(*) > 90000", ("HAVING COUNT(*) > 90000",)),
        ("SELECT city FROM branches WHERE id IS NOT NULL AND opened = 2009", ("WHERE NOT id IS NULL",)),
        ("SELECT MAX(opened) FROM branches LIMIT 1", ("LIMIT 1",)),
        ("SELECT city FROM branches WHERE members = (SELECT members FROM branches ORDER BY opened LIMIT 1)", ()),
    ],
)
def test_what_no_variant_can_test_is_named(
    suite_of: Callable[[str], Suite], gold: str, untested: tuple[str, ...]
) -> None:
    assert suite_of(gold).untested == untested


def test_the_clauses_of_every_query_and_their_probes() -> None:
    sql = "SELECT a FROM t WHERE a > 1 AND b IN (SELECT b FROM t WHERE a = 2 LIMIT 3) EXCEPT SELECT b FROM t"
    first, second = "a > 1", "b IN (SELECT b FROM t WHERE a = 2 LIMIT 3)"
    inner = "SELECT a FROM t WHERE a > 1 AND b IN (SELECT b FROM t{}) EXCEPT SELECT b FROM t"
    assert read_clauses(sql, SCHEMA) == (
        Clause("EXCEPT SELECT b FROM t", (f"SELECT a FROM t WHERE {first} AND {second}",)),
        Clause(f"WHERE {first} AND {second}", ("SELECT a FROM t WHERE 0 EXCEPT SELECT b FROM t",)),
        Clause(f"WHERE {first}", (f"SELECT a FROM t WHERE {second} EXCEPT SELECT b FROM t",)),
        Clause(f"WHERE {second}", (f"SELECT a FROM t WHERE {first} EXCEPT SELECT b FROM t",)),
        Clause("WHERE a = 2", (inner.format(" WHERE 0 LIMIT 3"), inner.format(" LIMIT 3"))),
        Clause("LIMIT 3", (inner.format(" WHERE a = 2"),)),
    )


@pytest.mark.parametrize("sql", ["", "no query", "SELECT (((", "SELECT a FROM t; SELECT b FROM t", "SELECT a FROM t"])
def test_what_is_no_query_or_has_no_clause_has_none(sql: str) -> None:
    assert read_clauses(sql, SCHEMA) == ()
