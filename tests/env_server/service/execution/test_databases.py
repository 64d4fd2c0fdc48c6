"""Every way gives the same answer: at once, from the cache, or from a queue."""

from __future__ import annotations

import gc
import sqlite3
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings

from env_server.dataset import Dataset
from env_server.errors import DataError, SQLError
from env_server.jobs import Job, JudgeJob, QueryJob
from env_server.judging.verdict import Judgement
from env_server.outcomes import ActionOutcome, query_outcome
from env_server.service.execution import databases as service_databases
from env_server.service.execution.cpu_budget import FREE_S, CpuBudget
from env_server.service.execution.databases import (
    TRIAL_COUNT_BYTES,
    TRIAL_DATABASE_BYTES,
    TRIAL_FUNCTIONS,
    OutcomeCache,
    RunInPool,
    ServiceDatabases,
    SessionJobs,
)
from env_server.settings import EnvSettings, SandboxSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.sandbox import QueryResult, Sandbox
from tests.env_server.sql.hostile_statements import SCRIPT, build, small_statements, statements

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
    "SELECT name FROM pets WHERE name LIKE '%a%b%c%d%e%f%g%h%i%j%k%l%m%n%o%'",
    "SELECT name FROM pets ORDER BY name COLLATE NOCASE",
    "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x FROM r) SELECT x FROM r WHERE x > 1",
]


SETTINGS = EnvSettings(sandbox=SandboxSettings(vm_steps=300_000))


@pytest.fixture
def worker(pets: Dataset) -> Iterator[ServiceDatabases]:
    databases = ServiceDatabases(pets.databases, SETTINGS)
    yield databases
    databases.close()


@pytest.fixture
def pool(pets: Dataset) -> Iterator[DatabasePool]:
    pool = DatabasePool(pets.databases, SETTINGS.sandbox)
    yield pool
    pool.close()


@pytest.fixture
def jobs(worker: ServiceDatabases, pool: DatabasePool) -> SessionJobs:
    return SessionJobs(worker, lane_of(pool), CpuBudget())


def lane_of(pool: DatabasePool) -> RunInPool:
    """A queue in this thread."""

    async def run(job: Job, cpu_budget: CpuBudget) -> QueryResult | Judgement:
        assert isinstance(job, QueryJob)
        return pool.query(job.db_id, job.sql, job.max_rows)

    return run


def query(sql: str) -> QueryJob:
    return QueryJob("pets", sql, 20)


def expected(pool: DatabasePool, sql: str) -> ActionOutcome:
    try:
        return query_outcome(pool.query("pets", sql, 20), SETTINGS.display)
    except SQLError as error:
        return query_outcome(error, SETTINGS.display)


@pytest.mark.parametrize("sql", AT_ONCE)
def test_what_an_agent_asks_is_answered_at_once(jobs: SessionJobs, pool: DatabasePool, sql: str) -> None:
    assert jobs.at_once(query(sql)) == (expected(pool, sql), "inline")
    assert jobs.at_once(query(sql)) == (expected(pool, sql), "cached")


@pytest.mark.parametrize("sql", WITH_A_LANE)
async def test_what_could_take_longer_is_for_a_lane(jobs: SessionJobs, pool: DatabasePool, sql: str) -> None:
    assert jobs.at_once(query(sql)) is None
    assert await jobs.in_pool(query(sql)) == (expected(pool, sql), "lane")
    assert jobs.at_once(query(sql)) == (expected(pool, sql), "cached")


async def test_who_has_used_up_the_allowance_is_not_tried(worker: ServiceDatabases, pool: DatabasePool) -> None:
    cpu_budget = CpuBudget()
    greedy, modest = (SessionJobs(worker, lane_of(pool), each) for each in (cpu_budget, CpuBudget()))
    cpu_budget.charge(1.0)
    assert greedy.at_once(query(AT_ONCE[0])) is None
    done = modest.at_once(query(AT_ONCE[0]))
    assert done is not None
    assert done.route == "inline"
    assert greedy.at_once(query(AT_ONCE[0])) == (done.outcome, "cached"), "what is remembered costs nobody anything"
    assert await greedy.in_pool(query(AT_ONCE[0])) == (done.outcome, "lane")


