"""The executor with real processes: the same answer wherever a job runs, order, cancelling, lost processes, closing."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import apsw
import pytest
import pytest_asyncio

from env_server.actions import ActionOutcome, Job, JudgeJob, Outcome, query_outcome
from env_server.dataset import Dataset
from env_server.errors import DataError, SQLEnvError, SQLError
from env_server.service.execution import worker
from env_server.service.execution.executor import (
    ExecutionResult,
    Executor,
    PoolClosedError,
)
from env_server.service.execution.worker import WorkerLostError
from env_server.settings import EnvSettings, SandboxSettings
from env_server.sql.pool import DatabasePool, QueryJob
from env_server.sql.sandbox import QueryResult
from env_server.test_suites.judge import SQLJudge
from env_server.test_suites.store import Suites, build_suites
from env_server.types import AnswerMode

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS = EnvSettings(sandbox=SandboxSettings(vm_steps=4_000_000, deadline_s=60))
COUNTED = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {}) SELECT {} FROM n"
LONG = COUNTED.format(200_000, "count(*)")
"""More than the fast pool allows, and a tenth of a second of the slow one."""
ENDLESS = COUNTED.format(10**9, "max(CASE WHEN i < 100000 THEN i ELSE hex(zeroblob(400000) || i) END)")
"""More steps than the fast pool allows, soon; then minutes of slow ones."""
INLINE = [
    "SELECT COUNT(*) FROM pets WHERE species = 'cat'",
    "SELECT T2.name, COUNT(*) FROM pets AS T1 JOIN owners AS T2 ON T1.owner_id = T2.owner_id GROUP BY T2.name",
    "SELECT name FROM pets WHERE name LIKE '%o%' ORDER BY age DESC LIMIT 2",
    "SELECT nothing FROM pets",
    "SELECT * FROM nowhere",
    "SELECT abs(-9223372036854775808)",
    "SELEC 1",
    "",
]
POOLED = [
    COUNTED.format(5_000, "COUNT(*)"),
    LONG,
    "SELECT COUNT(*) FROM pets a, pets b, pets c, pets d, pets e, pets f",
    "SELECT length(hex(zeroblob(50000)))",
    "SELECT group_concat(name) FROM pets",
    "DELETE FROM pets",
    "SELECT random()",
    "SELECT name FROM pets WHERE name GLOB '*o*'",
    "SELECT COUNT(*) FROM pets NATURAL JOIN owners",
    "SELECT 'a' || name FROM pets",
    f"SELECT 1 WHERE 'x' IN ({', '.join(repr(str(n)) for n in range(300))})",
    "SELECT name FROM pets WHERE name LIKE '%a%b%c%d%e%f%g%h%i%j%k%l%m%n%o%'",
    "SELECT name FROM pets ORDER BY name COLLATE NOCASE",
    "SELECT zeroblob(2000000)",
    COUNTED.format(50_000, "i"),  # its rows fit the fast pool, counting them does not
    COUNTED.format(-1, "i"),  # they cannot be counted at all
    COUNTED.format(-1, "count(*)"),
    COUNTED.format(150_000, "max(json(CASE i WHEN 140000 THEN '{' ELSE '1' END))"),  # fails late
]


@pytest.fixture(scope="module")
def databases(pets: Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("databases")
    odd = folder / "odd.sqlite"
    connection = apsw.Connection(str(odd))
    connection.execute("CREATE TABLE t (a); INSERT INTO t VALUES (CAST(x'61ff' AS TEXT)), (x'00ff'), (1e999), (2.5)")
    connection.close()
    (folder / "broken.sqlite").write_bytes(b"no database" * 100)
    return {"pets": pets.databases["pets"], "odd": odd, "broken": folder / "broken.sqlite"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(databases: dict[str, Path]) -> AsyncIterator[Executor]:
    """An executor that the tests share, since starting processes takes time."""
    async with Executor(databases, SETTINGS) as made:
        yield made


@pytest.fixture
def pool(databases: dict[str, Path]) -> Iterator[DatabasePool]:
    pool = DatabasePool(databases, SETTINGS.sandbox)
    yield pool
    pool.close()


def query(sql: str, max_rows: int = 5) -> QueryJob:
    return QueryJob("pets", sql, max_rows)


def expected(pool: DatabasePool, job: QueryJob) -> object:
    try:
        return query_outcome(pool.query(job.db_id, job.sql, job.max_rows), SETTINGS.display)
    except SQLError as error:
        return query_outcome(error, SETTINGS.display)
    except DataError as error:
        return str(error)


async def result(executor: Executor, job: Job) -> ExecutionResult:
    run = executor.run(job)
    return run if isinstance(run, ExecutionResult) else await run


async def outcome(executor: Executor, job: Job) -> object:
    try:
        return (await executor.run_in_pool(job)).outcome
    except SQLEnvError as error:
        return str(error)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def long_answer(executor: Executor) -> bool:
    """Tell whether the slow pool answers as it should."""
    async with asyncio.timeout(60):
        found = (await executor.run_in_pool(query(LONG))).outcome
    return isinstance(found, ActionOutcome) and found.rows is not None and found.rows.rows == ((200_000,),)


def vanished(pid: int) -> bool:
    """Tell whether a process is gone, and no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def pids(executor: Executor) -> list[int]:
    return [pid for pool in executor.pools.values() for pid in pool.pids]


