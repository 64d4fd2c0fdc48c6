"""The real Spider folder: what curation leaves out, that every gold can be answered, and what `inspect` says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from env_server.data.cli.inspection import inspect_text
from env_server.data.cli.validation import validate
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, ExclusionReason, Split
from env_server.settings import EnvSettings, JudgingSettings
from env_server.types import AnswerMode

ALONE = EnvSettings(judging=JudgingSettings(variants=False))


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


@pytest.mark.parametrize("mode", AnswerMode)
def test_every_gold_is_judged_correct(datasets: Mapping[AnswerMode, Dataset], mode: AnswerMode) -> None:
    validation = validate(datasets[mode], mode, ALONE)
    assert validation.problem == ""
    assert (validation.total, validation.database_total, len(validation.split())) == (2274, 46, 46)


def test_the_overview(datasets: Mapping[AnswerMode, Dataset]) -> None:
    console = Console(file=StringIO(), width=200, highlight=False)
    with console.capture() as capture:
        console.print(inspect_text(datasets[AnswerMode.VALUE]))
    out = capture.get()
    assert "among them 889 duplicates (the SQL of an earlier question, up to formatting), 6 questions" in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert rows["all"] == ["46", "484", "843", "462", "317", "2,106"]
    assert [rows[name][0] for name in ("gold_too_large", "gold_empty", "gold_fails")] == ["110", "57", "1"]
