"""What is named is found, keeps its name, and comes and goes with its files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.trainer.viewer.runs import evaluate, evaluate_alone, make_run, played, train
from trainer.viewer.sources import TRAINING, SourceError, Sources


def names(sources: Sources) -> list[str]:
    return [source.name for source in sources.look()]


def test_a_run_a_folder_of_runs_stages_and_evaluations_are_found(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    make_run(runs / "first")
    make_run(runs / "recipe" / "2-easy")
    (runs / "recipe" / "1-warmup").mkdir()
    (runs / "recipe" / "1-warmup" / "config.json").write_text('{"model_type": "gpt2"}')
    evaluate_alone(runs / "base.jsonl", [played("a")])
    (runs / "notes.jsonl").write_text("{}\n")
    assert names(Sources([runs])) == ["base", "first", "recipe/2-easy"]
    assert names(Sources([runs / "first", runs / "base.jsonl"])) == ["first", "base"]
    assert names(Sources([runs / "recipe"])) == ["2-easy"]
    assert names(Sources([runs, runs / "first"])) == ["base", "first", "recipe/2-easy"]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for seed in ("1", "2"):
        make_run(tmp_path / seed / "run")
    assert names(Sources([tmp_path / "1" / "run", tmp_path / "2" / "run"])) == ["run", "2/run"]


def test_a_link_to_a_run_elsewhere_is_a_run_by_the_links_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "disk" / "2026-01-01")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "best").symlink_to(run.path)
    assert [(source.name, source.path) for source in Sources([tmp_path / "runs"]).look()] == [("best", run.path)]


def test_what_comes_later_is_put_last_and_what_goes_is_gone(tmp_path: Path) -> None:
    make_run(tmp_path / "b")
    sources = Sources([tmp_path])
    assert names(sources) == ["b"]
    make_run(tmp_path / "a")
    assert names(sources) == ["b", "a"]
    shutil.rmtree(tmp_path / "b")
    assert names(sources) == ["a"]


def test_an_empty_folder_may_come_to_hold_a_run(tmp_path: Path) -> None:
    assert names(Sources([tmp_path])) == []


def test_the_files_of_a_run_come_in_the_order_of_training(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    train(run, 1, [played("a")])
    for label in ("random", "after", "step-000005", "before"):
        evaluate(run, label, [played("a")])
    (source,) = Sources([run.path]).look()
    assert list(source.files().values()) == [TRAINING, "before", "step-000005", "after", "random"]


def test_an_evaluation_that_is_called_episodes_has_its_folders_name(tmp_path: Path) -> None:
    for policy in ("before", "after"):
        (tmp_path / policy).mkdir()
        evaluate_alone(tmp_path / policy / "episodes.jsonl", [played("a")])
    assert names(Sources([tmp_path])) == ["after", "before"]
    assert names(Sources([tmp_path / "after" / "episodes.jsonl"])) == ["after"]


@pytest.mark.parametrize("name", ["missing", "metrics.jsonl", "episodes.jsonl", "config.json"])
def test_what_cannot_be_shown_is_refused_with_what_to_give(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "first")
    train(run, 1, [played("a")])
    with pytest.raises(SourceError, match="give the folder of a run"):
        Sources([run.path / name])
