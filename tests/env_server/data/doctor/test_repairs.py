"""Repairs, on a copy: the trouble is gone, the rest is as it was, and so is the folder itself."""

from __future__ import annotations

import csv
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from env_server.data.doctor.diagnosis import Diagnosis, repairable
from env_server.data.doctor.findings import Finding, Kind
from env_server.data.doctor.repairs import mend_folder
from env_server.errors import DataError
from tests.env_server.data.doctor.planted import PLANTED, QUESTIONS, Planted, database, look, plant, table

REPAIRED = [each for each in PLANTED if each.repaired and (each.said or each.advice)]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def chosen(found: Diagnosis, *kinds: Kind) -> list[Finding]:
    return [each for each in found.findings if each.kind in kinds and repairable(each, found.files)]


@pytest.mark.parametrize("planted", REPAIRED, ids=lambda each: f"{each.kind.value} {'/'.join(each.files)}")
def test_a_repair_takes_the_trouble_away(planted: Planted, tmp_path: Path) -> None:
    folder = plant(planted, tmp_path)
    before = contents(folder)
    found = look(folder)
    target = tmp_path / "fixed" / "shop"
    mend_folder(found, chosen(found, planted.kind), target)
    assert {each.name for each in target.parent.iterdir()} == {"shop"}
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


def test_repairs_of_one_table_go_together(tmp_path: Path) -> None:
    folder = plant(Planted(Kind.NUMBER_AS_TEXT, {"items.csv": CELLS}), tmp_path)
    found = look(folder)
    mend_folder(found, chosen(found, *Kind), tmp_path / "clean")
    with (tmp_path / "clean" / "items.csv").open(encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter=";"))
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
    mend_folder(found, chosen(found, *Kind), tmp_path / "clean")
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
    mend_folder(found, chosen(found, *Kind), tmp_path / "clean")
    expected = [{**asked[0], "sql": "SELECT name, city FROM customers WHERE city = 'Rome'"}, *asked[1:-1]]
    text = (tmp_path / "clean" / name).read_text()
    if name.endswith("csv"):
        assert list(csv.DictReader(text.replace("Gold SQL", "sql").splitlines())) == expected
    else:
        assert (json.loads(text) if name.endswith("json") else [*map(json.loads, text.splitlines())]) == expected


def test_nothing_is_written_over(tmp_path: Path) -> None:
    planted = Planted(Kind.SPELLINGS, {"a.csv": table("item,colour", "b,red", "c,red", "d,Red", "e,blue")})
    folder = plant(planted, tmp_path)
    found = look(folder)
    (tmp_path / "there").mkdir()
    for target, words in ((tmp_path / "there", "is there already"), (folder / "x", "which is to be copied")):
        with pytest.raises(DataError, match=words):
            mend_folder(found, found.findings, target)
    questions = folder / "questions.jsonl"
    questions.write_text('{"question": "Who?", "sql": "SELECT 1", "database": "shop"}\n')
    with pytest.raises(DataError, match=r"so the copy must be called so\. Try --out fixed/shop"):
        mend_folder(look(folder), (), tmp_path / "other")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cache", "shop", "there"]


def test_a_parquet_file_is_mended_at_its_source(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = plant(Planted(Kind.SPELLINGS), tmp_path)
    parquet.write_table(arrow.table({"item": ["a", "b", "c"], "price": ["$5", "7", "N/A"]}), folder / "items.parquet")
    found = look(folder)
    (finding,) = [each for each in found.findings if each.kind is Kind.NUMBER_AS_TEXT]
    assert finding.repair is not None
    assert not repairable(finding, found.files)
