"""Fixes, on a copy: the issue is gone, the rest is as it was, and so is the folder itself."""

from __future__ import annotations

import csv
import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from env_server.data.cells import DecimalMark, date_orders, decimal_marks, read_date, read_number
from env_server.errors import DataError
from env_server.tools.columns import check_column
from env_server.tools.diagnosis import Diagnosis
from env_server.tools.findings import CellFix, Finding, Kind, Order, Stated
from env_server.tools.fixes import changes_file, fix_folder
from env_server.tools.survey import ColumnSurvey
from tests.env_server.tools.planted import PLANTED, QUESTIONS, Planted, database, look, plant, table

FIXED = [each for each in PLANTED if each.fixed and (each.message or each.hint)]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def chosen(found: Diagnosis, *kinds: Kind) -> list[Finding]:
    return [each for each in found.findings if each.kind in kinds and found.is_fixable(each)]


@pytest.mark.parametrize("planted", FIXED, ids=lambda each: f"{each.kind.value} {'/'.join(each.files)}")
def test_a_fix_removes_the_issue(planted: Planted, tmp_path: Path) -> None:
    folder = plant(planted, tmp_path)
    before = contents(folder)
    found = look(folder)
    target = tmp_path / "fixed" / "shop"
    fix_folder(found, chosen(found, planted.kind), target)
    assert {each.name for each in target.parent.iterdir()} == {"shop", "shop-changes.csv"}
    again = look(target)
    assert planted.kind not in {each.kind for each in again.findings}
    assert contents(folder) == before
    touched = {"keys.toml", "questions.jsonl"} | set(planted.files)
    after = contents(target)
    assert {name for name in after if after[name] != before.get(name)} <= touched


CELLS = table(
    "item;price;day;sold;town;note;stock",
    '" lamp";$5;2024-01-15;yes;ZÃ¼rich;x;4',
    "desk;1.234,50 €;15/02/2024;Y;oslo;;-999",
    "chair;-;March 3 2024;no;Oslo;;-999",
    "chair;-;March 3 2024;no;Oslo;;-999",
    "sofa;7;2024-04-01;yes;Oslo;;",
    "Total;9;;;;;",
).replace("$5", "5 €")


def test_fixes_of_one_table_go_together(tmp_path: Path) -> None:
    folder = plant(Planted(Kind.NUMBER_AS_TEXT, {"items.csv": CELLS}), tmp_path)
    found = look(folder)
    count = fix_folder(found, chosen(found, *Kind), tmp_path / "clean")
    with (tmp_path / "clean" / "items.csv").open(encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter=";"))
    with changes_file(tmp_path / "clean").open(encoding="utf-8", newline="") as file:
        changes = list(csv.DictReader(file))
    assert len(changes) == count
    assert {"table": "items", "column": "price", "before": "1.234,50 €", "after": "1234.5"} in changes
    assert all(change["before"] != change["after"] for change in changes)
    assert rows == [
        ["item", "price", "day", "sold", "town", "note", "stock"],
        ["lamp", "5", "2024-01-15", "yes", "Zürich", "x", "4"],
        ["desk", "1234.5", "2024-02-15", "yes", "Oslo", "", ""],
        ["chair", "", "2024-03-03", "no", "Oslo", "", ""],
        ["sofa", "7", "2024-04-01", "yes", "Oslo", "", ""],
        ["Total", "9", "", "", "", "", ""],
    ]


SCRIPT = """
CREATE TABLE "shop list" ("shop id" INTEGER PRIMARY KEY, town TEXT DEFAULT 'Oslo' CHECK (town <> 'x'));
INSERT INTO "shop list" VALUES (1, 'Rome '), (2, 'Lima');
CREATE TABLE branches (
    code TEXT NOT NULL UNIQUE, "shop id" INTEGER, members TEXT, cost NUMERIC, opened VARCHAR(20), note TEXT,
    PRIMARY KEY (code));
INSERT INTO branches VALUES
    ('a', 1, '9', 5, '31.12.2023', NULL), ('b', 2, '10', 'N/A', '1.2.2024', NULL),
    ('c', 2, '200', '$7', '5.1.2024', NULL);
CREATE INDEX by_cost ON branches (cost);
CREATE VIEW dear AS SELECT code FROM branches WHERE cost > 5;
CREATE TRIGGER t AFTER INSERT ON branches BEGIN DELETE FROM branches WHERE 0; END;
CREATE TABLE plain (a TEXT, b TEXT);
INSERT INTO plain VALUES ('x', 'y'), ('x', 'y'), ('z', 'y');
"""


