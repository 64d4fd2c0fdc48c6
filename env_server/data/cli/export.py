"""A data set for Hugging Face `datasets` and TRL, so that it can be trained on without SQLEnv.

    train.parquet, eval.parquet      one row for each usable question; `prompt` is a list of {role, content}
    databases/ID.sqlite              copies of the databases
    README.md                        the data set's card: the columns, the splits, a reward function to start with

Promises: `datasets.load_dataset(FOLDER)` gives the splits; `prompt` is TRL's conversational format, a plain text-to-SQL
task with the whole schema, since there is no environment to explore; the folder appears whole or not at all; the same
data set gives the same bytes. The rows hold gold SQL and gold answers: what is exported is for a trainer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from env_server.data.archives import disk_errors
from env_server.data.curation import Progress
from env_server.data.parquet_table import import_pyarrow
from env_server.dataset import Dataset, Question, Split
from env_server.errors import DataError
from env_server.judging.answers import format_answer
from env_server.settings import SandboxSettings
from env_server.sql.display import sql_name
from env_server.sql.pool import DatabasePool
from env_server.sql.schema import Schema, Table, quote_identifier

DATABASES = "databases"
"""The folder of the databases."""
SYSTEM_PROMPT = "You write SQL for SQLite. Answer the question with one SELECT statement and nothing else."
COLUMNS = {
    "prompt": "the conversation that the model continues: the task, then the schema and the question",
    "question_id": "the question's name",
    "db_id": "the database's name",
    "database": "the database's file in this folder",
    "question": "the question alone",
    "evidence": "what one has to know to answer it; empty where nothing",
    "sql": "the gold query",
    "answer": "its rows as text: values separated by commas, rows as `a | b` one per line, or JSON",
    "ordered": "whether the order of the rows counts",
    "hardness": "easy, medium, hard or extra, by Spider's rule",
    "duplicate_of": "an earlier question with the same SQL up to formatting; empty where there is none",
    "split": "train or eval",
}
"""The columns of the files, and what they hold."""

_BATCH_ROWS = 1_000


def export_dataset(
    dataset: Dataset, folder: Path, split: Split = Split.ALL, progress: Progress | None = None
) -> dict[str, int]:
    """Write the usable questions of a split; return the number of questions in each file, by split.

    `progress` is called with the number of questions written and of all. Raises DataError when the folder exists and
    is not empty, when it cannot be written, when pyarrow is missing and when the split is empty.
    """
    arrow = import_pyarrow("Parquet is written")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists and is not empty. Choose a folder that does not exist yet")
    splits = [each for each in (Split.TRAIN, Split.EVAL) if split in (each, Split.ALL) and dataset.select(each)]
    if not splits:
        raise DataError(f"data set {dataset.name} has no usable question in split {split.value!r}. Choose another")
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        with disk_errors(folder):
            partial.mkdir(parents=True)
            counts = _write(arrow, dataset, splits, partial, progress)
            partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return counts


def prompt_of(question: Question, schema: Schema) -> list[dict[str, str]]:
    """Return the conversation that a model continues with a query."""
    hint = f"\nHint: {question.evidence}" if question.evidence else ""
    content = f"{schema_text(schema)}\n\nQuestion: {question.text}{hint}"
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": content}]


def schema_text(schema: Schema) -> str:
    """Return the schema as CREATE TABLE statements: names, types and keys of every table and view."""
    return "\n\n".join(_create(table) for table in schema.tables)


def _create(table: Table) -> str:
    if table.is_view:
        return f"CREATE VIEW {_name(table.name)} ({_names([column.name for column in table.columns])});"
    key = [column.name for column in table.columns if column.primary_key]
    lines = []
    for column in table.columns:
        words = [_name(column.name), " ".join(column.type.split()), "PRIMARY KEY" if [column.name] == key else ""]
        lines.append("  " + " ".join(filter(None, words)))
    if len(key) > 1:
        lines.append(f"  PRIMARY KEY ({_names(key)})")
    for reference in table.foreign_keys:
        columns = f" ({_names(reference.ref_columns)})" if reference.ref_columns else ""
        lines.append(f"  FOREIGN KEY ({_names(reference.columns)}) REFERENCES {_name(reference.table)}{columns}")
    return f"CREATE TABLE {_name(table.name)} (\n" + ",\n".join(lines) + "\n);"


def _name(name: str) -> str:
    """Return a name as it must be written in SQL, however long."""
    return name if sql_name(name) == name else quote_identifier(name)


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(_name, names))


def _write(
    arrow: Any, dataset: Dataset, splits: Sequence[Split], folder: Path, progress: Progress | None
) -> dict[str, int]:
    chosen = {split: dataset.select(split) for split in splits}
    total = sum(map(len, chosen.values()))
    done = 0
    files = _copy_databases(dataset, {q.db_id for questions in chosen.values() for q in questions}, folder)
    columns = _arrow_schema(arrow)
    with closing(DatabasePool(dataset.databases, SandboxSettings(), max_idle=1)) as pool:
        for split, questions in chosen.items():
            with arrow.parquet.ParquetWriter(folder / f"{split.value}.parquet", columns, compression="zstd") as writer:
                for start in range(0, len(questions), _BATCH_ROWS):
                    batch = questions[start : start + _BATCH_ROWS]
                    rows = [_row(question, pool.schema(question.db_id), files[question.db_id]) for question in batch]
                    writer.write_table(arrow.Table.from_pylist(rows, schema=columns))
                    done += len(batch)
                    if progress is not None:
                        progress(done, total)
    counts = {split.value: len(questions) for split, questions in chosen.items()}
    (folder / "README.md").write_text(card(dataset.name, counts), encoding="utf-8")
    return counts


def _row(question: Question, schema: Schema, database: str) -> dict[str, object]:
    return {
        "prompt": prompt_of(question, schema),
        "question_id": question.question_id,
        "db_id": question.db_id,
        "database": database,
        "question": question.text,
        "evidence": question.evidence,
        "sql": question.gold_sql,
        "answer": format_answer(question.gold.rows),
        "ordered": question.gold.ordered,
        "hardness": question.hardness.value,
        "duplicate_of": question.duplicate_of,
        "split": question.split.value,
    }


def _arrow_schema(arrow: Any) -> Any:
    text = arrow.string()
    message = arrow.list_(arrow.struct([("role", text), ("content", text)]))
    kinds = {"prompt": message, "ordered": arrow.bool_()}
    return arrow.schema([(name, kinds.get(name, text)) for name in COLUMNS])


def _copy_databases(dataset: Dataset, used: set[str], folder: Path) -> dict[str, str]:
    """Copy the databases that are used; return each one's path in the folder."""
    (folder / DATABASES).mkdir()
    files = {}
    for db_id in sorted(used):
        if Path(db_id).name != db_id:
            raise DataError(f"database {db_id!r} cannot be a file's name. Rename it")
        files[db_id] = f"{DATABASES}/{db_id}.sqlite"
        shutil.copyfile(dataset.databases[db_id], folder / files[db_id])
    return files


