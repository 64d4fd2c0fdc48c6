"""Carries fixes out, on a copy of a custom folder: its tables, databases, keys and questions.

Guarantees:
- The folder itself is only read. The copy is a folder that did not exist, and it is complete or absent.
- A cell changes only as its fix says; one that the fix cannot read stays as it is. Every changed cell is listed in
  `changes.csv` beside the copy, with what it was.
- A table of a SQLite file is made anew, as SQLite's documentation of ALTER TABLE says to ("Making Other Kinds Of Table
  Schema Changes"), with its indexes and triggers; other tables and views are left alone.
"""

from __future__ import annotations

import csv
import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from env_server.data.csv_table import CSV_SUFFIXES, delimiter_of, read_records
from env_server.data.database_files import is_database_name
from env_server.data.folder import find_sources, read_places
from env_server.data.json_files import QuestionFile
from env_server.data.question_files import columns_of, read_question_files
from env_server.data.source_table import column_names, table_name
from env_server.data.tabular import KEYS_FILE, Keys, keys_text, read_keys
from env_server.dataset import SQLValue
from env_server.errors import DataError
from env_server.sql.schema import quote_identifier
from env_server.tools.diagnosis import Diagnosis
from env_server.tools.findings import CellFix, ColumnFix, DeclareKey, DropLines, Finding, QuestionFix, Recode, TableFix
from env_server.tools.survey import TableSurvey

Fixes = Sequence[tuple[str, ColumnFix]]
"""Fixes of one table, each with its column, or ""."""
Log = Callable[[str, str, SQLValue, SQLValue], None]
"""Notes a changed cell: its table, its column, what it was and what it is."""
_NEW = "sqlenv_new_table"


def fix_folder(diagnosis: Diagnosis, chosen: Sequence[Finding], target: Path) -> int:
    """Copy the diagnosed folder to `target`, with the fixes of the chosen findings; return the number of changed cells.

    They are listed in `changes_file(target)`. Raises DataError.
    """
    folder = Path(diagnosis.spec).expanduser()
    if target.exists():
        raise DataError(f"{target} exists already. Choose another with --out, or remove it")
    if folder.resolve() in target.resolve().parents:
        raise DataError(f"{target} lies in {folder}, which is to be copied. Choose another with --out")
    _refuse_lost_names(folder, target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            copy, changes = Path(scratch, "copy"), Path(scratch, "changes.csv")
            shutil.copytree(folder, copy)
            with changes.open("w", encoding="utf-8", newline="") as sink:
                writer = csv.writer(sink, lineterminator="\n")
                writer.writerow(("table", "column", "before", "after"))
                count = 0

                def log(*change: SQLValue) -> None:
                    nonlocal count
                    count += 1
                    writer.writerow(change)

                _fix(diagnosis, chosen, folder, copy, log)
            changes.replace(changes_file(target))
            copy.rename(target)
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror}. Choose another place with --out") from error
    return count


def changes_file(target: Path) -> Path:
    """Return the file beside a copy that lists what was changed in it."""
    return target.with_name(f"{target.name}-changes.csv")


def _refuse_lost_names(folder: Path, target: Path) -> None:
    """Raises DataError where questions name the database that is called like the folder, and the copy is not."""
    name = find_sources(folder).name
    files: list[QuestionFile] = []
    with suppress(DataError):  # the diagnosis says so
        files = read_question_files(folder)
    if target.name != name and any(entry.get("database") == name for file in files for entry in file.entries):
        raise DataError(f"questions name the database {name!r}, so the copy must be called so. Try --out fixed/{name}")


def _fix(diagnosis: Diagnosis, chosen: Sequence[Finding], folder: Path, copy: Path, log: Log) -> None:
    # Questions first: they are found by their places in the files as they were diagnosed.
    if questions := {each.place.question_id: each.fix.sql for each in chosen if isinstance(each.fix, QuestionFix)}:
        _fix_questions(copy, folder, questions)
    tables: dict[str, dict[str, list[tuple[str, ColumnFix]]]] = defaultdict(lambda: defaultdict(list))
    for finding in chosen:
        place, fix = finding.place, finding.fix
        file = diagnosis.file_of(place)
        if isinstance(fix, Recode) and file is not None:
            _recode(copy / file.relative_to(folder), fix.encoding)
        elif isinstance(fix, CellFix | TableFix | DropLines | DeclareKey):
            tables[place.db_id][place.table].append((place.column, fix))
    for db_id, fixes in tables.items():
        copied = [copy / file.relative_to(folder) for file in diagnosis.files[db_id]]
        if is_database_name(copied[0]):
            surveyed = [(diagnosis.surveys[db_id].table(table), each) for table, each in fixes.items()]
            _rebuild(copied[0], [(table, each) for table, each in surveyed if table is not None], log)
            continue
        for file in copied:
            if (table := table_name(file)) in fixes and file.suffix.lower() in CSV_SUFFIXES:
                _rewrite(file, table, fixes[table], log)
        _declare(copied[0].parent, fixes, diagnosis, db_id)


