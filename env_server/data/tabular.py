"""CSV, TSV and Parquet files, imported once into a SQLite database in a cache directory.

Promises:
- Each file becomes a table that is called like it; what its columns are: `env_server.data.csv_table`,
  `env_server.data.parquet_table`, `env_server.data.source_table`.
- What `keys.toml` beside them states is declared (`env_server.data.keys`).
- The same files are imported once, changed ones again: the database is an entry of the cache (`env_server.cache`).
- Files are read row by row; memory does not grow with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import apsw

from env_server.cache import Cache, identity, key_of
from env_server.data.csv_table import CSV_SUFFIXES, read_csv
from env_server.data.keys import KEYS_FILE, Keys, check_keys, read_keys
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
