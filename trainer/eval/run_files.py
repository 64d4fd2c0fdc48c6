"""A run's folder: the one place that knows which file holds what.

    config.json                        what the run was started with
    metrics.jsonl                      one object per logged training step: "step" and numbers
    episodes.jsonl                     one training episode per line: "step" and an EpisodeRecord
    health.jsonl                       the run's health alerts, one Alert per line
    evaluations/LABEL.json             the summary and what was evaluated; LABEL is step-000050 after the 50th step
    evaluations/LABEL.episodes.jsonl   its EpisodeRecords
    report.html
    trainer_state.json                 the Trainer's state at the end, once the run is finished

`sqlenv evaluate --episodes_out FILE.jsonl` writes such records, and FILE.evaluation.json with what was evaluated.

Guarantees:

1. A line is on its way to the disk when `write` returns, and a killed process loses at most the line being written: it
   is skipped when the file is read. Any other broken line is an error that names the file and the line. A whole file is
   replaced at once: the old one or the new one is there, never a part.
2. Numbers of other libraries are written as Python's, non-finite ones as strings, since JSON has none; text that is not
   Unicode is marked instead of rejected: it may be a model's.
3. A resumed run cuts off what was logged after the step that it resumes from: no step is there twice. Alerts stay,
   since they were shown.
4. An evaluation's summary is written after its episodes.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from env_server.errors import SQLEnvError
from inference.adapters import RUN_MODEL
from trainer.eval.statistics import EvaluationSummary
from trainer.rollout.episodes import EpisodeRecord

T = TypeVar("T")
ABOUT = ".evaluation.json"
SECTIONS = ("sqlenv", "grpo", "model", "versions")
"""The parts of config.json that consist of flags, and the versions of the packages that training is built on."""
PLACES = re.compile(
    r"output_dir|run_name|resume_from_checkpoint|hub_.*|push_to_hub|report_to|project|trackio_.*|save_.*|log_.*|"
    r"logging_.*"
)
"""Flags that decide what a run writes and where; they change nothing about what it learns."""
_SECRET = re.compile(r"(token|secret|password|api_key|credential)s?$", re.IGNORECASE)
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class RunFolderError(SQLEnvError):
    """The folder is not a run, already is one, or holds a file that cannot be read."""


@dataclass(frozen=True, slots=True)
class TrainingEpisode:
    """An episode that was played for a training step."""

    step: int
    record: EpisodeRecord


@dataclass(frozen=True, slots=True)
class Alert:
    """What a run health check found at a step: what is wrong, its figures, the likely cause, and the fix."""

    step: int
    message: str
    figures: str
    cause: str
    fix: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation: `label` names its files, `order` is its place in tables (smallest first).

    `unseen_databases`: no training question is about a database of the evaluation questions. `step`: the number of
    training steps before it, where that is known. `during`: it was played during training. `best_of`: the policy was
    chosen as the best of so many evaluations on these questions; 0 when it was not chosen. `settings`: how it was
    played, where that is kept here; a run's own is kept beside the run's policy.
    """

    label: str
    policy: str
    data: str
    split: str
    answer_mode: str
    order: int
    summary: EvaluationSummary
    unseen_databases: bool = True
    step: int | None = None
    during: bool = False
    best_of: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


_RECORD = TypeAdapter(EpisodeRecord)
_EVALUATION = TypeAdapter(Evaluation)
_ALERT = TypeAdapter(Alert)


class JsonlWriter:
    """Appends objects to a JSONL file, each line flushed; a context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8", errors="replace", newline="\n")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one object."""
        self._file.write(json_line(row))

    def write_lines(self, lines: str) -> None:
        """Append lines that `json_line` made."""
        self._file.write(lines)

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def json_line(row: Mapping[str, Any]) -> str:
    """Return an object as a line of JSONL."""
    return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n"


def episode_line(step: int, record: EpisodeRecord) -> str:
    """Return the line of an episode that was played for this training step."""
    return json_line({"step": step, **asdict(record)})


