"""Carries repairs out, on a copy of a folder of one's own: the tables, the databases, the keys and the questions.

Promises:
- The folder itself is only read. The copy is a folder that did not exist, and it is complete or absent.
- A cell changes only as its repair says; one that the repair cannot read stays as it is.
- A table of a SQLite file is made anew, as SQLite's documentation of ALTER TABLE says to, with its indexes and
  triggers; other tables and views are left alone.
"""

from __future__ import annotations

import csv
import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from env_server.data.csv_table import CSV_SUFFIXES, delimiter_of, read_records
from env_server.data.database_files import is_database_name
from env_server.data.doctor.diagnosis import Diagnosis
from env_server.data.doctor.findings import (
    CellRepair,
    DeclareKey,
    DropColumn,
    DropDuplicates,
    DropLastRow,
    DropQuestion,
    Finding,
    Recode,
    ReplaceSQL,
    TableRepair,
)
from env_server.data.doctor.mending import mended_text
from env_server.data.doctor.rebuilding import rebuild
from env_server.data.folder import find_sources, read_places
from env_server.data.json_files import QuestionFile
from env_server.data.keys import KEYS_FILE, Keys, keys_text, read_keys
from env_server.data.question_files import columns_of, read_question_files
from env_server.data.source_table import column_names
from env_server.errors import DataError

Changes = Sequence[tuple[str, CellRepair | TableRepair]]
"""Repairs of one table, each with its column, or ""."""


def mend_folder(diagnosis: Diagnosis, chosen: Sequence[Finding], target: Path) -> None:
    """Copy the diagnosed folder to `target`, with the repairs of the chosen findings. Raises DataError."""
    folder = Path(diagnosis.spec).expanduser()
    if target.exists():
        raise DataError(f"{target} is there already. Choose another with --out, or remove it")
    if folder.resolve() in target.resolve().parents:
        raise DataError(f"{target} lies in {folder}, which is to be copied. Choose another with --out")
    _refuse_lost_names(folder, target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            copy = Path(scratch, "copy")
            shutil.copytree(folder, copy)
            _mend(diagnosis, chosen, folder, copy)
            copy.rename(target)
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror}. Choose another place with --out") from error


def _refuse_lost_names(folder: Path, target: Path) -> None:
    """Raises DataError where questions name the database that is called like the folder, and the copy is not."""
    name = find_sources(folder).name
    entries = [entry for file in _read_quietly(folder) for entry in file.entries]
    if target.name != name and any(entry.get("database") == name for entry in entries):
        raise DataError(f"questions name the database {name!r}, so the copy must be called so. Try --out fixed/{name}")


def _read_quietly(folder: Path) -> list[QuestionFile]:
    """Read the questions; none where they cannot be read, which the diagnosis says."""
    try:
        return read_question_files(folder)
    except DataError:
        return []


def _mend(diagnosis: Diagnosis, chosen: Sequence[Finding], folder: Path, copy: Path) -> None:
    # Questions first: they are found by their places in the files as they were diagnosed.
    questions = {f.place.question_id: f.repair for f in chosen if isinstance(f.repair, ReplaceSQL | DropQuestion)}
    if questions:
        _mend_questions(copy, folder, questions)
    tables: dict[tuple[str, str], list[tuple[str, CellRepair | TableRepair]]] = defaultdict(list)
    for finding in chosen:
        place, repair = finding.place, finding.repair
        if isinstance(repair, Recode):
            _recode(_copied(_file(diagnosis, finding), folder, copy), repair.encoding)
        elif repair is not None and not isinstance(repair, ReplaceSQL | DropQuestion):
            tables[place.db_id, place.table].append((place.column, repair))
    for db_id, files in diagnosis.files.items():
        changes = {table: each for (of, table), each in tables.items() if of == db_id}
        if not changes:
            continue
        copied = [_copied(file, folder, copy) for file in files]
        if is_database_name(copied[0]):
            rebuild(copied[0], changes, diagnosis.surveys[db_id])
            continue
        for file in copied:
            if file.stem in changes and file.suffix.lower() in CSV_SUFFIXES:
                _mend_table(file, changes[file.stem])
        _declare(copied[0].parent, changes, diagnosis, db_id)


def _file(diagnosis: Diagnosis, finding: Finding) -> Path:
    file = diagnosis.file_of(finding.place)
    if file is None:
        raise DataError(f"{finding.place.table} is no longer there. Run the doctor again")
    return file