# --- answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sql", [*INLINE, *POOLED])
async def test_the_answer_is_the_same_wherever_it_runs(shared: Executor, pool: DatabasePool, sql: str) -> None:
    for job in (query(sql), query(sql, 2)):
        wanted = expected(pool, job)
        source = "inline" if sql in INLINE else "pool"
        assert await result(shared, job) == (wanted, source)
        assert await result(shared, job) == (wanted, "cached")
        assert await outcome(shared, job) == wanted


async def test_odd_values_and_broken_databases(shared: Executor, pool: DatabasePool) -> None:
    for db_id, sql in (
        ("odd", "SELECT a, typeof(a) FROM t"),
        ("odd", "SELECT hex(zeroblob(400000)) FROM t"),
        ("broken", "SELECT 1"),
        ("nope", "SELECT 1"),
    ):
        job = QueryJob(db_id, sql, 20)
        assert await outcome(shared, job) == expected(pool, job)
    for db_id in ("nope", "broken"):
        with pytest.raises(DataError):
            shared.run(QueryJob(db_id, "SELECT 1", 1))


async def test_what_a_clock_decided_and_what_is_large_is_not_cached(pets: Dataset) -> None:
    hasty = EnvSettings(sandbox=SandboxSettings(vm_steps=10**15, deadline_s=0.02))
    async with Executor(pets.databases, hasty) as made:
        late = await result(made, query(COUNTED.format(-1, "count(*)")))
        assert isinstance(late.outcome, ActionOutcome)
        assert late.outcome.error == "too slow: the query takes longer than 0.02 s"
        assert len(made.cache) == 0
    rows = QueryResult(("a",), (("x" * 1_000_000,),), 1, 5)
    made._remember(query("SELECT 1"), ActionOutcome(result="x", rows=rows))
    assert (len(made.cache), made.cache.size) == (0, 0)


async def test_hundreds_of_jobs_are_answered_once_each_and_in_order(shared: Executor) -> None:
    answered: list[int] = []

    async def ask(number: int) -> None:
        await shared.run_in_pool(query(f"SELECT {number}"))
        answered.append(number)

    await asyncio.gather(*map(ask, range(200)))
    assert answered == list(range(200))


async def test_hostile_queries_hold_up_no_fast_one(shared: Executor) -> None:
    slow = shared.pools["slow"]
    hostile = [asyncio.create_task(shared.run_in_pool(query(f"{ENDLESS} -- {n}"))) for n in range(4)]
    await until(lambda: slow.running + slow.waiting == 4)
    for number in range(50):
        await shared.run_in_pool(query(f"SELECT {number}"))
    assert not any(task.done() for task in hostile)
    for task in hostile:
        task.cancel()
    await asyncio.wait(hostile)
    await until(lambda: not slow.running and not slow.waiting)
    assert await long_answer(shared)


# --- one flight, cancelling ----------------------------------------------------------------------------------


