"""Which episodes a report shows, and how."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from env_server.types import RewardComponents
from tests.trainer.records import make_record
from trainer.eval.run_files import RunFolderError
from trainer.report.replays import TEXT_LIMIT, components, cut, episode_view, replays, varied
from trainer.rollout.episodes import EpisodeRecord, Turn

KINDS = ("easy", "medium", "hard", "extra")


def played(index: int, won: bool, turns: list[dict[str, Any]] | None = None) -> EpisodeRecord:
    reward = RewardComponents(step_cost=-0.02, operational=-0.02, terminal=float(won), total=won - 0.02)
    turn = asdict(Turn("ANSWER 17", "ANSWER", "17", True, "17", "", reward)) | {"reward": reward.model_dump()}
    kind = {"hardness": KINDS[index % 4], "family": f"family{index % 3}"}
    shown = [turn] if turns is None else turns
    return make_record(f"q{index}", "correct" if won else "wrong", f"db{index % 6}", turns=shown, **kind)


def test_replays_show_gains_a_loss_and_a_standstill() -> None:
    before = [played(i, i == 0) for i in range(10)]
    after = [played(i, i > 1) for i in range(10)]
    shown = replays(before, after)
    assert [r.kind for r in shown] == [
        *["Wrong before, right after"] * 4,
        "Right before, wrong after",
        "Wrong before and after",
        *["Drawn at random"] * 2,
    ]
    chosen = [[False, True]] * 4 + [[True, False], [False, False]]
    assert [[side.correct for side in r.sides] for r in shown[:6]] == chosen
    assert len({r.question for r in shown}) == 8
    assert replays(before, after) == shown
    assert replays(before[:1], after[:1])[1:] == []


def test_chosen_pairs_differ_in_kind() -> None:
    pairs = [(played(i, False), played(i, True)) for i in (0, 12, 24, 1, 2, 36)]
    chosen = varied(pairs, 3)
    assert len({b.family for b, _ in chosen}) == 3
    assert varied(pairs, 99) == varied(pairs, 99)
    assert len(varied(pairs, 99)) == 6


def test_long_texts_are_cut_and_marked() -> None:
    assert cut("a" * TEXT_LIMIT) == "a" * TEXT_LIMIT
    assert cut("abcdef", 4) == "abcd ... (2 more characters)"


def test_components_name_what_is_not_zero() -> None:
    reward = RewardComponents(step_cost=-0.02, success=0.02, new_information=0.01, progress=0.15, total=0.15)
    assert components(reward) == "step cost -0.02, success +0.02, new information +0.01, progress +0.15, clipped -0.01"


def test_a_turn_that_is_none_is_an_error_that_names_the_episode() -> None:
    with pytest.raises(RunFolderError, match="episode episode-q3: a turn cannot be read"):
        episode_view("before", played(3, True, [{"text": 1}]))
