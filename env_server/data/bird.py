"""BIRD's folder (Li et al., NeurIPS 2023), as the archives of its train, dev and mini-dev parts unpack.

    train.json                                    a list of {"db_id", "question", "SQL", "evidence"}
    dev.json, or mini_dev_sqlite.json             the same with "question_id" and "difficulty"
    train_databases/ID/ID.sqlite                  one file for each db_id; also dev_databases/, databases/, database/

Any one part is enough. Each may lie in a top folder of its own, such as train/ and dev_20240627/ or minidev/MINIDEV/,
and the databases one folder deeper, as in dev_databases/dev_databases/. The evidence, BIRD's outside knowledge, is
shown to the agent with the question; the difficulty is the question's family. mini_dev_sqlite.json, whose questions
are a part of dev.json's, is read where there is no dev.json. The dev and mini-dev databases are for evaluation only.
How a folder is read, what a question is called and how the split is made: `env_server.data.layout`.
"""

from __future__ import annotations

from pathlib import Path

from env_server.data.layout import Layout, read_layout
from env_server.data.raw import RawDataset

BIRD = Layout(
    name="bird",
    train_files=("train.json",),
    eval_files=("dev.json", "mini_dev_sqlite.json"),
    database_folders=("train_databases", "dev_databases", "databases", "database"),
    sql_key="SQL",
    id_key="question_id",
    evidence_key="evidence",
    family_key="difficulty",
)


def read_bird(folder: Path) -> RawDataset:
    """Read a BIRD folder. Raises DataError."""
    return read_layout(BIRD, folder)
