"""The actions as an agent sees them: what each needs, what it gives, and what a mistake gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import apsw
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from env_server.actions import (
    ACTIONS,
    MAX_ERROR_CHARS,
    ActionContext,
    ActionOutcome,
    plan_action,
    query_outcome,
)
from env_server.settings import DisplaySettings, SandboxSettings
from env_server.sql.pool import DatabasePool, QueryJob, run_query
from env_server.types import ActionType

SCRIPT = """
CREATE TABLE owners (owner_id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE "my pets" (pet_id INTEGER PRIMARY KEY, name TEXT, owner_id INTEGER REFERENCES owners);
CREATE UNIQUE INDEX covering ON owners (name, owner_id);
INSERT INTO owners VALUES (1, 'Zoe'), (2, 'Bob'), (3, 'Ann'), (4, 'Cid');
CREATE TABLE keyed (k TEXT PRIMARY KEY, v INT) WITHOUT ROWID;
INSERT INTO keyed VALUES ('b', 1), ('a', 2);
CREATE TABLE huge (id INTEGER, body TEXT, name);
INSERT INTO huge VALUES (1, replace(hex(zeroblob(1500000)), '0', 'x'), 'Ada'), (2, 'short', 'Bo');
CREATE VIEW names AS SELECT name FROM owners ORDER BY name;
"""

Act = Callable[[str, str], ActionOutcome]


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
def act(pool: DatabasePool) -> Act:
    """What an action gives, its query run where it needs one."""
    judged = ActionOutcome(result="judged")
    context = ActionContext("pets", pool.schema("pets"), DisplaySettings(), lambda _: judged)

    def take(kind: str, argument: str) -> ActionOutcome:
        need = plan_action(kind, argument.strip(), context)
        if isinstance(need, QueryJob):
            return query_outcome(run_query(pool, need), context.display)
        assert isinstance(need, ActionOutcome)
        return need

    return take


def test_the_actions_that_code_names_are_in_the_table() -> None:
    assert list(ActionType) == list(ACTIONS)
    assert all(each.help and each.example and each.shows for each in ACTIONS.values())


def test_describe_shows_columns_and_keys(act: Act) -> None:
    assert act("DESCRIBE", "'MY PETS'") == ActionOutcome(
        '"my pets": 0 rows\npet_id INTEGER primary key\nname TEXT\nowner_id INTEGER references owners(owner_id)'
    )


def test_sample_shows_the_first_rows_as_stored(act: Act) -> None:
    assert act("SAMPLE", "owners").result == "owner_id | name\n1 | Zoe\n2 | Bob\n3 | Ann"
    assert act("SAMPLE", "keyed").result == "k | v\na | 2\nb | 1"
    assert act("SAMPLE", "names").result == "name\nAnn\nBob\nCid"
    assert act("SAMPLE", "my pets").result == "pet_id | name | owner_id\nno rows"
    assert act("SAMPLE", "huge").result == "id | body | name\n1 | (3000000 bytes) | Ada\n2 | short | Bo"


def test_query_shows_rows_and_carries_them(act: Act) -> None:
    outcome = act("QUERY", "SELECT count(*) AS n FROM owners;")
    assert (outcome.result, outcome.rows and outcome.rows.rows) == ("n\n4", ((4,),))


def test_an_answer_is_judged_by_the_episode(act: Act) -> None:
    assert act("ANSWER", "42").result == "judged"


def test_long_results_are_cut_at_the_settings(pool: DatabasePool) -> None:
    display = DisplaySettings(max_rows=2)
    context = ActionContext("pets", pool.schema("pets"), display, lambda _: ActionOutcome())
    job = plan_action("QUERY", "SELECT name FROM owners ORDER BY 1", context)
    assert isinstance(job, QueryJob)
    assert query_outcome(run_query(pool, job), display).result == "name\nAnn\nBob\n(2 more rows)"


@pytest.mark.parametrize(
    ("kind", "argument", "error"),
    [
        ("DESCRIBE", "cats", "no such table: cats. Tables: owners, my pets, keyed, huge, names"),
        ("SAMPLE", "cats\nand dogs", "no such table: cats and dogs. Tables: owners, my pets, keyed, huge, names"),
        ("DESCRIBE", " ", "DESCRIBE needs a table name"),
        ("SAMPLE", "", "SAMPLE needs a table name"),
        ("QUERY", "\n", "QUERY needs a SQL query"),
        ("QUERY", "SELECT * FORM owners", 'syntax error: near "FORM": syntax error'),
        ("QUERY", "SELECT * FROM cats", "not found: no such table: cats"),
        ("QUERY", "DROP TABLE owners", "not allowed: DROP is not allowed; only SELECT queries are"),
        ("QUERY", "SELECT json('{')", "error: malformed JSON"),
        ("QUERY", "SELECT zeroblob(9999999)", "too large: string or blob too big"),
        (
            "QUERY",
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT sum(i) FROM n",
            "too slow: the query needs more than 200000 steps",
        ),
    ],
)
def test_an_agents_mistake_is_one_line_of_error(act: Act, kind: str, argument: str, error: str) -> None:
    assert act(kind, argument) == ActionOutcome(error=error)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet=st.characters(), max_size=60))
def test_no_argument_raises_and_one_side_is_always_set(act: Act, argument: str) -> None:
    for kind in (*ACTIONS, argument):
        outcome = act(kind, argument)
        assert bool(outcome.result) is not bool(outcome.error)
        assert len(outcome.error) <= MAX_ERROR_CHARS
        assert len(outcome.error.splitlines()) <= 1
        (outcome.result + outcome.error).encode()
        assert act(kind, argument) == outcome
