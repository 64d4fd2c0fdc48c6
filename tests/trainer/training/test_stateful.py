"""What a run has learnt beside its weights is in its checkpoints, and a run that resumes goes on from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.config import ConfigError
from trainer.training.reward_weights import AdaptiveWeights
from trainer.training.stateful import Saved, SaveStates


def test_a_checkpoint_keeps_it_and_its_absence_is_an_error(tmp_path: Path) -> None:
    weights = AdaptiveWeights((1.0, 0.3))
    weights.observe(0, [[(0.0, 0.0), (1.0, 0.3), (0.0, 0.2), (1.0, 0.3)]])
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    args: Any = SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint=str(folder))
    state: Any = SimpleNamespace(global_step=1, is_world_process_zero=True)
    control: Any = None

    def saved(stateful: Any) -> SaveStates:
        return SaveStates(Saved(stateful, "state.json", "--reward_weighting adaptive"))

    other_rank: Any = SimpleNamespace(global_step=1, is_world_process_zero=False)
    saved(weights).on_save(args, other_rank, control)
    assert not list(folder.iterdir())
    saved(weights).on_save(args, state, control)
    resumed = AdaptiveWeights((1.0, 0.3))
    saved(resumed).on_train_begin(args, state, control)
    assert resumed.of(1) == weights.of(1) != (1.0, 0.3)
    assert resumed.state_dict() == weights.state_dict()
    (folder / "state.json").unlink()
    with pytest.raises(ConfigError, match=r"state.json is missing: .* without --reward_weighting adaptive"):
        saved(resumed).on_train_begin(args, state, control)
