"""A run's folder: what is written is read back, whatever a kill or a resume did to it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.results.run_files import Evaluation, JsonlWriter, RunFolder, RunFolderError
from trainer.results.statistics import summarize
from trainer.rollout.episodes import EpisodeRecord


def make_record(question: str, outcome: str = "correct") -> EpisodeRecord:
    turn = {"text": f"ANSWER {question}", "reward": {"total": 1.0}}
    return EpisodeRecord(question, question, "db", "how many?", "easy", "count", outcome, 1.0, 1, 1.0, 5, "", [turn])


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


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_broken_config_is_named(folder: RunFolder, text: str) -> None:
    folder.config_path.write_text(text)
    with pytest.raises(RunFolderError, match=r"config\.json"):
        folder.config()


def test_an_empty_run_has_no_rows(folder: RunFolder) -> None:
    assert folder.metrics().rows == []
    assert folder.episodes().rows == []
    assert folder.evaluations() == []


def test_metrics_merge_the_lines_of_a_step_and_keep_numbers(folder: RunFolder) -> None:
    with folder.metrics_writer() as writer:
        writer.write({"step": 1, "loss": np.float32(0.5), "note": "text", "flag": True})
        writer.write({"step": 1, "kl": math.nan, "norm": math.inf})
        writer.write({"step": 2, "loss": 3})
    first, second = folder.metrics().rows
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
        writer.write({"step": 1})
        assert folder.metrics().rows == [{"step": 1}]


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 200))
def test_a_file_cut_anywhere_loses_only_its_last_line(
    tmp_path_factory: pytest.TempPathFactory, values: list[int], cut: int
) -> None:
    folder = RunFolder.create(tmp_path_factory.mktemp("runs") / "run", {})
    with folder.metrics_writer() as writer:
        for step, value in enumerate(values):
            writer.write({"step": step, "value": value, "text": "é" * value})
    data = folder.metrics_path.read_bytes()[:cut]
    folder.metrics_path.write_bytes(data)
    whole = data.count(b"\n")
    lines = folder.metrics()
    assert [row["value"] for row in lines.rows] == values[:whole]
    assert lines.torn == (not data.endswith(b"\n") and bool(data))
    with folder.metrics_writer() as writer:
        writer.write({"step": 99, "value": -1})
    lines = folder.metrics()
    assert [row["value"] for row in lines.rows] == [*values[:whole], -1]
    assert lines.torn == 0


def test_a_torn_line_longer_than_a_block_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * 200_000)
    JsonlWriter(path).close()
    assert path.read_bytes() == b'{"a": 1}\n'


def test_a_killed_process_leaves_complete_lines(folder: RunFolder) -> None:
    script = (
        "import sys, itertools, pathlib; from trainer.results.run_files import RunFolder\n"
        "writer = RunFolder.open(pathlib.Path(sys.argv[1])).metrics_writer()\n"
        "for step in itertools.count():\n"
        "    writer.write({'step': step, 'text': 'x' * 1000})\n"
        "    step == 20 and print('ready', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder.path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    steps = [row["step"] for row in folder.metrics().rows]
    assert len(steps) > 20
    assert steps == list(range(len(steps)))


@pytest.mark.parametrize("line", ["{", "[]", '{"loss": 1}', '{"step": "1"}', ""])
def test_a_broken_line_is_named(folder: RunFolder, line: str) -> None:
    folder.metrics_path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl, line 2"):
        folder.metrics()


def test_a_resumed_run_replaces_the_steps_that_it_repeats(folder: RunFolder) -> None:
    with folder.metrics_writer() as metrics, folder.episodes_writer() as episodes:
        for attempt, steps in enumerate([(1, 2, 3, 4), (3, 4, 5)]):
            for step in steps:
                metrics.write({"step": step, "attempt": attempt})
                for i in range(2):
                    episodes.write_episode(step, make_record(f"{attempt}-{step}-{i}"))
    assert [(r["step"], r["attempt"]) for r in folder.metrics().rows] == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert [e.record.question_id for e in folder.episodes().rows] == [
        f"{attempt}-{step}-{i}" for step, attempt in ((1, 0), (2, 0), (3, 1), (4, 1), (5, 1)) for i in range(2)
    ]


def test_episodes_come_back_with_or_without_turns(folder: RunFolder) -> None:
    record = make_record("q\ud800é")
    with folder.episodes_writer() as writer:
        writer.write_episode(3, record)
    (episode,) = folder.episodes().rows
    assert episode.step == 3
    assert episode.record.turns == [{"text": "ANSWER q?é", "reward": {"total": 1.0}}]
    (lean,) = folder.episodes(turns=False).rows
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


def test_a_step_that_was_written_half_and_then_played_again_counts_once(folder: RunFolder) -> None:
    with folder.episodes_writer() as writer:
        writer.write_episode(1, make_record("a"))
        writer.write_episode(2, make_record("a", "wrong"))
        writer.write_episode(2, make_record("a", "wrong"))
        writer.write_episode(2, make_record("b"))
    assert [(row.step, row.record.question_id) for row in folder.episodes().rows] == [(1, "a"), (2, "a"), (2, "b")]