def _recode(file: Path, encoding: str) -> None:
    try:
        file.write_text(file.read_bytes().decode(encoding).lstrip("\ufeff"), encoding="utf-8", newline="")
    except (UnicodeDecodeError, LookupError) as error:
        raise DataError(f"{file.name} cannot be read as {encoding}: {error}. State another --encoding") from error


def _converter(fixes: Fixes, table: str, column: str, log: Log) -> Callable[[SQLValue], SQLValue] | None:
    """Return what converts the cells of a column; None where no fix does."""
    chosen = sorted((fix for of, fix in fixes if of == column and isinstance(fix, CellFix)), key=lambda fix: fix.order)

    def convert(value: SQLValue) -> SQLValue:
        new = value
        for fix in chosen:
            new = fix.convert(new)
        if str(new) != str(value):
            log(table, column, value, new)
        return new

    return convert if chosen else None


def _rewrite(file: Path, table: str, fixes: Fixes, log: Log) -> None:
    """Write a CSV file again, with its own delimiter; an empty cell is NULL."""
    delimiter = delimiter_of(file)
    dropped = {line for _, fix in fixes if isinstance(fix, DropLines) for line in fix.lines}
    kept_records = []
    for line, cells in read_records(file):
        if line in dropped:
            log(table, f"line {line}", delimiter.join(cells), None)
        else:
            kept_records.append(cells)
    header, *records = kept_records
    names = column_names(header)
    converters = [_converter(fixes, table, name, log) for name in names]
    if any(fix is TableFix.DROP_LAST_ROW for _, fix in fixes):
        records.pop()
    if any(converters):
        records = [
            [
                _text(convert(cell)) if convert is not None and cell.strip() else cell
                for cell, convert in zip(row, converters, strict=True)
            ]
            for row in records
        ]
    if any(fix is TableFix.DROP_DUPLICATES for _, fix in fixes):
        records = [list(row) for row in dict.fromkeys(map(tuple, records))]
    empty = {i for i, name in enumerate(names) if (name, TableFix.DROP_COLUMN) in fixes}
    left = [[cell for i, cell in enumerate(row) if i not in empty] for row in (header, *records)]
    _write_records(file, delimiter, left)


def _text(value: SQLValue) -> str:
    return "" if value is None else str(value)


