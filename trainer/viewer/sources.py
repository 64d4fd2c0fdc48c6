"""What `sqlenv view` was given: the runs and the evaluations that it names, found again at each look.

    runs                 a folder of runs, of stages or of evaluations: all that is in it, also what comes later
    runs/first           a run
    base.jsonl           what `sqlenv evaluate --episodes_out base.jsonl` wrote

Promises: a source keeps its name and its place as long as it is there, and what is new is put last. Nothing is
written. What is named must hold something to show, or be a folder that may come to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from env_server.errors import SQLEnvError
from trainer.eval.run_files import ABOUT, RunFolder

TRAINING = "training"
"""What the episodes of a run's training are called, beside the labels of its evaluations."""
EPISODES = ".episodes.jsonl"
RECORDS = ".jsonl"
LOGS = ("metrics.jsonl", "health.jsonl")
TRAINED = "episodes.jsonl"
"""A run's own episodes; an evaluation's may have this name, too."""
DEPTH = 3
"""Folders are looked into so deep: runs/STAGES/STAGE is the third."""
HOW = "give the folder of a run, a folder of runs, or a file that sqlenv evaluate --episodes_out FILE.jsonl wrote"


class SourceError(SQLEnvError):
    """What was named holds nothing to show; the text says what to give instead."""


@dataclass(frozen=True, slots=True)
class EpisodeFile:
    """A file of episodes; `label` is TRAINING or that of an evaluation."""

    path: Path
    label: str


@dataclass(frozen=True, slots=True)
class Source:
    """A run, or an evaluation's episodes by themselves. `name` is its own among those that are shown."""

    name: str
    path: Path

    @property
    def is_run(self) -> bool:
        """Whether it is a run's folder."""
        return self.path.suffix != RECORDS

    @property
    def run(self) -> RunFolder:
        """The run's folder, of a run."""
        return RunFolder(self.path)

    def files(self) -> list[EpisodeFile]:
        """Return the files of episodes that are there now: training, before and during it, after it, other players."""
        if not self.is_run:
            return [EpisodeFile(self.path, self.path.stem)]
        run = self.run
        found = [EpisodeFile(run.episodes_path, TRAINING)] if run.episodes_path.is_file() else []
        labels = {path.name.removesuffix(EPISODES): path for path in sorted(run.evaluations_path.glob(f"*{EPISODES}"))}
        return found + [EpisodeFile(labels[label], label) for label in sorted(labels, key=_order)]

    def side(self, label: str) -> str:
        """Name one of its evaluations as `sqlenv compare` reads it."""
        return f"{self.path}:{label}" if self.is_run else str(self.path)


class Sources:
    """The sources below the paths that were given."""

    def __init__(self, given: Sequence[Path]) -> None:
        """Raises SourceError when a path is neither a source nor a folder."""
        self.given = tuple(given)
        for path in given:
            own = path.name in LOGS or (path.name == TRAINED and _is_source(path.parent))
            if path.is_file() and (path.suffix != RECORDS or own):
                raise SourceError(f"{path} is no file of an evaluation's episodes; {HOW}")
            if not path.exists():
                raise SourceError(f"there is no {path}; {HOW}")
        self._known: list[Source] = []

    def look(self) -> list[Source]:
        """Return what there is now."""
        found: dict[Path, tuple[Path, Path]] = {}
        for given in self.given:
            for path in [given] if given.is_file() else _below(given, DEPTH):
                found.setdefault(path.resolve(), (path.absolute(), given.absolute()))
        self._known = [source for source in self._known if source.path in found]
        known = {source.path for source in self._known}
        for path, place in found.items():
            if path not in known:
                self._known.append(Source(self._name(*place), path))
        return list(self._known)

    def _name(self, path: Path, given: Path) -> str:
        """A short name that no other source has: from the folder that was given on, else more of the path."""
        taken = {source.name for source in self._known}
        # FOLDER/episodes.jsonl is called as its folder is.
        parts = path.parent.parts if path.name == TRAINED else path.with_suffix("").parts
        parts = path.parts if path.is_dir() else parts
        for count in range(max(1, len(parts) - len(given.parts)), len(parts)):
            name = "/".join(parts[-count:])
            if name not in taken:
                return name
        return str(path)


def _order(label: str) -> tuple[int, str]:
    """The place of an evaluation among those of its run."""
    places = {"before": 0, "after": 2}
    return places.get(label, 1 if label.startswith("step-") else 3), label


def _below(path: Path, depth: int) -> Iterator[Path]:
    """The sources at or below a path, in the order of their names."""
    if _is_source(path):
        yield path
    elif path.is_dir() and depth >= 0:
        try:
            children = sorted(path.iterdir())
        except OSError:  # somebody else's, or taken away at this moment
            return
        for child in children:
            if child.is_dir() or child.suffix == RECORDS:
                yield from _below(child, depth - 1)


def _is_source(path: Path) -> bool:
    """A run has a config and a folder for evaluations, as a model's folder has not."""
    if path.is_file():
        return path.suffix == RECORDS and path.with_suffix(ABOUT).is_file()
    return (path / "config.json").is_file() and (path / "evaluations").is_dir()
