"""Rehearsals: complete, repeatable, without leaks at thousands of episodes, and with the right figures."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace

import pytest

from env_server.dataset import Dataset
from env_server.types import AnswerMode
from inference.simulated.profile import Faults, ServerProfile
from tests.trainer.simulation.conftest import BUDGET, SERVER
from trainer.chat.format import ChatFormat
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.episodes import Episode, Outcome
from trainer.simulation.environments import EnvironmentProfile
from trainer.simulation.figures import Figures, Quantiles, figures
from trainer.simulation.rehearsal import Deployment, Load, Played, rehearse
from trainer.simulation.scripts import Lengths, made_up, played_by_the_oracle
from trainer.simulation.sizing import SizingError, planned

SHORT = Lengths(turns=3, turn_tokens=10, reply_tokens=15, question_tokens=12)
DEPLOYMENT = Deployment(SERVER, environments=EnvironmentProfile(servers=2, workers=4), max_concurrency=32)


@pytest.fixture(scope="module")
def load(chat: ChatFormat) -> Load:
    return Load(made_up(chat, SHORT, 64, seed=0, max_turns=15), 200, BUDGET)


def ideal(chat: ChatFormat, load: Load, deployment: Deployment = DEPLOYMENT) -> Played:
    return rehearse(chat, load, deployment, counts_work=False)


def said(played: Played) -> list[list[str]]:
    return [[turn.text for turn in episode.turns] for episode in played.episodes]


def test_every_episode_is_played_as_its_script_says(chat: ChatFormat, load: Load) -> None:
    played = ideal(chat, load)
    assert all(episode.outcome is Outcome.CORRECT for episode in played.episodes)
    assert said(played) == [[t.text for t in load.scripts[n % 64].turns] for n in range(load.episodes)]


def test_a_rehearsal_is_the_same_again_to_the_last_bit(chat: ChatFormat, load: Load) -> None:
    first, second = ideal(chat, load), ideal(chat, load)
    assert first.seconds == second.seconds
    assert [e.timing for e in first.episodes] == [e.timing for e in second.episodes]
    assert first.episodes == second.episodes


def test_failures_cost_time_and_change_no_episode(chat: ChatFormat, load: Load) -> None:
    faults = Faults(request_share=0.1, mean_uptime_s=2.0, restart_s=1.0)
    environments = replace(DEPLOYMENT.environments, failure_share=0.1)
    calm = ideal(chat, load, replace(DEPLOYMENT, replicas=2))
    troubled = ideal(chat, load, replace(DEPLOYMENT, replicas=2, faults=faults, environments=environments))
    assert troubled.episodes == calm.episodes
    assert troubled.seconds > calm.seconds


def test_batches_wait_for_their_last_episode(chat: ChatFormat, load: Load) -> None:
    flowing, batches = ideal(chat, load), ideal(chat, load, replace(DEPLOYMENT, batch=32))
    assert said(batches) == said(flowing), "each batch goes on with the scripts where the last one ended"
    assert batches.seconds > flowing.seconds
    assert figures(batches).first in ("tail", "engine")
    firsts = [batches.episodes[first : first + 32] for first in range(0, 200, 32)]
    ends = [max(e.timing.ended for e in batch if e.timing) for batch in firsts]
    starts = [min(e.timing.asked for e in batch if e.timing) for batch in firsts]
    assert all(start >= end for start, end in zip(starts[1:], ends, strict=False))


def test_two_thousand_episodes_in_flight_leave_nothing_behind(chat: ChatFormat, load: Load) -> None:
    """And take what the queue says: the last request ends when the servers have done all the work."""
    many = replace(load, episodes=2_000)
    deployment = Deployment(
        replace(SERVER, max_sequences=500), 4, EnvironmentProfile(servers=8, workers=16), max_concurrency=2_000
    )
    left: list[int] = []

    def count(_: Episode) -> None:
        left.append(len(asyncio.all_tasks()))

    played = rehearse(chat, many, deployment, counts_work=False, on_episode=count)
    found = figures(played)
    assert (found.episodes, found.failed) == (2_000, 0)
    assert left[0] >= 2_000
    assert left[-1] <= 3, "the last episode, whoever waits for it, and the probe"
    assert found.used["engine"] <= 1.0 + 1e-9
    assert sum(usage.jobs for usage in played.usage) == sum(len(episode.turns) for episode in played.episodes)


def test_real_environments_play_on_an_ordinary_clock(chat: ChatFormat, pets: Dataset) -> None:
    scripts = played_by_the_oracle(pets, pets.questions, AnswerMode.VALUE)
    quick = Deployment(ServerProfile(16, 1e-4, 0.0, 1e6), max_concurrency=8)
    with closing(LocalEnvironments(pets)) as environments:
        played = rehearse(chat, Load(scripts, 16, BUDGET), quick, environments)
    assert all(episode.outcome is Outcome.CORRECT for episode in played.episodes)
    assert "environments" not in figures(played).used


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"max_concurrency": 2}, "concurrency"),
        ({"max_concurrency": 64}, "engine"),
        ({"environments": EnvironmentProfile(workers=1, call_s=0.2, spread=0.0)}, "environments"),
        ({"server": replace(SERVER, request_s=0.1)}, "front end"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_used_up_first_is_named(chat: ChatFormat, load: Load, change: dict[str, object], first: str) -> None:
    found = figures(ideal(chat, load, replace(DEPLOYMENT, **change)))  # type: ignore[arg-type]
    assert found.first == first


def test_quantiles() -> None:
    assert Quantiles.of(float(number) for number in range(1, 101)) == Quantiles(50.5, 50.0, 95.0, 99.0, 100.0)
    assert Quantiles.of([]) == Quantiles(0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.fixture
def shown(chat: ChatFormat, load: Load) -> Figures:
    return figures(ideal(chat, load))


def test_a_plan_meets_its_target_as_rehearsed(chat: ChatFormat, load: Load, shown: Figures) -> None:
    def again(deployment: Deployment) -> Figures:
        return figures(ideal(chat, replace(load, episodes=400), deployment))

    target = 3 * shown.steady_episodes_per_second
    plan = planned(target, DEPLOYMENT, shown, again)
    assert plan.figures.steady_episodes_per_second >= target
    assert plan.deployment.replicas > 1
    assert plan.figures.episode_s == again(plan.deployment).episode_s


def test_a_target_that_no_deployment_meets_is_an_error(shown: Figures) -> None:
    with pytest.raises(SizingError, match="12 rounds"):
        planned(1e6, DEPLOYMENT, shown, lambda _: shown)
