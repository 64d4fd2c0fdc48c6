"""A run's folder: what is written is read back, whatever a kill or a resume did to it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.records import make_record
from trainer.eval.run_files import (
    Alert,
    Evaluation,
    RunFolder,
    RunFolderError,
    differing,
    episode_line,
    flags_of,
    json_line,
    read_about,
    read_records,
    redacted,
    replace_file,
    replace_json,
    write_episodes,
)
from trainer.eval.statistics import summarize
from trainer.rollout.episodes import EpisodeRecord


def make_evaluation(label: str, records: list[EpisodeRecord], order: int = 0) -> Evaluation:
    return Evaluation(label, "model", "synthetic", "eval", "value", order, summarize(records, {"gold_empty": 1}))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", {"learning_rate": 1e-4})


def test_create_open_and_config(folder: RunFolder) -> None:
    again = RunFolder.open(folder.path)
    assert again.name == "run"
    assert again.config() == {"learning_rate": 1e-4}
    with pytest.raises(RunFolderError, match="already holds a run"):
        RunFolder.create(folder.path, {})


def test_open_refuses_what_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="there is no folder"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match=r"is not a run: it holds no config\.json"):
        RunFolder.open(tmp_path)


def test_a_folder_of_runs_names_them(tmp_path: Path) -> None:
    for name in ("3-all", "2-easy"):
        RunFolder.create(tmp_path / name, {})
    (tmp_path / "1-warmup").mkdir()
    with pytest.raises(RunFolderError, match=r"is not a run: .* name one: \S*/2-easy, \S*/3-all$"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_config_is_named(folder: RunFolder, text: str) -> None:
    folder.config_path.write_text(text)
    with pytest.raises(RunFolderError, match=r"config\.json"):
        folder.config()


def test_metrics_merge_the_lines_of_a_step_and_keep_numbers(folder: RunFolder) -> None:
    with folder.metrics_writer() as writer:
        writer.write({"step": 1, "loss": np.float32(0.5), "note": "text", "flag": True})
        writer.write({"step": 1, "kl": math.nan, "norm": math.inf})
        writer.write({"step": 2, "loss": 3})
    first, second = folder.metrics()
    assert {k: first[k] for k in ("step", "loss", "flag", "norm")} == {
        "step": 1,
        "loss": 0.5,
        "flag": 1,
        "norm": math.inf,
    }
    assert math.isnan(first["kl"])
    assert "note" not in first
    assert second == {"step": 2, "loss": 3}
    for line in folder.metrics_path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_line_is_in_the_file_as_soon_as_it_is_written(folder: RunFolder) -> None:
    with folder.metrics_writer() as writer:
        writer.write({"step": 1, "text": "x" * 100_000})
        assert folder.metrics() == [{"step": 1}]


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 200), st.integers(-1, 6))
def test_a_file_cut_anywhere_loses_its_last_line_and_goes_on_from_any_step(
    tmp_path_factory: pytest.TempPathFactory, values: list[int], cut: int, last: int
) -> None:
    folder = RunFolder.create(tmp_path_factory.mktemp("runs") / "run", {})
    with folder.metrics_writer() as writer:
        for step, value in enumerate(values):
            writer.write({"step": step, "value": value, "text": "é" * value})
    data = folder.metrics_path.read_bytes()[:cut]
    folder.metrics_path.write_bytes(data)
    whole = data.count(b"\n")
    assert [row["value"] for row in folder.metrics()] == values[:whole]
    with folder.metrics_writer() as writer:
        folder.resume_from(last)
        writer.write({"step": last + 1, "value": -1})
    assert [row["value"] for row in folder.metrics()] == [*values[: min(whole, last + 1)], -1]


@pytest.mark.parametrize("line", ["{", "[]", '{"loss": 1}', '{"step": "1"}', ""])
def test_a_broken_line_is_named(folder: RunFolder, line: str) -> None:
    folder.metrics_path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl, line 2"):
        folder.metrics()


def test_a_resumed_run_keeps_what_came_before_its_checkpoint(folder: RunFolder) -> None:
    folder.resume_from(0)
    for steps in ((1, 2, 3), (3, 4)):
        with folder.metrics_writer() as metrics, folder.episodes_writer() as episodes:
            folder.resume_from(steps[0] - 1)
            for step in steps:
                metrics.write({"step": step, "first": steps[0]})
                for i in range(2):
                    episodes.write_lines(episode_line(step, make_record(f"{steps[0]}-{step}-{i}")))
    kept = [(1, 1), (1, 2), (3, 3), (3, 4)]
    assert [(row["first"], row["step"]) for row in folder.metrics()] == kept
    assert [e.record.question_id for e in folder.episodes()] == [f"{f}-{step}-{i}" for f, step in kept for i in (0, 1)]


def test_episodes_come_back_with_or_without_turns(folder: RunFolder) -> None:
    turn = {"text": "ANSWER q\ud800é", "reward": {"total": 1.0}}
    record = make_record("q", turns=[turn])
    with folder.episodes_writer() as writer:
        writer.write_lines(episode_line(3, record))
    (episode,) = folder.episodes()
    assert episode.step == 3
    assert episode.record.turns == [{"text": "ANSWER q?é", "reward": {"total": 1.0}}]
    (lean,) = folder.episodes(turns=False)
    assert lean.record.turns == []


@pytest.mark.parametrize("line", ['{"step": 1}', '{"question_id": "q"}', "7"])
def test_a_broken_episode_is_named(folder: RunFolder, line: str) -> None:
    folder.episodes_path.write_text(line + "\n")
    with pytest.raises(RunFolderError, match=r"episodes\.jsonl, line 1"):
        folder.episodes()


def test_evaluations_come_back_in_order(folder: RunFolder) -> None:
    records = [make_record("a"), make_record("b", "wrong")]
    after, before = make_evaluation("after", records, 2), make_evaluation("before", records[:1], 1)
    for evaluation, played in ((after, records), (before, records[:1])):
        folder.write_evaluation(evaluation, played)
    assert folder.evaluations() == [before, after]
    assert folder.evaluation_episodes("after") == records
    folder.write_evaluation(make_evaluation("after", records[1:], 3), records[1:])
    assert folder.evaluation_episodes("after") == records[1:]
    assert sorted(p.name for p in folder.evaluations_path.iterdir()) == [
        "after.episodes.jsonl",
        "after.json",
        "before.episodes.jsonl",
        "before.json",
    ]


def test_broken_evaluations_are_named(folder: RunFolder) -> None:
    with pytest.raises(RunFolderError, match="was not finished"):
        folder.evaluation_episodes("before")
    (folder.evaluations_path / "before.json").write_text('{"label": "before"}')
    with pytest.raises(RunFolderError, match=r"before\.json is not an evaluation: policy"):
        folder.evaluations()


@pytest.mark.parametrize("label", ["", "../x", "a.b", "a/b", "-a", "a\n"])
def test_a_label_is_a_plain_name(folder: RunFolder, label: str) -> None:
    records = [make_record("a")]
    with pytest.raises(ValueError, match="label"):
        folder.write_evaluation(make_evaluation(label, records), records)


def test_alerts_are_kept_also_beyond_the_step_that_a_run_resumes_from(folder: RunFolder) -> None:
    assert folder.alerts() == []
    alerts = [Alert(step, f"message {step}", "1 ± 2", "cause", "`--flag`") for step in (3, 7)]
    for alert in alerts:
        folder.add_alert(alert)
    folder.resume_from(5)
    assert folder.alerts() == alerts
    with folder.health_path.open("a") as file:
        file.write('{"step": 8}\n{"step"')
    with pytest.raises(RunFolderError, match=r"health\.jsonl, line 3: message: Field required"):
        folder.alerts()


def test_episodes_in_a_file_of_their_own_have_beside_them_what_they_are_of(tmp_path: Path) -> None:
    path = tmp_path / "base.jsonl"
    records = [make_record("a"), make_record("b", "failed", question="\ud800 \u2028")]
    about = replace(make_evaluation("base", records), settings={"few_shot": 2, "temperature": 0.5})
    write_episodes(path, about, records)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["base.evaluation.json", "base.jsonl"]
    assert read_about(path) == about
    assert [e.question_id for e in read_records(path)] == ["a", "b"]
    (tmp_path / "base.evaluation.json").unlink()
    assert read_about(path) is None


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), JSON_VALUES, max_size=4))
def test_a_line_is_read_back(row: dict[str, Any]) -> None:
    line = json_line(row)
    assert line.count("\n") == 1
    assert json.loads(line) == row


def test_numbers_that_json_has_not_are_words() -> None:
    row: dict[Any, Any] = {"a": np.float32(0.5), "b": np.int64(3), "c": [math.nan, -math.inf], 4: (np.float64("inf"),)}
    assert json.loads(json_line(row)) == {"a": 0.5, "b": 3, "c": ["nan", "-inf"], "4": ["inf"]}


def test_a_file_that_cannot_be_written_stays_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    replace_json(path, {"step": 1})
    with pytest.raises(TypeError):
        replace_json(path, {"step": object()})
    assert json.loads(path.read_bytes()) == {"step": 1}
    replace_file(path, "two")
    assert path.read_text("utf-8") == "two"
    assert list(tmp_path.iterdir()) == [path]


SETTINGS = st.dictionaries(st.sampled_from("abcd"), st.none() | st.integers(0, 2), max_size=4)


@given(SETTINGS, SETTINGS)
def test_what_differs_is_antisymmetric_and_nothing_else(a: dict[str, Any], b: dict[str, Any]) -> None:
    found = differing(a, b)
    assert {d.name for d in found} == {name for name in {*a, *b} if a.get(name) != b.get(name)}
    assert sorted((d.name, d.b, d.a) for d in found if d.a != d.b) == sorted(
        (d.name, d.a, d.b) for d in differing(b, a)
    )
    assert differing(a, a) == []


def test_flags_are_those_that_decide_what_is_learnt() -> None:
    config = {
        "sqlenv": {"data": "synthetic"},
        "grpo": {
            "beta": 0.1,
            "output_dir": "runs/a",
            "save_steps": 5,
            "logging_steps": 1,
            "hub_token": "s3cret",
            "model_init_kwargs": {"token": "s3cret"},
        },
        "model": {"use_peft": True},
        "versions": {"torch": "2"},
        "base_notes": "Warmed up.",
    }
    assert flags_of(config) == {
        "data": "synthetic",
        "beta": 0.1,
        "model_init_kwargs": {"token": "(hidden)"},
        "use_peft": True,
        "version of torch": "2",
    }
    assert flags_of({}) == {}


def test_secrets_are_hidden_wherever_they_stand() -> None:
    assert redacted({"a": [{"api_key": "k", "max_tokens": 5}], "token": "", "Password": "p"}) == {
        "a": [{"api_key": "(hidden)", "max_tokens": 5}],
        "token": "",
        "Password": "(hidden)",
    }
