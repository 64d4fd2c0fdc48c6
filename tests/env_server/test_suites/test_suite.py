"""Suites: the gold always passes, wrong queries that pass on the original fail, equivalent queries pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from env_server.dataset import Gold, Row
from env_server.errors import DataError
from env_server.judging.verdict import judge_rows
from env_server.settings import SandboxSettings, SQLRule
from env_server.sql.hardness import orders_at_top_level
from env_server.sql.sandbox import Sandbox
from env_server.sql.schema import Schema
from env_server.test_suites.profile import ColumnProfile, DatabaseProfile, Kind, TableProfile
from env_server.test_suites.suite import (
    DATABASES,
    MAX_RESULT_ROWS,
    Refusal,
    Strictness,
    Suite,
    SuiteDatabase,
    SuiteMaker,
    insert,
    opened,
    run,
    strictest,
)
from tests.env_server.test_suites.databases import database, profile_of

SHOP = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, joined DATE);
CREATE TABLE orders (
    id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers(id), product TEXT, price REAL, quantity INTEGER);
INSERT INTO customers VALUES (1, 'Ada', 'Oslo', '2019-05-01'), (2, 'Bo', 'Lima', '2020-07-12'),
    (3, 'Cy', 'Oslo', '2021-01-30'), (4, 'Di', 'Rome', '2018-11-11');
INSERT INTO orders VALUES (1, 1, 'tea', 3.5, 2), (2, 1, 'cup', 7.0, 1), (3, 2, 'tea', 3.5, 5), (4, 3, 'pot', 20.0, 1);
"""

CLUBS = """
CREATE TABLE branches (id INTEGER PRIMARY KEY, city TEXT, opened TEXT, members TEXT);
CREATE TABLE visits (id INTEGER PRIMARY KEY, branch INTEGER REFERENCES branches(id), pounds REAL);
CREATE TABLE offices (place TEXT, staff INTEGER);
INSERT INTO branches VALUES (1, 'London', '2001', '112'), (2, 'Oxford', '2013', '11'), (3, 'Leeds', '2009', '6'),
    (4, 'York', '2012', '1418'), (5, 'Ely', '2014', '56'), (6, 'Bath', '2015', '91');
INSERT INTO visits(branch, pounds) VALUES (1, 10.5), (1, 3), (2, 8), (3, 1.25);
INSERT INTO offices VALUES ('Rome', 4), ('Oslo', 9), ('Lima', 20);
"""

LUCKY = [
    ("SELECT name FROM customers WHERE city = 'Oslo'", "SELECT name FROM customers WHERE city LIKE 'O%'"),
    ("SELECT name FROM customers WHERE city = 'Oslo'", "SELECT name FROM customers WHERE id IN (1, 3)"),
    ("SELECT COUNT(*) FROM orders WHERE price > 5", "SELECT COUNT(*) FROM orders WHERE price >= 5"),
    ("SELECT COUNT(*) FROM orders WHERE quantity = 1 AND price > 5", "SELECT COUNT(*) FROM orders WHERE price > 5"),
    ("SELECT name FROM customers", "SELECT DISTINCT name FROM customers"),
    ("SELECT DISTINCT city FROM customers WHERE id > 2", "SELECT city FROM customers WHERE id > 2"),
    ("SELECT name FROM customers ORDER BY joined LIMIT 1", "SELECT name FROM customers ORDER BY name DESC LIMIT 1"),
    ("SELECT name FROM customers ORDER BY joined LIMIT 1", "SELECT 'Di'"),
    ("SELECT MAX(price) FROM orders", "SELECT price FROM orders WHERE id = 4"),
    (
        "SELECT MIN(quantity) FROM orders WHERE product = 'cup'",
        "SELECT MAX(quantity) FROM orders WHERE product = 'cup'",
    ),
    ("SELECT COUNT(DISTINCT product) FROM orders", "SELECT COUNT(DISTINCT price) FROM orders"),
    (
        "SELECT T1.name FROM customers AS T1 JOIN orders AS T2 ON T1.id = T2.customer_id WHERE T2.product = 'cup'",
        "SELECT T1.name FROM customers AS T1 JOIN orders AS T2 ON T1.id = T2.customer_id WHERE T2.quantity = 1 LIMIT 1",
    ),
    (
        "SELECT T1.name FROM customers AS T1 JOIN orders AS T2 ON T1.id = T2.customer_id GROUP BY T1.id "
        "HAVING COUNT(*) > 1",
        "SELECT T1.name FROM customers AS T1 JOIN orders AS T2 ON T1.id = T2.customer_id GROUP BY T1.id "
        "HAVING SUM(T2.quantity) = 3",
    ),
    (
        "SELECT name FROM customers WHERE id NOT IN (SELECT customer_id FROM orders)",
        "SELECT name FROM customers WHERE city = 'Rome'",
    ),
    (
        "SELECT city FROM customers GROUP BY city ORDER BY COUNT(*) DESC LIMIT 1",
        "SELECT city FROM customers GROUP BY city HAVING COUNT(*) = 2",
    ),
    (
        "SELECT T1.name FROM customers AS T1 LEFT JOIN orders AS T2 ON T1.id = T2.customer_id WHERE T2.product = 'pot'",
        "SELECT T1.name FROM customers AS T1 LEFT JOIN orders AS T2 ON T1.id = T2.id - 1 WHERE T2.product = 'pot'",
    ),
]

