"""A data set for Hugging Face `datasets` and TRL, so that it can be trained on without SQLEnv.

    train.parquet, eval.parquet      one row for each usable question; `prompt` is a list of {role, content}
    databases/ID.sqlite              copies of the databases
    README.md                        the data set's card: the columns, the splits, a reward function to start with

Guarantees: `datasets.load_dataset(FOLDER)` gives the splits; `prompt` is TRL's conversational format, a plain
text-to-SQL task with the whole schema, since there is no environment to explore; the folder appears whole or not at
all; the same data set gives the same bytes. The rows hold gold SQL and gold answers: it is for a trainer.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from env_server.data.curation import Progress
from env_server.data.parquet_table import import_pyarrow
from env_server.dataset import Dataset, Question, Split
from env_server.errors import DataError
from env_server.judging.answers import format_answer
from env_server.settings import SandboxSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.schema import read_statements
from env_server.tools.terminal import disk_errors

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
_CARD = Path(__file__).with_name("export_card.md")
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
    wanted = [each for each in (Split.TRAIN, Split.EVAL) if split in (each, Split.ALL)]
    chosen = {each: questions for each in wanted if (questions := dataset.select(each))}
    if not chosen:
        raise DataError(f"data set {dataset.name} has no usable question in split {split.value!r}. Choose another")
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        with disk_errors(folder):
            partial.mkdir(parents=True)
            counts = _write(arrow, dataset, chosen, partial, progress)
            partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return counts


def prompt_of(question: Question, statements: Sequence[str]) -> list[dict[str, str]]:
    """Return the conversation that a model continues with a query. `statements`: CREATE of each table and view."""
    schema = "\n\n".join(f"{statement.strip().rstrip(';')};" for statement in statements)
    hint = f"\nHint: {question.evidence}" if question.evidence else ""
    content = f"{schema}\n\nQuestion: {question.text}{hint}"
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": content}]


def _write(
    arrow: Any, dataset: Dataset, chosen: Mapping[Split, Sequence[Question]], folder: Path, progress: Progress | None
) -> dict[str, int]:
    total, done = sum(map(len, chosen.values())), 0
    files = _copy_databases(dataset, {q.db_id for questions in chosen.values() for q in questions}, folder)
    message = arrow.list_(arrow.struct([("role", arrow.string()), ("content", arrow.string())]))
    types = {"prompt": message, "ordered": arrow.bool_()}
    columns = arrow.schema([(name, types.get(name, arrow.string())) for name in COLUMNS])
    with closing(DatabasePool(dataset.databases, SandboxSettings(), max_idle=1)) as pool:

        @cache
        def statements(db_id: str) -> tuple[str, ...]:
            with pool.lease(db_id) as sandbox:
                return read_statements(sandbox, pool.schema(db_id))

        for split, questions in chosen.items():
            with arrow.parquet.ParquetWriter(folder / f"{split.value}.parquet", columns, compression="zstd") as writer:
                for start in range(0, len(questions), _BATCH_ROWS):
                    batch = questions[start : start + _BATCH_ROWS]
                    rows = [_row(question, statements(question.db_id), files[question.db_id]) for question in batch]
                    writer.write_table(arrow.Table.from_pylist(rows, schema=columns))
                    done += len(batch)
                    if progress is not None:
                        progress(done, total)
    counts = {split.value: len(questions) for split, questions in chosen.items()}
    (folder / "README.md").write_text(card(dataset.name, counts), encoding="utf-8")
    return counts


def _row(question: Question, statements: Sequence[str], database: str) -> dict[str, object]:
    return {
        "prompt": prompt_of(question, statements),
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
    return Template(_CARD.read_text(encoding="utf-8")).substitute(
        name=name,
        title=json.dumps(name),
        files="".join(f"      - split: {split}\n        path: {split}.parquet\n" for split in counts),
        columns="".join(f"| `{column}` | {meaning} |\n" for column, meaning in COLUMNS.items()),
        splits=", ".join(f"{count:,} in `{split}`" for split, count in counts.items()),
    )