def test_tables_of_a_sqlite_file_are_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    database(folder, "shop.sqlite", SCRIPT)
    (folder / "questions.csv").write_text("question,sql\nWhich?,SELECT code FROM dear\n")
    found = look(folder)
    fix_folder(found, chosen(found, *Kind), tmp_path / "clean")
    with closing(sqlite3.connect(tmp_path / "clean" / "shop.sqlite")) as connection:
        assert connection.execute("SELECT * FROM branches").fetchall() == [
            ("a", 1, 9, 5, "2023-12-31"),
            ("b", 2, 10, None, "2024-02-01"),
            ("c", 2, 200, 7, "2024-01-05"),
        ]
        types = {row[1]: row[2] for row in connection.execute("PRAGMA table_info(branches)")}
        assert types == {
            "code": "TEXT",
            "shop id": "INTEGER",
            "members": "INTEGER",
            "cost": "INTEGER",
            "opened": "VARCHAR(20)",
        }
        keys = [tuple(row[2:5]) for row in connection.execute("PRAGMA foreign_key_list(branches)")]
        assert keys == [("shop list", "shop id", "shop id")]
        assert connection.execute("SELECT MAX(members), MAX(cost) FROM branches").fetchone() == (200, 7)
        assert connection.execute("SELECT code FROM dear").fetchall() == [("c",)]
        assert connection.execute("SELECT * FROM plain ORDER BY 1").fetchall() == [("x", "y"), ("z", "y")]
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
        assert {"by_cost", "t", "dear"} <= names
        assert "sqlenv_new_table" not in names
        with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
            connection.execute("INSERT INTO \"shop list\" VALUES (3, 'x')")
        assert connection.execute('SELECT town FROM "shop list"').fetchall() == [("Rome",), ("Lima",)]


@pytest.mark.parametrize("name", ["questions.json", "questions.jsonl", "questions.csv"])
def test_questions_keep_their_form(name: str, tmp_path: Path) -> None:
    folder = plant(Planted(Kind.GOLD_FAILS), tmp_path)
    (folder / "questions.jsonl").unlink()
    asked = [
        {"question": "Who, in Rome?", "sql": "SELECT nmae, city FROM customers WHERE city = 'Rome'", "note": "a, b"},
        *({"question": text, "sql": sql, "note": ""} for text, sql in QUESTIONS),
        {"question": QUESTIONS[0][0], "sql": QUESTIONS[0][1], "note": "twice"},
    ]
    file = folder / name
    if name.endswith("csv"):
        with file.open("w", newline="") as sink:
            writer = csv.DictWriter(sink, ["question", "sql", "note"])
            sink.write("question,Gold SQL,note\n")
            writer.writerows(asked)
    else:
        as_lines = "\n".join(json.dumps(entry) for entry in asked)
        file.write_text(as_lines if name.endswith("l") else json.dumps(asked))
    found = look(folder)
    fix_folder(found, chosen(found, *Kind), tmp_path / "clean")
    expected = [{**asked[0], "sql": "SELECT name, city FROM customers WHERE city = 'Rome'"}, *asked[1:-1]]
    text = (tmp_path / "clean" / name).read_text()
    if name.endswith("csv"):
        assert list(csv.DictReader(text.replace("Gold SQL", "sql").splitlines())) == expected
    else:
        assert (json.loads(text) if name.endswith("json") else [*map(json.loads, text.splitlines())]) == expected


def test_nothing_is_written_over(tmp_path: Path) -> None:
    planted = Planted(Kind.INCONSISTENT_VALUES, {"a.csv": table("item,colour", "b,red", "c,red", "d,Red", "e,blue")})
    folder = plant(planted, tmp_path)
    found = look(folder)
    (tmp_path / "there").mkdir()
    for target, words in ((tmp_path / "there", "exists already"), (folder / "x", "which is to be copied")):
        with pytest.raises(DataError, match=words):
            fix_folder(found, found.findings, target)
    questions = folder / "questions.jsonl"
    questions.write_text('{"question": "Who?", "sql": "SELECT 1", "database": "shop"}\n')
    with pytest.raises(DataError, match=r"so the copy must be called so\. Try --out fixed/shop"):
        fix_folder(look(folder), (), tmp_path / "other")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cache", "shop", "there"]


