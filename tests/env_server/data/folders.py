"""Folders of data as users have them: databases, and files of questions."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any


def add_database(folder: Path, name: str, script: str = "CREATE TABLE t (a)") -> Path:
    """Make a database, and the folders that it lies in."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(script)
    return file


def write_entries(folder: Path, entries: Sequence[Mapping[str, Any]], name: str = "questions.json") -> Path:
    """Write a list of questions, each key on a line of its own."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(entries, indent=1), encoding="utf-8")
    return file


def spider_entry(db_id: str = "ranch", **changes: Any) -> dict[str, Any]:
    """A question as Spider writes it."""
    return {"db_id": db_id, "question": "How many?", "query": "SELECT count(*) FROM t", **changes}
