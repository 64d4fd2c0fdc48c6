"""Calibration finds again what a rehearsal was played on, from what a real run leaves behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inference.simulated.profile import ServerProfile
from tests.trainer.simulation.conftest import BUDGET, SERVER
from trainer.chat.format import ChatFormat
from trainer.results.run_files import RunFolder
from trainer.rollout.episodes import record
from trainer.rollout.timings import Part, split
from trainer.simulation.calibration import CalibrationError, fitted_environments, fitted_server, generated, scaled
from trainer.simulation.environments import EnvironmentProfile
from trainer.simulation.figures import figures
from trainer.simulation.like import PastRun, calibrated
from trainer.simulation.rehearsal import Deployment, Load, Played, rehearse
from trainer.simulation.scripts import Lengths, made_up

LENGTHS = Lengths(turns=4, turn_tokens=20, reply_tokens=40, question_tokens=30, spread=0.6)
TRUE = replace(SERVER, max_sequences=64)


def played(chat: ChatFormat, server: ServerProfile, concurrency: int, episodes: int = 120) -> Played:
    load = Load(made_up(chat, LENGTHS, 64, concurrency, 15), episodes, BUDGET)
    return rehearse(chat, load, Deployment(server, max_concurrency=concurrency), counts_work=False)


def test_a_server_is_found_again_and_predicts_what_was_not_measured(chat: ChatFormat) -> None:
    batches = [generated(played(chat, TRUE, concurrency).episodes) for concurrency in (1, 4, 12)]
    found = fitted_server(batches, TRUE.max_sequences)
    assert found.step_s == pytest.approx(TRUE.step_s, rel=0.1)
    assert found.step_s_per_sequence == pytest.approx(TRUE.step_s_per_sequence, rel=0.25)
    truth, guess = (figures(played(chat, server, 48, 400)) for server in (TRUE, found))
    assert guess.seconds == pytest.approx(truth.seconds, rel=0.1)
    assert guess.episode_s.p95 == pytest.approx(truth.episode_s.p95, rel=0.15)


def test_environments_are_found_again(chat: ChatFormat) -> None:
    found = fitted_environments(played(chat, TRUE, 1).episodes, EnvironmentProfile(workers=4))
    assert found.call_s == pytest.approx(0.005 + 0.001, rel=0.15)
    assert found.spread > 0.5


def test_what_is_too_little_is_an_error(chat: ChatFormat) -> None:
    with pytest.raises(CalibrationError, match="too few"):
        fitted_server([generated(played(chat, TRUE, 1, 1).episodes)], 8)
    with pytest.raises(CalibrationError, match="no call"):
        fitted_environments([], EnvironmentProfile())


@pytest.mark.parametrize("has_split", [True, False])
def test_a_run_is_rehearsed_at_its_own_speed(chat: ChatFormat, tmp_path: Path, has_split: bool) -> None:
    """Of a run on servers three times as slow as the preset, as its folder tells of it."""
    slow = Deployment(scaled(TRUE, 3.0), max_concurrency=16)
    run = RunFolder.create(tmp_path / "run", {"sqlenv": {"max_concurrency": 16}, "grpo": {"max_completion_length": 9}})
    with run.metrics_writer() as metrics, run.episodes_writer() as episodes:
        for step in range(1, 7):
            one = rehearse(chat, Load(made_up(chat, LENGTHS, 32, step, 15), 32, BUDGET), slow, counts_work=False)
            for episode in one.episodes:
                episodes.write_episode(step, record(episode))
            row = {"step": step, "rollout/seconds": one.seconds}
            if has_split:
                parts = split(e.timing for e in one.episodes if e.timing)
                row |= {f"time/{part}": parts[part] for part in Part}
            metrics.write(row)
    past = PastRun.read(tmp_path / "run")
    assert (past.batch, len(past.scripts), past.setting("max_concurrency", 0)) == (32, 4 * 32, 16)
    assert past.setting("max_completion_length", 0) == 9
    fitted = calibrated(past, chat, BUDGET, Deployment(TRUE, max_concurrency=16))
    assert fitted.server.step_s == pytest.approx(3 * TRUE.step_s, rel=0.15)
    again = rehearse(chat, Load(past.scripts, 128, BUDGET), replace(fitted, batch=32), counts_work=False)
    assert again.seconds / 4 == pytest.approx(past.rollout_s, rel=0.1)


def test_a_run_without_episodes_is_an_error(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", {})
    with pytest.raises(CalibrationError, match="no step"):
        PastRun.read(tmp_path / "run")
