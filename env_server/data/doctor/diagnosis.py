"""All that is wrong with a data set: its files, tables, columns, keys and questions, with the lines where it is.

Promises:
- Nothing is written but the imported tables and variants in the cache directory.
- One file that cannot be read does not hide what is wrong with the others.
- The same data give the same findings, the worst first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from env_server.data.csv_table import CSV_SUFFIXES, read_records
from env_server.data.curation import NothingUsableError, curate
from env_server.data.database_files import is_database_name
from env_server.data.doctor.findings import MEANINGS, Finding, Kind, Place, Recode, Severity
from env_server.data.doctor.questions import (
    Trial,
    check_exclusion,
    check_number,
    check_question,
    check_together,
    check_unasked,
)
from env_server.data.doctor.references import check_keys, check_references, likely_references
from env_server.data.doctor.survey import SURVEY_LIMITS, DatabaseSurvey, read_references, read_survey
from env_server.data.doctor.tables import check_database, check_header
from env_server.data.doctor.trials import try_gold
from env_server.data.folder import Sources, find_sources, read_questions
from env_server.data.loading import is_folder, read_source
from env_server.data.parquet_table import PARQUET_SUFFIXES
from env_server.data.raw import RawDataset, RawQuestion
from env_server.data.source_table import column_names
from env_server.dataset import Dataset
from env_server.errors import DataError, SQLError
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.sandbox import Sandbox, limit_memory
from env_server.test_suites.store import Suites
from env_server.types import AnswerMode

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the number done and the number in all."""
ENCODINGS = ("cp1252", "utf-16")
_LINES = 3
_ORDER = list(Severity)


@dataclass(frozen=True)
class Diagnosis:
    """What was found, the worst first. `files`: the files of each database. `dataset`: None where there is none."""

    spec: str
    findings: tuple[Finding, ...]
    files: Mapping[str, tuple[Path, ...]]
    dataset: Dataset | None
    surveys: Mapping[str, DatabaseSurvey]
    lines: Mapping[int, tuple[int, ...]]
    """Of findings, by their place in `findings`, the lines of the file where they are."""

    def where(self, index: int) -> str:
        """Say where a finding is, as a person looks for it."""
        place = self.findings[index].place
        if place.question_id:
            return f"question {place.question_id}"
        file = self.file_of(place)
        parts = [str(file) if file else place.db_id or self.spec]
        if lines := self.lines.get(index):
            parts.append(f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}")
        if place.table and (file is None or is_database_name(file)):
            parts.append(f"table {place.table}")
        if place.column:
            parts.append(f"column {place.column}")
        return ", ".join(parts)

    def file_of(self, place: Place) -> Path | None:
        """Return the file of a place: that of its table, or of its database."""
        files = self.files.get(place.db_id, ())
        return next((f for f in files if f.stem == place.table), files[0] if len(files) == 1 else None)


