"""CSV, TSV and Parquet files, imported once into a SQLite database in a cache directory.

Guarantees:
- Each file becomes a table that is called like it; what its columns are: `env_server.data.csv_table`,
  `env_server.data.parquet_table`, `env_server.data.source_table`.
- The keys that `keys.toml` beside them states are declared, so that DESCRIBE shows them and test databases keep them;
  whether every value of a foreign key has its row is not enforced. What is not stated is found (`key_column`).
- The same files are imported once, changed ones again: the database is an entry of the cache (`env_server.cache`).
- Files are read row by row; memory does not grow with them.

    [primary_keys]
    categories = "category_id"          # the table and its column

    [foreign_keys.products]
    category_id = "categories"          # the column, and the table whose primary key it refers to
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw

from env_server.cache import Cache, identity, key_of
from env_server.data.cells import normal
from env_server.data.csv_table import CSV_SUFFIXES, read_csv
from env_server.data.json_files import cannot_read
from env_server.data.parquet_table import PARQUET_SUFFIXES, read_parquet
from env_server.data.source_table import (
    SourceTable,
    create_statement,
    insert_statement,
    key_column,
    table_names,
)
from env_server.errors import DataError

KIND = "imported"
TABLE_SUFFIXES = (*CSV_SUFFIXES, *PARQUET_SUFFIXES)
KEYS_FILE = "keys.toml"
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_PRIMARY, _FOREIGN = "primary_keys", "foreign_keys"


def is_table_file(path: Path) -> bool:
    """Tell whether the file is called like one that can be imported."""
    return path.suffix.lower() in TABLE_SUFFIXES


def import_tables(name: str, files: Sequence[Path], cache_dir: Path) -> Path:
    """Return the SQLite file that holds the tables of `files`; it is in `cache_dir`, and made now if it is not yet.

    `name` is only for the person who looks into the cache. Raises DataError when a file cannot be read or is not a
    table, and when the cache cannot be written.
    """
    tables = table_names(files)
    stated = files[0].parent / KEYS_FILE
    keys = read_keys(stated.parent)

    def key() -> str:
        return key_of([(table, path.suffix.lower(), identity(path)) for table, path in sorted(tables.items())], keys)

    def make(path: Path) -> None:
        sources = [_read(file, table) for table, file in tables.items()]
        check_keys(keys, sources, stated)
        _write(path, sources, keys, stated)
        if key() != before:
            raise DataError(f"a file in {files[0].parent} changed while it was imported. Try again")

    before = key()
    label = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:40]
    return Cache(cache_dir).made(KIND, f"{label}-{before}.sqlite", make)


def _read(path: Path, name: str) -> SourceTable:
    return read_csv(path, name) if path.suffix.lower() in CSV_SUFFIXES else read_parquet(path, name)


def _write(path: Path, tables: Sequence[SourceTable], keys: Keys, stated: Path) -> None:
    """Write the database; `stated` is the file that the keys come from. Raises DataError when a key does not hold."""
    proposed = {table.name: keys.primary.get(table.name) or key_column(table) for table in tables}
    connection = apsw.Connection(str(path))
    try:
        with connection:
            for table in tables:
                key, references = proposed[table.name], keys.foreign.get(table.name, {})
                parents = {column: (parent, proposed[parent] or "") for column, parent in references.items()}
                if not _add(connection, table, key, parents):
                    if table.name in keys.primary:
                        problem = f"a value of {key!r}, the primary key of {table.name!r}, occurs more than once"
                        raise DataError(f"{stated}: {problem}. Correct the table, or the key")
                    proposed[table.name] = None
            for parent in {parent for references in keys.foreign.values() for parent in references.values()}:
                if proposed[parent] is None:
                    fix = f"Name one in [primary_keys] whose values differ, or drop the reference to {parent!r}"
                    raise DataError(f"{stated}: table {parent!r} has no primary key to refer to. {fix}")
    finally:
        connection.close(True)


def _add(
    connection: apsw.Connection, table: SourceTable, key: str | None, parents: Mapping[str, tuple[str, str]]
) -> bool:
    """Add the table, with the key if its values differ; return whether they do."""
    try:
        with connection:
            connection.execute(create_statement(table, key, parents))
            connection.executemany(insert_statement(table), table.rows())
    except apsw.ConstraintError:
        _add(connection, table, None, parents)
        return False
    return True


@dataclass(frozen=True)
class Keys:
    """`primary`: the key column of each table; `foreign`: for each table and column, the table that it refers to."""

    primary: Mapping[str, str] = field(default_factory=dict)
    foreign: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def read_keys(folder: Path) -> Keys:
    """Read the folder's keys; no keys where there is no file. Raises DataError."""
    path = folder / KEYS_FILE
    if not path.is_file():
        return Keys()
    try:
        stated = tomllib.loads(normal(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise cannot_read(path, error) from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise DataError(f"{path} is not TOML: {error}. Correct it") from error
    if unknown := [key for key in stated if key not in (_PRIMARY, _FOREIGN)]:
        raise DataError(f"{path}: {unknown[0]!r} is not known. It may have [{_PRIMARY}] and [{_FOREIGN}.TABLE]")
    foreign = _table(path, _FOREIGN, stated.get(_FOREIGN, {}))
    return Keys(
        _names(path, _PRIMARY, stated.get(_PRIMARY, {})),
        {table: _names(path, f"{_FOREIGN}.{table}", columns) for table, columns in foreign.items()},
    )


def check_keys(keys: Keys, tables: Sequence[SourceTable], path: Path) -> None:
    """Raises DataError when a key names what is not there, or a primary key has empty cells."""
    columns = {table.name: {column.name for column in table.columns} for table in tables}
    named = [(table, column) for table, column in keys.primary.items()]
    named += [(table, column) for table, references in keys.foreign.items() for column in references]
    parents = [parent for references in keys.foreign.values() for parent in references.values()]
    for table in (*(table for table, _ in named), *parents):
        if table not in columns:
            raise DataError(f"{path}: there is no table {table!r}. Name one of {', '.join(columns)}")
    for table, column in named:
        if column not in columns[table]:
            listed = ", ".join(sorted(columns[table]))
            raise DataError(f"{path}: table {table!r} has no column {column!r}. Name one of {listed}")
    complete = {(table.name, column.name) for table in tables for column in table.columns if column.complete}
    for table, column in keys.primary.items():
        if (table, column) not in complete:
            problem = f"{column!r}, the primary key of {table!r}, has empty cells"
            raise DataError(f"{path}: {problem}. Correct the table, or the key")


def keys_text(keys: Keys) -> str:
    """Return the text of a file that states these keys."""
    parts = []
    if keys.primary:
        parts.append((f"[{_PRIMARY}]", keys.primary))
    parts += [(f"[{_FOREIGN}.{_quoted(table)}]", columns) for table, columns in keys.foreign.items()]
    lines = [
        "\n".join([title, *(f"{_quoted(name)} = {_string(value)}" for name, value in of.items())])
        for title, of in parts
    ]
    return "\n\n".join(lines) + "\n"


def _quoted(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    """Write a text as TOML does: as JSON does, but for one more control character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _table(path: Path, name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{path}: {name} is not a table. Write [{name}], and a line NAME = NAME for each key")
    return value


def _names(path: Path, name: str, value: object) -> dict[str, str]:
    table = _table(path, name, value)
    if wrong := next((key for key, each in table.items() if not isinstance(each, str)), None):
        raise DataError(f'{path}: {wrong} in [{name}] is not a name. Write {wrong} = "NAME"')
    return table
