"""Folders of runs as training writes them, with real records of play."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.trainer.records import make_record
from trainer.eval.run_files import Evaluation, RunFolder, episode_line, write_episodes
from trainer.eval.statistics import summarize
from trainer.rollout.episodes import EpisodeRecord

NO_REWARD = {"step_cost": -0.02, "success": 0.0, "new_information": 0.0, "repeat": 0.0, "operational": -0.02}


def make_turn(kind: str, argument: str, result: str = "", error: str = "", **reward: float) -> dict[str, Any]:
    """A turn as a record has it."""
    parts = {**NO_REWARD, "progress": 0.0, "terminal": 0.0, "total": -0.02, **reward}
    return {
        "text": f"{kind} {argument}",
        "action_type": kind,
        "argument": argument,
        "parseable": True,
        "result": result,
        "error": error,
        "reward": parts,
        "policy_version": 0,
        "tokens": len(argument.split()) + 1,
    }


def played(question: str, outcome: str = "correct", db: str = "shop", /, **fields: Any) -> EpisodeRecord:
    """An episode of a failing query, another one and an answer."""
    won = outcome == "correct"
    turns = [
        make_turn("QUERY", "SELECT nme FROM items", error="not found: no such column: nme"),
        make_turn(
            "QUERY",
            "SELECT name FROM items",
            "name\nlamp",
            total=0.15,
            success=0.02,
            new_information=0.01,
            progress=0.15,
        ),
        make_turn("ANSWER", "lamp", "The answer is correct." if won else "The answer is wrong.", terminal=float(won)),
    ]
    turns[-1]["reward"]["total"] = round(-0.02 + won, 2)
    total = sum(turn["reward"]["total"] for turn in turns)
    usual: dict[str, Any] = {"turns": turns, "steps": len(turns), "reward": total, "parse_rate": 1.0}
    return make_record(question, outcome, db, **usual | fields)


def make_run(path: Path, **flags: Any) -> RunFolder:
    """The folder of a run that has just begun."""
    ours = {"data": "synthetic", "answer_mode": "value"}
    return RunFolder.create(
        path, {"sqlenv": ours, "grpo": {"max_steps": 10, "learning_rate": 1e-5} | flags, "model": {}}
    )


def train(run: RunFolder, step: int, records: Sequence[EpisodeRecord], **metrics: float) -> None:
    """Write what a training step writes."""
    with run.episodes_writer() as writer:
        for record in records:
            writer.write_lines(episode_line(step, record))
    with run.metrics_writer() as log:
        log.write({"step": step, "loss": 0.1, "reward": 0.5, **metrics})


def evaluation(label: str, records: Sequence[EpisodeRecord], **fields: Any) -> Evaluation:
    """An evaluation of these episodes."""
    order = {"random": 0, "before": 1, "after": 2}.get(label, 3)
    return Evaluation(label, label, "synthetic", "eval", "value", order, summarize(records, {}), **fields)


def evaluate(run: RunFolder, label: str, records: Sequence[EpisodeRecord], **fields: Any) -> None:
    """Write an evaluation of the run."""
    run.write_evaluation(evaluation(label, records, **fields), records)


def evaluate_alone(path: Path, records: Sequence[EpisodeRecord]) -> Path:
    """Write what `sqlenv evaluate --episodes_out` writes."""
    write_episodes(path, evaluation(path.stem, records), records)
    return path