def _write_records(file: Path, delimiter: str, records: Sequence[Sequence[str]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as sink:
        csv.writer(sink, delimiter=delimiter, lineterminator="\n").writerows(records)


def _declare(folder: Path, fixes: Mapping[str, Fixes], diagnosis: Diagnosis, db_id: str) -> None:
    """State the keys of imported tables beside them."""
    stated = read_keys(folder)
    primary = dict(stated.primary)
    foreign = {table: dict(columns) for table, columns in stated.foreign.items()}
    for table, column, fix in ((table, column, fix) for table, each in fixes.items() for column, fix in each):
        if not isinstance(fix, DeclareKey):
            continue
        if not fix.parent:
            primary[table] = column
            continue
        foreign.setdefault(table, {})[column] = fix.parent
        parent = diagnosis.surveys[db_id].table(fix.parent)
        key = parent.column(fix.parent_column) if parent else None
        if key is not None and not key.primary_key:
            primary[fix.parent] = fix.parent_column
    if (primary, foreign) != (stated.primary, stated.foreign):
        (folder / KEYS_FILE).write_text(keys_text(Keys(primary, foreign)), encoding="utf-8")


def _fix_questions(copy: Path, folder: Path, fixes: Mapping[str, str]) -> None:
    """Give questions another gold query; "": leave the question out."""
    places, questions = read_places(folder, find_sources(folder))
    by_file: dict[Path, tuple[QuestionFile, dict[int, str]]] = {}
    for (file, index), question in zip(places, questions, strict=True):
        if question.question_id in fixes:
            by_file.setdefault(file.path, (file, {}))[1][index] = fixes[question.question_id]
    for path, (file, chosen) in by_file.items():
        target = copy / path.relative_to(folder)
        if path.suffix.lower() in CSV_SUFFIXES:
            header, *records = [cells for _, cells in read_records(path)]
            place = columns_of(header)["sql"]
            changed = [
                [*cells[:place], chosen.get(i, cells[place]), *cells[place + 1 :]]
                for i, cells in enumerate(records)
                if chosen.get(i) != ""
            ]
            _write_records(target, delimiter_of(path), [header, *changed])
            continue
        entries: list[dict[str, Any]] = [
            {**entry, "sql": chosen[i]} if i in chosen else entry
            for i, entry in enumerate(file.entries)
            if chosen.get(i) != ""
        ]
        is_list = path.read_text(encoding="utf-8-sig").lstrip().startswith("[")
        lines = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
        target.write_text(
            json.dumps(entries, ensure_ascii=False, indent=1) + "\n" if is_list else lines, encoding="utf-8"
        )


def _rebuild(path: Path, tables: Sequence[tuple[TableSurvey, Fixes]], log: Log) -> None:
    """Make tables of a SQLite file anew. Raises DataError where one cannot be."""
    connection = apsw.Connection(str(path))
    try:
        connection.execute("PRAGMA foreign_keys = OFF; PRAGMA legacy_alter_table = ON")
        with connection:
            for table, fixes in tables:
                _rebuild_table(connection, table, fixes, log)
    except (apsw.Error, SqlglotError) as error:
        hint = "Correct it yourself, or leave it out with --only"
        raise DataError(f"{path.name} cannot be fixed: {error}. {hint}") from error
    finally:
        connection.close(True)


def _rebuild_table(connection: apsw.Connection, table: TableSurvey, fixes: Fixes, log: Log) -> None:
    stored = "SELECT sql FROM sqlite_master WHERE tbl_name = ? AND sql IS NOT NULL AND type IN "
    ((create,),) = connection.execute(stored + "('table')", (table.name,)).fetchall()
    beside = connection.execute(stored + "('index', 'trigger')", (table.name,)).fetchall()
    connection.execute(_create_statement(str(create), table, fixes))
    cells, columns = [], []
    for place, column in enumerate(table.columns):
        if (column.name, TableFix.DROP_COLUMN) in fixes:
            continue
        name = quote_identifier(column.name)
        columns.append(name)
        convert = _converter(fixes, table.name, column.name, log)
        if convert is not None:
            connection.create_scalar_function(f"fixed_{place}", convert, 1)  # type: ignore[arg-type]
        cells.append(name if convert is None else f"fixed_{place}({name})")
    distinct = "DISTINCT " if ("", TableFix.DROP_DUPLICATES) in fixes else ""
    name = quote_identifier(table.name)
    rows = f"SELECT {distinct}{', '.join(cells)} FROM {name}"
    connection.execute(f"INSERT INTO {_NEW} ({', '.join(columns)}) {rows}")
    connection.execute(f"DROP TABLE {name}")
    connection.execute(f"ALTER TABLE {_NEW} RENAME TO {name}")
    for (sql,) in beside:
        connection.execute(str(sql))


def _create_statement(sql: str, table: TableSurvey, fixes: Fixes) -> str:
    """Return the statement of the new table. Raises DataError when the stored one cannot be read."""
    create = sqlglot.parse_one(sql, read="sqlite")
    if not isinstance(create, exp.Create) or not isinstance(create.this, exp.Schema):
        raise DataError(f"the statement of table {table.name} cannot be read. Correct the table yourself")
    schema = create.this
    schema.set("this", exp.to_table(_NEW))
    definitions = {each.name.casefold(): each for each in schema.find_all(exp.ColumnDef)}
    for each in table.columns:
        if each.declared and each.name.casefold() in definitions:
            # As it was declared: sqlglot's own spelling of a type may have another affinity.
            definitions[each.name.casefold()].set("kind", exp.Var(this=each.declared))
    for column, fix in fixes:
        definition = definitions.get(column.casefold())
        if definition is None:
            continue
        if fix is TableFix.DROP_COLUMN:
            definition.pop()
        elif isinstance(fix, CellFix) and fix.column_type:
            definition.set("kind", exp.Var(this=fix.column_type))
        elif isinstance(fix, DeclareKey):
            schema.append("expressions", _key(column, fix))
    return str(create.sql(dialect="sqlite"))


def _key(column: str, key: DeclareKey) -> exp.Expression:
    named = exp.to_identifier(column, quoted=True)
    if not key.parent:
        return exp.PrimaryKey(expressions=[named])
    parent_column = exp.to_identifier(key.parent_column, quoted=True)
    parent = exp.Schema(this=exp.to_identifier(key.parent, quoted=True), expressions=[parent_column])
    return exp.ForeignKey(expressions=[named], reference=exp.Reference(this=parent))
