"""What the user names is found, or the answer says what to name instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from env_server.errors import SQLEnvError
from tests.trainer.report.folders import make_evaluation, make_file, make_records, make_run
from trainer.eval.run_files import RunFolderError
from trainer.policy import PlaySettings
from trainer.report.compare import find_side
from trainer.report.comparison import SideError

FEW, MANY = make_records([True, False, False, False]), make_records([True, True, True, False])


def test_a_run_is_its_evaluation_after_training_and_any_other_has_a_label(tmp_path: Path) -> None:
    config = {"grpo": {"learning_rate": 1e-4}}
    run = make_run(tmp_path / "run", {"before": FEW, "after": MANY, "step-000010": FEW}, config=config)
    after = find_side(str(run.path))
    assert (after.name, after.records, after.notes) == (f"{run.path}:after", MANY, ())
    assert after.evaluation is not None
    assert after.evaluation.label == "after"
    assert after.flags == {"learning_rate": 1e-4}
    for label in ("before", "after", "step-000010"):
        named = find_side(f"{run.path}:{label}")
        assert named.evaluation is not None
        assert named.evaluation.label == label
    for file in ("/before.json", "/before.episodes.jsonl"):
        assert find_side(f"{run.path}/evaluations{file}").name == f"{run.path}:before"


def test_a_run_that_is_not_done_is_its_latest_evaluation_and_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"before": FEW, "step-000020": MANY, "step-000010": FEW})
    side = find_side(str(run.path))
    assert side.records == MANY
    assert side.notes == (f"{run.path} has no evaluation after training yet; this is its latest, step-000020",)


def test_a_policy_that_was_chosen_by_these_questions_is_pointed_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {})
    run.write_evaluation(replace(make_evaluation("after", MANY), best_of=5), MANY)
    (note,) = find_side(str(run.path)).notes
    assert "chosen as the best of 5" in note


def test_what_was_played_is_known_from_the_file_beside_the_episodes_or_from_the_run(tmp_path: Path) -> None:
    side = find_side(str(make_file(tmp_path / "base.jsonl", FEW)))
    assert find_side(str(tmp_path / "base.evaluation.json")) == side
    assert side.evaluation is not None
    assert (side.evaluation.label, side.evaluation.data, side.settings["temperature"]) == ("base", "synthetic", 0.0)
    assert "seed" not in side.settings, "greedy play draws nothing"
    play = PlaySettings(step_budget=7)
    run = make_run(tmp_path / "run", {"random": FEW, "after": MANY}, play=play)
    settings = find_side(str(run.path)).settings
    assert (settings["step_budget"], settings["temperature"], settings["protocol"]) == (7, 0.0, "explore")
    assert find_side(f"{run.path}:random").settings == {"step_budget": 7, "seed": 0}
    checkpoint = tmp_path / "stopped" / "checkpoint-5"
    stopped = make_run(tmp_path / "stopped", {"before": FEW})
    assert find_side(f"{stopped.path}:before").settings == {}
    checkpoint.mkdir()
    play.save(checkpoint)
    assert find_side(f"{stopped.path}:before").settings["step_budget"] == 7


def test_a_file_of_episodes_alone_can_be_compared_and_says_what_is_not_known(tmp_path: Path) -> None:
    path = make_file(tmp_path / "base.jsonl", FEW)
    (tmp_path / "base.evaluation.json").unlink()
    side = find_side(str(path))
    assert (side.records, side.evaluation) == (FEW, None)
    assert "data, answer mode and settings are not known" in side.notes[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "there is no .*nothing; give a run's folder, RUN:LABEL"),
        ("nothing:before", "there is no .*nothing:before; give"),
        ("run:later", "has no evaluation 'later'; it has .*run:before, .*run:random"),
        ("run", "has no evaluation 'after'; it has .*run:before"),
        ("fresh", "it has none at all"),
        ("model", "holds no evaluation; .* sqlenv evaluate --policy .*model --episodes_out FILE.jsonl"),
        ("", "is a folder of several; name one: .*/fresh, .*/run$"),
        ("files", "is a folder of several; name one: .*/files/a.jsonl$"),
        ("run/episodes.jsonl", "are episodes of training, under many policies; give the run's folder, .*run$"),
    ],
)
def test_what_cannot_be_compared_is_refused_and_says_what_can(tmp_path: Path, name: str, message: str) -> None:
    make_run(tmp_path / "run", {"before": FEW, "random": FEW}, steps=1)
    make_run(tmp_path / "fresh", {})
    (tmp_path / "model").mkdir()
    (tmp_path / "files").mkdir()
    make_file(tmp_path / "files" / "a.jsonl", FEW)
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(SideError, match=message):
        find_side(f"{tmp_path}/{name}")


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = make_file(tmp_path / "base.jsonl", FEW)
    path.write_text('{"no": "episode"}\n')
    with pytest.raises(RunFolderError, match=r"base\.jsonl, line 1"):
        find_side(str(path))
    make_file(path, FEW)
    (tmp_path / "base.evaluation.json").write_text("{}")
    with pytest.raises(SQLEnvError, match=r"base\.evaluation\.json is not an evaluation"):
        find_side(str(path))
