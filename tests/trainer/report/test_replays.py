"""Episodes turn by turn, and which of them a report shows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.dataset import Dataset
from env_server.environment import EnvironmentFactory
from env_server.types import SQLAction
from tests.trainer.records import make_record
from tests.trainer.viewer.runs import played as shown_episode
from trainer.eval.run_files import RunFolderError
from trainer.report.replays import episode_view, replays
from trainer.rollout.episodes import EpisodeRecord, turn_of

KINDS = ("easy", "medium", "hard", "extra")
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


def played(index: int, won: bool, turns: list[dict[str, Any]] | None = None) -> EpisodeRecord:
    kind = {"hardness": KINDS[index % 4], "family": f"family{index % 3}"}
    return make_record(f"q{index}", "correct" if won else "wrong", f"db{index % 6}", turns=turns or [], **kind)


def test_replays_show_gains_a_loss_and_a_standstill() -> None:
    before = [played(i, i == 0) for i in range(10)]
    after = [played(i, i > 1) for i in range(10)]
    shown = replays(before, after)
    assert [reason for reason, _ in shown] == [
        *["Wrong before, right after"] * 4,
        "Right before, wrong after",
        "Wrong before and after",
        *["Drawn at random"] * 2,
    ]
    outcomes = [[side.outcome == "correct" for side in pair] for _, pair in shown[:6]]
    assert outcomes == [[False, True]] * 4 + [[True, False], [False, False]]
    assert len({pair[0].question for _, pair in shown}) == 8
    assert replays(before, after) == shown
    assert len(replays(before[:1], after[:1])) == 1


def test_gains_that_are_shown_differ_in_kind() -> None:
    indices = (0, 12, 24, 1, 2, 36)
    shown = replays([played(i, False) for i in indices], [played(i, True) for i in indices])
    assert len({pair[0].family for _, pair in shown[:3]}) == 3


def test_the_total_grows_turn_by_turn_and_the_clip_is_a_part() -> None:
    view = episode_view(shown_episode("a"))
    assert [turn["total"] for turn in view["turns"]] == pytest.approx([-0.02, 0.13, 1.11])
    assert view["turns"][1]["parts"]["clipped"] == pytest.approx(-0.01)
    assert view["turns"][-1]["total"] == pytest.approx(view["reward"])
    assert (view["kind"], view["why"]) == (None, "")
    failed = episode_view(shown_episode("a", "wrong"))
    assert (failed["kind"], failed["why"]) == ("right_rows", "saw the right rows, answered wrongly")


def test_a_malformed_turn_is_an_error_that_names_the_episode() -> None:
    with pytest.raises(RunFolderError, match="episode episode-q3: a turn cannot be read"):
        episode_view(played(3, True, [{"text": 1}]))


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
