"""The real Spider folder: what curation leaves out. That every gold can be answered: `tools/test_real_databases.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, ExclusionReason, Split
from env_server.types import AnswerMode


@pytest.fixture(scope="module")
def datasets(spider_dir: Path) -> Mapping[AnswerMode, Dataset]:
    return {mode: load_dataset(f"spider:{spider_dir}", answer_mode=mode) for mode in AnswerMode}


@pytest.mark.parametrize(
    ("mode", "usable", "excluded", "copies"),
    [
        (AnswerMode.VALUE, 2106, {"gold_fails": 1, "gold_empty": 57, "gold_too_large": 110}, 889),
        (AnswerMode.SQL, 2198, {"gold_fails": 1, "gold_empty": 57, "gold_too_large": 18}, 936),
    ],
)
def test_what_is_left_out(
    datasets: Mapping[AnswerMode, Dataset], mode: AnswerMode, usable: int, excluded: dict[str, int], copies: int
) -> None:
    dataset = datasets[mode]
    assert (len(dataset.questions), len(dataset.databases)) == (usable, 46)
    assert Counter(exclusion.reason.value for exclusion in dataset.excluded) == excluded
    (failing,) = (e for e in dataset.excluded if e.reason is ExclusionReason.GOLD_FAILS)
    assert (failing.db_id, failing.detail) == ("assets_maintenance", "missing: no such table: Ref_Company_Types")
    assert sum(q.gold.is_zero for q in dataset.questions) == 6
    assert sum(bool(q.duplicate_of) for q in dataset.questions) == copies
    train, evaluation = ({q.db_id for q in dataset.select(split)} for split in (Split.TRAIN, Split.EVAL))
    assert train.isdisjoint(evaluation)
    assert train | evaluation == set(dataset.databases)
    assert (len(train), len(evaluation)) == (35, 11)