def _copied(file: Path, folder: Path, copy: Path) -> Path:
    return copy / file.relative_to(folder)


def _recode(file: Path, encoding: str) -> None:
    file.write_text(file.read_bytes().decode(encoding), encoding="utf-8", newline="")


def _mend_table(file: Path, changes: Changes) -> None:
    """Write a CSV file again, with its own delimiter."""
    delimiter = delimiter_of(file)
    records = [cells for _, cells in read_records(file)]
    names = column_names(records[0])
    by_column: dict[int, list[CellRepair]] = defaultdict(list)
    dropped = {names.index(column) for column, repair in changes if isinstance(repair, DropColumn)}
    for column, repair in changes:
        if isinstance(repair, CellRepair):
            by_column[names.index(column)].append(repair)
    kinds = {type(repair) for _, repair in changes}
    rows = records[1:-1] if DropLastRow in kinds else records[1:]
    rows = [[mended_text(cell, by_column.get(i, ())) for i, cell in enumerate(row)] for row in rows]
    if DropDuplicates in kinds:
        rows = [list(row) for row in dict.fromkeys(map(tuple, rows))]
    kept = [i for i in range(len(names)) if i not in dropped]
    with file.open("w", encoding="utf-8", newline="") as sink:
        writer = csv.writer(sink, delimiter=delimiter, lineterminator="\n")
        writer.writerows([row[i] for i in kept] for row in (records[0], *rows))


def _declare(folder: Path, changes: Mapping[str, Changes], diagnosis: Diagnosis, db_id: str) -> None:
    """State the keys of imported tables beside them."""
    stated = read_keys(folder)
    primary = dict(stated.primary)
    foreign = {table: dict(columns) for table, columns in stated.foreign.items()}
    for table, each in changes.items():
        for column, repair in each:
            if isinstance(repair, DeclareKey) and not repair.parent:
                primary[table] = column
            elif isinstance(repair, DeclareKey):
                foreign.setdefault(table, {})[column] = repair.parent
                parent = diagnosis.surveys[db_id].table(repair.parent)
                key = parent.column(repair.parent_column) if parent else None
                if key is not None and not key.primary_key:
                    primary[repair.parent] = repair.parent_column
    if (primary, foreign) != (stated.primary, stated.foreign):
        (folder / KEYS_FILE).write_text(keys_text(Keys(primary, foreign)), encoding="utf-8")


def _mend_questions(copy: Path, folder: Path, repairs: Mapping[str, ReplaceSQL | DropQuestion]) -> None:
    places, questions = read_places(folder, find_sources(folder))
    by_file: dict[Path, dict[int, ReplaceSQL | DropQuestion]] = defaultdict(dict)
    files: dict[Path, QuestionFile] = {}
    for (file, index), question in zip(places, questions, strict=True):
        if question.question_id in repairs:
            by_file[file.path][index] = repairs[question.question_id]
            files[file.path] = file
    for path, of in by_file.items():
        target = _copied(path, folder, copy)
        if path.suffix.lower() in CSV_SUFFIXES:
            _mend_question_table(target, of)
        else:
            kept = [_changed(entry, of.get(i)) for i, entry in enumerate(files[path].entries)]
            entries = [entry for entry in kept if entry is not None]
            as_list = path.read_text(encoding="utf-8-sig").lstrip().startswith("[")
            lines = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
            whole = json.dumps(entries, ensure_ascii=False, indent=1) + "\n"
            target.write_text(whole if as_list else lines, encoding="utf-8")


def _changed(entry: dict[str, object], repair: ReplaceSQL | DropQuestion | None) -> dict[str, object] | None:
    if isinstance(repair, DropQuestion):
        return None
    return entry if repair is None else {**entry, "sql": repair.sql}


def _mend_question_table(file: Path, repairs: Mapping[int, ReplaceSQL | DropQuestion]) -> None:
    delimiter = delimiter_of(file)
    header, *records = [cells for _, cells in read_records(file)]
    place = columns_of(header)["sql"]
    with file.open("w", encoding="utf-8", newline="") as sink:
        writer = csv.writer(sink, delimiter=delimiter, lineterminator="\n")
        writer.writerow(header)
        for index, cells in enumerate(records):
            repair = repairs.get(index)
            if not isinstance(repair, DropQuestion):
                writer.writerow(cells if repair is None else [*cells[:place], repair.sql, *cells[place + 1 :]])