def replace_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as a whole file, indented for people."""
    replace_file(path, json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=2) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Write a whole file, or leave the old one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8", errors="replace")
    temporary.replace(path)


def versions() -> dict[str, str]:
    """Return the versions of SQLEnv and of what its training is built on."""
    found = {}
    for name in ("sqlenv", "trl", "transformers", "peft", "torch"):
        with suppress(PackageNotFoundError):  # SQLEnv may run from a checkout
            found[name] = version(name)
    return found


class RunFolder:
    """Names, writes and reads the files of one run. Make one with `create` or `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.json"
        self.metrics_path = path / "metrics.jsonl"
        self.episodes_path = path / "episodes.jsonl"
        self.health_path = path / "health.jsonl"
        self.evaluations_path = path / "evaluations"
        self.report_path = path / "report.html"

    @classmethod
    def create(cls, path: Path, config: Mapping[str, Any]) -> RunFolder:
        """Make the folder of a new run. Raises RunFolderError when it already holds a run."""
        folder = cls(path)
        if folder.config_path.exists():
            raise RunFolderError(f"{path} already holds a run")
        folder.evaluations_path.mkdir(parents=True, exist_ok=True)
        replace_json(folder.config_path, config)
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Return the folder of an existing run. Raises RunFolderError when it is none."""
        folder = cls(path)
        if not path.is_dir():
            raise RunFolderError(f"there is no folder {path}; give the folder of a run, such as runs/NAME")
        if not folder.config_path.is_file():
            inside = ", ".join(str(run.path) for run in runs_in(path))
            hint = f"; it holds runs, so name one: {inside}" if inside else ""
            raise RunFolderError(f"{path} is not a run: it holds no {folder.config_path.name}{hint}")
        return folder

    @property
    def has_trained(self) -> bool:
        """True where a run has made a step, or more than that."""
        logged = self.metrics_path.is_file() and self.metrics_path.stat().st_size > 0
        return logged or (self.path / RUN_MODEL).exists() or any(self.path.glob("checkpoint-*"))

    @property
    def name(self) -> str:
        """The run's name: its folder's."""
        return self.path.resolve().name

    def config(self) -> dict[str, Any]:
        """Return the run's config. Raises RunFolderError when it is not a JSON object."""
        try:
            config = json.loads(self.config_path.read_bytes())
        except ValueError as error:
            raise RunFolderError(f"{self.config_path} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise RunFolderError(f"{self.config_path} must hold a JSON object")
        return config

    def metrics_writer(self) -> JsonlWriter:
        """Return a writer of metrics: objects with an integer "step" and numbers."""
        return JsonlWriter(self.metrics_path)

    def metrics(self) -> list[dict[str, float]]:
        """Return one row per step, in order: rows of the same step are merged, values that are no number left out.

        A missing file has no rows.
        """
        merged: dict[float, dict[str, float]] = {}
        for row in _read(self.metrics_path, _metrics_row):
            merged.setdefault(row["step"], {}).update(row)
        return list(merged.values())

    def episodes_writer(self) -> JsonlWriter:
        """Return a writer of training episodes; `episode_line` makes their lines."""
        return JsonlWriter(self.episodes_path)

    def episodes(self, turns: bool = True) -> list[TrainingEpisode]:
        """Return the training episodes in order; a missing file has none.

        `turns` False leaves their turns out, which are nearly all of the memory.
        """
        return list(_read(self.episodes_path, partial(_training_episode, turns)))

    def add_alert(self, alert: Alert) -> None:
        """Append an alert."""
        with JsonlWriter(self.health_path) as writer:
            writer.write(asdict(alert))

    def alerts(self) -> list[Alert]:
        """Return the alerts in order; a missing file has none."""
        return list(_read(self.health_path, _ALERT.validate_json))

    def resume_from(self, step: int) -> None:
        """Cut off the lines after a step that training resumes from, and one that a killed process left half."""
        for path in filter(Path.is_file, (self.metrics_path, self.episodes_path)):
            lines = list(_read(path, lambda line: (_row(line)["step"], len(line))))
            os.truncate(path, sum(size for _, size in takewhile(lambda pair: pair[0] <= step, lines)))

    def write_evaluation(self, evaluation: Evaluation, records: Sequence[EpisodeRecord]) -> None:
        """Write an evaluation and its episodes, replacing one of the same label.

        Raises ValueError when the label is not letters, digits, `_` and `-`.
        """
        summary, episodes = self._evaluation_paths(evaluation.label)
        self.evaluations_path.mkdir(exist_ok=True)
        summary.unlink(missing_ok=True)
        write_episodes(episodes, evaluation, records, summary)

    def drop_evaluation(self, label: str) -> None:
        """Remove an evaluation and its episodes, where there are any."""
        for path in self._evaluation_paths(label):
            path.unlink(missing_ok=True)

    def evaluations(self) -> list[Evaluation]:
        """Return those before and after training, and of other players, by `order`, then label.

        Raises RunFolderError when a file is broken.
        """
        found = [evaluation for evaluation in self._evaluations() if not evaluation.during]
        return sorted(found, key=lambda e: (e.order, e.label))

    def evaluations_during(self) -> list[tuple[int, Evaluation]]:
        """Return those during training with their steps, in order. Raises RunFolderError when a file is broken."""
        found = [(e.step, e) for e in self._evaluations() if e.during and e.step is not None]
        return sorted(found, key=lambda pair: pair[0])

    def _evaluations(self) -> list[Evaluation]:
        return [_read_evaluation(path) for path in sorted(self.evaluations_path.glob("*.json"))]

    def evaluation_episodes(self, label: str) -> list[EpisodeRecord]:
        """Return the episodes of an evaluation. Raises RunFolderError when there are none or a line is broken."""
        _, path = self._evaluation_paths(label)
        if not path.is_file():
            raise RunFolderError(f"there is no {path}; the evaluation {label} was not finished")
        return read_records(path)

    def write_report(self, html: str) -> Path:
        """Write the report and return its path."""
        replace_file(self.report_path, html)
        return self.report_path

    def _evaluation_paths(self, label: str) -> tuple[Path, Path]:
        if not _LABEL.fullmatch(label):
            raise ValueError(f"an evaluation's label is letters, digits, _ and -, got {label!r}")
        return self.evaluations_path / f"{label}.json", self.evaluations_path / f"{label}.episodes.jsonl"


def runs_in(path: Path) -> list[RunFolder]:
    """Return the runs in a folder, such as those of a run's stages, by name."""
    found = (RunFolder(folder.parent) for folder in sorted(path.glob("*/evaluations")))
    return [run for run in found if run.config_path.is_file()]


def read_records(path: Path) -> list[EpisodeRecord]:
    """Return the episodes of a file that an evaluation or a run wrote. Raises RunFolderError."""
    if not path.is_file():
        raise RunFolderError(f"there is no file {path}; `sqlenv evaluate --episodes_out` writes one")
    return list(_read(path, _RECORD.validate_json))


def write_episodes(
    path: Path, evaluation: Evaluation, records: Sequence[EpisodeRecord], summary: Path | None = None
) -> None:
    """Write an evaluation's episodes into a file, then the evaluation: into `summary`, or beside the file."""
    replace_file(path, "".join(json_line(asdict(r)) for r in records))
    replace_json(summary or path.with_suffix(ABOUT), asdict(evaluation))


def read_about(path: Path) -> Evaluation | None:
    """Return the evaluation that a file of episodes is of, where that is beside it. Raises RunFolderError."""
    return _read_evaluation(about) if (about := path.with_suffix(ABOUT)).is_file() else None


@dataclass(frozen=True, slots=True)
class Differing:
    """One flag or setting that is not the same on both sides; None where a side does not have it."""

    name: str
    a: Any
    b: Any


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Differing]:
    """Return what is not the same on both sides, in the order of the first, then of the second."""
    return [Differing(name, a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)]


def flags_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that decide what a run learns, as its config.json has them, with nothing secret."""
    flags: dict[str, Any] = {}
    for section in SECTIONS:
        prefix = "version of " if section == "versions" else ""
        values = redacted(config.get(section, {}))
        flags |= {prefix + name: value for name, value in values.items() if not PLACES.fullmatch(name)}
    return flags


def redacted(value: Any) -> Any:
    """Hide what a config holds under a secret's name: reports and comparisons are passed around."""
    if isinstance(value, Mapping):
        return {
            key: "(hidden)" if isinstance(item, str) and item and _SECRET.search(key) else redacted(item)
            for key, item in value.items()
        }
    return [redacted(item) for item in value] if isinstance(value, list) else value


def _read_evaluation(path: Path) -> Evaluation:
    try:
        return _EVALUATION.validate_json(path.read_bytes())
    except ValidationError as error:
        raise RunFolderError(f"{path} is not an evaluation: {_first(error)}") from error


def _read(path: Path, parse: Callable[[bytes], T]) -> Iterator[T]:
    """Parse every complete line; raises RunFolderError for one that `parse` rejects."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                yield parse(line)
            except ValueError as error:
                why = _first(error) if isinstance(error, ValidationError) else error
                raise RunFolderError(f"{path}, line {number}: {why}") from error


def _row(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError('a line is a JSON object with an integer "step"')
    return row


def _metrics_row(line: bytes) -> dict[str, float]:
    return {key: value for key, raw in _row(line).items() if (value := _number(raw)) is not None}


def _training_episode(turns: bool, line: bytes) -> TrainingEpisode:
    row = _row(line)
    step = row.pop("step")
    if not turns:
        row["turns"] = []
    return TrainingEpisode(step, _RECORD.validate_python(row))


def _number(value: object) -> float | None:
    """Return the number that was logged, also where it was written as a string because it is not finite."""
    if isinstance(value, int | float):
        return float(value)
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else None


def _plain(value: Any) -> Any:
    """Turn numbers of other libraries into Python's, and the non-finite ones into strings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | str) or not isinstance(value, Real):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _first(error: ValidationError) -> str:
    """Word the first of pydantic's complaints."""
    detail = error.errors()[0]
    where = ".".join(str(part) for part in detail["loc"])
    return f"{where}: {detail['msg']}" if where else detail["msg"]
