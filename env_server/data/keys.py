"""`keys.toml`, beside CSV and Parquet files: the keys of their tables, which the files themselves cannot state.

    [primary_keys]
    categories = "category_id"          # the table and its column

    [foreign_keys.products]
    category_id = "categories"          # the column, and the table whose primary key it refers to

What is not stated is found as ever (`env_server.data.source_table.key_column`). Foreign keys are declared, so that
DESCRIBE shows them and variants of the database keep them; whether every value has its row is not enforced.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from env_server.data.cells import normal
from env_server.data.json_files import cannot_read
from env_server.data.source_table import SourceTable
from env_server.errors import DataError

KEYS_FILE = "keys.toml"
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_PRIMARY, _FOREIGN = "primary_keys", "foreign_keys"


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