EQUIVALENT = [
    (
        "SELECT T1.name FROM customers AS T1 JOIN orders AS T2 ON T1.id = T2.customer_id WHERE T2.price > 5",
        "SELECT c.name FROM orders o, customers c WHERE c.id = o.customer_id AND NOT o.price <= 5",
    ),
    (
        "SELECT name FROM customers WHERE id NOT IN (SELECT customer_id FROM orders)",
        "SELECT name FROM customers c WHERE NOT EXISTS (SELECT 1 FROM orders WHERE customer_id = c.id)",
    ),
    ("SELECT COUNT(*) FROM customers", "SELECT COUNT(id) FROM customers"),
    ("SELECT COUNT(*) FROM orders", "SELECT COUNT(*) FROM orders JOIN customers ON customers.id = customer_id"),
    ("SELECT AVG(price) FROM orders", "SELECT SUM(price) / COUNT(price) FROM orders"),
    (
        "SELECT id FROM orders WHERE quantity BETWEEN 1 AND 2",
        "SELECT id FROM orders WHERE quantity >= 1 AND quantity <= 2",
    ),
    (
        "SELECT product, SUM(quantity) FROM orders GROUP BY product",
        "SELECT SUM(quantity), product FROM (SELECT * FROM orders ORDER BY price) GROUP BY product",
    ),
    (
        "SELECT name FROM customers ORDER BY joined LIMIT 1",
        "SELECT name FROM customers ORDER BY joined ASC, id LIMIT 1",
    ),
    ("SELECT name FROM customers ORDER BY joined DESC", "SELECT name FROM customers ORDER BY joined DESC, name"),
    ("SELECT name FROM customers WHERE city = 'Oslo'", "SELECT name FROM customers WHERE city LIKE 'oslo'"),
    # Of a city's several customers, either may decide where it stands.
    (
        "SELECT DISTINCT city FROM customers ORDER BY joined",
        "SELECT city FROM customers GROUP BY 1 ORDER BY MIN(joined)",
    ),
    (
        "SELECT DISTINCT city FROM customers ORDER BY joined",
        "SELECT city FROM customers GROUP BY 1 ORDER BY MAX(joined)",
    ),
]

COLUMNS = tuple(ColumnProfile(name, Kind.INTEGER, required=False, values=(), has_null=False) for name in ("a", "b"))
TABLE = TableProfile("t", COLUMNS, (), (), (), checked=True)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return database(tmp_path_factory.mktemp("shop"), SHOP)


