"""Runs and files of evaluations, as the commands leave them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inference.adapters import RUN_MODEL
from tests.trainer.records import make_record
from trainer.eval.run_files import Evaluation, RunFolder, episode_line, write_episodes
from trainer.eval.statistics import summarize
from trainer.policy import PlaySettings
from trainer.rollout.episodes import EpisodeRecord

ANSWERED = [{"action_type": "ANSWER", "argument": "17", "parseable": True, "error": "", "reward": {"progress": 0.0}}]
"""An answer on no evidence."""
DATABASES = 4


def make_evaluation(label: str, records: Sequence[EpisodeRecord], **fields: Any) -> Evaluation:
    usual: dict[str, Any] = {"policy": label, "data": "synthetic", "split": "eval", "answer_mode": "value", "order": 0}
    return Evaluation(label, summary=summarize(records, {}), **usual | fields)


def make_records(won: Sequence[bool], **fields: Any) -> list[EpisodeRecord]:
    """One question for each, over four databases; the first quarter is easy, and so on."""
    levels = ("easy", "medium", "hard", "extra")
    return [
        make_record(
            f"q{i:03d}",
            "correct" if right else "wrong",
            f"db{i % DATABASES}",
            **{"hardness": levels[4 * i // len(won)], "turns": ANSWERED, "prompt_tokens": 100} | fields,
        )
        for i, right in enumerate(won)
    ]


WORSE = make_records([False] * 40)
BETTER = make_records([i // DATABASES % 2 == 0 for i in range(40)], tokens=20)
"""Half of them, in each database."""


def make_file(path: Path, records: Sequence[EpisodeRecord], **fields: Any) -> Path:
    """What `sqlenv evaluate --episodes_out` writes."""
    settings = {**asdict(PlaySettings()), "temperature": 0.0}
    write_episodes(path, make_evaluation(path.stem, records, **{"settings": settings} | fields), records)
    return path


def make_run(
    path: Path,
    evaluations: Mapping[str, Sequence[EpisodeRecord]],
    *,
    config: Mapping[str, Any] | None = None,
    steps: int = 0,
    play: PlaySettings | None = None,
) -> RunFolder:
    """A run with these evaluations, a step-000010 among them being one during training, and training episodes."""
    run = RunFolder.create(path, config or {})
    for order, (label, records) in enumerate(evaluations.items()):
        during = label.startswith("step-")
        step = int(label.removeprefix("step-")) if during else None
        run.write_evaluation(make_evaluation(label, records, order=order, step=step, during=during), records)
    with run.episodes_writer() as writer:
        for step in range(1, steps + 1):
            for record in make_records([i < step for i in range(8)]):
                writer.write_lines(episode_line(step, record))
    if play is not None:
        (path / RUN_MODEL).mkdir()
        play.save(path / RUN_MODEL)
    return run


def as_json(text: str) -> dict[str, Any]:
    """The one object that was printed."""
    found = json.loads(text)
    assert isinstance(found, dict)
    return found
