"""What curation keeps, what it leaves out and why; on real files, through the real sandbox."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.cache import FACTS, Cache
from env_server.data import curation
from env_server.data.curation import SQL_MODE_ROWS, NothingUsableError, curate, golds_from_json, max_gold_rows, unusable
from env_server.data.raw import RawDataset, RawQuestion
from env_server.dataset import Dataset, ExclusionReason, Hardness, Split, SQLValue
from env_server.errors import DataError
from env_server.settings import DisplaySettings, SandboxSettings
from env_server.sql.display import MAX_COLUMNS, format_result
from env_server.sql.hardness import hardness
from env_server.sql.sandbox import QueryResult, Sandbox
from env_server.types import AnswerMode
from tests.env_server.data.folders import add_database

VALUE, SQL = AnswerMode.VALUE, AnswerMode.SQL
ROWS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) SELECT i FROM n"
LONG_ROW = ", ".join(["printf('%070d', 7)"] * 3)
OUTCOMES = [
    # (gold SQL, reason in value mode, reason in sql mode); "" is usable
    ("SELECT count(*) FROM farm", "", ""),
    ("SELECT count(*) FROM farm WHERE id > = 2", "", ""),
    ("SELECT 0", "", ""),
    ("SELECT ''", "", ""),
    ("SELECT owner FROM farm ORDER BY id", "", ""),
    ("SELECT nothing FROM farm", "gold_fails", "gold_fails"),
    ("SELECT * FROM barn", "gold_fails", "gold_fails"),
    ("SELEC 1", "gold_fails", "gold_fails"),
    ("SELECT 1; SELECT 2", "gold_fails", "gold_fails"),
    ("DELETE FROM farm", "gold_fails", "gold_fails"),
    ("DROP TABLE farm", "gold_fails", "gold_fails"),
    ("SELECT abs(-9223372036854775808)", "gold_fails", "gold_fails"),
    ("SELECT id FROM farm WHERE id > 99", "gold_empty", "gold_empty"),
    ("SELECT NULL", "gold_all_null", "gold_all_null"),
    ("SELECT max(id) FROM farm WHERE id > 99", "gold_all_null", "gold_all_null"),
    ("SELECT NULL, NULL FROM farm", "gold_all_null", "gold_all_null"),
    ("SELECT NULL, id FROM farm", "", ""),
    (ROWS.format(20), "", ""),
    (ROWS.format(21), "gold_too_large", ""),
    (ROWS.format(SQL_MODE_ROWS), "gold_too_large", ""),
    (ROWS.format(SQL_MODE_ROWS + 1), "gold_too_large", "gold_too_large"),
    ("SELECT printf('%80d', 7)", "gold_too_large", ""),  # 79 blanks and the quotes around them
    ("SELECT printf('%080d', 7)", "", ""),
    ("SELECT printf('%081d', 7)", "gold_too_large", ""),
    (f"SELECT {', '.join(map(str, range(MAX_COLUMNS)))}", "", ""),
    (f"SELECT {', '.join(map(str, range(MAX_COLUMNS + 1)))}", "gold_too_large", ""),
    (f"SELECT {LONG_ROW} FROM farm, farm AS f LIMIT 9", "", ""),
    (f"SELECT {LONG_ROW} FROM farm, farm AS f LIMIT 10", "gold_too_large", ""),
    (f"SELECT 1 AS {'a' * 3000}", "", ""),
]


FARM = """CREATE TABLE farm (id INTEGER PRIMARY KEY, owner TEXT);
INSERT INTO farm VALUES (1, 'Ann'), (2, NULL), (3, 'Bo'), (4, 'Ann');"""


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_database(tmp_path_factory.mktemp("farm"), "farm.sqlite", FARM)


def raw_of(database: Path, queries: Iterable[str]) -> RawDataset:
    questions = (RawQuestion(f"q{i}", f"Question {i}?", "farm", sql, Split.TRAIN) for i, sql in enumerate(queries))
    return RawDataset("farms", tuple(questions), {"farm": database})


def reasons(dataset: Dataset) -> dict[str, str]:
    """Map each question id to its reason, "" where the question is usable."""
    return {q.question_id: "" for q in dataset.questions} | {e.question_id: e.reason.value for e in dataset.excluded}


def test_a_query_that_comes_with_its_hardness_is_not_graded_again(database: Path) -> None:
    query = "SELECT owner FROM farm ORDER BY id LIMIT 1"
    raw = raw_of(database, [query])
    graded = replace(raw, questions=tuple(replace(q, hardness=Hardness.EXTRA) for q in raw.questions))
    assert [curate(each).questions[0].hardness for each in (raw, graded)] == [hardness(query), Hardness.EXTRA]


@pytest.mark.parametrize("mode", AnswerMode)
def test_every_gold_gets_its_reason_and_nothing_is_lost(database: Path, mode: AnswerMode) -> None:
    raw = raw_of(database, [sql for sql, _, _ in OUTCOMES])
    before = database.read_bytes()
    dataset = curate(raw, answer_mode=mode)
    assert database.read_bytes() == before
    assert [path.name for path in database.parent.iterdir()] == [database.name]
    expected = {f"q{i}": row[1 if mode is VALUE else 2] for i, row in enumerate(OUTCOMES)}
    assert reasons(dataset) == expected
    assert len(dataset.questions) + len(dataset.excluded) == len(raw.questions)
    ids = [q.question_id for q in raw.questions]
    assert [q.question_id for q in dataset.questions] == [i for i in ids if not expected[i]]
    assert [e.question_id for e in dataset.excluded] == [i for i in ids if expected[i]]


def test_a_question_carries_what_its_source_and_its_gold_say(database: Path) -> None:
    raw = RawDataset(
        "farms",
        (
            RawQuestion("a", "Who?", "farm", "SELECT owner FROM farm ORDER BY id LIMIT 1", Split.EVAL, "top", "hint"),
            RawQuestion("b", "Whose?", "farm", "SELECT owner, id FROM farm", Split.TRAIN),
        ),
        {"farm": database},
    )
    first, second = curate(raw).questions
    assert (first.text, first.db_id, first.gold_sql) == ("Who?", "farm", "SELECT owner FROM farm ORDER BY id LIMIT 1")
    assert (first.split, first.family, first.evidence) == (Split.EVAL, "top", "hint")
    assert (first.hardness, first.gold.ordered, first.gold.rows) == (Hardness.MEDIUM, True, (("Ann",),))
    assert (second.hardness, second.gold.ordered, second.gold.width) == (Hardness.MEDIUM, False, 2)
    assert second.gold.rows == (("Ann", 1), (None, 2), ("Bo", 3), ("Ann", 4))


def test_a_gold_past_the_step_budget_is_too_slow(database: Path) -> None:
    raw = raw_of(database, ["SELECT 1", ROWS.format(10_000).replace("SELECT i FROM", "SELECT count(*) FROM")])
    assert reasons(curate(raw)) == {"q0": "", "q1": ""}
    dataset = curate(raw, sandbox=SandboxSettings(vm_steps=5_000))
    assert reasons(dataset) == {"q0": "", "q1": "gold_too_slow"}
    assert dataset.excluded[0].detail.startswith("budget: ")


def test_duplicates_carry_the_id_of_the_first_and_stay(database: Path) -> None:
    queries = [
        "SELECT owner FROM farm WHERE id = 9",  # left out, so it is nobody's first
        "select OWNER\nfrom Farm where ID=9;",
        "SELECT owner FROM farm WHERE id = 1",
        "SELECT max(id) FROM farm",
        "SELECT owner FROM farm WHERE id = '1'",
        "SELECT x.owner FROM farm x WHERE x.id = 1",
        "select OWNER /* whose */\nfrom Farm where ID=1; -- it is",
        "SELECT max(id) FROM farm",
    ]
    raw = raw_of(database, queries)
    other = replace(raw.questions[3], question_id="other", db_id="copy")  # of two databases, so no duplicate
    dataset = curate(replace(raw, questions=(*raw.questions, other), databases={"farm": database, "copy": database}))
    copies = {q.question_id: q.duplicate_of for q in dataset.questions if q.duplicate_of}
    assert copies == {"q6": "q2", "q7": "q3"}
    assert dataset.question("q3").gold is dataset.question("q7").gold


def test_databases_that_are_missing_refused_or_broken(database: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"this is no database" * 100)
    sources = {"farm": database, "broken": broken, "gone": tmp_path / "gone.sqlite"}
    details = {
        "unknown": "there is no file for this db_id",
        "broken": str(broken),
        "gone": str(tmp_path / "gone.sqlite"),
        "empty": "empty.sqlite is empty",
    }
    questions = tuple(RawQuestion(i, "?", i, "SELECT 1", Split.TRAIN) for i in ("farm", *details))
    seen: list[tuple[int, int]] = []
    raw = RawDataset("farms", questions, sources, {"empty": "empty.sqlite is empty"})
    dataset = curate(raw, progress=lambda *counts: seen.append(counts))
    assert reasons(dataset) == {"farm": "", **dict.fromkeys(details, "no_database")}
    assert all(details[exclusion.db_id] in exclusion.detail for exclusion in dataset.excluded)
    assert dict(dataset.databases) == {"farm": database}
    assert seen == [(done, 5) for done in range(1, 6)]


@pytest.mark.parametrize("repeated", ["SELECT 2", "SELECT NULL"])
def test_repeated_ids_are_refused(database: Path, repeated: str) -> None:
    raw = raw_of(database, ["SELECT 1", repeated])
    with pytest.raises(DataError, match=r"ids occur more than once: \['q1'\]"):
        curate(replace(raw, questions=(*raw.questions, raw.questions[1])))


def test_no_usable_question_names_the_commonest_reason(database: Path) -> None:
    with pytest.raises(NothingUsableError, match="no question at all") as raised:
        curate(raw_of(database, []))
    assert raised.value.dataset.excluded == ()
    with pytest.raises(
        NothingUsableError, match="2 of 3 are left out as gold_fails, such as q1: missing: no"
    ) as raised:
        curate(raw_of(database, ["SELECT NULL", "SELECT * FROM barn", "SELECT * FROM silo"]))
    found = raised.value.dataset
    assert list(reasons(found).values()) == ["gold_all_null", "gold_fails", "gold_fails"]
    assert (found.excluded[1].db_id, found.excluded[1].text) == ("farm", "Question 1?")
    assert found.databases == {}


CELLS: st.SearchStrategy[SQLValue] = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=120),
    st.binary(max_size=60),
)


@given(st.data())
def test_whatever_is_usable_in_value_mode_is_shown_whole(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 5))
    rows = data.draw(st.lists(st.tuples(*[CELLS] * width), max_size=25))
    display = DisplaySettings()
    kept = tuple(rows[: max_gold_rows(VALUE, display)])
    result = QueryResult(("c",) * width, kept, row_count=len(rows), vm_steps=0)
    problem = unusable(result, VALUE, display)
    text = format_result(result, display)
    if problem is None:
        assert text.count("\n") == len(rows)
        assert text.count("…") == sum(value.count("…") for row in rows for value in row if isinstance(value, str))
    elif problem.reason is ExclusionReason.GOLD_EMPTY:
        assert rows == []
    elif problem.reason is ExclusionReason.GOLD_NULL:
        assert {value for row in rows for value in row} == {None}
    else:
        assert problem.reason is ExclusionReason.GOLD_TOO_LARGE
        assert "…" in text or text.endswith(("more rows)", "more row)"))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The databases that curation opens, in order."""
    paths: list[Path] = []

    class Watched(Sandbox):
        def __init__(self, path: Path, settings: SandboxSettings) -> None:
            paths.append(path)
            super().__init__(path, settings)

    monkeypatch.setattr(curation, "Sandbox", Watched)
    return paths


