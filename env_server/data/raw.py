"""What a source of questions delivers, before anything is checked: texts, gold SQL, database files.

Plain data, no I/O. The loader runs the gold SQL, grades the hardness and leaves out what cannot be used; only
then does a `RawQuestion` become a `Question`. Nothing here promises that the SQL runs or that the file exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from env_server.dataset import Hardness, Row, Split


@dataclass(frozen=True, slots=True)
class RawQuestion:
    """One question as its source states it; `split` is TRAIN or EVAL.

    `family` is the source's own sort of question: the generator's family, BIRD's difficulty. `hardness` is None where
    the query is yet to be graded. `answer` is what the source states in place of SQL, which is "" then.
    """

    question_id: str
    text: str
    db_id: str
    sql: str
    split: Split
    family: str = ""
    evidence: str = ""
    hardness: Hardness | None = None
    answer: tuple[Row, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class RawDataset:
    """Questions in the source's order, and the SQLite file of each db_id.

    `refused` says why a database has a file and is not in `databases`.
    """

    name: str
    questions: tuple[RawQuestion, ...]
    databases: Mapping[str, Path]
    refused: Mapping[str, str] = field(default_factory=dict)
