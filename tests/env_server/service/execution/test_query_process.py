"""A queue's child: what it answers, on trial and not, and how it listens while it works."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from env_server.dataset import Dataset
from env_server.errors import DataError, SQLError
from env_server.jobs import JudgeJob, QueryJob
from env_server.judging.verdict import Judgement
from env_server.service.execution.query_process import (
    CANCEL,
    HEADER,
    READY,
    Answer,
    Failure,
    JobRunner,
    ProcessSetup,
    Reply,
    frame,
)
from env_server.settings import JudgingSettings, SandboxSettings
from env_server.sql.sandbox import QueryResult

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT {} FROM n"
PATIENT = SandboxSettings(vm_steps=10**15, deadline_s=60)
HASTY = SandboxSettings(vm_steps=10**15, deadline_s=0.02)
FRUGAL = SandboxSettings(vm_steps=20_000)


def setup(pets: Dataset, sandbox: SandboxSettings, *, trial: bool = False) -> ProcessSetup:
    return ProcessSetup(dict(pets.databases), sandbox, trial, JudgingSettings())


def query(sql: str) -> QueryJob:
    return QueryJob("pets", sql, 2)


# --- jobs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trial", [False, True])
def test_what_the_bounds_allow_is_answered_on_trial_too(pets: Dataset, trial: bool) -> None:
    runner = JobRunner(setup(pets, FRUGAL, trial=trial))
    result = runner.run(query("SELECT name FROM pets ORDER BY 1"))
    assert isinstance(result, QueryResult)
    assert (result.rows, result.row_count) == ((("Kit",), ("Max",)), 5)
    assert runner.run(query("SELECT nobody")) == Failure("missing", "no such column: nobody")
    assert runner.run(query("DROP TABLE pets")) == Failure("denied", "DROP is not allowed; only SELECT queries are")
    assert runner.run(JudgeJob(pets.question("cats"), "SELECT 2")) == Judgement(True, "equal")
    wrong = runner.run(JudgeJob(pets.question("cats"), "SELECT nobody"))
    assert wrong == Judgement(False, "the query fails: missing: no such column: nobody")


@pytest.mark.parametrize(
    ("sandbox", "sql", "message", "deterministic"),
    [
        (FRUGAL, ENDLESS.format("count(*)"), "the query needs more than 20000 steps", True),
        (HASTY, ENDLESS.format("count(*)"), "the query takes longer than 0.02 s", False),
        (HASTY, ENDLESS.format("i"), "the query takes longer than 0.02 s", False),
    ],
)
def test_what_the_bounds_stop_fails_but_on_trial_it_is_left_open(
    pets: Dataset, sandbox: SandboxSettings, sql: str, message: str, deterministic: bool
) -> None:
    assert JobRunner(setup(pets, sandbox, trial=True)).run(query(sql)) is None
    reply = JobRunner(setup(pets, sandbox)).run(query(sql))
    assert reply == Failure("budget", message, deterministic)


def test_rows_that_are_not_counted_are_an_answer_but_not_on_trial(pets: Dataset) -> None:
    assert JobRunner(setup(pets, FRUGAL, trial=True)).run(query(ENDLESS.format("i"))) is None
    result = JobRunner(setup(pets, FRUGAL)).run(query(ENDLESS.format("i")))
    assert isinstance(result, QueryResult)
    assert (result.rows, result.row_count) == (((1,), (2,)), None)


def test_a_submitted_query_that_a_bound_stops_is_wrong_only_where_the_bound_is_its_own(pets: Dataset) -> None:
    job = JudgeJob(pets.question("cats"), ENDLESS.format("count(*)"))
    assert JobRunner(setup(pets, FRUGAL, trial=True)).run(job) is None
    assert JobRunner(setup(pets, HASTY, trial=True)).run(job) is None
    verdict = JobRunner(setup(pets, FRUGAL)).run(job)
    assert verdict == Judgement(False, "the query fails: budget: the query needs more than 20000 steps")
    assert JobRunner(setup(pets, HASTY)).run(job) == Failure("budget", "the query takes longer than 0.02 s", False)


def test_an_interrupted_job_is_no_verdict_and_the_next_one_is_answered(pets: Dataset) -> None:
    runner = JobRunner(setup(pets, PATIENT))
    runner.interrupt()
    stopped = threading.Event()

    def interrupt() -> None:
        while not stopped.is_set():
            runner.interrupt()

    for job in (query(ENDLESS.format("count(*)")), JudgeJob(pets.question("cats"), ENDLESS.format("count(*)"))):
        stopped.clear()
        thread = threading.Thread(target=interrupt)
        thread.start()
        reply = runner.run(job)
        stopped.set()
        thread.join()
        assert reply == Failure("budget", "the query was interrupted", deterministic=False)
    assert isinstance(runner.run(query("SELECT 1")), QueryResult)


def test_a_failure_becomes_the_error_that_it_was(pets: Dataset, tmp_path: Path) -> None:
    error = Failure("budget", "too long", deterministic=False).error()
    assert isinstance(error, SQLError)
    assert (error.kind, error.message, error.deterministic) == ("budget", "too long", False)
    missing = JobRunner(ProcessSetup({"gone": tmp_path / "gone.sqlite"}, PATIENT)).run(QueryJob("gone", "SELECT 1", 1))
    assert isinstance(missing, Failure)
    assert isinstance(missing.error(), DataError)
    assert "gone.sqlite cannot be opened" in str(missing.error())


# --- the process ---------------------------------------------------------------------------------------------


class Child:
    """A child process and the pipes to it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def send(self, message: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(frame(message))
        self.process.stdin.flush()

    def receive(self) -> Reply | str:
        assert self.process.stdout is not None
        (size,) = HEADER.unpack(self.process.stdout.read(HEADER.size))
        message: Answer | str = pickle.loads(self.process.stdout.read(size))
        return message.reply if isinstance(message, Answer) else message

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)