async def test_the_same_job_runs_once_for_all_that_ask_for_it(shared: Executor) -> None:
    fast = shared.pools["fast"]
    os.kill(fast.pids[0], signal.SIGSTOP)
    tasks = [asyncio.create_task(shared.run_in_pool(query("SELECT 'together'"))) for _ in range(8)]
    failing = [asyncio.create_task(shared.run_in_pool(query("SELECT together"))) for _ in range(2)]
    await until(lambda: fast.running + fast.waiting == 2)
    for task in (*tasks[:3], failing[0]):
        task.cancel()
    await asyncio.wait((*tasks[:3], failing[0]))
    os.kill(fast.pids[0], signal.SIGCONT)
    results = [await task for task in (*tasks[3:], failing[1])]
    assert results == [results[0]] * 5 + [results[5]]
    assert results[5].outcome != results[0].outcome


async def test_a_job_that_none_waits_for_is_never_run_or_is_killed(shared: Executor) -> None:
    fast, slow = shared.pools["fast"], shared.pools["slow"]
    os.kill(fast.pids[0], signal.SIGSTOP)
    first = asyncio.create_task(shared.run_in_pool(query("SELECT 1")))
    waiting = asyncio.create_task(shared.run_in_pool(query("SELECT 2")))
    await until(lambda: fast.waiting == 1)
    waiting.cancel()
    await until(lambda: fast.waiting == 0)
    os.kill(fast.pids[0], signal.SIGCONT)
    await first
    restarts, (pid,) = slow.restarts, slow.pids
    task = asyncio.create_task(shared.run_in_pool(query(ENDLESS)))
    await until(lambda: slow.running == 1)
    task.cancel()
    await until(lambda: vanished(pid))
    assert await long_answer(shared)
    assert slow.restarts == restarts + 1


# --- lost processes ------------------------------------------------------------------------------------------


async def test_a_job_whose_process_is_lost_is_answered_by_the_next_one_or_fails(shared: Executor) -> None:
    slow = shared.pools["slow"]
    for losses in (1, 2):
        restarts = slow.restarts
        task = asyncio.create_task(shared.run_in_pool(query(ENDLESS if losses == 2 else f"{LONG} -- lost")))
        for lost in range(losses):
            await until(lambda due=restarts + lost: slow.running == 1 and slow.restarts == due)  # type: ignore[misc]
            os.kill(slow.pids[0], signal.SIGKILL)
        found = (await task).outcome
        assert isinstance(found, ActionOutcome)
        assert found.error == ("error: the process that ran the query was lost" if losses == 2 else "")
        assert await long_answer(shared)
        assert slow.restarts == restarts + losses
    fast = shared.pools["fast"]
    (pid,) = fast.pids
    os.kill(pid, signal.SIGKILL)
    await until(lambda: vanished(pid))
    assert (await shared.run_in_pool(query("SELECT 7"))).source == "pool", "one that is lost while idle costs no job"


async def test_a_query_killed_for_its_processor_time_is_not_run_again(databases: dict[str, Path]) -> None:
    """One under reduced limits moves on to the slow pool, where it fails."""
    async with Executor(databases, SETTINGS) as made:
        before = pids(made)
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        task = asyncio.create_task(made.run_in_pool(query("SELECT 1")))
        for name, pid in zip(("fast", "slow"), before, strict=True):
            await until(lambda name=name: made.pools[name].running == 1)  # type: ignore[misc]
            os.kill(pid, signal.SIGPROF)
            os.kill(pid, signal.SIGCONT)
        found = (await task).outcome
        assert isinstance(found, ActionOutcome)
        assert found.error == "too slow: the query takes longer than 60 s"


async def test_a_process_that_does_not_answer_is_replaced(pets: Dataset) -> None:
    async with Executor(pets.databases, EnvSettings(sandbox=SandboxSettings(deadline_s=0.1))) as made:
        before = pids(made)
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        found = (await made.run_in_pool(query("SELECT 1"))).outcome
        assert isinstance(found, ActionOutcome)
        assert found.error == "too slow: the query takes longer than 0.5 s"
        await until(lambda: len(pids(made)) == 2)
        assert all(map(vanished, before))