def card(name: str, counts: Mapping[str, int]) -> str:
    """Return the data set's card: what `datasets` reads, and what a person does."""
    files = "".join(f"      - split: {split}\n        path: {split}.parquet\n" for split in counts)
    columns = "".join(f"| `{column}` | {meaning} |\n" for column, meaning in COLUMNS.items())
    splits = ", ".join(f"{count:,} in `{split}`" for split, count in counts.items())
    return _CARD.format(
        name=name, title=json.dumps(name), files=files, columns=columns, splits=splits, databases=DATABASES
    )


_CARD = """\
---
pretty_name: {title}
task_categories:
  - text-generation
tags:
  - text-to-sql
  - grpo
configs:
  - config_name: default
    data_files:
{files}---

# {name}: questions about SQLite databases

Written by `sqlenv data export`. Questions: {splits}. Every gold query runs, and returns rows that are not all NULL.
The data keep the licence of their source.

| column | what it holds |
|---|---|
{columns}
## Train on it with TRL

A reward function: 1 when the query returns the gold query's rows, in any order unless the order counts.

```python
import re
import sqlite3
import time
from pathlib import Path

FOLDER = Path(".")  # this folder
READING = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
# What touches files, what differs each time, and what takes as long as one of its arguments says.
REFUSED = ("load_extension", "fts3_tokenizer", "readfile", "writefile", "edit")
REFUSED += ("random", "randomblob", "printf", "format")
# Functions whose time grows with the product of their arguments' lengths: they get short texts.
SLOW = re.compile("like|glob|match|instr|replace|trim|unhex|geopoly", re.IGNORECASE)
LIMITS = {{
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 50,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}}


def authorize(action, first, second, *_):
    if action == sqlite3.SQLITE_FUNCTION:
        return sqlite3.SQLITE_DENY if second.lower() in REFUSED else sqlite3.SQLITE_OK
    return sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY


def rows(database, sql):  # None when the query fails, is refused or needs too much
    connection = sqlite3.connect(f"{{(FOLDER / database).absolute().as_uri()}}?mode=ro&immutable=1", uri=True)
    for limit, most in LIMITS.items():
        connection.setlimit(limit, most)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000 if SLOW.search(sql) else 100_000)
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA hard_heap_limit = 256000000")  # bytes, of SQLite in this whole process
    connection.set_authorizer(authorize)
    ends = time.thread_time() + 2
    steps = iter(range(200_000))  # of 100 instructions each; then the query is stopped
    connection.set_progress_handler(lambda: next(steps, None) is None or time.thread_time() > ends, 100)
    found, size = [], 0
    try:
        for row in connection.execute(sql):
            size += sum(len(value) for value in row if isinstance(value, (str, bytes)))
            if len(found) == 10_000 or size > 10_000_000:
                return None
            found.append(row)
        return found
    except (sqlite3.Error, sqlite3.Warning, MemoryError, ValueError):
        return None
    finally:
        connection.close()


def reward_rows(completions, database, sql, ordered, **_):
    rewards = []
    for completion, file, gold, in_order in zip(completions, database, sql, ordered):
        query = completion[0]["content"].strip().removeprefix("```sql").removesuffix("```")
        found, wanted = rows(file, query), rows(file, gold)
        if found is not None and wanted is not None and not in_order:
            found, wanted = sorted(found, key=repr), sorted(wanted, key=repr)
        rewards.append(float(found is not None and found == wanted))
    return rewards
```

It is a start: it compares on one database, where a wrong query can be right by luck. What a model writes may only read,
and is stopped after 20 million instructions or two seconds; but it runs in this process, which it holds up meanwhile.
SQLEnv's own judge runs it in another process and on variants of the database.

```python
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset(str(FOLDER.absolute()), split="train")
GRPOTrainer("Qwen/Qwen3-0.6B", reward_rows, GRPOConfig("out"), train_dataset=dataset).train()
```
"""