@contextmanager
def started(queue: ProcessSetup, program: str = "") -> Iterator[Child]:
    code = program + "\nfrom env_server.service.execution.query_process import main; main()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            child = Child(process)
            child.send(queue)
            assert child.receive() == READY
            yield child
        finally:
            process.kill()


def test_a_cancelled_job_is_answered_and_the_next_one_is_not_cancelled(pets: Dataset) -> None:
    with started(setup(pets, PATIENT)) as child:
        child.send(CANCEL)
        for number in range(10):
            child.send(query(ENDLESS.format("count(*)")))
            child.send(CANCEL)
            assert child.receive() == Failure("budget", "the query was interrupted", deterministic=False)
            child.send(CANCEL)
            child.send(query(f"SELECT {number}"))
            reply = child.receive()
            assert isinstance(reply, QueryResult)
            assert reply.rows == ((number,),)
        assert child.end() == 0


def test_a_process_ends_with_its_pipe_in_the_middle_of_a_statement_too(pets: Dataset) -> None:
    with started(setup(pets, PATIENT)) as child:
        child.send(query(ENDLESS.format("count(*)")))
        assert child.end() == 0


def test_a_process_bounds_its_memory(pets: Dataset) -> None:
    many = f"SELECT {', '.join(['hex(zeroblob(400000))'] * 40)}"
    with started(setup(pets, SandboxSettings(heap_bytes=8_000_000))) as child:
        child.send(query(many))
        assert child.receive() == Failure("size", "the query needs too much memory", deterministic=False)


def test_what_is_printed_does_not_get_between_the_answers(pets: Dataset, capfd: pytest.CaptureFixture[str]) -> None:
    program = """
from env_server.service.execution import query_process as lane_process

class Runner(lane_process.JobRunner):
    def run(self, job):
        print("printed", flush=True)
        return super().run(job)

lane_process.JobRunner = Runner
"""
    with started(setup(pets, PATIENT), program) as child:
        child.send(query("SELECT 1"))
        assert isinstance(child.receive(), QueryResult)
        assert child.end() == 0
    assert capfd.readouterr().err == "printed\n"


def test_a_process_that_uses_more_processor_time_than_it_may_is_killed() -> None:
    program = (
        "from env_server.service.execution.query_process import limit_cpu\n"
        "limit_cpu(60); limit_cpu(0); limit_cpu(0.05)\n"
        "while True: pass"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60)
    assert done.returncode == -signal.SIGPROF


def test_each_statement_may_take_a_second_more_than_its_deadline(pets: Dataset) -> None:
    limits: list[float] = []
    runner = JobRunner(setup(pets, SandboxSettings(deadline_s=2.5)), limits.append)
    runner.run(query("SELECT 1"))
    runner.run(query("SELECT nobody"))
    runner.run(JudgeJob(pets.question("cats"), "SELECT 2"))
    assert limits == [3.5, 0] * 3
