"""What curation keeps, what it leaves out and why; on real files, through the real sandbox."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.data.curation import SQL_MODE_ROWS, NothingUsableError, curate, max_gold_rows, unusable
from env_server.data.raw import RawDataset, RawQuestion
from env_server.data.spider import read_spider
from env_server.dataset import Dataset, ExclusionReason, Hardness, Split, SQLValue
from env_server.errors import DataError
from env_server.settings import DisplaySettings, SandboxSettings
from env_server.sql.display import MAX_COLUMNS, format_result
from env_server.sql.sandbox import QueryResult
from env_server.types import AnswerMode

VALUE, SQL = AnswerMode.VALUE, AnswerMode.SQL
ROWS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) SELECT i FROM n"
LONG_ROW = ", ".join(["printf('%070d', 7)"] * 3)
OUTCOMES = [
    # (gold SQL, reason in value mode, reason in sql mode); "" is usable
    ("SELECT count(*) FROM farm", "", ""),
    ("SELECT 0", "", ""),
    ("SELECT ''", "", ""),
    ("SELECT owner FROM farm ORDER BY id", "", ""),
    ("SELECT nothing FROM farm", "gold_fails", "gold_fails"),
    ("SELECT * FROM barn", "gold_fails", "gold_fails"),
    ("SELEC 1", "gold_fails", "gold_fails"),
    ("SELECT 1; SELECT 2", "gold_fails", "gold_fails"),
    ("DELETE FROM farm", "gold_fails", "gold_fails"),
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


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "farm.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE farm (id INTEGER PRIMARY KEY, owner TEXT)")
    connection.executemany("INSERT INTO farm VALUES (?, ?)", [(1, "Ann"), (2, None), (3, "Bo"), (4, "Ann")])
    connection.commit()
    connection.close()
    return path


def raw_of(database: Path, queries: Iterable[str], db_id: str = "farm") -> RawDataset:
    questions = (RawQuestion(f"q{i}", f"Question {i}?", db_id, sql, Split.TRAIN) for i, sql in enumerate(queries))
    return RawDataset("farms", tuple(questions), {"farm": database})


def reasons(dataset: Dataset) -> dict[str, str]:
    """Map each question id to its reason, "" where the question is usable."""
    return {q.question_id: "" for q in dataset.questions} | {e.question_id: e.reason.value for e in dataset.excluded}


@pytest.mark.parametrize("mode", AnswerMode)
def test_every_gold_gets_its_reason_and_nothing_is_lost(database: Path, mode: AnswerMode) -> None:
    raw = raw_of(database, [sql for sql, _, _ in OUTCOMES])
    dataset = curate(raw, answer_mode=mode)
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


def test_the_detail_says_what_the_database_said(database: Path) -> None:
    dataset = curate(raw_of(database, ["SELECT 1", "SELECT * FROM barn"]))
    (exclusion,) = dataset.excluded
    assert exclusion.detail == "missing: no such table: barn"
    assert (exclusion.db_id, exclusion.text) == ("farm", "Question 1?")


def test_databases_that_are_missing_or_broken(database: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"this is no database" * 100)
    sources = {"farm": database, "broken": broken, "gone": tmp_path / "gone.sqlite"}
    ids = ("farm", "unknown", "broken", "gone")
    questions = tuple(RawQuestion(i, "?", i, "SELECT 1", Split.TRAIN) for i in ids)
    dataset = curate(RawDataset("farms", questions, sources))
    assert reasons(dataset) == {"farm": "", **dict.fromkeys(ids[1:], "no_database")}
    assert dataset.excluded[0].detail == "there is no file for this db_id"
    assert "broken.sqlite" in dataset.excluded[1].detail
    assert "gone.sqlite" in dataset.excluded[2].detail
    assert dict(dataset.databases) == {"farm": database}


def test_a_refused_database_is_left_out_with_its_reason(database: Path) -> None:
    questions = tuple(RawQuestion(i, "?", i, "SELECT 1", Split.TRAIN) for i in ("farm", "empty"))
    dataset = curate(RawDataset("farms", questions, {"farm": database}, {"empty": "empty.sqlite is empty"}))
    (exclusion,) = dataset.excluded
    assert (exclusion.reason, exclusion.detail) == (ExclusionReason.NO_DATABASE, "empty.sqlite is empty")


def test_a_gold_past_the_step_budget_is_too_slow(database: Path) -> None:
    raw = raw_of(database, ["SELECT 1", ROWS.format(10_000).replace("SELECT i FROM", "SELECT count(*) FROM")])
    assert reasons(curate(raw)) == {"q0": "", "q1": ""}
    dataset = curate(raw, sandbox=SandboxSettings(vm_steps=5_000))
    assert reasons(dataset) == {"q0": "", "q1": "gold_too_slow"}
    assert dataset.excluded[0].detail.startswith("budget: ")


def test_equal_golds_are_shared(database: Path) -> None:
    first, second = curate(raw_of(database, ["SELECT id FROM farm"] * 2)).questions
    assert first.gold is second.gold


def test_duplicates_carry_the_id_of_the_first_and_stay(database: Path) -> None:
    queries = [
        "SELECT owner FROM farm WHERE id = 9",  # left out, so it is nobody's first
        "select OWNER\nfrom Farm where ID=9;",
        "SELECT owner FROM farm WHERE id = 1",
        "SELECT max(id) FROM farm",
        'select f."owner" from farm as f where f.id = 1',
        "SELECT x.Owner FROM farm x WHERE x.id=1",
        "SELECT OWNER FROM farm WHERE id = 1;",
        "SELECT max(id) FROM farm",
        "SELECT owner FROM farm WHERE id = '1'",
    ]
    dataset = curate(raw_of(database, queries))
    copies = {q.question_id: q.duplicate_of for q in dataset.questions if q.duplicate_of}
    assert copies == {"q5": "q4", "q6": "q2", "q7": "q3"}
    assert len(dataset.questions) + len(dataset.excluded) == len(queries)


def test_questions_of_two_databases_are_never_duplicates(database: Path) -> None:
    questions = tuple(RawQuestion(i, "?", i, "SELECT count(*) FROM farm", Split.TRAIN) for i in ("farm", "copy"))
    dataset = curate(RawDataset("farms", questions, {"farm": database, "copy": database}))
    assert [q.duplicate_of for q in dataset.questions] == ["", ""]


def test_a_double_quoted_text_is_a_name_where_the_database_has_it(database: Path) -> None:
    same = ['SELECT "owner" FROM farm', "SELECT OWNER FROM farm"]
    texts = ['SELECT "nobody" FROM farm', 'SELECT "Nobody" FROM farm']
    rowids = ['SELECT "rowid" FROM farm', "SELECT ROWID FROM farm"]
    dataset = curate(raw_of(database, [*same, *texts, *rowids]))
    assert [q.duplicate_of for q in dataset.questions] == ["", "q0", "", "", "", "q4"]


def test_display_settings_decide_in_value_mode(database: Path) -> None:
    raw = raw_of(database, ["SELECT 1", "SELECT id FROM farm"])
    small = DisplaySettings(max_rows=3)
    assert reasons(curate(raw, display=small)) == {"q0": "", "q1": "gold_too_large"}
    assert reasons(curate(raw, display=small, answer_mode=SQL)) == {"q0": "", "q1": ""}


def test_progress_counts_every_question_once(database: Path) -> None:
    raw = raw_of(database, ["SELECT 1", "SELECT 2"])
    lost = RawQuestion("lost", "?", "lost", "SELECT 1", Split.TRAIN)
    seen: list[tuple[int, int]] = []
    curate(
        RawDataset("farms", (raw.questions[0], lost, raw.questions[1]), raw.databases),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(2, 3), (3, 3)]


def test_repeated_ids_are_refused(database: Path) -> None:
    raw = raw_of(database, ["SELECT 1", "SELECT 2"])
    with pytest.raises(DataError, match=r"ids occur more than once: \['q1'\]"):
        curate(RawDataset("farms", (*raw.questions, raw.questions[1]), raw.databases))
    excluded = raw_of(database, ["SELECT 1", "SELECT NULL"])
    with pytest.raises(DataError, match=r"ids occur more than once: \['q1'\]"):
        curate(RawDataset("farms", (*excluded.questions, excluded.questions[1]), raw.databases))


def test_no_usable_question_names_the_commonest_reason(database: Path) -> None:
    with pytest.raises(DataError, match=r"no usable question. 2 of 3 are left out as gold_fails, such as q1: missing"):
        curate(raw_of(database, ["SELECT NULL", "SELECT * FROM barn", "SELECT * FROM silo"]))
    with pytest.raises(NothingUsableError, match="no question at all") as raised:
        curate(raw_of(database, []))
    assert raised.value.dataset.excluded == ()
    with pytest.raises(NothingUsableError) as raised:
        curate(raw_of(database, ["SELECT NULL", "SELECT * FROM barn"]))
    assert list(reasons(raised.value.dataset).values()) == ["gold_all_null", "gold_fails"]
    assert raised.value.dataset.databases == {}


def test_the_file_is_not_changed(database: Path) -> None:
    before = database.read_bytes()
    curate(raw_of(database, ["SELECT 1", "DELETE FROM farm", "DROP TABLE farm"]))
    assert database.read_bytes() == before
    assert [path.name for path in database.parent.iterdir()] == [database.name]


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


@pytest.mark.parametrize(
    ("mode", "usable", "excluded", "copies"),
    [
        (VALUE, 2106, {"gold_fails": 1, "gold_empty": 57, "gold_too_large": 110}, 889),
        (SQL, 2198, {"gold_fails": 1, "gold_empty": 57, "gold_too_large": 18}, 936),
    ],
)
def test_the_real_folder(
    spider_dir: Path, mode: AnswerMode, usable: int, excluded: dict[str, int], copies: int
) -> None:
    dataset = curate(read_spider(spider_dir), answer_mode=mode)
    assert len(dataset.questions) == usable
    assert Counter(exclusion.reason.value for exclusion in dataset.excluded) == excluded
    (failing,) = (e for e in dataset.excluded if e.reason is ExclusionReason.GOLD_FAILS)
    assert (failing.db_id, failing.detail) == ("assets_maintenance", "missing: no such table: Ref_Company_Types")
    assert sum(q.gold.is_zero for q in dataset.questions) == 6
    assert sum(bool(q.duplicate_of) for q in dataset.questions) == copies
    train, evaluation = ({q.db_id for q in dataset.select(split)} for split in (Split.TRAIN, Split.EVAL))
    assert train.isdisjoint(evaluation)
    assert train | evaluation == set(dataset.databases)