@pytest.fixture(scope="module")
def maker(shop: Path) -> SuiteMaker:
    return SuiteMaker(profile_of(shop), SandboxSettings())


@pytest.fixture(scope="module")
def suite_of(maker: SuiteMaker) -> Callable[[str], Suite]:
    """Makes each gold's suite once."""
    return cache(maker.make)


@pytest.fixture(scope="module")
def clubs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Suite]:
    path = database(tmp_path_factory.mktemp("clubs"), CLUBS)
    return cache(SuiteMaker(profile_of(path), SandboxSettings()).make)


def rows_on(database: Path | bytes, sql: str) -> tuple[Row, ...]:
    sandbox = Sandbox(database, SandboxSettings())
    try:
        return sandbox.query(sql, 1_000).rows
    finally:
        sandbox.close()


def passes(suite: Suite, sql: str) -> bool:
    return all(each.accepts(rows_on(each.image, sql)) for each in suite.databases)


@pytest.mark.parametrize(("gold", "lucky"), LUCKY)
def test_a_query_that_is_right_by_luck_fails(
    shop: Path, suite_of: Callable[[str], Suite], gold: str, lucky: str
) -> None:
    on_original = Gold(rows_on(shop, gold), orders_at_top_level(gold))
    assert judge_rows(rows_on(shop, lucky), on_original).correct, "right on the original"
    suite = suite_of(gold)
    assert passes(suite, gold)
    assert not passes(suite, lucky)


@pytest.mark.parametrize(("gold", "other"), EQUIVALENT)
def test_an_equivalent_query_passes(suite_of: Callable[[str], Suite], gold: str, other: str) -> None:
    suite = suite_of(gold)
    assert len(suite.databases) == DATABASES
    assert all(len(database.image) < 50_000 for database in suite.databases)
    assert passes(suite, other)


def test_a_suite_is_the_same_each_time(maker: SuiteMaker, suite_of: Callable[[str], Suite]) -> None:
    for gold, _ in LUCKY[::5]:
        assert maker.make(gold) == suite_of(gold)


@pytest.mark.parametrize(
    "gold", ["SELECT count(*) FROM customers", "SELECT 1 FROM orders WHERE (((", "SELECT random()"]
)
def test_a_gold_without_use_has_what_can_be_made(maker: SuiteMaker, gold: str) -> None:
    suite = maker.make(gold)
    if gold.startswith("SELECT count"):
        assert len(suite.databases) == DATABASES
        assert suite.problem == ""
    else:
        assert suite.databases == ()
        assert suite.problem in (Refusal.FAILS, Refusal.CHANCE)


@pytest.mark.parametrize(
    ("results", "ordered", "strictness"),
    [
        ([((1,), (2,)), ((1,), (2,))], True, Strictness.ROWS),
        ([((1,), (2,)), ((2,), (1,))], False, Strictness.ROWS),
        ([((1,), (2,)), ((2,), (1,))], True, Strictness.ANY_ORDER),
        ([((1,),), ((2,),)], True, Strictness.SHAPE),
        ([((1,),), ((2,), (3,))], True, None),
        ([(), ((2,),)], False, None),
        ([(), ()], False, Strictness.ROWS),
    ],
)
def test_a_test_database_asks_no_more_than_the_gold_gives(
    results: list[tuple[Row, ...]], ordered: bool, strictness: Strictness | None
) -> None:
    database = strictest(b"", results, ordered=ordered)
    assert (database.strictness if database else None) is strictness


def test_what_each_strictness_accepts() -> None:
    gold = Gold(((1, "a"), (2, "b")), ordered=True)
    any_order = Gold(gold.rows, ordered=False)
    other, turned = ((3, "x"), (4, "y")), gold.rows[::-1]
    assert not SuiteDatabase(b"", gold, Strictness.ROWS).accepts(turned)
    assert SuiteDatabase(b"", any_order, Strictness.ANY_ORDER).accepts(turned)
    assert not SuiteDatabase(b"", any_order, Strictness.ANY_ORDER).accepts(other)
    shape = SuiteDatabase(b"", any_order, Strictness.SHAPE)
    assert shape.accepts(other)
    assert not shape.accepts(other[:1])
    assert not shape.accepts(((1,), (2,)))
    assert not shape.accepts(())


