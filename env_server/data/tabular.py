"""CSV, TSV and Parquet files, imported once into a SQLite database in a cache directory.

Promises:
- Each file becomes a table that is called like it; what its columns are: `env_server.data.csv_table`,
  `env_server.data.parquet_table`, `env_server.data.source_table`.
- What `keys.toml` beside them states is declared (`env_server.data.keys`).
- The database's name in the cache is made from the contents of the files: the same files are imported once, changed
  ones again, and a database in the cache never changes.
- It is complete or absent, also after a failure and with several processes at once: it is written in a folder of
  its own and renamed into its place. What a failure leaves is removed.
- Files are read row by row; memory does not grow with them.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import apsw

from env_server.cache import CACHE_VARIABLE
from env_server.data.csv_table import CSV_SUFFIXES, read_csv
from env_server.data.database_files import file_problem
from env_server.data.json_files import cannot_read
from env_server.data.keys import KEYS_FILE, Keys, check_keys, keys_text, read_keys
from env_server.data.parquet_table import PARQUET_SUFFIXES, read_parquet
from env_server.data.source_table import (
    SourceTable,
    create_statement,
    insert_statement,
    key_column,
    table_names,
)
from env_server.errors import DataError

IMPORT_VERSION = 1
"""Goes up when the same files would give another database."""
CACHE_FOLDER = "imported"
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
    label = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:40]
    digest = _digest(tables, keys)
    target = cache_dir.absolute() / CACHE_FOLDER / f"{label}-{digest}.sqlite"
    try:
        if target.is_file() and not file_problem(target):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{label}-") as scratch:
            fresh = Path(scratch, "new.sqlite")
            sources = [_read(path, table) for table, path in tables.items()]
            check_keys(keys, sources, stated)
            _write(fresh, sources, keys, stated)
            if _digest(tables, keys) != digest:
                raise DataError(f"a file in {files[0].parent} changed while it was imported. Try again")
            fresh.replace(target)
    except (OSError, apsw.FullError, apsw.IOError, apsw.CantOpenError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        fix = f"Make room there, or set {CACHE_VARIABLE} to a directory of your own"
        raise DataError(f"{target.parent} cannot be written: {reason}. {fix}") from error
    return target


def _digest(tables: Mapping[str, Path], keys: Keys) -> str:
    """Return what the names and contents of the tables, and their stated keys, come to."""
    contents = []
    for name, path in sorted(tables.items()):
        try:
            with path.open("rb") as file:
                contents.append([name, path.suffix.lower(), hashlib.file_digest(file, "sha256").hexdigest()])
        except OSError as error:
            raise cannot_read(path, error) from error
    stated = [] if keys == Keys() else [keys_text(keys)]
    return hashlib.sha256(json.dumps([IMPORT_VERSION, contents, *stated]).encode()).hexdigest()[:32]


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
