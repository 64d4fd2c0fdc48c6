"""All that is wrong with a data set: its files, tables, columns, keys and questions, with the lines where it is.

Guarantees:
- Each question of the source is usable or excluded with a reason. Each usable one has been tried: the environment
  itself judged its gold answer.
- Nothing is written but the imported tables and test databases in the cache directory.
- One file that cannot be read does not hide what is wrong with the others.
- The same data give the same findings, the worst first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import charset_normalizer

from env_server.cache import Cache
from env_server.data.csv_table import CSV_SUFFIXES, delimiter_of, read_records
from env_server.data.curation import NothingUsableError, curate
from env_server.data.database_files import is_database_name
from env_server.data.folder import Sources, find_sources, read_questions
from env_server.data.json_files import HEAD_BYTES, wide_encoding
from env_server.data.loading import ANSWERS, is_folder, read_source
from env_server.data.parquet_table import PARQUET_SUFFIXES
from env_server.data.raw import RawDataset, RawQuestion
from env_server.data.source_table import column_names, table_name
from env_server.dataset import Dataset
from env_server.environment import EnvironmentFactory
from env_server.errors import DataError, SQLError
from env_server.judging.answers import format_answer
from env_server.settings import EnvSettings, JudgingSettings
from env_server.sql.lexer import fold
from env_server.sql.sandbox import Sandbox, limit_memory
from env_server.test_suites.store import TITLE, Suites, build_suites
from env_server.tools.columns import check_tables
from env_server.tools.findings import Finding, Kind, Place, Recode, Severity, Stated
from env_server.tools.golds import Trial, text_numbers, try_gold
from env_server.tools.keys import check_keys, check_references, likely_references
from env_server.tools.lines import check_header, check_lines
from env_server.tools.questions import (
    check_exclusion,
    check_number,
    check_question,
    check_together,
    check_unasked,
)
from env_server.tools.survey import SURVEY_LIMITS, DatabaseSurvey, read_references, read_survey
from env_server.types import ActionType, AnswerMode, SQLAction, Verdict

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the number done and the number in all."""
_LINES = 3
_ENCODINGS = ["cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1257", "mac_roman", "koi8_r"]
"""Tried first: among all that there are, a short text is often taken for Korean."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found, the worst first. `files`: of each database. `dataset`: None where there are no questions."""

    spec: str
    findings: tuple[Finding, ...]
    files: Mapping[str, tuple[Path, ...]]
    surveys: Mapping[str, DatabaseSurvey]
    dataset: Dataset | None
    trials: Mapping[str, Trial] = field(default_factory=dict)
    """What trying the gold of each usable question gave, by its id."""

    def where(self, finding: Finding) -> str:
        """Say where a finding is, as a person looks for it."""
        place = finding.place
        if place.question_id:
            return f"question {place.question_id}"
        file = self.file_of(place)
        parts = [str(file) if file else place.db_id or self.spec]
        if lines := self.lines_of(finding):
            parts.append(f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}")
        if place.table and (file is None or is_database_name(file)):
            parts.append(f"table {place.table}")
        if place.column:
            parts.append(f"column {place.column}")
        return ", ".join(parts)

    def file_of(self, place: Place) -> Path | None:
        """Return the file of a place: that of its table, or of its database."""
        files = self.files.get(place.db_id, ())
        return next((f for f in files if table_name(f) == place.table), files[0] if len(files) == 1 else None)

    def lines_of(self, finding: Finding) -> list[int]:
        """Return the first lines of the CSV file on which the finding's cells are."""
        file = self.file_of(finding.place)
        if file is None or file.suffix.lower() not in CSV_SUFFIXES or not finding.cells:
            return []
        with suppress(DataError):
            return list(islice(_matching(file, finding), _LINES))
        return []

    def is_fixable(self, finding: Finding) -> bool:
        """Tell whether there is a fix that can be carried out: Parquet files are fixed at their source."""
        file = self.file_of(finding.place) if finding.place.table else None
        return finding.fix is not None and (file is None or file.suffix.lower() not in PARQUET_SUFFIXES)