def test_what_differs_in_numbers_alone_from_a_long_statement_is_not_tried(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(service_databases, "MAX_SHAPES", 2)
    jobs: SessionJobs = request.getfixturevalue("jobs")
    tried: list[str] = []
    run = Sandbox.query

    def recorded(sandbox: Sandbox, sql: str, max_rows: int) -> QueryResult:
        tried.append(sql)
        return run(sandbox, sql, max_rows)

    monkeypatch.setattr(Sandbox, "query", recorded)
    long = "SELECT COUNT(*) FROM pets a, pets b, pets c, pets d, pets e, pets f WHERE a.age > {}"

    def is_tried(sql: str) -> bool:
        assert jobs.at_once(query(sql)) is None
        return tried[-1:] == [sql]

    assert is_tried(long.format(1))
    assert not is_tried(long.format(23))
    assert is_tried(long.format(1).replace("a.age", "b.age"))
    assert is_tried(long.format(1).replace("a.age", "c.age"))
    assert is_tried(long.format(2)), "the least recently used is forgotten"
    assert jobs.at_once(query("SELECT COUNT(*) FROM pets WHERE age > 2")) is not None


def test_what_an_attempt_costs_is_charged_whether_it_ends_or_not(
    worker: ServiceDatabases, pool: DatabasePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_budget = CpuBudget(clock=lambda: 0.0)
    jobs = SessionJobs(worker, lane_of(pool), cpu_budget)
    left = [cpu_budget.left_s]
    for sql, cost in ((AT_ONCE[0], FREE_S / 2), (AT_ONCE[1], 0.002), (AT_ONCE[4], 0.002), (WITH_A_LANE[1], 0.002)):
        clock = SimpleNamespace(thread_time=iter((5.0, 5.0 + cost)).__next__)
        monkeypatch.setattr("env_server.service.execution.databases.time", clock)
        jobs.at_once(query(sql))
        left.append(cpu_budget.left_s)
    charged = [before - after for before, after in pairwise(left)]
    assert charged == pytest.approx([0.0, 0.002, 0.002, 0.002])


async def test_what_a_clock_decided_is_not_remembered(worker: ServiceDatabases) -> None:
    late = SQLError("budget", "the query takes longer than 5 s", deterministic=False)

    async def slow(job: Job, cpu_budget: CpuBudget) -> QueryResult | Judgement:
        raise late

    jobs = SessionJobs(worker, slow, CpuBudget())
    assert await jobs.in_pool(query(WITH_A_LANE[0])) == (query_outcome(late, SETTINGS.display), "lane")
    assert jobs.at_once(query(WITH_A_LANE[0])) is None
    assert len(worker.outcomes) == 0


def test_a_count_that_the_trial_cannot_finish_is_left_to_a_lane(tmp_path: Path) -> None:
    path = tmp_path / "long.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (a)")
    connection.executemany("INSERT INTO t VALUES (?)", [(n,) for n in range(50_000)])
    connection.commit()
    connection.close()
    databases = ServiceDatabases({"long": path}, EnvSettings())
    assert databases.attempt(QueryJob("long", "SELECT a FROM t WHERE a >= 0", 20)) is None
    databases.close()


def test_a_large_database_is_not_tried_on_the_event_loop(pets_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "large.sqlite"
    path.write_bytes(pets_file.read_bytes())
    with path.open("r+b") as file:
        file.truncate(TRIAL_DATABASE_BYTES + 1)
    databases = ServiceDatabases({"large": path}, EnvSettings())
    assert databases.attempt(QueryJob("large", "SELECT 1", 20)) is None
    databases.close()


def test_an_unknown_or_vanished_database_is_an_error(worker: ServiceDatabases, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'zoo'"):
        worker.attempt(QueryJob("zoo", "SELECT 1", 20))
    databases = ServiceDatabases({"gone": tmp_path / "gone.sqlite"}, EnvSettings())
    with pytest.raises(DataError, match="'gone' cannot be read: No such file"):
        databases.attempt(QueryJob("gone", "SELECT 1", 20))
    databases.close()


async def test_a_verdict_is_for_a_lane_and_without_one_there_is_an_error(
    worker: ServiceDatabases, pets: Dataset
) -> None:
    job = JudgeJob(pets.question("cats"), "SELECT 2")

    async def judge(asked: Job, cpu_budget: CpuBudget) -> QueryResult | Judgement:
        assert asked == job
        return Judgement(True, "equal")

    async def lost(asked: Job, cpu_budget: CpuBudget) -> QueryResult | Judgement:
        raise SQLError("runtime", "the process was lost", deterministic=False)

    jobs = SessionJobs(worker, judge, CpuBudget())
    assert jobs.at_once(job) is None
    assert await jobs.in_pool(job) == (Judgement(True, "equal"), "lane")
    with pytest.raises(SQLError, match="lost"):
        await SessionJobs(worker, lost, CpuBudget()).in_pool(job)


def shown(text: str) -> ActionOutcome:
    return ActionOutcome(result=text, rows=QueryResult(("a",), ((text,),), 1, 5))


def test_the_cache_gives_up_the_least_recently_used_first() -> None:
    cache = OutcomeCache(max_bytes=4_000)
    for n in range(3):
        cache.put(query(f"SELECT {n}"), shown("x" * 20))
    for n in range(10, 14):
        assert cache.get(query("SELECT 0")) == shown("x" * 20)
        cache.put(query(f"SELECT {n}"), shown("x" * 20))
    assert cache.get(query("SELECT 1")) is None
    assert cache.get(query("SELECT 13")) is not None
    assert cache.bytes <= 4_000


def test_the_cache_does_not_keep_what_is_too_large() -> None:
    cache = OutcomeCache()
    cache.put(query("SELECT 1"), shown("x" * 1_000_000))
    assert (len(cache), cache.bytes) == (0, 0)


def test_one_more_row_is_another_question(jobs: SessionJobs) -> None:
    for rows in (2, 3, 2):
        done = jobs.at_once(QueryJob("pets", "SELECT name FROM pets", rows))
        assert done is not None
        assert isinstance(done.outcome, ActionOutcome)
        assert done.outcome.rows is not None
        assert len(done.outcome.rows.rows) == rows


# --- how long the event loop is held -------------------------------------------------------------------------


LOOP_S = 0.010


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("hostile") / "t.db", SCRIPT.replace("COLLATE NOCASE", ""))


def held_s(path: Path, sql: str) -> float:
    """Processor time of trying a statement: the least of three, since a busy machine's caches are cold."""
    least = float("inf")
    for _ in range(3):
        databases = ServiceDatabases({"t": path}, EnvSettings())
        databases.attempt(QueryJob("t", "SELECT 1", 20))
        gc.disable()
        began = time.thread_time()
        try:
            result = databases.attempt(QueryJob("t", sql, 20))
            if result is not None:
                databases.outcome(QueryJob("t", sql, 20), result)
            least = min(least, time.thread_time() - began)
        finally:
            gc.enable()
            databases.close()
        if least < LOOP_S:
            break
    return least


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(small_statements(TRIAL_FUNCTIONS) | small_statements(TRIAL_FUNCTIONS) | statements())
def test_the_event_loop_is_held_less_than_ten_milliseconds(hostile: Path, sql: str) -> None:
    assert held_s(hostile, sql) < LOOP_S


@pytest.mark.parametrize(
    "sql",
    [
        f"SELECT count(*) FROM t WHERE large LIKE '%{'0_' * 40}1'",
        f"SELECT count(*) FROM t WHERE medium LIKE '%{'a_' * 13}1' OR medium LIKE '%{'b_' * 13}1'",
        "SELECT count(*) FROM t WHERE large LIKE '%0_0_..1' ESCAPE '!'",
        f"SELECT count(*) FROM t l, t r WHERE l.medium LIKE '%{'ab' * 14}1'",
        "SELECT " + ", ".join(["(SELECT count(*) FROM t)"] * 30),
        "SELECT 1 FROM " + ", ".join(["t"] * 60),
        "SELECT 1 FROM t a0 " + " ".join(f"JOIN t a{i} USING (a, small)" for i in range(25)),
        "SELECT 1 FROM t ORDER BY substr(small, 1, a) || small",
    ],
)
def test_what_is_dear_does_not_hold_the_event_loop(hostile: Path, sql: str) -> None:
    assert held_s(hostile, sql) < LOOP_S


def test_a_count_of_a_large_table_is_not_tried(tmp_path: Path) -> None:
    path = build(tmp_path / "t.db", SCRIPT.replace("COLLATE NOCASE", "").replace("LIMIT 300", "LIMIT 2000"))
    assert path.stat().st_size > TRIAL_COUNT_BYTES
    databases = ServiceDatabases({"t": path}, EnvSettings())
    assert databases.attempt(QueryJob("t", "SELECT small FROM t WHERE a = 7", 20)) is not None
    assert databases.attempt(QueryJob("t", "SELECT count(*) FROM t", 20)) is None
    databases.close()
