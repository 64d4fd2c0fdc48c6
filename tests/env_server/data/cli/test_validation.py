"""Every question is accounted for, and the environment itself judges the gold answers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from io import StringIO
from pathlib import Path

import apsw
import pytest
from rich.console import Console

from env_server.cache import CACHE_VARIABLE
from env_server.data.cli.validation import Validation, validate, validation_text
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Exclusion, ExclusionReason, Gold, Split
from env_server.settings import EnvSettings, JudgingSettings
from env_server.types import AnswerMode

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


@pytest.fixture
def dataset(pets: Dataset) -> Dataset:
    first, second, *others = pets.questions
    zero = replace(
        first,
        question_id="zero",
        gold_sql="SELECT COUNT(*) FROM pets WHERE age > 99",
        gold=Gold(((0,),), ordered=False),
        split=Split.TRAIN,
    )
    copy = replace(second, question_id="copy", duplicate_of=second.question_id)
    excluded = (
        Exclusion("lost-1", "pets", "Who?", ExclusionReason.GOLD_EMPTY, "no row"),
        Exclusion("lost-2", "zoo", "Where?", ExclusionReason.NO_DATABASE, "[no] file: " + "x" * 100),
    )
    return replace(pets, questions=(first, second, *others, zero, copy), excluded=excluded)


@pytest.mark.parametrize("mode", AnswerMode)
def test_gold_answers_are_judged_correct(dataset: Dataset, mode: AnswerMode) -> None:
    seen: list[tuple[int, int]] = []
    validation = validate(dataset, mode, ALONE, progress=lambda done, total: seen.append((done, total)))
    assert validation.wrong == ()
    assert validation.problem == ""
    assert seen == [(i, 6) for i in range(1, 7)]


def test_a_gold_that_the_environment_rejects_is_named(dataset: Dataset) -> None:
    lie = replace(dataset.questions[0], question_id="lie", gold=Gold(((3,),), ordered=False))
    validation = validate(replace(dataset, questions=(*dataset.questions, lie)), AnswerMode.SQL, ALONE)
    assert validation.wrong == ("lie",)
    assert "judged wrong for 1 usable question, such as lie" in validation.problem
    assert "gold answers that are judged wrong\n  lie\n" in printed(validation)
    assert validation.summary()["gold_answers_wrong"] == ["lie"]
    wrong = [record["question_id"] for record in validation.records() if record.get("gold_answer_correct") is False]
    assert wrong == ["lie"]


def test_the_report_accounts_for_every_question(dataset: Dataset) -> None:
    text = printed(validate(dataset))
    assert "pets: 8 questions over 2 databases, answered with a value" in text
    counts = accounts(text)
    assert counts["usable"] == 6
    assert counts["the gold answer, played through the environment, is judged correct"] == 6
    assert counts["the SQL of an earlier question, up to formatting; kept"] == 1
    assert counts["the answer is a single 0; kept, an answer like any other"] == 1
    assert counts["left out"] == 2
    assert counts["gold_empty: the gold query returns no row"] == 1
    assert counts["gold_all_null: the gold query returns nothing but NULL"] == 0
    reasons = [number for words, number in counts.items() if words.partition(":")[0] in list(ExclusionReason)]
    assert len(reasons) == len(ExclusionReason)
    assert sum(reasons) == 2


def test_no_exclusion_is_cut_or_taken_for_markup(dataset: Dataset) -> None:
    lines = printed(validate(dataset)).splitlines()
    assert "  lost-1  pets  gold_empty  no row" in lines
    assert f"  lost-2  zoo  no_database  [no] file: {'x' * 100}" in lines


def test_the_json_says_the_same(dataset: Dataset) -> None:
    validation = validate(dataset)
    summary = json.loads(json.dumps(validation.summary()))
    assert (summary["questions"], summary["usable"], summary["left_out"]) == (8, 6, 2)
    assert (summary["databases"], summary["usable_databases"]) == (2, 1)
    occurred = {reason: count for reason, count in summary["left_out_by_reason"].items() if count}
    assert occurred == {"gold_empty": 1, "no_database": 1}
    assert set(summary["left_out_by_reason"]) == set(ExclusionReason)
    assert summary["zero"] == ["zero"]
    assert summary["duplicate_of"] == {"copy": "oldest"}
    assert summary["splits"] == {"train": 5, "eval": 1}
    assert summary["hardness"] == {"easy": 6, "medium": 0, "hard": 0, "extra": 0}
    assert [each["question_id"] for each in summary["excluded"]] == ["lost-1", "lost-2"]


def test_there_is_one_record_for_each_question(dataset: Dataset) -> None:
    records = list(validate(dataset).records())
    assert [r["question_id"] for r in records] == [
        *(question.question_id for question in dataset.questions),
        *(exclusion.question_id for exclusion in dataset.excluded),
    ]
    assert [r["usable"] for r in records] == [True] * 6 + [False] * 2
    assert [r.get("zero") for r in records][4:6] == [True, False]
    assert (records[-1]["reason"], records[-2]["detail"]) == ("no_database", "no row")


def test_the_split_is_written_by_database_or_by_question(dataset: Dataset) -> None:
    ids = {q.question_id: q.split.value for q in dataset.questions}
    assert validate(dataset).split() == {"pets": ids}
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


def test_the_report_is_the_same_every_time(dataset: Dataset) -> None:
    first, second = validate(dataset), validate(dataset)
    assert printed(first) == printed(second)
    assert first.summary() == second.summary()


@pytest.mark.parametrize(("mode", "usable", "too_large"), [(AnswerMode.VALUE, 2106, 110), (AnswerMode.SQL, 2198, 18)])
def test_the_real_folder(spider_dir: Path, mode: AnswerMode, usable: int, too_large: int) -> None:
    validation = validate(load_dataset(f"spider:{spider_dir}", answer_mode=mode), mode, ALONE)
    assert validation.problem == ""
    assert (validation.total, validation.database_total, len(validation.dataset.questions)) == (2274, 46, usable)
    reasons = Counter(exclusion.reason for exclusion in validation.dataset.excluded)
    assert reasons == {"gold_fails": 1, "gold_empty": 57, "gold_too_large": too_large}
    assert len(validation.summary()["zero"]) == 6  # type: ignore[arg-type]
    assert len(validation.split()) == 46


def test_guessable_answers_are_flagged_when_asked_for(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert "guessable" not in validate(dataset).summary()
    validation = validate(dataset, guessable=True)
    records = {str(record["question_id"]): record for record in validation.records() if record["usable"]}
    assert validation.summary()["guessable"] == [name for name, record in records.items() if record["guessable"]]
    for record in records.values():
        near, lucky = record["near_misses"], record["lucky_near_misses"]
        assert isinstance(near, int)
        assert isinstance(lucky, int)
        assert record["guessable"] is (lucky > 0 and 3 * lucky >= near)


def test_clauses_that_no_variant_tests_are_named(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    sql = "SELECT species, COUNT(*) FROM pets GROUP BY species HAVING COUNT(*) >= 1"
    species = next(question for question in dataset.questions if question.question_id == "species")
    useless = replace(species, question_id="useless", gold_sql=sql)
    asked = replace(dataset, questions=(*dataset.questions, useless))
    assert "untested_clauses" not in validate(asked).summary()
    for validation in (validate(asked, guessable=True), validate(asked, AnswerMode.SQL)):
        assert validation.problem == ""
        assert validation.summary()["untested_clauses"] == {"useless": ["HAVING COUNT(*) >= 1"]}
        records = {record["question_id"]: record for record in validation.records() if record["usable"]}
        assert records["useless"]["untested_clauses"] == ["HAVING COUNT(*) >= 1"]
        assert records["cats"]["untested_clauses"] == []
        text = printed(validation)
        assert "clauses that no variant tests, or that change nothing\n  useless  HAVING COUNT(*) >= 1\n" in text
        assert accounts(text)["a clause of the gold is tested by none of its variants; kept"] == 1


def test_questions_without_variants_are_named_with_the_reason(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    (path,) = dataset.databases.values()
    searched = tmp_path / "searched.sqlite"
    searched.write_bytes(path.read_bytes())
    connection = apsw.Connection(str(searched))
    connection.execute("CREATE VIRTUAL TABLE notes USING fts5(body)")
    connection.close()
    question = replace(dataset.questions[0], question_id="on-search", db_id="searched")
    asked = replace(
        dataset,
        questions=(*dataset.questions, question),
        databases={**dataset.databases, "searched": searched},
    )
    assert "no_variants" not in validate(asked).summary()
    validation = validate(asked, AnswerMode.SQL)
    assert validation.problem == ""
    assert validation.summary()["no_variants"] == {"on-search": "the database has virtual tables: notes"}
    records = {record["question_id"]: record.get("no_variants") for record in validation.records()}
    assert records["on-search"] == "the database has virtual tables: notes"
    assert records["cats"] == ""
    text = printed(validation)
    lines = "  on-search  searched  the database has virtual tables: notes\n"
    assert f"without variants, so judged on one database\n{lines}" in text
    assert accounts(text)["no variant can be made, so a query is judged on one database; kept"] == 1