@pytest.mark.parametrize("mode", [VALUE, SQL])
def test_what_the_cache_knows_is_what_running_the_golds_gives(
    database: Path, tmp_path: Path, opened: list[Path], mode: AnswerMode
) -> None:
    raw = raw_of(database, [sql for sql, *_ in OUTCOMES] + ["SELECT x'00ff', 1.0, 1, 'one', NULL"])
    fresh = curate(raw, answer_mode=mode)
    first = curate(raw, answer_mode=mode, cache=Cache(tmp_path / "cache"))
    opened.clear()
    second = curate(raw, answer_mode=mode, cache=Cache(tmp_path / "cache"))
    assert opened == []
    assert fresh == first == second
    assert repr(fresh.questions[-1].gold.rows) == repr(second.questions[-1].gold.rows)


def test_only_golds_that_are_new_are_run(database: Path, tmp_path: Path, opened: list[Path]) -> None:
    cache = Cache(tmp_path / "cache")
    curate(raw_of(database, ["SELECT 1", "SELECT 2"]), cache=cache)
    opened.clear()
    more = raw_of(database, ["SELECT 2", "SELECT 3"])
    assert curate(more, cache=cache) == curate(more)
    assert len(opened) == 2
    assert curate(raw_of(database, ["SELECT 1", "SELECT 3"]), cache=cache).excluded == ()
    assert len(opened) == 2


