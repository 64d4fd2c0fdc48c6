"""Every question is accounted for, and the environment itself judges the gold answers."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from env_server.cache import CACHE_VARIABLE
from env_server.data.cli.validation import Validation, validate, validation_text
from env_server.dataset import Dataset, Exclusion, ExclusionReason, Gold, Split
from env_server.settings import EnvSettings, JudgingSettings
from env_server.types import AnswerMode
from tests.env_server.data.folders import add_database

ALONE = EnvSettings(judging=JudgingSettings(variants=False))


def printed(validation: Validation) -> str:
    """The report as on a narrow terminal, which must not cut it."""
    console = Console(file=StringIO(), width=60, highlight=False)
    with console.capture() as capture:
        console.print(validation_text(validation), soft_wrap=True)
    return capture.get()


def accounts(text: str) -> dict[str, int]:
    """The counts of the report by their words."""
    lines = [line.strip().partition(" ") for line in text.splitlines() if line[:9].strip().replace(",", "").isdigit()]
    return {words.strip(): int(number.replace(",", "")) for number, _, words in lines}


@pytest.fixture(scope="module")
def dataset(pets: Dataset) -> Dataset:
    first, second, *others = pets.questions
    zero = replace(
        first,
        question_id="zero",
        gold_sql="SELECT COUNT(*) FROM pets WHERE age > 99",
        gold=Gold(((0,),), ordered=False),
    )
    copy = replace(second, question_id="copy", duplicate_of=second.question_id)
    excluded = (
        Exclusion("lost-1", "pets", "Who?", ExclusionReason.GOLD_EMPTY, "no row"),
        Exclusion("lost-2", "zoo", "Where?", ExclusionReason.NO_DATABASE, "[no] file: " + "x" * 100),
    )
    return replace(pets, questions=(first, second, *others, zero, copy), excluded=excluded)


@pytest.fixture(scope="module")
def validation(dataset: Dataset) -> Validation:
    return validate(dataset)


@pytest.fixture
def variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants are made for this test."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))


@pytest.mark.parametrize("mode", AnswerMode)
def test_gold_answers_are_judged_correct(dataset: Dataset, mode: AnswerMode) -> None:
    seen: list[tuple[int, int]] = []
    validation = validate(dataset, mode, ALONE, progress=lambda *counts: seen.append(counts))
    assert (validation.wrong, validation.problem) == ((), "")
    assert seen == [(i, 6) for i in range(1, 7)]


def test_a_gold_that_the_environment_rejects_is_named(dataset: Dataset) -> None:
    lie = replace(dataset.questions[0], question_id="lie", gold=Gold(((3,),), ordered=False))
    validation = validate(replace(dataset, questions=(*dataset.questions, lie)), AnswerMode.SQL, ALONE)
    assert "judged wrong for 1 usable question, such as lie" in validation.problem
    assert "gold answers that are judged wrong\n  lie\n" in printed(validation)
    assert validation.summary()["gold_answers_wrong"] == ["lie"]
    wrong = [record["question_id"] for record in validation.records() if record.get("gold_answer_correct") is False]
    assert wrong == ["lie"]


def test_the_report_accounts_for_every_question(validation: Validation, dataset: Dataset) -> None:
    text = printed(validation)
    assert text == printed(validate(dataset)), "it is the same every time"
    assert "pets: 8 questions over 2 databases, answered with a value" in text
    assert "  lost-1  pets  gold_empty  no row\n" in text
    assert f"  lost-2  zoo  no_database  [no] file: {'x' * 100}\n" in text, "nothing is cut or taken for markup"
    counts = accounts(text)
    assert counts["usable"] == 6
    assert counts["the gold answer, played through the environment, is judged correct"] == 6
    assert counts["the SQL of an earlier question, up to formatting; kept"] == 1
    assert counts["the answer is a single 0; kept, an answer like any other"] == 1
    assert counts["left out"] == 2
    reasons = {words.partition(":")[0]: number for words, number in counts.items() if ": " in words}
    assert reasons == {reason: int(reason in ("gold_empty", "no_database")) for reason in ExclusionReason}


def test_the_json_says_the_same(validation: Validation, dataset: Dataset) -> None:
    summary = json.loads(json.dumps(validation.summary()))
    assert (summary["questions"], summary["usable"], summary["left_out"]) == (8, 6, 2)
    assert (summary["databases"], summary["usable_databases"]) == (2, 1)
    assert {reason: count for reason, count in summary["left_out_by_reason"].items() if count} == {
        "gold_empty": 1,
        "no_database": 1,
    }
    assert set(summary["left_out_by_reason"]) == set(ExclusionReason)
    assert (summary["zero"], summary["duplicate_of"]) == (["zero"], {"copy": "oldest"})
    assert summary["splits"] == {"train": 5, "eval": 1}
    assert summary["hardness"] == {"easy": 6, "medium": 0, "hard": 0, "extra": 0}
    assert [each["question_id"] for each in summary["excluded"]] == ["lost-1", "lost-2"]
    assert summary["split"] == {"pets": {q.question_id: q.split.value for q in dataset.questions}}
    assert not {"guessable", "untested_clauses", "no_variants"} & set(summary)


def test_there_is_one_record_for_each_question(validation: Validation, dataset: Dataset) -> None:
    records = list(validation.records())
    ids = [q.question_id for q in dataset.questions] + [e.question_id for e in dataset.excluded]
    assert [r["question_id"] for r in records] == ids
    assert [r["usable"] for r in records] == [True] * 6 + [False] * 2
    assert [r.get("zero") for r in records][4:6] == [True, False]
    assert (records[-1]["reason"], records[-2]["detail"]) == ("no_database", "no row")


def test_a_split_by_database_is_written_by_database(dataset: Dataset) -> None:
    train = tuple(q for q in dataset.questions if q.split is Split.TRAIN)
    validation = validate(replace(dataset, questions=train))
    assert validation.split() == {"pets": "train"}
    assert "split by database\n  train (1): pets" in printed(validation)


def test_a_data_set_without_a_usable_question(dataset: Dataset) -> None:
    validation = validate(replace(dataset, questions=(), databases={}))
    assert "has no usable question" in validation.problem
    text = printed(validation)
    assert accounts(text)["left out"] == 2
    assert "  lost-1  pets" in text
    assert validation.split() == {}


@pytest.mark.usefixtures("variants")
def test_guessable_answers_and_untested_clauses_are_flagged_when_asked_for(dataset: Dataset) -> None:
    sql = "SELECT species, COUNT(*) FROM pets GROUP BY species HAVING COUNT(*) >= 1"
    useless = replace(dataset.question("species"), question_id="useless", gold_sql=sql)
    asked = replace(dataset, questions=(*dataset.questions, useless))
    measured = validate(asked, guessable=True)
    for validation in (measured, validate(asked, AnswerMode.SQL)):
        assert validation.problem == ""
        assert validation.summary()["untested_clauses"] == {"useless": ["HAVING COUNT(*) >= 1"]}
        records = {str(record["question_id"]): record for record in validation.records() if record["usable"]}
        assert records["useless"]["untested_clauses"] == ["HAVING COUNT(*) >= 1"]
        assert records["cats"]["untested_clauses"] == []
        text = printed(validation)
        assert "clauses that no variant tests, or that change nothing\n  useless  HAVING COUNT(*) >= 1\n" in text
        assert accounts(text)["a clause of the gold is tested by none of its variants; kept"] == 1
    records = {str(record["question_id"]): record for record in measured.records() if record["usable"]}
    assert measured.summary()["guessable"] == [name for name, record in records.items() if record["guessable"]]
    for record in records.values():
        near, lucky = record["near_misses"], record["lucky_near_misses"]
        assert isinstance(near, int)
        assert isinstance(lucky, int)
        assert record["guessable"] is (lucky > 0 and 3 * lucky >= near)


@pytest.mark.usefixtures("variants")
def test_questions_without_variants_are_named_with_the_reason(dataset: Dataset, tmp_path: Path) -> None:
    searched = tmp_path / "searched.sqlite"
    searched.write_bytes(dataset.databases["pets"].read_bytes())
    add_database(tmp_path, searched.name, "CREATE VIRTUAL TABLE notes USING fts5(body)")
    question = replace(dataset.questions[0], question_id="on-search", db_id="searched")
    questions = (*dataset.questions, question)
    asked = replace(dataset, questions=questions, databases={**dataset.databases, "searched": searched})
    validation = validate(asked, AnswerMode.SQL)
    reason = "the database has virtual tables: notes"
    assert validation.problem == ""
    assert validation.summary()["no_variants"] == {"on-search": reason}
    records = {record["question_id"]: record.get("no_variants") for record in validation.records()}
    assert (records["on-search"], records["cats"]) == (reason, "")
    text = printed(validation)
    assert f"without variants, so judged on one database\n  on-search  searched  {reason}\n" in text
    assert accounts(text)["no variant can be made, so a query is judged on one database; kept"] == 1
