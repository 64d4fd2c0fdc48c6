"""Remote environments: the same episodes as locally, whatever happens to the servers meanwhile.

How a server is found and left is tested in `tests/env_server/client`, whole runs on real processes, one of which is
killed, in `tests/integration/test_training.py`.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from env_server.client.errors import ConnectionLostError, DeadlineError, NoServerError, RemoteActionError
from env_server.client.pool import LOST_ALLOWED
from env_server.dataset import Dataset
from env_server.environment import SQLEnvironment
from env_server.errors import NoEpisodeError
from env_server.settings import EnvSettings
from env_server.types import AnswerMode, SQLObservation
from tests.env_server.serving import (
    EPISODE,
    Close,
    Deed,
    Die,
    Hang,
    PlayingServer,
    action,
    error_frame,
    played_locally,
    running_server,
    shorten_backoffs,
)
from trainer.rollout.client import RolloutSettings
from trainer.rollout.environments import Environments, LocalEnvironments, open_environments
from trainer.rollout.remote_environments import (
    DifferentDataError,
    DifferentObservationError,
    RemoteEnvironments,
    RemoteSettings,
)
from trainer.rollout.transcript import TokenBudget


@pytest.fixture(autouse=True)
def short_backoffs(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_backoffs(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not {"sqlenv-remote", "playing-server"} & {thread.name for thread in threading.enumerate()}


@pytest.fixture
def servers(pets: Dataset) -> Iterator[list[PlayingServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running_server(pets)) for _ in range(2)]


Connect = Callable[..., RemoteEnvironments]


@pytest.fixture
def connect(pets: Dataset) -> Iterator[Connect]:
    with ExitStack() as stack:

        def connect(*servers: PlayingServer, **options: Any) -> RemoteEnvironments:
            remote = RemoteEnvironments([server.url for server in servers], pets, **options)
            return stack.enter_context(closing(remote))

        yield connect


async def play(environments: Environments, before: Callable[[int], None] = lambda _: None) -> list[SQLObservation]:
    """Play the episode; `before` is called before the reset, as 0, and before each step."""
    async with environments.session() as session:
        before(0)
        seen = [await session.reset("cats", "e")]
        for number, text in enumerate(EPISODE, start=1):
            before(number)
            seen.append(await session.step(action(text)))
    return seen


def in_use(servers: list[PlayingServer]) -> PlayingServer:
    """The server that the one episode is on."""
    (used,) = [server for server in servers if server.sessions]
    return used


@pytest.fixture
def expected(environment: SQLEnvironment) -> list[SQLObservation]:
    return played_locally(environment)


def test_sockets_outlive_episodes_and_loops(
    connect: Connect, servers: list[PlayingServer], expected: list[SQLObservation]
) -> None:
    remote = connect(*servers)

    async def play_four() -> list[list[SQLObservation]]:
        return await asyncio.gather(*(play(remote) for _ in range(4)))

    for _ in range(3):
        assert asyncio.run(play_four()) == [expected] * 4
    assert sum(server.opened for server in servers) <= 4
    assert [len(server.played("reset")) for server in servers] == [6, 6]
    remote.close()
    for server in servers:
        server.wait_until(lambda server=server: server.sessions == 0)  # type: ignore[misc]


FAILURES: list[Deed] = [Close(1000), Close(1012), error_frame("SESSION_ERROR"), error_frame("CAPACITY_REACHED")]


@pytest.mark.parametrize("deed", [*FAILURES, Die(), Hang()], ids=str)
async def test_an_episode_survives_every_way_in_which_its_server_can_fail(
    connect: Connect, servers: list[PlayingServer], expected: list[SQLObservation], deed: Deed
) -> None:
    remote = connect(*servers, deadlines=RemoteSettings(request_s=0.2 if deed == Hang() else 30.0))
    due = [deed]

    def fail(number: int) -> None:
        if number == 3:
            in_use(servers).script = lambda _: due.pop() if due else None

    assert await play(remote, fail) == expected
    requests = sum(len(server.requests) for server in servers)
    assert requests == len(EPISODE) + 1 + 4, "one has failed, and the three before it are sent again"


MOMENTS = st.integers(0, 2 * len(EPISODE))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(MOMENTS, st.sampled_from(FAILURES), max_size=LOST_ALLOWED - 1), st.booleans())
def test_whatever_fails_whenever_leaves_the_episode_as_it_is(
    pets: Dataset, expected: list[SQLObservation], failures: dict[int, Deed], one_dies: bool
) -> None:
    """Requests of these numbers fail, on whatever server, and one of them brings its server down for good."""
    due = {number: Die() if one_dies and number == min(failures) else deed for number, deed in failures.items()}
    with ExitStack() as stack:
        servers = [stack.enter_context(running_server(pets)) for _ in range(2)]
        for server in servers:
            server.script = lambda _: due.pop(sum(len(server.requests) for server in servers) - 1, None)
        remote = stack.enter_context(closing(RemoteEnvironments([server.url for server in servers], pets)))
        assert asyncio.run(play(remote)) == expected


async def test_a_call_that_cannot_be_made_anywhere_ends_with_a_reason(
    connect: Connect, servers: list[PlayingServer]
) -> None:
    remote = connect(*servers, deadlines=RemoteSettings(call_s=0.5))
    async with remote.session() as session:
        await session.reset("cats", "e")
        for server in servers:
            server.die()
        with pytest.raises(NoServerError, match=r"no session in [\d.]+ s \(.*cannot be reached.*;.*\)"):
            await session.step(action("ANSWER 2"))


async def test_a_call_has_a_deadline_whatever_it_waits_for(connect: Connect, servers: list[PlayingServer]) -> None:
    remote = connect(*servers, deadlines=RemoteSettings(call_s=0.3))
    async with remote.session() as session:
        await session.reset("cats", "e")
        for server in servers:
            server.script = lambda _: Hang()
        with pytest.raises(DeadlineError, match=r"no answer to a step in 0\.3 s, on any server"):
            await session.step(action("ANSWER 2"))
    for server in servers:
        await asyncio.to_thread(server.wait_until, lambda server=server: server.sessions == 0)  # type: ignore[misc]


def test_a_call_ends_before_the_rollout_gives_it_up() -> None:
    rollout = RolloutSettings(TokenBudget(1, 1, 1))
    assert RemoteSettings().request_s < RemoteSettings().call_s < rollout.environment_timeout_s


async def test_an_episode_is_rebuilt_without_what_its_session_played_before(
    connect: Connect, servers: list[PlayingServer]
) -> None:
    async with connect(*servers).session() as session:
        await session.reset("cats", "e")
        await session.step(action("SAMPLE owners"))
        await session.reset("oldest", "f")
        first = in_use(servers)
        first.die()
        assert (await session.step(action("ANSWER Max"))).reward > 0
    (other,) = (server for server in servers if server is not first)
    assert [len(other.played(kind)) for kind in ("reset", "step")] == [1, 1]


def other_texts(pets: Dataset, folder: Path) -> Dataset:
    return replace(pets, questions=tuple(replace(q, text=q.text + "!") for q in pets.questions))


def other_rows(pets: Dataset, folder: Path) -> Dataset:
    file = Path(shutil.copy(pets.databases["pets"], folder))
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE owners SET city = 'Rome'")
    return replace(pets, databases={"pets": file})


@pytest.mark.parametrize(("changed", "step"), [(other_texts, 0), (other_rows, 1)])
async def test_servers_that_disagree_are_a_loud_error(
    connect: Connect,
    servers: list[PlayingServer],
    pets: Dataset,
    tmp_path: Path,
    changed: Callable[[Dataset, Path], Dataset],
    step: int,
) -> None:
    with running_server(changed(pets, tmp_path)) as liar:
        liar.served = servers[0].served
        remote = connect(servers[0], liar)
        async with remote.session() as session:
            await session.reset("cats", "e")
            await session.step(action("SAMPLE owners"))
            in_use([servers[0], liar]).die()
            with pytest.raises(DifferentObservationError, match=f"episode e was moved here, and step {step} shows"):
                await session.step(action("ANSWER 2"))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"fingerprint": "0", "name": "spider", "questions": 7},
            "it serves the data set spider with 7 questions, and this run plays pets with 4 questions; give both the "
            "same --data",
        ),
        ({"fingerprint": "0"}, "its data set pets with 4 questions differs from this run's in questions or databases"),
        (
            {"answer_mode": "sql", "fingerprint": "0"},
            "it plays with --answer_mode sql, and this run with value; start it with --answer_mode value, or give this "
            "run --answer_mode sql",
        ),
        ({"step_budget": 7}, "it plays with --step_budget 7, and this run with 15; start it with --step_budget 15"),
    ],
)
def test_a_server_that_serves_something_else_is_refused_at_the_start(
    connect: Connect, servers: list[PlayingServer], changes: dict[str, Any], complaint: str
) -> None:
    servers[1].served |= changes
    with pytest.raises(DifferentDataError) as refused:
        connect(*servers)
    assert f"environment server ws://127.0.0.1:{servers[1].port}: {complaint}" in str(refused.value)


async def test_a_server_that_comes_back_with_other_data_is_not_used(
    connect: Connect, servers: list[PlayingServer], expected: list[SQLObservation], caplog: pytest.LogCaptureFixture
) -> None:
    remote = connect(*servers)
    servers[0].die()
    servers[0].served = servers[0].served | {"step_budget": 3}
    servers[0].start()
    async with remote.session() as session:
        await session.reset("cats", "e")
        # The other one has less to do now, so it is tried first.
        for _ in range(4):
            assert await play(remote) == expected
    assert [len(server.played("reset")) for server in servers] == [0, 5]
    assert any("plays with --step_budget 3" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"step_budget": 3}, "it plays with --step_budget 3"),
        ({"answer_mode": "sql"}, "it plays with --answer_mode sql"),
        ({"fingerprint": "0"}, "give both the same --data"),
    ],
)
async def test_a_server_behind_the_same_address_that_serves_something_else_is_a_loud_error(
    connect: Connect,
    servers: list[PlayingServer],
    expected: list[SQLObservation],
    changes: dict[str, Any],
    why: str,
) -> None:
    remote = connect(servers[0])
    assert await play(remote) == expected
    servers[0].hang_up()
    servers[0].served = servers[0].served | changes
    with pytest.raises(DifferentDataError, match=why):
        await play(remote)
    await asyncio.to_thread(servers[0].wait_until, lambda: servers[0].sessions == 0)


def test_settings_and_mode_are_compared(pets: Dataset) -> None:
    settings, mode = EnvSettings(step_budget=3), AnswerMode.SQL
    with (
        running_server(pets, settings=settings, answer_mode=mode) as server,
        closing(RemoteEnvironments(server.url, pets, settings, mode)) as remote,
        remote.blocking() as session,
    ):
        assert session.reset(question_id="cats").budget_remaining == 3
        assert session.step(action("ANSWER SELECT COUNT(*) FROM pets WHERE species = 'cat'")).done


def test_servers_that_drain_or_are_gone_at_the_start(connect: Connect, servers: list[PlayingServer]) -> None:
    servers[0].die()
    servers[1].status = "draining"
    with pytest.raises(NoServerError, match=r"cannot be reached.*about to stop"):
        connect(*servers)
    with pytest.raises(ConnectionLostError, match="Is it running"):
        connect(servers[0])


async def test_mistakes_of_the_caller_are_typed_and_cost_nothing(
    connect: Connect, servers: list[PlayingServer]
) -> None:
    async with connect(servers[0]).session() as session:
        with pytest.raises(NoEpisodeError):
            await session.step(action("ANSWER 2"))
        with pytest.raises(RemoteActionError, match="no question 'dogs'"):
            await session.reset("dogs", "e")
        await session.reset("cats", "e")
        await session.step(action("ANSWER 2"))
        with pytest.raises(RemoteActionError, match="the episode is over"):
            await session.step(action("ANSWER 2"))
        await session.reset("oldest", "f")
    assert servers[0].opened == 1


async def test_a_cancelled_step_frees_its_session_at_once(connect: Connect, servers: list[PlayingServer]) -> None:
    remote = connect(servers[0])
    async with remote.session() as session:
        await session.reset("cats", "e")
        servers[0].script = lambda _: Hang()
        task = asyncio.create_task(session.step(action("ANSWER 2")))
        await asyncio.to_thread(servers[0].wait_until, lambda: bool(servers[0].played("step")))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.to_thread(servers[0].wait_until, lambda: servers[0].sessions == 0)
    servers[0].script = lambda _: None
    await play(remote)


async def test_more_episodes_than_the_servers_have_room_for_take_turns(
    connect: Connect, servers: list[PlayingServer], expected: list[SQLObservation]
) -> None:
    for server in servers:
        server.max_sessions = 2
    remote = connect(*servers)
    assert await asyncio.gather(*(play(remote) for _ in range(12))) == [expected] * 12


def test_without_async_an_episode_is_the_one_that_is_played_locally(
    connect: Connect, servers: list[PlayingServer], environment: SQLEnvironment
) -> None:
    expected = [environment.reset(question_id="cats"), *(environment.step(action(t)) for t in EPISODE)]
    with connect(*servers).blocking() as session:
        with pytest.raises(NoEpisodeError):
            session.state  # noqa: B018
        seen = [session.reset(question_id="cats")]
        for text in EPISODE:
            if len(seen) == 3:
                in_use(servers).die()
            seen.append(session.step(action(text)))
        assert seen == expected
        assert session.state == environment.state


def test_closing_is_final_and_may_be_repeated(connect: Connect, servers: list[PlayingServer]) -> None:
    remote = connect(*servers)
    remote.close()
    remote.close()
    with pytest.raises(RuntimeError, match="the loop is closed"), remote.blocking() as session:
        session.reset(question_id="cats")


def test_the_flag_chooses(pets: Dataset, servers: list[PlayingServer]) -> None:
    urls = ",".join(server.url for server in servers)
    for env, kind in (("local", LocalEnvironments), (urls, RemoteEnvironments)):
        with closing(open_environments(env, None, pets, EnvSettings(), AnswerMode.VALUE)) as chosen:
            assert type(chosen) is kind
