"""The exploring actions, as an agent sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import apsw
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from env_server.errors import SQLError
from env_server.explorer import Explorer
from env_server.jobs import QueryJob
from env_server.outcomes import MAX_ERROR_CHARS, ActionOutcome, query_outcome
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


Done = Callable[..., ActionOutcome]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatabasePool]:
    path = tmp_path_factory.mktemp("db") / "pets.db"
    connection = apsw.Connection(str(path))
    connection.execute(SCRIPT).fetchall()
    connection.close()
    databases = DatabasePool({"pets": path}, SandboxSettings(vm_steps=200_000))
    yield databases
    databases.close()


@pytest.fixture(scope="module")
def explorer(pool: DatabasePool) -> Explorer:
    return Explorer(pool.schema("pets"), "pets", DisplaySettings())


@pytest.fixture(scope="module")
def done(pool: DatabasePool) -> Done:
    """What an action gave, its query run where it needs one."""

    def outcome(need: QueryJob | ActionOutcome, display: DisplaySettings | None = None) -> ActionOutcome:
        if isinstance(need, ActionOutcome):
            return need
        try:
            return query_outcome(pool.query(need.db_id, need.sql, need.max_rows), display or DisplaySettings())
        except SQLError as error:
            return query_outcome(error, display or DisplaySettings())

    return outcome


def test_describe(explorer: Explorer) -> None:
    outcome = explorer.describe("'MY PETS'")
    assert outcome.ok
    assert outcome.result == (
        '"my pets": 0 rows\npet_id INTEGER primary key\nname TEXT\nowner_id INTEGER references owners(owner_id)'
    )
    assert outcome.rows is None


def test_sample_shows_the_first_rows_as_stored(explorer: Explorer, done: Done) -> None:
    assert done(explorer.sample("owners")).result == "owner_id | name\n1 | Zoe\n2 | Bob\n3 | Ann"
    assert done(explorer.sample("keyed")).result == "k | v\na | 2\nb | 1"
    assert done(explorer.sample("names")).result == "name\nAnn\nBob\nCid"
    assert done(explorer.sample("my pets")).result == "pet_id | name | owner_id\nno rows"


def test_query_shows_rows_and_carries_them(explorer: Explorer, done: Done) -> None:
    outcome = done(explorer.query("SELECT count(*) AS n FROM owners;"))
    assert outcome.result == "n\n4"
    assert outcome.rows is not None
    assert outcome.rows.rows == ((4,),)


def test_long_results_are_cut_at_the_settings(pool: DatabasePool, done: Done) -> None:
    display = DisplaySettings(max_rows=2)
    short = Explorer(pool.schema("pets"), "pets", display)
    assert done(short.query("SELECT name FROM owners ORDER BY 1"), display).result == "name\nAnn\nBob\n(2 more rows)"


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
def test_an_agents_mistake_is_one_line_of_error(
    explorer: Explorer, done: Done, action: str, argument: str, error: str
) -> None:
    act = {"describe": explorer.describe, "sample": explorer.sample, "query": explorer.query}[action]
    assert done(act(argument)) == ActionOutcome(error=error)
    assert not done(act(argument)).ok


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet=st.characters(), max_size=60))
def test_no_argument_raises_and_one_side_is_always_set(explorer: Explorer, done: Done, argument: str) -> None:
    for act in (explorer.describe, explorer.sample, explorer.query):
        outcome = done(act(argument))
        assert bool(outcome.result) is not bool(outcome.error)
        assert len(outcome.error) <= MAX_ERROR_CHARS
        assert len(outcome.error.splitlines()) <= 1
        (outcome.result + outcome.error).encode()
        assert done(act(argument)) == outcome
