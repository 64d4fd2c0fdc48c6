"""The exploring actions, as an agent sees them."""

from __future__ import annotations

from collections.abc import Iterator

import apsw
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from env_server.errors import DataError
from env_server.explorer import MAX_ERROR_CHARS, ActionOutcome, Explorer
from env_server.settings import DisplaySettings, SandboxSettings
from env_server.sql.pool import DatabasePool

SCRIPT = """
CREATE TABLE owners (owner_id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE "my pets" (pet_id INTEGER PRIMARY KEY, name TEXT, owner_id INTEGER REFERENCES owners);
CREATE UNIQUE INDEX covering ON owners (name, owner_id);
INSERT INTO owners VALUES (1, 'Zoe'), (2, 'Bob'), (3, 'Ann'), (4, 'Cid');
CREATE TABLE keyed (k TEXT PRIMARY KEY, v INT) WITHOUT ROWID;
INSERT INTO keyed VALUES ('b', 1), ('a', 2);
CREATE VIEW names AS SELECT name FROM owners ORDER BY name;
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatabasePool]:
    path = tmp_path_factory.mktemp("db") / "pets.db"
    connection = apsw.Connection(str(path))
    connection.execute(SCRIPT).fetchall()
    connection.close()
    broken = path.with_name("broken.db")
    broken.write_bytes(b"no database at all" * 100)
    databases = DatabasePool({"pets": path, "broken": broken}, SandboxSettings(vm_steps=200_000))
    yield databases
    databases.close()


@pytest.fixture(scope="module")
def explorer(pool: DatabasePool) -> Explorer:
    return Explorer(pool, "pets", DisplaySettings())


def test_describe(explorer: Explorer) -> None:
    outcome = explorer.describe("'MY PETS'")
    assert outcome.ok
    assert outcome.result == (
        '"my pets": 0 rows\npet_id INTEGER primary key\nname TEXT\nowner_id INTEGER references owners(owner_id)'
    )
    assert outcome.rows is None


def test_sample_shows_the_first_rows_as_stored(explorer: Explorer) -> None:
    assert explorer.sample("owners").result == "owner_id | name\n1 | Zoe\n2 | Bob\n3 | Ann"
    assert explorer.sample("keyed").result == "k | v\na | 2\nb | 1"
    assert explorer.sample("names").result == "name\nAnn\nBob\nCid"
    assert explorer.sample("my pets").result == "pet_id | name | owner_id\nno rows"


def test_query_shows_rows_and_carries_them(explorer: Explorer) -> None:
    outcome = explorer.query("SELECT count(*) AS n FROM owners;")
    assert outcome.result == "n\n4"
    assert outcome.rows is not None
    assert outcome.rows.rows == ((4,),)


def test_long_results_are_cut_at_the_settings(pool: DatabasePool) -> None:
    short = Explorer(pool, "pets", DisplaySettings(max_rows=2))
    assert short.query("SELECT name FROM owners ORDER BY 1").result == "name\nAnn\nBob\n(2 more rows)"


@pytest.mark.parametrize(
    ("action", "argument", "error"),
    [
        ("describe", "cats", "no such table: cats. Tables: owners, my pets, keyed, names"),
        ("sample", "cats\nand dogs", "no such table: cats and dogs. Tables: owners, my pets, keyed, names"),
        ("describe", " ", "DESCRIBE needs a table name"),
        ("sample", "", "SAMPLE needs a table name"),
        ("query", "\n", "QUERY needs a SQL query"),
        ("query", "SELECT * FORM owners", 'syntax error: near "FORM": syntax error'),
        ("query", "SELECT * FROM cats", "not found: no such table: cats"),
        ("query", "DROP TABLE owners", "not allowed: DROP is not allowed; only SELECT queries are"),
        ("query", "SELECT json('{')", "error: malformed JSON"),
        ("query", "SELECT zeroblob(9999999)", "too large: string or blob too big"),
        (
            "query",
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT sum(i) FROM n",
            "too slow: the query needs more than 200000 steps",
        ),
    ],
)
def test_an_agents_mistake_is_one_line_of_error(explorer: Explorer, action: str, argument: str, error: str) -> None:
    act = {"describe": explorer.describe, "sample": explorer.sample, "query": explorer.query}[action]
    assert act(argument) == ActionOutcome(error=error)
    assert not act(argument).ok


def test_a_broken_file_is_the_callers_error(pool: DatabasePool) -> None:
    broken = Explorer(pool, "broken", DisplaySettings())
    with pytest.raises(DataError):
        broken.describe("t")
    with pytest.raises(DataError):
        broken.query("SELECT 1")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet=st.characters(), max_size=60))
def test_no_argument_raises_and_one_side_is_always_set(explorer: Explorer, argument: str) -> None:
    for act in (explorer.describe, explorer.sample, explorer.query):
        outcome = act(argument)
        assert bool(outcome.result) is not bool(outcome.error)
        assert len(outcome.error) <= MAX_ERROR_CHARS
        assert len(outcome.error.splitlines()) <= 1
        (outcome.result + outcome.error).encode()
        assert act(argument) == outcome
