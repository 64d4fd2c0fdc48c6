"""A query process: what it answers, under reduced limits and full ones, and how it ends."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from env_server.actions import ActionOutcome, JudgeJob
from env_server.dataset import Dataset
from env_server.errors import DataError, SQLEnvError
from env_server.judging.verdict import Judgement
from env_server.service.execution.process import HEADER, Answer, JobRunner, ProcessSetup, frame
from env_server.settings import DisplaySettings, JudgingSettings, SandboxSettings
from env_server.sql.pool import QueryJob

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT {} FROM n"
HASTY = SandboxSettings(vm_steps=10**15, deadline_s=0.02)
FRUGAL = SandboxSettings(vm_steps=20_000)


def setup(pets: Dataset, sandbox: SandboxSettings, *, reduced: bool = False) -> ProcessSetup:
    full = replace(sandbox, vm_steps=10**16) if reduced else sandbox
    return ProcessSetup(dict(pets.databases), sandbox, full, DisplaySettings(), JudgingSettings())


def query(sql: str) -> QueryJob:
    return QueryJob("pets", sql, 2)


def error(answer: Answer) -> str:
    assert isinstance(answer.outcome, ActionOutcome)
    return answer.outcome.error


@pytest.mark.parametrize("reduced", [False, True])
def test_what_the_limits_allow_is_answered(pets: Dataset, reduced: bool) -> None:
    runner = JobRunner(setup(pets, FRUGAL, reduced=reduced))
    answer = runner.run(query("SELECT name FROM pets ORDER BY 1"))
    assert isinstance(answer.outcome, ActionOutcome)
    assert answer.outcome.rows is not None
    assert (answer.outcome.rows.rows, answer.outcome.rows.row_count) == ((("Kit",), ("Max",)), 5)
    assert error(runner.run(query("SELECT nobody"))) == "not found: no such column: nobody"
    assert error(runner.run(query("DROP TABLE pets"))).startswith("not allowed")
    assert runner.run(JudgeJob(pets.question("cats"), "SELECT 2")).outcome == Judgement(True, "equal")
    wrong = runner.run(JudgeJob(pets.question("cats"), "SELECT nobody")).outcome
    assert wrong == Judgement(False, "the query fails: missing: no such column: nobody")


@pytest.mark.parametrize(
    ("sandbox", "sql", "message", "deterministic"),
    [
        (FRUGAL, ENDLESS.format("count(*)"), "too slow: the query needs more than 20000 steps", True),
        (HASTY, ENDLESS.format("count(*)"), "too slow: the query takes longer than 0.02 s", False),
        (HASTY, ENDLESS.format("i"), "too slow: the query takes longer than 0.02 s", False),
    ],
)
def test_what_the_limits_stop_fails_or_is_left_to_the_full_ones(
    pets: Dataset, sandbox: SandboxSettings, sql: str, message: str, deterministic: bool
) -> None:
    assert JobRunner(setup(pets, sandbox, reduced=True)).run(query(sql)).outcome is None
    answer = JobRunner(setup(pets, sandbox)).run(query(sql))
    assert (error(answer), answer.deterministic) == (message, deterministic)


def test_rows_that_are_not_counted_are_an_answer_under_full_limits_alone(pets: Dataset) -> None:
    assert JobRunner(setup(pets, FRUGAL, reduced=True)).run(query(ENDLESS.format("i"))).outcome is None
    outcome = JobRunner(setup(pets, FRUGAL)).run(query(ENDLESS.format("i"))).outcome
    assert isinstance(outcome, ActionOutcome)
    assert outcome.rows is not None
    assert (outcome.rows.rows, outcome.rows.row_count) == (((1,), (2,)), None)


def test_a_submitted_query_that_a_limit_stops_is_wrong_only_where_the_limit_is_its_own(pets: Dataset) -> None:
    job = JudgeJob(pets.question("cats"), ENDLESS.format("count(*)"))
    for sandbox in (FRUGAL, HASTY):
        assert JobRunner(setup(pets, sandbox, reduced=True)).run(job).outcome is None
    verdict = JobRunner(setup(pets, FRUGAL)).run(job)
    assert verdict.outcome == Judgement(False, "the query fails: budget: the query needs more than 20000 steps")
    late = JobRunner(setup(pets, HASTY)).run(job)
    assert (type(late.outcome), late.deterministic) == (SQLEnvError, False)


def test_a_database_that_cannot_be_opened_or_a_job_that_cannot_be_done(pets: Dataset, tmp_path: Path) -> None:
    full = SandboxSettings()
    runner = JobRunner(ProcessSetup({"gone": tmp_path / "gone.sqlite"}, full, full, DisplaySettings()))
    for job in (QueryJob("gone", "SELECT 1", 1), JudgeJob(pets.question("cats"), "SELECT 2")):
        outcome = runner.run(job).outcome
        assert isinstance(outcome, DataError)
        assert str(pickle.loads(pickle.dumps(outcome))) == str(outcome)


def test_each_statement_may_take_a_second_more_than_its_deadline(pets: Dataset) -> None:
    limits: list[float] = []
    runner = JobRunner(setup(pets, SandboxSettings(deadline_s=2.5)), limits.append)
    for job in (query("SELECT 1"), query("SELECT nobody"), JudgeJob(pets.question("cats"), "SELECT 2")):
        runner.run(job)
    assert limits == [3.5, 0] * 3


class Child:
    """A process and the pipes to it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def send(self, message: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(frame(message))
        self.process.stdin.flush()

    def receive(self) -> Answer | None:
        assert self.process.stdout is not None
        (size,) = HEADER.unpack(self.process.stdout.read(HEADER.size))
        message: Answer | None = pickle.loads(self.process.stdout.read(size))
        return message

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)


@contextmanager
def started(setup: ProcessSetup, program: str = "") -> Iterator[Child]:
    code = program + "\nfrom env_server.service.execution.process import main; main()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            child = Child(process)
            child.send(setup)
            assert child.receive() is None
            yield child
        finally:
            process.kill()


def test_a_process_bounds_its_memory_and_keeps_what_is_printed_out_of_its_answers(
    pets: Dataset, capfd: pytest.CaptureFixture[str]
) -> None:
    program = """
from env_server.service.execution import process

class Runner(process.JobRunner):
    def run(self, job):
        print("printed", flush=True)
        return super().run(job)

process.JobRunner = Runner
"""
    many = f"SELECT {', '.join(['hex(zeroblob(400000))'] * 40)}"
    with started(setup(pets, SandboxSettings(heap_bytes=8_000_000)), program) as child:
        child.send(query(many))
        answer = child.receive()
        assert answer is not None
        assert (error(answer), answer.deterministic) == ("too large: the query needs too much memory", False)
        for number in (signal.SIGINT, signal.SIGTERM):
            child.process.send_signal(number)
        assert child.end() == 0, "signals to the group are the server's alone"
    assert capfd.readouterr().err == "printed\n"


def test_a_statement_that_uses_too_much_processor_time_ends_its_process(pets: Dataset) -> None:
    program = "from env_server.service.execution import process; process.OVERRUN_S = -59.9"
    with started(setup(pets, SandboxSettings(vm_steps=10**15, deadline_s=60)), program) as child:
        child.send(query(ENDLESS.format("count(*)")))
        assert child.process.wait(60) == -signal.SIGPROF
