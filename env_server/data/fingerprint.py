"""Whether two processes hold the same data: a server says what it serves, a trainer compares it with its own.

`dataset_fingerprint` covers what an agent can be asked and shown: every question's id, text, evidence and database,
and of each database the tables as declared with their first and last rows. It is a check against a mistake, such as
another seed, version or folder; not against malice, and not of every row, so that it takes milliseconds for data sets
of gigabytes. It does not depend on where the files are, nor on how SQLite has laid them out. Nothing of the gold goes
into it: a fingerprint leaves the server. What was read of a database is kept in the cache, where one is given.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path
from typing import Any

from env_server.cache import Cache, identity, key_of
from env_server.dataset import Dataset
from env_server.errors import SQLError
from env_server.settings import EnvSettings, SandboxSettings
from env_server.sql.sandbox import Sandbox
from env_server.sql.schema import quote_identifier
from env_server.types import AnswerMode, ServedData

EDGE_ROWS = 3
MAX_TABLES = 10_000


def served_data(
    dataset: Dataset, answer_mode: AnswerMode, settings: EnvSettings, cache: Cache | None = None
) -> ServedData:
    """Describe what an environment of these plays. Raises DataError when a database cannot be opened."""
    return ServedData(
        name=dataset.name,
        questions=len(dataset.questions),
        fingerprint=dataset_fingerprint(dataset, cache),
        answer_mode=answer_mode,
        step_budget=settings.step_budget,
    )


def dataset_fingerprint(dataset: Dataset, cache: Cache | None = None) -> str:
    """Return 64 hexadecimal digits. Raises DataError when a database cannot be opened."""
    known = cache or Cache(None)
    digest = hashlib.sha256()
    for question in sorted(dataset.questions, key=lambda question: question.question_id):
        _add(digest, question.question_id, question.text, question.evidence, question.db_id)
    for db_id in sorted({question.db_id for question in dataset.questions}):
        _add(digest, db_id, _database_fingerprint(dataset.databases[db_id], known))
    return digest.hexdigest()


def _database_fingerprint(path: Path, cache: Cache) -> str:
    key = key_of("fingerprint", identity(path))
    fingerprint = cache.get(key)
    if fingerprint is None:
        fingerprint = _read_fingerprint(path)
        cache.set(key, fingerprint)
    return fingerprint


def _read_fingerprint(path: Path) -> str:
    digest = hashlib.sha256()
    with closing(Sandbox(path, SandboxSettings())) as sandbox:
        tables = sandbox.query("SELECT name, sql FROM sqlite_master WHERE type = 'table' ORDER BY name", MAX_TABLES)
        for name, sql in tables.rows:
            _add(digest, name, sql)
            table = quote_identifier(str(name))
            for order in ("ASC", "DESC"):
                _add(digest, *_rows(sandbox, f"SELECT * FROM {table} ORDER BY rowid {order} LIMIT {EDGE_ROWS}"))
    return digest.hexdigest()


def _rows(sandbox: Sandbox, statement: str) -> tuple[object, ...]:
    """Rows, or the sort of error: a table without rowids has no last rows, a module may be missing."""
    try:
        return sandbox.query(statement, EDGE_ROWS).rows
    except SQLError as error:
        return (error.kind,)


def _add(digest: Any, *parts: object) -> None:
    """Add the parts so that no other parts, and no other division into parts, add the same bytes."""
    for part in parts:
        text = repr(part).encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(text))
        digest.update(text)
    digest.update(b";")