def test_under_birds_rule_repeated_rows_do_not_count() -> None:
    gold = Gold(((1,), (2,)), ordered=True)
    repeated: tuple[Row, ...] = ((2,), (1,), (1,))
    for strictness in Strictness:
        assert SuiteDatabase(b"", gold, strictness).accepts(repeated, SQLRule.BIRD)
        assert not SuiteDatabase(b"", gold, strictness).accepts(repeated)


def test_what_comes_late_in_a_large_table_is_tested(tmp_path: Path) -> None:
    script = """CREATE TABLE jobs (id INTEGER PRIMARY KEY, name TEXT, ended TEXT);
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 10000)
        INSERT INTO jobs SELECT i, 'job ' || i, iif(i <= 9900, '2020-01-01', NULL) FROM n;"""
    maker = SuiteMaker(profile_of(database(tmp_path, script)), SandboxSettings())
    suite = maker.make("SELECT COUNT(*) FROM jobs WHERE ended IS NULL")
    assert passes(suite, "SELECT COUNT(*) - COUNT(ended) FROM jobs")
    assert not passes(suite, "SELECT COUNT(*) FROM jobs WHERE id > 9900")


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
def test_a_query_without_one_clause_is_wrong_on_a_test_database(
    clubs_of: Callable[[str], Suite], gold: str, lucky: str
) -> None:
    suite = clubs_of(gold)
    assert {query for database in suite.databases for query in database.rejected([gold, lucky])} == {lucky}
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
def test_what_no_database_can_test_is_named(
    clubs_of: Callable[[str], Suite], gold: str, untested: tuple[str, ...]
) -> None:
    assert clubs_of(gold).untested == untested


def empty(*statements: str) -> bytes:
    return SuiteMaker(DatabaseProfile(Schema(()), (TABLE,), statements), SandboxSettings()).empty


def image(rows: list[tuple[int, int]]) -> bytes:
    with opened(empty("CREATE TABLE t (a INTEGER, b INTEGER)")) as connection:
        insert(connection, TABLE, rows)
        return connection.serialize("main")


def test_rows_that_a_constraint_refuses_are_not_returned() -> None:
    with opened(empty("CREATE TABLE t (a INTEGER PRIMARY KEY, b INTEGER CHECK (b > 0))")) as connection:
        assert insert(connection, TABLE, [(1, 1), (2, 0), (1, 3), (4, 4)]) == [(1, 1), (4, 4)]


def test_reverse_turns_what_no_order_by_fixes() -> None:
    with opened(image([(1, 1), (2, 2)]), reverse=True) as connection:
        assert run(connection, "SELECT a FROM t") == ((2,), (1,))
        assert run(connection, "SELECT a FROM t ORDER BY a") == ((1,), (2,))


def test_a_query_that_fails_or_never_ends_has_no_result() -> None:
    with opened(image([(1, 1)])) as connection:
        assert run(connection, "SELECT nothing FROM t") is None
        assert (
            run(connection, "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x FROM r) SELECT MAX(x) FROM r") is None
        )
        assert run(connection, "SELECT 1") == ((1,),)


def test_one_row_too_many_is_enough() -> None:
    with opened(image([(n, n) for n in range(2 * MAX_RESULT_ROWS)])) as connection:
        rows = run(connection, "SELECT a FROM t")
    assert rows is not None
    assert len(rows) == MAX_RESULT_ROWS + 1


def test_a_schema_that_cannot_be_rebuilt_says_which_statement() -> None:
    with pytest.raises(DataError, match="CREATE TABLE broken"):
        empty("CREATE TABLE broken (")
