"""A session without sockets: each frame's reply, when it waits, what is counted, and what one leaves to another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from env_server.dataset import Dataset
from env_server.episodes import Episodes
from env_server.errors import SQLError
from env_server.jobs import Job, QueryJob
from env_server.judging.verdict import Judgement
from env_server.service.execution.cpu_budget import CpuBudget
from env_server.service.execution.databases import ServiceDatabases, SessionJobs
from env_server.service.session import Session
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.sandbox import QueryResult
from env_server.types import AnswerMode

SETTINGS = EnvSettings()
FAST = "SELECT COUNT(*) FROM pets"
LONG = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r LIMIT 3000) SELECT COUNT(*) FROM r"


class Pool:
    """A query pool in this thread, which answers when it is let."""

    def __init__(self, pool: DatabasePool) -> None:
        self._pool = pool
        self.open = asyncio.Event()
        self.asked: list[Job] = []

    async def run(self, job: Job, cpu_budget: CpuBudget) -> QueryResult | Judgement:
        self.asked.append(job)
        await self.open.wait()
        if isinstance(job, QueryJob):
            return self._pool.query(job.db_id, job.sql, job.max_rows)
        raise SQLError("runtime", "the process that ran the query was lost", deterministic=False)


class Ledger:
    """What sessions tell their observer."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, str, str]] = []
        self.errors: list[str] = []

    def step(self, action_type: str, outcome: str, seconds: float, route: str) -> None:
        self.steps.append((action_type, outcome, route))

    def frame_error(self, code: str) -> None:
        self.errors.append(code)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
async def query_pool(pets: Dataset) -> Any:
    pool = DatabasePool(pets.databases, SETTINGS.sandbox)
    yield Pool(pool)
    pool.close()


NewSession = Callable[..., Session]


@pytest.fixture
def new_session(pets: Dataset, query_pool: Pool, ledger: Ledger) -> Iterator[NewSession]:
    databases = ServiceDatabases(pets.databases, SETTINGS)

    def make(answer_mode: AnswerMode = AnswerMode.VALUE) -> Session:
        episodes = Episodes(pets, databases.schema, SETTINGS, answer_mode)
        session = Session(episodes, SessionJobs(databases, query_pool.run, CpuBudget()), ledger)
        assert reply(session.answer('{"type": "reset", "data": {"question_id": "cats"}}'))["type"] == "observation"
        return session

    yield make
    databases.close()


def step(kind: str, argument: str) -> str:
    return json.dumps({"type": "step", "data": {"action_type": kind, "argument": argument}})


def reply(answer: str | Awaitable[str] | None) -> dict[str, Any]:
    assert isinstance(answer, str), "it is answered at once"
    decoded: dict[str, Any] = json.loads(answer)
    return decoded


async def waiting(answer: str | Awaitable[str] | None) -> asyncio.Future[str]:
    """A reply that has to be waited for, on its way."""
    assert answer is not None
    assert not isinstance(answer, str)
    task = asyncio.ensure_future(answer)
    await asyncio.sleep(0)
    return task


async def test_the_route_of_a_step_is_the_one_it_took(
    new_session: NewSession, query_pool: Pool, ledger: Ledger
) -> None:
    one, other = new_session(), new_session()
    for action in (("DESCRIBE", "pets"), ("SAMPLE", "pets"), ("QUERY", FAST), ("QUERY", FAST), ("QUERY", "SELEC")):
        reply(one.answer(step(*action)))
    first, second = await waiting(one.answer(step("QUERY", LONG))), await waiting(other.answer(step("QUERY", LONG)))
    query_pool.open.set()
    await first
    await second
    reply(other.answer(step("QUERY", LONG)))
    reply(one.answer(step("ANSWER", "2")))
    assert ledger.steps == [
        ("DESCRIBE", "ok", "none"),
        ("SAMPLE", "ok", "inline"),
        ("QUERY", "ok", "inline"),
        ("QUERY", "ok", "cached"),
        ("QUERY", "error", "inline"),
        ("QUERY", "ok", "lane"),
        ("QUERY", "ok", "lane"),
        ("QUERY", "ok", "cached"),
        ("ANSWER", "correct", "none"),
    ]
    assert query_pool.asked == [QueryJob("pets", LONG, SETTINGS.display.max_rows)] * 2, "each step asks once"


async def test_a_step_that_is_given_up_is_not_taken_and_disturbs_no_other_session(
    new_session: NewSession, query_pool: Pool
) -> None:
    leaving, staying = new_session(), new_session()
    tasks = [await waiting(each.answer(step("QUERY", LONG))) for each in (leaving, staying)]
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    query_pool.open.set()
    observation = json.loads(await tasks[1])["data"]["observation"]
    assert (observation["result"].splitlines()[-1], observation["step_count"]) == ("3000", 1)
    assert reply(leaving.answer('{"type": "state"}'))["data"]["step_count"] == 0
    again = reply(leaving.answer(step("QUERY", LONG)))["data"]["observation"]
    assert again == observation


async def test_without_a_verdict_the_answer_is_an_error_and_can_be_given_again(
    new_session: NewSession, query_pool: Pool, ledger: Ledger
) -> None:
    session = new_session(AnswerMode.SQL)
    query_pool.open.set()
    for _ in range(2):
        frame = json.loads(await (await waiting(session.answer(step("ANSWER", "SELECT 2")))))
        assert (frame["type"], frame["data"]["code"]) == ("error", "EXECUTION_ERROR")
    assert reply(session.answer('{"type": "state"}'))["data"]["step_count"] == 0
    assert (ledger.steps, ledger.errors) == ([], ["EXECUTION_ERROR"] * 2)
