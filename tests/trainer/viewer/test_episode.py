"""The parts of a reward that are shown add up to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.dataset import Dataset
from env_server.factory import EnvironmentFactory
from env_server.types import SQLAction
from tests.trainer.viewer.runs import played
from trainer.rollout.episodes import turn_of
from trainer.viewer.episode import episode_view


def test_the_total_grows_turn_by_turn_and_the_clip_is_a_part() -> None:
    record = played("a")
    view = episode_view(record)
    assert [turn["total"] for turn in view["turns"]] == pytest.approx([-0.02, 0.13, 1.11])
    assert view["turns"][1]["parts"]["clipped"] == pytest.approx(-0.01)
    assert view["turns"][-1]["total"] == pytest.approx(view["reward"])
    assert (view["kind"], view["why"]) == (None, "")


def test_why_it_failed_is_said() -> None:
    view = episode_view(played("a", "wrong"))
    assert (view["kind"], view["why"]) == ("right_rows", "saw the right rows, answered wrongly")


ACTIONS = st.lists(
    st.sampled_from(
        [
            ("DESCRIBE", "owners"),
            ("SAMPLE", "owners"),
            ("QUERY", "SELECT COUNT(*) FROM owners"),
            ("QUERY", "SELECT * FROM pets"),
            ("QUERY", "SELEC"),
            ("ANSWER", "3"),
        ]
    ),
    min_size=1,
    max_size=8,
)


@given(actions=ACTIONS, place=st.integers(0, 3))
def test_the_parts_of_every_step_add_up(pets: Dataset, actions: list[tuple[str, str]], place: int) -> None:
    with EnvironmentFactory(pets) as factory:
        environment = factory.make()
        environment.reset(question_id=pets.questions[place % len(pets.questions)].question_id)
        for kind, argument in actions:
            action = SQLAction(action_type=kind, argument=argument)
            observation = environment.step(action)
            reward = turn_of(argument, action, observation).reward
            assert sum(reward.parts.values()) == pytest.approx(reward.total, abs=1e-6)
            if observation.done:
                break