async def test_a_pool_without_a_process_fails_its_jobs_and_recovers(
    databases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Executor(databases, SETTINGS) as made:
        with monkeypatch.context() as patch:
            patch.setattr(worker, "_PROGRAM", "raise SystemExit(3)")
            os.kill(made.pools["fast"].pids[0], signal.SIGKILL)
            found = (await made.run_in_pool(query("SELECT 1"))).outcome
            assert isinstance(found, ActionOutcome)
            assert "lost" in found.error
            assert len(made.cache) == 0
        await until(lambda: len(pids(made)) == 2)
        assert (await made.run_in_pool(query("SELECT 1"))).source == "pool"


# --- starting and closing ------------------------------------------------------------------------------------


async def test_closing_fails_what_waits_and_runs_and_leaves_nothing(databases: dict[str, Path]) -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    async with Executor(databases, SETTINGS, pool_sizes=(2, 1)) as made:
        tasks = [asyncio.create_task(outcome(made, query(f"{ENDLESS} -- {n}"))) for n in range(3)]
        await until(lambda: (made.pools["slow"].running, made.pools["slow"].waiting) == (1, 2))
        started = pids(made)
    await made.aclose()
    with pytest.raises(PoolClosedError):
        await made.run_in_pool(query("SELECT 1"))
    assert await asyncio.gather(*tasks) == [str(PoolClosedError())] * 3
    assert len(started) == 3
    assert all(map(vanished, started))
    assert sorted(Path("/proc/self/fd").iterdir()) == before


async def test_a_start_that_fails_says_so_and_leaves_nothing(
    databases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_PROGRAM", "raise SystemExit(3)")
    made = Executor(databases, SETTINGS)
    with pytest.raises(WorkerLostError, match="standard error"):
        await made.__aenter__()
    assert pids(made) == []


_SERVER = """
import asyncio, sys
from pathlib import Path
from env_server.sql.pool import QueryJob
from env_server.service.execution.executor import Executor
from env_server.settings import EnvSettings, SandboxSettings

async def main(database, sql):
    settings = EnvSettings(sandbox=SandboxSettings(deadline_s=0.3))
    async with Executor({"pets": Path(database)}, settings) as executor:
        task = asyncio.create_task(executor.run_in_pool(QueryJob("pets", sql, 5)))
        while not executor.pools["slow"].running:
            await asyncio.sleep(0)
        print(*(pid for pool in executor.pools.values() for pid in pool.pids), flush=True)
        await task

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for a process that is not a child: Linux only")
async def test_the_processes_end_with_their_server(databases: dict[str, Path]) -> None:
    command = [sys.executable, "-c", _SERVER, str(databases["pets"]), ENDLESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        handles = [os.pidfd_open(int(pid)) for pid in server.stdout.readline().split()]
        server.kill()
    assert len(handles) == 2
    for handle in handles:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(300_000), "a process outlives its server"
        os.close(handle)


# --- judging -------------------------------------------------------------------------------------------------


async def test_verdicts_are_those_of_the_judge(pets: Dataset, tmp_path: Path) -> None:
    cats = "SELECT COUNT(*) FROM pets WHERE species = 'cat'"
    answers = [
        ("cats", cats, True),
        ("cats", f"```sql\n{cats}\n```", True),
        ("cats", "SELECT 2", False),  # a false positive on the database alone
        ("cats", "SELECT 3", False),
        ("cats", "SELECT nothing", False),
        ("cats", "", False),
        ("cats", f"{cats} AND ({LONG}) = 200000", True),
        ("cats", f"{cats} AND ({COUNTED.format(-1, 'count(*)')}) = 200000", False),
        ("oslo", pets.question("oslo").gold_sql, True),
    ]
    jobs = [JudgeJob(pets.question(question_id), answer) for question_id, answer, _ in answers]
    build_suites(pets.databases, pets.questions, SETTINGS.sandbox, tmp_path)
    async with Executor(pets.databases, SETTINGS, AnswerMode.SQL, tmp_path) as made:
        found: list[Outcome] = [each.outcome for each in await asyncio.gather(*map(made.run_in_pool, jobs))]
    pool = DatabasePool(pets.databases, SETTINGS.sandbox)
    judge = SQLJudge(pool, Suites(pets.databases, SETTINGS.sandbox, tmp_path), SETTINGS.judging, SETTINGS.sandbox)
    assert found == [judge.judge(job.question, job.answer) for job in jobs]
    assert [getattr(each, "correct", None) for each in found] == [correct for _, _, correct in answers]
    pool.close()


async def test_without_a_judge_there_is_an_error(shared: Executor, pets: Dataset) -> None:
    with pytest.raises(DataError, match="does not judge"):
        await shared.run_in_pool(JudgeJob(pets.question("cats"), "SELECT 2"))