def test_a_changed_database_and_other_settings_run_the_golds_again(tmp_path: Path) -> None:
    database = add_database(tmp_path / "own", "farm.sqlite", FARM)
    cache = Cache(tmp_path / "cache")
    raw = raw_of(database, ["SELECT count(*) FROM farm", ROWS.format(20)])
    before = curate(raw, cache=cache)
    fewer = DisplaySettings(max_rows=5)
    assert curate(raw, display=fewer, cache=cache) == curate(raw, display=fewer) != before
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("INSERT INTO farm(owner) VALUES ('Ann')")
    after = curate(raw, cache=cache)
    assert after.questions[0].gold.rows != before.questions[0].gold.rows


def test_a_gold_that_the_clock_stopped_is_tried_again(database: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    raw = raw_of(database, ["SELECT 1", ROWS.format(3_000_000).replace("SELECT i FROM n", "SELECT max(i) FROM n")])
    hurried = SandboxSettings(deadline_s=0.01, vm_steps=10**9)
    stopped = curate(raw, sandbox=hurried, cache=cache)
    assert [each.reason for each in stopped.excluded] == [ExclusionReason.GOLD_TOO_SLOW]
    (fact,) = facts_of(tmp_path / "cache")
    assert list(golds_from_json(fact)) == ["SELECT 1"]


def facts_of(folder: Path) -> list[str]:
    return [file.read_text(encoding="utf-8") for file in Cache(folder).path(FACTS, "").iterdir()]


def test_stated_answers_are_held_to_what_an_answer_can_be(tmp_path: Path) -> None:
    path = add_database(tmp_path, "farm.sqlite")
    answers: list[tuple[tuple[SQLValue, ...], ...]] = [((3.5,),), (), ((None,),), tuple((n,) for n in range(21))]
    answers.append((("x" * 81,),))
    asked = [RawQuestion(f"q{n}", "?", "farm", "", Split.TRAIN, answer=answer) for n, answer in enumerate(answers)]
    raw = RawDataset("stated", tuple(asked), {"farm": path})
    dataset = curate(raw)
    (usable,) = dataset.questions
    assert (usable.gold.rows, usable.gold.stated, usable.hardness, usable.judged) == (((3.5,),), True, "unknown", True)
    assert [each.reason for each in dataset.excluded] == [
        "gold_empty",
        "gold_all_null",
        "gold_too_large",
        "gold_too_large",
    ]
    with pytest.raises(NothingUsableError) as raised:
        curate(raw, answer_mode=SQL)
    assert {each.reason for each in raised.value.dataset.excluded} == {ExclusionReason.NO_SQL}