def diagnose(
    spec: str,
    cache_dir: Path,
    *,
    answer_mode: AnswerMode = AnswerMode.VALUE,
    settings: EnvSettings | None = None,
    test_databases: bool = True,
    stated: Stated | None = None,
    db_id: str = "",
    progress: Progress = lambda *_: None,
) -> Diagnosis:
    """Examine everything, or all about the database `db_id`.

    `test_databases`: also make those of each question, which takes most of the time. Raises DataError when `spec` or
    `db_id` names nothing, or a folder without any database.
    """
    stated = stated or Stated()
    limits = settings or EnvSettings(judging=JudgingSettings(variants=test_databases))
    limit_memory(limits.sandbox)
    folder = Path(spec).expanduser() if is_folder(spec) else None
    findings: list[Finding] = []
    if folder is None:
        raw = read_source(spec.removeprefix(ANSWERS), cache_dir)
        files: Mapping[str, tuple[Path, ...]] = {name: (path,) for name, path in raw.databases.items()}
    else:
        sources = find_sources(folder)
        files = {name: source.files for name, source in sources.usable.items()}
        raw = _read_folder(sources, folder, cache_dir, stated, findings)
    if db_id:
        raw = _only(raw, db_id)
        findings = [each for each in findings if each.place.db_id in ("", db_id)]
    surveys: dict[str, DatabaseSurvey] = {}
    for done, (name, path) in enumerate(raw.databases.items()):
        progress("examining the tables", done, len(raw.databases))
        survey, found = examine(name, path, files[name], stated)
        findings += found
        if survey is not None:
            surveys[name] = survey
        else:
            raw = replace(raw, refused={**raw.refused, name: found[0].message})
    dataset: Dataset | None = None
    trials: dict[str, Trial] = {}
    if raw.questions:
        usable = replace(raw, databases={name: raw.databases[name] for name in surveys})
        dataset = _curated(usable, answer_mode, limits, cache_dir, progress)
        if test_databases:
            making = partial(progress, TITLE)
            build_suites(dataset.databases, dataset.questions, limits.sandbox, cache_dir, progress=making)
        suites = Suites(dataset.databases, limits.sandbox, cache_dir) if test_databases else None
        with EnvironmentFactory(dataset, limits, answer_mode, cache_dir) as factory:
            findings += _check_golds(raw, dataset, surveys, tuple(findings), factory, suites, trials, progress)
        findings += check_together(dataset.questions)
        findings += check_number(dataset, spec) if not db_id else ()
        for survey in surveys.values() if folder is not None else ():
            about = [question for question in raw.questions if question.db_id == survey.db_id]
            findings += check_unasked(about, survey, spec)
    severities, kinds = list(Severity), list(Kind)
    findings.sort(key=lambda each: (severities.index(each.severity), kinds.index(each.kind)))
    return Diagnosis(spec, tuple(findings), files, surveys, dataset, trials)


def examine(
    db_id: str, path: Path, files: Sequence[Path], stated: Stated
) -> tuple[DatabaseSurvey | None, list[Finding]]:
    """Survey a database and say what is wrong with it; None where it cannot be surveyed. `files`: it was made of."""
    imported = not is_database_name(files[0])
    try:
        with closing(Sandbox(path, SURVEY_LIMITS)) as sandbox:
            survey = read_survey(sandbox, db_id, imported=imported)
            references = read_references(sandbox, likely_references(survey))
    except (DataError, SQLError) as error:
        hint = "Copy or export the database again"
        return None, [Finding(Kind.UNREADABLE, str(error), hint, place=Place(db_id))]
    tables = {table_name(file): file for file in files if file.suffix.lower() in CSV_SUFFIXES}
    delimiters = {name: delimiter_of(file) for name, file in tables.items()}
    found = [*check_tables(survey, stated, delimiters), *check_keys(survey), *check_references(survey, references)]
    for name, file in tables.items():
        if lines := check_lines(read_records(file), Place(db_id, name)):
            found = [each for each in found if each.place.table != name or lines.fix is None]
            found.append(lines)
        if (table := survey.table(name)) and not (lines and lines.fix):
            _, header = next(read_records(file))
            found += check_header(header, table.rows, delimiters[name], Place(db_id, table.name))
    return survey, found


def _read_folder(
    sources: Sources, folder: Path, cache_dir: Path, stated: Stated, findings: list[Finding]
) -> RawDataset:
    """Read what can be read of a folder; the rest becomes findings."""
    databases: dict[str, Path] = {}
    broken = dict(sources.broken)
    findings += [
        Finding(Kind.UNREADABLE, problem, "The rest is read without it", place=Place(name))
        for name, problem in broken.items()
    ]
    for name, source in sources.usable.items():
        try:
            databases[name] = source.path(cache_dir)
        except DataError as error:
            broken[name] = str(error)
            hint = "Nothing of its database can be read until then"
            unreadable = Finding(Kind.UNREADABLE, str(error), hint, place=Place(name))
            told = list(_not_utf8(name, source.files, stated)) or list(_around(name, source.files, str(error)))
            findings += told or [unreadable]
    questions: list[RawQuestion] = []
    try:
        questions = read_questions(folder, sources)
    except DataError as error:
        findings.append(Finding(Kind.QUESTIONS, str(error), "Correct it; none of them is read until then"))
    return RawDataset(sources.name, tuple(questions), databases, broken)


