"""The constants of the environment: what is no sensible value is refused where it is written."""

from __future__ import annotations

import pickle

import pytest

from env_server.settings import DisplaySettings, EnvSettings, RewardSettings, SandboxSettings


@pytest.mark.parametrize("wrong", [0, -1])
@pytest.mark.parametrize("name", ["vm_steps", "deadline_s", "sql_bytes", "value_bytes", "heap_bytes"])
def test_a_bound_is_above_nothing(name: str, wrong: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be greater than 0, not {wrong}"):
        SandboxSettings(**{name: wrong})


@pytest.mark.parametrize("wrong", ["15", None, True, 1.5])
def test_a_count_is_an_integer(wrong: object) -> None:
    with pytest.raises(TypeError, match="step_budget must be of type int, not "):
        EnvSettings(step_budget=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="max_rows must be of type int"):
        DisplaySettings(max_rows=wrong)  # type: ignore[arg-type]


def test_seconds_may_be_whole() -> None:
    assert SandboxSettings(deadline_s=2).deadline_s == 2


def test_a_misspelt_name_is_not_ignored() -> None:
    with pytest.raises(TypeError, match="step_bugdet"):
        EnvSettings(step_bugdet=3)  # type: ignore[call-arg]


def test_the_clip_is_an_interval() -> None:
    with pytest.raises(ValueError, match=r"clip_low \(1\) must not exceed clip_high \(0\)"):
        RewardSettings(clip_low=1, clip_high=0)


def test_they_cannot_be_changed_and_go_through_a_pipe() -> None:
    settings = EnvSettings(sandbox=SandboxSettings(vm_steps=7))
    with pytest.raises(AttributeError):
        settings.step_budget = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(settings)) == settings
