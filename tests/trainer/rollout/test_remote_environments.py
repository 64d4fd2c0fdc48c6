"""Remote environments: the same episodes as locally, whatever happens to the servers meanwhile."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Qwen3ForCausalLM

from env_server.client.errors import (
    AddressError,
    AuthenticationError,
    ConnectionLostError,
    DeadlineError,
    NoServerError,
    RemoteActionError,
)
from env_server.dataset import Dataset
from env_server.environment import SQLEnvironment
from env_server.errors import NoEpisodeError
from env_server.settings import EnvSettings
from env_server.types import AnswerMode, SQLAction, SQLObservation
from inference.hf.engine import HFEngine
from tests.env_server.conftest import RunningServer
from tests.env_server.serving import Close, Deed, Die, Hang, PlayingServer, error_frame, running_server
from trainer.chat.prompts import ChatRenderer
from trainer.rollout.client import EpisodeRequest, RolloutClient, RolloutSettings, derive_seed
from trainer.rollout.environments import Environments, LocalEnvironments, open_environments
from trainer.rollout.episodes import Episode, Outcome
from trainer.rollout.remote_environments import (
    DifferentDataError,
    DifferentObservationError,
    RemoteEnvironments,
    RemoteSettings,
)
from trainer.rollout.transcript import TokenBudget
from trainer.tiny.tokenizer import build_tokenizer

EPISODE = (
    "DESCRIBE pets",
    "SAMPLE owners",
    "QUERY SELECT nothing",
    "QUERY SELECT COUNT(*) FROM pets WHERE species = 'cat'",
    "DANCE",
    "ANSWER 2",
)
QUESTIONS = ("cats", "oldest", "oslo", "species")


def action(text: str) -> SQLAction:
    kind, _, argument = text.partition(" ")
    return SQLAction(action_type=kind, argument=argument)


@pytest.fixture(autouse=True)
def short_backoffs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on how long a backoff is; the tests need not wait for it."""
    monkeypatch.setattr("env_server.client.servers.FIRST_BACKOFF_S", 0.002)
    monkeypatch.setattr("env_server.client.servers.LONGEST_BACKOFF_S", 0.1)


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


@pytest.fixture
def expected(environment: SQLEnvironment) -> list[SQLObservation]:
    return [environment.reset(question_id="cats", episode_id="e"), *(environment.step(action(t)) for t in EPISODE)]


async def test_an_episode_is_the_one_that_is_played_locally(
    connect: Connect, servers: list[PlayingServer], expected: list[SQLObservation]
) -> None:
    assert await play(connect(*servers)) == expected


async def test_an_episode_on_the_service(pets: Dataset, tmp_path: Path, expected: list[SQLObservation]) -> None:
    from env_server.service.settings import ServiceSettings

    given = ServiceSettings(token="geheim", cache_dir=tmp_path, messages_per_s=0)  # type: ignore[arg-type]
    running = RunningServer(given, pets)
    try:
        with closing(RemoteEnvironments(running.ws, pets, token="geheim")) as remote:
            assert await play(remote) == expected
            with pytest.raises(AuthenticationError, match="SQLENV_TOKEN"):
                RemoteEnvironments(running.ws, pets)
    finally:
        running.stop()


def test_sockets_outlive_episodes_and_loops(connect: Connect, servers: list[PlayingServer]) -> None:
    remote = connect(*servers)

    async def play_four() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(play(remote))

    for _ in range(3):
        asyncio.run(play_four())
    assert sum(server.opened for server in servers) <= 4
    assert [len(server.played("reset")) for server in servers] == [6, 6]
    remote.close()
    for server in servers:
        server.wait_until(lambda server=server: server.sessions == 0)  # type: ignore[misc]


@pytest.mark.parametrize("moment", range(len(EPISODE) + 1))
async def test_an_episode_survives_the_death_of_its_server_at_any_moment(
    connect: Connect, servers: list[PlayingServer], expected: list[SQLObservation], moment: int
) -> None:
    def kill(number: int) -> None:
        if number == moment:
            (used,) = [server for server in servers if server.sessions] or servers[:1]
            used.die()

    remote = connect(*servers)
    assert await play(remote, kill) == expected
    replayed = min(len(server.requests) for server in servers)
    assert sum(len(server.requests) for server in servers) == len(EPISODE) + 1 + replayed


DEEDS: list[Deed] = [Close(1000), Close(1012), Die(), error_frame("SESSION_ERROR"), error_frame("CAPACITY_REACHED")]


@pytest.mark.parametrize("deed", DEEDS, ids=str)
@pytest.mark.parametrize("kind", ["reset", "step"])
async def test_an_episode_survives_every_way_in_which_a_server_can_fail(
    connect: Connect, servers: list[PlayingServer], expected: list[SQLObservation], deed: Deed, kind: str
) -> None:
    failed: list[PlayingServer] = []

    def fail(number: int) -> None:
        for server in servers:
            server.script = lambda request, server=server: (  # type: ignore[misc]
                failed.append(server) or deed if request["type"] == kind and not failed else None  # type: ignore[func-returns-value]
            )

    assert await play(connect(*servers), lambda number: fail(number) if number == 0 else None) == expected
    assert len(failed) == 1


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from(DEEDS[:2] + DEEDS[3:])), max_size=3))
def test_any_three_failures_leave_the_episode_as_it_is(
    pets: Dataset, expected: list[SQLObservation], failures: list[tuple[int, Deed]]
) -> None:
    due = dict(failures)
    with ExitStack() as stack:
        servers = [stack.enter_context(running_server(pets)) for _ in range(2)]
        for server in servers:
            server.script = lambda _: due.pop(sum(len(server.requests) for server in servers) - 1, None)
        remote = stack.enter_context(closing(RemoteEnvironments([server.url for server in servers], pets)))
        assert asyncio.run(play(remote)) == expected


async def test_a_server_that_does_not_answer_is_left_in_time(
    connect: Connect, servers: list[PlayingServer], expected: list[SQLObservation]
) -> None:
    remote = connect(*servers, deadlines=RemoteSettings(request_s=0.2))

    def hang(number: int) -> None:
        if number == 3:
            (used,) = [server for server in servers if server.sessions]
            used.script = lambda _: Hang()

    assert await play(remote, hang) == expected


async def test_a_call_that_cannot_be_made_anywhere_ends_with_a_reason(
    connect: Connect, servers: list[PlayingServer]
) -> None:
    remote = connect(*servers, deadlines=RemoteSettings(call_s=2.0))
    async with remote.session() as session:
        await session.reset("cats", "e")
        for server in servers:
            server.die()
        with pytest.raises(NoServerError, match=r"no session in [\d.]+ s \(.*cannot be reached.*;.*\)"):
            await session.step(action("ANSWER 2"))
        servers[0].start()
        assert (await session.reset("cats", "e")).step_count == 0


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


async def test_servers_that_disagree_are_a_loud_error(
    connect: Connect, servers: list[PlayingServer], pets: Dataset
) -> None:
    others = replace(pets, questions=tuple(replace(q, text=q.text + "!") for q in pets.questions))
    with running_server(others) as liar:
        liar.served = servers[0].served
        remote = connect(servers[0], liar)
        async with remote.session() as session:
            await session.reset("cats", "e")
            used = liar if liar.sessions else servers[0]
            used.die()
            with pytest.raises(DifferentObservationError, match="episode e was moved here, and step 0 shows something"):
                await session.step(action("ANSWER 2"))


def wrong_server(pets: Dataset, **changes: Any) -> PlayingServer:
    server = PlayingServer(pets)
    server.served |= changes
    return server


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"fingerprint": "0", "name": "spider", "questions": 7},
            "it serves the data set spider with 7 questions, and this run plays pets with 4 questions; give both the "
            "same --data",
        ),
        ({"fingerprint": "0"}, "its data set pets with 4 questions differs from this run's in questions or databases"),
        ({"answer_mode": "sql"}, "it plays with --answer_mode sql, and this run with value; give both the same"),
        ({"step_budget": 7}, "it plays with --step_budget 7, and this run with 15; give both the same"),
    ],
)
def test_a_server_that_serves_something_else_is_refused_at_the_start(
    pets: Dataset, servers: list[PlayingServer], changes: dict[str, Any], complaint: str
) -> None:
    with closing(_Stopping(wrong_server(pets, **changes))) as wrong, pytest.raises(DifferentDataError) as refused:
        RemoteEnvironments([servers[0].url, wrong.server.url], pets)
    assert f"environment server ws://127.0.0.1:{wrong.server.port}: {complaint}" in str(refused.value)


class _Stopping:
    def __init__(self, server: PlayingServer) -> None:
        self.server = server

    def close(self) -> None:
        self.server.stop()


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


def test_settings_and_mode_are_compared(pets: Dataset) -> None:
    settings, mode = EnvSettings(step_budget=3), AnswerMode.SQL
    with (
        running_server(pets, settings=settings, answer_mode=mode) as server,
        closing(RemoteEnvironments(server.url, pets, settings, mode)) as remote,
        remote.blocking() as session,
    ):
        assert session.reset(question_id="cats").budget_remaining == 3
        assert session.step(action("ANSWER SELECT COUNT(*) FROM pets WHERE species = 'cat'")).done


def test_no_server_at_the_start(pets: Dataset, servers: list[PlayingServer]) -> None:
    for server in servers:
        server.die()
    with pytest.raises(NoServerError, match="no session at the first attempt"):
        RemoteEnvironments([server.url for server in servers], pets)
    with pytest.raises(ConnectionLostError, match="Is it running"):
        RemoteEnvironments(servers[0].url, pets)
    with pytest.raises(AddressError):
        RemoteEnvironments("somewhere", pets)


async def test_one_server_that_is_down_at_the_start_is_said_and_used_later(
    connect: Connect, servers: list[PlayingServer], caplog: pytest.LogCaptureFixture
) -> None:
    servers[0].die()
    remote = connect(*servers)
    await play(remote)
    servers[0].start()
    while not servers[0].played("reset"):
        async with remote.session() as busy:
            await busy.reset("cats", "e")
            await play(remote)
    said = [record.getMessage() for record in caplog.records if record.name == "trainer.rollout.remote_environments"]
    assert len(said) == 2
    assert f":{servers[0].port}: it cannot be reached" in said[0]
    assert said[1].endswith("it takes sessions again")


async def test_a_failing_server_is_said_once_and_not_per_episode(
    connect: Connect, servers: list[PlayingServer], caplog: pytest.LogCaptureFixture
) -> None:
    remote = connect(*servers)

    async def play_on(barrier: asyncio.Barrier) -> None:
        async with remote.session() as session:
            await session.reset("cats", "e")
            await barrier.wait()
            await barrier.wait()
            for text in EPISODE:
                await session.step(action(text))

    barrier = asyncio.Barrier(11)
    async with asyncio.TaskGroup() as group:
        for _ in range(10):
            group.create_task(play_on(barrier))
        await barrier.wait()
        assert min(server.sessions for server in servers) == 5
        servers[1].die()
        await barrier.wait()
    said = [record for record in caplog.records if record.name == "trainer.rollout.remote_environments"]
    assert len(said) == 1
    assert said[0].levelno == logging.WARNING
    assert "\n" not in said[0].getMessage()
    assert len(servers[0].played("reset")) == 10, "five were rebuilt here"


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
                (used,) = [server for server in servers if server.sessions]
                used.die()
            seen.append(session.step(action(text)))
        assert seen == expected
        assert session.state == environment.state


def test_closing_is_final_and_may_be_repeated(connect: Connect, servers: list[PlayingServer]) -> None:
    remote = connect(*servers)
    asyncio.run(play(remote))
    remote.close()
    remote.close()
    with pytest.raises(RuntimeError, match="the loop is closed"), remote.blocking() as session:
        session.reset(question_id="cats")


def test_the_flag_chooses(pets: Dataset, servers: list[PlayingServer]) -> None:
    urls = ",".join(server.url for server in servers)
    for env, kind in (("local", LocalEnvironments), (urls, RemoteEnvironments)):
        with closing(open_environments(env, None, pets, EnvSettings(), AnswerMode.VALUE)) as chosen:
            assert type(chosen) is kind


@pytest.mark.parametrize("killed", [False, True])
def test_rollouts_are_the_same_as_locally_also_when_a_server_dies(
    pets: Dataset, random_policy: Callable[..., Qwen3ForCausalLM], killed: bool
) -> None:
    tokenizer = build_tokenizer(["How many cats dogs are there pets owners name species Max Rex Oslo"])
    renderer = ChatRenderer(tokenizer)
    liked = {"<end>": 5.0, "pets": 4.0, "owners": 4.0, "DESCRIBE ": 4.5, "SAMPLE ": 4.5, "QUERY ": 3.5, "ANSWER ": 2.5}
    model = random_policy(tokenizer, seed=5, context=4_096, liked=liked)
    budget = TokenBudget(max_completion=1_000, max_context=4_096, max_turn=8)
    requests = [EpisodeRequest(QUESTIONS[i % 4], derive_seed(0, i), "pets", "easy", "test") for i in range(8)]
    short = EnvSettings(step_budget=6)

    async def roll(environments: Environments) -> list[Episode]:
        # A linger that no test sits out: each batch holds every open session, whatever the timing.
        engine = HFEngine(model, stop_ids=renderer.stop_ids, pad_id=0, linger_s=1e6)
        episodes = await RolloutClient(engine, environments, renderer, RolloutSettings(budget)).play(requests)
        await engine.aclose()
        return episodes

    with closing(LocalEnvironments(pets, short)) as local:
        expected = asyncio.run(roll(local))
    with ExitStack() as stack:
        servers = [stack.enter_context(running_server(pets, settings=short)) for _ in range(2)]
        if killed:
            servers[1].script = lambda _: Die() if len(servers[1].played("step")) == 10 else None
        remote = RemoteEnvironments([server.url for server in servers], pets, short)
        stack.callback(remote.close)
        assert asyncio.run(roll(remote)) == expected
        assert servers[1].listening is not killed
    assert Outcome.FAILED not in {episode.outcome for episode in expected}
    assert sum(len(episode.turns) for episode in expected) > 24, "long enough for a server to die in"