def _not_utf8(name: str, files: Sequence[Path], stated: Stated) -> Iterator[Finding]:
    """Yield the files that are not UTF-8. A guess of the encoding is a hint: the user states what is right."""
    message = "it is not UTF-8, and nothing of its database can be read"
    for file in files:
        data = file.read_bytes() if file.suffix.lower() in CSV_SUFFIXES else b""
        with suppress(UnicodeDecodeError):
            if not wide_encoding(data[:HEAD_BYTES]):
                data.decode("utf-8-sig")
                continue
        if encoding := wide_encoding(data[:HEAD_BYTES]):
            hint = f"Save it as UTF-8; it can be read as {encoding}"
        elif stated.encoding:
            encoding, hint = stated.encoding, f"Save it as UTF-8; it is stated to be {stated.encoding}"
            with suppress(UnicodeDecodeError):
                hint += f", as in {_line_beyond_ascii(data.decode(encoding))!r}"
        else:
            usual = charset_normalizer.from_bytes(data, cp_isolation=_ENCODINGS).best()
            guess = usual or charset_normalizer.from_bytes(data).best()
            hint = "Save it as UTF-8, or state its encoding with --encoding"
            if guess is not None:
                hint += f", such as {guess.encoding}, which reads {_line_beyond_ascii(str(guess))!r}"
            encoding = ""
        fix = Recode(encoding) if encoding else None
        yield Finding(Kind.NOT_UTF8, message, hint, fix, place=Place(name, table_name(file)))


def _around(name: str, files: Sequence[Path], error: str) -> Iterator[Finding]:
    """Yield the lines around the table of the file that cannot be read, where they are why."""
    for file in files:
        if file.suffix.lower() in CSV_SUFFIXES and error.startswith(f"{file}, line"):
            with suppress(DataError):
                lines = check_lines(read_records(file), Place(name, table_name(file)))
                if lines and lines.fix:
                    yield lines


def _line_beyond_ascii(text: str) -> str:
    return next((line[:80] for line in text.splitlines() if not line.isascii()), "")


def _only(raw: RawDataset, db_id: str) -> RawDataset:
    questions = tuple(question for question in raw.questions if question.db_id == db_id)
    if not questions and db_id not in raw.databases:
        known = ", ".join(list(raw.databases)[:8])
        raise DataError(f"data set {raw.name} has no database {db_id!r}; it has {len(raw.databases)}, such as {known}")
    databases = {name: path for name, path in raw.databases.items() if name == db_id}
    return replace(raw, questions=questions, databases=databases)


def _curated(
    raw: RawDataset, answer_mode: AnswerMode, limits: EnvSettings, cache_dir: Path, progress: Progress
) -> Dataset:
    try:
        return curate(
            raw,
            answer_mode=answer_mode,
            sandbox=limits.sandbox,
            display=limits.display,
            progress=partial(progress, "running the gold queries"),
            cache=Cache(cache_dir),
        )
    except NothingUsableError as error:
        return error.dataset


def _check_golds(
    raw: RawDataset,
    dataset: Dataset,
    surveys: Mapping[str, DatabaseSurvey],
    findings: Sequence[Finding],
    factory: EnvironmentFactory,
    suites: Suites | None,
    trials: dict[str, Trial],
    progress: Progress,
) -> Iterator[Finding]:
    """Try every gold query, play every gold answer through the environment, and yield what is wrong with them."""
    asked = {question.question_id: question for question in raw.questions}
    for each in dataset.excluded:
        yield check_exclusion(each, asked[each.question_id], surveys.get(each.db_id))
    plain = {db_id: text_numbers(survey) for db_id, survey in surveys.items()}
    written: dict[str, dict[tuple[str, str], str]] = {db_id: {} for db_id in surveys}
    for finding in findings:
        place = finding.place
        name = (fold(place.table), fold(place.column))
        if finding.kind is Kind.NUMBER_AS_TEXT and name not in plain[place.db_id]:
            written[place.db_id][name] = f"{place.table}.{place.column}"
    environment = factory.make()
    known: dict[tuple[str, str], Trial] = {}
    for done, question in enumerate(dataset.questions):
        progress("trying the gold queries", done, len(dataset.questions))
        environment.reset(question_id=question.question_id)
        by_value = factory.answer_mode is AnswerMode.VALUE
        answer = format_answer(question.gold.rows) if by_value else question.gold_sql
        last = environment.step(SQLAction(action_type=ActionType.ANSWER, argument=answer))
        if last.metadata.get("verdict") != Verdict.CORRECT:
            message = f"{question.text!r}: the environment judges its own answer wrong: {answer}"
            place = Place(question.db_id, question_id=question.question_id)
            yield Finding(Kind.GOLD_REJECTED, message, "Correct the query, or remove the question", place=place)
        key = (question.db_id, question.gold_sql)
        if key not in known:
            known[key] = try_gold(question, factory.pool, suites, plain[question.db_id])
        trials[question.question_id] = known[key]
        schema = surveys[question.db_id].schema
        yield from check_question(question, known[key], written[question.db_id], schema)


def _matching(file: Path, finding: Finding) -> Iterator[int]:
    records = read_records(file)
    _, header = next(records)
    column = finding.place.column
    index = column_names(header).index(column) if column else None
    for line, cells in records:
        examined = cells if index is None else cells[index : index + 1]
        if any(cell in finding.cells or cell.strip() in finding.cells for cell in examined):
            yield line
