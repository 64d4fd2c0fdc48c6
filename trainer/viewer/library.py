"""All that `sqlenv view` shows: the sources, the index of their episodes and their metrics, kept current by one thread.

Guarantees: a request is answered from what has been read and never waits for the rest; `state` says how far that is,
and its `version` changes with the data. An error in one file is reported and affects no other.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import apsw

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset
from env_server.errors import SQLEnvError, UnknownQuestionError
from env_server.settings import DisplaySettings
from env_server.sql.display import format_cell
from env_server.types import AnswerMode
from trainer.eval.failure_kinds import FailureKind
from trainer.eval.metrics import meaning
from trainer.eval.run_files import Evaluation, RunFolder, differing, flags_of
from trainer.eval.statistics import intervals_as_pairs
from trainer.report.comparison import compare_sides
from trainer.report.curves import CHARTS, TIMES, charts_of, rolling_success, series_of, window_for
from trainer.report.replays import episode_view
from trainer.report.sides import find_side
from trainer.report.tables import comparison_rows, group_rows, verdict
from trainer.rollout.episodes import EpisodeRecord, Outcome
from trainer.viewer.index import Filter, Index
from trainer.viewer.sources import TRAINING, Source, Sources

LOOK_S = 1.0
"""Between two looks at the files."""
BARS = 40
"""Columns of the chart of failures."""
SAME = 200
"""Episodes of one question that are listed."""
SHOWN_ROWS = 50
"""Rows of a gold answer that are shown."""
RIGHT = "right"
"""Beside the kinds of failure: the episodes that are right."""
_UNGUIDED = "FROM episodes WHERE file = ? AND given_steps = 0"


class UnknownError(SQLEnvError):
    """No source, file or episode has this name or number."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A file of episodes in the index."""

    number: int
    source: Source
    label: str


class Library:
    """What `sqlenv view` shows. `start` it once; all else but `catch_up` may be called by any thread."""

    def __init__(self, given: Sequence[Path]) -> None:
        """Raises SourceError when a path is neither a source nor a folder."""
        self._given = Sources(given)
        self._index = Index()
        self._sources = self._given.look()
        self._busy = True
        self._shown: dict[int, Shown] = {}
        self._metrics_read: dict[Path, tuple[tuple[int, int], list[dict[str, float]]]] = {}
        self._datasets: dict[tuple[str, str], Dataset | str] = {}
        self._lock = Lock()
        self._version = 0
        self._trouble = ""
        self._stop = Event()
        self._thread = Thread(target=self._keep_up, name="viewer-index", daemon=True)

    def start(self) -> None:
        """Begin to keep up with the files."""
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._stop.set()
        self._thread.join()

    # --- keeping up ---

    def catch_up(self) -> None:
        """Read all that is new, or report why it cannot be read, such as a full disk: the next look tries again."""
        self._busy = True
        try:
            self._sources = self._given.look()
            for _ in self._index.update([path for source in self._sources for path in source.files()]):
                self._look_up_files()
                self._version += 1
                if self._stop.is_set():
                    return
            self._look_up_files()
            self._trouble = ""
        except (OSError, apsw.Error) as error:
            self._trouble = f"what is new cannot be read: {error}"
        self._busy = False

    def _keep_up(self) -> None:
        while not self._stop.is_set():
            self.catch_up()
            self._stop.wait(LOOK_S)

    def _look_up_files(self) -> None:
        numbers = self._index.numbers()
        files = [(source, path, label) for source in self._sources for path, label in source.files().items()]
        self._shown = {numbers[p]: Shown(numbers[p], source, label) for source, p, label in files if p in numbers}

    # --- what the page asks for ---

    def words(self) -> dict[str, Any]:
        """Return what kinds of failure mean, and which groups of charts and parts of a step's time there are."""
        kinds = {kind.value: kind.meaning for kind in FailureKind}
        return {"kinds": kinds, "charts": list(CHARTS), "times": list(TIMES.items())}

    def state(self) -> dict[str, Any]:
        """Return the sources with their evaluations and numbers of episodes, and how far their files are read."""
        counts = dict(self._index.rows("SELECT file, COUNT(*) FROM episodes GROUP BY file"))
        offsets, errors = self._index.offsets(), self._index.errors()
        sizes = {path: _stat(path)[0] for source in self._sources for path in source.files()}
        read = {path: size if path in errors else min(size, offsets.get(path, 0)) for path, size in sizes.items()}
        logs = [_stat(path) for source in self._sources if source.run for path in _logs(source.run)]
        return {
            "version": f"{self._version}.{sum(counts.values())}.{hash(tuple(logs))}.{len(self._sources)}",
            "trouble": self._trouble,
            "indexing": self._busy and read != sizes,
            "read": sum(read.values()),
            "size": sum(sizes.values()),
            "episodes": sum(counts.values()),
            "sources": [self._about(source, counts, errors) for source in self._sources],
        }

    def curves(self, source: str) -> dict[str, Any]:
        """Return the curves of a run. Raises UnknownError, or RunFolderError for a broken log."""
        found = self._source(source)
        rows = self._metrics(found)
        statement = f"SELECT step, db_id, outcome, COUNT(*) {_UNGUIDED} GROUP BY 1, 2, 3"
        counts = {(step, db_id, outcome): n for step, db_id, outcome, n in self._of_training(found, statement)}
        points, window = rolling_success(counts)
        success = {
            "window": window,
            "steps": [p.step for p in points],
            "rate": [p.rate for p in points],
            "low": [p.interval.low for p in points],
            "high": [p.interval.high for p in points],
        }
        charts = {group: charts_of(group, rows) for group in CHARTS}
        series = {name: {**asdict(one), "meaning": meaning(name)} for name, one in series_of(rows).items()}
        return {"series": series, "window": window_for(len(rows)), "charts": charts, "success": success}

    def failures(self, source: str) -> dict[str, Any]:
        """Return how often each kind of failure occurred: over training, and in each evaluation."""
        found = self._source(source)
        over = self._of_training(found, f"SELECT step, kind, outcome, COUNT(*) {_UNGUIDED} GROUP BY 1, 2, 3")
        statement = "SELECT COALESCE(kind, outcome), COUNT(*) FROM episodes WHERE file = ? GROUP BY 1"
        files = [shown for shown in self._shown.values() if shown.source == found]
        totals = [{"label": f.label, "counts": dict(self._index.rows(statement, (f.number,)))} for f in files]
        return {"over": failures_over(over), "totals": totals}

    def episodes(self, wanted: Filter) -> dict[str, Any]:
        """Return a page of the wanted episodes, and how many there are; no source and no label means all."""
        files = [
            shown.number
            for shown in self._shown.values()
            if (not wanted.source or shown.source.name in wanted.source)
            and (not wanted.label or shown.label in wanted.label)
        ]
        found = self._index.search(files, wanted)
        return {**found, "episodes": self._located(found["episodes"])}

    def episode(self, number: int) -> dict[str, Any]:
        """Return an episode turn by turn, and the other episodes of its question. Raises UnknownError."""
        shown, step, record = self._record(number)
        same = self._index.listed(
            "FROM episodes WHERE question_id = :question_id AND db_id = :db_id AND question = :question "
            "ORDER BY step IS NOT NULL, step DESC, seq DESC LIMIT :limit",
            {name: getattr(record, name) for name in ("question_id", "db_id", "question")} | {"limit": SAME},
        )
        where = {"id": number, "source": shown.source.name, "label": shown.label, "step": step}
        return {**episode_view(record), **where, "same": self._located(same)}

    def gold(self, number: int) -> dict[str, Any]:
        """Return the gold query and answer of an episode's question, or why there is none. Raises UnknownError."""
        shown, _, record = self._record(number)
        data, answer_mode = self._data_of(shown)
        if not data:
            return {"why": "the data set is not known: it is written when the evaluation ends"}
        dataset = self._dataset(data, answer_mode)
        if isinstance(dataset, str):
            return {"why": dataset}
        try:
            question = dataset.question(record.question_id)
        except UnknownQuestionError:
            return {"why": f"{data} as it is here holds no question {record.question_id}"}
        if (question.text, question.db_id) != (record.question, record.db_id):
            return {"why": f"{data} as it is here has another question under this id"}
        width, gold = DisplaySettings().max_cell_chars, question.gold
        rows = [[format_cell(value, width) for value in row] for row in gold.rows[:SHOWN_ROWS]]
        return {"sql": question.gold_sql, "rows": rows, "count": len(gold.rows), "ordered": gold.ordered, "why": ""}

    def compare(self, a: int, b: int) -> dict[str, Any]:
        """Compare two evaluations by the numbers of their files. Raises UnknownError, SideError or RunFolderError."""
        files = [self._shown.get(number) for number in (a, b)]
        names = [f"{f.source.path}:{f.label}" if f.source.run else str(f.source.path) for f in files if f is not None]
        if len(names) < 2:
            raise UnknownError(f"there is no file of episodes with the number {a if files[0] is None else b}")
        comparison = compare_sides(*map(find_side, names))
        compared = asdict(comparison, dict_factory=intervals_as_pairs)
        rows = [row for rows in comparison_rows(comparison) for row in rows]
        for flip in (*compared["gained"], *compared["lost"]):
            flip["ids"] = [self._ending(n, flip["question_id"], flip[side]) for n, side in ((a, "a"), (b, "b"))]
        return {
            "verdict": verdict(comparison),
            "rows": [asdict(row, dict_factory=intervals_as_pairs) for row in rows],
            "by_database": [asdict(row, dict_factory=intervals_as_pairs) for row in group_rows(comparison.by_database)],
            **{name: compared[name] for name in ("warnings", "settings", "gained", "lost")},
        }

    def differences(self, a: str, b: str) -> list[dict[str, Any]]:
        """Return the flags that two runs were started with differently. Raises UnknownError."""
        return [asdict(one) for one in differing(*(flags_of(self._config(self._source(name))) for name in (a, b)))]

    # --- one thing ---

    def _about(self, source: Source, counts: dict[int, int], errors: dict[Path, str]) -> dict[str, Any]:
        files = [shown for shown in self._shown.values() if shown.source == source]
        paths = source.files()
        trouble = [f"{path.name}: {errors[path]}" for path in paths if path in errors]
        about: dict[str, Any] = {
            "name": source.name,
            "path": str(source.path),
            "is_run": source.run is not None,
            "files": [{"id": f.number, "label": f.label, "episodes": counts.get(f.number, 0)} for f in files],
            "evaluations": [],
            "alerts": [],
            "trouble": trouble,
            "step": None,
            "max_steps": None,
            "written": max((_stat(path)[1] / 1e9 for path in paths), default=0.0),
        }
        try:
            about["evaluations"] = [_evaluation(e) for e in source.evaluations()]
            if source.run is not None:
                about["alerts"] = [asdict(alert) for alert in source.run.alerts()]
                config = source.run.config()
                about["max_steps"] = config.get("grpo", {}).get("max_steps")
                about["facts"] = _facts(config)
                rows = self._metrics(source)
                about["step"] = int(rows[-1]["step"]) if rows else None
        except (SQLEnvError, OSError) as error:
            trouble.append(str(error))
        return about

    def _source(self, name: str) -> Source:
        for source in self._sources:
            if source.name == name:
                return source
        raise UnknownError(f"there is no run or evaluation {name!r} here")

    def _record(self, number: int) -> tuple[Shown, int | None, EpisodeRecord]:
        found = self._index.record(number)
        if found is None or found[0] not in self._shown:
            raise UnknownError(f"there is no episode with the number {number}; its file may have been replaced")
        return self._shown[found[0]], found[1], found[2]

    def _located(self, listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Say of listed episodes where they are from; those of a file that is no longer there are left out."""
        shown = self._shown
        found = [(one, shown[one["file"]]) for one in listed if one["file"] in shown]
        return [{**one, "source": file.source.name, "label": file.label} for one, file in found]

    def _of_training(self, source: Source, statement: str) -> list[tuple[Any, ...]]:
        files = [f.number for f in self._shown.values() if f.source == source and f.label == TRAINING and source.run]
        return self._index.rows(statement, files) if files else []

    def _config(self, source: Source) -> dict[str, Any]:
        return source.run.config() if source.run is not None else {}

    def _metrics(self, source: Source) -> list[dict[str, float]]:
        """The metrics of a run, read again when the log has changed."""
        if source.run is None:
            return []
        now = _stat(source.run.metrics_path)
        then, rows = self._metrics_read.get(source.path, (None, []))
        if now != then:
            rows = source.run.metrics()
            self._metrics_read[source.path] = now, rows
        return rows

    def _data_of(self, shown: Shown) -> tuple[str, str]:
        """The data set and the answer mode of a file's questions."""
        if shown.label == TRAINING and shown.source.run is not None:
            flags = self._config(shown.source).get("sqlenv", {})
            return str(flags.get("data", "")), str(flags.get("answer_mode", "value"))
        found = [e for e in shown.source.evaluations() if e.label == shown.label or shown.source.run is None]
        return (found[0].data, found[0].answer_mode) if found else ("", "value")

    def _dataset(self, data: str, answer_mode: str) -> Dataset | str:
        """The data set, or why it cannot be loaded; one thread loads, the others wait for it."""
        with self._lock:
            key = (data, answer_mode)
            if key not in self._datasets:
                try:
                    self._datasets[key] = load_dataset(data, answer_mode=AnswerMode(answer_mode))
                except (SQLEnvError, OSError, ValueError) as error:
                    self._datasets[key] = f"the data set {data} cannot be read here: {error}"
            return self._datasets[key]

    def _ending(self, file: int, question_id: str, ending: dict[str, Any]) -> int | None:
        """The number of an episode of a question that ended in a certain way."""
        statement = "SELECT id FROM episodes WHERE file = ? AND question_id = ? AND outcome = ? AND steps = ? LIMIT 1"
        found = self._index.rows(statement, (file, question_id, ending["outcome"], ending["steps"]))
        return found[0][0] if found else None


def failures_over(counts: Sequence[tuple[int, str | None, str, int]]) -> list[dict[str, Any]]:
    """Return how often each kind of failure occurred over training, from counts of each step, kind and outcome.

    Steps are binned so that there are at most BARS of them; errored episodes are left out.
    """
    counts = [one for one in counts if one[2] != Outcome.FAILED]
    if not counts:
        return []
    first, last = min(step for step, *_ in counts), max(step for step, *_ in counts)
    width = math.ceil((last - first + 1) / BARS)
    bars: dict[int, dict[str, int]] = {}
    for step, kind, _, number in counts:
        bars.setdefault((step - first) // width, defaultdict(int))[RIGHT if kind is None else kind] += number
    return [
        {"first": (start := first + place * width), "last": min(start + width - 1, last), "counts": bars[place]}
        for place in sorted(bars)
    ]


def _evaluation(evaluation: Evaluation) -> dict[str, Any]:
    summary = evaluation.summary
    return {
        **{name: getattr(evaluation, name) for name in ("label", "step", "during")},
        "rate": summary.success_rate,
        "low": summary.interval.low,
        "high": summary.interval.high,
        "episodes": summary.episodes,
    }


def _facts(config: dict[str, Any]) -> list[tuple[str, str]]:
    """What a run is, in a few words."""
    ours, grpo, model = (config.get(part, {}) for part in ("sqlenv", "grpo", "model"))
    named = {
        "model": model.get("model_name_or_path"),
        "data": ours.get("data"),
        "answers": ours.get("answer_mode"),
        "learning rate": grpo.get("learning_rate"),
        "beta": grpo.get("beta"),
        "episodes per group": grpo.get("num_generations"),
        "seed": grpo.get("seed"),
    }
    known = {name: value for name, value in named.items() if value is not None}
    return [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in known.items()]


def _logs(run: RunFolder) -> list[Path]:
    return [run.metrics_path, run.health_path, *sorted(run.evaluations_path.glob("*.json"))]


def _stat(path: Path) -> tuple[int, int]:
    """The size of a file and when it was last written, in nanoseconds; zeros where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns
