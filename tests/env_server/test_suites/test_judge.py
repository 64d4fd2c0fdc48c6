"""The verdict on submitted queries, under both rules, and how far a query supports an answer."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Gold, Hardness, Question, Split
from env_server.environment import EnvironmentFactory, SQLEnvironment
from env_server.settings import EnvSettings, JudgingSettings, SandboxSettings, SQLRule
from env_server.sql.pool import DatabasePool
from env_server.test_suites.judge import SQLJudge, Support, support_of
from env_server.test_suites.store import Suites
from env_server.types import AnswerMode, SQLAction

LUCKY = "SELECT 2"
"""The number of cats, by luck."""


@pytest.fixture
def pool(pets: Dataset) -> Iterator[DatabasePool]:
    pool = DatabasePool(pets.databases, SandboxSettings())
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def suites(pets: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Suites:
    return Suites(pets.databases, SandboxSettings(), tmp_path_factory.mktemp("cache"))


Judge = Callable[[str, str], bool]


@pytest.fixture
def judge(pets: Dataset, pool: DatabasePool, suites: Suites) -> Judge:
    def correct(question_id: str, sql: str) -> bool:
        return SQLJudge(pool, suites).judge(pets.question(question_id), sql).correct

    return correct


def test_the_gold_is_right(pets: Dataset, judge: Judge) -> None:
    assert all(judge(question.question_id, question.gold_sql) for question in pets.questions)


def test_a_lucky_query_is_right_on_the_database_alone(pets: Dataset, pool: DatabasePool, suites: Suites) -> None:
    question = pets.question("cats")
    assert SQLJudge(pool).judge(question, LUCKY).correct
    verdict = SQLJudge(pool, suites).judge(question, LUCKY)
    assert not verdict.correct
    assert "test database" in verdict.reason


@pytest.mark.parametrize(
    ("question_id", "sql", "right"),
    [
        ("cats", "SELECT COUNT(pet_id) FROM pets WHERE species LIKE 'cat' AND species = 'cat'", True),
        ("cats", "```sql\nSELECT COUNT(*) FROM pets WHERE species = 'cat';\n```", True),
        ("cats", "SELECT COUNT(*) FROM pets WHERE species = 'dog'", False),
        ("cats", "SELECT COUNT(*), 1 FROM pets WHERE species = 'cat'", False),
        ("cats", "", False),
        ("cats", "2", False),
        ("cats", "SELECT nothing", False),
        ("cats", "DELETE FROM pets", False),
        ("cats", "SELECT COUNT(*) FROM pets; DROP TABLE pets", False),
        ("oldest", "SELECT name FROM pets WHERE age = (SELECT MAX(age) FROM pets) LIMIT 1", True),
        ("species", "SELECT COUNT(*) AS n, species FROM pets GROUP BY species ORDER BY n", True),
    ],
)
def test_verdicts(judge: Judge, question_id: str, sql: str, right: bool) -> None:
    assert judge(question_id, sql) is right


def test_under_birds_rule_rows_may_repeat_and_columns_may_not_move(
    pets: Dataset, pool: DatabasePool, suites: Suites
) -> None:
    repeated = "SELECT species FROM pets"
    distinct = pets.question("species")
    for rule, sql, right in (
        (
            SQLRule.BIRD,
            "SELECT species, COUNT(*) FROM pets GROUP BY species UNION ALL SELECT 'cat', COUNT(*) "
            "FROM pets WHERE species = 'cat' HAVING COUNT(*) > 0",
            True,
        ),
        (SQLRule.SPIDER, "SELECT COUNT(*), species FROM pets GROUP BY species", True),
        (SQLRule.BIRD, "SELECT COUNT(*), species FROM pets GROUP BY species", False),
        (SQLRule.BIRD, repeated, False),
    ):
        judge = SQLJudge(pool, suites, JudgingSettings(rule=rule))
        assert judge.judge(distinct, sql).correct is right, sql


def test_a_result_without_end_is_wrong_under_both_rules(pets: Dataset, pool: DatabasePool) -> None:
    endless = "WITH RECURSIVE r(x) AS (SELECT 2 UNION ALL SELECT 2 FROM r LIMIT 50000) SELECT x FROM r"
    for rule in SQLRule:
        judge = SQLJudge(pool, settings=JudgingSettings(rule=rule))
        assert not judge.judge(pets.question("cats"), endless).correct


def test_an_environment_judges_on_variants_unless_told_not_to(pets: Dataset, tmp_path: Path) -> None:
    for variants, verdict in ((True, "wrong"), (False, "correct")):
        settings = EnvSettings(judging=JudgingSettings(variants=variants))
        with EnvironmentFactory(pets, settings, AnswerMode.SQL, tmp_path) as factory:
            environment: SQLEnvironment = factory.make()
            environment.reset(question_id="cats")
            observation = environment.step(SQLAction(action_type="ANSWER", argument=LUCKY))
            assert observation.metadata["verdict"] == verdict
            assert "test database" not in observation.model_dump_json()


def test_in_value_mode_no_variants_are_made(pets: Dataset, tmp_path: Path) -> None:
    with EnvironmentFactory(pets, cache_dir=tmp_path) as factory:
        assert factory.suites is None
        environment = factory.make()
        environment.reset(question_id="cats")
        assert environment.step(SQLAction(action_type="ANSWER", argument="2")).reward > 0.9
    assert list(tmp_path.iterdir()) == []


def test_golds_pass_on_every_variant_of_real_databases(spider_dir: Path, tmp_path: Path) -> None:
    dataset = load_dataset(f"spider:{spider_dir}", answer_mode=AnswerMode.SQL)
    pool = DatabasePool(dataset.databases, SandboxSettings())
    judge = SQLJudge(pool, Suites(dataset.databases, SandboxSettings(), tmp_path))
    chosen = dataset.questions[::60]
    assert len(chosen) > 30
    wrong = [question.question_id for question in chosen if not judge.judge(question, question.gold_sql).correct]
    pool.close()
    assert wrong == []


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
