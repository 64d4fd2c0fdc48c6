"""The two sides of a comparison: an evaluation's episodes, found by what the user wrote.

    runs/first                 a run: its evaluation after training, or else its latest one
    runs/first:before          another of its evaluations, by label
    base.jsonl                 what `sqlenv evaluate --episodes_out base.jsonl` wrote
    runs/first/evaluations/before.json     a file of a run, as runs/first:before

No substitution is silent: what was taken instead of what was named is in `notes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inference.adapters import RUN_MODEL
from trainer.eval.run_files import ABOUT, RunFolder, flags_of, read_about, read_records, runs_in
from trainer.policy import SCRIPTED, SETTINGS_FILE, read_play
from trainer.report.comparison import Side, SideError

AFTER = "after"
"""The label of a run's evaluation that is meant where none is named."""
RECORDS = ".jsonl"
HOW = "give a run's folder, RUN:LABEL, or a file that sqlenv evaluate --episodes_out FILE.jsonl wrote"


def find_side(text: str) -> Side:
    """Return what the user named. Raises SQLEnvError: SideError, or RunFolderError for a broken file."""
    path, label = Path(text), ""
    if not path.exists() and ":" in text:
        head, _, label = text.rpartition(":")
        path = Path(head)
    if path.is_file() and not label:
        return _of_file(path)
    if (path / "evaluations").is_dir():
        return _of_run(RunFolder.open(path), label)
    if not path.is_dir():
        raise SideError(f"there is no {text}; {HOW}")
    inside = [str(run.path) for run in runs_in(path)] or [str(file) for file in sorted(path.glob(f"*{RECORDS}"))]
    if inside:
        raise SideError(f"{path} is a folder of several; name one: {', '.join(inside)}")
    raise SideError(
        f"{path} holds no evaluation; {HOW}. A policy is evaluated by: "
        f"sqlenv evaluate --policy {path} --episodes_out FILE{RECORDS}"
    )


def _of_run(run: RunFolder, label: str) -> Side:
    during = [evaluation for _, evaluation in run.evaluations_during()]
    found = {evaluation.label: evaluation for evaluation in (*run.evaluations(), *during)}
    notes: list[str] = []
    wanted = label or AFTER
    if not label and AFTER not in found and during:
        wanted = during[-1].label
        notes.append(f"{run.path} has no evaluation after training yet; this is its latest, {wanted}")
    if wanted not in found:
        named = f"it has {', '.join(f'{run.path}:{name}' for name in found)}" if found else "it has none at all"
        raise SideError(f"{run.path} has no evaluation {wanted!r}; {named}")
    evaluation = found[wanted]
    if evaluation.best_of > 1:
        notes.append(
            f"the policy of {run.path}:{wanted} was chosen as the best of {evaluation.best_of} by these very "
            "questions, which flatters it; no interval here allows for that"
        )
    settings = evaluation.settings or _settings_of(run)
    return Side(
        f"{run.path}:{wanted}",
        run.evaluation_episodes(wanted),
        evaluation,
        _relevant(settings, evaluation.policy),
        run,
        flags_of(run.config()),
        tuple(notes),
    )


def _of_file(path: Path) -> Side:
    run = path.parent.parent
    if path.parent.name == "evaluations" and (run / "config.json").is_file():
        return _of_run(RunFolder.open(run), path.name.partition(".")[0])
    if path.name == "episodes.jsonl" and (path.parent / "config.json").is_file():
        raise SideError(f"{path} are episodes of training, under many policies; give the run's folder, {path.parent}")
    if path.name.endswith(ABOUT):
        path = path.with_name(path.name.removesuffix(ABOUT) + RECORDS)
    evaluation, records = read_about(path), read_records(path)
    if evaluation is None:
        note = f"there is no {path.with_suffix(ABOUT).name} beside {path}: data, answer mode and settings are not known"
        return Side(str(path), records, notes=(note,))
    return Side(str(path), records, evaluation, _relevant(evaluation.settings, evaluation.policy))


def _settings_of(run: RunFolder) -> dict[str, Any]:
    """How a run's evaluations were played: greedily, and otherwise as its policy or a checkpoint says."""
    checkpoints = sorted(run.path.glob(f"checkpoint-*/{SETTINGS_FILE}"))
    for file in (run.path / RUN_MODEL / SETTINGS_FILE, *checkpoints):
        if file.is_file():
            return {**asdict(read_play(file).settings), "temperature": 0.0, "protocol": "explore"}
    return {}


def _relevant(settings: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """Leave out the settings that do not affect this policy's play, and those that the questions and the data show."""
    if policy in SCRIPTED:
        wanted = {"step_budget", "seed"} if policy == "random" else {"step_budget"}
        return {name: value for name, value in settings.items() if name in wanted}
    without = {"data", "answer_mode", "eval_episodes"} | (set() if settings.get("temperature") else {"seed"})
    return {name: value for name, value in settings.items() if name not in without}