def test_a_parquet_file_is_fixed_at_its_source(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = plant(Planted(Kind.INCONSISTENT_VALUES), tmp_path)
    parquet.write_table(arrow.table({"item": ["a", "b", "c"], "price": ["$5", "7", "N/A"]}), folder / "items.parquet")
    found = look(folder)
    (finding,) = [each for each in found.findings if each.kind is Kind.NUMBER_AS_TEXT]
    assert finding.fix is not None
    assert not found.is_fixable(finding)


@pytest.mark.parametrize(
    ("cells", "fixed"),
    [
        (["1;0,500", "2;1,250", "3;2,125", "4;0,075"], ["0.5", "1.25", "2.125", "0.075"]),
        (["1;5%", "2;0.07", "3;12%", "4;0.5"], None),
        (["1;Y", "2;N", "3;yes", "4;0", "5;T", "6;no"], ["yes", "no", "yes", "no", "yes", "no"]),
        (["1;12.05.45", "2;03.11.60", "3;14.02.31"], None),
        (["1;'-4.0", "2;'5.5", "3;12"], ["-4.0", "5.5", "12"]),
        (["1;5-", "2;7", "3;+12"], ["-5", "7", "12"]),
    ],
)
def test_a_fix_never_makes_data_worse(cells: list[str], fixed: list[str] | None, tmp_path: Path) -> None:
    """All fixes, without asking: what is not certain stays as it is."""
    folder = plant(Planted(Kind.NUMBER_AS_TEXT, {"t.csv": table("n;value", *cells)}), tmp_path)
    found = look(folder)
    fix_folder(found, chosen(found, *Kind), tmp_path / "clean")
    after = [line.split(";")[1] for line in (tmp_path / "clean" / "t.csv").read_text().splitlines()[1:]]
    assert after == (fixed or [cell.split(";")[1] for cell in cells])


def test_the_other_columns_state_the_decimal_mark(tmp_path: Path) -> None:
    rows = table("n;weight;price", "1;1,234;9,90", "2;2,500;12,50", "3;12,125;3,75")
    found = look(plant(Planted(Kind.NUMBER_AS_TEXT, {"t.csv": rows}), tmp_path))
    fix_folder(found, chosen(found, *Kind), tmp_path / "clean")
    assert (tmp_path / "clean" / "t.csv").read_text().splitlines()[1:] == ["1;1.234;9.9", "2;2.5;12.5", "3;12.125;3.75"]


NUMBERS = st.builds(
    "{}{}{}".format,
    st.sampled_from(["", "-", "+"]),
    st.integers(0, 2000),
    st.sampled_from(["", ",5", ".50", ",125", ".125"]),
)
DATES = st.builds("{}/{}/{}".format, st.integers(1, 31), st.integers(1, 12), st.sampled_from(["2024", "1999", "24"]))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(NUMBERS, min_size=3, max_size=6) | st.lists(DATES, min_size=3, max_size=6))
def test_a_fixed_cell_has_one_meaning(cells: list[str]) -> None:
    """A cell is changed only to what every reading of it that its column allows comes to."""
    counts = tuple(Counter(cells).items())
    column = ColumnSurvey("value", "TEXT", False, len(cells), distinct=len(counts), text_cells=len(cells), texts=counts)
    for finding in check_column(column, Stated(), (None, None), imported=True):
        if isinstance(finding.fix, CellFix) and finding.fix.order is Order.VALUES:
            numbers = [number for cell in cells if (number := read_number(cell))]
            dates = [day for cell in cells if (day := read_date(cell))]
            for cell in cells:
                number, day = read_number(cell), read_date(cell)
                if number is not None:
                    plain = all(each.plain for each in numbers if {".", ","} & set(each.digits))
                    marks: list[DecimalMark] = ["."] if plain else decimal_marks(numbers)
                    assert [finding.fix.convert(cell)] == [number.value(mark) for mark in marks]
                elif day is not None:
                    readings = {day.iso(order) or cell for order in date_orders([*dates, day])}
                    assert finding.fix.convert(cell) == cell or not day.has_short_year
                    assert readings == {finding.fix.convert(cell)}
