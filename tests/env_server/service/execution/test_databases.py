"""Every way gives the same answer: at once, from the cache, or from a lane."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from env_server.dataset import Dataset
from env_server.environment import SQLEnvironment
from env_server.errors import DataError, SQLError
from env_server.explorer import ActionOutcome
from env_server.judging.verdict import Judgement
from env_server.service.execution import databases as service_databases
from env_server.service.execution.cpu_budget import FREE_S, Allowance
from env_server.service.execution.databases import (
    TRIAL_DATABASE_BYTES,
    Job,
    OutcomeCache,
    Pending,
    ServiceDatabases,
    SessionDatabases,
    finish,
)
from env_server.service.execution.query_process import QueryJob
from env_server.settings import SandboxSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.sandbox import QueryResult, Sandbox
from env_server.types import SQLAction

AT_ONCE = [
    "SELECT COUNT(*) FROM pets WHERE species = 'cat'",
    "SELECT T2.name, COUNT(*) FROM pets AS T1 JOIN owners AS T2 ON T1.owner_id = T2.owner_id GROUP BY T2.name",
    "SELECT name FROM pets WHERE name LIKE '%o%' ORDER BY age DESC LIMIT 2",
    "SELECT AVG(weight), MAX(age) FROM pets",
    "SELECT nothing FROM pets",
    "SELECT * FROM nowhere",
    "SELEC 1",
    "",
]
WITH_A_LANE = [
    "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r LIMIT 5000) SELECT COUNT(*) FROM r",
    "SELECT COUNT(*) FROM pets a, pets b, pets c, pets d, pets e, pets f",
    "SELECT length(hex(zeroblob(50000)))",
    "SELECT a.name FROM pets a, pets b, pets c, pets d, pets e, pets f, pets g",
    "SELECT group_concat(name) FROM pets",
    "DELETE FROM pets",
    "SELECT name FROM pets WHERE name GLOB '*o*'",
    "SELECT COUNT(*) FROM pets NATURAL JOIN owners",
    "SELECT 'a' || name FROM pets",
    f"SELECT 1 WHERE 'x' IN ({', '.join(repr(str(n)) for n in range(300))})",
    "SELECT name FROM pets WHERE name LIKE '%a%b%c%d%e%f%'",
    "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x FROM r) SELECT x FROM r WHERE x > 1",
]


@pytest.fixture
def worker(pets: Dataset) -> Iterator[ServiceDatabases]:
    databases = ServiceDatabases(pets.databases, SandboxSettings(vm_steps=300_000))
    yield databases
    databases.close()


@pytest.fixture
def databases(worker: ServiceDatabases) -> SessionDatabases:
    return SessionDatabases(worker, Allowance())


@pytest.fixture
def pool(pets: Dataset) -> Iterator[DatabasePool]:
    pool = DatabasePool(pets.databases, SandboxSettings(vm_steps=300_000))
    yield pool
    pool.close()


def outcome(databases: DatabasePool | SessionDatabases, sql: str) -> QueryResult | tuple[str, str]:
    try:
        return databases.query("pets", sql, 20)
    except SQLError as error:
        return error.kind, error.message


def from_lane(pool: DatabasePool, job: Job) -> QueryResult | SQLError:
    assert isinstance(job, QueryJob)
    try:
        return pool.query(job.db_id, job.sql, job.max_rows)
    except SQLError as error:
        return error


@pytest.mark.parametrize("sql", AT_ONCE)
def test_what_an_agent_asks_is_answered_at_once(databases: SessionDatabases, pool: DatabasePool, sql: str) -> None:
    expected = outcome(pool, sql)
    assert outcome(databases, sql) == expected
    assert databases.way == "inline"


@pytest.mark.parametrize("sql", WITH_A_LANE)
def test_what_could_take_longer_is_a_job(databases: SessionDatabases, pool: DatabasePool, sql: str) -> None:
    with pytest.raises(Pending) as pending:
        databases.query("pets", sql, 20)
    job = pending.value.job
    databases.supply(job, from_lane(pool, job))
    expected = outcome(pool, sql)
    assert outcome(databases, sql) == expected
    assert databases.way == "lane"
    databases.withdraw(job)
    with pytest.raises(Pending):
        databases.query("pets", sql, 20)


def test_who_has_used_up_the_allowance_is_not_tried(worker: ServiceDatabases, pool: DatabasePool) -> None:
    allowance = Allowance()
    greedy, modest = SessionDatabases(worker, allowance), SessionDatabases(worker, Allowance())
    allowance.charge(1.0)
    with pytest.raises(Pending) as pending:
        greedy.query("pets", AT_ONCE[0], 20)
    job = pending.value.job
    greedy.supply(job, from_lane(pool, job))
    assert outcome(greedy, AT_ONCE[0]) == outcome(modest, AT_ONCE[0])
    assert (greedy.way, modest.way) == ("lane", "inline")


def test_what_differs_in_numbers_alone_from_a_long_statement_is_not_tried(
    databases: SessionDatabases, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    query = Sandbox.query

    def recorded(sandbox: Sandbox, sql: str, max_rows: int) -> QueryResult:
        tried.append(sql)
        return query(sandbox, sql, max_rows)

    monkeypatch.setattr(Sandbox, "query", recorded)
    monkeypatch.setattr(service_databases, "MAX_SHAPES", 2)
    long = "SELECT COUNT(*) FROM pets a, pets b, pets c, pets d, pets e, pets f WHERE a.age > {}"

    def is_tried(sql: str) -> bool:
        with pytest.raises(Pending) as pending:
            databases.query("pets", sql, 20)
        assert pending.value.job == QueryJob("pets", sql, 20)
        return tried[-1:] == [sql]

    assert is_tried(long.format(1))
    assert not is_tried(long.format(23))
    assert is_tried(long.format(1).replace("a.age", "b.age"))
    assert is_tried(long.format(1).replace("a.age", "c.age"))
    assert is_tried(long.format(2)), "the oldest is forgotten"
    assert databases.query("pets", "SELECT COUNT(*) FROM pets WHERE age > 2", 20).rows == ((3,),)


def test_what_an_attempt_costs_is_charged_whether_it_ends_or_not(
    worker: ServiceDatabases, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowance = Allowance(clock=lambda: 0.0)
    databases = SessionDatabases(worker, allowance)
    left = [allowance.left_s]
    for sql, cost in ((AT_ONCE[0], FREE_S / 2), (AT_ONCE[0], 0.002), (AT_ONCE[4], 0.002), (WITH_A_LANE[1], 0.002)):
        clock = SimpleNamespace(thread_time=iter((5.0, 5.0 + cost)).__next__)
        monkeypatch.setattr("env_server.service.execution.databases.time", clock)
        with suppress(Pending, SQLError):
            databases.query("pets", sql, 20)
        left.append(allowance.left_s)
    charged = [before - after for before, after in pairwise(left)]
    assert charged == pytest.approx([0.0, 0.002, 0.002, 0.002])


def test_one_session_is_not_given_what_was_supplied_to_another(worker: ServiceDatabases, pool: DatabasePool) -> None:
    one, other = SessionDatabases(worker, Allowance()), SessionDatabases(worker, Allowance())
    job = QueryJob("pets", WITH_A_LANE[0], 20)
    one.supply(job, from_lane(pool, job))
    assert outcome(one, WITH_A_LANE[0])
    with pytest.raises(Pending):
        other.query("pets", WITH_A_LANE[0], 20)


def test_what_a_clock_decided_is_answered_once(databases: SessionDatabases) -> None:
    sql = WITH_A_LANE[0]
    with pytest.raises(Pending) as pending:
        databases.query("pets", sql, 20)
    late = SQLError("budget", "the query takes longer than 5 s", deterministic=False)
    databases.supply(pending.value.job, late)
    assert outcome(databases, sql) == ("budget", late.message)
    databases.withdraw(pending.value.job)
    with pytest.raises(Pending):
        databases.query("pets", sql, 20)


def test_a_count_that_the_trial_cannot_finish_is_left_to_a_lane(tmp_path: Path) -> None:
    path = tmp_path / "long.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (a)")
    connection.executemany("INSERT INTO t VALUES (?)", [(n,) for n in range(50_000)])
    connection.commit()
    connection.close()
    databases = ServiceDatabases({"long": path}, SandboxSettings())
    with pytest.raises(Pending):
        databases.attempt(QueryJob("long", "SELECT a FROM t WHERE a >= 0", 20))
    databases.close()


def test_a_large_database_is_not_tried_on_the_event_loop(pets_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "large.sqlite"
    path.write_bytes(pets_file.read_bytes())
    with path.open("r+b") as file:
        file.truncate(TRIAL_DATABASE_BYTES + 1)
    databases = ServiceDatabases({"large": path}, SandboxSettings())
    with pytest.raises(Pending):
        databases.attempt(QueryJob("large", "SELECT 1", 20))
    databases.close()


def test_an_unknown_database_is_an_error(databases: SessionDatabases) -> None:
    with pytest.raises(DataError, match="'zoo'"):
        databases.query("zoo", "SELECT 1", 20)


async def test_finish_asks_the_lanes_until_the_call_has_all_it_needs(
    databases: SessionDatabases, pool: DatabasePool
) -> None:
    asked: list[Job] = []

    async def run(job: Job) -> QueryResult | Judgement:
        asked.append(job)
        answer = from_lane(pool, job)
        if isinstance(answer, SQLError):
            raise answer
        return answer

    def call() -> list[object]:
        return [outcome(databases, sql) for sql in (WITH_A_LANE[0], AT_ONCE[0], WITH_A_LANE[2], WITH_A_LANE[5])]

    with pytest.raises(Pending) as pending:
        call()
    found = await finish(databases, run, pending.value.job, call)
    assert found == [outcome(pool, sql) for sql in (WITH_A_LANE[0], AT_ONCE[0], WITH_A_LANE[2], WITH_A_LANE[5])]
    assert len(asked) == 3


async def test_a_judge_without_a_verdict_is_an_error_and_not_asked_for_ever(
    databases: SessionDatabases, pets: Dataset
) -> None:
    question = pets.question("cats")

    async def lost(job: Job) -> QueryResult | Judgement:
        raise SQLError("runtime", "the process was lost", deterministic=False)

    with pytest.raises(Pending) as pending:
        databases.judge(question, "SELECT 2")
    with pytest.raises(SQLError, match="lost"):
        await finish(databases, lost, pending.value.job, lambda: databases.judge(question, "SELECT 2"))


def shown(text: str) -> ActionOutcome:
    return ActionOutcome(result=text, rows=QueryResult(("a",), ((text,),), 1, 5))


def test_the_cache_gives_up_the_least_recently_used_first() -> None:
    cache = OutcomeCache(max_bytes=4_000)
    for n in range(3):
        cache.put("d", f"SELECT {n}", 20, shown("x" * 20))
    for n in range(10, 14):
        assert cache.get("d", "SELECT 0", 20) == shown("x" * 20)
        cache.put("d", f"SELECT {n}", 20, shown("x" * 20))
    assert cache.get("d", "SELECT 1", 20) is None
    assert cache.get("d", "SELECT 13", 20) is not None
    assert cache.bytes <= 4_000
    assert cache.hits == 5


def test_the_cache_does_not_keep_what_is_too_large() -> None:
    cache = OutcomeCache()
    cache.put("d", "SELECT 1", 20, shown("x" * 1_000_000))
    assert (len(cache), cache.bytes) == (0, 0)


def test_a_cached_step_is_the_step_again(worker: ServiceDatabases, databases: SessionDatabases, pets: Dataset) -> None:
    observations = []
    for _ in range(2):
        environment = SQLEnvironment(pets, databases, outcomes=worker.outcomes)
        environment.reset(question_id="cats", episode_id="e")
        actions = [("SAMPLE", "pets"), *(("QUERY", sql) for sql in AT_ONCE)]
        observations.append([environment.step(SQLAction(action_type=a, argument=b)) for a, b in actions])
    assert observations[0] == observations[1]
    assert worker.outcomes.hits >= len(AT_ONCE)


def test_one_more_row_is_another_question(databases: SessionDatabases) -> None:
    assert len(databases.query("pets", "SELECT name FROM pets", 2).rows) == 2
    assert len(databases.query("pets", "SELECT name FROM pets", 3).rows) == 3