def diagnose(
    spec: str,
    cache_dir: Path,
    *,
    answer_mode: AnswerMode = AnswerMode.VALUE,
    settings: EnvSettings | None = None,
    variants: bool = True,
    order: bool | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Look at everything. `variants`: also make each question's variants, which takes most of the time.
    `order`: whether the day comes first in dates that do not say it.

    Raises DataError when `spec` names nothing, or a folder without any database.
    """
    limits = settings or EnvSettings()
    limit_memory(limits.sandbox)
    told = progress or (lambda *_: None)
    folder = Path(spec).expanduser() if is_folder(spec) else None
    findings: list[Finding] = []
    if folder is not None:
        sources = find_sources(folder)
        raw = _read_own(sources, folder, cache_dir, findings)
        files = {name: source.files for name, source in sources.usable.items()}
    else:
        raw = read_source(spec, cache_dir)
        files = {db_id: (path,) for db_id, path in raw.databases.items()}
    surveys = {}
    for done, (db_id, path) in enumerate(raw.databases.items()):
        told("looking through the tables", done, len(raw.databases))
        survey, found = examine(db_id, path, imported=not is_database_name(files[db_id][0]), order=order)
        findings += found
        if survey is not None:
            surveys[db_id] = survey
    if folder is not None:
        for db_id in surveys:
            findings += _headers(db_id, files[db_id], surveys[db_id])
    dataset = None
    if raw.questions:
        with_databases = replace(raw, databases={db_id: raw.databases[db_id] for db_id in surveys})
        dataset = _curated(with_databases, answer_mode, limits)
        findings += _questions(
            spec,
            raw,
            dataset,
            surveys,
            findings,
            limits,
            Suites(dataset.databases, limits.sandbox, cache_dir) if variants else None,
            told,
        )
        if folder is not None:
            for survey in surveys.values():
                asked = [question for question in raw.questions if question.db_id == survey.db_id]
                findings += check_unasked(asked, survey, spec)
    kinds = list(MEANINGS)
    findings.sort(key=lambda each: (_ORDER.index(each.severity), kinds.index(each.kind)))
    return Diagnosis(spec, tuple(findings), files, dataset, surveys, dict(_lines(findings, files)))


def _read_own(sources: Sources, folder: Path, cache_dir: Path, findings: list[Finding]) -> RawDataset:
    """Read what can be read of a folder; the rest becomes findings."""
    databases: dict[str, Path] = {}
    broken = dict(sources.broken)
    for name, problem in broken.items():
        findings.append(Finding(Kind.UNREADABLE, Place(name), problem, "The rest is read without it"))
    for name, source in sources.usable.items():
        try:
            databases[name] = source.path(cache_dir)
        except DataError as error:
            broken[name] = str(error)
            findings += _unreadable(name, source.files, error)
    questions: list[RawQuestion] = []
    try:
        questions = read_questions(folder, sources)
    except DataError as error:
        findings.append(Finding(Kind.QUESTIONS, Place(), str(error), "Correct it; none of them is read until then"))
    return RawDataset(sources.name, tuple(questions), databases, broken)


def _unreadable(name: str, files: Sequence[Path], error: DataError) -> Iterator[Finding]:
    """Say why tables cannot be imported: all of them that are not UTF-8, else the first error."""
    recoded = [(file, _encoding(file)) for file in files if file.suffix.lower() in CSV_SUFFIXES]
    found = False
    for file, encoding in recoded:
        if encoding:
            found = True
            advice = f"Save it as UTF-8; it can be read as {encoding}"
            said = "it is not UTF-8, and nothing of its database can be read"
            yield Finding(Kind.NOT_UTF8, Place(name, file.stem), said, advice, Recode(file.name, encoding))
    if not found:
        yield Finding(Kind.UNREADABLE, Place(name), str(error), "Nothing of its database can be read until then")


def _encoding(file: Path) -> str:
    """Return the encoding that a file has instead of UTF-8, as far as it can be told; "" for UTF-8."""
    data = file.read_bytes()
    with suppress(UnicodeDecodeError):
        data.decode("utf-8-sig")
        return ""
    for encoding in ENCODINGS[::-1] if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ENCODINGS[:1]:
        with suppress(UnicodeDecodeError):
            data.decode(encoding)
            return encoding
    return ""


def examine(
    db_id: str, path: Path, *, imported: bool, order: bool | None = None
) -> tuple[DatabaseSurvey | None, list[Finding]]:
    """Survey a database and say what is wrong with it; None where it cannot be surveyed."""
    try:
        with closing(Sandbox(path, SURVEY_LIMITS)) as sandbox:
            survey = read_survey(sandbox, db_id, imported=imported)
            references = read_references(sandbox, likely_references(survey))
    except (DataError, SQLError) as error:
        return None, [Finding(Kind.UNREADABLE, Place(db_id), str(error), "Copy or export the database again")]
    return survey, [*check_database(survey, order), *check_keys(survey), *check_references(survey, references)]


def _headers(db_id: str, files: Sequence[Path], survey: DatabaseSurvey) -> Iterator[Finding]:
    for file in files:
        table = survey.table(file.stem)
        if file.suffix.lower() in CSV_SUFFIXES and table is not None:
            _, header = next(read_records(file))
            yield from check_header(header, table.rows, Place(db_id, table.name))


def _curated(raw: RawDataset, answer_mode: AnswerMode, limits: EnvSettings) -> Dataset:
    try:
        return curate(raw, answer_mode=answer_mode, sandbox=limits.sandbox, display=limits.display)
    except NothingUsableError as error:
        return error.dataset


def _questions(
    spec: str,
    raw: RawDataset,
    dataset: Dataset,
    surveys: Mapping[str, DatabaseSurvey],
    findings: Sequence[Finding],
    limits: EnvSettings,
    suites: Suites | None,
    told: Progress,
) -> list[Finding]:
    asked = {question.question_id: question for question in raw.questions}
    found = [check_exclusion(each, asked[each.question_id], surveys.get(each.db_id)) for each in dataset.excluded]
    text_numbers = {db_id: _text_numbers(db_id, findings) for db_id in surveys}
    trials: dict[tuple[str, str], Trial] = {}
    with closing(DatabasePool(dataset.databases, limits.sandbox)) as pool:
        for done, question in enumerate(dataset.questions):
            told("trying the gold queries", done, len(dataset.questions))
            key = (question.db_id, question.gold_sql)
            if key not in trials:
                trials[key] = try_gold(question, pool, suites)
            survey = surveys[question.db_id]
            found += check_question(question, trials[key], text_numbers[question.db_id], survey.schema)
    return [*found, *check_together(dataset.questions), *check_number(dataset, spec)]


def _text_numbers(db_id: str, findings: Sequence[Finding]) -> dict[tuple[str, str], str]:
    """Return the columns of numbers that are text, by table and column in lower case."""
    return {
        (each.place.table.casefold(), each.place.column.casefold()): f"{each.place.table}.{each.place.column}"
        for each in findings
        if each.kind is Kind.NUMBER_AS_TEXT and each.place.db_id == db_id
    }


def _lines(findings: Sequence[Finding], files: Mapping[str, tuple[Path, ...]]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Find the lines of the CSV files where the cells are that findings show."""
    for index, finding in enumerate(findings):
        place = finding.place
        file = next((f for f in files.get(place.db_id, ()) if f.stem == place.table), None)
        if file is not None and file.suffix.lower() in CSV_SUFFIXES and finding.shown:
            with suppress(DataError):
                found = tuple(islice(_matching(read_records(file), place.column, finding.shown), _LINES))
                if found:
                    yield index, found


def _matching(records: Iterable[tuple[int, list[str]]], column: str, shown: Sequence[str]) -> Iterator[int]:
    read = iter(records)
    _, header = next(read)
    names = column_names(header)
    wanted = set(shown)
    for line, cells in read:
        looked_at = cells if not column else cells[names.index(column) : names.index(column) + 1]
        if any(cell in wanted or cell.strip() in wanted for cell in looked_at):
            yield line


def repairable(finding: Finding, files: Mapping[str, tuple[Path, ...]]) -> bool:
    """Tell whether a repair can be carried out: what is wrong with a Parquet file is mended at its source."""
    if finding.repair is None:
        return False
    own = [file for file in files.get(finding.place.db_id, ()) if file.stem == finding.place.table]
    is_parquet = any(file.suffix.lower() in PARQUET_SUFFIXES for file in own)
    return not is_parquet or not finding.place.table
