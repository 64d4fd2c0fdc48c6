"""All that `sqlenv view` shows: runs and evaluations, their episodes and their metrics.

Episodes are in a temporary SQLite database: columns to filter by, a full-text index, and where each one is in its file,
from which it is read when it is shown. Guarantees:

1. `refresh` reads what was appended to each file, in complete lines. A file that shrank, as that of a resumed run, or
   that was replaced is read again; one that is gone is forgotten.
2. An error in one file is reported with its source and affects no other: a malformed line ends the reading of its file.
3. What a user types is a value and never a part of a statement.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any, Literal

import apsw
from pydantic import BaseModel, Field
from pydantic_core import from_json

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset
from env_server.errors import SQLEnvError, UnknownQuestionError
from env_server.settings import DisplaySettings
from env_server.sql.display import format_cell
from env_server.types import AnswerMode
from trainer.eval.failure_kinds import FailureKind, failure_kind
from trainer.eval.metrics import meaning
from trainer.eval.run_files import Evaluation, RunFolder, differing, flags_of
from trainer.eval.statistics import intervals_as_pairs
from trainer.report.compare import find_side
from trainer.report.comparison import compare_sides
from trainer.report.curves import CHARTS, TIMES, charts_of, rolling_success, series_of, window_for
from trainer.report.replays import episode_view
from trainer.report.tables import comparison_rows, group_rows, verdict
from trainer.rollout.episodes import EpisodeRecord, Outcome
from trainer.viewer.sources import TRAINING, Source, Sources

LINES = 2**32
"""Numbers of episodes in one file: that of an episode is LINES times its file's, plus its line's from 0."""
BARS = 40
"""Columns of the chart of failures."""
SAME = 200
"""Episodes of one question that are listed."""
SHOWN_ROWS = 50
"""Rows of a gold answer that are shown."""
RIGHT = "right"
"""Beside the kinds of failure: the episodes that are right."""
LISTED = (
    *("id", "file", "step", "question_id", "db_id", "question", "hardness", "family", "outcome", "kind", "reward"),
    *("steps", "tokens", "prompt_tokens", "parse_rate"),
)
"""What a list of episodes shows of each."""
FACETS = ("outcome", "kind", "db_id", "hardness")
_COLUMNS = (*LISTED, "seq", "start", "size", "given_steps")
_TABLES = f"""
PRAGMA journal_mode = MEMORY; PRAGMA synchronous = OFF; PRAGMA cache_size = -100000;
CREATE TABLE episodes (id INTEGER PRIMARY KEY, {", ".join(_COLUMNS[1:])});
CREATE INDEX by_file ON episodes (file, step);
CREATE INDEX by_question ON episodes (question_id);
CREATE VIRTUAL TABLE words USING fts5(
  text, content='', contentless_delete=1, tokenize="unicode61 remove_diacritics 2"
);
"""
_INSERT = f"INSERT INTO episodes ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_UNGUIDED = "FROM episodes WHERE file = ? AND given_steps = 0"
_TERM = re.compile(r'(-?)(?:"([^"]*)"|(\S+))')


class UnknownError(SQLEnvError):
    """No source, file or episode has this name or number."""


_ORDERS = {
    "newest": "seq DESC",
    "oldest": "seq",
    "reward_down": "reward DESC, seq DESC",
    "reward_up": "reward, seq DESC",
    "steps_down": "steps DESC, seq DESC",
    "tokens_down": "tokens DESC, seq DESC",
}


class Filter(BaseModel):
    """Which episodes, in what order, and which part of the list; None and "" leave a condition out.

    Of equals, the one that was read last comes first.
    """

    source: str = ""
    label: str = ""
    outcome: str = ""
    kind: str = ""
    """A kind of failure, or "any" for all that failed."""
    db_id: str = ""
    hardness: str = ""
    question_id: str = ""
    min_step: int | None = None
    max_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    text: str = ""
    order: Literal["newest", "oldest", "reward_down", "reward_up", "steps_down", "tokens_down"] = "newest"
    offset: int = Field(default=0, ge=0, lt=2**62)
    limit: int = Field(default=100, ge=0, le=500)


@dataclass(slots=True)
class EpisodeFile:
    """A file of episodes, and how far it has been read."""

    number: int
    path: Path
    source: Source
    label: str
    inode: int = 0
    offset: int = 0
    lines: int = 0
    error: str = ""


class Library:
    """What is shown; any thread may call anything."""

    def __init__(self, given: Sequence[Path]) -> None:
        """Raises SourceError when a path is neither a source nor a folder."""
        self._given = Sources(given)
        self.sources = self._given.look()
        self._files: dict[Path, EpisodeFile] = {}
        self._numbers, self._seq = count(1), count(1)
        self._changes = 0
        self._lock = RLock()
        self._db = apsw.Connection("")  # a file of SQLite's own, which it deletes
        self._db.execute(_TABLES).fetchall()

    def refresh(self) -> None:
        """Read what is new; other threads wait for it."""
        with self._lock:
            self.sources = self._given.look()
            found = {path: (source, label) for source in self.sources for path, label in source.files().items()}
            for path in self._files.keys() - found.keys():
                self._forget(self._files.pop(path))
            for path, (source, label) in found.items():
                if path not in self._files:
                    self._files[path] = EpisodeFile(next(self._numbers), path, source, label)
                self._read_on(self._files[path])

    # --- what the page asks for ---

    def words(self) -> dict[str, Any]:
        """Return what kinds of failure mean, and which groups of charts and parts of a step's time there are."""
        kinds = {kind.value: kind.meaning for kind in FailureKind}
        return {"kinds": kinds, "charts": list(CHARTS), "times": list(TIMES.items())}

    def state(self) -> dict[str, Any]:
        """Read what is new, and return the sources with their evaluations; `version` changes with any of it."""
        with self._lock:
            self.refresh()
            counts = dict(self._rows("SELECT file, COUNT(*) FROM episodes GROUP BY file"))
            logs = [_stat(path) for source in self.sources if source.run for path in _logs(source.run)]
            return {
                "version": f"{self._changes}.{hash(tuple(logs))}.{len(self.sources)}",
                "episodes": sum(counts.values()),
                "sources": [self._about(source, counts) for source in self.sources],
            }

    def curves(self, source: str) -> dict[str, Any]:
        """Return the curves of a run. Raises UnknownError, or RunFolderError for a broken log."""
        found = self._source(source)
        rows = _metrics(found)
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
        totals = [{"label": f.label, "counts": dict(self._rows(statement, (f.number,)))} for f in self._files_of(found)]
        return {"over": failures_over(over), "totals": totals}

    def episodes(self, wanted: Filter) -> dict[str, Any]:
        """Return a page of the wanted episodes, how many there are, and how many of each facet."""
        files = [
            file.number
            for file in self._files.copy().values()
            if wanted.source in ("", file.source.name) and wanted.label in ("", file.label)
        ]
        where, values = _where(files, wanted)
        ((total, right, reward),) = self._rows(
            f"SELECT COUNT(*), COALESCE(SUM(outcome = 'correct'), 0), AVG(reward) {where}", values
        )
        facets = {}
        for name in FACETS:  # of the episodes that the other conditions leave
            others, known = _where(files, wanted.model_copy(update={name: ""}))
            group = f"SELECT {name}, COUNT(*) {others} AND {name} IS NOT NULL GROUP BY 1 ORDER BY 2 DESC, 1"
            facets[name] = dict(self._rows(group, known))
        page = f"{where} ORDER BY {_ORDERS[wanted.order]} LIMIT :limit OFFSET :offset"
        listed = self._listed(page, values | {"limit": wanted.limit, "offset": wanted.offset})
        return {"total": total, "right": right, "reward": reward, "episodes": listed, "facets": facets}

    def episode(self, number: int) -> dict[str, Any]:
        """Return an episode turn by turn, and the other episodes of its question. Raises UnknownError."""
        file, step, record = self._record(number)
        same = self._listed(
            "FROM episodes WHERE question_id = :question_id AND db_id = :db_id AND question = :question "
            "ORDER BY step IS NOT NULL, step DESC, seq DESC LIMIT :limit",
            {name: getattr(record, name) for name in ("question_id", "db_id", "question")} | {"limit": SAME},
        )
        where = {"id": number, "source": file.source.name, "label": file.label, "step": step}
        return {**episode_view(record), **where, "same": same}

    def gold(self, number: int) -> dict[str, Any]:
        """Return the gold query and answer of an episode's question, or why there is none. Raises UnknownError."""
        file, _, record = self._record(number)
        data, answer_mode = _data_of(file)
        if not data:
            return {"why": "the data set is not known: it is written when the evaluation ends"}
        with self._lock:  # one thread loads, the others wait for it
            dataset = _dataset(data, answer_mode)
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
        files = [self._file(number) for number in (a, b)]
        names = [f"{f.source.path}:{f.label}" if f.source.run else str(f.source.path) for f in files]
        comparison = compare_sides(*map(find_side, names))
        compared = asdict(comparison, dict_factory=intervals_as_pairs)
        rows = [row for rows in comparison_rows(comparison) for row in rows]
        ids = "SELECT id FROM episodes WHERE file = ? AND question_id = ? AND outcome = ? AND steps = ? LIMIT 1"
        for flip in (*compared["gained"], *compared["lost"]):
            endings = [
                (n, flip["question_id"], flip[side]["outcome"], flip[side]["steps"]) for n, side in ((a, "a"), (b, "b"))
            ]
            flip["ids"] = [found[0][0] if (found := self._rows(ids, ending)) else None for ending in endings]
        return {
            "verdict": verdict(comparison),
            "rows": [asdict(row, dict_factory=intervals_as_pairs) for row in rows],
            "by_database": [asdict(row, dict_factory=intervals_as_pairs) for row in group_rows(comparison.by_database)],
            **{name: compared[name] for name in ("warnings", "settings", "gained", "lost")},
        }

    def differences(self, a: str, b: str) -> list[dict[str, Any]]:
        """Return the flags that two runs were started with differently. Raises UnknownError."""
        return [asdict(one) for one in differing(*(flags_of(_config(self._source(name))) for name in (a, b)))]

    # --- one thing ---

    def _about(self, source: Source, counts: Mapping[int, int]) -> dict[str, Any]:
        files = self._files_of(source)
        trouble = [f"{file.path.name}: {file.error}" for file in files if file.error]
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
            "written": max((_stat(file.path)[1] / 1e9 for file in files), default=0.0),
        }
        try:
            about["evaluations"] = [_evaluation(e) for e in source.evaluations()]
            if source.run is not None:
                about["alerts"] = [asdict(alert) for alert in source.run.alerts()]
                config = source.run.config()
                about["max_steps"] = config.get("grpo", {}).get("max_steps")
                about["facts"] = _facts(config)
                rows = _metrics(source)
                about["step"] = int(rows[-1]["step"]) if rows else None
        except (SQLEnvError, OSError) as error:
            trouble.append(str(error))
        return about

    def _source(self, name: str) -> Source:
        for source in self.sources:
            if source.name == name:
                return source
        raise UnknownError(f"there is no run or evaluation {name!r} here")

    def _file(self, number: int) -> EpisodeFile:
        for file in self._files.copy().values():
            if file.number == number:
                return file
        raise UnknownError(f"there is no file of episodes with the number {number}")

    def _files_of(self, source: Source) -> list[EpisodeFile]:
        return [self._files[path] for path in source.files() if path in self._files]

    def _record(self, number: int) -> tuple[EpisodeFile, int | None, EpisodeRecord]:
        """Read an episode, with its training step. Raises UnknownError."""
        found = self._rows("SELECT start, size FROM episodes WHERE id = ?", (number,))
        try:
            file = self._file(number // LINES)
            with file.path.open("rb") as opened:
                opened.seek(found[0][0])
                return file, *_parse(opened.read(found[0][1]))
        except (IndexError, OSError, ValueError, UnknownError) as error:
            message = f"there is no episode with the number {number}; its file may have been replaced"
            raise UnknownError(message) from error

    def _of_training(self, source: Source, statement: str) -> list[tuple[Any, ...]]:
        files = [file.number for file in self._files_of(source) if source.run and file.label == TRAINING]
        return self._rows(statement, files) if files else []

    # --- the database ---

    def _rows(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            return list(self._db.execute(statement, values))

    def _listed(self, clauses: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what a list shows of the episodes that a statement from FROM on selects."""
        files = {file.number: file for file in self._files.copy().values()}
        rows = self._rows(f"SELECT {', '.join(LISTED)} {clauses}", values)
        listed = [dict(zip(LISTED, row, strict=True)) for row in rows]
        return [{**one, "source": (file := files[one["file"]]).source.name, "label": file.label} for one in listed]

    def _read_on(self, file: EpisodeFile) -> None:
        """Read what is new in a file."""
        try:
            with file.path.open("rb") as opened:
                stat = os.fstat(opened.fileno())
                if stat.st_ino != file.inode or stat.st_size < file.offset:
                    self._forget(file)
                    file.inode, file.offset, file.lines, file.error = stat.st_ino, 0, 0, ""
                if file.error or stat.st_size == file.offset:
                    return
                opened.seek(file.offset)
                with self._db:
                    file.offset, file.lines, file.error = self._insert(file, opened)
            self._changes += 1
        except FileNotFoundError:
            return
        except (OSError, apsw.Error) as error:
            file.inode = 0  # the next look tries again
            file.error = getattr(error, "strerror", None) or str(error)

    def _insert(self, file: EpisodeFile, lines: Iterator[bytes]) -> tuple[int, int, str]:
        """Insert episodes; return where in the file the next one will be, its line's number, and what is malformed."""
        start, number = file.offset, file.lines
        for line in lines:
            if not line.endswith(b"\n"):  # half a line, which is still being written
                break
            try:
                step, record = _parse(line)
                kind = _kind(record)
            except ValueError as error:
                return start, number, f"byte {start}: {error}"
            known = {"id": file.number * LINES + number, "file": file.number, "step": step, "kind": kind}
            known |= {"seq": next(self._seq), "start": start, "size": len(line)}
            row = [known[name] if name in known else getattr(record, name) for name in _COLUMNS]
            self._db.execute(_INSERT, row)
            self._db.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (known["id"], _text(record)))
            start, number = start + len(line), number + 1
        return start, number, ""

    def _forget(self, file: EpisodeFile) -> None:
        with self._db:
            self._db.execute(
                "DELETE FROM words WHERE rowid IN (SELECT id FROM episodes WHERE file = ?)", (file.number,)
            )
            self._db.execute("DELETE FROM episodes WHERE file = ?", (file.number,))
        self._changes += 1


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


def match_of(text: str) -> str:
    """Return a search as an expression of the full-text index; "" when it holds no word.

    Words are prefixes, and all must occur; what is in quotes must occur as it is, a word after a minus must not.
    """
    wanted: list[str] = []
    unwanted: list[str] = []
    for minus, quoted, word in _TERM.findall(text.replace("\0", " ")):  # a statement ends at a zero byte
        if re.search(r"\w", quoted or word):
            phrase = '"' + (quoted or word).replace('"', '""') + '"'
            (unwanted if minus else wanted).append(phrase if quoted else f"{phrase} *")
    if not wanted:
        return ""
    both = " AND ".join(wanted)
    return f"({both}) NOT ({' OR '.join(unwanted)})" if unwanted else both


def _where(files: Sequence[int], wanted: Filter) -> tuple[str, dict[str, Any]]:
    """Return the part of a statement from FROM to the end of WHERE, with its values."""
    parts = [f"file IN ({', '.join(map(str, files))})"]
    given = {name: getattr(wanted, name) for name in (*FACETS, "question_id")}
    if wanted.kind == "any":
        parts.append("kind IS NOT NULL")
        given["kind"] = ""
    values: dict[str, Any] = {name: value for name, value in given.items() if value}
    parts += [f"{name} = :{name}" for name in values]
    for column in ("step", "reward"):
        for end, sign in (("min", ">="), ("max", "<=")):
            if (bound := getattr(wanted, f"{end}_{column}")) is not None:
                parts.append(f"{column} {sign} :{end}_{column}")
                values[f"{end}_{column}"] = bound
    if match := match_of(wanted.text):
        parts.append("id IN (SELECT rowid FROM words WHERE words MATCH :match)")
        values["match"] = match
    elif wanted.text.strip():
        parts.append("0")  # punctuation alone is in no index
    return f"FROM episodes WHERE {' AND '.join(parts)}", values


def _parse(line: bytes) -> tuple[int | None, EpisodeRecord]:
    """Parse a line of a file of episodes: the training step, where it has one, and the record. Raises ValueError."""
    row = from_json(line)
    if not isinstance(row, dict):
        raise ValueError("a line is a JSON object")
    step = row.pop("step", None)
    try:
        return step, EpisodeRecord(**row)
    except TypeError as error:
        raise ValueError(f"this is no episode: {error}") from error


def _kind(record: EpisodeRecord) -> str | None:
    """Why an episode failed. Raises ValueError where its turns cannot be read."""
    try:
        return failure_kind(record)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a turn of episode {record.episode_id} cannot be read: {error!r}") from error


def _text(record: EpisodeRecord) -> str:
    """What the search covers."""
    about = (record.question, record.question_id, record.db_id, record.failure)
    return "\n".join((*about, *(turn[part] for turn in record.turns for part in ("text", "result", "error"))))


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


def _config(source: Source) -> dict[str, Any]:
    return source.run.config() if source.run is not None else {}


def _metrics(source: Source) -> list[dict[str, float]]:
    """The metrics of a run, read again when the log has changed."""
    return [] if source.run is None else _read_metrics(source.path, _stat(source.run.metrics_path))


@lru_cache(maxsize=32)
def _read_metrics(run: Path, _: tuple[int, int]) -> list[dict[str, float]]:
    return RunFolder(run).metrics()


def _data_of(file: EpisodeFile) -> tuple[str, str]:
    """The data set and the answer mode of a file's questions."""
    if file.label == TRAINING and file.source.run is not None:
        flags = _config(file.source).get("sqlenv", {})
        return str(flags.get("data", "")), str(flags.get("answer_mode", "value"))
    found = [e for e in file.source.evaluations() if e.label == file.label or file.source.run is None]
    return (found[0].data, found[0].answer_mode) if found else ("", "value")


@lru_cache
def _dataset(data: str, answer_mode: str) -> Dataset | str:
    """The data set, or why it cannot be loaded."""
    try:
        return load_dataset(data, answer_mode=AnswerMode(answer_mode))
    except (SQLEnvError, OSError, ValueError) as error:
        return f"the data set {data} cannot be read here: {error}"


def _logs(run: RunFolder) -> list[Path]:
    return [run.metrics_path, run.health_path, *sorted(run.evaluations_path.glob("*.json"))]


def _stat(path: Path) -> tuple[int, int]:
    """The size of a file and when it was last written, in nanoseconds; zeros where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns
