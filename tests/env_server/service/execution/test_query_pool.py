"""QueryPool with real child processes: answers, order, cancelling, lost processes, closing."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import apsw
import pytest
import pytest_asyncio

from env_server.dataset import Dataset
from env_server.errors import DataError, SQLEnvError, SQLError
from env_server.jobs import JudgeJob, QueryJob
from env_server.service.execution import child, query_pool
from env_server.service.execution import query_queue as queue
from env_server.service.execution.child import ChildLostError, ChildProcess
from env_server.service.execution.cpu_budget import LEAST_S, CpuBudget
from env_server.service.execution.query_pool import PoolClosedError, QueryPool
from env_server.settings import EnvSettings, SandboxSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.sandbox import QueryResult
from env_server.test_suites.building import build_suites
from env_server.test_suites.judge import SQLJudge
from env_server.test_suites.store import Suites
from env_server.types import AnswerMode

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS = EnvSettings(sandbox=SandboxSettings(vm_steps=4_000_000, deadline_s=60))
COUNTED = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {}) SELECT {} FROM n"
LONG = COUNTED.format(200_000, "count(*)")
"""More than the medium queue allows, and a tenth of a second of the slow one."""
ENDLESS = COUNTED.format(10**9, "max(CASE WHEN i < 100000 THEN i ELSE hex(zeroblob(400000) || i) END)")
"""More steps than the medium queue allows, soon; then minutes of slow ones."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a crowded machine, the slow queue's process may wait for more than a second until it can stop a statement."""
    monkeypatch.setattr(queue, "OVERRUN_S", 60.0)


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
async def shared(databases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[QueryPool]:
    """QueryPool that the tests share, since starting processes takes time."""
    async with QueryPool(databases, SETTINGS, AnswerMode.VALUE, tmp_path_factory.mktemp("cache")) as pool:
        yield pool


async def outcome(queries: QueryPool, job: QueryJob) -> object:
    try:
        return await queries.run(job)
    except SQLEnvError as error:
        return described(error)


def described(error: SQLEnvError) -> object:
    if isinstance(error, SQLError):
        return error.kind, error.message, error.deterministic
    return type(error), str(error)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, leaving the processor to the children, which are nicer than the test."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def long_answer(queries: QueryPool) -> bool:
    """Tell whether the slow queue answers as it should."""
    async with asyncio.timeout(60):
        return (await queries.run(QueryJob("pets", LONG, 5))).rows == ((200_000,),)


def vanished(pid: int) -> bool:
    """Tell whether a process is gone, and no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def every_pid(both: QueryPool) -> list[int]:
    return [pid for stats in both.stats.values() for pid in stats.pids]


# --- answers -------------------------------------------------------------------------------------------------


async def test_answers_errors_and_costs_are_those_of_a_pool(shared: QueryPool, databases: dict[str, Path]) -> None:
    jobs = [
        QueryJob("pets", sql, 3)
        for sql in (
            "SELECT * FROM pets",
            "SELECT name, weight FROM pets WHERE 0",
            "SELECT * FORM pets",
            "SELECT * FROM cats",
            "DELETE FROM pets",
            "SELECT random()",
            "SELECT abs(-9223372036854775808)",
            "SELECT zeroblob(2000000)",
            "",
            LONG,
            COUNTED.format(50_000, "i"),  # its rows fit the medium queue, counting them does not
            COUNTED.format(150_000, "i"),
            COUNTED.format(-1, "i"),  # they cannot be counted at all
            COUNTED.format(-1, "count(*)"),
            COUNTED.format(150_000, "max(json(CASE i WHEN 140000 THEN '{' ELSE '1' END))"),  # fails late
        )
    ]
    jobs += [
        QueryJob("odd", "SELECT a, typeof(a) FROM t", 20),
        QueryJob("odd", "SELECT hex(zeroblob(400000)) FROM t", 9),
    ]
    jobs += [QueryJob("broken", "SELECT 1", 1), QueryJob("nope", "SELECT 1", 1)]
    pool = DatabasePool(databases, SETTINGS.sandbox)

    def expected(job: QueryJob) -> object:
        try:
            return pool.query(job.db_id, job.sql, job.max_rows)
        except SQLEnvError as error:
            return described(error)

    found = await asyncio.gather(*(outcome(shared, job) for job in jobs))
    wanted = [expected(job) for job in jobs]
    pool.close()
    for job, answer, other in zip(jobs, found, wanted, strict=True):
        assert answer == other, job
    assert any(isinstance(each, QueryResult) and each.vm_steps > query_pool.MEDIUM_VM_STEPS for each in found)
    assert any(isinstance(each, QueryResult) and each.row_count is None for each in found)


async def test_hundreds_of_jobs_are_answered_once_each_and_in_order(shared: QueryPool) -> None:
    answered: list[int] = []

    async def ask(number: int) -> bool:
        result = await shared.run(QueryJob("pets", f"SELECT {number}", 5))
        answered.append(number)
        return result.rows == ((number,),)

    assert all(await asyncio.gather(*map(ask, range(200))))
    assert answered == list(range(200))


async def test_hostile_queries_hold_up_no_medium_one(shared: QueryPool) -> None:
    hostile = [asyncio.create_task(shared.run(QueryJob("pets", f"{ENDLESS} -- {n}", 5))) for n in range(4)]
    await until(lambda: shared.stats["slow"].running + shared.stats["slow"].waiting == 4)
    for number in range(50):
        assert (await shared.run(QueryJob("pets", f"SELECT {number}", 5))).rows == ((number,),)
    assert not any(task.done() for task in hostile)
    for task in hostile:
        task.cancel()
    await asyncio.wait(hostile)
    await until(lambda: not shared.stats["slow"].running)
    assert shared.stats["slow"].waiting == 0


# --- cancelling ----------------------------------------------------------------------------------------------


async def test_who_has_used_up_the_cpu_budget_comes_last(shared: QueryPool) -> None:
    order: list[str] = []

    async def ask(name: str, cpu_budget: CpuBudget) -> None:
        await shared.run(QueryJob("pets", f"SELECT '{name}'", 20), cpu_budget)
        order.append(name)

    greedy = CpuBudget()
    greedy.charge(-LEAST_S + greedy.left_s)
    first = asyncio.ensure_future(outcome(shared, QueryJob("pets", LONG, 20)))
    await until(lambda: shared.stats["medium"].running == 1)
    await asyncio.gather(first, ask("greedy", greedy), ask("modest", CpuBudget()))
    assert order == ["modest", "greedy"]


async def test_what_a_job_takes_is_charged(shared: QueryPool) -> None:
    cpu_budget = CpuBudget(clock=lambda: 0.0)
    before = cpu_budget.left_s
    await shared.run(QueryJob("pets", "SELECT 'free'", 20), cpu_budget)
    assert cpu_budget.left_s == before
    await shared.run(QueryJob("pets", LONG, 20), cpu_budget)
    assert cpu_budget.left_s < before


async def test_half_of_the_processes_are_kept_for_those_who_have_some_left(
    databases: dict[str, Path], tmp_path: Path
) -> None:
    async with QueryPool(databases, SETTINGS, AnswerMode.VALUE, tmp_path, (2, 1)) as queries:
        greedy = CpuBudget(clock=lambda: 0.0)
        greedy.charge(1.0)
        jobs = [asyncio.ensure_future(queries.run(QueryJob("pets", f"{LONG} -- {n}", 5), greedy)) for n in range(6)]
        most = 0
        while not all(job.done() for job in jobs):
            most = max(most, queries.stats["medium"].running)
            await asyncio.sleep(0.001)
        assert most == 1
        modest = [queries.run(QueryJob("pets", f"{LONG} -- modest {n}", 5), CpuBudget()) for n in range(6)]
        both = asyncio.gather(*modest)
        while not both.done():
            most = max(most, queries.stats["medium"].running)
            await asyncio.sleep(0.001)
        assert most == 2


async def test_cancelling_stops_the_statement_and_its_process_takes_the_next_job(shared: QueryPool) -> None:
    before = shared.stats
    for turns in range(0, 60, 5):
        await until(lambda: shared.stats["slow"].running == 0)
        task = asyncio.create_task(shared.run(QueryJob("pets", ENDLESS, 5)))
        await until(lambda: shared.stats["slow"].running == 1)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await long_answer(shared)
    assert shared.stats == before


async def test_the_same_job_runs_once_for_all_who_ask_for_it(shared: QueryPool) -> None:
    (pid,) = shared.stats["medium"].pids
    os.kill(pid, signal.SIGSTOP)
    job = QueryJob("pets", "SELECT 'together'", 5)
    tasks = [asyncio.create_task(shared.run(job)) for _ in range(8)]
    other = asyncio.create_task(shared.run(QueryJob("pets", "SELECT 'together'", 6)))
    await until(lambda: shared.stats["medium"].running + shared.stats["medium"].waiting == 2)
    for task in tasks[:3]:
        task.cancel()
    await until(lambda: all(task.done() for task in tasks[:3]))
    os.kill(pid, signal.SIGCONT)
    assert [(await task).rows for task in (*tasks[3:], other)] == [(("together",),)] * 6


async def test_an_error_is_told_to_all_who_wait_for_it(shared: QueryPool) -> None:
    job = QueryJob("pets", "SELECT nothing FROM pets", 5)
    errors = await asyncio.gather(*(shared.run(job) for _ in range(4)), return_exceptions=True)
    assert len(set(map(id, errors))) == 4, "an error each: whoever raises it adds to its traceback"
    outcomes = await asyncio.gather(*(outcome(shared, job) for _ in range(4)))
    assert outcomes == [outcomes[0]] * 4
    assert "nothing" in str(outcomes[0])


async def test_a_cancelled_job_that_waits_is_never_run(shared: QueryPool) -> None:
    (pid,) = shared.stats["medium"].pids
    os.kill(pid, signal.SIGSTOP)
    first = asyncio.create_task(shared.run(QueryJob("pets", "SELECT 1", 5)))
    tasks = [asyncio.create_task(shared.run(QueryJob("pets", f"SELECT {i}", 5))) for i in range(2, 5)]
    await until(lambda: shared.stats["medium"].waiting == 3)
    tasks[1].cancel()
    await until(tasks[1].done)
    assert shared.stats["medium"].waiting == 2
    os.kill(pid, signal.SIGCONT)
    assert [(await task).rows for task in (first, tasks[0], tasks[2])] == [((1,),), ((2,),), ((4,),)]


async def test_a_process_that_does_not_stop_is_replaced(shared: QueryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "OVERRUN_S", 0.05)

    before = shared.stats["slow"]
    os.kill(before.pids[0], signal.SIGSTOP)
    task = asyncio.create_task(shared.run(QueryJob("pets", ENDLESS, 5)))
    await until(lambda: shared.stats["slow"].running == 1)
    task.cancel()
    assert await long_answer(shared)
    assert shared.stats["slow"].restarts == before.restarts + 1
    assert shared.stats["slow"].pids != before.pids
    assert vanished(before.pids[0])


async def test_a_process_that_overruns_is_replaced_and_its_job_fails_or_moves_on(
    databases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "OVERRUN_S", 0.2)
    settings = EnvSettings(sandbox=SandboxSettings(deadline_s=0.1))

    async with QueryPool(databases, settings, AnswerMode.VALUE, tmp_path) as both:
        os.kill(both.stats["medium"].pids[0], signal.SIGSTOP)
        assert (await both.run(QueryJob("pets", "SELECT 1", 5))).rows == ((1,),)
        os.kill(both.stats["slow"].pids[0], signal.SIGSTOP)
        cpu_budget = CpuBudget(clock=lambda: 0.0)
        with pytest.raises(SQLError) as caught:
            await both.run(QueryJob("pets", ENDLESS, 5), cpu_budget)
        assert described(caught.value) == ("budget", "the query takes longer than 0.5 s", False)
        assert cpu_budget.left_s < -0.5, "all the time that it held the process"
        await until(lambda: [stats.restarts for stats in both.stats.values()] == [1, 1])


async def test_a_query_killed_for_its_processor_time_is_not_run_again(
    databases: dict[str, Path], tmp_path: Path
) -> None:
    """A query that is on trial moves on to the slow queue, where it fails."""
    async with QueryPool(databases, SETTINGS, AnswerMode.VALUE, tmp_path) as both:
        cpu_budget = CpuBudget(clock=lambda: 0.0)
        for pid in (both.stats["medium"].pids[0], both.stats["slow"].pids[0]):
            os.kill(pid, signal.SIGSTOP)
        task = asyncio.create_task(both.run(QueryJob("pets", "SELECT 1", 5), cpu_budget))
        for name in ("medium", "slow"):
            await until(lambda name=name: both.stats[name].running == 1)  # type: ignore[misc]
            os.kill(both.stats[name].pids[0], signal.SIGPROF)
            os.kill(both.stats[name].pids[0], signal.SIGCONT)
        with pytest.raises(SQLError) as caught:
            await task
        assert (caught.value.kind, caught.value.deterministic) == ("budget", False)
        assert cpu_budget.left_s == LEAST_S
        await until(lambda: [stats.restarts for stats in both.stats.values()] == [1, 1])


# --- lost processes ------------------------------------------------------------------------------------------


async def test_a_job_whose_process_is_lost_is_answered_by_the_next_one(shared: QueryPool) -> None:
    before = shared.stats["slow"]
    os.kill(before.pids[0], signal.SIGSTOP)
    task = asyncio.create_task(long_answer(shared))
    await until(lambda: shared.stats["slow"].running == 1)
    os.kill(before.pids[0], signal.SIGKILL)
    assert await task
    assert shared.stats["slow"].restarts == before.restarts + 1
    assert vanished(before.pids[0])


async def test_a_job_that_loses_two_processes_fails_and_the_next_one_is_answered(shared: QueryPool) -> None:
    before = shared.stats["slow"]
    task = asyncio.create_task(shared.run(QueryJob("pets", ENDLESS, 5)))
    await until(lambda: shared.stats["slow"].running == 1)
    os.kill(before.pids[0], signal.SIGKILL)
    await until(lambda: shared.stats["slow"].pids not in ((), before.pids))
    os.kill(shared.stats["slow"].pids[0], signal.SIGKILL)
    with pytest.raises(SQLError) as caught:
        await task
    assert described(caught.value) == ("runtime", "the process that ran the query was lost", False)
    assert await long_answer(shared)
    assert shared.stats["slow"].restarts == before.restarts + 2


async def test_a_process_that_is_lost_while_idle_costs_no_job(shared: QueryPool) -> None:
    before = shared.stats["medium"]
    os.kill(before.pids[0], signal.SIGKILL)
    await until(lambda: vanished(before.pids[0]))
    assert (await shared.run(QueryJob("pets", "SELECT 7", 5))).rows == ((7,),)
    assert shared.stats["medium"].restarts == before.restarts + 1


async def test_cancelling_a_job_whose_process_was_killed_is_no_trouble(shared: QueryPool) -> None:
    task = asyncio.create_task(shared.run(QueryJob("pets", ENDLESS, 5)))
    await until(lambda: shared.stats["slow"].running == 1)
    os.kill(shared.stats["slow"].pids[0], signal.SIGKILL)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await long_answer(shared)


async def test_a_lane_without_a_process_fails_its_jobs_and_recovers(
    shared: QueryPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(child, "_PROGRAM", "raise SystemExit(3)")
        os.kill(shared.stats["medium"].pids[0], signal.SIGKILL)
        with pytest.raises(SQLError, match="lost") as caught:
            await shared.run(QueryJob("pets", "SELECT 1", 5))
        assert not caught.value.deterministic
        assert shared.stats["medium"].pids == ()
    assert (await shared.run(QueryJob("pets", "SELECT 1", 5))).rows == ((1,),)


async def test_signals_to_the_group_are_the_servers_alone(shared: QueryPool) -> None:
    before = shared.stats
    for pid in every_pid(shared):
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
    assert await long_answer(shared)
    assert shared.stats == before


# --- starting and closing ------------------------------------------------------------------------------------


async def test_closing_fails_what_waits_and_runs_and_leaves_nothing(databases: dict[str, Path], tmp_path: Path) -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    both = QueryPool(databases, SETTINGS, AnswerMode.VALUE, tmp_path, sizes=(2, 1))
    await both.start()
    tasks = [asyncio.create_task(outcome(both, QueryJob("pets", f"{ENDLESS} -- {n}", 5))) for n in range(3)]
    await until(lambda: (both.stats["slow"].running, both.stats["slow"].waiting) == (1, 2))
    pids = every_pid(both)
    await both.aclose()
    assert every_pid(both) == []
    await both.aclose()
    with pytest.raises(PoolClosedError):
        await both.run(QueryJob("pets", "SELECT 1", 5))
    assert await asyncio.gather(*tasks) == [(PoolClosedError, str(PoolClosedError()))] * 3
    assert len(pids) == 3
    assert all(map(vanished, pids))
    assert sorted(Path("/proc/self/fd").iterdir()) == before


async def test_processes_that_are_idle_end_by_themselves(
    databases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(ChildProcess, "kill", lambda child: killed.append(child.pid))

    async with QueryPool(databases, SETTINGS, AnswerMode.VALUE, tmp_path) as both:
        own, *niceness = [os.getpriority(os.PRIO_PROCESS, pid) for pid in (os.getpid(), *every_pid(both))]
        assert niceness == [min(own + more, 19) for more in (query_pool.NICENESS, query_pool.SLOW_NICENESS)]
        assert await long_answer(both)
    assert killed == []


async def test_a_start_that_fails_says_so_and_leaves_nothing(
    databases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The slow queue's process does not start; the medium one's, of another niceness, does.
    program = f"import sys; sys.argv[1] == '{query_pool.NICENESS}' or sys.exit(3); {child._PROGRAM}"
    monkeypatch.setattr(child, "_PROGRAM", program)
    ended: list[int] = []
    end = ChildProcess.end

    async def recorded_end(child: ChildProcess) -> None:
        ended.append(child.pid)
        await end(child)

    monkeypatch.setattr(ChildProcess, "end", recorded_end)
    both = QueryPool(databases, SETTINGS, AnswerMode.VALUE, tmp_path)
    with pytest.raises(ChildLostError, match="standard error"):
        await both.start()
    assert len(ended) == 2
    assert all(map(vanished, ended))
    assert every_pid(both) == []


_SERVER = """
import asyncio, sys
from pathlib import Path
from env_server.jobs import QueryJob
from env_server.service.execution.query_pool import QueryPool
from env_server.settings import EnvSettings, SandboxSettings
from env_server.types import AnswerMode

async def main(database, cache, sql):
    settings = EnvSettings(sandbox=SandboxSettings(deadline_s=60))
    async with QueryPool({"pets": Path(database)}, settings, AnswerMode.VALUE, Path(cache)) as queries:
        task = asyncio.create_task(queries.run(QueryJob("pets", sql, 5)))
        while not queries.stats["slow"].running:
            await asyncio.sleep(0)
        print(*(pid for stats in queries.stats.values() for pid in stats.pids), flush=True)
        await task

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for a process that is not a child: Linux only")
async def test_the_processes_end_with_their_server_even_in_the_middle_of_a_statement(
    databases: dict[str, Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", _SERVER, str(databases["pets"]), str(tmp_path), ENDLESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        handles = [os.pidfd_open(int(pid)) for pid in server.stdout.readline().split()]
        server.kill()
    assert len(handles) == 2
    for handle in handles:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(30_000), "a child outlives its server"
        os.close(handle)


# --- judging -------------------------------------------------------------------------------------------------


async def test_verdicts_are_those_of_the_judge_and_only_right_queries_reach_its_lane(
    pets: Dataset, tmp_path: Path
) -> None:
    cats = "SELECT COUNT(*) FROM pets WHERE species = 'cat'"
    answers = [
        ("cats", cats),
        ("cats", f"```sql\n{cats}\n```"),
        ("cats", "SELECT 2"),  # by luck
        ("cats", "SELECT 3"),
        ("cats", "SELECT nothing"),
        ("cats", ""),
        ("cats", f"{cats} AND ({LONG}) = 200000"),
        ("cats", f"{cats} AND ({COUNTED.format(-1, 'count(*)')}) = 200000"),
        ("oslo", pets.question("oslo").gold_sql),
    ]
    jobs = [JudgeJob(pets.question(question_id), answer) for question_id, answer in answers]

    build_suites(pets.databases, pets.questions, SETTINGS.sandbox, tmp_path / "lanes")
    async with QueryPool(pets.databases, SETTINGS, AnswerMode.SQL, tmp_path / "lanes") as three:
        assert list(three.stats) == ["medium", "slow", "judge"]
        # A judge that is stopped shows what does without it.
        (judge_pid,) = three.stats["judge"].pids
        os.kill(judge_pid, signal.SIGSTOP)
        wrong = [await three.run(jobs[number]) for number in (3, 4, 5, 7)]
        os.kill(judge_pid, signal.SIGCONT)
        found = await asyncio.gather(*(three.run(job) for job in jobs))
    assert wrong == [found[number] for number in (3, 4, 5, 7)]

    pool = DatabasePool(pets.databases, SETTINGS.sandbox)
    suites = Suites(pets.databases, SETTINGS.sandbox, tmp_path / "other")
    judge = SQLJudge(pool, suites, SETTINGS.judging, SETTINGS.sandbox)
    assert found == [judge.judge(job.question, job.answer) for job in jobs]
    assert [each.correct for each in found] == [True, True, False, False, False, False, True, False, True]
    pool.close()


async def test_who_leaves_in_the_middle_of_a_verdict_costs_nobody_else_one(
    pets: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "OVERRUN_S", 0.2)
    build_suites(pets.databases, pets.questions, SETTINGS.sandbox, tmp_path)
    oslo = pets.question("oslo")
    async with QueryPool(pets.databases, SETTINGS, AnswerMode.SQL, tmp_path) as three:
        # A judge that is stopped does not react, as one in a long computation.
        (judge_pid,) = three.stats["judge"].pids
        os.kill(judge_pid, signal.SIGSTOP)
        leaving = asyncio.ensure_future(three.run(JudgeJob(oslo, oslo.gold_sql)))
        await until(lambda: three.stats["judge"].running == 1)
        leaving.cancel()
        assert (await three.run(JudgeJob(oslo, f"{oslo.gold_sql} -- again"))).correct
        assert three.stats["judge"].restarts == 1
    (line,) = [record.getMessage() for record in caplog.records if "did not stop" in record.getMessage()]
    (seconds,) = re.findall(r"(\d+\.\d) s", line)
    assert float(seconds) < query_pool.JUDGING_S / 2


async def test_lanes_for_typed_answers_have_no_judge(shared: QueryPool, pets: Dataset) -> None:
    assert list(shared.stats) == ["medium", "slow"]
    with pytest.raises(DataError, match="does not judge"):
        await shared.run(JudgeJob(pets.question("cats"), "SELECT 2"))
