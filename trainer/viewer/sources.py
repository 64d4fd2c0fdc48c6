"""What `sqlenv view` was given: the runs and evaluations that it names, found again at each look.

    runs                 a folder of runs, of stages or of evaluations: all that is in it, also what comes later
    runs/first           a run
    base.jsonl           what `sqlenv evaluate --episodes_out base.jsonl` wrote

Guarantees: a source keeps its name and its place as long as it exists, and new ones are put last. What is given must
hold something to show, or be a folder that may come to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from env_server.errors import SQLEnvError
from trainer.eval.run_files import ABOUT, Evaluation, RunFolder, read_about

TRAINING = "training"
"""The label of the episodes of a run's training, beside those of its evaluations."""
RECORDS, EPISODES = ".jsonl", ".episodes.jsonl"
DEPTH = 3
"""Levels of folders that are searched: runs/STAGES/STAGE is the third."""
HOW = "give the folder of a run, a folder of runs, or a file that sqlenv evaluate --episodes_out FILE.jsonl wrote"


class SourceError(SQLEnvError):
    """What was given holds nothing to show; the text says what to give instead."""


@dataclass(frozen=True, slots=True)
class Source:
    """A run, or an evaluation's episodes by themselves; its name is unique."""

    name: str
    path: Path

    @property
    def run(self) -> RunFolder | None:
        """The run's folder, of a run."""
        return None if self.path.suffix == RECORDS else RunFolder(self.path)

    def files(self) -> dict[Path, str]:
        """Return the files of episodes with their labels: training, before, during and after it, other players."""
        if self.run is None:
            return {self.path: self.path.stem}
        training = {self.run.episodes_path: TRAINING} if self.run.episodes_path.is_file() else {}
        found = {path: path.name.removesuffix(EPISODES) for path in self.run.evaluations_path.glob(f"*{EPISODES}")}
        places = {"before": 0, "after": 2}
        order = sorted(found.items(), key=lambda f: (places.get(f[1], 1 if f[1].startswith("step-") else 3), f[1]))
        return training | dict(order)

    def evaluations(self) -> list[Evaluation]:
        """Return its evaluations, those during training last. Raises RunFolderError."""
        if self.run is not None:
            return [*self.run.evaluations(), *(evaluation for _, evaluation in self.run.evaluations_during())]
        about = read_about(self.path)
        return [] if about is None else [about]


class Sources:
    """The sources below the paths that were given."""

    def __init__(self, given: Sequence[Path]) -> None:
        """Raises SourceError when a path is neither a source nor a folder."""
        for path in given:
            if not path.exists():
                raise SourceError(f"there is no {path}; {HOW}")
            if path.is_file() and (path.suffix != RECORDS or _is_source(path.parent)):
                raise SourceError(f"{path} is no file of an evaluation's episodes; {HOW}")
        self._given = tuple(given)
        self._known: list[Source] = []

    def look(self) -> list[Source]:
        """Return the sources that exist now."""
        found: dict[Path, tuple[Path, Path]] = {}
        for given in self._given:
            for path in [given] if given.is_file() else _below(given, DEPTH):
                found.setdefault(path.resolve(), (path.absolute(), given.absolute()))
        known = [source for source in self._known if source.path in found]
        for path, named in found.items():
            if path not in {source.path for source in known}:
                taken = {source.name for source in known}
                known.append(Source(next(name for name in _names(*named) if name not in taken), path))
        self._known = known
        return known


def _below(path: Path, depth: int) -> Iterator[Path]:
    """The sources at or below a path, in the order of their names."""
    if _is_source(path):
        yield path
    elif path.is_dir() and depth >= 0:
        try:
            children = sorted(path.iterdir())
        except OSError:  # not readable, or just removed
            return
        for child in children:
            yield from _below(child, depth - 1)


def _is_source(path: Path) -> bool:
    """A run has a config and a folder for evaluations, as a model's folder has not."""
    if path.suffix == RECORDS:
        return path.with_suffix(ABOUT).is_file()
    return (path / "config.json").is_file() and (path / "evaluations").is_dir()


def _names(path: Path, given: Path) -> Iterator[str]:
    """Names for a source: from the folder that was given on, then more and more of the path."""
    # FOLDER/episodes.jsonl is called as its folder is.
    parts = path.parent.parts if path.name == "episodes.jsonl" else path.with_suffix("").parts
    parts = path.parts if path.is_dir() else parts
    for count in range(max(1, len(parts) - len(given.parts)), len(parts)):
        yield "/".join(parts[-count:])
    yield str(path)
