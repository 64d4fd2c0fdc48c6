"""How far queries support an answer, on a database where the false positives are known by hand."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from env_server.dataset import Gold, Hardness, Question, Split
from env_server.settings import SandboxSettings
from env_server.sql.pool import DatabasePool
from env_server.test_suites.judge import Support, support_of
from env_server.test_suites.store import Suites

SHOPS = """
CREATE TABLE sales (shop TEXT, day INTEGER, amount REAL);
INSERT INTO sales VALUES ('north', 3, 2.5), ('north', 12, 3.25), ('south', 14, 1.0), ('north', 20, 4.125);
CREATE VIRTUAL TABLE notes USING fts5(text);
"""
COUNT = "SELECT COUNT(*) FROM sales WHERE shop = 'north' AND day > 10"


class Asked:
    """Questions about one database, and what queries are to them."""

    def __init__(self, path: Path, script: str, cache: Path) -> None:
        self.connection = sqlite3.connect(path)
        self.connection.executescript(script)
        self.databases = DatabasePool({"shops": path}, SandboxSettings())
        self.suites = Suites({"shops": path}, SandboxSettings(), cache)

    def support(self, gold_sql: str, sql: str, *, ordered: bool = False) -> Support:
        rows = tuple(self.connection.execute(gold_sql).fetchall())
        question = Question("q", "?", "shops", gold_sql, Hardness.EASY, Split.EVAL, Gold(rows, ordered))
        return support_of(question, sql, self.databases, self.suites, SandboxSettings())

    def close(self) -> None:
        self.databases.close()
        self.connection.close()


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("shops")
    asked = Asked(folder / "shops.sqlite", SHOPS.replace("CREATE VIRTUAL", "-- CREATE VIRTUAL"), folder / "cache")
    yield asked
    asked.close()


@pytest.mark.parametrize(
    ("sql", "support"),
    [
        (COUNT, Support.VERIFIED),
        (f" {COUNT};\n", Support.VERIFIED),
        ("SELECT COUNT(shop) AS n FROM (SELECT shop FROM sales WHERE day > 10) WHERE shop = 'north'", Support.VERIFIED),
        ("SELECT SUM(shop = 'north' AND day >= 11) FROM sales", Support.VERIFIED),
        ("SELECT COUNT(*) FROM sales WHERE day > 10 AND 'north' = shop", Support.VERIFIED),
        ("SELECT shop, COUNT(*) FROM sales WHERE shop = 'north' AND day > 10 GROUP BY shop", Support.FALSE_POSITIVE),
        ("SELECT MAX(shop), COUNT(*) FROM sales WHERE shop = 'north' AND day > 10", Support.VERIFIED),
        ("SELECT COUNT(*) FROM sales WHERE shop = 'north' AND day >= 10", Support.FALSE_POSITIVE),
        ("SELECT COUNT(*) - 1 FROM sales WHERE shop = 'north'", Support.FALSE_POSITIVE),
        ("SELECT 2", Support.FALSE_POSITIVE),
        ("SELECT COUNT(*) FROM sales", Support.OTHER_ROWS),
        ("SELECT 2 UNION ALL SELECT 2", Support.OTHER_ROWS),
        ("SELECT 2 WHERE 0", Support.OTHER_ROWS),
        ("SELECT city FROM sales", Support.OTHER_ROWS),
        ("", Support.OTHER_ROWS),
    ],
)
def test_what_a_query_is(asked: Asked, sql: str, support: Support) -> None:
    assert asked.support(COUNT, sql) is support


def test_a_rounded_number_is_the_number(asked: Asked) -> None:
    gold = "SELECT AVG(amount) FROM sales"
    assert asked.support(gold, "SELECT ROUND(AVG(amount), 6) FROM sales") is Support.VERIFIED
    assert asked.support(gold, "SELECT SUM(amount) / COUNT(*) FROM sales") is not Support.OTHER_ROWS
    assert asked.support(gold, "SELECT ROUND(AVG(amount)) + 100 FROM sales") is Support.OTHER_ROWS


def test_order_counts_where_the_gold_orders(asked: Asked) -> None:
    gold = "SELECT day FROM sales WHERE shop = 'north' ORDER BY day DESC"
    assert asked.support(gold, "SELECT day, amount FROM sales WHERE shop = 'north' ORDER BY 1 DESC", ordered=True) in (
        Support.VERIFIED,
        Support.FALSE_POSITIVE,
    )
    assert asked.support(gold, "SELECT day FROM sales WHERE shop = 'north' ORDER BY day", ordered=True) is (
        Support.OTHER_ROWS
    )


def test_columns_must_be_the_same_everywhere(asked: Asked) -> None:
    """Here the count is in both columns; on variants in one of them, now this and now that."""
    either = (
        "SELECT IIF(n % 2, n, -1), IIF(n % 2, -1, n) FROM (SELECT COUNT(*) AS n FROM sales WHERE shop = 'north' "
        "AND day > 10)"
    )
    assert asked.support(COUNT, either) is Support.FALSE_POSITIVE


def test_a_database_that_can_have_no_variants_cannot_tell(tmp_path: Path) -> None:
    asked = Asked(tmp_path / "shops.sqlite", SHOPS, tmp_path / "cache")
    try:
        assert asked.support(COUNT, "SELECT 2") is Support.UNTESTED
        assert asked.support(COUNT, COUNT) is Support.VERIFIED
        assert asked.support(COUNT, "SELECT 3") is Support.OTHER_ROWS
    finally:
        asked.close()
