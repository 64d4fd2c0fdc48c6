"""The comparison of one stage with several: as many steps on both sides, paired by question and seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.server_process import ROOT
from benchmarks.stages import CONFIG, SIDES, pooled, staged
from tests.trainer.records import make_record
from trainer.stages import read_stages

TINY = yaml.safe_load((ROOT / CONFIG).read_text(encoding="utf-8"))


@given(steps=st.integers(3, 200), side=st.sampled_from(sorted(SIDES)))
def test_both_sides_train_for_as_many_steps(steps: int, side: str) -> None:
    config = staged(TINY, SIDES[side], steps)
    stages = read_stages(config, ["--seed", "1"], Path("runs/x"))
    assert sum(int(stage.settings["max_steps"]) for stage in stages) == steps
    assert all(int(stage.settings["max_steps"]) > 0 for stage in stages)
    assert stages[-1].settings["eval_episodes"] == str(TINY["eval_episodes"])


def test_a_question_is_paired_with_itself_under_each_seed() -> None:
    won = [make_record("a", "correct", "x"), make_record("b", "correct", "y")]
    lost = [make_record("a", "wrong", "x"), make_record("b", "failed", "y")]
    both = pooled({1: (lost, won), 2: (won, lost)})
    assert (both.n, both.mean, both.clusters) == (2, 0.0, 1), "what failed on one side is no pair"
    assert pooled({1: (lost, won)}).mean == 1.0
    with pytest.raises(ValueError, match="no judged question in common"):
        pooled({1: (won[:1], lost[1:])})
