"""Each kind of trouble, planted in files, is found where it is; a healthy folder is silent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from env_server.data.doctor.diagnosis import diagnose, repairable
from env_server.data.doctor.findings import MEANINGS, Kind, Severity
from env_server.errors import DataError
from env_server.types import AnswerMode
from tests.env_server.data.doctor.planted import PLANTED, Planted, database, look, plant, table

ELSEWHERE = {Kind.NO_DATABASE, Kind.NO_SQL, Kind.GUESSABLE, Kind.NO_VARIANTS, Kind.FEW_QUESTIONS, Kind.NOT_EXAMINED}
"""Kinds that the other tests here plant; the last one takes a table of gigabytes."""


def test_every_kind_is_planted() -> None:
    assert {each.kind for each in PLANTED} | ELSEWHERE == set(Kind) == set(MEANINGS)
    assert len({each.kind for each in PLANTED}) >= 15


@pytest.mark.parametrize("variants", [False, True])
def test_a_healthy_folder_is_silent(variants: bool, tmp_path: Path) -> None:
    assert look(plant(Planted(Kind.EMPTY_TABLE), tmp_path), variants=variants).findings == ()


@pytest.mark.parametrize("planted", PLANTED, ids=lambda each: f"{each.kind.value} {'/'.join(each.files)}")
def test_a_planted_trouble_is_found(planted: Planted, tmp_path: Path) -> None:
    found = look(plant(planted, tmp_path))
    of_kind = [i for i, finding in enumerate(found.findings) if finding.kind is planted.kind]
    assert of_kind, [finding.kind.value for finding in found.findings]
    index = next((i for i in of_kind if planted.said in found.findings[i].said), of_kind[0])
    finding, where = found.findings[index], found.where(index)
    assert planted.said in finding.said
    assert where.endswith(planted.where)
    assert planted.advice in finding.advice
    aside = {Kind.UNASKED_TABLE, Kind.PRIMARY_KEY, Kind.FOREIGN_KEY, Kind.BROKEN_REFERENCE, Kind.OUTER_BLANKS}
    aside |= {Kind.NO_DATABASE, Kind.NUMBER_AS_TEXT, Kind.RENAMED_COLUMN, Kind.MIXED_DATES, Kind.FEW_QUESTIONS}
    assert {each.kind for each in found.findings} <= {planted.kind} | aside
    if planted.repaired and planted.said:
        assert repairable(finding, found.files)


def test_an_answer_without_sql_is_no_trouble_but_in_sql_mode(tmp_path: Path) -> None:
    folder = plant(Planted(Kind.NO_SQL), tmp_path)
    with (folder / "questions.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"question": "How many towns are there?", "answer": 4}) + "\n")
    assert look(folder, variants=True).findings == ()
    spec, cache = str(folder), tmp_path / "cache"
    (finding,) = diagnose(spec, cache, variants=False, answer_mode=AnswerMode.SQL).findings
    assert finding.kind is Kind.NO_SQL
    (folder / "shops.csv").write_text("shop_id,name\n1,Ann's\n2,Bo's\n", encoding="utf-8")  # asked about, or not
    assert look(folder, variants=True).findings == ()


def test_the_worst_comes_first(tmp_path: Path) -> None:
    files = {name: text for each in PLANTED[:12] for name, text in each.files.items()}
    severities = [finding.severity for finding in look(plant(Planted(Kind.SPELLINGS, files), tmp_path)).findings]
    assert len(set(severities)) >= 2
    assert severities == sorted(severities, key=list(Severity).index)


def test_what_is_guessable_takes_variants(tmp_path: Path) -> None:
    older = ("How many customers joined after 2020?", "SELECT COUNT(*) FROM customers WHERE joined > '2020-12-31'")
    folder = plant(Planted(Kind.GUESSABLE, questions=(older,)), tmp_path)
    (guessable,) = look(folder, variants=True).findings
    assert guessable.kind is Kind.GUESSABLE
    assert "5 of 6 queries that ask something else give 5 as well" in guessable.said
    script = "CREATE VIRTUAL TABLE notes USING fts5(text); INSERT INTO notes VALUES ('a b')"
    database(folder / "notes", "notes.sqlite", script)
    question = {"question": "How many?", "sql": "SELECT COUNT(*) FROM notes", "database": "notes"}
    (folder / "questions.jsonl").write_text(json.dumps(question))
    kinds = {finding.kind for finding in look(folder, variants=True).findings}
    assert {Kind.NO_VARIANTS, Kind.FEW_QUESTIONS} <= kinds


def test_a_question_about_a_broken_file_is_told(tmp_path: Path) -> None:
    folder = plant(Planted(Kind.NO_DATABASE, {"items.csv": "a,b\n1\n"}), tmp_path)
    found = look(folder)
    assert [finding.kind for finding in found.findings][:2] == [Kind.UNREADABLE, Kind.NO_DATABASE]
    assert "items.csv, line 2" in found.findings[0].said


def test_columns_that_only_look_like_trouble_raise_no_alarm(tmp_path: Path) -> None:
    files = {
        "places.csv": table(
            "zip,phone,version,ip,size,country,code,year,remark",
            "00501,+49 30 1234,1.2.3,192.168.100.200,6-2,NA,a1,1999,None",
            "90210,+49 30 9999,1.10.0,10.0.0.1,5-11,NO,A1,2001,unknown",
            "12345,+1 555 0100,2.0.0,10.0.0.2,6-0,DE,b2,2003,May 5",
        ),
        "sales.csv": table("region,2019,2020,2021", "north,1,2,4", "south,3,9,5", "west,8,6,7"),
        "codes.csv": table("letter,flag,level,rank", "a,0,1st,T", "A,1,2nd,F", "b,0,3rd,T"),
    }
    found = look(plant(Planted(Kind.SPELLINGS, files), tmp_path))
    assert {finding.kind for finding in found.findings} == {Kind.UNASKED_TABLE}


def test_the_order_of_dates_can_be_stated(tmp_path: Path) -> None:
    planted = next(each for each in PLANTED if "--dates" in each.advice)
    folder = plant(planted, tmp_path)
    found = look(folder, order=True)
    (finding,) = [each for each in found.findings if each.kind is Kind.UNSORTABLE_DATES]
    assert repairable(finding, found.files)


def test_sqlite_files_are_looked_through_as_well(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    database(
        folder,
        "shop.sqlite",
        """
        CREATE TABLE branches (branch_id INTEGER PRIMARY KEY, members TEXT, room_number TEXT, cost INTEGER, town TEXT);
        INSERT INTO branches VALUES (1, '9', '9', 5, 'Oslo'), (2, '10', '10', 'N/A', ''), (3, '200', '200', 7, 'Rome');
        CREATE TABLE visits (visit_id INTEGER PRIMARY KEY, branch_id INTEGER);
        INSERT INTO visits VALUES (1, 1), (2, 2), (3, 3), (4, NULL);
        CREATE VIEW v AS SELECT * FROM branches;
        """,
    )
    (folder / "questions.csv").write_text("question,sql\nWhat costs most?,SELECT MAX(cost) FROM branches\n")
    found = look(folder)
    told = {(each.kind, each.place.column or each.place.question_id) for each in found.findings}
    assert told == {
        (Kind.NUMBER_AS_TEXT, "members"),
        (Kind.NUMBER_AS_TEXT, "cost"),
        (Kind.GOLD_TEXT_NUMBERS, "questions-0000"),
        (Kind.MISSING_WORD, "town"),
        (Kind.FOREIGN_KEY, "branch_id"),
        (Kind.UNASKED_TABLE, ""),
        (Kind.FEW_QUESTIONS, ""),
    }
    index = next(i for i, each in enumerate(found.findings) if each.place.column == "members")
    assert found.where(index) == f"{folder / 'shop.sqlite'}, table branches, column members"
    assert found.findings[index].said.endswith("stored as text, so that their MAX is '9' and their MIN '10'")


def test_a_damaged_database_does_not_hide_the_others(tmp_path: Path) -> None:
    folder = plant(Planted(Kind.UNREADABLE), tmp_path)
    damaged = database(folder / "inner", "inner.sqlite", "CREATE TABLE t (a); INSERT INTO t VALUES (1)")
    damaged.write_bytes(damaged.read_bytes()[:100])
    found = look(folder)
    assert [finding.kind for finding in found.findings] == [Kind.UNREADABLE]
    assert "cut off" in found.findings[0].said


def test_a_name_that_names_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="names no data set"):
        diagnose("nowhere-at-all", tmp_path)
    with pytest.raises(DataError, match="holds no database"):
        diagnose(str(tmp_path), tmp_path)


def test_what_is_rare_among_very_many_numbers_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("env_server.data.doctor.survey.MAX_TEXTS", 50)
    prices = [f"{n}.5" for n in range(200)] * 2
    files = {"items.csv": table("item,price", *(f"a,{price}" for price in prices), "b,$7", "b,N/A")}
    found = look(plant(Planted(Kind.NUMBER_AS_TEXT, files), tmp_path))
    (finding,) = [each for each in found.findings if each.kind is Kind.NUMBER_AS_TEXT]
    assert "'$7' as 7, 'N/A' as NULL" in finding.advice
