"""All that is shown: the sources, the index of their episodes and their metrics, kept up to date by one thread.

Promises: what is asked for is answered from what is there now and never waits for the rest; `state` says how far that
is. Its `version` changes when anything has. Trouble with one file is told and spoils nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import apsw

from env_server.errors import SQLEnvError
from trainer.comparison.comparison import compare_sides
from trainer.comparison.sides import find_side
from trainer.comparison.text import verdict
from trainer.eval.run_files import Evaluation, differing, flags_of, read_about
from trainer.eval.statistics import intervals_as_pairs
from trainer.rollout.episodes import EpisodeRecord
from trainer.viewer import curves
from trainer.viewer.curves import MetricsLog
from trainer.viewer.episode import episode_view
from trainer.viewer.gold import Golds
from trainer.viewer.index import Index
from trainer.viewer.query import COLUMNS, Filter, Order, Statement, count, counts_by, listing, same_question
from trainer.viewer.sources import TRAINING, Source, Sources

LOOK_S = 1.0
"""Between two looks at the files."""
FACETS = ("outcome", "kind", "db_id", "hardness")
SAME = 200
"""Episodes of one question that are listed."""
_UNGUIDED = "FROM episodes WHERE file = ? AND given_steps = 0"
"""Episodes of training that say how well the policy plays by itself."""


class UnknownError(SQLEnvError):
    """There is nothing of this name or number."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A file of episodes that is in the index."""

    number: int
    source: Source
    label: str


class Library:
    """What `sqlenv view` shows. `start` it once; all else may be called by any thread."""

    def __init__(self, sources: Sources, index: Index) -> None:
        self._sources = sources
        self._index = index
        self._golds = Golds()
        self._found: list[Source] = []
        self._shown: dict[int, Shown] = {}
        self._logs: dict[Path, MetricsLog] = {}
        self._log_lock = Lock()
        self._version = 0
        self._busy = True
        self._trouble = ""
        self._stop = Event()
        self._thread = Thread(target=self._keep_up, name="viewer-index", daemon=True)
        self._name_files(self._look_around())

    def start(self) -> None:
        """Begin to keep up with the files."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and close the index."""
        self._stop.set()
        self._thread.join()
        self._index.close()

    def catch_up(self) -> None:
        """Read all that is new, or say why it cannot be: a full disk, for example, which may pass."""
        try:
            self._catch_up()
            self._trouble = ""
        except (OSError, apsw.Error) as error:
            self._trouble = f"what is new cannot be read: {error}"

    def state(self) -> dict[str, Any]:
        """Return what there is: the sources with their evaluations and their numbers of episodes."""
        counts = dict(self._index.rows("SELECT file, COUNT(*) FROM episodes GROUP BY file"))
        errors = self._index.errors
        read = dict(self._index.rows("SELECT path, place FROM files"))
        sizes = [(read.get(str(file.path), 0), _size(file.path)) for source in self._found for file in source.files()]
        return {
            "version": self._signature(counts),
            "trouble": self._trouble,
            "indexing": self._busy and any(done < size for done, size in sizes),
            "read": sum(done for done, _ in sizes),
            "size": sum(size for _, size in sizes),
            "episodes": sum(counts.values()),
            "sources": [self._about(source, counts, errors) for source in self._found],
        }

    def curves(self, name: str) -> dict[str, Any]:
        """Return the curves of a source. Raises UnknownError."""
        source = self._source(name)
        training = self._training_file(source)
        counts: list[tuple[int, str, str, int]] = []
        if training is not None:
            statement = f"SELECT step, db_id, outcome, COUNT(*) {_UNGUIDED} GROUP BY 1, 2, 3"
            counts = self._index.rows(statement, (training.number,))
        rows = self._metrics(source)
        return {**curves.series(rows), "success": curves.success(counts)}

    def failures(self, name: str) -> dict[str, Any]:
        """Return how often each kind of failure occurred: over training, and in each evaluation."""
        source = self._source(name)
        training = self._training_file(source)
        over: list[dict[str, Any]] = []
        if training is not None:
            statement = f"SELECT step, kind, outcome, COUNT(*) {_UNGUIDED} GROUP BY 1, 2, 3"
            over = curves.failures_over(self._index.rows(statement, (training.number,)))
        files = [shown for shown in self._shown.values() if shown.source == source]
        statement = "SELECT COALESCE(kind, outcome), COUNT(*) FROM episodes WHERE file = ? GROUP BY 1"
        totals = [
            {"label": shown.label, "counts": dict(self._index.rows(statement, (shown.number,)))} for shown in files
        ]
        return {"over": over, "totals": totals}

    def episodes(
        self, names: Sequence[str], labels: Sequence[str], wanted: Filter, order: Order, offset: int, limit: int
    ) -> dict[str, Any]:
        """Return a part of the episodes that are wanted, and how many there are; no name and no label means all."""
        files = tuple(
            shown.number
            for shown in self._shown.values()
            if (not names or shown.source.name in names) and (not labels or shown.label in labels)
        )
        wanted = Filter(**{**asdict(wanted), "files": files})
        ((total, right, reward),) = self._rows(count(wanted))
        return {
            "total": total,
            "right": right,
            "reward": reward,
            "episodes": self._listed(listing(wanted, order, offset, limit)),
            "facets": {name: dict(self._rows(counts_by(wanted, name))) for name in FACETS},
        }

    def episode(self, number: int) -> dict[str, Any]:
        """Return an episode turn by turn, and where else its question was played. Raises UnknownError."""
        shown, step, record = self._record(number)
        files = tuple(self._shown)
        same = same_question(files, record.question_id, record.db_id, record.question, SAME)
        where = {"id": number, "source": shown.source.name, "label": shown.label, "step": step}
        return {**episode_view(record), **where, "same": self._listed(same)}

    def gold(self, number: int) -> dict[str, Any]:
        """Return the gold of an episode's question. Raises UnknownError."""
        shown, _, record = self._record(number)
        data, answer_mode = self._data_of(shown)
        return asdict(self._golds.of(record, data, answer_mode))

    def compare(self, a: int, b: int) -> dict[str, Any]:
        """Compare two evaluations by the numbers of their files. Raises UnknownError, SideError or RunFolderError."""
        first, second = self._file(a), self._file(b)
        sides = find_side(first.source.side(first.label)), find_side(second.source.side(second.label))
        comparison = compare_sides(*sides)
        compared = {**asdict(comparison, dict_factory=intervals_as_pairs), "verdict": verdict(comparison)}
        for flip in (*compared["gained"], *compared["lost"]):
            flip["ids"] = [
                self._ending(number, flip["question_id"], flip[side]) for number, side in ((a, "a"), (b, "b"))
            ]
        return compared

    def differences(self, a: str, b: str) -> list[dict[str, Any]]:
        """Return the flags that two runs were started with differently. Raises UnknownError."""
        return [asdict(one) for one in differing(flags_of(self._config(a)), flags_of(self._config(b)))]

    def flags(self, name: str) -> dict[str, Any]:
        """Return what a run was started with, with nothing secret. Raises UnknownError."""
        return flags_of(self._config(name))

    # --- keeping up ---

    def _keep_up(self) -> None:
        while not self._stop.is_set():
            self.catch_up()
            self._stop.wait(LOOK_S)

    def _catch_up(self) -> None:
        sources = self._look_around()
        paths = [file.path for source in sources for file in source.files()]
        self._busy = True
        self._name_files(sources)
        for _ in self._index.update(paths):
            self._name_files(sources)
            self._version += 1
            if self._stop.is_set():
                return
        self._name_files(sources)
        self._busy = False

    def _look_around(self) -> list[Source]:
        self._found = self._sources.look()
        return self._found

    def _name_files(self, sources: Sequence[Source]) -> None:
        numbers = self._index.files()
        self._shown = {
            numbers[file.path]: Shown(numbers[file.path], source, file.label)
            for source in sources
            for file in source.files()
            if file.path in numbers
        }

    def _signature(self, counts: dict[int, int]) -> str:
        """A word that is another one when something has changed."""
        logs = [
            _size(path)
            for source in self._found
            if source.is_run
            for path in (source.run.metrics_path, source.run.health_path, *source.run.evaluations_path.glob("*.json"))
        ]
        return f"{self._version}.{sum(counts.values())}.{len(self._found)}.{sum(logs)}"

    # --- one thing ---

    def _about(self, source: Source, counts: dict[int, int], errors: dict[Path, str]) -> dict[str, Any]:
        files = [shown for shown in self._shown.values() if shown.source == source]
        trouble = [f"{path.name}: {errors[path]}" for path in (f.path for f in source.files()) if path in errors]
        about: dict[str, Any] = {
            "name": source.name,
            "path": str(source.path),
            "is_run": source.is_run,
            "files": [{"id": f.number, "label": f.label, "episodes": counts.get(f.number, 0)} for f in files],
            "evaluations": [],
            "alerts": [],
            "trouble": trouble,
            "step": None,
            "max_steps": None,
            "written": max((_modified(file.path) for file in source.files()), default=0.0),
        }
        try:
            about["evaluations"] = [curves.evaluation_point(e) for e in _evaluations(source)]
            if source.is_run:
                about["alerts"] = [asdict(alert) for alert in source.run.alerts()]
                config = source.run.config()
                about["max_steps"] = config.get("grpo", {}).get("max_steps")
                about["facts"] = _facts(config)
                rows = self._metrics(source)
                about["step"] = int(rows[-1]["step"]) if rows else None
                trouble += filter(None, [self._logs[source.path].trouble])
        except (SQLEnvError, OSError) as error:
            trouble.append(str(error))
        return about

    def _source(self, name: str) -> Source:
        for source in self._found:
            if source.name == name:
                return source
        raise UnknownError(f"there is no run or evaluation {name!r} here")

    def _file(self, number: int) -> Shown:
        if number not in self._shown:
            raise UnknownError(f"there is no file of episodes with the number {number}")
        return self._shown[number]

    def _training_file(self, source: Source) -> Shown | None:
        files = (shown for shown in self._shown.values() if shown.source == source and shown.label == TRAINING)
        return next(files, None)

    def _record(self, number: int) -> tuple[Shown, int | None, EpisodeRecord]:
        found = self._index.record(number)
        if found is None or found[0] not in self._shown:
            raise UnknownError(f"there is no episode with the number {number}; its file may have been written anew")
        return self._shown[found[0]], found[1], found[2]

    def _config(self, name: str) -> dict[str, Any]:
        source = self._source(name)
        return source.run.config() if source.is_run else {}

    def _metrics(self, source: Source) -> list[dict[str, float]]:
        if not source.is_run:
            return []
        with self._log_lock:
            log = self._logs.setdefault(source.path, MetricsLog(source.run.metrics_path))
            return log.rows()

    def _data_of(self, shown: Shown) -> tuple[str, str]:
        """The data set and the answer mode of a file's questions."""
        if shown.label == TRAINING and shown.source.is_run:
            flags = shown.source.run.config().get("sqlenv", {})
            return str(flags.get("data", "")), str(flags.get("answer_mode", "value"))
        for evaluation in _evaluations(shown.source):
            if evaluation.label == shown.label or not shown.source.is_run:
                return evaluation.data, evaluation.answer_mode
        return "", "value"

    def _rows(self, statement: Statement) -> list[tuple[Any, ...]]:
        return self._index.rows(statement.text, statement.values)

    def _listed(self, statement: Statement) -> list[dict[str, Any]]:
        listed = []
        for row in self._rows(statement):
            one = dict(zip(COLUMNS, row, strict=True))
            shown = self._shown.get(one.pop("file"))
            if shown is not None:
                listed.append({**one, "source": shown.source.name, "label": shown.label})
        return listed

    def _ending(self, file: int, question_id: str, ending: dict[str, Any]) -> int | None:
        """The number of an episode of a question that ended in a certain way."""
        statement = "SELECT id FROM episodes WHERE file = ? AND question_id = ? AND outcome = ? AND steps = ? LIMIT 1"
        found = self._index.rows(statement, (file, question_id, ending["outcome"], ending["steps"]))
        return found[0][0] if found else None


def _evaluations(source: Source) -> list[Evaluation]:
    """All evaluations of a source, those during training last."""
    if source.is_run:
        return [*source.run.evaluations(), *(evaluation for _, evaluation in source.run.evaluations_during())]
    about = read_about(source.path)
    return [] if about is None else [about]


def _facts(config: dict[str, Any]) -> list[tuple[str, str]]:
    """What a run is, in a few words."""
    ours, grpo, model = (config.get(part, {}) for part in ("sqlenv", "grpo", "model"))
    named = {
        "model": model.get("model_name_or_path"),
        "data": ours.get("data"),
        "answers": ours.get("answer_mode"),
        "learning rate": grpo.get("learning_rate"),
        "beta": grpo.get("beta"),
        "episodes a group": grpo.get("num_generations"),
        "seed": grpo.get("seed"),
    }
    known = {name: value for name, value in named.items() if value is not None}
    return [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in known.items()]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
